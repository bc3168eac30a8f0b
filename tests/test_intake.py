import numpy as np
import pytest

from pipeline import codec
from pipeline.algorithms import dapo
from pipeline.algorithms.samples import Samples
from pipeline.config import AlgorithmConfig, SamplingConfig
from pipeline.experience import Rollout, RolloutGroup
from pipeline.intake import Intake, summarise
from pipeline.leases import Lease, Ledger
from pipeline.messages import shard_key
from pipeline.roster import Known
from pipeline.storage import MemoryStorage, Object
from pipeline.trainer_log import GroupRef, Quarantine
from pipeline.versions import Version


def rollout(reward: float | None, *steps: int) -> Rollout:
    spans = [(number, Version(1, step)) for number, step in enumerate(steps)]
    invalid = "raised" if reward is None else None
    return Rollout([7] * len(steps), [-0.1] * len(steps), "x", "stop", reward, {}, invalid, spans)


def group(index: int, *rollouts: Rollout) -> RolloutGroup:
    return RolloutGroup(index, "set", "prompt", None, [5], list(rollouts), 0.0)


def summaries(*groups: RolloutGroup):
    return summarise(codec.decode(codec.encode(list(groups))), "key", "sha", "W", 3)


def test_groups_are_found_by_row_range_in_the_order_of_the_shard():
    first, second = summaries(group(9, rollout(0.0, 2), rollout(1.0, 2)), group(4, rollout(1.0, 1), rollout(1.0, 1)))
    assert (first.ref, second.ref) == (GroupRef(9, "key", "sha", 0, 2), GroupRef(4, "key", "sha", 2, 4))
    assert (first.writer, first.sequence) == ("W", 3)


def test_a_group_is_as_old_as_the_oldest_version_that_made_any_token_of_a_sample_in_training():
    (mixed,) = summaries(group(0, rollout(0.0, 3, 2), rollout(1.0, 3), rollout(None, 0)))
    assert (mixed.oldest, mixed.newest, mixed.valid) == (2, 3, 2)


def test_a_group_without_a_valid_sample_is_summarised_all_the_same():
    (none,) = summaries(group(0, rollout(None, 5), rollout(None, 4)))
    assert (none.oldest, none.newest, none.valid, none.spread) == (4, 5, 0, False)


@pytest.mark.parametrize(
    ("rewards", "spread"),
    [((0.0, 1.0), True), ((1.0, 1.0), False), ((0.0, 1e-9), False), ((1.0, None), False), ((0.0, 1.0, None), True)],
)
def test_spread_means_that_the_rewards_of_valid_samples_differ(rewards: tuple, spread: bool):
    (found,) = summaries(group(0, *(rollout(reward, 0) for reward in rewards)))
    assert found.spread is spread


def test_spread_is_that_of_the_rewards_before_shaping_which_alone_would_tell_the_samples_apart():
    (found,) = summaries(group(0, rollout(1.0, 0), rollout(1.0, *[0] * 10)))
    assert not found.spread
    sampling = SamplingConfig(max_new_tokens=10)
    parameters = {"overlong_buffer": 0.5, "overlong_penalty": 1.0}
    config = AlgorithmConfig(
        type="dapo", total_steps=1, prompts_per_step=1, group_size=2, sampling=sampling, parameters=parameters
    )
    trained = Samples(np.ones(2), np.ones(2, np.bool_), np.zeros(2, np.int64), np.array([1, 10]))
    assert dapo.advantages(trained, config).any()


@pytest.fixture
def store(clock) -> MemoryStorage:
    return MemoryStorage(clock)


async def write(store: MemoryStorage, sequence: int, index: int, metadata: dict[str, str] | None = None) -> str:
    key = shard_key("W", sequence)
    data = codec.encode([group(index, rollout(0.0, 0), rollout(1.0, 0))])
    await store.create(key, data, {"indices": f"[{index}]"} if metadata is None else metadata)
    return key


def leased(*indices: int) -> Ledger:
    ledger = Ledger()
    for index in indices:
        ledger.lease(index, Lease("W", 0, 0.0))
    return ledger


async def test_a_writer_is_read_up_to_its_last_shard_and_no_further_than_its_final_one(store: MemoryStorage):
    for number in range(3):
        await write(store, number, index=number)
    ledger, known = leased(0, 1, 2), Known("W", "rollout-0", final=2)
    await Intake(store, 2, None).drain(known, ledger)
    assert (known.cursor, sorted(ledger.delivered)) == (2, [0, 1])


@pytest.mark.parametrize("metadata", [{"indices": "[0]"}, {"indices": "torn"}, {}])
async def test_a_damaged_shard_does_not_hide_the_next_one(store: MemoryStorage, metadata: dict[str, str]):
    key = await write(store, 0, 0, metadata)
    await write(store, 1, 1)
    shard = store.memory.objects[key]
    store.memory.objects[key] = Object(shard.info, b"PAR1" + shard.data[4:-30], shard.metadata)
    ledger, known, intake = leased(0, 1), Known("W", "rollout-0"), Intake(store, 2, None)
    await intake.drain(known, ledger)
    assert (known.cursor, list(ledger.delivered), list(intake.damaged)) == (2, [1], [key])
    assert (0 in ledger.leases) is (metadata != {"indices": "[0]"})


async def test_a_damaged_shard_is_named_by_one_plan_only_even_if_it_is_read_again(store: MemoryStorage):
    key = shard_key("W", 0)
    await store.create(key, b"no parquet")
    intake = Intake(store, 2, None)
    await intake.drain(Known("W", "rollout-0"), Ledger())
    intake.logged([Quarantine(key, "reason")])
    await intake.drain(Known("W", "rollout-0"), Ledger())
    assert intake.damaged == {}
