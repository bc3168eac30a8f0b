"""operators.progress and operators.diagnosis: what a user reads, from made-up observations."""

import io
import time
from typing import Any

import pytest
import rich.console

from operators.diagnosis import how_it_ended, likely_cause
from operators.figures import duration, sparkline
from operators.probes import Probe
from operators.processes import Exit, Process, ProcessSpec, State
from operators.progress import Display, Progress, death_notice, metrics_text

STATUS: dict[str, Any] = {
    "phase": "training",
    "step": 12,
    "total_steps": 200,
    "version": [1, 12],
    "waiting_for": None,
    "reward_mean": 0.4123,
    "reward": {"generator": 0.4},
    "response_length_mean": 33.6,
    "tokens_per_s": {"trained": 130.0, "generated": 11_200.0},
    "samples_per_s": 2.125,
    "staleness_mean": 0.84,
    "staleness_max": 2,
    "queue_groups": 6,
    "eta_s": 3780,
    "evaluation": {"sums": {"avg@4": 0.21, "pass@4": 0.5, "count": 100, "step": 0}},
    "checkpoint_step": 10,
}


def process(name: str, state: State = "ready", one_off: bool = False, seconds: float = 0.0, **fields: Any) -> Process:
    made = Process(ProcessSpec(name, ("true",), {}, ".", f"logs/{name}.log", "message", one_off=one_off, **fields))
    made.enter(state)
    made.since = time.monotonic() - seconds
    return made


@pytest.fixture
def progress() -> Progress:
    made = Progress("sums", samples_per_step=32, max_restarts=3)
    made.processes = [
        process("rollout-0-vllm"),
        process("rollout-0-worker", readiness=Probe(port=1)),
        process("trainer-0"),
    ]
    return made


def test_rows_that_are_left_out_are_said_once_and_in_the_summary(progress: Progress) -> None:
    workers = {
        f"rollout-{number}": {"left_out": {"sums": "2 blank of its 9 rows, first row 4: blank"}} for number in (0, 1)
    }
    assert progress.observe(None, workers, 0) == ["data set sums: left out 2 blank of its 9 rows, first row 4: blank"]
    assert progress.observe(STATUS, workers, 0) == []
    assert ("left out", "sums: 2 blank of its 9 rows, first row 4: blank") in progress.summary({})


def test_the_summary_says_why_samples_were_dropped(progress: Progress) -> None:
    rows = progress.summary({"dropped": {"invalid": 3, "stale": 1}, "why_dropped": {"invalid": "no room"}})
    at = rows.index(("dropped", "invalid 3, stale 1"))
    assert rows[at + 1] == ("", "the first invalid one: no room")


def test_the_picture_tells_what_a_user_asks_first(progress: Progress) -> None:
    progress.began = time.monotonic() - 432
    progress.observe(STATUS | {"step": 11, "reward_mean": 0.2}, {}, 0)
    progress.observe(STATUS, {"rollout-0": {"version": [1, 12]}}, 3 << 30)
    assert progress.picture().splitlines() == [
        "sums  training for 7m 12s · step 12 of 200 · ETA 1h 3m · policy t1-s12 · staleness mean 0.8 max 2",
        "reward   0.412 ▁█  (generator 0.400) · response 34 tokens · eval sums avg@4 0.210, pass@4 0.500 at step 0",
        "speed    11.2k tok/s generated · 130 tok/s trained · 2.12 samples/s · memory 3.0 GiB",
        "rollout  rollout-0-vllm running · rollout-0-worker ready · queue 6 groups",
        "trainer  trainer-0 running · checkpoint s10 · restarts 0 of 3",
    ]


def test_the_line_tells_the_same_in_short(progress: Progress) -> None:
    progress.began = time.monotonic() - 432
    progress.observe(STATUS, {}, 0)
    assert progress.line() == (
        "[00:07:12] step 12/200 · reward 0.412 · response 34 tokens · 11.2k tok/s generated · 130 tok/s trained · "
        "2.12 samples/s · staleness 0.8 · queue 6 · ETA 1h 3m"
    )


@pytest.mark.parametrize(
    ("name", "state", "one_off", "expected"),
    [
        ("fetch", "ready", True, "fetching the model (fetch, 12s)"),
        ("fetch", "ended", True, None),
        ("trainer-0", "ready", False, "the trainer is starting (trainer-0, 12s)"),
        ("rollout-0-vllm", "back-off", False, "a pause before the next start (rollout-0-vllm, 12s)"),
        ("rollout-0-vllm", "ready", False, None),
        ("reward-quality-0", "starting", False, "a server to be ready (reward-quality-0, 12s)"),
        ("reward-quality-0", "ready", False, None),
        ("rollout-0-worker", "unready", False, None),
    ],
)
def test_what_a_process_keeps_waiting_for_is_said_in_words(
    name: str, state: State, one_off: bool, expected: str | None
) -> None:
    probe = Probe(port=1) if name.startswith(("reward", "rollout-0-worker")) else None
    made = process(name, state, one_off, seconds=12, readiness=probe)
    assert Progress("sums", 32, 3, processes=[made]).waiting_for() == expected


def test_what_still_loads_is_not_called_running(progress: Progress) -> None:
    progress.processes = [process("rollout-0-vllm", seconds=34), process("trainer-0", seconds=12)]
    progress.observe(None, {"rollout-0": {"waiting_for": "vLLM to load the model", "loading": ["rollout-0-vllm"]}}, 0)
    assert dict(progress.component_lines()) == {
        "rollout": "rollout-0-vllm loading the model 34s",
        "trainer": "trainer-0 starting 12s · restarts 0 of 3",
    }
    progress.observe({"step": 0}, {"rollout-0": {}}, 0)
    assert progress.component_lines()[0] == ("rollout", "rollout-0-vllm running")
    assert progress.component_lines()[1][1].startswith("trainer-0 running")


def test_what_workers_and_trainer_say_they_wait_for_is_passed_on(progress: Progress) -> None:
    workers = {"rollout-0": {"waiting_for": "vLLM to load the model (34s)"}, "rollout-1": {}}
    progress.observe({"step": 0, "waiting_for": "groups of step 1"}, workers, 0)
    assert progress.waiting_for() == (
        "rollout-0 waits for vLLM to load the model (34s); the trainer waits for groups of step 1"
    )
    assert progress.picture().splitlines()[-2:] == [
        "now      rollout-0 waits for vLLM to load the model (34s)",
        "         the trainer waits for groups of step 1",
    ]
    progress.observe({"step": 3}, {"rollout-0": {}}, 0)
    assert progress.waiting_for() is None


def test_at_the_end_no_memory_of_processes_that_are_gone_is_told(progress: Progress) -> None:
    progress.observe(STATUS, {}, 1 << 20)
    assert "memory" in progress.line()
    progress.notice = "the processes end"
    assert "memory" not in progress.line()
    progress.processes[-1].enter("ended")
    progress.processes[0].stop_requested.set()
    progress.observe(None, {"rollout-0": {"loading": ["rollout-0-vllm"]}}, 0)
    assert progress.headline() == "sums  ending after 0s"
    assert progress.component_lines()[0][1].startswith("rollout-0-vllm ending · ")


def test_what_is_waited_for_is_said_once() -> None:
    progress = Progress("sums", 32, 3)
    progress.observe({"step": 0, "waiting_for": "groups of step 1"}, {}, 0)
    assert progress.line() == "[00:00:00] the trainer waits for groups of step 1"
    assert "now      the trainer waits for groups of step 1" in progress.picture()


def test_a_trainer_that_is_started_again_is_not_shown_as_it_was(progress: Progress) -> None:
    progress.observe(STATUS | {"waiting_for": "groups of step 13"}, {}, 0)
    progress.observe(None, {}, 0)
    assert progress.waiting_for() == "the trainer waits for groups of step 13", "one look without an answer is no news"
    progress.processes = [process("trainer-0")]
    assert progress.headline().startswith("sums  starting for")
    assert progress.waiting_for() == "the trainer is starting (trainer-0, 0s)"


def test_nothing_known_still_gives_a_line_and_a_picture_and_a_summary() -> None:
    progress = Progress("sums", 32, 3)
    assert progress.line() == "[00:00:00] starting"
    assert progress.picture() == "sums  starting for 0s"
    assert dict(progress.summary({}))["steps"] == "0 of ?"


def test_speed_leaves_out_starting_up_and_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = Progress("sums", samples_per_step=32, max_restarts=3)
    for seconds, step in ((100, 0), (60, 1), (10, 2), (10, 4), (5, 4)):
        now[0] += seconds
        progress.observe({"step": step, "total_steps": 4}, {}, 0)
    assert progress.samples_per_s() == pytest.approx(3 * 32 / 20)
    assert progress.steps_made() == 4
    assert progress.since_step() == 5


def test_steps_of_earlier_runs_and_steps_made_again_are_not_progress_twice() -> None:
    progress = Progress("sums", 32, 3)
    for step in (20, 20, 21, 20, 21, 22):  # resumed at 20; the trainer restarts from its checkpoint after 21
        progress.observe({"step": step}, {}, 0)
    assert progress.steps_made() == 3  # 21, 21 again, 22: each was work, the first look was not


def test_the_summary_takes_what_the_trainer_has_summed_up(progress: Progress) -> None:
    progress.observe({"step": 1, "total_steps": 200, "reward_mean": 0.1}, {}, 5 << 29)
    progress.observe({"step": 199, "total_steps": 200, "reward_mean": 0.9}, {}, 1 << 29)
    comparison = {"step": 200, "before": 0.25, "after": 0.75, "difference": 0.5, "low": 0.31, "high": 0.69}
    final = {
        "steps": 200,
        "samples_per_s": 2.5,
        "evaluation": {"sums": comparison, "new": {"before": None, "after": 0.5}},
        "dropped": {"stale": 2, "failed": 0},
    }
    rows = dict(progress.summary(final))
    assert rows["steps"] == "200 of 200"
    assert rows["speed"] == "2.50 samples/s once it was running"
    assert rows["reward"] == "0.900 ▁█ (from 0.100)"
    assert rows["eval sums"] == "0.250 → 0.750 (+0.500, 95% interval +0.310 to +0.690)"
    assert rows["memory"] == "2.5 GiB at most, all processes together"
    assert rows["dropped"] == "stale 2"
    assert "eval new" not in rows


def test_the_summary_of_a_run_that_went_on_begins_with_its_first_step(progress: Progress) -> None:
    progress.observe({"step": 120, "total_steps": 200, "reward_mean": 0.4}, {}, 0)
    rows = dict(progress.summary({"steps": 200, "reward": {"first": 0.1, "last": 0.8}}))
    assert rows["reward"].startswith("0.800 ")
    assert rows["reward"].endswith(" (from 0.100)")


def test_the_summary_of_a_run_that_was_stopped_tells_what_was_seen(progress: Progress) -> None:
    for step, value in ((0, 0.25), (20, 0.5)):
        metrics = {"avg@1": value, "step": step}
        progress.observe({"step": step, "total_steps": 200, "evaluation": {"sums": metrics}}, {}, 0)
    rows = dict(progress.summary({}))
    assert rows["steps"] == "20 of 200"
    assert rows["eval sums"] == "avg@1 0.250 at step 0 → avg@1 0.500 at step 20"


def test_metrics_that_are_no_scores_stay_out_of_sight() -> None:
    assert metrics_text({"avg@2": 0.5, "pass@2": None, "count": 9, "per_prompt": [1]}) == "avg@2 0.500"


@pytest.mark.parametrize(
    ("values", "expected"), [([], ""), ([1.0], "▁"), ([2.0, 2.0], "▁▁"), ([0, 0.5, 1], "▁▅█"), ([-1, 1], "▁█")]
)
def test_sparkline(values: list[float], expected: str) -> None:
    assert sparkline(values) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0.4, "0s"), (59.9, "59s"), (61, "1m 1s"), (3600, "1h 0m"), (90000, "25h 0m")]
)
def test_duration(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected


@pytest.mark.parametrize(
    ("code", "lines", "expected"),
    [
        (137, [], "ran out of memory"),
        (139, [], "crashed in native code"),
        (1, ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"], "GPU's memory is full"),
        (1, ["RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory"], "machine's memory is full"),
        (1, ["OSError: [Errno 28] No space left on device"], "disk is full"),
        (1, ["OSError: [Errno 98] Address already in use"], "another process listens at this port"),
        (1, ["botocore ... (InvalidAccessKeyId) when calling"], "refuses the credentials"),
        (1, ["ModuleNotFoundError: No module named 'vllm'"], "package vllm is not installed here"),
        (1, ["/usr/bin/python: No module named pipeline"], "package pipeline is not installed here"),
        (1, ["huggingface_hub.errors.RepositoryNotFoundError: 404"], "no such model"),
        (1, ["socket.gaierror: [Errno -2] Name or service not known"], "a host name is not known"),
        (
            1,
            ["User-specified max_model_len (4096) is greater than the derived max_model_len (sliding_window=2048 or"],
            "rollout.maxModelLen (sliding_window=2048): lower it",
        ),
        (1, ["Connection refused", "MemoryError"], "machine's memory is full"),
        (1, ["ValueError: something else"], None),
        (0, [], None),
    ],
)
def test_a_likely_cause_is_named(code: int, lines: list[str], expected: str | None) -> None:
    cause = likely_cause(code, lines)
    assert cause is None if expected is None else expected in (cause or "")


def test_how_it_ended_names_the_signal() -> None:
    assert how_it_ended(137) == "killed by SIGKILL"
    assert how_it_ended(200) == "exit 200"


def test_a_death_notice_shows_last_words_cause_and_log() -> None:
    dead = process("rollout-0-vllm", "ended")
    exit = Exit("rollout-0-vllm", 137, "", ("loading", "still loading"), "its liveness probe kept failing")
    assert death_notice(dead, exit, again=True).splitlines() == [
        "rollout-0-vllm ended: its liveness probe kept failing, killed by SIGKILL; it is started again",
        "  | loading",
        "  | still loading",
        "  likely cause: it was killed from outside; most often the kernel did, because the machine ran out of memory",
        "  log: logs/rollout-0-vllm.log",
    ]


def test_the_termination_message_takes_the_place_of_the_log_s_last_lines() -> None:
    notice = death_notice(process("t"), Exit("t", 1, "store.uri: bucket x is not there", ("Traceback",)), again=False)
    assert "store.uri: bucket x is not there" in notice
    assert "Traceback" not in notice


def test_a_terminal_gets_one_picture_that_is_drawn_again(progress: Progress) -> None:
    screen = io.StringIO()
    with Display(progress, rich.console.Console(file=screen, force_terminal=True, width=200)) as display:
        progress.observe(STATUS, {}, 0)
        display.refresh()
        display.say("an event [with brackets]")
        display.refresh()
    assert "step 12 of 200" in screen.getvalue()
    assert "an event [with brackets]" in screen.getvalue()


def test_a_terminal_that_has_gone_does_not_end_the_run(progress: Progress) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    with Display(progress, rich.console.Console(file=Gone(), width=200)) as display:
        display.say("event")
        display.refresh()
    assert not display.enabled


def test_without_progress_only_events_are_shown(progress: Progress) -> None:
    screen = io.StringIO()
    with Display(progress, rich.console.Console(file=screen), enabled=False) as display:
        display.refresh()
        display.say("event")
    assert screen.getvalue() == "event\n"
