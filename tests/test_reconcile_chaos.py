"""The reconciler in a world that fails (tests.clustermodel): whatever happens, the job comes to its end, and nothing is
lost, doubled or taken back. `make operator-chaos` plays a thousand seeds."""

import functools
import os

import pytest

from tests.clustermodel import play

pytestmark = pytest.mark.timeout(600)
FIRST = int(os.environ.get("CHAOS_FIRST_SEED", "0"))
SEEDS = int(os.environ.get("CHAOS_SEEDS", "80"))
GROUP = 20
played = functools.cache(play)


@pytest.mark.parametrize("first", range(FIRST, FIRST + SEEDS, GROUP))
def test_whatever_happens_the_job_comes_to_its_end_and_nothing_is_lost_or_doubled(first):
    for seed in range(first, min(first + GROUP, FIRST + SEEDS)):
        try:
            played(seed)
        except AssertionError as error:
            error.add_note(f"seed {seed}: python -c 'from tests.clustermodel import play; play({seed})'")
            raise


def test_the_worlds_reach_every_end():
    """A world in which nothing happens would prove nothing. The same seeds, whichever are played besides."""
    reasons, counted, disrupted, edited = set(), 0, 0, 0
    for seed in range(GROUP):
        world = played(seed)
        status = world.job["status"] if world.job else {"conditions": [], "restarts": 0, "disruptions": 0}
        reasons |= {entry["reason"] for entry in status["conditions"] if entry["type"] in ("Complete", "Failed")}
        counted += sum(world.counted.values())
        disrupted += status["disruptions"]
        edited += sum(event.reason == "Restarting" for event in world.events)
    assert {"Completed", "MaxRestartsExceeded"} <= reasons
    assert min(counted, disrupted, edited) >= 2
