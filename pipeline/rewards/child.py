"""`python -m pipeline.rewards.child`: runs one reward function for the worker, one sample at a time.

Protocol, one JSON object a line. The first line in is the set-up {function, folder, memory_mib}; the answer is
{"ready": true} or {"error": why}. Then each line in holds the keyword arguments of one call, each line out
{"score": number} or {"error": why}. The function's own output goes to standard error, its input is empty.
"""

import ctypes
import importlib
import importlib.util
import inspect
import json
import os
import pathlib
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

PR_SET_PDEATHSIG = 1
LARGEST_FILE = 64 << 20
OPEN_FILES = 256
MESSAGE_LIMIT = 300


def main() -> None:
    requests, replies = _private_pipes()
    setup = json.loads(requests.readline())
    try:
        _limit(setup["memory_mib"])
        function = load(setup["function"], setup.get("folder"))
    except BaseException as error:  # a user's module may raise anything, SystemExit included
        _send(replies, {"error": describe(error)})
        return
    _send(replies, {"ready": True})
    accepted = _accepted(function)
    for line in requests:
        arguments = json.loads(line)
        _send(replies, call(function, {name: arguments[name] for name in arguments if accepted(name)}))


def call(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        score = function(**arguments)
        if isinstance(score, bool):
            score = float(score)
        if not hasattr(score, "__float__") or isinstance(score, str):
            return {"error": f"returned {type(score).__name__} {str(score)[:60]!r}, not a number"}
        return {"score": float(score)}
    except BaseException as error:
        return {"error": describe(error)}


def load(name: str, folder: str | None) -> Callable[..., Any]:
    """The function that `module:function` or `file.py:function` names. Raises ValueError where there is none."""
    place, separator, attribute = name.rpartition(":")
    if not separator or not place or not attribute:
        raise ValueError(f"{name!r} is neither module:function nor file.py:function")
    if not place.endswith(".py"):
        module = importlib.import_module(place)
    else:
        path = pathlib.Path(folder or ".") / place
        if not path.is_file():
            raise ValueError(f"there is no file {path}")
        sys.path.insert(0, str(path.parent))
        specification = importlib.util.spec_from_file_location(path.stem, path)
        assert specification
        assert specification.loader
        module = importlib.util.module_from_spec(specification)
        sys.modules[path.stem] = module
        specification.loader.exec_module(module)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ValueError(f"{place} has no function {attribute}")
    return function  # type: ignore[no-any-return]


def describe(error: BaseException) -> str:
    """One line: what was raised, and where in the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({pathlib.Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:MESSAGE_LIMIT] + where


def _accepted(function: Callable[..., Any]) -> Callable[[str], bool]:
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return lambda name: True
    names = {parameter.name for parameter in parameters}
    return lambda name: name in names


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Requests and replies on descriptors of their own; what the function reads and prints does not meet them."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return requests, replies


def _limit(memory_mib: int) -> None:
    """Bound what a runaway function can take, and end with the worker."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for kind, value in (
        (resource.RLIMIT_AS, memory_mib << 20),
        (resource.RLIMIT_FSIZE, LARGEST_FILE),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (bound, bound))


def _send(replies: BinaryIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply).encode() + b"\n")
    replies.flush()


if __name__ == "__main__":
    main()
