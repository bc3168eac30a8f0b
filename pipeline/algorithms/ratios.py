"""Ratios of probabilities, taken from log-probabilities without overflow."""

import torch
from torch import Tensor

LIMIT = 20.0
"""Log-ratios are clamped to ±20 before exp: e^20 is finite in float32, and so is every gradient."""


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """log(p/q) from log p and log q, clamped."""
    return torch.clamp(numerator - denominator, -LIMIT, LIMIT)
