"""Whether the completion's final answer equals the reference as mathematics (package math-verify): 1 or 0."""

import logging
import re

import math_verify

MATHEMATICAL = re.compile(r"\\boxed|\$|\\\(|\\\[")

# Its own timeouts are off, because this process as a whole is under one; it warns about that on every call.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def score(completion: str, answer: str | None) -> float:
    """Raises ValueError where there is no reference answer, or one without anything mathematical in it."""
    if answer is None or not answer.strip():
        raise ValueError("the prompt has no answer to compare with")
    reference = answer if MATHEMATICAL.search(answer) else f"${answer}$"
    gold = math_verify.parse(reference, parsing_timeout=None)
    if not gold:
        raise ValueError(f"the answer {answer[:80]!r} is not mathematics")
    return float(math_verify.verify(gold, math_verify.parse(completion, parsing_timeout=None), timeout_seconds=None))
