"""The trainer: plan → batch → update → new policy version, in lockstep on all ranks.

`python -m pipeline.trainer` under torchrun (see launch). Rank 0 leads: it alone talks to the workers through the
store (see lead), and tells the other ranks the plan. Every rank reads the plan's shards for itself, computes what is
the same for all, and slices by (plan, rank). Nothing may differ between ranks but the slice: whether to stop, to skip
an update, or which checkpoint is good is agreed before anybody acts on it.

Checkpoints are uploaded while training goes on (see saver). An interrupted step leaves no trace but its plan in the
log, which the next incarnation trains again.
"""

import concurrent.futures
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import transformers

from pipeline import archive, batching, checkpoint, distributed, launch, origin, termination, weights
from pipeline.background import Background
from pipeline.batching import Batch, Unreadable
from pipeline.clock import SystemClock
from pipeline.config import RunConfig
from pipeline.lead import Lead
from pipeline.learner import Interrupted, Learner
from pipeline.metrics import Row
from pipeline.parent import end_with_parent
from pipeline.saver import Saver
from pipeline.storage import Storage, open_storage
from pipeline.trainer_log import Fenced, Hopeless, Plan
from pipeline.versions import Version

log = logging.getLogger("pipeline.trainer")

T = TypeVar("T")

SLICE_S = 0.5
"""How often ranks that wait ask each other whether to stop."""
SKIPS_IN_A_ROW = 5
"""Steps with a non-finite gradient after which the run has failed."""


class Stopped(Exception):
    """Asked to stop early; the ranks have agreed on it."""


class Trainer:
    """The training loop of one rank; `lead` is there on rank 0 only."""

    def __init__(
        self, config: RunConfig, storage: Storage, background: Background, stopping: threading.Event, lead: Lead | None
    ) -> None:
        self.config, self.storage, self.background = config, storage, background
        self.stopping, self.lead = stopping, lead
        self.shards = archive.shards(config, storage)
        self.replayed = archive.replayed(config)
        self.version: Version | None = None
        self.saver = Saver(storage, background, lead.keep_checkpoint if lead else None)
        self.skips = 0
        self._ended = 0.0  # of the last step, by time.perf_counter

    def run(self, device: torch.device) -> None:
        """Train until total_steps. Raises Stopped (after a checkpoint), Hopeless, Fenced, and what the store raises."""
        try:
            version = self._resume(device)
            self._ended = time.perf_counter()
            while version.step < self.config.algorithm.total_steps:
                version = self._step(version)
            self._make_sure(version)
            self._lead("finish", version)
        except Stopped:
            if self.version is not None:
                self._make_sure(self.version, read_back=False)
            raise
        except ValueError as error:
            if self.version is None:
                raise  # the user's configuration, model or checkpoint
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    def _resume(self, device: torch.device) -> Version:
        """Restore the newest good checkpoint, or else begin as the configuration says; take over, publish that."""
        found = self.background.run(checkpoint.newest(self.storage)) if self.lead else []
        candidates = distributed.broadcast(found)
        self.learner = Learner(self.config, device)
        good = checkpoint.load(self.storage, self.background.run, candidates, self.learner.tensors())
        state, step = (good.state, good.version.step) if good else ({}, 0)
        if good:
            log.info("resumed from checkpoint %s", good.version)
            self.learner.restore(state["learner"])
            self.skips, self.saver.saved = state["skips"], good.version
        elif self.config.checkpoint.resume_from:
            self._load_origin()
        term = self._lead("take_over", state.get("coordinator"), step)
        self.version = Version(term, step)
        if self.config.checkpoint.resume_from:
            self._make_sure(self.version)  # before anybody generates with it: the other run goes on, or is deleted
        self._publish(self.version)
        return self.version

    def _load_origin(self) -> None:
        """Weights and optimizer of another run's checkpoint."""
        storage = origin.store(self.config)
        found = self.background.run(origin.candidates(self.config, storage)) if self.lead else []
        good = checkpoint.load(storage, self.background.run, distributed.broadcast(found), self.learner.tensors())
        assert good is not None
        log.info("begins from checkpoint %s of %s", good.version, storage.bucket.name)

    def _step(self, before: Version) -> Version:
        asked = time.perf_counter()
        version = Version(before.term, before.step + 1)
        plan: Plan = self._lead("next_plan", version.step, phase="waiting")
        waited = time.perf_counter() - asked
        self._enter("replaying" if plan.replayed else "training")
        batch = self._load(plan)
        try:
            row = self.learner.update(batch, version.step, self._agree_to_stop)
        except Interrupted:
            raise Stopped from None
        self._count_skips(row, version.step)
        if self.lead:
            self.background.run(self.lead.coordinator.finish_step(version.step))
        self.version = version
        row["perf/weight_publish_s"] = self._publish(version)
        every = self.config.checkpoint.every_steps
        if every and version.step % every == 0:
            row["perf/checkpoint_s"] = self._checkpoint(version)
        self.saver.settle()
        if self.lead:
            began, self._ended = self._ended, time.perf_counter()
            row |= {**self.lead.queue(), **_speed(row, waited, self._ended - began)}
            self.background.run(self.lead.record(version, row))
            log.info("step %d of %d: %s", version.step, self.config.algorithm.total_steps, _headline(row))
        return version

    def _load(self, plan: Plan) -> Batch:
        """The plan's samples, without those in shards that have been damaged since it was made; collective."""
        while True:
            damaged: dict[str, str] = {}
            try:
                batch = self.background.run(batching.load_plan(self.shards, plan, self.replayed))
            except Unreadable as error:
                damaged = error.shards
            for others in distributed.gather(damaged):
                damaged = others | damaged
            if not damaged:
                return batch
            if all(group.key in damaged for group in plan.groups):
                raise Hopeless(
                    f"step {plan.step}: none of its groups can be read any more ({min(damaged.values())}): "
                    "restore these objects, or start a new run"
                )
            log.warning("step %d is trained without the groups of %s", plan.step, "; ".join(damaged.values()))
            plan = self._lead("withdraw", plan.step, damaged)

    def _count_skips(self, row: Row, step: int) -> None:
        self.skips = self.skips + 1 if row["actor/skipped"] else 0
        if self.skips >= SKIPS_IN_A_ROW:
            raise Hopeless(
                f"a gradient was not finite in {self.skips} steps in a row, the last of them step {step}: "
                "start again with a lower algorithm.learning_rate, or with trainer.dtype float32"
            )

    def _publish(self, version: Version) -> float:
        """Store the weights of `version`, where anybody will want them, and announce them; seconds."""
        started = time.perf_counter()
        self._enter("publishing")
        wanted = distributed.broadcast(bool(self.lead and self.lead.wants_weights(version.step)))
        if wanted:
            with tempfile.TemporaryDirectory(prefix="miles-weights-") as folder:
                is_base = version.step == 0 and not self.config.checkpoint.resume_from
                kind = "base" if is_base else self.learner.export(folder)
                if self.lead:
                    files = None if is_base else folder
                    self.background.run(weights.publish(self.storage, version, files, kind))
        if self.lead:
            self.background.run(self.lead.publish(version, stored=wanted))
        return time.perf_counter() - started

    def _checkpoint(self, version: Version, read_back: bool = True) -> float:
        """Copy what the checkpoint `version` consists of, to be uploaded while training goes on; seconds."""
        started = time.perf_counter()
        self._enter("checkpointing")
        state: dict[str, Any] = {"skips": self.skips, "learner": self.learner.state()}
        if self.lead:
            state["coordinator"] = self.background.run(_called(self.lead.coordinator.state))
        self.saver.begin(version, self.learner.tensors(), state, read_back=read_back)
        return time.perf_counter() - started

    def _make_sure(self, version: Version, read_back: bool = True) -> None:
        """Return when the step of `version` is saved, by whatever trainer."""
        self._enter("checkpointing")
        self.saver.settle(wait=True)
        while self.saver.saved is None or self.saver.saved.step != version.step:
            self._checkpoint(version, read_back)
            self.saver.settle(wait=True)

    # Ranks in lockstep

    def _lead(self, name: str, *arguments: Any, phase: str | None = None) -> Any:
        """The result, on every rank, of a coroutine method of `lead` on rank 0. Raises Stopped, on rank 0 its error.

        However long it takes, the ranks meet every SLICE_S, so that no collective times out and all can stop together.
        """
        future = self.background.submit(getattr(self.lead, name)(*arguments)) if self.lead else None
        if phase:
            self._enter(phase)
        while True:
            ended = future is not None and bool(concurrent.futures.wait([future], SLICE_S).done)
            if self.lead and not ended:
                self.lead.check()
            asked = distributed.reduce({"stop": self.stopping.is_set(), "ended": ended}, dist.ReduceOp.MAX)
            if asked["ended"]:
                return distributed.broadcast(future.result() if future else None)
            if asked["stop"]:
                if future:
                    future.cancel()
                raise Stopped

    def _agree_to_stop(self) -> bool:
        return distributed.any_rank(self.stopping.is_set())

    def _enter(self, phase: str) -> None:
        if self.lead:
            self.lead.phase = phase


async def _called(function: Callable[[], T]) -> T:
    """In the event loop's thread, where nobody else is in the middle of a change."""
    return function()


def _speed(row: Row, waited: float, step_s: float) -> Row:
    """perf/* of a step that ended `step_s` after the one before; tokens are prompts and completions of all samples."""
    return {
        "async/wait_for_batch_s": waited,
        "perf/step_s": step_s,
        "perf/samples_per_s": row["perf/samples"] / step_s,
        "perf/tokens_per_s": row["perf/tokens"] / step_s,
        "perf/tokens_per_s_per_rank": row["perf/tokens"] / step_s / distributed.world_size(),
    }


def _headline(row: Row) -> str:
    return (
        f"reward {row['reward/mean']:.3f}, length {row['response_length/mean']:.0f}, loss {row['loss/policy']:.4f}, "
        f"gradient {row['actor/grad_norm']:.3g}, {_staleness(row)}"
        f"{row['perf/samples_per_s']:.1f} samples/s ({row['async/wait_for_batch_s']:.1f} s waited)"
    )


def _staleness(row: Row) -> str:
    return f"staleness {row['async/staleness_mean']:.1f}, " if "async/staleness_mean" in row else ""


# The process


def main() -> None:
    end_with_parent()  # torchrun that is killed by SIGKILL leaves its ranks behind
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    transformers.utils.logging.disable_progress_bar()
    try:
        config = launch.load()
        _train(config)
    except Exception as error:
        code, message = _explained(error)
        if code == termination.FAILED:
            traceback.print_exc()
        termination.report(message)
    else:
        code = termination.COMPLETE
    sys.stdout.flush()
    os._exit(code)  # peers may be gone: no collective, destructor or pool may keep this process


def _explained(error: Exception) -> tuple[int, str]:
    """Exit code and one line for it."""
    if isinstance(error, Stopped):
        return termination.STOPPED, f"{termination.STOPPED_PREFIX}: {error}"
    if isinstance(error, Fenced):
        return termination.FENCED, str(error)
    if isinstance(error, ValueError | Hopeless):
        return termination.USER_ERROR, str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return termination.FAILED, (
            f"out of GPU memory: lower trainer.maxTokensPerMicroBatch, set trainer.activationCheckpointing or "
            f"trainer.offload, or use more processes ({error})"
        )
    return termination.FAILED, f"{type(error).__name__}: {error}"


def _train(config: RunConfig) -> None:
    stopping = threading.Event()
    _stop_on_signal(stopping, config.trainer.stop_grace_s)
    device = distributed.start()
    torch.manual_seed(config.trainer.seed + distributed.rank())
    background, lead = Background(), None
    storage = open_storage(config.store.uri, config.store.endpoint, config.store.region)
    if distributed.rank() == 0:
        lead = Lead(config, storage, SystemClock(), random.Random(), stopping.set)
        background.run(lead.serve())
    trainer = Trainer(config, storage, background, stopping, lead)
    try:
        trainer.run(device)
    except Stopped:
        raise Stopped(_where(trainer.saver.saved)) from None
    except Hopeless as error:
        if lead:
            background.run(lead.fail(str(error)))
        raise
    finally:
        trainer.saver.discard()
        if lead:
            background.run(lead.close())


def _where(saved: Version | None) -> str:
    return f"checkpoint {saved} is written" if saved else "before the first step"


def _stop_on_signal(stopping: threading.Event, grace_s: float) -> None:
    """SIGTERM and SIGINT ask for a stop; where that is not done within `grace_s`, the process ends without it."""

    def stop(number: int, frame: Any) -> None:
        stopping.set()
        timer = threading.Timer(grace_s, _give_up, [grace_s])
        timer.daemon = True
        timer.start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)


def _give_up(grace_s: float) -> None:
    termination.report(f"asked to stop, but no checkpoint was written within {grace_s:g} s; the one before it stands")
    os._exit(termination.FAILED)


if __name__ == "__main__":
    main()
