"""Which run is meant: a run's folder, or the prefix of a run in a store."""

import json
import pathlib
import urllib.parse
from typing import Any

import pydantic

from pipeline.config import RunConfig
from pipeline.storage import Storage, StorageError, open_storage

REMEDY = "name a folder such as runs/NAME, or the prefix s3://BUCKET/…/RUN-ID that store.uri of its configuration gives"


async def open_run(run: str) -> tuple[Storage, RunConfig, str]:
    """The run's storage, its newest configuration, and its URI. Raises ValueError for what is no run."""
    if "://" not in run:
        folder = pathlib.Path(run).absolute()
        if not folder.is_dir():
            raise ValueError(f"{run}: there is no such folder; {REMEDY}")
        file = folder / "run.json"
        config = parse(file.read_bytes()) if file.is_file() else None
        if config is not None:
            return open_storage(config.store.uri, config.store.endpoint, config.store.region), config, config.store.uri
        run = folder.as_uri()
    if not exists(run):
        raise ValueError(f"{run}: there is no such folder; {REMEDY}")
    storage = open_storage(run)
    found = await in_store(storage)
    if found is None:
        raise ValueError(f"{run}: no configuration of a run lies there; {REMEDY}")
    return storage, found, run


async def in_store(storage: Storage) -> RunConfig | None:
    """The configuration of the newest attempt."""
    attempts = [info.key for info in await storage.list("attempts") if info.key.endswith(".json")]
    for key in [*sorted(attempts, key=lambda key: (len(key), key), reverse=True), "run.json"]:
        found = await storage.get(key)
        if found and (config := parse(found.data)):
            return config
    return None


async def delivery(config: RunConfig) -> dict[str, Any] | None:
    """The manifest of the model that this run delivered; None: not (yet), or its place does not answer."""
    if config.output is None or not exists(config.output.uri):
        return None
    try:
        found = await open_storage(config.output.uri, config.store.endpoint, config.store.region).get("MANIFEST.json")
    except StorageError:
        return None
    manifest = json.loads(found.data) if found else {}
    return manifest if manifest.get("run_id") == config.run_id else None


def exists(uri: str) -> bool:
    """Whether a local folder is there; other places are asked when they are read."""
    parts = urllib.parse.urlsplit(uri)
    return parts.scheme not in ("", "file") or pathlib.Path(urllib.parse.unquote(parts.path)).is_dir()


def parse(data: bytes) -> RunConfig | None:
    """A RunConfig in JSON; None for anything else."""
    try:
        return parsed(json.loads(data))
    except ValueError:
        return None


def parsed(content: Any) -> RunConfig | None:
    """A RunConfig, by itself or as `config` of another object; None for anything else."""
    if not isinstance(content, dict):
        return None
    try:
        return RunConfig.model_validate(content.get("config", content))
    except pydantic.ValidationError:
        return None
