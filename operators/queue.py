"""A work queue of keys: each key waits at most once, is worked on by one worker at a time, and comes back with a
growing delay after a failure. A key that is added while it is worked on is worked on again afterwards.

Its size is bounded by the number of different keys. Nothing in it outlives the process: who fills it, fills it anew.
"""

import asyncio
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
FIRST_DELAY_S = 0.2
LONGEST_DELAY_S = 60.0


def delay_after(failures: int, jitter: float) -> float:
    """Seconds until the next try after so many failures in a row; `jitter` from 0 to 1 spreads them by a quarter."""
    return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(failures - 1, 30)) * (1 - 0.25 * jitter)


class WorkQueue(Generic[K]):
    """`waited(seconds)` is told how long each key was due before its work began."""

    def __init__(self, waited: Callable[[float], None] = lambda seconds: None) -> None:
        self.waited = waited
        self.busy: dict[K, float] = {}
        """What is worked on now, and since when (loop time)."""
        self._due: OrderedDict[K, float] = OrderedDict()  # in order, with the time since when
        self._again: set[K] = set()  # added while busy
        self._later: dict[K, asyncio.TimerHandle] = {}
        self._failures: dict[K, int] = {}
        self._finished = 0.0  # loop time
        self._ready = asyncio.Semaphore(0)

    def add(self, key: K, delay_s: float = 0.0) -> None:
        """Have `key` worked on after `delay_s` at the latest; an earlier appointment stands. Only what is wanted at
        once cuts a failure's delay short: echoes of what happens to a broken object must not hammer the server."""
        now = asyncio.get_running_loop().time()
        timer = self._later.get(key)
        if timer is not None:
            if timer.when() <= now + delay_s or (delay_s > 0 and key in self._failures):
                return
            timer.cancel()
            del self._later[key]
        if delay_s > 0:
            if key not in self._due:
                self._later[key] = asyncio.get_running_loop().call_later(delay_s, self._now_due, key)
        elif key in self.busy:
            self._again.add(key)
        elif key not in self._due:
            self._due[key] = now
            self._ready.release()

    async def work(self, visit: Callable[[K], Awaitable[float | None]], workers: int) -> None:
        """Runs until cancelled. `visit` returns the seconds after which it wants the key back at the latest, or None;
        it may raise any Exception."""
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(self._work(visit))

    def depth(self) -> int:
        """Keys that are due and not yet worked on."""
        return len(self._due)

    def stalled_s(self) -> float:
        """Seconds for which keys have been waiting and none was finished; 0 where none waits."""
        if not self._due and not self.busy:
            return 0.0
        oldest = min([*list(self._due.values())[:1], *self.busy.values()])
        return asyncio.get_running_loop().time() - max(oldest, self._finished)

    def _now_due(self, key: K) -> None:
        self._later.pop(key, None)
        self.add(key)

    async def _work(self, visit: Callable[[K], Awaitable[float | None]]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._ready.acquire()
            key, since = self._due.popitem(last=False)
            self.busy[key] = loop.time()
            self.waited(loop.time() - since)
            try:
                delay_s = await visit(key)
                self._failures.pop(key, None)
            except Exception:
                failures = self._failures[key] = self._failures.get(key, 0) + 1
                delay_s = delay_after(failures, random.random())
            del self.busy[key]
            self._finished = loop.time()
            if key in self._again and key not in self._failures:
                delay_s = 0.0
            self._again.discard(key)
            if delay_s is not None:
                self.add(key, delay_s)
