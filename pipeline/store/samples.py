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

from pipeline import experience
from pipeline.config import RunConfig
from pipeline.experience import Damaged, RolloutGroup
from pipeline.messages import SHARDS_FOLDER
from pipeline.report import history
from pipeline.storage import Corrupted, Storage
from pipeline.trainer_log import Plan

WIDTH = 200
"""Characters of a text that are shown."""
MOST_SHARDS = 200
"""Read for statistics, evenly spread."""
CACHED = 8
"""Shards in memory: a step takes from a few, and the next one from the same."""
RECORDS = 10_000_000
"""Of the trainer's log: all."""


async def newest(storage: Storage, count: int) -> list[str]:
    """The last `count` groups, newest shard first, as lines. Raises ValueError if there are none."""
    lines: list[str] = []
    for shard in sorted(await storage.list(SHARDS_FOLDER), key=lambda info: info.modified, reverse=True):
        table = await _read(storage, shard.key)
        if isinstance(table, str):
            lines.append(f"{shard.key} is damaged: {_shown(table)}")
            continue
        for group in experience.rows(table, 0, table.num_rows)[:count]:
            lines += _lines(group)
            count -= 1
        if count == 0:
            break
    if not lines:
        raise ValueError("no rollouts have been written yet")
    return lines


def _lines(group: RolloutGroup) -> list[str]:
    lines = [f"index {group.index} of {_shown(group.set)}: {_shown(group.prompt or '')}"]
    for number, rollout in enumerate(group.rollouts):
        worth = "unscored" if rollout.reward is None else f"reward {rollout.reward:g}"
        fate = f"invalid: {_shown(rollout.invalid)}" if rollout.invalid else rollout.finish_reason
        step, length = rollout.oldest.step if rollout.spans else "?", len(rollout.completion_ids)
        lines.append(f"  {number}: {worth}, policy {step}, {length} tokens, {fate}: {_shown(rollout.completion)}")
    return lines


def _shown(text: str) -> str:
    """One line that no terminal acts on."""
    short = text if len(text) <= WIDTH else text[: WIDTH - 1] + "…"
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in short)


async def statistics(storage: Storage, config: RunConfig) -> list[tuple[str, str]]:
    """(name, value)s."""
    past = await history.read(storage, history.Bounds(metrics=1))
    shards = await storage.list(SHARDS_FOLDER)
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
    return [*rows, *await _figures(storage, [shard.key for shard in shards])]


async def _figures(storage: Storage, keys: list[str]) -> list[tuple[str, str]]:
    chosen = history.thin(sorted(keys), MOST_SHARDS)
    sums, rewards = collections.Counter[str](), []
    for key in chosen:
        found = await storage.get(key)
        table = _decoded(found.data) if found else None
        if found is None or table is None or isinstance(table, str):
            continue
        lengths = np.diff(experience.ragged(table, "completion_ids").offsets)
        prompts = np.diff(experience.ragged(table, "prompt_ids").offsets)
        rewards.append(table["reward"].to_numpy())
        sums["samples"] += table.num_rows
        sums["tokens"] += int(lengths.sum())
        sums["stored"] += int(lengths.sum() + prompts.sum())
        sums["bytes"] += len(found.data)
        sums["invalid"] += table.num_rows - table["invalid"].null_count
        sums["truncated"] += table["finish_reason"].to_pylist().count("length")
    count = sums["samples"]
    if not count:
        return []
    scored = np.concatenate(rewards)
    scored = scored[np.isfinite(scored)]
    return [
        ("samples", f"{count:,}" + (f" in {len(chosen)} of the shards" if len(chosen) < len(keys) else "")),
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
        return experience.decode(data)
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


async def export(storage: Storage, file: str) -> Written:
    """Write the trained samples, a column `step` before their own, through a temporary file.

    Raises ValueError for a name that ends in neither .parquet nor .jsonl, and if nothing has been trained.
    """
    kind = pathlib.Path(file).suffix
    if kind not in SINKS:
        raise ValueError(f"{file}: the name must end in {' or '.join(SINKS)}")
    plans = (await history.read(storage, history.Bounds(metrics=1, records=RECORDS))).plans
    written, temporary = Written(), f"{file}.{secrets.token_hex(4)}.partial"
    sink: Sink | None = None
    try:
        async for table in _trained(storage, plans.values(), written):
            sink = sink or SINKS[kind](temporary, table.schema)
            sink.write(table)
        if sink is None:
            raise ValueError("nothing has been trained yet, or its shards have been collected")
        sink.close()
        os.replace(temporary, file)
    finally:
        pathlib.Path(temporary).unlink(missing_ok=True)
    return written


async def _trained(storage: Storage, plans: Iterable[Plan], written: Written) -> AsyncIterator[pa.Table]:
    """A table a step."""
    cache: collections.OrderedDict[str, pa.Table | str] = collections.OrderedDict()
    for plan in plans:
        parts = []
        for group in plan.groups:
            if group.key not in cache:
                cache[group.key] = await _read(storage, group.key)
                if isinstance(cache[group.key], str):
                    written.omissions.append(f"step {plan.step}: {cache[group.key]}")
            cache.move_to_end(group.key)
            table = cache[group.key]
            if not isinstance(table, str):
                parts.append(table.slice(group.start, group.stop - group.start))
            while len(cache) > CACHED:
                cache.popitem(last=False)
        if parts:
            table = pa.concat_tables(parts)
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
