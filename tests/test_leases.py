import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.leases import Delivered, Frontier, Holder, Lease, Ledger, Suspicions, grant
from pipeline.messages import shard_key
from pipeline.trainer_log import Drop, GroupRef, Plan


def group(index: int, writer: str = "W", oldest: int = 0, sequence: int = 0) -> Delivered:
    ref = GroupRef(index, shard_key("key", 0), "sha", 0, 2)
    return Delivered(ref, writer, sequence, oldest, oldest, valid=2, spread=True)


def lease(writer: str = "W", minimum: int = 0) -> Lease:
    return Lease(writer, minimum, granted=0.0)


def plan(step: int, indices: list[int], drops: tuple[Drop, ...] = ()) -> Plan:
    return Plan(step, term=1, groups=tuple(group(index).ref for index in indices), drops=drops)


def deal(indices: list[int], holders: list[Holder], limit: int = 10, suspicions: Suspicions | None = None):
    return grant(indices, holders, limit, suspicions or Suspicions(most=3))


@given(st.lists(st.integers(0, 40)))
def test_frontier_holds_exactly_what_was_closed_in_any_order(indices: list[int]):
    frontier = Frontier()
    for index in indices:
        frontier.close([index])
    assert {index for index in range(50) if index in frontier} == set(indices)
    assert frontier.low not in frontier
    restored = Frontier.from_json(frontier.to_json())
    assert (restored.low, restored.above) == (frontier.low, frontier.above)


def test_frontier_swallows_the_set_above_when_the_gap_closes():
    frontier = Frontier(low=3, above=[4, 5, 7])
    frontier.close([3])
    assert frontier.to_json() == {"low": 6, "above": [7]}


def test_the_lowest_free_index_is_granted_first_and_none_that_is_anywhere_else():
    ledger = Ledger(Frontier(low=2, above=[3]))
    ledger.lease(2, lease())
    ledger.lease(4, lease())
    assert ledger.deliver(group(4))
    ledger.lease(6, lease())
    ledger.set_aside(6, "failed")
    ledger.plan(plan(1, [7]))
    assert list(itertools.islice(ledger.free(), 3)) == [5, 8, 9]


def test_a_released_index_is_free_again_but_only_its_holder_can_release_it():
    ledger = Ledger()
    ledger.lease(0, lease("A"))
    assert not ledger.release(0, "B")
    assert ledger.release(0, "A")
    assert next(ledger.free()) == 0


def test_capacity_counts_leased_delivered_and_planned_until_the_policy_of_the_step_is_published():
    ledger = Ledger()
    for index in range(4):
        ledger.lease(index, lease())
    ledger.deliver(group(0))
    ledger.deliver(group(1))
    assert ledger.capacity(6) == 2
    ledger.plan(plan(1, [0, 1]))
    ledger.finish(1)
    assert ledger.capacity(6) == 2
    ledger.publish(1)
    assert ledger.capacity(6) == 4


def test_capacity_is_never_negative_when_the_bound_has_shrunk():
    ledger = Ledger()
    ledger.lease(0, lease())
    ledger.lease(1, lease())
    assert ledger.capacity(1) == 0


def test_an_index_set_aside_makes_room_at_once_and_closes_with_the_plan_that_drops_it():
    ledger = Ledger()
    ledger.lease(0, lease())
    ledger.deliver(group(0))
    ledger.set_aside(0, "no-spread")
    assert ledger.capacity(1) == 1
    assert 0 not in ledger.frontier
    assert next(ledger.free()) == 1
    ledger.plan(plan(1, [], drops=(Drop(0, "no-spread"),)))
    assert 0 in ledger.frontier
    assert not ledger.aside


def test_a_second_delivery_is_a_duplicate_wherever_the_first_one_has_got_to():
    ledger = Ledger()
    ledger.lease(0, lease())
    assert ledger.deliver(group(0))
    assert not ledger.deliver(group(0, "other"), catching_up=True)
    ledger.plan(plan(1, [0]))
    assert not ledger.deliver(group(0), catching_up=True)
    ledger.finish(1)
    ledger.publish(1)
    assert not ledger.deliver(group(0), catching_up=True)


def test_a_delivery_that_nobody_asked_for_is_refused_unless_a_predecessor_had_acknowledged_it():
    ledger = Ledger()
    assert not ledger.deliver(group(7))
    assert ledger.deliver(group(7), catching_up=True)


@pytest.mark.parametrize(("oldest", "welcome"), [(3, True), (2, False)])
def test_a_late_delivery_by_the_former_holder_counts_if_it_is_no_staler_than_the_new_lease(oldest: int, welcome: bool):
    ledger = Ledger()
    ledger.lease(0, lease("new", minimum=3))
    assert ledger.deliver(group(0, "old", oldest)) is welcome
    assert (0 in ledger.leases) is not welcome


def test_the_cursor_stays_at_the_oldest_shard_that_holds_something_unplanned():
    ledger = Ledger()
    for index, sequence in [(0, 3), (1, 4), (2, 5)]:
        ledger.lease(index, lease())
        ledger.deliver(group(index, sequence=sequence))
    ledger.set_aside(1, "invalid")
    assert ledger.cursors({"W": 6}) == {"W": 3}
    assert ledger.cursors({"other": 6}) == {"other": 6}
    ledger.plan(plan(1, [0]))
    assert ledger.cursors({"W": 6}) == {"W": 4}


def test_the_cursor_stays_at_a_shard_whose_groups_are_planned_until_their_step_is_trained_and_published():
    ledger = Ledger()
    ref = GroupRef(0, shard_key("W", 3), "sha", 0, 2)
    ledger.plan(Plan(1, term=1, groups=(ref,)))
    assert ledger.cursors({"W": 6}) == {"W": 3}
    assert ledger.cursors({"other": 6}) == {"other": 6}
    ledger.finish(1)
    ledger.publish(1)
    assert ledger.cursors({"W": 6}) == {"W": 6}


def test_indices_go_to_the_writer_with_the_fewest_leases():
    holders = [Holder("A", open=2), Holder("B", open=0)]
    assert deal([0, 1, 2, 3], holders) == [(0, "B"), (1, "B"), (2, "A"), (3, "B")]


def test_no_writer_gets_more_than_it_can_run_at_a_time():
    assert deal([0, 1, 2], [Holder("A", open=1), Holder("B", open=2)], limit=2) == [(0, "A")]


def test_an_index_that_its_writer_still_reports_as_failed_is_left_for_later_and_the_next_one_granted():
    assert deal([0, 1], [Holder("A", open=0, refuses=frozenset({0}))]) == [(1, "A")]


def test_a_failed_index_goes_to_another_writer_if_there_is_one():
    suspicions = Suspicions(most=3)
    assert not suspicions.failed(0, "A")
    assert deal([0], [Holder("A", open=0), Holder("B", open=5)], suspicions=suspicions) == [(0, "B")]
    assert deal([0], [Holder("A", open=0)], suspicions=suspicions) == [(0, "A")]


def test_an_index_is_given_up_after_the_allowed_number_of_failures():
    suspicions = Suspicions(most=3)
    assert [suspicions.failed(0, writer) for writer in "AAB"] == [False, False, True]


def test_innocent_companions_of_a_deadly_index_are_suspected_but_never_given_up():
    suspicions = Suspicions(most=2)
    assert suspicions.died([1, 2]) == []
    assert suspicions.died([1, 2]) == []
    assert suspicions.is_suspect(1)
    assert suspicions.is_suspect(2)
    assert suspicions.died([2]) == [2]
    suspicions.forget([1, 2])
    assert not suspicions.is_suspect(1)


def test_a_suspect_is_generated_alone_and_one_writer_is_emptied_for_it():
    suspicions = Suspicions(most=1)
    suspicions.died([0])
    busy, idle = Holder("A", open=3), Holder("B", open=0)
    assert deal([0, 1], [busy, idle], suspicions=suspicions) == [(0, "B"), (1, "A")]
    assert deal([0, 1], [Holder("A", open=3), Holder("B", open=1)], suspicions=suspicions) == [(1, "A")]
    assert deal([1], [Holder("A", open=1, exclusive=True)], suspicions=suspicions) == []
