"""One seed of each kind; `make store-chaos` runs fifty."""

import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_group_is_trained_once_although_processes_and_server_are_killed_and_the_store_is_away():
    command = [sys.executable, "-m", "tests.storechaos", "--seeds", "1", "--outage-s", "3"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert "3 of 3 seeds hold" in run.stdout, run.stdout
