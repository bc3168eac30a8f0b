"""`python -m pipeline.rewards.child`: runs one reward function for the worker, one sample at a time.

Protocol, one JSON object a line: {"id", "message"} in, and a reply with the same id out. The first message is the
set-up {function, folder, memory_mib}; the reply holds {"ready": true} or {"error": why}. Then each message holds the
keyword arguments of one call, each reply {"score": number} or {"error": why}. The function's own output goes to
standard error, its input is empty; a process that it forks off ends where it would return.
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
OWN_PID = os.getpid()


def main() -> None:
    requests, replies = _private_pipes()
    request = json.loads(requests.readline())
    setup = request["message"]
    try:
        _limit(setup["memory_mib"])
        function = load(setup["function"], setup.get("folder"))
        parameters = list(inspect.signature(function).parameters.values())
    except BaseException as error:  # a user's module may raise anything, SystemExit included
        _send(replies, request["id"], {"error": describe(error)})
        return
    _send(replies, request["id"], {"ready": True})
    for line in requests:
        request = json.loads(line)
        _send(replies, request["id"], call(function, parameters, request["message"]))


def call(function: Callable[..., Any], parameters: list[inspect.Parameter], offered: dict[str, Any]) -> dict[str, Any]:
    """The reply to one request: `function` on those of the `offered` arguments that its `parameters` take."""
    try:
        arguments = _taken(parameters, offered)
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
    try:
        text = " ".join(str(error).split()).encode(errors="replace").decode()
    except Exception:
        text = "(it cannot be printed)"
    return f"{type(error).__name__}: {text}"[:MESSAGE_LIMIT] + where


def _taken(parameters: list[inspect.Parameter], offered: dict[str, Any]) -> dict[str, Any]:
    """Raises TypeError, naming the argument, where one that the function requires is not offered."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = {parameter.name: parameter for parameter in parameters if parameter.kind not in variable}
    missing = [name for name, one in named.items() if one.default is one.empty and name not in offered]
    if missing:
        raise TypeError(
            f"there is no {', '.join(missing)}; name one of {', '.join(sorted(offered))}, or give it a default value"
        )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return offered
    return {name: value for name, value in offered.items() if name in named}


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


def _send(replies: BinaryIO, identity: str, reply: dict[str, Any]) -> None:
    if os.getpid() != OWN_PID:
        os._exit(0)
    replies.write(json.dumps({"id": identity, **reply}).encode() + b"\n")
    replies.flush()


if __name__ == "__main__":
    main()
