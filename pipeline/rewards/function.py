"""A reward function in a few processes, each killed and replaced when it hangs."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from pipeline.rewards.values import Value, parsed
from pipeline.usercode.process import Process, SampleError, content


class FunctionProcesses:
    """At most `limit` processes that run one function. `setup` is what usercode.child.set_up expects."""

    def __init__(self, name: str, setup: dict[str, Any], timeout_s: float, limit: int) -> None:
        self.name, self._setup, self._timeout_s = name, setup, timeout_s
        self._idle: list[Process] = []
        self._all: set[Process] = set()
        self._slots = asyncio.Semaphore(limit)

    async def start(self) -> None:
        """Start the first process. Raises ValueError where the function cannot be loaded."""
        try:
            self._idle.append(await self._spawn())
        except SampleError as error:
            raise ValueError(f"reward {self.name}: {self._setup['code']}: {error}") from None

    async def score(self, arguments: dict[str, Any]) -> Value:
        """The function's value; raises SampleError where it raised, hung, died or gave no number."""
        async with self._slots, self._process() as process:
            reply = await process.ask(arguments, self._timeout_s)
        return parsed(content(reply))

    async def close(self) -> None:
        await asyncio.gather(*(process.end() for process in list(self._all)))

    @contextlib.asynccontextmanager
    async def _process(self) -> AsyncIterator[Process]:
        """A process for one sample; one that was interrupted in it, for whatever reason, is not used again."""
        process = self._idle.pop() if self._idle else await self._spawn()
        try:
            yield process
        except BaseException:
            self._all.discard(process)
            await process.end()
            raise
        self._idle.append(process)

    async def _spawn(self) -> Process:
        process = await Process.start("pipeline.rewards.child", self._setup)
        self._all.add(process)
        return process
