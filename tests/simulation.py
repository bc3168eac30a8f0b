"""The whole protocol in virtual time: the real Coordinator and the real Writers, under faults, by seed.

    python -m tests.simulation --seeds 1000 [--first 0] [--scenario "storm"] [--verbose]

One event loop whose clock jumps to the next timer runs a trainer and 1–20 workers over one bucket in memory. A seed
decides the sizes, the speeds, and which hazards there are: kills at any storage call (before it took effect or after),
stalls that make zombies, lost responses, errors in 1–20 % of the calls, outages, damaged shards, unreadable
checkpoints, failing and fatal prompts, workers that come and go, trainers of another number of ranks, clocks an hour
off, the store's own set back, garbage collected meanwhile.
Whatever happens, every index is trained once in the surviving lineage or dropped for a reason that the hazards allow;
what else must hold is said where `require` asks for it.
"""

import argparse
import asyncio
import collections
import concurrent.futures
import dataclasses
import functools
import hashlib
import json
import logging
import os
import random
import sys
import time
from collections.abc import Collection, Coroutine, Mapping
from typing import Any
from unittest import mock

import numpy as np

from pipeline import codec
from pipeline.batching import Batch, Unreadable, layout, load_plan
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
from pipeline.leases import Frontier
from pipeline.messages import CONTROL_KEY, ControlState, evaluation_key, shard_place
from pipeline.storage import Conflict, MemoryBucket, MemoryStorage, Object, ObjectInfo, StorageError, Transient
from pipeline.trainer_log import Fenced, Plan, Record, TrainerLog, Withdraw, decode, encode
from pipeline.versions import Version
from pipeline.writer import Control, Report, Superseded, Writer
from tests.virtual import VirtualClock, VirtualLoop

log = logging.getLogger(__name__)

CALM_FROM_S = 1_000.0
"""Virtual time from which on nothing is killed, stalls or fails any more: whatever happened before, the run must end.
Without such an end a run may hang by chance alone: stalls that outlast each other call for more and more rivals."""
LONGEST_S = 5_000.0
"""Virtual time after which a run counts as hanging."""
MESSAGE_CHARACTERS = 250
"""Of what went wrong, in the one line that says so."""
RANKS = (2, 1)
"""Of the trainers, in turns."""
GRACE_S = 20.0
"""A worker that is asked to leave is killed after that."""
KEPT = 2
"""Checkpoints."""
CONTROL_LOST = 0.002
"""Chance per storage call, where it may be lost."""
KINDS = ("lost", "doubled", "hung", "leaked", "broken")


class Violation(AssertionError):
    """An invariant does not hold. `kind`: of an index lost, doubled; hung; of a permit leaked; broken: any other."""

    def __init__(self, kind: str, message: str):
        super().__init__(f"{kind}: {message}")
        self.kind = kind


def require(holds: bool, kind: str, message: str) -> None:
    if not holds:
        raise Violation(kind, message)


class Killed(BaseException):
    """SIGKILL, as the victim's code sees it: no handler of its own catches it."""


@dataclasses.dataclass(frozen=True)
class Hazards:
    """Chances per storage call, unless said otherwise; of what strikes processes and calls, until CALM_FROM_S."""

    kill_trainer: float = 0.0
    kill_worker: float = 0.0
    stall: float = 0.0
    """The process does nothing for minutes, then goes on; meanwhile another may have been started in its place."""
    rivals: float = 0.0
    """Each time a trainer is started, and every few seconds after: another one is started beside it."""
    faults: bool = False
    """1–20 % of the calls fail: half of them before they take effect, half of them lose their response."""
    outage: bool = False
    """The store answers nobody for a minute or two."""
    damage: float = 0.0
    """Per shard: its bytes change after they were written, or it breaks a rule."""
    rot: float = 0.0
    """Per plan: one of its shards changes or vanishes before it is trained."""
    unreadable: float = 0.0
    """Per start of a trainer: the newest of several checkpoints."""
    fail: float = 0.0
    """Per group: the engine reports an error."""
    fatal: bool = False
    """One prompt kills every worker that generates it."""
    scored_alike: float = 0.0
    """Per group, with dynamic sampling: no spread; half as often no valid sample at all."""
    lose_control: bool = False
    """control/state.json is deleted when the trainer is killed, and now and then while it lives."""
    drain: float = 0.0
    """Per look at control: the worker hands everything back and leaves."""
    set_back: float = 0.0
    """Per start of a trainer: the store's clock, by up to an hour."""
    elastic: tuple[int, ...] = ()
    """Workers wanted, one stretch of time after the other; those that are too many are asked to leave."""
    drops: frozenset[str] = frozenset()
    """Reasons for which an index may be dropped under these hazards."""

    @property
    def workers_live(self) -> bool:
        """Whatever happens to the trainer and to single calls, no worker has reason to begin anything twice."""
        lost = self.kill_worker or self.stall or self.fail or self.damage or self.rot or self.drain
        return not (lost or self.fatal or self.elastic or self.lose_control)


STALE = frozenset({"stale"})
ELASTIC = (1, 8, 2, 0, 3)
SCENARIOS: dict[str, Hazards] = {
    "calm": Hazards(),
    "bad network": Hazards(faults=True, outage=True),
    "trainer killed": Hazards(kill_trainer=0.01, rivals=0.05, faults=True, unreadable=0.2),
    "workers killed": Hazards(kill_worker=0.01, faults=True, drops=STALE),
    "workers leave": Hazards(drain=0.03, fail=0.02, drops=frozenset({"failed", "stale"})),
    "elastic workers": Hazards(elastic=ELASTIC, faults=True, kill_trainer=0.003, drops=STALE),
    "damage": Hazards(damage=0.1, kill_trainer=0.005, unreadable=0.2, drops=STALE),
    "rot": Hazards(rot=0.1, kill_trainer=0.005, faults=True, drops=frozenset({"damaged", "stale"})),
    "fatal prompt": Hazards(fatal=True, kill_trainer=0.003, drops=frozenset({"failed", "stale"})),
    "dynamic sampling": Hazards(scored_alike=0.3, kill_trainer=0.01, drops=frozenset({"no-spread", "invalid"})),
    "control lost": Hazards(kill_trainer=0.01, lose_control=True, drops=STALE),
    "clock set back": Hazards(set_back=0.5, kill_trainer=0.01, kill_worker=0.01, drops=STALE),
    "zombies": Hazards(stall=0.01, rivals=0.05, faults=True, drops=STALE),
    "storm": Hazards(
        kill_trainer=0.005,
        kill_worker=0.005,
        stall=0.005,
        rivals=0.05,
        faults=True,
        outage=True,
        damage=0.03,
        unreadable=0.1,
        drain=0.005,
        set_back=0.1,
        elastic=ELASTIC,
        drops=STALE,
    ),
}


class WatchedBucket(MemoryBucket):
    """Checks, at every write of control/state.json, what must hold between two of them; damages shards."""

    def __init__(self, world: "World"):
        super().__init__(world.store_clock)
        self.world = world
        self.control: ControlState | None = None
        self.finals: dict[str, int] = {}
        """Writers of which control/state.json has said that they are revoked, and from which shard on."""
        self.ended = False
        """Workers have been told that the run is over, and leave, whether its trainer then lives to see that or not."""
        self.generated: collections.Counter[int] = collections.Counter()
        """Index → shards that hold it."""
        self.withdrawn: collections.Counter[int] = collections.Counter()
        """Step → groups that the log says are left out."""
        self.rotten: dict[str, Object] = {}
        """What shards were before."""

    async def write(self, key: str, data: bytes, metadata: dict[str, str], condition: str | None) -> ObjectInfo:
        info = await super().write(key, data, metadata, condition)
        if key == CONTROL_KEY:
            after = ControlState.decode(data)
            self._check(self.control if condition != "*" else None, after)
            self.control = after
            for ulid, entry in after.writers.items():
                if entry.final is None:
                    self.finals.pop(ulid, None)
                else:
                    self.finals.setdefault(ulid, entry.final)
        if key.startswith("trainer/log/"):
            record = decode(data)
            if isinstance(record, Withdraw):
                self.withdrawn[record.step] += len(record.drops)
            if isinstance(record, Plan):
                self._check_writers(record)
        if key.startswith("rollouts/"):
            self.generated.update(json.loads(metadata["indices"]))
            if self.world.chance(self.world.hazards.damage):
                damaged = bytes([data[0] ^ 1]) + data[1:] if self.world.chance(0.5) else data[: len(data) // 2]
                self.objects[key] = Object(info, damaged, dict(metadata))
        return info

    def _check_writers(self, plan: Plan) -> None:
        """A plan that is replayed may name a shard whose writer was revoked since."""
        for group in plan.groups:
            ulid, sequence = shard_place(group.key)
            late = sequence >= self.finals.get(ulid, sequence + 1)
            require(not late, "broken", f"{group.key} was written by a revoked writer")

    def lose_control(self) -> None:
        self.objects.pop(CONTROL_KEY, None)
        self.finals.clear()  # nobody knows any longer who was revoked, but a trainer that lives

    def rot(self, key: str) -> None:
        found = self.rotten[key] = self.objects.pop(key)
        if self.world.chance(0.5):
            self.objects[key] = Object(found.info, found.data[:-1], found.metadata)

    def restore(self) -> None:
        self.objects |= self.rotten
        self.rotten.clear()

    def _check(self, before: ControlState | None, after: ControlState) -> None:
        leased = [index for entry in after.writers.values() for index in entry.leases]
        require(len(leased) == len(set(leased)), "doubled", "an index is leased twice")
        require(len(leased) <= self.world.most_open, "leaked", f"{len(leased)} leases")
        revoked = {ulid for ulid, entry in after.writers.items() if entry.final is not None}
        require(not any(after.writers[ulid].leases for ulid in revoked), "leaked", "a revoked writer holds leases")
        self.ended = self.ended or after.stop is not None
        unfounded = revoked and self.world.hazards.workers_live and not self.ended
        require(not unfounded, "broken", f"{revoked} revoked without a reason")
        if before is None:
            return
        require(after.term >= before.term, "broken", "a fenced trainer wrote control/state.json")
        if before.version and after.version:
            require(after.version.step >= before.version.step, "broken", "the policy went back")
        for ulid, entry in after.writers.items():
            known = before.writers.get(ulid)
            if known and known.final is not None:
                require(entry.final == known.final, "broken", "a revoked writer is no longer revoked as it was")
            if after.replaying and not self.world.hazards.lose_control:
                granted = entry.leases.keys() - (known.leases.keys() if known else set())
                require(not granted, "broken", "granted during the replay")


class Process:
    """One process start: its storage calls are slow, fail, stall, or are its last (pipeline.storage.Faults)."""

    def __init__(self, world: "World", name: str, kill: float):
        self.world, self.name, self.kill = world, name, kill
        self.clock = VirtualClock(world.random.choice([0.0, 0.0, 3600.0, -3600.0]))
        self.dead = False
        self.stalled_until = 0.0
        self.asked_to_leave: float | None = None
        world.counts["processes"] += 1

    def storage(self) -> MemoryStorage:
        return MemoryStorage(self.clock, self, self.world.bucket, random.Random(self.world.random.random()))

    def leave(self) -> None:
        """SIGTERM; a little later SIGKILL."""
        now = self.world.now()
        self.asked_to_leave = self.asked_to_leave or now
        self.dead = self.dead or now - self.asked_to_leave > GRACE_S

    @property
    def stalled(self) -> bool:
        return self.stalled_until > self.world.now()

    async def before(self, operation: str, key: str) -> None:
        self.world.counts["calls"] += 1
        await self._proceed()
        if self.world.in_outage() or self.world.strikes(self.world.fault_rate / 2):
            self.world.counts["faults"] += 1
            raise Transient("503")

    async def after(self, operation: str, key: str) -> None:
        await self._proceed()
        if self.world.strikes(self.world.fault_rate / 2):
            self.world.counts["faults"] += 1
            raise Transient("connection reset")

    async def _proceed(self) -> None:
        if self.world.strikes(self.world.hazards.stall):
            self.stalled_until = self.world.now() + self.world.random.uniform(20, 200)
            log.info("%s stalls until %.1f", self.name, self.stalled_until)
        if self.world.hazards.lose_control and self.world.strikes(CONTROL_LOST):
            log.info("%s is deleted", CONTROL_KEY)
            self.world.bucket.lose_control()
        await self.sleep(self.world.random.uniform(0.001, 0.05))
        if self.world.is_last_moment(self):
            self.die()

    def die(self) -> None:
        log.info("%s is killed", self.name)
        self.world.counts["kills"] += 1
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
    def __init__(self, seed: int, scenario: str, crash_at: frozenset[int] = frozenset()):
        """`crash_at`: moments at which the trainer is killed, two for each of its storage calls, counted from 1."""
        self.seed, self.scenario, self.hazards = seed, scenario, SCENARIOS[scenario]
        self.random = random.Random(seed)
        self.clock, self.store_clock = VirtualClock(), VirtualClock()
        self.bucket = WatchedBucket(self)
        self.counts: collections.Counter[str] = collections.Counter()
        self.crash_at, self.moments = crash_at, 0
        self.kills_left = 8
        self.fault_rate = self.random.uniform(0.01, 0.2) if self.hazards.faults else 0.0
        self.outage_from = self.random.uniform(10, 100) if self.hazards.outage else float("inf")
        self.outage_s = self.random.uniform(20, 200)
        self.stretch_s = self.random.uniform(10, 60)  # of one number of workers
        self.workers = max(self.hazards.elastic, default=0) or self.random.choice([1, 2, 3, 4, 5, 8, 20])
        self.speeds = [self.random.choice([0.5, 1, 1, 3, 8]) for _ in range(self.workers)]  # seconds per group, times 4
        self.train_s = self.random.choice([0.1, 3, 10])
        self.prefetch = self.chance(0.5)
        self.checkpoint_every = self.random.choice([1, 2, 5])
        self.window = self.chance(0.5)  # retention
        self.config = self._configure()
        algorithm = self.config.algorithm
        self.most_open = (algorithm.max_staleness + 1) * algorithm.prompts_per_step
        self.fatal_index = self.random.randrange(self.most_open) if self.hazards.fatal else -1
        self.finished = False
        self.trained: dict[int, Plan] = {}
        self.coordinator: Coordinator | None = None
        """The newest; once `finished`, the one that has ended the run."""

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
                prompts_per_step=self.random.randint(1, 4) if self.workers < 8 else self.random.randint(4, 8),
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

    def strikes(self, probability: float) -> bool:
        return self.now() < CALM_FROM_S and self.chance(probability)

    def in_outage(self) -> bool:
        return self.outage_from <= self.now() < self.outage_from + self.outage_s

    def is_last_moment(self, process: Process) -> bool:
        if process.name.startswith("trainer"):
            self.moments += 1
            if self.moments in self.crash_at:
                return True
        return self.kills_left > 0 and self.strikes(process.kill)

    def wanted(self) -> int:
        """Workers that should run now."""
        if not self.hazards.elastic:
            return self.workers
        return self.hazards.elastic[min(int(self.now() / self.stretch_s), len(self.hazards.elastic) - 1)]

    # The trainer

    async def trainers(self) -> None:
        """Start a trainer, and another whenever the last one has died or stalls."""
        running: dict[asyncio.Task[None], Process] = {}
        number = 0
        while not self.finished:
            while all(process.stalled for process in running.values()) or self.strikes(self.hazards.rivals):
                self._set_back()
                process = Process(self, f"trainer {number}", self.hazards.kill_trainer)
                running[asyncio.ensure_future(self._train(process, RANKS[number % len(RANKS)]))] = process
                number += 1
            done, _ = await asyncio.wait(running, timeout=5, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                await self._bury(task, running.pop(task))
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _set_back(self) -> None:
        if self.strikes(self.hazards.set_back):
            self.store_clock.skew_s -= self.random.uniform(0, 3600)
            log.info("the store's clock is set back, and now %.0f s behind", -self.store_clock.skew_s)

    async def _bury(self, task: asyncio.Task[None], process: Process) -> None:
        try:
            task.result()
        except Killed:
            self.kills_left -= 1
            if self.hazards.lose_control:
                self.bucket.lose_control()
        except (Fenced, StorageError, Superseded) as error:
            log.info("%s ends: %s", process.name, error)
            hazards = self.hazards
            alone = isinstance(error, Fenced) and not (hazards.rivals or hazards.stall)
            require(not alone, "broken", f"{process.name} had no rival, and yet: {error}")
            down = isinstance(error, StorageError) and not (hazards.outage or hazards.stall or hazards.lose_control)
            require(not down, "broken", f"the store was not away for long, and yet: {error}")
        await asyncio.sleep(self.random.uniform(0.5, 20))

    async def _train(self, process: Process, ranks: int) -> None:
        storage = process.storage()
        saved = await self._newest_checkpoint(storage)
        coordinator = Coordinator(storage, self.config, process.clock, random.Random(self.random.random()))
        if not self.finished:
            self.coordinator = coordinator
        await coordinator.take_over(saved["coordinator"] if saved else None)
        log.info("%s has term %d, from step %d", process.name, coordinator.term, coordinator.step)
        trained = {
            int(step): decode(json.dumps(plan).encode()) for step, plan in (saved or {"trained": {}})["trained"].items()
        }
        steps = self._steps(process, storage, coordinator, trained, ranks)
        await together(coordinator.run(), steps, self._watch(coordinator))

    async def _watch(self, coordinator: Coordinator) -> None:
        """Open indices stay bounded (those of plans being replayed were opened by a predecessor)."""
        while True:
            ledger = coordinator.ledger
            planned = sum(len(plan.groups) for plan in ledger.plans.values() if not plan.replayed)
            count = len(ledger.leases) + len(ledger.delivered) + planned
            require(count <= self.most_open, "leaked", f"{count} open indices, {self.most_open} allowed")
            await asyncio.sleep(0.5)

    async def _steps(
        self, process: Process, storage: MemoryStorage, coordinator: Coordinator, trained: dict[int, Any], ranks: int
    ) -> None:
        term, total = coordinator.term, self.config.algorithm.total_steps
        await coordinator.publish(Version(term, coordinator.step))
        following: asyncio.Task[Plan] | None = None
        for step in range(coordinator.step + 1, total + 1):
            plan = await (following or coordinator.next_plan(step))
            following = None
            self._check_plan(plan)
            plan = await self._load(storage, coordinator, plan, ranks)
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

    async def _load(self, storage: MemoryStorage, coordinator: Coordinator, plan: Plan, ranks: int) -> Plan:
        """What Trainer does: a plan whose shards have been damaged is trained without them."""
        if self.chance(self.hazards.rot):
            key = self.random.choice(sorted({group.key for group in plan.groups} - self.bucket.rotten.keys()) or [""])
            if key:
                self.bucket.rot(key)
        while True:
            try:
                _check_shares(await load_plan(storage, plan), ranks)
                return plan
            except Unreadable as error:
                lost = sorted(error.shards.keys() - self.bucket.rotten.keys())
                if lost:
                    await coordinator.stop("lost")  # one whose successor has collected them is fenced here
                    raise Violation("lost", f"{lost} are planned and gone") from error
                if all(group.key in error.shards for group in plan.groups):
                    self.bucket.restore()  # the run would end here, and say so
                else:
                    plan = await coordinator.withdraw(plan.step, error.shards)

    async def _save(self, storage: MemoryStorage, coordinator: Coordinator, trained: dict[int, Plan]) -> None:
        content = {
            "coordinator": json.loads(json.dumps(coordinator.state())),
            "trained": {step: json.loads(encode(plan)) for step, plan in trained.items()},
        }
        version = Version(coordinator.term, coordinator.step)
        await storage.put(_checkpoint_key(version), json.dumps(content).encode())
        await self._retire(storage, coordinator, version)

    async def _retire(self, storage: MemoryStorage, coordinator: Coordinator, version: Version) -> None:
        """What Lead and checkpoint.prune do after a checkpoint."""
        keys = sorted(info.key for info in await storage.list("checkpoints") if info.key <= _checkpoint_key(version))
        if not keys:
            raise Fenced(f"checkpoint {version} is gone")
        for key in keys[:-KEPT]:
            await storage.delete(key)
        if self.window:
            kept = [await storage.get(key) for key in keys[-KEPT:]]
            states = [json.loads(found.data)["coordinator"] for found in kept if found]
            if len(states) == len(kept):
                self.counts["collected"] += await coordinator.collect(states)

    async def _newest_checkpoint(self, storage: MemoryStorage) -> dict[str, Any] | None:
        keys = sorted(info.key for info in await storage.list("checkpoints"))
        if len(keys) > 1 and self.chance(self.hazards.unreadable):
            keys.pop()
        found = await storage.get(keys[-1]) if keys else None
        return json.loads(found.data) if found else None

    def _check_plan(self, plan: Plan) -> None:
        """What is planned is whole, undamaged and not stale; that it is there: `_load`."""
        size, staleness_bound = self.config.algorithm.prompts_per_step, self.config.algorithm.max_staleness
        found = len(plan.groups) + self.bucket.withdrawn[plan.step]
        require(found == size, "broken", f"{len(plan.groups)} groups in step {plan.step}")
        for group in plan.groups:
            if group.key in self.bucket.rotten or group.key not in self.bucket.objects:
                continue
            shard = self.bucket.objects[group.key]
            require(hashlib.sha256(shard.data).hexdigest() == group.sha256, "broken", f"{group.key} was not read whole")
            table = codec.decode(shard.data).slice(group.start, group.stop - group.start)
            whole = table["index"].to_pylist() == [group.index] * self.config.algorithm.group_size
            require(whole, "broken", f"rows of index {group.index} in step {plan.step}")
            staleness = plan.step - 1 - min(table["version_step"].to_pylist())
            require(0 <= staleness <= staleness_bound, "broken", f"staleness {staleness} in step {plan.step}")

    # The workers

    async def slot(self, number: int) -> None:
        """Start a worker, and another whenever the last one of this slot has ended or stalls for long."""
        running: dict[asyncio.Task[None], Process] = {}
        while not self.finished:
            if number >= self.wanted():
                for process in running.values():
                    process.leave()
            elif all(process.stalled for process in running.values()) and (not running or self.chance(0.05)):
                process = Process(self, f"worker {number}", self.hazards.kill_worker)
                running[asyncio.ensure_future(Worker(self, process, number).run())] = process
            if not running:
                await asyncio.sleep(1)
                continue
            done, _ = await asyncio.wait(running, timeout=5, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                await self._bury(task, running.pop(task))
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    # The outcome

    async def run(self) -> "Outcome":
        """Raises Violation where an invariant does not hold."""
        try:
            async with asyncio.timeout(LONGEST_S):
                await asyncio.gather(self.trainers(), *(self.slot(number) for number in range(self.workers)))
        except TimeoutError:
            log.info("told %s", self.bucket.control)
            raise Violation("hung", self._describe()) from None
        self._check_permits()
        dropped = await self._check_lineage()
        assert self.coordinator is not None
        self.counts["runs"] = 1
        self.counts["seconds"] = int(self.now())
        self.counts["steps"] = len(self.trained)
        self.counts["groups trained"] = sum(len(plan.groups) for plan in self.trained.values())
        self.counts["takeovers"] = self.coordinator.term
        self.counts.update(f"dropped: {reason}" for reason in dropped.values())
        return Outcome(self.scenario, self.counts, self.moments)

    def _describe(self) -> str:
        if self.coordinator is None:
            return "no trainer"
        ledger, told = self.coordinator.ledger, self.bucket.control
        writers = list(told.writers.values()) if told else []
        return (
            f"term {self.coordinator.term} waits for {self.coordinator.waiting_for} after step {self.coordinator.step}"
            f", {len(ledger.leases)} leased, {len(ledger.delivered)} delivered, {len(ledger.planned)} planned; "
            f"told by term {told.term if told else None}: {len(writers)} writers, "
            f"{sum(entry.final is None for entry in writers)} not revoked"
        )

    def _check_permits(self) -> None:
        """Behind the last step nothing is wanted any more, so nothing may be open."""
        assert self.coordinator is not None
        ledger, told = self.coordinator.ledger, self.bucket.control
        require(not (ledger.leases or ledger.delivered or ledger.planned), "leaked", self._describe())
        assert told is not None
        left = {ulid: entry.leases for ulid, entry in told.writers.items() if entry.leases}
        require(not left, "leaked", f"the last control/state.json grants {left}")
        twice = [index for index, count in self.bucket.generated.items() if count > 1]
        # A worker that has waited out an outage commits again what may have arrived before it.
        forbidden = self.hazards.workers_live and not self.hazards.outage
        require(not (twice and forbidden), "doubled", f"{twice} were generated twice without a reason")

    async def _check_lineage(self) -> dict[int, str]:
        assert self.coordinator is not None
        total, reader = self.config.algorithm.total_steps, TrainerLog(MemoryStorage(self.clock, bucket=self.bucket))
        records = [record for _, record in await reader.take_over()]
        frontier = self.coordinator.ledger.frontier
        dropped = check_lineage(records, self.trained, frontier, total, self.most_open, self.hazards.drops)
        if self.hazards.fatal:
            failed = {index for index, reason in dropped.items() if reason == "failed"}
            require(failed <= {self.fatal_index}, "lost", f"{failed} dropped, {self.fatal_index} is the fatal one")
            passed = self.fatal_index < frontier.low
            require(not passed or failed == {self.fatal_index}, "lost", "the fatal index vanished")
        return dropped


def check_lineage(
    records: list[Record],
    trained: Mapping[int, Plan],
    frontier: Frontier,
    total: int,
    most_open: int,
    drops_allowed: Collection[str],
) -> dict[int, str]:
    """What must hold of a run of `total` steps that is over; the dropped indices with their reasons.

    `records` of the log, all of them; `trained`: step → what the surviving trainer has trained; `frontier`: what it
    has closed.
    """
    logged = [record for record in records if isinstance(record, Plan)]
    withdrawn = [record for record in records if isinstance(record, Withdraw)]
    steps = [plan.step for plan in logged]
    require(steps == sorted(trained) == list(range(1, total + 1)), "broken", f"the log has the steps {steps}")
    left = {plan.step: plan for plan in logged}
    for record in withdrawn:
        left[record.step] = left[record.step].without(record)
    logged = list(left.values())
    for plan in logged:
        require(trained[plan.step].groups == plan.groups, "broken", f"step {plan.step} trained what is not in the log")
    indices = [group.index for plan in logged for group in plan.groups]
    drops = [drop for record in [*logged, *withdrawn] for drop in record.drops]
    dropped = {drop.index: drop.reason for drop in drops}
    require(len(indices) == len(set(indices)), "doubled", "an index was trained twice")
    require(not dropped.keys() & set(indices), "doubled", "a dropped index was trained")
    require(len(dropped) == len(drops), "doubled", "an index was dropped twice")
    require(set(dropped.values()) <= set(drops_allowed), "lost", f"dropped {dropped}")
    closed = {index for index in range(max(indices) + 1) if index in frontier}
    known = {index for index in [*indices, *dropped] if index <= max(indices)}
    require(closed == known, "lost", f"{closed ^ known} are closed, or neither trained nor dropped")
    skipped = [index for index in range(max(indices)) if index not in closed]
    require(len(skipped) <= most_open, "lost", f"left behind: {skipped}")
    return dict(dropped)


@dataclasses.dataclass(frozen=True)
class Outcome:
    scenario: str
    counts: collections.Counter[str]
    moments: int
    """At which the trainers could have been killed."""


def _check_shares(batch: Batch, ranks: int) -> None:
    """However many ranks there are, each sample that takes part in training goes to one of them."""
    shares = layout(batch, batch.valid, ranks, max_tokens=16)
    samples = sorted(sample for bins in shares for blocks in bins for block in blocks for sample in block.samples)
    require(len(shares) == ranks and samples == np.flatnonzero(batch.valid).tolist(), "lost", f"ranks get {samples}")


def _checkpoint_key(version: Version) -> str:
    return f"checkpoints/{version}.json"


class Worker:
    """What pipeline.rollout does, without an engine: obeys its leases and takes random times."""

    def __init__(self, world: World, process: Process, number: int):
        self.world, self.process, self.number = world, process, number
        storage = process.storage()
        self.storage = storage
        rollout = world.config.rollout
        randomness = random.Random(world.random.random())
        self.writer = Writer(storage, f"rollout-{number}", process.clock, randomness, rollout.heartbeat_s)
        self.loaded: Version | None = None
        self.running: dict[int, tuple[Version, float]] = {}  # index → (version, time at which it is done)
        self.done: dict[int, RolloutGroup] = {}
        self.generated = 0

    async def run(self) -> None:
        await self.writer.register()
        while True:
            try:
                if await self._round():
                    return
            except StorageError as error:
                log.info("%s sits it out: %s", self.process.name, error)
            await self.process.sleep(self.world.config.rollout.poll_s)

    async def _round(self) -> bool:
        """True: the end."""
        leaving = self.process.asked_to_leave is not None or self.world.strikes(self.world.hazards.drain)
        if leaving:
            self.writer.hand_back(list(self.running))
            await self._flush()
        control = await self.writer.sync(Report(self.loaded, leaving, {"generated_tokens": self.generated}))
        if control.stop or leaving:
            return True
        if control.evaluation:
            await self._evaluate(control)
        elif self._should_load(control.version):
            await self.process.sleep(self.world.random.uniform(0.1, 2))
            self.loaded = control.version
        self._follow(control)
        await self._flush()
        return False

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


def simulate(seed: int, scenario: str | None = None, crash_at: frozenset[int] = frozenset()) -> Outcome:
    """One run; raises Violation, or whatever the code under test raised."""
    # The same bytes are read over and over: by the planner, by the trainer, by checks, by each successor.
    remembered = mock.patch.object(codec, "decode", functools.lru_cache(256)(codec.decode))
    with remembered, asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(World(seed, scenario or scenario_of(seed), crash_at).run())


def scenario_of(seed: int) -> str:
    return list(SCENARIOS)[seed % len(SCENARIOS)]


def attempt(seed: int, scenario: str) -> Outcome | tuple[str, str]:
    """The outcome, or (kind, one line) of what went wrong."""
    try:
        return simulate(seed, scenario)
    except Exception as error:
        log.info("seed %d", seed, exc_info=True)
        if isinstance(error, Violation):
            return error.kind, described(seed, scenario, str(error))
        return "broken", described(seed, scenario, repr(error))


def described(seed: int, scenario: str, message: str) -> str:
    """What went wrong and how to see it again; the whole message is in the log."""
    if len(message) > MESSAGE_CHARACTERS:
        message = message[: MESSAGE_CHARACTERS - 1] + "…"
    again = f"python -m tests.simulation --first {seed} --seeds 1 --verbose"
    if scenario != scenario_of(seed):
        again += f" --scenario '{scenario}'"
    return f"{scenario}, seed {seed}: {' '.join(message.split())}; {again}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--scenario", choices=list(SCENARIOS), help="the same for all seeds; else they take turns")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--verbose", action="store_true", help="what happens, in order; one job")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO if options.verbose else logging.CRITICAL, format="%(name)s %(message)s")
    seeds = range(options.first, options.first + options.seeds)
    scenarios = [options.scenario or scenario_of(seed) for seed in seeds]
    started, failures = time.monotonic(), collections.Counter[str]()
    totals = {scenario: collections.Counter[str]() for scenario in dict.fromkeys(scenarios)}
    with concurrent.futures.ProcessPoolExecutor(options.jobs) as pool:
        play = map if options.verbose else pool.map
        outcomes = play(attempt, seeds, scenarios)
        for count, (scenario, outcome) in enumerate(zip(scenarios, outcomes, strict=True), 1):
            if isinstance(outcome, Outcome):
                totals[scenario].update(outcome.counts)
            else:
                failures[outcome[0]] += 1
                print(outcome[1], flush=True)
            if count % 100 == 0 and count < options.seeds:
                print(f"{count} of {options.seeds} seeds", flush=True)
    print_totals(totals)
    held, took = options.seeds - failures.total(), time.monotonic() - started
    print(
        ", ".join(f"{failures[kind]} {kind}" for kind in KINDS)
        + f": {held} of {options.seeds} seeds hold, {took:.0f} s"
    )
    return 1 if failures else 0


def print_totals(totals: dict[str, collections.Counter[str]]) -> None:
    """A row a scenario and their sum; drops by reason below."""
    columns = ["runs", "groups trained", "takeovers", "processes", "kills", "calls", "faults", "collected"]
    total = sum(totals.values(), collections.Counter[str]())
    print(f"{'':16}" + "".join(f"{name:>15}" for name in [*columns, "virtual hours"]))
    for name, counts in [*totals.items(), ("all", total)]:
        cells = [f"{counts[column]:15,}" for column in columns] + [f"{counts['seconds'] / 3600:15.1f}"]
        print(f"{name:16}" + "".join(cells))
    drops = {name: count for name, count in sorted(total.items()) if name.startswith("dropped")}
    print(", ".join(f"{name} {count}" for name, count in drops.items()) or "nothing dropped")


if __name__ == "__main__":
    sys.exit(main())
