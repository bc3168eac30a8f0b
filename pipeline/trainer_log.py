"""The trainer's log: the one order of all plans, and the fence between trainers.

trainer/log/<n>.json, n = 0, 1, 2, …, each taken with If-None-Match and never deleted. A new trainer appends
`takeover` with a term above every one in the log before it does anything else. Whoever then loses the race for
a position looks at what is there: a record of a lower term lies before its own and is adopted; one of its own term
or a higher one means that it has been replaced. So no two trainers run past one record.

    {"type": "takeover", "term"}
    {"type": "plan", "term", "step", "groups": [{"index", "key", "sha256", "start", "stop"}, …],
     "drops": [{"index", "reason"}, …], "quarantined": [{"key", "reason"}, …]}
    {"type": "withdraw", "term", "step", "drops", "quarantined"}    what of a logged plan cannot be read any more
    {"type": "collect", "term", "below"}          nobody resumes from a position below; appended before deleting
    {"type": "stop", "term", "reason", "step"}
"""

import asyncio
import dataclasses
import itertools
import json
from collections.abc import Iterable
from typing import Literal, get_args

import pydantic

from pipeline.messages import encoded
from pipeline.storage import Conflict, Storage

DropReason = Literal["stale", "no-spread", "failed", "orphaned", "invalid", "damaged", "filtered"]
DROP_REASONS: tuple[str, ...] = get_args(DropReason)
GETS_AT_ONCE = 32


class Fenced(Exception):
    """Another trainer has taken this run over: stop, write nothing more."""


class Hopeless(Exception):
    """Training cannot go on, and a restart would come to the same point."""


@dataclasses.dataclass(frozen=True)
class Takeover:
    term: int


@dataclasses.dataclass(frozen=True)
class GroupRef:
    """Where one planned group lies: rows start … stop-1 of the shard `key`."""

    index: int
    key: str
    sha256: str
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Drop:
    """A prompt index that will not be trained."""

    index: int
    reason: DropReason


@dataclasses.dataclass(frozen=True)
class Quarantine:
    """A damaged shard; its indices are not dropped but granted again."""

    key: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """What optimizer step `step` (1, 2, …) trains."""

    step: int
    term: int
    groups: tuple[GroupRef, ...]  # prompts_per_step, oldest policy first
    drops: tuple[Drop, ...] = ()
    quarantined: tuple[Quarantine, ...] = ()
    replayed: bool = False
    """The log had it already when this trainer took over; not part of the record."""

    def without(self, withdrawn: "Withdraw") -> "Plan":
        """What is left of the plan."""
        gone = {drop.index for drop in withdrawn.drops}
        return dataclasses.replace(self, groups=tuple(group for group in self.groups if group.index not in gone))


@dataclasses.dataclass(frozen=True)
class Withdraw:
    """Groups of a plan whose shards have been damaged since. Appended before the step is trained without them, so that
    every later trainer leaves them out as well, even if it should be able to read them."""

    step: int
    term: int
    drops: tuple[Drop, ...]
    quarantined: tuple[Quarantine, ...]


@dataclasses.dataclass(frozen=True)
class Collect:
    term: int
    below: int
    """Log position."""


@dataclasses.dataclass(frozen=True)
class Stop:
    term: int
    reason: str
    step: int


Record = Takeover | Plan | Withdraw | Collect | Stop


KINDS: dict[str, pydantic.TypeAdapter[Record]] = {
    kind.__name__.lower(): pydantic.TypeAdapter(kind) for kind in get_args(Record)
}


class TrainerLog:
    """`position` is the number of the next record, `term` this trainer's (0 before it took over)."""

    def __init__(self, storage: Storage):
        self.storage = storage
        self.position = 0
        self.term = 0
        self._appending = asyncio.Lock()

    async def take_over(self, position: int = 0, term: int = 0) -> list[tuple[int, Record]]:
        """Fence every earlier trainer; returns the (number, record)s from `position` to the takeover exclusive.

        `term` is the highest one known from before `position`. Raises Fenced if another trainer took over at once.
        """
        self.position = position
        records: list[tuple[int, Record]] = []
        while (record := await self._read(self.position)) is not None:
            records.append((self.position, record))
            self.position += 1
        self.term = max([term, *(record.term for _, record in records)]) + 1
        return records + await self._append(Takeover(self.term))

    async def append(self, record: Record) -> None:
        """Take the next position for `record`. Raises Fenced; StorageError if the store did not say what became of it.

        After a StorageError this log must not be used further: the restarted trainer will see what is there.
        """
        assert record.term == self.term > 0, "take over first"
        async with self._appending:  # the next plan may come while this one is withdrawn, or old shards are collected
            adopted = await self._append(record)
        assert not adopted, "a trainer of a lower term wrote past a takeover"

    async def _append(self, record: Record) -> list[tuple[int, Record]]:
        adopted: list[tuple[int, Record]] = []
        while True:
            try:
                await self.storage.create(_key(self.position), encode(record))
            except Conflict:
                rival = await self._read(self.position)
                assert rival is not None, "records are never deleted"
                if rival.term >= record.term:
                    raise Fenced(
                        f"a trainer of term {rival.term} has taken over; this one has term {record.term}"
                    ) from None
                adopted.append((self.position, rival))
                self.position += 1
            else:
                self.position += 1
                return adopted

    async def _read(self, position: int) -> Record | None:
        found = await self.storage.get(_key(position))
        return decode(found.data) if found else None


async def is_begun(storage: Storage) -> bool:
    """Whether there is a log: only who deletes the whole run deletes it."""
    return await storage.head(_key(0)) is not None


async def records(storage: Storage, start: int = 0) -> list[Record]:
    """The log from position `start` on. Raises ValueError for what is no record, Corrupted, StorageError."""
    found: list[Record] = []
    while True:
        keys = [_key(start + len(found) + number) for number in range(GETS_AT_ONCE)]
        objects = await asyncio.gather(*(storage.get(key) for key in keys))
        there = list(itertools.takewhile(lambda each: each is not None, objects))
        found += [decode(each.data) for each in there if each is not None]
        if len(there) < GETS_AT_ONCE:
            return found


def surviving(log: Iterable[Record]) -> dict[int, Plan]:
    """Step → its plan, ascending, without what was withdrawn; a later plan of a step replaces an earlier one, whose
    lineage was abandoned."""
    plans: dict[int, Plan] = {}
    for record in log:
        if isinstance(record, Plan):
            plans[record.step] = record
        elif isinstance(record, Withdraw) and record.step in plans:
            plans[record.step] = plans[record.step].without(record)
    return dict(sorted(plans.items()))


def ended(log: Iterable[Record]) -> Stop | None:
    """The last stop record, unless a trainer took over after it."""
    ends = [record for record in log if isinstance(record, Stop | Takeover)]
    return ends[-1] if ends and isinstance(ends[-1], Stop) else None


def encode(record: Record) -> bytes:
    content = dataclasses.asdict(record)
    content.pop("replayed", None)
    return encoded({"type": type(record).__name__.lower(), **content})


def decode(data: bytes) -> Record:
    """Raises ValueError for anything that is not a record."""
    try:
        return KINDS[json.loads(data)["type"]].validate_json(data, strict=True)
    except pydantic.ValidationError as error:
        fault = error.errors()[0]
        reason = ".".join(map(str, fault["loc"])) + ": " + fault["msg"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = str(error)
    raise ValueError(f"not a record of the trainer's log: {data[:200]!r} ({reason})")


def _key(position: int) -> str:
    return f"trainer/log/{position:020d}.json"
