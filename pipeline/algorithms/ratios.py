"""Ratios of probabilities, taken from log-probabilities without overflow."""

import torch
from torch import Tensor

LIMIT = 20.0
"""Log-ratios are clamped to ±20 before exp: e^20 is finite in float32, and so is every gradient."""


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """log(p/q) from log p and log q, clamped."""
    return torch.clamp(numerator - denominator, -LIMIT, LIMIT)


def sequence_means(values: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    """Each token's mean of `values` over the tokens of its sample that lie inside the mask; all [R].

    `rows`: sample of the token, any numbering. Values [1, 3, 5], rows [7, 7, 2]: [2, 2, 5].
    """
    _, sequence = torch.unique(rows, return_inverse=True)
    size = int(sequence.max()) + 1
    total = values.new_zeros(size).index_add(0, sequence, torch.where(mask, values, 0.0))
    count = values.new_zeros(size).index_add(0, sequence, mask.to(values.dtype))
    return (total / count.clamp(min=1.0))[sequence]
