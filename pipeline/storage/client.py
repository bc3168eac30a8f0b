"""Storage: what every writer and reader of the run uses; the rules that hold for all kinds of buckets."""

import asyncio
import collections
import contextlib
import dataclasses
import hashlib
import itertools
import logging
import os
import random
import secrets
from collections.abc import Awaitable, Callable
from typing import BinaryIO, TypeVar

from pipeline.clock import Clock, SystemClock
from pipeline.storage.bucket import (
    ABSENT,
    Bucket,
    Conflict,
    Corrupted,
    Object,
    ObjectInfo,
    StorageError,
    Transient,
    Unavailable,
    confined,
)

T = TypeVar("T")
log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
SLOW_S = 5.0
"""A call that has failed for so long has not failed by chance."""
PART_BYTES = 16 << 20
PARTS_AT_ONCE = 4


class Storage:
    """Objects by key below one root.

    Every write carries its sha256 and a nonce in its metadata. A condition that fails is judged by looking at
    the object: one's own nonce is one's own first try, whose response was lost; an object that meets the
    condition after all means that a rival was still writing (S3's 409), so it is tried again; else Conflict.
    A fault of transport is tried again with full jitter until `deadline_s` is over, then raised as Unavailable; the
    second one in a row is logged, or a first one that was slow, so that nobody waits without knowing for what.
    All calls raise ValueError for a key that is not confined to the root.
    """

    def __init__(
        self,
        bucket: Bucket,
        clock: Clock | None = None,
        randomness: random.Random | None = None,
        deadline_s: float = 120.0,
    ):
        self.bucket = bucket
        self.clock = clock or SystemClock()
        self.deadline_s = deadline_s
        self._randomness = randomness or random.Random()
        self._failing = False  # and the log says so

    async def get(self, key: str) -> Object | None:
        """The whole object, or None if there is no such key; raises Corrupted if its sha256 is wrong twice."""
        for _ in range(2):
            found = await self._retry("GET", key, self.bucket.read)
            if found is None:
                return None
            sha256 = hashlib.sha256(found.data).hexdigest()
            if sha256 == found.metadata.get("sha256", sha256):
                return dataclasses.replace(found, info=dataclasses.replace(found.info, sha256=sha256))
        raise Corrupted(f"{self.bucket.name}/{key} does not have the sha256 it was written with", found)

    async def head(self, key: str) -> ObjectInfo | None:
        """What is known of an object without reading it, or None if there is no such key."""
        found = await self._retry("HEAD", key, self.bucket.stat)
        return found[0] if found else None

    async def create(self, key: str, data: bytes, metadata: dict[str, str] | None = None) -> ObjectInfo:
        """Write a new key; raises Conflict if somebody else has written it."""
        return await self._write(key, data, metadata, ABSENT)

    async def replace(self, key: str, data: bytes, etag: str, metadata: dict[str, str] | None = None) -> ObjectInfo:
        """Write a key whose present version is `etag`; raises Conflict if it is another one or gone."""
        return await self._write(key, data, metadata, etag)

    async def put(self, key: str, data: bytes, metadata: dict[str, str] | None = None) -> ObjectInfo:
        """Write unconditionally: only for keys that have a single writer by construction."""
        return await self._write(key, data, metadata, None)

    async def put_file(self, key: str, path: str) -> ObjectInfo:
        """Write a large file, in parts where needed; a manifest that names its size and sha256 comes later."""
        sha256 = await asyncio.to_thread(file_sha256, path)
        metadata = {"sha256": sha256, "nonce": secrets.token_hex(16)}
        info = await self._retry("PUT", key, lambda key: self.bucket.upload(key, path, metadata))
        return dataclasses.replace(info, sha256=sha256)

    async def get_file(self, key: str, path: str) -> ObjectInfo:
        """Download to `path` through a temporary name, in parts, several at a time, each retried by itself.

        Raises StorageError if there is no such key, Corrupted if its sha256 is wrong twice.
        """
        found = await self._retry("HEAD", key, self.bucket.stat)
        if found is None:
            raise StorageError(f"{self.bucket.name}/{key} does not exist")
        info, metadata = found
        partial = f"{path}.{secrets.token_hex(4)}.partial"
        try:
            with open(partial, "xb") as file:
                sha256 = await self._download(info, file)
                if sha256 != metadata.get("sha256", sha256):
                    file.seek(0)
                    sha256 = await self._download(info, file)
            if sha256 != metadata.get("sha256", sha256):
                raise Corrupted(f"{self.bucket.name}/{key} does not have the sha256 it was written with")
            os.replace(partial, path)
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror}") from None
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(partial)
        return dataclasses.replace(info, sha256=sha256)

    async def _download(self, info: ObjectInfo, file: BinaryIO) -> str:
        """Write the object's parts in order, holding PARTS_AT_ONCE of them; hex sha256 of the whole."""

        def part(start: int) -> asyncio.Task[bytes]:
            stop = min(start + PART_BYTES, info.size)
            return asyncio.create_task(
                self._retry("GET", info.key, lambda key: self.bucket.read_range(key, start, stop, info.etag))
            )

        digest, starts = hashlib.sha256(), iter(range(0, info.size, PART_BYTES))
        parts = collections.deque(part(start) for start in itertools.islice(starts, PARTS_AT_ONCE))
        try:
            while parts:
                data = await parts[0]
                parts.popleft()
                parts.extend(part(start) for start in itertools.islice(starts, 1))
                await asyncio.to_thread(digest.update, data)
                await asyncio.to_thread(file.write, data)
        finally:
            for task in parts:
                task.cancel()
            await asyncio.gather(*parts, return_exceptions=True)
        return digest.hexdigest()

    async def list(self, prefix: str) -> list[ObjectInfo]:
        """All objects below the folder `prefix` (empty: everything), in no promised order."""
        return await self._retry("LIST", prefix.removesuffix("/"), self.bucket.list)

    async def delete(self, key: str) -> None:
        """Remove a key; a missing one is no error."""
        await self._retry("DELETE", key, self.bucket.delete)

    async def _write(self, key: str, data: bytes, metadata: dict[str, str] | None, condition: str | None) -> ObjectInfo:
        sha256, nonce = hashlib.sha256(data).hexdigest(), secrets.token_hex(16)
        sealed = {**(metadata or {}), "sha256": sha256, "nonce": nonce}

        async def attempt(key: str) -> ObjectInfo:
            try:
                return await self.bucket.write(key, data, sealed, condition)
            except Conflict:
                found = await self.bucket.stat(key)
                if found and found[1].get("nonce") == nonce:
                    return found[0]
                if condition == (found[0].etag if found else ABSENT):
                    raise Transient("a rival is still writing") from None
                raise

        info = await self._retry("PUT", key, attempt)
        return dataclasses.replace(info, sha256=sha256)

    async def _retry(self, operation: str, key: str, attempt: Callable[[str], Awaitable[T]]) -> T:
        if key or operation != "LIST":
            confined(key)
        started, pause = self.clock.monotonic(), FIRST_PAUSE_S
        while True:
            try:
                answer = await attempt(key)
                self._failing = False
                return answer
            except Transient as fault:
                passed = self.clock.monotonic() - started
                if passed >= self.deadline_s:
                    raise Unavailable(
                        f"{operation} {self.bucket.name}/{key} failed for {self.deadline_s:.0f} s: {fault}"
                    ) from None
                if not self._failing and (pause > FIRST_PAUSE_S or passed > SLOW_S):
                    self._failing = True
                    log.warning("%s; trying again for %.0f s", fault, self.deadline_s - passed)
            await self.clock.sleep(pause * self._randomness.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_PAUSE_S)


def file_sha256(path: str) -> str:
    """Hex SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
