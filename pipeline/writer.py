"""The worker's side of the protocol: registers, keeps alive, learns its leases, commits shards.

A lease is a permit: {index: minimum} allows, and asks, to generate the group of that prompt index with any policy
version whose step is at least `minimum`. The rule for the caller of `sync` is: work on exactly `Control.leases` —
start what is new, abort what is gone (it was given to another, or is no longer wanted). What has been committed,
handed back or failed does not show up again until the trainer has dealt with it and, perhaps, granted it anew.

One process start is one ULID. A writer that the trainer has revoked registers under a new one by itself.
"""

import asyncio
import dataclasses
import json
import logging
import math
import random

from pipeline import codec
from pipeline.clock import Clock, ulid
from pipeline.experience import RolloutGroup
from pipeline.messages import (
    CONTROL_KEY,
    ControlState,
    EvaluationRequest,
    Heartbeat,
    WriterEntry,
    shard_key,
    writer_key,
)
from pipeline.storage import Conflict, Storage, StorageError
from pipeline.versions import Version

log = logging.getLogger(__name__)


class Superseded(Exception):
    """Another process registered for the same instance later than this one, which must end."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What the worker says about itself in its next heartbeat."""

    version: Version | None
    """Policy that is loaded."""
    draining: bool = False
    """True: no further leases, please."""
    statistics: dict[str, float] = dataclasses.field(default_factory=dict)
    """generated_tokens, tokens_per_s, running, …"""


@dataclasses.dataclass(frozen=True)
class Control:
    """What this worker should do, as of the last look at control/state.json."""

    term: int = 0
    """0: no trainer has appeared yet."""
    step: int = 0
    version: Version | None = None
    """Policy to load if it is higher than the loaded one."""
    leases: dict[int, int] = dataclasses.field(default_factory=dict)
    """Index → lowest step of a version it may be generated with."""
    evaluation: EvaluationRequest | None = None
    """Addressed to this writer, and not of an older policy than the loaded one."""
    stop: str | None = None
    replaying: bool = False
    """The trainer repeats logged steps: what runs is still wanted, nothing new is granted."""
    revoked: bool = False
    """Everything this writer held went to others; it has a new ULID by now."""


class Writer:
    def __init__(
        self, storage: Storage, instance: str, clock: Clock, randomness: random.Random, heartbeat_s: float = 5.0
    ):
        self.storage, self.instance, self.clock, self.randomness = storage, instance, clock, randomness
        self.heartbeat_s = heartbeat_s
        self._commits = asyncio.Lock()
        self._revoked = False  # and the caller does not know yet
        self._begin()

    def _begin(self) -> None:
        self.ulid = ulid(self.clock.now(), self.randomness)
        self.sequence = 0
        self._committed: dict[int, int] = {}  # index → sequence number, until acknowledged
        self._handed_back: set[int] = set()
        self._failures: dict[int, str] = {}
        self._said: Heartbeat | None = None
        self._beaten = -math.inf  # by the clock's `monotonic`

    async def register(self) -> None:
        """Become known to the trainer; leases come with a later `sync`."""
        await self._heartbeat(Report(version=None))

    async def sync(self, report: Report) -> Control:
        """Look at control/state.json, then tell the trainer what is new or that this writer is alive.

        Raises StorageError if the store does not answer in time, or the trainer's file is damaged (try again: leases
        are kept for a while), Superseded if another process has taken this instance's place.
        """
        found = await self.storage.get(CONTROL_KEY)
        try:
            state = ControlState.decode(found.data) if found else None
        except ValueError as error:
            raise StorageError(str(error)) from None
        entry = state.writers.get(self.ulid) if state else None
        if state and entry and entry.final is not None:
            await self._reincarnate(state)
            entry = None
        leases = self._settle(entry) if entry else {}
        await self._heartbeat(report)
        revoked, self._revoked = self._revoked, False
        return self._control(state, leases, report.version, revoked) if state else Control(revoked=revoked)

    async def commit(self, groups: list[RolloutGroup]) -> str:
        """Write whole groups as one shard; returns its key. Raises StorageError: the same groups may be given again."""
        data = codec.encode(groups)
        metadata = {
            "rows": str(sum(len(group.rollouts) for group in groups)),
            "schema": "1",
            "indices": json.dumps([group.index for group in groups], separators=(",", ":")),
        }
        async with self._commits:
            while True:
                key = shard_key(self.ulid, self.sequence)
                try:
                    await self.storage.create(key, data, metadata)
                except Conflict:
                    # Nobody else writes here: an earlier commit arrived although it seemed to fail.
                    self.sequence += 1
                    continue
                self._committed.update({group.index: self.sequence for group in groups})
                self.sequence += 1
                return key

    def hand_back(self, indices: list[int]) -> None:
        """Give up leases, in the next heartbeat."""
        self._handed_back.update(indices)

    def fail(self, index: int, reason: str) -> None:
        """Report, in the next heartbeat, that this index by itself could not be generated."""
        self._failures[index] = reason

    def _settle(self, entry: WriterEntry) -> dict[int, int]:
        """Forget what the trainer has dealt with; returns the leases that are work to do."""
        self._committed = {i: sequence for i, sequence in self._committed.items() if sequence >= entry.acknowledged}
        self._handed_back &= entry.leases.keys()
        self._failures = {i: reason for i, reason in self._failures.items() if i in entry.leases}
        settling = self._committed.keys() | self._handed_back | self._failures.keys()
        return {index: minimum for index, minimum in entry.leases.items() if index not in settling}

    def _control(self, state: ControlState, leases: dict[int, int], loaded: Version | None, revoked: bool) -> Control:
        request = state.evaluation
        if request and (request.writer != self.ulid or (loaded and loaded > request.version)):
            request = None  # the trainer will see what is loaded, and ask another writer or for another version
        return Control(
            term=state.term,
            step=state.step,
            version=state.version,
            leases=leases,
            evaluation=request,
            stop=state.stop,
            replaying=state.replaying,
            revoked=revoked,
        )

    async def _reincarnate(self, state: ControlState) -> None:
        others = [
            ulid for ulid, entry in state.writers.items() if entry.instance == self.instance and entry.final is None
        ]
        if others:
            raise Superseded(
                f"another process runs as instance {self.instance!r} (writer {others[0]}); "
                "give each worker its own name"
            )
        async with self._commits:
            log.warning("writer %s was revoked; registering again", self.ulid)
            self._begin()
            self._revoked = True

    async def _heartbeat(self, report: Report) -> None:
        """Refresh writers/<ulid>.json if it is due, or at once where the trainer should act on a change."""
        heartbeat = Heartbeat(
            ulid=self.ulid,
            instance=self.instance,
            version=report.version,
            sequence=self.sequence,
            draining=report.draining,
            handed_back=tuple(sorted(self._handed_back)),
            failures=dict(self._failures),
            statistics=report.statistics,
            refreshed=self.clock.now(),
        )
        is_due = self.clock.monotonic() - self._beaten >= self.heartbeat_s
        if self._said and _urgent(heartbeat) == _urgent(self._said) and not is_due:
            return
        beaten = self.clock.monotonic()
        await self.storage.put(writer_key(self.ulid), heartbeat.encode())
        self._said, self._beaten = heartbeat, beaten


def _urgent(heartbeat: Heartbeat) -> tuple[object, ...]:
    return (heartbeat.version, heartbeat.draining, heartbeat.handed_back, heartbeat.failures)
