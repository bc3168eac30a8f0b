"""REINFORCE++-baseline (arXiv:2501.03262): the group's mean as baseline, normalised over the whole batch.

The spread of the batch, not that of the group, sets the scale, so that easy and hard prompts keep their proportion.
"""

import numpy as np

from pipeline.algorithms import groups
from pipeline.algorithms.losses import clipped_loss as loss
from pipeline.algorithms.samples import Samples, normalised
from pipeline.config import AlgorithmConfig

__all__ = ["advantages", "loss"]


def advantages(samples: Samples, config: AlgorithmConfig) -> np.ndarray:
    """r − mean of the group, normalised over all tokens of valid samples, [T]; 0 where the group cannot be compared.

    Groups that cannot be compared count as 0 in mean and deviation.
    """
    group = groups.statistics(samples.scores, samples.valid, samples.groups)
    compared = samples.valid & group.comparable
    centred = samples.per_token(np.where(compared, samples.scores - group.mean, 0.0))
    return np.where(samples.per_token(compared), normalised(centred, samples.mask), 0.0)
