"""A stand-in for vLLM's server, for quick tests of what happens around it.

It answers a prompt with the number of the weights that are loaded (0: the base), as text and as token id + 10, and
keeps what it was asked under /calls. `python -m tests.fake_vllm PORT` runs it as a process that can be killed.
"""

import asyncio
import pathlib
import sys
from typing import Any

from aiohttp import web


class FakeVLLM:
    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.loaded = 0
        self.adapters: dict[str, int] = {}
        self.paused = False
        self.refuse_resets = 0
        """How many resets of the prefix cache fail before one succeeds."""
        self.broken: dict[str, tuple[int, Any]] = {}
        """Path → (status, body) to answer instead."""
        self.lacks_methods_of: str | None = None
        """Class of the worker that was started without pipeline.vllm_worker."""
        self.seconds = 0.0
        """How long a completion takes."""

    def application(self) -> web.Application:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._answer)
        return application

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else None
        if request.path not in ("/health", "/calls"):
            self.calls.append((request.path_qs, body))
        if request.path in self.broken:
            status, content = self.broken[request.path]
            return web.json_response(content, status=status)
        return await getattr(self, "_" + request.path.removeprefix("/v1").strip("/").replace("/", "_"))(body)

    async def _health(self, body: Any) -> web.Response:
        return web.Response()

    async def _calls(self, body: Any) -> web.Response:
        return web.json_response(self.calls)

    async def _pause(self, body: Any) -> web.Response:
        self.paused = True
        return web.json_response({"status": "paused"})

    async def _resume(self, body: Any) -> web.Response:
        self.paused = False
        return web.json_response({"status": "resumed"})

    async def _reset_prefix_cache(self, body: Any) -> web.Response:
        self.refuse_resets -= 1
        return web.json_response({"success": self.refuse_resets < 0})

    async def _collective_rpc(self, body: Any) -> web.Response:
        if body["method"] == "reload_weights":
            self.loaded = int((pathlib.Path(body["kwargs"]["weights_path"]) / "number").read_text())
        elif self.lacks_methods_of:
            message = f"Worker failed with error '{self.lacks_methods_of!r} object has no attribute {body['method']!r}'"
            return web.json_response({"error": {"message": message}}, status=500)
        return web.json_response({"results": [None]})

    async def _load_lora_adapter(self, body: Any) -> web.Response:
        self.adapters[body["lora_name"]] = int((pathlib.Path(body["lora_path"]) / "number").read_text())
        return web.Response(text="Success")

    async def _unload_lora_adapter(self, body: Any) -> web.Response:
        if self.adapters.pop(body["lora_name"], None) is None:
            return web.json_response({"error": "not found"}, status=404)
        return web.Response(text="Success")

    async def _completions(self, body: Any) -> web.Response:
        await asyncio.sleep(self.seconds)
        if body["model"] not in ("policy", *self.adapters):
            return web.json_response({"error": {"message": f"no model {body['model']}"}}, status=404)
        number = self.adapters.get(body["model"], self.loaded)
        choice = {
            "text": str(number),
            "token_ids": [10 + number, 2],
            "logprobs": {"token_logprobs": [-0.5, -0.25]},
            "finish_reason": "stop",
        }
        return web.json_response({"choices": [{**choice, "index": index} for index in reversed(range(body["n"]))]})


if __name__ == "__main__":
    web.run_app(FakeVLLM().application(), host="127.0.0.1", port=int(sys.argv[1]), print=None)
