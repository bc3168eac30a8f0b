"""`python -m pipeline.rewards.child`: runs one reward function for the worker, one sample at a time.

The set-up (see usercode.child) may name the arguments that are `offered`: a function that needs others is refused at
once. After it each message holds the keyword arguments of one call, each reply
{"score": number, "steps": [[position, reward], …]} or {"error": why}.
"""

import inspect
from typing import Any

from pipeline.usercode import child
from pipeline.usercode.child import Code, Message, Refused


def main() -> None:
    channel = child.private_channel()
    loaded = child.set_up(channel, check)
    if loaded is None:
        return
    _, function = loaded
    parameters = child.parameters(function)
    while (message := channel.receive()) is not None:
        channel.reply(call(function, parameters, message))


def check(function: Code, setup: Message) -> None:
    """Raises Refused for a function that could not be called on any sample."""
    wanted = child.parameters(function)
    if setup.get("offered") is not None:
        child.taken(wanted, dict.fromkeys(setup["offered"]))


def call(function: Code, parameters: list[inspect.Parameter], offered: Message) -> Message:
    """The reply to one request: `function` on those of the `offered` arguments that its `parameters` take."""
    try:
        return given(function(**child.taken(parameters, offered)))
    except BaseException as error:
        return {"error": child.describe(error)}


def given(result: Any) -> Message:
    """The reply for what the function returned, a number or (number, [(position, reward), …]). Raises Refused."""
    if not isinstance(result, tuple):
        return {"score": child.number(result)}
    if len(result) != 2 or not isinstance(result[1], list | tuple) or not all(map(_is_step, result[1])):
        raise Refused(f"returned {str(result)[:60]!r}, neither a number nor (number, [(position, reward), …])")
    score, steps = result
    return {"score": child.number(score), "steps": [[int(at), child.number(reward)] for at, reward in steps]}


def _is_step(step: Any) -> bool:
    return isinstance(step, list | tuple) and len(step) == 2 and hasattr(step[0], "__index__")


if __name__ == "__main__":
    main()
