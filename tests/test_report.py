import asyncio
import collections
import contextlib
import dataclasses
import io
import json
import math
import os
import pathlib
import random
import re
import sys

import numpy as np
import pytest

from pipeline import codec, evaluation, metrics
from pipeline.config import (
    AlgorithmConfig,
    DataConfig,
    ModelConfig,
    OutputConfig,
    PromptSetConfig,
    RewardConfig,
    RunConfig,
    StoreConfig,
)
from pipeline.experience import Rollout, RolloutGroup, Turn
from pipeline.messages import evaluation_key, shard_key
from pipeline.metrics import Recorder
from pipeline.report import __main__ as command_line
from pipeline.report import configuration as report_configuration
from pipeline.report import curves, document, evaluations, history, rollouts, source, summary
from pipeline.storage import Storage, open_storage
from pipeline.trainer_log import Drop, GroupRef, Plan, Stop, TrainerLog
from pipeline.versions import Version
from tests import browser
from tests.conftest import copy

HOSTILE = "</script><script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\"><!--"
STEPS, PROMPTS, SAMPLES = 12, 3, 4


def configuration(folder: pathlib.Path, **changes: object) -> RunConfig:
    return RunConfig(
        name="sums",
        run_id="run-1",
        model=ModelConfig(uri="hf://org/tiny", path="/models/tiny"),
        data=DataConfig(sets=[PromptSetConfig(name="sums", uri="https://user:secret@host/sums.jsonl?token=concealed")]),
        rewards=[RewardConfig(name="correct", library="generator"), RewardConfig(name="brief", library="length")],
        algorithm=AlgorithmConfig(type="grpo", total_steps=STEPS, prompts_per_step=PROMPTS, group_size=SAMPLES),
        store=StoreConfig(uri=(folder / "store").as_uri()),
        output=OutputConfig(uri=(folder / "model").as_uri()),
    ).model_copy(update=changes)


def group(index: int, version: Version, rewards: list[float | None], response: str = "7") -> RolloutGroup:
    return RolloutGroup(
        index=index,
        set="sums",
        prompt=f"What is {index} + 1?",
        answer=str(index + 1),
        prompt_ids=[1, 2, 3],
        rollouts=[
            Rollout(
                completion_ids=[5, 6],
                logprobs=[-0.5, -1.5],
                completion=f"{response} ({number})",
                finish_reason="stop",
                reward=reward,
                rewards={} if reward is None else {"correct": reward},
                invalid="correct: timed out" if reward is None else None,
                spans=[(0, version)],
            )
            for number, reward in enumerate(rewards)
        ],
        created=1.7e9,
    )


EPISODES = metrics.of_turns(np.array([3, 1]), np.array([40, 0]))


def row(step: int, chance: random.Random) -> dict[str, float]:
    learnt = step / STEPS
    return {
        "reward/mean": learnt,
        "reward/correct/mean": learnt + chance.gauss(0, 0.02),
        "reward/brief/mean": -0.1,
        "response_length/mean": 20 - 10 * learnt,
        "actor/grad_norm": abs(chance.gauss(1, 0.2)),
        "mismatch/kl": 1e-6 if step != 5 else math.nan,
        "async/staleness_mean": 0.5,
        "async/staleness_max": 1.0,
        "async/wait_for_batch_s": 1.0,
        "perf/forward_backward_s": 2.0,
        "perf/step_s": 4.0,
        "perf/samples_per_s": 3.0,
        "perf/tokens_per_s": 40.0,
        **EPISODES,
        "my/own": float(step),
    }


async def trained(storage: Storage, steps: int, response: str = "7") -> None:
    """A finished run in `storage`, as worker and trainer leave it."""
    chance, log, recorder = random.Random(0), TrainerLog(storage), Recorder(storage, None)
    await log.take_over()
    for step in range(1, steps + 1):
        groups = [
            group(step * PROMPTS + number, Version(1, max(0, step - 2)), [0.0, 1.0, 1.0, None], response)
            for number in range(PROMPTS)
        ]
        key, data = shard_key("01W", step), codec.encode(groups)
        await storage.create(key, data)
        references = [
            GroupRef(each.index, key, "", place * SAMPLES, (place + 1) * SAMPLES) for place, each in enumerate(groups)
        ]
        drops = (Drop(900, "stale"),) if step == 2 else ()
        await log.append(Plan(step, 1, tuple(references), drops))
        await recorder.record(Version(1, step), row(step, chance), 1.7e9 + 4 * step)
    await log.append(Stop(1, "complete", steps))


async def evaluated(storage: Storage, step: int, scores: list[float]) -> None:
    groups = [group(number, Version(1, step), [score, score]) for number, score in enumerate(scores)]
    result = {"step": step, "version": [1, step], "sets": {"held-out": evaluation.summary(groups, 2, "correct")}}
    await storage.create(evaluation_key(step).removesuffix(".json") + ".parquet", codec.encode(groups))
    await storage.create(evaluation_key(step), json.dumps(result).encode())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A finished run."""
    config = configuration(tmp_path_factory.mktemp("finished"))

    async def fill() -> None:
        storage = open_storage(config.store.uri)
        await storage.create("run.json", b"{}")
        await trained(storage, STEPS, HOSTILE)
        await evaluated(storage, 0, [0.0] * 30 + [1.0] * 2)
        await evaluated(storage, STEPS, [0.0] * 4 + [1.0] * 28)
        manifest = {"run_id": config.run_id, "version": [1, STEPS]}
        await open_storage(config.output.uri).put("MANIFEST.json", json.dumps(manifest).encode())

    asyncio.run(fill())
    return config


@pytest.fixture
def run_folder(finished: RunConfig, tmp_path: pathlib.Path) -> pathlib.Path:
    """What `miles run` leaves of it."""
    config = configuration(tmp_path)
    (tmp_path / "run.json").write_text(config.model_dump_json())

    async def fill() -> None:
        await copy(finished.store.uri, config.store.uri)
        await copy(finished.output.uri, config.output.uri)
        await open_storage(config.store.uri).create("attempts/0.json", config.model_dump_json().encode())

    asyncio.run(fill())
    return tmp_path


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="run">(.*?)</script>', page, re.S)[1])


def report(folder: pathlib.Path) -> str:
    return asyncio.run(document.build(str(folder)))


def test_a_page_holds_the_runs_metrics_evaluations_rollouts_and_configuration(run_folder):
    data = data_of(report(run_folder))
    assert data["status"]["label"] == "Complete"
    assert (data["step"], data["steps"]) == (STEPS, list(range(1, STEPS + 1)))
    assert data["drops"] == [["stale", 1]]
    assert data["delivered"]["detail"] == f"step {STEPS} (final)"
    charts = {chart["title"]: chart for section in data["charts"] for chart in section["charts"]}
    assert [series["name"] for series in charts["Reward"]["series"]] == ["mean", "brief", "correct"]
    assert charts["Where a step's time goes"]["series"][-1] == {"name": "other", "values": [1.0] * STEPS}
    assert charts["Turns of an episode"]["series"][1] == {"name": "most", "values": [3.0] * STEPS}
    assert charts["What the environment says"]["series"][0]["values"] == [20.0] * STEPS
    assert charts["Staleness"]["bound"]["value"] == 1
    assert [chart["title"] for chart in data["others"]] == ["my/own"]
    assert len(data["rollouts"]["trained"]) == STEPS
    assert [(each["of"], len(each["groups"])) for each in data["rollouts"]["trained"]] == [(PROMPTS, PROMPTS)] * STEPS
    assert [(each["of"], len(each["groups"])) for each in data["rollouts"]["evaluated"]] == [(32, 8)] * 2


def test_a_step_that_was_trained_again_counts_once_with_the_row_of_the_higher_term(run_folder):
    storage = open_storage((run_folder / "store").as_uri())
    asyncio.run(Recorder(storage, None).record(Version(2, STEPS), {"reward/mean": 0.25}, 1.7e9 + 99))
    data = data_of(report(run_folder))
    assert data["steps"] == list(range(1, STEPS + 1))
    assert data["charts"][0]["charts"][1]["series"][0]["values"][-1] == 0.25


@pytest.mark.parametrize(("parts", "shown"), [(["a"], ["mean"]), (["a", "b/c"], ["mean", "a", "b/c"])])
def test_reward_functions_have_curves_of_their_own_where_there_are_several(parts, shown):
    metrics = {1: {"reward/mean": 1.0, **{f"reward/{name}/mean": 1.0 for name in parts}}}
    past = history.History({}, [], metrics, {}, {}, collections.Counter(), 0, None, 1, None, [])
    [section] = curves.sections(configuration(pathlib.Path("/")), past)
    assert [series["name"] for series in section["charts"][0]["series"]] == shown


def test_numbers_that_are_not_finite_are_gaps_and_the_page_stays_json(run_folder):
    charts = {chart["title"]: chart for section in data_of(report(run_folder))["charts"] for chart in section["charts"]}
    assert charts["KL of sampler and trainer"]["series"][0]["values"][4] is None
    assert (charts["KL of sampler and trainer"]["gaps"], charts["Reward"]["gaps"]) == (1, 0)


def test_the_gain_is_compared_prompt_by_prompt_with_its_interval(run_folder):
    [change] = data_of(report(run_folder))["evaluations"]
    assert (change["before"], change["after"]) == (2 / 32, 28 / 32)
    expected = evaluation.compare([0.0] * 30 + [1.0] * 2, [0.0] * 4 + [1.0] * 28)
    assert change["change"] == pytest.approx(expected[0])
    assert change["error"] == pytest.approx(expected[0] - expected[1])


def test_one_evaluation_alone_claims_no_change(run_folder):
    (run_folder / "store" / evaluation_key(STEPS)).unlink()
    [change] = data_of(report(run_folder))["evaluations"]
    assert change["before"] is None
    assert change["after"] == 2 / 32


def test_wilsons_interval_stays_inside_zero_and_one():
    assert evaluations.wilson(0.5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert evaluations.wilson(1.0, 10)[1] == 1.0
    assert 0.6 < evaluations.wilson(1.0, 10)[0] < 1.0


def test_shown_advantages_are_those_of_the_algorithm_over_the_whole_step(run_folder):
    from pipeline.algorithms import grpo
    from pipeline.algorithms.samples import Samples
    from pipeline.config import AlgorithmConfig

    samples = data_of(report(run_folder))["rollouts"]["trained"][3]["groups"][0]["samples"]
    rewards, valid = np.array([0.0, 1.0, 1.0, np.nan]), np.array([True, True, True, False])
    expected = grpo.advantages(
        Samples(rewards, valid, np.zeros(4, int), np.ones(4, int)),
        AlgorithmConfig(type="grpo", total_steps=1, prompts_per_step=1, group_size=4),
    )
    assert [sample["advantage"] for sample in samples] == [*map(pytest.approx, expected[:3]), None]
    assert samples[3]["invalid"] == "correct: timed out"


def test_staleness_is_the_version_before_the_step_minus_the_oldest_that_made_a_token(run_folder):
    steps = data_of(report(run_folder))["rollouts"]["trained"]
    assert [steps[0]["groups"][0]["samples"][0][name] for name in ("version", "staleness")] == ["t1-s0", 0]
    assert [steps[5]["groups"][0]["samples"][0][name] for name in ("version", "staleness")] == ["t1-s4", 1]


def test_credentials_in_urls_do_not_reach_the_page(run_folder):
    page = report(run_folder)
    assert "secret" not in page
    assert "concealed" not in page
    cards = {card["title"]: card["rows"] for card in data_of(page)["configuration"]}
    assert ["uri", "https://…@host/sums.jsonl?token=…", True] in cards["data.sets: sums"]


def test_the_runs_text_cannot_end_the_data_block_and_reads_back_unchanged(run_folder):
    page = report(run_folder)
    assert "<img" not in page
    assert page.count("</script>") == 2
    sample = data_of(page)["rollouts"]["trained"][0]["groups"][0]["samples"][0]
    assert sample["turns"] == [[False, f"{HOSTILE} (0)"]]


def test_what_an_environment_said_is_told_apart_and_counts_in_no_figure():
    turns = [Turn(0, False, "left"), Turn(2, True, "a wall"), Turn(4, False, "right")]
    (plain,) = group(0, Version(1, 0), [1.0]).rollouts
    walked = dataclasses.replace(
        plain, completion_ids=[5, 6, 7, 8, 9], logprobs=[-0.5, -1.5, math.nan, math.nan, -4.0], turns=turns
    )
    shown = rollouts.sample(walked, 100)
    assert shown["turns"] == [[False, "left"], [True, "a wall"], [False, "right"]]
    assert (shown["tokens"], shown["logprob"]) == (3, -2.0)
    chosen = [(0, 1, [(dataclasses.replace(group(0, Version(1, 0), []), rollouts=[walked]), [None])])]
    assert rollouts.characters(chosen, 100) == len("What is 0 + 1?" + "left" + "a wall" + "right")


@pytest.mark.parametrize("text", ["\ud800 lone", "\u2028", "\x00\x1b[31m", "-->", "&lt;", "\\u003c", "$title ${data}"])
def test_any_text_survives_the_way_into_the_page(text):
    page = document.page(text, {"text": text})
    page.encode("utf-8")
    assert data_of(page)["text"] == text.replace("\ud800", "\ufffd")


def test_a_long_run_is_thinned_and_the_page_says_so(tmp_path):
    storage = open_storage(tmp_path.as_uri())

    async def build() -> history.History:
        await trained(storage, rollouts.STEPS + 5)
        return await history.read(storage, history.Bounds(metrics=10, records=20))

    past = asyncio.run(build())
    assert list(past.metrics)[:: len(past.metrics) - 1] == [1, rollouts.STEPS + 5]
    assert len(past.metrics) == 10
    assert past.omissions == [
        f"Curves show 10 of {rollouts.STEPS + 5} steps, evenly spread.",
        f"Drops are counted over the last 20 of {rollouts.STEPS + 7} records of the trainer's log.",
    ]


def test_long_texts_are_cut_in_the_middle_and_say_by_how_much():
    text = rollouts.shortened("a" * 900 + "b" * 300, 400)
    assert text == "a" * 300 + "\n… 800 characters left out …\n" + "b" * 100


def test_a_shard_that_is_gone_or_damaged_leaves_a_gap_and_a_sentence(run_folder):
    (run_folder / "store" / shard_key("01W", 3)).unlink()
    (run_folder / "store" / shard_key("01W", 4)).write_bytes(b"PAR1 torn")
    data = data_of(report(run_folder))
    assert [each["step"] for each in data["rollouts"]["trained"]] == [1, 2, *range(5, STEPS + 1)]
    assert "The rollouts of 2 of these steps are no longer in the store." in data["omissions"]


def test_without_torch_the_page_lacks_advantages_and_says_why(run_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "pipeline.algorithms.grpo", None)
    data = data_of(report(run_folder))
    assert data["rollouts"]["trained"][0]["groups"][0]["samples"][0]["advantage"] is None
    assert (
        "Advantages are missing: their module needs a package that is not installed here (extra `trainer`)."
        in (data["omissions"])
    )


def test_a_run_that_has_trained_nothing_yet_has_a_page(tmp_path):
    config = configuration(tmp_path)
    (tmp_path / "run.json").write_text(config.model_dump_json())
    (tmp_path / "store").mkdir()
    data = data_of(report(tmp_path))
    assert data["status"]["label"] == "Starting"
    assert data["charts"] == []


@pytest.mark.parametrize(
    ("reason", "label"),
    [
        (None, "Starting"),
        ("the store is full", "Failed"),
        ("none of the first 2 groups has a sample that can be trained: reward correct: timed out", "Failed"),
    ],
)
def test_what_a_run_without_a_step_has_dropped_is_counted_with_its_reason(tmp_path, reason, label):
    config = configuration(tmp_path)
    (tmp_path / "run.json").write_text(config.model_dump_json())

    async def fill() -> None:
        storage, log = open_storage(config.store.uri), TrainerLog(open_storage(config.store.uri))
        await log.take_over()
        groups = [group(index, Version(1, 0), rewards) for index, rewards in enumerate([[None] * 2, [None, 1.0]])]
        await storage.create(shard_key("01W", 0), codec.encode(groups))
        if reason:
            await log.append(Stop(1, reason, 0))

    asyncio.run(fill())
    data = data_of(report(tmp_path))
    assert data["drops"] == [["invalid", 1]]
    assert data["status"]["label"] == label
    assert "correct: timed out" in data["status"]["detail"]
    assert (reason or "") in data["status"]["detail"]
    assert data["status"]["detail"].count("timed out") == 1


def test_a_prefix_in_a_store_is_a_run_too(run_folder):
    storage, config, uri = asyncio.run(source.open_run((run_folder / "store").as_uri()))
    assert (config.name, uri) == ("sums", (run_folder / "store").as_uri())
    assert asyncio.run(storage.head("run.json")) is not None


def test_edits_between_attempts_are_listed_by_field(tmp_path):
    before = configuration(tmp_path)
    after = configuration(tmp_path, attempt=1, algorithm=before.algorithm.model_copy(update={"learning_rate": 5e-6}))
    past = history.History({}, [(0, before), (1, after)], {}, {}, {}, collections.Counter(), 0, None, 1, None, [])
    assert summary.of(after, past, None)["attempts"] == [(1, "algorithm.learningRate", "1e-06", "5e-06")]


@pytest.mark.parametrize("sample", sorted(pathlib.Path("manifests/samples").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_configuration_has_the_names_of_the_rljob(sample):
    from operators import manifest, resolve, schema

    job = manifest.load_one(str(sample))
    rows = list(report_configuration.fields(resolve.run_config(job, "run-1", resolve.Platform(local=True))))
    assert len(rows) > 30
    for path, *_ in rows:
        top = () if path.startswith("metadata.") else ("spec",)
        assert schema.at((*top, *path.split("."))) is not None, f"{path} is no field of an RLJob: name it in NAMES"
    assert ("store.uri", "", resolve.address(job.spec.store.uri, "", resolve.Platform(local=True)), True) in rows


def test_the_configuration_of_each_list_item_stands_under_its_name(tmp_path):
    cards = {card["title"]: card["rows"] for card in report_configuration.cards(configuration(tmp_path))}
    assert ("prompt", "prompt", False) in cards["data.sets.fields: sums"]
    assert ("library", "length", True) in cards["rewards: brief"]
    assert ("totalSteps", str(STEPS), True) in cards["algorithm"]
    assert "runId" not in str(cards)


def test_what_the_rljob_sets_is_shown_in_its_own_words(tmp_path):
    found = {"algorithm.learningRate": "1e-3", "trainer.nodes": 1, "trainer.template.env[0].name": "TOKEN"}
    found |= {"data.sets[0].uri": "https://user:concealed@host/sums.jsonl"}
    assert report_configuration.given(configuration(tmp_path, given=found)) == [
        {"title": "algorithm", "rows": [("learningRate", "1e-3", True)]},
        {"title": "trainer", "rows": [("nodes", "1", True)]},
        {"title": "trainer.template.env[0]", "rows": [("name", "TOKEN", True)]},
        {"title": "data.sets[0]", "rows": [("uri", "https://…@host/sums.jsonl", True)]},
    ]


@pytest.mark.parametrize("run", ["nowhere", "file:///nowhere/at/all", "ftp://host/run", "."])
def test_what_is_no_run_is_refused_in_one_line(tmp_path, run, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refused(run).startswith("miles report: ")
    assert not list(tmp_path.iterdir())


def refused(run: pathlib.Path | str) -> str:
    """The one line that a report of `run` ends with."""
    said = io.StringIO()
    page = pathlib.Path("page.html") if isinstance(run, str) else run / "page.html"
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        patch.setattr(sys, "argv", ["miles report", str(run), "-o", str(page)])
        assert command_line.main() == 2
    assert not page.exists()
    (line,) = said.getvalue().splitlines()
    return line


def test_a_store_that_is_gone_is_said_to_be_and_nothing_is_made(tmp_path):
    (tmp_path / "run.json").write_text(configuration(tmp_path).model_dump_json())
    assert f"its store {(tmp_path / 'store').as_uri()} is not there" in refused(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("content", ["", "xx", "[]", "{}", '{"name": 5}'])
def test_a_torn_run_json_is_named(tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    assert f"{tmp_path}/run.json is no configuration of a run" in refused(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]


FIRST_SCORES, FIRST_ROW = evaluation_key(0), f"metrics/v1/{Version(1, 1)}.json"


@pytest.mark.parametrize(
    ("key", "content"),
    [
        (f"trainer/log/{2:020d}.json", "xx"),
        (f"trainer/log/{2:020d}.json", ""),
        (f"trainer/log/{2:020d}.json", '{"type": "stop", "term": 1, "reason": "complete", "step": "x"}'),
        ("run.json", ""),
        ("attempts/0.json", "{}"),
        (FIRST_ROW, "[]"),
        (FIRST_SCORES, "{}"),
        (FIRST_SCORES, '{"sets": [1]}'),
        (FIRST_SCORES, '{"sets": {"x": "y"}}'),
        (FIRST_SCORES, '{"sets": {"x": {"samples": 1, "count": 1, "avg@1": "high", "per_prompt": []}}}'),
    ],
)
def test_a_torn_file_is_left_out_and_named_and_the_rest_is_shown(run_folder, key, content):
    (run_folder / "store" / key).write_text(content)
    data = data_of(report(run_folder))
    assert f"{key} is damaged, or not what it should be, and is left out." in data["omissions"]
    assert data["step"] == STEPS
    assert data["charts"]


@pytest.mark.parametrize("content", ["", "[]", '{"run_id": "run-1"}', '{"run_id": "run-1", "version": 5}'])
def test_a_manifest_that_names_no_version_counts_as_not_delivered(run_folder, content):
    (run_folder / "model" / "MANIFEST.json").write_text(content)
    data = data_of(report(run_folder))
    assert data["delivered"]["detail"] == "not delivered yet"
    assert any("MANIFEST.json" in sentence for sentence in data["omissions"])


def test_files_that_are_none_of_the_runs_own_are_not_looked_at(run_folder):
    before = data_of(report(run_folder))
    store = run_folder / "store"
    strays = ("metrics/v1/.DS_Store", "trainer/log/.DS_Store", "attempts/0 copy.json", "evaluations/v1/best.json")
    for name in strays:
        (store / name).write_text("stray")
    (store / "attempts" / "notes 1.json").write_text(configuration(run_folder, name="other").model_dump_json())
    after = data_of(report(run_folder))
    in_store = data_of(asyncio.run(document.build(store.as_uri())))
    assert after | {"generated": ""} == before | {"generated": ""}
    assert in_store["name"] == "sums"


@pytest.mark.parametrize("name", ["time", "perf/step_s", "async/wait_for_batch_s", "perf/tokens", "reward/mean"])
def test_a_metric_that_is_no_number_is_a_gap(run_folder, name):
    file = run_folder / "store" / FIRST_ROW
    file.write_text(json.dumps(json.loads(file.read_text()) | {"perf/samples": 4, "perf/tokens": 9, name: "soon"}))
    assert data_of(report(run_folder))["step"] == STEPS


def test_a_run_of_an_algorithm_that_this_release_does_not_know_lacks_only_advantages(tmp_path):
    config = configuration(tmp_path)
    config = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"type": "future"})})
    (tmp_path / "run.json").write_text(config.model_dump_json())
    asyncio.run(trained(open_storage(config.store.uri), 2))
    data = data_of(report(tmp_path))
    assert "Advantages are missing: this release does not know the algorithm future." in data["omissions"]
    assert len(data["rollouts"]["trained"]) == 2


needs_browser = pytest.mark.skipif(
    browser.executable() is None and not os.environ.get("CI"), reason="no Chromium: apt-get install chromium"
)


@pytest.fixture
def page_file(run_folder: pathlib.Path) -> pathlib.Path:
    file = run_folder / "report.html"
    file.write_text(report(run_folder), encoding="utf-8")
    return file


LONE = """[...document.querySelectorAll('.charts')].map(grid => [grid, ...[...grid.children].slice(-2)])
    .filter(([, one, other]) => other && other.offsetTop > one.offsetTop)
    .map(([grid, , other]) => ({card: other.offsetWidth, grid: grid.offsetWidth}))"""
"""Widths of the charts that have a row to themselves, and of their rows."""


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(1400, False), (1400, True), (390, False), (390, True)])
async def test_the_page_draws_its_curves_in_a_browser_without_errors_or_network(page_file, tmp_path, width, dark):
    async with browser.page(page_file.as_uri(), width=width, dark=dark) as page:
        assert page.errors == []
        assert page.requests == [page_file.as_uri()]
        assert await page.evaluate("document.title") == "sums"
        curves = await page.evaluate("[...document.querySelectorAll('.curve')].map(path => path.getTotalLength())")
        assert len(curves) > 10
        assert min(curves) > width / 10
        points = "[...document.querySelectorAll('.curve')].map(path => path.getAttribute('d').split(/[ML]/).length - 1)"
        assert max(await page.evaluate(points)) == STEPS
        assert await page.evaluate("document.documentElement.scrollWidth") == width
        assert await page.evaluate(f"{LONE}.every(({{card, grid}}) => Math.abs(card - grid) < 2)")
        assert "1 of 12 steps have no value" in await page.evaluate("document.querySelector('main').textContent")
        assert "NaN" not in await page.evaluate("document.querySelector('main').innerHTML")
        await page.screenshot(tmp_path / "page.png")
    assert brightness(tmp_path / "page.png") < 80 if dark else brightness(tmp_path / "page.png") > 200


def brightness(image: pathlib.Path) -> float:
    """Mean of all colour channels, 0 to 255."""
    from PIL import Image

    return float(np.asarray(Image.open(image).convert("L")).mean())


@needs_browser
@pytest.mark.slow
async def test_hostile_text_is_shown_as_text(page_file):
    async with browser.page(page_file.as_uri()) as page:
        texts = await page.evaluate("[...document.querySelectorAll('.sample .text')].map(node => node.textContent)")
        assert f"{HOSTILE} (0)" in texts
        assert await page.evaluate("document.querySelectorAll('main img').length") == 0
        assert page.errors == []


@needs_browser
@pytest.mark.slow
async def test_pointing_at_a_curve_shows_that_steps_values_and_a_click_opens_its_rollouts(page_file):
    async with browser.page(page_file.as_uri(), height=1600) as page:
        cards = "[...document.querySelectorAll('.charts .card')]"
        reward = f"{cards}.find(card => card.querySelector('h4').firstChild.data === 'Reward')"
        chart = f"{reward}.querySelector('svg').getBoundingClientRect()"
        box = f"(box => [box.left, box.top, box.width, box.height])({chart})"
        left, top, width, height = await page.evaluate(box)
        await page.move(left + width / 2, top + height / 2)
        legend = await page.evaluate(f"{reward}.querySelector('.legend').textContent")
        step = int(re.search(r"step (\d+)", legend)[1])
        assert 0 < step < STEPS
        assert f"mean {step / STEPS:.3g} " in legend.replace("brief", " brief") + " "
        await page.click(left + width / 2, top + height / 2)
        assert (
            await page.evaluate("document.querySelector('output:not(#smoothing-value)').textContent") == f"step {step}"
        )
        assert page.errors == []


@needs_browser
@pytest.mark.slow
async def test_evaluated_rollouts_and_a_search_can_be_chosen(page_file):
    async with browser.page(page_file.as_uri()) as page:
        shown = "document.querySelector('output:not(#smoothing-value)').textContent"
        assert await page.evaluate(shown) == f"step {STEPS}"
        choose = "(select => { select.value = 'evaluated'; select.dispatchEvent(new Event('change')) })"
        await page.evaluate(f"{choose}(document.querySelector('.controls select'))")
        assert await page.evaluate(shown) == f"step {STEPS}, 8 of 32 prompts"
        assert "What is 0 + 1?" in await page.evaluate("document.querySelector('.group').textContent")
        search = "(input => { input.value = '(1)'; input.dispatchEvent(new Event('input')) })"
        await page.evaluate(f"{search}(document.querySelector('input[type=search]'))")
        texts = await page.evaluate("[...document.querySelectorAll('.sample .text')].map(node => node.textContent)")
        assert set(texts) == {"7 (1)"}
