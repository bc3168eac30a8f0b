"""Off-policy correction: what a token counts because μ (the sampler) is not π_old (the trainer before the update).

Weights and rejections are two things. A rejected token has weight 0 but stays in the response mask, so it stays in
every denominator; `pipeline.algorithms.aggregation` never sees this module's masks. The ratio is always π_old/μ, never
of the policy being trained: its clip is the loss's own business. Nothing here has a gradient.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.algorithms.ratios import sequence_means
from pipeline.config import CorrectionConfig


class Correction(NamedTuple):
    weights: Tensor  # [R], 0 for what is rejected
    rejected: Tensor  # [R] bool


def correct(
    config: CorrectionConfig,
    drift: Tensor,  # [R] log π_old − log μ, clamped; anything outside the mask
    rows: Tensor,  # [R] sample of each token, any numbering
    mask: Tensor,  # [R] bool, the response mask
) -> Correction:
    """Weights by `type`, and rejection by the same, by `sequence_low` … `sequence_high` and by `veto`.

    none: 1. token-tis: min(ratio, cap), truncated importance sampling. masked-is: the ratio where it lies within
    low … high, rejected elsewhere (IcePop). A whole sample is rejected if exp(mean log-ratio) of its tokens lies
    outside the sequence band, or if the ratio of one of its tokens is below `veto`.
    """
    drift = torch.where(mask, drift.detach(), 0.0)
    ratio = torch.exp(drift)
    weights, rejected = ratio.clamp(max=config.cap), torch.zeros_like(mask)
    if config.type == "none":
        weights = torch.ones_like(ratio)
    elif config.type == "masked-is":
        weights, rejected = ratio, (ratio < config.low) | (ratio > config.high)
    if config.sequence_low is not None and config.sequence_high is not None:
        mean = torch.exp(sequence_means(drift, rows, mask))
        rejected = rejected | (mean < config.sequence_low) | (mean > config.sequence_high)
    if config.veto:
        rejected = rejected | (sequence_means((ratio < config.veto).to(ratio.dtype), rows, mask) > 0)
    return Correction(torch.where(rejected, 0.0, weights), rejected)
