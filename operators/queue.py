"""A work queue of keys: each key waits at most once, is worked on by one worker at a time, and comes back with a
growing delay after a failure. A key that is added while it is worked on is worked on again afterwards.

What is added without a delay is urgent and overtakes what waited for its time, which begins only while less than half
of the workers are busy: under a flood of echoes a new job still gets its children at once. Every FAIR-th key is taken
from the others all the same. After a visit a key rests from what is not urgent: for `spacing_s`, and for as long as the
visit took, so that of a busy server less is asked.

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

    def __init__(self, waited: Callable[[float], None] = lambda seconds: None, spacing_s: float = 0.0) -> None:
        self.waited, self.spacing_s = waited, spacing_s
        self.busy: dict[K, float] = {}
        """What is worked on now, and since when (loop time)."""
        self._urgent: OrderedDict[K, float] = OrderedDict()  # in order, with the time since when
        self._due: OrderedDict[K, float] = OrderedDict()  # the same of what is not urgent
        self._taken = 0
        self._again: dict[K, bool] = {}  # added while busy, and whether urgently
        self._later: dict[K, asyncio.TimerHandle] = {}
        self._failures: dict[K, int] = {}
        self._resting: dict[K, asyncio.TimerHandle] = {}
        self._finished = 0.0  # loop time
        self._changed = asyncio.Event()  # there may be something to take

    def add(self, key: K, delay_s: float = 0.0) -> None:
        """Have `key` worked on after `delay_s` at the latest; an earlier appointment stands. Only what is wanted at
        once cuts a failure's delay short: echoes of what happens to a broken object must not hammer the server."""
        if delay_s > 0:
            self._appoint(key, delay_s)
            return
        self._cancel(self._later, key)
        if key in self.busy:
            self._again[key] = True
        elif key in self._due:
            self._urgent[key] = self._due.pop(key)
            self._changed.set()
        elif key not in self._urgent:
            self._queue(key, self._urgent)

    async def work(self, visit: Callable[[K], Awaitable[float | None]], workers: int) -> None:
        """Runs until cancelled. `visit` returns the seconds after which it wants the key back at the latest, or None;
        it may raise any Exception."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._changed.clear()
                while (key := self._take(workers)) is not None:
                    group.create_task(self._work(visit, key))
                await self._changed.wait()

    def depth(self) -> int:
        """Keys that are due and not yet worked on."""
        return len(self._due) + len(self._urgent)

    def stalled_s(self) -> float:
        """Seconds for which keys have been waiting and none was finished; 0 where none waits."""
        waiting = [since for keys in (self._urgent, self._due) for since in list(keys.values())[:1]]
        if not waiting and not self.busy:
            return 0.0
        return asyncio.get_running_loop().time() - max(min([*waiting, *self.busy.values()]), self._finished)

    def _appoint(self, key: K, delay_s: float) -> None:
        if key in self._due or key in self._urgent:
            return
        when = asyncio.get_running_loop().time() + delay_s
        if key in self._resting:
            when = max(when, self._resting[key].when())
        timer = self._later.get(key)
        if timer is not None and (timer.when() <= when or key in self._failures):
            return
        self._cancel(self._later, key)
        self._later[key] = asyncio.get_running_loop().call_at(when, self._now_due, key)

    def _now_due(self, key: K) -> None:
        del self._later[key]
        if key in self.busy:
            self._again.setdefault(key, False)
        elif key in self._resting:
            self._appoint(key, 0.0)
        else:
            self._queue(key, self._due)

    def _queue(self, key: K, keys: OrderedDict[K, float]) -> None:
        """Due now, whatever was appointed."""
        assert key not in self._due and key not in self._urgent, f"{key} is due twice"
        self._cancel(self._later, key)
        keys[key] = asyncio.get_running_loop().time()
        self._changed.set()

    def _cancel(self, timers: dict[K, asyncio.TimerHandle], key: K) -> None:
        timer = timers.pop(key, None)
        if timer is not None:
            timer.cancel()

    def _take(self, workers: int) -> K | None:
        """The next key, which is busy now; None: there is none, or no worker for it."""
        if len(self.busy) >= workers:
            return None
        if self._due and self._urgent and (self._taken + 1) % FAIR == 0:
            keys = self._due
        elif self._urgent:
            keys = self._urgent
        elif self._due and len(self.busy) < max(1, workers // 2):
            keys = self._due
        else:
            return None
        self._taken += 1
        key, since = keys.popitem(last=False)
        self.busy[key] = asyncio.get_running_loop().time()
        self.waited(self.busy[key] - since)
        return key

    async def _work(self, visit: Callable[[K], Awaitable[float | None]], key: K) -> None:
        try:
            delay_s = await visit(key)
            self._failures.pop(key, None)
            delay_s = delay_s and drawn_apart(delay_s, random.random())
        except Exception:
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            delay_s = delay_after(failures, random.random())
        self._finished = asyncio.get_running_loop().time()
        took = self._finished - self.busy.pop(key)
        self._changed.set()
        again = self._again.pop(key, None)
        if delay_s is not None:
            self.add(key, delay_s)
        if key in self._failures:
            return
        self._cancel(self._resting, key)
        self._resting[key] = asyncio.get_running_loop().call_later(max(self.spacing_s, took), self._resting.pop, key)
        if again:
            self.add(key)
        elif again is not None:
            self._appoint(key, 0.0)
