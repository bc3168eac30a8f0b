"""pipeline.normalisation: rewards on one scale, against values computed by hand and against all samples at once."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from pipeline.config import RewardConfig
from pipeline.learner import Interrupted, Learner
from pipeline.normalisation import Moments, rescaled
from tests import policies
from tests.batches import batch_of

GROUPS = [([1, 2], [[3, 4], [5]]), ([6], [[7], [8, 9]])]
NAN = float("nan")


def scored(scores, *, name="rm", weight=1.0, other=0.0, valid=None):
    """A batch whose samples have `scores` from that reward, and `other` from the rest of them."""
    raw = np.asarray(scores, np.float64)
    batch = batch_of(GROUPS, rewards=weight * np.nan_to_num(raw) + other, valid=valid)
    return dataclasses.replace(batch, parts={name: raw})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param({"normalize": True}, [-1, 1, -1, 1], id="mean 2, deviation 1"),
        pytest.param({"normalize": True, "weight": -0.5}, [0.5, -0.5, 0.5, -0.5], id="weighted afterwards"),
        pytest.param({"normalize": True, "clip": 0.75}, [-0.75, 0.75, -0.75, 0.75], id="clipped in deviations"),
        pytest.param({"clip": 2.5}, [1, 2.5, 1, 2.5], id="clipped in its own unit"),
        pytest.param({}, [1, 3, 1, 3], id="as it is"),
    ],
)
def test_a_score_is_normalised_then_clipped_then_weighted_and_what_else_there_is_stays(options, expected):
    reward = RewardConfig(name="rm", **options)
    batch = scored([1, 3, 1, 3], weight=reward.weight, other=10.0)
    changed, moments = rescaled(batch, [reward], {})
    np.testing.assert_allclose(changed.rewards, np.asarray(expected) + 10.0, atol=1e-12)
    assert moments == ({"rm": Moments(4, 2.0, 4.0)} if reward.normalize else {})
    np.testing.assert_array_equal(batch.parts["rm"], [1, 3, 1, 3])


def test_the_statistics_are_those_of_all_valid_samples_of_all_steps():
    rng, reward = np.random.default_rng(0), RewardConfig(name="rm", normalize=True)
    moments, seen = {}, []
    for step in range(20):
        scores = rng.normal(1e3 + step, 5, size=4)
        valid = rng.random(4) < 0.7
        changed, moments = rescaled(scored(scores, valid=valid), [reward], moments)
        seen += list(scores[valid])
        deviation = max(np.std(seen), 1e-4) if seen else 1e-4
        if seen:
            np.testing.assert_allclose(changed.rewards, (scores - np.mean(seen)) / deviation, rtol=1e-9, atol=1e-9)
    assert (moments["rm"].samples, moments["rm"].mean) == (len(seen), pytest.approx(np.mean(seen), rel=1e-12))


def test_equal_scores_become_zero():
    changed, _ = rescaled(scored([7, 7, 7, 7]), [RewardConfig(name="rm", normalize=True)], {})
    np.testing.assert_array_equal(changed.rewards, np.zeros(4))


def test_a_sample_without_the_score_keeps_its_reward_and_is_not_counted():
    changed, moments = rescaled(scored([1, 3, NAN, NAN], other=0.5), [RewardConfig(name="rm", normalize=True)], {})
    np.testing.assert_allclose(changed.rewards, [-0.5, 1.5, 0.5, 0.5])
    assert moments["rm"].samples == 2


def test_a_greedy_completion_is_put_on_the_scale_and_is_not_counted():
    batch = dataclasses.replace(
        scored([1, 3, 1, 3]), baselines=np.array([5.0, 5, 2, 2]), baseline_parts={"rm": np.array([5.0, 5, 2, 2])}
    )
    changed, moments = rescaled(batch, [RewardConfig(name="rm", normalize=True)], {})
    np.testing.assert_allclose(changed.baselines, [3, 3, 0, 0])
    assert moments["rm"].samples == 4


# In the learner


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return policies.save_model("llama", tmp_path_factory.mktemp("model") / "llama")


def learner_of(folder) -> Learner:
    config = policies.run_config(folder, lora=policies.LORA)
    algorithm = config.algorithm.model_copy(update={"type": "reinforce++", "parameters": {"dual_clip": 0, "gamma": 1}})
    rewards = [RewardConfig(name="rm", normalize=True)]
    return Learner(config.model_copy(update={"algorithm": algorithm, "rewards": rewards}), torch.device("cpu"))


def test_a_resumed_learner_goes_on_with_the_statistics_to_the_last_bit(folder):
    first, second = scored([0.1, 0.7, 0.2, 0.3]), scored([5, 1, 2, 9])
    learner = learner_of(folder)
    learner.update(first, 1, lambda: False)
    resumed = learner_of(folder)
    resumed.restore(json.loads(json.dumps(learner.state())))
    row, again = (each.update(second, 2, lambda: False) for each in (learner, resumed))
    assert resumed.moments == learner.moments and learner.moments["rm"].samples == 8
    assert row["reward/rm/running_mean"] == again["reward/rm/running_mean"] == pytest.approx(18.3 / 8)
    assert row["reward/mean"] == 17 / 4, "logged as it was scored"
    assert row["advantage/std"] == again["advantage/std"]


def test_an_interrupted_step_leaves_no_trace_in_the_statistics(folder):
    learner = learner_of(folder)
    with pytest.raises(Interrupted):
        learner.update(scored([1, 3, 1, 3]), 1, lambda: True)
    assert learner.moments == {}
