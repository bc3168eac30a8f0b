"""The whole protocol in virtual time: the real Coordinator and the real Writers, under faults, by seed.

    python -m tests.simulation --seeds 1000 [--first 0] [--verbose]

One event loop whose clock jumps to the next timer runs a trainer and 1–5 workers over one bucket in memory. A seed
decides the sizes, the speeds, and which hazards there are: kills at any storage call (before it took effect or after),
stalls that make zombies, lost responses, transient errors, outages, damaged shards, failing and fatal prompts.
Whatever happens, every index is trained once in the surviving lineage or dropped for a reason that the hazards allow.
"""

import argparse
import asyncio
import collections
import dataclasses
import hashlib
import json
import logging
import random
import selectors
import sys
import time
from collections.abc import Coroutine
from typing import Any

from pipeline import experience
from pipeline.config import (
    AlgorithmConfig,
    DataConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    StoreConfig,
)
from pipeline.coordinator import Coordinator
from pipeline.experience import Rollout, RolloutGroup
from pipeline.messages import CONTROL_KEY, ControlState, evaluation_key
from pipeline.storage import Conflict, MemoryBucket, MemoryStorage, Object, ObjectInfo, StorageError, Transient
from pipeline.trainer_log import Fenced, Plan, TrainerLog, decode, encode
from pipeline.versions import Version
from pipeline.writer import Control, Report, Superseded, Writer

log = logging.getLogger(__name__)

LONGEST_S = 5_000.0
"""Virtual time after which a run counts as hanging."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Never waits: when nothing is ready, its time jumps to the next timer."""

    def __init__(self) -> None:
        self.virtual = 0.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self.virtual


class _Jump(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop):
        super().__init__()
        self.loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "deadlock: every task waits for another"
        self.loop.virtual += max(0.0, timeout)
        return []


class VirtualClock:
    def now(self) -> float:
        return 1_700_000_000.0 + asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Killed(BaseException):
    """SIGKILL, as the victim's code sees it: no handler of its own catches it."""


@dataclasses.dataclass(frozen=True)
class Hazards:
    """Chances per storage call, unless said otherwise."""

    kill_trainer: float = 0.0
    kill_worker: float = 0.0
    stall: float = 0.0
    """The process does nothing for minutes, then goes on; meanwhile another may have been started in its place."""
    rivals: float = 0.0
    """Each time a trainer is started, and every few seconds after: another one is started beside it."""
    transient: float = 0.0
    lost: float = 0.0
    """A response, after the request took effect."""
    outage: bool = False
    """The store answers nobody for a minute or two."""
    damage: float = 0.0
    """Per shard: its bytes change after they were written, or it breaks a rule."""
    fail: float = 0.0
    """Per group: the engine reports an error."""
    fatal: bool = False
    """One prompt kills every worker that generates it."""
    scored_alike: float = 0.0
    """Per group, with dynamic sampling: no spread; half as often no valid sample at all."""
    lose_control: bool = False
    """control/state.json is deleted when the trainer is killed."""
    drain: float = 0.0
    """Per look at control: the worker hands everything back and leaves."""
    drops: frozenset[str] = frozenset()
    """Reasons for which an index may be dropped under these hazards."""


STALE = frozenset({"stale"})
SCENARIOS: dict[str, Hazards] = {
    "calm": Hazards(),
    "bad network": Hazards(transient=0.05, lost=0.03, outage=True),
    "trainer killed": Hazards(kill_trainer=0.01, rivals=0.05, lost=0.02),
    "workers killed": Hazards(kill_worker=0.01, lost=0.02, drops=STALE),
    "workers leave": Hazards(drain=0.03, fail=0.02, drops=frozenset({"failed", "stale"})),
    "damage": Hazards(damage=0.1, kill_trainer=0.005, drops=STALE),
    "fatal prompt": Hazards(fatal=True, kill_trainer=0.003, drops=frozenset({"failed", "stale"})),
    "dynamic sampling": Hazards(scored_alike=0.3, kill_trainer=0.01, drops=frozenset({"no-spread", "invalid"})),
    "control lost": Hazards(kill_trainer=0.01, lose_control=True, drops=STALE),
    "storm": Hazards(
        kill_trainer=0.005,
        kill_worker=0.005,
        stall=0.005,
        rivals=0.05,
        transient=0.03,
        lost=0.03,
        outage=True,
        damage=0.03,
        drain=0.005,
        drops=STALE,
    ),
}


class WatchedBucket(MemoryBucket):
    """Checks, at every write of control/state.json, what must hold between two of them; damages shards."""

    def __init__(self, world: "World"):
        super().__init__(world.clock)
        self.world = world
        self.control: ControlState | None = None

    async def write(self, key: str, data: bytes, metadata: dict[str, str], condition: str | None) -> ObjectInfo:
        info = await super().write(key, data, metadata, condition)
        if key == CONTROL_KEY:
            after = ControlState.decode(data)
            self._check(self.control if condition != "*" else None, after)
            self.control = after
        if key.startswith("rollouts/") and self.world.chance(self.world.hazards.damage):
            damaged = bytes([data[0] ^ 1]) + data[1:] if self.world.chance(0.5) else data[: len(data) // 2]
            self.objects[key] = Object(info, damaged, dict(metadata))
        return info

    def _check(self, before: ControlState | None, after: ControlState) -> None:
        leased = [index for entry in after.writers.values() for index in entry.leases]
        assert len(leased) == len(set(leased)), "an index is leased twice"
        assert len(leased) <= self.world.most_open, f"{len(leased)} leases"
        assert not any(entry.leases for entry in after.writers.values() if entry.final is not None)
        if before is None:
            return
        assert after.term >= before.term, "a fenced trainer wrote control/state.json"
        if before.version and after.version:
            assert after.version.step >= before.version.step, "the policy went back"
        for ulid, entry in after.writers.items():
            known = before.writers.get(ulid)
            if known and known.final is not None:
                assert entry.final == known.final, "a revoked writer is no longer revoked as it was"
            if after.replaying and not self.world.hazards.lose_control:
                assert entry.leases.keys() <= (known.leases.keys() if known else set()), "granted during the replay"


class Process:
    """One process start: its storage calls are slow, fail, stall, or are its last (pipeline.storage.Faults)."""

    def __init__(self, world: "World", name: str, kill: float):
        self.world, self.name, self.kill = world, name, kill
        self.dead = False
        self.stalled_until = 0.0

    def storage(self) -> MemoryStorage:
        return MemoryStorage(self.world.clock, self, self.world.bucket, random.Random(self.world.random.random()))

    @property
    def stalled(self) -> bool:
        return self.stalled_until > self.world.now()

    async def before(self, operation: str, key: str) -> None:
        await self._proceed()
        if self.world.in_outage() or self.world.chance(self.world.hazards.transient):
            raise Transient("503")

    async def after(self, operation: str, key: str) -> None:
        await self._proceed()
        if self.world.chance(self.world.hazards.lost):
            raise Transient("connection reset")

    async def _proceed(self) -> None:
        if self.world.chance(self.world.hazards.stall):
            self.stalled_until = self.world.now() + self.world.random.uniform(20, 200)
            log.info("%s stalls until %.1f", self.name, self.stalled_until)
        await self.sleep(self.world.random.uniform(0.001, 0.05))
        if self.world.may_kill() and self.world.chance(self.kill):
            self.die()

    def die(self) -> None:
        log.info("%s is killed", self.name)
        self.dead = True
        raise Killed(self.name)

    async def sleep(self, seconds: float) -> None:
        """Time passes, for every task of a stalled or dead process alike."""
        await asyncio.sleep(seconds)
        while self.stalled:
            await asyncio.sleep(self.stalled_until - self.world.now())
        if self.dead:
            raise Killed(self.name)


async def together(*parts: Coroutine[Any, Any, Any]) -> Any:
    """Run the tasks of one process; the first to end ends all. Its result, or what it raised."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(iter(done)).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class World:
    def __init__(self, seed: int, scenario: str):
        self.seed, self.scenario, self.hazards = seed, scenario, SCENARIOS[scenario]
        self.random = random.Random(seed)
        self.clock = VirtualClock()
        self.bucket = WatchedBucket(self)
        self.kills_left = 8
        self.outage_from = self.random.uniform(10, 100) if self.hazards.outage else float("inf")
        self.outage_s = self.random.uniform(20, 200)
        self.workers = self.random.randint(1, 5)
        self.speeds = [self.random.choice([0.5, 1, 1, 3, 8]) for _ in range(self.workers)]  # seconds per group, times 4
        self.train_s = self.random.choice([0.1, 3, 10])
        self.prefetch = self.chance(0.5)
        self.checkpoint_every = self.random.choice([1, 2, 5])
        self.config = self._configure()
        algorithm = self.config.algorithm
        self.most_open = (algorithm.max_staleness + 1) * algorithm.prompts_per_step
        self.fatal_index = self.random.randrange(self.most_open) if self.hazards.fatal else -1
        self.finished = False
        self.trained: dict[int, Plan] = {}
        self.coordinator: Coordinator | None = None

    def _configure(self) -> RunConfig:
        return RunConfig(
            name="simulation",
            run_id=str(self.seed),
            model=ModelConfig(uri="none", path="none"),
            data=DataConfig(sets=[]),
            rewards=[RewardConfig(name="none")],
            store=StoreConfig(uri="memory://simulation"),
            algorithm=AlgorithmConfig(
                type="grpo",
                total_steps=self.random.randint(5, 9),
                prompts_per_step=self.random.randint(1, 4),
                group_size=2,
                max_staleness=self.random.randint(0, 3),
                parameters={"dynamic_sampling": True} if self.hazards.scored_alike else {},
            ),
            rollout=RolloutConfig(
                poll_s=1.0,
                heartbeat_s=4.0,
                flush_s=2.0,
                lease_timeout_s=25.0,
                group_timeout_s=300.0,
                max_concurrent_groups=self.random.randint(1, 6),
                max_failures=1 if self.hazards.fatal else 2 if self.hazards.fail else 8,
            ),
        )

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.random.random() < probability

    def in_outage(self) -> bool:
        return self.outage_from <= self.now() < self.outage_from + self.outage_s

    def may_kill(self) -> bool:
        return self.kills_left > 0

    # The trainer

    async def trainers(self) -> None:
        """Start a trainer, and another whenever the last one has died or stalls."""
        running: dict[asyncio.Task[None], Process] = {}
        number = 0
        while not self.finished:
            while all(process.stalled for process in running.values()) or self.chance(self.hazards.rivals):
                process = Process(self, f"trainer {number}", self.hazards.kill_trainer)
                running[asyncio.ensure_future(self._train(process))] = process
                number += 1
            done, _ = await asyncio.wait(running, timeout=5, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                await self._bury(task, running.pop(task))
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _bury(self, task: asyncio.Task[None], process: Process) -> None:
        try:
            task.result()
        except Killed:
            self.kills_left -= 1
            if self.hazards.lose_control:
                self.bucket.objects.pop(CONTROL_KEY, None)
        except (Fenced, StorageError, Superseded) as error:
            log.info("%s ends: %s", process.name, error)
        await asyncio.sleep(self.random.uniform(0.5, 20))

    async def _train(self, process: Process) -> None:
        storage = process.storage()
        saved = await self._newest_checkpoint(storage)
        coordinator = Coordinator(storage, self.config, self.clock, random.Random(self.random.random()))
        self.coordinator = coordinator
        await coordinator.take_over(saved["coordinator"] if saved else None)
        log.info("%s has term %d, from step %d", process.name, coordinator.term, coordinator.step)
        trained = {
            int(step): decode(json.dumps(plan).encode()) for step, plan in (saved or {"trained": {}})["trained"].items()
        }
        await together(coordinator.run(), self._steps(process, storage, coordinator, trained), self._watch(coordinator))

    async def _watch(self, coordinator: Coordinator) -> None:
        """Open indices stay bounded (those of plans being replayed were opened by a predecessor)."""
        while True:
            ledger = coordinator.ledger
            planned = sum(len(plan.groups) for plan in ledger.plans.values() if not plan.replayed)
            count = len(ledger.leases) + len(ledger.delivered) + planned
            assert count <= self.most_open, f"{count} open indices, {self.most_open} allowed"
            await asyncio.sleep(0.5)

    async def _steps(
        self, process: Process, storage: MemoryStorage, coordinator: Coordinator, trained: dict[int, Any]
    ) -> None:
        term, total = coordinator.term, self.config.algorithm.total_steps
        await coordinator.publish(Version(term, coordinator.step))
        following: asyncio.Task[Plan] | None = None
        for step in range(coordinator.step + 1, total + 1):
            plan = await (following or coordinator.next_plan(step))
            following = None
            self._check_plan(plan)
            if self.prefetch and step < total and self.config.algorithm.max_staleness:
                following = asyncio.ensure_future(coordinator.next_plan(step + 1))
            await process.sleep(self.random.uniform(0, self.train_s))
            trained[step] = plan
            await coordinator.finish_step(step)
            version = Version(term, step)
            if step % 3 == 0:
                await coordinator.evaluate(step, version)
            if step % self.checkpoint_every == 0:
                await self._save(storage, coordinator, trained)
            await coordinator.publish(version)
        for step in range(3, total + 1, 3):
            while await coordinator.evaluation(step) is None:
                await process.sleep(1.0)
        await coordinator.stop("complete")
        self.trained, self.coordinator, self.finished = trained, coordinator, True

    async def _save(self, storage: MemoryStorage, coordinator: Coordinator, trained: dict[int, Plan]) -> None:
        content = {
            "coordinator": json.loads(json.dumps(coordinator.state())),
            "trained": {step: json.loads(encode(plan)) for step, plan in trained.items()},
        }
        await storage.put(
            f"checkpoints/{Version(coordinator.term, coordinator.step)}.json", json.dumps(content).encode()
        )

    async def _newest_checkpoint(self, storage: MemoryStorage) -> dict[str, Any] | None:
        keys = sorted(info.key for info in await storage.list("checkpoints"))
        found = await storage.get(keys[-1]) if keys else None
        return json.loads(found.data) if found else None

    def _check_plan(self, plan: Plan) -> None:
        """What is planned lies where the plan says, whole, undamaged, and is not stale."""
        assert len(plan.groups) == self.config.algorithm.prompts_per_step
        for group in plan.groups:
            shard = self.bucket.objects[group.key]
            table = experience.decode(shard.data).slice(group.start, group.stop - group.start)
            assert hashlib.sha256(shard.data).hexdigest() == group.sha256
            assert table["index"].to_pylist() == [group.index] * self.config.algorithm.group_size
            staleness = plan.step - 1 - min(table["version_step"].to_pylist())
            assert 0 <= staleness <= self.config.algorithm.max_staleness, f"staleness {staleness} in step {plan.step}"

    # The workers

    async def slot(self, number: int) -> None:
        """Start a worker, and another whenever the last one of this slot has ended or stalls for long."""
        running: dict[asyncio.Task[None], Process] = {}
        while not self.finished:
            if all(process.stalled for process in running.values()) and (not running or self.chance(0.05)):
                process = Process(self, f"worker {number}", self.hazards.kill_worker)
                running[asyncio.ensure_future(Worker(self, process, number).run())] = process
            done, _ = await asyncio.wait(running, timeout=5, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                await self._bury(task, running.pop(task))
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    # The outcome

    async def run(self) -> str:
        """Returns a summary; raises AssertionError where an invariant does not hold."""
        try:
            async with asyncio.timeout(LONGEST_S):
                await asyncio.gather(self.trainers(), *(self.slot(number) for number in range(self.workers)))
        except TimeoutError:
            raise AssertionError(f"hangs: {self._describe()}") from None
        dropped = await self._check_lineage()
        counts = dict(collections.Counter(reason for reason in dropped.values()))
        assert self.coordinator is not None
        return f"{len(self.trained)} steps, term {self.coordinator.term}, dropped {counts}, {self.now():.0f} s"

    def _describe(self) -> str:
        if self.coordinator is None:
            return "no trainer"
        ledger, control = self.coordinator.ledger, self.bucket.control
        return (
            f"step {self.coordinator.step} waits for {self.coordinator.waiting_for}; leases {ledger.leases}, "
            f"delivered {list(ledger.delivered)}, planned {ledger.planned}, told {control}"
        )

    async def _check_lineage(self) -> dict[int, str]:
        assert self.coordinator is not None
        total, reader = self.config.algorithm.total_steps, TrainerLog(MemoryStorage(self.clock, bucket=self.bucket))
        logged = [record for _, record in await reader.take_over() if isinstance(record, Plan)]
        assert [plan.step for plan in logged] == sorted(self.trained) == list(range(1, total + 1))
        for plan in logged:
            assert self.trained[plan.step].groups == plan.groups, f"step {plan.step} trained what is not in the log"
        trained = [group.index for plan in logged for group in plan.groups]
        dropped = {drop.index: drop.reason for plan in logged for drop in plan.drops}
        assert len(trained) == len(set(trained)), "an index was trained twice"
        assert not dropped.keys() & set(trained), "a dropped index was trained"
        assert len(dropped) == sum(len(plan.drops) for plan in logged), "an index was dropped twice"
        assert set(dropped.values()) <= self.hazards.drops, f"dropped {dropped}"
        closed = {index for index in range(max(trained) + 1) if index in self.coordinator.ledger.frontier}
        assert closed == {index for index in [*trained, *dropped] if index <= max(trained)}
        skipped = [index for index in range(max(trained)) if index not in closed]
        assert len(skipped) <= self.most_open, f"left behind: {skipped}"
        if self.hazards.fatal:
            assert {index for index, reason in dropped.items() if reason == "failed"} <= {self.fatal_index}
        if self.hazards.fatal and self.fatal_index < self.coordinator.ledger.frontier.low:
            assert dropped.get(self.fatal_index) == "failed"
        return dropped


class Worker:
    """What pipeline.rollout does, without an engine: obeys its leases and takes random times."""

    def __init__(self, world: World, process: Process, number: int):
        self.world, self.process, self.number = world, process, number
        storage = process.storage()
        self.storage = storage
        rollout = world.config.rollout
        randomness = random.Random(world.random.random())
        self.writer = Writer(storage, f"rollout-{number}", world.clock, randomness, rollout.heartbeat_s)
        self.loaded: Version | None = None
        self.running: dict[int, tuple[Version, float]] = {}  # index → (version, time at which it is done)
        self.done: dict[int, RolloutGroup] = {}
        self.generated = 0

    async def run(self) -> None:
        await self.writer.register()
        while True:
            leaving = self.world.chance(self.world.hazards.drain)
            if leaving:
                self.writer.hand_back([*self.running, *self.done])
            control = await self.writer.sync(Report(self.loaded, leaving, {"generated_tokens": self.generated}))
            if control.stop or leaving:
                return
            if control.evaluation:
                await self._evaluate(control)
            elif self._should_load(control.version):
                await self.process.sleep(self.world.random.uniform(0.1, 2))
                self.loaded = control.version
            self._follow(control)
            await self._flush()
            await self.process.sleep(self.world.config.rollout.poll_s)

    def _should_load(self, version: Version | None) -> bool:
        if version is None or self.loaded is None:
            return version is not None
        return version > self.loaded and self.world.chance(0.5)  # the download takes a while

    def _follow(self, control: Control) -> None:
        self.running = {index: task for index, task in self.running.items() if index in control.leases}
        self.done = {index: group for index, group in self.done.items() if index in control.leases}
        for index, minimum in control.leases.items():
            known = index in self.running or index in self.done
            if not known and self.loaded and self.loaded.step >= minimum and not control.replaying:
                mean = 4 * self.world.speeds[self.number]
                self.running[index] = (self.loaded, self.world.now() + self.world.random.expovariate(1 / mean))
        for index, (version, end) in list(self.running.items()):
            if end <= self.world.now():
                del self.running[index]
                self._finish(index, version)

    def _finish(self, index: int, version: Version) -> None:
        if index == self.world.fatal_index:
            self.process.die()
        if self.world.chance(self.world.hazards.fail):
            self.writer.fail(index, "the engine answered 500")
            return
        self.done[index] = self._group(index, version)

    def _group(self, index: int, version: Version) -> RolloutGroup:
        hazards, rewards = self.world.hazards, [0.0, 1.0]
        if self.world.chance(hazards.scored_alike):
            rewards = [1.0, 1.0]
        invalid = "unscorable" if hazards.scored_alike and self.world.chance(hazards.scored_alike / 2) else None
        if self.world.chance(hazards.damage):
            rewards = rewards[:1]
        self.generated += 4
        rollouts = [
            Rollout([7, 2], [-0.1, -0.7], "x", "stop", None if invalid else reward, {}, invalid, [(0, version)])
            for reward in rewards
        ]
        return RolloutGroup(index, "set", "prompt", None, [5, 9], rollouts, self.world.clock.now())

    async def _flush(self) -> None:
        if self.done:
            await self.writer.commit(list(self.done.values()))
            self.done = {}

    async def _evaluate(self, control: Control) -> None:
        request = control.evaluation
        assert request is not None
        assert self.loaded is None or self.loaded <= request.version, "asked to go back to an older policy"
        self.loaded = request.version
        for _ in range(5):
            await self.process.sleep(self.world.random.uniform(0.2, 5))
            await self.storage.head(evaluation_key(request.step))
        try:
            await self.storage.create(evaluation_key(request.step), json.dumps({"step": request.step}).encode())
        except Conflict:
            log.info("evaluation of step %d exists", request.step)


def simulate(seed: int, scenario: str | None = None) -> str:
    """One run; raises AssertionError, or whatever the code under test raised."""
    scenario = scenario or list(SCENARIOS)[seed % len(SCENARIOS)]
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return f"{scenario}: {runner.run(World(seed, scenario).run())}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--scenario", choices=list(SCENARIOS))
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO if options.verbose else logging.CRITICAL, format="%(name)s %(message)s")
    failures, started = 0, time.monotonic()
    for seed in range(options.first, options.first + options.seeds):
        try:
            summary = simulate(seed, options.scenario)
            if options.verbose or options.seeds <= 30:
                print(f"seed {seed}: {summary}")
        except Exception as error:
            failures += 1
            print(f"seed {seed} ({options.scenario or list(SCENARIOS)[seed % len(SCENARIOS)]}): {error!r}")
            if options.verbose:
                logging.getLogger(__name__).exception("seed %d", seed)
    print(f"{options.seeds - failures} of {options.seeds} seeds hold, {time.monotonic() - started:.1f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
