"""The store's figures as one table: `make bench-store`. Beside each stands what it should be.

Bytes a token, and the codec against pyarrow's own work on the same columns with the same settings, in processor time;
the planner at 500 writers and 10,000 pending groups; the time from the start of a put to the bytes in a reader's hands,
against a bare put and get of the same bytes, in a folder and on a real S3 server, and what polling less often costs in
time and saves in requests. Writer and reader are processes of their own, as a worker and the trainer are.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import io
import logging
import multiprocessing
import multiprocessing.connection
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import codec, parquet
from pipeline.coordinator import Coordinator
from pipeline.experience import SCHEMA
from pipeline.leases import Delivered, Lease
from pipeline.messages import Heartbeat, shard_key
from pipeline.plan.requests import PER_MILLION
from pipeline.roster import Known
from pipeline.storage import MemoryStorage, Storage, open_storage
from pipeline.trainer_log import GroupRef
from pipeline.versions import Version
from tests import s3server
from tests.conftest import SkippingClock
from tests.exploration import Size, configure
from tests.test_experience import english

WRITERS, PENDING, BATCH = 500, 10_000, 128
INTERVALS = ((0.002, 100), (0.1, 40), (0.5, 20), (2.0, 8))
"""Seconds between two looks, and rounds. The first is as tight as makes sense: a look itself takes as long."""
LONGEST_S = 60.0


def row(name: str, value: str, wanted: str = "") -> None:
    print(f"{name:54}{value:>22}  {wanted}", flush=True)


def best(call: Callable[[], Any], rounds: int = 5) -> float:
    """Seconds of the processor, the fewest of a few rounds: a busy machine only ever adds."""
    return compare(call, rounds=rounds)[0]


def compare(*calls: Callable[[], Any], rounds: int = 10) -> list[float]:
    """`best` of each, in turns, so that a machine that is busy for a while is so for all."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, taken in zip(calls, times, strict=True):
            started = time.process_time()
            call()
            taken.append(time.process_time() - started)
    return [min(taken) for taken in times]


def shards() -> None:
    for number, wanted in ((8, "6.2"), (125, "5.6")):
        groups = english(groups=number)
        data = codec.encode(groups)
        tokens = sum(len(sample.completion_ids) for group in groups for sample in group.rollouts)
        row(f"bytes a token, text and all, {8 * number} rows", f"{len(data) / tokens:.2f}", f"at most {wanted}")
    columns = {field.name: codec.decode(data)[field.name].to_pylist() for field in SCHEMA}

    settings: dict[str, Any] = {
        "use_dictionary": codec.DICTIONARY,
        "column_encoding": codec.ENCODING,
        "row_group_size": codec.ROWS_PER_ROW_GROUP,
        "compression": "zstd",
        "compression_level": 3,
    }

    def write(checksums: bool) -> None:
        table = pa.table([pa.array(columns[field.name], field.type) for field in SCHEMA], schema=SCHEMA)
        pq.write_table(table, io.BytesIO(), write_page_checksum=checksums, **settings)

    def parse(checksums: bool) -> None:
        source = pa.BufferReader(data)
        pq.read_table(source, use_threads=False, page_checksum_verification=checksums).combine_chunks()

    encoded, written, unsealed = compare(lambda: codec.encode(groups), lambda: write(True), lambda: write(False))
    read, parsed, unchecked = compare(lambda: codec.read(data), lambda: parse(True), lambda: parse(False))
    bounds = best(lambda: parquet.reckon(data, SCHEMA.names, codec.MOST_ROWS, codec.MOST_BYTES), rounds=10)
    decoded = best(lambda: codec.decode(data))
    row("encode, of pyarrow's speed", f"{written / encoded:.2f}", "at least 0.95")
    row("decode without checks, of pyarrow's speed", f"{parsed / (read - bounds):.2f}", "at least 0.95")
    row("decode and the check of what pages claim", f"{parsed / read:.2f}")
    row("decode and every check, of pyarrow's speed", f"{parsed / decoded:.2f}")
    sha256 = 1e3 * best(lambda: hashlib.sha256(data))
    sums = f"{1e3 * (written - unsealed):.1f}, {1e3 * (parsed - unchecked):.1f} ms"
    row(f"checksums of {len(data) / 1e6:.1f} MB: pages written, pages read", sums)
    row("    sha256", f"{sha256:.1f} ms")
    row("encode, decode, million tokens/s", f"{tokens / encoded / 1e6:.1f}, {tokens / decoded / 1e6:.1f}")


async def planner() -> None:
    """One step's work of the trainer beside training, but for the store's answers."""
    clock = SkippingClock()
    size = Size(steps=10_000, prompts=PENDING // 2 + BATCH, staleness=1)
    trainer = Coordinator(MemoryStorage(clock), configure(size), clock, random.Random(0))
    await trainer.take_over()
    await trainer.publish(Version(1, 0))
    writers = [f"W{number:03d}" for number in range(WRITERS)]
    for ulid in writers:
        trainer.roster.writers[ulid] = Known(ulid, ulid, heartbeat=Heartbeat(ulid, ulid))
    for index in range(PENDING):
        ulid = writers[index % WRITERS]
        if index % 2:
            trainer.ledger.lease(index, Lease(ulid, 0, 0.0))
        else:
            reference = GroupRef(index, shard_key(ulid, index // 64), "0" * 64, 0, 8)
            trainer.ledger.delivered[index] = Delivered(reference, ulid, index // 64, 0, 0, 8, True)
    capacity = trainer.ledger.capacity
    trainer.ledger.capacity = lambda most: min(BATCH, capacity(most))  # type: ignore[method-assign]
    row("planner: choose", f"{1e3 * best(lambda: trainer.dispatcher.choose(1)):.1f} ms")
    granted = best(lambda: trainer.dispatcher.grant(Version(1, 0)), rounds=1)
    row(f"planner: grant {BATCH} of {PENDING:,} to {WRITERS} writers", f"{1e3 * granted:.1f} ms")
    told = best(lambda: trainer._control().encode())
    row("planner: control/state.json", f"{1e3 * told:.1f} ms")
    row("planner: a checkpoint's state", f"{1e3 * best(trainer.state):.1f} ms")
    total = best(lambda: trainer.dispatcher.choose(1)) + granted + told
    row("planner: choose, grant and tell, a step", f"{1e3 * total:.1f} ms", "at most 50 ms")


@dataclasses.dataclass
class Reader:
    """A process that asks for one key again and again, every so many seconds, until it has the bytes."""

    pipe: multiprocessing.connection.Connection
    looks: int = 0
    looked_s: float = 0.0

    def expect(self, key: str, interval_s: float) -> None:
        """Returns when it has asked in vain for the first time."""
        self.pipe.send((key, interval_s))
        assert self.pipe.poll(LONGEST_S)
        assert self.pipe.recv() == "asked"

    def seen(self) -> float:
        """When it had the bytes, by the machine's monotonic clock."""
        assert self.pipe.poll(LONGEST_S), "the reader has not found the object"
        looks, looked_s, when = self.pipe.recv()
        self.looks, self.looked_s = self.looks + looks, self.looked_s + looked_s
        return float(when)


def look(pipe: multiprocessing.connection.Connection, uri: str, endpoint: str | None) -> None:
    """The reader's main function."""

    async def serve() -> None:
        storage = open_storage(uri, endpoint)
        while told := pipe.recv():
            key, interval_s = told
            started, looks = time.monotonic(), 1
            assert await storage.get(key) is None
            pipe.send("asked")
            while await storage.get(key) is None:
                looks += 1
                await asyncio.sleep(interval_s)
            pipe.send((looks, time.monotonic() - started, time.monotonic()))

    asyncio.run(serve())


@contextlib.contextmanager
def reader(uri: str, endpoint: str | None) -> Iterator[Reader]:
    context = multiprocessing.get_context("spawn")  # obstore has threads
    ours, theirs = context.Pipe()
    process = context.Process(target=look, args=(theirs, uri, endpoint))
    process.start()
    try:
        yield Reader(ours)
        ours.send(None)
        process.join(LONGEST_S)
    finally:
        process.kill()


async def visible(name: str, uri: str, endpoint: str | None = None) -> None:
    """The reader knows the next key and asks for it, as the trainer does while it waits for groups. Turn by turn with
    that goes the bare put and get, while the reader rests."""
    data, dice, storage = codec.encode(english(groups=8)), random.Random(0), open_storage(uri, endpoint)
    print(f"{len(data) / 1e3:.0f} KB in a {name}; p50, p99 in ms")
    print(
        f"{'polling every':>15}{'put and get':>18}{'put → visible':>18}{'p99 of p99':>12}{'requests/h':>12}{'$/h':>9}"
    )
    for interval_s, rounds in INTERVALS:
        waits, bare = [], []
        with reader(uri, endpoint) as other:
            for number in range(rounds):
                bare.append(await put_and_get(storage, shard_key(f"B{1e3 * interval_s:g}", number), data))
                key = shard_key(f"A{1e3 * interval_s:g}", number)
                other.expect(key, interval_s)
                await asyncio.sleep(dice.uniform(0, interval_s))
                started = time.monotonic()
                await storage.create(key, data)
                waits.append(other.seen() - started)
        an_hour = 3600 * other.looks / other.looked_s
        ratio = np.percentile(waits, 99) / np.percentile(bare, 99)
        line = f"{interval_s:13g} s{milliseconds(bare):>18}{milliseconds(waits):>18}{ratio:12.2f}"
        line += f"{an_hour:12,.0f}{an_hour * PER_MILLION['GET'] / 1e6:9.4f}"
        print(line + ("  at most 1.5" if interval_s == INTERVALS[0][0] else ""), flush=True)


async def put_and_get(storage: Storage, key: str, data: bytes) -> float:
    """Seconds."""
    started = time.monotonic()
    await storage.create(key, data)
    await storage.get(key)
    return time.monotonic() - started


def milliseconds(seconds: list[float]) -> str:
    p50, p99 = np.percentile(seconds, [50, 99]) * 1e3
    return f"{p50:.1f}, {p99:.1f}"


def main() -> None:
    logging.disable(logging.CRITICAL)
    shards()
    asyncio.run(planner())
    with tempfile.TemporaryDirectory(prefix="bench-store-") as folder:
        asyncio.run(visible("folder", folder))
    with s3server.serve("miles") as server:
        os.environ |= server.environment
        asyncio.run(visible("bucket of SeaweedFS", "s3://miles/bench", server.endpoint))


if __name__ == "__main__":
    main()
