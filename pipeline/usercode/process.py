"""The worker's side of a user's code: child processes that are asked one thing at a time, and killed when they hang."""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from typing import Any

START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 5.0
"""Longest wait for a process that was killed."""
LONGEST_LINE = 64 << 20  # bytes
PASSED_ON = ("PATH", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV")
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

Message = dict[str, Any]


class SampleError(Exception):
    """What a user's code, or a service, was to do for one sample was not done; the message says why."""


class Ended(SampleError):
    """The process is gone."""


class Process:
    """`python -m <module>` in a session of its own, once it has loaded the code that its set-up names."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, module: str, setup: Message, descriptors: Sequence[int] = ()) -> "Process":
        """`setup` is what usercode.child.set_up expects. Raises SampleError where the code cannot be loaded."""
        process = cls(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=LONGEST_LINE,
                env=_environment(),
                start_new_session=True,
                pass_fds=descriptors,
            )
        )
        try:
            content(await process.ask(setup, START_TIMEOUT_S))
        except BaseException:
            await process.end()
            raise
        return process

    async def ask(self, message: Message, timeout_s: float) -> Message:
        """The reply, which may tell of an error (see `content`). Raises SampleError where there is none in time; the
        process is of no use then, nor after a cancellation."""
        assert self._process.stdin
        assert self._process.stdout
        try:
            return await ask(self._process.stdout, self._process.stdin, message, timeout_s)
        except Ended:
            code = await self._process.wait()
            raise Ended(f"its process died ({f'signal {-code}' if code < 0 else f'exit code {code}'})") from None

    async def end(self) -> None:
        """Kill the process with all that it started, save what left its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # asyncio waits for the pipes as well, which a daemon that the code forked holds open: close our ends.
        assert self._process.stdin
        if not self._process.stdin.is_closing():
            self._process.stdin.transport.abort()
        self._process._transport.close()  # type: ignore[attr-defined]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), END_TIMEOUT_S)


async def ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, message: Message, timeout_s: float
) -> Message:
    """The reply to `message`. Raises SampleError where it is late or another's, Ended where nobody is there."""
    try:
        return await asyncio.wait_for(_exchange(reader, writer, message), timeout_s)
    except TimeoutError:
        raise SampleError(f"no answer within {timeout_s:g} s") from None


def content(reply: Message) -> Message:
    """The reply itself. Raises SampleError where it tells of an error."""
    if "error" in reply:
        raise SampleError(str(reply["error"]))
    return reply


async def _exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, message: Message) -> Message:
    """The id tells the reply from whatever else the code wrote where replies are."""
    identity = secrets.token_hex(8)
    try:
        writer.write(encoded({"id": identity, "message": message}))
        await writer.drain()
        line = await reader.readline()
    except (ConnectionError, ValueError):
        line = b""
    if not line.endswith(b"\n"):
        raise Ended("its process died")
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError):
        reply = None
    if not isinstance(reply, dict) or reply.get("id") != identity:
        raise SampleError("its process gave a reply that does not belong to this sample")
    return reply


def encoded(message: Message) -> bytes:
    """One line of JSON; what JSON does not have in generated items and Parquet rows is told as text or left out."""
    return json.dumps(message, default=str, skipkeys=True).encode() + b"\n"


def _environment() -> dict[str, str]:
    """No credentials, no tokens: only what Python needs to start as this process did."""
    kept = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    return {**kept, **THREADS, "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1"}
