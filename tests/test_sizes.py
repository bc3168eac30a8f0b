"""Shards of unusual sizes come back as they went, or are refused with a reason; memory is that of a few shards."""

import contextlib
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest

from pipeline import codec, experience
from pipeline.experience import SCHEMA, TURN, Rollout, RolloutGroup
from pipeline.intake import Intake
from pipeline.leases import Lease, Ledger
from pipeline.messages import shard_key
from pipeline.roster import Known
from pipeline.storage import MemoryBucket, Storage
from pipeline.versions import Version
from tests.conftest import SkippingClock

MOST = 3
"""Shards' worth of memory."""


def rollout(tokens: int, text: str = "", invalid: str | None = None) -> Rollout:
    ids = list(range(tokens)) if tokens < 50_000 else np.arange(tokens, dtype=np.int32).tolist()
    return Rollout(ids, [-0.5] * tokens, text, "stop", 1.0, {"sum": 1.0}, invalid, [(0, Version(1, 3))])


def group(index: int, *rollouts: Rollout) -> RolloutGroup:
    return RolloutGroup(index, "sums", "2 + 2 =", "4", [5, 9], list(rollouts), 0.0)


@pytest.mark.parametrize(
    "groups",
    [
        [group(0, rollout(1_000_000, "é" * 1_000_000))],
        [group(0, rollout(0, invalid="no token"), rollout(1))],
        [group(index, rollout(1)) for index in range(10_000)],
        [group(0, rollout(2, "\0 \U0001f600 ‮ e\u0301 \r\n"))],
    ],
    ids=["a million tokens", "none", "ten thousand of one", "any unicode"],
)
def test_what_was_written_is_read_back(groups):
    table = codec.decode(codec.encode(groups))
    assert experience.rows(table, 0, table.num_rows) == groups


def test_a_sample_without_a_token_that_is_not_marked_is_refused_by_its_row():
    with pytest.raises(experience.Damaged, match=r"^row 1: no completion token$"):
        codec.decode(codec.encode([group(0, rollout(1), rollout(0))]))


def test_every_column_that_may_reach_two_to_the_31_bytes_counts_in_64_bits():
    """Offsets of 32 bits overflow there; maps, and lists of spans and turns, have an entry a reward, a policy version
    or a turn, and no shard has 2³¹ of those."""
    few = {"rewards", "spans", "turns"}
    for field in [field for field in SCHEMA if field.name not in few] + [TURN.field("text")]:
        long = pa.types.is_large_list(field.type) or pa.types.is_large_string(field.type)
        assert long or pa.types.is_primitive(field.type), field


@contextlib.contextmanager
def measured() -> Iterator[pa.MemoryPool]:
    """Everything that Arrow allocates meanwhile comes from a pool that knows its peak."""
    usual = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(usual)
    pa.set_memory_pool(pool)
    try:
        yield pool
    finally:
        pa.set_memory_pool(usual)


def shard(number: int) -> list[RolloutGroup]:
    random = np.random.default_rng(number)
    ids, logprobs = random.integers(0, 50_000, 2000).tolist(), (-random.random(2000)).tolist()
    sample = Rollout(ids, logprobs, "text " * 500, "stop", 1.0, {"sum": 1.0}, None, [(0, Version(1, 3))])
    return [group(16 * number + place, *[sample] * 4) for place in range(16)]


async def test_memory_of_writer_and_reader_is_that_of_a_few_shards_however_many_there_are():
    storage = Storage(MemoryBucket(SkippingClock()), SkippingClock())
    with measured() as pool:
        for number in range(6):
            await storage.create(shard_key("A", number), codec.encode(shard(number)))
        writing = pool.max_memory()
    size = codec.decode(codec.encode(shard(0))).nbytes
    ledger, known = Ledger(), Known("A", "rollout-0", cursor=0)
    for index in range(96):
        ledger.lease(index, Lease("A", 0, 0.0))
    with measured() as pool:
        await Intake(storage, 4, None).drain(known, ledger)
        reading = pool.max_memory()
    assert len(ledger.delivered) == 96
    print(f"\nof a shard of {size / 1e6:.1f} MB: writing {writing / size:.2f}, reading {reading / size:.2f}")
    assert 0.5 < writing / size <= MOST
    assert 0.5 < reading / size <= MOST
