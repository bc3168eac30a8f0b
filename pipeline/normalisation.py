"""Rewards on a common scale: the running normalisation and the clip of each reward, before advantages are made of them.

What is stored and logged stays raw. The statistics are the trainer's, of every valid sample that it has trained, and
part of its checkpoints: a resumed or replayed step has those that it had. Whether a group has spread, and is replaced
by dynamic sampling, is judged by its raw rewards.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipeline.algorithms.samples import VARIANCE
from pipeline.batching import Batch
from pipeline.config import RewardConfig


class Moments(NamedTuple):
    """Of all values of a reward so far. [1, 3]: samples 2, mean 2, squares 2."""

    samples: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared distances from the mean

    def joined(self, values: np.ndarray) -> "Moments":
        """With `values` [K], none of them NaN, among them (Chan, Golub, LeVeque, 1979)."""
        if not len(values):
            return self
        samples, mean = self.samples + len(values), float(values.mean())
        distance, share = mean - self.mean, len(values) / samples
        squares = float(np.square(values - mean).sum()) + distance**2 * self.samples * share
        return Moments(samples, self.mean + distance * share, self.squares + squares)

    @property
    def std(self) -> float:
        """ddof 0; at least 1e-4, as in samples.normalised."""
        return math.sqrt(max(self.squares / max(self.samples, 1), VARIANCE))


def rescaled(
    batch: Batch, rewards: Sequence[RewardConfig], moments: Mapping[str, Moments]
) -> tuple[Batch, dict[str, Moments]]:
    """The batch with the rewards that advantages are made of, and the statistics with its valid samples among them.

    A sample without one of the scores, as from before an edit of the job, keeps what it has for it.
    """
    totals, baselines, joined = batch.rewards, batch.baselines, dict(moments)
    for reward in rewards:
        raw = batch.parts.get(reward.name)
        if raw is None or not (reward.normalize or reward.clip is not None):
            continue
        if reward.normalize:
            scores = raw[batch.valid & np.isfinite(raw)]
            joined[reward.name] = joined.get(reward.name, Moments()).joined(scores)
        scale = joined[reward.name] if reward.normalize else None
        totals = totals + _change(raw, reward, scale)
        if baselines is not None and reward.name in batch.baseline_parts:
            baselines = baselines + _change(batch.baseline_parts[reward.name], reward, scale)
    return dataclasses.replace(batch, rewards=totals, baselines=baselines), joined


def _change(raw: np.ndarray, reward: RewardConfig, scale: Moments | None) -> np.ndarray:
    """What rescaling adds to the weighted sum, [N]."""
    scores = raw if scale is None else (raw - scale.mean) / scale.std
    if reward.clip is not None:
        scores = np.clip(scores, -reward.clip, reward.clip)
    return np.where(np.isfinite(raw), reward.weight * (scores - raw), 0.0)
