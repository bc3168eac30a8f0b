"""Values: generalised advantage estimation, and the loss of the critic that predicts them.

A value belongs to a response token: it is that of the state before the token, read where the token is predicted. Tokens
that are no response (prompts, observations) are skipped, as if the response went on behind them.
"""

import dataclasses

import numpy as np
import torch
from torch import Tensor

from pipeline.algorithms.losses import LossSums, add_up
from pipeline.algorithms.samples import Samples
from pipeline.config import AlgorithmConfig


def gae(samples: Samples, gamma: float, gae_lambda: float) -> np.ndarray:
    """δ_t + γλ·δ_{t+1} + …, with δ_t = r_t + γ·v_{t+1} − v_t and no value behind the last token, [T]
    (arXiv:1506.02438); 0 for invalid samples.

    Rewards [0, 0, 1], values [.5, .4, .6], γ 1, λ .95 give [.451, .58, .4].
    """
    assert samples.values is not None, "there is no critic"
    values = np.where(samples.mask, samples.values, 0.0)
    ahead = np.append(values[1:], 0.0)
    ahead[(np.cumsum(samples.lengths) - 1)[samples.lengths > 0]] = 0.0
    return samples.discounted(samples.token_rewards + gamma * ahead - values, gamma * gae_lambda)


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float:
    """1 − Var(returns − values) / Var(returns), [T] each: 1 is perfect, 0 no better than a constant. 0 if none vary."""
    variance = float(np.var(returns)) if len(returns) else 0.0
    return 1.0 - float(np.var(returns - values)) / variance if variance else 0.0


@dataclasses.dataclass(frozen=True)
class Targets:
    """What the critic's loss is told about R response tokens, all [R]."""

    mask: Tensor  # bool: the response mask
    weights: Tensor  # share in the batch's loss, from aggregation.token_weights
    returns: Tensor  # advantage + value
    old: Tensor  # the critic's value before the step
    initial: Tensor | None = None  # the initial critic's value; needed where value_regularization > 0


def value_loss(values: Tensor, targets: Targets, config: AlgorithmConfig) -> tuple[Tensor, LossSums]:
    """½·max((v − R)², (v_old + clip(v − v_old, ±value_clip) − R)²), aggregated as the policy's loss (arXiv:2005.12729);
    plus value_regularization × ½(v − v_initial)². value_clip 0: unclipped.
    """
    mask = targets.mask
    values, returns, old, weights = (
        torch.where(mask, each, 0.0) for each in (values, targets.returns, targets.old, targets.weights)
    )
    error = (values - returns).square()
    worst, clip = error, config.parameters["value_clip"]
    if clip:
        worst = torch.maximum(error, (old + (values - old).clamp(-clip, clip) - returns).square())
    loss = (weights * worst).sum() / 2
    logged = add_up(mask, {"critic/clip_frac": worst.detach() > error.detach()}, {"loss/value": loss})
    del logged.sums["tokens"]  # counted by the policy's loss
    if targets.initial is not None:
        distance = (weights * (values - torch.where(mask, targets.initial, 0.0)).square()).sum() / 2
        loss = loss + config.parameters["value_regularization"] * distance
    return loss, logged
