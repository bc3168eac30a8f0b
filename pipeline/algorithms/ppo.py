"""PPO (arXiv:1707.06347): a critic's values as baseline, by generalised advantage estimation; clipped surrogate.

With kl_placement `reward` every token pays its own KL penalty (arXiv:2203.02155). One sample a prompt is enough.
"""

import numpy as np

from pipeline.algorithms.losses import clipped_loss as loss
from pipeline.algorithms.samples import Samples, normalised
from pipeline.algorithms.values import gae
from pipeline.config import AlgorithmConfig

__all__ = ["advantages", "loss", "returns"]


def advantages(samples: Samples, config: AlgorithmConfig) -> np.ndarray:
    """GAE, normalised over the batch's tokens, [T]."""
    return normalised(gae(samples, config.parameters["gamma"], config.parameters["gae_lambda"]), samples.mask)


def returns(samples: Samples, config: AlgorithmConfig) -> np.ndarray:
    """What the critic learns: GAE before normalisation + values, [T]."""
    assert samples.values is not None, "there is no critic"
    return gae(samples, config.parameters["gamma"], config.parameters["gae_lambda"]) + samples.values
