"""What a place for objects must do, one try at a time: the seam under Storage, one module per kind of place."""

import dataclasses
import re
from typing import Protocol

ABSENT = "*"
MOST_BYTES = 4 << 30
"""Of an object that is read into memory whole: anybody who may write to the store may write a larger one."""
SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=-]{0,254}")


class StorageError(Exception):
    """The store did not answer in time, refused, or has no such object; names the key."""


class Conflict(StorageError):
    """A conditional write lost: the key exists already, or has changed since it was read."""


class Transient(StorageError):
    """One try failed in a way that a further try may mend: 5xx, reset, time-out, disk full."""


class Unavailable(StorageError):
    """Every try until the deadline was Transient: the store is down, not misused; a later start may succeed."""


@dataclasses.dataclass(frozen=True)
class ObjectInfo:
    key: str
    size: int  # bytes
    etag: str
    modified: float  # seconds since the epoch, by the store's clock
    sha256: str = ""  # hex, of the bytes read or written; empty where neither happened


@dataclasses.dataclass(frozen=True)
class Object:
    info: ObjectInfo
    data: bytes
    metadata: dict[str, str]


class Corrupted(StorageError):
    """The bytes read do not have the sha256 they were written with, or are too many to be read; `object` is what was
    read, metadata included."""

    def __init__(self, message: str, damaged: Object | None = None):
        super().__init__(message)
        self.object = damaged


class Bucket(Protocol):
    """Each call is one try: it raises Transient where another one may succeed, StorageError where none will."""

    name: str
    """How messages call this place: its URI."""

    async def read(self, key: str) -> Object | None:
        """The object as it arrived, unchecked; None if there is no such key. Raises Corrupted above MOST_BYTES, before
        it takes the memory."""
        ...

    async def read_range(self, key: str, start: int, stop: int, etag: str) -> bytes:
        """Bytes start … stop-1 of the version `etag`; raises Conflict if that is not the present one."""
        ...

    async def stat(self, key: str) -> tuple[ObjectInfo, dict[str, str]] | None:
        """What is known of an object without its bytes, and its metadata."""
        ...

    async def write(self, key: str, data: bytes, metadata: dict[str, str], condition: str | None) -> ObjectInfo:
        """Atomic. `condition`: None overwrites, ABSENT creates, anything else is the etag to replace.

        Raises Conflict where the condition does not hold, or may not hold: the caller looks for itself.
        """
        ...

    async def upload(self, key: str, path: str, metadata: dict[str, str]) -> ObjectInfo:
        """A whole file in bounded memory; visible when complete."""
        ...

    async def list(self, folder: str) -> list[ObjectInfo]: ...

    async def delete(self, key: str) -> None: ...


def check_size(place: str, info: ObjectInfo, metadata: dict[str, str]) -> None:
    """Raises Corrupted for what is too large to be read whole."""
    if info.size > MOST_BYTES:
        reason = f"{place}/{info.key} has {info.size:,} bytes, and at most {MOST_BYTES:,} are read at once"
        raise Corrupted(reason, Object(info, b"", metadata))


def confined(key: str) -> str:
    """`key` itself, if it is a relative path of plain names; else ValueError.

    Refused: absolute paths, `.` and `..`, empty and hidden names, anything a shell, URL or glob would interpret.
    """
    if len(key) > 900 or not all(SEGMENT.fullmatch(segment) for segment in key.split("/")):
        raise ValueError(
            f"{key[:200]!r} is no key of a store: use a relative path of the characters A-Z a-z 0-9 . _ = -"
        )
    return key
