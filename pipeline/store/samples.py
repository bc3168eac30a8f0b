"""Rollouts read back for people: the newest, figures of all, and the trained ones as one file. Only reads."""

import collections
import dataclasses
import json
import math
import os
import pathlib
import secrets
from collections.abc import AsyncIterator, Iterable
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import archive, codec, experience, selection
from pipeline.archive import Shelf
from pipeline.config import RunConfig
from pipeline.experience import Damaged, RolloutGroup
from pipeline.messages import SHARDS_FOLDER, is_shard
from pipeline.report import history
from pipeline.storage import Corrupted, ObjectInfo, Storage
from pipeline.trainer_log import Plan
from pipeline.where import Condition

WIDTH = 200
"""Characters of a text that are shown."""
MOST_SHARDS = 200
"""Read for statistics, evenly spread."""
RECORDS = 10_000_000
"""Of the trainer's log: all."""


async def newest(storage: Storage, count: int, condition: Condition | None = None) -> list[str]:
    """The last `count` groups, newest shard first, as lines: those of their samples for which `condition` is true.

    Raises ValueError if there are none.
    """
    lines: list[str] = []
    for shard in sorted(await _shards(storage), key=lambda info: info.modified, reverse=True):
        table = await _read(storage, shard.key)
        if isinstance(table, str):
            lines.append(f"{shard.key} is damaged: {_shown(table)}")
            continue
        for group in _groups(table, condition)[:count]:
            lines += _lines(*group)
            count -= 1
        if count == 0:
            break
    if not lines:
        raise ValueError("no sample is like that" if condition else "no rollouts have been written yet")
    return lines


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
    lines = [f"index {group.index} of {_shown(group.set)}: {_shown(group.prompt or '')}"]
    for number in numbers:
        rollout = group.rollouts[number]
        worth = "unscored" if rollout.reward is None else f"reward {rollout.reward:g}"
        fate = f"invalid: {_shown(rollout.invalid)}" if rollout.invalid else rollout.finish_reason
        step, length = rollout.oldest.step if rollout.spans else "?", len(rollout.completion_ids)
        lines.append(f"  {number}: {worth}, policy {step}, {length} tokens, {fate}: {_shown(rollout.completion)}")
    return lines


def _shown(text: str) -> str:
    """One line that no terminal acts on."""
    short = text if len(text) <= WIDTH else text[: WIDTH - 1] + "…"
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in short)


async def statistics(storage: Storage, config: RunConfig, condition: Condition | None = None) -> list[tuple[str, str]]:
    """(name, value)s; those of samples are of the ones for which `condition` is true."""
    past = await history.read(storage, history.Bounds(metrics=1))
    shards = await _shards(storage)
    drops = ", ".join(f"{reason} {count}" for reason, count in sorted(past.drops.items()))
    size = sum(shard.size for shard in shards)
    rows = [
        ("run", f"{config.namespace}/{config.name} {config.run_id}"),
        ("steps planned", f"{max(past.plans, default=0):,} of {config.algorithm.total_steps:,}"),
        ("groups planned", f"{sum(len(plan.groups) for plan in past.plans.values()):,}"),
        ("groups dropped", drops or "0"),
        ("trainers", f"{past.takeovers}"),
        ("over", past.stop.reason if past.stop else "no"),
        ("damaged shards", f"{past.quarantined}"),
        ("shards", f"{len(shards):,}, {size / 1e6:,.1f} MB"),
    ]
    return [*rows, *await _figures(storage, shards, condition)]


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
    def write(self, table: pa.Table) -> None: ...

    def close(self) -> None: ...


async def export(storage: Storage, config: RunConfig, file: str, condition: Condition | None = None) -> Written:
    """Write the trained samples for which `condition` is true, a column `step` before their own, through a temporary
    file.

    Raises ValueError for a name that ends in neither .parquet nor .jsonl, and if nothing has been trained.
    """
    kind = pathlib.Path(file).suffix
    if kind not in SINKS:
        raise ValueError(f"{file}: the name must end in {' or '.join(SINKS)}")
    plans, omissions = await history.plans(storage, RECORDS)
    shelf = Shelf(archive.shards(config, storage))
    written, temporary = Written(omissions=omissions), f"{file}.{secrets.token_hex(4)}.partial"
    sink: Sink | None = None
    try:
        async for table in _trained(shelf, plans.values(), written, archive.condition(config), condition):
            sink = sink or SINKS[kind](temporary, table.schema)
            sink.write(table)
        if sink is None:
            why = "nothing has been trained yet, or its shards have been collected"
            raise ValueError("no trained sample is like that" if condition and written.omissions == [] else why)
        sink.close()
        os.replace(temporary, file)
    finally:
        pathlib.Path(temporary).unlink(missing_ok=True)
    return written


async def _trained(
    shelf: Shelf, plans: Iterable[Plan], written: Written, own: Condition | None, condition: Condition | None
) -> AsyncIterator[pa.Table]:
    """A table a step; `own` is the run's condition on the stored samples that it trains again."""
    for plan in plans:
        parts, missing = [], collections.Counter[str]()
        for group in plan.groups:
            table = await shelf.table(group)
            if isinstance(table, str):
                missing[table] += 1
                continue
            part = selection.narrowed(table.slice(group.start, group.stop - group.start), own)
            parts.append(selection.rows(part, condition))
        written.omissions += [f"step {plan.step}: {count} groups: {why}" for why, count in missing.items()]
        if parts and (table := pa.concat_tables(parts)).num_rows:
            written.steps += 1
            written.samples += table.num_rows
            yield table.add_column(0, pa.field("step", pa.int64()), pa.array([plan.step] * table.num_rows, pa.int64()))


class ParquetSink:
    def __init__(self, path: str, schema: pa.Schema):
        self.writer = pq.ParquetWriter(path, schema, compression="zstd")

    def write(self, table: pa.Table) -> None:
        self.writer.write_table(table)

    def close(self) -> None:
        self.writer.close()


class LineSink:
    """JSON, one sample a line; a number that is not finite becomes null."""

    def __init__(self, path: str, schema: pa.Schema):
        self.file = open(path, "x", encoding="utf-8")  # noqa: SIM115

    def write(self, table: pa.Table) -> None:
        for row in table.to_pylist():
            row["rewards"] = dict(row["rewards"] or [])
            self.file.write(json.dumps(_finite(row), ensure_ascii=False) + "\n")

    def close(self) -> None:
        self.file.close()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list) else value


SINKS: dict[str, Any] = {".parquet": ParquetSink, ".jsonl": LineSink}
