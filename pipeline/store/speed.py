"""How fast a store answers: small objects one after the other, many at once, and one large file."""

import asyncio
import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any

from pipeline.storage import Storage
from pipeline.storage.check import FOLDER

ROUNDS = 20
SMALL = 1_000  # bytes
AT_ONCE = 32
LARGE = 64_000_000  # bytes; goes in parts


async def measure(storage: Storage) -> list[str]:
    """Lines of figures. Writes below `probe/`, and removes what it wrote. Raises StorageError."""
    folder = f"{FOLDER}/{secrets.token_hex(8)}"
    try:
        return [*await _small(storage, folder), *await _large(storage, f"{folder}/large")]
    finally:
        for info in await storage.list(folder):
            await storage.delete(info.key)


async def _small(storage: Storage, folder: str) -> list[str]:
    data = secrets.token_bytes(SMALL)
    keys = [f"{folder}/{number}" for number in range(ROUNDS)]
    puts = [await _timed(lambda key=key: storage.create(key, data)) for key in keys]  # type: ignore[misc]
    gets = [await _timed(lambda key=key: storage.get(key)) for key in keys]  # type: ignore[misc]
    lists = [await _timed(lambda: storage.list(folder)) for _ in range(3)]
    started = time.perf_counter()
    await asyncio.gather(*(storage.create(f"{folder}/many-{number}", data) for number in range(AT_ONCE)))
    rate = AT_ONCE / (time.perf_counter() - started)
    return [
        _latency("put of 1 KB", puts),
        _latency("get of 1 KB", gets),
        _latency(f"list of {ROUNDS}", lists),
        f"{f'puts, {AT_ONCE} at once':30}{rate:10,.0f} /s",
    ]


async def _large(storage: Storage, key: str) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="miles-check-") as scratch:
        there, back = os.path.join(scratch, "there"), os.path.join(scratch, "back")
        with open(there, "wb") as file:
            file.write(secrets.token_bytes(LARGE))
        up = await _timed(lambda: storage.put_file(key, there))
        down = await _timed(lambda: storage.get_file(key, back))
    name, size = f"{LARGE // 10**6} MB", LARGE / 1e6
    return [f"{f'put of {name}':30}{size / up:10,.0f} MB/s", f"{f'get of {name}':30}{size / down:10,.0f} MB/s"]


async def _timed(call: Callable[[], Awaitable[Any]]) -> float:
    started = time.perf_counter()
    await call()
    return time.perf_counter() - started


def _latency(name: str, seconds: list[float]) -> str:
    return f"{name:30}{1000 * statistics.median(seconds):10.1f} ms in the median, at most {1000 * max(seconds):.1f} ms"
