"""Which prompt index is where: a pure ledger, from which capacity is derived anew each time.

An index 0, 1, 2, … is free, leased to one writer, delivered, set aside (to be dropped by the next plan), planned, or
closed (trained or dropped). A lease is at once the permit to generate, and names the lowest policy step it may be
generated with: the one current when it was granted.
Open indices (leased, delivered or planned) never exceed (max_staleness + 1) · prompts_per_step, and the lowest free
index is granted first. Thus at most max_staleness steps lie between a grant and the step that trains it.
"""

import bisect
import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pipeline.messages import shard_place
from pipeline.trainer_log import Drop, DropReason, GroupRef, Plan, Withdraw


class Frontier:
    """The closed indices: all below `low`, and those in `above`. JSON: {"low", "above"}."""

    def __init__(self, low: int = 0, above: Iterable[int] = ()):
        self.low, self.above = low, set(above)

    def __contains__(self, index: int) -> bool:
        return index < self.low or index in self.above

    def close(self, indices: Iterable[int]) -> None:
        self.above.update(index for index in indices if index >= self.low)
        while self.low in self.above:
            self.above.remove(self.low)
            self.low += 1

    def to_json(self) -> dict[str, Any]:
        return {"low": self.low, "above": sorted(self.above)}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Frontier":
        return cls(content["low"], content["above"])


@dataclasses.dataclass(frozen=True)
class Lease:
    writer: str
    """ULID."""
    minimum: int
    """Lowest policy step the group may be generated with."""
    granted: float
    """Seconds of the trainer's own time; see coordinator."""


@dataclasses.dataclass(frozen=True)
class Delivered:
    """One group in a shard: what planning needs to know of it."""

    ref: GroupRef
    writer: str
    sequence: int
    oldest: int
    """Lowest policy step that made any of its tokens."""
    newest: int
    valid: int
    """Samples that take part in training."""
    spread: bool
    """Whether the rewards of the valid samples differ."""
    why: str = ""
    """Of a group without a valid sample: why the first one is none."""


class Ledger:
    def __init__(self, frontier: Frontier | None = None):
        self.frontier = frontier or Frontier()
        self.leases: dict[int, Lease] = {}
        self.delivered: dict[int, Delivered] = {}
        self.aside: dict[int, tuple[Drop, Delivered | None]] = {}
        """To be dropped by the next plan: no longer open, not yet closed."""
        self.plans: dict[int, Plan] = {}
        """By step, until the policy of that step is published."""
        self.planned: dict[int, int] = {}
        """Index → step, of the plans above."""

    def taken(self, index: int) -> bool:
        return (
            index in self.frontier
            or index in self.planned
            or index in self.delivered
            or index in self.leases
            or index in self.aside
        )

    def free(self) -> Iterator[int]:
        """Every index that may be granted, lowest first; endless."""
        return (index for index in itertools.count(self.frontier.low) if not self.taken(index))

    def capacity(self, most_open: int) -> int:
        return max(0, most_open - len(self.leases) - len(self.delivered) - len(self.planned))

    def lease(self, index: int, lease: Lease) -> None:
        assert not self.taken(index), f"index {index} is taken"
        self.leases[index] = lease

    def held(self) -> dict[str, dict[int, Lease]]:
        """Leases by writer; empty for a writer that has none."""
        by_writer: dict[str, dict[int, Lease]] = collections.defaultdict(dict)
        for index, lease in self.leases.items():
            by_writer[lease.writer][index] = lease
        return by_writer

    def renew(self, now: float) -> None:
        """Count the time of every lease from `now`."""
        self.leases = {index: dataclasses.replace(lease, granted=now) for index, lease in self.leases.items()}

    def release(self, index: int, writer: str) -> bool:
        """Free an index if `writer` holds its lease."""
        lease = self.leases.get(index)
        if lease is None or lease.writer != writer:
            return False
        del self.leases[index]
        return True

    def deliver(self, group: Delivered, catching_up: bool = False) -> bool:
        """Take a group in; False if it is a duplicate, or nobody asked for it.

        Its lease may have passed to another writer: the group is welcome if it is no staler than that lease allows.
        While `catching_up` with what the predecessor had acknowledged, there need not be a lease.
        """
        index = group.ref.index
        lease = self.leases.get(index)
        if lease is None:
            if self.taken(index) or not catching_up:
                return False
        elif lease.writer != group.writer and group.oldest < lease.minimum:
            return False
        self.leases.pop(index, None)
        self.delivered[index] = group
        return True

    def set_aside(self, index: int, reason: DropReason) -> None:
        assert index not in self.planned, f"index {index} is planned"
        self.leases.pop(index, None)
        self.aside[index] = (Drop(index, reason), self.delivered.pop(index, None))

    def plan(self, plan: Plan) -> None:
        """Enter a plan that is in the log."""
        self.plans[plan.step] = plan
        for group in plan.groups:
            self.delivered.pop(group.index, None)
            self.leases.pop(group.index, None)
            self.planned[group.index] = plan.step
        for drop in plan.drops:
            self.aside.pop(drop.index, None)
        self.frontier.close(drop.index for drop in plan.drops)

    def withdraw(self, withdrawn: Withdraw) -> None:
        """Enter a withdrawal that is in the log: its groups are closed, though their permits are held until `publish`;
        what else its shards hold is free again."""
        self.plans[withdrawn.step] = self.plans[withdrawn.step].without(withdrawn)
        self.frontier.close(drop.index for drop in withdrawn.drops)
        keys = {shard.key for shard in withdrawn.quarantined}
        self.delivered = {index: group for index, group in self.delivered.items() if group.ref.key not in keys}

    def finish(self, step: int) -> None:
        """The step is trained; its groups stay open until `publish`."""
        self.frontier.close(group.index for group in self.plans[step].groups)

    def publish(self, step: int) -> None:
        """The policy behind `step` is out: its groups and those of earlier steps are no longer open."""
        self.plans = {number: plan for number, plan in self.plans.items() if number > step}
        self.planned = {index: number for index, number in self.planned.items() if number > step}

    def cursors(self, read: Mapping[str, int]) -> dict[str, int]:
        """By writer: the first of its shards that is still needed, for groups not planned or not trained yet; the one
        up to which it has been `read`, if none is."""
        found = dict(read)
        groups = [*self.delivered.values(), *(group for _, group in self.aside.values() if group)]
        places = [(group.writer, group.sequence) for group in groups]
        places += [shard_place(group.key) for plan in self.plans.values() for group in plan.groups]
        for writer, sequence in places:
            if sequence < found.get(writer, 0):
                found[writer] = sequence
        return found


class Suspicions:
    """Failures by index: which one kills its writers, which writers have failed with it.

    A writer that dies takes innocent indices with it. So one that has been held by `most` dying writers becomes a
    suspect and is generated alone; only what happens to it by itself counts as its failure, `most` of which end it.
    """

    def __init__(self, most: int):
        self.most = most
        self.failures: collections.Counter[int] = collections.Counter()
        self.deaths: collections.Counter[int] = collections.Counter()
        self.avoid: dict[int, set[str]] = {}

    def failed(self, index: int, writer: str) -> bool:
        """`index` failed by itself; True: give it up."""
        self.failures[index] += 1
        self.avoid.setdefault(index, set()).add(writer)
        return self.failures[index] >= self.most

    def died(self, indices: Iterable[int]) -> list[int]:
        """A writer died holding `indices`; returns those that were suspects already, alone with it."""
        alone = [index for index in indices if self.is_suspect(index)]
        self.deaths.update(indices)
        return alone

    def is_suspect(self, index: int) -> bool:
        return self.deaths[index] >= self.most

    def forget(self, indices: Iterable[int]) -> None:
        for index in indices:
            self.failures.pop(index, None)
            self.deaths.pop(index, None)
            self.avoid.pop(index, None)


@dataclasses.dataclass(eq=False)
class Holder:
    """A live writer, as `grant` sees it."""

    ulid: str
    open: int
    """Leases it holds."""
    refuses: frozenset[int] = frozenset()
    """Indices it reports as failed or handed back."""
    exclusive: bool = False
    """It works on a suspect, alone."""


def grant(
    indices: Iterable[int],
    holders: Iterable[Holder],
    limit: int,
    suspicions: Suspicions,
) -> list[tuple[int, str]]:
    """Deal the indices out: each to the holder with the fewest leases, if possible one that has not failed with it.

    A holder gets at most `limit`. A suspect goes to a holder that has nothing else to do and gets nothing else then;
    one holder at a time is kept free for that. An index that nobody can take now is left for later.
    """
    waiting = sorted((holder for holder in holders if holder.open < limit and not holder.exclusive), key=_turn)
    granted, reserved = [], False
    for index in indices:
        chosen = _choose(waiting, index, suspicions.avoid.get(index, set()))
        if chosen is None:
            continue
        suspect = suspicions.is_suspect(index)
        if suspect and reserved:
            continue
        waiting.remove(chosen)
        if suspect:
            reserved = chosen.exclusive = True
            if chosen.open:
                continue
        chosen.open += 1
        granted.append((index, chosen.ulid))
        if chosen.open < limit and not chosen.exclusive:
            bisect.insort(waiting, chosen, key=_turn)
    return granted


def _turn(holder: Holder) -> tuple[int, str]:
    return holder.open, holder.ulid


def _choose(waiting: list[Holder], index: int, avoided: set[str]) -> Holder | None:
    """The first that does not refuse `index`, if possible none of `avoided`."""
    able = (holder for holder in waiting if index not in holder.refuses)
    first = next(able, None)
    if first is None or first.ulid not in avoided:
        return first
    return next((holder for holder in able if holder.ulid not in avoided), first)
