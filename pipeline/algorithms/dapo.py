"""DAPO (arXiv:2503.14476): GRPO with clip-higher, token-mean, dynamic sampling and overlong shaping.

Clip-higher and token-mean are defaults of the registry. Dynamic sampling (`dynamic_sampling`): groups whose rewards are
all the same, before shaping (equation 11), are replaced before a step is planned, see pipeline.dispatch.
`mask_truncated` leaves completions that were cut off out of the loss and its denominators; they still count in their
group (the paper's overlong filtering).
"""

import numpy as np

from pipeline.algorithms import grpo
from pipeline.algorithms.losses import clipped_loss as loss
from pipeline.algorithms.samples import Samples
from pipeline.config import AlgorithmConfig

__all__ = ["advantages", "loss", "overlong"]


def advantages(samples: Samples, config: AlgorithmConfig) -> np.ndarray:
    """GRPO's, of rewards that are lower for overlong completions, [T]."""
    longest = config.sampling.max_new_tokens
    buffer = config.parameters["overlong_buffer"] * longest
    penalties = config.parameters["overlong_penalty"] * overlong(samples.lengths, longest, buffer)
    return grpo.of_scores(np.where(samples.valid, samples.scores + penalties, 0.0), samples)


def overlong(lengths: np.ndarray, longest: int, buffer: float) -> np.ndarray:
    """Soft punishment, [N] → [N]: 0 up to longest − buffer tokens, from there linearly down to −1 at `longest`.

    Lengths [8, 9, 10] with longest 10 and buffer 2: [0, -.5, -1].
    """
    if buffer == 0:
        return np.zeros(len(lengths))
    return np.minimum(-(lengths - (longest - buffer)) / buffer, 0.0)
