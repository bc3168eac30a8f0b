import asyncio
import time

import pytest

from tests.simulation import SCENARIOS, Hazards, VirtualClock, VirtualLoop, described, scenario_of, simulate

pytestmark = pytest.mark.timeout(180)
SHORT = (2, "calm")
"""A run of few storage calls."""


@pytest.mark.parametrize("seed", range(len(SCENARIOS)))
def test_every_index_is_trained_once_or_dropped_for_an_allowed_reason(seed: int):
    """One seed a scenario; a thousand: make store-sim."""
    simulate(seed)


def test_a_trainer_may_be_killed_at_any_storage_call():
    """At some of them here; at each one: test_every_crash."""
    moments = simulate(*SHORT).moments
    for moment in range(1, moments, moments // 5):
        assert simulate(*SHORT, crash_at=frozenset({moment})).counts["kills"] == 1


@pytest.mark.parametrize("seed", range(3))
def test_resumed_on_two_one_two_ranks_with_one_three_one_workers_nothing_is_dropped(
    seed: int, monkeypatch: pytest.MonkeyPatch
):
    """That plans are replayed unchanged and every index is planned once, each simulation checks."""
    monkeypatch.setitem(SCENARIOS, "resumed", Hazards(elastic=(1, 3, 1)))
    moments = simulate(seed, "resumed").moments
    counts = simulate(seed, "resumed", crash_at=frozenset({moments // 3, moments // 3 * 2})).counts
    assert (counts["kills"], counts["takeovers"]) == (2, 3)
    assert not [name for name in counts if name.startswith("dropped")]


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_every_crash():
    for moment in range(1, simulate(*SHORT).moments + 1):
        simulate(*SHORT, crash_at=frozenset({moment}))


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_many_seeds_hold(scenario: str):
    for seed in range(10_000, 10_020):
        simulate(seed, scenario)


@pytest.mark.parametrize("scenario", ["calm", "dynamic sampling"])
def test_a_violation_is_one_readable_line_that_says_how_to_see_it_again(scenario: str):
    line = described(13, scenario, "hung: " + "a\nlong story " * 1000)
    assert len(line) <= 400
    assert "\n" not in line
    assert line.startswith(f"{scenario}, seed 13: hung: a long story")
    assert "python -m tests.simulation --first 13 --seeds 1 --verbose" in line
    assert ("--scenario" in line) == (scenario != scenario_of(13))


def test_a_seed_decides_everything():
    assert simulate(9) == simulate(9)


def test_an_hour_of_virtual_time_takes_no_real_time():
    async def wait() -> float:
        await VirtualClock().sleep(3600.0)
        return VirtualClock().now()

    started = time.monotonic()
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(wait()) == 1_700_003_600.0
    assert time.monotonic() - started < 10


def test_tasks_that_only_wait_for_each_other_are_reported_as_a_deadlock():
    async def wait() -> None:
        await asyncio.Event().wait()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner, pytest.raises(AssertionError, match="deadlock"):
        runner.run(wait())
