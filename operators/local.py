"""`miles run FILE`: the children that a cluster would get, as processes on this machine.

operators.placement says which processes those are, operators.processes runs them; here are the run's folder, the
order of starting and ending, restarts of the trainer, and what decides that the run is over.

Exit codes: 0 complete · 1 failed · 2 the file, the environment or the folder was refused ·
4 the trainer was paused by somebody else · 130 / 143 / 129 paused on SIGINT / SIGTERM / SIGHUP.
After all but 0, the same command goes on from the newest checkpoint: the run id is kept in the run's folder.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import re
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import aiohttp
import rich.console

from operators import manifest, userfiles
from operators.children import children
from operators.figures import duration
from operators.machine import Ports, gpu_ids
from operators.placement import TOKEN_VARIABLE, Placement, plan
from operators.processes import BACK_OFF, BackOff, Exit, PodSpec, Process, Supervisor, resident_memory
from operators.progress import Display, Progress, death_notice
from operators.resolve import Platform, run_config
from operators.runfolder import RunFolder
from operators.spec import RLJob
from operators.spec.job import RunPolicy

ROLLOUT = "rollout"
COMPLETE, FAILED, REFUSED, PAUSED = 0, 1, 2, 4
FENCED = 5  # exit code of a trainer that another one has replaced
POLL_SECONDS = 1.0
STATUS_TIMEOUT = 2.0
RESUME_HINT = "the same command goes on from the newest checkpoint"
PORT_VARIABLE = "MILES_STATUS_PORT"
ENGINE_VARIABLE = "VLLM_URL"


def main(argv: list[str]) -> int:
    options = parse(argv)
    try:
        job, warnings = manifest.load_to_run(options.file, options.set)
        for warning in warnings:
            if not warning.startswith("spec.runPolicy"):  # acted on here
                say(warning)
        if job.spec.suspend:
            raise ValueError("spec.suspend: the job is suspended; remove it, or add --set spec.suspend=false")
        platform = Platform(
            local=True,
            gpus=len(gpu_ids(os.environ)),
            cpus=len(os.sched_getaffinity(0)),
            folder=os.path.dirname(os.path.abspath(options.file)),
        )
        userfiles.check(job, platform.folder)
        with RunFolder(options.run_dir or f"runs/{job.metadata.name}", say) as folder:
            folder.claim(job, platform)
            return asyncio.run(Run(job, folder, platform, options.progress).execute())
    except manifest.Invalid as error:
        print(error, file=sys.stderr)
    except (ValueError, OSError) as error:
        say(str(error))
    return REFUSED


def named(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("got an empty text; write a folder, or leave it out")
    return text


def say(text: str) -> None:
    print(f"miles run: {text}", file=sys.stderr, flush=True)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="miles run",
        description="Run an RLJob as processes on this machine. Ctrl-C pauses it after a checkpoint; the same command "
        "goes on. A second Ctrl-C kills what is still there.",
        epilog="Exit codes: 0 complete; 1 failed; 2 refused, something must be mended first; 4 paused by request; "
        "130, 143, 129 paused by Ctrl-C, SIGTERM, SIGHUP.",
    )
    parser.add_argument("file", help="YAML file with the RLJob")
    parser.add_argument(
        "--run-dir", type=named, help="folder of this run, kept for resuming (default: runs/<name of the job>)"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", help="override a field: spec.trainer.nodes=2"
    )
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="print events and the end only")
    return parser.parse_args(argv)


@dataclasses.dataclass(frozen=True)
class Outcome:
    code: int
    """Exit code of `miles run`."""
    text: str


class Run:
    """One `miles run`, from the first process to the summary."""

    def __init__(
        self,
        job: RLJob,
        folder: RunFolder,
        platform: Platform,
        show_progress: bool,
        desired: Callable[..., list[dict[str, Any]]] = children,
        back_off: BackOff = BACK_OFF,
    ):
        self.job, self.folder, self.platform, self.back_off = job, folder, platform, back_off
        self.children = desired
        self.policy = job.spec.run_policy
        self.ports = Ports()
        self.environment = dict(os.environ) | {TOKEN_VARIABLE: secrets.token_urlsafe(24)}
        samples = job.spec.algorithm.prompts_per_step * job.spec.algorithm.group_size
        self.progress = Progress(job.metadata.name, samples, self.policy.max_restarts)
        self.progress.total_steps = job.spec.algorithm.total_steps
        self.display = Display(self.progress, rich.console.Console(), show_progress)
        self.signals: list[signal.Signals] = []
        self.signalled = asyncio.Event()

    async def execute(self) -> int:
        if self.folder.is_complete:
            self.conclude(Outcome(COMPLETE, "complete"), None)
            return COMPLETE
        try:
            self.placement = self.place()
        except (ValueError, OSError):
            self.folder.release()
            raise
        supervisor = Supervisor(self.folder.lock, self.back_off, self.announce)
        with self.display:
            async with supervisor, aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(STATUS_TIMEOUT)) as self.http:
                self.supervisor = supervisor
                self.heed_signals()
                self.watcher = asyncio.create_task(self.watch())
                outcome = await self.until_over()
                again = "; Ctrl-C again kills them" if self.signals else ""
                self.progress.notice = f"the processes end{again}"
                await supervisor.stop_all()
                self.watcher.cancel()
        self.ports.close()
        # What a run that goes on has seen at first are the steps of earlier ones.
        made = self.progress.step if self.folder.is_new else self.progress.steps_made()
        kept = self.folder.release() if outcome.code == REFUSED and not made else None
        self.conclude(outcome, kept)
        return outcome.code

    def place(self) -> Placement:
        """Plan a new attempt, and write the files that its processes read."""
        attempt = self.folder.next_attempt()
        desired = self.children(self.job, run_id=self.folder.run_id, platform=self.platform, attempt=attempt)
        folder = str(self.folder.path)
        gpus, scratch = gpu_ids(os.environ), str(self.folder.scratch)
        placement = plan(desired, folder, self.ports, self.environment, gpus, os.getcwd(), scratch)
        self.folder.prepare(placement)
        return placement

    async def until_over(self) -> Outcome:
        """Start everything at once; trainer attempts follow each other until the run has come to one of its ends."""
        others = [asyncio.create_task(self.supervisor.run_pod(pod)) for pod in self.placement.pods if pod.restart]
        signalled = asyncio.create_task(self.signalled.wait())
        overdue = asyncio.create_task(self.until_overdue())
        pause = 0.0
        while True:
            trainer = asyncio.create_task(self.run_trainer(pause))
            ends = [trainer, signalled, overdue, self.watcher, *others]
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if signalled in done:
                return await self.pause_trainer(trainer)
            if overdue in done:
                return Outcome(FAILED, overdue.result())
            if self.watcher in done:
                await self.watcher  # it never returns: this raises
            if trainer not in done:
                return self.given_up([task.result() for task in others if task in done])
            outcome = self.judge(trainer.result())
            if outcome is not None:
                return outcome
            pause = min(max(2 * pause, self.back_off.first_s), self.back_off.cap_s)
            self.placement = self.place()

    def trainer_pods(self) -> list[PodSpec]:
        return [pod for pod in self.placement.pods if not pod.restart]

    async def run_trainer(self, pause: float) -> Exit | None:
        """One attempt, after a pause; when one pod fails the others are stopped. Its first failure, else a success;
        None if it was stopped before it had started."""
        await asyncio.sleep(pause)
        pods = self.trainer_pods()
        pending = {asyncio.create_task(self.supervisor.run_pod(pod)) for pod in pods}
        first: Exit | None = None  # the first failure, else the first success
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for exit in (exit for task in done if (exit := task.result()) is not None):
                first = exit if first is None or first.code == 0 else first
            if first is not None and first.code != 0 and pending:
                await self.supervisor.stop(self.lives(pods))
        return first

    def lives(self, pods: Iterable[PodSpec]) -> list[Process]:
        """The processes of the pods' containers that have been started."""
        names = [container.name for pod in pods for container in pod.containers]
        return [self.supervisor.processes[name] for name in names if name in self.supervisor.processes]

    def judge(self, exit: Exit | None) -> Outcome | None:
        """What the end of a trainer attempt means; None: another attempt follows."""
        if exit is None or exit.code == PAUSED:
            return Outcome(PAUSED, f"the trainer was paused; {RESUME_HINT}")
        if exit.code == COMPLETE:
            return Outcome(COMPLETE, "complete")
        process = self.supervisor.processes[exit.process]
        if process.spec.one_off:
            return self.given_up([exit])
        again = not exit.user_error and exit.code != FENCED and self.progress.restarts < self.policy.max_restarts
        self.announce(process, exit, again)
        if again:
            self.progress.restarts += 1
            return None
        if exit.user_error:
            return Outcome(REFUSED, first_line(exit))
        if exit.code == FENCED:
            return Outcome(FAILED, "another trainer has taken over this run")
        return Outcome(FAILED, f"the trainer failed {self.progress.restarts + 1} times (runPolicy.maxRestarts)")

    def given_up(self, exits: Sequence[Exit | None]) -> Outcome:
        exit = next(exit for exit in exits if exit is not None)
        if exit.user_error:
            return Outcome(REFUSED, first_line(exit))
        return Outcome(FAILED, f"{exit.process} failed {self.back_off.attempts} times in a row")

    def announce(self, process: Process, exit: Exit, again: bool) -> None:
        if not exit.user_error:  # which is said once, as the outcome
            self.display.say(death_notice(process, exit, again))

    def heed_signals(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                asyncio.get_running_loop().add_signal_handler(number, self.on_signal, number)

    def on_signal(self, number: signal.Signals) -> None:
        self.signals.append(number)
        self.signalled.set()
        if len(self.signals) > 1:
            self.supervisor.kill_all()

    async def pause_trainer(self, trainer: "asyncio.Task[Exit | None]") -> Outcome:
        """Ask the trainer for a checkpoint and wait for it; SIGTERM if it does not take requests or takes too long."""
        code = 128 + self.signals[0]
        lives = [life for life in self.lives(self.trainer_pods()) if life.state != "ended"]
        if not lives and not trainer.done():
            return Outcome(code, f"stopped before the trainer had started; {RESUME_HINT}")
        grace = max((life.spec.grace_s for life in lives), default=0.0)
        asked = not trainer.done() and await self.request_pause()
        # What they still deliver waits in the store; the trainer needs none of it for its checkpoint.
        others = self.lives(pod for pod in self.placement.pods if pod.restart)
        others_end = asyncio.create_task(self.supervisor.stop(others))
        if asked:
            deadline = time.monotonic() + grace
            while not trainer.done() and (left := deadline - time.monotonic()) > 0:
                self.progress.notice = f"the trainer writes a checkpoint (at most {left:.0f} s; Ctrl-C again kills it)"
                await asyncio.wait([trainer], timeout=min(left, 0.5))
        if not trainer.done():
            self.progress.notice = f"the trainer ends (at most {grace:.0f} s; Ctrl-C again kills it)"
            await self.supervisor.stop(lives)
        exit = await trainer
        self.progress.notice = "the processes end; Ctrl-C again kills them"
        await others_end
        if exit is not None and exit.code == COMPLETE:
            return Outcome(COMPLETE, "complete")
        saved = "paused, a checkpoint is written" if exit is not None and exit.code == PAUSED else "stopped"
        return Outcome(code, f"{saved}; {RESUME_HINT}")

    async def request_pause(self) -> bool:
        """Whether the trainer has accepted a request to checkpoint and stop."""
        url = status_url(self.trainer_pods()[0])
        assert url is not None
        headers = {"Authorization": f"Bearer {self.environment[TOKEN_VARIABLE]}"}
        try:
            async with self.http.post(f"{url}/pause", headers=headers) as response:
                return response.ok
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def watch(self) -> None:
        """Look at everything once a second, for the display."""
        while True:
            self.progress.processes = list(self.supervisor.processes.values())
            rollouts = [pod for pod in self.placement.pods if pod.component == ROLLOUT]
            trainer, *workers = await asyncio.gather(
                self.status(self.trainer_pods()[0]), *(self.worker_status(pod) for pod in rollouts)
            )
            said = {pod.name: status for pod, status in zip(rollouts, workers, strict=True) if status is not None}
            for text in self.progress.observe(trainer, said, resident_memory(os.getpid())):
                self.display.say(text)
            self.display.refresh()
            await asyncio.sleep(POLL_SECONDS)

    async def status(self, pod: PodSpec) -> Mapping[str, Any] | None:
        """What the pod says of itself; None: it does not answer, or not yet."""
        url = status_url(pod)
        answer = await self.get(f"{url}/status") if url and self.lives([pod]) else None
        try:
            said = json.loads(answer[1]) if answer and answer[0] else None
        except ValueError:
            return None
        return said if isinstance(said, dict) else None

    async def worker_status(self, pod: PodSpec) -> Mapping[str, Any] | None:
        """The same for a worker, with `waiting_for` until it is ready, and `loading`: processes that still load the
        model; None before it has been started."""
        lives = self.lives([pod])
        if not lives:
            return None
        said = dict(await self.status(pod) or {})
        if all(life.state == "ready" for life in lives):
            return said
        since = duration(min(life.seconds() for life in lives))
        engine = next((url for life in lives if (url := life.spec.environment.get(ENGINE_VARIABLE))), None)
        healthy = await self.get(f"{engine}/health")
        if healthy is None or not healthy[0]:
            loading = [life.spec.name for life in lives if ENGINE_VARIABLE not in life.spec.environment]
            return said | {"waiting_for": f"vLLM to load the model ({since})", "loading": loading}
        ready = await self.get(f"{status_url(pod)}/readyz")
        if ready is None:
            return said | {"waiting_for": f"its worker to start ({since})"}
        return said if ready[0] else said | {"waiting_for": ready[1].strip()}

    async def get(self, url: str) -> tuple[bool, str] | None:
        """(whether it is well, text) of a server on this machine; None: no answer."""
        try:
            async with self.http.get(url) as response:
                return response.ok, await response.text()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None

    async def until_overdue(self) -> str:
        """Returns once one of the run's deadlines has passed, saying which."""
        while True:
            age = time.monotonic() - self.progress.began
            text = overdue(self.policy, age, self.progress.steps_made(), self.progress.since_step())
            if text is not None:
                return f"{text}; it waited for: {self.progress.waiting_for() or 'the trainer'}"
            await asyncio.sleep(POLL_SECONDS)

    def conclude(self, outcome: Outcome, kept: str | None) -> None:
        """The last lines on the screen: how it ended, what was achieved, where things are. `kept`: what became of the
        folder of a job that was refused before its first step."""
        config = run_config(self.job, self.folder.run_id, self.platform)
        final, already = self.folder.earlier if self.folder.is_complete else self.folder.summary(), None
        if outcome.code == COMPLETE:
            already = complete_already(final, self.folder.earlier, self.job.spec.algorithm.total_steps)
        if already:  # the figures are those of the training
            final |= {name: value for name, value in self.folder.earlier.items() if not final.get(name)}
        self.display.say(f"{self.job.metadata.name}: {already or outcome.text}")
        rows = [("logs", f"{self.folder.shown}/logs")]
        rows += [("next", kept)] if kept else []
        if outcome.code == REFUSED and self.progress.trainer:  # what was sampled tells what is wrong
            rows.append(("report", f"miles report {shlex.quote(config.store.uri)}"))
        if outcome.code != REFUSED:
            rows += [*self.progress.summary(final), ("store", config.store.uri)]
            if self.progress.trainer or final:  # else it has not come to write anything that could be reported
                rows.append(("report", f"miles report {shlex.quote(self.folder.shown)}"))
        if config.output is not None and outcome.code == COMPLETE:
            rows.append(("model", config.output.uri))
        self.display.say("\n".join(f"  {label:<10} {text}" for label, text in rows))


def complete_already(final: Mapping[str, Any], earlier: Mapping[str, Any], total: int) -> str | None:
    """That nothing was left to train, in words; None where something was. final, earlier: summaries of the trainer
    in this run of the command and in one before it, {} if there is none."""
    steps = final.get("steps")
    if steps is None:
        return None
    if steps > total:
        return f"complete already, nothing was trained: {steps} steps are done, spec.algorithm.totalSteps is {total}"
    if steps == earlier.get("steps"):
        return "complete already, nothing was trained; for more steps, raise spec.algorithm.totalSteps"
    return None


def first_line(exit: Exit) -> str:
    """Of what the process said of its end; which of the ranks it was says nothing to a user."""
    return re.sub(r"^\[rank [0-9]+\] ", "", exit.message.splitlines()[0])


def status_url(pod: PodSpec) -> str | None:
    """Where the pod's GET /status is, if one of its containers has it."""
    ports = [container.environment.get(PORT_VARIABLE) for container in pod.containers]
    return next((f"http://127.0.0.1:{port}" for port in ports if port), None)


def overdue(policy: RunPolicy, age: float, steps: int, since_step: float) -> str | None:
    """Which deadline has passed, if one has. age, since_step: seconds since the start, since the last step (or start).
    steps: how many were finished in this run of the command."""
    if policy.active_deadline_seconds is not None and age > policy.active_deadline_seconds:
        return f"not complete after {duration(age)} (runPolicy.activeDeadlineSeconds)"
    if steps == 0 and age > policy.startup_deadline_seconds:
        return f"no step after {duration(age)} (runPolicy.startupDeadlineSeconds)"
    if steps > 0 and since_step > policy.progress_deadline_seconds:
        return f"no step for {duration(since_step)} (runPolicy.progressDeadlineSeconds)"
    return None
