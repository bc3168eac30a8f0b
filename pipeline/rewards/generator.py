"""A generated prompt's own scorer (reasoning-gym's `score_answer`), mostly in 0 … 1."""

import base64
import functools
import json
import pickle
import re
from typing import Any

import reasoning_gym

TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def score(completion: str, set: str, entry: str | None = None) -> float:
    """Scores what stands in the last <answer> tag of the completion, or all of it where there is none.

    `entry` is the pickled (task, parameters, item) that the worker made: JSON would lose tuples and the like.
    Raises ValueError for a prompt that was not generated.
    """
    if entry is None:
        raise ValueError(f"set {set} is not generated and has no scorer of its own")
    task, parameters, item = pickle.loads(base64.b64decode(entry))
    tagged = TAGGED.findall(completion)
    answer = (tagged[-1] if tagged else completion).strip()
    return float(_dataset(task, json.dumps(parameters)).score_answer(answer, item))


@functools.lru_cache(maxsize=64)
def _dataset(task: str, parameters: str) -> Any:
    return reasoning_gym.create_dataset(task, **json.loads(parameters), seed=0, size=1)
