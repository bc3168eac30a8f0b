"""The operator on a real API server that fails (tests.servermodel): whatever happens, the job comes to its end, and
nothing is lost, doubled or taken back. `make operator-chaos` plays fifty seeds."""

import asyncio
import collections
import contextlib
import os
import pathlib
import time
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from tests.clustermodel import NAME
from tests.controlplane import ControlPlane
from tests.kubelet import Kubelet
from tests.servermodel import Mirror, Server, fail_once, in_a_hurry, play

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(3600)]
FIRST = int(os.environ.get("CHAOS_FIRST_SEED", "0"))
SEEDS = int(os.environ.get("CHAOS_SERVER_SEEDS", "3"))
AT_ONCE = 6
World = Callable[[int], contextlib.AbstractAsyncContextManager[Server]]
MOMENTS = 28
"""More than there are before and after the writes between a failure and the next attempt."""


@pytest.fixture(scope="module")
def mirror(control_plane: ControlPlane, operator_account: pathlib.Path, nodes: Kubelet) -> Iterator[Mirror]:
    with in_a_hurry():
        yield Mirror(control_plane.api)


@pytest.fixture
def world(control_plane: ControlPlane, mirror: Mirror, operator_account: pathlib.Path) -> World:
    """Opens a world by its seed; of many, a few at once."""
    limit = asyncio.Semaphore(AT_ONCE)

    @contextlib.asynccontextmanager
    async def one(seed: int) -> AsyncIterator[Server]:
        async with limit:
            namespace = await asyncio.to_thread(control_plane.new_namespace)
            try:
                yield Server(seed, mirror, namespace, operator_account)
            finally:
                control_plane.api.delete("RLJob", NAME, namespace)
                control_plane.api.delete("Namespace", namespace)

    return one


async def test_whatever_happens_the_job_comes_to_its_end(world: World) -> None:
    ends, began = collections.Counter[str](), time.monotonic()

    async def one(seed: int) -> Server:
        async with world(seed) as found:
            try:
                await play(found)
            except AssertionError as error:
                error.add_note(f"CHAOS_FIRST_SEED={seed} CHAOS_SERVER_SEEDS=1")
                raise
            ends[found.job["status"]["phase"] if found.job else "deleted"] += 1
            return found

    played = await asyncio.gather(*(one(seed) for seed in range(FIRST, FIRST + SEEDS)))
    kills, faults = sum(each.kills for each in played), sum(each.faults for each in played)
    took = time.monotonic() - began
    print(f"\n{SEEDS} seeds in {took:.0f} s: {kills} kills, {faults} failed requests; {dict(ends)}")
    assert kills and faults


async def test_killed_at_any_moment_around_a_failure_it_counts_the_restart_once_with_its_cause(world: World) -> None:
    async def one(fatal: int) -> bool:
        async with world(0) as found:
            found.errors = found.deaths = 0.0
            return await fail_once(found, fatal)

    died = await asyncio.gather(*(one(fatal) for fatal in range(MOMENTS)))
    print(f"\nkilled at {sum(died)} moments")
    assert died[:4] == [True] * 4
    assert not died[-1], "there are more moments than were tried"
