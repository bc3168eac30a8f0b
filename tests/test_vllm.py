"""The engine against a real vLLM on the CPU: what it samples is what transformers computes, with changed weights."""

import asyncio
import math
import pathlib
import shutil
from collections.abc import Iterator

import pytest

from pipeline.clock import SystemClock
from pipeline.inference import VLLM, Completion, EngineLost, Sampling, Weights
from pipeline.versions import Version
from tests import models, vllm_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

PROMPT = [2, 34, 32, 18, 31, 99, 10, 83, 11, 99]
AGREEMENT = 5e-5
"""Mean |log μ − log π| of sampled tokens between vLLM and transformers, float32."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def base(folder: pathlib.Path) -> pathlib.Path:
    return models.ensure("tiny", folder / "base")


@pytest.fixture(scope="module")
def server(base: pathlib.Path, folder: pathlib.Path) -> Iterator[vllm_server.VLLMServer]:
    with vllm_server.serve(base, folder / "log", "--enable-lora", "--max-lora-rank", "8") as running:
        yield running


def changed(base: pathlib.Path, target: pathlib.Path, seed: int) -> pathlib.Path:
    """A policy clearly unlike the base: all of its matrices are disturbed."""
    import safetensors.torch
    import torch

    shutil.copytree(base, target)
    tensors = safetensors.torch.load_file(target / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        if tensor.ndim == 2:
            tensor += torch.randn(tensor.shape, generator=generator) * tensor.std()
    safetensors.torch.save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def difference(model: object, completions: list[Completion], temperature: float) -> float:
    """Mean |log μ − log π| over all sampled tokens; π by transformers."""
    import torch

    total, count = 0.0, 0
    for completion in completions:
        ids = torch.tensor([PROMPT + completion.ids])
        with torch.no_grad():
            logits = model(ids).logits[0, len(PROMPT) - 1 : -1].double() / temperature  # type: ignore[operator]
        expected = logits.log_softmax(-1).gather(1, ids[0, len(PROMPT) :, None])[:, 0]
        total += float((torch.tensor(completion.logprobs).double() - expected).abs().sum())
        count += len(completion.ids)
    return total / count


def policy(folder: pathlib.Path) -> object:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")


SAMPLING = Sampling(temperature=0.7, max_new_tokens=24, stop_ids=(3,))


async def test_new_weights_answer_at_once_and_a_server_that_restarts_alone_is_noticed(
    server: vllm_server.VLLMServer, base: pathlib.Path, folder: pathlib.Path
) -> None:
    engine = VLLM(server.url, SystemClock())
    first, second = changed(base, folder / "first", 1), changed(base, folder / "second", 2)
    with pytest.raises(EngineLost):
        await engine.generate(PROMPT, 1, SAMPLING)
    await engine.load(Weights(Version(1, 0), "base", str(base)))
    assert difference(policy(base), await engine.generate(PROMPT, 8, SAMPLING), 0.7) < AGREEMENT
    for number, changed_folder in enumerate([first, second], start=1):
        await engine.load(Weights(Version(1, number), "full", str(changed_folder)))
        completions = await engine.generate(PROMPT, 8, SAMPLING)
        assert all(math.isfinite(x) for completion in completions for x in completion.logprobs)
        assert difference(policy(changed_folder), completions, 0.7) < AGREEMENT
        assert difference(policy(base), completions, 0.7) > 0.1

    running = asyncio.create_task(engine.generate(PROMPT, 64, Sampling(1.0, 200)))
    await asyncio.sleep(0.3)
    server.kill()
    with pytest.raises(EngineLost):
        await running
    assert engine.version is None
    server.start()
    await asyncio.to_thread(server.wait)
    # The server is well and has the base weights again: nothing may come from it before a reload.
    with pytest.raises(EngineLost):
        await engine.generate(PROMPT, 8, SAMPLING)
    await engine.load(Weights(Version(1, 2), "full", str(second)))
    assert difference(policy(second), await engine.generate(PROMPT, 8, SAMPLING), 0.7) < AGREEMENT
    await engine.close()


async def test_a_cancelled_request_leaves_the_server_idle(
    server: vllm_server.VLLMServer, base: pathlib.Path
) -> None:
    import aiohttp

    engine = VLLM(server.url, SystemClock())
    await engine.load(Weights(Version(1, 0), "base", str(base)))
    request = asyncio.create_task(engine.generate(PROMPT, 64, Sampling(1.0, 200)))
    await asyncio.sleep(0.3)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    async with aiohttp.ClientSession() as session:
        for _ in range(100):
            async with session.get(f"{server.url}/metrics") as response:
                lines = (await response.text()).splitlines()
            counts = [float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_")]
            if counts and not any(counts):
                break
            await asyncio.sleep(0.05)
        else:
            raise AssertionError(f"requests still run: {counts}")
    await engine.close()
