"""Files of prompts: JSONL or Parquet, on this machine, in the object store, or at any address fsspec knows."""

import asyncio
import io
import json
import pathlib
import urllib.parse
from collections.abc import Callable
from typing import Any

import fsspec
import pyarrow.parquet

from pipeline.config import StoreConfig
from pipeline.storage import open_storage

Rows = tuple[int, Callable[[int], dict[str, Any]]]


def read_rows(uri: str, name: str, store: StoreConfig | None = None) -> Rows:
    """How many rows the file at `uri` has, and a function that gives one of them.

    `name` begins the messages. Raises ValueError for a file that is missing or malformed.
    """
    suffix = pathlib.PurePosixPath(urllib.parse.urlsplit(uri).path).suffix.lower()
    if suffix not in READERS:
        raise ValueError(f"{name}: {uri} must end in one of {', '.join(READERS)}")
    try:
        data = _fetch(uri, store)
    except Exception as error:  # each store has its own exceptions
        raise ValueError(f"{name}: cannot read {uri}: {_cause(error, uri)}") from None
    return READERS[suffix](data, f"{name}: {uri}")


def _cause(error: BaseException, uri: str) -> str:
    """One line of the first in the chain of causes that says more than the address."""
    text = str(error).strip()
    if text and text.strip("'\"") != uri:
        return text.splitlines()[0][:300]
    return _cause(error.__cause__, uri) if error.__cause__ else type(error).__name__


def _fetch(uri: str, store: StoreConfig | None) -> bytes:
    if urllib.parse.urlsplit(uri).scheme != "s3":
        with fsspec.open(uri, "rb") as file:
            return bytes(file.read())
    folder, _, key = uri.rpartition("/")
    storage = open_storage(folder, store.endpoint if store else None, store.region if store else None)
    found = asyncio.run(storage.get(key))
    if found is None:
        raise FileNotFoundError("there is no such object")
    return found.data


def _jsonl(data: bytes, where: str) -> Rows:
    lines = []
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}, line {number}, is not JSON: {str(error)[:300]}") from None
        if not isinstance(row, dict):
            raise ValueError(f'{where}, line {number}, is not an object such as {{"prompt": …}}')
        lines.append(line)
    return len(lines), lambda number: json.loads(lines[number])


def _parquet(data: bytes, where: str) -> Rows:
    try:
        table = pyarrow.parquet.read_table(io.BytesIO(data))
    except Exception as error:  # a damaged file may raise anything
        raise ValueError(f"{where} is not Parquet, or damaged: {_cause(error, where)}") from None

    def row(number: int) -> dict[str, Any]:
        try:
            return dict(table.slice(number, 1).to_pylist()[0])
        except Exception as error:  # damaged text, or a date that Python does not have
            raise ValueError(f"{where}, row {number + 1}, cannot be read: {_cause(error, where)}") from None

    return table.num_rows, row


READERS: dict[str, Callable[[bytes, str], Rows]] = {".jsonl": _jsonl, ".ndjson": _jsonl, ".parquet": _parquet}
