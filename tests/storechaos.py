"""The store's protocol between real processes over a real S3 server, killed with SIGKILL, by seed.

    python -m tests.storechaos --seeds 50 [--first 0] [--scenario "server killed"] [--verbose]

A trainer (the real Coordinator, without a model) and 1–4 workers (the real Writer, without an engine) are processes of
their own. What they say to SeaweedFS goes through the fault proxy. A seed decides the sizes, the faults, and at which
request which process is killed, or stopped and replaced and continued as a zombie; scenarios also kill the server, or
have the proxy answer 503 for a minute. At the end the log and the outcome are judged as in tests.simulation: every
index is trained once in the surviving lineage, or dropped for a reason that these hazards allow. A seed does not
repeat a run exactly: the processes' timing is the machine's.
"""

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import functools
import json
import logging
import multiprocessing.context
import os
import random
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from pipeline import codec
from pipeline.batching import Unreadable, load_plan
from pipeline.clock import Clock, SystemClock
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
from pipeline.experience import RolloutGroup
from pipeline.leases import Frontier
from pipeline.messages import CONTROL_KEY, ControlState
from pipeline.storage import Storage, StorageError, open_storage, s3
from pipeline.trainer_log import Fenced, Plan, TrainerLog, decode, encode
from pipeline.versions import Version
from pipeline.writer import Superseded
from tests import fake_worker, s3server
from tests.faultproxy import FAULTS, FaultProxy, by_seed
from tests.simulation import KINDS, Violation, check_lineage, require

log = logging.getLogger(__name__)

LONGEST_S = 300.0
"""After which a run counts as hanging."""
GAVE_UP = 3
"""Exit code of a process that was fenced, superseded, or let down by the store."""
REQUESTS_BETWEEN = 150
"""Two kills, in the mean."""
KEPT = 2
"""Checkpoints."""
OUTCOME_KEY = "outcome.json"
IMPORTS = ["pipeline.batching", "pipeline.coordinator", "pipeline.storage.s3", "tests.fake_worker", "tests.simulation"]
"""What every process needs, and starts no thread."""
FORKS = multiprocessing.get_context("forkserver")


@dataclasses.dataclass(frozen=True)
class Hazards:
    kills: int = 6
    """Processes that are killed, or stopped for a while and replaced."""
    faults: bool = True
    """0–10 % of the requests meet a fault of tests.faultproxy."""
    server_kills: int = 0
    outage_s: float = 0.0
    """In the middle of the run the proxy answers nothing but 503."""


SCENARIOS = {
    "calm": Hazards(kills=0, faults=False),
    "kills": Hazards(),
    "server killed": Hazards(kills=2, server_kills=2),
    "outage": Hazards(kills=2, faults=False, outage_s=60.0),
}


# The processes


class SkewedClock(SystemClock):
    def __init__(self, skew_s: float):
        self.skew_s = skew_s

    def now(self) -> float:
        return super().now() + self.skew_s


Part = Callable[[RunConfig, Storage, Clock, str], Awaitable[None]]


def process(part: Part, config: RunConfig, name: str, skew_s: float, verbose: bool) -> None:
    """The main function of each: exit code 0 when the run is over."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO if verbose else logging.CRITICAL, format=f"{name} %(name)s %(message)s")
    s3.REQUEST_LIMIT = "5s"
    storage = open_storage(config.store.uri, config.store.endpoint)
    try:
        asyncio.run(part(config, storage, SkewedClock(skew_s), name))  # type: ignore[arg-type]
    except (Fenced, Superseded, StorageError) as error:
        log.info("ends: %s", error)
        sys.exit(GAVE_UP)


async def work(config: RunConfig, storage: Storage, clock: Clock, name: str) -> None:
    """What pipeline.rollout does, without an engine: each group takes a moment."""

    def make(index: int, version: Version) -> RolloutGroup:
        time.sleep(random.uniform(0, 0.1))
        rollouts = [fake_worker.rollout([7, 2], [-0.1, -0.7], reward, version) for reward in (0.0, 1.0)]
        return fake_worker.group(index, [5, 9], rollouts)

    await fake_worker.work(config, storage, make, name, clock=clock)


async def train(config: RunConfig, storage: Storage, clock: Clock, name: str, dies: bool) -> None:
    """What pipeline.trainer and pipeline.lead do, without a model: its weights are the list of what was trained.

    `dies`: by SIGKILL, up to two steps behind the run's first checkpoint. Kills at random are mostly too early or too
    late for what a checkpoint keeps to matter.
    """
    last = None
    saved = await _newest_checkpoint(storage)
    coordinator = Coordinator(storage, config, clock, random.Random())
    await coordinator.take_over(saved["coordinator"] if saved else None)
    log.info("term %d, from step %d", coordinator.term, coordinator.step)
    trained = _plans(saved["trained"]) if saved else {}
    ticking = asyncio.create_task(coordinator.run())
    term, total = coordinator.term, config.algorithm.total_steps
    await coordinator.publish(Version(term, coordinator.step))
    for step in range(coordinator.step + 1, total + 1):
        trained[step] = await _load(storage, coordinator, await coordinator.next_plan(step))
        await asyncio.sleep(random.uniform(0, 0.2))
        await coordinator.finish_step(step)
        if step % config.checkpoint.every_steps == 0:
            await _save(config, storage, coordinator, trained)
            if dies and saved is None and last is None:
                last = step + random.randint(0, 2)
        await coordinator.publish(Version(term, step))
        if step == last:
            os.kill(os.getpid(), signal.SIGKILL)
    await coordinator.stop("complete")
    ticking.cancel()
    outcome = {"frontier": coordinator.ledger.frontier.to_json(), "trained": _json(trained), "term": term}
    outcome["resumed"] = saved is not None
    await storage.put(OUTCOME_KEY, json.dumps(outcome).encode())


async def _load(storage: Storage, coordinator: Coordinator, plan: Plan) -> Plan:
    """Damage on the way may look like damage in the store: then the step is trained without that shard."""
    while True:
        try:
            await load_plan(storage, plan)
            return plan
        except Unreadable as error:
            plan = await coordinator.withdraw(plan.step, error.shards)


async def _save(config: RunConfig, storage: Storage, coordinator: Coordinator, trained: dict[int, Plan]) -> None:
    key = f"checkpoints/{Version(coordinator.term, coordinator.step)}.json"
    content = {"coordinator": coordinator.state(), "trained": _json(trained)}
    await storage.create(key, json.dumps(content).encode())
    keys = sorted(info.key for info in await storage.list("checkpoints") if info.key <= key)
    for old in keys[:-KEPT]:
        await storage.delete(old)
    kept = [await storage.get(each) for each in keys[-KEPT:]]
    states = [json.loads(found.data)["coordinator"] for found in kept if found]
    if states and len(states) == len(kept) and config.store.retention == "window":
        await coordinator.collect(states)


async def _newest_checkpoint(storage: Storage) -> dict[str, Any] | None:
    keys = sorted(info.key for info in await storage.list("checkpoints"))
    found = await storage.get(keys[-1]) if keys else None
    return json.loads(found.data) if found else None


def _json(trained: dict[int, Plan]) -> dict[int, Any]:
    return {step: json.loads(encode(plan)) for step, plan in trained.items()}


def _plans(content: dict[str, Any]) -> dict[int, Plan]:
    plans = {int(step): decode(json.dumps(record).encode()) for step, record in content.items()}
    return {step: plan for step, plan in plans.items() if isinstance(plan, Plan)}


# The run


class Run:
    def __init__(self, seed: int, scenario: str, server: s3server.S3Server, outage_s: float, verbose: bool):
        self.seed, self.scenario, self.server, self.verbose = seed, scenario, server, verbose
        self.hazards = SCENARIOS[scenario]
        self.outage_s = min(outage_s, self.hazards.outage_s)
        self.random = random.Random(f"{scenario} {seed}")
        self.counts: collections.Counter[str] = collections.Counter()
        self.running: dict[str, multiprocessing.context.ForkServerProcess] = {}
        self.zombies: list[multiprocessing.context.ForkServerProcess] = []
        self.skews: dict[str, float] = {}
        """Seconds by which the clock of each part's machine is off."""
        self.workers = self.random.randint(1, 4)
        rate = self.random.uniform(0, 0.1) if self.hazards.faults else 0.0
        self.proxy = FaultProxy(server.endpoint, by_seed(seed, rate, FAULTS), seed)

    def _configure(self) -> RunConfig:
        prefix = f"chaos/{self.scenario.replace(' ', '-')}-{self.seed}-{secrets.token_hex(4)}"
        return RunConfig(
            name="chaos",
            run_id=str(self.seed),
            model=ModelConfig(uri="none", path="none"),
            data=DataConfig(sets=[]),
            rewards=[RewardConfig(name="none")],
            store=StoreConfig(
                uri=f"s3://miles/{prefix}",
                endpoint=self.proxy.endpoint,
                retention="window" if self.random.random() < 0.5 else "all",
            ),
            algorithm=AlgorithmConfig(
                type="grpo",
                total_steps=self.random.randint(6, 10),
                prompts_per_step=self.random.randint(2, 6),
                group_size=2,
                max_staleness=self.random.randint(0, 3),
            ),
            rollout=RolloutConfig(
                poll_s=0.1,
                heartbeat_s=0.5,
                flush_s=0.2,
                lease_timeout_s=15.0,
                group_timeout_s=60.0,
                max_concurrent_groups=self.random.randint(1, 6),
                max_failures=8,
            ),
            checkpoint={"every_steps": self.random.choice([1, 2, 3])},
        )

    async def run(self) -> collections.Counter[str]:
        """Raises Violation where an invariant does not hold."""
        started = time.monotonic()
        async with self.proxy:
            self.config = self._configure()
            trainer = functools.partial(train, dies=self.hazards.kills > 0)
            parts = [self._keep(trainer, "trainer"), *(self._keep(work, f"worker-{n}") for n in range(self.workers))]
            hazards = [asyncio.ensure_future(hazard) for hazard in (self._kill(), self._break_server(), self._outage())]
            try:
                async with asyncio.timeout(LONGEST_S), asyncio.TaskGroup() as group:
                    for part in parts:
                        group.create_task(part)
            except TimeoutError:
                raise Violation("hung", f"{sorted(self.running)} still run after {LONGEST_S:.0f} s") from None
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None
            finally:
                for hazard in hazards:
                    hazard.cancel()
                self._end()
        await self._check()
        self.counts.update(runs=1, requests=self.proxy.requests.total(), faults=self.proxy.faults.total())
        self.counts["seconds"] = round(time.monotonic() - started)
        return self.counts

    async def _keep(self, part: Part, name: str) -> None:
        """Start `part` again and again until one of its processes ends well."""
        while True:
            child = self.running[name] = self._start(part, name)
            while child.exitcode is None and self.running[name] is child and child not in self.zombies:
                await asyncio.sleep(0.02)
            if child.exitcode == 0:
                del self.running[name]
                return
            known = child.exitcode in (None, -signal.SIGKILL, GAVE_UP)
            require(known, "broken", f"{name} ended with exit code {child.exitcode}")
            await asyncio.sleep(self.random.uniform(0, 0.5))

    def _start(self, part: Part, name: str) -> multiprocessing.context.ForkServerProcess:
        skew_s = self.skews.setdefault(name, self.random.choice([0.0, 0.0, 3600.0, -3600.0]))
        child = FORKS.Process(target=process, args=(part, self.config, name, skew_s, self.verbose), daemon=True)
        child.start()
        self.counts["processes"] += 1
        return child

    async def _kill(self) -> None:
        for _ in range(self.hazards.kills):
            await self._requests(self.random.expovariate(1 / REQUESTS_BETWEEN))
            able = sorted(name for name, child in self.running.items() if child.exitcode is None)
            if not able:
                continue
            name = self.random.choice(able)
            child = self.running[name]
            self.counts["kills"] += 1
            if self.random.random() < 0.3:
                log.info("%s is stopped, and replaced", name)
                self.zombies.append(child)
                _signal(child, signal.SIGSTOP)
                asyncio.get_running_loop().call_later(self.random.uniform(0.5, 6), _signal, child, signal.SIGCONT)
            else:
                log.info("%s is killed", name)
                _signal(child, signal.SIGKILL)

    async def _break_server(self) -> None:
        for _ in range(self.hazards.server_kills):
            await self._requests(self.random.expovariate(1 / (2 * REQUESTS_BETWEEN)))
            log.info("the server is killed")
            assert self.server.restart
            self.server.restart()
            self.counts["server kills"] += 1
            while not await asyncio.to_thread(s3server.answers, self.server):
                await asyncio.sleep(0.2)

    async def _outage(self) -> None:
        if self.outage_s:
            await self._requests(self.random.expovariate(1 / (2 * REQUESTS_BETWEEN)))
            before, self.proxy.choose = self.proxy.choose, lambda request: "503"
            await asyncio.sleep(self.outage_s)
            self.proxy.choose = before

    async def _requests(self, count: float) -> None:
        """Until so many more have come: on a busy machine, too, the processes have done something by then."""
        enough = self.proxy.requests.total() + count
        while self.proxy.requests.total() < enough:
            await asyncio.sleep(0.01)

    def _end(self) -> None:
        for child in [*self.running.values(), *self.zombies]:
            _signal(child, signal.SIGKILL)
            child.join(10)

    async def _check(self) -> None:
        storage = open_storage(self.config.store.uri, self.server.endpoint)
        records = [record for _, record in await TrainerLog(storage).take_over()]
        found, told = await storage.get(OUTCOME_KEY), await storage.get(CONTROL_KEY)
        assert found
        assert told
        outcome, algorithm = json.loads(found.data), self.config.algorithm
        trained, frontier = _plans(outcome["trained"]), Frontier.from_json(outcome["frontier"])
        most_open = (algorithm.max_staleness + 1) * algorithm.prompts_per_step
        dropped = check_lineage(records, trained, frontier, algorithm.total_steps, most_open, {"stale", "damaged"})
        require(outcome["resumed"] or not self.hazards.kills, "broken", "no trainer was killed behind a checkpoint")
        require(self.hazards.faults or "damaged" not in dropped.values(), "lost", f"dropped {dropped}")
        count = sum(len(plan.groups) for plan in trained.values())
        damaged = sum(reason == "damaged" for reason in dropped.values())
        wanted = algorithm.total_steps * algorithm.prompts_per_step
        require(count + damaged == wanted, "lost", f"{count} groups were trained of {wanted}")
        leases = [index for entry in ControlState.decode(told.data).writers.values() for index in entry.leases]
        require(not leases, "leaked", f"{leases} are still leased")
        if self.config.store.retention == "all":
            await self._check_rows(storage, trained)
        self.counts.update({"groups trained": count, "takeovers": outcome["term"]})
        self.counts.update(f"dropped: {reason}" for reason in dropped.values())

    async def _check_rows(self, storage: Storage, trained: dict[int, Plan]) -> None:
        """What was trained lies where the plans say, and is as old as it may be."""
        for plan in trained.values():
            for group in plan.groups:
                found = await storage.get(group.key)
                require(found is not None and found.info.sha256 == group.sha256, "lost", f"{group.key} is not there")
                assert found
                table = codec.decode(found.data).slice(group.start, group.stop - group.start)
                whole = table["index"].to_pylist() == [group.index] * self.config.algorithm.group_size
                require(whole, "broken", f"rows of index {group.index} in step {plan.step}")
                staleness = plan.step - 1 - min(table["version_step"].to_pylist())
                require(0 <= staleness <= self.config.algorithm.max_staleness, "broken", f"staleness {staleness}")


def _signal(child: multiprocessing.context.ForkServerProcess, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        if child.exitcode is None and child.pid is not None:
            os.kill(child.pid, number)


async def attempt(run: Run) -> collections.Counter[str] | str:
    """The counts, or what went wrong."""
    try:
        return await run.run()
    except Exception as error:
        log.info("seed %d", run.seed, exc_info=True)
        again = f"python -m tests.storechaos --scenario '{run.scenario}' --first {run.seed} --seeds 1 --verbose"
        return f"{error.kind if isinstance(error, Violation) else 'broken'}: seed {run.seed}: {error!r}; {again}"


async def play(seeds: dict[str, range], outage_s: float, at_once: int, verbose: bool) -> int:
    """Run the seeds of each scenario; print failures and totals; 1 if there are failures."""
    totals: dict[str, collections.Counter[str]] = {}
    failures: list[str] = []
    started = time.monotonic()
    with s3server.serve("miles") as server:
        os.environ |= server.environment
        FORKS.set_forkserver_preload(IMPORTS)
        for scenario, numbers in seeds.items():
            totals[scenario] = collections.Counter()
            gate = asyncio.Semaphore(1 if SCENARIOS[scenario].server_kills else at_once)

            async def one(seed: int, scenario: str = scenario, gate: asyncio.Semaphore = gate) -> None:
                async with gate:
                    outcome = await attempt(Run(seed, scenario, server, outage_s, verbose))
                totals[scenario]["seeds"] += 1
                if totals[scenario]["seeds"] % 5 == 0:
                    print(f"{scenario}: {totals[scenario]['seeds']} seeds", flush=True)
                if isinstance(outcome, str):
                    failures.append(outcome)
                    print(f"{scenario}: {outcome}", flush=True)
                else:
                    totals[scenario].update(outcome)

            await asyncio.gather(*map(one, numbers))
    print_totals(totals)
    count = sum(len(numbers) for numbers in seeds.values())
    kinds = collections.Counter(failure.partition(":")[0] for failure in failures)
    print(
        ", ".join(f"{kinds[kind]} {kind}" for kind in KINDS)
        + f": {count - len(failures)} of {count} seeds hold, {time.monotonic() - started:.0f} s"
    )
    return 1 if failures else 0


def print_totals(totals: dict[str, collections.Counter[str]]) -> None:
    columns = ["runs", "groups trained", "takeovers", "processes", "kills", "server kills", "requests", "faults"]
    print(f"{'':16}" + "".join(f"{name:>15}" for name in [*columns, "seconds"]))
    for name, counts in totals.items():
        print(f"{name:16}" + "".join(f"{counts[column]:15,}" for column in [*columns, "seconds"]))
    total = sum(totals.values(), collections.Counter[str]())
    drops = {name: count for name, count in sorted(total.items()) if name.startswith("dropped")}
    print(", ".join(f"{name} {count}" for name, count in drops.items()) or "nothing dropped")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=50, help="of kills; a fifth as many with kills of the server")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--scenario", choices=list(SCENARIOS), help="this one alone")
    parser.add_argument("--outage-s", type=float, default=60.0, help="how long the store answers 503 (default 60)")
    parser.add_argument("--at-once", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--verbose", action="store_true", help="what happens, in every process")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO if options.verbose else logging.CRITICAL, format="%(name)s %(message)s")
    shares = {"kills": options.seeds, "server killed": -(-options.seeds // 5), "outage": 1}
    if options.scenario:
        shares = {options.scenario: options.seeds}
    seeds = {scenario: range(options.first, options.first + count) for scenario, count in shares.items()}
    return asyncio.run(play(seeds, options.outage_s, options.at_once, options.verbose))


if __name__ == "__main__":
    sys.exit(main())
