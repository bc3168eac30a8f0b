"""What a checkpoint keeps of the coordinator, and what of the run's shards no checkpoint can ask for any more; pure.

The state is that of a finished step: everything behind it in the trainer's log is replayed from `position` on.
"""

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any

from pipeline.leases import Frontier, Ledger
from pipeline.messages import WriterEntry, is_shard, shard_place
from pipeline.roster import Known
from pipeline.storage import ObjectInfo
from pipeline.trainer_log import Plan, Record
from pipeline.versions import Version


@dataclasses.dataclass(frozen=True)
class State:
    """JSON: {"term", "step", "position", "low", "above", "writers": {ulid: {"instance", "leases", "acknowledged",
    "final", "cursor"}}, "evaluations": [[step, [term, step]], …]}."""

    term: int = 0
    step: int = 0
    position: int = 0
    """Number of the record behind the plan of `step`."""
    frontier: Frontier = dataclasses.field(default_factory=Frontier)
    writers: dict[str, WriterEntry] = dataclasses.field(default_factory=dict)
    cursors: dict[str, int] = dataclasses.field(default_factory=dict)
    """By writer: the first shard that holds something not trained yet."""
    evaluations: dict[int, Version] = dataclasses.field(default_factory=dict)
    """Requested and not answered: step → version."""

    def to_json(self) -> dict[str, Any]:
        return {
            "term": self.term,
            "step": self.step,
            "position": self.position,
            **self.frontier.to_json(),
            "writers": {
                ulid: {**entry.to_json(), "cursor": self.cursors[ulid]} for ulid, entry in self.writers.items()
            },
            "evaluations": [[step, list(version)] for step, version in self.evaluations.items()],
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "State":
        return cls(
            term=content["term"],
            step=content["step"],
            position=int(content["position"]),
            frontier=Frontier.from_json(content),
            writers={ulid: WriterEntry.from_json(entry) for ulid, entry in content["writers"].items()},
            cursors={ulid: int(entry["cursor"]) for ulid, entry in content["writers"].items()},
            evaluations={step: Version(*version) for step, version in content["evaluations"]},
        )


def entries(roster: Iterable[Known], ledger: Ledger) -> dict[str, WriterEntry]:
    """What is to be said of each writer, by ULID."""
    held = ledger.held()
    return {
        known.ulid: WriterEntry(
            instance=known.instance,
            leases={index: lease.minimum for index, lease in held[known.ulid].items()},
            acknowledged=known.cursor,
            final=known.final,
        )
        for known in roster
    }


def expired(
    shards: Iterable[ObjectInfo], kept: Collection[State], records: Iterable[Record], roster: Collection[str]
) -> list[str]:
    """Keys of the shards that no trainer which starts from one of the `kept` checkpoints can ask for.

    That is, shards that no plan in `records`, those behind the oldest checkpoint, names, and that either lie below
    their writer's cursor in the oldest, or come from a writer that nobody names: no checkpoint, nor the `roster`, those
    of control/state.json. No clock decides. One that nobody names was met after the oldest checkpoint and forgotten, or
    had been read to its end before; should it come back, nothing that it has written counts.
    """
    oldest = min(kept, key=lambda state: state.position)
    named = {*roster, *(ulid for state in kept for ulid in state.cursors)}
    planned = {group.key for record in records if isinstance(record, Plan) for group in record.groups}
    keys = []
    for shard in shards:
        if is_shard(shard.key) and shard.key not in planned:
            ulid, sequence = shard_place(shard.key)
            if ulid not in named or sequence < oldest.cursors.get(ulid, 0):
                keys.append(shard.key)
    return keys
