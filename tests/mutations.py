"""Protocol bugs, planted one at a time into the real code: the simulation must catch each.

    python -m tests.mutations                a row for each: the seeds it took, and what was noticed

A mutation is a set of replaced functions, and the scenario of tests.simulation in whose seeds it shows.
"""

import contextlib
import dataclasses
import hashlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from pipeline import planning, resume
from pipeline.control_file import ControlFile
from pipeline.coordinator import Coordinator
from pipeline.dispatch import Dispatcher
from pipeline.intake import Intake
from pipeline.leases import Frontier, Ledger
from pipeline.messages import CONTROL_KEY, shard_key
from pipeline.planning import Choice
from pipeline.roster import Roster
from pipeline.storage import Storage
from pipeline.trainer_log import Takeover, TrainerLog
from tests.simulation import simulate

SEEDS = 40
"""Most that are tried before a mutation counts as missed."""


@dataclasses.dataclass(frozen=True)
class Mutation:
    scenario: str
    replaced: list[tuple[Any, str, Callable[..., Any]]]
    """(owner, attribute, what takes its place)."""

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for owner, name, replacement in self.replaced:
                stack.enter_context(mock.patch.object(owner, name, replacement))
            yield


MUTATIONS: dict[str, Mutation] = {}


def mutation(name: str, scenario: str, owner: Any, attribute: str) -> Callable[[Callable[..., Any]], None]:
    """The decorated function takes the place of `owner`'s; a second one of that name is planted together with it."""

    def register(replacement: Callable[..., Any]) -> None:
        known = MUTATIONS.get(name, Mutation(scenario, []))
        MUTATIONS[name] = dataclasses.replace(known, replaced=[*known.replaced, (owner, attribute, replacement)])

    return register


# Fencing


@mutation("no takeover record", "zombies", TrainerLog, "take_over")
async def _(self, position=0, term=0):
    self.position, records = position, []
    while (record := await self._read(self.position)) is not None:
        records.append((self.position, record))
        self.position += 1
    self.term = max([term, *(record.term for _, record in records)]) + 1
    return records


@mutation("a takeover keeps the term", "damage", TrainerLog, "take_over")
async def _(self, position=0, term=0):
    self.position, records = position, []
    while (record := await self._read(self.position)) is not None:
        records.append((self.position, record))
        self.position += 1
    self.term = max([term, 1, *(record.term for _, record in records)])
    return records + await self._append(Takeover(self.term))


@mutation("control is written without a condition", "zombies", ControlFile, "write")
async def _(self, current, fresh=False):
    return await self.storage.put(CONTROL_KEY, current().encode())


@mutation("a lost response counts as a rival", "workers killed", Storage, "_write")
async def _(self, key, data, metadata, condition):
    sealed = {**(metadata or {}), "sha256": hashlib.sha256(data).hexdigest(), "nonce": "another"}
    return await self._retry("PUT", key, lambda key: self.bucket.write(key, data, sealed, condition))


@mutation("a revoked writer is accepted", "zombies", Intake, "drain")
async def _(self, known, ledger):
    while (shard := await self.storage.get(shard_key(known.ulid, known.cursor))) is not None:
        self._deliver(known, shard, ledger)
        known.cursor += 1


@mutation("a revoked writer is accepted", "zombies", Dispatcher, "read")
async def _(self, period_s):
    for known in list(self.roster.writers.values()):
        await self.intake.drain(known, self.ledger)


# The log and its replay


@mutation("published before it is logged", "trainer killed", Coordinator, "next_plan")
async def _(self, step):
    if step not in self.ledger.plans:
        self._enter(await self._choose(step), self.log.position + 1)
    return self.ledger.plans[step]


@mutation("published before it is logged", "trainer killed", Coordinator, "publish")
async def _(self, version, publish=Coordinator.publish):
    plan = self.ledger.plans.get(version.step)
    await publish(self, version)
    if plan and not plan.replayed:
        await self.log.append(plan)


@mutation("logged plans are made anew", "trainer killed", Coordinator, "_restore")
def _(self, saved, records, restore=Coordinator._restore):
    restore(self, saved, [])


@mutation("a checkpoint names the end of the log", "trainer killed", Coordinator, "state")
def _(self, state=Coordinator.state):
    return {**state(self), "position": self.log.position}


@mutation("cursors without rows", "trainer killed", Ledger, "cursors")
def _(self, read):
    return dict(read)


@mutation("the frontier forgets what lies above it", "trainer killed", Frontier, "to_json")
def _(self):
    return {"low": self.low, "above": []}


@mutation("the frontier passes over what is open", "workers leave", Frontier, "close")
def _(self, indices):
    self.low = max([self.low, *(index + 1 for index in indices)])


@mutation("acknowledged groups are forgotten", "trainer killed", Coordinator, "_adopt")
def _(self, saved, old, adopt=Coordinator._adopt):
    adopt(self, saved, old)
    for known in self.roster.writers.values():
        known.promised = 0


@mutation("leases die with their trainer", "trainer killed", Coordinator, "_adopt")
def _(self, saved, old, adopt=Coordinator._adopt):
    adopt(self, saved, old)
    self.ledger.leases.clear()


@mutation("leases are granted during a replay", "trainer killed", Coordinator, "_grant")
def _(self):
    if not self.stopped and self.version is not None:
        self.dispatcher.grant(self.version)


# Permits


@mutation("drops keep their permits", "dynamic sampling", Ledger, "capacity")
def _(self, most_open):
    return max(0, most_open - len(self.leases) - len(self.delivered) - len(self.planned) - len(self.aside))


@mutation("trained groups stay open", "calm", Ledger, "publish")
def _(self, step):
    self.plans = {number: plan for number, plan in self.plans.items() if number > step}


@mutation("one permit too many", "calm", Ledger, "capacity")
def _(self, most_open):
    return max(0, most_open + 1 - len(self.leases) - len(self.delivered) - len(self.planned))


@mutation("what nobody asked for is taken", "zombies", Ledger, "deliver")
def _(self, group, catching_up=False, deliver=Ledger.deliver):
    return deliver(self, group, catching_up=True)


@mutation("a second delivery counts", "zombies", Ledger, "deliver")
def _(self, group, catching_up=False):
    self.leases.pop(group.ref.index, None)
    self.delivered[group.ref.index] = group
    return True


@mutation("an outage counts as silence", "bad network", Roster, "wrote")
def _(self, modified):
    self.elapsed = modified
    self.now = modified


@mutation("the planner waits for nobody", "calm", planning, "choose")
def _(step, delivered, leases, size, max_staleness):
    ready = sorted(delivered, key=lambda group: (group.oldest, group.ref.index))
    return Choice(tuple(ready[:size]) if len(ready) >= size else (), len(ready))


# Damage and garbage


@mutation("a damaged shard is passed over in silence", "damage", Intake, "_quarantine")
def _(self, known, key, shard, reason, ledger):
    for index in [index for index, lease in ledger.leases.items() if lease.writer == known.ulid]:
        ledger.frontier.close([index])
        ledger.release(index, known.ulid)


@mutation("shards are not checked", "damage", Storage, "get")
async def _(self, key):
    return await self._retry("GET", key, self.bucket.read)


@mutation("collected below the newest checkpoint", "damage", Coordinator, "collect")
async def _(self, kept, collect=Coordinator.collect):
    return await collect(self, [self.state()])


@mutation("collected below what is read, not what is planned", "trainer killed", resume, "expired")
def _(shards, kept, records, roster, expired=resume.expired):
    read = [{ulid: entry.acknowledged for ulid, entry in state.writers.items()} for state in kept]
    states = [dataclasses.replace(state, cursors=cursors) for state, cursors in zip(kept, read, strict=True)]
    return expired(shards, states, [], roster)


@mutation("whoever the checkpoint does not name is older", "workers killed", resume, "expired")
def _(shards, kept, records, roster, expired=resume.expired):
    return expired(shards, [min(kept, key=lambda state: state.position)], [], set())


def caught(name: str, seeds: int = SEEDS) -> tuple[int, str] | None:
    """(seeds tried, what the simulation noticed), None if it noticed nothing."""
    with MUTATIONS[name].planted():
        for seed in range(seeds):
            try:
                simulate(seed, MUTATIONS[name].scenario)
            except Exception as error:
                return seed + 1, str(error) or repr(error)
    return None


def main() -> int:
    logging.disable(logging.CRITICAL)
    missed = 0
    for name, entry in MUTATIONS.items():
        found = caught(name)
        missed += found is None
        print(f"{name:52} {entry.scenario:18} " + (f"{found[0]:3}  {found[1][:90]}" if found else "MISSED"), flush=True)
    print(f"{len(MUTATIONS) - missed} of {len(MUTATIONS)} planted bugs are caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
