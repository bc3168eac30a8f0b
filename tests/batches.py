"""Batches written down as lists, for tests of packing and training."""

import itertools
from collections.abc import Sequence

import numpy as np

from pipeline.batching import Batch
from pipeline.experience import Ragged


def batch_of(
    groups: Sequence[tuple[list[int], list[list[int]]]],  # (prompt, its completions)
    *,
    logprobs: Sequence[list[float]] | None = None,  # a list per completion; default: −1 each
    rewards: Sequence[float] | None = None,  # default: 0
    valid: Sequence[bool] | None = None,  # default: all
    masks: Sequence[list[bool]] | None = None,  # a list per completion: which tokens were sampled; default: all
) -> Batch:
    samples = [(number, prompt, completion) for number, (prompt, group) in enumerate(groups) for completion in group]
    count = len(samples)
    given = logprobs or [[-1.0] * len(completion) for _, _, completion in samples]
    return Batch(
        prompts=ragged([prompt for _, prompt, _ in samples], np.int32),
        completions=ragged([completion for _, _, completion in samples], np.int32),
        logprobs=ragged(given, np.float32),
        mask=ragged(masks or [[True] * len(completion) for _, _, completion in samples], np.bool_),
        rewards=np.asarray(rewards if rewards is not None else [0.0] * count, np.float64),
        parts={},
        valid=np.asarray(valid if valid is not None else [True] * count, np.bool_),
        groups=np.asarray([number for number, _, _ in samples]),
        steps=np.zeros(count, np.int64),
        truncated=np.zeros(count, np.bool_),
    )


def random_batch(
    groups: int, size: int, *, prompt: tuple[int, int], completion: tuple[int, int], vocabulary: int, seed: int = 0
) -> Batch:
    """`groups` × `size` samples with prompt and completion lengths in [low, high], and random rewards."""
    rng = np.random.default_rng(seed)

    def ids(bounds: tuple[int, int]) -> list[int]:
        return rng.integers(0, vocabulary, rng.integers(bounds[0], bounds[1] + 1)).tolist()

    content = [(ids(prompt), [ids(completion) for _ in range(size)]) for _ in range(groups)]
    logprobs = [(-rng.exponential(3.0, len(ids))).tolist() for _, group in content for ids in group]
    return batch_of(content, logprobs=logprobs, rewards=rng.normal(size=groups * size))


def ragged(rows: Sequence[Sequence[float]], dtype: type) -> Ragged:
    return Ragged(
        np.asarray(list(itertools.chain.from_iterable(rows)), dtype),
        np.cumsum([0, *map(len, rows)]).astype(np.int64),
    )
