"""Coroutine tests in virtual time: waits take none, and a busy machine changes nothing."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

from tests.simulation import VirtualLoop

P = ParamSpec("P")


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    @functools.wraps(test)
    def run(*arguments: P.args, **named: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*arguments, **named))

    return run
