"""What the trainer and its workers tell each other through the store: keys, and two small JSON objects.

control/state.json is written by the trainer of the highest term alone, writers/<ulid>.json by that worker alone.
    control: {"term", "step", "version": [term, step] | null, "writers": {ulid: {"instance", "leases": [[index,
              minimum step], …], "acknowledged", "final"}}, "evaluation": {"step", "version", "writer"} | null,
              "stop": reason | null, "replaying"}
    writer:  {"ulid", "instance", "version": [term, step] | null, "sequence", "draining", "handed_back": [index, …],
              "failures": {index: reason}, "statistics", "refreshed"}
"""

import dataclasses
import json
import re
from typing import Annotated, Any, TypeVar

import pydantic

from pipeline.versions import Version

T = TypeVar("T")
FAULTS = 3
"""Named in a message."""
CONTROL_KEY = "control/state.json"
WRITERS_FOLDER = "writers"
SHARDS_FOLDER = "rollouts/v1"
CONTROL_REMEDY = (
    "while nothing of the run is going on, delete it: the next trainer writes it anew, and has generated again what was"
    " in flight"
)


def writer_key(ulid: str) -> str:
    return f"{WRITERS_FOLDER}/{ulid}.json"


def is_heartbeat(key: str) -> bool:
    """Whether it is spelled as `writer_key` does: what else lies in the folder is none of the run's."""
    return re.fullmatch(rf"{WRITERS_FOLDER}/[0-9A-Za-z]+\.json", key) is not None


def shard_key(ulid: str, sequence: int) -> str:
    return f"{SHARDS_FOLDER}/{ulid}/{sequence:020d}.parquet"


def shard_place(key: str) -> tuple[str, int]:
    """(ULID, sequence number) of a shard's key."""
    _, _, ulid, name = key.split("/")
    return ulid, int(name.removesuffix(".parquet"))


def is_shard(key: str) -> bool:
    """Whether it is spelled as `shard_key` does: what else lies in the folder is none of the run's."""
    return re.fullmatch(rf"{SHARDS_FOLDER}/[0-9A-Za-z_-]+/\d{{20}}\.parquet", key) is not None


def evaluation_key(step: int) -> str:
    """The result; the worker creates it last, after the samples beside it (.parquet)."""
    return f"evaluations/v1/s{step:020d}.json"


def encoded(content: dict[str, Any]) -> bytes:
    """JSON in UTF-8: a lone surrogate, as it may come with the message of somebody's error, becomes a question mark,
    since readers take what holds one for damaged."""
    return json.dumps(content, ensure_ascii=False).encode(errors="replace")


def _leases(pairs: Any) -> dict[int, int]:
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and [type(number) for number in pair] == [int, int] for pair in pairs
    ):
        raise ValueError("should be a list of pairs [prompt index, lowest step]")
    return dict(pairs)


@dataclasses.dataclass(frozen=True)
class WriterEntry:
    """What the trainer says about one writer incarnation."""

    instance: str
    leases: Annotated[dict[int, int], pydantic.BeforeValidator(_leases)]
    """Prompt index → lowest step of a version it may be generated with."""
    acknowledged: int
    """Sequence number of the next shard the trainer expects."""
    final: int | None = None
    """Revoked: shards from this sequence number on do not count."""

    def to_json(self) -> dict[str, Any]:
        return {
            "instance": self.instance,
            "leases": [[index, minimum] for index, minimum in sorted(self.leases.items())],
            "acknowledged": self.acknowledged,
            "final": self.final,
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "WriterEntry":
        return cls(content["instance"], _leases(content["leases"]), content["acknowledged"], content["final"])


@dataclasses.dataclass(frozen=True)
class EvaluationRequest:
    step: int
    """Names the result: evaluation_key(step)."""
    version: Version
    writer: str
    """ULID of the writer asked to load `version` and evaluate it."""


@dataclasses.dataclass(frozen=True)
class ControlState:
    term: int
    step: int
    """Finished optimizer steps."""
    version: Version | None
    """Policy that workers should load; None: none is published yet."""
    writers: dict[str, WriterEntry]
    evaluation: EvaluationRequest | None = None
    stop: str | None = None
    """Why the run ended; None: it goes on."""
    replaying: bool = False
    """A restarted trainer repeats logged steps: leases are those of its predecessor, none is granted."""

    def encode(self) -> bytes:
        content = dataclasses.asdict(dataclasses.replace(self, writers={}))
        content["writers"] = {ulid: entry.to_json() for ulid, entry in self.writers.items()}
        return encoded(content)

    @classmethod
    def decode(cls, data: bytes) -> "ControlState":
        """Raises ValueError, which names key, field and remedy, for anything else."""
        try:
            return _decoded(_CONTROL, data)
        except ValueError as error:
            raise ValueError(f"{CONTROL_KEY} is damaged ({error}); {CONTROL_REMEDY}") from None


@dataclasses.dataclass(frozen=True)
class Heartbeat:
    """What one writer incarnation says about itself."""

    ulid: str
    instance: str
    """Name of its slot (pod, or rollout-0): a newer incarnation of the same slot proves the older one dead."""
    version: Version | None = None
    """Policy it has loaded."""
    sequence: int = 0
    """Sequence number of the next shard it will write."""
    draining: bool = False
    """It is about to leave: grant nothing."""
    handed_back: tuple[int, ...] = ()
    failures: dict[int, str] = dataclasses.field(default_factory=dict)
    statistics: dict[str, float] = dataclasses.field(default_factory=dict)
    refreshed: float = 0.0
    """Seconds since the epoch, by the worker's clock; for people, the protocol uses the store's."""

    def encode(self) -> bytes:
        return encoded(dataclasses.asdict(self))

    @classmethod
    def decode(cls, data: bytes) -> "Heartbeat":
        """Raises ValueError, which names the field, for anything else."""
        return _decoded(_HEARTBEAT, data)


_CONTROL, _HEARTBEAT = pydantic.TypeAdapter(ControlState), pydantic.TypeAdapter(Heartbeat)


def _decoded(kind: pydantic.TypeAdapter[T], data: bytes) -> T:
    try:
        return kind.validate_json(data, strict=True)
    except pydantic.ValidationError as error:
        faults = [".".join(map(str, fault["loc"])) + ": " + fault["msg"] for fault in error.errors()]
        raise ValueError("; ".join(fault.removeprefix(": ") for fault in faults[:FAULTS])) from None
