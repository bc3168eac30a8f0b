import asyncio
import contextlib
import errno
import json
import os
import pathlib
import re
import subprocess
import sys
import time

import pytest
from obstore.exceptions import GenericError

from pipeline.storage import (
    Conflict,
    Corrupted,
    FaultyBucket,
    LocalBucket,
    MemoryBucket,
    MemoryStorage,
    Storage,
    StorageError,
    Transient,
    Unavailable,
    bucket,
    open_storage,
    probe,
    s3,
)

ROUNDS, WRITERS = 16, 8


class Script:
    """Faults by (moment, operation): each an exception to raise or a coroutine function to await, used once."""

    def __init__(self, **script: object):
        self.script = script

    async def _play(self, moment: str, operation: str) -> None:
        step = self.script.pop(f"{moment}_{operation}", None)
        if isinstance(step, Exception):
            raise step
        if step is not None:
            await step()  # type: ignore[operator]

    async def before(self, operation: str, key: str) -> None:
        await self._play("before", operation)

    async def after(self, operation: str, key: str) -> None:
        await self._play("after", operation)


async def test_an_object_comes_back_with_its_metadata_and_its_size(storage):
    written = await storage.create("rollouts/v1/W/0.parquet", b"rows", {"rows": "2", "indices": "7,8"})
    found = await storage.get("rollouts/v1/W/0.parquet")
    assert found.data == b"rows"
    assert {"rows": "2", "indices": "7,8"}.items() <= found.metadata.items()
    assert (found.info.key, found.info.size, found.info.etag) == (written.key, 4, written.etag)
    assert found.info.sha256 == written.sha256 == found.metadata["sha256"]
    head = await storage.head("rollouts/v1/W/0.parquet")
    assert (head.size, head.etag, head.modified) == (4, written.etag, written.modified)


async def test_a_missing_key_is_none_to_every_reader_and_no_error_to_delete(storage):
    assert await storage.get("control/state.json") is None
    assert await storage.head("control/state.json") is None
    assert await storage.list("control") == []
    await storage.delete("control/state.json")


async def test_an_empty_object_is_an_object(storage):
    await storage.create("empty", b"")
    assert (await storage.get("empty")).data == b""


async def test_the_second_create_of_a_key_is_a_conflict_and_changes_nothing(storage):
    await storage.create("run.json", b"first")
    with pytest.raises(Conflict):
        await storage.create("run.json", b"second")
    assert (await storage.get("run.json")).data == b"first"


async def test_exactly_one_of_eight_racing_creators_wins_and_its_data_stay(open_client):
    clients = [open_client() for _ in range(WRITERS)]

    async def race(key):
        winners = await _contend(clients, lambda client, data: client.create(key, data))
        assert winners == [(await clients[0].get(key)).data]

    await asyncio.gather(*(race(f"log/{number}") for number in range(ROUNDS)))


async def test_exactly_one_of_eight_racing_replacers_wins_and_its_data_stay(open_client):
    clients = [open_client() for _ in range(WRITERS)]

    async def race(key):
        etag = (await clients[0].create(key, b"start")).etag
        winners = await _contend(clients, lambda client, data: client.replace(key, data, etag))
        assert winners == [(await clients[0].get(key)).data]

    await asyncio.gather(*(race(f"state/{number}") for number in range(ROUNDS)))


async def _contend(clients, write):
    """The data of those who were told that they won."""

    async def one(client, data):
        try:
            await write(client, data)
        except Conflict:
            return None
        return data

    outcomes = await asyncio.gather(*(one(client, os.urandom(9)) for client in clients))
    return [data for data in outcomes if data is not None]


async def test_replace_of_a_version_that_is_no_longer_there_is_a_conflict(storage):
    first = await storage.create("state", b"1")
    second = await storage.replace("state", b"2", first.etag)
    with pytest.raises(Conflict):
        await storage.replace("state", b"3", first.etag)
    await storage.replace("state", b"4", second.etag)
    await storage.delete("state")
    with pytest.raises(Conflict):
        await storage.replace("state", b"5", second.etag)
    assert await storage.get("state") is None


async def test_put_overwrites_and_the_new_metadata_replace_the_old(storage):
    await storage.put("writers/W.json", b"1", {"beat": "1"})
    await storage.put("writers/W.json", b"22", {"beat": "2"})
    found = await storage.get("writers/W.json")
    assert (found.data, found.metadata["beat"]) == (b"22", "2")


async def test_a_list_holds_what_lies_below_the_folder_and_not_its_namesakes(storage):
    keys = {"weights/t1/a", "weights/t1/b/c", "weights/t10/a", "weights/t1.json"}
    for key in keys:
        await storage.put(key, b"x")
    assert {info.key for info in await storage.list("weights/t1")} == {"weights/t1/a", "weights/t1/b/c"}
    assert {info.key for info in await storage.list("weights/t1/")} == {"weights/t1/a", "weights/t1/b/c"}
    assert {info.key for info in await storage.list("")} == keys
    await storage.delete("weights/t1/a")
    assert {info.key for info in await storage.list("weights")} == keys - {"weights/t1/a"}


@pytest.mark.parametrize("lost", ["create", "replace"])
async def test_a_write_whose_response_was_lost_is_recognised_as_ones_own(open_client, clock, lost):
    faults = Script()
    client = open_client(faults, clock)
    first = await client.create("state", b"1", {"by": "me"})
    faults.script["after_write"] = Transient("connection reset")
    if lost == "create":
        await client.create("log/0", b"mine")
        assert (await client.get("log/0")).data == b"mine"
    else:
        second = await client.replace("state", b"2", first.etag)
        assert (await client.get("state")).info.etag == second.etag


async def test_a_rival_who_wrote_between_two_tries_is_a_conflict(open_client, clock):
    rival = open_client()

    async def rival_writes():
        await rival.create("log/0", b"theirs")
        raise Transient("connection refused")

    client = open_client(Script(before_write=rival_writes), clock)
    with pytest.raises(Conflict):
        await client.create("log/0", b"mine")
    assert (await client.get("log/0")).data == b"theirs"


async def test_a_conflict_with_nobody_is_a_rival_still_writing_and_is_tried_again(clock):
    client = MemoryStorage(clock, Script(before_write=Conflict("409")))
    await client.create("log/0", b"mine")
    assert (await client.get("log/0")).data == b"mine"


async def test_an_outage_of_a_minute_is_waited_out(clock):
    down_until = clock.now() + 60.0

    class Outage(Script):
        async def before(self, operation, key):
            if clock.now() < down_until:
                raise Transient("503")

    client = MemoryStorage(clock, Outage())
    await client.create("log/0", b"mine")
    assert down_until <= clock.now() < down_until + 6.0


@pytest.mark.parametrize("jump", [0.0, -3600.0, 3600.0])
async def test_an_outage_beyond_the_deadline_is_an_error_that_names_key_place_and_cause(clock, jump: float):
    """Even if somebody sets the machine's clock meanwhile."""

    class Outage(Script):
        async def before(self, operation, key):
            clock.skew_s = jump
            raise Transient("503 Slow Down")

    started = clock.monotonic()
    with pytest.raises(Unavailable, match=r"GET memory://log/0 failed for 30 s: 503 Slow Down"):
        await MemoryStorage(clock, Outage(), deadline_s=30.0).get("log/0")
    assert 30.0 <= clock.monotonic() - started < 36.0


@pytest.mark.parametrize(
    "key",
    [
        "/etc/passwd",
        "../x",
        "a/../../x",
        "a//b",
        "a/./b",
        "",
        "a/",
        ".miles/locks/000",
        "a\\b",
        "a b",
        "a\nb",
        "~/x",
        "-rf",
        "a/$(id)",
        "a?b",
        "a#b",
        "a%2e%2e/b",
        "ключ",
        "a/" + "b" * 256,
        "/".join(["abcdefghij"] * 90),
    ],
)
async def test_a_key_that_could_leave_the_root_or_mislead_is_refused_by_every_call(open_client, key, tmp_path):
    storage = open_client()
    for call in [
        storage.get(key),
        storage.head(key),
        storage.create(key, b""),
        storage.replace(key, b"", "e"),
        storage.put(key, b""),
        storage.put_file(key, __file__),
        storage.get_file(key, f"{tmp_path}/out"),
        storage.delete(key),
    ]:
        with pytest.raises(ValueError, match="is no key of a store"):
            await call


async def test_a_large_file_goes_and_comes_in_parts_unchanged(open_client, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.storage.client.PART_BYTES", 1 << 20)
    source, target = tmp_path / "source.safetensors", tmp_path / "target.safetensors"
    source.write_bytes(os.urandom((35 << 20) + 7))
    reads = Counter()
    storage = open_client(reads)
    sent = await storage.put_file("weights/v/model.safetensors", str(source))
    got = await storage.get_file("weights/v/model.safetensors", str(target))
    assert target.read_bytes() == source.read_bytes()
    assert sent.size == got.size == source.stat().st_size
    assert sent.sha256 == got.sha256
    assert reads.count["read_range"] == 36


class Counter:
    def __init__(self):
        self.count: dict[str, int] = {}

    async def before(self, operation, key):
        self.count[operation] = self.count.get(operation, 0) + 1

    async def after(self, operation, key):
        pass


async def test_a_part_that_fails_is_fetched_again_alone(open_client, clock, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.storage.client.PART_BYTES", 100)
    (tmp_path / "source").write_bytes(os.urandom(950))
    storage = open_client(Script(after_read_range=Transient("reset")), clock)
    await storage.put_file("f", str(tmp_path / "source"))
    await storage.get_file("f", str(tmp_path / "target"))
    assert (tmp_path / "target").read_bytes() == (tmp_path / "source").read_bytes()


async def test_a_failed_download_leaves_no_file_behind(open_client, clock, tmp_path):
    storage = open_client(Script(before_read_range=StorageError("access denied")), clock)
    await storage.put("f", b"data")
    with pytest.raises(StorageError):
        await storage.get_file("f", str(tmp_path / "out" / "target"))
    (tmp_path / "out").mkdir()
    with pytest.raises(StorageError):
        await storage.get_file("f", str(tmp_path / "out" / "target"))
    with pytest.raises(StorageError, match="missing does not exist"):
        await storage.get_file("missing", str(tmp_path / "out" / "target"))
    assert list((tmp_path / "out").iterdir()) == []


async def test_a_file_replaced_while_it_is_downloaded_is_not_mixed(open_client, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.storage.client.PART_BYTES", 100)
    monkeypatch.setattr("pipeline.storage.client.PARTS_AT_ONCE", 1)
    other = open_client()
    await other.put("f", b"a" * 300)

    async def replace():
        await other.put("f", b"b" * 300)

    with pytest.raises(Conflict):
        await open_client(Script(after_read_range=replace)).get_file("f", str(tmp_path / "target"))


async def test_damaged_bytes_are_told_with_the_metadata_that_came_with_them(clock, tmp_path):
    storage = MemoryStorage(clock)
    await storage.create("shard", b"rows", {"indices": "7,8"})
    _flip(storage.memory, "shard")
    with pytest.raises(Corrupted, match="shard does not have the sha256") as caught:
        await storage.get("shard")
    assert caught.value.object.metadata["indices"] == "7,8"
    with pytest.raises(Corrupted):
        await storage.get_file("shard", str(tmp_path / "target"))


async def test_an_object_too_large_for_memory_is_not_read_whole_but_into_a_file(storage, tmp_path, monkeypatch):
    monkeypatch.setattr(bucket, "MOST_BYTES", 1000)
    await storage.create("least", b"x" * 1000)
    await storage.create("shard", b"x" * 1001, {"indices": "7,8"})
    assert (await storage.get("least")).info.size == 1000
    with pytest.raises(Corrupted, match="shard has 1,001 bytes, and at most 1,000 are read at once") as caught:
        await storage.get("shard")
    assert (caught.value.object.data, caught.value.object.metadata["indices"]) == (b"", "7,8")
    assert (await storage.get_file("shard", str(tmp_path / "target"))).size == 1001


def _flip(bucket: MemoryBucket, key: str) -> None:
    found = bucket.objects[key]
    bucket.objects[key] = type(found)(found.info, b"R" + found.data[1:], found.metadata)


async def test_bytes_damaged_on_the_way_once_are_read_again(clock, tmp_path):
    class Noise(FaultyBucket):
        reads = 0

        async def read(self, key):
            found = await super().read(key)
            self.reads += 1
            return type(found)(found.info, b"noise", found.metadata) if self.reads == 1 else found

        async def read_range(self, key, start, stop, etag):
            self.reads += 1
            return b"nois" if self.reads == 3 else await super().read_range(key, start, stop, etag)

    storage = Storage(Noise(MemoryBucket(clock), Counter()), clock)
    await storage.create("shard", b"rows")
    assert (await storage.get("shard")).data == b"rows"
    await storage.get_file("shard", str(tmp_path / "target"))
    assert (tmp_path / "target").read_bytes() == b"rows"


async def test_the_probe_passes_every_real_store_quickly_and_leaves_nothing(storage):
    async with asyncio.timeout(10.0):
        await probe(storage)
    assert await storage.list("") == []


class Careless(MemoryBucket):
    """A store that looks right to one writer at a time: its condition and its write are two steps."""

    async def write(self, key, data, metadata, condition):
        await asyncio.sleep(0)
        present = self.objects.get(key)
        if condition is not None and condition != (present.info.etag if present else "*"):
            raise Conflict("412")
        await asyncio.sleep(0)
        return await super().write(key, data, metadata, None)


class CarelessReplace(Careless):
    async def write(self, key, data, metadata, condition):
        if condition in (None, "*"):
            return await MemoryBucket.write(self, key, data, metadata, condition)
        return await super().write(key, data, metadata, condition)


class Forbidding(MemoryBucket):
    async def read(self, key):
        found = await super().read(key)
        if found is None:
            raise StorageError(f"{key}: access denied (AccessDenied)")
        return found


class Forgetful(MemoryBucket):
    async def write(self, key, data, metadata, condition):
        return await super().write(key, data, {}, condition)


class Slow(MemoryBucket):
    """A store whose listing lags behind."""

    async def list(self, folder):
        return []


class Stale(MemoryBucket):
    """A store whose reads lag behind."""

    async def read(self, key):
        return None


@pytest.mark.parametrize(
    ("bucket", "remedy"),
    [
        (Careless, r"of 4 racing writers win \(If-None-Match\): use a store with atomic"),
        (CarelessReplace, r"of 4 racing writers win \(If-Match\): use a store with atomic"),
        (Forbidding, "answers 403 for a missing key: allow ListBucket"),
        (Forgetful, "does not keep the metadata"),
        (Slow, "does not list an object just written"),
        (Stale, "does not return what was just written"),
    ],
)
async def test_the_probe_refuses_a_store_that_breaks_a_promise_in_one_line_with_the_remedy(clock, bucket, remedy):
    storage = MemoryStorage(clock, bucket=bucket(clock))
    with pytest.raises(StorageError, match=remedy) as caught:
        await probe(storage)
    assert "\n" not in str(caught.value)


async def test_the_probe_of_a_store_that_does_not_answer_gives_up_after_half_a_minute(clock):
    class Outage(Script):
        async def before(self, operation, key):
            raise Transient("Connection refused")

    started = clock.now()
    with pytest.raises(Unavailable, match="Connection refused"):
        await probe(MemoryStorage(clock, Outage()))
    assert clock.now() - started < 40.0


async def test_actors_of_a_simulation_share_objects_but_not_faults(clock):
    trainer = MemoryStorage(clock)
    worker = MemoryStorage(clock, Script(before_read=StorageError("partitioned")), bucket=trainer.memory)
    await worker.put("writers/W.json", b"alive")
    assert (await trainer.get("writers/W.json")).data == b"alive"
    with pytest.raises(StorageError, match="partitioned"):
        await worker.get("writers/W.json")


@pytest.mark.parametrize(
    "uri",
    ["", "runs/here", "file://runs/here", "gs://bucket/x", "s3://", "s3://b/../c", "s3:///x", "memory://", "file:///"],
)
def test_a_store_uri_that_is_none_is_refused_by_name(uri):
    remedies = r"neither s3://bucket/prefix nor file:///folder|is no key of a store|names no bucket: write s3://bucket/"
    with pytest.raises(ValueError, match=rf"^store {re.escape(repr(uri))}:? ?(is )?.*({remedies})"):
        open_storage(uri)


async def test_a_first_fault_that_was_slow_is_told_at_once(clock, caplog):
    class Silent(Script):
        async def before(self, operation, key):
            if not caplog.records:
                clock.time += 30.0
                raise Transient("no answer within 30s")

    await MemoryStorage(clock, Silent()).get("log/0")
    assert [record.getMessage() for record in caplog.records] == ["no answer within 30s; trying again for 90 s"]


async def test_memory_uris_name_one_store_per_process():
    await open_storage("memory://shared-by-name").put("k", b"x")
    assert await open_storage("memory://shared-by-name").get("k")
    assert await open_storage("memory://another").get("k") is None


# The local folder.


async def test_objects_of_a_local_store_are_ordinary_files_and_nothing_else_is_in_sight(tmp_path):
    storage = open_storage(f"file://{tmp_path}/my%20runs")
    await storage.create("rollouts/v1/W/0.parquet", b"rows")
    await storage.put("rollouts/v1/W/0.parquet", b"rows2")
    visible = [path for path in pathlib.Path(tmp_path, "my runs").glob("[!.]*/**/*") if path.is_file()]
    assert [(path.name, path.read_bytes()) for path in visible] == [("0.parquet", b"rows2")]
    assert (await storage.get("rollouts/v1/W/0.parquet")).metadata["nonce"]


async def test_a_file_that_somebody_put_into_a_local_store_is_an_object_without_metadata(tmp_path):
    storage = open_storage(str(tmp_path))
    (tmp_path / "notes.txt").write_text("by hand")
    found = await storage.get("notes.txt")
    assert (found.data, found.metadata) == (b"by hand", {})


@pytest.mark.parametrize("damage", [b"Rows", b"row", b""])
async def test_damage_in_place_to_a_local_file_is_found(tmp_path, damage):
    storage = open_storage(str(tmp_path))
    await storage.create("shard", b"rows")
    with open(tmp_path / "shard", "r+b") as file:
        file.write(damage)
        file.truncate()
    with pytest.raises(Corrupted):
        await storage.get("shard")


async def test_symbolic_links_lead_nowhere_in_a_local_store(tmp_path):
    outside, root = tmp_path / "outside", tmp_path / "root"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    storage = open_storage(str(root))
    (root / "folder").symlink_to(outside)
    (root / "file").symlink_to(outside / "secret")
    for call in [
        storage.get("folder/secret"),
        storage.get("file"),
        storage.put("folder/new", b"x"),
        storage.delete("folder/secret"),
        storage.list("folder"),
    ]:
        with pytest.raises(StorageError, match="symbolic link"):
            await call
    assert await storage.list("") == []
    assert [path.name for path in outside.iterdir()] == ["secret"]


@pytest.mark.parametrize("fault", [errno.EIO, errno.EACCES, errno.ESTALE])
async def test_a_folder_that_cannot_be_read_is_no_empty_one(tmp_path, monkeypatch, clock, fault):
    storage = Storage(LocalBucket(str(tmp_path)), clock)
    await storage.create("checkpoints/a/MANIFEST.json", b"{}")
    scandir = os.scandir

    def failing(path):
        if str(path).endswith("/a"):
            raise OSError(fault, os.strerror(fault), path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", failing)
    with pytest.raises(StorageError, match=os.strerror(fault)):
        await storage.list("checkpoints")
    assert await storage.list("none") == []


async def test_a_local_store_leaves_no_temporary_file_or_stale_metadata(tmp_path):
    storage = open_storage(str(tmp_path))
    info = await storage.create("state", b"0")
    for number in range(5):
        info = await storage.replace("state", str(number).encode(), info.etag)
        with pytest.raises(Conflict):
            await storage.create("state", b"x")
    hidden = [path for path in (tmp_path / ".miles").rglob("*") if path.is_file() and path.parent.name != "locks"]
    assert [path.parent.name for path in hidden] == ["state"]
    await storage.delete("state")
    assert not hidden[0].exists()


async def test_what_a_killed_writer_left_in_a_local_store_is_swept_a_day_later(tmp_path):
    LocalBucket(str(tmp_path))
    old, young = (tmp_path / ".miles/temporary" / name for name in ("old", "young"))
    old.write_bytes(b"x")
    young.write_bytes(b"x")
    os.utime(old, (0, 0))
    LocalBucket(str(tmp_path))
    assert (old.exists(), young.exists()) == (False, True)


def test_processes_racing_on_a_local_folder_have_one_winner_each_time(tmp_path):
    code = (
        "import asyncio, json, sys\n"
        "from pipeline.storage import Conflict, open_storage\n"
        "async def main(root, me):\n"
        "    storage, won, added = open_storage(root), [], 0\n"
        "    for number in range(40):\n"
        "        try:\n"
        "            await storage.create(f'log/{number}', me.encode())\n"
        "            won.append(number)\n"
        "        except Conflict: pass\n"
        "    while added < 20:\n"
        "        state = await storage.get('count')\n"
        "        try:\n"
        "            await storage.replace('count', b'%d' % (int(state.data) + 1), state.info.etag)\n"
        "            added += 1\n"
        "        except Conflict: pass\n"
        "    print(json.dumps(won))\n"
        "asyncio.run(main(*sys.argv[1:]))\n"
    )
    asyncio.run(open_storage(str(tmp_path)).create("count", b"0"))
    command = [sys.executable, "-c", code, str(tmp_path)]
    processes = [subprocess.Popen([*command, str(n)], stdout=subprocess.PIPE) for n in range(3)]
    won = [number for process in processes for number in json.loads(process.communicate(timeout=50)[0])]
    assert sorted(won) == list(range(40))
    assert (tmp_path / "count").read_text() == "60"


async def test_a_writer_killed_at_any_moment_leaves_only_whole_objects_in_a_local_store(tmp_path):
    code = (
        "import asyncio, os, sys\n"
        "from pipeline.storage import open_storage\n"
        "async def main():\n"
        "    storage = open_storage(sys.argv[1])\n"
        "    for number in range(10_000):\n"
        "        await storage.create(f'log/{number}', os.urandom(3_000_000))\n"
        "        print(number, flush=True)\n"
        "asyncio.run(main())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"0\n"
    time.sleep(0.1)
    process.kill()
    acknowledged = process.communicate()[0].split()
    storage = open_storage(str(tmp_path))
    infos = await storage.list("log")
    assert len(infos) >= 1 + len(acknowledged)
    for info in infos:
        found = await storage.get(info.key)
        assert (len(found.data), "sha256" in found.metadata) == (3_000_000, True)


async def test_a_local_folder_that_cannot_be_written_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written to"):
        open_storage(f"{tmp_path}/file/store")


# S3: what a server, or the way to it, does wrong.


class Answers:
    """An endpoint that gives one scripted answer after the other, each on a connection of its own."""

    def __init__(self, *answers: bytes | None):
        self.answers, self.requests = list(answers), 0

    async def __aenter__(self):
        self.server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.endpoint = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self.server.close()

    async def _answer(self, reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head.lower())
            await reader.readexactly(int(length[1]) if length else 0)
        self.requests += 1
        answer = self.answers.pop(0)
        if answer is None:
            writer.transport.abort()
            return
        writer.write(answer)
        await writer.drain()
        writer.close()


def _http(status: str, body: bytes = b"", length: int | None = None) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body) if length is None else length}\r\nConnection: close\r\n"
    return f'{head}ETag: "e"\r\nLast-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n\r\n'.encode() + body


def _refusal(status: str, code: str, message: str) -> bytes:
    return _http(status, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode())


@pytest.fixture
def credentials(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")


@pytest.mark.usefixtures("credentials")
async def test_server_errors_throttling_resets_and_torn_answers_are_tried_again(clock):
    faults = [_http("503 Slow Down"), _http("500 Oops"), _http("429 Too Many"), None, _http("200 OK", b"ro", length=4)]
    async with Answers(*faults, _http("200 OK", b"rows")) as server:
        storage = open_storage("s3://bucket/run", server.endpoint, clock=clock)
        assert (await storage.get("shard")).data == b"rows"
    assert server.requests == 6


@pytest.mark.usefixtures("credentials")
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (_refusal("403 Forbidden", "SignatureDoesNotMatch", "Check your key"), "access denied .*check the credentials"),
        (_refusal("403 Forbidden", "AccessDenied", "Access Denied"), r"access denied \(AccessDenied: Access Denied\)"),
        (
            _refusal("403 Forbidden", "RequestTimeTooSkewed", "Too large"),
            "TimeTooSkewed.*set the clock of this machine",
        ),
        (_refusal("400 Bad Request", "InvalidBucketName", "The bucket name is bad"), "InvalidBucketName: The bucket"),
        (_refusal("404 Not Found", "NoSuchBucket", "The specified bucket"), "bucket bucket of .* does not exist"),
        (_http("301 Moved Permanently"), "incorrectly configured region"),
    ],
)
@pytest.mark.parametrize("call", [lambda storage: storage.get("shard"), lambda storage: storage.list("")])
async def test_a_refusal_by_the_server_is_one_line_at_once(clock, answer, message, call):
    async with Answers(answer) as server:
        storage = open_storage("s3://bucket/run", server.endpoint, clock=clock)
        with pytest.raises(StorageError, match=message) as caught:
            await call(storage)
    assert "\n" not in str(caught.value)
    assert server.requests == 1


@pytest.mark.usefixtures("credentials")
async def test_an_endpoint_without_tls_is_told_from_a_silent_one(clock):
    async def answer(reader, writer):
        await reader.read(1)
        writer.write(_http("400 Bad Request"))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        storage = open_storage("s3://bucket/run", f"https://127.0.0.1:{port}", clock=clock)
        with pytest.raises(StorageError, match="does not speak TLS: write http:// instead of https://"):
            await storage.list("")


@pytest.mark.parametrize(
    "endpoint", ["localhost:8333", "127.0.0.1:8333", "seaweedfs", "ftp://host", "http://", "http://a b", "http://a:b"]
)
def test_an_endpoint_that_is_no_url_is_refused_with_where_it_comes_from(monkeypatch, endpoint):
    with pytest.raises(ValueError, match=f"endpoint {endpoint}, as configured, is no URL: write one, such as http://"):
        open_storage("s3://bucket/run", endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(ValueError, match=f"endpoint {endpoint}, as AWS_ENDPOINT_URL says, is no URL"):
        open_storage("s3://bucket/run")


def _listing(*keys: str) -> bytes:
    entry = "<LastModified>2026-01-01T00:00:00Z</LastModified><ETag>e</ETag><Size>0</Size>"
    found = "".join(f"<Contents><Key>{key}</Key>{entry}</Contents>" for key in keys)
    content = f"<ListBucketResult><Name>bucket</Name><IsTruncated>false</IsTruncated>{found}</ListBucketResult>"
    return _http("200 OK", content.encode())


@pytest.mark.usefixtures("credentials")
async def test_a_folder_that_somebody_made_in_a_console_is_no_object(clock):
    async with Answers(_listing("run/", "run/shard")) as server:
        storage = open_storage("s3://bucket/run", server.endpoint, clock=clock)
        assert [info.key for info in await storage.list("")] == ["shard"]


@pytest.mark.parametrize("key", ["run/writers//x.json", "run/writers/../x.json"])
@pytest.mark.usefixtures("credentials")
async def test_an_object_that_keeps_others_from_being_listed_is_named_at_once(clock, key):
    async with Answers(_listing(key)) as server:
        storage = open_storage("s3://bucket/run", server.endpoint, clock=clock)
        with pytest.raises(StorageError, match=f"{re.escape(key)}.*: delete that object"):
            await storage.list("writers")
    assert server.requests == 1


@pytest.mark.usefixtures("credentials")
async def test_an_upload_that_the_server_does_not_know_any_more_is_begun_again(clock, tmp_path, monkeypatch):
    """The answer to its completion was lost, and the server has forgotten it when it is asked again."""
    monkeypatch.setattr("pipeline.storage.s3.PART_BYTES", 100)
    monkeypatch.setattr("pipeline.storage.s3.PARTS_AT_ONCE", 1)
    (tmp_path / "source").write_bytes(bytes(150))
    begun = _http("200 OK", b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>")
    done = _http("200 OK", b"<CompleteMultipartUploadResult><ETag>e</ETag></CompleteMultipartUploadResult>")
    gone, aborted = _refusal("404 Not Found", "NoSuchUpload", "It does not exist"), _http("204 No Content")
    parts = [_http("200 OK")] * 2
    async with Answers(begun, *parts, gone, aborted, begun, *parts, done, _http("200 OK")) as server:
        storage = open_storage("s3://bucket/run", server.endpoint, clock=clock)
        assert (await storage.put_file("weights", str(tmp_path / "source"))).etag == '"e"'
    assert server.answers == []


@pytest.mark.usefixtures("credentials")
async def test_an_endpoint_nobody_listens_at_is_told_when_the_deadline_is_over(clock):
    storage = open_storage("s3://bucket/run", "http://127.0.0.1:1", clock=clock)
    with pytest.raises(Unavailable, match=r"GET s3://bucket/run/shard failed for 120 s: .*Connection refused"):
        await storage.get("shard")


@pytest.mark.slow
@pytest.mark.usefixtures("credentials")
def test_processes_that_end_on_an_s3_answer_exit_with_their_own_code():
    code = (
        "import asyncio, sys\n"
        "from pipeline.storage import Storage, Unavailable\n"
        "from pipeline.storage.s3 import S3Bucket\n"
        "async def main():\n"
        "    await Storage(S3Bucket('bucket', 'run', 'http://127.0.0.1:1', None), deadline_s=0.2).get('key')\n"
        "try: asyncio.run(main())\n"
        "except Unavailable: sys.exit(7)\n"
    )
    # Some at once, so that threads have to wait for a core: one in six was aborted.
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(16)]
    assert [process.wait(timeout=50) for process in processes] == [7] * 16


async def test_where_nobody_gave_credentials_the_error_says_what_to_set():
    async def asked():
        raise GenericError("Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 1s")

    bucket = s3.S3Bucket("bucket", "run", "http://127.0.0.1:1", None)
    with pytest.raises(s3.Transient, match="no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give"):
        await bucket._call("key", asked())
