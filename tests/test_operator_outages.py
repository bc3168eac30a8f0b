"""The operator where the API server itself goes away: killed and started again on what it had stored, and without the
definition of RLJobs for a while. On a control plane of its own, without nodes."""

import time
from collections.abc import Iterator

import pytest

from operators import crd
from operators.controller import CHECK_S
from operators.election import LEASE_S
from tests import controlplane, replica
from tests.controlplane import ControlPlane
from tests.kubeapi import until
from tests.replica import Replica, rljob

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]
JOBS = 3


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    try:
        with controlplane.running(tmp_path_factory.mktemp("outages")) as plane:
            yield plane
    except controlplane.Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def operator(plane: ControlPlane) -> Iterator[Replica]:
    found = Replica(replica.install(plane), plane.folder, "replica", ["--log-level=debug"])
    try:
        found.wait_until_leading()
        yield found
    finally:
        found.kill()


def workers(plane: ControlPlane, job: str) -> int | None:
    """How many the operator wants now."""
    found = plane.api.find("Deployment", f"{job}-rollout", "default")
    return found and found["spec"]["replicas"]


def until_scaled(plane: ControlPlane, job: str, replicas: int) -> None:
    until(lambda: workers(plane, job) == replicas, f"{job} has {replicas} workers", 60)


@pytest.mark.parametrize("seconds", [1.0, LEASE_S + 1.0], ids=["for a moment", "for longer than a Lease lasts"])
def test_an_api_server_that_comes_back_finds_the_same_operator_at_work(
    plane: ControlPlane, operator: Replica, seconds: float
) -> None:
    names = [f"sums-{seconds:.0f}-{number}" for number in range(JOBS)]
    for name in names:
        plane.api.create(rljob(name, "default"))
    for name in names:
        until_scaled(plane, name, 1)
    plane.api.patch("RLJob", names[0], "default", {"spec": {"rollout": {"replicas": 2}}})
    plane.interrupt("kube-apiserver", seconds)
    plane.api.patch("RLJob", names[1], "default", {"spec": {"rollout": {"replicas": 3}}})
    plane.api.create(rljob(f"{names[0]}-new", "default"))
    until_scaled(plane, names[0], 2)
    until_scaled(plane, names[1], 3)
    until_scaled(plane, f"{names[0]}-new", 1)
    assert workers(plane, names[2]) == 1
    assert operator.leads()
    plane.api.patch("Deployment", f"{names[2]}-rollout", "default", {"spec": {"replicas": 7}})
    until_scaled(plane, names[2], 1)


def ended(operator: Replica, before: int) -> list[str]:
    """What it has said of the end of the watch of RLJobs, after so many lines."""
    return [line["message"] for line in operator.said()[before:] if "watch of RLJobs ended" in line["message"]]


def test_a_definition_that_is_deleted_takes_the_jobs_with_it_and_is_welcome_back(
    plane: ControlPlane, operator: Replica
) -> None:
    before = len(operator.said())
    for name in ("first", "sums"):
        plane.api.create(rljob(name, "default"))
        until_scaled(plane, name, 1)
    plane.api.delete("RLJob", "first", "default")
    until(lambda: workers(plane, "first") is None, "the garbage collector has learned of RLJobs", 90)
    plane.api.delete("CustomResourceDefinition", crd.NAME)
    until(lambda: plane.api.find("CustomResourceDefinition", crd.NAME) is None, "the definition is gone", 60)
    until(lambda: ended(operator, before), "the watch has ended", 60)
    plane.api.apply(crd.definition())
    until(lambda: replica.served(plane.api), "RLJobs are served again", 90)
    until(lambda: workers(plane, "sums") is None, "the children of the old job are gone", 120)
    plane.api.create(rljob("sums", "default"))
    until_scaled(plane, "sums", 1)
    plane.api.patch("RLJob", "sums", "default", {"spec": {"rollout": {"replicas": 2}}})
    began = time.monotonic()
    until_scaled(plane, "sums", 2)
    assert ended(operator, before) == ["the watch of RLJobs ended: 404 page not found; it is begun anew"]
    assert not [each for each in operator.said()[before:] if "exception" in each], "a traceback"
    assert time.monotonic() - began < CHECK_S / 2, "the watch hears again, not only the comparison once a minute"
    assert operator.leads()
