"""The protocol, explored to the end: every order of events of a small run, over the real planning code.

    python -m tests.exploration              a larger world; minutes

A state is what the store holds, what the trainer has in memory, and what each worker last saw. From the first state
every event is tried in every state: a worker looks or commits, the trainer reads, tells, plans, finishes, publishes,
saves, collects, takes leases back, or dies at that point and is followed by one that starts from any checkpoint that is
kept, perhaps without control/state.json; what a dead trainer had begun to delete is still deleted, sooner or later; a
revoked writer is forgotten at any moment that the rule for it allows. The trainer is the real Coordinator with its
Ledger, Dispatcher, Intake and resume; only its store is a dict, and its steps take no time.

One writer, one step, one crash and one revocation make 7,000 states; two steps and a revocation 28,000; two steps and a
crash with a loss 32,000; two steps with a crash and a revocation 506,000, in seven minutes; larger worlds have not been
walked to their end.
Limits: one group a shard, no damage, no failing prompt, no evaluation; a lost response is a death between the effect
and its author's next event.
"""

import argparse
import collections
import dataclasses
import logging
import random
import sys
import time
from collections.abc import Coroutine, Iterator
from typing import Any

from pipeline import resume
from pipeline.clock import SystemClock
from pipeline.config import RunConfig
from pipeline.coordinator import Coordinator
from pipeline.intake import Intake
from pipeline.leases import Delivered, Frontier, Ledger
from pipeline.messages import ControlState, Heartbeat, shard_key
from pipeline.roster import Known
from pipeline.storage import Object, ObjectInfo
from pipeline.trainer_log import Collect, GroupRef, Plan, Record, Takeover
from pipeline.versions import Version

KEPT = 2


@dataclasses.dataclass(frozen=True)
class Size:
    writers: int = 2
    steps: int = 2
    prompts: int = 1
    staleness: int = 1
    crashes: int = 1
    revocations: int = 1
    losses: int = 0
    """Crashes at which control/state.json is lost, too."""


@dataclasses.dataclass(frozen=True)
class Worker:
    """One process, as far as others can tell."""

    ulid: str
    sequence: int = 0
    version: int = -1
    leases: tuple[int, ...] = ()
    """Seen, and not committed yet."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    state: dict[str, Any]
    trained: tuple[Plan, ...]
    """By the lineage that leads here."""


class Broken(AssertionError):
    """An invariant does not hold in a state that can be reached; says how."""


class Shelf(Intake):
    """Shards that are summarised already."""

    def __init__(self, shards: dict[str, Delivered]):
        super().__init__(self, 2, None)  # type: ignore[arg-type]
        self.shards = shards

    async def get(self, key: str) -> Object | None:
        return Object(ObjectInfo(key, 1, "", 0.0), b"", {}) if key in self.shards else None

    def _deliver(self, known: Known, shard: Object, ledger: Ledger) -> None:
        ledger.deliver(self.shards[shard.info.key], catching_up=known.cursor < known.promised)


class State:
    def __init__(self, size: Size, config: RunConfig):
        self.size, self.config = size, config
        self.shards: dict[str, Delivered] = {}
        self.log: tuple[Record, ...] = ()
        self.checkpoints: tuple[Checkpoint, ...] = ()
        self.control: ControlState | None = None
        self.workers = tuple(Worker(f"W{number}") for number in range(size.writers))
        self.doomed: frozenset[str] = frozenset()
        """Keys that a trainer, dead or alive, is about to delete."""
        self.crashes, self.revocations, self.losses = size.crashes, size.revocations, size.losses
        self.following = "plan"
        self.trained: tuple[Plan, ...] = ()
        self.trainer = self._take_over(None)

    def copy(self) -> "State":
        new = object.__new__(State)
        new.__dict__.update(self.__dict__)
        new.shards = dict(self.shards)
        new.trainer = new._trainer()
        old, ledger = self.trainer, new.trainer.ledger
        ledger.frontier = Frontier(old.ledger.frontier.low, old.ledger.frontier.above)
        for name in ("leases", "delivered", "aside", "plans", "planned"):
            setattr(ledger, name, dict(getattr(old.ledger, name)))
        new.trainer.roster.writers = {ulid: dataclasses.replace(k) for ulid, k in old.roster.writers.items()}
        new.trainer.step, new.trainer.version, new.trainer._logged = old.step, old.version, old._logged
        new.trainer._positions, new.trainer._beaten = dict(old._positions), old._beaten
        new.trainer.log.term, new.trainer.log.position = old.log.term, old.log.position
        return new

    def key(self) -> str:
        ledger, roster = self.trainer.ledger, self.trainer.roster.writers
        return repr(
            (
                sorted(self.shards),
                self.log,
                [(c.state, len(c.trained)) for c in self.checkpoints],
                self.control and self.control.encode(),
                self.workers,
                sorted(self.doomed),
                (self.crashes, self.revocations, self.losses),
                self.following,
                ledger.frontier.to_json(),
                sorted((index, lease.writer, lease.minimum) for index, lease in ledger.leases.items()),
                sorted(ledger.delivered),
                sorted(ledger.aside),
                sorted(ledger.planned.items()),
                sorted((k.ulid, k.cursor, k.promised, k.final, k.heartbeat is None) for k in roster.values()),
                (self.trainer.step, self.trainer.version, self.trainer._positions, self.trainer._beaten),
            )
        )

    def _trainer(self) -> Coordinator:
        trainer = Coordinator(None, self.config, SystemClock(), random.Random(0))  # type: ignore[arg-type]
        trainer.dispatcher.intake = Shelf(self.shards)
        return trainer

    def _take_over(self, checkpoint: Checkpoint | None) -> Coordinator:
        """As Coordinator.take_over and the trainer's first publish do."""
        trainer = self._trainer()
        saved = resume.State.from_json(checkpoint.state) if checkpoint else resume.State()
        records = list(enumerate(self.log))[saved.position :]
        trainer.log.term = max([saved.term, *(record.term for _, record in records)]) + 1
        self.log = (*self.log, Takeover(trainer.log.term))
        trainer.log.position = len(self.log)
        trainer._restore(saved, records)
        trainer._adopt(saved, self.control)
        completed(trainer.dispatcher.catch_up())
        trainer.dispatcher.refuse(trainer._logged + 1)
        old = self.control
        self.control = dataclasses.replace(old, term=trainer.term, replaying=True) if old else trainer._control()
        self.trained, self.following = (checkpoint.trained if checkpoint else ()), "plan"
        self.trainer = trainer
        self._publish(trainer.step)
        return trainer

    # Events

    def events(self) -> Iterator[tuple[str, "State"]]:
        """What can happen next, and what it leads to."""
        for name, arguments in self._possible():
            after = self.copy()
            getattr(after, f"_{name}")(*arguments)
            after.check()
            yield " ".join([name, *map(str, arguments)]), after

    def _possible(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        for number, worker in enumerate(self.workers):
            yield "look", (number,)
            for index in worker.leases:
                yield "commit", (number, index)
        for known in self.trainer.roster.writers.values():
            if shard_key(known.ulid, known.cursor) in self.shards and known.live:
                yield "read", (known.ulid,)
            if known.live and self.revocations:
                yield "revoke", (known.ulid,)
            if not known.live:
                yield "forget", (known.ulid,)
        yield "tell", ()
        if not self.done():
            yield self.following, ()
        if self.following == "plan" and self.trainer.step:
            yield "save", ()
        if self._expired() - self.doomed:
            yield "collect", ()
        if self.doomed:
            yield "delete", ()
        if self.crashes:
            for number in range(len(self.checkpoints)) if self.checkpoints else [None]:
                yield "die", (number,)
                if self.losses:
                    yield "lose", (number,)

    def done(self) -> bool:
        return self.trainer.step == self.size.steps and self.following == "plan"

    def _look(self, number: int) -> None:
        worker, told = self.workers[number], self.control
        assert told is not None
        entry = told.writers.get(worker.ulid)
        if entry and entry.final is not None:
            worker, entry = Worker(worker.ulid + "-"), None
        version = max(worker.version, told.version.step) if told.version else worker.version
        wanted = {index for index, minimum in entry.leases.items() if minimum <= version} if entry else set()
        committed = {
            self.shards[key].ref.index
            for seq in range(entry.acknowledged if entry else 0, worker.sequence)
            if (key := shard_key(worker.ulid, seq)) in self.shards
        }
        leases = () if told.replaying else tuple(sorted(wanted - committed))
        self._replace(number, dataclasses.replace(worker, version=version, leases=leases))

    def _commit(self, number: int, index: int) -> None:
        worker = self.workers[number]
        key = shard_key(worker.ulid, worker.sequence)
        ref, step = GroupRef(index, key, "", 0, 2), worker.version
        self.shards[key] = Delivered(ref, worker.ulid, worker.sequence, step, step, 2, True)
        left = tuple(other for other in worker.leases if other != index)
        self._replace(number, dataclasses.replace(worker, sequence=worker.sequence + 1, leases=left))

    def _replace(self, number: int, worker: Worker) -> None:
        self.workers = (*self.workers[:number], worker, *self.workers[number + 1 :])

    def _read(self, ulid: str) -> None:
        completed(self.trainer.dispatcher.intake.drain(self.trainer.roster.writers[ulid], self.trainer.ledger))

    def _revoke(self, ulid: str) -> None:
        self.revocations -= 1
        completed(self.trainer.dispatcher._revoke(self.trainer.roster.writers[ulid], "silent"))

    def _forget(self, ulid: str) -> None:
        self.trainer.dispatcher.forget([self.trainer.roster.writers[ulid]])

    def _tell(self) -> None:
        """A tick: listen, grant, write control/state.json."""
        writers = self.trainer.roster.writers
        for worker in self.workers:
            heartbeat = Heartbeat(worker.ulid, worker.ulid, None, worker.sequence)
            writers.setdefault(worker.ulid, Known.met(heartbeat)).heartbeat = heartbeat
        self.trainer._grant()
        self.control = self.trainer._control()
        self.trainer._beaten = 0.0

    def _plan(self) -> None:
        trainer, step = self.trainer, self.trainer.step + 1
        if step not in trainer.ledger.plans:
            groups = trainer.dispatcher.choose(step).groups
            if not groups:
                return
            for group in groups:
                known = trainer.roster.writers[group.writer]
                late = known.final is not None and group.sequence >= known.final
                require(not late, f"{group.ref.key} is of a revoked writer")
            drops = tuple(drop for drop, _ in trainer.ledger.aside.values())
            plan = Plan(step, trainer.term, tuple(group.ref for group in groups), drops)
            self.log = (*self.log, plan)
            trainer.log.position = len(self.log)
            trainer._enter(plan, len(self.log))
        self.following = "finish"

    def _finish(self) -> None:
        step = self.trainer.step + 1
        self.trained = (*self.trained, self.trainer.ledger.plans[step])
        completed(self.trainer.finish_step(step))
        self.following = "publish"

    def _publish(self, step: int | None = None) -> None:
        """As Coordinator.publish, but what it tells is told by the next `tell`."""
        trainer = self.trainer
        version = Version(trainer.term, trainer.step if step is None else step)
        trainer.ledger.publish(version.step)
        if version.step >= trainer._logged:
            trainer.version = version
        self.following = "plan"

    def _save(self) -> None:
        self.checkpoints = (*self.checkpoints, Checkpoint(self.trainer.state(), self.trained))[-KEPT:]

    def _expired(self) -> set[str]:
        if not self.checkpoints or self.trainer._beaten is None:
            return set()
        listed = [ObjectInfo(key, 1, "", 0.0) for key in self.shards]
        kept = [resume.State.from_json(checkpoint.state) for checkpoint in self.checkpoints]
        return set(resume.expired(listed, kept, self.log[kept[0].position :], self.trainer.roster.writers))

    def _collect(self) -> None:
        """As Coordinator.collect does."""
        self.log = (*self.log, Collect(self.trainer.term, self.checkpoints[0].state["position"]))
        self.trainer.log.position = len(self.log)
        self.control = self.trainer._control()
        self.doomed |= self._expired()

    def _delete(self) -> None:
        for key in self.doomed:
            self.shards.pop(key, None)
        self.doomed = frozenset()

    def _die(self, number: int | None) -> None:
        """Another starts from that checkpoint; those above it turn out to be unreadable."""
        self.crashes -= 1
        checkpoint = None
        if number is not None:
            self.checkpoints = self.checkpoints[: number + 1]
            checkpoint = self.checkpoints[number]
        self._take_over(checkpoint)

    def _lose(self, number: int | None) -> None:
        """As `die`, and control/state.json is lost."""
        self.losses -= 1
        self.control = None
        self._die(number)

    # What must hold

    def check(self) -> None:
        plans = [record for record in self.log if isinstance(record, Plan)]
        planned = [group.index for plan in plans for group in plan.groups]
        dropped = [drop.index for plan in plans for drop in plan.drops]
        steps = [plan.step for plan in plans]
        require(steps == list(range(1, len(steps) + 1)), f"the log has the steps {steps}")
        require(len({*planned, *dropped}) == len([*planned, *dropped]), f"planned {planned}, dropped {dropped}")
        require(
            [plan.groups for plan in self.trained] == [plan.groups for plan in plans[: len(self.trained)]], "lineage"
        )
        for plan in plans:
            for group in plan.groups:
                self._check_group(plan, group)
        ledger = self.trainer.ledger
        bound = (self.size.staleness + 1) * self.size.prompts
        planning = sum(len(plan.groups) for plan in ledger.plans.values() if not plan.replayed)
        count = len(ledger.leases) + len(ledger.delivered) + planning
        require(count <= bound, f"{count} open indices, {bound} allowed")
        closed = set(range(ledger.frontier.low)) | ledger.frontier.above
        require(closed <= {*planned, *dropped}, f"{closed} are closed, planned {planned}, dropped {dropped}")
        told = [index for entry in self.control.writers.values() for index in entry.leases] if self.control else []
        require(len(told) == len(set(told)), f"told {told}")

    def _check_group(self, plan: Plan, group: GroupRef) -> None:
        replayed = plan.step > min((c.state["step"] for c in self.checkpoints), default=0)
        require(not replayed or group.key in self.shards, f"{group.key}, which a successor will train, is gone")
        require(not replayed or group.key not in self.doomed, f"{group.key}, which a successor will train, is doomed")
        found = self.shards.get(group.key)
        if found:
            staleness = plan.step - 1 - found.oldest
            require(0 <= staleness <= self.size.staleness, f"staleness {staleness} in step {plan.step}")


def require(holds: bool, message: str) -> None:
    if not holds:
        raise Broken(message)


def completed(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of what never waits."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waits")


@dataclasses.dataclass(frozen=True)
class Found:
    states: int
    events: int
    finished: int
    """States in which all steps are trained."""


def explore(size: Size, most: int = 10_000_000) -> Found:
    """Breadth first. Raises Broken, with the events that lead there, where an invariant does not hold, and for a
    state from which the run cannot be finished any more; AssertionError if there are more than `most` states."""
    start = State(size, configure(size))
    names = {start.key(): 0}
    came: list[tuple[int, str]] = [(-1, "start")]
    before: list[list[int]] = [[]]
    queue, finished, events = collections.deque([start]), set[int](), 0
    number = 0
    while queue:
        state = queue.popleft()
        if state.done():
            finished.add(number)
        try:
            for name, after in state.events():
                events += 1
                known = names.setdefault(after.key(), len(came))
                if known == len(came):
                    assert known < most, f"more than {most} states"
                    came.append((number, name))
                    before.append([])
                    queue.append(after)
                before[known].append(number)
        except (AssertionError, ValueError) as error:
            raise Broken(f"{error or repr(error)}, after: {_path(came, number)} and one more event") from error
        number += 1
    stuck = set(range(number)) - _leading_to(finished, before)
    if stuck:
        raise Broken(f"{len(stuck)} states lead nowhere, the first after: {_path(came, min(stuck))}")
    return Found(number, events, len(finished))


def _path(came: list[tuple[int, str]], number: int) -> str:
    names = []
    while number > 0:
        number, name = came[number]
        names.append(name)
    return ", ".join(reversed(names)) or "nothing"


def _leading_to(goals: set[int], before: list[list[int]]) -> set[int]:
    reached, todo = set(goals), list(goals)
    while todo:
        new = [state for state in before[todo.pop()] if state not in reached]
        reached.update(new)
        todo += new
    return reached


def configure(size: Size) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "exploration",
            "run_id": "0",
            "model": {"uri": "none", "path": "none"},
            "data": {"sets": []},
            "rewards": [{"name": "none"}],
            "algorithm": {
                "type": "grpo",
                "total_steps": size.steps,
                "prompts_per_step": size.prompts,
                "group_size": 2,
                "max_staleness": size.staleness,
            },
            "store": {"uri": "memory://exploration"},
        }
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in dataclasses.fields(Size):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    logging.disable(logging.CRITICAL)
    started = time.monotonic()
    found = explore(Size(**vars(parser.parse_args())))
    took = time.monotonic() - started
    print(f"{found.states:,} states, {found.events:,} events, {found.finished:,} finished; all hold, {took:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
