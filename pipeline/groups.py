"""The groups that a worker holds, each from its lease to a shard: generating, scoring, finished.

A server that dies takes all running groups with it, and one of their prompts may be to blame. So those are tried
again by themselves, in halves (`Trials`); a group during which the server dies while it runs alone has failed.
"""

import asyncio
import collections
import logging
from collections.abc import Awaitable, Callable, Collection

from pipeline.clock import Clock
from pipeline.experience import RolloutGroup
from pipeline.inference import EngineLost, Sampling
from pipeline.prompts import Prompt
from pipeline.sampling import Generated, Sampler

RATE_WINDOW_S = 60.0

logger = logging.getLogger(__name__)


class Groups:
    """`prompt` gives the prompt of an index, `fail` is told of an index that could not be generated, and why.

    `greedy`: each group gets one more sample, the greedy completion.
    """

    def __init__(
        self,
        prompt: Callable[[int], Awaitable[Prompt]],
        sampler: Sampler,
        samples: int,
        sampling: Sampling,
        clock: Clock,
        fail: Callable[[int, str], None],
        wake: asyncio.Event,
        greedy: bool = False,
    ) -> None:
        self._prompt, self._sampler, self._samples, self._sampling = prompt, sampler, samples, sampling
        self._clock, self._fail, self._wake, self._greedy = clock, fail, wake, greedy
        self.generating: dict[int, asyncio.Task[None]] = {}
        self.scoring: dict[int, asyncio.Task[None]] = {}
        self.finished: dict[int, RolloutGroup] = {}
        self.generated_tokens = 0
        self.failures = 0
        self._broken: Exception | None = None  # what ended the scoring of a group
        self._trials = Trials()
        self._lately: collections.deque[tuple[float, int]] = collections.deque()  # (when, tokens)

    @property
    def held(self) -> set[int]:
        return {*self.generating, *self.scoring, *self.finished}

    @property
    def running(self) -> list[asyncio.Task[None]]:
        return [*self.generating.values(), *self.scoring.values()]

    def begin(self, waiting: Collection[int], limit: int) -> None:
        """Start generating `waiting` indices, lowest first, until `limit` run; after a loss, the suspects first.

        Raises RuntimeError where a group could not be scored: rewards cost single samples, so this is our own fault.
        """
        if self._broken:
            raise RuntimeError(f"scoring failed: {type(self._broken).__name__}: {self._broken}") from self._broken
        idle = not self.generating
        culprit = self._trials.settle() if idle else None
        if culprit is not None:
            self._failed(culprit, "the inference server died while it generated this prompt alone")
            waiting = set(waiting) - {culprit}
        self._trials.recall(waiting)
        if idle:
            for index in self._trials.next(waiting):
                self._begin(index)
        if not self._trials.open:
            for index in sorted(waiting)[: max(0, limit - len(self.generating))]:
                self._begin(index)

    async def abort(self, indices: Collection[int]) -> None:
        """Forget these groups; requests that run for them are aborted before this returns."""
        tasks = []
        for index in indices:
            self.finished.pop(index, None)
            tasks += [task for task in (self.generating.get(index), self.scoring.get(index)) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for index in indices:
            # A task that never came to run has not tidied up.
            self.generating.pop(index, None)
            self.scoring.pop(index, None)

    async def drained(self) -> None:
        """Wait until no group is being generated; each ends by the engine's own time limit."""
        while self.generating:
            await asyncio.wait(self.generating.values())

    def tokens_per_s(self) -> float:
        """Over the last minute."""
        now = self._clock.monotonic()
        while self._lately and self._lately[0][0] < now - RATE_WINDOW_S:
            self._lately.popleft()
        return sum(tokens for _, tokens in self._lately) / RATE_WINDOW_S

    def _begin(self, index: int) -> None:
        self.generating[index] = asyncio.create_task(self._generate(index))

    async def _generate(self, index: int) -> None:
        try:
            prompt = await self._prompt(index)
            generated = await self._sampler.generate(prompt, self._samples, self._sampling, self._greedy)
        except EngineLost as error:
            logger.warning("prompt %d lost: %s", index, error)
            self._trials.lost(index)
        except Exception as error:  # whatever a generator or the engine raises costs this index alone
            self._failed(index, f"{type(error).__name__}: {error}")
        else:
            self._count(generated)
            self.scoring[index] = asyncio.create_task(self._score(index, generated))
        finally:
            self.generating.pop(index, None)
            self._wake.set()

    async def _score(self, index: int, generated: Generated) -> None:
        try:
            self.finished[index] = await self._sampler.score(generated)
        except Exception as error:
            logger.exception("prompt %d could not be scored", index)
            self._broken = error
        finally:
            self.scoring.pop(index, None)
            self._wake.set()

    def _failed(self, index: int, reason: str) -> None:
        logger.warning("prompt %d failed: %s", index, reason)
        self.failures += 1
        self._fail(index, reason)

    def _count(self, generated: Generated) -> None:
        self.generated_tokens += generated.tokens
        self._lately.append((self._clock.monotonic(), generated.tokens))


class Trials:
    """Finds the prompt that kills the server: what was lost together is tried again in halves, one half at a time.

    With one culprit among n this takes about log2(n) deaths, and two rounds if there is none. A culprit that is
    granted once more is tried by itself from the start.
    """

    def __init__(self) -> None:
        self._queue: collections.deque[set[int]] = collections.deque()
        self._current: set[int] = set()
        self._lost: set[int] = set()
        self._culprits: set[int] = set()

    @property
    def open(self) -> bool:
        """Whether nothing but the current trial may run."""
        return bool(self._current or self._queue)

    def lost(self, index: int) -> None:
        self._lost.add(index)

    def settle(self) -> int | None:
        """Nothing runs any more: arrange new trials for what was lost. Returns an index that is certainly to blame."""
        lost, alone = sorted(self._lost), self._current == self._lost and len(self._lost) == 1
        self._lost, self._current = set(), set()
        if alone:
            self._culprits.add(lost[0])
            return lost[0]
        middle = (len(lost) + 1) // 2
        self._queue.extend(set(half) for half in (lost[:middle], lost[middle:]) if half)
        return None

    def recall(self, waiting: Collection[int]) -> None:
        """Put known culprits among `waiting` on trial."""
        known = self._culprits.intersection(waiting) - self._current.union(*self._queue)
        self._queue.extend({index} for index in sorted(known))

    def next(self, waiting: Collection[int]) -> list[int]:
        """The indices to try next, by themselves; empty when all suspects are cleared or no longer wanted."""
        while self._queue and not self._current:
            self._current = self._queue.popleft().intersection(waiting)
        return sorted(self._current)
