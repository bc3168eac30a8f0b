import dataclasses
import json
import random

import pytest

from pipeline import codec
from pipeline.experience import Rollout, RolloutGroup
from pipeline.messages import (
    CONTROL_KEY,
    ControlState,
    EvaluationRequest,
    Heartbeat,
    WriterEntry,
    shard_key,
    writer_key,
)
from pipeline.storage import MemoryStorage, StorageError, Transient
from pipeline.versions import Version
from pipeline.writer import Control, Report, Superseded, Writer

IDLE = Report(version=Version(1, 0))


def group(index: int) -> RolloutGroup:
    rollouts = [Rollout([7, 2], [-0.1, -0.7], "x", "stop", 1.0, {}, None, [(0, Version(1, 0))]) for _ in range(2)]
    return RolloutGroup(index, "set", "prompt", None, [5, 9], rollouts, 0.0)


class Scene:
    """One writer, and a trainer that says what the test makes it say."""

    def __init__(self, clock, faults=None):
        self.storage = MemoryStorage(clock, faults, deadline_s=10.0)
        self.plain = MemoryStorage(clock, bucket=self.storage.memory)
        self.writer = Writer(self.storage, "rollout-0", clock, random.Random(0), heartbeat_s=5.0)
        self.state = ControlState(term=1, step=0, version=Version(1, 0), writers={})

    async def say(self, leases=(), acknowledged: int = 0, final: int | None = None, **changes) -> None:
        entry = WriterEntry("rollout-0", dict.fromkeys(leases, 0), acknowledged, final)
        writers = {**self.state.writers, self.writer.ulid: entry}
        self.state = dataclasses.replace(self.state, writers=writers, **changes)
        await self.plain.put(CONTROL_KEY, self.state.encode())

    async def heard(self) -> Heartbeat:
        found = await self.plain.get(writer_key(self.writer.ulid))
        assert found is not None
        return Heartbeat.decode(found.data)

    async def leases(self, report: Report = IDLE) -> list[int]:
        return sorted((await self.writer.sync(report)).leases)


@pytest.fixture
def scene(clock) -> Scene:
    return Scene(clock)


async def test_before_any_trainer_there_is_nothing_to_do(scene: Scene):
    await scene.writer.register()
    assert await scene.writer.sync(Report(version=None)) == Control()
    assert (await scene.heard()).instance == "rollout-0"


async def test_leases_come_with_their_lowest_policy_step(scene: Scene):
    entry = WriterEntry("rollout-0", {4: 2, 5: 3}, acknowledged=0)
    scene.state = dataclasses.replace(scene.state, writers={scene.writer.ulid: entry}, step=3)
    await scene.plain.put(CONTROL_KEY, scene.state.encode())
    control = await scene.writer.sync(IDLE)
    assert control.leases == {4: 2, 5: 3}
    assert (control.term, control.step, control.version) == (1, 3, Version(1, 0))


async def test_the_heartbeat_is_refreshed_when_it_is_due_and_not_before(scene: Scene, clock):
    await scene.writer.sync(IDLE)
    first = await scene.heard()
    await scene.writer.sync(IDLE)
    assert await scene.heard() == first
    clock.time += 5.0
    await scene.writer.sync(IDLE)
    assert (await scene.heard()).refreshed == first.refreshed + 5.0


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
async def test_a_clock_that_is_set_neither_silences_the_writer_nor_hurries_it(scene: Scene, clock, jump: float):
    await scene.writer.sync(IDLE)
    first = await scene.heard()
    clock.skew_s = jump
    await scene.writer.sync(IDLE)
    assert await scene.heard() == first
    clock.time += 5.0
    await scene.writer.sync(IDLE)
    assert (await scene.heard()).refreshed == clock.now()


async def test_a_newly_loaded_version_is_told_at_once(scene: Scene):
    await scene.writer.sync(IDLE)
    await scene.writer.sync(Report(version=Version(1, 1)))
    assert (await scene.heard()).version == Version(1, 1)


async def test_shards_are_numbered_densely_and_name_their_indices(scene: Scene):
    keys = [await scene.writer.commit([group(4), group(7)]), await scene.writer.commit([group(9)])]
    assert keys == [shard_key(scene.writer.ulid, 0), shard_key(scene.writer.ulid, 1)]
    found = await scene.plain.get(keys[0])
    assert found is not None
    assert json.loads(found.metadata["indices"]) == [4, 7]
    assert found.metadata["rows"] == "4"
    assert codec.decode(found.data, group_size=2)["index"].to_pylist() == [4, 4, 7, 7]


async def test_a_committed_index_is_no_work_until_it_is_acknowledged_and_granted_anew(scene: Scene):
    await scene.say(leases=[4, 5])
    await scene.writer.commit([group(4)])
    assert await scene.leases() == [5]
    await scene.say(leases=[5], acknowledged=1)
    assert await scene.leases() == [5]
    await scene.say(leases=[4, 5], acknowledged=1)
    assert await scene.leases() == [4, 5]


async def test_an_index_handed_back_is_told_until_the_trainer_has_taken_it(scene: Scene):
    await scene.say(leases=[4, 5])
    scene.writer.hand_back([4])
    assert await scene.leases() == [5]
    assert (await scene.heard()).handed_back == (4,)
    await scene.say(leases=[5])
    assert await scene.leases() == [5]
    assert (await scene.heard()).handed_back == ()
    await scene.say(leases=[4, 5])
    assert await scene.leases() == [4, 5]


async def test_a_failed_index_is_reported_with_its_reason_and_may_be_granted_again_afterwards(scene: Scene):
    await scene.say(leases=[4])
    scene.writer.fail(4, "the engine answered 500")
    assert await scene.leases() == []
    assert (await scene.heard()).failures == {4: "the engine answered 500"}
    await scene.say(leases=[])
    await scene.leases()
    await scene.say(leases=[4])
    assert await scene.leases() == [4]


async def test_a_revoked_writer_starts_anew_under_another_ulid_with_nothing(scene: Scene):
    await scene.say(leases=[4])
    await scene.writer.commit([group(4)])
    scene.writer.fail(5, "reason")
    await scene.say(final=1, acknowledged=1)
    before = scene.writer.ulid
    control = await scene.writer.sync(IDLE)
    assert control.revoked
    assert control.leases == {}
    assert scene.writer.ulid != before
    heartbeat = await scene.heard()
    assert (heartbeat.sequence, heartbeat.failures, heartbeat.version) == (0, {}, IDLE.version)
    assert not (await scene.writer.sync(IDLE)).revoked


async def test_a_writer_whose_place_another_process_has_taken_ends(scene: Scene):
    other = WriterEntry("rollout-0", {}, acknowledged=0)
    scene.state = dataclasses.replace(scene.state, writers={"01OTHER": other})
    await scene.say(final=0)
    with pytest.raises(Superseded, match=r"rollout-0.*01OTHER"):
        await scene.writer.sync(IDLE)


async def test_only_the_writer_that_was_chosen_sees_the_evaluation(scene: Scene):
    mine = EvaluationRequest(4, Version(1, 4), scene.writer.ulid)
    await scene.say(evaluation=mine)
    assert (await scene.writer.sync(IDLE)).evaluation == mine
    await scene.say(evaluation=dataclasses.replace(mine, writer="01OTHER"))
    assert (await scene.writer.sync(IDLE)).evaluation is None


async def test_nobody_is_asked_to_evaluate_a_policy_older_than_the_loaded_one(scene: Scene):
    await scene.say(evaluation=EvaluationRequest(4, Version(1, 4), scene.writer.ulid))
    assert (await scene.writer.sync(Report(version=Version(1, 5)))).evaluation is None


class Outage:
    """Requests arrive, but no response comes back, while `on`."""

    def __init__(self):
        self.on = False

    async def before(self, operation: str, key: str) -> None:
        if self.on and operation != "write":
            raise Transient("time-out")

    async def after(self, operation: str, key: str) -> None:
        if self.on:
            raise Transient("time-out")


async def test_a_commit_that_seemed_to_fail_may_be_repeated_and_leaves_no_gap(clock):
    outage = Outage()
    scene = Scene(clock, outage)
    outage.on = True
    with pytest.raises(StorageError):
        await scene.writer.commit([group(4)])
    outage.on = False
    assert await scene.writer.commit([group(4)]) == shard_key(scene.writer.ulid, 1)
    assert await scene.plain.get(shard_key(scene.writer.ulid, 0)) is not None


async def test_that_a_writer_was_revoked_is_told_even_if_registering_again_failed_at_first(clock):
    outage = Outage()
    scene = Scene(clock, outage)
    await scene.say(final=0)

    async def silent_after_control(operation: str, key: str) -> None:
        if key.startswith("writers/"):
            raise Transient("time-out")

    outage.before = silent_after_control  # type: ignore[method-assign]
    with pytest.raises(StorageError):
        await scene.writer.sync(IDLE)
    outage.before = Outage().before  # type: ignore[method-assign]
    assert (await scene.writer.sync(IDLE)).revoked


async def test_a_damaged_file_of_the_trainer_is_sat_out_like_an_outage(scene: Scene):
    await scene.writer.register()
    await scene.plain.put(CONTROL_KEY, b"{}")
    with pytest.raises(StorageError, match=r"control/state.json is damaged"):
        await scene.writer.sync(IDLE)
