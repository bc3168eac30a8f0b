"""The inference engine: a vLLM server beside the worker, over HTTP.

Tokens are accepted only from the very server process into which the current weights were loaded: a vLLM that
restarted by itself serves the base weights again and says nothing. So a connection that never sends anything is
opened to the server before weights are loaded (`ServerProcess`). It ends when that process does, whatever killed
it, and it is looked at after every answer, in the kernel and not in the event loop: since two processes cannot
listen on one port, an answer that arrived while it was still open came from that process.
"""

import asyncio
import contextlib
import dataclasses
import logging
import math
import socket
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import aiohttp

from pipeline.clock import Clock
from pipeline.versions import Version

READY_TIMEOUT_S = 900.0
LOAD_TIMEOUT_S = 900.0
REQUEST_TIMEOUT_S = 30.0
"""For health checks, pause, resume and the like."""
RESET_TRIES = 20
CPU_WORKER = "CPUWorker"
"""Class that vLLM names when its worker on a CPU lacks a method."""
MOURNING_S = 1.0
"""After a lost connection, time in which a dying process's other connections close as well."""
STAND_IN = -9999.0
"""vLLM's spelling of minus infinity, which JSON does not have."""
ROUNDING = 1e-5
"""Log-probabilities this little above 0 are float32's doing, and are 0."""

logger = logging.getLogger(__name__)


class EngineError(Exception):
    """The engine answered, but not with completions; says why. Another try with this prompt is likely to fail too."""


class EngineLost(EngineError):
    """The server is gone, or is another process than the one that weights were loaded into: load them again."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Everything else that shapes the distribution is switched off, because the trainer could not reproduce it."""

    temperature: float
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    """Ids that end a completion, and belong to it."""


@dataclasses.dataclass(frozen=True)
class Completion:
    ids: list[int]  # [C], with the one that ended it
    logprobs: list[float]  # [C], of the sampled ids under the distribution they were drawn from
    text: str
    finish_reason: str  # stop | length


def unfit(prompt_ids: Sequence[int], sampling: Sampling, max_model_len: int) -> str | None:
    """Why this prompt cannot be completed; None if it can."""
    if not prompt_ids:
        return "the prompt has no tokens"
    if len(prompt_ids) + sampling.max_new_tokens > max_model_len:
        return (
            f"the prompt has {len(prompt_ids)} tokens; with sampling.maxNewTokens {sampling.max_new_tokens} "
            f"they exceed rollout.maxModelLen {max_model_len}"
        )
    return None


def defect(completion: Completion, vocabulary_size: int) -> str | None:
    """Why the trainer could do nothing with this completion; None if it can."""
    if not completion.ids:
        return "empty completion"
    if len(completion.logprobs) != len(completion.ids):
        return f"{len(completion.logprobs)} logprobs for {len(completion.ids)} tokens"
    for token, logprob in zip(completion.ids, completion.logprobs, strict=True):
        if not 0 <= token < vocabulary_size:
            return f"token id {token} is outside the vocabulary of {vocabulary_size}"
        if not math.isfinite(logprob) or logprob <= STAND_IN or logprob > ROUNDING:
            return f"logprob {logprob:g}"
    return None


@dataclasses.dataclass(frozen=True)
class Weights:
    """Where a policy version lies, in folders that the engine can read.

    base: the model as fetched. full: a whole model. merged: the base with an adapter merged into its linear layers.
    These replace the served model. adapter: LoRA, loaded beside the base.
    """

    version: Version
    kind: Literal["base", "full", "merged", "adapter"]
    folder: str


class Engine(Protocol):
    version: Version | None
    """Policy that answers come from; None: unknown, weights must be loaded before anything is generated."""

    async def generate(self, prompt_ids: list[int], n: int, sampling: Sampling) -> list[Completion]:
        """`n` completions by `version`. Raises EngineError; EngineLost leaves `version` None. Cancelling aborts."""
        ...

    async def load(self, weights: Weights) -> None:
        """Make `weights` the policy; waits for the server first. The caller has nothing running. Raises EngineLost."""
        ...

    async def close(self) -> None: ...


class ServerProcess:
    """Tells whether the process that listened at `url` when this was opened is still the one that listens there."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    @classmethod
    async def open(cls, url: str) -> "ServerProcess":
        """Raises OSError where nothing listens."""
        parts = urllib.parse.urlsplit(url)
        address = parts.hostname or "127.0.0.1", parts.port or (443 if parts.scheme == "https" else 80)
        connection = await asyncio.to_thread(socket.create_connection, address, REQUEST_TIMEOUT_S)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setblocking(False)
        return cls(connection)

    def alive(self) -> bool:
        try:
            self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False  # the end of the stream, or unasked words on its way to it

    def close(self) -> None:
        self._connection.close()


class VLLM:
    """`base`: name under which the server serves the model (`--served-model-name`)."""

    def __init__(self, url: str, clock: Clock, base: str = "policy", timeout_s: float = 1800.0) -> None:
        self.url, self.clock = url.rstrip("/"), clock
        self.version: Version | None = None
        self._base = self._model = base
        self._server: ServerProcess | None = None
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def generate(self, prompt_ids: list[int], n: int, sampling: Sampling) -> list[Completion]:
        self._check_server()
        if self.version is None:
            raise EngineLost("weights were not loaded completely")
        request = {
            "model": self._model,
            "prompt": prompt_ids,
            "n": n,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "min_tokens": 0,
            "ignore_eos": False,
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.stop_ids),
            "logprobs": 0,
            "return_token_ids": True,
            "stream": False,
        }
        # No seed: one of its own kills vLLM's engine on a CPU.
        answer = await self._request("POST", "/v1/completions", request, timeout_s=self._timeout_s)
        self._check_server()
        return _completions(answer, n)

    async def load(self, weights: Weights) -> None:
        self.version = None
        await self.ready()
        await self._watch()
        # Nothing of ours is running; what a predecessor left behind is aborted.
        await self._request("POST", "/pause?mode=abort")
        await self._exchange(weights)
        await self._forget_prefixes()
        await self._request("POST", "/resume")
        self._check_server()
        self.version = weights.version
        logger.info("policy %s (%s) is loaded", weights.version, weights.kind)

    async def ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until the server answers. Raises EngineLost after `timeout_s`."""
        deadline = self.clock.monotonic() + timeout_s
        while True:
            try:
                await self._send("GET", "/health", None, REQUEST_TIMEOUT_S)
                return
            except (aiohttp.ClientError, TimeoutError, OSError, EngineError) as error:
                if self.clock.monotonic() >= deadline:
                    raise EngineLost(f"vLLM at {self.url} is not ready after {timeout_s:.0f} s: {error}") from None
            await self.clock.sleep(1.0)

    async def close(self) -> None:
        if self._server:
            self._server.close()
        if self._session:
            await self._session.close()

    async def _watch(self) -> None:
        if self._server:
            self._server.close()
        try:
            self._server = await ServerProcess.open(self.url)
        except OSError as error:
            raise EngineLost(f"vLLM at {self.url} went away: {error}") from None

    def _check_server(self) -> None:
        """Raises EngineLost unless the process that was watched when weights were last loaded still serves."""
        if self._server is None or not self._server.alive():
            self.version = None
            raise EngineLost(f"vLLM at {self.url} is not the process that the weights were loaded into")

    async def _exchange(self, weights: Weights) -> None:
        if weights.kind == "adapter":
            name = f"{self._base}-{weights.version}"
            body = {"lora_name": name, "lora_path": weights.folder, "load_inplace": True}
            await self._request("POST", "/v1/load_lora_adapter", body)
            await self._serve(name)
            return
        await self._serve(self._base)
        body = {"method": "reload_weights", "kwargs": {"weights_path": weights.folder}}
        await self._request("POST", "/collective_rpc", body, timeout_s=LOAD_TIMEOUT_S)
        if weights.kind != "merged":
            await self._pack_heads(required=weights.kind == "full")

    async def _pack_heads(self, required: bool) -> None:
        """On a CPU a head tied to the embedding must be packed anew (see vllm_worker). Other servers need nothing."""
        try:
            await self._request("POST", "/collective_rpc", {"method": "pack_heads"})
        except EngineError as error:
            if required and CPU_WORKER in str(error):
                raise EngineError(
                    "vLLM on a CPU serves updated weights rightly only when it is started with "
                    "--worker-extension-cls pipeline.vllm_worker.PackedHeads"
                ) from None

    async def _serve(self, model: str) -> None:
        """Let `model` answer from now on; an adapter that did before is removed."""
        previous, self._model = self._model, model
        if previous not in (self._base, model):
            with contextlib.suppress(EngineError):  # a new server does not know it
                await self._request("POST", "/v1/unload_lora_adapter", {"lora_name": previous})

    async def _forget_prefixes(self) -> None:
        """Cached keys and values are the old policy's. The server refuses, in its answer alone, while any is in use."""
        for _ in range(RESET_TRIES):
            answer = await self._request("POST", "/reset_prefix_cache")
            if isinstance(answer, dict) and answer.get("success") is True:
                return
            await self.clock.sleep(0.1)
        raise EngineError(f"vLLM at {self.url} does not reset its prefix cache: {answer}")

    async def _request(self, method: str, path: str, body: Any = None, timeout_s: float = REQUEST_TIMEOUT_S) -> Any:
        try:
            return await self._send(method, path, body, timeout_s)
        except TimeoutError:
            raise EngineError(f"no answer to {path} within {timeout_s:.0f} s") from None
        except (aiohttp.ClientError, OSError) as error:
            await self.clock.sleep(MOURNING_S)
            self._check_server()
            raise EngineError(f"{path}: {error}") from None

    async def _send(self, method: str, path: str, body: Any, timeout_s: float) -> Any:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._http().request(method, self.url + path, json=body, timeout=timeout) as response:
            if response.status != 200:
                raise EngineError(f"{path} answered {response.status}: {(await response.text())[:300]}")
            return await response.json() if response.content_type == "application/json" else await response.text()

    def _http(self) -> aiohttp.ClientSession:
        # A new connection each time: the server closes idle ones when it likes, and a POST is not sent twice.
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
        return self._session


def _completions(answer: Any, n: int) -> list[Completion]:
    try:
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        completions = [
            Completion(
                ids=choice["token_ids"],
                logprobs=[float("nan") if x is None else float(x) for x in choice["logprobs"]["token_logprobs"]],
                text=choice["text"],
                finish_reason=choice["finish_reason"],
            )
            for choice in choices
        ]
    except (KeyError, TypeError) as error:
        raise EngineError(f"vLLM's answer is not understood: {type(error).__name__} {error}") from None
    if len(completions) != n:
        raise EngineError(f"vLLM gave {len(completions)} completions instead of {n}")
    if any(completion.finish_reason not in ("stop", "length") for completion in completions):
        raise EngineError(f"vLLM ended a completion by {sorted({c.finish_reason for c in completions})}")
    return completions


class FakeEngine:
    """An engine for tests, in the caller's (perhaps virtual) time. `script(prompt_ids, version)` is one completion.

    `restart()` is a server that lost its weights; what was running then fails, as it would.
    """

    def __init__(self, clock: Clock, script: Callable[[list[int], Version], Completion], seconds: float = 0.0) -> None:
        self.clock, self.script, self.seconds = clock, script, seconds
        self.version: Version | None = None
        self.loaded: list[Weights] = []
        self.running = 0
        self.most_running = 0
        self._process = 0

    async def generate(self, prompt_ids: list[int], n: int, sampling: Sampling) -> list[Completion]:
        process, version = self._process, self.version
        if version is None:
            raise EngineLost("no weights are loaded")
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            await self.clock.sleep(self.seconds)
        finally:
            self.running -= 1
        if process != self._process:
            raise EngineLost("the server has restarted")
        return [self.script(prompt_ids, version) for _ in range(n)]

    async def load(self, weights: Weights) -> None:
        assert self.running == 0, "weights change between sequences only"
        self.loaded.append(weights)
        self.version = weights.version

    def restart(self) -> None:
        self._process += 1
        self.version = None

    async def close(self) -> None:
        pass
