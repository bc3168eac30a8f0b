"""Rollouts read back for people: the newest, figures of all, and the trained ones as one file. Only reads."""

import collections
import dataclasses
import datetime
import json
import math
import os
import pathlib
import secrets
from collections.abc import AsyncIterator, Iterable
from typing import Any, BinaryIO, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline import archive, codec, experience, selection, where
from pipeline.archive import Shelf
from pipeline.config import RunConfig
from pipeline.experience import Damaged, RolloutGroup
from pipeline.messages import SHARDS_FOLDER, is_shard
from pipeline.report import history
from pipeline.storage import Corrupted, ObjectInfo, Storage
from pipeline.trainer_log import Plan
from pipeline.where import Condition

UNITS = ("B", "KB", "MB", "GB", "TB")
WIDTH = 200
"""Characters of a text that are shown."""
MOST_SHARDS = 200
"""Read for statistics, evenly spread."""
RECORDS = 10_000_000
"""Of the trainer's log: all."""


async def newest(storage: Storage, config: RunConfig, count: int, condition: Condition | None = None) -> list[str]:
    """The last `count` groups, newest shard first, as lines: those of their samples for which `condition` is true.

    Raises ValueError if there are none.
    """
    if config.data.replay_from is not None:
        raise ValueError(f"this run has no samples of its own: it trains those of {config.data.replay_from.uri}")
    lines: list[str] = []
    for shard in sorted(await _shards(storage), key=lambda info: info.modified, reverse=True):
        table = await _read(storage, shard.key)
        if isinstance(table, str):
            lines.append(f"{shard.key} is damaged: {shown(table)}")
            continue
        for group in _groups(table, condition)[:count]:
            lines += _lines(*group)
            count -= 1
        if count == 0:
            break
    if not lines:
        raise ValueError(_none_like(condition, config) if condition else "no rollouts have been written yet")
    return lines


def _none_like(condition: Condition, config: RunConfig) -> str:
    known = [reward.name for reward in config.rewards]
    strange = sorted(where.rewards(condition) - {*known}) if known else []
    return "no sample is like that" + (
        f"; the run has no reward {strange[0]}, but {', '.join(known)}" if strange else ""
    )


async def _shards(storage: Storage) -> list[ObjectInfo]:
    return [info for info in await storage.list(SHARDS_FOLDER) if is_shard(info.key)]


def _groups(table: pa.Table, condition: Condition | None) -> list[tuple[RolloutGroup, list[int]]]:
    """The groups with the numbers of the samples for which `condition` is true, where there are any."""
    wanted = np.ones(table.num_rows, np.bool_) if condition is None else selection.matching(table, condition)
    found, row = [], 0
    for group in experience.rows(table, 0, table.num_rows):
        numbers = np.flatnonzero(wanted[row : row + len(group.rollouts)]).tolist()
        row += len(group.rollouts)
        if numbers:
            found.append((group, numbers))
    return found


def _lines(group: RolloutGroup, numbers: list[int]) -> list[str]:
    lines = [f"index {group.index} of {shown(group.set)}: {shown(group.prompt or '')}"]
    for number in numbers:
        rollout = group.rollouts[number]
        worth = "unscored" if rollout.reward is None else f"reward {rollout.reward:g}"
        fate = f"invalid: {shown(rollout.invalid)}" if rollout.invalid else rollout.finish_reason
        step, length = rollout.oldest.step if rollout.spans else "?", len(rollout.completion_ids)
        lines.append(f"  {number}: {worth}, policy {step}, {length} tokens, {fate}: {shown(rollout.completion)}")
    return lines


def shown(text: str) -> str:
    """One line that no terminal acts on."""
    short = text if len(text) <= WIDTH else text[: WIDTH - 1] + "…"
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in short)


def size(amount: float) -> str:
    """Of bytes. Example: 1500 gives "1.5 KB"."""
    unit = 0
    while amount >= 1000 and unit < len(UNITS) - 1:
        amount, unit = amount / 1000, unit + 1
    return f"{amount:.1f} {UNITS[unit]}" if unit else f"{amount:.0f} {UNITS[unit]}"


def counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


async def statistics(storage: Storage, config: RunConfig, condition: Condition | None = None) -> list[tuple[str, str]]:
    """(name, value)s; those of samples are of the ones for which `condition` is true."""
    past = await history.read(storage, history.Bounds(metrics=1))
    shards = await _shards(storage)
    drops = ", ".join(f"{reason} {count}" for reason, count in sorted(past.drops.items()))
    rows = [
        ("run", f"{config.namespace}/{config.name} {config.run_id}"),
        ("store", storage.bucket.name),
        *_replayed(config),
        ("steps planned", f"{max(past.plans, default=0):,} of {config.algorithm.total_steps:,}"),
        ("groups planned", f"{sum(len(plan.groups) for plan in past.plans.values()):,}"),
        ("groups dropped", drops or "0"),
        ("trainers", f"{past.takeovers}"),
        ("over", past.stop.reason if past.stop else "no"),
        ("damaged shards", f"{past.quarantined}"),
        *_stored(shards, () if config.data.replay_from else past.plans.values()),
    ]
    return [*rows, *await _figures(storage, shards, condition)]


def _replayed(config: RunConfig) -> list[tuple[str, str]]:
    source = config.data.replay_from
    return [] if source is None else [("trains again", source.uri + (f" where {source.where}" if source.where else ""))]


def _stored(shards: list[ObjectInfo], plans: Iterable[Plan]) -> list[tuple[str, str]]:
    there = {shard.key for shard in shards}
    gone = sum(group.key not in there for plan in plans for group in plan.groups)
    amount = f"{len(shards):,}, {size(sum(shard.size for shard in shards))}"
    amount += f"; those of {counted(gone, 'planned group')} are gone" if gone else ""
    if not shards:
        return [("shards", amount)]
    last = datetime.datetime.fromtimestamp(max(shard.modified for shard in shards), datetime.UTC)
    return [("shards", amount), ("last shard written", f"{last:%Y-%m-%d %H:%M:%S} UTC")]


async def _figures(storage: Storage, shards: list[ObjectInfo], condition: Condition | None) -> list[tuple[str, str]]:
    chosen = history.thin(sorted((shard.key, shard.size) for shard in shards), MOST_SHARDS)
    sums, rewards = collections.Counter[str](), []
    for key, size in chosen:
        table = await _read(storage, key)
        if isinstance(table, str):
            continue
        sums["read"] += table.num_rows
        sums["stored"] += sum(len(experience.ragged(table, name).values) for name in ("completion_ids", "prompt_ids"))
        sums["bytes"] += size
        table = selection.rows(table, condition).combine_chunks()
        rewards.append(table["reward"].to_numpy())
        sums["samples"] += table.num_rows
        sums["tokens"] += len(experience.ragged(table, "completion_ids").values)
        sums["invalid"] += table.num_rows - table["invalid"].null_count
        sums["truncated"] += table["finish_reason"].to_pylist().count("length")
    count = sums["samples"]
    of_all = f" of {sums['read']:,}" if condition else ""
    if not count:
        return [("samples", f"0{of_all}")] if condition else []
    scored = np.concatenate(rewards)
    scored = scored[np.isfinite(scored)]
    return [
        ("samples", f"{count:,}{of_all}" + (f" in {len(chosen)} of the shards" if len(chosen) < len(shards) else "")),
        ("completion tokens", f"{sums['tokens']:,}, {sums['tokens'] / count:.1f} a sample"),
        ("bytes a token", f"{sums['bytes'] / max(1, sums['stored']):.2f}, prompts counted"),
        ("reward", f"{scored.mean():.4f} mean" if len(scored) else "none"),
        ("invalid", f"{sums['invalid'] / count:.2%}"),
        ("cut off by the limit", f"{sums['truncated'] / count:.2%}"),
    ]


async def _read(storage: Storage, key: str) -> pa.Table | str:
    """The shard, or why it cannot be read."""
    try:
        found = await storage.get(key)
    except Corrupted as error:
        return str(error)
    return _decoded(found.data) if found else f"{key} is gone"


def _decoded(data: bytes) -> pa.Table | str:
    try:
        return codec.decode(data)
    except Damaged as error:
        return str(error)


@dataclasses.dataclass
class Written:
    steps: int = 0
    samples: int = 0
    omissions: list[str] = dataclasses.field(default_factory=list)


class Sink(Protocol):
    def __init__(self, file: BinaryIO, schema: pa.Schema): ...

    def write(self, table: pa.Table) -> None: ...

    def close(self) -> None: ...


async def export(storage: Storage, config: RunConfig, file: str, condition: Condition | None = None) -> Written:
    """Write the trained samples for which `condition` is true, a column `step` before their own, through a temporary
    file.

    Raises ValueError for a name that ends in neither .parquet nor .jsonl, for a file that cannot be written, and if
    nothing has been trained.
    """
    kind = pathlib.Path(file).suffix
    if kind not in SINKS:
        raise ValueError(f"{file}: the name must end in {' or '.join(SINKS)}")
    temporary = f"{file}.{secrets.token_hex(4)}.partial"
    try:
        with open(temporary, "xb") as target:
            written = await _write(storage, config, target, SINKS[kind], condition)
        os.replace(temporary, file)
    except OSError as error:
        raise ValueError(f"{file} cannot be written: {error.strerror or error}") from None
    finally:
        pathlib.Path(temporary).unlink(missing_ok=True)
    return written


async def _write(
    storage: Storage, config: RunConfig, target: BinaryIO, kind: type[Sink], condition: Condition | None
) -> Written:
    plans, omissions = await history.plans(storage, RECORDS)
    place = archive.shards(config, storage)
    there = {shard.key for shard in await _shards(place)}
    gone = sorted({step for step, plan in plans.items() if any(group.key not in there for group in plan.groups)})
    written, sink = Written(omissions=omissions), None
    if gone:
        count = sum(group.key not in there for plan in plans.values() for group in plan.groups)
        written.omissions.append(
            f"{counted(count, 'group')} of {counted(len(gone), 'step')} ({gone[0]} to {gone[-1]}): their shards are "
            "gone, as by store.retention: window"
        )
    try:
        async for table in _trained(Shelf(place), plans.values(), there, written, archive.condition(config), condition):
            sink = sink or kind(target, table.schema)
            sink.write(table)
    finally:
        if sink is not None:
            sink.close()
    if sink is None:
        nothing = _none_like(condition, config) if condition else "nothing that was trained is left"
        left_out = f"; left out: {written.omissions[0]}" if written.omissions else ""
        raise ValueError(nothing + left_out if plans else "nothing has been trained yet")
    return written


async def _trained(
    shelf: Shelf,
    plans: Iterable[Plan],
    there: set[str],
    written: Written,
    own: Condition | None,
    condition: Condition | None,
) -> AsyncIterator[pa.Table]:
    """A table a step, of those shards that are `there`; `own` is the run's condition on the stored samples that it
    trains again."""
    for plan in plans:
        parts, damaged = [], collections.Counter[str]()
        for group in plan.groups:
            if group.key not in there:
                continue
            table = await shelf.table(group)
            if isinstance(table, str):
                damaged[table] += 1
                continue
            part = selection.narrowed(table.slice(group.start, group.stop - group.start), own)
            parts.append(selection.rows(part.filter(pc.is_null(part["invalid"])), condition))
        written.omissions += [f"step {plan.step}: {counted(count, 'group')}: {why}" for why, count in damaged.items()]
        if parts and (table := pa.concat_tables(parts)).num_rows:
            written.steps += 1
            written.samples += table.num_rows
            yield table.add_column(0, pa.field("step", pa.int64()), pa.array([plan.step] * table.num_rows, pa.int64()))


class ParquetSink:
    def __init__(self, file: BinaryIO, schema: pa.Schema):
        self.writer = pq.ParquetWriter(file, schema, compression="zstd")

    def write(self, table: pa.Table) -> None:
        self.writer.write_table(table)

    def close(self) -> None:
        self.writer.close()


class LineSink:
    """JSON, one sample a line; a number that is not finite becomes null."""

    def __init__(self, file: BinaryIO, schema: pa.Schema):
        self.file = file

    def write(self, table: pa.Table) -> None:
        for row in table.to_pylist():
            row["rewards"] = dict(row["rewards"] or [])
            self.file.write(json.dumps(_finite(row), ensure_ascii=False).encode() + b"\n")

    def close(self) -> None:
        """Nothing is held back."""


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list) else value


SINKS: dict[str, type[Sink]] = {".parquet": ParquetSink, ".jsonl": LineSink}
