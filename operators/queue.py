"""A work queue of keys: each key waits at most once, is worked on by one worker at a time, and comes back with a
growing delay after a failure. A key that is added while it is worked on is worked on again afterwards.

What is added without a delay is urgent and overtakes what waited for its time: under a flood of echoes a new job still
gets its children at once. Every FAIR-th key is taken from the others all the same.

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
FAIR = 8
EARLIER_FROM_S = 5.0


def delay_after(failures: int, jitter: float) -> float:
    """Seconds until the next try after so many failures in a row; `jitter` from 0 to 1 spreads them by a quarter."""
    return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(failures - 1, 30)) * (1 - 0.25 * jitter)


def drawn_apart(delay_s: float, jitter: float) -> float:
    """Keys that came together, as all do after a start, would come back together for ever: each comes up to a second
    earlier, by `jitter` from 0 to 1. Short delays are kept, as they are meant to the moment."""
    return delay_s - jitter if delay_s >= EARLIER_FROM_S else delay_s


class WorkQueue(Generic[K]):
    """`waited(seconds)` is told how long each key was due before its work began."""

    def __init__(self, waited: Callable[[float], None] = lambda seconds: None) -> None:
        self.waited = waited
        self.busy: dict[K, float] = {}
        """What is worked on now, and since when (loop time)."""
        self._urgent: OrderedDict[K, float] = OrderedDict()  # in order, with the time since when
        self._due: OrderedDict[K, float] = OrderedDict()  # the same of what is not urgent
        self._taken = 0
        self._again: dict[K, bool] = {}  # added while busy, and whether urgently
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
            if key not in self._due and key not in self._urgent:
                self._later[key] = asyncio.get_running_loop().call_later(delay_s, self._now_due, key)
        elif key in self.busy:
            self._again[key] = True
        elif key in self._due:
            self._urgent[key] = self._due.pop(key)
        elif key not in self._urgent:
            self._queue(key, self._urgent)

    async def work(self, visit: Callable[[K], Awaitable[float | None]], workers: int) -> None:
        """Runs until cancelled. `visit` returns the seconds after which it wants the key back at the latest, or None;
        it may raise any Exception."""
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(self._work(visit))

    def depth(self) -> int:
        """Keys that are due and not yet worked on."""
        return len(self._due) + len(self._urgent)

    def stalled_s(self) -> float:
        """Seconds for which keys have been waiting and none was finished; 0 where none waits."""
        waiting = [since for keys in (self._urgent, self._due) for since in list(keys.values())[:1]]
        if not waiting and not self.busy:
            return 0.0
        return asyncio.get_running_loop().time() - max(min([*waiting, *self.busy.values()]), self._finished)

    def _now_due(self, key: K) -> None:
        del self._later[key]
        if key in self.busy:
            self._again.setdefault(key, False)
        else:
            self._queue(key, self._due)

    def _queue(self, key: K, keys: OrderedDict[K, float]) -> None:
        """Due now, whatever was appointed."""
        assert key not in self._due and key not in self._urgent, f"{key} is due twice"
        timer = self._later.pop(key, None)
        if timer is not None:
            timer.cancel()
        keys[key] = asyncio.get_running_loop().time()
        self._ready.release()

    def _take(self) -> tuple[K, float]:
        self._taken += 1
        fair = self._taken % FAIR == 0 and self._due
        keys = self._due if fair or not self._urgent else self._urgent
        return keys.popitem(last=False)

    async def _work(self, visit: Callable[[K], Awaitable[float | None]]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._ready.acquire()
            key, since = self._take()
            self.busy[key] = loop.time()
            self.waited(loop.time() - since)
            try:
                delay_s = await visit(key)
                self._failures.pop(key, None)
                delay_s = delay_s and drawn_apart(delay_s, random.random())
            except Exception:
                failures = self._failures[key] = self._failures.get(key, 0) + 1
                delay_s = delay_after(failures, random.random())
            del self.busy[key]
            self._finished = loop.time()
            again = self._again.pop(key, None)
            if again is not None and key not in self._failures:
                self._queue(key, self._urgent if again else self._due)
            elif delay_s is not None:
                self.add(key, delay_s)
