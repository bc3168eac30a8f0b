"""A reward model behind vLLM's pooling server: the raw logit of its one label."""

from typing import Any

import aiohttp

from pipeline.clock import Clock
from pipeline.rewards.endpoint import Endpoint
from pipeline.rewards.values import Value, number
from pipeline.usercode.process import SampleError

START_LIMIT_S = 600.0
"""As long as the start-up probe of its server lets it load."""
LOOK_S = 1.0


class Unready(Exception):
    """A reward model's server has not come up."""


class RewardModel(Endpoint):
    """`form`: what the model reads. chat: prompt and completion through its own chat template; text: one after the
    other; ids: the policy's own token ids, for a reward model with the policy's tokenizer."""

    def __init__(self, name: str, url: str, timeout_s: float, form: str = "chat") -> None:
        super().__init__(name, url, timeout_s)
        if form not in ("chat", "text", "ids"):
            raise ValueError(f"reward {name}: parameter form is {form!r}; use chat, text or ids")
        self._form = form

    async def until_ready(self, clock: Clock) -> None:
        """Return once the server answers, which it does when it has loaded the model. Raises Unready if it is late."""
        deadline = clock.monotonic() + START_LIMIT_S
        while not await self._is_ready():
            if clock.monotonic() > deadline:
                raise Unready(f"reward model {self.name}: {self._url} is not ready after {START_LIMIT_S:.0f} s")
            await clock.sleep(LOOK_S)

    async def _is_ready(self) -> bool:
        assert self._session, "start() comes first"
        try:
            async with self._session.get(f"{self._url.rstrip('/')}/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def score(self, arguments: dict[str, Any]) -> Value:
        # Without use_activation a sigmoid would squash the score.
        body = {**self._input(arguments), "task": "classify", "use_activation": False}
        reply = await self.post(f"{self._url.rstrip('/')}/pooling", body)
        try:
            data = reply["data"][0]["data"]
        except (LookupError, TypeError):
            raise SampleError("the reply is not that of a pooling server") from None
        if not isinstance(data, list) or len(data) != 1:
            raise SampleError("the reward model must have exactly one label")
        return Value(number(data[0]))

    def _input(self, arguments: dict[str, Any]) -> dict[str, Any]:
        if self._form == "ids":
            return {"input": [[*arguments["prompt_ids"], *arguments["completion_ids"]]]}
        if self._form == "text":
            return {"input": arguments["prompt"] + arguments["completion"]}
        prompt = arguments["messages"] or [{"role": "user", "content": arguments["prompt"]}]
        return {"messages": [*prompt, {"role": "assistant", "content": arguments["completion"]}]}
