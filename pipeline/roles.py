"""The roles of a training step, and the models that play them; each sharded over all ranks, or over those of a replica.

With LoRA one frozen base plays all: the policy is one adapter, the critic another with a value head, the reference is
the base with its adapters disabled, and the critic as it began is that base under the head's initial weights, which are
kept. In full fine-tuning the critic is a model of its own; reference and initial critic share one frozen copy of the
base. What nobody asks for is not there: no frozen copy without KL or value regularisation. That copy, or every model,
may lie in the CPU's memory (`trainer.offload`).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from pipeline import distributed, model
from pipeline.algorithms.registry import ALGORITHMS
from pipeline.batching import MicroBatch
from pipeline.config import RunConfig
from pipeline.distributed import Sharding
from pipeline.model import Policy

Load = Callable[[Policy, RunConfig, torch.device], None]
"""Gives a policy that is built and sharded its weights: model.load."""
Score = Callable[[MicroBatch], Tensor]
"""A number for each of R response tokens, without gradient, [R]."""


class Roles:
    policy: Policy
    critic: Policy | None = None
    """Under LoRA the policy itself."""
    reference: Score | None = None
    initial_values: Score | None = None

    def __init__(self, config: RunConfig, device: torch.device, load: Load) -> None:
        """Raises ValueError for a model that cannot be trained."""
        algorithm, lora = config.algorithm, config.trainer.lora is not None
        has_critic = ALGORITHMS[algorithm.type].critic
        self.policy, self._sharding = _sharded(config, device, load, critic=has_critic and lora)
        self._critic_sharding = self._sharding
        if has_critic and lora:
            self.critic = self.policy
        elif has_critic:
            self.critic, self._critic_sharding = _sharded(config, device, load, critic=True, policy=False)
        to_reference = algorithm.kl_coefficient > 0
        to_initial = has_critic and algorithm.parameters["value_regularization"] > 0
        frozen = self.policy
        if not lora and (to_reference or to_initial):
            frozen, _ = _sharded(config, device, load, frozen=True, critic=has_critic)
        if to_reference:
            self.reference = frozen.reference
        if to_initial:
            self.initial_values = frozen.initial_values
        self.models = {self.policy, self.critic or self.policy, frozen}

    @property
    def operations(self) -> int:
        """Floating-point operations of all passes so far, on this rank."""
        return sum(each.operations for each in self.models)

    def own_parameters(self) -> dict[str, torch.nn.Parameter]:
        """All that is trained, as this rank stores it, by its name in checkpoints."""
        own = distributed.own_parameters(self.policy)
        if self.critic not in (None, self.policy):
            own |= {f"critic.{name}": each for name, each in distributed.own_parameters(self.critic).items()}
        return own

    def expect_policy(self, last: bool) -> None:
        """Call before the policy's pass over a micro-batch; `last`: the update's last one."""
        # The critic's pass follows; where it goes through the same module, that one ends the update.
        self._sharding.expect(last and self.critic is not self.policy)

    def expect_critic(self, last: bool) -> None:
        """Call before the critic's pass, which follows the policy's over the same micro-batch."""
        self._critic_sharding.expect(last)


def _sharded(config: RunConfig, device: torch.device, load: Load, **options: bool) -> tuple[Policy, Sharding]:
    built = model.build(config, device, **options)
    heads = [] if built.value_head is None else [built.value_head]
    sharding = distributed.shard(
        built,
        built.layers,
        device,
        built.dtype,
        exact=heads,
        replicas=config.trainer.model_replicas,
        offload=built.offloaded,
    )
    load(built, config, device)
    return built, sharding
