"""`miles replay RUN --step N`: an optimizer step, trained again from what the store has of it, in this one process.

    newest checkpoint before N, or the base model ─► the steps between ─► step N, its figures beside the logged ones
    plans of the trainer's log ─► shards ─────────────┴────────────────────┘

Nothing is written to the store, and no sampler is needed. The figures are those of the run as far as arithmetic goes:
with another number of ranks, or on other hardware, sums round differently, and the steps between add that up. What
retention has deleted is named.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import math
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

try:
    import torch
    import transformers
    from torch import Tensor

    from pipeline import archive, batching, checkpoint, distributed
    from pipeline.algorithms.losses import Tokens
    from pipeline.background import Background
    from pipeline.batching import Batch, Replayed
    from pipeline.learner import Learner
except ModuleNotFoundError as missing:
    print(f"miles replay: needs {missing.name}, which is not installed: pip install 'miles[trainer]'", file=sys.stderr)
    sys.exit(2)

from pipeline import terminal
from pipeline.checkpoint import Checkpoint
from pipeline.config import AlgorithmConfig, RunConfig
from pipeline.experience import Damaged
from pipeline.metrics import Row
from pipeline.report import history, source
from pipeline.storage import Storage, StorageError
from pipeline.trainer_log import Plan

DIFFERENT, REFUSED = 1, 2  # exit codes
TOLERANCE = 1e-4
"""Relative difference of a figure that other sums in float32 explain; bfloat16's are larger."""
SMALL = 1e-3
ELSEWHERE = ("perf/", "async/")
"""Figures of the machine and of the moment."""
EVERYTHING = history.Bounds(metrics=sys.maxsize, records=sys.maxsize)


@dataclasses.dataclass(frozen=True)
class Past:
    """What the store has of the steps up to the wanted one."""

    logged: Row
    plans: dict[int, Plan]
    checkpoints: list[Checkpoint]
    """Of earlier steps, newest first."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """Of one sample, over its tokens that the loss was computed of."""

    advantage: float
    """Mean."""
    tokens: int
    weight: float
    """Mean π_old / μ: how far the policy before the step is from the one that sampled."""
    largest_weight: float
    ratio: float
    """Mean π / π_old, in the update that the sample takes part in."""


class Watched:
    """Stands in for a learner's algorithm, and notes what its loss is computed of, sample by sample."""

    def __init__(self, learner: Learner) -> None:
        self._algorithm = learner.algorithm
        self.samples: dict[int, Sample] = {}
        learner.algorithm = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._algorithm, name)

    def loss(self, logprobs: Tensor, entropy: Tensor, tokens: Tokens, config: AlgorithmConfig) -> Any:
        now = logprobs.detach()
        old = now if tokens.old is None else tokens.old
        weights, ratios = (old - tokens.sampled).exp(), (now - old).exp()
        for row in tokens.rows[tokens.mask].unique().tolist():
            own = tokens.mask & (tokens.rows == row)
            mean = [float(values[own].double().mean()) for values in (tokens.advantages, weights, ratios)]
            self.samples[row] = Sample(mean[0], int(own.sum()), mean[1], float(weights[own].max()), mean[2])
        return self._algorithm.loss(logprobs, entropy, tokens, config)


def main() -> int:
    transformers.utils.logging.disable_progress_bar()
    options = _arguments()
    try:
        with running() as background:
            storage, config, _ = background.run(source.open_run(options.run))
            if options.model:
                config = config.model_copy(update={"model": config.model.model_copy(update={"path": options.model})})
            if not (pathlib.Path(config.model.path) / "config.json").is_file():
                raise ValueError(f"the base model is not in {config.model.path}; name its folder with --model")
            return replay(config, storage, background, options.step)
    except BrokenPipeError:
        raise
    except (ValueError, StorageError, OSError) as error:
        print(f"miles replay: {error}", file=sys.stderr)
        return REFUSED


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="miles replay",
        description="Train one step of a run again, from its rollouts in the store, and compare with what was logged.",
        epilog=f"Exit codes: 0 equal to what was logged, within {TOLERANCE:g}; 1 different; 2 it cannot be replayed.",
    )
    parser.add_argument("run", help="a run's folder (runs/NAME) or its prefix in the store (s3://…, file:///…)")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="optimizer step, from 1")
    parser.add_argument("--model", metavar="FOLDER", help="base model (default: where the run had it)")
    return parser.parse_args()


def replay(config: RunConfig, storage: Storage, background: Background, step: int) -> int:
    """Print what became of `step`; returns the exit code. Raises ValueError for a step that cannot be replayed."""
    shards, replayed = archive.shards(config, storage), archive.replayed(config)
    past = background.run(look(storage, shards, step))
    device = distributed.start()
    torch.manual_seed(config.trainer.seed)
    learner = Learner(config, device)
    good = checkpoint.load(storage, background.run, past.checkpoints, learner.tensors())
    if good:
        learner.restore(good.state["learner"])
    elif config.checkpoint.resume_from:
        raise ValueError(f"step {step}: the checkpoint of step 0, which came from another run, has been deleted")
    begin = good.version.step if good else 0
    print(f"{config.name}: step {step}, {_from(begin, step, good)}", flush=True)
    for earlier in range(begin + 1, step):
        row = learner.update(background.run(load(shards, past.plans[earlier], replayed)), earlier, lambda: False)
        print(f"  step {earlier} again: reward {row['reward/mean']:.3f}, loss {row['loss/policy']:.6g}", flush=True)
    watched = Watched(learner)
    batch = background.run(load(shards, past.plans[step], replayed))
    row = learner.update(batch, step, lambda: False)
    print(samples_table(batch, past.plans[step], watched.samples))
    print(figures_table(past.logged, row))
    different = [name for name in common(past.logged, row) if difference(past.logged[name], row[name]) > TOLERANCE]
    words = f"different: {', '.join(different)}" if different else "all figures are those that were logged"
    print(f"{words} (relative tolerance {TOLERANCE:g})")
    return DIFFERENT if different else 0


@contextlib.contextmanager
def running() -> Iterator[Background]:
    background = Background()
    try:
        yield background
    finally:
        background.close()
        distributed.stop()


def _from(begin: int, step: int, good: Checkpoint | None) -> str:
    place = f"from checkpoint {good.version}" if good else "from the base model"
    if step - begin == 1:
        return place
    return place + (f", after steps {begin + 1} to {step - 1}" if step - begin > 2 else f", after step {begin + 1}")


async def look(storage: Storage, shards: Storage, step: int) -> Past:
    """Raises ValueError, naming what is not there, for a step that cannot be replayed.

    `shards`: where the shards lie that the plans name.
    """
    past = await history.read(storage, EVERYTHING)
    if step not in past.plans:
        known = f"steps 1 to {max(past.plans)}" if past.plans else "no step"
        raise ValueError(f"--step: got {step}; the run has planned {known}")
    if step not in past.metrics:
        raise ValueError(
            f"step {step} was planned, but no figures of it were logged: it has not been trained to its end"
        )
    earlier = [found for found in await checkpoint.newest(storage) if found.version.step < step]
    begin = earlier[0].version.step if earlier else 0
    gone = [each for each in range(begin + 1, step + 1) if not await _is_there(shards, past.plans.get(each))]
    if gone:
        place = f"that of step {begin} is the newest checkpoint" if earlier else "there is no checkpoint"
        listed = ", ".join(map(str, gone[:10])) + (" …" if len(gone) > 10 else "")
        raise ValueError(
            f"step {step} needs the rollouts of steps {begin + 1} to {step}, since {place} before it; those of "
            f"{listed} have been deleted (store.retention)"
        )
    return Past(past.metrics[step], past.plans, earlier)


async def _is_there(shards: Storage, plan: Plan | None) -> bool:
    keys = {group.key for group in plan.groups} if plan else set()
    return bool(keys) and all(await asyncio.gather(*(shards.head(key) for key in keys)))


async def load(shards: Storage, plan: Plan, replayed: Replayed | None) -> Batch:
    try:
        return await batching.load_plan(shards, plan, replayed)
    except Damaged as error:
        raise ValueError(f"step {plan.step}: {error}") from None


def common(logged: Mapping[str, Any], row: Row) -> list[str]:
    return sorted(name for name in row if name in logged and not name.startswith(ELSEWHERE))


def difference(logged: float, replayed: float) -> float:
    """Relative to the larger; figures below SMALL are differences of larger ones, and rounded like those."""
    if math.isnan(logged) and math.isnan(replayed):
        return 0.0
    return abs(logged - replayed) / max(SMALL, abs(logged), abs(replayed))


def figures_table(logged: Mapping[str, Any], row: Row) -> str:
    lines = [f"{'figure':<32} {'logged':>14} {'replayed':>14} {'difference':>11}"]
    for name in common(logged, row):
        lines.append(
            f"{name:<32} {logged[name]:>14.8g} {row[name]:>14.8g} {difference(logged[name], row[name]):>11.1e}"
        )
    return "\n".join(lines)


def samples_table(batch: Batch, plan: Plan, samples: Mapping[int, Sample]) -> str:
    """A line a sample; of one that no loss was computed of, because its advantage is 0 or it is invalid, the reward."""
    lines = [f"{'prompt':>8} {'sample':>6} {'reward':>9} {'advantage':>10} {'tokens':>6}  π_old/μ mean, max    π/π_old"]
    first = np.searchsorted(batch.groups, batch.groups)  # of the sample's group
    for row, group in enumerate(batch.groups.tolist()):
        told = f"{plan.groups[group].index:>8} {row - first[row]:>6} {batch.rewards[row]:>9.4f}"
        sample = samples.get(row)
        if sample is None:
            lines.append(f"{told} {'0' if batch.valid[row] else 'invalid':>10} {int(batch.lengths[row]):>6}")
        else:
            lines.append(
                f"{told} {sample.advantage:>10.5f} {sample.tokens:>6}  "
                f"{sample.weight:.6f}, {sample.largest_weight:.6f}  {sample.ratio:.6f}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    terminal.run(main)
