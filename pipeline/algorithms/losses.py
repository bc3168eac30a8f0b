"""Policy losses over R response tokens laid end to end, whichever samples, micro-batch or rank they belong to.

Every loss is a sum of weighted token losses (see `aggregation`), so that summing it over micro-batches and ranks gives
the batch's loss. What lies outside the response mask is replaced before any arithmetic: NaN times 0 is NaN, in the
value as in the gradient. No I/O, no collectives.

An algorithm brings its `Objective`; `policy_loss` adds what all have in common.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.algorithms import correction, kl
from pipeline.algorithms.ratios import log_ratio
from pipeline.config import AlgorithmConfig


@dataclasses.dataclass(frozen=True)
class Tokens:
    """What a loss is told about its R tokens, all [R]. `old` and `reference` come from this trainer's own passes."""

    mask: Tensor  # bool: the response mask
    rows: Tensor  # int: sample of the token, any numbering; all tokens of a sample are here
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


class Objective(NamedTuple):
    """An algorithm's loss of each token before weights, and which tokens a clip has touched; all [R]."""

    loss: Tensor
    high: Tensor  # bool: above the upper bound
    low: Tensor  # bool: below the lower bound


AGGREGATED = ("loss/policy", "loss/kl", "loss/value")
"""Logged as the batch's loss; everything else as a mean over tokens."""

MakeObjective = Callable[[Tensor, Tensor, Tokens, AlgorithmConfig], Objective]
"""Of (log π_θ − log π_old, clamped and with gradient; log π_θ, with gradient; tokens; config)."""


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


def clipped(ratio: Tensor, advantages: Tensor, config: AlgorithmConfig) -> Objective:
    """The clipped surrogate of ratios [R], of tokens or of whole samples."""
    dual_clip = config.parameters.get("dual_clip", 0.0)
    return Objective(
        clipped_surrogate(ratio, advantages, config.clip_low, config.clip_high, dual_clip),
        (ratio > 1 + config.clip_high) & (advantages > 0),
        (ratio < 1 - config.clip_low) & (advantages < 0),
    )


def clipped_loss(logprobs: Tensor, entropy: Tensor, tokens: Tokens, config: AlgorithmConfig) -> tuple[Tensor, LossSums]:
    """`policy_loss` clipped on each token's π_θ/π_old, which most algorithms share."""

    def objective(change: Tensor, logprobs: Tensor, tokens: Tokens, config: AlgorithmConfig) -> Objective:
        return clipped(torch.exp(change), tokens.advantages, config)

    return policy_loss(objective, logprobs, entropy, tokens, config)


def policy_loss(
    objective: MakeObjective,
    logprobs: Tensor,  # [R] log π_θ, with gradient
    entropy: Tensor,  # [R] in nats; with gradient where it is trained
    tokens: Tokens,
    config: AlgorithmConfig,
) -> tuple[Tensor, LossSums]:
    """This part's share of the batch's loss, and of what is logged of it.

    The objective, weighted by the correction's π_old/μ, plus kl_coefficient × KL to the reference, less
    entropy_coefficient × entropy. With `bypass` π_old is μ, and there is nothing to correct.
    """
    mask, weights = tokens.mask, _inside(tokens.mask, tokens.weights)
    logprobs, entropy, sampled = _inside(mask, logprobs), _inside(mask, entropy), _inside(mask, tokens.sampled)
    current = logprobs.detach() if tokens.old is None else _inside(mask, tokens.old)
    old = sampled if config.correction.bypass else current
    inside = dataclasses.replace(tokens, advantages=_inside(mask, tokens.advantages))

    change = log_ratio(logprobs, old)
    applied = correction.correct(config.correction, log_ratio(old, sampled), tokens.rows, mask)
    made = objective(change, logprobs, inside, config)
    policy = (weights * applied.weights * made.loss).sum()
    per_token = {
        "loss/entropy": entropy.detach(),
        "actor/ppo_kl": -change.detach(),
        "actor/clip_frac": made.high | made.low,
        "actor/clip_frac_high": made.high,
        **_mismatch(log_ratio(current, sampled), applied, config.correction.cap),
    }
    loss, losses = policy, {"loss/policy": policy}
    if config.entropy_coefficient:
        loss = loss - config.entropy_coefficient * (weights * entropy).sum()
    if tokens.reference is not None:
        divergence = kl.estimate(config.kl_estimator, logprobs, _inside(mask, tokens.reference))
        per_token["actor/reference_kl"] = divergence.detach()
        if config.kl_placement == "loss":
            losses["loss/kl"] = (weights * divergence).sum()
            loss = loss + config.kl_coefficient * losses["loss/kl"]
    return loss, add_up(mask, per_token, losses)


def _inside(mask: Tensor, values: Tensor) -> Tensor:
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def _mismatch(drift: Tensor, applied: correction.Correction, cap: float) -> dict[str, Tensor]:
    """`drift` = log π_old − log μ, [R], of the trainer's own π_old even where that is bypassed."""
    raw = torch.exp(drift)
    return {
        "mismatch/logprob_abs_diff": drift.abs(),
        "mismatch/kl": raw - 1 - drift,
        "mismatch/is_mean": applied.weights,
        "mismatch/is_square": applied.weights.square(),
        "mismatch/is_max": raw,
        "mismatch/tis_clip_frac": raw > cap,
        "mismatch/masked_frac": applied.rejected,
    }


def add_up(mask: Tensor, per_token: Mapping[str, Tensor], losses: Mapping[str, Tensor]) -> LossSums:
    """Sums over the response mask of what is [R], and the parts' shares of the losses."""
    values = {name: _inside(mask, value.double()) for name, value in {"tokens": mask, **per_token}.items()}
    maxima = {name: values.pop(name).max() for name in ("mismatch/is_max",) if name in values}
    shares = {name: share.detach().double() for name, share in losses.items()}
    return LossSums({name: value.sum() for name, value in values.items()} | shares, maxima)


def summary(sums: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
    """The logged numbers of a whole batch, from sums and maxima over all of its parts and ranks.

    What is in AGGREGATED are the batch's losses; all others are means over the response tokens that
    took part in a pass, and left out where none did.
    mismatch/kl is the unbiased ρ − 1 − log ρ of KL(μ‖π_old); mismatch/ess is (Σw)²/(n·Σw²), 1 when all weights agree.
    """
    tokens = sums["tokens"]
    result = {name: sums[name] for name in AGGREGATED if name in sums}
    if not tokens:
        return result
    result |= {
        name: value / tokens for name, value in sums.items() if name not in ("tokens", "mismatch/is_square", *result)
    }
    square = sums["mismatch/is_square"]
    result["mismatch/ess"] = sums["mismatch/is_mean"] ** 2 / (tokens * square) if square else 1.0
    return result | dict(maxima)
