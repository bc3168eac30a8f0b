"""pipeline.algorithms: every estimator's advantages, by hand and against formulas written as loops, in float64."""

import importlib
import statistics

import numpy as np
import pytest

from pipeline.algorithms import dapo
from pipeline.algorithms.registry import ALGORITHMS
from pipeline.algorithms.samples import Samples, normalised
from pipeline.config import AlgorithmConfig, SamplingConfig

NAN = float("nan")
GROUPED = [name for name, entry in ALGORITHMS.items() if entry.minimum_group_size == 2]


def config_of(name, **parameters) -> AlgorithmConfig:
    return AlgorithmConfig(
        type=name,
        total_steps=1,
        prompts_per_step=1,
        group_size=2,
        sampling=SamplingConfig(max_new_tokens=10),
        parameters=ALGORITHMS[name].parameters | parameters,
    )


def advantages(name, samples, **parameters):
    module = importlib.import_module(ALGORITHMS[name].module)
    return module.advantages(samples, config_of(name, **parameters))


def samples_of(rewards, *, valid=None, groups=None, lengths=None, **others) -> Samples:
    count = len(rewards)
    return Samples(
        rewards=np.asarray(rewards, np.float64),
        valid=np.ones(count, bool) if valid is None else np.asarray(valid, bool),
        groups=np.zeros(count, int) if groups is None else np.asarray(groups),
        lengths=np.ones(count, int) if lengths is None else np.asarray(lengths),
        **{name: np.asarray(values, np.float64) for name, values in others.items()},
    )


def random_samples(seed=0, count=24) -> Samples:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, count)
    valid = rng.random(count) < 0.8
    return samples_of(
        np.where(valid, rng.normal(size=count), NAN),
        valid=valid,
        groups=rng.permutation(np.repeat([4, 11, 2, 7], count // 4)),
        lengths=lengths,
        penalties=rng.normal(0, 0.1, lengths.sum()),
        baselines=rng.normal(size=count),
        values=rng.normal(size=lengths.sum()),
    )


def tokens(samples, values):
    return np.concatenate([np.full(length, value) for length, value in zip(samples.lengths, values, strict=True)])


# By hand


@pytest.mark.parametrize(
    ("name", "rewards", "expected"),
    [
        ("grpo", [1, 0, 0, 0], [1.4997, -0.4999, -0.4999, -0.4999]),
        ("dr-grpo", [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
        ("rloo", [1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]),
        ("rloo", [1, 1, 1, 0, 0, 0, 0, 0], [0.714286] * 3 + [-0.428571] * 5),
        ("reinforce++", [1, 0], [1, -1]),
        ("reinforce++-baseline", [1, 0, 0, 0], [1.7320508, -0.5773503, -0.5773503, -0.5773503]),
        ("gspo", [1, 0, 0, 0], [1.4997, -0.4999, -0.4999, -0.4999]),
        ("cispo", [1, 0, 0, 0], [1.4997, -0.4999, -0.4999, -0.4999]),
        ("dapo", [1, 0, 0, 0], [1.4997, -0.4999, -0.4999, -0.4999]),
    ],
)
def test_advantages_of_single_tokens(name, rewards, expected):
    np.testing.assert_allclose(advantages(name, samples_of(rewards)), expected, atol=6e-5)


def test_remax_compares_with_the_greedy_completion_of_the_same_prompt():
    samples = samples_of([1, 0.25, 3], groups=[0, 0, 1], lengths=[2, 1, 1], baselines=[0.5, 0.5, 1])
    assert advantages("remax", samples).tolist() == [0.5, 0.5, -0.25, 2]
    unknown = samples_of([1, 3], groups=[0, 1], baselines=[NAN, 1])
    assert advantages("remax", unknown).tolist() == [0, 2]


def test_reinforce_returns_are_discounted_within_a_sample_and_normalised_over_all_tokens():
    samples = samples_of([1, 2], lengths=[2, 1], penalties=[0.5, 0, 0])
    returns = np.array([-0.5 + 0.5 * 1, 1, 2])
    expected = (returns - returns.mean()) / returns.std()
    np.testing.assert_allclose(advantages("reinforce++", samples, gamma=0.5), expected, rtol=1e-12)


def test_a_penalty_counts_in_the_return_of_its_own_token_and_earlier_ones_only():
    samples = samples_of([1], lengths=[3], penalties=[0, 0.25, 0])
    assert samples.discounted(samples.token_rewards, 1.0).tolist() == [0.75, 0.75, 1]


@pytest.mark.parametrize("name", ["grpo", "rloo", "remax"])
def test_an_estimator_of_whole_samples_takes_the_sum_of_their_penalties_from_the_reward(name):
    penalised = samples_of([1, 0], lengths=[2, 1], penalties=[0.25, 0.5, 0.125], baselines=[0, 0])
    plain = samples_of([0.25, -0.125], lengths=[2, 1], baselines=[0, 0])
    np.testing.assert_allclose(advantages(name, penalised), advantages(name, plain), rtol=1e-12)


def test_overlong_completions_are_punished_linearly_within_the_buffer():
    lengths = np.array([1, 8, 9, 10])
    assert dapo.overlong(lengths, longest=10, buffer=2.0).tolist() == [0, 0, -0.5, -1]
    assert dapo.overlong(lengths, longest=10, buffer=0.0).tolist() == [0] * 4
    shaped = advantages("dapo", samples_of([1, 1, 1, 0], lengths=lengths), overlong_penalty=0.5)
    expected = advantages("grpo", samples_of([1, 1, 0.75, -0.5], lengths=lengths))
    np.testing.assert_allclose(shaped, expected, rtol=1e-12)


# Against loops


def peers(samples, sample):
    same = [i for i in range(len(samples.rewards)) if samples.groups[i] == samples.groups[sample] and samples.valid[i]]
    return [score(samples, i) for i in same]


def score(samples, sample):
    start = int(samples.lengths[:sample].sum())
    return samples.rewards[sample] - samples.penalties[start : start + samples.lengths[sample]].sum()


def by_group(samples, estimate):
    values = []
    for sample in range(len(samples.rewards)):
        others = peers(samples, sample)
        comparable = samples.valid[sample] and len(others) >= 2
        values.append(estimate(score(samples, sample), others) if comparable else 0.0)
    return tokens(samples, values)


def over_the_batch(samples, values):
    inside = [value for value, valid in zip(values, tokens(samples, samples.valid), strict=True) if valid]
    mean, deviation = statistics.fmean(inside), statistics.pstdev(inside)
    return np.where(tokens(samples, samples.valid), (values - mean) / deviation, 0)


def reinforce(samples, gamma=0.9):
    returns, start = np.zeros(samples.lengths.sum()), 0
    for sample, length in enumerate(samples.lengths):
        for t in range(length):
            later = [-samples.penalties[start + u] for u in range(t, length)]
            later[-1] += samples.rewards[sample]
            returns[start + t] = sum(gamma**k * reward for k, reward in enumerate(later))
        start += length
    return over_the_batch(samples, returns)


FORMULAS = {
    "grpo": lambda s: by_group(s, lambda r, peers: (r - statistics.fmean(peers)) / (statistics.stdev(peers) + 1e-4)),
    "dr-grpo": lambda s: by_group(s, lambda r, peers: r - statistics.fmean(peers)),
    "rloo": lambda s: by_group(s, lambda r, peers: r - (sum(peers) - r) / (len(peers) - 1)),
    "reinforce++-baseline": lambda s: over_the_batch(s, by_group(s, lambda r, peers: r - statistics.fmean(peers))),
    "reinforce++": reinforce,
    "remax": lambda s: tokens(s, [score(s, i) - s.baselines[i] if s.valid[i] else 0.0 for i in range(len(s.rewards))]),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", FORMULAS)
def test_advantages_equal_the_formula(name, seed):
    samples = random_samples(seed)
    parameters = {"gamma": 0.9} if name == "reinforce++" else {}
    np.testing.assert_allclose(advantages(name, samples, **parameters), FORMULAS[name](samples), rtol=1e-9, atol=1e-9)


# What all must do


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_invalid_sample_has_advantage_zero_and_no_influence(name):
    samples = random_samples()
    changed = random_samples()
    changed.rewards[~changed.valid] = 1e9
    result = advantages(name, samples)
    assert np.isfinite(result).all()
    assert not result[~samples.mask].any()
    assert result[samples.mask].any()
    assert result.tolist() == advantages(name, changed).tolist()


@pytest.mark.parametrize(
    ("rewards", "valid"), [([0.7], [1]), ([0.7, NAN], [1, 0]), ([0.1] * 8, [1] * 8), ([NAN, NAN], [0, 0])]
)
@pytest.mark.parametrize("name", GROUPED)
def test_a_group_that_cannot_be_compared_has_advantage_zero_beside_one_that_can(name, rewards, valid):
    count = len(rewards)
    samples = samples_of([*rewards, 1, 0], valid=[*valid, 1, 1], groups=[0] * count + [1, 1])
    result = advantages(name, samples)
    assert result[:count].tolist() == [0] * count
    assert result[count] > 0 > result[count + 1]


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in GROUPED])
def test_an_algorithm_without_groups_works_with_one_sample_a_prompt(name):
    samples = samples_of([1, 0, 0], groups=[0, 1, 2], baselines=[0.5, 0.5, 0], values=[0, 0, 0])
    first, second, _ = advantages(name, samples)
    assert first > 0 > second


def test_normalisation_of_equal_values_and_of_nothing_gives_zero():
    assert normalised(np.array([2.0, 2.0, NAN]), np.array([True, True, False])).tolist() == [0, 0, 0]
    assert normalised(np.array([2.0]), np.array([False])).tolist() == [0]
