"""`python -m pipeline.environments.child`: loads a user's class once, and forks a process off for each episode.

After the set-up (see usercode.child) {"begin": n} forks episode n, which talks on the socket that came with it over
`carrier`; {"end": n} kills it with all that it started. Both are answered by {"ready": true}. An episode is sent
{"reset": arguments} once, answered by {"messages"}, then {"step": arguments}, answered by {"messages", "reward",
"done"}; to either, {"error": why}.
"""

import contextlib
import inspect
import json
import os
import random
import signal
import socket
import sys
from typing import Any

from pipeline.usercode import child
from pipeline.usercode.child import Channel, Code, Message, Refused


def main() -> None:
    channel = child.private_channel()
    loaded = child.set_up(channel, check)
    if loaded is None:
        return
    setup, code = loaded
    carrier = socket.socket(fileno=setup["carrier"])
    episodes: dict[int, int] = {}  # number → process
    while (message := channel.receive()) is not None:
        if "end" in message:
            end(episodes.pop(message["end"], None))
            channel.reply({"ready": True})
            continue
        _, (descriptor,), _, _ = socket.recv_fds(carrier, 1, 1)
        try:
            process = os.fork()
        except OSError as error:
            channel.reply({"error": f"its process could not be forked off: {error.strerror}"})
        else:
            if process == 0:
                carrier.close()
                channel.close()
                play(descriptor, code, setup["parameters"])
            # Here as in the child, so that it holds for both whichever runs first.
            with contextlib.suppress(OSError):
                os.setpgid(process, process)
            episodes[message["begin"]] = process
            channel.reply({"ready": True})
        os.close(descriptor)


def check(code: Code, setup: Message) -> None:
    """Raises TypeError or ValueError for what is no environment, or does not take the parameters."""
    if not callable(getattr(code, "step", None)):
        raise ValueError("it has no method step")
    inspect.signature(code).bind(**setup["parameters"])


def end(process: int | None) -> None:
    if process is not None:
        os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)


def play(descriptor: int, code: Code, parameters: Message) -> None:
    """One episode, to the end of this process."""
    os.setpgid(0, 0)
    child.end_with_parent()
    _reseed()
    channel = Channel(os.fdopen(descriptor, "rb"), os.fdopen(os.dup(descriptor), "wb"))
    environment = None
    while (message := channel.receive()) is not None:
        try:
            if environment is None:
                environment = code(**parameters)
                reply = begin(environment, message["reset"])
            else:
                reply = step(environment, message["step"])
            json.dumps(reply)
        except BaseException as error:
            reply = {"error": child.describe(error)}
        channel.reply(reply)
    os._exit(0)


def begin(environment: Any, offered: Message) -> Message:
    reset = getattr(environment, "reset", None)
    return {"messages": _messages(reset(**child.taken(child.parameters(reset), offered))) if reset else []}


def step(environment: Any, offered: Message) -> Message:
    result = environment.step(**child.taken(child.parameters(environment.step), offered))
    if not isinstance(result, tuple) or len(result) != 3:
        raise Refused(f"step returned {str(result)[:60]!r}, not (observation, reward, done)")
    observation, reward, done = result
    messages = _messages(observation)
    if not messages and not done:
        raise Refused("step returned no observation, and the episode is not done")
    return {"messages": messages, "reward": child.number(reward), "done": bool(done)}


def _messages(observation: Any) -> list[Message]:
    if observation is None or observation == "":
        return []
    messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
    if not isinstance(messages, list | tuple) or not all(map(_is_message, messages)):
        raise Refused(f"returned {str(observation)[:60]!r}, neither text nor messages {{role, content}} of others")
    # Half of a surrogate pair is no character, and no tokenizer takes it.
    return [{**message, "content": message["content"].encode(errors="replace").decode()} for message in messages]


def _is_message(value: Any) -> bool:
    texts = isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))
    return texts and value["role"] != "assistant"


def _reseed() -> None:
    """Episodes are not to draw the same random numbers, although they begin as copies of one process."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


if __name__ == "__main__":
    main()
