"""The trainer's view of the writers: who there is, what they last said, who is silent.

Listing writers/ tells which heartbeats have changed; only those are read. Silence is measured in the trainer's own
time: the sum of the intervals between its successful writes of control/state.json, by the store's clock, each cut
at `longest_beat_s`. So neither an outage of the store nor a pause of the trainer counts against anybody, and no
worker's clock matters.

A revoked writer is named as such, so that it learns of it, until its heartbeat is GONE_AFTER time-outs old by the
store's clock; then it is forgotten, and what it has left in writers/ is deleted. So both hold what those time-outs have
seen, however often workers and trainers are replaced. One that wakes up even later is revoked on sight: `Known.met`.
"""

import asyncio
import dataclasses
import logging
import math

from pipeline.messages import WRITERS_FOLDER, Heartbeat, is_heartbeat
from pipeline.storage import Corrupted, ObjectInfo, Storage

log = logging.getLogger(__name__)

GETS_AT_ONCE = 32
GONE_AFTER = 10
"""Age of its heartbeat, in lease time-outs, from which on a revoked writer is forgotten, and the heartbeat deleted."""


@dataclasses.dataclass
class Known:
    """One writer incarnation."""

    ulid: str
    instance: str
    cursor: int = 0
    """Sequence number of the next shard to read."""
    promised: int = 0
    """Shards below were acknowledged by an earlier trainer."""
    final: int | None = None
    """Revoked: shards from here on do not count."""
    heartbeat: Heartbeat | None = None
    listed: tuple[str, float] = ("", 0.0)
    """Etag and time of the heartbeat, as the last listing showed them."""
    heard: float = 0.0
    """Own time at which the heartbeat was last seen to change."""
    looked: float = -math.inf
    """Of the last look for a shard, by the clock's `monotonic`."""
    stirred: float = -math.inf
    """By the same, when it was last granted something, or delivered it."""

    @classmethod
    def met(cls, heartbeat: Heartbeat) -> "Known":
        """One that nobody has told of. If it has written shards, somebody once had: it was revoked and forgotten, or
        control/state.json was lost. What it wrote would be read again by later trainers, so nothing of it counts, and
        it registers anew."""
        return cls(heartbeat.ulid, heartbeat.instance, final=0 if heartbeat.sequence else None)

    @property
    def live(self) -> bool:
        return self.final is None

    @property
    def draining(self) -> bool:
        return self.heartbeat is not None and self.heartbeat.draining

    @property
    def refuses(self) -> frozenset[int]:
        """Indices that it reports as failed or handed back."""
        if self.heartbeat is None:
            return frozenset()
        return frozenset(self.heartbeat.handed_back) | self.heartbeat.failures.keys()


class Roster:
    def __init__(self, storage: Storage, lease_timeout_s: float, longest_beat_s: float):
        self.storage, self.lease_timeout_s, self.longest_beat_s = storage, lease_timeout_s, longest_beat_s
        self.writers: dict[str, Known] = {}
        self.elapsed = 0.0
        """Own time, seconds."""
        self.now = -math.inf
        """Store's time of the trainer's last write, seconds since the epoch."""

    def live(self) -> list[Known]:
        return [known for known in self.writers.values() if known.live]

    def silence(self, known: Known) -> float:
        return self.elapsed - known.heard

    def gone(self) -> list[Known]:
        """Revoked, and silent for so long that nobody waits for them to learn of it."""
        return [known for known in self.writers.values() if not known.live and self._is_old(known.listed[1])]

    def _is_old(self, modified: float) -> bool:
        return modified < self.now - GONE_AFTER * self.lease_timeout_s

    def wrote(self, modified: float) -> None:
        """The trainer has written an object, at `modified` by the store's clock."""
        if self.now > -math.inf:
            self.elapsed += min(max(0.0, modified - self.now), self.longest_beat_s)
        self.now = modified

    async def refresh(self) -> list[tuple[Known, str]]:
        """Learn of new writers and new heartbeats; returns the (writer, reason)s to be revoked."""
        listed = [info for info in await self.storage.list(WRITERS_FOLDER) if is_heartbeat(info.key)]
        await self._sweep(listed)
        changed = [info for info in listed if self._is_news(info)]
        gate = asyncio.Semaphore(GETS_AT_ONCE)
        heartbeats = await asyncio.gather(*(self._read(info, gate) for info in changed))
        for info, heartbeat in zip(changed, heartbeats, strict=True):
            if heartbeat is None:
                continue
            known = self.writers.setdefault(heartbeat.ulid, Known.met(heartbeat))
            known.heartbeat, known.listed, known.heard = heartbeat, (info.etag, info.modified), self.elapsed
        return list((self._silent() | self._superseded()).values())

    async def _sweep(self, listed: list[ObjectInfo]) -> None:
        """Delete, a few at a time, what writers have left that are not known any more, or never were."""
        gone = [info.key for info in listed if _ulid(info) not in self.writers and self._is_old(info.modified)]
        await asyncio.gather(*(self.storage.delete(key) for key in gone[:GETS_AT_ONCE]))

    def _is_news(self, info: ObjectInfo) -> bool:
        known = self.writers.get(_ulid(info))
        if known is not None:
            return known.listed != (info.etag, info.modified)
        return self.now - info.modified <= self.lease_timeout_s  # else it left before this trainer came

    async def _read(self, info: ObjectInfo, gate: asyncio.Semaphore) -> Heartbeat | None:
        async with gate:
            try:
                found = await self.storage.get(info.key)
                heartbeat = Heartbeat.decode(found.data) if found else None
                if heartbeat and heartbeat.ulid != _ulid(info):
                    raise ValueError(f"it is that of writer {heartbeat.ulid!r}")
                return heartbeat
            except (Corrupted, ValueError) as error:
                log.warning("%s is damaged, and passed over until its worker writes it again (%s)", info.key, error)
                return None

    def _superseded(self) -> dict[str, tuple[Known, str]]:
        """A slot runs one process: its newest incarnation has replaced the others."""
        newest: dict[str, str] = {}
        for known in self.live():
            newest[known.instance] = max(known.ulid, newest.get(known.instance, ""))
        return {
            known.ulid: (known, f"replaced by {newest[known.instance]}")
            for known in self.live()
            if known.ulid != newest[known.instance]
        }

    def _silent(self) -> dict[str, tuple[Known, str]]:
        return {
            known.ulid: (known, f"silent for {self.silence(known):.0f} s")
            for known in self.live()
            if self.silence(known) > self.lease_timeout_s
        }


def _ulid(info: ObjectInfo) -> str:
    return info.key.removeprefix(f"{WRITERS_FOLDER}/").removesuffix(".json")
