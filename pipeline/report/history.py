"""What a run has left in its store, read back: metrics, evaluations, the trainer's log, real rollouts.

Only reads. Works beside a live run and on one whose trainer died: whatever is there, as of now. All that could grow
without bound is thinned: `Bounds` says how far, `History.omissions` what was left out.
"""

import asyncio
import collections
import dataclasses
import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

import pyarrow as pa

from pipeline import experience, trainer_log
from pipeline.config import RunConfig
from pipeline.messages import evaluation_key
from pipeline.report import source
from pipeline.storage import Corrupted, ObjectInfo, Storage
from pipeline.trainer_log import Plan, Stop, Takeover
from pipeline.versions import Version

T = TypeVar("T")
Document = dict[str, Any]
CONCURRENCY = 32


@dataclasses.dataclass(frozen=True)
class Bounds:
    metrics: int = 2000
    """Steps whose metrics are read, evenly spread."""
    records: int = 20_000
    """Newest records of the trainer's log that are read."""
    steps: int = 40
    """Steps whose rollouts are read, evenly spread."""


@dataclasses.dataclass
class History:
    run: Document
    """run.json; empty if it is missing."""
    attempts: list[tuple[int, RunConfig]]
    """Number and configuration of each attempt, in order."""
    metrics: dict[int, Document]
    """Step → row of the highest term, ascending."""
    evaluations: dict[int, Document]
    """Step → evaluation, ascending."""
    plans: dict[int, Plan]
    """Step → the plan that counts, ascending."""
    drops: collections.Counter[str]
    """Reason → groups."""
    quarantined: int
    """Damaged shards; their prompts were generated again."""
    stop: Stop | None
    """The stop record, if the run has stopped and was not taken over since."""
    takeovers: int
    started: float | None
    """When run.json was written, by the store's clock, seconds since the epoch."""
    omissions: list[str]
    """What was left out, one sentence each."""


async def read(storage: Storage, bounds: Bounds = Bounds()) -> History:
    """All of a run but its rollouts. Raises StorageError if the store does not answer."""
    omissions: list[str] = []
    run = await storage.get("run.json")
    attempts = await _documents(storage, "attempts", bounds.metrics, omissions, "attempts")
    rows = await _metrics(storage, bounds, omissions)
    evaluations = await _documents(storage, "evaluations/v1", bounds.metrics, omissions, "evaluations")
    log = await _log(storage, bounds, omissions)
    return History(
        run=json.loads(run.data) if run else {},
        attempts=[(int(_stem(key)), config) for key, found in attempts if (config := source.parsed(found))],
        metrics=rows,
        evaluations={int(_stem(key).removeprefix("s")): record for key, record in evaluations},
        plans=_plans(log),
        drops=_drops(log),
        quarantined=sum(len(record.quarantined) for record in log if isinstance(record, Plan)),
        stop=_stop(log),
        takeovers=sum(isinstance(record, Takeover) for record in log),
        started=run.info.modified if run else None,
        omissions=omissions,
    )


async def groups(storage: Storage, plan: Plan) -> list[experience.RolloutGroup]:
    """The groups that `plan` trained, in its order; those whose shard is gone or damaged are left out."""
    keys = sorted({reference.key for reference in plan.groups})
    tables = dict(zip(keys, await _each(keys, lambda key: _table(storage, key)), strict=True))
    found = []
    for reference in plan.groups:
        table = tables[reference.key]
        if table is not None and reference.stop <= table.num_rows:
            found += experience.rows(table, reference.start, reference.stop)
    return found


async def evaluated(storage: Storage, step: int) -> list[experience.RolloutGroup]:
    """All samples of the evaluation at `step`; none if they are gone or damaged."""
    table = await _table(storage, evaluation_key(step).removesuffix(".json") + ".parquet")
    return experience.rows(table, 0, table.num_rows) if table is not None else []


def thin(items: Sequence[T], count: int) -> list[T]:
    """At most `count` of `items`, evenly spread, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    return [items[round(place * (len(items) - 1) / (count - 1))] for place in range(count)]


async def _metrics(storage: Storage, bounds: Bounds, omissions: list[str]) -> dict[int, Document]:
    newest: dict[int, Version] = {}
    for info in await storage.list("metrics/v1"):
        version = Version.parse(_stem(info.key))
        newest[version.step] = max(version, newest.get(version.step, version))
    chosen = thin(sorted(newest), bounds.metrics)
    if len(chosen) < len(newest):
        omissions.append(f"Curves show {len(chosen)} of {len(newest)} steps, evenly spread.")
    rows = await _each(chosen, lambda step: _json(storage, f"metrics/v1/{newest[step]}.json"))
    return {step: row for step, row in zip(chosen, rows, strict=True) if row is not None}


async def _log(storage: Storage, bounds: Bounds, omissions: list[str]) -> list[trainer_log.Record]:
    keys = sorted(info.key for info in await storage.list("trainer/log"))
    chosen = keys[-bounds.records :]
    if len(chosen) < len(keys):
        omissions.append(f"Drops are counted over the last {len(chosen)} of {len(keys)} records of the trainer's log.")
    found = await _each(chosen, storage.get)
    return [trainer_log.decode(each.data) for each in found if each]


def _plans(log: Iterable[trainer_log.Record]) -> dict[int, Plan]:
    """A later plan of a step replaces an earlier one: its lineage was abandoned."""
    plans = {record.step: record for record in log if isinstance(record, Plan)}
    return dict(sorted(plans.items()))


def _drops(log: Iterable[trainer_log.Record]) -> collections.Counter[str]:
    return collections.Counter(drop.reason for record in log if isinstance(record, Plan) for drop in record.drops)


def _stop(log: Sequence[trainer_log.Record]) -> Stop | None:
    """The last stop record, unless a trainer took over after it."""
    ends = [record for record in log if isinstance(record, Stop | Takeover)]
    return ends[-1] if ends and isinstance(ends[-1], Stop) else None


async def _documents(
    storage: Storage, folder: str, limit: int, omissions: list[str], what: str
) -> list[tuple[str, Document]]:
    infos = sorted(
        (info for info in await storage.list(folder) if info.key.endswith(".json")), key=lambda info: _order(info)
    )
    chosen = thin(infos, limit)
    if len(chosen) < len(infos):
        omissions.append(f"{len(chosen)} of {len(infos)} {what} are shown, evenly spread.")
    return await _read(storage, chosen)


def _order(info: ObjectInfo) -> tuple[int, str]:
    """attempts/10.json comes after attempts/9.json."""
    return len(info.key), info.key


async def _read(storage: Storage, infos: Sequence[ObjectInfo]) -> list[tuple[str, Document]]:
    records = await _each(infos, lambda info: _json(storage, info.key))
    return [(info.key, record) for info, record in zip(infos, records, strict=True) if record is not None]


async def _json(storage: Storage, key: str) -> Document | None:
    """None for what is gone, damaged or no JSON object: a report shows the rest."""
    try:
        found = await storage.get(key)
        record = json.loads(found.data) if found else None
    except (Corrupted, ValueError):
        return None
    return record if isinstance(record, dict) else None


async def _table(storage: Storage, key: str) -> pa.Table | None:
    try:
        found = await storage.get(key)
        return experience.decode(found.data) if found else None
    except (Corrupted, experience.Damaged):
        return None


async def _each(items: Iterable[T], call: Callable[[T], Awaitable[Any]]) -> list[Any]:
    """`call` on each item, so many at a time, results in order."""
    free = asyncio.Semaphore(CONCURRENCY)

    async def one(item: T) -> Any:
        async with free:
            return await call(item)

    return await asyncio.gather(*map(one, items))


def _stem(key: str) -> str:
    return key.rsplit("/", 1)[-1].removesuffix(".json")
