"""checkpoint.resumeFrom: a run begins with the weights and the optimizer of another one, or says why it cannot."""

import asyncio
import json
import pathlib
import shutil
from unittest.mock import AsyncMock

import pytest
import torch

from pipeline import checkpoint, launch, origin, termination
from pipeline.lead import Lead
from pipeline.learner import Learner
from pipeline.storage import StorageError, Unavailable
from pipeline.trainer_log import Plan
from pipeline.versions import Version
from tests import models
from tests.test_trainer import (  # fmt: skip
    CPU,
    PPO,
    Killed,
    assert_same,
    configure,
    launched,
    listed,
    records,
    storage_of,
    train,
    trained,
    worker,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # one rank
RUN = "s3://team-a/miles/default/sums/3f0c"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    models.tiny(str(folder), layers=2, hidden=64)
    return folder


@pytest.fixture(scope="module")
def first(tmp_path_factory, tiny):
    """(configuration, trained tensors) of a run of four steps, with checkpoints of steps 2 and 4."""
    torch.set_num_threads(1)
    config = configure(tmp_path_factory.mktemp("first"), tiny, "first", algorithm__total_steps=4)
    asyncio.run(launch.record(storage_of(config), config))
    with worker(config):
        return config, trained(train(config))


def second(tmp_path, tiny, resume_from, **changes):
    wanted = {"checkpoint__resume_from": resume_from, "algorithm__total_steps": 1, "checkpoint__keep_last": 9}
    return configure(tmp_path, tiny, "second", **{**wanted, **changes})


def files(config):
    folder = pathlib.Path(config.store.uri.removeprefix("file://"))
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def at_step(config, step):
    """What this run's own checkpoint of that step holds."""
    storage, learner = storage_of(config), Learner(config, CPU)
    found = [each for each in asyncio.run(checkpoint.newest(storage)) if each.version.step == step]
    assert checkpoint.load(storage, asyncio.run, found, learner.tensors())
    return learner.tensors()


@pytest.mark.parametrize(
    ("uri", "prefix", "version"),
    [
        (RUN, RUN, None),
        (f"{RUN}/", RUN, None),
        (f"{RUN}/checkpoints", RUN, None),
        (f"{RUN}/checkpoints//", RUN, None),
        (f"{RUN}/checkpoints/{Version(2, 400)}", RUN, Version(2, 400)),
        (f"{RUN}/checkpoints/{Version(2, 400)}/", RUN, Version(2, 400)),
        ("s3://checkpoints/a", "s3://checkpoints/a", None),
        ("file:///srv/checkpoints/run", "file:///srv/checkpoints/run", None),
        ("s3://team-a/miles/default/checkpoints/3f0c/checkpoints", "s3://team-a/miles/default/checkpoints/3f0c", None),
    ],
)
def test_a_uri_names_a_run_or_one_of_its_checkpoints(uri, prefix, version):
    assert origin.parse(uri) == (prefix, version)


def test_the_other_runs_folder_is_opened_for_reading_alone(tmp_path, tiny):
    config = second(tmp_path, tiny, tmp_path.as_uri())
    origin.store(config)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("below", ["", "/checkpoints", f"/checkpoints/{Version(1, 4)}"])
def test_step_0_has_the_weights_and_the_optimizer_of_the_other_run_which_is_only_read(tmp_path, tiny, first, below):
    there, tensors = first
    before = files(there)
    config = second(tmp_path, tiny, there.store.uri + below)
    with worker(config):
        loop = train(config)
    assert_same(at_step(config, 0), tensors)
    assert loop.version == Version(1, 1)
    plans = [record for record in records(config) if isinstance(record, Plan)]
    assert [(plan.step, sorted(group.index for group in plan.groups)) for plan in plans] == [(1, [0, 1])]
    weights = listed(config, "weights")
    assert json.loads(weights[f"weights/{Version(1, 0)}/MANIFEST.json"])["kind"] == "adapter"
    assert files(there) == before


def test_an_exact_checkpoint_is_taken_though_there_is_a_newer_one(tmp_path, tiny, first):
    config = second(tmp_path, tiny, f"{first[0].store.uri}/checkpoints/{Version(1, 2)}")
    with worker(config):
        train(config)
    assert_same(at_step(config, 0), at_step(first[0], 2))


def test_after_a_crash_in_the_first_step_the_other_run_is_needed_no_more(tmp_path, tiny, first, monkeypatch):
    copy = tmp_path / "copy"
    shutil.copytree(first[0].store.uri.removeprefix("file://"), copy)
    config = second(tmp_path, tiny, f"file://{copy}")

    async def killed(*_):
        raise Killed

    with worker(config):
        with monkeypatch.context() as patch:
            patch.setattr(Lead, "next_plan", killed)
            with pytest.raises(Killed):
                train(config)
        shutil.rmtree(copy)
        asyncio.run(origin.check(config, storage_of(config)))
        loop = train(config)
    assert loop.version == Version(2, 1)
    assert_same(at_step(config, 0), first[1])
    assert {json.loads(data)["kind"] for key, data in listed(config, "weights").items() if key.endswith(".json")
            and "MANIFEST" in key} == {"adapter"}  # fmt: skip


UNFIT = {
    "no such folder": (lambda uri: f"{uri}/nowhere", {}, "there is no such folder; give the prefix of a run"),
    "no run": (lambda uri: uri.rpartition("/")[0], {}, "holds no checkpoint; give the prefix of a run"),
    "no such checkpoint": (
        lambda uri: f"{uri}/checkpoints/{Version(1, 3)}",
        {},
        f"{Version(1, 3)} does not exist; its run has the checkpoints {Version(1, 4)}, {Version(1, 2)}",
    ),
    "no version": (lambda uri: f"{uri}/checkpoints/newest", {}, "there is no such folder"),
    "another model": (lambda uri: uri, {"model__uri": "hf://a/b", "model__revision": "x"}, "this run has hf://a/b@x"),
    "another rank": (lambda uri: uri, {"trainer__lora": {"rank": 8, "alpha": 8}}, "other parameters .* differ"),
    "other layers": (
        lambda uri: uri,
        {"trainer__lora": {"rank": 4, "alpha": 8, "targets": ["q_proj"]}},
        "other parameters .* differ",
    ),
    "no adapter": (lambda uri: uri, {"trainer__lora": None}, "other parameters .* differ"),
    "a critic": (lambda uri: uri, PPO, "other parameters .* differ"),
}


@pytest.mark.parametrize(("place", "changes", "message"), UNFIT.values(), ids=UNFIT)
def test_a_checkpoint_that_is_missing_or_does_not_fit_is_named_in_one_line(
    tmp_path, tiny, first, place, changes, message
):
    config = second(tmp_path, tiny, place(first[0].store.uri), **changes)
    with pytest.raises(ValueError, match=rf"(?s)^checkpoint\.resumeFrom: .*{message}") as error:
        asyncio.run(launch.check_origin(storage_of(config), config))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"trainer__dtype": "bfloat16", "trainer__compile": True},
        {"trainer__lora": {"rank": 4, "alpha": 32}},
        {"algorithm__type": "rloo", "algorithm__kl_coefficient": 0.1},
    ],
    ids=["alike", "another type", "another alpha", "another algorithm"],
)
def test_what_may_differ_from_the_other_run(tmp_path, tiny, first, changes):
    config = second(tmp_path, tiny, first[0].store.uri, **changes)
    asyncio.run(launch.check_origin(storage_of(config), config))


def test_a_store_that_does_not_answer_may_be_tried_again_and_one_that_refuses_may_not(
    tmp_path, tiny, first, monkeypatch
):
    config = second(tmp_path, tiny, first[0].store.uri)

    for error, kind in ((Unavailable("GET x failed for 30 s"), Unavailable), (StorageError("denied"), ValueError)):
        monkeypatch.setattr(origin, "candidates", AsyncMock(side_effect=error))
        with pytest.raises(kind, match=str(error)):
            asyncio.run(launch.check_origin(storage_of(config), config))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_begin_where_one_rank_ended(tmp_path, tiny, first):
    config = second(tmp_path, tiny, first[0].store.uri)
    with worker(config), launched(config, tmp_path, ranks=2) as (process, _):
        assert process.wait(200) == termination.COMPLETE, (tmp_path / "output.txt").read_text()
    assert_same(at_step(config, 0), first[1])


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_what_does_not_fit_exits_3_before_any_rank_starts(tmp_path, tiny, first):
    config = second(tmp_path, tiny, first[0].store.uri, trainer__lora={"rank": 8, "alpha": 8})
    with launched(config, tmp_path, ranks=2) as (process, _):
        assert process.wait(90) == termination.USER_ERROR
    assert (tmp_path / "termination").read_text().startswith("checkpoint.resumeFrom: checkpoint t000001-s")
    assert (tmp_path / "output.txt").read_text().count("\n") == 1
