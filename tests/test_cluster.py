"""The operator's client where the API server does not do as it is asked; on a real one: tests.test_operator*."""

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator
from typing import Any

import pytest
from kubernetes.aio.client import Configuration

from operators import drift
from operators.act import Refused
from operators.cache import Cache, JobKey
from operators.cluster import APPLIES, EVENT_LIMIT_S, ApiError, Cluster
from operators.observed import Event, Key
from operators.statusport import StatusPort
from tests.virtual import in_virtual_time

KEY = JobKey("team", "sums")
JOB = {"metadata": {"name": "sums", "namespace": "team", "uid": "u", "resourceVersion": "7"}}
OWNER = {"kind": "RLJob", "name": "sums", "uid": "u", "controller": True}


def wanted(image: str = "miles:1", kind: str = "Deployment") -> dict[str, Any]:
    metadata = {"name": "sums-rollout", "namespace": "team", "ownerReferences": [OWNER]}
    return drift.marked({"kind": kind, "metadata": metadata, "spec": {"image": image}})


class Server(Cluster):
    """Answers to a patch with what was applied; `admission` may change that, or raise."""

    def __init__(self) -> None:
        super().__init__(Configuration(), Cache(), StatusPort())
        self.writes = 0
        self.admission: Any = lambda found: found

    async def _request(self, verb: str, method: str, path: str, *values: Any, **options: Any) -> Any:
        assert method == "PATCH"
        self.writes += 1
        found = self.admission(copy.deepcopy(values[1]))
        found["metadata"] |= {"uid": "d", "resourceVersion": str(self.writes)}
        return found


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    server = Server()
    yield server
    await server.close()


def mirrored(found: dict[str, Any]) -> dict[str, Any]:
    return found | {"spec": {"image": f"mirror/{found['spec']['image']}"}}


async def test_what_an_admission_rule_rewrites_is_applied_once_and_again_after_an_edit_or_a_change_by_others() -> None:
    async with serving() as server:
        server.admission = mirrored
        for _ in range(3):
            await server.apply(wanted())
        assert server.writes == 1
        for _ in range(3):
            await server.apply(wanted("miles:2"))
        assert server.writes == 2
        live = server.cache.find("Deployment", "team", "sums-rollout")
        live["metadata"]["resourceVersion"] = "9"
        server.cache.put("Deployment", live | {"spec": {"image": "evil"}})
        await server.apply(wanted("miles:2"))
        assert server.writes == 3


@pytest.mark.parametrize(
    "write",
    [
        lambda cluster: cluster.apply(wanted()),
        lambda cluster: cluster.delete("Job", "sums-trainer-0", "team", "j"),
        lambda cluster: cluster.write_status(JOB, {"phase": "Running"}),
    ],
)
async def test_a_replica_that_leads_no_longer_writes_nothing_but_its_lease(write: Any) -> None:
    sent: list[str] = []

    class Silent(Cluster):
        async def _send(self, method: str, path: str, *values: Any, **options: Any) -> Any:
            sent.append(method)
            raise OSError("no server")

    cluster = Silent(Configuration(), Cache(), StatusPort())
    cluster.may_write = lambda: False
    with pytest.raises(ApiError):
        await write(cluster)
    assert set(sent) <= {"GET"}
    with pytest.raises(ApiError, match="no server"):
        await cluster.write_lease({"metadata": {"name": "miles-operator", "namespace": "system"}})
    assert sent[-1] == "POST"
    await cluster.close()


class Busy(Cluster):
    """Answers to each request with the next of these statuses, the last one for ever; None: not at all."""

    def __init__(self, *statuses: int | None) -> None:
        super().__init__(Configuration(), Cache(), StatusPort())
        self.statuses, self.asked = list(statuses), list[Any]()

    async def _request(self, verb: str, method: str, path: str, *values: Any, body: Any, **options: Any) -> Any:
        self.asked.append(body)
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        if status is None:
            await asyncio.Event().wait()
        elif status >= 400 or status == 0:
            raise ApiError(status, "", "no")


@pytest.mark.parametrize(
    ("statuses", "asked"),
    [((201,), 1), ((0, 429, 503, 201), 4), ((403, 201), 1), ((409, 201), 1), ((500,), 6), ((None,), 1)],
    ids=["taken", "taken after a while", "refused", "there already", "never taken", "never answered"],
)
@in_virtual_time
async def test_an_event_is_asked_for_again_while_the_server_is_busy_and_then_given_up(
    statuses: tuple[int | None, ...], asked: int
) -> None:
    cluster = Busy(*statuses)
    began = asyncio.get_running_loop().time()
    await cluster.post_event(JOB, Event("Warning", "BackOff", "it failed"))
    assert len(cluster.asked) == asked
    assert len({body["metadata"]["name"] for body in cluster.asked}) == 1
    assert asyncio.get_running_loop().time() - began <= EVENT_LIMIT_S
    await cluster.close()


async def test_what_becomes_as_it_was_applied_is_applied_whenever_that_is_asked_for() -> None:
    async with serving() as server:
        for _ in range(3):
            await server.apply(wanted())
        assert server.writes == 3


async def test_children_of_many_jobs_are_applied_a_few_at_a_time() -> None:
    class Slow(Server):
        now = most = 0

        async def _request(self, *values: Any, **options: Any) -> Any:
            self.now += 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(0)
            self.now -= 1
            return await super()._request(*values, **options)

    server = Slow()
    await asyncio.gather(*(server.apply(wanted(f"miles:{number}")) for number in range(3 * APPLIES)))
    await server.close()
    assert (server.most, server.writes) == (APPLIES, 3 * APPLIES)


@pytest.mark.parametrize("status", [400, 403, 413, 422])
async def test_a_refusal_is_known_until_the_child_is_taken_or_the_job_is_gone(status: int) -> None:
    def refuse(found: Any) -> Any:
        raise ApiError(status, "Forbidden", "exceeded quota: full")

    async with serving() as server:
        server.admission = refuse
        with pytest.raises(Refused, match="Deployment sums-rollout: Forbidden: exceeded quota: full"):
            await server.apply(wanted())
        assert server.refused(KEY) == {Key("Deployment", "sums-rollout"): "Forbidden: exceeded quota: full"}
        server.admission = lambda found: found
        await server.apply(wanted())
        assert server.refused(KEY) == {}
        server.admission = refuse
        with pytest.raises(Refused):
            await server.apply(wanted())
        server.forget(KEY)
        assert server.refused(KEY) == {}


@pytest.mark.parametrize("status", [0, 409, 429, 500, 504])
async def test_a_request_that_failed_is_no_refusal(status: int) -> None:
    def fail(found: Any) -> Any:
        raise ApiError(status, "", "try again")

    async with serving() as server:
        server.admission = fail
        with pytest.raises(ApiError, match="try again"):
            await server.apply(wanted())
        assert server.refused(KEY) == {}
