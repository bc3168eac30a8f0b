"""The real client, through the proxy, against the real server: each fault alone, then without end."""

import asyncio
import os
import pathlib
import secrets
import time

import pytest

from pipeline.storage import Corrupted, Storage, StorageError, Unavailable, probe
from pipeline.storage.s3 import S3Bucket
from tests.faultproxy import FAULTS, FaultProxy, Request, by_seed, first

pytestmark = pytest.mark.slow

READ, WRITTEN = b"rows" * 100, b"plan" * 100
METHODS = {"create": "PUT", "replace": "PUT", "put": "PUT", "get": "GET", "head": "HEAD", "list": "GET"}
METHODS |= {"delete": "DELETE", "put_file": "PUT", "get_file": "GET"}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.storage.s3.REQUEST_LIMIT", "2s")


async def _check(operation: str, storage: Storage, proxy: FaultProxy, faults, folder: pathlib.Path) -> None:
    """Do it amid `faults`, then look without them whether what should have happened has."""
    source, target = folder / "source", folder / f"target-{secrets.token_hex(4)}"
    source.write_bytes(WRITTEN)
    first_version = await storage.put("old", READ)
    proxy.choose = faults
    answers = {
        "create": lambda: storage.create("new", WRITTEN),
        "replace": lambda: storage.replace("old", WRITTEN, first_version.etag),
        "put": lambda: storage.put("new", WRITTEN),
        "get": lambda: storage.get("old"),
        "head": lambda: storage.head("old"),
        "list": lambda: storage.list(""),
        "delete": lambda: storage.delete("old"),
        "put_file": lambda: storage.put_file("new", str(source)),
        "get_file": lambda: storage.get_file("old", str(target)),
    }
    answer = await answers[operation]()
    proxy.choose = lambda request: None
    stored = {info.key: (await storage.get(info.key)).data for info in await storage.list("")}
    if operation in ("create", "put", "put_file"):
        assert stored == {"old": READ, "new": WRITTEN}
        assert answer.etag == (await storage.head("new")).etag
    elif operation == "replace":
        assert stored == {"old": WRITTEN}
        assert answer.etag == (await storage.head("old")).etag
    elif operation == "delete":
        assert stored == {}
    elif operation == "list":
        assert [info.key for info in answer] == ["old"]
    else:
        assert {"get": lambda: answer.data == READ, "get_file": lambda: target.read_bytes() == READ}.get(
            operation, lambda: answer.size == len(READ)
        )()


@pytest.mark.parametrize("kind", [kind for kind in FAULTS if kind != "stale list"])
async def test_every_operation_ends_right_although_one_request_meets(s3_server, tmp_path, kind):
    async def one(operation: str) -> int:
        async with FaultProxy(s3_server.endpoint) as proxy:
            storage = Storage(S3Bucket("miles", f"faults/{secrets.token_hex(8)}", proxy.endpoint, None), deadline_s=40)
            await _check(operation, storage, proxy, first(1, kind, METHODS[operation]), tmp_path)
            return proxy.faults[kind]

    assert sum(await asyncio.gather(*map(one, METHODS))) >= 2


@pytest.mark.parametrize(
    ("kind", "operation", "reason"),
    [
        ("500", "get", "InternalError: refused"),
        ("503", "create", "SlowDown: refused"),
        ("429", "list", "TooManyRequests: refused"),
        ("409", "replace", "a rival is still writing"),
        ("reset", "head", ""),
        ("stall", "get", "no answer within 2s"),
        ("torn request", "put", ""),
        ("lost response", "create", ""),
        ("torn body", "get_file", ""),
    ],
)
async def test_a_fault_that_does_not_end_is_one_clear_error_soon_after_the_deadline(
    s3_server, tmp_path, kind, operation, reason
):
    async with FaultProxy(s3_server.endpoint) as proxy:
        storage = Storage(S3Bucket("miles", f"faults/{secrets.token_hex(8)}", proxy.endpoint, None), deadline_s=1)
        started = time.monotonic()
        method = METHODS[operation]
        with pytest.raises(Unavailable, match=rf"(?:{method}|LIST) .*failed for 1 s: .*{reason}") as caught:
            await _check(operation, storage, proxy, by_seed(0, 1.0, [kind]), tmp_path)
        assert time.monotonic() - started < 20
        assert "\n" not in str(caught.value)


async def test_a_write_that_broke_off_half_way_leaves_nothing(s3_server):
    async with FaultProxy(s3_server.endpoint) as proxy:
        storage = Storage(S3Bucket("miles", f"faults/{secrets.token_hex(8)}", proxy.endpoint, None), deadline_s=0)
        proxy.choose = first(1, "torn request")
        with pytest.raises(Unavailable):
            await storage.create("shard", os.urandom(1 << 20))
        assert await storage.get("shard") is None


async def test_damage_that_stays_is_told_by_every_reader(s3_server, tmp_path):
    async with FaultProxy(s3_server.endpoint) as proxy:
        storage = Storage(S3Bucket("miles", f"faults/{secrets.token_hex(8)}", proxy.endpoint, None))
        await storage.create("shard", READ, {"indices": "7,8"})
        proxy.choose = by_seed(0, 1.0, ["bit flip"])
        with pytest.raises(Corrupted, match="shard does not have the sha256") as caught:
            await storage.get("shard")
        assert caught.value.object.metadata["indices"] == "7,8"
        with pytest.raises(Corrupted):
            await storage.get_file("shard", str(tmp_path / "target"))
        assert list(tmp_path.iterdir()) == []


async def test_the_probe_passes_through_a_bad_network_and_refuses_stale_lists(s3_server):
    async with FaultProxy(s3_server.endpoint) as proxy:
        storage = Storage(S3Bucket("miles", f"faults/{secrets.token_hex(8)}", proxy.endpoint, None))
        proxy.choose = by_seed(0, 0.1, FAULTS.keys() - {"stale list", "bit flip", "stall"})
        await probe(storage)
        assert sum(proxy.faults.values()) > 5
        proxy.choose = by_seed(0, 1.0, ["stale list"])
        with pytest.raises(StorageError, match="does not list an object just written"):
            await probe(storage)


def test_one_seed_gives_one_order_of_faults_and_all_kinds_occur():
    put = Request(b"PUT /b/k HTTP/1.1\r\nIf-None-Match: *\r\n\r\n", b"body", True)
    requests = [
        put,
        *(Request(b"GET " + target + b" HTTP/1.1\r\n\r\n", b"", True) for target in (b"/b", b"/b?list-type=2")),
    ]

    def faults(seed: int) -> list[str | None]:
        choose = by_seed(seed, 0.5)
        return [choose(request) for request in requests * 100]

    assert faults(1) == faults(1) != faults(2)
    assert set(faults(1)) == {None, *FAULTS}
