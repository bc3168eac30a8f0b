"""Runs one command and outlives it: when the guard has gone, nothing that the command started remains.

    python -I -S guard.py LOG LOG_BYTES GRACE_S COMMAND…

What a container runtime does for a container, for one process on a bare machine:
- SIGTERM is passed to the command alone; after GRACE_S seconds every descendant is killed. SIGQUIT kills at once.
- Standard input is the lifeline: its other end is held by `miles run`, and when that dies, even by SIGKILL, the
  guard reads end-of-file and acts as on SIGTERM.
- The guard is the subreaper of its descendants, so daemons and sessions of their own (torchrun's ranks) cannot
  leave it. They end with the command, as a container ends with its first process.
- Output goes to LOG; beyond LOG_BYTES it is moved to LOG.1, so a command holds at most twice that on disk. The pipe
  it comes through has a name beside the log, by which /proc tells whose output a process writes.
- Exit code: the command's, or 128 + the signal that killed it.

If the guard itself is killed by SIGKILL the command dies with it (parent-death signal), and so does what asks for
that signal in turn (pipeline.parent: ranks, vLLM's engine, rewards). Other children of it are left to the next
subreaper, `miles run`, which sweeps them. Limit: where that was killed too they live on, until the next run in the
same folder ends them.
Standard library only: one guard costs about 10 MB.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Iterable

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
KILL_DEADLINE_S = 10.0
FORWARDED = (signal.SIGTERM, signal.SIGQUIT, signal.SIGCHLD)  # signals that the guard acts on
LIFELINE = 0  # standard input
PIPE_SUFFIX = ".output"


def prctl(option: int, value: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def become_subreaper() -> None:
    """From now on, orphaned descendants become children of this process instead of init's."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def parents() -> dict[int, int]:
    """The parent of every process on this machine, from /proc/<pid>/stat."""
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as stream:
                fields = stream.read().rpartition(b")")[2].split()
        except OSError:  # it ended while we looked
            continue
        found[int(entry)] = int(fields[1])
    return found


def descendants(root: int) -> list[int]:
    """Every process below `root`, children before grandchildren; ended ones included until they are reaped."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents().items():
        children.setdefault(parent, []).append(pid)
    found = list(children.get(root, []))
    for pid in found:
        found.extend(children.get(pid, []))
    return found


def send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class Log:
    """An appended file that is moved aside when it has grown to `limit` bytes."""

    def __init__(self, path: str, limit: int):
        self.path = path
        self.limit = limit
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.size = os.fstat(self.file).st_size

    def write(self, data: bytes) -> None:
        try:
            if self.size + len(data) > self.limit:
                self.rotate()
            os.write(self.file, data)
        except OSError:  # a full disk must not end the command: its output is lost instead
            return
        self.size += len(data)

    def rotate(self) -> None:
        os.replace(self.path, self.path + ".1")
        os.close(self.file)
        self.file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.size = 0


def output_pipe(name: str) -> tuple[int, int]:
    """(reading, writing) end of a pipe that /proc/<pid>/fd shows as `name`, whatever a process calls itself."""
    try:
        os.mkfifo(name)
    except OSError:  # a file system without
        return os.pipe()
    try:
        reading = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        return reading, os.open(name, os.O_WRONLY | os.O_CLOEXEC)
    finally:
        os.unlink(name)


def start(command: list[str], output: int) -> int:
    """Fork and exec `command` in a session of its own, without standard input; returns its pid."""
    guard = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # one that reaches the child early waits for its own handlers
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        return pid
    try:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(128 + signal.SIGKILL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.closerange(3, 65536)
        for number in (*FORWARDED, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(127)


def reap(command: int) -> tuple[bool, int | None]:
    """Collect whatever has ended: (whether children remain, the command's exit code if it was among them)."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False, code
        if pid == 0:
            return True, code
        if pid == command:
            code = os.waitstatus_to_exitcode(status)
            code = 128 - code if code < 0 else code


def watch(command: int, output: int, wakeup: int, log: Log, grace: float) -> int:
    """Until the command and all that it started have ended; returns the command's exit code."""
    code: int | None = None
    kill_at: float | None = None  # descendants are killed from this time on
    give_up_at = float("inf")  # a process that no signal ends (blocked in the kernel) is not waited for
    sources = [LIFELINE, wakeup, output]
    while True:
        now = time.monotonic()
        if kill_at is not None and now >= kill_at:
            give_up_at = min(give_up_at, now + KILL_DEADLINE_S)
            send(descendants(os.getpid()), signal.SIGKILL)
        remain, ended = reap(command)
        code = ended if ended is not None else code
        if code is not None:
            kill_at = now if kill_at is None else min(kill_at, now)
        if not remain or now >= give_up_at:
            break
        timeout = None if kill_at is None else max(0.02, kill_at - now)
        ready = select.select(sources, [], [], timeout)[0]
        if output in ready:
            if data := os.read(output, 65536):
                log.write(data)
            else:
                sources.remove(output)
        told = os.read(wakeup, 64) if wakeup in ready else b""
        if LIFELINE in ready:
            sources.remove(LIFELINE)
        if (LIFELINE in ready or signal.SIGTERM in told) and kill_at is None:
            kill_at = time.monotonic() + grace
            send([command], signal.SIGTERM)
        if signal.SIGQUIT in told:
            kill_at = now
    while select.select([output], [], [], 0)[0] and (rest := os.read(output, 65536)):
        log.write(rest)
    return 128 + signal.SIGKILL if code is None else code


def main(arguments: list[str]) -> int:
    path, limit, grace, *command = arguments
    become_subreaper()
    wakeup, wakeup_writer = os.pipe()
    os.set_blocking(wakeup, False)
    os.set_blocking(wakeup_writer, False)
    signal.set_wakeup_fd(wakeup_writer, warn_on_full_buffer=False)
    for number in FORWARDED:
        signal.signal(number, lambda *_: None)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    log = Log(path, int(limit))
    output, output_writer = output_pipe(path + PIPE_SUFFIX)
    pid = start(command, output_writer)
    os.close(output_writer)
    return watch(pid, output, wakeup, log, float(grace))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
