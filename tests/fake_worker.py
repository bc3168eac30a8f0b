"""A rollout worker without vLLM: the real Writer, groups from a function, evaluations at once.

`synthetic` gives groups that are a pure function of the prompt index, so that two runs train the same batches.
`Sampled` gives groups by the published weights themselves, through transformers.
"""

import asyncio
import json
import pathlib
import random
import tempfile
from collections.abc import Callable

import numpy as np

from pipeline import weights
from pipeline.clock import Clock, SystemClock
from pipeline.config import RunConfig
from pipeline.experience import Rollout, RolloutGroup
from pipeline.messages import evaluation_key
from pipeline.storage import Storage
from pipeline.versions import Version
from pipeline.writer import Control, Report, Writer

MakeGroup = Callable[[int, Version], RolloutGroup]


def synthetic(config: RunConfig, vocabulary: int = 90) -> MakeGroup:
    """Random ids, a reward that prefers low ones; lengths differ, and some samples are invalid."""

    def make(index: int, version: Version) -> RolloutGroup:
        numbers = np.random.default_rng(index)
        prompt = numbers.integers(4, vocabulary, numbers.integers(3, 9)).tolist()
        rollouts = []
        for _ in range(config.algorithm.group_size):
            ids = numbers.integers(4, vocabulary, numbers.integers(1, 12)).tolist()
            reward = float(np.mean(np.array(ids) < vocabulary // 2))
            bad = numbers.random() < 0.1
            rollouts.append(rollout(ids, [-4.5] * len(ids), None if bad else reward, version))
        return group(index, prompt, rollouts)

    return make


def rollout(ids: list[int], logprobs: list[float], reward: float | None, version: Version) -> Rollout:
    return Rollout(
        completion_ids=ids,
        logprobs=logprobs,
        completion=" ".join(map(str, ids)),
        finish_reason="stop",
        reward=reward,
        rewards={} if reward is None else {"low": reward},
        invalid="unscorable" if reward is None else None,
        spans=[(0, version)],
    )


def group(index: int, prompt: list[int], rollouts: list[Rollout]) -> RolloutGroup:
    return RolloutGroup(
        index=index,
        set="synthetic",
        prompt=" ".join(map(str, prompt)),
        answer=None,
        prompt_ids=prompt,
        rollouts=rollouts,
        created=0.0,
    )


class Sampled:
    """Samples from the newest version, fetched from the store; the reward is the share of ids below `border`."""

    def __init__(self, config: RunConfig, storage: Storage, border: int, max_new_tokens: int = 8) -> None:
        import torch
        import transformers

        self.config, self.storage, self.border, self.max_new_tokens = config, storage, border, max_new_tokens
        self.model = transformers.AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
        self.base = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.version: Version | None = None

    async def load(self, version: Version) -> None:
        import safetensors.torch

        if version == self.version:
            return
        with tempfile.TemporaryDirectory() as folder:
            manifest = await weights.fetch(self.storage, version, f"{folder}/new", self.config.model.path)
            if manifest.kind == "adapter":
                weights.merge_adapter(self.config.model.path, f"{folder}/new", f"{folder}/merged")
            where = {"base": self.config.model.path, "adapter": f"{folder}/merged", "full": f"{folder}/new"}
            tensors = safetensors.torch.load_file(next(pathlib.Path(where[manifest.kind]).glob("*.safetensors")))
            self.model.load_state_dict(tensors, strict=False)
        self.version = version

    def __call__(self, index: int, version: Version) -> RolloutGroup:
        import torch

        prompt = np.random.default_rng(index).integers(4, 90, 5).tolist()
        with torch.no_grad():
            ids = torch.tensor([prompt] * self.config.algorithm.group_size)
            logprobs = []
            for _ in range(self.max_new_tokens):
                scores = self.model(ids).logits[:, -1].float().log_softmax(-1)
                chosen = torch.multinomial(scores.exp(), 1)
                logprobs.append(scores.gather(1, chosen))
                ids = torch.cat([ids, chosen], 1)
        completions, chances = ids[:, len(prompt) :].tolist(), torch.cat(logprobs, 1).tolist()
        rollouts = [
            rollout(tokens, chance, float(np.mean(np.array(tokens) < self.border)), version)
            for tokens, chance in zip(completions, chances, strict=True)
        ]
        return group(index, prompt, rollouts)


async def work(
    config: RunConfig,
    storage: Storage,
    make: MakeGroup,
    instance: str = "rollout-0",
    scores: Callable[[int], float] = lambda step: 0.5 + step / 100,
    clock: Clock | None = None,
) -> None:
    """Serve until the run is over or the task is cancelled; an evaluation of step s comes out as `scores`(s)."""
    writer = Writer(storage, instance, clock or SystemClock(), random.Random(), config.rollout.heartbeat_s)
    await writer.register()
    control = Control()
    loaded: Version | None = None
    while not control.stop:
        control = await writer.sync(Report(version=loaded))
        if control.version and (loaded is None or control.version > loaded):
            if isinstance(make, Sampled):
                await make.load(control.version)
            loaded = control.version
        if control.evaluation:
            await _evaluate(storage, control.evaluation.step, control.evaluation.version, scores)
        able = [index for index, minimum in sorted(control.leases.items()) if loaded and loaded.step >= minimum]
        if able:
            assert loaded
            await writer.commit([await asyncio.to_thread(make, index, loaded) for index in able])
        await asyncio.sleep(config.rollout.poll_s)


async def _evaluate(storage: Storage, step: int, version: Version, scores: Callable[[int], float]) -> None:
    key = evaluation_key(step)
    if await storage.head(key):
        return
    manifest = await weights.manifest(storage, version)
    per_prompt = [scores(step) - 0.1, scores(step) + 0.1 * step / 10, scores(step) + 0.1]
    metrics = {"avg@1": float(np.mean(per_prompt)), "samples": 1, "count": 3, "per_prompt": per_prompt}
    content = {"step": step, "version": list(version), "sets": {"held-out": {**metrics, "kind": manifest.kind}}}
    await storage.create(key, json.dumps(content).encode())
