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
import json
import logging
import random
from collections.abc import Iterable, Mapping
from typing import Any

from pipeline import resume, trainer_log
from pipeline.archive import Archive
from pipeline.assignment import Assignments, Candidate
from pipeline.clock import Clock
from pipeline.config import RunConfig
from pipeline.control_file import ControlFile
from pipeline.dispatch import Dispatcher
from pipeline.leases import Lease, Ledger
from pipeline.messages import SHARDS_FOLDER, ControlState, evaluation_key
from pipeline.resume import State
from pipeline.roster import Known, Roster
from pipeline.storage import Storage, StorageError
from pipeline.trainer_log import Collect, Drop, Plan, Quarantine, Record, Stop, TrainerLog, Withdraw
from pipeline.versions import Version

log = logging.getLogger(__name__)


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
        self.control = ControlFile(storage)
        source = Archive if config.data.replay_from else Dispatcher
        self.dispatcher: Dispatcher = source(storage, config, clock, vocabulary)
        self.assignments = Assignments()
        self.step = 0
        self.version: Version | None = None
        self.stopped: str | None = None
        self.dropped: collections.Counter[str] = collections.Counter()
        self.idle_s = 0.0
        """In which the workers had nothing to do: no lease was open, and no evaluation asked for."""
        self._wanted: str | None = None
        self._outage: str | None = None
        self._failure: Exception | None = None
        self._logged = 0  # last step that the log had at takeover
        self._positions: dict[int, int] = {0: 0}  # step → log position behind its plan
        self._beaten: float | None = None
        self._idle_since: float | None = None
        self._ticked = asyncio.Event()

    @property
    def term(self) -> int:
        return self.log.term

    @property
    def ledger(self) -> Ledger:
        return self.dispatcher.ledger

    @property
    def roster(self) -> Roster:
        return self.dispatcher.roster

    @property
    def waiting_for(self) -> str | None:
        """What the run waits for, in words."""
        request = self.assignments.current
        if self._outage or self._wanted is None or request is None or self.ledger.delivered:
            return self._outage or self._wanted
        return f"the evaluation of step {request.step}, which comes first; then {self._wanted}"

    @property
    def replaying(self) -> bool:
        """Until the policy of the last step that the predecessor planned is published."""
        return self.version is None or self.version.term < self.term

    # Taking over

    async def take_over(self, state: dict[str, Any] | None = None) -> None:
        """Fence earlier trainers and restore; `state` is what `state` returned for the checkpoint, None without one.

        Raises Fenced if another trainer takes over at the same time, StorageError if what `state` needs was collected,
        or records of the log are missing.
        """
        saved = State.from_json(state) if state else State()
        records = await self.log.take_over(saved.position, saved.term)
        self._restore(saved, records)
        predecessor, info = await self.control.seize(self._control())
        self.roster.wrote(info.modified)
        self._adopt(saved, predecessor)
        await self.dispatcher.catch_up()
        self.dispatcher.refuse(self._logged + 1)

    def _restore(self, saved: State, records: list[tuple[int, Record]]) -> None:
        self.step = self._logged = saved.step
        self._positions = {self.step: saved.position}
        self.assignments = Assignments(saved.evaluations)
        self.dispatcher.ledger = Ledger(saved.frontier)
        for number, record in records:
            if isinstance(record, Plan) and record.step > self._logged:
                self._logged += 1
                if record.step != self._logged:
                    raise StorageError(f"trainer/log has no plan of step {self._logged}: records have been deleted")
                self._enter(dataclasses.replace(record, replayed=True), number + 1)
            elif isinstance(record, Withdraw) and record.step > self.step:
                self._withdraw(record)
            elif isinstance(record, Collect) and record.below > saved.position:
                raise StorageError(
                    f"the checkpoint of step {saved.step} is too old: what followed it has been deleted; if another "
                    "trainer was still saving newer ones, the next start finds them"
                )

    def _adopt(self, saved: State, old: ControlState | None) -> None:
        """The leases are those of control/state.json, or else the checkpoint's; none that the log has closed."""
        entries = saved.writers
        if old is not None:
            entries = {ulid: dataclasses.replace(entry, leases={}) for ulid, entry in entries.items()} | old.writers
            if old.version is not None and old.version.step <= self._logged:
                self.version = old.version
        for ulid, entry in entries.items():
            cursor = saved.cursors.get(ulid, 0)
            self.roster.writers[ulid] = Known(ulid, entry.instance, cursor, entry.acknowledged, entry.final)
            for index, minimum in entry.leases.items():
                if not self.ledger.taken(index) and entry.final is None:
                    self.ledger.lease(index, Lease(ulid, minimum, self.roster.elapsed))

    def state(self) -> dict[str, Any]:
        """What the checkpoint of the last finished step must keep for `take_over`; JSON."""
        cursors = self.ledger.cursors({ulid: known.cursor for ulid, known in self.roster.writers.items()})
        kept = [known for ulid, known in self.roster.writers.items() if known.live or cursors[ulid] < known.cursor]
        return State(
            term=self.term,
            step=self.step,
            position=self._positions[self.step],
            frontier=self.ledger.frontier,
            writers=resume.entries(kept, self.ledger),
            cursors=cursors,
            evaluations=self.assignments.pending,
        ).to_json()

    async def collect(self, kept: Iterable[dict[str, Any]]) -> int:
        """Delete the shards that no checkpoint needs; returns how many. For `store.retention: window`.

        `kept`: what `state` returned for each checkpoint that is kept. No trainer can resume from an older one after
        this. Raises Fenced.
        """
        if self._beaten is None:
            return 0  # whoever seems to be named by nobody may only not have been met yet
        states = [State.from_json(state) for state in kept]
        below = min(state.position for state in states)
        shards = await self.storage.list(SHARDS_FOLDER)  # before the record: a successor's writers are not among them
        await self.log.append(Collect(self.term, below))
        roster = set(self.roster.writers)
        await self._tell()  # a writer that has just been forgotten is no longer named
        records = await trainer_log.records(self.storage, below)
        keys = resume.expired(shards, states, records, roster | self.roster.writers.keys())
        for key in keys:
            await self.storage.delete(key)
        return len(keys)

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
        while True:
            if self._failure:
                raise self._failure
            choice = self.dispatcher.choose(step)
            if choice.groups:
                self._wanted = None
                return Plan(
                    step=step,
                    term=self.term,
                    groups=tuple(group.ref for group in choice.groups),
                    drops=tuple(drop for drop, _ in self.ledger.aside.values()),
                    quarantined=tuple(self.dispatcher.intake.damaged.values()),
                )
            self._wanted = self.dispatcher.describe(step, choice)
            self._ticked.clear()
            await self._ticked.wait()

    def _enter(self, plan: Plan, position: int) -> None:
        self.dispatcher.enter(plan)
        self._positions[plan.step] = position

    async def withdraw(self, step: int, damaged: Mapping[str, str]) -> Plan:
        """Leave out of `step`, which is not trained yet, the groups in the shards of `damaged` (key → reason).

        Returns what is left of its plan; no later trainer will train them either. Raises Fenced.
        """
        drops = tuple(Drop(group.index, "damaged") for group in self.ledger.plans[step].groups if group.key in damaged)
        shards = tuple(Quarantine(key, reason) for key, reason in sorted(damaged.items()))
        record = Withdraw(step, self.term, drops, shards)
        await self.log.append(record)
        self._withdraw(record)
        self.dropped["damaged"] += len(drops)
        return self.ledger.plans[step]

    def _withdraw(self, record: Withdraw) -> None:
        self.ledger.withdraw(record)
        self.dispatcher.intake.logged(record.quarantined)

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
        if await self.storage.head(evaluation_key(step)) is None:
            self.assignments.request(step, version)
            self._assign()
            await self._tell()

    async def evaluation(self, step: int) -> dict[str, Any] | None:
        """The result as the worker wrote it; None as long as there is none. Raises Corrupted, ValueError."""
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
        rollout = self.config.rollout
        try:
            beat = self._beaten is None or self.clock.monotonic() - self._beaten >= rollout.heartbeat_s
            if beat:
                await self.dispatcher.listen(patient=self.replaying)
            await self.dispatcher.read(rollout.poll_s if self._wanted else rollout.flush_s)
            await self._settle_evaluation()
            self._grant()
            await self._tell(fresh=beat)
            if beat:
                self._beaten = self.clock.monotonic()
            self._count_idle()
        finally:
            self._ticked.set()

    def _grant(self) -> None:
        if not self.replaying and not self.stopped and self.version is not None:
            self.dispatcher.grant(self.version)

    def _count_idle(self) -> None:
        """Looked at once a tick, so that what is shorter is not seen."""
        now, busy = self.clock.monotonic(), self.ledger.leases or self.assignments.pending or self.replaying
        if self._idle_since is not None:
            self.idle_s += now - self._idle_since
        self._idle_since = None if busy or not self.roster.live() else now

    async def _tell(self, fresh: bool = False) -> None:
        """Write control/state.json if it has changed, or to keep it `fresh`."""
        info = await self.control.write(self._control, fresh)
        if info:
            self.roster.wrote(info.modified)

    def _control(self) -> ControlState:
        return ControlState(
            term=self.term,
            step=self.step,
            version=self.version,
            writers=resume.entries(self.roster.writers.values(), self.ledger),
            evaluation=self.assignments.current,
            stop=self.stopped,
            replaying=self.replaying,
        )

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
