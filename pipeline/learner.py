"""The learner: roles, optimizer, and what one step does to them. Nothing of the store; the same code on every rank.

A step's batch may be split into several updates. Each packs this rank's share into micro-batches, runs forward and
backward over them, clips the global gradient and lets AdamW step. π_old is the policy before the step: with one update
that is the forward pass itself, detached; with several it is computed beforehand. What differs between algorithms is
told by pipeline/algorithms/README.md. A critic, where there is one, scores the batch before the step, too, and is
trained on every micro-batch after the policy; the norms of the two gradients are clipped apart.
"""

import importlib
import itertools
import math
import resource
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline import batching, devices, distributed, metrics, model, normalisation
from pipeline.algorithms import aggregation, kl, losses, values
from pipeline.algorithms.losses import LossSums, Tokens
from pipeline.algorithms.registry import ALGORITHMS
from pipeline.algorithms.samples import Samples
from pipeline.algorithms.values import Targets
from pipeline.batching import Batch, MicroBatch
from pipeline.config import AlgorithmConfig, RunConfig
from pipeline.metrics import Row
from pipeline.normalisation import Moments
from pipeline.roles import Load, Roles
from pipeline.schedule import learning_rate

GIB = 2**30


class Scores(NamedTuple):
    """Of a micro-batch's R response tokens, before the step changes anything; None where the loss does not need it."""

    old: Tensor | None = None  # [R] log π_old
    reference: Tensor | None = None  # [R] log π_ref
    values: Tensor | None = None  # [R] the critic's
    initial_values: Tensor | None = None  # [R] those of the critic as it began


class Interrupted(Exception):
    """The ranks agreed to stop before this step has changed anything."""


class Learner:
    def __init__(self, config: RunConfig, device: torch.device, load: Load = model.load) -> None:
        """Builds, shards and loads the models; raises ValueError for one that cannot be trained."""
        self.config, self.device = config, device
        self.kl_coefficient = config.algorithm.kl_coefficient  # moves with kl_target
        self.moments: dict[str, Moments] = {}  # of the rewards that are normalised
        self.algorithm = importlib.import_module(ALGORITHMS[config.algorithm.type].module)
        self.roles = Roles(config, device, load)
        self.policy = self.roles.policy
        own = self.roles.own_parameters()
        self.parameters = {name: each for name, each in own.items() if not model.of_critic(name)}
        self.critic_parameters = {name: each for name, each in own.items() if model.of_critic(name)}
        groups = [{"params": list(part.values())} for part in (self.parameters, self.critic_parameters) if part]
        self.optimizer = torch.optim.AdamW(
            groups,
            config.algorithm.learning_rate,
            weight_decay=config.algorithm.weight_decay,
            fused=True,  # in place: no temporary copy of the parameters
        )
        self._fill_optimizer()
        on_gpu = device.type == "cuda"
        self.peak_tflops = devices.peak_tflops(torch.cuda.get_device_name(device)) if on_gpu else None

    # One step

    def update(self, batch: Batch, step: int, stop: Callable[[], bool]) -> Row:
        """Train `batch` as optimizer step `step` (1, 2, …); returns what is logged of it, the same on every rank.

        `stop`, a collective, is asked between micro-batches; raises Interrupted, the policy unchanged, if it says so.
        An update whose gradient is not finite changes nothing; actor/skipped is the share of such ones.
        """
        started, before = time.perf_counter(), self.roles.operations
        config = self.config.algorithm.model_copy(update={"kl_coefficient": self.kl_coefficient})
        row = of_batch(batch, step)
        batch, moments = normalisation.rescaled(batch, self.config.rewards, self.moments)
        for name, scale in moments.items():
            row |= {f"reward/{name}/running_mean": scale.mean, f"reward/{name}/running_std": scale.std}
        included = batching.updates(batch, config.updates_per_step)
        trained = ~batch.truncated if config.parameters.get("mask_truncated") else batch.valid  # [N]
        matters = self._matters(batch, trained)
        shares = [self._share(batch, samples & matters) for samples in included]
        scored = [[self._score(part, stop) for part in share] for share in shares]
        judged = self._judge(batch, shares, scored)
        advantages = self.algorithm.advantages(judged, config)  # [T]
        row |= metrics.of_advantages(advantages[judged.mask])
        returns = self.algorithm.returns(judged, config) if self.roles.critic else None  # [T]
        if returns is not None:
            row |= _of_critic(judged, returns)

        rate = self._set_rates(step)
        warmup = config.parameters.get("critic_warmup_steps", 0)
        total = Sums()
        norms: list[tuple[float, float]] = []
        for samples, share, scores in zip(included, shares, scored, strict=True):
            lengths = np.where(samples & trained, batch.lengths, 0)
            weights = aggregation.token_weights(config.aggregation, lengths, config.sampling.max_new_tokens)
            for number, (part, score) in enumerate(zip(share, scores, strict=True)):
                if not norms and stop():
                    self.optimizer.zero_grad()
                    raise Interrupted
                last, places = number == len(share) - 1, batch.places(part)
                tokens = self._tokens(part, advantages[places], weights, score)
                total.add(self._backward(part, tokens, config, last, frozen=step <= warmup))
                if returns is not None:
                    total.add(self._backward_critic(part, tokens, returns[places], score, last))
            norms.append(self._apply_gradients())
        row |= total.summary(len(included))
        row |= self._adapt_kl(row, int(batch.valid.sum()))
        self.moments = moments
        row["actor/lr"] = rate
        row |= self._of_gradients(np.asarray(norms))
        row["perf/forward_backward_s"] = time.perf_counter() - started
        row |= self._utilisation(self.roles.operations - before, row["perf/forward_backward_s"])
        row["perf/peak_memory_gib"] = distributed.reduce({"peak": self._peak_gib()}, dist.ReduceOp.MAX)["peak"]
        return row

    def _matters(self, batch: Batch, trained: np.ndarray) -> np.ndarray:
        """[N] bool: the samples that the gradient depends on. Without critic, KL term and entropy bonus those of
        advantage 0, as of a group whose rewards are all the same, count in the loss's denominator only and need no
        pass; nor do those that are not `trained`."""
        config = self.config.algorithm
        if self.roles.reference or self.roles.critic or config.entropy_coefficient:
            return batch.valid
        matters = np.zeros(len(batch.valid), np.bool_)
        matters[batch.owners[self.algorithm.advantages(_samples(batch), config) != 0]] = True
        return matters & trained

    def _share(self, batch: Batch, samples: np.ndarray) -> list[MicroBatch]:
        limit = self.config.trainer.max_tokens_per_micro_batch
        return batching.pack(batch, samples, distributed.world_size(), limit)[distributed.rank()]

    def _score(self, part: MicroBatch, stop: Callable[[], bool]) -> Scores:
        """`old` where updates follow one another, or where the KL penalty is part of the reward."""
        config, roles = self.config.algorithm, self.roles
        old = config.updates_per_step > 1 and not config.correction.bypass
        old = old or (roles.reference is not None and config.kl_placement == "reward")
        if not (old or roles.reference or roles.critic):
            return Scores()
        if stop():
            raise Interrupted
        return Scores(
            old=self.policy.score(part) if old else None,
            reference=roles.reference(part) if roles.reference else None,
            values=roles.critic.score_values(part) if roles.critic else None,
            initial_values=roles.initial_values(part) if roles.initial_values else None,
        )

    def _judge(self, batch: Batch, shares: list[list[MicroBatch]], scored: list[list[Scores]]) -> Samples:
        """What advantages are made of, with what all ranks have scored. Collective."""
        config, roles = self.config.algorithm, self.roles
        parts = list(zip(itertools.chain(*shares), itertools.chain(*scored), strict=True))

        def everywhere(made: Callable[[Scores], Tensor]) -> np.ndarray:  # [T]
            own = np.zeros(len(batch.owners))
            for part, scores in parts:
                own[batch.places(part)[part.mask]] = made(scores).double().cpu().numpy()[part.mask]
            return distributed.total(own)

        def divergence(scores: Scores) -> Tensor:
            assert scores.old is not None and scores.reference is not None
            return kl.estimate(config.kl_estimator, scores.old, scores.reference)

        def of_critic(scores: Scores) -> Tensor:
            assert scores.values is not None
            return scores.values

        in_reward = roles.reference is not None and config.kl_placement == "reward"
        penalties = self.kl_coefficient * everywhere(divergence) if in_reward else None
        return _samples(batch, penalties, everywhere(of_critic) if roles.critic else None)

    def _adapt_kl(self, row: Row, samples: int) -> Row:
        """Steer the coefficient, the same on every rank; logs the one that this step had."""
        config = self.config.algorithm
        if self.roles.reference is None:
            return {}
        used = {"actor/kl_coefficient": self.kl_coefficient}
        if config.kl_target and math.isfinite(row.get("actor/reference_kl", math.nan)):
            self.kl_coefficient = kl.adapted(
                self.kl_coefficient, row["actor/reference_kl"], config.kl_target, samples, config.kl_horizon
            )
        return used

    def _tokens(
        self,
        part: MicroBatch,
        advantages: np.ndarray,  # [R]
        weights: np.ndarray,  # [N]
        scores: Scores,
    ) -> Tokens:
        def on_device(values: np.ndarray) -> Tensor:
            return torch.as_tensor(values, device=self.device)

        return Tokens(
            mask=on_device(part.mask),
            rows=on_device(part.row),
            weights=on_device(weights[part.row].astype(np.float32)),
            advantages=on_device(advantages.astype(np.float32)),
            sampled=on_device(part.sampled),
            old=scores.old,
            reference=scores.reference,
        )

    def _backward(
        self, part: MicroBatch, tokens: Tokens, config: AlgorithmConfig, last: bool, frozen: bool
    ) -> LossSums:
        """`frozen`: only the critic is trained in this step."""
        self.roles.expect_policy(last)
        with torch.set_grad_enabled(not frozen):
            logprobs, entropy = self.policy(part)
            loss, logged = self.algorithm.loss(logprobs, entropy, tokens, config)
        if not frozen:
            loss.backward()
        return logged

    def _backward_critic(
        self, part: MicroBatch, tokens: Tokens, returns: np.ndarray, scores: Scores, last: bool
    ) -> LossSums:
        critic = self.roles.critic
        assert critic is not None and scores.values is not None
        goal = torch.as_tensor(returns.astype(np.float32), device=self.device)
        targets = Targets(tokens.mask, tokens.weights, goal, scores.values, scores.initial_values)
        self.roles.expect_critic(last)
        with critic.adapter(model.CRITIC):
            loss, logged = values.value_loss(critic.values(part), targets, self.config.algorithm)
            loss.backward()
        return logged

    def _set_rates(self, step: int) -> float:
        """The learning rates of a step; returns the policy's."""
        config = self.config.algorithm
        rate = learning_rate(config, step)
        scales = (1.0, config.parameters.get("critic_learning_rate_scale", 1.0))
        for group, scale in zip(self.optimizer.param_groups, scales, strict=False):
            group["lr"] = scale * rate
        return rate

    def _apply_gradients(self) -> tuple[float, float]:
        """Clip and step, unless one is not finite; returns the norms of policy and critic, alike on every rank."""
        limit = self.config.algorithm.max_grad_norm
        norm = distributed.clip_gradients(self.parameters.values(), limit)
        critic_norm = distributed.clip_gradients(self.critic_parameters.values(), limit)
        if math.isfinite(norm) and math.isfinite(critic_norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm, critic_norm

    def _of_gradients(self, norms: np.ndarray) -> Row:
        """Of updates with these norms [updates, policy and critic]: means over those that were applied."""
        applied = np.isfinite(norms).all(axis=1)
        actor, critic = norms[applied].mean(axis=0) if applied.any() else (math.nan, math.nan)
        row = {"actor/grad_norm": float(actor), "actor/skipped": float(1 - applied.mean())}
        return row | {"critic/grad_norm": float(critic)} if self.roles.critic else row

    def _utilisation(self, operations: int, seconds: float) -> Row:
        """Model FLOPs utilisation: of what the devices of all ranks could compute meanwhile in bfloat16, the share that
        the update's passes needed. Nothing where that peak is not known."""
        everywhere = distributed.reduce({"operations": operations})["operations"]
        if self.peak_tflops is None:
            return {}
        return {"perf/mfu": everywhere / (distributed.world_size() * self.peak_tflops * 1e12 * seconds)}

    def _peak_gib(self) -> float:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / GIB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

    # What others are given

    def export(self, folder: str) -> str:
        """Write the weights as others load them, from rank 0; returns their kind (see weights). Collective."""
        if self.config.trainer.lora:
            model.adapter_files(self.policy, folder)
            return "adapter"
        model.full_files(self.policy, folder)
        return "full"

    def tensors(self) -> dict[str, Tensor]:
        """The trained parameters and AdamW's state of each, by name, not copied: loading into them restores."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.roles.own_parameters().items():
            found[f"model.{name}"] = parameter.detach()
            found |= {f"optimizer.{name}.{key}": value for key, value in self.optimizer.state[parameter].items()}
        return found

    def state(self) -> dict[str, Any]:
        """What is not a tensor to be sharded, such as the random state of every rank. Collective; JSON."""
        random = distributed.gather(torch.get_rng_state().numpy().tobytes().hex())
        return {"random": random, "kl_coefficient": self.kl_coefficient, "moments": self.moments}

    def restore(self, state: dict[str, Any]) -> None:
        """On another number of ranks the random states are not those that were saved; nothing else depends on that."""
        if self.config.algorithm.kl_target:
            self.kl_coefficient = state.get("kl_coefficient", self.kl_coefficient)
        self.moments = {name: Moments(*values) for name, values in state.get("moments", {}).items()}
        if len(state["random"]) == distributed.world_size():
            saved = bytearray.fromhex(state["random"][distributed.rank()])
            torch.set_rng_state(torch.frombuffer(saved, dtype=torch.uint8))

    def _fill_optimizer(self) -> None:
        """AdamW's state as it is before its first step, so that a checkpoint can be loaded into it."""
        for parameter in itertools.chain(self.parameters.values(), self.critic_parameters.values()):
            self.optimizer.state[parameter] = {
                "step": torch.tensor(0.0, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }


class Sums:
    """Adds up what is logged of micro-batches."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.maxima: dict[str, Tensor] = {}

    def add(self, part: LossSums) -> None:
        for name, value in part.sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        for name, value in part.maxima.items():
            self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value

    def summary(self, updates: int) -> Row:
        """Over all ranks; losses are the mean of the step's updates."""
        sums = distributed.reduce(self.sums)
        row = losses.summary(sums, distributed.reduce(self.maxima, dist.ReduceOp.MAX))
        return row | {name: row[name] / updates for name in losses.AGGREGATED if name in row}


def _samples(batch: Batch, penalties: np.ndarray | None = None, values: np.ndarray | None = None) -> Samples:
    known = batch.rewards, batch.valid, batch.groups, batch.lengths
    return Samples(*known, penalties, batch.baselines, values, batch.credits)


def _of_critic(judged: Samples, returns: np.ndarray) -> Row:
    assert judged.values is not None
    inside = judged.mask
    return {
        "critic/explained_var": values.explained_variance(judged.values[inside], returns[inside]),
        "critic/value_mean": float(judged.values[inside].mean()),
        "critic/return_mean": float(returns[inside].mean()),
    }


def of_batch(batch: Batch, step: int) -> Row:
    """reward/*, response_length/*, async/staleness_* (of this run's own samples) and the sizes of a step's batch."""
    tokens = np.diff(batch.prompts.offsets) + np.diff(batch.completions.offsets)
    return {
        **metrics.of_rewards(batch.rewards, batch.valid, batch.groups, batch.parts),
        **metrics.of_responses(batch.lengths, batch.truncated),
        **metrics.of_turns(batch.turns, np.diff(batch.completions.offsets) - batch.lengths),
        **({} if batch.steps is None else metrics.of_staleness(step - 1 - batch.steps)),
        "perf/samples": float(len(batch.rewards)),
        "perf/tokens": float(tokens.sum()),
    }
