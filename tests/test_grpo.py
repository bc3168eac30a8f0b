"""pipeline.algorithms.grpo: advantages, with pinned numbers and against the statistics module."""

import statistics

import numpy as np
import pytest

from pipeline.algorithms import grpo
from pipeline.algorithms.registry import ALGORITHMS
from pipeline.algorithms.samples import Samples
from pipeline.config import AlgorithmConfig

NAN = float("nan")


def advantages(rewards, valid=None, groups=None):
    rewards = np.asarray(rewards, np.float64)
    valid = np.ones(len(rewards), bool) if valid is None else np.asarray(valid, bool)
    groups = np.zeros(len(rewards), int) if groups is None else np.asarray(groups)
    samples = Samples(rewards, valid, groups, lengths=np.ones(len(rewards), int))
    return grpo.advantages(samples, AlgorithmConfig(type="grpo", total_steps=1, prompts_per_step=1, group_size=2))


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 0, 0, 0], [1.4997, -0.4999, -0.4999, -0.4999]),
        ([1, 1, 1, 0, 0, 0, 0, 0], [1.2074] * 3 + [-0.7244] * 5),  # 1.2076 and -0.7246 but for the 1e-4
    ],
)
def test_rewards_are_divided_by_the_sample_standard_deviation(rewards, expected):
    # .00006: the last digit of each pinned number
    np.testing.assert_allclose(advantages(rewards), expected, atol=6e-5)


def test_an_unscorable_sample_is_left_out_of_its_group():
    result = advantages([1, NAN, 0, 1], valid=[1, 0, 1, 1])
    np.testing.assert_allclose(result, [0.5773, 0, -1.1545, 0.5773], atol=6e-5)


def test_an_invalid_sample_has_no_influence_even_with_a_score():
    assert advantages([1, 100, 0, 1], valid=[1, 0, 1, 1]).tolist() == advantages([1, NAN, 0, 1], [1, 0, 1, 1]).tolist()


@pytest.mark.parametrize(
    ("rewards", "valid"),
    [
        ([0.7], [1]),
        ([0.7, NAN], [1, 0]),
        ([NAN, NAN], [0, 0]),
        ([0.1] * 8, [1] * 8),
        ([0.5, 0.5 + 1e-7], [1, 1]),
    ],
)
def test_a_group_that_cannot_be_compared_has_advantage_zero(rewards, valid):
    assert advantages(rewards, valid).tolist() == [0.0] * len(rewards)


def test_a_large_common_offset_does_not_make_spread():
    assert advantages([1e6] * 4).tolist() == [0.0] * 4


def test_each_group_is_compared_within_itself_wherever_its_samples_lie():
    rng = np.random.default_rng(0)
    groups = rng.permutation(np.repeat([4, 11, 2], 5))
    rewards, valid = rng.normal(size=15), rng.random(15) < 0.8
    result = advantages(rewards, valid, groups)
    for sample in range(15):
        peers = [rewards[other] for other in range(15) if groups[other] == groups[sample] and valid[other]]
        expected = 0.0
        if valid[sample] and len(peers) >= 2:
            expected = (rewards[sample] - statistics.mean(peers)) / (statistics.stdev(peers) + 1e-4)
        assert result[sample] == pytest.approx(expected, abs=1e-12)


def test_the_registry_names_this_module():
    assert ALGORITHMS["grpo"].module == grpo.__name__
    assert callable(grpo.loss)
