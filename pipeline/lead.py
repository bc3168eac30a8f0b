"""What rank 0 does beside training: it leads the run through the store.

It owns the coordinator and its task, asks for evaluations, records metrics, answers on HTTP, deletes weights that
nobody will ask for again, and ends the run. All of it runs in one event loop (see background); the training thread
of rank 0 hands coroutines in and reads plain attributes.
"""

import asyncio
import json
import logging
import os
import pathlib
import random
import statistics
from collections.abc import Callable
from typing import Any

from pipeline import checkpoint, metrics, output, status, termination, weights
from pipeline.clock import Clock
from pipeline.config import RunConfig
from pipeline.coordinator import Coordinator
from pipeline.metrics import Row
from pipeline.scoreboard import Scoreboard, numbers
from pipeline.status import StatusServer
from pipeline.storage import Storage, open_storage
from pipeline.trainer_log import Plan
from pipeline.versions import Version

log = logging.getLogger(__name__)

RECENT_STEPS = 20
"""Steps over which the remaining time is estimated."""
WAITS_STEPS = 5
"""Steps over which it is told who waits for whom."""
FIGURES = ("duration_s", "samples_per_s", "tokens_per_s", "peak_memory_gib", "dropped", "why_dropped")
"""Of the summary: what only a process that trains can measure."""


class Lead:
    def __init__(
        self, config: RunConfig, storage: Storage, clock: Clock, randomness: random.Random, pause: Callable[[], None]
    ) -> None:
        """`pause` asks the training loop to checkpoint and stop; called in the event loop's thread."""
        self.config, self.storage, self.clock = config, storage, clock
        self.coordinator = Coordinator(storage, config, clock, randomness, _vocabulary(config))
        self.scoreboard = Scoreboard(config, self.coordinator, clock)
        self.recorder = metrics.Recorder(storage, metrics.run_folder())
        self.server = StatusServer("miles_trainer", self.status, self.gauges, self._unready, pause)
        self.phase = "starting"
        self.started = clock.monotonic()
        self.step = 0
        self.checkpointed: Version | None = None
        self.stored: dict[str, int] | None = None
        """bytes and objects of the run in the store, as counted when a checkpoint was last proven."""
        self.rows: list[Row] = []
        self.versions: list[Version] = []  # of weights: the newest few, oldest first
        self._task: asyncio.Task[None] | None = None
        self._idle_s = 0.0  # of the coordinator, when the last step was recorded

    async def serve(self) -> None:
        """Raises ValueError if the port is taken."""
        await status.serve(self.server)

    async def take_over(self, state: dict[str, Any] | None, step: int) -> int:
        """Fence the predecessor, restore the coordinator, let it run; returns the term. Raises Fenced."""
        await self.coordinator.take_over(state)
        self.step = step
        await self.scoreboard.restore()
        self.versions = sorted(await weights.published(self.storage))
        self._task = asyncio.create_task(self.coordinator.run())
        return self.coordinator.term

    async def next_plan(self, step: int) -> Plan:
        return await self.coordinator.next_plan(step)

    async def withdraw(self, step: int, damaged: dict[str, str]) -> Plan:
        return await self.coordinator.withdraw(step, damaged)

    def check(self) -> None:
        """Raise whatever ended the coordinator's task."""
        if self._task is not None and self._task.done():
            self._task.result()

    def wants_weights(self, step: int) -> bool:
        """Not while logged steps are replayed: nothing is generated until the last of them, only evaluated. A run that
        generates nothing at all keeps its last step's."""
        if self.config.data.replay_from:
            return step == self.config.algorithm.total_steps
        return step + 1 not in self.coordinator.ledger.plans or self.scoreboard.wants(step)

    async def publish(self, version: Version, stored: bool) -> None:
        """Announce a finished step's version, ask for its evaluation, and delete weights nobody will ask for again.

        `stored`: its weights lie in the store, because they were wanted.
        """
        await self.coordinator.publish(version)
        await self.scoreboard.ask(version)
        keep = set(self.scoreboard.pending.values())
        await self._collect()
        best = self.scoreboard.best()
        if best is not None:
            keep.add(Version(*best["version"]))
        if stored:
            self.versions = [*self.versions, version][-(self.config.algorithm.max_staleness + 2) :]
            await weights.collect(self.storage, version, keep | set(self.versions))

    async def record(self, version: Version, row: Row) -> None:
        """The step behind `version` is trained."""
        self.step = version.step
        row["async/rollout_idle_s"] = self.coordinator.idle_s - self._idle_s
        self._idle_s = self.coordinator.idle_s
        self.rows.append(row)
        await self.recorder.record(version, row, self.clock.now())

    async def keep_checkpoint(self, newest: Version, proven: bool) -> None:
        """`newest` is complete. Where it has been read back, too: delete what is older than the last few, and the
        shards only they need; then count what is left, a request for each thousand objects."""
        self.checkpointed = newest
        if not proven:
            return
        kept = await checkpoint.prune(self.storage, newest, self.config.checkpoint.keep_last)
        if self.config.store.retention == "window":
            await self.coordinator.collect([each.state["coordinator"] for each in kept])
        found = await self.storage.list("")
        self.stored = {"bytes": sum(info.size for info in found), "objects": len(found)}

    async def _collect(self) -> None:
        for step, result in (await self.scoreboard.collect(self.step)).items():
            scores = {
                f"{name}/{metric}": value
                for name, values in result["sets"].items()
                for metric, value in numbers(values)
            }
            self.recorder.evaluation(Version(self.coordinator.term, step), scores, self.clock.now())

    # The end

    async def finish(self, version: Version) -> None:
        """All steps are trained and checkpointed: last evaluation, stop record, delivery, summary."""
        self.phase = "evaluating"
        await self.scoreboard.wait()
        await self._collect()
        await self.coordinator.stop("complete")
        self.phase = "delivering"
        delivered = await self._deliver(version)
        await self._summarise(version, delivered)
        self.phase = "complete"
        termination.conclude(status.finite(self.status()))
        self.recorder.close()

    async def _deliver(self, final: Version) -> Version | None:
        if self.config.output is None:
            return None
        result = self.scoreboard.results.get(final.step)
        if self.config.output.what == "best":
            result = self.scoreboard.best() or result
        version = Version(*result["version"]) if result else final
        store = self.config.store
        target = open_storage(self.config.output.uri, store.endpoint, store.region)
        await output.deliver(self.storage, target, self.config, version, result["sets"] if result else {})
        return version

    async def _summarise(self, version: Version, delivered: Version | None) -> None:
        folder = metrics.run_folder()
        if folder is None:
            return
        statistics = self.coordinator.statistics()
        now, began = self.coordinator.roster.now, await self.storage.head("run.json")  # both by the store's clock
        # Those of earlier trainers are in the store alone.
        rows = self.rows if len(self.rows) == version.step else await metrics.stored(self.storage)
        rewards = [value for row in rows if (value := row.get("reward/mean")) is not None]
        content = {
            "run_id": self.config.run_id,
            "steps": version.step,
            "term": version.term,
            "duration_s": now - began.modified if began else self.clock.monotonic() - self.started,
            "reward": {"first": rewards[0], "last": rewards[-1]} if rewards else None,
            "evaluation": self.scoreboard.improvement(),
            "dropped": statistics["dropped"],
            "why_dropped": self.coordinator.dispatcher.first_why,
            "samples_per_s": metrics.steady_rate(rows, "samples"),
            "tokens_per_s": metrics.steady_rate(rows, "tokens"),
            "peak_memory_gib": max((row["perf/peak_memory_gib"] for row in rows), default=None),
            "output": {"uri": self.config.output.uri, "version": list(delivered)}
            if self.config.output and delivered
            else None,
        }
        if not self.rows:
            content |= _kept(folder / "summary.json", self.config.run_id)
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".summary-{os.getpid()}.json"
        temporary.write_text(json.dumps(status.finite(content), indent=1))
        temporary.replace(folder / "summary.json")

    async def fail(self, reason: str) -> None:
        """Trying again cannot help: say so to the workers."""
        await self.coordinator.stop(reason)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.server.stop()

    # What is told

    def queue(self) -> Row:
        """async/* of the moment."""
        statistics = self.coordinator.statistics()
        return {
            "async/queue_size": float(statistics["queue_groups"]),
            "async/running_groups": float(statistics["running"]),
            "async/writers": float(statistics["writers"]),
            "async/dropped_stale": 0.0,
            "perf/generated_tokens_per_s": float(statistics["generated_tokens_per_s"]),
            **{f"async/dropped_{reason}": float(count) for reason, count in statistics["dropped"].items()},
        }

    def gauges(self) -> Row:
        return {**self.recorder.latest, **self.queue(), "step": float(self.step)}

    def status(self) -> dict[str, Any]:
        row, statistics = self.recorder.latest, self.coordinator.statistics()
        version = self.coordinator.version
        return {
            "phase": self.phase,
            "step": self.step,
            "total_steps": self.config.algorithm.total_steps,
            "version": list(version) if version else None,
            "waiting_for": self._waiting_for(),
            "reward_mean": row.get("reward/mean"),
            "reward": {name.split("/")[1]: value for name, value in row.items() if metrics.is_part(name)},
            "response_length_mean": row.get("response_length/mean"),
            "tokens_per_s": {
                "trained": row.get("perf/tokens_per_s"),
                "generated": statistics["generated_tokens_per_s"],
            },
            "samples_per_s": row.get("perf/samples_per_s"),
            "staleness_mean": row.get("async/staleness_mean"),
            "staleness_max": row.get("async/staleness_max"),
            "queue_groups": statistics["queue_groups"],
            "waits": self._waits(),
            "dropped": statistics["dropped"],
            "why_dropped": self.coordinator.dispatcher.first_why,
            "losses": self.coordinator.dispatcher.losses(),
            "eta_s": self._eta_s(),
            "evaluation": self._newest_evaluation(),
            "checkpoint_step": self.checkpointed.step if self.checkpointed else None,
            "store": self.stored,
            "writers": statistics["writers"],
            "peak_memory_gib": row.get("perf/peak_memory_gib"),
        }

    def _waiting_for(self) -> str | None:
        if self.phase == "evaluating":
            return "evaluation of step " + ", ".join(map(str, self.scoreboard.pending))
        return self.coordinator.waiting_for if self.phase == "waiting" else None

    def _waits(self) -> dict[str, float] | None:
        """Shares of the last steps' time in which the trainer waited for experience, and workers had nothing to do."""
        rows = self.rows[metrics.STARTING_STEPS :][-WAITS_STEPS:]
        if not rows:
            return None
        trainer, rollout = (metrics.share(rows, f"async/{name}_s") for name in ("wait_for_batch", "rollout_idle"))
        return {"trainer": trainer, "rollout": rollout, "steps": len(rows)}

    def _unready(self) -> str | None:
        return "the model to be loaded" if self.phase == "starting" else None

    def _eta_s(self) -> float | None:
        """By the median: the first step, which waits for vLLM to start, would promise hours."""
        recent = [row["perf/step_s"] for row in self.rows[-RECENT_STEPS:]]
        return (self.config.algorithm.total_steps - self.step) * statistics.median(recent) if recent else None

    def _newest_evaluation(self) -> dict[str, Any]:
        """Set → {metric: value, "step"}."""
        results = self.scoreboard.results
        sets = results[max(results)]["sets"] if results else {}
        return {name: {**dict(numbers(values)), "step": max(results)} for name, values in sets.items()}


def _vocabulary(config: RunConfig) -> int | None:
    """Rows of the model's embedding: no token id may be higher."""
    content = json.loads(pathlib.Path(config.model.path, "config.json").read_text())
    return content.get("vocab_size") or (content.get("text_config") or {}).get("vocab_size")


def _kept(file: pathlib.Path, run_id: str) -> dict[str, Any]:
    """Figures that the summary of a run keeps when the run is only ended once more."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict) or content.get("run_id") != run_id:
        return {}
    return {name: content[name] for name in FIGURES if content.get(name) is not None}
