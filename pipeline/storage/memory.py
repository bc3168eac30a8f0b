"""A bucket in this process' memory, and faults to put in front of any bucket: both for tests and simulation."""

import asyncio
import pathlib
import random
from collections.abc import Awaitable
from typing import ClassVar, Protocol, TypeVar

from pipeline.clock import Clock
from pipeline.storage.bucket import ABSENT, Bucket, Conflict, Object, ObjectInfo, check_size
from pipeline.storage.client import Storage

T = TypeVar("T")


class Faults(Protocol):
    """Called around each try, with operation in read, stat, write, read_range, upload, list, delete.

    Either may sleep on a clock, or raise: Transient makes Storage try again, StorageError reaches the caller.
    """

    async def before(self, operation: str, key: str) -> None:
        """Raising here: the request never arrived."""
        ...

    async def after(self, operation: str, key: str) -> None:
        """Raising here: the request took effect, its response was lost."""
        ...


class FaultyBucket:
    """Another bucket, seen through faults."""

    def __init__(self, bucket: Bucket, faults: Faults):
        self.bucket, self.faults, self.name = bucket, faults, bucket.name

    async def _call(self, operation: str, key: str, call: Awaitable[T]) -> T:
        try:
            await self.faults.before(operation, key)
        except BaseException:
            call.close()  # type: ignore[attr-defined]
            raise
        answer = await call
        await self.faults.after(operation, key)
        return answer

    async def read(self, key: str) -> Object | None:
        return await self._call("read", key, self.bucket.read(key))

    async def read_range(self, key: str, start: int, stop: int, etag: str) -> bytes:
        return await self._call("read_range", key, self.bucket.read_range(key, start, stop, etag))

    async def stat(self, key: str) -> tuple[ObjectInfo, dict[str, str]] | None:
        return await self._call("stat", key, self.bucket.stat(key))

    async def write(self, key: str, data: bytes, metadata: dict[str, str], condition: str | None) -> ObjectInfo:
        return await self._call("write", key, self.bucket.write(key, data, metadata, condition))

    async def upload(self, key: str, path: str, metadata: dict[str, str]) -> ObjectInfo:
        return await self._call("upload", key, self.bucket.upload(key, path, metadata))

    async def list(self, folder: str) -> list[ObjectInfo]:
        return await self._call("list", folder, self.bucket.list(folder))

    async def delete(self, key: str) -> None:
        await self._call("delete", key, self.bucket.delete(key))


class MemoryBucket:
    """Objects in a dict; `modified` is the given clock's time. One bucket may serve many Storages."""

    _named: ClassVar[dict[str, "MemoryBucket"]] = {}

    def __init__(self, clock: Clock, name: str = "memory:/"):
        self.clock, self.name = clock, name
        self.objects: dict[str, Object] = {}
        self._writes = 0

    @classmethod
    def named(cls, name: str, clock: Clock) -> "MemoryBucket":
        """The same bucket for the same name, throughout this process."""
        return cls._named.setdefault(name, cls(clock, f"memory://{name}"))

    async def read(self, key: str) -> Object | None:
        found = await self._find(key)
        if found:
            check_size(self.name, found.info, found.metadata)
        return found

    async def _find(self, key: str) -> Object | None:
        await asyncio.sleep(0)
        return self.objects.get(key)

    async def read_range(self, key: str, start: int, stop: int, etag: str) -> bytes:
        found = await self._find(key)
        if found is None or found.info.etag != etag:
            raise Conflict(f"{self.name}/{key} has changed while it was read")
        return found.data[start:stop]

    async def stat(self, key: str) -> tuple[ObjectInfo, dict[str, str]] | None:
        found = await self._find(key)
        return (found.info, found.metadata) if found else None

    async def write(self, key: str, data: bytes, metadata: dict[str, str], condition: str | None) -> ObjectInfo:
        await asyncio.sleep(0)
        present = self.objects.get(key)
        if condition is not None and condition != (present.info.etag if present else ABSENT):
            raise Conflict(f"{self.name}/{key} was written by somebody else")
        self._writes += 1
        info = ObjectInfo(key, len(data), f"e{self._writes}", self.clock.now())
        self.objects[key] = Object(info, data, dict(metadata))
        return info

    async def upload(self, key: str, path: str, metadata: dict[str, str]) -> ObjectInfo:
        return await self.write(key, pathlib.Path(path).read_bytes(), metadata, None)

    async def list(self, folder: str) -> list[ObjectInfo]:
        await asyncio.sleep(0)
        return [found.info for key, found in self.objects.items() if not folder or key.startswith(folder + "/")]

    async def delete(self, key: str) -> None:
        await asyncio.sleep(0)
        self.objects.pop(key, None)


class MemoryStorage(Storage):
    """A Storage on `bucket` (a new MemoryBucket by default), seen through `faults` if given.

    Several actors of one simulation share a bucket, each with faults of its own:
        trainer = MemoryStorage(clock); worker = MemoryStorage(clock, faults=partition, bucket=trainer.memory)
    """

    def __init__(
        self,
        clock: Clock,
        faults: Faults | None = None,
        bucket: MemoryBucket | None = None,
        randomness: random.Random | None = None,
        deadline_s: float = 120.0,
    ):
        self.memory = bucket or MemoryBucket(clock)
        seen = FaultyBucket(self.memory, faults) if faults else self.memory
        super().__init__(seen, clock, randomness or random.Random(0), deadline_s)
