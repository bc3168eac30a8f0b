"""One optimizer step of the trainer's own code on tensors without storage, as rank 0 of any number of ranks."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from pipeline import batching, distributed, model
from pipeline.batching import Batch
from pipeline.config import RunConfig
from pipeline.experience import Ragged
from pipeline.learner import Learner
from pipeline.plan.counting import OFFLOADED, Counting

MICRO_BATCHES = 2
"""Of each update: the second one meets the gradients of the first."""


@dataclasses.dataclass(frozen=True)
class Rehearsal:
    """What one step of MICRO_BATCHES full micro-batches an update takes of a rank."""

    parameters: int
    """Of the model, without adapters."""
    memory: dict[str, int]
    """Bytes by part when their sum is largest: weights, gradients, optimizer, gathered layers, activations, logits."""
    offloaded: int
    """Bytes in the CPU's memory."""
    operations: int
    traffic: int
    """Bytes that collectives bring to the rank or take from it."""
    micro_batches: int
    tokens: int
    """Packed tokens in them."""


def rehearse(config: RunConfig, ranks: int) -> Rehearsal:
    """Raises ValueError for what Learner refuses. `config.trainer.dtype` must be stated, not auto."""
    fake, counting = FakeTensorMode(allow_non_fake_inputs=True), Counting()

    def allocate(policy: model.Policy, config: RunConfig, device: torch.device) -> None:
        with fake:
            model.allocate(policy, device)
        counting.assign(OFFLOADED if policy.offloaded else "weights", policy.parameters())
        counting.assign("weights", policy.buffers())

    with _without_peers(ranks):
        learner = Learner(config, distributed.CPU, allocate)
        state = "optimizer"
        if config.trainer.offload == "all":
            state = counting.gradients_part = OFFLOADED
        counting.assign(state, (t for state in learner.optimizer.state.values() for t in state.values()))
        counting.gradients = lambda: _gradients(learner)
        batch = full_batch(config, ranks)
        with fake, counting:
            learner.update(batch, config.algorithm.total_steps, stop=lambda: False)  # past the critic's warm-up
    return Rehearsal(
        parameters=sum(parameter.numel() for parameter in _original(learner.policy)),
        memory={part: size for part, size in counting.peak.items() if size},
        offloaded=counting.offloaded,
        operations=counting.operations,
        traffic=counting.traffic,
        **share(config, batch, ranks),
    )


def share(config: RunConfig, batch: Batch, ranks: int) -> dict[str, int]:
    """Micro-batches, and packed tokens in them, that rank 0 has of a step on `batch`."""
    limit = config.trainer.max_tokens_per_micro_batch
    included = batching.updates(batch, config.algorithm.updates_per_step)
    parts = [part for samples in included for part in batching.layout(batch, samples, ranks, limit)[0]]
    return {"micro_batches": len(parts), "tokens": sum(block.tokens for part in parts for block in part)}


@contextlib.contextmanager
def _without_peers(ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        distributed.stop()


def _original(policy: model.Policy) -> Iterator[Tensor]:
    """The parameters of the language model itself, without adapters and value head."""
    own = ("lora_", "value_head")
    return (each for name, each in policy.named_parameters() if not any(part in name for part in own))


def _gradients(learner: Learner) -> Iterator[Tensor]:
    """Those of this rank's parameters, and of gathered ones that still wait for an update's last micro-batch."""
    own = (*learner.parameters.values(), *learner.critic_parameters.values())
    found = [parameter.grad for parameter in own]
    for policy in filter(None, (learner.policy, learner.roles.critic)):
        for module in policy.modules():
            if isinstance(module, FSDPModule):
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    found += [part for parameter in group.fsdp_params for part in _waiting(parameter)]
    return (gradient for gradient in found if gradient is not None)


def _waiting(parameter: Any) -> tuple[Tensor | None, ...]:
    gathered = getattr(parameter, "_unsharded_param", None)
    return parameter.unsharded_accumulated_grad, None if gathered is None else gathered.grad


def full_batch(config: RunConfig, ranks: int) -> Batch:
    """MICRO_BATCHES micro-batches for each rank and update, each filled by one prompt and its completions.

    Completions are as long as they may be, prompts take the rest of rollout.max_model_len; rewards differ.
    """
    limit = config.trainer.max_tokens_per_micro_batch
    longest = config.algorithm.sampling.max_new_tokens
    prompt = max(1, config.rollout.max_model_len - longest)
    samples = max(2, -(-(limit - prompt) // longest))
    completion = max(1, (limit - prompt) // samples) + 1
    groups = MICRO_BATCHES * ranks * config.algorithm.updates_per_step
    return uniform_batch(groups, samples, prompt, completion)


def uniform_batch(groups: int, samples: int, prompt: int, completion: int) -> Batch:
    """`groups` × `samples` samples of the same lengths, in tokens; within a group rewards differ."""
    count = groups * samples

    def rows(length: int, value: Any) -> Ragged:
        values = np.broadcast_to(value, count * length)  # takes no memory: a step may have a hundred million
        return Ragged(values, np.arange(count + 1, dtype=np.int64) * length)

    return Batch(
        prompts=rows(prompt, np.int32(0)),
        completions=rows(completion, np.int32(0)),
        logprobs=rows(completion, np.float32(-1)),
        mask=rows(completion, np.True_),
        rewards=np.arange(count) % 2.0,
        parts={},
        valid=np.ones(count, np.bool_),
        groups=np.repeat(np.arange(groups), samples),
        steps=np.zeros(count, np.int64),
        truncated=np.zeros(count, np.bool_),
        baselines=np.full(count, 0.5),
    )
