"""Statistics of the reward groups that GRPO, Dr.GRPO, RLOO and REINFORCE++-baseline compare their samples in."""

from typing import NamedTuple

import numpy as np

SPREAD = 1e-6
"""Standard deviation below which the rewards of a group count as equal."""


class Statistics(NamedTuple):
    """Per sample, those of its group over its valid samples. Rewards [1, 0], [5]: valid [2, 2, 1], mean [.5, .5, 5]."""

    valid: np.ndarray  # [N] int
    mean: np.ndarray  # [N] float64; 0 without a valid sample
    std: np.ndarray  # [N] float64, ddof 1; 0 with fewer than two valid samples

    @property
    def comparable(self) -> np.ndarray:
        """[N] bool: the group has two valid samples and spread, so that it can tell good samples from bad ones."""
        return (self.valid >= 2) & (self.std >= SPREAD)


def statistics(
    rewards: np.ndarray,  # [N] float64; anything where invalid
    valid: np.ndarray,  # [N] bool
    groups: np.ndarray,  # [N] int, any numbering; samples of one group need not lie together
) -> Statistics:
    _, group = np.unique(groups, return_inverse=True)
    rewards = np.where(valid, rewards, 0.0)

    def total(values: np.ndarray) -> np.ndarray:
        return np.bincount(group, weights=values)[group]

    count = total(valid.astype(np.float64))
    mean = total(rewards) / np.maximum(count, 1)
    squares = total(np.where(valid, (rewards - mean) ** 2, 0.0))
    return Statistics(count.astype(np.int64), mean, np.sqrt(squares / np.maximum(count - 1, 1)))
