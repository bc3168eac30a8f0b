"""Virtual time: an event loop that never waits, and coroutine tests in it."""

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

P = ParamSpec("P")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Never waits: when nothing is ready, its time jumps to the next timer."""

    def __init__(self) -> None:
        self.virtual = 0.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self.virtual


class _Jump(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop):
        super().__init__()
        self.loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "deadlock: every task waits for another"
        self.loop.virtual += max(0.0, timeout)
        return []


class VirtualClock:
    def __init__(self, skew_s: float = 0.0):
        self.skew_s = skew_s

    def now(self) -> float:
        return 1_700_000_000.0 + self.skew_s + asyncio.get_running_loop().time()

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """The test takes no time to wait, and a busy machine changes nothing."""

    @functools.wraps(test)
    def run(*arguments: P.args, **named: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*arguments, **named))

    return run
