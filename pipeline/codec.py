"""Shards: groups of experience to the bytes of a Parquet file, and back.

Reading is guarded: `decode` answers anything that is no shard of whole and sane groups with Damaged, so that a torn
or hostile object is quarantined by its reader and never ends it; `parquet` sees to it that none takes more memory than
MOST_BYTES. Samples marked invalid may hold anything that the engine returned (no token, a NaN logprob): their values
are not checked, and are not to be trained on.
"""

import array
import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline import parquet
from pipeline.experience import SCHEMA, Damaged, Ragged, RolloutGroup, Turn, entries, ragged, response_mask, sampled

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
    for row, turns in entries(table, "turns"):
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
    for row, steps in entries(table, "steps"):
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
