"""pipeline.algorithms: losses, aggregation, correction and KL, against numpy float64 and finite differences."""

import itertools

import numpy as np
import pytest
import torch

from pipeline.algorithms import cispo, gspo, kl
from pipeline.algorithms.aggregation import token_weights
from pipeline.algorithms.correction import correct
from pipeline.algorithms.losses import Tokens, clipped_loss, clipped_surrogate, summary
from pipeline.algorithms.ratios import log_ratio, sequence_means
from pipeline.config import AlgorithmConfig, CorrectionConfig

NO_CORRECTION = CorrectionConfig(type="none")
LOSSES = {"clipped": clipped_loss, "gspo": gspo.loss, "cispo": cispo.loss}
AGGREGATIONS = {"token-mean": 0.4, "seq-mean-token-mean": 0.625, "seq-mean-token-sum": 2.0, "constant": 0.2}


def configured(**changes) -> AlgorithmConfig:
    return AlgorithmConfig(type="grpo", total_steps=1, prompts_per_step=1, group_size=2, **changes)


def tensor(values, **options):
    return torch.tensor(np.asarray(values, np.float64), **options)


def token_batch(count, *, seed=0, **changes) -> dict:
    rng = np.random.default_rng(seed)
    logprobs = -rng.exponential(2.0, count)
    rows = np.sort(rng.integers(0, max(1, count // 4), count))
    return {
        "logprobs": logprobs,
        "old": logprobs + rng.normal(0, 0.3, count),
        "sampled": logprobs + rng.normal(0, 0.8, count),
        "reference": logprobs + rng.normal(0, 0.5, count),
        "advantages": rng.normal(size=count),
        "weights": np.full(count, 1.0 / count),
        "entropy": rng.exponential(1.0, count),
        "mask": np.ones(count, bool),
        "rows": rows,
        **changes,
    }


def tokens_of(batch) -> Tokens:
    others = {name: tensor(batch[name]) for name in ("weights", "advantages", "sampled", "old", "reference")}
    return Tokens(mask=torch.tensor(batch["mask"]), rows=torch.tensor(batch["rows"]), **others)


def evaluate(batch, config, loss_of=clipped_loss):
    """(loss, gradient, summary) of a batch of tokens given as float64 arrays."""
    logprobs = tensor(batch["logprobs"], requires_grad=True)
    loss, logged = loss_of(logprobs, tensor(batch["entropy"]), tokens_of(batch), config)
    loss.backward()
    numbers = summary({k: float(v) for k, v in logged.sums.items()}, {k: float(v) for k, v in logged.maxima.items()})
    return loss.item(), logprobs.grad.numpy(), numbers


def corrected(batch, config):
    """The weight of each token, one by one."""
    correction, weights = config.correction, []
    for token, row in enumerate(batch["rows"]):
        ratio = np.exp(batch["old"][token] - batch["sampled"][token])
        weight = {
            "none": 1.0,
            "token-tis": min(ratio, correction.cap),
            "masked-is": ratio if correction.low <= ratio <= correction.high else 0.0,
        }[correction.type]
        own = [i for i in range(len(batch["rows"])) if batch["rows"][i] == row and batch["mask"][i]]
        drifts = [batch["old"][i] - batch["sampled"][i] for i in own]
        if correction.sequence_low is not None:
            inside = correction.sequence_low <= np.exp(np.mean(drifts)) <= correction.sequence_high
            weight *= inside
        if min(drifts, default=0.0) < np.log(max(correction.veto, 1e-300)):
            weight = 0.0
        weights.append(weight)
    return weights


def by_hand(batch, config, name="clipped", old_objective=None):
    """The same loss, token by token; `old_objective`: detached ratios (CISPO differentiates log π only)."""
    if config.correction.bypass:
        batch = {**batch, "old": batch["sampled"]}
    weights, total = corrected(batch, config), 0.0
    for token in np.flatnonzero(batch["mask"]):
        p, old, ref = (batch[key][token] for key in ("logprobs", "old", "reference"))
        advantage = batch["advantages"][token]
        change = p - old
        if name == "gspo":
            own = [i for i in np.flatnonzero(batch["mask"]) if batch["rows"][i] == batch["rows"][token]]
            change = np.mean([batch["logprobs"][i] - batch["old"][i] for i in own])
        ratio = np.exp(change)
        clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
        loss = -min(ratio * advantage, clipped * advantage)
        if name == "cispo":
            ratio = np.exp((batch["logprobs"] if old_objective is None else old_objective)[token] - old)
            loss = -min(max(ratio, 1 - config.clip_low), 1 + config.clip_high) * advantage * p
        distance = {"k2": (p - ref) ** 2 / 2, "k3": np.exp(ref - p) - 1 + p - ref}[config.kl_estimator]
        loss = weights[token] * loss + config.kl_coefficient * distance
        total += batch["weights"][token] * (loss - config.entropy_coefficient * batch["entropy"][token])
    return total


# Aggregation


@pytest.mark.parametrize(("aggregation", "expected"), AGGREGATIONS.items())
@pytest.mark.parametrize("parts", [[slice(0, 10)], [slice(0, 2), slice(2, 10)], [slice(0, 5), slice(5, 10)]])
def test_the_loss_does_not_depend_on_micro_batches(aggregation, expected, parts):
    # Token losses 1.0 twice and 0.25 eight times; with ratio 1 the loss of a token is −advantage.
    weights = token_weights(aggregation, np.array([2, 8]), max_length=10)
    losses, weights = np.repeat([1.0, 0.25], [2, 8]), np.repeat(weights, [2, 8])
    total = 0.0
    for part in parts:
        batch = token_batch(10, advantages=-losses, weights=weights)
        batch["old"] = batch["sampled"] = batch["logprobs"]
        total += evaluate({name: values[part] for name, values in batch.items()}, configured())[0]
    assert total == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_sample_without_tokens_has_no_weight_and_no_share_in_a_denominator(aggregation):
    with_empty = token_weights(aggregation, np.array([2, 0, 8, 0]), max_length=10)
    assert with_empty[[1, 3]].tolist() == [0, 0]
    np.testing.assert_array_equal(with_empty[[0, 2]], token_weights(aggregation, np.array([2, 8]), max_length=10))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_batch_without_tokens_has_weights_of_zero(aggregation):
    assert token_weights(aggregation, np.array([0, 0]), max_length=10).tolist() == [0, 0]


# The response mask, and what lies outside it


@pytest.mark.parametrize("rubbish", [np.nan, np.inf, -np.inf])
def test_tokens_outside_the_response_mask_change_neither_loss_nor_gradient(rubbish):
    config = configured(kl_coefficient=0.1)
    inside = token_batch(4)
    loss, gradient, numbers = evaluate(inside, config)
    padded = {name: np.append(values, [rubbish] * 12) for name, values in inside.items()}
    padded["mask"] = np.arange(16) < 4
    padded_loss, padded_gradient, padded_numbers = evaluate(padded, config)
    assert padded_loss == pytest.approx(loss, rel=1e-12)
    assert padded_gradient.tolist() == [*gradient, *[0.0] * 12]
    assert padded_numbers == pytest.approx(numbers)


def test_four_tokens_of_loss_one_and_twelve_outside_give_one():
    weights = np.repeat(token_weights("token-mean", np.array([4]), max_length=16), 16)
    batch = token_batch(16, advantages=np.full(16, -1.0), weights=weights, mask=np.arange(16) < 4)
    batch["old"] = batch["sampled"] = batch["logprobs"]
    assert evaluate(batch, configured())[0] == pytest.approx(1.0)


def test_a_batch_that_is_all_masked_gives_zero_and_a_gradient_of_zero():
    nothing = token_batch(3, logprobs=np.full(3, np.nan), mask=np.zeros(3, bool))
    loss, gradient, numbers = evaluate(nothing, configured(kl_coefficient=0.1))
    assert (loss, gradient.tolist()) == (0.0, [0.0] * 3)
    assert all(np.isfinite(value) for value in numbers.values())


def test_a_token_of_correction_weight_zero_stays_in_the_denominator():
    batch = token_batch(4, advantages=np.full(4, -1.0), weights=np.full(4, 0.25))
    batch["old"] = batch["logprobs"]
    batch["sampled"] = batch["old"] + [0, 0, 0, 1000]  # π_old/μ = e^-20
    assert evaluate(batch, configured())[0] == pytest.approx(0.75)


# The loss


@pytest.mark.parametrize(
    "changes",
    [
        {"correction": NO_CORRECTION},
        {"clip_high": 0.28},
        {"correction": CorrectionConfig(cap=1.2), "kl_coefficient": 0.05},
        {"kl_coefficient": 0.5, "kl_estimator": "k2", "entropy_coefficient": 0.1},
        {"correction": CorrectionConfig(type="masked-is", low=0.6, high=1.5)},
        {"correction": CorrectionConfig(sequence_low=0.8, sequence_high=1.2, veto=0.2)},
        {"correction": CorrectionConfig(bypass=True)},
    ],
    ids=["uncorrected", "clip-higher", "tis and k3", "k2 and entropy", "masked", "sequences", "bypass"],
)
@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_equal_the_formula_and_its_finite_differences(name, changes):
    narrow = {"clip_low": 0.1, "clip_high": 0.1} if name == "gspo" else {}  # a mean varies less than a token
    config, batch = configured(**(changes | narrow)), token_batch(40)
    loss, gradient, numbers = evaluate(batch, config, LOSSES[name])
    assert loss == pytest.approx(by_hand(batch, config, name), rel=1e-12)
    assert 0 < numbers["actor/clip_frac_high"] < numbers["actor/clip_frac"] < 1, (
        "the example must reach both sides of the clip"
    )
    for token in range(40):
        step = np.zeros(40)
        step[token] = 1e-6
        ahead, behind = (
            by_hand({**batch, "logprobs": batch["logprobs"] + change}, config, name, batch["logprobs"])
            for change in (step, -step)
        )
        assert gradient[token] == pytest.approx((ahead - behind) / 2e-6, abs=1e-8)


def test_the_clip_acts_on_the_recomputed_policy_and_the_weight_on_the_sampler():
    # Behaviour .2, recomputed old .4, now .44: against behaviour the ratio 2.2 is clipped and the gradient is 0.
    batch = token_batch(1, advantages=[1.0], weights=[1.0], logprobs=np.log([0.44]))
    batch |= {"old": np.log([0.4]), "sampled": np.log([0.2])}
    loss, gradient, _ = evaluate(batch, configured(correction=CorrectionConfig(cap=5.0)))
    assert loss == pytest.approx(-2 * 1.1)
    assert gradient[0] == pytest.approx(-2 * 1.1)  # d ratio / d log p = ratio
    assert evaluate(batch, configured(correction=CorrectionConfig(cap=1.5)))[0] == pytest.approx(-1.5 * 1.1)
    naive_loss, naive_gradient, _ = evaluate({**batch, "old": batch["sampled"]}, configured(correction=NO_CORRECTION))
    assert (naive_loss, naive_gradient[0]) == (pytest.approx(-1.2), 0.0)


def test_without_old_logprobs_the_ratio_is_one_and_carries_the_gradient():
    logprobs = tensor([-1.0, -2.0], requires_grad=True)
    tokens = Tokens(
        torch.ones(2, dtype=torch.bool), torch.arange(2), tensor([0.5, 0.5]), tensor([1.0, -3.0]), tensor([-1.0, -2.0])
    )
    loss, _ = clipped_loss(logprobs, torch.zeros(2), tokens, configured())
    loss.backward()
    assert (loss.item(), logprobs.grad.tolist()) == (1.0, [-0.5, 1.5])


def test_dual_clip_bounds_the_loss_of_bad_samples_only():
    ratio, advantages = tensor([10.0, 10.0, 2.0]), tensor([-1.0, 1.0, -1.0])
    assert clipped_surrogate(ratio, advantages, 0.2, 0.2).tolist() == pytest.approx([10.0, -1.2, 2.0])
    assert clipped_surrogate(ratio, advantages, 0.2, 0.2, dual_clip=3.0).tolist() == pytest.approx([3.0, -1.2, 2.0])
    batch = token_batch(1, advantages=[-1.0], weights=[1.0], logprobs=[np.log(0.9)])
    batch |= {"old": np.log([0.09]), "sampled": np.log([0.09])}
    assert evaluate(batch, configured(parameters={"dual_clip": 3.0}))[0] == pytest.approx(3.0)


# Off-policy correction

RATIOS = [2.0, 0.6, 9.0, 1e-5]
"""Of four tokens, two samples of two."""


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (CorrectionConfig(type="none"), [1, 1, 1, 1]),
        (CorrectionConfig(cap=3.0), [2, 0.6, 3, 1e-5]),
        (CorrectionConfig(type="masked-is"), [2, 0.6, 0, 0]),
        (CorrectionConfig(type="none", sequence_low=0.5, sequence_high=5.0), [1, 1, 0, 0]),  # √1.2 and √9e-5
        (CorrectionConfig(cap=3.0, veto=1e-4), [2, 0.6, 0, 0]),
        (CorrectionConfig(type="masked-is", low=0.5, high=5.0, veto=1e-6), [2, 0.6, 0, 0]),
    ],
)
def test_weights_and_rejections_of_the_old_policy_over_the_sampler(correction, expected):
    old = tensor(np.log(RATIOS) - 1, requires_grad=True)
    everything = torch.ones(4, dtype=torch.bool)
    applied = correct(correction, log_ratio(old, tensor([-1.0] * 4)), torch.tensor([5, 5, 3, 3]), everything)
    assert applied.weights.tolist() == pytest.approx(expected)
    assert applied.rejected.tolist() == [weight == 0 for weight in expected]
    assert not applied.weights.requires_grad


def test_tokens_outside_the_response_mask_reject_no_sample():
    mask = torch.tensor([True, True, False])
    drift = tensor([0.0, 0.0, -20.0])
    strict = CorrectionConfig(sequence_low=0.9, sequence_high=1.1, veto=1e-4)
    assert not correct(strict, drift, torch.tensor([1, 1, 1]), mask).rejected[mask].any()


def test_a_rejected_token_stays_in_every_denominator_and_is_counted():
    batch = token_batch(4, advantages=np.full(4, -1.0), weights=np.full(4, 0.25))
    batch["old"] = batch["logprobs"]
    batch["sampled"] = batch["old"] - np.log([1.0, 1.0, 1.0, 100.0])
    loss, gradient, numbers = evaluate(batch, configured(correction=CorrectionConfig(type="masked-is")))
    assert (loss, gradient.tolist()) == (pytest.approx(0.75), [0.25, 0.25, 0.25, 0.0])
    assert numbers["mismatch/masked_frac"] == 0.25


def test_bypass_clips_against_the_sampler_and_still_reports_the_mismatch():
    batch = token_batch(1, advantages=[1.0], weights=[1.0], logprobs=np.log([0.44]))
    batch |= {"old": np.log([0.4]), "sampled": np.log([0.2])}
    loss, gradient, numbers = evaluate(batch, configured(correction=CorrectionConfig(bypass=True)))
    assert (loss, gradient[0]) == (pytest.approx(-1.2), 0.0)
    assert numbers["mismatch/is_mean"] == 1.0
    assert numbers["mismatch/is_max"] == pytest.approx(2.0)


# Other objectives


def test_the_mean_of_a_sequence_is_that_of_its_tokens_wherever_they_lie():
    values, rows = tensor([1.0, 5.0, 3.0, 7.0]), torch.tensor([7, 2, 7, 2])
    assert sequence_means(values, rows, torch.tensor([True, True, True, False])).tolist() == [2, 5, 2, 5]


def test_gspo_clips_a_sample_as_a_whole_by_the_geometric_mean_of_its_ratios():
    batch = token_batch(2, advantages=[1.0, 1.0], weights=[0.5, 0.5], logprobs=np.zeros(2), rows=np.zeros(2, int))
    batch |= {"old": np.log([0.5, 2.2]), "sampled": np.log([0.5, 2.2])}  # ratios 2 and 1/2.2, geometric mean .953
    ratio = np.sqrt(2 / 2.2)
    loss, gradient, _ = evaluate(batch, configured(), gspo.loss)
    assert (loss, gradient.tolist()) == (pytest.approx(-ratio), pytest.approx([-ratio / 2] * 2))
    loss, gradient, numbers = evaluate(batch, configured(clip_high=-0.06), gspo.loss)
    assert (loss, gradient.tolist()) == (pytest.approx(-0.94), [0.0, 0.0])
    assert numbers["actor/clip_frac_high"] == 1.0


def test_cispo_clips_the_weight_and_keeps_the_gradient_of_every_token():
    batch = token_batch(3, advantages=[1.0, 1.0, -1.0], weights=np.full(3, 1.0), logprobs=np.log([0.9, 0.5, 0.1]))
    batch |= {"old": np.log([0.09, 0.5, 0.4]), "sampled": np.log([0.09, 0.5, 0.4])}  # ratios 10, 1, .25
    _, gradient, numbers = evaluate(batch, configured(clip_low=1.0, clip_high=4.0), cispo.loss)
    assert gradient.tolist() == pytest.approx([-5.0, -1.0, 0.25])
    assert numbers["actor/clip_frac"] == pytest.approx(1 / 3)


def test_the_entropy_bonus_is_taken_from_the_loss_and_has_a_gradient():
    entropy = tensor([0.5, 2.0], requires_grad=True)
    batch = token_batch(2, weights=np.array([0.25, 0.75]))
    logprobs = tensor(batch["logprobs"])
    plain, _ = clipped_loss(logprobs, entropy, tokens_of(batch), configured())
    with_bonus, logged = clipped_loss(logprobs, entropy, tokens_of(batch), configured(entropy_coefficient=0.1))
    assert (with_bonus - plain).item() == pytest.approx(-0.1 * (0.25 * 0.5 + 0.75 * 2.0))
    with_bonus.backward()
    assert entropy.grad.tolist() == pytest.approx([-0.025, -0.075])
    assert float(logged.sums["loss/entropy"]) == pytest.approx(2.5)


# KL


def test_k3_far_from_the_reference_has_a_finite_value_and_gradient():
    logprobs = torch.tensor([-100.0], requires_grad=True)
    divergence = kl.estimate("k3", logprobs, torch.tensor([-1.0]))
    divergence.sum().backward()
    assert torch.isfinite(divergence).all()
    assert torch.isfinite(logprobs.grad).all()
    batch = token_batch(2, logprobs=np.array([-100.0, -1.0]), reference=np.array([-1.0, -100.0]))
    loss, gradient, _ = evaluate(batch, configured(kl_coefficient=1.0))
    assert np.isfinite([loss, *gradient]).all()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators_are_zero_at_the_reference_and_right_on_average(estimator):
    policy, reference = np.array([0.5, 0.3, 0.2]), np.array([0.45, 0.33, 0.22])
    values = kl.estimate(estimator, tensor(np.log(policy)), tensor(np.log(reference))).numpy()
    exact = (policy * np.log(policy / reference)).sum()
    assert policy @ values == pytest.approx(exact, rel=1e-9 if estimator != "k2" else 0.05)
    assert kl.estimate(estimator, tensor([-2.0]), tensor([-2.0])).item() == 0.0


def test_a_penalty_in_the_reward_adds_nothing_to_the_loss_and_is_logged():
    batch = token_batch(8)
    penalised = configured(kl_coefficient=9.0, kl_placement="reward", kl_estimator="k1")
    loss, _, numbers = evaluate(batch, penalised)
    assert loss == evaluate(batch, configured())[0]
    assert numbers["actor/reference_kl"] == pytest.approx(np.mean(batch["logprobs"] - batch["reference"]))


@pytest.mark.parametrize(
    ("divergence", "expected"), [(0.1, 0.5), (0.11, 0.5 * 1.01), (0.5, 0.5 * 1.02), (0.0, 0.5 * 0.98)]
)
def test_the_coefficient_follows_the_target_by_a_bounded_relative_error(divergence, expected):
    assert kl.adapted(0.5, divergence, target=0.1, samples=64, horizon=640) == pytest.approx(expected)


# What is logged


def test_logged_numbers_are_means_over_all_tokens_however_they_were_split():
    config, batch = configured(kl_coefficient=0.1), token_batch(30)
    _, _, whole = evaluate(batch, config)
    ratio, raw = np.exp(batch["logprobs"] - batch["old"]), np.exp(batch["old"] - batch["sampled"])
    weights = np.minimum(raw, 2.0)
    high = (ratio > 1.2) & (batch["advantages"] > 0)
    expected = {
        "actor/ppo_kl": np.mean(batch["old"] - batch["logprobs"]),
        "actor/clip_frac_high": np.mean(high),
        "actor/clip_frac": np.mean(high | ((ratio < 0.8) & (batch["advantages"] < 0))),
        "mismatch/logprob_abs_diff": np.mean(np.abs(batch["sampled"] - batch["old"])),
        "mismatch/kl": np.mean(raw - 1 - np.log(raw)),
        "mismatch/is_mean": np.mean(weights),
        "mismatch/is_max": raw.max(),
        "mismatch/ess": weights.sum() ** 2 / (30 * (weights**2).sum()),
        "mismatch/tis_clip_frac": np.mean(raw > 2.0),
    }
    assert {name: whole[name] for name in expected} == pytest.approx(expected)

    sums: dict[str, float] = {}
    maxima: dict[str, float] = {}
    for start, stop in itertools.pairwise([0, 7, 8, 30]):
        part = {name: values[start:stop] for name, values in batch.items()}
        _, logged = clipped_loss(tensor(part["logprobs"]), tensor(part["entropy"]), tokens_of(part), config)
        for name, value in logged.sums.items():
            sums[name] = sums.get(name, 0.0) + float(value)
        for name, value in logged.maxima.items():
            maxima[name] = max(maxima.get(name, 0.0), float(value))
    assert summary(sums, maxima) == pytest.approx(whole)
