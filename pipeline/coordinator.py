"""The trainer's side of the protocol: who generates what, which groups each step trains, and that none is lost.

`tick`, called over and over, listens to writers/, reads new shards, takes leases back, grants free indices and tells
all of it in control/state.json. `next_plan` picks a step's groups and appends them to the trainer's log before
anybody trains them. After a restart `take_over` fences the predecessor, takes its leases from control/state.json and
re-reads the delivered groups that no plan names; logged plans are then handed out again, unchanged, before new ones
are made. During that replay no lease is granted, and control/state.json keeps naming the policy it named before:
leases that are open then stay valid, as a version of an earlier term counts by its step.

The order of calls is: take_over, publish(version of the restored step), then for each step next_plan, finish_step,
[evaluate,] [state, for a checkpoint,] publish; at the end stop. A request to evaluate is part of the state. All of it
happens in one event loop, with `run` as a task in it; the next step's plan may be asked for while one is trained.
"""

import asyncio
import collections
import dataclasses
import itertools
import json
import logging
import random
from typing import Any

from pipeline import planning
from pipeline.assignment import Assignments, Candidate
from pipeline.clock import Clock
from pipeline.config import RunConfig
from pipeline.control_file import ControlFile
from pipeline.intake import Intake
from pipeline.leases import Frontier, Holder, Lease, Ledger, Suspicions, grant
from pipeline.messages import ControlState, WriterEntry, evaluation_key, shard_key
from pipeline.roster import GETS_AT_ONCE, Known, Roster
from pipeline.storage import Storage, StorageError
from pipeline.trainer_log import Collect, DropReason, Plan, Record, Stop, TrainerLog
from pipeline.versions import Version

log = logging.getLogger(__name__)

FORGET_AFTER = 10
"""Lease time-outs after which a revoked, silent writer is no longer mentioned."""


class Coordinator:
    """`term`: this trainer's. `step`: finished steps. `version`: the policy that workers are told to load."""

    def __init__(
        self,
        storage: Storage,
        config: RunConfig,
        clock: Clock,
        randomness: random.Random,
        vocabulary: int | None = None,
    ):
        """`vocabulary`: a shard with a token id that is not below it is damaged; None: not checked."""
        self.storage, self.config, self.clock, self.randomness = storage, config, clock, randomness
        self.log = TrainerLog(storage)
        self.ledger = Ledger()
        self.suspicions = Suspicions(config.rollout.max_failures)
        self.roster = Roster(storage, config.rollout.lease_timeout_s, 2 * config.rollout.heartbeat_s)
        self.intake = Intake(storage, config.algorithm.group_size, vocabulary)
        self.assignments = Assignments()
        self.control = ControlFile(storage)
        self.step = 0
        self.version: Version | None = None
        self.stopped: str | None = None
        self._wanted: str | None = None
        self._outage: str | None = None
        self.dropped: collections.Counter[str] = collections.Counter()
        self._logged = 0  # last step that the log had at takeover
        self._positions: dict[int, int] = {0: 0}  # step → log position behind its plan
        self._beaten: float | None = None
        self._ticked = asyncio.Event()
        self._failure: Exception | None = None

    @property
    def term(self) -> int:
        return self.log.term

    @property
    def waiting_for(self) -> str | None:
        """What the run waits for, in words."""
        return self._outage or self._wanted

    @property
    def replaying(self) -> bool:
        """Until the policy of the last step that the predecessor planned is published."""
        return self.version is None or self.version.term < self.term

    # Taking over

    async def take_over(self, state: dict[str, Any] | None = None) -> None:
        """Fence earlier trainers and restore; `state` is what `state` returned for the checkpoint, None without one.

        Raises Fenced if another trainer takes over at the same time, ValueError if what `state` needs was collected.
        """
        saved = state or {"term": 0, "step": 0, "position": 0, "low": 0, "above": [], "writers": {}, "evaluations": []}
        records = await self.log.take_over(saved["position"], saved["term"])
        self._restore(saved, records)
        predecessor, info = await self.control.seize(self._control())
        self.roster.wrote(info.modified)
        self._adopt(saved, predecessor)
        for known in list(self.roster.writers.values()):
            await self.intake.drain(known, self.ledger)
            if known.cursor < known.promised:
                log.warning("shard %s is gone", shard_key(known.ulid, known.cursor))
                known.cursor = known.promised
        self._refuse(self._logged + 1)

    def _restore(self, saved: dict[str, Any], records: list[tuple[int, Record]]) -> None:
        self.step = self._logged = saved["step"]
        self._positions = {self.step: saved["position"]}
        self.assignments = Assignments({step: Version(*version) for step, version in saved["evaluations"]})
        self.ledger = Ledger(Frontier.from_json(saved))
        for number, record in records:
            if isinstance(record, Plan) and record.step > self._logged:
                assert record.step == self._logged + 1, f"the log lacks a plan of step {self._logged + 1}"
                self._logged = record.step
                self._enter(dataclasses.replace(record, replayed=True), number + 1)
            elif isinstance(record, Collect) and record.below > saved["position"]:
                raise ValueError(f"the checkpoint of step {self.step} is too old: what followed it has been deleted")

    def _adopt(self, saved: dict[str, Any], old: ControlState | None) -> None:
        entries = {
            ulid: WriterEntry(entry["instance"], dict(entry["leases"]), entry["acknowledged"], entry["final"])
            for ulid, entry in saved["writers"].items()
        }
        if old is not None:
            entries = {ulid: dataclasses.replace(entry, leases={}) for ulid, entry in entries.items()} | old.writers
            if old.version is not None and old.version.step <= self._logged:
                self.version = old.version
        for ulid, entry in entries.items():
            cursor = saved["writers"].get(ulid, {"cursor": 0})["cursor"]
            self.roster.writers[ulid] = Known(ulid, entry.instance, cursor, entry.acknowledged, entry.final)
            for index, minimum in entry.leases.items():
                if not self.ledger.taken(index) and entry.final is None:
                    self.ledger.lease(index, Lease(ulid, minimum, self.roster.elapsed))

    def state(self) -> dict[str, Any]:
        """What the checkpoint of the last finished step must keep for `take_over`; JSON."""
        held, writers = self.ledger.held(), {}
        for ulid, known in self.roster.writers.items():
            cursor = self.ledger.cursor(ulid, known.cursor)
            if known.live or cursor < known.cursor:
                writers[ulid] = {
                    "instance": known.instance,
                    "cursor": cursor,
                    "acknowledged": known.cursor,
                    "final": known.final,
                    "leases": [[index, lease.minimum] for index, lease in held[ulid].items()],
                }
        return {
            "term": self.term,
            "step": self.step,
            "position": self._positions[self.step],
            **self.ledger.frontier.to_json(),
            "writers": writers,
            "evaluations": [[step, list(version)] for step, version in self.assignments.pending.items()],
        }

    # Steps

    async def next_plan(self, step: int) -> Plan:
        """The plan of `step`, 1 more than the last one planned; it is in the log when this returns.

        Waits for groups, says for which in `waiting_for`; needs `run` beside it. Raises Fenced.
        """
        if step not in self.ledger.plans:
            plan = await self._choose(step)
            await self.log.append(plan)
            self._enter(plan, self.log.position)
            self.dropped.update([drop.reason for drop in plan.drops] + ["quarantined"] * len(plan.quarantined))
        return self.ledger.plans[step]

    async def _choose(self, step: int) -> Plan:
        algorithm = self.config.algorithm
        while True:
            if self._failure:
                raise self._failure
            self._refuse(step)
            choice = planning.choose(
                step,
                self.ledger.delivered.values(),
                self.ledger.leases,
                algorithm.prompts_per_step,
                algorithm.max_staleness,
            )
            if choice.groups:
                self._wanted = None
                return Plan(
                    step=step,
                    term=self.term,
                    groups=tuple(group.ref for group in choice.groups),
                    drops=tuple(drop for drop, _ in self.ledger.aside.values()),
                    quarantined=tuple(self.intake.damaged.values()),
                )
            self._wanted = self._describe(step, choice)
            self._ticked.clear()
            await self._ticked.wait()

    def _refuse(self, step: int) -> None:
        algorithm = self.config.algorithm
        need_spread = bool(algorithm.parameters.get("dynamic_sampling", False))
        for index, group in list(self.ledger.delivered.items()):
            reason = planning.refusal(group, step, algorithm.max_staleness, need_spread)
            if reason:
                self._set_aside(index, reason)

    def _set_aside(self, index: int, reason: DropReason) -> None:
        log.info("prompt index %d is dropped: %s", index, reason)
        self.ledger.set_aside(index, reason)

    def _enter(self, plan: Plan, position: int) -> None:
        self.ledger.plan(plan)
        self._positions[plan.step] = position
        self.intake.logged(plan.quarantined)
        self.suspicions.forget([group.index for group in plan.groups] + [drop.index for drop in plan.drops])

    async def finish_step(self, step: int) -> None:
        """`step` has been trained."""
        assert step == self.step + 1, f"step {step} finished after {self.step}"
        self.ledger.finish(step)
        del self._positions[self.step]
        self.step = step

    async def publish(self, version: Version) -> None:
        """The weights of `version` lie in the store: tell the workers, and grant what that allows. Raises Fenced."""
        assert version.term == self.term, "published by another trainer"
        assert version.step <= self.step, "published before it was finished"
        self.ledger.publish(version.step)
        if version.step >= self._logged:
            if self.replaying:
                self.ledger.renew(self.roster.elapsed)
            self.version = version
        self._grant()
        await self._tell()

    async def stop(self, reason: str) -> None:
        """Append the stop record and tell the workers to end. Raises Fenced."""
        await self.log.append(Stop(self.term, reason, self.step))
        self.stopped = reason
        await self._tell()

    # Evaluation

    async def evaluate(self, step: int, version: Version) -> None:
        """Have a worker evaluate `version`, whose weights lie in the store; the result is named by `step`.

        If every worker has loaded a later policy by then, the one current then is evaluated: the result says which.
        """
        if await self.evaluation(step) is None:
            self.assignments.request(step, version)
            self._assign()
            await self._tell()

    async def evaluation(self, step: int) -> dict[str, Any] | None:
        """The result as the worker wrote it; None as long as there is none."""
        found = await self.storage.get(evaluation_key(step))
        return json.loads(found.data) if found else None

    async def _settle_evaluation(self) -> None:
        step = self.assignments.first
        if step is not None and await self.storage.head(evaluation_key(step)):
            self.assignments.settle(step)
        self._assign()

    def _assign(self) -> None:
        held = self.ledger.held()
        candidates = {
            known.ulid: Candidate(known.heartbeat.version, len(held[known.ulid]))
            for known in self.roster.live()
            if known.heartbeat and not known.draining
        }
        self.assignments.assign(candidates, self.version)

    # The loop

    async def run(self) -> None:
        """Tick until cancelled or fenced; outages of the store are logged and outlasted.

        Whatever ends it is raised by `next_plan`, too.
        """
        try:
            while True:
                try:
                    await self.tick()
                    self._outage = None
                except StorageError as error:
                    log.warning("%s; trying again", error)
                    self._outage = str(error)
                await self.clock.sleep(self.config.rollout.poll_s * self.randomness.uniform(0.8, 1.2))
        except Exception as error:
            self._failure = error
            raise
        finally:
            self._ticked.set()

    async def tick(self) -> None:
        """One round of listening, reading, granting and telling. Raises Fenced, StorageError."""
        try:
            beat = self._is_due(self._beaten, self.config.rollout.heartbeat_s)
            if beat:
                await self._listen()
            await self._read()
            await self._settle_evaluation()
            self._grant()
            await self._tell(fresh=beat)
            if beat:
                self._beaten = self.clock.now()
        finally:
            self._ticked.set()

    def _is_due(self, last: float | None, period_s: float) -> bool:
        """A clock that was set back makes everything due."""
        return last is None or not 0 <= self.clock.now() - last < period_s

    async def _listen(self) -> None:
        for known, reason in await self.roster.refresh():
            await self._revoke(known, reason)
        for known in self.roster.live():
            if known.heartbeat:
                for index in known.heartbeat.handed_back:
                    self.ledger.release(index, known.ulid)
                for index, reason in known.heartbeat.failures.items():
                    self._fail(index, known, reason)
            await self._end_overdue(known)
        self._forget()

    async def _end_overdue(self, known: Known) -> None:
        limit = self.config.rollout.group_timeout_s
        held = self.ledger.held()[known.ulid]
        overdue = [index for index, lease in held.items() if self.roster.elapsed - lease.granted > limit]
        if overdue and not self.replaying:
            for index in overdue:
                self._fail(index, known, f"not delivered within {limit:g} s")
            await self._revoke(known, f"prompt index {overdue[0]} not delivered within {limit:g} s")

    async def _revoke(self, known: Known, reason: str) -> None:
        """Nothing that this incarnation writes from now on counts; what it held is free again."""
        await self.intake.drain(known, self.ledger)
        log.warning("writer %s (%s) is revoked: %s", known.ulid, known.instance, reason)
        known.final = known.cursor
        held = list(self.ledger.held()[known.ulid])
        for index in self.suspicions.died(held):
            self._fail(index, known, reason)
        for index in held:
            self.ledger.release(index, known.ulid)

    def _fail(self, index: int, known: Known, reason: str) -> None:
        if self.ledger.release(index, known.ulid):
            log.warning("prompt index %d failed on %s: %s", index, known.instance, reason)
            if self.suspicions.failed(index, known.ulid):
                self._set_aside(index, "failed")

    def _forget(self) -> None:
        for known in list(self.roster.writers.values()):
            long_gone = self.roster.silence(known) > FORGET_AFTER * self.config.rollout.lease_timeout_s
            if not known.live and long_gone and self.ledger.cursor(known.ulid, known.cursor) == known.cursor:
                del self.roster.writers[known.ulid]

    async def _read(self) -> None:
        """New shards of every writer that may have one; more often while the trainer waits for them."""
        period = self.config.rollout.poll_s if self._wanted else self.config.rollout.flush_s
        gate = asyncio.Semaphore(GETS_AT_ONCE)

        async def read(known: Known) -> None:
            async with gate:
                await self.intake.drain(known, self.ledger)
            known.looked = self.clock.now()

        holders = {lease.writer for lease in self.ledger.leases.values()}
        due = []
        for known in self.roster.live():
            announced = known.heartbeat is not None and known.heartbeat.sequence > known.cursor
            if announced or (known.ulid in holders and self._is_due(known.looked, period)):
                due.append(known)
        outcomes = await asyncio.gather(*(read(known) for known in due), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    def _grant(self) -> None:
        if self.replaying or self.stopped or self.version is None:
            return
        algorithm = self.config.algorithm
        capacity = self.ledger.capacity((algorithm.max_staleness + 1) * algorithm.prompts_per_step)
        held, holders = self.ledger.held(), []
        for known in self.roster.live():
            if known.heartbeat and not known.draining:
                leases = held[known.ulid]
                exclusive = any(self.suspicions.is_suspect(index) for index in leases)
                holders.append(Holder(known.ulid, len(leases), known.refuses, exclusive))
        indices = list(itertools.islice(self.ledger.free(), capacity))
        for index, ulid in grant(indices, holders, self.config.rollout.max_concurrent_groups, self.suspicions):
            self.ledger.lease(index, Lease(ulid, self.version.step, self.roster.elapsed))

    # Telling

    def _control(self) -> ControlState:
        held = self.ledger.held()
        return ControlState(
            term=self.term,
            step=self.step,
            version=self.version,
            writers={
                ulid: WriterEntry(
                    known.instance,
                    {index: lease.minimum for index, lease in held[ulid].items()},
                    known.cursor,
                    known.final,
                )
                for ulid, known in self.roster.writers.items()
            },
            evaluation=self.assignments.current,
            stop=self.stopped,
            replaying=self.replaying,
        )

    async def _tell(self, fresh: bool = False) -> None:
        """Write control/state.json if it has changed, or to keep it `fresh`."""
        info = await self.control.write(self._control, fresh)
        if info:
            self.roster.wrote(info.modified)

    def _describe(self, step: int, choice: planning.Choice) -> str:
        if not self.roster.live():
            return "rollout workers (none registered)"
        running = collections.Counter(
            self.roster.writers[lease.writer].instance
            for index, lease in self.ledger.leases.items()
            if not choice.urgent or index in choice.urgent
        )
        places = ", ".join(f"{count} running on {instance}" for instance, count in running.most_common(3))
        if choice.urgent:
            return f"groups that would be stale after step {step}: {places}"
        unfit = collections.Counter(drop.reason for drop, _ in self.ledger.aside.values())
        dropped = "".join(f"; {count} dropped ({reason})" for reason, count in unfit.items())
        return f"{choice.ready} of {self.config.algorithm.prompts_per_step} groups; {places or 'none running'}{dropped}"

    def statistics(self) -> dict[str, Any]:
        """queue_groups, running, writers, dropped {reason: count}, generated_tokens, generated_tokens_per_s."""
        said = [known.heartbeat.statistics for known in self.roster.live() if known.heartbeat]
        return {
            "queue_groups": len(self.ledger.delivered),
            "running": len(self.ledger.leases),
            "writers": len(self.roster.live()),
            "dropped": dict(self.dropped),
            "generated_tokens": sum(statistics.get("generated_tokens", 0) for statistics in said),
            "generated_tokens_per_s": sum(statistics.get("tokens_per_s", 0.0) for statistics in said),
        }
