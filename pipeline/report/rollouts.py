"""Real rollouts for the report's browser: some samples of some steps, as they lie in the store."""

import functools
import importlib
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from pipeline import archive
from pipeline.algorithms.registry import ALGORITHMS
from pipeline.algorithms.samples import Samples
from pipeline.config import RunConfig
from pipeline.experience import GREEDY, Rollout, RolloutGroup
from pipeline.report import history
from pipeline.report.history import History
from pipeline.storage import Storage
from pipeline.versions import Version

STEPS = 40
SAMPLES = 16
"""Samples of one step that are shown."""
CHARACTERS = 12_000_000
"""Of all texts together; beyond it each text is cut shorter."""
TEXT_LIMITS = (8000, 2000, 500)
"""Characters of one text, tried in order."""

Estimator = Callable[[Samples], np.ndarray]
"""Advantages of all response tokens, laid end to end."""
Chosen = list[tuple[RolloutGroup, list[float | None]]]
"""Groups, each with the advantages of its samples."""


async def browse(storage: Storage, config: RunConfig, past: History) -> tuple[dict[str, Any], list[str]]:
    """{trained, evaluated}, each [{step, of, groups}] for page.js; `of`: groups there were, and what was left out."""
    plans = history.thin(list(past.plans.values()), STEPS)
    estimator, stored = estimator_of(config), config.data.replay_from is not None
    shards, condition = archive.shards(config, storage), archive.condition(config)
    trained: list[tuple[int, int, Chosen]] = []
    for plan in plans:
        groups = await history.groups(shards, plan, condition)
        if groups:
            trained.append((plan.step, len(groups), pick(groups, advantages(groups, estimator))))
    evaluated: list[tuple[int, int, Chosen]] = []
    for step in history.thin(list(past.evaluations), STEPS):
        groups = await history.evaluated(storage, step)
        if groups:
            evaluated.append((step, len(groups), pick(groups, advantages(groups, None))))
    limit = next((each for each in TEXT_LIMITS if characters(trained + evaluated, each) <= CHARACTERS), TEXT_LIMITS[-1])
    shown = {
        "trained": [
            {
                "step": step,
                "of": count,
                "groups": [describe(each, limit, None if stored else step) for each in chosen],
            }
            for step, count, chosen in trained
        ],
        "evaluated": [
            {"step": step, "of": count, "groups": [describe(each, limit) for each in chosen]}
            for step, count, chosen in evaluated
        ],
    }
    said = omissions(past, len(plans), len(trained), limit)
    return shown, said if estimator else [*said, no_advantages(config)]


def estimator_of(config: RunConfig) -> Estimator | None:
    """The algorithm's own advantages; None where they are more than the samples tell, see no_advantages."""
    if lacking(config):
        return None
    try:
        module = importlib.import_module(ALGORITHMS[config.algorithm.type].module)
    except ImportError:
        return None
    return functools.partial(module.advantages, config=config.algorithm)


def lacking(config: RunConfig) -> str | None:
    """What else than the stored rewards of a step the advantages were made of."""
    algorithm = config.algorithm
    if algorithm.type not in ALGORITHMS:
        return f"this release does not know the algorithm {algorithm.type}"
    if ALGORITHMS[algorithm.type].critic:
        return "they hang on the values of the critic, which are not kept"
    if algorithm.kl_coefficient and algorithm.kl_placement == "reward":
        return "they hang on the KL penalty of each token, which is not kept"
    if any(reward.normalize or reward.clip is not None for reward in config.rewards):
        return "they hang on rescaled rewards; miles replay shows them"
    return None


def advantages(groups: list[RolloutGroup], estimator: Estimator | None) -> list[list[float | None]]:
    """Per group and sample, as the trainer computed them from the whole step, the mean over its tokens; None where a
    sample takes no part."""
    if estimator is None:
        return [[None] * len(group.rollouts) for group in groups]
    placed = [(number, rollout) for number, group in enumerate(groups) for rollout in group.rollouts]
    baselines = {number: rollout.reward for number, rollout in placed if rollout.invalid == GREEDY}
    samples = Samples(
        rewards=_numbers(rollout.reward for _, rollout in placed),
        valid=np.array([rollout.invalid is None and rollout.reward is not None for _, rollout in placed], bool),
        groups=np.array([number for number, _ in placed]),
        lengths=np.array([int(rollout.mask.sum()) for _, rollout in placed]),
        baselines=_numbers(baselines.get(number) for number, _ in placed) if baselines else None,
        credits=np.concatenate([rollout.credits[rollout.mask] for _, rollout in placed]),
    )
    of_tokens = np.split(estimator(samples), np.cumsum(samples.lengths)[:-1])
    took_part = samples.valid & (samples.lengths > 0)
    found = iter([float(each.mean()) if ok else None for each, ok in zip(of_tokens, took_part, strict=True)])
    return [[next(found) for _ in group.rollouts] for group in groups]


def _numbers(rewards: Iterable[float | None]) -> np.ndarray:
    return np.array([np.nan if reward is None else reward for reward in rewards], np.float64)


def pick(groups: list[RolloutGroup], estimates: list[list[float | None]]) -> Chosen:
    """As many whole groups as SAMPLES allow, at least one, evenly spread over the step."""
    largest = max(len(group.rollouts) for group in groups)
    return history.thin(list(zip(groups, estimates, strict=True)), max(1, SAMPLES // max(1, largest)))


def describe(chosen: tuple[RolloutGroup, list[float | None]], limit: int, step: int | None = None) -> dict[str, Any]:
    """`step`: the optimizer step that trained the group; None: its samples have no staleness."""
    group, estimates = chosen
    rewards = [rollout.reward for rollout in group.rollouts if rollout.reward is not None]
    return {
        "index": group.index,
        "set": group.set,
        "prompt": shortened(group.prompt, limit),
        "answer": None if group.answer is None else shortened(group.answer, limit),
        "mean": statistics.fmean(rewards) if rewards else None,
        "size": len(group.rollouts),
        "samples": [
            sample(rollout, limit)
            # The trainer's version before the step, minus the oldest that made a token.
            | {"advantage": advantage, "staleness": None if step is None else step - 1 - rollout.oldest.step}
            for rollout, advantage in zip(group.rollouts[:SAMPLES], estimates[:SAMPLES], strict=True)
        ],
    }


def sample(rollout: Rollout, limit: int) -> dict[str, Any]:
    logprobs = [value for value, sampled in zip(rollout.logprobs, rollout.mask, strict=False) if sampled]
    turns = [[turn.observation, shortened(turn.text, limit)] for turn in rollout.turns]
    return {
        "turns": turns or [[False, shortened(rollout.completion, limit)]],
        "reward": rollout.reward,
        "rewards": sorted(rollout.rewards.items()),
        "invalid": rollout.invalid,
        "tokens": int(rollout.mask.sum()),
        "finish": rollout.finish_reason,
        "version": policy([version for _, version in rollout.spans]),
        "logprob": statistics.fmean(logprobs) if logprobs else None,
    }


def policy(versions: list[Version]) -> str:
    """t1-s12, or t1-s12 … t1-s13 where the policy changed within the response."""
    first, last = min(versions), max(versions)
    names = [f"t{version.term}-s{version.step}" for version in (first, last)]
    return names[0] if first == last else " … ".join(names)


def shortened(text: str, limit: int) -> str:
    """Beginning and end of `text`, together about `limit` characters."""
    if len(text) <= limit:
        return text
    head = limit * 3 // 4
    return f"{text[:head]}\n… {len(text) - limit:,} characters left out …\n{text[len(text) - (limit - head) :]}"


def characters(steps: list[tuple[int, int, Chosen]], limit: int) -> int:
    """Of all texts that would be shown."""
    groups = [group for _, _, chosen in steps for group, _ in chosen]
    samples = [rollout for group in groups for rollout in group.rollouts[:SAMPLES]]
    texts = [text for each in samples for text in ([turn.text for turn in each.turns] or [each.completion])]
    return sum(min(len(text), limit) for text in [*(group.prompt for group in groups), *texts])


def omissions(past: History, wanted: int, found: int, limit: int) -> list[str]:
    said = []
    if wanted < len(past.plans):
        said.append(f"Rollouts of {wanted} of {len(past.plans)} steps are in this page, up to {SAMPLES} samples each.")
    if found < wanted:
        said.append(f"The rollouts of {wanted - found} of these steps are no longer in the store.")
    if limit < TEXT_LIMITS[0]:
        said.append(f"Texts are cut to {limit} characters.")
    return said


def no_advantages(config: RunConfig) -> str:
    why = lacking(config) or "their module needs a package that is not installed here (extra `trainer`)"
    return f"Advantages are missing: {why}."
