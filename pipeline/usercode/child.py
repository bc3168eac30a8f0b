"""What every process that runs a user's code does: limit itself, load the code, keep its replies apart from prints.

Protocol, one JSON object a line: {"id", "message"} in, and a reply with the same id out. The first message is the
set-up {code, folder, memory_mib, …}; the reply holds {"ready": true} or {"error": why}. The code's own output goes to
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

Message = dict[str, Any]
Code = Callable[..., Any]


class Refused(Exception):
    """The code is not as it must be, or did what it must not; the message is told as it is."""


class Channel:
    """Requests and replies; only the process that made it may reply."""

    def __init__(self, requests: BinaryIO, replies: BinaryIO) -> None:
        self._requests, self._replies, self._pid = requests, replies, os.getpid()
        self._identity = ""

    def receive(self) -> Message | None:
        """The next message; None at the end."""
        line = self._requests.readline()
        if not line:
            return None
        request = json.loads(line)
        self._identity = request["id"]
        return request["message"]  # type: ignore[no-any-return]

    def reply(self, content: Message) -> None:
        """To the last message."""
        if os.getpid() != self._pid:
            os._exit(0)
        self._replies.write(json.dumps({"id": self._identity, **content}).encode() + b"\n")
        self._replies.flush()

    def close(self) -> None:
        self._requests.close()
        self._replies.close()


def private_channel() -> Channel:
    """Standard input and output on descriptors of their own; what the code reads and prints does not meet them."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return Channel(requests, replies)


def set_up(channel: Channel, check: Callable[[Code, Message], Any]) -> tuple[Message, Code] | None:
    """Receive the set-up, load the code and say so; None where it cannot be used, or `check` raises for it."""
    setup = channel.receive()
    if setup is None:
        return None
    try:
        limit(setup["memory_mib"])
        code = load(setup["code"], setup.get("folder"))
        check(code, setup)
    except BaseException as error:  # a user's module may raise anything, SystemExit included
        channel.reply({"error": describe(error)})
        return None
    channel.reply({"ready": True})
    return setup, code


def load(name: str, folder: str | None) -> Code:
    """What `module:name` or `file.py:name` names, a function or class. Raises ValueError where there is none."""
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
    code = getattr(module, attribute, None)
    if not callable(code):
        raise ValueError(f"{place} has no function or class {attribute}")
    return code  # type: ignore[no-any-return]


def describe(error: BaseException) -> str:
    """One line: what was raised, and where in the user's code."""
    if isinstance(error, Refused):
        return str(error)[:MESSAGE_LIMIT]
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({pathlib.Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    try:
        text = " ".join(str(error).split()).encode(errors="replace").decode()
    except Exception:
        text = "(it cannot be printed)"
    return f"{type(error).__name__}: {text}"[:MESSAGE_LIMIT] + where


def parameters(code: Code) -> list[inspect.Parameter]:
    return list(inspect.signature(code).parameters.values())


def taken(wanted: list[inspect.Parameter], offered: dict[str, Any]) -> dict[str, Any]:
    """Those of the `offered` arguments that the parameters take. Raises Refused, naming the argument, where one
    that is required is not offered."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = {parameter.name: parameter for parameter in wanted if parameter.kind not in variable}
    missing = [name for name, one in named.items() if one.default is one.empty and name not in offered]
    if missing:
        there = ", ".join(sorted(offered))
        raise Refused(f"there is no argument {', '.join(missing)}; name one of {there}, or give it a default value")
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in wanted):
        return offered
    return {name: value for name, value in offered.items() if name in named}


def number(value: Any) -> float:
    """A number that the code gave, as a float. Raises Refused for what is none."""
    if isinstance(value, bool):
        return float(value)
    if not hasattr(value, "__float__") or isinstance(value, str):
        raise Refused(f"returned {type(value).__name__} {str(value)[:60]!r}, not a number")
    return float(value)


def limit(memory_mib: int) -> None:
    """Bound what runaway code can take, and end with the parent."""
    end_with_parent()
    for kind, value in (
        (resource.RLIMIT_AS, memory_mib << 20),
        (resource.RLIMIT_FSIZE, LARGEST_FILE),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (bound, bound))


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
