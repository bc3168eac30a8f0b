"""The store's figures as one table: `make bench-store`. Beside each stands what it should be.

Bytes a token, and the codec against pyarrow's own work on the same columns with the same settings; the planner at 500
writers and 10,000 pending groups; the time from the start of a put to the bytes in a reader's hands, against a bare put
and get of the same bytes, in a folder and on a real S3 server.
"""

import asyncio
import io
import logging
import os
import random
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import experience
from pipeline.coordinator import Coordinator
from pipeline.experience import SCHEMA
from pipeline.leases import Delivered, Lease
from pipeline.messages import Heartbeat, shard_key
from pipeline.roster import Known
from pipeline.storage import MemoryStorage, Storage, open_storage
from pipeline.trainer_log import GroupRef
from pipeline.versions import Version
from tests import s3server
from tests.conftest import SkippingClock
from tests.exploration import Size, configure
from tests.test_experience import english

WRITERS, PENDING, BATCH = 500, 10_000, 128
ROUNDS = 40


def row(name: str, value: str, wanted: str = "") -> None:
    print(f"{name:54}{value:>22}  {wanted}", flush=True)


def best(call: Callable[[], Any], rounds: int = 3) -> float:
    """Seconds, the shortest of a few: a busy machine only ever adds."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def codec() -> None:
    for number, wanted in ((8, "6.2"), (125, "5.6")):
        groups = english(groups=number)
        data = experience.encode(groups)
        tokens = sum(len(sample.completion_ids) for group in groups for sample in group.rollouts)
        row(f"bytes a token, text and all, {8 * number} rows", f"{len(data) / tokens:.2f}", f"at most {wanted}")
    columns = {field.name: experience.decode(data)[field.name].to_pylist() for field in SCHEMA}

    def write() -> None:
        table = pa.table([pa.array(columns[field.name], field.type) for field in SCHEMA], schema=SCHEMA)
        settings: dict[str, Any] = {"use_dictionary": experience.DICTIONARY, "column_encoding": experience.ENCODING}
        pq.write_table(
            table, io.BytesIO(), compression="zstd", compression_level=3, write_page_checksum=True, **settings
        )

    def read() -> None:
        pq.read_table(pa.BufferReader(data), use_threads=False, page_checksum_verification=True).combine_chunks()

    encoded, decoded = best(lambda: experience.encode(groups)), best(lambda: experience.decode(data))
    row("encode, of pyarrow's speed", f"{best(write) / encoded:.2f}", "at least 0.95")
    row("decode and every check, of pyarrow's speed", f"{best(read) / decoded:.2f}", "at least 0.95 without the checks")
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


async def visible(name: str, writer: Storage, reader: Storage) -> None:
    """The reader asks for the next key again and again, as the trainer does while it waits for groups."""
    data = experience.encode(english(groups=8))
    waits, bare = [], []
    for number in range(ROUNDS):
        started = time.perf_counter()
        found = asyncio.create_task(_tail(reader, shard_key("A", number)))
        await writer.create(shard_key("A", number), data)
        await found
        waits.append(time.perf_counter() - started)
        started = time.perf_counter()
        await writer.create(shard_key("B", number), data)
        await reader.get(shard_key("B", number))
        bare.append(time.perf_counter() - started)
    p50, p99 = np.percentile(waits, [50, 99]) * 1e3
    row(f"put → visible, {len(data) / 1e3:.0f} KB, {name}, p50 and p99", f"{p50:.1f}, {p99:.1f} ms")
    ratio = float(np.percentile(waits, 99) / np.percentile(bare, 99))
    row(f"    p99 against put and get, {name}", f"{ratio:.2f}", "at most 1.5")


async def _tail(reader: Storage, key: str) -> None:
    while await reader.get(key) is None:
        await asyncio.sleep(0)


def main() -> None:
    logging.disable(logging.CRITICAL)
    codec()
    asyncio.run(planner())
    with tempfile.TemporaryDirectory(prefix="bench-store-") as folder:
        asyncio.run(visible("folder", open_storage(folder), open_storage(folder)))
    with s3server.serve("miles") as server:
        os.environ |= server.environment
        uri = "s3://miles/bench"
        asyncio.run(visible("SeaweedFS", open_storage(uri, server.endpoint), open_storage(uri, server.endpoint)))


if __name__ == "__main__":
    main()
