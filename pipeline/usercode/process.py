"""The worker's side of reward functions: a few child processes a reward, each killed and replaced when it hangs."""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 5.0
"""Longest wait for a process that was killed."""
LONGEST_LINE = 64 << 20  # bytes
PASSED_ON = ("PATH", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV")
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class RewardError(Exception):
    """One sample could not be scored; the message says why."""


class FunctionProcesses:
    """At most `limit` processes that run one function. `setup` is what child.main expects first."""

    def __init__(self, name: str, setup: dict[str, Any], timeout_s: float, limit: int) -> None:
        self.name, self._setup, self._timeout_s = name, setup, timeout_s
        self._idle: list[asyncio.subprocess.Process] = []
        self._all: set[asyncio.subprocess.Process] = set()
        self._slots = asyncio.Semaphore(limit)

    async def start(self) -> None:
        """Start the first process. Raises ValueError where the function cannot be loaded."""
        try:
            self._idle.append(await self._spawn())
        except RewardError as error:
            raise ValueError(f"reward {self.name}: {self._setup['function']}: {error}") from None

    async def score(self, arguments: dict[str, Any]) -> float:
        """The function's value; raises RewardError where it raised, hung, died or gave no number."""
        async with self._slots, self._process() as process:
            try:
                reply = await asyncio.wait_for(_ask(process, arguments), self._timeout_s)
            except TimeoutError:
                raise RewardError(f"no answer within {self._timeout_s:g} s") from None
        if "error" in reply:
            raise RewardError(reply["error"])
        return float(reply["score"])

    async def close(self) -> None:
        await asyncio.gather(*(self._end(process) for process in list(self._all)))

    @contextlib.asynccontextmanager
    async def _process(self) -> AsyncIterator[asyncio.subprocess.Process]:
        """A process for one sample; one that was interrupted in it, for whatever reason, is not used again."""
        process = self._idle.pop() if self._idle else await self._spawn()
        try:
            yield process
        except BaseException:
            await self._end(process)
            raise
        self._idle.append(process)

    async def _spawn(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pipeline.rewards.child"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LONGEST_LINE,
            env=_environment(),
            start_new_session=True,
        )
        self._all.add(process)
        try:
            reply = await asyncio.wait_for(_ask(process, self._setup), START_TIMEOUT_S)
        except TimeoutError:
            reply = {"error": f"not loaded within {START_TIMEOUT_S:g} s"}
        except BaseException:
            await self._end(process)
            raise
        if "error" in reply:
            await self._end(process)
            raise RewardError(reply["error"])
        return process

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """Kill the process with all that it started, save what left its session."""
        self._all.discard(process)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # asyncio waits for the pipes as well, which a daemon that the function forked holds open: close our ends.
        assert process.stdin
        if not process.stdin.is_closing():
            process.stdin.transport.abort()
        process._transport.close()  # type: ignore[attr-defined]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), END_TIMEOUT_S)


async def _ask(process: asyncio.subprocess.Process, message: dict[str, Any]) -> dict[str, Any]:
    """The reply to `message`; the id tells it from whatever else the function wrote where replies are."""
    identity = secrets.token_hex(8)
    assert process.stdin
    assert process.stdout
    try:
        process.stdin.write(encoded({"id": identity, "message": message}))
        await process.stdin.drain()
        line = await process.stdout.readline()
    except (ConnectionError, ValueError):
        line = b""
    if not line.endswith(b"\n"):
        code = await process.wait()
        raise RewardError(f"its process died ({f'signal {-code}' if code < 0 else f'exit code {code}'})")
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError):
        reply = None
    if not isinstance(reply, dict) or reply.get("id") != identity:
        raise RewardError("its process gave a reply that does not belong to this sample")
    return reply


def encoded(message: dict[str, Any]) -> bytes:
    """One line of JSON; what JSON does not have in generated items and Parquet rows is told as text or left out."""
    return json.dumps(message, default=str, skipkeys=True).encode() + b"\n"


def _environment() -> dict[str, str]:
    """No credentials, no tokens: only what Python needs to start as this process did."""
    kept = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    return {**kept, **THREADS, "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1"}
