"""Leader election on a Lease, against an API server in memory that keeps its rules: versions and conflicts."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest

from operators.election import LEASE_S, Election, LeaseLost
from tests.virtual import in_virtual_time


class Refused(Exception):
    """The API server in memory said no."""


class Leases:
    """One Lease; `down`: every request is refused, `silent`: none is answered."""

    def __init__(self) -> None:
        self.lease: Any = None
        self.down = self.silent = False
        self.writes: list[str] = []
        self._versions = itertools.count(1)

    async def get(self, kind: str, namespace: str, name: str) -> Any:
        await self._answer()
        return self.lease and {**self.lease, "spec": dict(self.lease["spec"]), "metadata": dict(self.lease["metadata"])}

    async def write_lease(self, lease: Any) -> Any:
        await self._answer()
        known = self.lease and self.lease["metadata"]["resourceVersion"]
        if lease["metadata"].get("resourceVersion") != known:
            raise Refused("conflict")
        self.lease = {**lease, "metadata": {**lease["metadata"], "resourceVersion": str(next(self._versions))}}
        self.writes.append(lease["spec"]["holderIdentity"])
        return self.lease

    async def _answer(self) -> None:
        if self.silent:
            await asyncio.Event().wait()
        if self.down:
            raise Refused("connection refused")


def cut_off(how: str = "down") -> Leases:
    """What a replica sees of the server when the network between them is cut."""
    leases = Leases()
    setattr(leases, how, True)
    return leases


class Replica:
    """Runs an Election; `log` gets its name when it begins to lead, and name + " ended" when it ends."""

    def __init__(self, leases: Leases, name: str, log: list[str]):
        self.election, self.name, self.log = Election(leases, "system", name, Refused), name, log
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(self.election.run(self.lead, self.stop))

    async def lead(self) -> None:
        self.log.append(self.name)
        try:
            await asyncio.Event().wait()
        finally:
            self.log.append(f"{self.name} ended")


@contextlib.asynccontextmanager
async def replicas(leases: Leases, log: list[str], *names: str) -> AsyncIterator[list[Replica]]:
    started = []
    for name in names:
        started.append(Replica(leases, name, log))
        await asyncio.sleep(0.5)
    try:
        yield started
    finally:
        for replica in started:
            replica.task.cancel()
        await asyncio.wait([replica.task for replica in started])


@in_virtual_time
async def test_of_three_replicas_one_leads() -> None:
    leases, log = Leases(), []
    async with replicas(leases, log, "a", "b", "c"):
        await asyncio.sleep(25)
        assert log == ["a"]
        assert len(leases.writes) > 5, "the Lease is renewed"


@in_virtual_time
async def test_a_leader_that_is_told_to_stop_hands_over_at_once() -> None:
    leases, log = Leases(), []
    async with replicas(leases, log, "a", "b") as (a, _):
        await asyncio.sleep(2.5)
        a.stop.set()
        await asyncio.sleep(5)
        assert log == ["a", "a ended", "b"]
        assert leases.lease["spec"]["leaseTransitions"] >= 1
        assert a.task.done()


@in_virtual_time
async def test_a_leader_that_vanishes_is_succeeded_when_its_lease_has_run_out_and_not_before() -> None:
    leases, log = Leases(), []
    async with replicas(leases, log, "a", "b") as (a, _):
        await asyncio.sleep(2.5)
        a.election.leases = cut_off()  # as if killed: it neither renews nor gives back
        await asyncio.sleep(LEASE_S - 3)
        assert "b" not in log
        await asyncio.sleep(6)
        assert "b" in log


@pytest.mark.parametrize("how", ["down", "silent"])
@in_virtual_time
async def test_a_leader_that_cannot_renew_ends_before_another_may_begin(how: str) -> None:
    leases, log = Leases(), []
    async with replicas(leases, log, "a", "b") as (a, _):
        await asyncio.sleep(2.5)
        a.election.leases = cut_off(how)
        await asyncio.sleep(25)
        assert log == ["a", "a ended", "b"]
        with pytest.raises(LeaseLost, match="could not be renewed"):
            await a.task


@in_virtual_time
async def test_a_short_silence_of_the_server_costs_nothing() -> None:
    leases, log = Leases(), []
    async with replicas(leases, log, "a", "b"):
        await asyncio.sleep(2.5)
        leases.down = True
        await asyncio.sleep(4)
        leases.down = False
        await asyncio.sleep(15)
        assert log == ["a"]


@in_virtual_time
async def test_nobody_leads_while_the_server_is_away_and_one_does_when_it_is_back() -> None:
    leases, log = Leases(), []
    leases.down = True
    async with replicas(leases, log, "a", "b"):
        await asyncio.sleep(10)
        assert log == []
        leases.down = False
        await asyncio.sleep(10)
        assert log in (["a"], ["b"])


@in_virtual_time
async def test_the_holder_by_a_clock_that_is_hours_off_still_keeps_the_lease() -> None:
    leases, log = Leases(), []
    async with replicas(leases, log, "a", "b"):
        leases.lease["spec"]["renewTime"] = "1970-01-01T00:00:00.000000Z"
        await asyncio.sleep(5)
        assert log == ["a"]


@in_virtual_time
async def test_what_ends_the_work_of_a_leader_ends_it_and_frees_the_lease() -> None:
    leases = Leases()

    async def lead() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await Election(leases, "system", "a", Refused).run(lead, asyncio.Event())
    assert leases.lease["spec"]["holderIdentity"] == ""
