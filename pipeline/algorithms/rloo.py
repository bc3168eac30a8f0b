"""RLOO (arXiv:2402.14740): each reward less the mean of the others of its group, an unbiased baseline."""

import numpy as np

from pipeline.algorithms import groups
from pipeline.algorithms.losses import clipped_loss as loss
from pipeline.algorithms.samples import Samples
from pipeline.config import AlgorithmConfig

__all__ = ["advantages", "loss"]


def advantages(samples: Samples, config: AlgorithmConfig) -> np.ndarray:
    """r_i − mean of the group's other valid r_j, [T]; 0 where the group cannot be compared.

    That is n/(n−1)·(r_i − mean). Rewards [1, 0, 0, 0] of one group give [1, -⅓, -⅓, -⅓].
    """
    group = groups.statistics(samples.scores, samples.valid, samples.groups)
    scale = group.valid / np.maximum(group.valid - 1, 1)
    return samples.per_token(np.where(samples.valid & group.comparable, scale * (samples.scores - group.mean), 0.0))
