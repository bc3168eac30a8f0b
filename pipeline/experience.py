"""Experience: what a worker writes and the trainer reads, one Parquet shard of whole groups at a time.

A row is one sample (one completion of one prompt). All samples of a group lie together in one shard.
The schema is explicit; columns may be added within v1 (nullable), never changed.

A sample of several turns holds all tokens after its prompt, the policy's and the environment's, in the order in which
the policy saw them: `turns` says who wrote which. Observations are context and nothing else: they have no logprob
(NaN, so that a reader that does not know of turns refuses the shard), and no part in losses and statistics.

Reading is guarded: `decode` answers anything that is no shard of whole and sane groups with Damaged, so that a torn
or hostile object is quarantined by its reader and never ends it; `parquet` sees to it that none takes more memory than
MOST_BYTES. Samples marked invalid may hold anything that the
engine returned (no token, a NaN logprob): their values are not checked, and are not to be trained on.
"""

import array
import dataclasses
import io
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline import parquet
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

ROWS_PER_ROW_GROUP = 256
MOST_ROWS = 1_000_000
MOST_BYTES = 4 << 30
"""Of a shard in memory; reading one takes twice as much for a moment. One that is written has half of it at most, some
100 million tokens: what Parquet makes of a value may seem twice as large."""
MOST_ENTRIES = 10_000_000
"""Spans, turns or steps of a shard."""
ROUNDING = 1e-6
STAND_IN = -9999.0
"""What vLLM writes for a logprob of -inf."""

# Ids and words repeat; logprobs do not, but their exponents do, once the bytes of a float are put apart.
DICTIONARY = ["set", "prompt", "answer", "finish_reason", "invalid"]
DICTIONARY += ["prompt_ids.list.element", "completion_ids.list.element", "rewards.key_value.key"]
ENCODING = {"logprobs.list.element": "BYTE_STREAM_SPLIT"}


def encode(groups: list[RolloutGroup]) -> bytes:
    """One Parquet file of whole groups, every sample a row, in the given order.

    Lone surrogates in texts become U+FFFD (Arrow refuses them); a logprob that rounding made positive becomes 0.
    Raises ValueError for more than a reader takes.
    """
    rows = [(group, number, rollout) for group in groups for number, rollout in enumerate(group.rollouts)]
    columns = {
        "index": [group.index for group, _, _ in rows],
        "sample": [number for _, number, _ in rows],
        "set": [group.set for group, _, _ in rows],
        "prompt": [_text(group.prompt) for group, _, _ in rows],
        "answer": [_text(group.answer) for group, _, _ in rows],
        "prompt_ids": _flat("prompt_ids", [group.prompt_ids for group, _, _ in rows]),
        "completion": [_text(rollout.completion) for _, _, rollout in rows],
        "completion_ids": _flat("completion_ids", [rollout.completion_ids for _, _, rollout in rows]),
        "logprobs": _rounded([rollout.logprobs for _, _, rollout in rows]),
        "finish_reason": [rollout.finish_reason for _, _, rollout in rows],
        "reward": [rollout.reward for _, _, rollout in rows],
        "rewards": [list(rollout.rewards.items()) for _, _, rollout in rows],
        "invalid": [_text(rollout.invalid) for _, _, rollout in rows],
        "version_term": [rollout.oldest.term for _, _, rollout in rows],
        "version_step": [rollout.oldest.step for _, _, rollout in rows],
        "spans": [[(start, *version) for start, version in rollout.spans] for _, _, rollout in rows],
        "created": [group.created for group, _, _ in rows],
        "turns": [
            [turn._replace(text=_text(turn.text) or "")._asdict() for turn in rollout.turns] or None
            for _, _, rollout in rows
        ],
        "steps": [[step._asdict() for step in rollout.steps] or None for _, _, rollout in rows],
    }
    table = pa.table([pa.array(columns[field.name], field.type) for field in SCHEMA], schema=SCHEMA)
    if len(rows) > MOST_ROWS or table.nbytes > MOST_BYTES // 2:
        raise ValueError(
            f"{len(groups)} groups have {len(rows):,} samples and {table.nbytes:,} bytes, and a shard at most"
            f" {MOST_ROWS:,} and {MOST_BYTES // 2:,}: lower algorithm.groupSize or sampling.maxNewTokens"
        )
    sink = io.BytesIO()
    pq.write_table(
        table,
        sink,
        row_group_size=ROWS_PER_ROW_GROUP,
        compression="zstd",
        compression_level=3,
        use_dictionary=DICTIONARY,
        column_encoding=ENCODING,
        write_page_checksum=True,
    )
    return sink.getvalue()


def _flat(column: str, lists: Sequence[Sequence[Any]]) -> pa.LargeListArray:
    """What `pa.array` makes of lists of numbers, in two thirds of its time."""
    kind = SCHEMA.field(column).type
    flat = array.array("f" if pa.types.is_floating(kind.value_type) else "i")
    for values in lists:
        flat.fromlist(list(values))
    offsets = np.cumsum([0, *map(len, lists)])
    return pa.LargeListArray.from_arrays(offsets, pa.array(np.asarray(flat), kind.value_type), type=kind)


def _rounded(logprobs: list[Sequence[float]]) -> pa.Array:
    made = _flat("logprobs", logprobs)
    values = made.values.to_numpy()
    positive = values > 0
    if not positive.any():
        return made
    values = np.where(positive & (values <= ROUNDING), 0, values)
    return pa.LargeListArray.from_arrays(made.offsets, values, type=made.type)


def _text(text: str | None) -> str | None:
    """`text` without lone surrogates; pairs of them become the character they spell."""
    if text is None:
        return None
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def decode(data: bytes, vocabulary: int | None = None, group_size: int | None = None) -> pa.Table:
    """The shard's table, one chunk a column, in SCHEMA's columns and types.

    `vocabulary`: ids must be below it; `group_size`: samples every group must have; None: not checked.
    Raises Damaged, naming the rule and the first row that breaks it, for anything that is not a shard.
    """
    table = read(data)
    _check_rows(table, vocabulary)
    _check_groups(table, group_size)
    return table


def read(data: bytes) -> pa.Table:
    """The table of `decode`, as far as Parquet and SCHEMA vouch for it: what rows hold is not looked at."""
    try:
        table = _within_bounds(data)
        table.validate(full=True)
    except Damaged:
        raise
    except Exception as error:  # garbage makes the reader fail in ways that it does not enumerate
        raise Damaged(
            f"not a Parquet shard of schema 1: {str(error).splitlines()[0] if str(error) else error!r}"
        ) from None
    return table


def _within_bounds(data: bytes) -> pa.Table:
    parts, size = [SCHEMA.empty_table()], 0
    for batch in parquet.batches(data, SCHEMA.names, MOST_ROWS, MOST_BYTES):
        parts.append(_conform(pa.Table.from_batches([batch])))
        size += parts[-1].nbytes
        if size > MOST_BYTES:
            raise Damaged(f"its rows take more than {MOST_BYTES:,} bytes")
    table = pa.concat_tables(parts).combine_chunks()
    for name in ("spans", "turns", "steps"):  # are looked at as Python objects
        entries = len(pc.list_flatten(table.column(name)))
        if entries > MOST_ENTRIES:
            raise Damaged(f"column {name} has {entries:,} entries, more than {MOST_ENTRIES:,}")
    return table


def _conform(table: pa.Table) -> pa.Table:
    """SCHEMA's columns: unknown ones are left out, nullable ones that an older writer did not know are null."""
    columns = []
    for field in SCHEMA:
        if field.name in table.column_names:
            column = table.column(field.name).cast(field.type)
        elif field.nullable:
            column = pa.nulls(table.num_rows, field.type)
        else:
            raise Damaged(f"column {field.name} is missing")
        if column.null_count and not field.nullable:
            raise Damaged(f"column {field.name} holds nulls")
        columns.append(column)
    return pa.table(columns, schema=SCHEMA)


def _check_rows(table: pa.Table, vocabulary: int | None) -> None:
    """Every sample by itself; values only of samples that take part in training."""
    valid = table.column("invalid").is_null().to_numpy()  # [N]
    limit = vocabulary if vocabulary is not None else np.iinfo(np.int32).max
    prompts, completions, logprobs = (ragged(table, name) for name in ("prompt_ids", "completion_ids", "logprobs"))
    lengths = np.diff(completions.offsets)  # [N]
    _refuse(lengths != np.diff(logprobs.offsets), "completion_ids and logprobs differ in length")
    _refuse(valid & (lengths == 0), "no completion token")
    _refuse(valid & (np.diff(prompts.offsets) == 0), "no prompt token")
    for column in (prompts, completions):
        _refuse(
            valid & _any(column, (column.values < 0) | (column.values >= limit)), f"a token id is not in [0, {limit})"
        )
    _check_turns(table, valid, lengths)
    _check_steps(table, valid, lengths)
    mask, values = response_mask(table), logprobs.values
    _refuse(valid & _any(logprobs, mask & ~np.isfinite(values)), "a logprob is not finite")
    _refuse(valid & _any(logprobs, ~mask & ~np.isnan(values)), "an observation has a logprob")
    _refuse(valid & _any(logprobs, values > 0), "a logprob is positive")
    _refuse(valid & _any(logprobs, values <= STAND_IN), f"a logprob is {STAND_IN:g}, the engine's stand-in for -inf")
    reward = table.column("reward").to_numpy()  # [N], null as NaN
    _refuse(valid & ~np.isfinite(reward), "no finite reward, and not marked invalid")
    finish = pc.is_in(table.column("finish_reason"), pa.array(["stop", "length"], pa.large_string())).to_numpy()
    _refuse(valid & ~finish, "finish_reason is neither stop nor length")
    _check_spans(table, valid, lengths)


def _check_turns(table: pa.Table, valid: np.ndarray, lengths: np.ndarray) -> None:
    """Turns cover the completion in order, and the first and the last are the policy's."""
    for row, turns in _lists(table, "turns"):
        starts, observed = [turn["start"] for turn in turns], [turn["observation"] for turn in turns]
        if not valid[row]:
            continue
        if None in starts or None in observed:
            raise Damaged(f"row {row}: a turn holds nulls")
        if starts[0] != 0 or starts != sorted(set(starts)) or starts[-1] >= lengths[row]:
            raise Damaged(f"row {row}: turns {starts} do not cover the completion in order")
        if observed[0] or observed[-1]:
            raise Damaged(f"row {row}: an observation without a sampled turn before and after it")
        if not all(math.isfinite(turn["reward"] or 0.0) for turn in turns):
            raise Damaged(f"row {row}: a turn's reward is not finite")


def _check_steps(table: pa.Table, valid: np.ndarray, lengths: np.ndarray) -> None:
    """Process rewards are finite, of distinct sampled tokens in ascending order."""
    turns = table.column("turns")
    for row, steps in _lists(table, "steps"):
        if not valid[row]:
            continue
        tokens = [step["token"] for step in steps]
        if None in tokens or not all(step["reward"] is not None and math.isfinite(step["reward"]) for step in steps):
            raise Damaged(f"row {row}: a step is not a token and a finite reward")
        if tokens != sorted(set(tokens)) or tokens[0] < 0 or tokens[-1] >= lengths[row]:
            raise Damaged(f"row {row}: steps {tokens} are not tokens of the completion in order")
        mask = sampled([Turn(**turn) for turn in turns[row].as_py() or []], lengths[row])
        if not mask[tokens].all():
            raise Damaged(f"row {row}: a step rewards an observation")


def _check_spans(table: pa.Table, valid: np.ndarray, lengths: np.ndarray) -> None:
    """Spans of versions cover the completion in order; the oldest is the one the row names."""
    named = zip(table.column("version_term").to_pylist(), table.column("version_step").to_pylist(), strict=True)
    rows = zip(table.column("spans").to_pylist(), lengths, named, strict=True)
    for row, (spans, length, version) in enumerate(rows):
        starts = [span["start"] for span in spans or []]
        if not valid[row] and not starts:
            continue
        versions = [(span["term"], span["step"]) for span in spans or []]
        if starts[:1] != [0] or starts != sorted(set(starts)) or (valid[row] and starts[-1] >= length):
            raise Damaged(f"row {row}: spans {starts} do not cover the completion in order")
        if min(versions) != version or min(version) < 0:
            raise Damaged(f"row {row}: version {version} is not the oldest of its spans {versions}")


def _check_groups(table: pa.Table, group_size: int | None) -> None:
    """Whole groups only: an index's samples lie together, numbered from 0, and share their prompt."""
    if table.num_rows == 0:
        raise Damaged("no rows")
    index, sample = table.column("index").to_numpy(), table.column("sample").to_numpy()  # [N]
    first = _first_rows(index)
    sizes = np.diff(np.append(first, len(index)))
    _refuse(index < 0, "index is negative")
    _refuse(sample != np.arange(len(index)) - np.repeat(first, sizes), "samples of a group are not numbered from 0 on")
    if len(np.unique(index)) != len(first):
        raise Damaged("samples of one index lie apart")
    if group_size is not None and (sizes != group_size).any():
        raise Damaged(f"a group has {sizes[sizes != group_size][0]} samples, not {group_size}")
    prompts = ragged(table, "prompt_ids")
    for start, size in zip(first, sizes, strict=True):
        bounds = prompts.offsets[start : start + size + 1]
        prompt, block = prompts.values[bounds[0] : bounds[1]], prompts.values[bounds[0] : bounds[-1]]
        if (np.diff(bounds) != len(prompt)).any() or (block != np.tile(prompt, size)).any():
            raise Damaged(f"row {start}: samples of one group have different prompt_ids")


def _first_rows(index: np.ndarray) -> np.ndarray:
    """The row at which each group starts. Example: index [4, 4, 9, 9] gives [0, 2]."""
    return np.flatnonzero(np.append(True, index[1:] != index[:-1])) if len(index) else np.zeros(0, np.int64)


def _any(column: Ragged, flags: np.ndarray) -> np.ndarray:
    """Whether a flag is set in each row: flags [T] → [N]."""
    if not flags.any():
        return np.zeros(len(column.offsets) - 1, np.bool_)
    running = np.concatenate([[0], np.cumsum(flags)])
    return np.diff(running[column.offsets]) > 0


def _refuse(broken: np.ndarray, rule: str) -> None:
    if broken.any():
        raise Damaged(f"row {int(np.argmax(broken))}: {rule}")


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
    for row, steps in _lists(table, "steps"):
        if valid[row]:
            rewards[completions.offsets[row] + np.array([step["token"] for step in steps])] += [
                step["reward"] for step in steps
            ]
    return rewards if rewards.any() else None


def _valid_turns(table: pa.Table, completions: Ragged) -> Iterator[tuple[slice, list[Turn]]]:
    """(where its tokens lie, its turns) of each valid sample that has any."""
    invalid = table.column("invalid")
    for row, turns in _lists(table, "turns"):
        if invalid[row].as_py() is None:
            yield slice(*completions.offsets[row : row + 2]), [Turn(**turn) for turn in turns]


def _lists(table: pa.Table, name: str) -> list[tuple[int, list[dict[str, Any]]]]:
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
