"""What of a run nobody needs any more: planned purely from a listing, deleted only when the run is over.

While a run goes on its trainer collects by the same rules (`resume.expired`, `weights.collectable`, the last few
checkpoints), each behind a fence; here nothing is fenced, so a run that may still be resumed where it stopped keeps
what that takes, and a live one is only looked at.
"""

import collections
import dataclasses
import json
import re
import time
from collections.abc import Iterable
from typing import Any

from pipeline import trainer_log, weights
from pipeline.config import RunConfig
from pipeline.messages import (
    CONTROL_KEY,
    CONTROL_REMEDY,
    SHARDS_FOLDER,
    WRITERS_FOLDER,
    ControlState,
    Heartbeat,
    is_heartbeat,
)
from pipeline.report import history
from pipeline.resume import State, expired
from pipeline.roster import GONE_AFTER
from pipeline.scoreboard import score
from pipeline.storage import Corrupted, LocalBucket, ObjectInfo, Storage
from pipeline.storage.check import FOLDER as PROBE
from pipeline.trainer_log import Record
from pipeline.versions import Version

CHECKPOINTS = "checkpoints"
EVALUATION = re.compile(r"evaluations/v1/s\d{20}\.(json|parquet)")
PROBED = re.compile(rf"{PROBE}/[0-9a-f]{{16}}/[0-9a-z/]+")
MANIFEST = "MANIFEST.json"
SKEW_S = 3600.0
"""This machine's clock may be so far ahead of the store's."""


@dataclasses.dataclass(frozen=True)
class Removal:
    key: str
    size: int  # bytes
    why: str


@dataclasses.dataclass(frozen=True)
class Facts:
    """What decides beside the listing."""

    now: float
    """Seconds since the epoch by the store's clock, rather early than late."""
    retention: str
    lease_timeout_s: float
    keep_last: int
    max_staleness: int
    checkpoints: dict[Version, State]
    """The complete ones."""
    records: tuple[Record, ...] = ()
    """Of the log, behind the oldest of the checkpoints that are kept."""
    roster: frozenset[str] = frozenset()
    """Writers that control/state.json names."""
    in_use: frozenset[Version] = frozenset()
    """Weights that a worker has, is told to load or to evaluate, and the best ones."""

    @property
    def kept(self) -> list[Version]:
        """Of the checkpoints, oldest first."""
        return sorted(self.checkpoints)[-self.keep_last :]


def plan(objects: Iterable[ObjectInfo], facts: Facts) -> list[Removal]:
    """What can go, in the order in which it must: nothing is deleted before what refers to it."""
    folders: dict[str, list[ObjectInfo]] = collections.defaultdict(list)
    for info in objects:
        folders[info.key.split("/")[0]].append(info)
    return [
        *_checkpoints(folders[CHECKPOINTS], facts),
        *_weights(folders[weights.FOLDER], facts),
        *_shards(folders[SHARDS_FOLDER.split("/")[0]], facts),
        *_leftovers(folders, facts),
    ]


def _checkpoints(objects: list[ObjectInfo], facts: Facts) -> list[Removal]:
    kept = facts.kept
    removals = []
    for version, files in _versions(objects):
        if kept and version < kept[-1] and version not in kept:
            whole = version in facts.checkpoints
            removals += _all(files, f"checkpoints before the last {len(kept)}" if whole else "unfinished checkpoints")
    return removals


def _weights(objects: list[ObjectInfo], facts: Facts) -> list[Removal]:
    by_version = dict(_versions(objects))
    published = sorted(version for version, files in by_version.items() if files[0].key.endswith(MANIFEST))
    if not published:
        return []
    keep = {*published[-(facts.max_staleness + 2) :], *(facts.in_use & set(published))}
    removals = []
    for version in weights.collectable(by_version, published[-1], keep):
        whole = version in published
        removals += _all(by_version[version], "weights that nobody will load" if whole else "unfinished weights")
    return removals


def _shards(objects: list[ObjectInfo], facts: Facts) -> list[Removal]:
    if facts.retention != "window" or not facts.checkpoints:
        return []
    kept = [facts.checkpoints[version] for version in facts.kept]
    keys = set(expired(objects, kept, facts.records, facts.roster))
    why = "rollouts that were used up before the oldest checkpoint kept"
    return _all([info for info in objects if info.key in keys], why)


def _leftovers(folders: dict[str, list[ObjectInfo]], facts: Facts) -> list[Removal]:
    old = facts.now - GONE_AFTER * facts.lease_timeout_s
    evaluations = [info for info in folders["evaluations"] if EVALUATION.fullmatch(info.key)]
    answered = {info.key.removesuffix(".json") for info in evaluations if info.key.endswith(".json")}
    orphans = [info for info in evaluations if info.key.removesuffix(".parquet") not in answered]
    samples = [info for info in orphans if info.key.endswith(".parquet")]
    heartbeats = [info for info in folders[WRITERS_FOLDER] if is_heartbeat(info.key)]
    probes = [info for info in folders[PROBE] if PROBED.fullmatch(info.key)]
    return [
        *_all([info for info in heartbeats if info.modified < old], "heartbeats of workers long gone"),
        *_all([info for info in samples if info.modified < old], "samples of evaluations that were never finished"),
        *_all([info for info in probes if info.modified < old], "objects of a check that was killed"),
    ]


def _versions(objects: list[ObjectInfo]) -> list[tuple[Version, list[ObjectInfo]]]:
    """By version, the manifest first."""
    files: dict[Version, list[ObjectInfo]] = collections.defaultdict(list)
    for info in objects:
        if (version := Version.of_key(info.key)) is not None:
            files[version].append(info)
    for part in files.values():
        part.sort(key=lambda info: not info.key.endswith(MANIFEST))
    return sorted(files.items())


def _all(objects: Iterable[ObjectInfo], why: str) -> list[Removal]:
    return [Removal(info.key, info.size, why) for info in objects]


def by_reason(removals: Iterable[Removal]) -> dict[str, list[Removal]]:
    parts: dict[str, list[Removal]] = {}
    for removal in removals:
        parts.setdefault(removal.why, []).append(removal)
    return parts


async def find(storage: Storage, config: RunConfig, retention: str) -> list[Removal]:
    objects = await storage.list("")
    checkpoints, control = await _complete(storage, objects), await _control(storage)
    facts = Facts(
        now=max([time.time() - SKEW_S, *(info.modified for info in objects)]),
        retention=retention,
        lease_timeout_s=config.rollout.lease_timeout_s,
        keep_last=max(1, config.checkpoint.keep_last),
        max_staleness=config.algorithm.max_staleness,
        checkpoints=checkpoints,
        roster=frozenset(control.writers if control else ()),
        in_use=frozenset(await _in_use(storage, objects, checkpoints.values(), control)),
    )
    if retention == "window" and checkpoints:
        below = min(checkpoints[version].position for version in facts.kept)
        facts = dataclasses.replace(facts, records=tuple(await trainer_log.records(storage, below)))
    return plan(objects, facts)


async def abandoned(storage: Storage) -> list[Removal]:
    """What a folder holds beside its objects; to open it in order to delete has removed that already."""
    found = await storage.bucket.abandoned() if isinstance(storage.bucket, LocalBucket) else ()
    return _all(found, "temporary files of processes that were killed")


async def remove(storage: Storage, removals: list[Removal]) -> None:
    """Raises ValueError if the run is not over."""
    past = await history.read(storage, history.Bounds(metrics=1))
    if past.stop is None:
        raise ValueError(
            "the run is not over (its log does not end in a stop record), and a trainer may need what looks unused; "
            "its own trainer collects as store.retention says; --dry-run shows what could go; of a run that nobody "
            "will resume the whole prefix can be deleted"
        )
    for removal in removals:
        await storage.delete(removal.key)


async def _complete(storage: Storage, objects: list[ObjectInfo]) -> dict[Version, State]:
    found = {}
    for info in objects:
        if info.key.startswith(f"{CHECKPOINTS}/") and info.key.endswith(f"/{MANIFEST}"):
            content = await _json(storage, info.key)
            try:
                if content["version"] == list(Version.of_key(info.key) or ()):
                    found[Version(*content["version"])] = State.from_json(content["state"]["coordinator"])
            except (KeyError, TypeError, ValueError, AttributeError):
                continue  # damaged: no checkpoint
    return found


async def _control(storage: Storage) -> ControlState | None:
    try:
        found = await storage.get(CONTROL_KEY)
    except Corrupted as error:
        raise ValueError(f"{error}; {CONTROL_REMEDY}") from None
    return ControlState.decode(found.data) if found else None


async def _in_use(
    storage: Storage, objects: list[ObjectInfo], states: Iterable[State], control: ControlState | None
) -> set[Version]:
    versions = {version for state in states for version in state.evaluations.values()}
    if control is not None:
        versions |= {control.version} if control.version else set()
        versions |= {control.evaluation.version} if control.evaluation else set()
    best: tuple[float, Version] | None = None
    for info in objects:
        if is_heartbeat(info.key):
            loaded = await _loaded(storage, info.key)
            versions |= {loaded} if loaded else set()
        elif EVALUATION.fullmatch(info.key) and info.key.endswith(".json"):
            content = await _json(storage, info.key)
            try:
                value, version = score(content), Version(*content["version"])
                if value is not None and (best is None or value > best[0]):
                    best = value, version
            except (KeyError, TypeError, AttributeError):
                continue  # damaged: no result
    return versions | ({best[1]} if best else set())


async def _loaded(storage: Storage, key: str) -> Version | None:
    """The weights that a worker has; None for a damaged heartbeat too: a worker that lives writes it again."""
    try:
        found = await storage.get(key)
        return Heartbeat.decode(found.data).version if found else None
    except (Corrupted, ValueError):
        return None


async def _json(storage: Storage, key: str) -> dict[str, Any]:
    """The JSON object at `key`; empty for what is damaged."""
    try:
        found = await storage.get(key)
        content = json.loads(found.data) if found else {}
    except (Corrupted, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
