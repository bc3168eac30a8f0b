import random

import pytest

from pipeline.leases import Delivered, Lease
from pipeline.planning import choose, refusal
from pipeline.trainer_log import GroupRef


def group(index: int, oldest: int = 0, newest: int | None = None, valid: int = 2, spread: bool = True) -> Delivered:
    newest = oldest if newest is None else newest
    return Delivered(GroupRef(index, "key", "sha", 0, 2), "W", 0, oldest, newest, valid, spread)


def running(*minimums: int) -> dict[int, Lease]:
    return {100 + number: Lease("W", minimum, 0.0) for number, minimum in enumerate(minimums)}


@pytest.mark.parametrize(
    ("candidate", "reason"),
    [
        (group(0, oldest=3), None),
        (group(0, oldest=2), "stale"),
        (group(0, oldest=2, newest=4), "stale"),
        (group(0, oldest=4, newest=5), "orphaned"),
        (group(0, oldest=4, valid=0), "invalid"),
        (group(0, oldest=4, spread=False), "no-spread"),
    ],
)
def test_step_5_with_staleness_1_refuses_what_it_must_not_train(candidate: Delivered, reason: str | None):
    assert refusal(candidate, step=5, max_staleness=1, need_spread=True) == reason


def test_equal_rewards_are_trained_unless_dynamic_sampling_is_on():
    assert refusal(group(0, spread=False), step=1, max_staleness=0, need_spread=False) is None


def test_the_oldest_policy_goes_first_then_the_lowest_index():
    delivered = [group(5, oldest=1), group(9, oldest=0), group(4, oldest=1)]
    choice = choose(2, delivered, {}, size=2, max_staleness=1)
    assert [chosen.ref.index for chosen in choice.groups] == [9, 4]


def test_nothing_is_chosen_before_the_batch_is_full():
    choice = choose(1, [group(0)], running(0), size=2, max_staleness=1)
    assert (choice.groups, choice.ready, choice.urgent) == ((), 1, ())


def test_the_planner_waits_for_a_running_group_that_the_step_would_make_stale():
    delivered = [group(index, oldest=1) for index in range(4)]
    assert choose(2, delivered, running(0), size=2, max_staleness=1).urgent == (100,)
    assert choose(2, delivered, running(1), size=2, max_staleness=1).groups


def test_the_planner_does_not_let_more_groups_fall_behind_than_the_steps_left_can_train():
    """Staleness 2, two groups a step: four groups of policy 0 cannot all be left to step 3, the last they may be in."""
    fresh = [group(0, oldest=1), group(1, oldest=1)]
    assert choose(2, fresh, running(0, 0, 0, 0), size=2, max_staleness=2).urgent == (100, 101, 102, 103)
    assert choose(2, fresh, running(0, 0), size=2, max_staleness=2).groups


@pytest.mark.parametrize("seed", range(40))
def test_with_bounded_admission_and_any_speeds_no_group_ever_goes_stale(seed: int):
    draw = random.Random(seed)
    size, staleness = draw.randint(1, 4), draw.randint(0, 4)
    leases: dict[int, Lease] = {}
    delivered: dict[int, Delivered] = {}
    following = 0
    for step in range(1, 40):
        while len(leases) + len(delivered) < (staleness + 1) * size:
            leases[following] = Lease("W", step - 1, 0.0)
            following += 1
        while not (choice := choose(step, delivered.values(), leases, size, staleness)).groups:
            index = draw.choice(list(leases)[-3:] if draw.random() < 0.9 else list(leases))
            delivered[index] = group(index, oldest=leases.pop(index).minimum)
        for chosen in choice.groups:
            del delivered[chosen.ref.index]
            assert refusal(chosen, step, staleness, need_spread=False) is None
