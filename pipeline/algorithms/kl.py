"""Estimators of KL(π‖π_ref) from one sampled token: k1, k2, k3 (J. Schulman, joschu.net/blog/kl-approx)."""

import numpy as np
import torch
from torch import Tensor

from pipeline.algorithms.ratios import log_ratio


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


def penalised(rewards: np.ndarray, divergence: np.ndarray, coefficient: float) -> np.ndarray:
    """Rewards [N] less coefficient × divergence [N], the sum of the sample's token estimates (kl_placement: reward)."""
    return rewards - coefficient * divergence
