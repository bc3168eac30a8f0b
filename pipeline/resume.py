"""What a checkpoint keeps of the coordinator, and what of the run's shards no checkpoint can ask for any more; pure.

The state is that of a finished step: everything behind it in the trainer's log is replayed from `position` on.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from pipeline.leases import Frontier, Ledger
from pipeline.messages import WriterEntry, is_shard, shard_place
from pipeline.roster import Known
from pipeline.storage import ObjectInfo
from pipeline.versions import Version


@dataclasses.dataclass(frozen=True)
class State:
    """JSON: {"term", "step", "position", "low", "above", "writers": {ulid: {"instance", "leases", "acknowledged",
    "final", "cursor"}}, "evaluations": [[step, [term, step]], …], "time"}."""

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
    time: float = 0.0
    """Of the state, seconds since the epoch by the store's clock."""

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
            "time": self.time,
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "State":
        return cls(
            term=content["term"],
            step=content["step"],
            position=content["position"],
            frontier=Frontier.from_json(content),
            writers={ulid: WriterEntry.from_json(entry) for ulid, entry in content["writers"].items()},
            cursors={ulid: entry["cursor"] for ulid, entry in content["writers"].items()},
            evaluations={step: Version(*version) for step, version in content["evaluations"]},
            time=float(content["time"]),
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


def expired(shards: Iterable[ObjectInfo], oldest: State, grace_s: float) -> list[str]:
    """Keys of the shards that nothing from the checkpoint `oldest` on needs.

    Those below a writer's cursor hold nothing that is still to be trained. A writer that the state does not name had
    been read to its end by then, if it is older, so what it wrote before does not count either. The state's time is
    that of the last write of control/state.json: a revocation that has not been told yet spares what came after.
    """
    keys = []
    for shard in shards:
        if not is_shard(shard.key):
            continue
        ulid, sequence = shard_place(shard.key)
        read = ulid not in oldest.cursors or sequence < oldest.cursors[ulid]
        if read and shard.modified < oldest.time - grace_s:
            keys.append(shard.key)
    return keys
