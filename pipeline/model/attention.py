"""Attention within the blocks of a micro-batch: a prompt once, with all of its completions (see pipeline.batching).

Each block is computed by itself, so the cost is that of the blocks however many a micro-batch holds, and no mask of the
whole micro-batch is ever made. Registered with transformers under NAME; the model hands `blocks` through unchanged.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from pipeline.batching import MicroBatch

NAME = "shared_prompt"
STOCK = "sdpa"
"""transformers' own."""


class Block(NamedTuple):
    """Tokens start … stop-1 of the micro-batch, t of them."""

    start: int
    stop: int
    mask: Tensor | None  # [1, 1, t, t] bool, True where query (row) sees key (column); None: plainly causal


class Blocks:
    """The blocks of a micro-batch, as an object that compiled layers hand on without looking into it: they would be
    compiled again for every list of other lengths."""

    def __init__(self, micro_batch: MicroBatch, device: torch.device) -> None:
        rows = [slice(start, stop) for start, stop in micro_batch.blocks]
        masks = [_mask(micro_batch.segment[row], micro_batch.parent[row], device) for row in rows]
        self.content = [Block(row.start, row.stop, mask) for row, mask in zip(rows, masks, strict=True)]


def _mask(segments: np.ndarray, parents: np.ndarray, device: torch.device) -> Tensor | None:
    if len(np.unique(segments)) <= 2:
        return None
    segment, parent = torch.as_tensor(segments, device=device), torch.as_tensor(parents, device=device)
    position = torch.arange(len(segment), device=device)
    own = segment[:, None] == segment[None, :]
    prompt = parent[:, None] == segment[None, :]
    return ((position[:, None] >= position[None, :]) & (own | prompt))[None, None]


@torch.compiler.disable
def attend(
    module: nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, H_kv, T, D]
    value: Tensor,  # [1, H_kv, T, D]
    attention_mask: Tensor | None,
    *,
    blocks: Blocks,
    scaling: float | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """[1, T, H, D], as transformers wants it."""
    repeats = query.shape[1] // key.shape[1]
    parts = []
    for start, stop, mask in blocks.content:
        rows = slice(start, stop)
        part = scaled_dot_product_attention(
            query[:, :, rows],
            key[:, :, rows].repeat_interleave(repeats, 1),
            value[:, :, rows].repeat_interleave(repeats, 1),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
        )
        parts.append(part.transpose(1, 2))
    return torch.cat(parts, 1), None


transformers.AttentionInterface.register(NAME, attend)
