"""A plan carried out: what is done, in which order, where the API server refuses a child or a request fails."""

from typing import Any

import pytest

from operators.act import Refused, carry_out
from operators.observed import Deletion, Event, Key, Observed, Plan

JOB = {"metadata": {"name": "sums", "namespace": "team", "uid": "u"}}


def child(kind: str) -> dict[str, Any]:
    return {"kind": kind, "metadata": {"name": "c", "namespace": "team"}}


PLAN = Plan(
    apply=[child("ConfigMap"), child("Deployment"), child("Job")],
    delete=[Deletion(Key("Service", "old"), "s")],
    status={"phase": "Pending"},
    events=[Event("Normal", "Starting", "it begins")],
)


class Server:
    """Keeps what was asked for; `failures`: what an apply of that kind raises."""

    def __init__(self, **failures: Exception) -> None:
        self.failures, self.done = failures, list[str]()

    async def ensure_token(self, job: Any) -> None:
        self.done.append("token")

    async def apply(self, desired: Any) -> None:
        if failure := self.failures.get(desired["kind"]):
            raise failure
        self.done.append(desired["kind"])

    async def delete(self, kind: str, name: str, namespace: str, uid: str) -> None:
        self.done.append(f"delete {kind}")

    async def write_status(self, job: Any, status: Any) -> None:
        self.done.append("status")

    async def post_event(self, job: Any, event: Event) -> None:
        self.done.append("event")


async def test_what_pods_need_is_there_first_and_the_status_comes_last() -> None:
    server = Server()
    await carry_out(PLAN, Observed(JOB), server)  # type: ignore[arg-type]
    assert sorted(server.done[:2]) == ["ConfigMap", "token"]
    assert sorted(server.done[2:4]) == ["Deployment", "Job"]
    assert server.done[4:] == ["delete Service", "status", "event"]


@pytest.mark.parametrize(
    ("kind", "done"),
    [
        ("Job", ["ConfigMap", "token", "Deployment", "delete Service", "status", "event"]),
        ("ConfigMap", ["token", "delete Service", "status", "event"]),
    ],
)
async def test_a_refused_child_keeps_no_status_from_people_and_ends_the_pass(kind: str, done: list[str]) -> None:
    server = Server(**{kind: Refused("exceeded quota")})
    with pytest.raises(Refused, match="exceeded quota"):
        await carry_out(PLAN, Observed(JOB), server)  # type: ignore[arg-type]
    assert server.done == done


async def test_a_request_that_fails_ends_the_pass_before_the_status_also_beside_a_refusal() -> None:
    server = Server(ConfigMap=OSError("no route"), Job=Refused("exceeded quota"))
    with pytest.raises(OSError, match="no route"):
        await carry_out(PLAN, Observed(JOB), server)  # type: ignore[arg-type]
    assert "status" not in server.done
