"""A command that is ended, or whose output is not read to its end, leaves no traceback."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from pipeline import terminal
from pipeline.storage import open_storage


def started(*command: str, **variables: str) -> subprocess.Popen[str]:
    """`python -m command`, which Ctrl-C reaches also where this process ignores it."""
    return subprocess.Popen(
        ["env", "--default-signal=INT", sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | variables,
    )


@pytest.mark.parametrize("command", [["pipeline.store", "ls"], ["pipeline.report"]])
def test_ctrl_c_ends_a_command_that_waits_for_a_store(command):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"  # nobody listens
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    process = started(*command, "s3://bucket/run", AWS_ENDPOINT_URL=url, **keys)
    said = process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=30)
    assert "does not answer" in said
    assert (process.returncode, rest) == (130, "")


async def test_output_that_nobody_reads_any_more_is_no_fault(tmp_path):
    await open_storage(str(tmp_path)).create("key", b"")
    process = started("pipeline.store", "ls", str(tmp_path))
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(30) == 0


@pytest.mark.parametrize("code", [0, 1, 2])
def test_any_other_command_ends_with_its_own_code(code):
    with pytest.raises(SystemExit) as ended:
        terminal.run(lambda: code)
    assert ended.value.code == code
