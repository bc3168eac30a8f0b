"""CISPO (MiniMax-M1, arXiv:2506.13585): the ratio is clipped as a weight; no token loses its gradient.

GRPO's clip takes tokens out of the update once their ratio has moved, often the rare ones that matter. Here the
clipped ratio, without gradient, weighs log π_θ. `clip_low` and `clip_high` are distances from 1, as everywhere:
clip_high 4 lets the weight grow to 5; clip_low 1 is no lower bound.
"""

import torch
from torch import Tensor

from pipeline.algorithms.grpo import advantages
from pipeline.algorithms.losses import LossSums, Objective, Tokens, policy_loss
from pipeline.config import AlgorithmConfig

__all__ = ["advantages", "loss"]


def loss(logprobs: Tensor, entropy: Tensor, tokens: Tokens, config: AlgorithmConfig) -> tuple[Tensor, LossSums]:
    """See losses.policy_loss."""
    return policy_loss(_objective, logprobs, entropy, tokens, config)


def _objective(change: Tensor, logprobs: Tensor, tokens: Tokens, config: AlgorithmConfig) -> Objective:
    """−sg(clip(ρ, 1−clip_low, 1+clip_high))·A·log π_θ, [R]."""
    ratio = torch.exp(change.detach())
    weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return Objective(-weight * tokens.advantages * logprobs, ratio > 1 + config.clip_high, ratio < 1 - config.clip_low)
