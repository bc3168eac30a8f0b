"""The worker's side of an environment's processes: one that has loaded the user's class, and one for each episode."""

import asyncio
import contextlib
import itertools
import socket
from collections.abc import AsyncIterator

from pipeline.config import EnvironmentConfig
from pipeline.environments.registry import LIBRARY
from pipeline.usercode.process import LONGEST_LINE, Message, Process, SampleError, ask, content

COMMAND_TIMEOUT_S = 30.0
"""For forking and killing a process."""
TRIES = 2
"""Times that a process is forked off, the second time from a new one."""
LIBRARY_MEMORY_MIB = 4096


class EpisodeProcess:
    """Where one episode's object lives."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timeout_s: float) -> None:
        self._reader, self._writer, self._timeout_s = reader, writer, timeout_s

    async def ask(self, message: Message) -> Message:
        """Raises SampleError where the environment raised, hung, died or gave what it must not."""
        return content(await ask(self._reader, self._writer, message, self._timeout_s))


class EpisodeProcesses:
    """At most `config.concurrency` at a time, forked off one process, which is replaced when it dies."""

    def __init__(self, config: EnvironmentConfig) -> None:
        """Raises ValueError where `config` describes no environment."""
        if (config.code is None) == (config.library is None):
            raise ValueError("environment: give exactly one of code and library")
        if config.library is not None and config.library not in LIBRARY:
            raise ValueError(f"environment: library {config.library!r} is none of {', '.join(LIBRARY)}")
        self._config = config
        self._code = config.code or LIBRARY[config.library or ""]
        self._slots = asyncio.Semaphore(config.concurrency)
        self._numbers = itertools.count()
        self._one_at_a_time = asyncio.Lock()
        self._origin: Process | None = None
        self._carrier: socket.socket | None = None

    async def start(self) -> None:
        """Load the class. Raises ValueError where that fails."""
        try:
            await self._spawn()
        except SampleError as error:
            raise ValueError(f"environment {self._code}: {error}") from None

    async def close(self) -> None:
        async with self._one_at_a_time:
            await self._end()

    @contextlib.asynccontextmanager
    async def episode(self) -> AsyncIterator[EpisodeProcess]:
        """A process for one episode, killed with all that it started when the context ends."""
        async with self._slots:
            number = next(self._numbers)
            ours, theirs = socket.socketpair()
            try:
                # A command that is cut short would leave its answer to the next one.
                await asyncio.shield(asyncio.create_task(self._fork(number, theirs)))
                reader, writer = await asyncio.open_unix_connection(sock=ours, limit=LONGEST_LINE)
                try:
                    yield EpisodeProcess(reader, writer, self._config.timeout_s)
                finally:
                    writer.transport.abort()
            finally:
                ours.close()
                await asyncio.shield(asyncio.create_task(self._kill(number)))

    async def _fork(self, number: int, theirs: socket.socket) -> None:
        with theirs:
            async with self._one_at_a_time:
                for _ in range(TRIES):
                    if self._origin is None:
                        await self._spawn()
                    if await self._command({"begin": number}, theirs):
                        return
        raise SampleError("its process could not be forked off")

    async def _kill(self, number: int) -> None:
        async with self._one_at_a_time:
            if self._origin is not None:
                await self._command({"end": number})

    async def _command(self, message: Message, descriptor: socket.socket | None = None) -> bool:
        """Whether the process that episodes are forked off did as told. If it did not answer, it is ended, and they
        with it. Raises SampleError for what it could not do."""
        assert self._origin
        assert self._carrier
        try:
            if descriptor is not None:
                socket.send_fds(self._carrier, [b"."], [descriptor.fileno()])
            reply = await self._origin.ask(message, COMMAND_TIMEOUT_S)
        except (SampleError, OSError):
            await self._end()
            return False
        content(reply)
        return True

    async def _spawn(self) -> None:
        config = self._config
        self._carrier, theirs = socket.socketpair()
        with theirs:
            setup = {
                "code": self._code,
                "folder": config.folder,
                "memory_mib": max(config.memory_mib, LIBRARY_MEMORY_MIB) if config.library else config.memory_mib,
                "parameters": config.parameters,
                "carrier": theirs.fileno(),
            }
            self._origin = await Process.start("pipeline.environments.child", setup, [theirs.fileno()])

    async def _end(self) -> None:
        origin, self._origin = self._origin, None
        if origin is not None:
            await origin.end()
        if self._carrier is not None:
            self._carrier.close()
