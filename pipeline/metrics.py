"""One row of numbers per trained step, under the field's names, to whoever wants it.

metrics/v1/t<term6>-s<step20>.json in the store, one conditional PUT a step; with MILES_RUN_DIR also metrics.jsonl
and TensorBoard files in tensorboard/. Every row names its term: after a resume a step may stand there once a term,
and readers take the row of the highest term.
"""

import asyncio
import contextlib
import json
import logging
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.algorithms import groups as group_statistics
from pipeline.storage import Corrupted, Storage
from pipeline.versions import Version

log = logging.getLogger(__name__)

FOLDER = "metrics/v1"
GETS_AT_ONCE = 32
RUN_FOLDER_VARIABLE = "MILES_RUN_DIR"

Row = dict[str, float]


def run_folder() -> pathlib.Path | None:
    """The local folder of the run, if the process has one."""
    named = os.environ.get(RUN_FOLDER_VARIABLE)
    return pathlib.Path(named) if named else None


async def stored(storage: Storage) -> list[Row]:
    """The row of every step in the store, ascending; of a step that was trained again that of the highest term. What is
    damaged is left out."""
    newest: dict[int, Version] = {}
    for info in await storage.list(FOLDER):
        with contextlib.suppress(ValueError):  # no row of ours
            version = Version.parse(info.key.rsplit("/", 1)[-1].removesuffix(".json"))
            newest[version.step] = max(version, newest.get(version.step, version))
    gate = asyncio.Semaphore(GETS_AT_ONCE)

    async def get(version: Version) -> Row | None:
        async with gate:
            try:
                found = await storage.get(f"{FOLDER}/{version}.json")
                content = json.loads(found.data) if found else None
            except (Corrupted, ValueError, RecursionError):
                content = ()
        if content is None or isinstance(content, dict):
            return content
        log.warning("the metrics of %s are damaged, and left out", version)
        return None

    found = await asyncio.gather(*(get(newest[step]) for step in sorted(newest)))
    return [row for row in found if row is not None]


class Recorder:
    """Writes rows; used by rank 0 alone."""

    def __init__(self, storage: Storage, folder: pathlib.Path | None) -> None:
        self.storage = storage
        self.folder = folder
        self.latest: Row = {}
        self._board: Any = None

    async def record(self, version: Version, row: Row, created: float) -> None:
        """Store the row of the step that made `version`; `created` in seconds since the epoch."""
        numbers = {name: value if math.isfinite(value) else None for name, value in row.items()}
        text = json.dumps({"term": version.term, "step": version.step, "time": created, **numbers})
        await self.storage.create(f"{FOLDER}/{version}.json", text.encode())
        self.latest = row
        if self.folder is not None:
            append(self.folder / "metrics.jsonl", text)
            self._tensorboard(version, row, created)

    def evaluation(self, version: Version, scores: Row, created: float) -> None:
        """An evaluation's result, for TensorBoard; the store has it in evaluations/."""
        self._tensorboard(version, {f"eval/{name}": value for name, value in scores.items()}, created)

    def close(self) -> None:
        if self._board is not None:
            self._board.close()

    def _tensorboard(self, version: Version, row: Row, created: float) -> None:
        if self.folder is None:
            return
        if self._board is None:
            from torch.utils.tensorboard import SummaryWriter  # slow to import, and only wanted here

            # Points of an earlier incarnation from this step on are superseded.
            self._board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=version.step)
        for name, value in row.items():
            self._board.add_scalar(name, value, version.step, walltime=created)
        self._board.flush()


def append(path: pathlib.Path, line: str) -> None:
    """Add one line in one write, after the newline that a killed predecessor may have owed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as stream:
        if stream.tell() > 0:
            stream.seek(-1, os.SEEK_END)
            line = line if stream.read(1) == b"\n" else "\n" + line
        stream.write(line.encode() + b"\n")


def of_rewards(
    rewards: np.ndarray,  # [N] float64, NaN where unscorable
    valid: np.ndarray,  # [N] bool
    groups: np.ndarray,  # [N] int, number of the group
    parts: Mapping[str, np.ndarray],  # reward name → [N], NaN where unscorable
) -> Row:
    """reward/*. A group without two valid samples or without spread counts in reward/frac_zero_std."""
    scored = rewards[valid]
    row = _summary("reward", scored)
    row |= {f"reward/{name}/mean": _mean(values[valid]) for name, values in parts.items()}
    _, first = np.unique(groups, return_index=True)  # one sample of each group
    row["reward/frac_zero_std"] = _mean(~group_statistics.statistics(rewards, valid, groups).comparable[first])
    row["reward/frac_invalid"] = 1.0 - len(scored) / max(1, len(rewards))
    return row


def of_responses(lengths: np.ndarray, truncated: np.ndarray) -> Row:
    """response_length/*: lengths [N] in tokens, truncated [N] bool."""
    return {
        "response_length/mean": _mean(lengths),
        "response_length/max": float(lengths.max(initial=0)),
        "response_length/clip_ratio": _mean(truncated),
    }


def of_turns(turns: np.ndarray, observed: np.ndarray) -> Row:
    """episode/*: turns [N] of the policy, observed [N] tokens of the environment; empty where all have one turn."""
    if turns.max(initial=0) < 2:
        return {}
    return {
        "episode/turns_mean": _mean(turns),
        "episode/turns_max": float(turns.max()),
        "episode/observation_length_mean": _mean(observed),
    }


def of_staleness(staleness: np.ndarray) -> Row:
    """async/staleness_*: staleness [N] in policy versions."""
    return {"async/staleness_mean": _mean(staleness), "async/staleness_max": float(staleness.max(initial=0))}


def of_advantages(advantages: np.ndarray) -> Row:
    return {"advantage/mean": _mean(advantages), "advantage/std": float(np.std(advantages)) if len(advantages) else 0.0}


STARTING_STEPS = 2
"""Steps in which caches fill and code compiles; no measure of speed."""


def steady(rows: Sequence[Mapping[str, float]]) -> Sequence[Mapping[str, float]]:
    return rows[STARTING_STEPS:] or rows


def steady_rate(rows: Sequence[Mapping[str, float]], name: str) -> float:
    """perf/<name> a second, over the steady steps."""
    seconds = sum(row["perf/step_s"] for row in steady(rows))
    return sum(row[f"perf/{name}"] for row in steady(rows)) / seconds if seconds else 0.0


def waiting_share(rows: Sequence[Mapping[str, float]]) -> float:
    """Share of the steady steps' time in which the trainer waits for experience."""
    return share(steady(rows), "async/wait_for_batch_s")


def share(rows: Sequence[Mapping[str, float]], name: str) -> float:
    """Of the steps' time, that of the seconds `name`."""
    seconds = sum(row["perf/step_s"] for row in rows)
    return sum(row.get(name, 0.0) for row in rows) / seconds if seconds else 0.0


def _summary(name: str, values: np.ndarray) -> Row:
    if not len(values):
        return {f"{name}/{statistic}": 0.0 for statistic in ("mean", "std", "max", "min")}
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/std": float(values.std()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def is_part(name: str) -> bool:
    """Whether a name is that of one reward function's mean: reward/<function>/mean."""
    return name.startswith("reward/") and name.count("/") == 2
