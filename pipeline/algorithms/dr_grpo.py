"""Dr.GRPO (arXiv:2503.20783): GRPO without its two biases, the division by the group's spread and by a sample's length.

The second is the aggregation `constant`, its default.
"""

import numpy as np

from pipeline.algorithms import groups
from pipeline.algorithms.losses import clipped_loss as loss
from pipeline.algorithms.samples import Samples
from pipeline.config import AlgorithmConfig

__all__ = ["advantages", "loss"]


def advantages(samples: Samples, config: AlgorithmConfig) -> np.ndarray:
    """r − mean over the valid samples of the group, [T]; 0 where the group cannot be compared.

    Rewards [1, 0, 0, 0] of one group give [.75, -.25, -.25, -.25].
    """
    group = groups.statistics(samples.scores, samples.valid, samples.groups)
    return samples.per_token(np.where(samples.valid & group.comparable, samples.scores - group.mean, 0.0))
