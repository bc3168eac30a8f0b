"""Put the base model into the local folder config.model.path: `python -m pipeline.fetch`, an init container.

A model is a folder of safetensors, configuration and tokenizer, at file:///folder, s3://bucket/prefix or
hf://org/name[@revision]. Pickled weights (.bin, .pt) are never downloaded: reading them runs what they say. Python
files come only with trust_remote_code. Each file appears under its name when it is complete; a second start goes on
where the first was broken off, and one that finds the finished record does nothing, not even a request. Processes of
one machine that want the same folder wait for the one that fetches.

Exits 3 with one line (also in the termination message) for what only the user can mend, 1 for an outage.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import pathlib
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from typing import Any, Protocol

from pipeline import config as configuration
from pipeline import termination
from pipeline.config import ModelConfig, StoreConfig
from pipeline.storage import SEGMENT, Storage, StorageError, Unavailable, file_sha256, open_storage
from pipeline.weights import header

SETTINGS = "config.json"
RECORD = ".fetched.json"
LOCK = ".fetch.lock"
LOCK_LIMIT_S = 3600.0
LOCK_PAUSE_S = 0.5

KINDS = ["safetensors", "json", "txt", "model", "jinja", "tiktoken"]
DOUBLES = re.compile(r"consolidated.*")
"""Other packagings of the same weights."""
TOKENIZER = re.compile(
    r"(tokenizer.*|special_tokens_map\.json|added_tokens\.json|chat_template.*|vocab\..*|merges\.txt|.*\.tiktoken)"
)
CONVERT = "load it with transformers and save it with save_pretrained(), which writes them"


class Source(Protocol):
    """Where a model's files are."""

    async def names(self) -> dict[str, str]:
        """The files by name, each with what tells one content from another."""
        ...

    async def bring(self, name: str, target: pathlib.Path) -> None:
        """Make `target`, in one step, the file `name`."""
        ...


class Folder:
    """Files on this machine: linked, not copied, where that is possible."""

    def __init__(self, folder: str, symbolic: bool):
        """`symbolic`: whether all who use the model see this folder as well, so that a symbolic link will do."""
        self.folder, self.symbolic = pathlib.Path(folder), symbolic

    async def names(self) -> dict[str, str]:
        if not self.folder.is_dir():
            raise ValueError(f"{self.folder} is not a folder on this machine")
        return {path.name: str(path.stat().st_size) for path in self.folder.iterdir() if path.is_file()}

    async def bring(self, name: str, target: pathlib.Path) -> None:
        await asyncio.to_thread(self._bring, (self.folder / name).resolve(), target)

    def _bring(self, source: pathlib.Path, target: pathlib.Path) -> None:
        partial = target.with_name(f"{target.name}.{secrets.token_hex(4)}.partial")
        try:
            os.link(source, partial)
        except OSError:
            if self.symbolic:
                partial.symlink_to(source)
            else:
                shutil.copyfile(source, partial)
        partial.replace(target)


class Snapshot(Folder):
    """A folder in the hub's cache, whose large files are named by their sha256."""

    def __init__(self, folder: str):
        super().__init__(folder, symbolic=False)

    def _bring(self, source: pathlib.Path, target: pathlib.Path) -> None:
        if re.fullmatch("[0-9a-f]{64}", source.name) and file_sha256(str(source)) != source.name:
            source.unlink()
            raise Unavailable(f"{source} in the hub's cache is damaged and was removed: start again to download it")
        super()._bring(source, target)


class Objects:
    """Files in a store, by names without a folder."""

    def __init__(self, storage: Storage):
        self.storage = storage

    async def names(self) -> dict[str, str]:
        return {info.key: info.etag for info in await self.storage.list("") if "/" not in info.key}

    async def bring(self, name: str, target: pathlib.Path) -> None:
        await self.storage.get_file(name, str(target))


def main() -> None:
    termination.clear()
    try:
        config = configuration.load()
    except ValueError as error:
        termination.report(str(error))
        sys.exit(termination.USER_ERROR)
    try:
        asyncio.run(fetch(config.model, config.store))
    except Unavailable as error:
        termination.report(f"model.uri: {error}")
        sys.exit(termination.FAILED)
    except (ValueError, StorageError) as error:
        termination.report(f"model.uri: {error}")
        sys.exit(termination.USER_ERROR)
    except OSError as error:
        termination.report(f"model.path: {error.filename}: {error.strerror}")
        sys.exit(termination.FAILED)


async def fetch(model: ModelConfig, store: StoreConfig) -> None:
    """Make model.path the complete model. Raises ValueError, StorageError, or Unavailable where a later try may do."""
    path = pathlib.Path(model.path)
    if not (model.uri.startswith("file://") and path.resolve() == pathlib.Path(_folder(model.uri)).resolve()):
        path.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            await _fetch(model, store, path)
    elif model.tokenizer:
        raise ValueError(f"{model.uri} is used where it lies: save the tokenizer {model.tokenizer} into it instead")
    check(path)


async def settings(model: ModelConfig, store: StoreConfig, path: pathlib.Path) -> None:
    """Bring what describes the model, and no weights, into the folder `path`; raises as `fetch` does."""
    source = await _open(model, store, path, [SETTINGS, *(["*.py"] if model.trust_remote_code else [])])
    names = [name for name in await source.names() if SEGMENT.fullmatch(name)]
    if SETTINGS not in names:
        raise ValueError(f"{model.uri} has no {SETTINGS}")
    for name in names:
        if name == SETTINGS or (model.trust_remote_code and name.endswith(".py")):
            await source.bring(name, path / name)


async def _fetch(model: ModelConfig, store: StoreConfig, path: pathlib.Path) -> None:
    request = [model.uri, model.revision, model.tokenizer, model.trust_remote_code]
    record = _read_record(path)
    if record["request"] != request:
        for name in record["files"]:
            (path / name).unlink(missing_ok=True)
        record = {"request": request, "complete": False, "files": {}}
    elif record["complete"] and all((path / name).is_file() for name in record["files"]):
        return
    for partial in path.glob("*.partial"):
        partial.unlink()
    started = time.monotonic()
    for name, (source, identity) in sorted((await _wanted(model, store, path)).items()):
        if record["files"].get(name) != identity or not (path / name).is_file():
            await source.bring(name, path / name)
            record["files"][name] = identity
            _write_record(path, record)
    foreign = sorted(other.name for other in path.glob("*.safetensors") if other.name not in record["files"])
    if foreign:
        raise ValueError(f"{path} holds {foreign[0]}, which is no part of {model.uri}: empty the folder")
    check(path)
    _write_record(path, record | {"complete": True})
    size = sum((path / name).stat().st_size for name in record["files"])
    print(
        f"{model.uri}: {len(record['files'])} files, {size / 1e6:.0f} MB, {time.monotonic() - started:.0f} s",
        flush=True,
    )


async def _wanted(model: ModelConfig, store: StoreConfig, path: pathlib.Path) -> dict[str, tuple[Source, str]]:
    """By name: where each file comes from, and which content it is."""
    source = await _open(model, store, path)
    found = await source.names()
    chosen = select(model.uri, list(found), model.trust_remote_code)
    wanted = {name: (source, found[name]) for name in chosen}
    if model.tokenizer:
        source = await _open(ModelConfig(uri=model.tokenizer, path=model.path), store, path)
        wanted = {name: entry for name, entry in wanted.items() if not TOKENIZER.fullmatch(name)}
        wanted |= {
            name: (source, identity) for name, identity in (await source.names()).items() if TOKENIZER.fullmatch(name)
        }
    return wanted


def select(uri: str, names: list[str], python: bool) -> list[str]:
    """The files to take of a model's, plain names only; raises ValueError where there are no safetensors."""
    plain = [name for name in names if SEGMENT.fullmatch(name) and not DOUBLES.fullmatch(name)]
    chosen = [name for name in plain if name.rpartition(".")[2] in _kinds(python)]
    if not names:
        raise ValueError(f"{uri} is empty or does not exist")
    if not any(name.endswith(".safetensors") for name in chosen):
        others = sorted({name.rpartition(".")[2] for name in names if re.search(r"\.(bin|pt|pth|pkl|gguf|h5)$", name)})
        instead = f", only .{', .'.join(others)}" if others else ""
        raise ValueError(f"{uri} has no safetensors files{instead}: {CONVERT}")
    return chosen


def _kinds(python: bool) -> list[str]:
    return [*KINDS, "py"] if python else KINDS


async def _open(
    model: ModelConfig, store: StoreConfig, path: pathlib.Path, patterns: list[str] | None = None
) -> Source:
    """`patterns`: of the files that are wanted from a hub; by default all that belong to a model."""
    uri = model.uri
    scheme = uri.partition("://")[0]
    if scheme == "hf":
        return Snapshot(await asyncio.to_thread(_hub_snapshot, model, path, patterns))
    if scheme == "s3":
        return Objects(open_storage(uri, store.endpoint, store.region))
    if uri.startswith(("file:///", "/")):
        return Folder(_folder(uri), symbolic=True)
    raise ValueError(f"{uri!r} is none of file:///folder, s3://bucket/prefix and hf://org/name")


def _folder(uri: str) -> str:
    return uri.removeprefix("file://")


def _hub_snapshot(model: ModelConfig, path: pathlib.Path, patterns: list[str] | None) -> str:
    """The folder of the hub's cache with the model's files; downloads what is missing in it.

    HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT and HF_TOKEN are honoured. Where the cache cannot be written to (a container),
    it is kept beside the model, which then shares its files.
    """
    import huggingface_hub as hub
    from huggingface_hub import constants, errors

    uri = model.uri
    name, _, named = uri.removeprefix("hf://").partition("@")
    if named and model.revision and named != model.revision:
        raise ValueError(f"{uri} names another revision than model.revision, {model.revision}: leave one out")
    revision = named or model.revision
    cache = constants.HF_HUB_CACHE if _writable(constants.HF_HUB_CACHE) else str(path / ".hub")
    try:
        return hub.snapshot_download(
            name,
            revision=revision,
            cache_dir=cache,
            allow_patterns=patterns or [f"*.{kind}" for kind in _kinds(model.trust_remote_code)],
            ignore_patterns=["*/*", "consolidated*"],
        )
    except errors.GatedRepoError:
        raise ValueError(f"{uri} is gated: accept its licence on the hub and give a token (HF_TOKEN)") from None
    except errors.RevisionNotFoundError:
        raise ValueError(f"{uri} has no revision {revision}") from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise ValueError(
            f"{uri} is not on the hub, or is private: check the name, or give a token (HF_TOKEN)"
        ) from None
    except errors.LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            raise ValueError(f"{uri} is not complete in the cache {cache}, and HF_HUB_OFFLINE is set") from None
        raise Unavailable(f"{uri}: the hub does not answer ({_line(error.__cause__ or error)})") from None
    except OSError as error:
        raise Unavailable(f"{uri}: {_line(error)}") from None


def _writable(folder: str) -> bool:
    present = next(parent for parent in (pathlib.Path(folder), *pathlib.Path(folder).parents) if parent.exists())
    return os.access(present, os.W_OK)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def check(path: pathlib.Path) -> None:
    """Raise ValueError, naming the file, unless the folder is a complete model with its tokenizer."""
    if not (path / "config.json").is_file():
        raise ValueError(f"{path} has no config.json: {CONVERT}")
    architectures(path)
    if not (path / "tokenizer.json").is_file():
        raise ValueError(
            f"{path} has no tokenizer.json: save the tokenizer with transformers'"
            " AutoTokenizer.from_pretrained(…).save_pretrained(…), which writes one"
        )
    if not isinstance(_json_object(path / "tokenizer.json").get("model"), dict):
        raise ValueError(f"{path}/tokenizer.json holds no tokenizer (it has no model): fetch or save it again")
    for name in ("tokenizer_config.json", "generation_config.json"):
        if (path / name).is_file():
            _json_object(path / name)
    index = path / "model.safetensors.index.json"
    names = _indexed(index) if index.is_file() else set()
    lying = {file.name for file in path.glob("*.safetensors") if not DOUBLES.fullmatch(file.name)}
    for name in names or lying or {"model.safetensors"}:
        if not SEGMENT.fullmatch(name) or not (path / name).is_file():
            raise ValueError(f"{path} has no file {name!r} of its weights; safetensors alone are read: {CONVERT}")
        tensors, _ = header(path / name)
        if not tensors:
            raise ValueError(f"{path}/{name} holds no tensors: fetch or save the model again")


def architectures(path: pathlib.Path) -> list[str]:
    """What config.json names; raises ValueError for one that is no configuration of a model."""
    found = _json_object(path / "config.json").get("architectures") or []
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise ValueError(f"{path}/config.json: architectures is {found!r}, not a list of names: {CONVERT}")
    return found


def _json_object(file: pathlib.Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}): fetch or save it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} is not a JSON object: fetch or save it again")
    return content


def _indexed(index: pathlib.Path) -> set[str]:
    """The files that an index of safetensors files names."""
    named = _json_object(index).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
        raise ValueError(f"{index} is not an index of safetensors files: fetch or save it again")
    return set(named.values())


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
    """One process of this machine at a time; the kernel frees the lock of one that dies."""
    deadline = time.monotonic() + LOCK_LIMIT_S
    with (path / LOCK).open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Unavailable(
                        f"another process fetches into {path} for more than {LOCK_LIMIT_S:.0f} s"
                    ) from None
                time.sleep(LOCK_PAUSE_S)
        yield


def _read_record(path: pathlib.Path) -> dict[str, Any]:
    try:
        record = json.loads((path / RECORD).read_text())
        return {"request": record["request"], "complete": record["complete"], "files": dict(record["files"])}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return {"request": None, "complete": False, "files": {}}


def _write_record(path: pathlib.Path, record: dict[str, Any]) -> None:
    partial = path / f"{RECORD}.partial"
    partial.write_text(json.dumps(record))
    partial.replace(path / RECORD)


if __name__ == "__main__":
    main()
