"""Parquet that somebody else has written, read within bounds.

A file of some hundred bytes may decode to terabytes: a run of one repeated value, a dictionary of one long text that
every row names, a page of zeros. What a file would take is therefore reckoned first, from its footer and from the
header before each page (github.com/apache/parquet-format; Thrift's compact protocol), without decompressing anything:
pages must hold as many values as the footer says, and a value takes its width. Only texts that a page repeats by
reference are not known beforehand: in lists each counts as the largest page; elsewhere a batch of rows is made so short
that it is not too large, and the caller counts what the batches take.

pyarrow's own view of a footer is not used: it ends the process where a footer is damaged in some ways.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

BATCH_BYTES = 64 << 20
MOST_FOOTER = 16 << 20
TAIL = 8
"""Bytes behind the footer: its length, and PAR1."""
WIDTHS = {0: 1, 1: 4, 2: 8, 3: 12, 4: 4, 5: 8, 6: 8}
"""Bytes of a value in memory, by physical type: boolean, int32, int64, int96, float, double; of a text its offset."""
TEXT = 6
LEVELS = 4
"""Bytes that a value takes for its definition and repetition levels."""
REPEATED = 2
PLAIN = 0
"""The encoding in which a value stands for itself."""
DATA, DICTIONARY, DATA_V2 = 0, 2, 3
"""Types of pages."""
BOOLEANS, BYTE, INTEGERS, DOUBLE, BINARY, LISTS, STRUCT = (1, 2), 3, (4, 5, 6), 7, 8, (9, 10), 12
"""Types of Thrift's compact protocol; Parquet has no others."""
DEEPEST = 12
"""Structs and lists in one another."""

Fields = dict[int, Any]


class Leaf(NamedTuple):
    """A column of values."""

    name: str  # of the top-level column that it is part of
    kind: int  # physical type
    nested: bool  # in lists


class Pages(NamedTuple):
    """Of one column in one row group."""

    values: int  # nulls and empty lists included
    total: int  # bytes, uncompressed
    largest: int  # bytes, uncompressed, of one page
    plain: bool  # each value stands for itself


def batches(data: bytes, columns: Sequence[str], rows: int, size: int) -> Iterator[pa.RecordBatch]:
    """Those of the columns that are there, some rows at a time: texts of a batch take no more than BATCH_BYTES beyond
    what their pages hold.

    Raises ValueError, before anything is decoded, if there are more than `rows` rows or they take more than `size`
    bytes, texts outside of lists that pages repeat by reference counted once; else pyarrow's errors for what is no
    Parquet file.
    """
    longest = reckon(data, columns, rows, size)
    file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
    at_once = max(1, min(rows, BATCH_BYTES // max(longest, 1)))
    yield from file.iter_batches(at_once, columns=list(columns), use_threads=False)


def reckon(data: bytes, columns: Collection[str], rows: int, size: int) -> int:
    """Bytes that a text outside of lists may take which a page repeats by reference; raises ValueError as `batches`."""
    try:
        footer = _footer(data)
        if footer[3] > rows:
            raise ValueError(f"{footer[3]:,} rows, more than {rows:,}")
        leaves = list(_leaves(footer[2]))
        longest, claimed = 0, 0
        for group in footer[4]:
            for leaf, chunk in zip(leaves, group[1], strict=True):
                if leaf.name in columns:
                    pages = _scan(data, leaf, chunk[3])
                    repeats = leaf.kind == TEXT and not pages.plain
                    width = WIDTHS[leaf.kind] + LEVELS + (pages.largest if repeats and leaf.nested else 0)
                    claimed += max(pages.total, pages.values * width)
                    longest = max(longest, pages.largest if repeats and not leaf.nested else 0)
                if claimed > size:
                    raise ValueError(f"its pages decode to {claimed:,} bytes or more, above {size:,}")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"footer or a page's header is damaged ({type(error).__name__}: {error})") from None
    return longest


def _footer(data: bytes) -> Fields:
    length = int.from_bytes(data[-TAIL:-4], "little")
    if data[-4:] != b"PAR1" or length > len(data) - TAIL:
        raise ValueError("no footer at its end")
    if length > MOST_FOOTER:
        raise ValueError(f"a footer of {length:,} bytes, more than {MOST_FOOTER:,}")
    return _struct(data, len(data) - TAIL - length)[0]


def _leaves(schema: list[Fields]) -> Iterator[Leaf]:
    """The schema is a tree, written parents first."""
    open_: list[tuple[int, str, bool]] = [(schema[0].get(5, 0), "", False)]  # children to come, name, in a list
    for element in schema[1:]:
        while not open_[-1][0]:
            open_.pop()
        count, top, nested = open_[-1]
        open_[-1] = count - 1, top, nested
        top, nested = top or element[4].decode(), nested or element.get(3) == REPEATED
        if element.get(5):
            open_.append((element[5], top, nested))
        else:
            yield Leaf(top, element[1], nested)


def _scan(data: bytes, leaf: Leaf, chunk: Fields) -> Pages:
    """What the headers of a column chunk's pages say; raises ValueError if they contradict the footer."""
    if leaf.kind not in WIDTHS:
        raise ValueError(f"column {leaf.name} is of a type that no column has")
    if not chunk[5]:
        return Pages(0, 0, 0, True)
    at = min(offset for offset in (chunk[9], chunk.get(11)) if offset)
    stop = at + chunk[7]
    values, total, largest, plain = 0, 0, 0, True
    while 0 < at < stop:
        header, at = _struct(data, at)
        kind, expanded, stored = header[1], header[2], header[3]
        if expanded < 0 or stored < 0 or kind not in (DATA, DICTIONARY, DATA_V2):
            raise ValueError(f"column {leaf.name} has a page of no kind that is known")
        at, total, largest = at + stored, total + expanded, max(largest, expanded)
        if kind != DICTIONARY:
            page, encoding = (header[5], 2) if kind == DATA else (header[8], 4)
            if page[1] < 0:
                raise ValueError(f"column {leaf.name} has a page of {page[1]} values")
            values, plain = values + page[1], plain and page[encoding] == PLAIN
    if values != chunk[5] or at != stop or stop > len(data):
        raise ValueError(f"column {leaf.name} has other pages than its footer says")
    return Pages(values, total, largest, plain)


def _struct(data: bytes, at: int, depth: int = 0) -> tuple[Fields, int]:
    """({field: number, bytes, list or struct}, where it ends). Raises ValueError or IndexError for what is none."""
    fields: Fields = {}
    field = 0
    while head := data[at]:
        at += 1
        if head >> 4:
            field += head >> 4
        else:
            field, at = _signed(data, at)
        kind = head & 15
        if kind not in BOOLEANS:  # its type is its value
            fields[field], at = _value(data, at, kind, depth)
    return fields, at + 1


def _value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in INTEGERS:
        return _signed(data, at)
    if kind == BINARY:
        length, at = _varint(data, at)
        return data[at : at + length], at + length
    if kind == STRUCT and depth < DEEPEST:
        return _struct(data, at, depth + 1)
    if kind in LISTS and depth < DEEPEST:
        return _list(data, at, depth + 1)
    if kind in (BYTE, *BOOLEANS):
        return data[at], at + 1
    if kind == DOUBLE:
        return None, at + 8
    raise ValueError("footer or a page's header is damaged")


def _list(data: bytes, at: int, depth: int) -> tuple[list[Any], int]:
    kind, count = data[at] & 15, data[at] >> 4
    at += 1
    if count == 15:
        count, at = _varint(data, at)
    values = []
    for _ in range(count):
        value, at = _value(data, at, kind, depth)
        if at > len(data):
            raise IndexError("it goes beyond the end")
        values.append(value)
    return values, at


def _signed(data: bytes, at: int) -> tuple[int, int]:
    number, at = _varint(data, at)
    return (number >> 1) ^ -(number & 1), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    byte = data[at]
    number, shift = byte & 127, 0
    while byte > 127:
        at, shift = at + 1, shift + 7
        byte = data[at]
        number |= (byte & 127) << shift
        if shift > 63:
            raise ValueError("footer or a page's header is damaged")
    return number, at + 1
