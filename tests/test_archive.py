"""Training again on stored samples (data.replayFrom): what is planned of them, and which are refused."""

import asyncio
import dataclasses
import hashlib
import json
import pathlib
import random

import pytest

from pipeline import archive, codec
from pipeline.config import RunConfig, StoreConfig
from pipeline.coordinator import Coordinator
from pipeline.experience import Rollout, RolloutGroup
from pipeline.messages import shard_key
from pipeline.storage import Storage, open_storage
from pipeline.trainer_log import GroupRef, Hopeless, Plan, Stop, Takeover, decode, encode
from pipeline.versions import Version
from tests.conftest import SkippingClock

GROUPS = 6
"""Of the source: indices 10 … 15, two a step; sample 1 of each is right, but for index 12 where none is."""


def group(index: int) -> RolloutGroup:
    rewards = (0.0, 0.0) if index == 12 else (0.0, 1.0)
    rollouts = [
        Rollout([7, 2], [-0.5, -0.1], "4", "stop", reward, {"sum": reward}, None, [(0, Version(1, 99))])
        for reward in rewards
    ]
    return RolloutGroup(index, "sums", "2 + 2 =", "4", [5, 9], rollouts, 0.0)


@pytest.fixture
def source(tmp_path) -> str:
    uri = f"memory://{tmp_path.name}/source"
    asyncio.run(_source(uri))
    return uri


async def _source(uri: str) -> None:
    storage, refs = open_storage(uri), []
    for number in range(3):
        data = codec.encode([group(10 + 2 * number), group(11 + 2 * number)])
        key = shard_key("A", number)
        await storage.create(key, data)
        digest = hashlib.sha256(data).hexdigest()
        refs += [GroupRef(10 + 2 * number + part, key, digest, 2 * part, 2 * part + 2) for part in range(2)]
    plans = [Plan(step, 1, tuple(refs[2 * step - 2 : 2 * step])) for step in (1, 2, 3)]
    for number, record in enumerate([Takeover(1), *plans, Stop(1, "complete", 3)]):
        await storage.create(f"trainer/log/{number:020d}.json", encode(record))
    content = {"config": configuration(uri, None).model_dump(mode="json")}
    await storage.create("run.json", json.dumps(content).encode())


def again(uri: str, where: str | None = None, **algorithm) -> RunConfig:
    """A run that trains the samples at `uri` again."""
    return configuration(f"{uri}-again", {"uri": uri, "where": where}, **algorithm)


def configuration(uri: str, replay: dict | None, **algorithm) -> RunConfig:
    settings = {"type": "grpo", "total_steps": 9, "prompts_per_step": 2, "group_size": 2, "max_staleness": 0}
    return RunConfig.model_validate(
        {
            "name": "sums",
            "run_id": "r1",
            "model": {"uri": "none", "path": "none"},
            "data": {"sets": [], "replay_from": replay},
            "rewards": [],
            "algorithm": settings | algorithm,
            "store": {"uri": uri},
        }
    )


def storage_of(config: RunConfig) -> Storage:
    return open_storage(config.store.uri)


async def check(config: RunConfig) -> None:
    await archive.check(config, storage_of(config))


def coordinator(config: RunConfig) -> Coordinator:
    return Coordinator(storage_of(config), config, SkippingClock(), random.Random(0))


async def planned(config: RunConfig, steps: int, state=None, began: int = 0) -> tuple[list[Plan], Coordinator]:
    """The plans of steps began + 1 … steps, each of them finished."""
    trainer, plans = coordinator(config), []
    await trainer.take_over(state)
    await trainer.publish(Version(trainer.term, began))
    for step in range(began + 1, steps + 1):
        await trainer.tick()
        plans.append(await trainer.next_plan(step))
        await trainer.finish_step(step)
        await trainer.publish(Version(trainer.term, step))
    return plans, trainer


def rows(plans: list[Plan]) -> list[tuple[str, int]]:
    return [(found.key, found.start) for plan in plans for found in plan.groups]


def everything(folder: pathlib.Path) -> dict[str, tuple[int, bytes]]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


async def test_each_pass_trains_every_group_once_in_the_order_of_the_source(source):
    plans, _ = await planned(again(source), 6)
    first, second = rows(plans[:3]), rows(plans[3:])
    assert first == second == [(shard_key("A", number), start) for number in range(3) for start in (0, 2)]
    assert [found.index for plan in plans for found in plan.groups] == list(range(12))


async def test_samples_of_any_age_are_trained_and_the_log_is_the_same_after_a_restart(source):
    config = again(source)
    plans, first = await planned(config, 3)
    state = first.state()
    await first.tick()
    fourth = await first.next_plan(4)  # planned, and not trained
    after, _ = await planned(config, 5, state=state, began=3)
    assert after[0].groups == fourth.groups
    assert after[0].replayed
    assert rows([*plans, *after])[6:] == rows(plans)[:4]


async def test_a_pass_that_the_steps_do_not_divide_goes_on_with_the_next(source):
    plans, _ = await planned(again(source, prompts_per_step=4), 3)
    assert [found.index % GROUPS for plan in plans for found in plan.groups] == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]


async def test_a_group_without_a_sample_that_the_filter_chooses_is_passed_over_and_logged_as_such(source):
    plans, trainer = await planned(again(source, "reward > 0.5"), 3)
    assert (shard_key("A", 1), 0) not in rows(plans)  # index 12
    drops = [drop for plan in plans for drop in plan.drops]
    assert [(drop.index, drop.reason) for drop in drops] == [(2, "filtered"), (8, "filtered")]  # once a pass
    assert trainer.dropped == {"filtered": 2}


async def test_a_filter_that_chooses_nothing_ends_the_run_in_one_sentence(source):
    trainer = coordinator(again(source, "reward > 7"))
    await trainer.take_over()
    with pytest.raises(Hopeless, match=r"^data\.replayFrom: none of the 6 groups can be trained: 6 filtered$"):
        await trainer.tick()


async def test_a_damaged_shard_of_the_source_is_named_and_the_others_are_trained(source):
    await edit(source, shard_key("A", 1), lambda data: data.replace(b"PAR1", b"ROT1"))
    plans, _ = await planned(again(source), 4)
    assert shard_key("A", 1) not in {key for key, _ in rows(plans)}
    assert [shard.key for plan in plans for shard in plan.quarantined] == [shard_key("A", 1)]
    assert [drop.reason for plan in plans for drop in plan.drops] == ["damaged"] * 4  # two groups, two passes


async def test_the_source_is_only_read(tmp_path):
    """Even the folder, in which a store that is opened to write would leave locks."""
    uri = f"file://{tmp_path}/source"
    await _source(uri)
    before = everything(tmp_path)
    config = again(uri).model_copy(update={"store": StoreConfig(uri=f"memory://{tmp_path.name}")})
    await check(config)
    await planned(config, 4)
    assert everything(tmp_path) == before


async def extend(source: str) -> None:
    """Take the source up again: another step, of groups 10 and 11, and no end yet."""
    storage = open_storage(source)
    found = await storage.get(f"trainer/log/{1:020d}.json")
    plan = dataclasses.replace(decode(found.data), step=4, term=2)
    for number, record in enumerate([Takeover(2), plan], 5):
        await storage.create(f"trainer/log/{number:020d}.json", encode(record))


async def test_a_source_that_is_taken_up_again_stays_for_this_run_what_it_was(source):
    config = again(source)
    await check(config)
    plans, first = await planned(config, 2)
    state = first.state()
    await extend(source)
    await check(config)  # of a restarted trainer
    after, _ = await planned(config, 6, state=state, began=2)
    once = [(shard_key("A", number), start) for number in range(3) for start in (0, 2)]
    assert rows([*plans, *after]) == once * 2
    with pytest.raises(ValueError, match="is not over"):
        await check(again(source).model_copy(update={"store": StoreConfig(uri=f"{source}-other")}))


async def test_what_the_source_has_collected_since_is_dropped_by_name_and_the_rest_trained(source):
    await check(again(source))
    await open_storage(source).delete(shard_key("A", 0))
    plans, _ = await planned(again(source), 2)
    assert {key for key, _ in rows(plans)} == {shard_key("A", 1), shard_key("A", 2)}
    drops = [(drop.index % GROUPS, drop.reason) for plan in plans for drop in plan.drops]
    assert set(drops) == {(0, "damaged"), (1, "damaged")}
    (gone,) = (shard for plan in plans for shard in plan.quarantined)
    assert gone.reason.startswith(f"{shard_key('A', 0)} is gone: its run has collected it (store.retention)")


@pytest.mark.parametrize("torn", [b"rot", b"{}", b"[1]"])
async def test_a_damaged_note_of_the_sources_extent_is_named_with_its_remedy(source, torn):
    config = again(source)
    await storage_of(config).put("source.json", torn)
    with pytest.raises(ValueError, match=r"^source\.json of this run is damaged .*; delete it"):
        await check(config)


async def test_no_writer_of_the_source_is_named_in_the_control_file(source):
    config = again(source)
    await planned(config, 2)
    trainer = coordinator(config)
    await trainer.take_over()  # plans are replayed
    await trainer.publish(Version(trainer.term, 0))
    assert not trainer.roster.writers
    assert not trainer.state()["writers"]


async def edit(source: str, key: str, change) -> None:
    storage = open_storage(source)
    found = await storage.get(key)
    await storage.put(key, change(found.data))


def outside(data: bytes) -> bytes:
    return data.replace(b"rollouts/v1/A/", b"rollouts/v1/../")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"group_size": 4},
            "algorithm.groupSize: got 4; the samples of data.replayFrom come in groups of 2",
        ),
        ({"sampling": {"temperature": 0.5}}, "algorithm.sampling.temperature: got 0.5; the samples of"),
        ({"type": "remax"}, "algorithm.type: remax cannot train the samples that grpo has drawn"),
        ({"where": "reword > 1"}, "data.replayFrom.where: character 1: there is no column reword"),
    ],
)
async def test_what_cannot_be_trained_on_is_refused_in_one_line(source, changes, words):
    with pytest.raises(Exception, match=words) as caught:
        await check(again(source, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "change", "words"),
    [
        ("run.json", lambda data: b"[]", "holds no run.json of a run"),
        (
            "run.json",
            lambda data: json.dumps(json.loads(data)["config"]).encode(),
            "is a run's folder; name its prefix",
        ),
        (f"trainer/log/{4:020d}.json", lambda data: encode(Takeover(2)), "is not over"),
        (f"trainer/log/{2:020d}.json", lambda data: b"rot", "is damaged"),
        (f"trainer/log/{2:020d}.json", outside, "names what is no group of samples"),
        (f"trainer/log/{2:020d}.json", lambda data: data.replace(b'"start": 0', b'"start": -8'), "names what is no"),
    ],
)
async def test_a_source_that_is_no_finished_run_is_refused_in_one_line(source, key, change, words):
    await edit(source, key, change)
    with pytest.raises(ValueError, match=rf"^data\.replayFrom\.uri: .*{words}"):
        await check(again(source))


async def test_a_folder_that_is_not_there_is_named_and_not_made(tmp_path):
    with pytest.raises(ValueError, match=r"^data\.replayFrom\.uri: .*/missing: there is no such folder"):
        await archive.check(again(f"file://{tmp_path}/missing"), open_storage(f"memory://{tmp_path.name}"))
    assert not (tmp_path / "missing").exists()


async def test_a_run_of_stored_samples_has_none_itself(source):
    config = again(source)
    await storage_of(config).create("run.json", json.dumps({"config": config.model_dump(mode="json")}).encode())
    with pytest.raises(ValueError, match=f"has no samples of its own; name {source}"):
        await check(again(config.store.uri))
