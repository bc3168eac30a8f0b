"""Who generates what: leases are granted and taken back, and what the writers deliver is taken in.

Everything is derived anew from the ledger and the roster each time; nothing here writes to the store.
"""

import asyncio
import collections
import itertools
import logging
from collections.abc import Iterable

from pipeline import planning, polling
from pipeline.algorithms.registry import ALGORITHMS
from pipeline.clock import Clock
from pipeline.config import RunConfig
from pipeline.intake import LONGEST_REASON, Intake
from pipeline.leases import Holder, Lease, Ledger, Suspicions, grant
from pipeline.messages import shard_key
from pipeline.planning import Choice
from pipeline.roster import GETS_AT_ONCE, Known, Roster
from pipeline.storage import Storage
from pipeline.trainer_log import DropReason, Hopeless, Plan
from pipeline.versions import Version

log = logging.getLogger(__name__)

ROUNDS = 10
"""Dynamic sampling: replacements of a whole step after which the groups that come are trained as they are."""
BARREN = 64
"""Groups of a run's beginning without any valid sample, or shards in a row that are refused, after which none is
expected any more."""


class Dispatcher:
    def __init__(self, storage: Storage, config: RunConfig, clock: Clock, vocabulary: int | None):
        self.rollout, self.algorithm, self.clock = config.rollout, config.algorithm, clock
        self.max_staleness = config.algorithm.max_staleness
        self.ledger = Ledger()
        self.roster = Roster(storage, config.rollout.lease_timeout_s, 2 * config.rollout.heartbeat_s)
        rows = config.algorithm.group_size + ALGORITHMS[config.algorithm.type].greedy_baseline
        self.intake = Intake(storage, rows, vocabulary)
        self.suspicions = Suspicions(config.rollout.max_failures)
        self.why: dict[DropReason, str] = {}
        """Of groups that the next plan drops: why the first one for that reason."""
        self.first_why: dict[DropReason, str] = {}
        """The same of all since this trainer began."""
        # A user's server may only be starting yet; for a reward model's, workers wait.
        self._impatient = not any(reward.endpoint for reward in config.rewards)

    # Plans

    def choose(self, step: int) -> Choice:
        """The groups of `step`; those that cannot be trained any more are set aside first. Raises Hopeless where all
        of a run's first groups are, and where one shard after the other is refused."""
        self.refuse(step)
        self._expect_some(step)
        size = self.algorithm.prompts_per_step
        return planning.choose(step, self.ledger.delivered.values(), self.ledger.leases, size, self.max_staleness)

    def refuse(self, step: int) -> None:
        """Set aside what cannot be trained; groups without spread up to ROUNDS times a step's size, then no more."""
        wanted = bool(self.algorithm.parameters.get("dynamic_sampling", False))
        alike = sum(drop.reason == "no-spread" for drop, _ in self.ledger.aside.values())
        for index, group in list(self.ledger.delivered.items()):
            need_spread = wanted and alike < ROUNDS * self.algorithm.prompts_per_step
            reason = planning.refusal(group, step, self.max_staleness, need_spread)
            if reason:
                self._set_aside(index, reason, group.why)
                alike += reason == "no-spread"

    def _expect_some(self, step: int) -> None:
        """One valid sample is enough: then what makes others invalid is not the same for all."""
        came = [*self.ledger.delivered.values(), *(group for _, group in self.ledger.aside.values() if group)]
        count = len(came)
        if step == 1 and self._impatient and count >= BARREN and not any(group.valid for group in came):
            raise Hopeless(f"none of the first {count} groups has a sample that can be trained: {self.why['invalid']}")
        if self.intake.refused >= BARREN:
            raise Hopeless(
                f"the last {self.intake.refused} shards are not what a worker should write ({self._damage()}): workers "
                "and trainer need the same version of Miles and the same configuration"
            )

    def _damage(self) -> str:
        return next(reversed(self.intake.damaged.values())).reason

    def enter(self, plan: Plan) -> None:
        """`plan` is in the log."""
        self.ledger.plan(plan)
        self.why = {}
        self.intake.logged(plan.quarantined)
        self.suspicions.forget([group.index for group in plan.groups] + [drop.index for drop in plan.drops])

    def describe(self, step: int, choice: Choice) -> str:
        """What `step` waits for, in words."""
        if not self.roster.live():
            return "rollout workers (none registered)"
        held = collections.Counter(
            lease.writer for index, lease in self.ledger.leases.items() if not choice.urgent or index in choice.urgent
        )
        places = ", ".join(self._place(self.roster.writers[writer], count) for writer, count in held.most_common(3))
        if choice.urgent:
            return f"groups that would be stale after step {step}: {places}"
        unfit = collections.Counter(drop.reason for drop, _ in self.ledger.aside.values())
        parts = [f"more groups: {choice.ready} of {self.algorithm.prompts_per_step} ready"]
        parts += [f"{count} dropped ({self._cause(reason)})" for reason, count in unfit.items()]
        if self.intake.damaged:
            parts.append(f"damaged shards: {len(self.intake.damaged)} ({self._damage()})")
        return "; ".join([*parts, places or "none running"])

    def _place(self, writer: Known, count: int) -> str:
        if writer.heartbeat is None or writer.heartbeat.version is None:
            return f"{count} wait until {writer.instance} has loaded a policy"
        return f"{count} running on {writer.instance}"

    def _cause(self, reason: DropReason) -> str:
        return f"{reason}: {self.why[reason]}" if reason in self.why else reason

    def losses(self) -> str | None:
        """Why groups have been dropped since the last plan, in words that stay the same; None: nothing is known."""
        return "; ".join(self._cause(reason) for reason in self.why) or None

    # Granting

    def grant(self, version: Version) -> None:
        """Lease what staleness allows and the remaining steps need, to be generated with `version` or a later one."""
        steps = min(self.algorithm.max_staleness + 1, self.algorithm.total_steps - version.step)
        capacity = self.ledger.capacity(steps * self.algorithm.prompts_per_step)
        held, holders = self.ledger.held(), []
        for known in self.roster.live():
            if known.heartbeat and not known.draining:
                leases = held[known.ulid]
                exclusive = any(self.suspicions.is_suspect(index) for index in leases)
                holders.append(Holder(known.ulid, len(leases), known.refuses, exclusive))
        indices = list(itertools.islice(self.ledger.free(), capacity))
        for index, ulid in grant(indices, holders, self.rollout.max_concurrent_groups, self.suspicions):
            self.ledger.lease(index, Lease(ulid, version.step, self.roster.elapsed))
            self.roster.writers[ulid].stirred = self.clock.monotonic()

    # Listening

    async def listen(self, patient: bool) -> None:
        """Learn what the writers say, take leases back; `patient`: not for want of progress."""
        for known, reason in await self.roster.refresh():
            await self._revoke(known, reason)
        held = self.ledger.held()
        for known in self.roster.live():
            if known.heartbeat:
                for index in known.heartbeat.handed_back:
                    self.ledger.release(index, known.ulid)
                for index, reason in known.heartbeat.failures.items():
                    self._fail(index, known, reason)
            if not patient:
                await self._end_overdue(known, held[known.ulid])
        self.forget(self.roster.gone())

    async def _end_overdue(self, known: Known, held: dict[int, Lease]) -> None:
        limit = self.rollout.group_timeout_s
        late = [index for index, lease in held.items() if self.roster.elapsed - lease.granted > limit]
        overdue = [index for index in late if index in self.ledger.leases]
        for index in overdue:
            self._fail(index, known, f"not delivered within {limit:g} s")
        if overdue:
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
                self._set_aside(index, "failed", reason)

    def _set_aside(self, index: int, reason: DropReason, why: str = "") -> None:
        log.info("prompt index %d is dropped: %s%s", index, reason, f" ({why})" if why else "")
        self.ledger.set_aside(index, reason)
        if why:
            self.why.setdefault(reason, why[:LONGEST_REASON])
            self.first_why.setdefault(reason, why[:LONGEST_REASON])

    def forget(self, gone: Iterable[Known]) -> None:
        """Name these revoked writers no longer, but for those of which a successor would have to read groups again."""
        for ulid, cursor in self.ledger.cursors({known.ulid: known.cursor for known in gone}).items():
            if cursor == self.roster.writers[ulid].cursor:
                del self.roster.writers[ulid]

    # Taking in

    async def catch_up(self) -> None:
        """Read again what the predecessor had acknowledged, and what has come since."""
        for known in list(self.roster.writers.values()):
            await self.intake.drain(known, self.ledger)
            if known.cursor < known.promised:
                log.warning("shard %s is gone", shard_key(known.ulid, known.cursor))
                known.cursor = known.promised

    async def read(self, period_s: float) -> None:
        """Take in new shards, looking at each writer that may have one every `period_s`, less and less often while it
        is quiet, or at once if it says so."""
        gate = asyncio.Semaphore(GETS_AT_ONCE)

        async def drain(known: Known) -> None:
            before = known.cursor
            async with gate:
                await self.intake.drain(known, self.ledger)
            known.looked = self.clock.monotonic()
            if known.cursor > before:
                known.stirred = known.looked

        holders, due, now = self.ledger.held().keys(), [], self.clock.monotonic()
        for known in self.roster.live():
            announced = known.heartbeat is not None and known.heartbeat.sequence > known.cursor
            patience_s = polling.patience(now - known.stirred, period_s, self.rollout.heartbeat_s)
            if announced or (known.ulid in holders and now - known.looked >= patience_s):
                due.append(known)
        outcomes = await asyncio.gather(*(drain(known) for known in due), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
