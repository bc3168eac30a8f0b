"""Which run is meant: a run's folder, or the prefix of a run in a store."""

import json
import pathlib
import re
from typing import Any

import pydantic

from pipeline.config import RunConfig
from pipeline.storage import Corrupted, Storage, StorageError, exists, local_folder, open_storage

ATTEMPT = re.compile(r"attempts/(\d+)\.json")
PREFIX_FOLDERS = ("attempts", "trainer", "control")
"""One of these lies in each prefix of a run in a store, and none in the folder of a local run."""
FIELDS_SHOWN = 3
Document = dict[str, Any]
REMEDY = (
    "name a folder such as runs/NAME, or the prefix s3://BUCKET/…/NAMESPACE/NAME/RUN-ID, which `miles store ls` helps "
    "to find"
)


async def open_run(run: str, read_only: bool = True) -> tuple[Storage, RunConfig, str]:
    """The run's storage, its newest configuration, and its URI. Raises ValueError for what is no run.

    `read_only`: nothing is written to a folder, which may be one that cannot be written to.
    """
    if (folder := _folder(run)) is not None:
        if not folder.is_dir():
            raise ValueError(f"{run}: there is no such folder; {REMEDY}")
        config = of_folder(run)
        if config is not None:
            return open_storage(*place(run, config), read_only=read_only), config, config.store.uri
        if not _is_prefix(folder):
            file = folder / "run.json"
            _refuse_other_version(str(file), _json(_bytes(file)))
            fault = f"{file} is no configuration of a run" if file.is_file() else f"{run}: there is no run.json"
            raise ValueError(f"{fault}; {REMEDY}")
        run = folder.as_uri()
    if not exists(run):
        raise ValueError(f"{run}: there is no such folder; {REMEDY}")
    storage = open_storage(run, read_only=read_only)
    found = await in_store(storage)
    if found is None:
        _refuse_other_version(f"{run}/run.json", await read(storage, "run.json", []))
        raise ValueError(f"{run}: neither attempts/ nor run.json there holds the configuration of a run; {REMEDY}")
    return storage, found, run


def _folder(run: str) -> pathlib.Path | None:
    """The folder that is meant, which need not be there; None: another place, or none."""
    folder = local_folder(run) if "://" not in run or run.startswith("file:///") else None
    return folder and folder.absolute()


def _is_prefix(folder: pathlib.Path) -> bool:
    return any((folder / name).is_dir() for name in PREFIX_FOLDERS)


def of_folder(run: str) -> RunConfig | None:
    """The configuration in a run's own folder, which speaks of another place; None for all else: a prefix is read where
    it lies, a copy of one included."""
    folder = _folder(run)
    return None if folder is None or _is_prefix(folder) else parse(_bytes(folder / "run.json"))


def place(run: str, config: RunConfig) -> tuple[str, str | None, str | None]:
    """URI, endpoint and region of the store of the run whose folder is `run`. Raises ValueError if it is not there."""
    store = config.store
    if not exists(store.uri):
        raise ValueError(
            f"{run}: its store {store.uri} is not there: it was moved or deleted, or the run has not begun; {REMEDY}"
        )
    return store.uri, store.endpoint, store.region


def _bytes(file: pathlib.Path) -> bytes:
    return file.read_bytes() if file.is_file() else b""


def _refuse_other_version(place: str, content: Any) -> None:
    """Raises ValueError if it is the configuration of a run whose fields are not those of this version."""
    config = content.get("config", content) if isinstance(content, dict) else None
    if not isinstance(config, dict) or not {"run_id", "algorithm", "store"} <= config.keys():
        return
    try:
        RunConfig.model_validate(config)
    except pydantic.ValidationError as error:
        fields = list(dict.fromkeys(".".join(map(str, fault["loc"])) for fault in error.errors()))
        shown = ", ".join(fields[:FIELDS_SHOWN]) + (", …" if len(fields) > FIELDS_SHOWN else "")
        raise ValueError(
            f"{place}: this run comes from another version of Miles, and this one does not understand {shown}: look at "
            "it with the version that made it"
        ) from None


async def in_store(storage: Storage) -> RunConfig | None:
    """The configuration of the newest attempt."""
    numbers = [int(match[1]) for info in await storage.list("attempts") if (match := ATTEMPT.fullmatch(info.key))]
    for key in [*(f"attempts/{number}.json" for number in sorted(numbers, reverse=True)), "run.json"]:
        config = parsed(await read(storage, key, []))
        if config is not None:
            return config
    return None


async def read(storage: Storage, key: str, omissions: list[str]) -> Document | None:
    """The JSON object at `key`; None for what is gone, and, with a sentence, for what is damaged or no such thing."""
    try:
        found = await storage.get(key)
        content = json.loads(found.data) if found else None
    except (Corrupted, ValueError, RecursionError):
        content = ()
    if content is None or isinstance(content, dict):
        return content
    omissions.append(torn(key))
    return None


def torn(key: str) -> str:
    return f"{key} is damaged, or not what it should be, and is left out."


async def delivery(config: RunConfig, omissions: list[str]) -> Document | None:
    """The manifest of the model that this run delivered; None: not (yet), or its place does not answer."""
    if config.output is None or not exists(config.output.uri):
        return None
    try:
        target = open_storage(config.output.uri, config.store.endpoint, config.store.region, read_only=True)
        damaged: list[str] = []
        manifest = await read(target, "MANIFEST.json", damaged)
    except StorageError:
        return None
    if damaged:
        omissions.append(f"In output.uri, {damaged[0]}")
    if manifest is None or manifest.get("run_id") != config.run_id:
        return None
    version = manifest.get("version")
    if isinstance(version, list) and len(version) == 2 and all(isinstance(part, int) for part in version):
        return manifest
    omissions.append("In output.uri, MANIFEST.json names no version: the model counts as not delivered.")
    return None


def parse(data: bytes) -> RunConfig | None:
    """A RunConfig in JSON; None for anything else."""
    return parsed(_json(data))


def _json(data: bytes) -> Any:
    """None for what is no JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def parsed(content: Any) -> RunConfig | None:
    """A RunConfig, by itself or as `config` of another object; None for anything else."""
    if not isinstance(content, dict):
        return None
    try:
        return RunConfig.model_validate(content.get("config", content))
    except pydantic.ValidationError:
        return None
