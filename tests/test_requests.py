"""How often a run asks its store: the arithmetic of `miles plan` against calls that are counted, in virtual time."""

import asyncio
import collections
import random

import numpy as np
import pytest

from pipeline import batching, polling
from pipeline.config import RunConfig
from pipeline.coordinator import Coordinator
from pipeline.experience import Rollout, RolloutGroup
from pipeline.messages import SHARDS_FOLDER
from pipeline.plan import requests
from pipeline.storage import FaultyBucket, MemoryBucket, Storage
from pipeline.versions import Version
from pipeline.writer import Control, Report, Writer
from tests.virtual import VirtualClock, in_virtual_time

HOUR_S = 3600.0
KINDS = {"read": "get", "stat": "get", "write": "put", "list": "list"}


class Counted:
    """Counts calls by kind, and the bytes of shards."""

    def __init__(self) -> None:
        self.calls = collections.Counter[str]()

    async def before(self, operation: str, key: str) -> None:
        self.calls[KINDS[operation]] += 1

    async def after(self, operation: str, key: str) -> None:
        pass


def configuration(**algorithm) -> RunConfig:
    settings = {"type": "grpo", "total_steps": 10_000, "prompts_per_step": 8, "group_size": 2, "max_staleness": 1}
    return RunConfig.model_validate(
        {
            "name": "sums",
            "run_id": "r1",
            "model": {"uri": "none", "path": "none"},
            "data": {"sets": []},
            "rewards": [{"name": "sum"}],
            "algorithm": settings | algorithm,
            "store": {"uri": "memory://none"},
        }
    )


def group(index: int, version: Version) -> RolloutGroup:
    rollouts = [
        Rollout([7, 2], [-0.5, -0.1], "4", "stop", reward, {"sum": reward}, None, [(0, version)])
        for reward in (0.0, 1.0)
    ]
    return RolloutGroup(index, "sums", "2 + 2 =", "4", [5, 9], rollouts, 0.0)


class Run:
    """Writers that poll as pipeline.rollout does, and a trainer; each with a count of its calls."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.clock, self.bucket = config, VirtualClock(), MemoryBucket(VirtualClock())
        self.tasks: list[asyncio.Task] = []
        self.finished = 0
        self.trainer: Coordinator | None = None

    def storage(self, counted: Counted) -> Storage:
        return Storage(FaultyBucket(self.bucket, counted), self.clock)

    def start(self, work) -> asyncio.Task:
        self.tasks.append(asyncio.ensure_future(work))
        return self.tasks[-1]

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def worker(self, number: int, counted: Counted, generate_s: float) -> None:
        rollout = self.config.rollout
        writer = Writer(
            self.storage(counted), f"rollout-{number}", self.clock, random.Random(number), rollout.heartbeat_s
        )
        await writer.register()
        version, ready, flushed = None, {}, self.clock.now()
        control, changed = Control(), self.clock.now()
        while True:
            before, control = control, await writer.sync(Report(version))
            if control != before or ready:
                changed = self.clock.now()
            version = control.version or version
            now = self.clock.now()
            for index in control.leases:
                ready.setdefault(index, now + generate_s)
            due = [index for index, when in ready.items() if when <= now]
            if due and version and now - flushed >= rollout.flush_s:
                await writer.commit([group(index, version) for index in due])
                flushed = now
                for index in due:
                    del ready[index]
            quiet_s = self.clock.now() - changed
            await self.clock.sleep(polling.interval(quiet_s, rollout.poll_s, rollout.heartbeat_s, writer.randomness))

    async def train(self, counted: Counted, train_s: float) -> None:
        storage = self.storage(counted)
        self.trainer = trainer = Coordinator(storage, self.config, self.clock, random.Random(0))
        await trainer.take_over()
        self.start(trainer.run())
        await trainer.publish(Version(1, 0))
        for step in range(1, self.config.algorithm.total_steps + 1):
            plan = await trainer.next_plan(step)
            await batching.load_plan(storage, plan)
            await self.clock.sleep(train_s)
            for key in (f"metrics/{step}", f"weights/{step}", f"weights/{step}-manifest"):
                await storage.put(key, b"")
            await trainer.finish_step(step)
            await trainer.publish(Version(1, step))
            self.finished = step


@pytest.mark.parametrize("quiet_s", [3.0, 30.0, 90.0, 3600.0])
@pytest.mark.parametrize(("shortest_s", "longest_s"), [(0.5, 5.0), (2.0, 5.0), (5.0, 5.0)])
def test_the_looks_of_a_quiet_time_are_counted_rather_too_many_than_too_few(quiet_s, shortest_s, longest_s):
    looks, looked = 0, 0.0
    for now in np.arange(0.0, quiet_s, 0.05):
        if now - looked >= polling.patience(now, shortest_s, longest_s):
            looks, looked = looks + 1, now
    assert looks <= polling.looks(quiet_s, shortest_s, longest_s) <= 1.1 * looks + 1


@in_virtual_time
async def test_a_worker_whose_trainer_has_stopped_polls_no_more_than_stated_and_writes_no_shard_for_an_hour():
    config = configuration()
    run, idle = Run(config), Counted()
    training = run.start(run.train(Counted(), train_s=5.0))
    run.start(run.worker(0, idle, generate_s=3.0))
    await asyncio.sleep(300)
    for task in run.tasks:
        if task is training or task is run.tasks[2]:
            task.cancel()
    await asyncio.sleep(60)  # what was leased is written
    shards = len(await run.bucket.list(SHARDS_FOLDER))
    idle.calls.clear()
    await asyncio.sleep(HOUR_S)
    stated = requests.idle_worker(config)
    print(f"\nan idle worker in an hour: {dict(idle.calls)}, ${stated.dollars:.4f}")
    assert len(await run.bucket.list(SHARDS_FOLDER)) == shards
    assert idle.calls["get"] == pytest.approx(stated.get, rel=0.05)
    assert idle.calls["put"] == pytest.approx(stated.put, rel=0.05)
    assert idle.calls["list"] == 0
    assert stated.dollars < 0.003
    await run.stop()


@in_virtual_time
async def test_a_trainer_without_workers_polls_no_more_than_stated_and_says_what_it_waits_for():
    config = configuration()
    run, counted = Run(config), Counted()
    run.start(run.train(counted, train_s=5.0))
    await asyncio.sleep(10)
    counted.calls.clear()
    await asyncio.sleep(HOUR_S)
    stated = requests.trainer(config, workers=0, waiting=1.0, quiet_s=HOUR_S)
    assert counted.calls["list"] == pytest.approx(stated.list, rel=0.15)
    assert counted.calls["put"] == pytest.approx(stated.put, rel=0.15)
    assert counted.calls["get"] == stated.get == 0
    assert run.trainer.waiting_for == "rollout workers (none registered)"
    await run.stop()


@pytest.mark.parametrize(("workers", "generate_s", "train_s"), [(3, 12.0, 2.0), (2, 1.0, 10.0), (3, 100.0, 2.0)])
@in_virtual_time
async def test_requests_of_a_run_are_those_that_the_plan_states(workers, generate_s, train_s):
    """At most, and not twice as many: how groups fall into shards is a matter of chance."""
    config = configuration()
    run, counted = Run(config), Counted()
    for number in range(workers):
        run.start(run.worker(number, counted, generate_s))
    run.start(run.train(counted, train_s))
    await asyncio.sleep(100)
    began, steps = run.clock.now(), run.finished
    counted.calls.clear()
    await asyncio.sleep(300)
    step_s = (run.clock.now() - began) / (run.finished - steps)
    waiting = max(0.0, 1 - train_s / step_s)
    samples = (run.finished - steps) * config.algorithm.prompts_per_step * config.algorithm.group_size
    stated = requests.per_million_rollouts(config, workers, 1, step_s, waiting).times(samples / 1e6)
    print(f"\n{workers} workers, {step_s:.1f} s a step: counted {dict(counted.calls)}, stated {stated}")
    for counts, most in ((counted.calls[kind], getattr(stated, kind)) for kind in ("put", "get", "list")):
        assert most / 2 < counts <= most
    await run.stop()
