"""Programs that run beside the tests: each has its log in a file, and ends with the block or with this process."""

import contextlib
import ctypes
import pathlib
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence


@contextlib.contextmanager
def running(command: Sequence[str], log: pathlib.Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run `command`, and kill it afterwards: its state is thrown away. Ctrl-C in the terminal does not reach it."""
    process = start(command, log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def start(command: Sequence[str], log: pathlib.Path) -> subprocess.Popen[bytes]:
    """For `running`, and to start once more what was killed inside it."""
    with open(log, "wb") as file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: pathlib.Path, limit_s: float) -> None:
    """Until `ready` is true. Raises RuntimeError with the end of the log when the program ends or `limit_s` passes."""
    deadline = time.monotonic() + limit_s
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            tail = log.read_text(errors="replace")[-2000:]
            state = "is not ready" if process.poll() is None else f"ended with exit code {process.returncode}"
            raise RuntimeError(f"{log.stem} {state} (limit {limit_s:.0f} s); {log} ends:\n{tail}")
        time.sleep(0.1)


def hold() -> tuple[socket.socket, int]:
    """A port of 127.0.0.1 that nobody else is given until the socket is closed; a server, which sets SO_REUSEADDR, may
    listen on it, end, and listen again."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder, int(holder.getsockname()[1])


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    holder, port = hold()
    with holder:
        yield port


@contextlib.contextmanager
def held_ports(count: int) -> Iterator[list[int]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(held_port()) for _ in range(count)]


def die_with_parent() -> None:
    """For `preexec_fn`: the program is killed when the thread that started it ends, however it ends."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
