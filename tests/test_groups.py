import asyncio
import math
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.clock import SystemClock
from pipeline.groups import Groups, Trials
from pipeline.inference import Sampling
from pipeline.prompts import Prompt
from pipeline.sampling import Generated, Sampler
from pipeline.versions import Version


def run(trials: Trials, waiting: set[int], culprits: set[int], limit: int = 10**6) -> tuple[int, int, set[int]]:
    """Generate `waiting` on a server that dies of any of `culprits`: (deaths, rounds, indices that were blamed)."""
    deaths, rounds, blamed = 0, 0, set()
    waiting = set(waiting)
    while waiting:
        rounds += 1
        assert rounds < 10 * len(waiting) + 100
        culprit = trials.settle()
        if culprit is not None:
            blamed.add(culprit)
            waiting.discard(culprit)
        trials.recall(waiting)
        batch = trials.next(waiting) or (sorted(waiting)[:limit] if not trials.open else [])
        if culprits.intersection(batch):
            deaths += 1
            for index in batch:
                trials.lost(index)
        else:
            waiting.difference_update(batch)
    return deaths, rounds, blamed


@pytest.mark.parametrize("count", [1, 2, 3, 8, 64])
def test_one_culprit_is_found_in_a_logarithmic_number_of_deaths(count: int) -> None:
    for culprit in range(count):
        deaths, _, blamed = run(Trials(), set(range(count)), {culprit})
        assert blamed == {culprit}
        assert deaths <= math.ceil(math.log2(count)) + 2


def test_a_server_that_died_by_itself_costs_two_rounds() -> None:
    trials = Trials()
    for index in range(64):
        trials.lost(index)
    deaths, rounds, blamed = run(trials, set(range(64)), set())
    assert (deaths, rounds, blamed) == (0, 2, set())


@settings(deadline=None)
@given(st.sets(st.integers(0, 40)), st.sets(st.integers(0, 40), max_size=4))
def test_exactly_the_culprits_are_blamed_and_all_others_come_through(waiting: set[int], culprits: set[int]) -> None:
    _, _, blamed = run(Trials(), waiting, culprits)
    assert blamed == culprits & waiting


def test_a_known_culprit_is_tried_alone_when_it_is_granted_again() -> None:
    trials = Trials()
    run(trials, set(range(8)), {5})
    deaths, _, blamed = run(trials, set(range(8)), {5})
    assert (deaths, blamed) == (1, {5})


def test_a_suspect_that_is_no_longer_wanted_is_not_tried() -> None:
    trials = Trials()
    for index in range(4):
        trials.lost(index)
    assert trials.settle() is None
    assert trials.next({9}) == []
    assert not trials.open


class BrokenSampler:
    async def generate(self, prompt: Prompt, samples: int, sampling: Sampling, greedy: bool = False) -> Generated:
        return Generated(prompt, [1], Version(0, 0), samples, [], 8)

    async def score(self, generated: Generated) -> Any:
        raise KeyError("a fault of our own")


async def test_a_group_that_cannot_be_scored_is_not_lost_in_silence() -> None:
    async def prompt(index: int) -> Prompt:
        return Prompt(index, "sums", "2 + 2 =", "4")

    sampling = Sampling(temperature=1.0, max_new_tokens=8)
    sampler, clock = cast(Sampler, BrokenSampler()), SystemClock()
    groups = Groups(prompt, sampler, 1, sampling, clock, lambda *_: None, asyncio.Event())
    groups.begin({3}, 1)
    async with asyncio.timeout(30):
        while groups.held:
            await asyncio.sleep(0.01)
    with pytest.raises(RuntimeError, match="a fault of our own"):
        groups.begin({3}, 1)
