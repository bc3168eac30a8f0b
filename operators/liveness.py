"""Whether the operator hears and works: how old the last word of each watch is, and whether the queue moves.

A watch proves itself by what it brings, bookmarks included, and each at least once a minute. Pure but for the clock.
"""

import time
from collections.abc import Callable

WATCH_LIMIT_S = 240.0
STALL_LIMIT_S = 180.0


class Health:
    """`stalled_s`: for how long keys have waited without one being finished."""

    def __init__(self, stalled_s: Callable[[], float] = lambda: 0.0, clock: Callable[[], float] = time.monotonic):
        self.stalled_s, self._clock = stalled_s, clock
        self._heard: dict[str, float] = {}
        self.filling = False
        """Whether this replica leads and does not know all objects yet."""

    def expect(self, source: str) -> None:
        """From now on `source` has to give signs of life. That a list succeeds is none: the watch may be dead."""
        self._heard.setdefault(source, self._clock())

    def beat(self, source: str) -> None:
        """`source` gave a sign of life."""
        self._heard[source] = self._clock()

    def forget(self, *but: str) -> None:
        """Nothing is expected any more of other sources than these."""
        self._heard = {source: heard for source, heard in self._heard.items() if source in but}

    def ages(self) -> dict[str, float]:
        """Seconds since the last sign of each source."""
        now = self._clock()
        return {source: now - heard for source, heard in self._heard.items()}

    def waits_for(self) -> str | None:
        """What stands between this replica and its readiness; None: nothing. One that stands by is ready."""
        if not self._heard:
            return "the API server"
        return "the caches to fill" if self.filling else None

    def faults(self) -> list[str]:
        """Why the process should be replaced, one line each."""
        deaf = [
            f"{source}: nothing was heard for {age:.0f} s (limit {WATCH_LIMIT_S:.0f} s)"
            for source, age in sorted(self.ages().items())
            if age > WATCH_LIMIT_S
        ]
        stalled = self.stalled_s()
        if stalled > STALL_LIMIT_S:
            deaf.append(f"queue: jobs wait and none was finished for {stalled:.0f} s (limit {STALL_LIMIT_S:.0f} s)")
        return deaf
