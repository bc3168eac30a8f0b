"""`python -m pipeline.rewards.child`: runs one reward function for the worker, one sample at a time.

The set-up (see usercode.child) may name the arguments that are `offered`: a function that needs others is refused at
once. After it each message holds the keyword arguments of one call, each reply
{"score": number} or {"error": why}.
"""

import inspect

from pipeline.usercode import child
from pipeline.usercode.child import Code, Message


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
        return {"score": child.number(function(**child.taken(parameters, offered)))}
    except BaseException as error:
        return {"error": child.describe(error)}


if __name__ == "__main__":
    main()
