"""What a reward gives for a sample: a number and, of a process reward, what else came with certain tokens."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from pipeline.usercode.process import SampleError


class Value(NamedTuple):
    score: float
    steps: Sequence[tuple[int, float]] = ()  # (position among the completion's ids, reward), besides `score`

    @property
    def total(self) -> float:
        return self.score + sum(reward for _, reward in self.steps)


def parsed(reply: Any) -> Value:
    """Of {"score": number, "steps": [[position, reward], …]}, whose second part may be missing. Raises SampleError."""
    if not isinstance(reply, dict) or not isinstance(reply.get("score"), int | float):
        raise SampleError('the reply is not {"score": number}')
    steps = reply.get("steps") or []
    if not isinstance(steps, list) or not all(map(_is_step, steps)):
        raise SampleError("the steps of the reply are not [[position, reward], …]")
    return Value(number(reply["score"]), [(position, number(reward)) for position, reward in steps])


def _is_step(step: Any) -> bool:
    return isinstance(step, list) and len(step) == 2 and type(step[0]) is int and isinstance(step[1], int | float)


def number(value: Any) -> float:
    """What a server replied as a float; raises SampleError where it is none."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise SampleError(f"the reply is not a usable number: {error}"[:300]) from None
