import asyncio
import dataclasses
import json
import random

import numpy as np
import pytest

from pipeline import trainer_log
from pipeline.config import (
    AlgorithmConfig,
    DataConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    StoreConfig,
)
from pipeline.coordinator import Coordinator
from pipeline.dispatch import BARREN
from pipeline.experience import Rollout, RolloutGroup
from pipeline.messages import CONTROL_KEY, ControlState, WriterEntry, evaluation_key, shard_key
from pipeline.roster import GONE_AFTER
from pipeline.storage import MemoryBucket, MemoryStorage, Object, StorageError, Transient
from pipeline.trainer_log import Collect, Fenced, Hopeless, Plan, TrainerLog
from pipeline.versions import Version
from pipeline.writer import Report, Writer
from tests.conftest import SkippingClock

SIZE = 2  # groups a step
HEARTBEAT_S = 5.0
LEASE_TIMEOUT_S = 60.0


class Down:
    """The store answers nobody while `on`."""

    on = False

    async def before(self, operation: str, key: str) -> None:
        if self.on:
            raise Transient("503")

    async def after(self, operation: str, key: str) -> None:
        pass


class Scene:
    """One store with a clock of its own, trainers and workers that the test moves by hand."""

    def __init__(self, max_staleness: int = 1, group_timeout_s: float = 3600.0, **parameters):
        self.clock, self.store_clock, self.down = SkippingClock(), SkippingClock(), Down()
        self.bucket = MemoryBucket(self.store_clock)
        self.plain = MemoryStorage(self.store_clock, bucket=self.bucket)
        self.config = RunConfig(
            name="run",
            run_id="r",
            model=ModelConfig(uri="none", path="none"),
            data=DataConfig(sets=[]),
            rewards=[RewardConfig(name="none")],
            store=StoreConfig(uri="memory://run"),
            algorithm=AlgorithmConfig(
                type="grpo",
                total_steps=9,
                prompts_per_step=SIZE,
                group_size=2,
                max_staleness=max_staleness,
                parameters=parameters,
            ),
            rollout=RolloutConfig(
                heartbeat_s=HEARTBEAT_S,
                lease_timeout_s=LEASE_TIMEOUT_S,
                group_timeout_s=group_timeout_s,
                max_failures=2,
            ),
        )
        self.writers = 0

    async def trainer(self, state: dict | None = None) -> Coordinator:
        """One that has taken over and published the policy it starts from."""
        storage = MemoryStorage(self.clock, self.down, self.bucket, deadline_s=5.0)
        coordinator = Coordinator(storage, self.config, self.clock, random.Random(0))
        await coordinator.take_over(json.loads(json.dumps(state)) if state else None)
        await coordinator.publish(Version(coordinator.term, coordinator.step))
        return coordinator

    async def writer(self, instance: str) -> Writer:
        self.writers += 1
        writer = Writer(self.plain, instance, self.store_clock, random.Random(self.writers), HEARTBEAT_S)
        self.store_clock.time += 1  # so that the newer one has the higher ULID
        await writer.register()
        return writer

    async def tick(self, coordinator: Coordinator, seconds: float = HEARTBEAT_S) -> None:
        self.clock.time += seconds
        self.store_clock.time += seconds
        await coordinator.tick()

    async def control(self) -> ControlState:
        found = await self.plain.get(CONTROL_KEY)
        assert found is not None
        return ControlState.decode(found.data)

    async def leases(self, writer: Writer) -> dict[int, int]:
        return (await self.control()).writers[writer.ulid].leases


@pytest.fixture
def scene() -> Scene:
    return Scene()


def group(index: int, step: int = 0, rewards: tuple = (0.0, 1.0)) -> RolloutGroup:
    rollouts = [
        Rollout([7], [-0.1], "x", "stop", reward, {}, None if reward is not None else "raised", [(0, Version(1, step))])
        for reward in rewards
    ]
    return RolloutGroup(index, "set", "prompt", None, [5], rollouts, 0.0)


async def keep_alive(scene: Scene, writer: Writer, version: Version | None = None) -> None:
    scene.store_clock.time += 0.001
    writer._said = None
    await writer.sync(Report(version=version))


async def plan_now(coordinator: Coordinator, step: int) -> Plan:
    return await asyncio.wait_for(coordinator.next_plan(step), 30)


async def waits_for(coordinator: Coordinator, step: int) -> str:
    """What `next_plan` waits for, before any tick."""
    task = asyncio.ensure_future(coordinator.next_plan(step))
    await asyncio.sleep(0)
    assert not task.done()
    task.cancel()
    assert coordinator.waiting_for is not None
    return coordinator.waiting_for


async def finish(coordinator: Coordinator, step: int) -> None:
    await coordinator.finish_step(step)
    await coordinator.publish(Version(coordinator.term, step))


def indices(plan: Plan) -> list[int]:
    return [group.index for group in plan.groups]


# Granting


async def test_all_that_staleness_allows_is_granted_and_split_evenly(scene: Scene):
    trainer = await scene.trainer()
    first, second = await scene.writer("rollout-0"), await scene.writer("rollout-1")
    await scene.tick(trainer)
    assert await scene.leases(first) == {0: 0, 2: 0}
    assert await scene.leases(second) == {1: 0, 3: 0}


async def test_nothing_is_granted_before_a_policy_is_published(scene: Scene):
    coordinator = Coordinator(scene.plain, scene.config, scene.clock, random.Random(0))
    await coordinator.take_over()
    writer = await scene.writer("rollout-0")
    await scene.tick(coordinator)
    assert await scene.leases(writer) == {}


async def test_room_is_made_by_a_published_step_and_new_leases_ask_for_its_policy(scene: Scene):
    trainer = await scene.trainer()
    writer = await scene.writer("rollout-0")
    await scene.tick(trainer)
    await writer.commit([group(0), group(1)])
    await scene.tick(trainer)
    assert await scene.leases(writer) == {2: 0, 3: 0}
    await plan_now(trainer, 1)
    await trainer.finish_step(1)
    await scene.tick(trainer)
    assert await scene.leases(writer) == {2: 0, 3: 0}
    await trainer.publish(Version(1, 1))
    assert await scene.leases(writer) == {2: 0, 3: 0, 4: 1, 5: 1}


async def test_the_time_in_which_workers_have_nothing_to_do_is_counted(scene: Scene):
    trainer = await scene.trainer()
    await scene.tick(trainer)
    assert trainer.idle_s == 0  # there are none
    writer = await scene.writer("rollout-0")
    await scene.tick(trainer)
    assert await scene.leases(writer)
    await writer.commit([group(index) for index in range(4)])
    await scene.tick(trainer)
    assert trainer.idle_s == 0
    for _ in range(3):
        await keep_alive(scene, writer)
        await scene.tick(trainer)
    assert trainer.idle_s == 3 * HEARTBEAT_S
    await plan_now(trainer, 1)
    await finish(trainer, 1)
    assert await scene.leases(writer)
    await scene.tick(trainer)
    await scene.tick(trainer)
    assert trainer.idle_s == 4 * HEARTBEAT_S  # until it was looked at again


async def test_a_draining_writer_gets_nothing_and_what_it_hands_back_goes_to_others(scene: Scene):
    trainer = await scene.trainer()
    leaving = await scene.writer("rollout-0")
    await scene.tick(trainer)
    leaving.hand_back([0, 1, 2, 3])
    await leaving.sync(Report(version=None, draining=True))
    staying = await scene.writer("rollout-1")
    await scene.tick(trainer)
    assert await scene.leases(leaving) == {}
    assert sorted(await scene.leases(staying)) == [0, 1, 2, 3]


async def test_a_failed_index_goes_to_another_writer_and_is_dropped_after_the_allowed_failures(scene: Scene):
    trainer = await scene.trainer()
    first = await scene.writer("rollout-0")
    await scene.tick(trainer)
    second = await scene.writer("rollout-1")
    first.fail(0, "the engine answered 500")
    await first.sync(Report(version=None))
    await scene.tick(trainer)
    assert 0 in await scene.leases(second)
    second.fail(0, "the engine answered 500")
    await second.sync(Report(version=None))
    await scene.tick(trainer)
    control = await scene.control()
    assert not any(0 in entry.leases for entry in control.writers.values())
    await second.commit([group(1), group(2)])
    await first.commit([group(1), group(2)])
    await scene.tick(trainer)
    plan = await plan_now(trainer, 1)
    assert [(drop.index, drop.reason) for drop in plan.drops] == [(0, "failed")]
    assert trainer.statistics()["dropped"] == {"failed": 1}


async def test_the_only_writer_gets_a_failed_index_again_once_it_has_seen_that_it_was_taken(scene: Scene):
    trainer = await scene.trainer()
    writer = await scene.writer("rollout-0")
    await scene.tick(trainer)
    writer.fail(0, "reset")
    await writer.sync(Report(version=None))
    await scene.tick(trainer)
    assert 0 not in await scene.leases(writer)
    await writer.sync(Report(version=None))
    await scene.tick(trainer)
    assert 0 in (await writer.sync(Report(version=None))).leases


# Revoking


async def test_silence_takes_the_leases_back_and_later_shards_do_not_count(scene: Scene):
    trainer = await scene.trainer()
    silent = await scene.writer("rollout-0")
    await scene.tick(trainer)
    await silent.commit([group(0)])
    other = await scene.writer("rollout-1")
    while (await scene.control()).writers[silent.ulid].final is None:
        await keep_alive(scene, other)
        await scene.tick(trainer)
    assert scene.store_clock.time < 1_700_000_000 + LEASE_TIMEOUT_S + 6 * HEARTBEAT_S
    assert (await scene.control()).writers[silent.ulid].final == 1
    assert sorted(await scene.leases(other)) == [1, 2, 3]
    await silent.commit([group(1)])
    await scene.tick(trainer)
    assert 1 in await scene.leases(other)
    assert (await silent.sync(Report(version=None))).revoked


async def test_an_outage_that_hides_everybody_revokes_nobody(scene: Scene):
    trainer = await scene.trainer()
    writer = await scene.writer("rollout-0")
    await scene.tick(trainer)
    scene.down.on = True
    for _ in range(10):
        with pytest.raises(StorageError):
            await scene.tick(trainer, 60.0)
    scene.down.on = False
    await scene.tick(trainer)
    assert (await scene.control()).writers[writer.ulid].final is None


async def test_a_trainer_that_was_paused_for_an_hour_revokes_nobody_for_it(scene: Scene):
    trainer = await scene.trainer()
    writer = await scene.writer("rollout-0")
    await scene.tick(trainer)
    await scene.tick(trainer, 3600.0)
    await scene.tick(trainer)
    assert (await scene.control()).writers[writer.ulid].final is None


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
async def test_the_trainers_own_clock_may_jump(scene: Scene, jump: float):
    trainer = await scene.trainer()
    writer = await scene.writer("rollout-0")
    await scene.tick(trainer)
    scene.clock.skew_s += jump
    await scene.tick(trainer)
    await writer.commit([group(0)])
    await scene.tick(trainer)
    control = (await scene.control()).writers[writer.ulid]
    assert (control.final, control.acknowledged) == (None, 1)


async def test_a_quiet_writer_is_looked_at_less_and_less_often_and_again_every_poll_when_it_has_stirred(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
):
    trainer, looks, poll_s = await scene.trainer(), [], scene.config.rollout.poll_s
    get = trainer.storage.get

    async def noticed(key: str) -> Object | None:
        if key.startswith("rollouts/"):
            looks.append(scene.clock.time)
        return await get(key)

    monkeypatch.setattr(trainer.storage, "get", noticed)
    writer = await scene.writer("rollout-0")
    await scene.tick(trainer)
    plan = asyncio.create_task(trainer.next_plan(1))
    for _ in range(int(200 / poll_s)):
        await keep_alive(scene, writer)
        await scene.tick(trainer, poll_s)
    gaps = np.diff(looks)
    assert gaps[:10].tolist() == pytest.approx([poll_s] * 10)
    assert gaps.max() == pytest.approx(HEARTBEAT_S)
    assert (np.diff(gaps) >= 0).all()
    await writer.commit([group(0)])
    looks.clear()
    while 0 not in trainer.ledger.delivered:
        await scene.tick(trainer, poll_s)
    for _ in range(10):
        await scene.tick(trainer, poll_s)
    assert np.diff(looks[1:]).tolist() == pytest.approx([poll_s] * 10)
    plan.cancel()


async def test_a_new_process_in_the_same_slot_replaces_the_old_one_at_once(scene: Scene):
    trainer = await scene.trainer()
    old = await scene.writer("rollout-0")
    await scene.tick(trainer)
    new = await scene.writer("rollout-0")
    await scene.tick(trainer)
    assert (await scene.control()).writers[old.ulid].final == 0
    assert sorted(await scene.leases(new)) == [0, 1, 2, 3]


async def test_a_group_that_hangs_behind_a_live_heartbeat_is_taken_back_in_the_end():
    scene = Scene(group_timeout_s=100.0)
    trainer = await scene.trainer()
    hanging = await scene.writer("rollout-0")
    await scene.tick(trainer)
    other, ulid = await scene.writer("rollout-1"), hanging.ulid
    while (await scene.control()).writers[ulid].final is None:
        await keep_alive(scene, hanging)
        await keep_alive(scene, other)
        await scene.tick(trainer)
    assert 100 < scene.store_clock.time - 1_700_000_000 < 125
    assert sorted(await scene.leases(other)) == [0, 1, 2, 3]
    await keep_alive(scene, hanging)
    assert hanging.ulid != ulid


async def test_a_writer_that_left_before_the_trainer_came_is_not_known(scene: Scene):
    gone = await scene.writer("rollout-0")
    scene.store_clock.time += 2 * LEASE_TIMEOUT_S
    trainer = await scene.trainer()
    await scene.tick(trainer)
    assert gone.ulid not in (await scene.control()).writers
    await keep_alive(scene, gone)
    await scene.tick(trainer)
    assert gone.ulid in (await scene.control()).writers


async def test_a_revoked_writer_that_stays_silent_is_forgotten_in_the_end(scene: Scene):
    trainer = await scene.trainer()
    old = await scene.writer("rollout-0")
    await scene.tick(trainer)
    new = await scene.writer("rollout-0")
    for _ in range(130):
        await keep_alive(scene, new)
        await scene.tick(trainer)
    assert list((await scene.control()).writers) == [new.ulid]
    assert trainer.statistics()["writers"] == 1
    assert old.ulid not in trainer.state()["writers"]


async def test_the_dead_do_not_add_up_however_often_workers_and_trainers_are_replaced(scene: Scene):
    for _ in range(30):  # no trainer lives as long as a writer is remembered
        trainer = await scene.trainer()
        writer = await scene.writer("rollout-0")
        for _ in range(20):
            await keep_alive(scene, writer)
            await scene.tick(trainer)
    told = (await scene.control()).writers
    assert writer.ulid in told
    assert len(told) <= GONE_AFTER * LEASE_TIMEOUT_S / (20 * HEARTBEAT_S) + 2
    assert len(await scene.plain.list("writers")) <= len(told) + 1


async def test_a_writer_that_wakes_up_after_it_was_forgotten_begins_anew_and_nothing_it_wrote_counts(scene: Scene):
    trainer = await scene.trainer()
    zombie = await scene.writer("rollout-0")
    await scene.tick(trainer)
    await zombie.sync(Report(Version(1, 0)))
    await zombie.commit([group(0), group(1)])
    await scene.tick(trainer)
    await trainer.next_plan(1)
    await trainer.finish_step(1)
    await trainer.publish(Version(1, 1))
    other = await scene.writer("rollout-1")
    while zombie.ulid in (await scene.control()).writers:
        await keep_alive(scene, other)
        await scene.tick(trainer)
    late = await zombie.commit([group(2)])
    assert (await zombie.sync(Report(Version(1, 0)))).leases == {}
    forgotten = zombie.ulid
    await scene.tick(trainer)
    assert (await scene.control()).writers[forgotten].final == 0
    successor = await scene.trainer(trainer.state())
    assert late not in {delivered.ref.key for delivered in successor.ledger.delivered.values()}
    assert (await zombie.sync(Report(Version(1, 0)))).revoked
    assert zombie.ulid != forgotten


# Taking groups in


async def test_a_damaged_shard_is_named_in_the_next_plan_and_its_indices_are_granted_again(scene: Scene):
    trainer = await scene.trainer()
    writer = await scene.writer("rollout-0")
    await scene.tick(trainer)
    key = await writer.commit([group(0), group(1)])
    shard = scene.bucket.objects[key]
    scene.bucket.objects[key] = Object(shard.info, shard.data[:-9], shard.metadata)
    await scene.tick(trainer)
    assert sorted((await writer.sync(Report(version=None))).leases) == [0, 1, 2, 3]
    await writer.commit([group(0), group(1)])
    await scene.tick(trainer)
    plan = await plan_now(trainer, 1)
    assert (indices(plan), [shard.key for shard in plan.quarantined], plan.drops) == ([0, 1], [key], ())
    await finish(trainer, 1)
    await writer.commit([group(2), group(3)])
    await scene.tick(trainer)
    assert (await plan_now(trainer, 2)).quarantined == ()


async def test_groups_whose_shard_was_damaged_after_they_were_planned_are_left_out_for_good(scene: Scene):
    trainer = await scene.trainer()
    a, b = await scene.writer("a"), await scene.writer("b")
    await scene.tick(trainer)
    mine, yours = sorted(await scene.leases(a)), sorted(await scene.leases(b))
    rotten = await a.commit([group(index) for index in mine])
    await b.commit([group(index) for index in yours])
    await scene.tick(trainer)
    plan = await plan_now(trainer, 1)
    lost = [reference.index for reference in plan.groups if reference.key == rotten]
    kept = [index for index in indices(plan) if index not in lost]
    assert lost
    assert kept
    left = await trainer.withdraw(1, {rotten: "torn"})
    assert indices(left) == kept
    assert trainer.statistics()["dropped"] == {"damaged": len(lost)}
    assert len(trainer.ledger.planned) == SIZE  # the permits are held until the step is published

    successor = await scene.trainer()
    replayed = await plan_now(successor, 1)
    assert indices(replayed) == kept  # though it could read them
    assert replayed.replayed
    await finish(successor, 1)
    assert all(index in successor.ledger.frontier for index in indices(plan))
    await scene.tick(successor)
    assert successor.ledger.capacity(2 * SIZE) == 0
    assert [index for index in mine if index not in lost and not successor.ledger.taken(index)] == []


async def test_an_incomplete_group_is_quarantined(scene: Scene):
    trainer = await scene.trainer()
    writer = await scene.writer("rollout-0")
    await scene.tick(trainer)
    await writer.commit([group(0, rewards=(1.0,))])
    await writer.commit([group(1), group(2)])
    await scene.tick(trainer)
    plan = await plan_now(trainer, 1)
    assert indices(plan) == [1, 2]
    assert "1 samples, not 2" in plan.quarantined[0].reason


async def test_a_token_beyond_the_vocabulary_makes_a_shard_damaged(scene: Scene):
    trainer = Coordinator(scene.plain, scene.config, scene.clock, random.Random(0), vocabulary=7)
    await trainer.take_over()
    await trainer.publish(Version(1, 0))
    writer = await scene.writer("rollout-0")
    await scene.tick(trainer)
    await writer.commit([group(0)])
    await scene.tick(trainer)
    assert trainer.statistics()["queue_groups"] == 0


async def test_a_group_without_a_valid_sample_is_dropped_as_invalid(scene: Scene):
    trainer = await scene.trainer()
    writer = await scene.writer("rollout-0")
    await scene.tick(trainer)
    await writer.commit([group(0, rewards=(None, None)), group(1, rewards=(None, 1.0)), group(2)])
    await scene.tick(trainer)
    plan = await plan_now(trainer, 1)
    assert indices(plan) == [1, 2]
    assert [(drop.index, drop.reason) for drop in plan.drops] == [(0, "invalid")]


async def deliver(scene: Scene, trainer: Coordinator, writer: Writer, groups: int, rewards: tuple) -> None:
    """Until the trainer has taken in so many."""
    for _ in range(groups // (2 * SIZE)):
        await keep_alive(scene, writer)
        await scene.tick(trainer)
        await writer.commit([group(index, rewards=rewards) for index in await scene.leases(writer)])
        await scene.tick(trainer)
        trainer.dispatcher.refuse(1)


async def test_the_reason_that_no_sample_could_be_scored_is_in_what_the_trainer_waits_for(scene: Scene):
    trainer, writer = await scene.trainer(), await scene.writer("rollout-0")
    await deliver(scene, trainer, writer, 8, (None, None))
    assert (await waits_for(trainer, 1)) == "more groups: 0 of 2 ready; 8 dropped (invalid: raised); none running"
    assert trainer.dispatcher.losses() == "invalid: raised"


async def test_the_reason_that_prompts_fail_is_in_what_the_trainer_waits_for(scene: Scene):
    trainer, writer = await scene.trainer(), await scene.writer("rollout-0")
    for _ in range(2):
        await keep_alive(scene, writer)
        await scene.tick(trainer)
        for index in await scene.leases(writer):
            writer.fail(index, "prompt of 9 tokens")
        await writer.sync(Report(version=None))
        await scene.tick(trainer)
    assert "2 ready; 4 dropped (failed: prompt of 9 tokens); " in await waits_for(trainer, 1)
    assert trainer.dispatcher.first_why == {"failed": "prompt of 9 tokens"}


async def test_a_run_that_begins_with_nothing_but_invalid_samples_is_hopeless_and_says_why(scene: Scene):
    trainer, writer = await scene.trainer(), await scene.writer("rollout-0")
    await deliver(scene, trainer, writer, BARREN - 4, (None, None))
    await waits_for(trainer, 1)
    await deliver(scene, trainer, writer, 4, (None, None))
    with pytest.raises(Hopeless, match=f"none of the first {BARREN} groups .* can be trained: raised"):
        await plan_now(trainer, 1)
    successor = await scene.trainer()
    with pytest.raises(Hopeless):
        await plan_now(successor, 1)


ONE_TOO_MANY = (0.0, 1.0, 1.0)
"""Rewards of a group that is larger than the configured ones."""


async def test_workers_whose_every_shard_is_refused_end_the_run_which_says_why(scene: Scene):
    trainer, writer = await scene.trainer(), await scene.writer("rollout-0")
    await deliver(scene, trainer, writer, 2 * SIZE * (BARREN - 1), ONE_TOO_MANY)
    assert f"damaged shards: {BARREN - 1} (a group has 3 samples, not 2)" in await waits_for(trainer, 1)
    successor = await scene.trainer()
    await deliver(scene, successor, writer, 2 * SIZE, ONE_TOO_MANY)
    with pytest.raises(Hopeless, match=rf"the last {BARREN} shards .*\(a group has 3 samples, not 2\): workers"):
        await plan_now(successor, 1)


async def test_one_shard_in_between_that_can_be_trained_keeps_hope(scene: Scene):
    trainer, writer = await scene.trainer(), await scene.writer("rollout-0")
    await deliver(scene, trainer, writer, 2 * SIZE * (BARREN - 1), ONE_TOO_MANY)
    await writer.commit([group(0)])
    await scene.tick(trainer)
    await deliver(scene, trainer, writer, 2 * SIZE * (BARREN - 1), ONE_TOO_MANY)
    assert "1 of 2 ready" in await waits_for(trainer, 1)


async def test_one_valid_sample_or_a_trained_step_or_a_reward_that_may_still_start_keeps_hope(scene: Scene):
    trainer, writer = await scene.trainer(), await scene.writer("rollout-0")
    await deliver(scene, trainer, writer, 4, (None, 1.0))
    for step in (1, 2):
        await plan_now(trainer, step)
        await finish(trainer, step)
    await deliver(scene, trainer, writer, BARREN, (None, None))
    await waits_for(trainer, 3)
    scene = Scene()
    scene.config = scene.config.model_copy(update={"rewards": [RewardConfig(name="a", endpoint="http://x")]})
    trainer, writer = await scene.trainer(), await scene.writer("rollout-0")
    await deliver(scene, trainer, writer, BARREN, (None, None))
    await waits_for(trainer, 1)


async def test_dynamic_sampling_replaces_groups_without_spread_even_if_they_fill_the_whole_window():
    scene = Scene(max_staleness=0, dynamic_sampling=True)
    trainer = await scene.trainer()
    writer = await scene.writer("rollout-0")
    await scene.tick(trainer)
    await writer.commit([group(0, rewards=(1.0, 1.0)), group(1, rewards=(0.0, 0.0))])
    await scene.tick(trainer)
    assert await waits_for(trainer, 1) == "more groups: 0 of 2 ready; 2 dropped (no-spread); none running"
    await scene.tick(trainer)
    assert sorted(await scene.leases(writer)) == [2, 3]
    await writer.commit([group(2), group(3)])
    await scene.tick(trainer)
    plan = await plan_now(trainer, 1)
    assert indices(plan) == [2, 3]
    assert {drop.index: drop.reason for drop in plan.drops} == {0: "no-spread", 1: "no-spread"}


async def test_dynamic_sampling_gives_up_after_ten_times_a_step_and_trains_what_comes():
    scene = Scene(max_staleness=0, dynamic_sampling=True)
    trainer = await scene.trainer()
    writer = await scene.writer("rollout-0")
    for _ in range(10):
        await keep_alive(scene, writer)
        await scene.tick(trainer)
        await writer.commit([group(index, rewards=(1.0, 1.0)) for index in await scene.leases(writer)])
        await scene.tick(trainer)
        await waits_for(trainer, 1)
    await scene.tick(trainer)
    await writer.commit([group(index, rewards=(1.0, 1.0)) for index in await scene.leases(writer)])
    await scene.tick(trainer)
    plan = await plan_now(trainer, 1)
    assert indices(plan) == [20, 21]
    assert len(plan.drops) == 20


# Waiting


async def test_it_says_that_an_evaluation_comes_first(scene: Scene):
    trainer, writer = await scene.trainer(), await scene.writer("rollout-0")
    await keep_alive(scene, writer, Version(1, 0))
    await scene.tick(trainer)
    await trainer.evaluate(0, Version(1, 0))
    told = await waits_for(trainer, 1)
    assert told.startswith("the evaluation of step 0, which comes first; then more groups: 0 of 2 ready")


async def test_it_says_that_no_worker_has_registered(scene: Scene):
    trainer = await scene.trainer()
    await scene.tick(trainer)
    assert await waits_for(trainer, 1) == "rollout workers (none registered)"


async def test_it_says_how_many_groups_are_there_and_where_the_others_run(scene: Scene):
    trainer = await scene.trainer()
    writer = await scene.writer("rollout-0")
    await writer.sync(Report(version=Version(1, 0)))
    await scene.tick(trainer)
    await writer.commit([group(0)])
    await scene.tick(trainer)
    assert await waits_for(trainer, 1) == "more groups: 1 of 2 ready; 3 running on rollout-0"


async def test_groups_of_a_worker_that_has_loaded_nothing_yet_are_not_said_to_run(scene: Scene):
    trainer = await scene.trainer()
    writer = await scene.writer("rollout-0")
    await writer.sync(Report(version=None))
    await scene.tick(trainer)
    assert await waits_for(trainer, 1) == "more groups: 0 of 2 ready; 4 wait until rollout-0 has loaded a policy"


async def test_it_waits_for_a_running_group_that_the_step_would_make_stale(scene: Scene):
    trainer = await scene.trainer()
    writer = await scene.writer("rollout-0")
    await writer.sync(Report(version=Version(1, 0)))
    await scene.tick(trainer)
    await writer.commit([group(0), group(1)])
    await scene.tick(trainer)
    await plan_now(trainer, 1)
    await finish(trainer, 1)
    await writer.commit([group(2), group(4, step=1), group(5, step=1)])
    await scene.tick(trainer)
    assert await waits_for(trainer, 2) == "groups that would be stale after step 2: 1 running on rollout-0"
    await writer.commit([group(3)])
    await scene.tick(trainer)
    assert indices(await plan_now(trainer, 2)) == [2, 3]


async def test_the_loop_outlasts_an_outage_and_says_what_it_waits_for(scene: Scene):
    trainer = await scene.trainer()
    scene.down.on = True
    loop = asyncio.ensure_future(trainer.run())
    while trainer.waiting_for is None:
        await asyncio.sleep(0)
    assert "503" in trainer.waiting_for
    scene.down.on = False
    while trainer.waiting_for is not None:
        await asyncio.sleep(0)
    loop.cancel()


async def test_a_fault_in_the_loop_reaches_whoever_waits_for_a_plan(scene: Scene):
    trainer = await scene.trainer()
    await scene.trainer()
    waiting = asyncio.ensure_future(trainer.next_plan(1))
    with pytest.raises(Fenced):
        await trainer.run()
    with pytest.raises(Fenced):
        await waiting


# Restarts


async def test_a_control_file_deleted_while_a_step_is_waited_for_stops_nobody(scene: Scene):
    trainer = await scene.trainer()
    writer = await scene.writer("rollout-0")
    await scene.tick(trainer)
    held = await scene.leases(writer)
    del scene.bucket.objects[CONTROL_KEY]
    await scene.tick(trainer)
    assert (await writer.sync(Report(version=None))).leases == held


async def test_a_successor_fences_its_predecessor_everywhere(scene: Scene):
    old = await scene.trainer()
    writer = await scene.writer("rollout-0")
    await scene.tick(old)
    await writer.commit([group(0), group(1)])
    await scene.tick(old)
    new = await scene.trainer()
    assert new.term == 2
    scene.clock.time += HEARTBEAT_S
    for act in (old.tick, lambda: old.next_plan(1), lambda: old.evaluate(0, Version(1, 0)), lambda: old.stop("x")):
        with pytest.raises(Fenced, match="term 2"):
            await act()
    assert (await scene.control()).term == 2


async def test_delivered_groups_that_no_plan_names_survive_a_restart_without_being_generated_again(scene: Scene):
    old = await scene.trainer()
    writer = await scene.writer("rollout-0")
    await scene.tick(old)
    await writer.commit([group(0), group(1), group(2)])
    await scene.tick(old)
    await plan_now(old, 1)
    await finish(old, 1)
    state = old.state()
    new = await scene.trainer(state)
    assert sorted(await scene.leases(writer)) == [3, 4, 5]
    await writer.commit([group(3)])
    await scene.tick(new)
    assert indices(await plan_now(new, 2)) == [2, 3]


async def test_logged_plans_are_handed_out_unchanged_and_nothing_is_granted_meanwhile(scene: Scene):
    old = await scene.trainer()
    writer = await scene.writer("rollout-0")
    await scene.tick(old)
    await writer.commit([group(0), group(1)])
    await scene.tick(old)
    first = await plan_now(old, 1)
    await finish(old, 1)
    await writer.commit([group(2), group(3)])
    await scene.tick(old)
    second = await plan_now(old, 2)

    new = await scene.trainer()
    assert (await scene.control()).replaying
    await scene.tick(new)
    assert (await scene.control()).version == Version(1, 1)
    assert await scene.leases(writer) == {4: 1, 5: 1}
    replayed = await plan_now(new, 1)
    assert (replayed.groups, replayed.term, replayed.replayed) == (first.groups, 1, True)
    await finish(new, 1)
    assert (await scene.control()).version == Version(1, 1)
    assert (await plan_now(new, 2)).groups == second.groups
    await finish(new, 2)
    control = await scene.control()
    assert (control.version, control.replaying) == (Version(2, 2), False)
    assert await scene.leases(writer) == {4: 1, 5: 1, 6: 2, 7: 2}


async def test_groups_that_a_lower_bound_on_staleness_has_made_stale_are_dropped_as_stale(scene: Scene):
    old = await scene.trainer()
    writer = await scene.writer("rollout-0")
    await scene.tick(old)
    await writer.commit([group(index) for index in range(4)])
    await scene.tick(old)
    await plan_now(old, 1)
    await finish(old, 1)
    algorithm = scene.config.algorithm.model_copy(update={"max_staleness": 0})
    scene.config = scene.config.model_copy(update={"algorithm": algorithm})
    new = await scene.trainer(old.state())
    await writer.commit([group(index, step=1) for index in await scene.leases(writer)])
    await scene.tick(new)
    plan = await plan_now(new, 2)
    assert indices(plan) == [4, 5]
    assert [(drop.index, drop.reason) for drop in plan.drops] == [(2, "stale"), (3, "stale")]


async def test_leases_that_a_logged_plan_has_closed_do_not_come_back(scene: Scene):
    old = await scene.trainer()
    writer = await scene.writer("rollout-0")
    await scene.tick(old)
    state = old.state()
    await writer.commit([group(0), group(1)])
    await scene.tick(old)
    await plan_now(old, 1)
    new = await scene.trainer(state)
    await scene.tick(new)
    assert sorted(await scene.leases(writer)) == [2, 3]


async def test_without_control_the_leases_are_those_of_the_checkpoint(scene: Scene):
    old = await scene.trainer()
    writer = await scene.writer("rollout-0")
    await scene.tick(old)
    state = old.state()
    del scene.bucket.objects[CONTROL_KEY]
    new = await scene.trainer(state)
    assert new.term == 2
    assert await scene.leases(writer) == {0: 0, 1: 0, 2: 0, 3: 0}


async def test_a_checkpoint_below_what_was_collected_is_refused_in_words(scene: Scene):
    old = await scene.trainer()
    state = old.state()
    await old.log.append(Collect(old.term, below=old.log.position))
    with pytest.raises(StorageError, match="step 0 is too old"):
        await scene.trainer(state)


async def test_a_log_with_a_missing_plan_is_not_replayed(scene: Scene):
    old = await scene.trainer()
    await old.log.append(Plan(2, old.term, ()))
    with pytest.raises(StorageError, match="no plan of step 1"):
        await scene.trainer()


async def test_what_no_checkpoint_needs_is_deleted_and_the_rest_suffices_to_resume(scene: Scene):
    trainer = await scene.trainer()
    writer = await scene.writer("rollout-0")
    await scene.tick(trainer)
    used, waiting = await writer.commit([group(0), group(1)]), await writer.commit([group(2)])
    await scene.tick(trainer, LEASE_TIMEOUT_S)
    await plan_now(trainer, 1)
    await finish(trainer, 1)
    await scene.tick(trainer, HEARTBEAT_S)
    state = trainer.state()
    assert await trainer.collect([state]) == 1
    assert used not in scene.bucket.objects
    assert waiting in scene.bucket.objects
    successor = await scene.trainer(state)
    await scene.tick(successor)
    await writer.commit([group(3)])
    await scene.tick(successor)
    assert indices(await plan_now(successor, 2)) == [2, 3]
    with pytest.raises(StorageError, match="too old"):
        await scene.trainer()


@pytest.mark.parametrize("control", ["kept", "lost", "names it as met again"])
async def test_what_is_collected_during_a_replay_spares_the_plans_still_to_be_replayed(scene: Scene, control: str):
    """Also where the log alone tells of the writer, which never comes back, and one restart follows another."""
    trainer = await scene.trainer()
    writer = await scene.writer("rollout-0")
    await scene.tick(trainer)
    used = await writer.commit([group(0), group(1)])
    needed = await writer.commit([group(2), group(3)])
    await scene.tick(trainer)
    await plan_now(trainer, 1)
    await finish(trainer, 1)
    await plan_now(trainer, 2)

    async def spoil_control() -> None:
        await scene.tick(trainer, 20 * LEASE_TIMEOUT_S)
        if control == "lost":
            del scene.bucket.objects[CONTROL_KEY]
        elif control != "kept":
            met = {writer.ulid: WriterEntry("rollout-0", {}, acknowledged=0, final=0)}
            await scene.plain.put(CONTROL_KEY, dataclasses.replace(await scene.control(), writers=met).encode())

    await spoil_control()
    trainer = await scene.trainer()
    await plan_now(trainer, 1)
    await finish(trainer, 1)
    for _ in range(2):
        await scene.tick(trainer, 20 * LEASE_TIMEOUT_S)
        state = trainer.state()
        await trainer.collect([state])
        assert used not in scene.bucket.objects
        assert needed in scene.bucket.objects
        await spoil_control()
        trainer = await scene.trainer(state)
        assert {reference.key for reference in (await plan_now(trainer, 2)).groups} == {needed}
    await finish(trainer, 2)
    await scene.tick(trainer, 20 * LEASE_TIMEOUT_S)
    assert await trainer.collect([trainer.state()]) == 1
    if control != "kept":
        assert not trainer.state()["writers"]


@pytest.mark.parametrize("restarted", [True, False])
@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
async def test_whatever_the_stores_clock_does_nothing_untrained_is_collected(
    scene: Scene, jump: float, restarted: bool
):
    trainer = await scene.trainer()
    state = trainer.state()
    scene.store_clock.time += jump
    if restarted:
        trainer = await scene.trainer(state)
    writer = await scene.writer("rollout-0")
    for _ in range(3):
        await scene.tick(trainer)
        await keep_alive(scene, writer)
    planned, waiting = await writer.commit([group(0), group(1)]), await writer.commit([group(2)])
    await scene.tick(trainer)
    await plan_now(trainer, 1)
    await finish(trainer, 1)
    assert await trainer.collect([trainer.state(), state]) == 0
    assert {planned, waiting} <= scene.bucket.objects.keys()


async def test_shards_of_a_writer_long_gone_are_collected_once_no_kept_checkpoint_is_followed_by_their_plan(
    scene: Scene,
):
    trainer = await scene.trainer()
    first = trainer.state()
    writer = await scene.writer("rollout-0")
    await scene.tick(trainer)
    key = await writer.commit([group(0), group(1)])
    await scene.tick(trainer)
    await plan_now(trainer, 1)
    await finish(trainer, 1)
    while writer.ulid in (await scene.control()).writers:
        await scene.tick(trainer, LEASE_TIMEOUT_S)
    last = trainer.state()
    assert not last["writers"]
    assert await trainer.collect([last, first]) == 0
    assert await trainer.collect([last]) == 1
    assert key not in scene.bucket.objects


async def test_who_has_listened_to_nobody_yet_collects_nothing(scene: Scene):
    trainer = await scene.trainer()
    assert await trainer.collect([trainer.state()]) == 0
    assert not [record for record in await trainer_log.records(scene.plain) if isinstance(record, Collect)]


async def test_a_fenced_trainer_deletes_nothing_of_what_its_successor_is_given(scene: Scene):
    trainer = await scene.trainer()
    await scene.tick(trainer)
    state = trainer.state()
    successor = await scene.trainer(state)
    writer = await scene.writer("rollout-0")
    await scene.tick(successor)
    key = await writer.commit([group(0), group(1)])
    with pytest.raises(Fenced):
        await trainer.collect([state])
    assert key in scene.bucket.objects


async def test_acknowledged_shards_that_have_vanished_do_not_block_a_restart(scene: Scene):
    old = await scene.trainer()
    writer = await scene.writer("rollout-0")
    await scene.tick(old)
    await writer.commit([group(0)])
    await writer.commit([group(1)])
    await scene.tick(old)
    del scene.bucket.objects[shard_key(writer.ulid, 0)]
    new = await scene.trainer()
    await scene.tick(new)
    assert sorted(await scene.leases(writer)) == [0, 1, 2, 3]
    await writer.commit([group(0), group(1)])
    await scene.tick(new)
    assert indices(await plan_now(new, 1)) == [0, 1]


async def test_the_stop_record_ends_granting_and_tells_the_workers(scene: Scene):
    trainer = await scene.trainer()
    await trainer.stop("complete")
    writer = await scene.writer("rollout-0")
    await scene.tick(trainer)
    control = await writer.sync(Report(version=None))
    assert (control.stop, control.leases) == ("complete", {})
    records = await TrainerLog(scene.plain).take_over()
    assert (records[-1][1].reason, records[-1][1].step) == ("complete", 0)


# Evaluation


async def test_an_evaluation_is_assigned_until_its_result_is_there(scene: Scene):
    trainer = await scene.trainer()
    writer = await scene.writer("rollout-0")
    await scene.tick(trainer)
    await trainer.evaluate(0, Version(1, 0))
    request = (await writer.sync(Report(version=None))).evaluation
    assert request
    assert (request.step, request.version) == (0, Version(1, 0))
    assert await trainer.evaluation(0) is None
    await scene.plain.create(evaluation_key(0), b'{"set": {"avg@1": 0.5}}')
    await scene.tick(trainer)
    assert (await scene.control()).evaluation is None
    assert await trainer.evaluation(0) == {"set": {"avg@1": 0.5}}


async def test_the_evaluation_of_a_lost_writer_passes_to_another_and_survives_a_restart(scene: Scene):
    trainer = await scene.trainer()
    lost = await scene.writer("rollout-0")
    await scene.tick(trainer)
    await trainer.evaluate(0, Version(1, 0))
    state = trainer.state()
    other = await scene.writer("rollout-1")
    successor = await scene.trainer(state)
    for _ in range(15):
        await keep_alive(scene, other)
        await scene.tick(successor)
    control = await scene.control()
    assert control.writers[lost.ulid].final == 0
    assert control.evaluation
    assert control.evaluation.writer == other.ulid


async def test_an_evaluation_whose_result_is_there_is_not_asked_for_again(scene: Scene):
    trainer = await scene.trainer()
    await scene.writer("rollout-0")
    await scene.tick(trainer)
    await scene.plain.create(evaluation_key(0), b"{}")
    await trainer.evaluate(0, Version(1, 0))
    assert (await scene.control()).evaluation is None
