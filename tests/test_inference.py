import asyncio
import contextlib
import math
import pathlib
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from aiohttp import web

from pipeline.clock import SystemClock
from pipeline.inference import VLLM, EngineError, EngineLost, Sampling, ServerProcess, Weights
from pipeline.versions import Version
from tests import daemons
from tests.conftest import SkippingClock
from tests.fake_vllm import FakeVLLM

SAMPLING = Sampling(temperature=0.7, max_new_tokens=5, stop=("\n\n",), stop_ids=(2, 3))


@contextlib.asynccontextmanager
async def listening(fake: FakeVLLM) -> AsyncIterator[str]:
    runner = web.AppRunner(fake.application(), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.fixture
async def fake() -> FakeVLLM:
    return FakeVLLM()


@pytest.fixture
async def engine(fake: FakeVLLM) -> AsyncIterator[VLLM]:
    async with listening(fake) as url:
        engine = VLLM(url, SkippingClock())
        yield engine
        await engine.close()


def weights(folder: pathlib.Path, number: int, kind: Any = "full") -> Weights:
    path = folder / f"{kind}{number}"
    path.mkdir(exist_ok=True)
    (path / "number").write_text(str(number))
    return Weights(Version(1, number), kind, str(path))


async def text(engine: VLLM) -> str:
    return (await engine.generate([5, 6], 1, SAMPLING))[0].text


async def test_a_group_is_one_request_that_leaves_no_sampling_parameter_to_chance(
    engine: VLLM, fake: FakeVLLM, tmp_path: pathlib.Path
) -> None:
    await engine.load(weights(tmp_path, 0, "base"))
    fake.calls.clear()
    completions = await engine.generate([5, 6], 3, SAMPLING)
    assert [(c.ids, c.logprobs, c.text, c.finish_reason) for c in completions] == [
        ([10, 2], [-0.5, -0.25], "0", "stop")
    ] * 3
    [(path, body)] = fake.calls
    assert path == "/v1/completions"
    assert body["prompt"] == [5, 6]
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "min_tokens": 0, "ignore_eos": False, "repetition_penalty": 1.0}
    neutral |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
    asked = {"n": 3, "temperature": 0.7, "max_tokens": 5, "stop": ["\n\n"], "stop_token_ids": [2, 3], "logprobs": 0}
    assert {**neutral, **asked, "return_token_ids": True}.items() <= body.items()
    assert "seed" not in body, "vLLM's CPU engine dies of it"


async def test_new_weights_are_loaded_in_the_order_that_leaves_nothing_of_the_old_policy(
    engine: VLLM, fake: FakeVLLM, tmp_path: pathlib.Path
) -> None:
    """F14: pause, load, reset the prefix cache (and look at the answer), report the version, resume."""
    await engine.load(weights(tmp_path, 1))
    fake.calls.clear()
    fake.refuse_resets = 2
    await engine.load(weights(tmp_path, 2))
    assert [path for path, _ in fake.calls] == [
        "/pause?mode=abort",
        "/collective_rpc",
        "/collective_rpc",
        *["/reset_prefix_cache"] * 3,
        "/resume",
    ]
    assert (engine.version, await text(engine)) == (Version(1, 2), "2")


@pytest.mark.parametrize(
    "failure",
    [{"/pause": (500, {})}, {"/collective_rpc": (500, {})}, {"/reset_prefix_cache": (200, {"success": False})}],
)
async def test_a_load_that_fails_leaves_no_policy_to_generate_with(
    engine: VLLM, fake: FakeVLLM, tmp_path: pathlib.Path, failure: dict[str, Any]
) -> None:
    await engine.load(weights(tmp_path, 1))
    fake.broken = failure
    with pytest.raises(EngineError):
        await engine.load(weights(tmp_path, 2))
    assert engine.version is None
    with pytest.raises(EngineLost):
        await text(engine)
    fake.broken = {}
    await engine.load(weights(tmp_path, 2))
    assert await text(engine) == "2"


async def test_a_cpu_server_that_cannot_pack_tied_heads_is_refused_full_weights_and_only_those(
    engine: VLLM, fake: FakeVLLM, tmp_path: pathlib.Path
) -> None:
    fake.lacks_methods_of = "CPUWorker"
    for kind in ("base", "merged"):
        await engine.load(weights(tmp_path, 1, kind))
    with pytest.raises(EngineError, match="started with --worker-extension-cls"):
        await engine.load(weights(tmp_path, 2, "full"))
    assert engine.version is None
    fake.lacks_methods_of = "Worker"
    await engine.load(weights(tmp_path, 2, "full"))
    assert await text(engine) == "2"


async def test_adapters_are_served_under_the_name_of_their_version_and_replaced(
    engine: VLLM, fake: FakeVLLM, tmp_path: pathlib.Path
) -> None:
    await engine.load(weights(tmp_path, 0, "base"))
    assert await text(engine) == "0"
    for number in (1, 2):
        await engine.load(weights(tmp_path, number, "adapter"))
        assert await text(engine) == str(number)
        assert list(fake.adapters.values()) == [number]
    await engine.load(weights(tmp_path, 0, "base"))
    assert await text(engine) == "0"
    assert not fake.adapters


@pytest.fixture
def process() -> Iterator["Process"]:
    with daemons.held_port() as port:
        server = Process(port)
        yield server
        server.kill()


class Process:
    """The fake server as a process of its own."""

    def __init__(self, port: int) -> None:
        self.port, self.url = port, f"http://127.0.0.1:{port}"
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-m", "tests.fake_vllm", str(self.port)])

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.mark.parametrize("kind", ["full", "adapter"])
async def test_a_server_that_restarts_alone_is_noticed_before_its_answers_are_accepted(
    process: Process, tmp_path: pathlib.Path, kind: str
) -> None:
    engine = VLLM(process.url, SystemClock())
    await engine.load(weights(tmp_path, 7, kind))
    assert await text(engine) == "7"
    process.kill()
    process.start()
    await engine.ready()
    # It is well, and would answer with the base weights.
    with pytest.raises(EngineLost):
        await text(engine)
    assert engine.version is None
    await engine.load(weights(tmp_path, 7, kind))
    assert await text(engine) == "7"
    await engine.close()


async def test_an_answer_that_a_restarted_server_gave_to_a_running_request_is_not_accepted(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is sent to the new server although the old one was alive when it was made."""
    old, new = FakeVLLM(), FakeVLLM()
    async with listening(new) as new_url:
        async with listening(old) as old_url:
            engine = VLLM(old_url, SkippingClock())
            await engine.load(weights(tmp_path, 7))
            send = engine._send

            async def through_the_restart(*arguments: Any) -> Any:
                engine.url = new_url
                answer = await send(*arguments)
                stopped.set()
                await asyncio.sleep(0.3)
                return answer

            stopped = asyncio.Event()
            monkeypatch.setattr(engine, "_send", through_the_restart)
            request = asyncio.create_task(text(engine))
            await stopped.wait()
        with pytest.raises(EngineLost):
            await request
    assert [path for path, _ in new.calls] == ["/v1/completions"]
    await engine.close()


async def test_a_server_that_dies_under_a_request_is_told_from_one_that_refuses_it(
    process: Process, tmp_path: pathlib.Path
) -> None:
    engine = VLLM(process.url, SystemClock())
    await engine.load(weights(tmp_path, 1))
    with pytest.raises(EngineError, match="/nothing answered 500") as refused:
        await engine._request("POST", "/nothing")
    assert not isinstance(refused.value, EngineLost)
    assert await text(engine) == "1"
    process.kill()
    with pytest.raises(EngineLost):
        await text(engine)
    await engine.close()


async def test_a_silent_connection_outlives_the_servers_idle_timeout_and_ends_with_the_process(
    process: Process,
) -> None:
    await VLLM(process.url, SystemClock()).ready()
    watch = await ServerProcess.open(process.url)
    await asyncio.sleep(0.5)
    assert watch.alive()
    process.kill()
    deadline = asyncio.get_running_loop().time() + 30
    while watch.alive():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)
    process.start()
    await VLLM(process.url, SystemClock()).ready()
    assert not watch.alive()
    watch.close()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((400, {"error": "prompt too long"}), "answered 400"),
        ((200, {"choices": []}), "0 completions instead of 1"),
        ((200, {"choices": [{"index": 0, "text": "no ids"}]}), "not understood"),
        ((200, "what?"), "not understood"),
    ],
)
async def test_an_answer_that_is_no_group_of_completions_is_an_error_of_that_request_alone(
    engine: VLLM, fake: FakeVLLM, tmp_path: pathlib.Path, answer: tuple[int, Any], message: str
) -> None:
    await engine.load(weights(tmp_path, 1))
    fake.broken = {"/v1/completions": answer}
    with pytest.raises(EngineError, match=message):
        await text(engine)
    fake.broken = {}
    assert await text(engine) == "1"


async def test_a_null_logprob_arrives_as_nan(engine: VLLM, fake: FakeVLLM, tmp_path: pathlib.Path) -> None:
    await engine.load(weights(tmp_path, 1))
    choice = {"index": 0, "text": "", "token_ids": [1], "logprobs": {"token_logprobs": [None]}, "finish_reason": "stop"}
    fake.broken = {"/v1/completions": (200, {"choices": [choice]})}
    assert math.isnan((await engine.generate([5], 1, SAMPLING))[0].logprobs[0])


async def test_a_request_that_is_never_answered_ends(fake: FakeVLLM, tmp_path: pathlib.Path) -> None:
    async with listening(fake) as url:
        engine = VLLM(url, SkippingClock(), timeout_s=0.2)
        await engine.load(weights(tmp_path, 1))
        fake.seconds = 60.0
        with pytest.raises(EngineError, match="no answer to /v1/completions"):
            await text(engine)
        await engine.close()


async def test_waiting_for_a_server_that_never_comes_ends() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        engine = VLLM(f"http://127.0.0.1:{unused.getsockname()[1]}", SkippingClock())
        with pytest.raises(EngineLost, match="not ready after 900 s"):
            await engine.ready()
        await engine.close()
