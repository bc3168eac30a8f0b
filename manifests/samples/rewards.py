"""Reward functions of the samples. Each is called with what it names: see `miles explain spec.rewards`."""

import re


def share_of_digits(completion: str) -> float:
    """1 for digits alone, 0 for none; partial credit lets a random model begin to learn."""
    return sum(character.isdigit() for character in completion) / max(1, len(completion))


def last_number(completion: str, answer: str) -> float:
    """1 if the last number in the completion is the answer."""
    numbers = re.findall(r"-?\d+", completion)
    return float(bool(numbers) and numbers[-1] == answer)


def brevity(tokens: int, max_new_tokens: int) -> float:
    """From 1 for an empty completion down to 0 for one that fills its limit."""
    return 1 - tokens / max_new_tokens
