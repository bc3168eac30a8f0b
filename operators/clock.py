"""The time of the API server, which the Date of each of its answers tells: this machine's own where the two agree.

Times in a status outlive the replica that wrote them, and times of pods are the server's. By a clock that is an hour
fast, a replica that takes over would fail every job for want of progress, and take pods that are being stopped for
lost; one that is slow would keep a trainer in its back-off for an hour.
"""

import datetime
import email.utils
import logging
from collections.abc import Callable

AGREE_S = 20.0
"""A Date has whole seconds, and is as old as its answer was on its way: requests end after 15 s. So a smaller
difference is not corrected."""
logger = logging.getLogger(__name__)


def _local() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class ServerClock:
    """`local`: this machine's clock."""

    def __init__(self, local: Callable[[], datetime.datetime] = _local) -> None:
        self._local = local
        self._behind = datetime.timedelta(0)

    def now(self) -> datetime.datetime:
        return self._local() + self._behind

    def hear(self, date: str | None) -> None:
        """The header Date of an answer that has just come; one that cannot be read tells nothing."""
        try:
            behind = email.utils.parsedate_to_datetime(date or "") - self._local()
        except (ValueError, TypeError):
            return
        if abs(behind.total_seconds()) < AGREE_S:
            behind = datetime.timedelta(0)
        if bool(behind) != bool(self._behind):
            seconds = behind.total_seconds()
            told = f"is {abs(seconds):.0f} s {'behind' if seconds > 0 else 'ahead of'} the API server's, which counts"
            logger.warning(f"the clock of this machine {told if behind else 'agrees with the API server again'}")
        self._behind = behind
