"""operators.processes and operators.guard with real processes: restarts, probes, and that nothing is left behind."""

import asyncio
import fcntl
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from operators import guard
from operators.probes import Probe
from operators.processes import (
    BackOff,
    Exit,
    PodSpec,
    Process,
    ProcessSpec,
    Supervisor,
    end_orphans,
    resident_memory,
    tail,
)
from tests import daemons

FAST = BackOff(first_s=0.02, cap_s=0.05, attempts=3)
DAEMON = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True)"
SLEEP = "import time; time.sleep(60)"


Make = Callable[..., ProcessSpec]


@pytest.fixture
def make(tmp_path: pathlib.Path) -> Make:
    def build(code: str, *arguments: str, name: str = "p", **fields: object) -> ProcessSpec:
        values: dict = {"environment": dict(os.environ), "folder": str(tmp_path), "grace_s": 30.0} | fields
        return ProcessSpec(
            name=name,
            command=(sys.executable, "-c", code, *arguments),
            log=str(tmp_path / f"{name}.log"),
            termination_message=str(tmp_path / f"{name}.message"),
            **values,
        )

    return build


def job(*containers: ProcessSpec, init: tuple[ProcessSpec, ...] = ()) -> PodSpec:
    return PodSpec("job", "trainer", init, containers, restart=False)


def deployment(*containers: ProcessSpec, init: tuple[ProcessSpec, ...] = ()) -> PodSpec:
    return PodSpec("deployment", "rollout", init, containers, restart=True)


async def eventually(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def written_pid(path: pathlib.Path) -> int | None:
    return int(path.read_text() or 0) if path.exists() else None


def sleeper(path: pathlib.Path) -> str:
    """Code that writes its pid to `path`, then sleeps."""
    return f"import os, time; open({str(path)!r}, 'w').write(str(os.getpid())); time.sleep(60)"


async def test_exit_carries_code_message_and_last_lines(make: Make, tmp_path: pathlib.Path) -> None:
    code = f"open({str(tmp_path / 'p.message')!r}, 'w').write('no such model'); print('one'); print('two'); exit(3)"
    async with Supervisor() as supervisor:
        exit = await supervisor.run_pod(job(make(code)))
    assert exit == Exit("p", code=3, message="no such model", lines=("one", "two"))
    assert exit.user_error


@pytest.mark.parametrize("code", ["import os; os.kill(os.getpid(), 9)", "exit(137)"])
async def test_a_killed_process_has_the_exit_code_a_container_would_have(make: Make, code: str) -> None:
    async with Supervisor() as supervisor:
        exit = await supervisor.run_pod(job(make(code)))
    assert exit is not None
    assert exit.code == 128 + signal.SIGKILL


async def test_a_command_that_does_not_exist_is_an_exit_not_a_crash(make: Make) -> None:
    spec = make("")
    missing = ProcessSpec(**{**vars(spec), "command": ("no-such-program",)})
    async with Supervisor() as supervisor:
        exit = await supervisor.run_pod(job(missing))
    assert exit is not None
    assert exit.code == 127
    assert exit.lines == ("cannot start no-such-program: No such file or directory",)


async def test_a_deployment_restarts_its_container_and_gives_up_after_failures_in_a_row(
    make: Make,
) -> None:
    ends: list[tuple[int, bool]] = []
    async with Supervisor(
        back_off=FAST, ended=lambda process, exit, again: ends.append((exit.code, again))
    ) as supervisor:
        exit = await supervisor.run_pod(deployment(make("exit(7)")))
    assert exit is not None
    assert exit.code == 7
    assert ends == [(7, True), (7, True), (7, False)]


async def test_a_deployment_restarts_after_success_without_counting_it_as_a_failure(
    make: Make, tmp_path: pathlib.Path
) -> None:
    code = f"open({str(tmp_path / 'lives')!r}, 'a').write('x')"
    async with Supervisor(back_off=FAST) as supervisor:
        task = asyncio.create_task(supervisor.run_pod(deployment(make(code))))
        await eventually(lambda: (tmp_path / "lives").exists() and (tmp_path / "lives").stat().st_size > 4)
        await supervisor.stop(supervisor.processes.values())
        assert await task is None


async def test_a_deployment_does_not_repeat_a_user_error(make: Make, tmp_path: pathlib.Path) -> None:
    code = f"open({str(tmp_path / 'p.message')!r}, 'w').write('model.uri: no such folder'); exit(3)"
    async with Supervisor() as supervisor:  # the default back-off would take half a minute
        exit = await supervisor.run_pod(deployment(make(code)))
    assert exit is not None
    assert exit.message == "model.uri: no such folder"
    assert supervisor.processes["p"].restarts == 0


async def test_init_containers_run_in_sequence_before_the_containers(make: Make, tmp_path: pathlib.Path) -> None:
    order = str(tmp_path / "order")
    write = "import sys, time; time.sleep(float(sys.argv[1])); open(sys.argv[2], 'a').write(sys.argv[3])"
    inits = tuple(make(write, "0.1" if name == "a" else "0", order, name, name=name) for name in ("a", "b"))
    async with Supervisor() as supervisor:
        await supervisor.run_pod(job(make(write, "0", order, "c"), init=inits))
    assert pathlib.Path(order).read_text() == "abc"


async def test_an_init_container_that_two_pods_share_runs_once(make: Make, tmp_path: pathlib.Path) -> None:
    init = make(f"open({str(tmp_path / 'fetched')!r}, 'a').write('x')", name="fetch")
    async with Supervisor() as supervisor:
        pods = [job(make("", name=name), init=(init,)) for name in ("one", "two")]
        await asyncio.gather(*(supervisor.run_pod(pod) for pod in pods))
    assert (tmp_path / "fetched").read_text() == "x"


async def test_an_init_container_is_retried_and_its_failure_ends_the_pod(make: Make) -> None:
    async with Supervisor(back_off=FAST) as supervisor:
        exit = await supervisor.run_pod(job(make("open('/ran')"), init=(make("exit(9)", name="init"),)))
    assert exit is not None
    assert exit.code == 9
    assert supervisor.processes["init"].restarts == FAST.attempts - 1
    assert "p" not in supervisor.processes


async def test_http_probes_decide_between_starting_unready_and_ready(
    make: Make, tmp_path: pathlib.Path, free_port: int
) -> None:
    server = (
        "import http.server, os, sys\n"
        "class H(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200 if self.path == '/healthz' or os.path.exists('loaded') else 503)\n"
        "        self.end_headers()\n"
        "http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), H).serve_forever()\n"
    )
    fast = {"port": free_port, "period_s": 0.05, "failure_threshold": 1}
    probes = {
        "startup": Probe(port=free_port, path="/healthz", period_s=0.05, failure_threshold=200),
        "readiness": Probe(path="/readyz", **fast),
    }
    async with Supervisor() as supervisor:
        task = asyncio.create_task(supervisor.run_pod(deployment(make(server, str(free_port), **probes))))
        await eventually(lambda: "p" in supervisor.processes)
        process = supervisor.processes["p"]
        await eventually(lambda: process.state == "unready")
        (tmp_path / "loaded").touch()
        await eventually(lambda: process.state == "ready")
        (tmp_path / "loaded").unlink()
        await eventually(lambda: process.state == "unready")
        await supervisor.stop([process])
        assert await task is None
        assert process.state == "ended"


@pytest.fixture
def free_port() -> Iterator[int]:
    with daemons.held_port() as port:
        yield port


@pytest.mark.parametrize("kind", ["startup", "liveness"])
async def test_a_failing_probe_ends_the_process_and_it_is_restarted(make: Make, kind: str, free_port: int) -> None:
    reasons: list[str] = []
    probe = Probe(port=free_port, period_s=0.02, failure_threshold=3)  # tcpSocket: nobody listens
    spec = make(SLEEP, **{kind: probe})
    async with Supervisor(back_off=FAST, ended=lambda process, exit, again: reasons.append(exit.reason)) as supervisor:
        exit = await supervisor.run_pod(deployment(spec))
    assert exit is not None
    assert reasons == [f"its {kind} probe kept failing"] * 3


async def test_an_exec_probe_that_hangs_fails_and_is_killed(make: Make, tmp_path: pathlib.Path) -> None:
    pid_file = tmp_path / "probe.pid"
    probe = Probe(command=(sys.executable, "-c", sleeper(pid_file)), timeout_s=0.5, failure_threshold=1)
    async with Supervisor(back_off=FAST) as supervisor:
        exit = await supervisor.run_pod(job(make(SLEEP, startup=probe)))
    assert exit is not None
    assert exit.code == 128 + signal.SIGTERM
    await eventually(lambda: not alive(written_pid(pid_file) or 0))


async def test_stop_waits_for_the_grace_and_then_kills(make: Make, tmp_path: pathlib.Path) -> None:
    stubborn = f"import signal; signal.signal(15, signal.SIG_IGN); {sleeper(tmp_path / 'pid')}"
    async with Supervisor() as supervisor:
        task = asyncio.create_task(supervisor.run_pod(job(make(stubborn, grace_s=0.4))))
        await eventually(lambda: written_pid(tmp_path / "pid"))
        began = time.monotonic()
        await supervisor.stop(supervisor.processes.values())
        assert 0.4 <= time.monotonic() - began < 30
        exit = await task
    assert exit is not None
    assert exit.code == 128 + signal.SIGKILL


async def test_stop_lets_a_process_finish_its_work(make: Make, tmp_path: pathlib.Path) -> None:
    code = (
        "import signal, time, sys\n"
        "def stop(*_): time.sleep(0.3); open('saved', 'w').write('x'); sys.exit(4)\n"
        "signal.signal(15, stop); open('up', 'w').close(); time.sleep(60)\n"
    )
    async with Supervisor() as supervisor:
        task = asyncio.create_task(supervisor.run_pod(job(make(code))))
        await eventually((tmp_path / "up").exists)
        await supervisor.stop(supervisor.processes.values())
        exit = await task
    assert exit is not None
    assert exit.code == 4
    assert (tmp_path / "saved").exists()


async def test_a_stopped_process_in_back_off_is_not_started_again(make: Make, tmp_path: pathlib.Path) -> None:
    code = f"open({str(tmp_path / 'lives')!r}, 'a').write('x'); exit(1)"
    async with Supervisor(back_off=BackOff(first_s=60)) as supervisor:
        task = asyncio.create_task(supervisor.run_pod(deployment(make(code))))
        await eventually(lambda: "p" in supervisor.processes and supervisor.processes["p"].state == "back-off")
        await supervisor.stop(supervisor.processes.values())
        assert await asyncio.wait_for(task, 30) is None
    assert (tmp_path / "lives").read_text() == "x"


async def test_grandchildren_in_their_own_session_end_with_the_process(make: Make, tmp_path: pathlib.Path) -> None:
    pid_file = tmp_path / "pid"
    code = DAEMON + "; import os, time\nwhile not os.path.exists('pid'): time.sleep(0.01)"
    async with Supervisor() as supervisor:
        exit = await supervisor.run_pod(job(make(code, sleeper(pid_file))))
    assert exit is not None
    assert exit.code == 0
    assert not alive(written_pid(pid_file) or 0)


SUPERVISED = """
import asyncio, sys
from operators.processes import PodSpec, ProcessSpec, Supervisor
import os, pathlib

async def main():
    folder = sys.argv[1]
    spec = ProcessSpec("p", (sys.executable, "-c", *sys.argv[2:]), dict(os.environ), folder, folder + "/p.log",
                       folder + "/p.message", grace_s=1.0)
    async with Supervisor() as supervisor:
        task = asyncio.create_task(supervisor.run_pod(PodSpec("pod", "trainer", (), (spec,), False)))
        while not (p := supervisor.processes.get("p")) or p.guard is None: await asyncio.sleep(0.01)
        pathlib.Path(folder, "guard.pid").write_text(str(p.guard.pid))
        await task

asyncio.run(main())
"""


async def test_nothing_is_left_when_the_supervising_process_is_killed(tmp_path: pathlib.Path) -> None:
    parent, daemon = tmp_path / "parent.pid", tmp_path / "daemon.pid"
    code = DAEMON + f"; {sleeper(parent)}"
    runner = subprocess.Popen([sys.executable, "-c", SUPERVISED, str(tmp_path), code, sleeper(daemon)])
    try:
        await eventually(lambda: written_pid(parent) and written_pid(daemon))
    finally:
        runner.kill()
        runner.wait()
    pids = [written_pid(tmp_path / name) or 0 for name in ("guard.pid", "parent.pid", "daemon.pid")]
    assert all(pids)
    await eventually(lambda: not any(map(alive, pids)))


async def test_a_killed_guard_takes_its_command_along_and_the_supervisor_sweeps_the_rest(
    make: Make, tmp_path: pathlib.Path
) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", SLEEP])  # a child of ours that is not the supervisor's
    try:
        parent, daemon = tmp_path / "parent.pid", tmp_path / "daemon.pid"
        async with Supervisor() as supervisor:
            spec = make(DAEMON + f"; {sleeper(parent)}", sleeper(daemon))
            task = asyncio.create_task(supervisor.run_pod(job(spec)))
            await eventually(lambda: written_pid(parent) and written_pid(daemon))
            supervisor.processes["p"].send(signal.SIGKILL)
            exit = await task
            assert exit is not None
            assert exit.code == 128 + signal.SIGKILL
            await eventually(lambda: not alive(written_pid(parent) or 0) and not alive(written_pid(daemon) or 0))
        assert alive(bystander.pid)
    finally:
        bystander.kill()
        bystander.wait()


async def test_what_outlived_guard_and_supervisor_is_found_by_its_output_whatever_it_calls_itself(
    tmp_path: pathlib.Path,
) -> None:
    daemon, logs = tmp_path / "daemon.pid", tmp_path / "logs"
    logs.mkdir()
    title = f"import setproctitle; setproctitle.setproctitle('x' * 4096); {sleeper(daemon)}"
    lifeline, held = os.pipe()
    command = [sys.executable, "-I", "-S", guard.__file__, logs / "p.log", "65536", "1"]
    bystander = subprocess.Popen([sys.executable, "-c", SLEEP], stdout=(logs / "mine.log").open("w"))
    watched = subprocess.Popen([*command, sys.executable, "-c", DAEMON + "; " + SLEEP, title], stdin=lifeline)
    try:
        await eventually(lambda: written_pid(daemon))
        watched.kill()
        watched.wait()
        assert alive(written_pid(daemon) or 0)
        assert sorted(os.listdir(logs)) == ["mine.log", "p.log"], "the pipe's name is gone"
        assert end_orphans(str(tmp_path)) == 0
        assert end_orphans(str(logs)) == 1
        await eventually(lambda: not alive(written_pid(daemon) or 0))
        assert alive(bystander.pid)
    finally:
        for process in (watched, bystander):
            process.kill()
            process.wait()
        os.close(lifeline)
        os.close(held)


async def test_a_lock_is_held_until_the_last_process_is_gone(make: Make, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "lock"
    lock = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    async with Supervisor(lock=lock) as supervisor:
        task = asyncio.create_task(supervisor.run_pod(job(make(SLEEP))))
        await eventually(lambda: "p" in supervisor.processes and supervisor.processes["p"].state == "ready")
        os.close(lock)  # as if the supervising process had died
        supervisor.lock = None
        with open(path) as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        await supervisor.stop(supervisor.processes.values())
        await task
        with open(path) as other:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_log_holds_at_most_twice_its_limit_and_keeps_the_newest(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "log"
    code = "for n in range(20000): print(f'line {n}')"
    lifeline, held = os.pipe()
    command = [sys.executable, "-I", "-S", guard.__file__, log, "65536", "1", sys.executable, "-c", code]
    subprocess.run(command, stdin=lifeline, check=True)
    os.close(lifeline)
    os.close(held)
    sizes = [path.stat().st_size for path in (log, tmp_path / "log.1")]
    assert all(0 < size <= 65536 for size in sizes)
    assert log.read_text().endswith("line 19999\n")


async def test_tail_shows_the_last_life_only(make: Make, tmp_path: pathlib.Path) -> None:
    async with Supervisor(back_off=FAST) as supervisor:
        await supervisor.run_pod(deployment(make("print('a\\n\\nb'); exit(1)")))
    assert tail(str(tmp_path / "p.log")) == ("a", "b")
    assert tail(str(tmp_path / "p.log"), limit=1) == ("b",)


async def test_memory_counts_grandchildren(make: Make, tmp_path: pathlib.Path) -> None:
    pid_file = tmp_path / "pid"
    hog = f"block = b'x' * (100 << 20); {sleeper(pid_file)}"
    before = resident_memory(os.getpid())
    async with Supervisor() as supervisor:
        task = asyncio.create_task(supervisor.run_pod(job(make(DAEMON + f"; {SLEEP}", hog))))
        await eventually(lambda: written_pid(pid_file))
        assert 100 << 20 < resident_memory(os.getpid()) - before < 300 << 20
        await supervisor.stop(supervisor.processes.values(), at_once=True)
        await task


async def test_leaving_the_context_ends_what_runs(make: Make, tmp_path: pathlib.Path) -> None:
    async with Supervisor() as supervisor:
        task = asyncio.create_task(supervisor.run_pod(deployment(make(sleeper(tmp_path / "pid")))))
        await eventually(lambda: written_pid(tmp_path / "pid"))
    assert not alive(written_pid(tmp_path / "pid") or 0)
    assert await task is None


def test_a_process_counts_seconds_since_its_state_changed() -> None:
    process = Process(ProcessSpec("p", ("true",), {}, ".", "log", "message"))
    process.since -= 5
    process.enter("waiting")
    assert process.seconds() >= 5
    process.enter("starting")
    assert process.seconds() < 1
