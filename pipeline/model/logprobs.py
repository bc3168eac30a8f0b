"""Log-probabilities of chosen tokens from hidden states, without ever holding all logits.

The head is applied to a chunk of rows at a time. A frozen head needs nothing of that in the backward pass: the gradient
of log p(target) with respect to the hidden state, (1[target] − p)·W/T, is made while the chunk's probabilities are at
hand and only scaled later. A head that is trained has its chunks computed again, as its own gradient needs them.
1[target] − p is taken in float32: of a token that was nearly certain, W[target] − p·W in bfloat16 is rounding alone.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

LOGITS_PER_CHUNK = 2**25
"""Bounds the memory of one chunk: 128 MiB in float32, three times over."""


def token_logprobs(
    hidden: Tensor, weight: Tensor, target: Tensor, temperature: float, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden·weightᵀ/temperature)[target] and the entropy of the same distribution, [R] each, float32.

    `hidden` [R, D], `weight` [V, D], `target` [R] ids. float64 inputs give float64. The entropy has a gradient only
    with `entropy_gradient`, which costs another matrix product per chunk.
    """
    return _TokenLogprobs.apply(hidden, weight, target, 1.0 / temperature, entropy_gradient)


class _TokenLogprobs(torch.autograd.Function):
    """With logits z: ∂ log p(target)/∂z = 1[target] − p, ∂H/∂z = −p·(log p + H), elementwise."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, sharpness: float, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(len(target), dtype=wide, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        ahead = ctx.needs_input_grad[0] and not ctx.needs_input_grad[1]
        direction = torch.empty_like(hidden) if ahead else None
        of_entropy = torch.empty_like(hidden) if ahead and entropy_gradient else None
        for rows in _chunks(len(target), len(weight)):
            shifted, exponentials, total = _distribution(hidden[rows], weight, sharpness, wide)
            log_total = total.log()
            logprobs[rows] = shifted.gather(1, target[rows, None]).squeeze(1) - log_total
            entropy[rows] = log_total - torch.linalg.vecdot(exponentials, shifted) / total
            if direction is None:
                continue
            chances = exponentials.div_(total[:, None])
            if of_entropy is not None:
                slope = _entropy_slope(chances, shifted.sub_(log_total[:, None]), entropy[rows])
                of_entropy[rows] = (slope.to(weight.dtype) @ weight) * sharpness
            direction[rows] = (_slope(chances, target[rows]).to(weight.dtype) @ weight) * sharpness
        if ahead:
            ctx.save_for_backward(direction, of_entropy)
        else:
            ctx.save_for_backward(hidden, weight, target)
        ctx.ahead, ctx.sharpness, ctx.wide, ctx.entropy_gradient = ahead, sharpness, wide, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, gradient: Tensor, of_entropy: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        if ctx.ahead:
            direction, entropy_direction = ctx.saved_tensors
            of_hidden = direction * gradient[:, None].to(direction.dtype)
            if entropy_direction is not None:
                of_hidden += entropy_direction * of_entropy[:, None].to(direction.dtype)
            return of_hidden, None, None, None, None

        hidden, weight, target = ctx.saved_tensors
        of_hidden, of_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=ctx.wide)
        for rows in _chunks(len(target), len(weight)):
            shifted, exponentials, total = _distribution(hidden[rows], weight, ctx.sharpness, ctx.wide)
            chances = exponentials.div_(total[:, None])
            slope = None
            if ctx.entropy_gradient:
                logs = shifted.sub_(total.log()[:, None])
                slope = _entropy_slope(chances, logs, -torch.linalg.vecdot(chances, logs))
            residual = _slope(chances, target[rows]).mul_(gradient[rows, None])
            if slope is not None:
                residual.addcmul_(slope, of_entropy[rows, None])
            residual.mul_(ctx.sharpness)
            of_hidden[rows] = residual.to(weight.dtype) @ weight
            of_weight += residual.to(hidden.dtype).T @ hidden[rows]
        return of_hidden, of_weight.to(weight.dtype), None, None, None


def _slope(chances: Tensor, target: Tensor) -> Tensor:
    """1[target] − p, [R, V]; overwrites `chances`."""
    chances.neg_()[torch.arange(len(target), device=target.device), target] += 1
    return chances


def _entropy_slope(chances: Tensor, logs: Tensor, entropy: Tensor) -> Tensor:
    """−p·(log p + H), [R, V]; overwrites `logs`, which are finite even where a chance has come out as 0."""
    return logs.add_(entropy[:, None]).mul_(chances).neg_()


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
