"""Estimators of KL(π‖π_ref) from one sampled token: k1, k2, k3 (J. Schulman, joschu.net/blog/kl-approx)."""

import torch
from torch import Tensor

from pipeline.algorithms.ratios import log_ratio

LARGEST_ERROR = 0.2
"""Bound of the relative error that the adaptive coefficient follows."""


def estimate(estimator: str, logprobs: Tensor, reference: Tensor) -> Tensor:
    """Per token, same shape as `logprobs`. With d = log π − log π_ref: k1 = d, k2 = d²/2, k3 = exp(−d) − 1 + d.

    As a loss, k2 has the gradient of KL(π‖π_ref); k1 has none in expectation and is only for the reward.
    """
    difference = log_ratio(logprobs, reference)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    assert estimator == "k3", estimator
    return torch.exp(-difference) - 1 + difference


def adapted(coefficient: float, divergence: float, target: float, samples: int, horizon: int) -> float:
    """The coefficient after a step of `samples` whose mean KL per token was `divergence` nats (arXiv:1909.08593).

    β·(1 + e·samples/horizon), e = divergence/target − 1 within ±0.2.
    """
    error = min(max(divergence / target - 1, -LARGEST_ERROR), LARGEST_ERROR)
    return coefficient * (1 + error * samples / horizon)
