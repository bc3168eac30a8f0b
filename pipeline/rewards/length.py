"""Overlong shaping: a penalty that grows over the last `buffer` tokens before the limit (DAPO, arXiv:2503.14476)."""


def score(tokens: int, max_new_tokens: int, buffer: int, factor: float = 1.0) -> float:
    """min(−(tokens − (max_new_tokens − buffer)) / buffer · factor, 0). Raises ValueError for an unusable buffer.

    Example: limit 100, buffer 20: 80 tokens score 0, 90 score −0.5, 100 score −1.
    """
    if not 0 < buffer <= max_new_tokens:
        raise ValueError(f"parameter buffer is {buffer}; it must lie between 1 and max_new_tokens, {max_new_tokens}")
    return min(-(tokens - (max_new_tokens - buffer)) / buffer * factor, 0.0)
