"""Parquet bombs, real ones, read by a process that has little memory."""

import io
import random
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import codec, experience, parquet
from pipeline.experience import SCHEMA
from tests.test_experience import english, group

BOUND, MEMORY = 64 << 20, 512 << 20
"""Bytes that a shard may take, and that its reader may beyond what it has when it begins."""
READ = """
import pathlib, resource, sys
from pipeline import codec, experience
codec.MOST_BYTES = int(sys.argv[1])
taken = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, 2 * (taken + int(sys.argv[2]),))
for file in sys.argv[3:]:
    try:
        codec.decode(pathlib.Path(file).read_bytes())
    except experience.Damaged as error:
        print(error)
"""
MANY, TEXT = 10_000_000, "x" * 1_000_000


def written(table: pa.Table, **settings) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True, **settings)
    return sink.getvalue()


def shard(**columns) -> pa.Table:
    """One group of as many samples as the columns have rows, in all else as our writer makes it."""
    count = len(next(iter(columns.values())))
    plain = pq.read_table(io.BytesIO(codec.encode([group()])))
    table = plain.take(np.zeros(count, np.int64))
    for name, values in columns.items():
        table = table.set_column(table.column_names.index(name), name, [values])
    return table


def repeated(count: int) -> pa.Array:
    """A long text, by reference."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), pa.array([TEXT]))


def long_list() -> bytes:
    """Two samples, of which one has very many tokens: one run of the same."""
    ids = pa.LargeListArray.from_arrays(pa.array([0, MANY, MANY + 1], pa.int64()), pa.array(np.zeros(MANY + 1, "i4")))
    return written(shard(completion_ids=ids))


def lying_footer() -> bytes:
    """As `long_list`, but the footer says that there are three tokens."""
    data = long_list()
    at = len(data) - parquet.TAIL - int.from_bytes(data[-parquet.TAIL : -4], "little")
    true, false = _varint(2 * (MANY + 1)), bytearray(_varint(2 * 3))
    while len(false) < len(true):
        false[-1] |= 128
        false.append(0)
    assert true in data[at:]
    return data[:at] + data[at:].replace(true, bytes(false))


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def keys() -> bytes:
    """One map of many entries whose keys are the same long text."""
    rewards = pa.MapArray.from_arrays([0, 0, 2_000], repeated(2_000), pa.array(np.zeros(2_000)))
    return written(shard(rewards=rewards), store_schema=False)


def zeros() -> bytes:
    """A page that hardly takes a byte."""
    return written(shard(completion=pa.array(["0" * BOUND, ""], pa.large_string())), use_dictionary=False)


BOMBS = {
    "rows": (
        lambda: written(pa.table({"index": pa.array(np.zeros(MANY, np.int64))})),
        "10,000,000 rows, more than 1,000,000",
    ),
    "one run of values in a list": (long_list, "its pages decode to 80,000,192 bytes or more, above 67,108,864"),
    "more values than the footer says": (lying_footer, "column completion_ids has other pages than its footer says"),
    "a long text in a list": (keys, "its pages decode to 2,"),
    "a page of zeros": (zeros, "its pages decode to 67,"),
    "a long text in each row": (
        lambda: written(shard(prompt=repeated(2_000)), store_schema=False),
        "its rows take more than 67,108,864 bytes",
    ),
    "a long text in each row, as Arrow's dictionary": (
        lambda: written(shard(prompt=repeated(2_000))),
        "its rows take more than 67,108,864 bytes",
    ),
}


def test_bombs_are_refused_with_their_reasons_by_a_reader_that_has_no_memory_for_them(tmp_path):
    files = [tmp_path / f"{number}.parquet" for number in range(len(BOMBS))]
    for file, (make, _) in zip(files, BOMBS.values(), strict=True):
        file.write_bytes(make())
        assert file.stat().st_size < 1_000_000
    command = [sys.executable, "-c", READ, str(BOUND), str(MEMORY), *map(str, files)]
    read = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert (read.returncode, read.stderr) == (0, "")
    for (name, (_, reason)), said in zip(BOMBS.items(), read.stdout.splitlines(), strict=True):
        assert reason in said, name


def test_turns_beyond_count_are_refused_before_they_become_python_objects(monkeypatch):
    monkeypatch.setattr(codec, "MOST_ENTRIES", 1)
    with pytest.raises(experience.Damaged, match="column spans has 3 entries, more than 1"):
        codec.decode(codec.encode([group()]))


@pytest.mark.parametrize(
    "settings", [{}, {"data_page_version": "2.0"}, {"use_dictionary": True}, {"row_group_size": 3}]
)
def test_shards_that_other_settings_made_are_read_in_batches_as_they_were(settings, monkeypatch):
    table = codec.decode(codec.encode(english(groups=2)))
    monkeypatch.setattr(parquet, "BATCH_BYTES", 1000)
    assert codec.decode(written(table, **settings)).equals(table)


def test_whatever_a_footer_or_a_page_says_the_reckoning_ends_and_raises_nothing_but_value_error():
    data, dice, refused = codec.encode([group(number) for number in range(4)]), random.Random(0), 0
    for _ in range(600):
        bad = bytearray(data)
        for _ in range(dice.randint(1, 4)):
            bad[dice.randrange(len(bad))] = dice.randrange(256)
        try:
            parquet.reckon(bytes(bad), SCHEMA.names, 1000, 1 << 30)
        except ValueError:
            refused += 1
    assert refused > 150
