"""Off-policy correction: a token's weight because μ (the sampler) is not π_old (the trainer before the update).

Weights and rejections are two things. A rejected token has weight 0 but stays in the response mask, so it stays in
every denominator; `pipeline.algorithms.aggregation` never sees this module's masks.
"""

import torch
from torch import Tensor

from pipeline.algorithms.ratios import log_ratio


def importance_weights(
    correction: str,
    old: Tensor,  # [R] log π_old
    sampled: Tensor,  # [R] log μ
    cap: float,
) -> Tensor:
    """Detached weights [R]. `token-tis`: min(π_old/μ, cap), truncated importance sampling; `none`: 1.

    The ratio is always of π_old, never of the policy being trained: its clip is the loss's own business.
    """
    if correction == "none":
        return torch.ones_like(old)
    assert correction == "token-tis", correction
    return torch.exp(log_ratio(old, sampled)).clamp(max=cap).detach()
