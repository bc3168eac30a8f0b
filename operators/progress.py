"""What `miles run` shows: a live picture on a terminal, one line now and then elsewhere, and a summary at the end.

Progress gathers what was observed (process states, GET /status of trainer and workers) and words it, without any
I/O; Display puts that on a console.
"""

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import rich.console
import rich.live
import rich.text

from operators.diagnosis import how_it_ended, likely_cause
from operators.figures import count, duration, number, sparkline
from operators.processes import Exit, Process

SPARKLINE_WIDTH = 30
LINE_SECONDS = 10.0
GIB = 1 << 30

Status = Mapping[str, Any]


@dataclasses.dataclass
class Progress:
    """All that was seen of one run so far."""

    name: str
    samples_per_step: int
    max_restarts: int
    began: float = dataclasses.field(default_factory=time.monotonic)
    processes: Sequence[Process] = ()
    trainer: Status = dataclasses.field(default_factory=dict)
    """What it said last."""
    trainer_answered: float = 0.0
    """When it last answered."""
    workers: Mapping[str, Status] = dataclasses.field(default_factory=dict)
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    """Prompt set → which of its rows are not used, as workers say."""
    total_steps: int | None = None  # of the job
    restarts: int = 0  # of the trainer
    notice: str = ""
    """What is being waited for at the end, in place of anything else."""
    memory: int = 0  # bytes
    peak_memory: int = 0  # bytes
    rewards: "collections.OrderedDict[int, float]" = dataclasses.field(default_factory=collections.OrderedDict)
    first_evaluation: dict[str, Status] = dataclasses.field(default_factory=dict)
    last_evaluation: dict[str, Status] = dataclasses.field(default_factory=dict)
    step: int | None = None
    """Finished steps as last seen, those of earlier runs of the command included."""
    advances: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    """(when, how many) for the first look that saw steps finish, and for all later ones together."""

    def observe(self, trainer: Status | None, workers: Mapping[str, Status], memory: int) -> list[str]:
        """Take in one look; `trainer` None: it did not answer, what it said last stands. Returns what is to be said of
        it, once."""
        self.workers, self.memory = workers, memory
        self.peak_memory = max(self.peak_memory, memory)
        told = {name: text for status in workers.values() for name, text in (status.get("left_out") or {}).items()}
        news = [f"data set {name}: left out {text}" for name, text in told.items() if name not in self.left_out]
        self.left_out |= told
        if trainer is not None:
            self._observe_trainer(trainer)
        return news

    def _observe_trainer(self, trainer: Status) -> None:
        self.trainer_answered = time.monotonic()
        self.trainer = trainer
        step = int(trainer.get("step") or 0)
        if self.step is not None and step > self.step:
            self._advance(step - self.step)
        self.step = step
        if step and trainer.get("reward_mean") is not None:
            self.rewards[step] = float(trainer["reward_mean"])
            if len(self.rewards) > SPARKLINE_WIDTH:
                self.rewards.popitem(last=False)
        for name, metrics in (trainer.get("evaluation") or {}).items():
            self.first_evaluation.setdefault(name, metrics)
            self.last_evaluation[name] = metrics

    def _advance(self, steps: int) -> None:
        before = self.advances.pop()[1] if len(self.advances) == 2 else 0
        self.advances.append((time.monotonic(), before + steps))

    def steps_made(self) -> int:
        """Steps that this run of the command has seen finish."""
        return sum(steps for _, steps in self.advances)

    def since_step(self) -> float:
        """Seconds since a step was last seen to finish, or since the start."""
        return time.monotonic() - (self.advances[-1][0] if self.advances else self.began)

    def samples_per_s(self) -> float | None:
        """Speed without starting up and without the first step."""
        if len(self.advances) < 2:
            return None
        (began, _), (ended, steps) = self.advances
        return steps * self.samples_per_step / (ended - began)

    def waiting_for(self) -> str | None:
        """In words, what keeps the next step; None while steps are made."""
        return "; ".join(self._waits()) or None

    def _waits(self) -> list[str]:
        """The same, each thing by itself."""
        if self.notice:
            return [self.notice]
        parts = [text for process in self.processes if (text := self._process_waits(process))]
        for pod, status in self.workers.items():
            if status.get("waiting_for"):
                parts.append(f"{pod} waits for {status['waiting_for']}")
        if self._trainer_is_up() and self.trainer.get("waiting_for"):
            parts.append(f"the trainer waits for {self.trainer['waiting_for']}")
        return parts

    def _process_waits(self, process: Process) -> str | None:
        where = f"({process.spec.name}, {duration(process.seconds())})"
        if process.state == "back-off":
            return f"a pause before the next start {where}"
        if process.spec.one_off and process.state != "ended":
            return f"{'fetching the model' if 'fetch' in process.spec.name else 'preparing'} {where}"
        if process.spec.name.startswith("trainer") and process.state == "ready" and not self._trainer_is_up():
            return f"the trainer is starting {where}"
        if process.spec.readiness and process.state in ("starting", "unready") and not self._is_worker(process):
            return f"a server to be ready {where}"
        return None

    def _is_worker(self, process: Process) -> bool:
        """Workers say themselves what they wait for."""
        return process.spec.name.startswith("rollout")

    def _trainer_is_up(self) -> bool:
        """Whether the present incarnation of the trainer has answered yet."""
        began = max((p.since for p in self.processes if p.spec.name.startswith("trainer")), default=0.0)
        return self.trainer_answered > began

    def phase(self) -> str:
        if self._trainer_is_up():
            return str(self.trainer.get("phase") or "running")
        return "ending" if self.notice else "starting"

    def headline(self) -> str:
        since = duration(time.monotonic() - self.began)
        if self.phase() == "ending":  # what the trainer said last is not where it got to
            return f"{self.name}  ending after {since}"
        parts = [f"{self.name}  {self.phase()} for {since}"]
        if self.trainer.get("total_steps"):
            parts.append(f"step {self.trainer.get('step', 0)} of {self.trainer['total_steps']}")
        if self.trainer.get("eta_s") is not None:
            parts.append(f"ETA {duration(self.trainer['eta_s'])}")
        if self.trainer.get("version"):
            term, step = self.trainer["version"]
            parts.append(f"policy t{term}-s{step}")
        if self.trainer.get("staleness_mean") is not None:
            parts.append(
                f"staleness mean {self.trainer['staleness_mean']:.1f} max {self.trainer.get('staleness_max', 0)}"
            )
        return " · ".join(parts)

    def reward_line(self) -> str | None:
        mean = self.trainer.get("reward_mean")
        if mean is None:
            return None
        terms = ", ".join(f"{name} {number(value)}" for name, value in (self.trainer.get("reward") or {}).items())
        parts = [f"{number(mean)} {sparkline(list(self.rewards.values()))}" + (f"  ({terms})" if terms else "")]
        if self.trainer.get("response_length_mean") is not None:
            parts.append(f"response {self.trainer['response_length_mean']:.0f} tokens")
        parts += [f"eval {name} {metrics_text(metrics)}" for name, metrics in self.last_evaluation.items()]
        return " · ".join(parts)

    def speed_line(self) -> str | None:
        speeds = self.trainer.get("tokens_per_s") or {}
        generated = speeds.get("generated")
        if generated is None and self.workers:
            generated = sum(worker.get("tokens_per_s") or 0 for worker in self.workers.values())
        parts = []
        if generated is not None:
            parts.append(f"{count(generated)} tok/s generated")
        if speeds.get("trained") is not None:
            parts.append(f"{count(speeds['trained'])} tok/s trained")
        if self.trainer.get("samples_per_s") is not None:
            parts.append(f"{self.trainer['samples_per_s']:.2f} samples/s")
        if self.memory and not self.notice:  # at the end there is nobody left who has any
            parts.append(f"memory {self.memory / GIB:.1f} GiB")
        return " · ".join(parts) or None

    def component_lines(self) -> list[tuple[str, str]]:
        """(component, state of its processes), such as ("trainer", "trainer-0 ready · checkpoint s20 · restarts 0")."""
        rows: dict[str, list[str]] = {}
        for process in self.processes:
            if process.state != "ended" or (process.exit is not None and process.exit.code != 0):
                component = process.spec.name.partition("-")[0]
                rows.setdefault(component, []).append(f"{process.spec.name} {self._state_words(process)}")
        if "rollout" in rows and self.trainer.get("queue_groups") is not None:
            rows["rollout"].append(f"queue {self.trainer['queue_groups']} groups")
        if "trainer" in rows:
            if self.trainer.get("checkpoint_step") is not None:
                rows["trainer"].append(f"checkpoint s{self.trainer['checkpoint_step']}")
            rows["trainer"].append(f"restarts {self.restarts} of {self.max_restarts}")
        return [(component, " · ".join(parts)) for component, parts in rows.items()]

    def _state_words(self, process: Process) -> str:
        """As for any process; what is up, but of no use yet, is not called running."""
        if process.state == "ready" and not process.stop_requested.is_set():
            if any(process.spec.name in status.get("loading", ()) for status in self.workers.values()):
                return f"loading the model {duration(process.seconds())}"
            if process.spec.name.startswith("trainer") and not self._trainer_is_up():
                return f"starting {duration(process.seconds())}"
        return state_words(process)

    def picture(self) -> str:
        """All lines of the live display."""
        rows = [("reward", self.reward_line()), ("speed", self.speed_line()), *self.component_lines()]
        rows += [("" if number else "now", text) for number, text in enumerate(self._waits())]
        return "\n".join([self.headline(), *(f"{name:<8} {text}" for name, text in rows if text)])

    def line(self) -> str:
        """The same in one line, for a log."""
        stamp = f"[{clock_time(time.monotonic() - self.began)}]"
        if not self.trainer.get("step"):
            return f"{stamp} {self.waiting_for() or self.phase()}"
        status = self.trainer
        parts = [f"step {status['step']}/{status.get('total_steps', '?')}"]
        if status.get("reward_mean") is not None:
            parts.append(f"reward {number(status['reward_mean'])}")
        if status.get("response_length_mean") is not None:
            parts.append(f"response {status['response_length_mean']:.0f} tokens")
        parts.append(self.speed_line() or "")
        if status.get("staleness_mean") is not None:
            parts.append(f"staleness {status['staleness_mean']:.1f}")
        if status.get("queue_groups") is not None:
            parts.append(f"queue {status['queue_groups']}")
        if status.get("eta_s") is not None:
            parts.append(f"ETA {duration(status['eta_s'])}")
        waits = self.waiting_for()
        return " · ".join([f"{stamp} {parts[0]}", *filter(None, parts[1:])]) + (f" · {waits}" if waits else "")

    def summary(self, final: Status) -> list[tuple[str, str]]:
        """What was achieved, as (label, text). final: the trainer's own summary, {} if it has not come to write one."""
        steps = final.get("steps", self.trainer.get("step", 0))
        rows = [
            ("steps", f"{steps} of {self.total_steps or self.trainer.get('total_steps') or final.get('steps', '?')}")
        ]
        # Where nothing was started, the figures are those of the run as it was.
        seconds = time.monotonic() - self.began if self.processes else final.get("duration_s", 0.0)
        rows.append(("duration", duration(seconds)))
        speed = final.get("samples_per_s") or self.samples_per_s()
        if speed:
            rows.append(("speed", f"{speed:.2f} samples/s once it was running"))
        whole, seen = final.get("reward") or {}, list(self.rewards.values())
        course = [*([whole["first"]] if whole else []), *seen, *([whole["last"]] if whole else [])]
        if course:
            words = [number(course[-1]), sparkline(seen), f"(from {number(course[0])})"]
            rows.append(("reward", " ".join(filter(None, words))))
        rows += self._evaluations(final.get("evaluation") or {})
        dropped = final.get("dropped") or self.trainer.get("dropped") or {}
        if any(dropped.values()):
            rows.append(("dropped", ", ".join(f"{reason} {n}" for reason, n in dropped.items() if n)))
            why = final.get("why_dropped") or self.trainer.get("why_dropped") or {}
            rows += [("", f"the first {reason} one: {text}") for reason, text in why.items()]
        rows += [("left out", f"{name}: {text}") for name, text in self.left_out.items()]
        if self.restarts:
            rows.append(("restarts", str(self.restarts)))
        if self.peak_memory:
            rows.append(("memory", f"{self.peak_memory / GIB:.1f} GiB at most, all processes together"))
        return rows

    def _evaluations(self, improvements: Mapping[str, Status]) -> list[tuple[str, str]]:
        """Before → after of each set; as far as it was seen, where the trainer has not compared them."""
        seen = {name: metrics_text(metrics) for name, metrics in self.last_evaluation.items()}
        for name, metrics in self.first_evaluation.items():
            if metrics != self.last_evaluation[name]:
                seen[name] = f"{metrics_text(metrics)} → {seen[name]}"
        return [(f"eval {name}", text) for name, text in {**seen, **compared(improvements)}.items()]


class Display:
    """Shows a Progress; usable as a context. `live` None: live exactly if the console is a terminal."""

    def __init__(self, progress: Progress, console: rich.console.Console, enabled: bool = True):
        self.progress = progress
        self.console = console
        self.enabled = enabled
        self.last_line = 0.0
        self.live: rich.live.Live | None = None
        if enabled and console.is_terminal:
            self.live = rich.live.Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> "Display":
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live is not None:
            self._quietly(self.live.stop)

    def refresh(self) -> None:
        """Redraw, or print a line if the last one is old enough."""
        if self.live is not None:
            picture = rich.text.Text(self.progress.picture(), no_wrap=True, overflow="ellipsis")
            self._quietly(functools.partial(self.live.update, picture, refresh=True))
        elif self.enabled and time.monotonic() - self.last_line >= LINE_SECONDS:
            self.last_line = time.monotonic()
            self.say(self.progress.line())

    def say(self, text: str) -> None:
        """Print an event, above the live picture if there is one."""
        self._quietly(functools.partial(self.console.print, rich.text.Text(text), soft_wrap=True))

    def _quietly(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError:  # the terminal has gone; the run goes on without it
            self.enabled, self.live = False, None


def death_notice(process: Process, exit: Exit, again: bool) -> str:
    """Several lines on the end of a process: how, its last words, a likely cause, and whether it is started again."""
    how = f"{exit.reason}, {how_it_ended(exit.code)}" if exit.reason else how_it_ended(exit.code)
    lines = [f"{process.spec.name} ended: {how}" + ("; it is started again" if again else "")]
    if exit.message:
        lines += [f"  {line}" for line in exit.message.splitlines()[:5]]
    else:
        lines += [f"  | {line[:300]}" for line in exit.lines[-12:]]
    cause = likely_cause(exit.code, [*exit.lines, *exit.message.splitlines()])
    if cause:
        lines.append(f"  likely cause: {cause}")
    lines.append(f"  log: {process.spec.log}")
    return "\n".join(lines)


def state_words(process: Process) -> str:
    restarts = f", {process.restarts} restarts" if process.restarts else ""
    if process.state == "ended" and process.exit is not None:
        return how_it_ended(process.exit.code)
    if process.stop_requested.is_set():
        return "ending"
    if process.state == "ready":
        word = "running" if process.spec.readiness is None else "ready"
        return f"{word}{restarts}"
    return f"{process.state} {duration(process.seconds())}{restarts}"


def metrics_text(metrics: Status) -> str:
    """The scores among an evaluation's numbers: "avg@4 0.250, pass@4 0.500 at step 20"."""
    scores = [f"{name} {number(value)}" for name, value in metrics.items() if "@" in name and value is not None]
    return ", ".join(scores) + (f" at step {metrics['step']}" if "step" in metrics else "")


def compared(improvements: Mapping[str, Status]) -> dict[str, str]:
    """Set → "0.250 → 0.750 (+0.500, 95% interval +0.310 to +0.690)"."""
    texts = {}
    for name, found in improvements.items():
        if found.get("before") is not None and found.get("after") is not None:
            texts[name] = f"{number(found['before'])} → {number(found['after'])}"
            if found.get("low") is not None:
                interval = f"95% interval {found['low']:+.3f} to {found['high']:+.3f}"
                texts[name] += f" ({found['difference']:+.3f}, {interval})"
    return texts


def clock_time(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600:02}:{whole % 3600 // 60:02}:{whole % 60:02}"
