"""A deaf or stuck operator is found out: by the age of its watches, by what that of RLJobs missed, by its queue."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import pytest

from operators import liveness
from operators.cache import Cache, JobKey
from operators.cluster import ApiError
from operators.controller import CHECK_S, RESYNC_S, Controller
from operators.liveness import STALL_LIMIT_S, WATCH_LIMIT_S, Health
from operators.observed import Plan
from operators.resolve import Platform
from operators.telemetry import Telemetry
from operators.watch import follow
from tests.virtual import in_virtual_time


class Server:
    """An API server with ConfigMaps and RLJobs; its watches bring `events` and then whatever `manner` says."""

    def __init__(self) -> None:
        self.cache = Cache()
        self.objects: list[dict[str, Any]] = []
        self.events: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self.lists = self.watches = 0
        self.manner = "bookmarks"
        self.since: list[str] = []

    async def pages(self, kind: str, namespace: str, selector: Any = None, bare: bool = False) -> AsyncIterator[Any]:
        self.lists += 1
        if self.manner == "refuses":
            raise ApiError(0, "", "connection refused")
        yield self.objects, "100"

    async def spot_nodes(self) -> frozenset[str]:
        return frozenset()

    async def watch(self, kind: str, namespace: str, version: str) -> AsyncIterator[tuple[str, Any]]:
        self.watches += 1
        self.since.append(version)
        while self.manner == "bookmarks":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(60):
                    yield await self.events.get()
                    continue
            yield "BOOKMARK", {"metadata": {"resourceVersion": "200"}}
        if self.manner in ("expired", "forgetful"):
            self.manner = "bookmarks" if self.manner == "expired" else self.manner
            raise ApiError(410, "Expired", "too old")
        await asyncio.sleep(100)  # dead; then the client gives up
        raise ApiError(0, "", "Timeout on reading data from socket")


def config_map(version: str) -> dict[str, Any]:
    owner = {"kind": "RLJob", "name": "sums", "uid": "u", "controller": True}
    metadata = {"name": "c", "namespace": "team", "uid": "c", "resourceVersion": version, "ownerReferences": [owner]}
    return {"kind": "ConfigMap", "apiVersion": "v1", "metadata": metadata}


def loop_health(**options: Any) -> Health:
    return Health(clock=asyncio.get_running_loop().time, **options)


@contextlib.asynccontextmanager
async def beside(task: Awaitable[Any]) -> AsyncIterator[None]:
    running = asyncio.ensure_future(task)
    try:
        yield
    finally:
        running.cancel()
        await asyncio.wait({running})


@contextlib.asynccontextmanager
async def following(server: Server, health: Health) -> AsyncIterator[list[JobKey]]:
    changed: list[JobKey] = []
    listed = asyncio.Event()
    async with beside(follow(server, "ConfigMap", "", health, changed.append, listed)):  # type: ignore[arg-type]
        if server.manner != "refuses":
            await listed.wait()
        yield changed


@in_virtual_time
async def test_a_quiet_watch_that_brings_bookmarks_is_alive_for_hours() -> None:
    server, health = Server(), loop_health()
    async with following(server, health):
        await asyncio.sleep(4 * 3600)
        assert health.faults() == []
        assert server.lists == 1


@in_virtual_time
async def test_a_dead_watch_is_a_fault_although_lists_succeed() -> None:
    server, health = Server(), loop_health()
    server.manner = "dead"
    async with following(server, health):
        await asyncio.sleep(WATCH_LIMIT_S - 1)
        assert health.faults() == []
        await asyncio.sleep(2)
        (fault,) = health.faults()
        assert fault.startswith("ConfigMap: nothing was heard for")
        assert server.lists > 1


@in_virtual_time
async def test_a_watch_that_lives_again_is_no_fault() -> None:
    server, health = Server(), loop_health()
    server.manner = "dead"
    async with following(server, health):
        await asyncio.sleep(150)
        server.manner = "bookmarks"
        await asyncio.sleep(600)
        assert health.faults() == []


@in_virtual_time
async def test_changes_reach_the_cache_and_name_their_job() -> None:
    server, health = Server(), loop_health()
    server.objects = [config_map("7")]
    async with following(server, health) as changed:
        assert changed == [JobKey("team", "sums")]
        server.events.put_nowait(("MODIFIED", config_map("150")))
        await asyncio.sleep(1)
        assert server.cache.of("u", ["ConfigMap"], "team")[0]["metadata"]["resourceVersion"] == "150"
        server.events.put_nowait(("DELETED", config_map("151")))
        await asyncio.sleep(1)
        assert server.cache.of("u", ["ConfigMap"], "team") == []
        assert len(changed) == 3


@in_virtual_time
async def test_what_vanished_while_the_server_had_forgotten_is_noticed_by_the_new_list() -> None:
    server, health = Server(), loop_health()
    server.objects = [config_map("7")]
    async with following(server, health) as changed:
        server.objects, server.manner = [], "expired"
        await asyncio.sleep(70)
        assert server.cache.of("u", ["ConfigMap"], "team") == []
        assert changed[-1] == JobKey("team", "sums")
        assert server.lists == 2


@in_virtual_time
async def test_a_server_that_has_forgotten_every_version_is_not_asked_without_a_pause() -> None:
    server, health = Server(), loop_health()
    server.manner = "forgetful"
    async with following(server, health):
        await asyncio.sleep(20)
        assert 2 < server.lists < 20


@in_virtual_time
async def test_a_server_that_refuses_is_asked_again_until_it_answers() -> None:
    server, health = Server(), loop_health()
    server.manner = "refuses"
    async with following(server, health):
        await asyncio.sleep(20)
        assert 2 < server.lists < 20
        server.manner = "bookmarks"
        server.objects = [config_map("7")]
        await asyncio.sleep(20)
        assert len(server.cache.of("u", ["ConfigMap"], "team")) == 1


def controller(server: Server, health: Health) -> Controller:
    return Controller(server, lambda *_: Plan(), Platform(), health, Telemetry(health))  # type: ignore[arg-type]


def deaf(health: Health) -> list[str]:
    """Faults but those of the queue, on which nobody works here."""
    return [fault for fault in health.faults() if not fault.startswith("queue")]


NAME = {"name": "sums", "namespace": "team"}


def rljob(version: str, generation: int = 1) -> dict[str, Any]:
    return {"metadata": {**NAME, "uid": "u1", "resourceVersion": version, "generation": generation}}


def due(operator: Controller) -> list[JobKey]:
    return [*operator.queue._urgent, *operator.queue._due]


def forget(operator: Controller) -> None:
    operator.queue._urgent.clear()
    operator.queue._due.clear()


@in_virtual_time
async def test_a_watch_of_rljobs_that_told_everything_is_alive() -> None:
    server, health = Server(), loop_health()
    operator = controller(server, health)
    server.objects = [rljob("50")]
    operator.heard(None, rljob("50"))
    async with beside(operator._check()):
        await asyncio.sleep(3600)
        assert deaf(health) == []


@in_virtual_time
async def test_a_watch_of_rljobs_that_misses_a_change_is_a_fault_and_the_job_is_looked_at_all_the_same() -> None:
    server, health = Server(), loop_health()
    operator = controller(server, health)
    server.objects = [rljob("51")]
    operator.heard(None, rljob("50"))
    forget(operator)
    async with beside(operator._check()):
        await asyncio.sleep(CHECK_S * 1.5)
        assert due(operator) == [JobKey("team", "sums")]
        assert operator._doubted == {JobKey("team", "sums")}, "what the watch told would do"
        await asyncio.sleep(WATCH_LIMIT_S)
        (fault,) = deaf(health)
        assert fault.startswith("RLJob: nothing was heard for")


@in_virtual_time
async def test_a_watch_that_is_a_moment_behind_the_list_is_no_fault() -> None:
    server, health = Server(), loop_health()
    operator = controller(server, health)
    async with beside(operator._check()):
        for version in range(100, 110):
            server.objects = [rljob(str(version))]
            await asyncio.sleep(CHECK_S + CHECK_S / 6 - 1)
            operator.heard("MODIFIED", rljob(str(version)))
            await asyncio.sleep(1)
        assert deaf(health) == []


@in_virtual_time
async def test_every_job_is_looked_at_now_and_then_whatever_happens() -> None:
    server, health = Server(), loop_health()
    operator = controller(server, health)
    server.objects = [rljob("50")]
    operator.heard(None, rljob("50"))
    forget(operator)
    async with beside(operator._check()):
        await asyncio.sleep(RESYNC_S * 0.8)
        assert due(operator) == []
        await asyncio.sleep(RESYNC_S)
        assert due(operator) == [JobKey("team", "sums")]


@in_virtual_time
async def test_a_job_whose_end_was_not_heard_is_forgotten() -> None:
    server, health = Server(), loop_health()
    operator = controller(server, health)
    operator.heard(None, rljob("50"))
    async with beside(operator._check()):
        await asyncio.sleep(CHECK_S * 1.5)
        assert operator.jobs == {}


@in_virtual_time
async def test_news_is_worked_on_at_once_and_an_echo_a_little_later() -> None:
    server, health = Server(), loop_health()
    operator = controller(server, health)
    key = JobKey("team", "sums")
    operator.heard("ADDED", rljob("50"))
    assert due(operator) == [key]
    forget(operator)
    operator.heard("MODIFIED", rljob("51"))
    assert due(operator) == []
    assert list(operator.queue._later) == [key]
    operator.heard("MODIFIED", rljob("52", generation=2))
    assert due(operator) == [key]


def test_a_queue_that_does_not_move_is_a_fault() -> None:
    stalled = 0.0
    health = Health(lambda: stalled)
    assert health.faults() == []
    stalled = STALL_LIMIT_S + 1
    (fault,) = health.faults()
    assert fault.startswith("queue: jobs wait and none was finished for")


def test_a_replica_is_ready_when_it_hears_the_server_and_while_it_leads_when_it_knows_everything() -> None:
    health = Health()
    assert health.waits_for() == "the API server"
    health.beat("Lease")
    assert health.waits_for() is None
    health.filling = True
    assert health.waits_for() == "the caches to fill"


@pytest.mark.parametrize("seconds", [0.0, WATCH_LIMIT_S - 1])
def test_what_was_heard_lately_is_no_fault(seconds: float) -> None:
    now = 100.0
    health = liveness.Health(clock=lambda: now)
    health.beat("Job")
    now += seconds
    assert health.faults() == []
