"""pipeline.batching: reading a plan's samples, and packing them with shared prompts."""

import dataclasses
import hashlib

import numpy as np
import pytest

from pipeline import batching, codec, experience
from pipeline.algorithms.samples import Samples
from pipeline.algorithms.values import gae
from pipeline.batching import EMPTY, EXAMPLE, Unreadable
from pipeline.experience import Damaged, Ragged, Rollout, RolloutGroup, Step
from pipeline.storage import MemoryBucket, Storage
from pipeline.trainer_log import GroupRef, Plan
from pipeline.versions import Version
from tests.batches import batch_of, random_batch

# Reading


def rollout(ids, *, reward: float | None = 1.0, invalid=None, step=3, finish="stop", rewards=None):
    return Rollout(
        completion_ids=ids,
        logprobs=[-0.25 * (n + 1) for n in range(len(ids))],
        completion="",
        finish_reason=finish,
        reward=reward,
        rewards={"task": reward} if rewards is None else rewards,
        invalid=invalid,
        spans=[(0, Version(1, step))],
    )


def group(index, prompt, rollouts):
    return RolloutGroup(index, "train", "", None, prompt, rollouts, created=0.0)


@pytest.fixture
def store(clock):
    return Storage(MemoryBucket(clock), clock)


async def planned(store, shards, order) -> Plan:
    """Store `shards` (key → groups) and plan the (key, number of the group) in `order`."""
    references = {}
    for key, groups in shards.items():
        data = codec.encode(groups)
        await store.create(key, data)
        start = 0
        for number, entry in enumerate(groups):
            stop = start + len(entry.rollouts)
            references[key, number] = GroupRef(entry.index, key, hashlib.sha256(data).hexdigest(), start, stop)
            start = stop
    return Plan(step=1, term=1, groups=tuple(references[place] for place in order))


async def test_a_plan_is_read_in_its_own_order_from_several_shards(store):
    shards = {
        "a.parquet": [group(7, [1, 2], [rollout([5]), rollout([6, 7])]), group(8, [3], [rollout([8, 9], step=2)])],
        "b.parquet": [group(9, [4, 4, 4], [rollout([1, 2, 3], finish="length")])],
    }
    batch = await batching.load_plan(store, await planned(store, shards, [("b.parquet", 0), ("a.parquet", 1)]))
    assert batch.prompts.values.tolist() == [4, 4, 4, 3]
    assert batch.completions.values.tolist() == [1, 2, 3, 8, 9]
    assert batch.completions.offsets.tolist() == [0, 3, 5]
    assert batch.logprobs.values.tolist() == [-0.25, -0.5, -0.75, -0.25, -0.5]
    assert batch.lengths.tolist() == [3, 2]
    assert batch.groups.tolist() == [0, 1]
    assert batch.steps.tolist() == [3, 2]
    assert batch.truncated.tolist() == [True, False]
    assert batch.valid.tolist() == [True, True]


async def test_samples_without_a_reward_or_marked_invalid_take_no_part(store):
    samples = [
        rollout([5], reward=0.5, rewards={"task": 0.5, "form": 2.0}),
        rollout([6], reward=None, invalid="reward task raised", rewards={"form": 1.0}),
        rollout([7], reward=0.25, invalid="too long", rewards={"task": 0.25}),
    ]
    plan = await planned(store, {"a.parquet": [group(0, [1], samples)]}, [("a.parquet", 0)])
    batch = await batching.load_plan(store, plan)
    assert batch.valid.tolist() == [True, False, False]
    assert np.isnan(batch.rewards[1])
    assert {name: values.tolist()[::2] for name, values in batch.parts.items()} == {
        "task": [0.5, 0.25],
        "form": [2.0, pytest.approx(np.nan, nan_ok=True)],
    }


async def test_the_greedy_completion_of_a_group_gives_its_baseline_and_is_no_sample(store):
    def with_greedy(index, reward):
        greedy = rollout([8], reward=reward, rewards={"task": 2.0 * (reward or 0)}, invalid=experience.GREEDY)
        return group(index, [1], [rollout([5, 6]), rollout([7]), greedy])

    shards = {"a.parquet": [with_greedy(0, 0.5), with_greedy(1, None)]}
    batch = await batching.load_plan(store, await planned(store, shards, [("a.parquet", 1), ("a.parquet", 0)]))
    assert batch.completions.values.tolist() == [5, 6, 7] * 2
    assert (batch.groups.tolist(), batch.valid.tolist()) == ([0, 0, 1, 1], [True] * 4)
    np.testing.assert_array_equal(batch.baselines, [np.nan, np.nan, 0.5, 0.5])
    assert {name: values.tolist() for name, values in batch.baseline_parts.items()} == {"task": [0, 0, 1, 1]}


async def test_a_process_reward_counts_at_its_token_and_estimators_of_whole_samples_see_the_sum(store):
    """Reward 2: .5 with the first of three tokens, −.25 with the second, the rest at the end."""
    graded = dataclasses.replace(rollout([5, 6, 7], reward=2.0), steps=[Step(0, 0.5), Step(1, -0.25)])
    shards = {"a.parquet": [group(0, [1], [graded, rollout([8], reward=0.0)])]}
    batch = await batching.load_plan(store, await planned(store, shards, [("a.parquet", 0)]))
    assert batch.credits.tolist() == [0.5, -0.25, 0, 0]
    samples = Samples(batch.rewards, batch.valid, batch.groups, batch.lengths, credits=batch.credits)
    assert samples.token_rewards.tolist() == [0.5, -0.25, 1.75, 0]
    assert samples.discounted(samples.token_rewards, 0.5).tolist() == [0.8125, 0.625, 1.75, 0]
    judged = dataclasses.replace(samples, values=np.array([0.5, 1.0, 0.25, 0.0]))
    # δ = .5 + 1 − .5, −.25 + .25 − 1, 1.75 − .25; each with half of what follows.
    np.testing.assert_allclose(gae(judged, gamma=1.0, gae_lambda=0.5), [1.0 - 0.125, -0.25, 1.5, 0.0])
    assert samples.scores.tolist() == [2.0, 0.0]


async def test_a_shard_that_is_not_the_planned_one_is_refused(store):
    plan = await planned(store, {"a.parquet": [group(0, [1], [rollout([5])])]}, [("a.parquet", 0)])
    await store.put("a.parquet", codec.encode([group(0, [1], [rollout([6])])]))
    with pytest.raises(Damaged, match=r"a\.parquet: its sha256 is not the planned one"):
        await batching.load_plan(store, plan)


async def test_a_shard_that_has_gone_is_named(store):
    plan = Plan(1, 1, (GroupRef(0, "gone.parquet", "0" * 64, 0, 1),))
    with pytest.raises(Damaged, match=r"gone\.parquet: planned, but not in the store"):
        await batching.load_plan(store, plan)


async def test_every_shard_that_is_not_what_was_planned_is_named_at_once(store):
    shards = {f"{name}.parquet": [group(number, [1], [rollout([5])])] for number, name in enumerate("abc")}
    plan = await planned(store, shards, [(key, 0) for key in shards])
    await store.delete("a.parquet")
    found = store.bucket.objects["c.parquet"]
    store.bucket.objects["c.parquet"] = dataclasses.replace(found, data=found.data[:-1])
    with pytest.raises(Unreadable) as caught:
        await batching.load_plan(store, plan)
    assert list(caught.value.shards) == ["a.parquet", "c.parquet"]


async def test_rows_of_another_prompt_are_refused(store):
    plan = await planned(store, {"a.parquet": [group(4, [1], [rollout([5])])]}, [("a.parquet", 0)])
    wrong = dataclasses.replace(plan, groups=(dataclasses.replace(plan.groups[0], index=5),))
    with pytest.raises(Damaged, match="rows 0:1 are not those of prompt index 5"):
        await batching.load_plan(store, wrong)


def test_updates_split_whole_groups_in_the_plans_order():
    batch = batch_of([([1], [[1], [2]])] * 4, valid=[1, 0, 1, 1, 1, 1, 1, 1])
    first, second = batching.updates(batch, 2)
    assert first.tolist() == [True, False, True, True, False, False, False, False]
    assert second.tolist() == [False] * 4 + [True] * 4


def test_updates_of_a_plan_that_has_lost_groups_still_take_every_sample_once():
    batch = batch_of([([1], [[1], [2]])] * 3)
    assert np.sum(batching.updates(batch, 2), axis=0).tolist() == [1] * 6
    assert np.sum(batching.updates(batch, 4), axis=0).tolist() == [1] * 6


# Packing


def packed(batch, ranks=1, max_tokens=4096, include=None):
    return batching.pack(batch, batch.valid if include is None else include, ranks, max_tokens)


def scored(parts):
    """Every (sample, position, predicted id) that the micro-batches score, sorted."""
    return sorted(
        (int(row), int(column), int(target))
        for part in parts
        for row, column, target, inside in zip(part.row, part.column, part.target, part.mask, strict=True)
        if inside
    )


def contents(batch, include=None):
    include = batch.valid if include is None else include
    rows = np.split(batch.completions.values, batch.completions.offsets[1:-1])
    return [(n, c, int(id)) for n, ids in enumerate(rows) if include[n] for c, id in enumerate(ids)]


@pytest.fixture(params=[{"prompt": (1, 30), "completion": (1, 20)}, {"prompt": (40, 60), "completion": (1, 3)}])
def batch(request):
    return random_batch(6, 5, vocabulary=50, **request.param)


def test_the_documented_example_packs_as_drawn():
    (part,) = packed(batch_of([([3, 1, 4], [[1, 5, 9], [2, 6]])], logprobs=[[0] * 3, [0] * 2]))[0]
    for field in dataclasses.fields(part):
        np.testing.assert_array_equal(getattr(part, field.name), getattr(EXAMPLE, field.name), field.name)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("max_tokens", [80, 150, 4096])
def test_every_response_token_is_scored_once_whatever_the_split(batch, ranks, max_tokens):
    parts = [part for share in packed(batch, ranks, max_tokens) for part in share]
    assert scored(parts) == contents(batch)


@pytest.mark.parametrize("max_tokens", [80, 150, 4096])
def test_a_micro_batch_holds_at_most_the_allowed_tokens(batch, max_tokens):
    assert max(len(part.input_ids) for share in packed(batch, 2, max_tokens) for part in share) <= max_tokens


def test_each_completion_token_is_predicted_by_the_token_before_it(batch):
    for part in packed(batch, max_tokens=150)[0]:
        first = part.column == 0
        np.testing.assert_array_equal(part.input_ids[part.source[~first]], part.target[np.flatnonzero(~first) - 1])
        prompts = [batch.prompts.values[batch.prompts.offsets[row + 1] - 1] for row in part.row[first]]
        np.testing.assert_array_equal(part.input_ids[part.source[first]], prompts)


def test_positions_of_a_completion_go_on_where_its_prompt_ends(batch):
    for part in packed(batch, max_tokens=150)[0]:
        prompt_lengths = np.diff(batch.prompts.offsets)[part.row]
        np.testing.assert_array_equal(part.position_ids[part.source], prompt_lengths + part.column - 1)


def test_sampled_logprobs_stay_with_their_tokens(batch):
    for part in packed(batch, max_tokens=150)[0]:
        places = batch.completions.offsets[part.row] + part.column
        np.testing.assert_array_equal(part.sampled, batch.logprobs.values[places])


def test_a_group_shares_its_prompt_unless_it_is_too_long():
    group = [([1] * 10, [[2] * 5] * 4)]
    assert [len(part.input_ids) for part in packed(batch_of(group))[0]] == [10 + 4 * 4]
    assert [len(part.input_ids) for part in packed(batch_of(group), max_tokens=18)[0]] == [10 + 2 * 4] * 2


def test_blocks_are_the_prompts_with_their_completions():
    (part,) = packed(batch_of([([1] * 3, [[2] * 3, [2]]), ([4], [[5], [6]])]))[0]
    assert part.blocks == [(0, 5), (5, 6)]


def test_a_sample_longer_than_the_limit_gets_a_micro_batch_of_its_own():
    sizes = [len(part.input_ids) for part in packed(batch_of([([1] * 9, [[2] * 9, [3]])]), max_tokens=12)[0]]
    assert sorted(sizes) == [9, 17]


@pytest.mark.parametrize("ranks", [2, 4, 5])
@pytest.mark.parametrize("max_tokens", [80, 4096])
def test_every_rank_gets_as_many_micro_batches_as_the_others(batch, ranks, max_tokens):
    shares = packed(batch, ranks, max_tokens)
    assert len(shares) == ranks
    assert len({len(share) for share in shares}) == 1


def test_ranks_without_samples_get_an_empty_micro_batch():
    shares = packed(batch_of([([1, 2], [[3, 4]])]), ranks=3)
    assert [len(share[0].input_ids) for share in shares] == [3, 2, 2]
    for share in shares[1:]:
        assert share == [EMPTY]
        assert not share[0].mask.any()


def test_a_step_without_any_valid_sample_still_packs():
    assert packed(batch_of([([1, 2], [[3, 4]])], valid=[False]), ranks=2) == [[EMPTY], [EMPTY]]


def test_ranks_get_about_the_same_number_of_tokens():
    batch = random_batch(32, 4, prompt=(5, 60), completion=(5, 60), vocabulary=9)
    for share_of_each in zip(*packed(batch, ranks=4, max_tokens=400), strict=True):
        tokens = [len(part.input_ids) for part in share_of_each]
        assert max(tokens) - min(tokens) <= 0.15 * max(tokens)


def test_only_the_included_samples_are_packed(batch):
    include = np.arange(len(batch.valid)) % 3 == 1
    parts = [part for share in packed(batch, 2, 150, include) for part in share]
    assert scored(parts) == contents(batch, include)


def test_the_same_batch_always_packs_in_the_same_way(batch):
    for one, other in zip(packed(batch, 2, 150)[1], packed(batch, 2, 150)[1], strict=True):
        np.testing.assert_array_equal(one.input_ids, other.input_ids)
        np.testing.assert_array_equal(one.row, other.row)


def test_observations_are_input_but_neither_scored_nor_counted():
    masks = [[True, True, False, False, True], [True, False, True], [True, True]]
    batch = batch_of([([3, 1], [[1, 2, 8, 9, 4], [5, 8, 6]]), ([2], [[7, 7]])], masks=masks)
    assert batch.lengths.tolist() == [3, 2, 2]
    assert batch.turns.tolist() == [2, 2, 1]
    (part,) = packed(batch)[0]
    assert part.input_ids.tolist() == [3, 1, 1, 2, 8, 9, 5, 8, 2, 7]
    assert part.target.tolist() == [1, 2, 4, 5, 6, 7, 7]
    assert part.input_ids[part.source].tolist() == [1, 1, 9, 1, 8, 2, 7]
    assert part.row.tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert part.column.tolist() == [0, 1, 2, 0, 1, 0, 1]


def test_a_micro_batch_counts_the_tokens_of_observations(batch):
    masked = dataclasses.replace(batch, mask=Ragged(np.zeros_like(batch.mask.values), batch.mask.offsets))
    for max_tokens in (80, 150):
        parts = [part for share in packed(masked, 2, max_tokens) for part in share]
        assert max(len(part.input_ids) for part in parts) <= max_tokens
        assert sum(len(part.target) for part in parts if part is not EMPTY) == 0
