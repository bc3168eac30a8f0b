"""The engine against a real vLLM on the CPU: what it samples is what transformers computes, with changed weights."""

import asyncio
import math
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pipeline import codec, experience, weights
from pipeline.clock import SystemClock
from pipeline.config import (
    AlgorithmConfig,
    DataConfig,
    ModelConfig,
    PromptSetConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    StoreConfig,
)
from pipeline.inference import VLLM, Completion, EngineLost, Sampling, Weights
from pipeline.messages import CONTROL_KEY, ControlState, WriterEntry
from pipeline.prompts import Prompt
from pipeline.storage import open_storage
from pipeline.tokenizer import Tokenizer
from pipeline.versions import Version
from tests import models, vllm_server
from tests.environments import sampling_with, source

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

PROMPT = [2, 34, 32, 18, 31, 99, 10, 83, 11, 99]
PACKED_HEADS = ["--worker-extension-cls", "pipeline.vllm_worker.PackedHeads"]
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
    with vllm_server.serve(base, folder / "log", "--enable-lora", "--max-lora-rank", "8", *PACKED_HEADS) as running:
        yield running


def changed(base: pathlib.Path, target: pathlib.Path, seed: int) -> pathlib.Path:
    """A policy clearly unlike the base: all of its matrices are disturbed, the embedding and so the tied head too."""
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


def test_the_processes_of_a_server_share_what_they_have_imported(server: vllm_server.VLLMServer) -> None:
    shared = []
    for pid in server.pids():
        fields = dict(
            line.split(":") for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        )
        shared.append(int(fields["Shared_Dirty"].split()[0]) / 1024)
    assert sum(mib > 100 for mib in shared) >= 3, shared  # server, engine, worker


async def test_a_cancelled_request_leaves_the_server_idle(server: vllm_server.VLLMServer, base: pathlib.Path) -> None:
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


async def test_the_trainer_sees_an_episode_of_three_turns_as_the_server_sampled_it(
    server: vllm_server.VLLMServer, base: pathlib.Path, folder: pathlib.Path
) -> None:
    """Observations included: the logprob of each sampled token is that of transformers, given all tokens before it."""
    import torch

    config = source(folder, "return f'{len(completion)} characters', 1.0, metadata['turn'] == 3")
    engine, tokenizer = VLLM(server.url, SystemClock()), Tokenizer(str(base))
    await engine.load(Weights(Version(1, 0), "base", str(base)))
    sampling = Sampling(temperature=0.7, max_new_tokens=60)
    async with sampling_with(config.model_copy(update={"max_tokens_per_turn": 16}), engine, tokenizer) as sampler:
        group = await sampler.score(await sampler.generate(Prompt(0, "s", "hi", None), 4, sampling))
    await engine.close()
    for sample in group.rollouts:
        assert (sample.invalid, sample.reward, len(sample.turns)) == (None, 3.0, 5)
        ids, start = torch.tensor([group.prompt_ids + sample.completion_ids]), len(group.prompt_ids)
        with torch.no_grad():
            logits = policy(base)(ids).logits[0, start - 1 : -1].double() / 0.7  # type: ignore[operator]
        expected = logits.log_softmax(-1).gather(1, ids[0, start:, None])[:, 0][torch.as_tensor(sample.mask)]
        sampled = torch.tensor(sample.logprobs).double()[torch.as_tensor(sample.mask)]
        assert float((sampled - expected).abs().mean()) < AGREEMENT


def adapter(base: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    """A LoRA of all linear layers, as PEFT saves it, that changes the policy clearly."""
    import peft
    import torch

    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(policy(base), config)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "lora_" in name:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
    model.save_pretrained(target)
    return target


async def test_an_adapter_gives_the_same_policy_merged_or_loaded_beside_the_base(
    server: vllm_server.VLLMServer, base: pathlib.Path, folder: pathlib.Path
) -> None:
    import peft

    from pipeline.weights import merge_adapter

    lora = adapter(base, folder / "lora")
    merge_adapter(str(base), str(lora), str(folder / "merged"))
    expected = peft.PeftModel.from_pretrained(policy(base), lora)  # type: ignore[arg-type]
    engine = VLLM(server.url, SystemClock())
    await engine.load(Weights(Version(1, 0), "base", str(base)))
    for kept in (
        Weights(Version(1, 1), "adapter", str(lora)),
        Weights(Version(1, 2), "merged", str(folder / "merged")),
    ):
        await engine.load(kept)
        completions = await engine.generate(PROMPT, 8, SAMPLING)
        assert difference(expected, completions, 0.7) < AGREEMENT
        assert difference(policy(base), completions, 0.7) > 0.1
    await engine.load(Weights(Version(1, 9), "base", str(base)))
    assert difference(policy(base), await engine.generate(PROMPT, 8, SAMPLING), 0.7) < AGREEMENT
    await engine.close()


class Run:
    """A worker process beside the server, and the test in the trainer's place."""

    def __init__(self, config: RunConfig, url: str, folder: pathlib.Path) -> None:
        (folder / "run.json").write_text(config.model_dump_json())
        environment = {**os.environ, "MILES_CONFIG": str(folder / "run.json"), "VLLM_URL": url}
        environment |= {"MILES_INSTANCE": "rollout-0", "MILES_TERMINATION_LOG": str(folder / "end")}
        self.storage = open_storage(config.store.uri)
        self.ulid = ""
        with (folder / "worker.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pipeline.rollout"], env=environment, stdout=log, stderr=log
            )

    async def registered(self) -> None:
        while not (beats := await self.storage.list("writers")):
            assert self.process.poll() is None
            await asyncio.sleep(0.2)
        self.ulid = beats[0].key.removeprefix("writers/").removesuffix(".json")

    async def grant(self, version: Version, indices: range) -> None:
        entry = WriterEntry("rollout-0", dict.fromkeys(indices, version.step), acknowledged=0)
        state = ControlState(term=1, step=version.step, version=version, writers={self.ulid: entry})
        await self.storage.put(CONTROL_KEY, state.encode())

    async def delivered(self, indices: range) -> list[experience.RolloutGroup]:
        while True:
            assert self.process.poll() is None
            groups = {}
            for info in await self.storage.list("rollouts"):
                found = await self.storage.get(info.key)
                assert found is not None
                table = codec.decode(found.data, vocabulary=100, group_size=4)
                groups.update({group.index: group for group in experience.rows(table, 0, table.num_rows)})
            if set(indices) <= groups.keys():
                return [groups[index] for index in indices]
            await asyncio.sleep(0.2)


def mismatch(model: object, groups: list[experience.RolloutGroup]) -> float:
    import torch

    total, count = 0.0, 0
    for group in groups:
        for sample in group.rollouts:
            ids = torch.tensor([group.prompt_ids + sample.completion_ids])
            with torch.no_grad():
                logits = model(ids).logits[0, len(group.prompt_ids) - 1 : -1].double()  # type: ignore[operator]
            expected = logits.log_softmax(-1).gather(1, ids[0, len(group.prompt_ids) :, None])[:, 0]
            total += float((torch.tensor(sample.logprobs).double() - expected).abs().sum())
            count += len(sample.completion_ids)
    return total / count


async def test_a_worker_samples_from_the_published_policy_through_reloads_and_a_killed_server(
    server: vllm_server.VLLMServer, base: pathlib.Path, folder: pathlib.Path
) -> None:
    """The whole worker as a process: store → weights → vLLM → rewards → shards, μ compared with transformers."""
    config = RunConfig(
        name="test",
        run_id="vllm-test",
        model=ModelConfig(uri="file:///model", path=str(base)),
        data=DataConfig(sets=[PromptSetConfig(name="sums", generator="reasoning-gym/chain_sum")]),
        rewards=[],
        algorithm=AlgorithmConfig(
            type="grpo",
            total_steps=2,
            prompts_per_step=4,
            group_size=4,
            sampling=SamplingConfig(temperature=1.0, max_new_tokens=16),
        ),
        rollout=RolloutConfig(max_model_len=256, poll_s=0.2, heartbeat_s=1.0, flush_s=0.2),
        store=StoreConfig(uri=f"file://{folder}/store"),
    )
    run = Run(config, server.url, folder)
    try:
        for step in (1, 2):
            # As the trainer publishes them: tensors alone.
            target = folder / f"step{step}"
            shutil.copytree(changed(base, folder / f"policy{step}", 10 + step), target)
            for path in target.iterdir():
                if path.suffix != ".safetensors":
                    path.unlink()
            await weights.publish(run.storage, Version(1, step), str(target), "full")
        await run.registered()
        await run.grant(Version(1, 1), range(8))
        first = await run.delivered(range(8))
        assert mismatch(policy(folder / "policy1"), first) < AGREEMENT
        assert mismatch(policy(base), first) > 0.1
        assert all(sample.invalid is None for group in first for sample in group.rollouts)

        await run.grant(Version(1, 2), range(8, 40))
        await asyncio.sleep(1.0)
        server.kill()
        await asyncio.sleep(2.0)
        server.start()
        second = await run.delivered(range(8, 40))
        assert mismatch(policy(folder / "policy2"), second) < AGREEMENT
        assert {sample.oldest for group in second for sample in group.rollouts} == {Version(1, 2)}

        run.process.terminate()
        assert await asyncio.to_thread(run.process.wait, 120) == 0
    finally:
        run.process.kill()
        run.process.wait()
