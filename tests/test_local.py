"""operators.local: whole runs with stand-ins in place of the pipeline's processes, as `miles run` would have them."""

import asyncio
import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from operators import local
from operators.children import children
from operators.local import Run, overdue
from operators.processes import BackOff
from operators.resolve import Platform
from operators.runfolder import RunFolder
from operators.spec import RLJob
from operators.spec.pods import RunPolicy

FAST = BackOff(first_s=0.02, cap_s=0.05, attempts=3)
STAND_IN = str(pathlib.Path(__file__).with_name("stand_in.py"))
PARTS = {"pipeline.fetch": "fetch", "pipeline.rollout": "worker", "pipeline.launch": "trainer"}
MODEL = "/var/lib/miles/model"

Start = Callable[..., Run]


def job(name: str = "sums", **spec: Any) -> RLJob:
    content = {
        "model": {"uri": "hf://org/tiny"},
        "data": {"sets": [{"generator": "reasoning-gym/chain_sum"}]},
        "algorithm": {"type": "grpo", "totalSteps": 3, "promptsPerStep": 2, "groupSize": 4},
        "store": {"uri": "file://./store"},
    }
    value = {"apiVersion": "miles.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": name}, "spec": content | spec}
    return RLJob.model_validate(value)


def stand_in_children(job: RLJob, **arguments: Any) -> list[dict[str, Any]]:
    """The real children, with stand_in.py in place of every command; probes quick."""
    found = children(job, **arguments)
    for child in found:
        pod = child.get("spec", {}).get("template", {}).get("spec", {})
        for container in [*pod.get("initContainers", []), *pod.get("containers", [])]:
            part = PARTS.get(container["command"][-1], "vllm")
            container["command"], container["args"] = ["python", "-S", "-E", STAND_IN, part], []
            container["env"].append({"name": "STAND_IN_MODEL", "value": MODEL})
            for probe in ("startupProbe", "readinessProbe"):
                if probe in container:
                    container[probe]["periodSeconds"] = 0.05
    return found


@pytest.fixture
def start(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(local, "POLL_SECONDS", 0.05)
    folders = []

    def build(wanted: RLJob | None = None, progress: bool = False, **environment: str) -> Run:
        for name, value in environment.items():
            monkeypatch.setenv(f"STAND_IN_{name.upper()}", value)
        wanted = wanted or job()
        folder = RunFolder(str(tmp_path / "run"), print)
        folder.__enter__()
        folders.append(folder)
        platform = Platform(local=True, cpus=2, folder=str(tmp_path))
        folder.claim(wanted, platform)
        return Run(wanted, folder, platform, progress, stand_in_children, FAST)

    yield build
    for folder in folders:
        folder.__exit__(None, None, None)


def claimed(path: pathlib.Path, wanted: RLJob, folder: str = ".") -> None:
    """A run of the command that claims the folder, and is stopped then."""
    with RunFolder(str(path), print) as run:
        run.claim(wanted, Platform(local=True, folder=folder))


def contents(path: pathlib.Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in path.rglob("*") if file.is_file() and file.name != "lock"}


def notes(tmp_path: pathlib.Path) -> list[str]:
    file = tmp_path / "run" / "notes"
    return file.read_text().splitlines() if file.exists() else []


async def noted(tmp_path: pathlib.Path, text: str) -> None:
    deadline = time.monotonic() + 30
    while not any(text in line for line in notes(tmp_path)):
        assert time.monotonic() < deadline, f"{text!r} not in {notes(tmp_path)}"
        await asyncio.sleep(0.02)


async def up(run: Run, tmp_path: pathlib.Path, trainer: str) -> None:
    """Until every process of the run does what it shall: before, a signal would end it without a word."""
    await noted(tmp_path, f"rank 0: {trainer}")
    deadline = time.monotonic() + 30
    while len(found := run.supervisor.processes) < 4 or any(p.state not in ("ready", "ended") for p in found.values()):
        assert time.monotonic() < deadline, {name: process.state for name, process in found.items()}
        await asyncio.sleep(0.02)


def processes_of(folder: pathlib.Path) -> list[int]:
    """Every living process that has the run's folder in its environment."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"MILES_RUN_DIR={folder}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def another(run: Run) -> None:
    """Let go of the folder, for the next run in it."""
    os.close(run.folder.lock)
    run.folder.lock = os.open(os.devnull, os.O_RDONLY)  # closed again by the fixture


async def test_a_run_completes_and_says_what_was_achieved(
    start: Start, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await start().execute() == 0
    shown = capsys.readouterr().out
    assert "sums: complete" in shown
    assert "3 of 3" in shown
    assert "12.50 samples/s" in shown
    assert f"file://{tmp_path}/store/default/sums/" in shown
    assert "report     miles report" in shown
    assert notes(tmp_path).count("fetch: fetched") == 1, "the model is fetched once for both pods"
    assert "worker: worker left" in notes(tmp_path)
    assert not processes_of(tmp_path / "run")


async def test_vllm_outlives_the_worker_that_needs_it(start: Start, tmp_path: pathlib.Path) -> None:
    await start().execute()
    left = [note for note in notes(tmp_path) if note.endswith("left")]
    assert left == ["worker: worker left", "vllm: vllm left"]


async def test_a_failed_trainer_is_started_again_as_a_new_attempt(
    start: Start, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await start(trainer="crash,complete").execute() == 0
    assert [note for note in notes(tmp_path) if "attempt" in note] == [
        "trainer: attempt 0 rank 0: crash",
        "trainer: attempt 1 rank 0: complete",
    ]
    shown = capsys.readouterr().out
    assert "trainer-0 ended: exit 1; it is started again" in shown
    assert "| RuntimeError: No space left on device" in shown
    assert "likely cause: the disk is full" in shown


async def test_the_run_fails_after_max_restarts(
    start: Start, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await start(job(runPolicy={"maxRestarts": 2}), trainer="crash").execute() == 1
    assert len([note for note in notes(tmp_path) if "attempt" in note]) == 3
    shown = capsys.readouterr().out
    assert "the trainer failed 3 times (runPolicy.maxRestarts)" in shown
    assert "steps      0 of 3" in shown
    assert "miles report" not in shown, "no trainer has come to write anything"


async def test_a_user_error_ends_the_run_at_once_with_its_message(
    start: Start, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await start(trainer="refuse").execute() == 2
    assert capsys.readouterr().out.splitlines() == [
        "sums: model.uri: no such model",
        f"  logs       {tmp_path}/run/logs",
        "  next       only the logs are kept, and what the store has of it; once mended, the same command begins anew",
    ]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["logs", "notes"]
    assert len([note for note in notes(tmp_path) if "attempt" in note]) == 1


async def test_a_worker_that_keeps_crashing_ends_the_run(
    start: Start, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    assert await start(trainer="hang", worker="crash").execute() == 1
    shown = capsys.readouterr().out
    assert "rollout-0-worker failed 3 times in a row" in shown
    assert "likely cause: a server that it needs does not answer" in shown
    assert not processes_of(tmp_path / "run")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_asks_the_trainer_for_a_checkpoint_and_meanwhile_ends_the_workers(
    start: Start, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    running = asyncio.create_task((run := start(trainer="hang")).execute())
    await up(run, tmp_path, "hang")
    os.kill(os.getpid(), number)
    assert await running == 128 + number
    order = [note for note in notes(tmp_path) if "attempt" not in note and "fetch" not in note]
    assert order[0] == "trainer: paused by request"
    assert sorted(order[1:]) == ["trainer: checkpoint written", "vllm: vllm left", "worker: worker left"]
    assert order.index("worker: worker left") < order.index("vllm: vllm left")
    assert "paused, a checkpoint is written; the same command goes on" in capsys.readouterr().out


async def test_a_trainer_that_takes_no_requests_is_sent_sigterm(start: Start, tmp_path: pathlib.Path) -> None:
    running = asyncio.create_task((run := start(trainer="silent")).execute())
    await up(run, tmp_path, "silent")
    os.kill(os.getpid(), signal.SIGINT)
    assert await running == 128 + signal.SIGINT
    assert "trainer: checkpoint written" in notes(tmp_path)
    assert "trainer: paused by request" not in notes(tmp_path)


async def test_under_nohup_the_end_of_the_terminal_is_ignored(start: Start, tmp_path: pathlib.Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        running = asyncio.create_task(start(step_seconds="0.2").execute())
        await noted(tmp_path, "rank 0: complete")
        os.kill(os.getpid(), signal.SIGHUP)
        assert await running == 0
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_a_second_signal_kills_what_does_not_end(start: Start, tmp_path: pathlib.Path) -> None:
    running = asyncio.create_task((run := start(trainer="hang", vllm="stubborn")).execute())
    await up(run, tmp_path, "hang")
    os.kill(os.getpid(), signal.SIGINT)
    await noted(tmp_path, "worker left")
    began = time.monotonic()
    os.kill(os.getpid(), signal.SIGINT)
    assert await running == 128 + signal.SIGINT
    assert time.monotonic() - began < 30, "the grace is a minute"
    assert not processes_of(tmp_path / "run")


async def test_when_one_trainer_node_fails_the_others_are_stopped(start: Start, tmp_path: pathlib.Path) -> None:
    wanted = job(trainer={"nodes": 2}, runPolicy={"maxRestarts": 0})
    assert await start(wanted, trainer="crash-rank-1").execute() == 1
    assert "trainer: checkpoint written" in notes(tmp_path), "rank 0 had the chance to save"
    assert not processes_of(tmp_path / "run")


async def test_ports_in_use_are_evaded(start: Start, tmp_path: pathlib.Path) -> None:
    with socket.socket() as first, socket.socket() as second:
        for port, held in ((8000, first), (8001, second)):
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):  # somebody else holds it: as good
                held.bind(("127.0.0.1", port))
                held.listen()
        run = start(job(rollout={"replicas": 2}), step_seconds="0.2")
        assert await run.execute() == 0
    given = list(run.ports.given.values())
    assert not {8000, 8001} & set(given)
    assert len(set(given)) == len(given) == 6
    assert run.progress.step, "the trainer was asked at its new port"


async def test_the_same_command_resumes_with_the_same_run_id(start: Start, tmp_path: pathlib.Path) -> None:
    first = start()
    assert await first.execute() == 0
    (tmp_path / "run" / "summary.json").unlink()  # as if it had not come to the end
    another(first)
    second = start()
    assert second.folder.run_id == first.folder.run_id
    assert await second.execute() == 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["attempt"] == 1


async def test_progress_is_one_line_now_and_then_without_a_terminal(
    start: Start, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("operators.progress.LINE_SECONDS", 0.0)
    await start(progress=True, steps="3", step_seconds="0.3").execute()
    shown = capsys.readouterr().out
    assert "step 2/3 · reward 0." in shown
    assert "\x1b" not in shown


KILLED = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from tests.test_local import FAST, Platform, Run, RunFolder, job, stand_in_children
with RunFolder(sys.argv[2], print) as folder:
    platform = Platform(local=True, cpus=2, folder=sys.argv[3])
    folder.claim(job(), platform)
    run = Run(job(), folder, platform, False, stand_in_children, FAST)
    asyncio.run(run.execute())
"""


async def test_nothing_remains_after_sigkill_and_the_next_run_waits_for_the_last_process(
    start: Start, tmp_path: pathlib.Path
) -> None:
    environment = os.environ | {"STAND_IN_TRAINER": "hang"}
    repository = str(pathlib.Path(__file__).parents[1])
    runner = subprocess.Popen(
        [sys.executable, "-c", KILLED, repository, str(tmp_path / "run"), str(tmp_path)], env=environment
    )
    try:
        await noted(tmp_path, "rank 0: hang")
        with pytest.raises(ValueError, match=rf"in use by another `miles run` \(process {runner.pid}\)"):
            start()
    finally:
        runner.kill()
        runner.wait()
    started = time.monotonic()
    run = await asyncio.to_thread(start)
    assert time.monotonic() - started < 50
    assert "trainer: checkpoint written" in notes(tmp_path), "SIGTERM came first"
    assert not processes_of(tmp_path / "run")
    assert await run.execute() == 0


async def test_a_complete_run_that_is_run_again_says_so_and_keeps_its_figures(
    start: Start, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run-id").write_text("earlier")
    (tmp_path / "run" / "summary.json").write_text('{"steps": 3, "samples_per_s": 99.5}')
    assert await start(rate="0").execute() == 0
    shown = capsys.readouterr().out
    assert "sums: complete already, nothing was trained; for more steps, raise spec.algorithm.totalSteps" in shown
    assert "99.50 samples/s" in shown


async def test_a_complete_run_that_is_run_again_as_it_was_starts_nothing_and_shows_the_kept_figures(
    start: Start, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = start()
    assert await first.execute() == 0
    kept = json.loads((tmp_path / "run" / "summary.json").read_text())
    kept |= {"duration_s": 90.0, "reward": {"first": 0.125, "last": 0.75}}
    (tmp_path / "run" / "summary.json").write_text(json.dumps(kept))
    before = notes(tmp_path)
    another(first)
    capsys.readouterr()
    second = start()
    assert await second.execute() == 0
    shown = capsys.readouterr().out
    assert notes(tmp_path) == before
    assert "goes on" not in shown
    assert "sums: complete already, nothing was trained; for more steps, raise spec.algorithm.totalSteps" in shown
    for words in ("3 of 3", "duration   1m 30s", "12.50 samples/s", "0.750 (from 0.125)", "miles report"):
        assert words in shown
    assert "GiB" not in shown
    another(second)
    assert await start(job(checkpoint={"everySteps": 2})).execute() == 0
    assert len(notes(tmp_path)) > len(before), "an edited job is run"


async def test_fewer_total_steps_than_are_done_are_said_in_words(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    fewer = {"type": "grpo", "totalSteps": 2, "promptsPerStep": 2, "groupSize": 4}
    assert await start(job(algorithm=fewer)).execute() == 0
    words = "complete already, nothing was trained: 3 steps are done, spec.algorithm.totalSteps is 2"
    assert words in capsys.readouterr().out


def test_a_summary_of_an_earlier_run_of_the_command_is_no_summary_of_this_one(tmp_path: pathlib.Path) -> None:
    (tmp_path / "summary.json").write_text('{"steps": 3}')
    with RunFolder(str(tmp_path), print) as folder:
        assert (folder.earlier, folder.summary()) == ({"steps": 3}, {})
        (tmp_path / "summary.json").write_text('{"steps": 4}')
        assert folder.summary() == {"steps": 4}


ALGORITHM = {"type": "grpo", "totalSteps": 3, "promptsPerStep": 2, "groupSize": 4}
DATA = {"sets": [{"generator": "reasoning-gym/chain_sum"}]}
OTHER_SETS = {"sets": [{"generator": "reasoning-gym/chain_sum", "limit": 5}]}


@pytest.mark.parametrize(
    ("changed", "field", "values"),
    [
        (job("other"), "metadata.name", 'got "other", but the run in .* has "sums"'),
        (job(model={"uri": "hf://org/other"}), "spec.model.uri", 'got "hf://org/other", but .* has "hf://org/tiny"'),
        (job(store={"uri": "file://./other"}), "spec.store.uri", "got .* has"),
        (job(algorithm=ALGORITHM | {"groupSize": 8}), "spec.algorithm.groupSize", "got (8|the default), .* has 4 "),
        (job(data=DATA | {"seed": 7}), "spec.data.seed", "got 7, .* has the default "),
        (job(data=OTHER_SETS), "spec.data.sets[0].limit", "got 5, .* has the default "),
        (job(trainer={"seed": 7}), "spec.trainer.seed", "got 7, .* has the default "),
    ],
)
def test_a_run_goes_on_only_with_the_fields_that_its_beginning_fixed(
    tmp_path: pathlib.Path, changed: RLJob, field: str, values: str
) -> None:
    claimed(tmp_path, job())
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=rf"^{re.escape(field)}: {values}.*; write what it has, or .*--run-dir$"):
        claimed(tmp_path, changed)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    "changed", [{"trainer": {"nodes": 2}}, {"algorithm": ALGORITHM | {"totalSteps": 9}}, {"rollout": {"replicas": 2}}]
)
def test_a_stopped_run_takes_the_edits_that_a_suspended_job_takes(
    tmp_path: pathlib.Path, changed: dict[str, Any]
) -> None:
    claimed(tmp_path, job())
    claimed(tmp_path, job(**changed))


async def test_a_job_that_was_refused_before_its_first_step_binds_nothing(start: Start, tmp_path: pathlib.Path) -> None:
    first = start(trainer="refuse")
    assert await first.execute() == 2
    again = start(job(model={"uri": "hf://org/other"}), trainer="complete")
    assert again.folder.run_id != first.folder.run_id, "what the refused job left in the store is not found again"
    assert await again.execute() == 0


def test_a_folder_of_a_job_that_was_refused_before_anything_started_is_gone(tmp_path: pathlib.Path) -> None:
    (tmp_path / "mine").write_text("kept")
    for path in (tmp_path, tmp_path / "runs" / "sums"):
        with RunFolder(str(path), print) as folder:
            folder.claim(job(), Platform(local=True))
            folder.next_attempt()
            folder.release()
        assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_who_waited_for_a_lock_that_a_refused_run_took_away_holds_the_one_that_counts(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunFolder(str(tmp_path / "run"), print) as refused:
        refused.claim(job(), Platform(local=True))
        (tmp_path / "run" / "lock").write_text("")  # whoever holds it cannot be seen
        waiting = RunFolder(str(tmp_path / "run"), print)
        monkeypatch.setattr("operators.runfolder.time.sleep", lambda seconds: end(refused))
        with waiting, pytest.raises(ValueError, match="in use by another `miles run`"):
            RunFolder(str(tmp_path / "run"), print).__enter__()
        refused.lock = os.open(os.devnull, os.O_RDONLY)


def end(refused: RunFolder) -> None:
    refused.release()
    os.close(refused.lock)


def test_a_run_that_goes_on_says_so_and_with_which_edits(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for wanted in (job(), job(), job(algorithm=ALGORITHM | {"learningRate": "1e-4"}, rollout={"replicas": 2})):
        claimed(tmp_path / "run", wanted)
    remedy = "to begin another, choose another folder with --run-dir or delete this one"
    edits = 'spec.algorithm.learningRate the default → "1e-4", spec.rollout.replicas the default → 2'
    assert capsys.readouterr().out.splitlines() == [
        f"the run in {tmp_path}/run goes on; {remedy}",
        f"the run in {tmp_path}/run goes on with {edits}; {remedy}",
    ]


async def test_a_refused_job_leaves_the_run_that_was_there_as_it_was(start: Start, tmp_path: pathlib.Path) -> None:
    first = start()
    assert await first.execute() == 0
    first.folder.__exit__(None, None, None)
    first.folder.lock = os.open(os.devnull, os.O_RDONLY)  # closed again by the fixture
    kept = {name: (tmp_path / "run" / name).read_bytes() for name in ("run-id", "rljob.json", "run.json")}
    assert await start(job(trainer={"nodes": 2}), trainer="refuse").execute() == 2
    assert kept == {name: (tmp_path / "run" / name).read_bytes() for name in kept}


def test_relative_uris_are_those_of_the_folder_that_the_job_lies_in(tmp_path: pathlib.Path) -> None:
    relative = job(store={"uri": "file://../store"})
    claimed(tmp_path / "run", relative, "/a/b")
    claimed(tmp_path / "run", job(store={"uri": "file:///a/store"}), "/c/d")
    with pytest.raises(ValueError, match=r'spec.store.uri: got "file:///c/store", but .* has "file:///a/store"'):
        claimed(tmp_path / "run", relative, "/c/d")


@pytest.mark.parametrize("place", ["/proc/x", "file", "file/below", "dangling", "no-run-id", "no-lock"])
def test_a_folder_that_cannot_be_a_runs_is_named_with_a_remedy(tmp_path: pathlib.Path, place: str) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "no-run-id" / "run-id").mkdir(parents=True)
    (tmp_path / "no-lock" / "lock").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=rf"so no run can be in .*{place}; choose another folder with --run-dir$"):
        claimed(tmp_path / place, job())
    assert sorted(tmp_path.rglob("*")) == before


def test_an_empty_name_of_a_folder_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        local.parse(["job.yaml", "--run-dir", ""])
    assert "argument --run-dir: got an empty text" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["rljob.json", "run-id"])
def test_a_run_that_has_lost_what_says_which_it_is_does_not_go_on(tmp_path: pathlib.Path, name: str) -> None:
    with RunFolder(str(tmp_path), print) as folder:
        folder.claim(job(), Platform(local=True))
        folder.next_attempt()
    (tmp_path / name).unlink()
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=rf"{re.escape(name)}.*restore.*"):
        claimed(tmp_path, job(model={"uri": "hf://org/other"}))
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["run.json", "rljob.json", "attempt", "summary.json", "metrics.jsonl"])
def test_a_folder_with_files_of_somebody_else_is_left_as_it_is(tmp_path: pathlib.Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(ValueError, match=rf"has no run-id but {re.escape(name)}, .* --run-dir"):
        claimed(tmp_path, job())
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [(name, "mine")]


@pytest.mark.parametrize(
    "text", ["xx", "[]", "", '{"a": ' * 5000, "{}", '{"metadata": {"labels": [1]}}', '{"spec": []}']
)
def test_a_kept_job_that_is_unreadable_is_named_with_a_remedy(tmp_path: pathlib.Path, text: str) -> None:
    (tmp_path / "run-id").write_text("earlier")
    (tmp_path / "rljob.json").write_text(text)
    words = r"rljob\.json: not the JSON of a job.*; restore the file, or .* --run-dir$"
    with pytest.raises(ValueError, match=words):
        claimed(tmp_path, job())
    assert (tmp_path / "rljob.json").read_text() == text


@pytest.mark.parametrize("text", ["", "one", "²", "-1", "9" * 5000])
def test_an_attempt_that_is_no_number_is_named_with_a_remedy(tmp_path: pathlib.Path, text: str) -> None:
    (tmp_path / "attempt").write_text(text)
    with RunFolder(str(tmp_path), print) as folder, pytest.raises(ValueError, match=r"attempt: got .* --run-dir$"):
        folder.next_attempt()


@pytest.mark.parametrize("text", ["", "../other", "two words"])
def test_a_run_id_that_is_none_is_named_with_a_remedy(tmp_path: pathlib.Path, text: str) -> None:
    (tmp_path / "run-id").write_text(text)
    with pytest.raises(ValueError, match=r"run-id: got .* --run-dir$"), RunFolder(str(tmp_path), print):
        pass


def test_an_attempt_number_is_never_used_twice(tmp_path: pathlib.Path) -> None:
    for expected in (0, 1, 2):
        with RunFolder(str(tmp_path), print) as folder:
            folder.claim(job(), Platform(local=True))
            assert folder.next_attempt() == expected


@pytest.mark.parametrize(
    ("age", "steps", "since_step", "expected"),
    [
        (100, 0, 100, None),
        (1801, 0, 1801, "no step after 30m 1s (runPolicy.startupDeadlineSeconds)"),
        (1801, 1, 1700, None),
        (9000, 1, 3601, "no step for 1h 0m (runPolicy.progressDeadlineSeconds)"),
        (86401, 50, 1, "not complete after 24h 0m (runPolicy.activeDeadlineSeconds)"),
    ],
)
def test_deadlines(age: float, steps: int, since_step: float, expected: str | None) -> None:
    policy = RunPolicy.model_validate({"activeDeadlineSeconds": 86400})
    assert overdue(policy, age, steps, since_step) == expected


def test_main_refuses_a_bad_file_in_one_line(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert local.main([str(tmp_path / "none.yaml")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_main_names_missing_secrets(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    wanted = job(store={"uri": "s3://bucket/prefix", "secretRef": {"name": "team"}})
    file = tmp_path / "job.yaml"
    file.write_text(wanted.model_dump_json(by_alias=True, exclude_unset=True))
    assert local.main([str(file), "--run-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "AWS_ACCESS_KEY_ID (from secret team), AWS_SECRET_ACCESS_KEY (from secret team)" in error


def test_local_runs_without_torch_vllm_or_the_data_plane() -> None:
    code = "import sys, operators.local; print(*sorted(name for name in sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "vllm", "transformers", "numpy", "kopf", "kubernetes"} & set(loaded)
    ours = {name for name in loaded if name.startswith("pipeline.")}
    registries = {
        f"pipeline.{part}{end}" for part in ("algorithms", "environments", "rewards") for end in ("", ".registry")
    }
    assert ours <= registries | {"pipeline.config", "pipeline.where"}
