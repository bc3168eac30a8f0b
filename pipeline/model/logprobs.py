"""Log-probabilities of chosen tokens from hidden states, without ever holding all logits.

The head is applied to a chunk of rows at a time. A frozen head needs nothing of that in the backward pass: the gradient
of log p(target) with respect to the hidden state, (W[target] − p·W)/T, is made while the chunk's probabilities are at
hand and only scaled later. A head that is trained has its chunks computed again, as its own gradient needs them.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

LOGITS_PER_CHUNK = 2**25
"""Bounds the memory of one chunk: 128 MiB in float32, three times over."""


def token_logprobs(hidden: Tensor, weight: Tensor, target: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """log softmax(hidden·weightᵀ/temperature)[target] and the entropy of the same distribution, [R] each, float32.

    `hidden` [R, D], `weight` [V, D], `target` [R] ids. float64 inputs give float64. The entropy has no gradient.
    """
    return _TokenLogprobs.apply(hidden, weight, target, 1.0 / temperature)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, sharpness: float) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(len(target), dtype=wide, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        ahead = ctx.needs_input_grad[0] and not ctx.needs_input_grad[1]
        direction = torch.empty_like(hidden) if ahead else None
        for rows in _chunks(len(target), len(weight)):
            shifted, exponentials, total = _distribution(hidden[rows], weight, sharpness, wide)
            log_total = total.log()
            logprobs[rows] = shifted.gather(1, target[rows, None]).squeeze(1) - log_total
            entropy[rows] = log_total - torch.linalg.vecdot(exponentials, shifted) / total
            if direction is not None:
                mean = exponentials.div_(total[:, None]).to(weight.dtype) @ weight
                direction[rows] = (weight[target[rows]] - mean) * sharpness
        if ahead:
            ctx.save_for_backward(direction)
        else:
            ctx.save_for_backward(hidden, weight, target)
        ctx.ahead, ctx.sharpness, ctx.wide = ahead, sharpness, wide
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _entropy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:  # type: ignore[override]
        if ctx.ahead:
            (direction,) = ctx.saved_tensors
            return direction * gradient[:, None].to(direction.dtype), None, None, None

        hidden, weight, target = ctx.saved_tensors
        of_hidden, of_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=ctx.wide)
        for rows in _chunks(len(target), len(weight)):
            _, residual, total = _distribution(hidden[rows], weight, ctx.sharpness, ctx.wide)
            residual.mul_((-1.0 / total)[:, None])
            residual.scatter_add_(1, target[rows, None], torch.ones_like(residual[:, :1]))
            residual.mul_(ctx.sharpness * gradient[rows, None])
            of_hidden[rows] = residual.to(weight.dtype) @ weight
            of_weight += residual.to(hidden.dtype).T @ hidden[rows]
        return of_hidden, of_weight.to(weight.dtype), None, None


def _chunks(rows: int, columns: int) -> Iterator[slice]:
    size = max(1, LOGITS_PER_CHUNK // columns)
    return (slice(start, start + size) for start in range(0, rows, size))


def _distribution(
    hidden: Tensor, weight: Tensor, sharpness: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits less their maximum [R, V], their exponentials [R, V], and the sum of these [R]."""
    logits = (hidden @ weight.T).to(dtype)
    if sharpness != 1.0:
        logits.mul_(sharpness)
    logits.sub_(logits.amax(-1, keepdim=True))
    exponentials = logits.exp()
    return logits, exponentials, exponentials.sum(-1)
