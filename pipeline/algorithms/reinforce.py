"""REINFORCE++ (arXiv:2501.03262): no groups and no critic; token returns, normalised over the whole batch.

With kl_placement `reward` every token pays its own KL penalty, and only later ones count in its return.
"""

import numpy as np

from pipeline.algorithms.losses import clipped_loss as loss
from pipeline.algorithms.samples import Samples, normalised
from pipeline.config import AlgorithmConfig

__all__ = ["advantages", "loss"]


def advantages(samples: Samples, config: AlgorithmConfig) -> np.ndarray:
    """Returns of the token rewards, discounted by `gamma`, less their mean over the batch, by their deviation; [T].

    Rewards [1, 0] of samples with one token each give [1, -1].
    """
    returns = samples.discounted(samples.token_rewards, config.parameters["gamma"])
    return normalised(returns, samples.mask)
