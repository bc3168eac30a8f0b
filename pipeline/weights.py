"""Policy versions as files: published by the trainer, fetched by workers, merged with the base. Free of torch.

    weights/<version>/{adapter_model.safetensors, adapter_config.json | model*.safetensors, …}
    weights/<version>/MANIFEST.json     last: names, sizes, sha256 of the files; checksum of all tensor names and shapes

What the manifest does not name does not exist, and nothing is announced before its manifest is there. A fetch
believes a file only when it has the manifest's sha256, and a full set of weights only when its tensors are the base
model's by name and shape: an export of one rank's part, or under a compiler's prefix, is refused, not served.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import pathlib
import re
import secrets
import shutil
import struct
from collections.abc import Iterable
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple

import numpy as np
import pydantic

from pipeline.storage import Storage, StorageError, confined, file_sha256
from pipeline.versions import Version

FOLDER = "weights"
MANIFEST = "MANIFEST.json"
LONGEST_HEADER = 100_000_000
PREFIX = "base_model.model."
BLOCK = 1 << 18
"""Multiply-adds in one product: OpenBLAS keeps to one thread up to here. On cores that an inference engine shares,
its threads wait for one another: larger products take ten times as long."""
FLOATS = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
"""Numpy type of the stored bits; bfloat16 is the upper half of a float32."""


class File(pydantic.BaseModel):
    size: int  # bytes
    sha256: Annotated[str, pydantic.Field(pattern="^[0-9a-f]{64}$")]


class Manifest(pydantic.BaseModel):
    version: str
    kind: Literal["base", "adapter", "full"]
    """base: the model as it was fetched, no files; adapter: a PEFT LoRA of it; full: all its tensors."""
    files: dict[str, File]
    tensors: str
    """sha256 over the sorted names, types and shapes of all tensors in the files."""


class Tensor(NamedTuple):
    dtype: str  # as safetensors spells it: F32, BF16, …
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    stop: int


def key(version: Version, name: str) -> str:
    return f"{FOLDER}/{version}/{name}"


async def publish(storage: Storage, version: Version, folder: str | None, kind: str) -> Manifest:
    """Upload the files of `folder` (None for kind "base"), then their manifest.

    Raises ValueError for a file that is not complete safetensors, Conflict if this version is published already.
    """
    files: dict[str, File] = {}
    for path in sorted(pathlib.Path(folder).iterdir()) if folder else []:
        info = await storage.put_file(key(version, path.name), str(path))
        files[path.name] = File(size=info.size, sha256=info.sha256)
    manifest = Manifest(version=str(version), kind=kind, files=files, tensors=_tensors_sha256(folder))
    await storage.create(key(version, MANIFEST), manifest.model_dump_json(indent=1).encode())
    return manifest


async def manifest(storage: Storage, version: Version) -> Manifest:
    """Raises StorageError if the version is not published, or its manifest is damaged."""
    found = await storage.get(key(version, MANIFEST))
    if found is None:
        raise StorageError(
            f"weights {version} are not published, or were collected: {key(version, MANIFEST)} is missing"
        )
    try:
        read = Manifest.model_validate_json(found.data)
        if read.version != str(version) or any("/" in confined(name) for name in read.files):
            raise ValueError("it names another version, or a file elsewhere")
    except ValueError as error:
        raise StorageError(f"{key(version, MANIFEST)} is damaged: {str(error).splitlines()[0]}") from None
    return read


async def fetch(storage: Storage, version: Version, folder: str, base: str | None = None) -> Manifest:
    """Download a version's files into `folder`; those there already with the right sha256 are kept.

    With `base`, the folder of the base model, full weights must have its tensors.
    Raises StorageError naming the first file that is missing, damaged or incomplete.
    """
    read = await manifest(storage, version)
    os.makedirs(folder, exist_ok=True)
    for name, file in read.files.items():
        path = os.path.join(folder, name)
        there = os.path.isfile(path) and os.path.getsize(path) == file.size
        if there and await asyncio.to_thread(file_sha256, path) == file.sha256:
            continue
        info = await storage.get_file(key(version, name), path)
        if (info.size, info.sha256) != (file.size, file.sha256):
            os.unlink(path)
            raise StorageError(f"{key(version, name)} is not the file that {MANIFEST} names")
    try:
        if _tensors_sha256(folder if read.files else None) != read.tensors:
            raise ValueError("its tensors are not those that the manifest names")
        if read.kind == "full" and base:
            check_complete(tensors(folder), tensors(base))
    except ValueError as error:
        raise StorageError(f"weights {version} are damaged: {error}") from None
    return read


def check_complete(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Raise ValueError unless `found` has the names and shapes of `wanted`; a tied head may be left out."""
    missing = sorted(wanted.keys() - found.keys() - {"lm_head.weight"})
    extra = sorted(found.keys() - wanted.keys() - {"lm_head.weight"})
    if missing or extra:
        named = f"lacks {missing[0]}" if missing else f"has {extra[0]}, which the base model has not"
        raise ValueError(f"the export {named} ({len(missing)} missing, {len(extra)} unknown)")
    for name in found.keys() & wanted.keys():
        if found[name].shape != wanted[name].shape:
            raise ValueError(f"tensor {name} has shape {found[name].shape}, the base model's has {wanted[name].shape}")


def tensors(folder: str) -> dict[str, Tensor]:
    """All tensors in the safetensors files of a folder, by name; raises ValueError for a damaged file."""
    return {
        name: tensor
        for path in sorted(pathlib.Path(folder).glob("*.safetensors"))
        for name, tensor in header(path)[0].items()
    }


def _tensors_sha256(folder: str | None) -> str:
    found = tensors(folder) if folder else {}
    lines = sorted(f"{name} {tensor.dtype} {list(tensor.shape)}" for name, tensor in found.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def header(path: pathlib.Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors in order of their bytes, metadata) of one safetensors file, which must be complete.

    Format: github.com/huggingface/safetensors. Raises ValueError naming the file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(LONGEST_HEADER, size - 8):
                raise ValueError("its header is longer than the file")
            entries = json.loads(file.read(length))
        metadata = entries.pop("__metadata__", {})
        begin = 8 + length
        found = {
            name: Tensor(entry["dtype"], tuple(entry["shape"]), *(begin + offset for offset in entry["data_offsets"]))
            for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"])
        }
        ends = [begin, *(tensor.stop for tensor in found.values())]
        if [tensor.start for tensor in found.values()] != ends[:-1] or ends[-1] != size:
            raise ValueError(f"its tensors do not fill its {size} bytes")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from None
    return found, metadata


class Adapter(NamedTuple):
    """One target of a LoRA: W + scale · B·A."""

    a: np.ndarray  # [rank, in] float32
    b: np.ndarray  # [out, rank] float32
    scale: float


def merge_adapter(base: str, adapter: str, out: str) -> None:
    """Write the base model with a PEFT LoRA merged into it to the folder `out`, which appears when complete.

    The arithmetic and the merged tensors are float32, whatever the base is stored in: in bfloat16 an early adapter
    would round away. All other tensors are copied bit by bit, other files linked (or copied). The base is only read.
    Raises ValueError for an adapter that is not plain LoRA on linear layers that the base has.
    """
    adapters = _adapters(pathlib.Path(adapter))
    files = sorted(pathlib.Path(base).glob("*.safetensors"))
    headers = {path: header(path) for path in files}
    unknown = sorted(adapters.keys() - {name for found, _ in headers.values() for name in found})
    if unknown:
        tied = (
            "; the head is tied to the embedding: leave it out of the targets" if unknown[0] == "lm_head.weight" else ""
        )
        raise ValueError(f"adapter {adapter} changes {unknown[0]}, which the base model {base} does not store{tied}")
    staging = pathlib.Path(f"{out.rstrip('/')}.{secrets.token_hex(4)}.partial")
    staging.mkdir(parents=True)
    try:
        for path in sorted(pathlib.Path(base).iterdir()):
            if path in headers and not adapters.keys().isdisjoint(headers[path][0]):
                _merge_file(path, *headers[path], adapters, staging / path.name)
            elif path.is_file() and not path.name.startswith("."):
                _link_or_copy(path, staging / path.name)
        shutil.rmtree(out, ignore_errors=True)
        staging.rename(out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _adapters(folder: pathlib.Path) -> dict[str, Adapter]:
    """By the name of the base tensor that each one changes. Format: PEFT's adapter_config.json and its tensor names."""
    config = json.loads((folder / "adapter_config.json").read_text())
    asked = [name for name in ("use_dora", "fan_in_fan_out", "modules_to_save") if config.get(name)]
    asked += ["bias"] if config.get("bias", "none") != "none" else []
    if config.get("peft_type") != "LORA" or asked:
        raise ValueError(
            f"adapter {folder} is not plain LoRA ({', '.join(asked) or config.get('peft_type')}): not merged"
        )
    path = folder / "adapter_model.safetensors"
    data = np.memmap(path, np.uint8, "r")
    found = {name: _float32(data, tensor) for name, tensor in header(path)[0].items()}
    modules = {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in found}
    adapters = {}
    for module in sorted(modules):
        a, b = (found.pop(f"{PREFIX}{module}.lora_{part}.weight", None) for part in "AB")
        if a is None or b is None:
            raise ValueError(f"adapter {folder} has no complete LoRA of {module}: not merged")
        adapters[f"{module}.weight"] = Adapter(a, b, _scale(config, module, len(a)))
    if found:
        raise ValueError(f"adapter {folder} holds {min(found)}, which is no LoRA of a linear layer: not merged")
    return adapters


def _scale(config: dict[str, Any], module: str, rank: int) -> float:
    """α/r, or α/√r for rank-stabilised LoRA; a pattern gives the modules that end in it an α of their own."""
    patterns = config.get("alpha_pattern") or {}
    named = [alpha for pattern, alpha in patterns.items() if re.fullmatch(rf"(.*\.)?({pattern})", module)]
    alpha = named[0] if named else config["lora_alpha"]
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)


def _float32(data: np.ndarray, tensor: Tensor) -> np.ndarray:
    """A stored tensor as float32: a view where it is that, else a copy. `data`: the file's bytes."""
    if tensor.dtype not in FLOATS:
        raise ValueError(f"weights of type {tensor.dtype} cannot be merged; use float32, float16 or bfloat16")
    stored = data[tensor.start : tensor.stop].view(FLOATS[tensor.dtype]).reshape(tensor.shape)
    if tensor.dtype == "BF16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32, copy=False)


def _merge_file(
    path: pathlib.Path,
    found: dict[str, Tensor],
    metadata: dict[str, str],
    adapters: dict[str, Adapter],
    out: pathlib.Path,
) -> None:
    data = np.memmap(path, np.uint8, "r")
    with out.open("wb") as file:
        _write_header(file, found, metadata, adapters.keys())
        for name, tensor in found.items():
            if name in adapters:
                file.write(_merged(name, _float32(data, tensor), adapters[name]).data)
            else:
                file.write(data[tensor.start : tensor.stop].data)


def _merged(name: str, weight: np.ndarray, adapter: Adapter) -> np.ndarray:
    """weight + scale · B·A, [out, in] float32, a few rows at a time."""
    a, b, scale = adapter
    if (b.shape[0], a.shape[1]) != weight.shape:
        raise ValueError(f"the adapter of {name} has shape {(b.shape[0], a.shape[1])}, the base {weight.shape}")
    merged = np.empty(weight.shape, np.float32)
    b = b * np.float32(scale)
    step = max(1, BLOCK // a.size)
    for row in range(0, len(b), step):
        block = merged[row : row + step]
        np.matmul(b[row : row + step], a, out=block)
        block += weight[row : row + step]
    return merged


def _write_header(file: BinaryIO, found: dict[str, Tensor], metadata: dict[str, str], merged: Iterable[str]) -> None:
    """The header of `found` with the merged tensors as float32, its length a multiple of 8 as the format asks."""
    entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, tensor in found.items():
        dtype, size = tensor.dtype, tensor.stop - tensor.start
        if name in merged:
            dtype, size = "F32", 4 * int(np.prod(tensor.shape))
        entries[name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)


def _link_or_copy(source: pathlib.Path, target: pathlib.Path) -> None:
    with contextlib.suppress(OSError):
        os.link(source.resolve(), target)
        return
    shutil.copyfile(source, target)


async def published(storage: Storage) -> set[Version]:
    """Versions whose manifest is there."""
    found = [(info.key, Version.of_key(info.key)) for info in await storage.list(FOLDER)]
    return {version for name, version in found if version is not None and name == key(version, MANIFEST)}


def collectable(versions: Iterable[Version], newest: Version, keep: set[Version]) -> list[Version]:
    """Versions below `newest` that are not kept, oldest first."""
    return sorted(version for version in versions if version < newest and version not in keep)


async def collect(storage: Storage, newest: Version, keep: set[Version]) -> list[Version]:
    """Delete the collectable versions, each manifest first, and return them.

    `newest` is the collecting trainer's own, so nothing of a successor, whose term is higher, is ever touched.
    """
    files: dict[Version, list[str]] = {}
    for info in await storage.list(FOLDER):
        if (version := Version.of_key(info.key)) is not None:
            files.setdefault(version, []).append(info.key)
    deleted = collectable(files, newest, keep)
    for version in deleted:
        for name in [key(version, MANIFEST), *files[version]]:
            await storage.delete(name)
    return deleted
