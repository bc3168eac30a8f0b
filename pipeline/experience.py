"""Experience: what a worker writes and the trainer reads, one Parquet shard of whole groups at a time.

A row is one sample (one completion of one prompt). All samples of a group lie together in one shard. Here is what a row
holds, and how the columns of a table are read; `codec` makes shards of it and checks those that come.
The schema is explicit; columns may be added within v1 (nullable), never changed.

A sample of several turns holds all tokens after its prompt, the policy's and the environment's, in the order in which
the policy saw them: `turns` says who wrote which. Observations are context and nothing else: they have no logprob
(NaN, so that a reader that does not know of turns refuses the shard), and no part in losses and statistics.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from pipeline.versions import Version

TURN = pa.struct(
    [
        ("start", pa.int32()),
        ("observation", pa.bool_()),
        ("text", pa.large_string()),
        ("reward", pa.float64()),  # part of the sample's reward
    ]
)
STEP = pa.struct([("token", pa.int32()), ("reward", pa.float64())])
SCHEMA = pa.schema(
    [
        pa.field("index", pa.int64(), nullable=False),  # prompt index, names the group
        pa.field("sample", pa.int32(), nullable=False),  # 0 … group_size-1
        pa.field("set", pa.large_string(), nullable=False),
        pa.field("prompt", pa.large_string()),
        pa.field("answer", pa.large_string()),
        pa.field("prompt_ids", pa.large_list(pa.int32()), nullable=False),  # [P]
        pa.field("completion", pa.large_string()),  # of several turns the policy's last
        pa.field("completion_ids", pa.large_list(pa.int32()), nullable=False),  # [C]
        pa.field("logprobs", pa.large_list(pa.float32()), nullable=False),  # [C] of the sampling policy; NaN: observed
        pa.field("finish_reason", pa.large_string(), nullable=False),  # stop | length
        pa.field("reward", pa.float64()),  # weighted sum; null: unscorable
        pa.field("rewards", pa.map_(pa.string(), pa.float64())),  # unweighted, by name
        pa.field("invalid", pa.large_string()),  # why the sample takes no part in training; null: it does
        pa.field("version_term", pa.int32(), nullable=False),  # oldest version that made any token
        pa.field("version_step", pa.int64(), nullable=False),
        pa.field("spans", pa.list_(pa.struct([("start", pa.int32()), ("term", pa.int32()), ("step", pa.int64())]))),
        pa.field("created", pa.float64(), nullable=False),  # seconds since the epoch, the worker's clock
        pa.field("turns", pa.list_(TURN)),  # null: one turn, all of it sampled
        pa.field("steps", pa.large_list(STEP)),  # process rewards, weighted: parts of `reward`; null: none
    ],
    metadata={"miles.schema": "1"},
)


class Damaged(ValueError):
    """A shard that is torn, fails its checksum or breaks a rule; the message names the rule."""


class Turn(NamedTuple):
    """A part of a sample's tokens, up to the next turn."""

    start: int  # index of its first token
    observation: bool  # written by the environment, not sampled
    text: str
    reward: float | None = None  # what came with a turn of the policy, weighted: part of the sample's reward


class Step(NamedTuple):
    """What of a sample's reward came with one of its sampled tokens."""

    token: int  # index in completion_ids
    reward: float  # weighted


@dataclasses.dataclass(frozen=True)
class Rollout:
    """One completion. Example: prompt_ids [5, 9], completion_ids [7, 2], logprobs [-0.1, -0.7]."""

    completion_ids: list[int]  # [C]
    logprobs: list[float]  # [C], float32, log μ of the sampled tokens; NaN for observations
    completion: str
    finish_reason: str
    reward: float | None  # None: unscorable
    rewards: dict[str, float]
    invalid: str | None
    spans: list[tuple[int, Version]]  # (first token of the span, version that made it)
    turns: list[Turn] = dataclasses.field(default_factory=list)  # empty: one turn, all of it sampled
    steps: list[Step] = dataclasses.field(default_factory=list)  # by ascending token

    @property
    def oldest(self) -> Version:
        return min(version for _, version in self.spans)

    @property
    def mask(self) -> np.ndarray:
        """[C] bool: which tokens the policy sampled."""
        return sampled(self.turns, len(self.completion_ids))

    @property
    def credits(self) -> np.ndarray:
        """[C] float64: each turn's reward at its last token and each step's at its own, 0 elsewhere."""
        return _credits(self.turns, self.steps, len(self.completion_ids))


@dataclasses.dataclass(frozen=True)
class RolloutGroup:
    """All completions of one prompt index."""

    index: int
    set: str
    prompt: str
    answer: str | None
    prompt_ids: list[int]  # [P]
    rollouts: list[Rollout]
    created: float  # seconds since the epoch


class Ragged(NamedTuple):
    """Rows of different lengths, end to end: row i is values[offsets[i]:offsets[i+1]].

    Example: [[5, 9], [], [7]] is values [5, 9, 7], offsets [0, 2, 2, 3].
    """

    values: np.ndarray  # [T]
    offsets: np.ndarray  # [N+1] int64


GREEDY = "greedy baseline"
"""Why a sample that is there for its reward alone is `invalid`: the last of its group (ReMax)."""


def ragged(table: pa.Table, name: str) -> Ragged:
    """A list column as numpy, without copying: views of the table's memory, read-only, alive as long as it.

    The table must come from `decode` (or be one chunk); a slice of it works.
    """
    column = table.column(name)
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    offsets = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    if array.values.null_count:
        raise Damaged(f"column {name} holds nulls inside its lists")
    values = array.values.to_numpy()
    return Ragged(values[offsets[0] : offsets[-1]], offsets - offsets[0])


def response_mask(table: pa.Table) -> np.ndarray:
    """[T] bool over the values of `completion_ids`: sampled by the policy. Of invalid samples all are True."""
    completions = ragged(table, "completion_ids")
    mask = np.ones(len(completions.values), np.bool_)
    for part, turns in _valid_turns(table, completions):
        mask[part] = sampled(turns, part.stop - part.start)
    return mask


def token_rewards(table: pa.Table) -> np.ndarray | None:
    """[T] over the values of `completion_ids`: a turn's reward at its last token, a step's at its own; None where there
    is neither."""
    completions = ragged(table, "completion_ids")
    rewards = np.zeros(len(completions.values))
    for part, turns in _valid_turns(table, completions):
        rewards[part] = _credits(turns, (), part.stop - part.start)
    valid = table.column("invalid").is_null().to_numpy()  # [N]
    for row, steps in entries(table, "steps"):
        if valid[row]:
            rewards[completions.offsets[row] + np.array([step["token"] for step in steps])] += [
                step["reward"] for step in steps
            ]
    return rewards if rewards.any() else None


def _valid_turns(table: pa.Table, completions: Ragged) -> Iterator[tuple[slice, list[Turn]]]:
    """(where its tokens lie, its turns) of each valid sample that has any."""
    invalid = table.column("invalid")
    for row, turns in entries(table, "turns"):
        if invalid[row].as_py() is None:
            yield slice(*completions.offsets[row : row + 2]), [Turn(**turn) for turn in turns]


def entries(table: pa.Table, name: str) -> list[tuple[int, list[dict[str, Any]]]]:
    """(row, its entries in column `turns` or `steps`), for rows that have any."""
    column = table.column(name)
    if column.null_count == len(column):
        return []
    return [(row, entries) for row, entries in enumerate(column.to_pylist()) if entries]


def sampled(turns: Sequence[Turn], length: int) -> np.ndarray:
    """[C] bool: which of `length` tokens the policy sampled."""
    mask = np.ones(length, np.bool_)
    for turn, stop in _with_stops(turns, length):
        if turn.observation:
            mask[turn.start : stop] = False
    return mask


def _credits(turns: Sequence[Turn], steps: Sequence[Step], length: int) -> np.ndarray:
    credits = np.zeros(length)
    for turn, stop in _with_stops(turns, length):
        credits[stop - 1 : stop] = turn.reward or 0.0
    for step in steps:
        credits[step.token] += step.reward
    return credits


def _with_stops(turns: Sequence[Turn], length: int) -> Iterator[tuple[Turn, int]]:
    return zip(turns, [*(turn.start for turn in turns[1:]), length], strict=False)


def rows(table: pa.Table, start: int, stop: int) -> list[RolloutGroup]:
    """The groups in rows start … stop-1, which must be whole, as Python objects (slow: some 10,000 rows/s)."""
    part = table.slice(start, stop - start).to_pylist()
    groups: list[RolloutGroup] = []
    for row in part:
        if not groups or groups[-1].index != row["index"]:
            assert row["sample"] == 0, f"row range {start}:{stop} cuts a group"
            groups.append(
                RolloutGroup(
                    index=row["index"],
                    set=row["set"],
                    prompt=row["prompt"],
                    answer=row["answer"],
                    prompt_ids=row["prompt_ids"],
                    rollouts=[],
                    created=row["created"],
                )
            )
        groups[-1].rollouts.append(_rollout(row))
    return groups


def _rollout(row: dict[str, Any]) -> Rollout:
    return Rollout(
        completion_ids=row["completion_ids"],
        logprobs=row["logprobs"],
        completion=row["completion"],
        finish_reason=row["finish_reason"],
        reward=row["reward"],
        rewards=dict(row["rewards"] or []),
        invalid=row["invalid"],
        spans=[(span["start"], Version(span["term"], span["step"])) for span in row["spans"] or []],
        turns=[Turn(**turn) for turn in row["turns"] or []],
        steps=[Step(**step) for step in row["steps"] or []],
    )
