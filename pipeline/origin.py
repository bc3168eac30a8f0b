"""A run that begins from a checkpoint of another one: checkpoint.resumeFrom.

Weights and optimizer state of that checkpoint are those of step 0. Everything else begins anew: steps, the course of
the learning rate, prompts, random numbers, the KL coefficient, what rewards are normalised by. Of the other run only
run.json and checkpoints/ are read, and only once: step 0 becomes this run's own first checkpoint before anything is
generated with it.

Limit: the base model is the same if its URI and revision are.
"""

import asyncio
import dataclasses
import json
import re

from pipeline import checkpoint
from pipeline.checkpoint import Checkpoint
from pipeline.config import ModelConfig, RunConfig
from pipeline.distributed import CPU
from pipeline.roles import Roles
from pipeline.storage import Storage, StorageError, Unavailable, exists, open_storage
from pipeline.versions import Version

FIELD = "checkpoint.resumeFrom"
REMEDY = "give the prefix of a run, <store.uri>/<namespace>/<name>/<run id>, or one of the folders in its checkpoints/"


def parse(uri: str) -> tuple[str, Version | None]:
    """(prefix of the run, the checkpoint that is meant; None: its newest good one)."""
    found = re.fullmatch(rf"(.+?)(/{checkpoint.FOLDER}(/(t\d{{6}}-s\d{{20}}))?)?/*", uri)
    assert found is not None, "a URI has no line breaks"
    return found[1], Version.parse(found[4]) if found[4] else None


def store(config: RunConfig) -> Storage:
    """Where the other run lies. Raises ValueError for a folder that is not there, StorageError for a closed one."""
    uri = _uri(config)
    prefix, _ = parse(uri)
    if not exists(prefix):
        raise ValueError(f"{FIELD}: {uri}: there is no such folder; {REMEDY}")
    return open_storage(prefix, config.store.endpoint, config.store.region, read_only=True)


async def candidates(config: RunConfig, storage: Storage) -> list[Checkpoint]:
    """The checkpoints in the other run's `storage` that may be begun from, newest first. Raises ValueError if there is
    none, StorageError if none can be read."""
    uri = _uri(config)
    _, wanted = parse(uri)
    found = await checkpoint.newest(storage)
    if not found:
        raise ValueError(f"{FIELD}: {uri} holds no checkpoint; {REMEDY}")
    chosen = [each for each in found if wanted in (None, each.version)]
    if not chosen:
        there = ", ".join(str(each.version) for each in found)
        raise ValueError(f"{FIELD}: {uri} does not exist; its run has the checkpoints {there}")
    return chosen


async def check(config: RunConfig, own: Storage) -> None:
    """Raises ValueError if there is no checkpoint to begin from, or none that fits this run's model and adapter, and
    StorageError if the other run's store does not answer. With a checkpoint of its own a run needs no other."""
    if await checkpoint.newest(own):
        return
    try:
        storage = store(config)
        found = await candidates(config, storage)
        theirs = await _model(storage)
    except Unavailable:
        raise
    except StorageError as error:
        raise ValueError(f"{FIELD}: {error}") from None
    if (theirs.uri, theirs.revision) != (config.model.uri, config.model.revision):
        raise ValueError(
            f"{FIELD}: {_uri(config)} belongs to model {_named(theirs)}, this run has {_named(config.model)}: give the "
            "same model.uri and model.revision"
        )
    try:
        await asyncio.to_thread(_check_shape, config, found[0])
    except ValueError as error:
        raise ValueError(f"{FIELD}: {error}") from None


def _uri(config: RunConfig) -> str:
    assert config.checkpoint.resume_from is not None
    return config.checkpoint.resume_from


async def _model(storage: Storage) -> ModelConfig:
    """Base model of the run that is stored there."""
    found = await storage.get("run.json")
    try:
        if found is None:
            raise ValueError("it is missing")
        content = json.loads(found.data)["config"]["model"]
        return ModelConfig(uri=content["uri"], revision=content["revision"], path="")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{FIELD}: {storage.bucket.name}/run.json does not name the base model: {error}") from None


def _named(model: ModelConfig) -> str:
    return model.uri + (f"@{model.revision}" if model.revision else "")


def _check_shape(config: RunConfig, found: Checkpoint) -> None:
    """Compares the parameters that would be trained, built without storage; the optimizer's state follows them."""
    whole = config.trainer.model_copy(update={"dtype": "float32", "compile": False})  # as one rank alone: no FSDP
    roles = Roles(config.model_copy(update={"trainer": whole}), CPU, lambda *_: None)
    wanted = {f"model.{name}": parameter for name, parameter in roles.own_parameters().items()}
    saved = {name: entry for name, entry in found.tensors.items() if name.startswith("model.")}
    checkpoint.check_names(dataclasses.replace(found, tensors=saved), wanted)
