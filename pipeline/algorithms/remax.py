"""ReMax (arXiv:2310.10505): the reward of the greedy completion of the same prompt as baseline.

The worker adds that completion to each group; it is scored, never trained, and no part of a batch's samples.
"""

import numpy as np

from pipeline.algorithms.losses import clipped_loss as loss
from pipeline.algorithms.samples import Samples
from pipeline.config import AlgorithmConfig

__all__ = ["advantages", "loss"]


def advantages(samples: Samples, config: AlgorithmConfig) -> np.ndarray:
    """r − r(greedy), [T]; 0 for an invalid sample, and where the greedy completion has no reward."""
    assert samples.baselines is not None, "groups hold no greedy completion"
    known = samples.valid & np.isfinite(samples.baselines)
    return samples.per_token(np.where(known, samples.scores - np.where(known, samples.baselines, 0.0), 0.0))
