"""A stand-in for the kubelet: nodes that run nothing. It moves the status of pods bound to them and completes their
deletion; everything else about a pod (Job, Deployment, scheduler, eviction, garbage) is the real controllers' doing.

A pod runs and is Ready at once unless a test scripted something else for it, before it exists or while it runs. The
stand-in has a thread of its own, so tests may block; it follows thousands of pods.
"""

import asyncio
import contextlib
import dataclasses
import datetime
import fnmatch
import itertools
import json
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any

import aiohttp

from tests.kubeapi import STRATEGIC_PATCH, Api, Dict, until
from tests.podstatus import Outcome, Step, runs, status

HEARTBEAT_S = 2.0  # the control plane of the tests gives a node up after 20 s
ROOM = {"cpu": "10k", "memory": "100Ti", "ephemeral-storage": "100Ti", "pods": "50k", "nvidia.com/gpu": "64"}


@dataclasses.dataclass
class Script:
    outcome: Outcome
    namespace: str
    labels: Mapping[str, str]
    name: str
    left: int | None  # pods that it is still for; None: all
    only_new: bool

    def fits(self, pod: Dict) -> bool:
        meta = pod["metadata"]
        return (
            self.left != 0
            and meta["namespace"] == self.namespace
            and self.labels.items() <= meta.get("labels", {}).items()
            and fnmatch.fnmatchcase(meta["name"], self.name)
        )


@dataclasses.dataclass
class Bound:
    """A pod on one of the nodes."""

    pod: Dict  # as last seen
    address: str
    outcome: Outcome | None = None
    written: Step | None = None
    task: asyncio.Task[None] | None = None
    stopping: bool = False


class Kubelet:
    """Use as a context manager; ready when its nodes take pods. Methods may be called from any thread."""

    def __init__(self, api: Api, nodes: tuple[str, ...] = ("node-1", "node-2")):
        self.nodes = nodes
        self.faults: list[BaseException] = []
        """What the server refused although it should not have: a mistake of the stand-in."""
        self._api = api
        self._lost: set[str] = set()
        self._scripts: list[Script] = []
        self._bound: dict[str, Bound] = {}  # by uid
        self._numbers = itertools.count(256)  # of addresses
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),), name="kubelet")

    def __enter__(self) -> "Kubelet":
        self._cordon(True)
        for name in self.nodes:
            self._register(name)
        self._thread.start()
        until(self._schedulable, "nodes of the stand-in to be schedulable")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(self._loop)])
        self._thread.join(timeout=10)
        for name in self.nodes:
            self._api.delete("Node", name)
        self._cordon(False)

    def script(
        self,
        outcome: Outcome,
        namespace: str,
        labels: Mapping[str, str] | None = None,
        name: str = "*",
        times: int | None = None,
        only_new: bool = False,
    ) -> None:
        """For pods of `namespace` with these labels and a name of this pattern, those that run now and those to come;
        `times`: only for so many of them, the oldest first; `only_new`: not for those that run now. The latest script
        that fits a pod counts."""
        script = Script(outcome, namespace, labels or {}, name, times, only_new)
        self._loop.call_soon_threadsafe(self._add, script)

    def forget(self, namespace: str) -> None:
        """Drop the scripts of a namespace; its pods go on as they are."""
        self._scripts = [each for each in self._scripts if each.namespace != namespace]

    def add_node(self, name: str) -> None:
        """One more, for pods that tolerate its taint, `apart`, only: others do not notice that it is lost."""
        taints = [{"key": "apart", "effect": "NoSchedule"}]
        self._register(name, taints=taints)
        self.nodes = (*self.nodes, name)

    def lose_node(self, name: str) -> None:
        """The node falls silent. The controllers notice after 20 s, and evict its pods 2 s later; none of them ends."""
        self._loop.call_soon_threadsafe(self._lose, name)

    def recover(self) -> None:
        """Lost nodes are back, and with them the pods that were not deleted meanwhile."""
        self._loop.call_soon_threadsafe(self._recover)

    # Pods, in the thread.

    async def _run(self) -> None:
        connector = aiohttp.TCPConnector(ssl=self._api.tls, limit=32)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        async with aiohttp.ClientSession(
            self._api.host, connector=connector, headers=self._api.headers, timeout=timeout
        ) as self._session:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(self._heartbeat(), self._follow())

    async def _follow(self) -> None:
        """List and watch, for ever; a watch that breaks off begins with a list again."""
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async for kind, pod in self._events():
                    self._gone(pod["metadata"]["uid"]) if kind == "DELETED" else self._seen(pod)
            await asyncio.sleep(0.2)

    async def _events(self) -> AsyncIterator[tuple[str, Dict]]:
        query = {"fieldSelector": "spec.nodeName!="}
        async with self._session.get("/api/v1/pods", params=query, raise_for_status=True) as answer:
            listed = await answer.json()
        present = {pod["metadata"]["uid"] for pod in listed["items"]}
        for uid in self._bound.keys() - present:
            self._gone(uid)
        for pod in listed["items"]:
            yield "ADDED", pod
        query |= {"watch": "true", "resourceVersion": listed["metadata"]["resourceVersion"], "timeoutSeconds": "300"}
        async with self._session.get("/api/v1/pods", params=query, raise_for_status=True) as answer:
            buffer = b""
            async for chunk in answer.content.iter_any():
                *lines, buffer = (buffer + chunk).split(b"\n")
                for event in map(json.loads, lines):
                    if event["type"] == "ERROR":
                        return
                    yield event["type"], event["object"]

    def _seen(self, pod: Dict) -> None:
        uid, node = pod["metadata"]["uid"], pod["spec"]["nodeName"]
        if node not in self.nodes:
            return
        bound = self._bound.setdefault(uid, Bound(pod, pod["status"].get("podIP") or self._address()))
        bound.pod = pod
        if node in self._lost:
            return
        if "deletionTimestamp" not in pod["metadata"]:
            if bound.outcome is None:
                self._begin(bound)
        elif not bound.stopping:
            bound.stopping = True
            self._start(bound, self._stop(bound))

    def _gone(self, uid: str) -> None:
        if (bound := self._bound.pop(uid, None)) and bound.task:
            bound.task.cancel()

    def _begin(self, bound: Bound) -> None:
        """What the latest script that fits says of the pod."""
        script = next((each for each in reversed(self._scripts) if each.fits(bound.pod)), None)
        if script and script.left:
            script.left -= 1
        bound.outcome = script.outcome if script else runs()
        self._start(bound, self._live(bound, bound.outcome))

    def _add(self, script: Script) -> None:
        self._scripts.append(script)
        for bound in [] if script.only_new else self._bound.values():
            if bound.outcome and not bound.stopping and not _over(bound.pod) and script.fits(bound.pod):
                self._begin(bound)

    def _start(self, bound: Bound, work: Coroutine[None, None, None]) -> None:
        if bound.task:
            bound.task.cancel()
        bound.task = self._loop.create_task(work)
        bound.task.add_done_callback(self._note_fault)

    def _note_fault(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (fault := task.exception()):
            self.faults.append(fault)

    async def _live(self, bound: Bound, outcome: Outcome) -> None:
        for step in outcome.steps:
            await asyncio.sleep(step.after_s)
            if bound.written != step:
                await self._write(bound, step)

    async def _stop(self, bound: Bound) -> None:
        step = (bound.outcome or runs()).stop
        await asyncio.sleep(min(step.after_s, bound.pod["metadata"].get("deletionGracePeriodSeconds", 0)))
        if not _over(bound.pod):
            await self._write(bound, step)
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": bound.pod["metadata"]["uid"]}}
        await self._ask("DELETE", _path(bound.pod), body, "application/json")

    async def _write(self, bound: Bound, step: Step) -> None:
        content = status(bound.pod, step, bound.address, datetime.datetime.now(datetime.UTC))
        patch = {"metadata": {"uid": bound.pod["metadata"]["uid"]}, "status": content}
        await self._ask("PATCH", f"{_path(bound.pod)}/status", patch, STRATEGIC_PATCH)
        bound.written = step

    async def _ask(self, method: str, path: str, body: Dict, kind: str) -> None:
        """Until the server has answered; a pod that is gone, or another by now, is no fault."""
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                headers = {"Content-Type": kind}
                async with self._session.request(method, path, data=json.dumps(body), headers=headers) as answer:
                    if answer.status < 400 or answer.status in (404, 409):
                        return
                    if answer.status < 429:
                        raise RuntimeError(f"{method} {path}: {await answer.text()}")
            await asyncio.sleep(0.5)

    def _address(self) -> str:
        number = next(self._numbers)
        return f"10.{244 + (number >> 16)}.{(number >> 8) % 256}.{number % 256}"

    # Nodes.

    def _register(self, name: str, **spec: Any) -> None:
        labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
        metadata = {"name": name, "labels": labels}
        self._api.apply({"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": spec})

    async def _heartbeat(self) -> None:
        while True:
            for name in set(self.nodes) - self._lost:
                await self._ask("PATCH", f"/api/v1/nodes/{name}/status", {"status": _node_status()}, STRATEGIC_PATCH)
            await asyncio.sleep(HEARTBEAT_S)

    def _schedulable(self) -> bool:
        return not any(self._api.get("Node", name)["spec"].get("taints") for name in self.nodes)

    def _lose(self, name: str) -> None:
        self._lost.add(name)
        for bound in self._bound.values():
            if bound.pod["spec"]["nodeName"] == name and bound.task and not bound.task.done():
                bound.task.cancel()
                bound.outcome = None

    def _recover(self) -> None:
        self._lost.clear()
        for bound in self._bound.values():
            self._seen(bound.pod)

    def _cordon(self, unschedulable: bool) -> None:
        """A test cluster's own nodes take no pods meanwhile."""
        for node in self._api.list("Node"):
            if node["metadata"]["name"] not in self.nodes:
                self._api.patch("Node", node["metadata"]["name"], None, {"spec": {"unschedulable": unschedulable}})


def evict(api: Api, namespace: str, name: str) -> None:
    """Ask for an eviction, as `kubectl drain` does: PodDisruptionBudgets count, the pod gets DisruptionTarget."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": namespace}}
    api.request("POST", f"/api/v1/namespaces/{namespace}/pods/{name}/eviction", body)


def _over(pod: Dict) -> bool:
    return pod["status"]["phase"] in ("Succeeded", "Failed")


def _path(pod: Dict) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


def _node_status() -> Dict:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}
    return {
        "capacity": ROOM,
        "allocatable": ROOM,
        "conditions": [ready | {"lastHeartbeatTime": now, "lastTransitionTime": now}],
    }
