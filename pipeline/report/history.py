"""What a run has left in its store, read back: metrics, evaluations, the trainer's log, real rollouts.

Only reads. Works beside a live run and on one whose trainer died: whatever is there, as of now. Files that are torn are
left out, others than the run's own are not looked at, and all that could grow without bound is thinned: `Bounds` says
how far, `History.omissions` what was left out.
"""

import asyncio
import collections
import dataclasses
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

import pyarrow as pa

from pipeline import codec, experience, selection, trainer_log
from pipeline.config import RunConfig
from pipeline.intake import summarise
from pipeline.messages import SHARDS_FOLDER, evaluation_key, is_shard
from pipeline.report import source
from pipeline.report.source import Document
from pipeline.storage import Corrupted, Storage
from pipeline.trainer_log import Plan, Stop, Takeover, Withdraw
from pipeline.versions import Version
from pipeline.where import Condition

T = TypeVar("T")
CONCURRENCY = 32
ROW = re.compile(r"metrics/v1/(t\d{6}-s\d{20})\.json")
EVALUATION = re.compile(r"evaluations/v1/s(\d{20})\.json")
RECORD = re.compile(r"trainer/log/(\d{20})\.json")


@dataclasses.dataclass(frozen=True)
class Bounds:
    metrics: int = 2000
    """Steps whose metrics are read, evenly spread."""
    records: int = 20_000
    """Newest records of the trainer's log that are read."""
    steps: int = 40
    """Steps whose rollouts are read, evenly spread; or shards, where no step is planned."""


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
    why_invalid: str = ""
    """Of a run that has planned no step: why the first sample that it could not train is none; empty: none is known."""


async def read(storage: Storage, bounds: Bounds = Bounds()) -> History:
    """All of a run but its rollouts. Raises StorageError if the store does not answer."""
    omissions: list[str] = []
    began = await storage.head("run.json")
    run = await source.read(storage, "run.json", omissions)
    attempts = await _documents(storage, source.ATTEMPT, bounds.metrics, omissions, "attempts")
    rows = await _metrics(storage, bounds, omissions)
    evaluations = await _documents(storage, EVALUATION, bounds.metrics, omissions, "evaluations")
    log = await _log(storage, bounds, omissions)
    plans = trainer_log.surviving(log)
    unplanned, why_invalid = (collections.Counter[str](), "") if plans else await _invalid(storage, bounds, omissions)
    return History(
        run=run or {},
        attempts=_attempts(attempts, omissions),
        metrics=rows,
        evaluations=_evaluations(evaluations, omissions),
        plans=plans,
        drops=_drops(log) + unplanned,
        why_invalid=why_invalid,
        quarantined=sum(len(record.quarantined) for record in log if isinstance(record, Plan | Withdraw)),
        stop=trainer_log.ended(log),
        takeovers=sum(isinstance(record, Takeover) for record in log),
        started=began.modified if began else None,
        omissions=omissions,
    )


async def plans(storage: Storage, records: int) -> tuple[dict[int, Plan], list[str]]:
    """Step → the plan that counts, of the newest `records` of the log, and what was left out, one sentence each."""
    omissions: list[str] = []
    return trainer_log.surviving(await _log(storage, Bounds(records=records), omissions)), omissions


async def groups(storage: Storage, plan: Plan, condition: Condition | None = None) -> list[experience.RolloutGroup]:
    """The groups that `plan` trained, in its order; those whose shard is gone or damaged are left out.

    `storage` is where its shards lie; samples for which `condition` is not true are invalid.
    """
    keys = sorted({reference.key for reference in plan.groups})
    tables = dict(zip(keys, await _each(keys, lambda key: _table(storage, key)), strict=True))
    found = []
    for reference in plan.groups:
        table = tables[reference.key]
        if table is not None and reference.stop <= table.num_rows:
            found += experience.rows(selection.narrowed(table, condition), reference.start, reference.stop)
    return found


async def evaluated(storage: Storage, step: int) -> list[experience.RolloutGroup]:
    """All samples of the evaluation at `step`; none if they are gone or damaged."""
    table = await _table(storage, evaluation_key(step).removesuffix(".json") + ".parquet")
    return experience.rows(table, 0, table.num_rows) if table is not None else []


def thin(items: Sequence[T], count: int) -> list[T]:
    """At most `count` of `items`, evenly spread, the first and the last among them; of one, the last."""
    if len(items) <= count:
        return list(items)
    if count == 1:
        return [items[-1]]
    return [items[round(place * (len(items) - 1) / (count - 1))] for place in range(count)]


async def _metrics(storage: Storage, bounds: Bounds, omissions: list[str]) -> dict[int, Document]:
    newest: dict[int, Version] = {}
    for name in await _named(storage, ROW):
        version = Version.parse(name)
        newest[version.step] = max(version, newest.get(version.step, version))
    chosen = thin(sorted(newest), bounds.metrics)
    if len(chosen) < len(newest):
        omissions.append(f"Curves show {len(chosen)} of {len(newest)} steps, evenly spread.")
    rows = await _each(chosen, lambda step: source.read(storage, f"metrics/v1/{newest[step]}.json", omissions))
    return {step: _numbers(row) for step, row in zip(chosen, rows, strict=True) if row is not None}


def _numbers(row: Document) -> Document:
    """What of a row can be drawn."""
    return {name: value for name, value in row.items() if _is_number(value)}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _attempts(records: dict[int, Document], omissions: list[str]) -> list[tuple[int, RunConfig]]:
    configs = {number: source.parsed(record) for number, record in records.items()}
    omissions += [source.torn(f"attempts/{number}.json") for number, config in configs.items() if config is None]
    return [(number, config) for number, config in configs.items() if config is not None]


def _evaluations(records: dict[int, Document], omissions: list[str]) -> dict[int, Document]:
    found = {}
    for step, record in records.items():
        sets = record.get("sets")
        if not isinstance(sets, dict) or not all(map(_is_result, sets.values())):
            omissions.append(source.torn(evaluation_key(step)))
        else:
            found[step] = record
    return found


def _is_result(result: object) -> bool:
    """Whether it is what pipeline.evaluation writes of a set, as far as a report relies on it."""
    if not isinstance(result, dict) or not isinstance(result.get("samples"), int):
        return False
    scores, score = result.get("per_prompt"), f"avg@{result['samples']}"
    values = [result.get(name) for name in result if name.startswith(("avg@", "pass@"))]
    return (
        isinstance(scores, list)
        and {score, "count"} <= result.keys()
        and all(value is None or _is_number(value) for value in [*scores, *values, result["count"]])
    )


async def _log(storage: Storage, bounds: Bounds, omissions: list[str]) -> list[trainer_log.Record]:
    keys = [f"trainer/log/{name}.json" for name in sorted(await _named(storage, RECORD))]
    chosen = keys[-bounds.records :]
    if len(chosen) < len(keys):
        omissions.append(f"Drops are counted over the last {len(chosen)} of {len(keys)} records of the trainer's log.")
    found = await _each(chosen, lambda key: _record(storage, key, omissions))
    return [record for record in found if record is not None]


async def _record(storage: Storage, key: str, omissions: list[str]) -> trainer_log.Record | None:
    try:
        found = await storage.get(key)
        record = trainer_log.decode(found.data) if found else None
    except (Corrupted, ValueError):
        omissions.append(source.torn(key))
        return None
    if isinstance(record, Plan | Withdraw | Stop) and not isinstance(record.step, int):
        omissions.append(source.torn(key))
        return None
    return record


def _drops(log: Iterable[trainer_log.Record]) -> collections.Counter[str]:
    records = [record for record in log if isinstance(record, Plan | Withdraw)]
    return collections.Counter(drop.reason for record in records for drop in record.drops)


async def _invalid(storage: Storage, bounds: Bounds, omissions: list[str]) -> tuple[collections.Counter[str], str]:
    """Groups that the first plan will drop, which nothing but their shards tells of, and the first one's reason."""
    keys = sorted(info.key for info in await storage.list(SHARDS_FOLDER) if is_shard(info.key))
    chosen = thin(keys, bounds.steps)
    if len(chosen) < len(keys):
        omissions.append(f"Drops are counted in {len(chosen)} of {len(keys)} shards.")
    tables = await _each(chosen, lambda key: _table(storage, key))
    groups = [group for table in tables if table is not None for group in summarise(table, "", "", "", 0)]
    found = [group.why for group in groups if not group.valid]
    return collections.Counter({"invalid": len(found)} if found else {}), found[0] if found else ""


async def _documents(
    storage: Storage, pattern: re.Pattern[str], limit: int, omissions: list[str], what: str
) -> dict[int, Document]:
    """The JSON objects whose keys `pattern` describes, by the number in their key, ascending."""
    found = {int(name): key for name, key in (await _named(storage, pattern)).items()}
    chosen = thin(sorted(found), limit)
    if len(chosen) < len(found):
        omissions.append(f"{len(chosen)} of {len(found)} {what} are shown, evenly spread.")
    records = await _each(chosen, lambda number: source.read(storage, found[number], omissions))
    return {number: record for number, record in zip(chosen, records, strict=True) if record is not None}


async def _named(storage: Storage, pattern: re.Pattern[str]) -> dict[str, str]:
    """Keys that `pattern` describes, by what it captures; nothing else in the folder is the run's."""
    folder = pattern.pattern.rpartition("/")[0]
    matches = [pattern.fullmatch(info.key) for info in await storage.list(folder)]
    return {match[1]: match[0] for match in matches if match}


async def _table(storage: Storage, key: str) -> pa.Table | None:
    try:
        found = await storage.get(key)
        return codec.decode(found.data) if found else None
    except (Corrupted, experience.Damaged):
        return None


async def _each(items: Iterable[T], call: Callable[[T], Awaitable[Any]]) -> list[Any]:
    """`call` on each item, so many at a time, results in order."""
    free = asyncio.Semaphore(CONCURRENCY)

    async def one(item: T) -> Any:
        async with free:
            return await call(item)

    return await asyncio.gather(*map(one, items))
