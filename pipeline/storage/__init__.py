"""The object store behind one small interface: S3, a local folder, or memory.

Keys are relative to the root that a Storage was opened at, and cannot leave it. Every write of the protocol
is ONE conditional PUT of bytes made in memory: a torn or half-written object is never visible.
Conflicts are answers, not faults: `create` and `replace` raise Conflict at once; transport faults are retried
with jitter until a deadline and then raise StorageError.
"""

import pathlib
import urllib.parse

from pipeline.clock import Clock, SystemClock
from pipeline.storage.bucket import (
    ABSENT,
    SEGMENT,
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
from pipeline.storage.check import probe
from pipeline.storage.client import Storage, file_sha256
from pipeline.storage.local import LocalBucket
from pipeline.storage.memory import Faults, FaultyBucket, MemoryBucket, MemoryStorage

__all__ = [
    "ABSENT",
    "SEGMENT",
    "Bucket",
    "Conflict",
    "Corrupted",
    "Faults",
    "FaultyBucket",
    "LocalBucket",
    "MemoryBucket",
    "MemoryStorage",
    "Object",
    "ObjectInfo",
    "Storage",
    "StorageError",
    "Transient",
    "Unavailable",
    "confined",
    "exists",
    "file_sha256",
    "local_folder",
    "open_storage",
    "probe",
]


def open_storage(
    uri: str,
    endpoint: str | None = None,
    region: str | None = None,
    clock: Clock | None = None,
    read_only: bool = False,
) -> Storage:
    """The Storage at s3://bucket/prefix, file:///folder or an absolute path, or memory://name (this process only).

    Raises ValueError for any other URI, StorageError for a folder that cannot be written to, or, where it is only to
    be read, is not there.
    """
    scheme, separator, rest = uri.partition("://")
    if scheme == "s3":
        # Only here: neither the operator nor a run on a local folder needs obstore.
        from pipeline.storage.s3 import S3Bucket

        bucket, _, prefix = rest.partition("/")
        if not bucket:
            raise ValueError(f"store {uri!r} names no bucket: write s3://bucket/prefix")
        try:
            confined(f"{bucket}/{prefix}".rstrip("/"))
        except ValueError as error:
            raise ValueError(f"store {uri!r}: {error}") from None
        return Storage(S3Bucket(bucket, prefix.rstrip("/"), endpoint, region), clock)
    folder = urllib.parse.unquote(rest) if scheme == "file" else uri
    if folder.startswith("/") and folder.strip("/") and (scheme == "file" or not separator):
        return Storage(LocalBucket(folder, read_only), clock)
    if scheme == "memory" and rest:
        return Storage(MemoryBucket.named(rest, clock or SystemClock()), clock)
    raise ValueError(f"store {uri!r} is neither s3://bucket/prefix nor file:///folder")


def local_folder(uri: str) -> pathlib.Path | None:
    """The folder that a file:/// URI or a path names, which need not be there; None for other places."""
    scheme, separator, rest = uri.partition("://")
    if separator and scheme != "file":
        return None
    return pathlib.Path(urllib.parse.unquote(rest) if separator else uri)


def exists(uri: str) -> bool:
    """Whether a local folder is there; other places are asked when they are read."""
    folder = local_folder(uri)
    return folder is None or folder.is_dir()
