"""GRPO (arXiv:2402.03300): rewards compared within the group of one prompt, clipped surrogate.

The clip may be asymmetric (`clip_high` above `clip_low`: DAPO's clip-higher, arXiv:2503.14476) and the loss is weighted
by the truncated importance weight π_old/μ, which makes it the decoupled objective of AReaL (arXiv:2505.24298).
"""

import numpy as np

from pipeline.algorithms import groups
from pipeline.algorithms.losses import clipped_loss as loss
from pipeline.algorithms.samples import Samples
from pipeline.config import AlgorithmConfig

__all__ = ["EPSILON", "advantages", "loss"]

EPSILON = 1e-4
"""Added to the standard deviation (ddof 1), as in TRL."""


def advantages(samples: Samples, config: AlgorithmConfig) -> np.ndarray:
    """(r − mean) / (std + 1e-4) over the valid samples of the group, [T].

    0 for an invalid sample, in a group of fewer than two valid samples, and in one without spread.
    Rewards [1, 0, 0, 0] of one group give [1.4997, -.4999, -.4999, -.4999].
    """
    return of_scores(samples.scores, samples)


def of_scores(scores: np.ndarray, samples: Samples) -> np.ndarray:
    """The same of other scores [N] than the samples' own."""
    group = groups.statistics(scores, samples.valid, samples.groups)
    return samples.per_token(
        np.where(samples.valid & group.comparable, (scores - group.mean) / (group.std + EPSILON), 0)
    )
