"""The start-up check of a store: what the protocol rests on is tried, and a store that does not hold it is refused.

Every writer that loses a race must be told so; an acknowledged write must be seen by the next read; a missing key
must be a 404; metadata and checksums must come back. Servers exist that pass each of these one at a time and fail
the races: so the races are run, several writers at once, several rounds.
"""

import asyncio
import contextlib
import secrets

from pipeline.storage.bucket import ABSENT, Conflict, Object, StorageError, Unavailable
from pipeline.storage.client import Storage

WRITERS = 4
ROUNDS = 4
FOLDER = "probe"
DEADLINE_S = 30.0
"""A wrong address is told after this, not after the two minutes that a running job waits out."""


async def probe(storage: Storage) -> None:
    """Raise StorageError, one line with the remedy, unless the store holds what the protocol needs; Unavailable if it
    does not answer.

    Takes some 200 small requests below `probe/`, which it removes again. All races run side by side, since a server
    may make each loser of one wait a second longer (SeaweedFS does).
    """
    storage = Storage(storage.bucket, storage.clock, deadline_s=DEADLINE_S)
    name, folder = storage.bucket.name, f"{FOLDER}/{secrets.token_hex(8)}"
    try:
        await _probe(storage, folder, name)
    except Unavailable:
        raise
    except StorageError:
        await _clean(storage, folder)
        raise
    await _clean(storage, folder)


async def _clean(storage: Storage, folder: str) -> None:
    with contextlib.suppress(StorageError):
        await asyncio.gather(*(storage.delete(info.key) for info in await storage.list(folder)))


async def _probe(storage: Storage, folder: str, name: str) -> None:
    await _missing_key(storage, f"{folder}/missing", name)
    written = await storage.create(f"{folder}/written", b"first", {"rows": "1"})
    _check(await storage.get(f"{folder}/written"), b"first", name)
    if written.key not in {info.key for info in await storage.list(folder)}:
        raise StorageError(f"store {name} does not list an object just written: it needs read-after-write consistency")
    creations = (_race(storage, f"{folder}/create-{number}", ABSENT, name) for number in range(ROUNDS))
    replacements = (_race_to_replace(storage, f"{folder}/replace-{number}", name) for number in range(ROUNDS))
    for outcome in await asyncio.gather(*creations, *replacements, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


async def _missing_key(storage: Storage, key: str, name: str) -> None:
    try:
        found = await storage.get(key)
    except StorageError as error:
        if "access denied" in str(error):
            raise StorageError(
                f"store {name} answers 403 for a missing key: allow ListBucket on this prefix, or check the credentials"
                f" ({error})"
            ) from None
        raise
    if found is not None:
        raise StorageError(f"store {name} returns an object for a key that was never written")


def _check(found: Object | None, data: bytes, name: str) -> None:
    if found is None or found.data != data:
        raise StorageError(f"store {name} does not return what was just written: it needs read-after-write consistency")
    if not {"nonce", "sha256"} <= found.metadata.keys() or found.metadata.get("rows") != "1":
        raise StorageError(f"store {name} does not keep the metadata of an object: use one with x-amz-meta-* headers")


async def _race_to_replace(storage: Storage, key: str, name: str) -> None:
    await _race(storage, key, (await storage.create(key, b"start")).etag, name)


async def _race(storage: Storage, key: str, condition: str, name: str) -> None:
    """Of several writers at once exactly one must win, and be the one that is read."""
    outcomes = await asyncio.gather(*(_contend(storage, key, number, condition) for number in range(WRITERS)))
    winners = [data for data in outcomes if data is not None]
    if len(winners) != 1:
        header = "If-None-Match" if condition == ABSENT else "If-Match"
        raise StorageError(
            f"store {name} let {len(winners)} of {WRITERS} racing writers win ({header}): use a store with atomic"
            " conditional writes (Amazon S3, MinIO, SeaweedFS from 4.48), or update it"
        )
    _check(await storage.get(key), winners[0], name)


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
