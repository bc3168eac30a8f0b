"""Supervised processes: what a kubelet does for the containers of a pod, on this machine.

Each process runs under a guard of its own (operators.guard), which logs its output, passes signals, and sees to it
that nothing it started remains. Here are the rules above that: init containers in sequence, probes, restarts with
back-off for the containers of a Deployment, none for those of a Job, an ordered stop.
Nothing here knows what the processes are for.
"""

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import shlex
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Literal

import aiohttp

from operators import guard
from operators.probes import Probe, verdicts

LOG_BYTES = 16 << 20
LIFE = "--- start "
"""Begins the line of a log below which the output of one life stands."""
UNSTARTED_GRACE_S = 3.0
"""Grace of a process that has not passed its startup probe: it has nothing to save, and vLLM ignores SIGTERM then."""
SWEEPS, SWEEP_PAUSE_S = 5, 0.05
MARK = "MILES_SUPERVISOR"
"""Variable in the environment of all that a supervisor started, by which it knows them."""
USER_ERROR = 3
"""Exit code of the data plane for a fault that trying again cannot mend; see pipeline.termination."""

State = Literal["waiting", "starting", "unready", "ready", "back-off", "ended"]


@dataclasses.dataclass(frozen=True)
class ProcessSpec:
    """One container, ready to run here. Equal names of init containers mean: run it once for all."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    folder: str
    """Working directory."""
    log: str
    termination_message: str
    """File to which the process writes why it ended."""
    grace_s: float = 30.0
    """From the request to end until it is killed."""
    one_off: bool = False
    """An init container: runs to its end before the containers start."""
    stop_delay_s: float = 0.0
    """How long it is still needed by others that are asked to end at the same time (preStop sleep)."""
    startup: Probe | None = None
    readiness: Probe | None = None
    liveness: Probe | None = None


@dataclasses.dataclass(frozen=True)
class PodSpec:
    name: str
    component: str
    """trainer, rollout, …: the label app.kubernetes.io/component."""
    init: tuple[ProcessSpec, ...]
    containers: tuple[ProcessSpec, ...]
    restart: bool
    """Whether containers are started again whenever they end (Deployment), or never (Job)."""


@dataclasses.dataclass(frozen=True)
class Exit:
    """How one life of a process ended."""

    process: str
    code: int
    """128 + n: killed by signal n."""
    message: str
    """What the process wrote into its termination message; '' if nothing."""
    lines: tuple[str, ...]
    """The last lines of its log."""
    reason: str = ""
    """Why it was ended from outside, for example a failed liveness probe."""

    @property
    def user_error(self) -> bool:
        return self.code == USER_ERROR and bool(self.message)


@dataclasses.dataclass(frozen=True)
class BackOff:
    """Pauses between the lives of a process that keeps ending: first_s, doubled each time up to cap_s."""

    first_s: float = 1.0
    cap_s: float = 60.0
    reset_s: float = 600.0
    """A life of this length starts the series anew."""
    attempts: int = 4
    """Failures in a row without the pod having been ready, after which the process is given up."""


BACK_OFF = BackOff()


class Process:
    """One container over all its lives: what a display needs to know, and the handle to stop it."""

    def __init__(self, spec: ProcessSpec):
        self.spec = spec
        self.state: State = "waiting"
        self.since = time.monotonic()
        self.restarts = 0
        self.exit: Exit | None = None
        self.started = False  # passed its startup probe in this life
        self.ready_at = 0.0  # when a readiness probe last found it ready; 0: never
        self.reason = ""
        self.guard: asyncio.subprocess.Process | None = None
        self.stop_requested = asyncio.Event()

    def enter(self, state: State) -> None:
        if state != self.state:
            self.state, self.since = state, time.monotonic()

    def seconds(self) -> float:
        """Time in the present state."""
        return time.monotonic() - self.since

    def send(self, number: signal.Signals) -> None:
        """To the guard, which does the rest. SIGTERM: end within the grace; SIGQUIT: kill now."""
        if self.guard is not None and self.guard.returncode is None:
            self.guard.send_signal(number)

    def end(self, reason: str) -> None:
        """End this life; the restart rule decides whether another one follows."""
        self.reason = reason
        self.send(signal.SIGTERM)
        if not self.started:
            asyncio.get_running_loop().call_later(UNSTARTED_GRACE_S, self._kill_life, self.guard)

    def kill(self) -> None:
        """End this life without grace."""
        self.send(signal.SIGTERM)  # for a guard that does not know SIGQUIT yet, and may have inherited ignoring it
        self.send(signal.SIGQUIT)

    def _kill_life(self, life: asyncio.subprocess.Process | None) -> None:
        if life is self.guard:
            self.kill()


class Supervisor:
    """Runs processes, and on leaving its context ends those that are left.

    `lock`: a file descriptor that every guard keeps open, so that a lock on it lasts until the last one is gone.
    `ended`: called after each unrequested failure of a process that is kept running, with whether it is started again.
    """

    def __init__(
        self,
        lock: int | None = None,
        back_off: BackOff = BACK_OFF,
        ended: Callable[[Process, Exit, bool], None] = lambda process, exit, again: None,
    ):
        self.lock = lock
        self.back_off = back_off
        self.ended = ended
        self.closing = False  # nothing is started any more
        self.processes: dict[str, Process] = {}
        self._inits: dict[str, asyncio.Task[Exit | None]] = {}
        self._mark = f"{MARK}={os.getpid()}-{id(self)}".encode()

    async def __aenter__(self) -> "Supervisor":
        guard.become_subreaper()
        self._lifeline_end, self._lifeline = os.pipe()
        self._http = aiohttp.ClientSession()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop_all(at_once=True)
        codes = [process.guard.returncode or 0 for process in self.processes.values() if process.guard]
        if min(codes, default=0) < 0:
            await self._sweep()
        for task in self._inits.values():
            task.cancel()
        os.close(self._lifeline)
        os.close(self._lifeline_end)
        await self._http.close()

    async def run_pod(self, pod: PodSpec) -> Exit | None:
        """Init containers in sequence, then all containers. Returns the exit of the first one that is not to be
        started again: for a Job's pod how it ended, for a Deployment's pod why it was given up; None: all stopped.
        """
        for spec in pod.init:
            if spec.name not in self._inits:
                self._inits[spec.name] = asyncio.create_task(self._keep(self._adopt(spec), until_success=True))
            failure = await asyncio.shield(self._inits[spec.name])
            if failure is not None or self.closing:
                return failure
        lives = [self._adopt(spec) for spec in pod.containers]
        tasks = [asyncio.create_task(self._keep(life, lives) if pod.restart else self._run(life)) for life in lives]
        try:
            for task in asyncio.as_completed(tasks):
                exit = await task
                if exit is not None:
                    return exit
            return None
        finally:
            for task in tasks:
                task.cancel()

    async def stop_all(self, at_once: bool = False) -> None:
        """End everything for good; from now on nothing is started."""
        self.closing = True
        await self.stop(self.processes.values(), at_once)

    def kill_all(self) -> None:
        """Do not wait any longer for what is being stopped."""
        self.closing = True
        for process in self.processes.values():
            process.stop_requested.set()
            process.kill()

    async def stop(self, processes: Iterable[Process], at_once: bool = False) -> None:
        """End the processes for good, at once or with their grace, and wait until they are gone."""
        processes = list(processes)
        for process in processes:
            process.stop_requested.set()
        needed = [process for process in processes if process.spec.stop_delay_s and process.started and not at_once]
        first = [process for process in processes if process not in needed]
        for process in first:
            if at_once:
                process.kill()
            else:
                process.end("stopped")
        await gone(first, max((process.spec.stop_delay_s for process in needed), default=0.0))
        for process in needed:
            process.end("stopped")
        grace = 0.0 if at_once else max((process.spec.grace_s for process in processes), default=0.0)
        await gone(processes, grace + guard.KILL_DEADLINE_S + 5)

    def _adopt(self, spec: ProcessSpec) -> Process:
        process = self.processes[spec.name] = Process(spec)
        return process

    async def _keep(self, process: Process, pod: Sequence[Process] = (), until_success: bool = False) -> Exit | None:
        """Start the process again whenever it ends. Returns None once stopped (or successful, if that is wanted),
        an Exit when it is given up: a user error, or too many failures in a row in which the pod was never ready."""
        pause = self.back_off.first_s
        failures = 0  # in a row
        while not process.stop_requested.is_set():
            began = time.monotonic()
            exit = await self._run(process)
            if process.stop_requested.is_set() or (until_success and exit.code == 0):
                break
            long_lived = time.monotonic() - began >= self.back_off.reset_s
            if exit.code != 0:
                sound = long_lived or any(sibling.ready_at > began for sibling in pod)
                failures = 0 if sound else failures + 1
                give_up = exit.user_error or failures >= self.back_off.attempts
                self.ended(process, exit, not give_up)
                if give_up:
                    return exit
            if long_lived:
                pause = self.back_off.first_s
            process.enter("back-off")
            try:
                await asyncio.wait_for(process.stop_requested.wait(), pause)
            except TimeoutError:
                process.restarts += 1
            pause = min(2 * pause, self.back_off.cap_s)
        return None

    async def _run(self, process: Process) -> Exit:
        """One life, from start to end."""
        spec = process.spec
        pathlib.Path(spec.termination_message).write_text("")
        with open(spec.log, "a") as log:
            log.write(f"{LIFE}{process.restarts + 1}, {time.strftime('%F %T')}: {shlex.join(spec.command)}\n")
            log.flush()
            process.guard = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", guard.__file__),
                *(spec.log, str(LOG_BYTES), str(spec.grace_s), *spec.command),
                stdin=self._lifeline_end,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=log,
                env={**spec.environment, MARK: self._mark.decode().partition("=")[2]},
                cwd=spec.folder,
                start_new_session=True,
                pass_fds=() if self.lock is None else (self.lock,),
            )
        process.started = False
        process.reason = ""
        process.enter("starting")
        if process.stop_requested.is_set():  # meanwhile
            process.kill()
        probes = asyncio.create_task(self._probe(process))
        try:
            code = await process.guard.wait()
        finally:
            probes.cancel()
        if code < 0:
            await self._sweep()
        message = pathlib.Path(spec.termination_message).read_text(errors="replace").strip()
        code = 128 - code if code < 0 else code
        process.exit = Exit(spec.name, code, message, tail(spec.log), process.reason)
        process.enter("ended")
        return process.exit

    async def _probe(self, process: Process) -> None:
        """Startup first; then readiness, for the display, and liveness side by side."""
        spec = process.spec
        if spec.startup is not None:
            async for passed in self._verdicts(spec.startup, spec):
                if passed:
                    break
                process.end("its startup probe kept failing")
                return
        process.started = True
        process.enter("ready" if spec.readiness is None else "unready")
        async with asyncio.TaskGroup() as group:
            if spec.readiness is not None:
                group.create_task(self._probe_readiness(spec.readiness, process))
            if spec.liveness is not None:
                group.create_task(self._probe_liveness(spec.liveness, process))

    def _verdicts(self, probe: Probe, spec: ProcessSpec) -> AsyncIterator[bool]:
        return verdicts(probe, self._http, spec.environment, spec.folder)

    async def _probe_readiness(self, probe: Probe, process: Process) -> None:
        async for passed in self._verdicts(probe, process.spec):
            process.enter("ready" if passed else "unready")
            process.ready_at = process.since if passed else process.ready_at

    async def _probe_liveness(self, probe: Probe, process: Process) -> None:
        async for passed in self._verdicts(probe, process.spec):
            if not passed:
                process.end("its liveness probe kept failing")
                return

    async def _sweep(self) -> None:
        """Kill what a guard that was itself killed has left to us, its subreaper. Looks several times, since what is
        dying just now hands its children on only when it is dead."""
        for _ in range(SWEEPS):
            known = {process.guard.pid for process in self.processes.values() if process.guard}
            parents = guard.parents()
            for orphan in (pid for pid, parent in parents.items() if parent == os.getpid() and pid not in known):
                if self._is_ours(orphan):
                    guard.send([*guard.descendants(orphan), orphan], signal.SIGKILL)
            await asyncio.sleep(SWEEP_PAUSE_S)

    def _is_ours(self, pid: int) -> bool:
        try:
            return self._mark in pathlib.Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # it ended while we looked
            return False


def end_orphans(logs: str) -> int:
    """Kill what supervisors that are gone have left behind: processes whose output goes to a log in the folder `logs`.
    Returns how many; for callers who know that no such supervisor or guard lives. Their environment does not tell:
    vLLM and torchrun write their titles over it."""
    ended: set[int] = set()
    for _ in range(SWEEPS):
        orphans = [pid for pid in guard.parents() if _writes_to(pid, os.path.realpath(logs))]
        if not orphans:
            break
        guard.send(orphans, signal.SIGKILL)
        ended.update(orphans)
        time.sleep(SWEEP_PAUSE_S)
    return len(ended)


def _writes_to(pid: int, logs: str) -> bool:
    for output in (1, 2):
        with contextlib.suppress(OSError):  # it ended while we looked, or is another user's
            file = os.readlink(f"/proc/{pid}/fd/{output}").removesuffix(" (deleted)")
            if file.endswith(guard.PIPE_SUFFIX) and os.path.dirname(file) == logs:
                return True
    return False


async def gone(processes: Iterable[Process], seconds: float) -> None:
    """Wait until all have ended, but no longer than that."""
    waits = [asyncio.create_task(process.guard.wait()) for process in processes if process.guard is not None]
    if waits:
        _, late = await asyncio.wait(waits, timeout=seconds)
        for task in late:
            task.cancel()


def tail(log: str, limit: int = 20) -> tuple[str, ...]:
    """The last lines of the last life in a log, at most `limit`."""
    with open(log, "rb") as stream:
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - 65536))
        lines = stream.read().decode(errors="replace").splitlines()
    marks = [number for number, line in enumerate(lines) if line.startswith(LIFE)]
    return tuple(line for line in lines[marks[-1] + 1 if marks else 0 :] if line.strip())[-limit:]


def resident_memory(root: int) -> int:
    """Bytes of memory that all processes below `root` hold; pages they share count once for each."""
    pages = 0
    for pid in guard.descendants(root):
        with contextlib.suppress(OSError):  # it ended while we looked
            pages += int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
