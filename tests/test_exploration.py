"""Small worlds in which every order of events is tried; larger ones: python -m tests.exploration --help."""

import pytest

from tests import mutations
from tests.exploration import Broken, Size, explore

pytestmark = pytest.mark.timeout(300)


SMALL = Size(writers=1, steps=1, staleness=0, crashes=1, revocations=0)


@pytest.mark.parametrize(
    "size",
    [
        SMALL,
        Size(writers=1, steps=1, staleness=1, crashes=0, revocations=1),
        pytest.param(Size(writers=1, steps=1, staleness=0, crashes=1, revocations=1), marks=pytest.mark.slow),
        pytest.param(Size(writers=1, steps=2, staleness=0, crashes=1, revocations=0), marks=pytest.mark.slow),
    ],
)
def test_in_every_order_of_events_the_invariants_hold_and_the_run_can_still_be_finished(size: Size):
    found = explore(size, most=100_000)
    assert found.states > 250
    assert found.finished


@pytest.mark.parametrize("name", ["logged plans are made anew", "one permit too many"])
def test_the_exploration_catches_a_planted_bug(name: str):
    with mutations.MUTATIONS[name].planted(), pytest.raises(Broken):
        explore(SMALL, most=100_000)
