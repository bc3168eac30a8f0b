"""The learner: policy, optimizer, and what one step does to them. Nothing of the store; the same code on every rank.

A step's batch may be split into several updates. Each packs this rank's share into micro-batches, runs forward and
backward over them, clips the global gradient and lets AdamW step. π_old is the policy before the step: with one update
that is the forward pass itself, detached; with several it is computed beforehand. What differs between algorithms is
told by pipeline/algorithms/README.md.
"""

import importlib
import math
import resource
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline import batching, distributed, metrics, model
from pipeline.algorithms import aggregation, kl, losses
from pipeline.algorithms.losses import LossSums, Tokens
from pipeline.algorithms.registry import ALGORITHMS
from pipeline.algorithms.samples import Samples
from pipeline.batching import Batch, MicroBatch
from pipeline.config import AlgorithmConfig, RunConfig
from pipeline.metrics import Row
from pipeline.schedule import learning_rate

GIB = 2**30


class Scores(NamedTuple):
    """Of a micro-batch's R response tokens, before the step changes anything; None where the loss does not need it."""

    old: Tensor | None  # [R] log π_old
    reference: Tensor | None  # [R] log π_ref


class Interrupted(Exception):
    """The ranks agreed to stop before this step has changed anything."""


class Learner:
    def __init__(self, config: RunConfig, device: torch.device) -> None:
        """Builds and shards the model; raises ValueError for one that cannot be trained."""
        self.config, self.device = config, device
        self.kl_coefficient = config.algorithm.kl_coefficient  # moves with kl_target
        self.algorithm = importlib.import_module(ALGORITHMS[config.algorithm.type].module)
        self.policy = model.build(config, device)
        self.sharding = distributed.shard(self.policy, self.policy.layers, device, self.policy.dtype)
        self.reference = self._reference()
        self.parameters = distributed.own_parameters(self.policy)
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), config.algorithm.learning_rate, weight_decay=config.algorithm.weight_decay
        )
        self._fill_optimizer()

    def _reference(self) -> Callable[[MicroBatch], Tensor] | None:
        """Scores by the base model, where KL to it is wanted; a second, sharded copy only in full fine-tuning."""
        if self.config.algorithm.kl_coefficient == 0:
            return None
        if self.config.trainer.lora:
            return self.policy.reference
        frozen = model.build(self.config, self.device, frozen=True)
        distributed.shard(frozen, frozen.layers, self.device, frozen.dtype)
        return frozen.score

    # One step

    def update(self, batch: Batch, step: int, stop: Callable[[], bool]) -> Row:
        """Train `batch` as optimizer step `step` (1, 2, …); returns what is logged of it, the same on every rank.

        `stop`, a collective, is asked between micro-batches; raises Interrupted, the policy unchanged, if it says so.
        A step whose gradient is not finite changes nothing and has actor/skipped 1.
        """
        started = time.perf_counter()
        config = self.config.algorithm.model_copy(update={"kl_coefficient": self.kl_coefficient})
        row = of_batch(batch, step)
        included = batching.updates(batch, config.updates_per_step)
        if config.parameters.get("mask_truncated"):
            included = [samples & ~batch.truncated for samples in included]
        matters = self._matters(batch)
        shares = [self._share(batch, samples & matters) for samples in included]
        scored = [[self._score(part, stop) for part in share] for share in shares]
        samples_of_step = _samples(batch, self._penalties(batch, shares, scored))
        advantages = self.algorithm.advantages(samples_of_step, config)  # [T]
        row |= metrics.of_advantages(advantages[samples_of_step.mask])

        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        total = Sums()
        norms: list[float] = []
        for samples, share, scores in zip(included, shares, scored, strict=True):
            lengths = np.where(samples, batch.lengths, 0)
            weights = aggregation.token_weights(config.aggregation, lengths, config.sampling.max_new_tokens)
            for number, (part, score) in enumerate(zip(share, scores, strict=True)):
                if not norms and stop():
                    self.optimizer.zero_grad()
                    raise Interrupted
                tokens = self._tokens(part, advantages[batch.places(part)], weights, score)
                total.add(self._backward(part, tokens, config, last=number == len(share) - 1))
            norms.append(self._apply_gradient())
        row |= total.summary(len(included))
        row |= self._adapt_kl(row, int(batch.valid.sum()))
        row["actor/lr"] = learning_rate(config, step)
        row["actor/grad_norm"] = norms[0] if len(norms) == 1 else float(np.mean(norms))
        row["actor/skipped"] = float(not all(map(math.isfinite, norms)))
        row["perf/forward_backward_s"] = time.perf_counter() - started
        row["perf/peak_memory_gib"] = distributed.reduce({"peak": self._peak_gib()}, dist.ReduceOp.MAX)["peak"]
        return row

    def _matters(self, batch: Batch) -> np.ndarray:
        """[N] bool: the samples that the gradient depends on. Without a KL term or an entropy bonus those of advantage
        0, as of a group whose rewards are all the same, count in the loss's denominator only and need no pass."""
        config = self.config.algorithm
        if self.reference is not None or config.entropy_coefficient:
            return batch.valid
        matters = np.zeros(len(batch.valid), np.bool_)
        matters[batch.owners[self.algorithm.advantages(_samples(batch), config) != 0]] = True
        return matters

    def _share(self, batch: Batch, samples: np.ndarray) -> list[MicroBatch]:
        limit = self.config.trainer.max_tokens_per_micro_batch
        return batching.pack(batch, samples, distributed.world_size(), limit)[distributed.rank()]

    def _score(self, part: MicroBatch, stop: Callable[[], bool]) -> Scores:
        """`old` where updates follow one another, or where the KL penalty is part of the reward."""
        config = self.config.algorithm
        several = config.updates_per_step > 1 and not config.correction.bypass
        if self.reference is None and not several:
            return Scores(None, None)
        if stop():
            raise Interrupted
        beforehand = several or (self.reference and config.kl_placement == "reward")
        return Scores(self.policy.score(part) if beforehand else None, self.reference(part) if self.reference else None)

    def _penalties(self, batch: Batch, shares: list[list[MicroBatch]], scored: list[list[Scores]]) -> np.ndarray | None:
        """[T] kl_coefficient × KL of each token, where that is taken from the reward. Collective."""
        config = self.config.algorithm
        if self.reference is None or config.kl_placement == "loss":
            return None
        own = np.zeros(len(batch.owners))
        for share, scores in zip(shares, scored, strict=True):
            for part, score in zip(share, scores, strict=True):
                assert score.old is not None
                assert score.reference is not None
                divergence = kl.estimate(config.kl_estimator, score.old, score.reference).double().cpu().numpy()
                own[batch.places(part)[part.mask]] = divergence[part.mask]
        return self.kl_coefficient * distributed.total(own)

    def _adapt_kl(self, row: Row, samples: int) -> Row:
        """Steer the coefficient, the same on every rank; logs the one that this step had."""
        config = self.config.algorithm
        if self.reference is None:
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

    def _backward(self, part: MicroBatch, tokens: Tokens, config: AlgorithmConfig, last: bool) -> LossSums:
        self.sharding.expect(last)
        logprobs, entropy = self.policy(part)
        loss, logged = self.algorithm.loss(logprobs, entropy, tokens, config)
        loss.backward()
        return logged

    def _apply_gradient(self) -> float:
        """Clip and step, unless the gradient is not finite; returns its norm, which is the same on every rank."""
        norm = distributed.clip_gradients(self.parameters.values(), self.config.algorithm.max_grad_norm)
        if math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

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
        for name, parameter in distributed.own_parameters(self.policy).items():
            found[f"model.{name}"] = parameter.detach()
            found |= {f"optimizer.{name}.{key}": value for key, value in self.optimizer.state[parameter].items()}
        return found

    def state(self) -> dict[str, Any]:
        """What is not a tensor to be sharded: the random state of every rank. Collective; JSON."""
        random = distributed.gather(torch.get_rng_state().numpy().tobytes().hex())
        return {"random": random, "kl_coefficient": self.kl_coefficient}

    def restore(self, state: dict[str, Any]) -> None:
        """On another number of ranks the random states are not those that were saved; nothing else depends on that."""
        if self.config.algorithm.kl_target:
            self.kl_coefficient = state.get("kl_coefficient", self.kl_coefficient)
        if len(state["random"]) == distributed.world_size():
            saved = bytearray.fromhex(state["random"][distributed.rank()])
            torch.set_rng_state(torch.frombuffer(saved, dtype=torch.uint8))

    def _fill_optimizer(self) -> None:
        """AdamW's state as it is before its first step, so that a checkpoint can be loaded into it."""
        for parameter in self.parameters.values():
            self.optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
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


def _samples(batch: Batch, penalties: np.ndarray | None = None) -> Samples:
    return Samples(batch.rewards, batch.valid, batch.groups, batch.lengths, penalties, batch.baselines)


def of_batch(batch: Batch, step: int) -> Row:
    """reward/*, response_length/*, async/staleness_* and the sizes of a step's batch."""
    tokens = np.diff(batch.prompts.offsets) + np.diff(batch.completions.offsets)
    return {
        **metrics.of_rewards(batch.rewards, batch.valid, batch.groups, batch.parts),
        **metrics.of_responses(batch.lengths, batch.truncated),
        **metrics.of_turns(batch.turns, np.diff(batch.completions.offsets) - batch.lengths),
        **metrics.of_staleness(step - 1 - batch.steps),
        "perf/samples": float(len(batch.rewards)),
        "perf/tokens": float(tokens.sum()),
    }
