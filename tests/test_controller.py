"""What a look costs in requests and rendering, and that it never acts on what is old."""

import asyncio
import copy
import datetime
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from operators import reconcile as reconciler
from operators.cache import Cache, JobKey
from operators.cluster import ApiError, Conflict
from operators.controller import LOOKS, Controller
from operators.liveness import Health
from operators.observed import Plan
from operators.reconcile import reconcile
from operators.telemetry import Telemetry
from tests.situations import PLATFORM, Story
from tests.virtual import in_virtual_time

KEY = JobKey("default", "arithmetic")
Dict = dict[str, Any]


class Server:
    """One RLJob at work, its children, and all that was asked for."""

    def __init__(self) -> None:
        self.story, self.cache, self.asked = Story(), Cache(), list[str]()
        self.refusal = 0  # of a list of nodes
        self.status = SimpleNamespace(report=self._report)
        self.story.job["metadata"]["uid"] = "3f0c1111-2222-3333-4444-555566667777"
        self.story.now = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=100)
        for step in range(3):
            self.story.look(1) if step == 0 else self.story.train(step)
        self.job = copy.deepcopy(self.story.job)
        for found in (*self.story.children.values(), *self.story.pods):
            metadata = {"namespace": "default", "resourceVersion": "7"} | found["metadata"]
            self.cache.put(found["kind"], found | {"metadata": metadata})

    async def _report(self, pods: Any) -> Any:
        return self.story.report

    async def foreign(self, key: JobKey, uid: str) -> frozenset[Any]:
        return frozenset()

    def refused(self, key: JobKey) -> dict[Any, str]:
        return {}

    async def get(self, kind: str, namespace: str, name: str) -> Dict:
        self.asked.append("get")
        return self.job

    async def apply(self, desired: Any) -> None:
        self.asked.append(f"apply {desired['kind']}")

    async def holds(self, job: Dict) -> bool:
        live = await self.get("RLJob", "default", "arithmetic")
        return bool(live["metadata"]["resourceVersion"] == job["metadata"]["resourceVersion"])

    async def write_status(self, job: Dict, status: Any) -> None:
        self.asked.append("status")
        if job["metadata"]["resourceVersion"] != self.job["metadata"]["resourceVersion"]:
            raise Conflict(409, "Conflict", "it is no longer what was seen")
        self.job = self.job | {"status": dict(status)}
        self._touch()
        self.cache.put_answer("RLJob", self.job)

    def edit(self, **spec: Any) -> None:
        self.job = self.job | {"spec": self.job["spec"] | spec}
        self._touch()
        self.job["metadata"]["generation"] += 1

    def _touch(self) -> None:
        metadata = self.job["metadata"]
        self.job["metadata"] = metadata | {"resourceVersion": str(int(metadata["resourceVersion"]) + 1)}

    async def spot_nodes(self) -> frozenset[str]:
        self.asked.append("nodes")
        if self.refusal:
            raise ApiError(self.refusal, "", "no")
        return frozenset({"node-1"})

    async def post_event(self, job: Dict, event: Any) -> None:
        self.asked.append("event")


def controller(server: Server, *namespaces: str) -> Controller:
    found = Controller(server, reconcile, PLATFORM, Health(), Telemetry(Health()), namespaces)  # type: ignore[arg-type]
    found.heard("ADDED", server.job)
    return found


async def settled() -> tuple[Server, Controller]:
    """A job after whose last pass nothing was left to do."""
    server = Server()
    found = controller(server)
    await found.visit(KEY)
    found.heard("MODIFIED", server.job)
    await found.visit(KEY)
    server.asked.clear()
    return server, found


@in_virtual_time
async def test_a_look_that_nothing_asks_for_asks_the_server_nothing_and_parses_and_renders_nothing() -> None:
    _, found = await settled()
    server = found.cluster
    refuse = mock.Mock(side_effect=AssertionError("worked out again"))
    with (
        mock.patch.object(reconciler.manifest, "check", refuse),
        mock.patch.object(reconciler.children, "children", refuse),
    ):
        assert await found.visit(KEY) == reconciler.LOOK.total_seconds()
    assert server.asked == []  # type: ignore[attr-defined]


@in_virtual_time
async def test_where_nothing_was_to_be_done_nothing_is_worked_out_until_something_has_changed() -> None:
    server, found = await settled()
    work = found.reconcile = mock.Mock(side_effect=reconcile)
    await found.visit(KEY)
    work.reset_mock()
    report, pod = server.story.report, server.story.pods[0]
    assert report is not None

    def pod_changes() -> None:
        metadata = {"namespace": "default", "resourceVersion": "8"} | pod["metadata"]
        server.cache.put("Pod", pod | {"metadata": metadata})

    async def worked() -> int:
        assert await found.visit(KEY) is not None
        count = work.call_count
        await found.visit(KEY)  # what was looked at is known again
        work.reset_mock()
        return count

    assert await worked() == 0
    server.story.report = report | {"queue_groups": 7.0}
    assert await worked() == 0
    server.story.report = report | {"checkpoint_step": report["step"]}
    assert await worked() == 1
    pod_changes()
    assert await worked() == 1
    found.heard("MODIFIED", server.job)
    assert await worked() == 1
    found._doubted.add(KEY)
    assert await worked() == 1
    await asyncio.sleep(reconciler.STANDS.total_seconds() - 1)
    assert await worked() == 0
    await asyncio.sleep(2)
    assert await worked() == 1


@in_virtual_time
@pytest.mark.parametrize("news", ["status", "child"])
async def test_an_echo_that_asks_for_nothing_costs_no_request(news: str) -> None:
    server, found = await settled()
    found._echo(KEY) if news == "child" else found.heard("MODIFIED", server.job)
    await found.visit(KEY)
    assert server.asked == []


@in_virtual_time
async def test_progress_costs_one_request_the_status() -> None:
    server, found = await settled()
    server.story.report = {"phase": "training", "step": 9, "version": [1, 9]}
    await found.visit(KEY)
    assert server.asked == ["status"]
    assert server.job["status"]["training"]["step"] == 9
    await found.visit(KEY)
    assert server.asked == ["status"], "its own write was forgotten"


@in_virtual_time
async def test_an_edit_costs_a_question_the_child_that_it_changes_and_the_status() -> None:
    server, found = await settled()
    server.edit(rollout={"replicas": 2})
    found.heard("MODIFIED", server.job)
    await found.visit(KEY)
    assert server.asked == ["get", "apply Deployment", "status"]


@in_virtual_time
async def test_nothing_is_applied_by_what_the_watch_told_long_ago() -> None:
    server, found = await settled()
    server.edit(rollout={"replicas": 2})
    found.heard("MODIFIED", server.job)
    server.edit(rollout={"replicas": 1})
    await found.visit(KEY)
    assert server.asked == ["get", "get", "status"]
    assert server.job["status"]["observedGeneration"] == server.job["metadata"]["generation"]


@in_virtual_time
async def test_after_a_status_by_what_the_watch_told_long_ago_is_refused_the_server_is_asked() -> None:
    server, found = await settled()
    server.story.report = {"phase": "training", "step": 9, "version": [1, 9]}
    server.edit(runPolicy={"maxRestarts": 7})
    with pytest.raises(Conflict):
        await found.visit(KEY)
    await found.visit(KEY)
    assert server.asked == ["status", "get", "status"]
    assert server.job["status"]["training"]["step"] == 9


@in_virtual_time
async def test_after_a_look_that_failed_the_server_itself_is_asked() -> None:
    server, found = await settled()
    found.heard("MODIFIED", server.job)
    with mock.patch.object(server, "foreign", side_effect=OSError("no route")), pytest.raises(OSError, match="route"):
        await found.visit(KEY)
    await found.visit(KEY)
    assert server.asked[:1] == ["get"]


async def test_a_kind_that_cannot_be_listed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def follow(*values: Any) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr("operators.controller.LIST_LIMIT_S", 0.05)
    monkeypatch.setattr("operators.controller.follow", follow)
    with pytest.RaisesGroup(pytest.RaisesExc(ValueError, match="kind Job could not be listed")):
        async with asyncio.TaskGroup() as group:
            await controller(Server())._follow(group, "Job")


@in_virtual_time
async def test_nodes_are_surveyed_beside_the_looks_and_only_for_all_namespaces() -> None:
    server, found = await settled()
    await found._survey()
    await found.visit(KEY)
    assert server.asked == ["nodes", "status"], "how many workers run on spot nodes is news"
    assert server.job["status"]["rollout"]["spot"] == 0
    await controller(server, "team-a")._survey()
    assert server.asked == ["nodes", "status"]


@in_virtual_time
@pytest.mark.parametrize(("status", "known"), [(403, None), (0, frozenset({"node-1"})), (500, frozenset({"node-1"}))])
async def test_what_was_known_of_nodes_stands_until_it_is_known_anew_or_may_not_be(status: int, known: Any) -> None:
    server, found = await settled()
    await found._survey()
    server.refusal = status
    await found._survey()
    assert server.cache.spot_nodes == known


async def test_jobs_are_told_by_the_replica_that_leads_and_by_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    server, told = Server(), []
    found = controller(server)

    async def lead(namespace: str) -> None:
        told.extend(found.telemetry.jobs())

    monkeypatch.setattr(found, "_lead", lead)
    assert not list(found.telemetry.jobs())
    await found.lead("miles-system")
    assert told == [("default", "arithmetic", "Running", True, "Training")]
    assert not list(found.telemetry.jobs())


class Slow(Server):
    """Takes a second for a look at a job with nothing yet."""

    def __init__(self) -> None:
        super().__init__()
        self.looks, self.most, self.begun = 0, 0, list[str]()

    async def foreign(self, key: JobKey, uid: str) -> frozenset[Any]:
        if key != KEY:
            self.looks += 1
            self.most = max(self.most, self.looks)
            self.begun.append(key.name)
            await asyncio.sleep(1)
            self.looks -= 1
        return frozenset()


@in_virtual_time
async def test_of_a_burst_a_few_jobs_are_looked_at_at_once_in_order_and_quiet_ones_do_not_wait_for_them() -> None:
    server = Slow()
    found = controller(server)
    await found.visit(KEY)
    found.heard("MODIFIED", server.job)
    await found.visit(KEY)
    names = [f"job-{number:02}" for number in range(2 * LOOKS)]
    for number, name in enumerate(names):
        metadata = server.job["metadata"] | {"name": name, "uid": f"uid-{number}"}
        found.heard("ADDED", server.job | {"metadata": metadata, "status": {}})
    found.reconcile = lambda *_: Plan()
    async with asyncio.TaskGroup() as group:
        burst = [group.create_task(found.visit(JobKey("default", name))) for name in names]
        await asyncio.sleep(0.5)
        await asyncio.wait_for(found.visit(KEY), 0.1)
        assert not any(each.done() for each in burst)
    assert (server.begun, server.most) == (names, LOOKS)
