"""A simulation that notices nothing would prove nothing: each planted bug (tests.mutations) must be caught."""

import pytest

from tests import mutations

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize("name", ["a takeover keeps the term", "acknowledged groups are forgotten"])
def test_the_simulation_catches_a_planted_bug(name: str):
    assert mutations.caught(name)


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", mutations.MUTATIONS)
def test_the_simulation_catches_every_planted_bug(name: str):
    assert mutations.caught(name)
