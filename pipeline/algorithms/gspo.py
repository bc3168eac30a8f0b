"""GSPO (arXiv:2507.18071): GRPO whose ratio is that of the whole sample, the geometric mean of its tokens' ratios.

That ratio varies far less than a token's, hence clip bounds of a few 1e-4; clipping drops or keeps a sample as a whole.
"""

import torch
from torch import Tensor

from pipeline.algorithms.grpo import advantages
from pipeline.algorithms.losses import LossSums, Objective, Tokens, clipped, policy_loss
from pipeline.algorithms.ratios import sequence_means
from pipeline.config import AlgorithmConfig

__all__ = ["advantages", "loss"]


def loss(logprobs: Tensor, entropy: Tensor, tokens: Tokens, config: AlgorithmConfig) -> tuple[Tensor, LossSums]:
    """See losses.policy_loss. With the default aggregation each sample's loss counts once, whatever its length."""
    return policy_loss(_objective, logprobs, entropy, tokens, config)


def _objective(change: Tensor, logprobs: Tensor, tokens: Tokens, config: AlgorithmConfig) -> Objective:
    ratio = torch.exp(sequence_means(change, tokens.rows, tokens.mask))
    return clipped(ratio, tokens.advantages, config)
