import math
import pathlib
from typing import Any

import pytest

from pipeline import evaluation
from pipeline.config import EvaluationConfig, PromptSetConfig
from pipeline.experience import Rollout, RolloutGroup
from pipeline.storage import MemoryStorage
from pipeline.versions import Version
from tests.conftest import SkippingClock
from tests.test_rollout import configure


def group(*scores: float | None) -> RolloutGroup:
    """A group whose samples have these scores; None: unscorable."""
    rollouts = [
        Rollout(
            completion_ids=[1, 2],
            logprobs=[-1.0, -1.0],
            completion="x",
            finish_reason="stop",
            reward=None if score is None else score + 0.5,
            rewards={} if score is None else {"task": score, "brief": 0.5},
            invalid="reward task: returned nan" if score is None else None,
            spans=[(0, Version(1, 2))],
        )
        for score in scores
    ]
    return RolloutGroup(0, "a", "p", None, [5], rollouts, 0.0)


def test_avg_and_pass_at_k_are_those_of_the_task_reward_over_prompts() -> None:
    summary = evaluation.summary([group(1, 0, 0, 0), group(0, 0, 0, 0), group(1, 1, 0.5, 1)], 4, "task")
    assert summary["per_prompt"] == [0.25, 0.0, 0.875]
    assert summary["avg@4"] == pytest.approx(1.125 / 3)
    assert summary["pass@4"] == pytest.approx(2 / 3)
    assert (summary["count"], summary["invalid"], summary["response_length"]) == (3, 0, 2.0)
    assert summary["reward"] == pytest.approx(4.5 / 12 + 0.5)


def test_samples_that_could_not_be_scored_are_left_out_and_counted() -> None:
    summary = evaluation.summary([group(1, None), group(None, None), group(0, 0)], 2, "task")
    assert summary["per_prompt"] == [1.0, None, 0.0]
    assert (summary["avg@2"], summary["pass@2"], summary["invalid"]) == (0.5, 0.5, 3)


def test_nothing_to_average_is_null_not_nan() -> None:
    summary = evaluation.summary([group(None)], 1, "task")
    assert (summary["avg@1"], summary["pass@1"], summary["reward"]) == (None, None, None)


def test_a_partly_right_answer_is_not_a_pass() -> None:
    assert evaluation.summary([group(0.2, 0.99)], 2, "task")["pass@2"] == 0.0


def test_two_evaluations_are_compared_prompt_by_prompt_with_a_confidence_interval() -> None:
    mean, low, high = evaluation.compare([0, 0, 1, 0], [1, 0, 1, 1])
    margin = 1.96 * math.sqrt(1 / 3 / 4)
    assert (mean, low, high) == pytest.approx((0.5, 0.5 - margin, 0.5 + margin))
    assert evaluation.compare([0, None, 1, 0], [1, 0, None, 1])[0] == 1.0
    with pytest.raises(ValueError, match="needs two"):
        evaluation.compare([None, 1.0], [1.0, 1.0])


async def test_what_was_published_first_stays() -> None:
    storage = MemoryStorage(SkippingClock())
    await evaluation.publish_failure(storage, 3, Version(1, 3), "the server died")
    await evaluation.publish_failure(storage, 3, Version(1, 3), "something else")
    found = await storage.get(evaluation.evaluation_key(3))
    assert found is not None
    assert b"the server died" in found.data


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"generator": "reasoning-gym/chain_sum"}, "evaluation set e: reasoning-gym/chain_sum is endless; set limit"),
        ({"uri": "/gone.jsonl"}, "data set e: cannot read /gone.jsonl"),
    ],
)
def test_a_set_that_cannot_be_evaluated_is_refused_when_it_is_opened(
    tmp_path: pathlib.Path, entry: dict[str, Any], message: str
) -> None:
    config = configure(tmp_path, {})
    sets = EvaluationConfig(sets=[PromptSetConfig(name="e", **entry)])
    with pytest.raises(ValueError, match=message):
        evaluation.open_sets(config.model_copy(update={"evaluation": sets}))


def test_each_set_has_its_own_temperature_and_number_of_samples(tmp_path: pathlib.Path) -> None:
    first, greedy = evaluation.open_sets(configure(tmp_path, {}))
    assert (first.sampling.temperature, first.samples, first.count) == (0.9, 2, 5)
    assert (greedy.sampling.temperature, greedy.samples, greedy.count) == (0.0, 1, 2)
