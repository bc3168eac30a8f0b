"""Training again on the stored samples of a run that is over (`data.replayFrom`): nothing is generated.

The groups that the other run trained, each as often as it did, in its order: that is a pass, and after the last comes
the first again. The n-th group of all passes has the index n, so the ledger, the log and checkpoints keep their rules:
each index is planned once, or dropped with a reason. How old a policy made a sample does not matter, since it is not
one of this run's; what its log-probabilities differ by, `algorithm.correction` weighs as ever.

The other run's prefix is only read: its log and run.json when a trainer starts, its shards a few at a time. If it is
taken up again for more steps, nothing changes here: source.json keeps how much of its log there was at first. What it
then collects (`store.retention: window`) this run misses, and drops by name.
"""

import collections
import contextlib
import dataclasses
import json
import logging

import pyarrow as pa

from pipeline import codec, selection, trainer_log, where
from pipeline.algorithms.registry import ALGORITHMS
from pipeline.batching import Replayed
from pipeline.clock import Clock
from pipeline.config import RunConfig
from pipeline.dispatch import Dispatcher
from pipeline.experience import Damaged
from pipeline.intake import summarise
from pipeline.messages import shard_key, shard_place
from pipeline.planning import Choice
from pipeline.storage import Conflict, Corrupted, Storage, confined, exists, open_storage
from pipeline.trainer_log import DropReason, GroupRef, Hopeless, Quarantine, Record
from pipeline.versions import Version
from pipeline.where import Condition

log = logging.getLogger(__name__)

FIELD = "data.replayFrom"
EXTENT_KEY = "source.json"
"""{"records"}: of the source's log, when this run began; a pass is what they say."""
AHEAD = 2
"""Steps whose groups are read before they are trained."""
CACHED = 8
"""Shards in memory: a step takes from a few, and the next one from the same."""


def shards(config: RunConfig, storage: Storage) -> Storage:
    """Where the shards lie that the plans of this run name; `storage` is the run's own."""
    return storage if config.data.replay_from is None else _source(config)


def replayed(config: RunConfig) -> Replayed | None:
    """How these shards are read; None: as the run's own."""
    return None if config.data.replay_from is None else Replayed(condition(config))


def _source(config: RunConfig) -> Storage:
    assert config.data.replay_from is not None
    return open_storage(config.data.replay_from.uri, config.store.endpoint, config.store.region, read_only=True)


def condition(config: RunConfig) -> Condition | None:
    """Which of the samples are trained; None: all. Raises ValueError for what is no condition."""
    source = config.data.replay_from
    if source is None or source.where is None:
        return None
    try:
        return where.parse(source.where)
    except ValueError as error:
        raise ValueError(f"{FIELD}.where: {error}") from None


async def check(config: RunConfig, storage: Storage) -> None:
    """Raise ValueError, one line, for a source that cannot be trained on, or not in this way. Notes its extent in the
    run's own `storage`, if no earlier trainer has."""
    condition(config)
    assert config.data.replay_from is not None
    if not exists(config.data.replay_from.uri):
        raise ValueError(f"{FIELD}.uri: {config.data.replay_from.uri}: there is no such folder")
    source = _source(config)
    await _agree(config, source)
    records = await _records(config, storage, source)
    _groups(config, records)
    with contextlib.suppress(Conflict):
        await storage.create(EXTENT_KEY, json.dumps({"records": len(records)}).encode())


async def _agree(config: RunConfig, source: Storage) -> None:
    """The samples must mean here what they meant there."""
    assert config.data.replay_from is not None
    uri = config.data.replay_from.uri
    try:
        found = await source.get("run.json")
        content = json.loads(found.data) if found else {}
        there = RunConfig.model_validate(content.get("config", content))
    except (Corrupted, ValueError, AttributeError):
        raise ValueError(
            f"{FIELD}.uri: {uri} holds no run.json of a run; name a prefix <root>/<namespace>/<name>/<run id>"
        ) from None
    if "config" not in content:
        raise ValueError(f"{FIELD}.uri: {uri} is a run's folder; name its prefix in the store, {there.store.uri}")
    if there.data.replay_from is not None:
        raise ValueError(f"{FIELD}.uri: {uri} has no samples of its own; name {there.data.replay_from.uri}")
    here, drawn = config.algorithm, there.algorithm
    if here.group_size != drawn.group_size:
        raise ValueError(
            f"algorithm.groupSize: got {here.group_size}; the samples of {FIELD} come in groups of {drawn.group_size}"
        )
    if here.sampling.temperature != drawn.sampling.temperature:
        raise ValueError(
            f"algorithm.sampling.temperature: got {here.sampling.temperature:g}; the samples of {FIELD} were drawn at "
            f"{drawn.sampling.temperature:g}, and their log-probabilities are those of that temperature"
        )
    if ALGORITHMS[here.type].greedy_baseline != ALGORITHMS[drawn.type].greedy_baseline:
        raise ValueError(
            f"algorithm.type: {here.type} cannot train the samples that {drawn.type} has drawn: one of the two needs a "
            "greedy completion in each group, and the other has none"
        )


async def _records(config: RunConfig, storage: Storage, source: Storage) -> list[Record]:
    """The source's log, as far as it went when this run began."""
    assert config.data.replay_from is not None
    uri = config.data.replay_from.uri
    try:
        records = await trainer_log.records(source)
    except (ValueError, Corrupted) as error:
        raise ValueError(f"{FIELD}.uri: the log of {uri} is damaged: {error}") from None
    try:
        found = await storage.get(EXTENT_KEY)
        return records[: int(json.loads(found.data)["records"])] if found else records
    except (ValueError, KeyError, TypeError, Corrupted) as error:
        raise ValueError(
            f"{EXTENT_KEY} of this run is damaged ({error}); delete it, and {uri} is trained as it is now"
        ) from None


def _groups(config: RunConfig, records: list[Record]) -> list[GroupRef]:
    """Those of one pass. Raises ValueError if the run is not over, or has trained nothing."""
    assert config.data.replay_from is not None
    uri = config.data.replay_from.uri
    if trainer_log.ended(records) is None:
        raise ValueError(f"{FIELD}.uri: {uri} is not over: its log does not end in a stop record; wait until it is")
    groups = [group for plan in trainer_log.surviving(records).values() for group in plan.groups]
    if not groups:
        raise ValueError(f"{FIELD}.uri: {uri} has trained nothing")
    if strange := next((group for group in groups if not _is_reference(group)), None):
        raise ValueError(f"{FIELD}.uri: the log of {uri} names what is no group of samples: {strange}")
    return groups


def _is_reference(group: GroupRef) -> bool:
    """What a stranger's log may say without harm."""
    try:
        confined(group.key)
        return (
            group.key == shard_key(*shard_place(group.key))
            and 0 <= group.start < group.stop
            and isinstance(group.sha256, str)
            and isinstance(group.index, int)
        )
    except (ValueError, TypeError, AttributeError):
        return False


class Shelf:
    """The last few shards that were read, decoded."""

    def __init__(self, source: Storage, vocabulary: int | None = None, group_size: int | None = None) -> None:
        self.source, self.vocabulary, self.group_size = source, vocabulary, group_size
        self._tables: collections.OrderedDict[str, pa.Table | str] = collections.OrderedDict()

    async def table(self, reference: GroupRef) -> pa.Table | str:
        """The shard that holds the group, or why it cannot be used. Raises StorageError if the store is silent."""
        key = reference.key
        if key not in self._tables:
            self._tables[key] = await self._read(key, reference.sha256)
        self._tables.move_to_end(key)
        while len(self._tables) > CACHED:
            self._tables.popitem(last=False)
        return self._tables[key]

    async def _read(self, key: str, sha256: str) -> pa.Table | str:
        try:
            found = await self.source.get(key)
            if found is None:
                return f"{key} is gone: its run has collected it (store.retention), or somebody deleted it"
            if found.info.sha256 != sha256:
                return f"{key}: its sha256 is not that of the log; it was changed after it was trained"
            return codec.decode(found.data, self.vocabulary, self.group_size)
        except Corrupted as error:
            return str(error)
        except Damaged as error:
            return f"{key}: {error}"


class Archive(Dispatcher):
    """In the dispatcher's place: groups are delivered from a store, not by workers, of which there are none."""

    def __init__(self, storage: Storage, config: RunConfig, clock: Clock, vocabulary: int | None) -> None:
        super().__init__(storage, config, clock, vocabulary)
        self.config, self.source, self.condition = config, shards(config, storage), condition(config)
        self.max_staleness = config.algorithm.total_steps  # no bound: see _deliver
        self.groups: list[GroupRef] = []
        self._shelf = Shelf(self.source, vocabulary, self.intake.group_size)
        self._barren: collections.Counter[str] = collections.Counter()  # groups in a row that could not be trained

    def describe(self, step: int, choice: Choice) -> str:
        return f"more groups: {choice.ready} of {self.algorithm.prompts_per_step} ready, from {self.source.bucket.name}"

    def grant(self, version: Version) -> None:
        """There is nobody to grant anything to."""

    async def listen(self, patient: bool) -> None:
        """There is nobody to listen to."""

    async def catch_up(self) -> None:
        """Raises ValueError if the source has changed so that it cannot be trained on any more."""
        self.groups = _groups(self.config, await _records(self.config, self.intake.storage, self.source))
        log.info("%d groups of %s are trained again", len(self.groups), self.source.bucket.name)

    async def read(self, period_s: float) -> None:
        """Deliver the next groups, as many as may be open. Raises Hopeless if none of a whole pass can be trained."""
        room = self.ledger.capacity(AHEAD * self.algorithm.prompts_per_step)
        indices = self.ledger.free()
        while room > 0:
            index = next(indices)
            reference = self.groups[index % len(self.groups)]
            table = await self._shelf.table(reference)
            reason: DropReason | None = "damaged"
            if isinstance(table, str):
                self._name_damaged(reference.key, table)
            elif reference.stop > table.num_rows:
                self._name_damaged(reference.key, f"{reference.key} has fewer rows than the log says")
            else:
                reason = self._deliver(index, reference, table)
            if reason is None:
                self._barren.clear()
                room -= 1
            else:
                self._set_aside(index, reason)
                self._despair(reason)

    def _deliver(self, index: int, reference: GroupRef, table: pa.Table) -> DropReason | None:
        """Why the group cannot be trained; None: it is delivered, as if the base model had made it: never stale."""
        part = table.slice(reference.start, reference.stop - reference.start)
        whole = summarise(part, reference.key, reference.sha256, "", 0)
        chosen = summarise(selection.narrowed(part, self.condition), reference.key, reference.sha256, "", 0)
        if len(whole) != 1:
            return "damaged"
        if chosen[0].valid == 0:
            return "filtered" if whole[0].valid else "invalid"
        place = dataclasses.replace(reference, index=index)
        delivered = dataclasses.replace(chosen[0], ref=place, oldest=0, newest=0)
        self.ledger.deliver(delivered, catching_up=True)
        return None

    def _name_damaged(self, key: str, reason: str) -> None:
        if not self.intake.is_logged(key):
            log.warning("shard %s is quarantined: %s", key, reason)
            self.intake.damaged[key] = Quarantine(key, reason)

    def _despair(self, reason: str) -> None:
        self._barren[reason] += 1
        if self._barren.total() >= len(self.groups):
            counts = ", ".join(f"{count} {why}" for why, count in self._barren.most_common())
            said = "".join(f"; {shard.reason}" for shard in list(self.intake.damaged.values())[:1])
            raise Hopeless(f"{FIELD}: none of the {len(self.groups)} groups can be trained: {counts}{said}")
