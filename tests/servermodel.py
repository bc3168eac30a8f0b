"""The world of `tests.clustermodel` on a real API server: the same accidents, and the same rules for what must never
happen and what must come about, but objects, controllers, watches and time are real.

The operator runs in this process, as its own ServiceAccount, with all that is its own but kopf's watch of RLJobs: it
looks when a child's watch tells something, and every half second. Its requests fail before or after they took effect,
it dies between any two of them, and its watches lag. Trainers are this model's, their pods those of the stand-in
kubelet. No node is lost: that takes minutes here.
"""

import asyncio
import collections
import contextlib
import datetime
import pathlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from kubernetes.aio import config
from kubernetes.aio.client import Configuration

from operators import attempts
from operators.act import carry_out
from operators.cache import Cache, JobKey
from operators.cluster import ApiError, Cluster, Conflict, Held
from operators.liveness import Health
from operators.observe import observe
from operators.observed import Object, Observed
from operators.reconcile import reconcile
from operators.watch import KINDS, follow
from tests import kubeapi, podstatus
from tests.clustermodel import NAME, PLATFORM, Dict, Killed, Place, World, holds
from tests.kubeapi import STRATEGIC_PATCH, Api
from tests.podstatus import Step

MIRRORED = ("ConfigMap", "Deployment", "Job", "NetworkPolicy", "Pod", "PodDisruptionBudget", "RLJob", "Service")
OVER_LIMIT_S = 240.0
QUIET_S = 3.0
TICK_S = 0.3


class Missed(Exception):
    """The pod is not what it was a moment ago: nothing happens to it."""


class Mirror:
    """What the server tells of all namespaces, by one watch a kind."""

    def __init__(self, api: Api):
        self.api = api
        self.objects: dict[str, dict[Place, Dict]] = collections.defaultdict(dict)
        for kind in MIRRORED:
            threading.Thread(target=self._follow, args=(kind,), name=f"mirror {kind}", daemon=True).start()

    def _follow(self, kind: str) -> None:
        """Until this process ends, or the control plane does."""
        with contextlib.suppress(OSError):
            for what, found in self.api.follow(kind):
                name, namespace = found["metadata"]["name"], found["metadata"]["namespace"]
                if what == "DELETED":
                    self.objects[namespace].pop((kind, name), None)
                elif name != "kube-root-ca.crt":  # every namespace has that
                    self.objects[namespace][kind, name] = found | {"kind": kind}


class Server(World):
    """One namespace of the server, with a job in it."""

    def __init__(self, seed: int, mirror: Mirror, namespace: str, account: pathlib.Path):
        self.api, self.mirror, self.namespace, self.account = mirror.api, mirror, namespace, account
        self.kills = self.faults = 0
        self.operator: asyncio.Task[None] | None = None
        super().__init__(seed)
        # A pass is made of few requests, and there is no time for many passes.
        self.errors, self.deaths = 0.08, 0.05

    # What the model of a server did is the real one's doing

    @property
    def objects(self) -> dict[Place, Dict]:
        return dict(self.mirror.objects[self.namespace])

    @objects.setter
    def objects(self, nothing: Mapping[Place, Dict]) -> None:
        assert not nothing

    @property
    def now(self) -> datetime.datetime:
        return datetime.datetime.now(datetime.UTC)

    @now.setter
    def now(self, unused: datetime.datetime) -> None: ...

    def tick(self, seconds: float) -> None:
        """Time passes by itself."""
        with contextlib.suppress(Missed):
            self.train()
        self.check()

    def put(self, found: Dict) -> Dict:
        """Somebody creates an object, or changes the data of one."""
        if "uid" in found["metadata"]:
            return self._ask(self.api.patch, found["kind"], NAME + "-config", self.namespace, {"data": found["data"]})
        made = {"apiVersion": kubeapi.API_VERSIONS.get(found["kind"], "v1")} | found
        made["metadata"] = {"name": found["metadata"]["name"]}
        if found["kind"] == "RLJob":
            made["spec"] = found["spec"] | {"trainer": found["spec"]["trainer"] | {"stopGraceSeconds": 5}}
        return self._ask(self.api.create, made, self.namespace)

    def set_spec(self, found: Dict, **changes: Any) -> None:
        self._ask(self.api.patch, found["kind"], found["metadata"]["name"], self.namespace, {"spec": changes})

    def delete(self, found: Dict, policy: str = "Background") -> None:
        name, only = found["metadata"]["name"], {"uid": found["metadata"]["uid"]}
        options = {"propagationPolicy": policy, "preconditions": only}
        self._ask(lambda: self.api.delete(found["kind"], name, self.namespace, **options))

    def _ask(self, ask: Callable[..., Any], *arguments: Any) -> Any:
        """People are refused now and then, and go their way."""
        with contextlib.suppress(kubeapi.ApiError):
            return ask(*arguments)

    # Pods

    def set_status(self, found: Dict, **changes: Any) -> Dict:
        assert (found["kind"], changes["phase"]) == ("Pod", "Succeeded")
        self._end(found, Step("ended", reason="Completed"))
        return found

    def end_pods(self, pods: list[Dict], code: int, message: str, reason: str = "Error") -> None:
        for pod in pods:
            self._end(pod, Step("ended", exit_code=code, reason=reason, message=message))

    def _end(self, pod: Dict, step: Step) -> None:
        """Raises Missed unless it runs until now."""
        metadata = pod["metadata"]
        live = self.api.find("Pod", metadata["name"], self.namespace)
        if live is None or live["status"]["phase"] != "Running" or "deletionTimestamp" in live["metadata"]:
            raise Missed
        only = {name: live["metadata"][name] for name in ("uid", "resourceVersion")}
        status = podstatus.status(live, step, live["status"]["podIP"], self.now)
        body = {"metadata": only, "status": status}
        try:
            self.api.patch("Pod", metadata["name"], self.namespace, body, "status", STRATEGIC_PATCH)
        except kubeapi.ApiError:
            raise Missed from None

    # Accidents that differ

    def hit_trainer(self, hit: Callable[[Dict, Dict], None]) -> None:
        crashed = dict(self.crashed)
        try:
            super().hit_trainer(hit)
        except Missed:
            self.crashed = crashed

    def evict(self, job: Dict, pod: Dict) -> None:
        self._end(pod, Step("evicted", message="The node was low on resource: memory."))

    def cut_off(self, job: Dict, pod: Dict) -> None:
        raise Missed

    def delete_child(self, child: Dict) -> None:
        self.forget(child)
        self.delete(child, "Orphan" if self.random.random() < 0.4 else "Background")

    def occupy(self) -> None:
        service = self.objects.get(("Service", f"{NAME}-trainer"))
        if service is not None:
            self.delete(service)
            self.put({"kind": "Service", "metadata": {"name": f"{NAME}-trainer"}, "spec": {"clusterIP": "None"}})

    # The operator

    def strike(self, method: str, after: bool) -> None:
        """At each request of the operator. Raises Killed and ApiError."""
        if self.random.random() < self.deaths:
            self.kills += 1
            raise Killed
        if self.random.random() < self.errors:
            self.faults += 1
            status = 0 if after else self.random.choice([0, 409, 429, 500])
            raise (Conflict if status == 409 else ApiError)(status, "", "a fault of the test")

    async def employ(self, probability: float = 1.0) -> None:
        """One operator is at work, or none for a while. Raises what it ended by."""
        if self.operator is not None and self.operator.done():
            with contextlib.suppress(Killed):
                self.operator.result()
            self.operator = None
        if self.operator is None and self.random.random() < probability:
            configuration = Configuration()
            await config.load_kube_config(config_file=str(self.account), client_configuration=configuration)
            self.operator = asyncio.create_task(Operator(configuration, self).run())

    async def dismiss(self) -> None:
        if self.operator is not None:
            self.operator.cancel()
            await asyncio.gather(self.operator, return_exceptions=True)

    async def until(self, holds: Callable[[], bool], what: str, limit_s: float = OVER_LIMIT_S) -> None:
        """With an operator at work. Raises AssertionError naming `what`."""
        deadline = asyncio.get_running_loop().time() + limit_s
        while not holds():
            assert asyncio.get_running_loop().time() < deadline, f"not within {limit_s:.0f} s: {what}: {self.job}"
            await self.employ()
            await asyncio.sleep(TICK_S)
            self.tick(TICK_S)


class Port:
    """The status ports of the trainers."""

    def __init__(self, world: Server):
        self.world = world

    async def report(self, pods: Sequence[Object]) -> Any:
        return self.world.report(list(pods))

    async def pause(self, pods: Sequence[Object], token: str) -> None:
        running = [pod for pod in pods if pod["status"]["phase"] == "Running"]
        owners = [owner for pod in running for owner in pod["metadata"].get("ownerReferences", ())]
        self.world.asked.update(owner["uid"] for owner in owners)


class Operator(Cluster):
    """One incarnation."""

    def __init__(self, configuration: Configuration, world: Server):
        super().__init__(configuration, Cache(), Port(world))
        self.key, self.world = b"key", world
        self.observed: Observed | None = None
        """What the pass that is under way looks at."""
        self._passing = self._dead = False

    async def run(self) -> None:
        """Until cancelled. Raises Killed, and AssertionError for what must never happen."""
        woken, watches = asyncio.Event(), []
        try:
            for kind in KINDS:
                listed = asyncio.Event()
                told = follow(self, kind, self.world.namespace, Health(), lambda key: woken.set(), listed)
                watches.append(asyncio.create_task(told))
                async with asyncio.timeout(60):
                    await listed.wait()
            while True:
                await self.look()
                await asyncio.sleep(0.2)
                # Not wait_for, which in Python 3.11 may swallow a cancellation.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.3):
                        await woken.wait()
                woken.clear()
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
            await self.close()

    async def look(self) -> None:
        self._passing = True
        try:
            self.observed = await observe(self, JobKey(self.world.namespace, NAME))
            if self.observed is not None:
                await carry_out(reconcile(self.observed, self.world.now, PLATFORM), self.observed, self)
        except (ApiError, Held):
            return  # the next pass plans anew
        finally:
            self._passing = False

    async def watch(self, kind: str, namespace: str, version: str) -> AsyncIterator[tuple[str, Any]]:
        async for told in super().watch(kind, namespace, version):
            if self.world.errors:
                await asyncio.sleep(self.world.random.choice([0.0, 0.0, 0.3, 1.0]))
            yield told

    async def _request(
        self, verb: str, method: str, path: str, query: Any = None, body: Any = None, *more: Any, **also: Any
    ) -> Any:
        if not self._passing:
            return await super()._request(verb, method, path, query, body, *more, **also)
        self._strike(method, after=False)
        answer = await super()._request(verb, method, path, query, body, *more, **also)
        if method != "GET":
            self.world.writes += 1
            if path.endswith("/status"):
                assert self.observed is not None
                self.world.check_status(self.observed.job.get("status", {}), body["status"], self.observed)
            self.world.check()
        self._strike(method, after=True)
        return answer

    def _strike(self, method: str, after: bool) -> None:
        """Of requests that go out together none goes out after the operator's death."""
        try:
            if self._dead:
                raise Killed
            self.world.strike(method, after)
        except Killed:
            self._dead = True
            raise

    async def apply(self, desired: Mapping[str, Any]) -> None:
        assert self.observed is not None
        status = self.observed.job.get("status", {})
        if holds(status, "Complete") or holds(status, "Failed"):
            assert (desired["kind"], desired["spec"]["replicas"]) == ("Deployment", 0), "over, and gets a new child"
        await super().apply(desired)

    async def delete(self, kind: str, name: str, namespace: str, uid: str) -> None:
        live = self.world.objects.get((kind, name))
        if live is not None and live["metadata"]["uid"] == uid:
            assert self.observed is not None
            self.world.check_deletion(live, self.observed)
        await super().delete(kind, name, namespace, uid)


@contextlib.contextmanager
def in_a_hurry() -> Iterator[None]:
    """Pauses of seconds where the operator makes ten and more."""
    short = {"FIRST_BACK_OFF_S": 1, "LONGEST_BACK_OFF_S": 2, "STOP_MARGIN_S": 1}
    with mock.patch.multiple(attempts, **short):
        yield


async def play(world: Server, rounds: int = 30) -> None:
    """Disturb a job for a while, then see it come to its end. Raises AssertionError."""
    try:
        for _ in range(rounds):
            await asyncio.sleep(world.random.choice([0.1, 0.3, 0.6]))
            world.tick(TICK_S)
            if world.random.random() < 0.3:
                world.disturb()
            await world.employ(0.6)
        world.calm()
        await world.until(lambda: world.job is None or _is_over(world.job), "the job is over")
        await world.until(lambda: _complaint(world) is None, "nothing is left over")
        world.check_end()
        await _is_quiet(world)
    finally:
        await world.dismiss()


async def fail_once(world: Server, fatal: int) -> bool:
    """The trainer fails, and the operator dies at the moment `fatal` of its writes from then on: 0 before the first, 1
    after it, and so on. Returns whether there was such a moment before the next attempt ran. Raises AssertionError."""
    moments = -1

    def strike(method: str, after: bool) -> None:
        nonlocal moments
        if moments >= 0 and method != "GET" and not _trainer_runs(world, 1):
            moments += 1
            if moments == fatal + 1:
                world.kills += 1
                raise Killed

    world.strike = strike
    try:
        await world.until(lambda: _trainer_runs(world, 0), "the trainer runs")
        moments = 0
        world.hit_trainer(world.crash)
        (pod,) = world.crashed.values()
        await world.until(lambda: _trainer_runs(world, 1), "the next attempt runs")
        status = world.api.get("RLJob", NAME, world.namespace)["status"]
        assert (status["restarts"], status["disruptions"], status["attempt"]["cause"]) == (1, 0, "Failure")
        assert f"container trainer of pod {pod}" in status["attempt"]["message"]
        assert len(world.all("Job")) == 1
    finally:
        await world.dismiss()
    return world.kills > 0


def _trainer_runs(world: Server, attempt: int) -> bool:
    return any(
        pod["status"]["phase"] == "Running"
        for job in world.all("Job")
        if job["metadata"]["labels"]["miles.dev/attempt"] == str(attempt)
        for pod in world.pods_of(job)
    )


async def _is_quiet(world: Server) -> None:
    """An idle job is not written to."""
    for _ in range(10):
        before = world.writes
        await asyncio.sleep(QUIET_S)
        await world.employ()
        if world.writes == before:
            return
    raise AssertionError("an idle job is written to")


def _complaint(world: Server) -> str | None:
    try:
        world.check_end()
    except AssertionError as error:
        return str(error) or "not yet"
    return None


def _is_over(job: Dict) -> bool:
    return holds(job.get("status", {}), "Complete") or holds(job.get("status", {}), "Failed")
