"""operators.clock: whatever this machine's clock says, the time is the API server's."""

import datetime
import email.utils

import pytest

from operators.clock import ServerClock

NOW = datetime.datetime(2026, 3, 1, 12, tzinfo=datetime.UTC)


def date(seconds: float = 0.0) -> str:
    return email.utils.format_datetime(NOW + datetime.timedelta(seconds=seconds), usegmt=True)


@pytest.mark.parametrize(
    ("wrong_s", "corrected"), [(0, False), (15, False), (-15, False), (25, True), (3600, True), (-3600, True)]
)
def test_a_clock_that_is_wrong_is_corrected_and_small_differences_are_not_followed(
    wrong_s: float, corrected: bool
) -> None:
    local = NOW + datetime.timedelta(seconds=wrong_s)
    clock = ServerClock(lambda: local)
    assert clock.now() == local, "nothing is heard yet"
    clock.hear(date())
    assert clock.now() == (NOW if corrected else local)


def test_a_clock_that_is_set_right_meanwhile_counts_again(caplog: pytest.LogCaptureFixture) -> None:
    local = NOW + datetime.timedelta(hours=1)
    clock = ServerClock(lambda: local)
    for _ in range(3):
        clock.hear(date())
    local = NOW + datetime.timedelta(seconds=2)
    clock.hear(date(2))
    assert clock.now() == local
    assert [record.message for record in caplog.records] == [
        "the clock of this machine is 3600 s ahead of the API server's, which counts",
        "the clock of this machine agrees with the API server again",
    ]


@pytest.mark.parametrize(
    "told", [None, "", "yesterday", "Sun, 99 Mar 2026 12:00:00 GMT", "Sun, 01 Mar 2026 12:00:00 -0000"]
)
def test_what_is_no_date_tells_nothing(told: str | None) -> None:
    clock = ServerClock(lambda: NOW)
    clock.hear(date(3600))
    clock.hear(told)
    assert clock.now() == NOW + datetime.timedelta(hours=1)
