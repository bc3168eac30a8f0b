"""Evaluation: the worker's side. All sets, with exactly one policy version, in an order that never changes.

evaluations/v1/s<step>.json holds {step, version, sets: {name: {"avg@k", "pass@k", "count", "invalid", "samples",
"reward", "per_prompt": [...]}}}, with the number of samples for k; all samples lie in the Parquet file beside it,
under the schema of experience, numbered through over the sets.
The score of a sample is the first reward of the run, the task's own; `reward` is the mean of the weighted sum.
A sample is correct where its score is at least 1. Samples that could not be scored are left out of the means and
counted. per_prompt are the mean scores of the prompts in the set's fixed order, so that two evaluations can be
compared prompt by prompt (`compare`).
"""

import asyncio
import contextlib
import dataclasses
import json
import math
import statistics
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from pipeline import codec
from pipeline.config import PromptSetConfig, RunConfig, SamplingConfig
from pipeline.experience import RolloutGroup
from pipeline.inference import Sampling
from pipeline.messages import evaluation_key
from pipeline.prompts import PromptSet, open_set
from pipeline.sampling import Sampler
from pipeline.storage import Conflict, Storage
from pipeline.versions import Version

CORRECT = 1.0 - 1e-9
NORMAL_95 = 1.96


@dataclasses.dataclass(frozen=True)
class EvaluationSet:
    name: str
    prompts: PromptSet
    count: int
    """Prompts evaluated, the set's first so many."""
    samples: int
    """Completions per prompt."""
    sampling: Sampling


def open_sets(config: RunConfig) -> list[EvaluationSet]:
    """The evaluation sets of a run; reads files and blocks. Raises ValueError for a set without an end."""
    return [_open(entry, config) for entry in config.evaluation.sets]


def _open(entry: PromptSetConfig, config: RunConfig) -> EvaluationSet:
    prompts = open_set(entry, config.data.seed, config.store, held_out=True)
    if prompts.size is None:
        raise ValueError(f"evaluation set {entry.name}: {entry.generator} is endless; set limit, such as 100")
    sampling = sampling_of(config.algorithm.sampling, entry.temperature)
    # Greedy completions of one prompt are all the same.
    samples = entry.samples if sampling.temperature > 0 else 1
    return EvaluationSet(entry.name, prompts, prompts.size, samples, sampling)


def sampling_of(config: SamplingConfig, temperature: float | None = None) -> Sampling:
    return Sampling(
        temperature=config.temperature if temperature is None else temperature,
        max_new_tokens=config.max_new_tokens,
        stop=tuple(config.stop),
    )


Aside = Callable[..., Awaitable[Any]]
"""Calls a blocking function with arguments where it does not hold up the event loop."""


async def evaluate(
    sets: Sequence[EvaluationSet], sampler: Sampler, concurrent_groups: int, aside: Aside
) -> list[list[RolloutGroup]]:
    """The groups of each set, in order. Raises the first EngineError where the engine fails."""
    slots = asyncio.Semaphore(concurrent_groups)
    offset, tasks = 0, []
    try:
        async with asyncio.TaskGroup() as group:
            for entry in sets:
                tasks.append(
                    [
                        group.create_task(_sample(entry, n, offset + n, sampler, slots, aside))
                        for n in range(entry.count)
                    ]
                )
                offset += entry.count
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [[task.result() for task in of_set] for of_set in tasks]


async def _sample(
    entry: EvaluationSet, number: int, index: int, sampler: Sampler, slots: asyncio.Semaphore, aside: Aside
) -> RolloutGroup:
    async with slots:
        prompt = await aside(entry.prompts.item, number, index)
        generated = await sampler.generate(prompt, entry.samples, entry.sampling)
    return await sampler.score(generated)


async def publish(
    storage: Storage,
    step: int,
    version: Version,
    sets: Sequence[EvaluationSet],
    groups: Sequence[list[RolloutGroup]],
    task_reward: str,
) -> dict[str, Any]:
    """Write samples, then result; returns the result. What another worker has published before stays."""
    result = {
        "step": step,
        "version": list(version),
        "sets": {
            entry.name: summary(of_set, entry.samples, task_reward)
            for entry, of_set in zip(sets, groups, strict=True)
        },
    }  # fmt: skip
    key = evaluation_key(step)
    samples = codec.encode([group for of_set in groups for group in of_set])
    with contextlib.suppress(Conflict):
        await storage.create(key.removesuffix(".json") + ".parquet", samples)
    with contextlib.suppress(Conflict):
        await storage.create(key, json.dumps(result).encode())
    return result


async def publish_failure(storage: Storage, step: int, version: Version, reason: str) -> None:
    """So that nobody waits for an evaluation that cannot be done."""
    content = {"step": step, "version": list(version), "sets": {}, "error": reason}
    with contextlib.suppress(Conflict):
        await storage.create(evaluation_key(step), json.dumps(content).encode())


def summary(groups: Sequence[RolloutGroup], samples: int, task_reward: str) -> dict[str, Any]:
    scores = [
        [r.rewards[task_reward] for r in group.rollouts if r.invalid is None and task_reward in r.rewards]
        for group in groups
    ]
    rewards = [r.reward for group in groups for r in group.rollouts if r.reward is not None]
    per_prompt = [statistics.fmean(of_prompt) if of_prompt else None for of_prompt in scores]
    solved = [any(score >= CORRECT for score in of_prompt) for of_prompt in scores if of_prompt]
    return {
        f"avg@{samples}": _mean([score for score in per_prompt if score is not None]),
        f"pass@{samples}": _mean([float(each) for each in solved]),
        "samples": samples,
        "count": len(groups),
        "invalid": sum(r.invalid is not None for group in groups for r in group.rollouts),
        "reward": _mean(rewards),
        "response_length": _mean([float(r.mask.sum()) for group in groups for r in group.rollouts]),
        "per_prompt": per_prompt,
    }


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def compare(before: Sequence[float | None], after: Sequence[float | None]) -> tuple[float, float, float]:
    """Mean improvement over the same prompts and its 95% confidence interval (low, high), paired, normal.

    Example: [0, 0, 1, 0] to [1, 0, 1, 1] improves by 0.5, between -0.07 and 1.07.
    Raises ValueError for lists of different length or fewer than two prompts scored in both.
    """
    pairs = [(a, b) for a, b in zip(before, after, strict=True) if a is not None and b is not None]
    if len(pairs) < 2:
        raise ValueError(f"only {len(pairs)} prompts are scored in both evaluations; a comparison needs two")
    differences = [b - a for a, b in pairs]
    mean = statistics.fmean(differences)
    margin = NORMAL_95 * statistics.stdev(differences) / math.sqrt(len(differences))
    return mean, mean - margin, mean + margin
