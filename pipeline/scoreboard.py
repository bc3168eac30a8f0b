"""The trainer's side of evaluation: when one is due, what has come back, which version is the best."""

import asyncio
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.clock import Clock
from pipeline.config import RunConfig
from pipeline.coordinator import Coordinator
from pipeline.evaluation import compare
from pipeline.storage import Corrupted
from pipeline.versions import Version

log = logging.getLogger(__name__)

EVALUATIONS_FOLDER = "evaluations/v1"
RESULT = re.compile(r"/s(\d{20})\.json$")
Result = dict[str, Any]
"""evaluations/v1/s<step>.json, see pipeline.evaluation."""


class Scoreboard:
    def __init__(self, config: RunConfig, coordinator: Coordinator, clock: Clock) -> None:
        self.config, self.coordinator, self.clock = config, coordinator, clock
        self.results: dict[int, Result] = {}
        """By step, of this lineage."""
        self.damaged: set[int] = set()
        """Steps whose result cannot be read: evaluations that are missing, and no reason to end the run."""

    def due(self, step: int) -> bool:
        """Whether the policy of `step` is to be evaluated: first, last, and every so many."""
        every, last = self.config.evaluation.every_steps, self.config.algorithm.total_steps
        return bool(self.config.evaluation.sets) and (step in (0, last) or bool(every and step % every == 0))

    def wants(self, step: int) -> bool:
        """Whether the policy of `step` is still to be evaluated, and nobody has been asked to."""
        return self.due(step) and not self._answered(step) and step not in self.pending

    def _answered(self, step: int) -> bool:
        return step in self.results or step in self.damaged

    async def ask(self, version: Version) -> None:
        """Request the evaluation of a published version if it is wanted."""
        if self.wants(version.step):
            await self.coordinator.evaluate(version.step, version)

    async def restore(self) -> None:
        """Take in all results there are, those of steps that will be trained again included: their weights are kept."""
        for info in await self.coordinator.storage.list(EVALUATIONS_FOLDER):
            match = RESULT.search(info.key)
            if match and (result := await self._read(int(match[1]))):
                self.results[int(match[1])] = result

    async def collect(self, up_to: int) -> dict[int, Result]:
        """Results that have appeared since the last call, of steps 0 … up_to."""
        new: dict[int, Result] = {}
        for step in filter(self.due, range(up_to + 1)):
            if self._answered(step):
                continue
            result = await self._read(step)
            if result is not None:
                self.results[step] = new[step] = result
                if result.get("error"):
                    log.warning("the evaluation of step %d failed: %s", step, result["error"])
        return new

    async def _read(self, step: int) -> Result | None:
        """None: there is none, or it is damaged, which is said once."""
        try:
            found = await self.coordinator.evaluation(step)
            if found is None or _is_result(found):
                return found
            reason = "no result of an evaluation"
        except (Corrupted, ValueError, RecursionError) as error:
            reason = str(error)
        log.warning("the evaluation of step %d is damaged, and left out: %s", step, reason)
        self.damaged.add(step)
        return None

    @property
    def pending(self) -> Mapping[int, Version]:
        """Step → version, requested and not answered."""
        return self.coordinator.assignments.pending

    async def wait(self) -> None:
        """Until no evaluation is pending, at most as long as a lease may be held."""
        try:
            async with asyncio.timeout(self.config.rollout.group_timeout_s):
                while self.pending:
                    await self.clock.sleep(self.config.rollout.poll_s)
        except TimeoutError:
            log.warning("no evaluation of step %s within %g s; the run ends without it",
                        ", ".join(map(str, self.pending)), self.config.rollout.group_timeout_s)  # fmt: skip

    def best(self) -> Result | None:
        """The trained version with the highest score so far, the earliest of equals; the base model is none."""
        scores = {step: value for step, result in self.results.items() if step and (value := score(result)) is not None}
        return self.results[max(scores, key=lambda step: (scores[step], -step))] if scores else None

    def improvement(self) -> dict[str, dict[str, float | int | None]]:
        """Set → before, after, and their paired difference with its 95% interval, from the first to the last step."""
        if len(self.results) < 2:
            return {}
        first, last = self.results[min(self.results)], self.results[max(self.results)]
        found: dict[str, dict[str, float | int | None]] = {}
        for name in first["sets"].keys() & last["sets"].keys():
            before, after = first["sets"][name], last["sets"][name]
            entry = {"step": max(self.results), "before": average(before), "after": average(after)}
            try:
                difference, low, high = compare(before["per_prompt"], after["per_prompt"])
                entry |= {"difference": difference, "low": low, "high": high}
            except ValueError as error:
                log.warning("evaluation set %s: %s", name, error)
            found[name] = entry
        return found


def _is_result(content: Any) -> bool:
    """Whether it has what is asked of a result here."""
    if not isinstance(content, dict) or not isinstance(content.get("sets"), dict):
        return False
    version, sets = content.get("version"), content["sets"].values()
    return (
        isinstance(version, list)
        and [type(part) for part in version] == [int, int]
        and all(isinstance(metrics, dict) and isinstance(metrics.get("per_prompt"), list) for metrics in sets)
        and all(_is_score(value) for metrics in sets for value in [average(metrics), *metrics["per_prompt"]])
    )


def _is_score(value: Any) -> bool:
    return value is None or isinstance(value, int | float)


def score(result: Result) -> float | None:
    """Mean over the sets of avg@k; None for an evaluation that failed."""
    averages = [value for metrics in result["sets"].values() if (value := average(metrics)) is not None]
    return sum(averages) / len(averages) if averages else None


def average(metrics: Mapping[str, Any]) -> float | None:
    """avg@k of one set, whatever k is."""
    return next((value for name, value in metrics.items() if name.startswith("avg@")), None)


def numbers(metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """What of one set's metrics is a number."""
    return ((name, float(value)) for name, value in metrics.items() if isinstance(value, int | float))
