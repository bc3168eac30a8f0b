"""What advantages are made of: the samples of a step, and all of their response tokens laid end to end.

Advantages have one value per response token, [T]; an estimator that judges whole samples spreads its values out with
`per_token`. Example: completions of 2 and 1 tokens are lengths [2, 1] and T = 3. Everything is numpy, on every rank the
whole batch.
"""

import dataclasses
import functools

import numpy as np

VARIANCE = 1e-8
"""Smallest variance that `normalised` divides by."""


@dataclasses.dataclass(frozen=True)
class Samples:
    rewards: np.ndarray  # [N] float64; anything where invalid
    valid: np.ndarray  # [N] bool: takes part in training
    groups: np.ndarray  # [N] int, any numbering; samples of one group need not lie together
    lengths: np.ndarray  # [N] int, response tokens
    penalties: np.ndarray | None = (
        None  # [T] kl_coefficient × estimated KL of the token, where it is taken from rewards
    )
    baselines: np.ndarray | None = None  # [N] reward of the group's greedy completion, NaN where there is none
    values: np.ndarray | None = None  # [T] the critic's value of the state before the token
    credits: np.ndarray | None = None  # [T] part of the sample's reward that came with the token, as after a turn

    @functools.cached_property
    def mask(self) -> np.ndarray:
        """[T] bool: tokens of valid samples."""
        return self.per_token(self.valid)

    @functools.cached_property
    def scores(self) -> np.ndarray:
        """[N] rewards, less the penalties of all tokens of the sample; 0 where invalid."""
        rewards = self.rewards
        if self.penalties is not None:
            owners = self.per_token(np.arange(len(rewards)))
            rewards = rewards - np.bincount(owners, self.penalties, minlength=len(rewards))
        return np.where(self.valid, rewards, 0.0)

    @functools.cached_property
    def token_rewards(self) -> np.ndarray:
        """[T] each token's penalty as a negative reward, and the sample's reward: what came with a token there, the
        rest at its last token; 0 where invalid."""
        rewards = np.zeros(len(self.mask)) if self.penalties is None else -self.penalties
        rest = self.rewards
        if self.credits is not None:
            rewards = rewards + self.credits
            rest = rest - np.bincount(self.per_token(np.arange(len(rest))), self.credits, minlength=len(rest))
        last = (np.cumsum(self.lengths) - 1)[self.lengths > 0]
        rewards[last] += rest[self.lengths > 0]
        return np.where(self.mask, rewards, 0.0)

    def per_token(self, values: np.ndarray) -> np.ndarray:
        """[N] → [T]: every token has its sample's value."""
        return np.repeat(values, self.lengths)

    def discounted(self, values: np.ndarray, discount: float) -> np.ndarray:
        """x_t + discount·x_{t+1} + discount²·x_{t+2} + … up to the sample's last token, [T] → [T]."""
        ends, ahead, sums = np.cumsum(self.lengths), np.zeros(len(self.lengths)), np.zeros(len(values))
        for back in range(1, self.lengths.max(initial=0) + 1):
            inside = self.lengths >= back
            place = ends[inside] - back
            sums[place] = ahead[inside] = values[place] + discount * ahead[inside]
        return sums


def normalised(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """(x − mean) / √max(variance, 1e-8) over the entries inside the mask (ddof 0), 0 outside. Both [T]."""
    inside = values[mask]
    if not len(inside):
        return np.zeros(len(values))
    return np.where(mask, (values - inside.mean()) / np.sqrt(max(inside.var(), VARIANCE)), 0.0)
