"""The check of a store: what the protocol rests on is tried, and a store that does not hold it is refused.

Every writer that loses a race must be told so; an acknowledged write must be seen by the next read; a missing key
must be a 404; metadata and checksums must come back. Servers exist that pass each of these one at a time and fail
the races: so the races are run, several writers at once, several rounds.
"""

import asyncio
import contextlib
import dataclasses
import secrets
import time
from collections.abc import Awaitable, Callable

from pipeline.storage.bucket import ABSENT, Conflict, Object, StorageError, Unavailable
from pipeline.storage.client import Storage

WRITERS = 4
ROUNDS = 4
FOLDER = "probe"
DEADLINE_S = 30.0
"""A wrong address is told after this, not after the two minutes that a running job waits out."""


@dataclasses.dataclass(frozen=True)
class Finding:
    title: str
    """What must hold."""
    fault: StorageError | None
    """One line with the remedy; None: it holds."""
    seconds: float


async def probe(storage: Storage) -> None:
    """Raise StorageError, one line with the remedy, unless the store holds what the protocol needs; Unavailable if it
    does not answer."""
    for finding in await examine(storage):
        if finding.fault:
            raise finding.fault


async def examine(storage: Storage) -> list[Finding]:
    """What holds of all that the protocol needs.

    Takes some 200 small requests below `probe/`, which it removes again. All run side by side, since a server may
    make each loser of a race wait a second longer (SeaweedFS does).
    """
    storage = Storage(storage.bucket, storage.clock, deadline_s=DEADLINE_S)
    folder = f"{FOLDER}/{secrets.token_hex(8)}"
    findings = await asyncio.gather(*(_examine(storage, f"{folder}/{number}", number) for number in range(len(CHECKS))))
    if not any(isinstance(finding.fault, Unavailable) for finding in findings):
        with contextlib.suppress(StorageError):
            await asyncio.gather(*(storage.delete(info.key) for info in await storage.list(folder)))
    return findings


async def _examine(storage: Storage, folder: str, number: int) -> Finding:
    title, check = CHECKS[number]
    started, fault = time.perf_counter(), None
    try:
        await check(storage, folder)
    except StorageError as error:
        fault = error
    return Finding(title, fault, time.perf_counter() - started)


async def _missing_key(storage: Storage, folder: str) -> None:
    name = storage.bucket.name
    try:
        found = await storage.get(f"{folder}/missing")
    except StorageError as error:
        if "access denied (AccessDenied" in str(error):
            raise StorageError(
                f"store {name} answers 403 for a missing key: allow ListBucket on this prefix, or check the credentials"
                f" ({error})"
            ) from None
        raise
    if found is not None:
        raise StorageError(f"store {name} returns an object for a key that was never written")


async def _read_after_write(storage: Storage, folder: str) -> None:
    key, name = f"{folder}/written", storage.bucket.name
    for data in (b"first", b"second"):
        await storage.put(key, data)
        found = await storage.get(key)
        if found is None or found.data != data:
            raise StorageError(
                f"store {name} does not return what was just written: it needs read-after-write consistency"
            )


async def _metadata(storage: Storage, folder: str) -> None:
    await storage.create(f"{folder}/written", b"rows", {"rows": "1"})
    _require_metadata(await storage.get(f"{folder}/written"), storage.bucket.name)


def _require_metadata(found: Object | None, name: str) -> None:
    if found is None or not {"nonce", "sha256"} <= found.metadata.keys() or found.metadata.get("rows") != "1":
        raise StorageError(f"store {name} does not keep the metadata of an object: use one with x-amz-meta-* headers")


async def _list(storage: Storage, folder: str) -> None:
    keys = {f"{folder}/{name}" for name in ("a", "b/c")}
    for key in keys:
        await storage.create(key, b"")
    listed = {info.key for info in await storage.list(folder)}
    if not keys <= listed:
        raise StorageError(
            f"store {storage.bucket.name} does not list an object just written: it needs read-after-write consistency"
        )


async def _create(storage: Storage, folder: str) -> None:
    await asyncio.gather(*(_race(storage, f"{folder}/{number}", ABSENT) for number in range(ROUNDS)))


async def _replace(storage: Storage, folder: str) -> None:
    async def race(key: str) -> None:
        await _race(storage, key, (await storage.create(key, b"start")).etag)

    await asyncio.gather(*(race(f"{folder}/{number}") for number in range(ROUNDS)))


async def _race(storage: Storage, key: str, condition: str) -> None:
    """Of several writers at once exactly one must win, and be the one that is read."""
    outcomes = await asyncio.gather(*(_contend(storage, key, number, condition) for number in range(WRITERS)))
    winners = [data for data in outcomes if data is not None]
    if len(winners) != 1:
        header = "If-None-Match" if condition == ABSENT else "If-Match"
        raise StorageError(
            f"store {storage.bucket.name} let {len(winners)} of {WRITERS} racing writers win ({header}): use a store"
            " with atomic conditional writes (Amazon S3, MinIO, SeaweedFS from 4.48), or update it"
        )
    found = await storage.get(key)
    if found is None or found.data != winners[0]:
        raise StorageError(f"store {storage.bucket.name} does not return what the winner of a race has written")


async def _contend(storage: Storage, key: str, number: int, condition: str) -> bytes | None:
    """What this writer wrote, if it won."""
    data = f"writer {number}".encode()
    try:
        if condition == ABSENT:
            await storage.create(key, data, {"rows": "1"})
        else:
            await storage.replace(key, data, condition, {"rows": "1"})
    except Conflict:
        return None
    return data


CHECKS: tuple[tuple[str, Callable[[Storage, str], Awaitable[None]]], ...] = (
    ("a missing key is told from a forbidden one (404, not 403)", _missing_key),
    ("read after write", _read_after_write),
    ("metadata, with the checksum, comes back", _metadata),
    ("list after write", _list),
    ("conditional create has one winner (If-None-Match)", _create),
    ("conditional replace has one winner (If-Match)", _replace),
)
