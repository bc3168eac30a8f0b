"""Policy losses over R response tokens laid end to end, whichever samples, micro-batch or rank they belong to.

Every loss is a sum of weighted token losses (see `aggregation`), so that summing it over micro-batches and ranks gives
the batch's loss. What lies outside the response mask is replaced before any arithmetic: NaN times 0 is NaN, in the
value as in the gradient. No I/O, no collectives.
"""

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from pipeline.algorithms import correction, kl
from pipeline.algorithms.ratios import log_ratio
from pipeline.config import AlgorithmConfig


@dataclasses.dataclass(frozen=True)
class Tokens:
    """What a loss is told about its R tokens, all [R]. `old` and `reference` come from this trainer's own passes."""

    mask: Tensor  # bool: the response mask
    weights: Tensor  # share in the batch's loss, from aggregation.token_weights
    advantages: Tensor
    sampled: Tensor  # log μ, from the policy that sampled the token
    old: Tensor | None = None  # log π_old; None: the policy being trained has not been updated since, π_old = π_θ
    reference: Tensor | None = None  # log π_ref; needed where kl_coefficient > 0


@dataclasses.dataclass
class LossSums:
    """What is logged of a loss, as 0-dimensional tensors that add up over micro-batches and ranks."""

    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]
    """The same for quantities of which the largest counts."""


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> Tensor:
    """−min(ρA, clip(ρ, 1−clip_low, 1+clip_high)·A), same shape as `ratio` (arXiv:1707.06347).

    `dual_clip` c > 1 bounds it by −cA where A < 0 (arXiv:1912.09729); 0: unbounded.
    """
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip:
        objective = torch.where(advantages < 0, torch.maximum(objective, dual_clip * advantages), objective)
    return -objective


def clipped_loss(
    logprobs: Tensor,  # [R] log π_θ, with gradient
    entropy: Tensor,  # [R] in nats; logged, not trained
    tokens: Tokens,
    config: AlgorithmConfig,
) -> tuple[Tensor, LossSums]:
    """This part's share of the batch's loss, and of what is logged of it.

    Clipped on π_θ/π_old, weighted by the correction's π_old/μ, plus kl_coefficient × KL to the reference.
    """
    mask = tokens.mask
    logprobs = _inside(mask, logprobs)
    old = logprobs.detach() if tokens.old is None else _inside(mask, tokens.old)
    sampled, advantages = _inside(mask, tokens.sampled), _inside(mask, tokens.advantages)

    change = log_ratio(logprobs, old)
    correct = correction.importance_weights(config.correction, old, sampled, config.correction_cap)
    dual_clip = config.parameters.get("dual_clip", 0.0)
    surrogate = clipped_surrogate(torch.exp(change), advantages, config.clip_low, config.clip_high, dual_clip)
    policy = (_inside(mask, tokens.weights) * correct * surrogate).sum()
    clipped = _clipped(torch.exp(change.detach()), advantages, config)
    mismatch = _mismatch(log_ratio(old, sampled), correct, config.correction_cap)
    logged = _add_up(mask, {"loss/entropy": entropy.detach(), "actor/ppo_kl": -change.detach(), **clipped, **mismatch})
    logged.sums["loss/policy"] = policy.detach().double()
    if config.kl_coefficient == 0 or config.kl_placement == "reward":
        return policy, logged

    assert tokens.reference is not None, "kl_coefficient > 0 needs the reference's logprobs"
    divergence = kl.estimate(config.kl_estimator, logprobs, _inside(mask, tokens.reference))
    penalty = (_inside(mask, tokens.weights) * divergence).sum()
    logged.sums["loss/kl"] = penalty.detach().double()
    return policy + config.kl_coefficient * penalty, logged


def _inside(mask: Tensor, values: Tensor) -> Tensor:
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def _clipped(ratio: Tensor, advantages: Tensor, config: AlgorithmConfig) -> dict[str, Tensor]:
    high = (ratio > 1 + config.clip_high) & (advantages > 0)
    low = (ratio < 1 - config.clip_low) & (advantages < 0)
    return {"actor/clip_frac": high | low, "actor/clip_frac_high": high}


def _mismatch(drift: Tensor, correct: Tensor, cap: float) -> dict[str, Tensor]:
    """`drift` = log π_old − log μ, [R]."""
    raw = torch.exp(drift)
    return {
        "mismatch/logprob_abs_diff": drift.abs(),
        "mismatch/kl": raw - 1 - drift,
        "mismatch/is_mean": correct,
        "mismatch/is_square": correct.square(),
        "mismatch/is_max": raw,
        "mismatch/tis_clip_frac": raw > cap,
        "mismatch/masked_frac": correct == 0,
    }


def _add_up(mask: Tensor, per_token: dict[str, Tensor]) -> LossSums:
    values = {name: _inside(mask, value.double()) for name, value in {"tokens": mask, **per_token}.items()}
    maxima = {"mismatch/is_max": values.pop("mismatch/is_max").max()}
    return LossSums({name: value.sum() for name, value in values.items()}, maxima)


def summary(sums: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
    """The logged numbers of a whole batch, from sums and maxima over all of its parts and ranks.

    loss/policy and loss/kl are the batch's losses as aggregated; all others are means over the response tokens that
    took part in a pass, and left out where none did.
    mismatch/kl is the unbiased ρ − 1 − log ρ of KL(μ‖π_old); mismatch/ess is (Σw)²/(n·Σw²), 1 when all weights agree.
    """
    tokens = sums["tokens"]
    result = {name: sums[name] for name in ("loss/policy", "loss/kl") if name in sums}
    if not tokens:
        return result
    result |= {
        name: value / tokens for name, value in sums.items() if name not in ("tokens", "mismatch/is_square", *result)
    }
    square = sums["mismatch/is_square"]
    result["mismatch/ess"] = sums["mismatch/is_mean"] ** 2 / (tokens * square) if square else 1.0
    return result | dict(maxima)
