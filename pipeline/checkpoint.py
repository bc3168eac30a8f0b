"""Checkpoints: what a restarted trainer needs to go on exactly where it was, on any number of ranks.

torch.distributed.checkpoint lays the tensors out (each rank writes what it holds, a load reshards); files go
through a temporary local folder, each rank its own, and MANIFEST.json comes last, from rank 0. Only the first part of
that is collective and holds training up (`stage`); see saver for the rest. The manifest carries sizes, checksums, the
layout and the trainer's state as JSON, so that nothing from the store is ever unpickled.
A checkpoint without a manifest does not exist. Older ones are deleted only after the new one has been read back.

Limit: layout and files are those of torch.distributed.checkpoint 2.13's FileSystemWriter.
"""

import asyncio
import dataclasses
import json
import logging
import os
import pathlib
import tempfile
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as layouts
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo

from pipeline.storage import Corrupted, Storage, StorageError, Unavailable, file_sha256
from pipeline.trainer_log import Fenced
from pipeline.versions import Version

log = logging.getLogger(__name__)

T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, T]], T]
"""Runs a coroutine on this rank's event loop and waits for its result."""

FOLDER = "checkpoints"
MANIFEST = "MANIFEST.json"
SCHEMA = 1
Files = dict[str, dict[str, Any]]
"""Name → size in bytes, sha256."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    version: Version
    state: dict[str, Any]
    """JSON: what is not a tensor (step, coordinator, random states …)."""
    tensors: dict[str, Any]
    """Layout: name → dtype, size and pieces (offsets, sizes, file, position, length)."""
    files: Files


@dataclasses.dataclass(frozen=True)
class Staged:
    """A checkpoint to be: what this rank holds of it, in files of this machine."""

    version: Version
    state: dict[str, Any]
    layout: layouts.Metadata
    local: tempfile.TemporaryDirectory[str]


def folder(version: Version) -> str:
    return f"{FOLDER}/{version}"


def stage(version: Version, tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> Staged:
    """Copy what this rank holds of `tensors` into a local folder; collective. They may change as soon as it returns.

    `tensors` may hold DTensors, named alike on every rank.
    """
    local = tempfile.TemporaryDirectory(prefix="miles-checkpoint-", ignore_cleanup_errors=True)
    layout = dcp.save(
        tensors,
        storage_writer=dcp.FileSystemWriter(local.name, sync_files=False),
        no_dist=not dist.is_initialized(),
    )
    return Staged(version, state, layout, local)


async def upload(storage: Storage, staged: Staged, *, read_back: bool = True) -> Files:
    """Write this rank's files to the store and remove them here; no collective. Returns their description.

    With `read_back` they are downloaded and compared; raises StorageError if they differ.
    """
    with staged.local as local:
        paths = sorted(pathlib.Path(local).glob("*.distcp"))
        files = {path.name: await asyncio.to_thread(_describe, path) for path in paths}
        for name in files:
            await storage.put_file(f"{folder(staged.version)}/{name}", os.path.join(local, name))
        if read_back and files:
            await _verify(storage, staged.version, files)
    return files


async def complete(storage: Storage, staged: Staged, files: Files) -> None:
    """Make a checkpoint of the uploaded `files` of all ranks: until now there was none."""
    checkpoint = Checkpoint(staged.version, staged.state, _layout_to_json(staged.layout), files)
    await storage.create(f"{folder(staged.version)}/{MANIFEST}", _encode(checkpoint))


async def newest(storage: Storage) -> list[Checkpoint]:
    """All complete checkpoints, newest version first; one whose manifest is damaged is skipped and said so.

    Raises StorageError if there are some, and all are damaged; and if the store does not give one of them: who passed
    over the newest for that would begin from an older one, or delete it.
    """
    checkpoints = []
    manifests = [info for info in await storage.list(FOLDER) if info.key.endswith("/" + MANIFEST)]
    for info in manifests:
        try:
            found = await storage.get(info.key)
            if found is not None:
                checkpoints.append(_decode(info.key, found.data))
        except (ValueError, KeyError, TypeError, Corrupted) as error:
            log.warning("checkpoint %s is damaged (%s); it is ignored", info.key, error)
    if manifests and not checkpoints:
        raise StorageError(f"the manifests of all {len(manifests)} checkpoints are damaged")
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.version, reverse=True)


def load(
    storage: Storage, run: Run, candidates: list[Checkpoint], tensors: dict[str, torch.Tensor]
) -> Checkpoint | None:
    """Fill `tensors` in place from the first good candidate; collective. None if there are no candidates.

    Raises ValueError if the parameters are not those that were saved, StorageError if every candidate is damaged,
    Unavailable if the store does not answer.
    """
    cause: BaseException | None = None
    for candidate in candidates:
        check_names(candidate, tensors)
        with tempfile.TemporaryDirectory(prefix="miles-checkpoint-") as local:
            try:
                dcp.load(
                    tensors,
                    storage_reader=_Reader(storage, run, candidate, local),
                    no_dist=not dist.is_initialized(),
                )
                return candidate
            except CheckpointException as error:
                causes = [failure[0] for failure in error.failures.values()]
                if silent := next((each for each in causes if isinstance(each, Unavailable)), None):
                    raise silent from None
                cause = causes[0]
                log.warning("checkpoint %s is damaged (%s); trying the one before it", candidate.version, cause)
    if candidates:
        raise StorageError(
            f"all {len(candidates)} checkpoints are damaged; the newest is {candidates[0].version} ({cause})"
        )
    return None


async def prune(storage: Storage, newest_version: Version, keep_last: int) -> list[Checkpoint]:
    """Delete all but the last `keep_last` checkpoints and what unfinished ones left; returns those kept, newest first.

    The manifest goes first: a half-deleted checkpoint is an unfinished one. Nothing above `newest_version` is touched.
    Raises Fenced if neither that one nor an older one is left: a successor, which has newer ones, has pruned them.
    """
    keys: dict[Version, list[str]] = {}
    for info in await storage.list(FOLDER):
        version = Version.of_key(info.key)
        if version is not None and version <= newest_version:
            keys.setdefault(version, []).append(info.key)
    complete = [found for found in await newest(storage) if found.version <= newest_version]
    if not complete:
        raise Fenced(f"checkpoint {newest_version} is gone: another trainer has taken over")
    kept = complete[: max(1, keep_last)]
    for version in keys.keys() - {found.version for found in kept}:
        for key in sorted(keys[version], key=lambda key: not key.endswith(MANIFEST)):
            await storage.delete(key)
    return kept


class _Reader(dcp.FileSystemReader):
    """Takes the layout from the manifest and downloads only the files that this rank's plan asks for."""

    def __init__(self, storage: Storage, run: Run, checkpoint: Checkpoint, local: str) -> None:
        super().__init__(local)
        self.storage, self.run, self.checkpoint, self.local = storage, run, checkpoint, local

    def read_metadata(self, *args: Any, **kwargs: Any) -> layouts.Metadata:
        return _layout_from_json(self.checkpoint.tensors)

    def read_data(self, plan: Any, planner: Any) -> Any:
        names = {self.storage_data[item.storage_index].relative_path for item in plan.items}
        self.run(_download(self.storage, self.checkpoint, self.local, sorted(names)))
        return super().read_data(plan, planner)


async def _verify(storage: Storage, version: Version, files: Files) -> None:
    with tempfile.TemporaryDirectory(prefix="miles-checkpoint-") as local:
        checkpoint = Checkpoint(version, {}, {}, files)
        await _download(storage, checkpoint, local, sorted(files), keep=False)


async def _download(
    storage: Storage, checkpoint: Checkpoint, local: str, names: list[str], *, keep: bool = True
) -> None:
    """Fetch files and check them against the manifest; raises StorageError naming the damaged key."""
    for name in names:
        if name not in checkpoint.files or name != os.path.basename(name):
            raise StorageError(f"checkpoint {checkpoint.version} names no file {name!r}")
        key, path = f"{folder(checkpoint.version)}/{name}", os.path.join(local, name)
        info = await storage.get_file(key, path)
        if {"size": info.size, "sha256": info.sha256} != checkpoint.files[name]:
            raise StorageError(f"{key} differs from what its manifest says")
        if not keep:
            os.unlink(path)


def _describe(path: pathlib.Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": file_sha256(str(path))}


def check_names(checkpoint: Checkpoint, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises ValueError unless the checkpoint has these tensors, by name and shape, and no others."""
    saved = {name: entry["size"] for name, entry in checkpoint.tensors.items()}
    wanted = {name: list(tensor.shape) for name, tensor in tensors.items()}
    differing = sorted(name for name in saved.keys() | wanted.keys() if saved.get(name) != wanted.get(name))
    if differing:
        raise ValueError(
            f"checkpoint {checkpoint.version} holds other parameters than this model trains "
            f"({len(differing)} differ, first {differing[0]}); restore the model and trainer.lora it was written with, "
            "or begin without it"
        )


def _encode(checkpoint: Checkpoint) -> bytes:
    content = {
        "schema": SCHEMA,
        "version": list(checkpoint.version),
        "step": checkpoint.version.step,
        "state": checkpoint.state,
        "files": checkpoint.files,
        "tensors": checkpoint.tensors,
    }
    return json.dumps(content).encode()


def _decode(key: str, data: bytes) -> Checkpoint:
    content = json.loads(data)
    if content["schema"] != SCHEMA:
        raise ValueError(f"schema {content['schema']} is unknown")
    version = Version.of_key(key)
    if version is None or content["version"] != list(version):
        raise ValueError(f"it is that of checkpoint {content['version']}")
    parts = content["state"], content["tensors"], content["files"]
    if not all(isinstance(part, dict) for part in parts):
        raise ValueError("state, tensors or files is no object")
    return Checkpoint(version, *parts)


def _layout_to_json(layout: layouts.Metadata) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for name, entry in layout.state_dict_metadata.items():
        assert isinstance(entry, layouts.TensorStorageMetadata), f"{name} is not a tensor"
        pieces = []
        for chunk in entry.chunks:
            place = layout.storage_data[layouts.MetadataIndex(name, chunk.offsets)]
            pieces.append([list(chunk.offsets), list(chunk.sizes), place.relative_path, place.offset, place.length])
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "size": list(entry.size), "pieces": pieces}
    return tensors


def _layout_from_json(tensors: dict[str, Any]) -> layouts.Metadata:
    entries: dict[str, Any] = {}
    places: dict[layouts.MetadataIndex, _StorageInfo] = {}
    for name, tensor in tensors.items():
        dtype = getattr(torch, tensor["dtype"])
        assert isinstance(dtype, torch.dtype), f"{name}: {dtype} is no dtype"
        chunks = []
        for number, (offsets, sizes, path, position, length) in enumerate(tensor["pieces"]):
            chunks.append(layouts.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            places[layouts.MetadataIndex(name, offsets, number)] = _StorageInfo(path, position, length)
        properties = layouts.TensorProperties(dtype=dtype)
        entries[name] = layouts.TensorStorageMetadata(properties, torch.Size(tensor["size"]), chunks)
    return layouts.Metadata(entries, storage_data=places, storage_meta=layouts.StorageMeta())
