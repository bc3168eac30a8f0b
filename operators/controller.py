"""The operator itself: what is heard fills the queue; a pass observes, plans, and carries the plan out.

Level-triggered: a pass depends on nothing but what it observes, so a lost, doubled or early call costs only time.
"""

import asyncio
import datetime
import logging
import math
import random
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from operators.act import Refused, carry_out
from operators.cache import JobKey, Name
from operators.cluster import ApiError, Cluster, Conflict, Held
from operators.handlers import WatchEnded, watch_jobs
from operators.liveness import Health
from operators.observe import observe, reported
from operators.observed import Object, Observed, Plan
from operators.queue import WorkQueue
from operators.resolve import Platform
from operators.spec import API_VERSION, KIND
from operators.telemetry import JobState, Telemetry
from operators.training import Report, counting
from operators.watch import KINDS, RETRY_S, follow

ECHO_S = 0.2
"""Changes of children and of status are gathered for so long; a new or edited job is looked at at once."""
SPACING_S = 1.0
"""From the end of a look at a job to the next that nothing but such changes asks for, at least."""
LOOKS = 24
"""Jobs that are planned and acted for at once, in the order in which they came. Of more that come in a burst all would
have their first children early and their last one late. Those at which nothing has changed do not count: they may each
wait for a trainer that does not answer."""
PASS_LIMIT_S = 60.0
CHECK_S = 60.0
"""Between two comparisons of what the watch of RLJobs told with what there is."""
RESYNC_S = 600.0
"""Every job is looked at so often, whatever happens."""
START_LIMIT_S = 60.0
LIST_LIMIT_S = 300.0
"""Of all objects of a kind, at a start: to begin again would ask a busy API server for more, not for less."""
LEASE = "Lease"
"""The source of health that a replica has whether it leads or not."""
logger = logging.getLogger(__name__)

Reconcile = Callable[[Observed, datetime.datetime, Platform], Plan]


class Known(NamedTuple):
    """What was last heard of an RLJob."""

    version: int
    generation: int
    state: JobState


class Standing(NamedTuple):
    """A job at which nothing was to be done when it was last looked at."""

    uid: str
    counting: Report | None
    spot_nodes: frozenset[str] | None
    again_s: float | None
    until: float  # loop time, for as long as nothing changes


class Controller:
    """Of one process, while it leads. `may_act`: whether it still leads."""

    def __init__(
        self,
        cluster: Cluster,
        reconcile: Reconcile,
        platform: Platform,
        health: Health,
        telemetry: Telemetry,
        namespaces: Sequence[str] = (),
        workers: int = 64,
        may_act: Callable[[], bool] = lambda: True,
        now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
    ) -> None:
        self.cluster, self.reconcile, self.platform = cluster, reconcile, platform
        self.health, self.telemetry, self.namespaces = health, telemetry, namespaces
        self.workers, self.may_act, self.now = workers, may_act, now
        self.queue: WorkQueue[JobKey] = WorkQueue(telemetry.waited.observe, SPACING_S)
        self.jobs: dict[JobKey, Known] = {}
        self._looks = asyncio.Semaphore(LOOKS)
        self._doubted: set[JobKey] = set()
        """Jobs of which the watch may not have told all: the next look asks the server."""
        self._standing: dict[JobKey, Standing] = {}
        health.stalled_s = self.queue.stalled_s
        telemetry.depth = self.queue.depth

    async def lead(self, namespace: str) -> None:
        """Runs until cancelled. `namespace`: the operator's own."""
        self.health.filling = True
        self.telemetry.leading.set(1)
        self.telemetry.jobs = lambda: [known.state for known in self.jobs.values()]
        try:
            await self._lead(namespace)
        finally:
            self.health.filling = False
            self.health.stalled_s = lambda: 0.0
            self.health.forget(LEASE)
            self.telemetry.leading.set(0)
            self.telemetry.jobs = lambda: ()

    async def _lead(self, namespace: str) -> None:
        await self._wait_for_definition()
        await self.cluster.load_key(namespace)
        async with asyncio.TaskGroup() as group:
            *objects, warnings = KINDS
            await asyncio.gather(*(self._follow(group, kind) for kind in objects))
            await self._follow(group, warnings)
            group.create_task(self._hear(), name="watch RLJob")
            group.create_task(self._check(), name="check")
            await self._survey()
            self.health.filling = False
            await self.queue.work(self.visit, self.workers)

    async def visit(self, key: JobKey) -> float | None:
        """One pass. Returns the seconds after which the job wants another at the latest."""
        if not self.may_act():
            return 1.0
        began = time.perf_counter()
        result = "error"
        try:
            async with asyncio.timeout(PASS_LIMIT_S):
                again = await self._pass(key)
            result = "ok"
            return again
        except (Conflict, Held) as error:
            result = "conflict"
            logger.debug(f"looks again: {error}", extra=_fields(key))
            raise
        except (ApiError, Refused, TimeoutError) as error:
            logger.warning(f"pass ended: {error or f'longer than {PASS_LIMIT_S:.0f} s'}", extra=_fields(key))
            raise
        except Exception:
            logger.exception("pass failed", extra=_fields(key))
            raise
        finally:
            self.telemetry.reconciles.labels(result).inc()
            self.telemetry.duration.observe(time.perf_counter() - began)

    async def _pass(self, key: JobKey) -> float | None:
        """One that failed may have done so for what the watch told."""
        told = key not in self._doubted
        self._doubted.discard(key)
        try:
            standing = self._standing.get(key)
            if told and standing is not None and await self._stands(key, standing):
                return standing.again_s
            async with self._looks:
                return await self._look(key, told)
        except BaseException:
            self._doubted.add(key)
            raise

    async def _stands(self, key: JobKey, standing: Standing) -> bool:
        """Whether all is as it was, as far as the watches and the trainer tell."""
        cache = self.cluster.cache
        if key in cache.changed or cache.spot_nodes != standing.spot_nodes:
            return False
        if asyncio.get_running_loop().time() >= standing.until:
            return False
        report = await reported(self.cluster, cache.of(standing.uid, ["Pod"], key.namespace))
        return counting(report) == standing.counting and key not in cache.changed

    async def _look(self, key: JobKey, told: bool) -> float | None:
        """`told`: what the watch told of the RLJob will do to see what is to be done. More than a write of the status,
        which the server refuses where the RLJob has changed, is done only while the server holds that very version."""
        self._standing.pop(key, None)
        began = asyncio.get_running_loop().time()
        self.cluster.cache.changed.discard(key)
        observed = await observe(self.cluster, key, told)
        if observed is None:
            return None
        plan = self.reconcile(observed, self.now(), self.platform)
        if told and plan.acts and not await self.cluster.holds(observed.job):
            return await self._look(key, told=False)
        await carry_out(plan, observed, self.cluster)
        for event in plan.events:
            logger.info(event.message, extra=_fields(key, reason=event.reason))
        again_s = None if plan.again is None else plan.again.total_seconds()
        if plan.stands:
            until = began + plan.stands.total_seconds()
            seen = observed.job["metadata"]["uid"], counting(observed.report), observed.spot_nodes
            self._standing[key] = Standing(*seen, again_s, until)
        return again_s

    def heard(self, what: str | None, job: Object) -> None:
        """The watch of RLJobs told something."""
        metadata = job["metadata"]
        key = JobKey(metadata["namespace"], metadata["name"])
        self.health.beat(KIND)
        if what == "DELETED":
            self.jobs.pop(key, None)
            self.cluster.cache.remove(KIND, job)
            self.queue.add(key)
            return
        self.cluster.cache.put(KIND, {"apiVersion": API_VERSION, "kind": KIND, **job})
        before = self.jobs.get(key)
        known = Known(int(metadata["resourceVersion"]), metadata.get("generation", 0), _state(key, job))
        self.jobs[key] = known
        is_echo = before is not None and before.generation == known.generation
        self.queue.add(key, ECHO_S if is_echo else 0.0)

    def _echo(self, key: JobKey) -> None:
        """A child has changed."""
        self.queue.add(key, ECHO_S)

    async def _follow(self, group: asyncio.TaskGroup, kind: str) -> None:
        """Follow a kind in every namespace; returns once it was listed."""
        listed = []
        for namespace in self.namespaces or ("",):
            listed.append(asyncio.Event())
            watch = follow(self.cluster, kind, namespace, self.health, self._echo, listed[-1])
            group.create_task(watch, name=f"watch {kind}")
        try:
            async with asyncio.timeout(LIST_LIMIT_S):
                for event in listed:
                    await event.wait()
        except TimeoutError:
            raise ValueError(f"objects of kind {kind} could not be listed within {LIST_LIMIT_S:.0f} s") from None

    async def _hear(self) -> None:
        """The watch of RLJobs, begun anew when it has ended, as soon as there are such objects (again). For how long
        that may take, /healthz decides."""
        while True:
            try:
                await watch_jobs(self.cluster.connection, self.namespaces, self.heard)
            except WatchEnded as error:
                logger.warning(f"{error}; it is begun anew")
            await self._wait_for_definition(math.inf)
            await asyncio.sleep(RETRY_S)  # kopf asks once what there is to watch, and that is told a little later

    async def _check(self) -> None:
        """Compares what the watch of RLJobs told with what there is: the proof that it hears, and the resync."""
        self.health.expect(KIND)
        loop = asyncio.get_running_loop()
        resynced = loop.time()
        while True:
            await asyncio.sleep(CHECK_S)
            await self._survey()
            try:
                missed, found = await self._missed()
            except ApiError as error:
                logger.warning(f"RLJobs could not be listed: {error}")
                continue
            await asyncio.sleep(CHECK_S / 6)  # the watch may be a little behind the list
            missed = {key: version for key, version in missed.items() if self._is_behind(key, version)}
            if not missed:
                self.health.beat(KIND)
            everything = loop.time() - resynced > RESYNC_S
            resynced = loop.time() if everything else resynced
            for key in found if everything else missed:
                self._doubted.add(key)
                self.queue.add(key, ECHO_S if key in missed else CHECK_S * random.random())

    async def _survey(self) -> None:
        """Which nodes the cloud may take away. No namespace holds nodes: an operator for some of them does not ask, and
        one that may not list nodes (403) says nothing of them."""
        if self.namespaces:
            return
        try:
            self.cluster.cache.spot_nodes = await self.cluster.spot_nodes()
        except ApiError as error:
            if error.status == 403:
                self.cluster.cache.spot_nodes = None
            else:
                logger.warning(f"nodes could not be listed: {error}")

    async def _missed(self) -> tuple[dict[JobKey, int], list[JobKey]]:
        """(the version of each job of which the watch has not told so far, all jobs). Forgets jobs that are gone."""
        found: dict[JobKey, int] = {}
        before = set(self.jobs)
        for namespace in self.namespaces or ("",):
            async for page, _ in self.cluster.pages(KIND, namespace, bare=True):
                for each in page:
                    metadata = each["metadata"]
                    found[JobKey(metadata["namespace"], metadata["name"])] = int(metadata["resourceVersion"])
        for key in before - set(found):
            self.jobs.pop(key, None)
        self.cluster.cache.keep_only(KIND, "", [Name(*key) for key in self.jobs])
        return {key: version for key, version in found.items() if self._is_behind(key, version)}, list(found)

    def _is_behind(self, key: JobKey, version: int) -> bool:
        known = self.jobs.get(key)
        return known is None or known.version < version

    async def _wait_for_definition(self, limit_s: float = START_LIMIT_S) -> None:
        """Raises ValueError where the cluster does not learn what an RLJob is in time."""
        deadline = asyncio.get_running_loop().time() + limit_s
        said = ""
        while True:
            try:
                async for _ in self.cluster.pages(KIND, next(iter(self.namespaces), ""), {}, bare=True):
                    return
            except ApiError as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise ValueError(f"RLJobs cannot be listed; is manifests/crd applied? ({error})") from None
                if str(error) != said:
                    said = str(error)
                    logger.warning(f"waits for the definition of RLJobs, manifests/crd: {said}")
            await asyncio.sleep(2.0)


def _state(key: JobKey, job: Object) -> JobState:
    status = job.get("status") or {}
    ready: Object = next((each for each in status.get("conditions", ()) if each["type"] == "Ready"), {})
    return JobState(*key, status.get("phase", ""), ready.get("status") == "True", ready.get("reason", ""))


def _fields(key: JobKey, **more: str) -> dict[str, dict[str, str]]:
    return {"fields": {"namespace": key.namespace, "name": key.name, **more}}
