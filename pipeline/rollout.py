"""The rollout worker: leases → prompts → completions (vLLM beside it) → rewards → shards in the store.

`python -m pipeline.rollout`. One loop looks at control/state.json and acts on it; all that takes long runs beside
it, so that heartbeats go on: the groups (`groups`), and one special task that loads weights or evaluates. Weights
change between sequences only: a newer version is fetched while groups are generated, then none is begun until
those that run are through.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import math
import os
import random
import signal
import sys
from collections.abc import Coroutine
from typing import Any

from pipeline import config as configuration
from pipeline import evaluation, polling, status, termination
from pipeline.algorithms.registry import ALGORITHMS
from pipeline.clock import Clock, SystemClock
from pipeline.config import RunConfig
from pipeline.environments.episode import Environment
from pipeline.evaluation import EvaluationSet
from pipeline.groups import Groups
from pipeline.inference import VLLM, EngineError
from pipeline.messages import EvaluationRequest
from pipeline.policies import Policies, scratch
from pipeline.prompts import PromptSource
from pipeline.rewards.model import Unready
from pipeline.rewards.scorer import Scorer
from pipeline.sampling import TOLD, Sampler
from pipeline.storage import Storage, StorageError, open_storage
from pipeline.tokenizer import Tokenizer
from pipeline.versions import Version
from pipeline.writer import Control, Report, Superseded, Writer

GRACE_S = 10.0
"""After SIGTERM, time in which running groups may still be finished."""
LEAVE_S = 25.0
"""After SIGTERM, longest time to the end of the process; Kubernetes kills after 30 s."""
MOMENT_S = 1e-3
"""A look that is due so soon is due."""
OUTAGE_S = 900.0
"""Longest silence of the store that a worker sits out."""
TRIES = 3
"""Times that one evaluation, or loading weights, may fail in a row."""

logger = logging.getLogger(__name__)


class Worker:
    """Works for the trainer until `stopping` is set or the run is over. Raises StorageError, EngineError or
    Superseded where going on makes no sense."""

    def __init__(
        self,
        config: RunConfig,
        storage: Storage,
        writer: Writer,
        prompts: PromptSource,
        sampler: Sampler,
        evaluations: list[EvaluationSet],
        clock: Clock,
        policies: Policies,
        aside: evaluation.Aside,
    ) -> None:
        self.config, self.storage, self.writer, self.clock = config, storage, writer, clock
        opened = [*prompts.sets, *(each.prompts for each in evaluations)]
        self.left_out = {each.name: each.left_out for each in opened if each.left_out}
        self.sampler, self.engine, self.evaluations, self.policies = sampler, sampler.engine, evaluations, policies
        self.aside = aside
        self.control = Control()
        self.stopping = asyncio.Event()
        self._wake = asyncio.Event()
        sampling = evaluation.sampling_of(config.algorithm.sampling)
        self.groups = Groups(
            functools.partial(aside, prompts.at),
            *(sampler, config.algorithm.group_size, sampling, clock, self._fail, self._wake),
            greedy=ALGORITHMS[config.algorithm.type].greedy_baseline,
        )
        self._special: asyncio.Task[None] | None = None
        self._evaluating: EvaluationRequest | None = None
        self._evaluated: set[int] = set()
        self._setbacks = 0  # of special tasks, in a row
        self._hold = False  # begin no group
        self._highest: Version | None = None
        self._oldest_finished: float | None = None
        self._looked = self._changed = -math.inf
        self._interval = 0.0  # until the next look
        self._answered = clock.monotonic()
        self._met = False  # the run's control file
        self._ended: int | None = None  # term of the trainer that had stopped when we came

    async def run(self) -> None:
        while not self.stopping.is_set() and not self._is_over():
            self._wake.clear()
            await self._look()
            self._direct()
            self._begin()
            await self._flush()
            await self._pause()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await self._leave()

    def stop(self) -> None:
        """Leave in order; may be called from a signal handler."""
        self.stopping.set()
        self._wake.set()

    def _is_over(self) -> bool:
        """A run that had ended when this worker came is about to be taken up again, for more steps."""
        return self.control.stop is not None and self.control.term != self._ended

    async def _look(self) -> None:
        """Tell the trainer how it goes, learn what it wants, and let go of what it no longer wants."""
        if self._until_look() > MOMENT_S:
            return
        self._looked, before = self.clock.monotonic(), self.control
        try:
            self.control = await self.writer.sync(self._report())
        except StorageError as error:
            self._outage(error)
            return
        self._answered = self.clock.monotonic()
        self._pace(self.control != before)
        if not self._met:
            self._met, self._ended = True, self.control.term if self.control.stop is not None else None
        held = self.groups.held
        await self.groups.abort(held if self.control.revoked else held - self.control.leases.keys())
        if self._evaluating and self.control.evaluation != self._evaluating and self._special:
            self._special.cancel()

    def _until_look(self) -> float:
        """Seconds."""
        return max(0.0, self._interval - (self.clock.monotonic() - self._looked))

    def _pace(self, changed: bool) -> None:
        """Whoever has nothing to do and is told nothing new looks less and less often."""
        if changed or self.groups.held or self._special:
            self._changed = self._answered
        rollout, quiet_s = self.config.rollout, self._answered - self._changed
        self._interval = polling.interval(quiet_s, rollout.poll_s, rollout.heartbeat_s, self.writer.randomness)

    def _direct(self) -> None:
        """At most one special task at a time: an evaluation, or else newer weights."""
        if self._special and self._special.done():
            self._conclude(self._special)
        if self._special or self.control.stop is not None:
            return
        request, version = self.control.evaluation, self.control.version
        if request and request.step not in self._evaluated:
            self._evaluating = request
            self._start(self._evaluate(request))
        elif version is not None and self._wanted(version):
            self._start(self._update(version))

    def _wanted(self, version: Version) -> bool:
        """Only higher versions are loaded; the same one again where the server has lost it."""
        if self.engine.version is None:
            return self._highest is None or version >= self._highest
        return version > self.engine.version

    def _start(self, special: Coroutine[Any, Any, None]) -> None:
        self._special = asyncio.create_task(special)
        self._special.add_done_callback(lambda _: self._wake.set())

    def _conclude(self, task: asyncio.Task[None]) -> None:
        request = self._evaluating
        self._special, self._evaluating, self._hold = None, None, False
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._setbacks = 0
            return
        if not isinstance(error, EngineError | StorageError):
            raise error
        logger.warning("%s: %s", f"evaluation {request.step}" if request else "loading weights", error)
        self._setbacks += 1
        if self._setbacks < TRIES:
            return
        if request is None:
            raise error
        self._setbacks = 0
        self._start(self._give_up(request, error))

    async def _update(self, version: Version) -> None:
        await self._load(version)
        self._highest = version

    async def _load(self, version: Version) -> None:
        prepared = await self.policies.prepare(version)
        self._hold = True
        await self.groups.drained()
        await self.engine.load(prepared)
        self.policies.keep_only(version)

    async def _evaluate(self, request: EvaluationRequest) -> None:
        """With exactly the version that is asked for, which may be older than the one that was loaded."""
        if self.engine.version != request.version:
            await self._load(request.version)
        self._hold = True
        limit = self.config.rollout.max_concurrent_groups
        groups = await evaluation.evaluate(self.evaluations, self.sampler, limit, self.aside)
        task_reward = self.sampler.scorer.configs[0].name
        await evaluation.publish(self.storage, request.step, request.version, self.evaluations, groups, task_reward)
        self._evaluated.add(request.step)

    async def _give_up(self, request: EvaluationRequest, error: BaseException) -> None:
        await evaluation.publish_failure(self.storage, request.step, request.version, str(error))
        self._evaluated.add(request.step)

    def _begin(self) -> None:
        version = self.engine.version
        if self._hold or version is None:
            return
        self.groups.begin(self._waiting(version), self.config.rollout.max_concurrent_groups)

    def _waiting(self, version: Version) -> set[int]:
        """Leased indices that may be generated with `version` and are not in work."""
        permitted = {index for index, minimum in self.control.leases.items() if minimum <= version.step}
        return permitted - self.groups.held

    def _fail(self, index: int, reason: str) -> None:
        self.control.leases.pop(index, None)
        self.writer.fail(index, reason)

    async def _flush(self) -> None:
        """Write shards: full ones, and the rest when it has waited long enough or nothing more is on its way."""
        finished = self.groups.finished
        if not finished:
            self._oldest_finished = None
            return
        now = self.clock.monotonic()
        self._oldest_finished = self._oldest_finished or now
        version = self.engine.version
        idle = not self.groups.running and not (version and self._waiting(version))
        due = now - self._oldest_finished >= self.config.rollout.flush_s
        if due or idle or len(finished) >= self.config.rollout.shard_groups:
            await self._deliver()

    async def _deliver(self) -> None:
        try:
            while self.groups.finished:
                batch = list(self.groups.finished.values())[: self.config.rollout.shard_groups]
                await self.writer.commit(batch)
                for group in batch:
                    self.control.leases.pop(group.index, None)
                    del self.groups.finished[group.index]
        except StorageError as error:
            self._outage(error)
        self._oldest_finished = None

    def _outage(self, error: StorageError) -> None:
        """Sit it out: leases are kept for a while, and what is finished can be delivered later."""
        if self.clock.monotonic() - self._answered > OUTAGE_S:
            raise error
        logger.warning("the store does not answer: %s", error)

    async def _pause(self) -> None:
        """Until something has changed here, or it is time to look again."""
        tasks = {
            asyncio.create_task(self._wake.wait()),
            asyncio.create_task(self.clock.sleep(self._until_look() or self.config.rollout.poll_s)),
        }
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()

    async def _leave(self) -> None:
        """Hand back what is unfinished, deliver what is finished."""
        if self._special:
            self._special.cancel()
            await asyncio.gather(self._special, return_exceptions=True)
        if self.control.stop is None:
            self.writer.hand_back(sorted(self.control.leases.keys() - self.groups.held))
            await self._tell()
        if self.control.stop is not None:  # as may be learned only now: whoever ends the run ends us at once
            await self.groups.abort(self.groups.held)
            return
        if self.groups.running:
            grace = asyncio.create_task(self.clock.sleep(GRACE_S))
            settled = asyncio.create_task(self._settled())
            await asyncio.wait({grace, settled}, return_when=asyncio.FIRST_COMPLETED)
            grace.cancel()
            settled.cancel()
        unfinished = self.groups.held - self.groups.finished.keys()
        await self.groups.abort(unfinished)
        self.writer.hand_back(sorted(unfinished))
        await self._deliver()
        await self._tell()

    async def _settled(self) -> None:
        while self.groups.running:
            await asyncio.wait(self.groups.running)

    async def _tell(self) -> None:
        try:
            self.control = await self.writer.sync(self._report())
        except StorageError as error:
            logger.warning("%s", error)

    def _report(self) -> Report:
        return Report(version=self.engine.version, draining=self.stopping.is_set(), statistics=self.gauges())

    def gauges(self) -> dict[str, float]:
        """Numbers for the heartbeat and /metrics."""
        version = self.engine.version
        return {
            "running": len(self.groups.generating),
            "scoring": len(self.groups.scoring),
            "finished": len(self.groups.finished),
            "queued": len(self._waiting(version)) if version else len(self.control.leases),
            "generated_tokens": self.groups.generated_tokens,
            "tokens_per_s": self.groups.tokens_per_s(),
            "failures": self.groups.failures,
            "policy_step": version.step if version else -1,
            **{f"reward_failures/{name}": count for name, count in self.sampler.scorer.failures.items()},
        }

    def status(self) -> dict[str, Any]:
        version = self.engine.version
        return {
            "version": list(version) if version else None,
            "writer": self.writer.ulid,
            "left_out": self.left_out,
            **self.gauges(),
        }

    def waiting_for(self) -> str | None:
        """None once the worker can generate."""
        if self.engine.version is not None:
            return None
        if self.control.stop is not None:
            return "a trainer to take up the run, which had ended"
        return "the first policy version" if self.control.version is None else "weights to be loaded"


async def serve(config: RunConfig, url: str, instance: str) -> None:
    """Run a worker for the vLLM server at `url` until the run is over or SIGTERM comes."""
    clock = SystemClock()
    storage = open_storage(config.store.uri, config.store.endpoint, config.store.region)
    prompts = await asyncio.to_thread(PromptSource, config.data, config.store)
    evaluations = await asyncio.to_thread(evaluation.open_sets, config)
    tokenizer = Tokenizer(config.model.path)
    engine = VLLM(url, clock, timeout_s=config.rollout.group_timeout_s)
    writer = Writer(storage, instance, clock, random.Random(), config.rollout.heartbeat_s)
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(scratch(config, instance))
        stack.push_async_callback(engine.close)
        offered = TOLD | prompts.columns | ({"episode_reward"} if config.environment else set())
        scorer = await stack.enter_async_context(Scorer(config.rewards, offered))
        shape = config.data.system_prompt, config.rollout.max_model_len
        environment = None
        if config.environment is not None:
            environment = await stack.enter_async_context(Environment(config.environment, engine, tokenizer, *shape))
        sampler = Sampler(engine, tokenizer, scorer, clock, *shape, environment)
        policies = Policies(storage, config, folder)
        # One thread: generators are not made for several, and an item may take seconds.
        thread = stack.enter_context(concurrent.futures.ThreadPoolExecutor(1, "prompts"))
        aside = functools.partial(asyncio.get_running_loop().run_in_executor, thread)
        worker = Worker(config, storage, writer, prompts, sampler, evaluations, clock, policies, aside)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, worker.stop)
        server = status.StatusServer(
            "miles_rollout", worker.status, worker.gauges, lambda: scorer.waiting_for or worker.waiting_for()
        )
        stack.push_async_callback(server.stop)
        await status.serve(server)
        await unless(worker.stopping, scorer.until_ready(clock))
        await worker.run()


async def unless(stopping: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Do `work`, or leave it where it is as soon as `stopping` is set. Raises what it raises."""
    told = asyncio.create_task(stopping.wait())
    doing = asyncio.create_task(work)
    await asyncio.wait({told, doing}, return_when=asyncio.FIRST_COMPLETED)
    told.cancel()
    doing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await doing


def main() -> None:
    if "PYTHONHASHSEED" not in os.environ:
        # Some generators iterate over sets: only under one hash seed does an index name one prompt everywhere.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "pipeline.rollout", *sys.argv[1:]])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    termination.clear()
    try:
        config = configuration.load()
        asyncio.run(serve(config, _environment("VLLM_URL"), _environment("MILES_INSTANCE")))
    except (StorageError, EngineError, Superseded, Unready) as error:
        termination.report(str(error))
        sys.exit(termination.FAILED)
    except ValueError as error:
        termination.report(str(error))
        sys.exit(termination.USER_ERROR)


def _environment(name: str) -> str:
    if not os.environ.get(name):
        raise ValueError(f"{name} is not set")
    return os.environ[name]


if __name__ == "__main__":
    main()
