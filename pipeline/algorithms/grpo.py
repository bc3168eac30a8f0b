"""GRPO (arXiv:2402.03300): rewards compared within the group of one prompt, clipped surrogate.

The clip is asymmetric (`clip_high` above `clip_low`: DAPO's clip-higher, arXiv:2503.14476) and the loss is weighted by
the truncated importance weight π_old/μ, which makes it the decoupled objective of AReaL (arXiv:2505.24298).
"""

import numpy as np

from pipeline.algorithms import groups as group_statistics
from pipeline.algorithms.losses import clipped_loss as loss

__all__ = ["EPSILON", "advantages", "loss"]

EPSILON = 1e-4
"""Added to the standard deviation (ddof 1), as in TRL."""


def advantages(
    rewards: np.ndarray,  # [N] float64; anything where invalid
    valid: np.ndarray,  # [N] bool
    groups: np.ndarray,  # [N] int
) -> np.ndarray:
    """(r − mean) / (std + 1e-4) over the valid samples of the group, [N] float64.

    0 for an invalid sample, in a group of fewer than two valid samples, and in one without spread.
    Rewards [1, 0, 0, 0] of one group give [1.4997, -.4999, -.4999, -.4999].
    """
    group = group_statistics.statistics(rewards, valid, groups)
    return np.where(valid & group.comparable, (np.where(valid, rewards, 0.0) - group.mean) / (group.std + EPSILON), 0.0)
