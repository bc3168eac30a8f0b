"""Entry point of the trainer's container: check what can be checked, then start torchrun.

`python -m pipeline.launch` validates configuration, model folder and store first, so that a user's error costs
seconds and one line (termination message, exit 3), not a rendezvous. torchrun runs in this very process, driven by
its PET_* variables, so that the first failing rank's exit code becomes the container's.
"""

import asyncio
import contextlib
import json
import math
import os
import pathlib
import sys
import tempfile
from typing import Any

import pydantic

from pipeline import archive, fetch, output, termination
from pipeline import config as configuration
from pipeline.algorithms.registry import ALGORITHMS, OFF_OR_ABOVE_1, SHARES, Algorithm
from pipeline.config import AlgorithmConfig, RunConfig
from pipeline.storage import Conflict, Storage, StorageError, Unavailable, open_storage
from pipeline.storage.check import probe

KINDS = {bool: "true or false", int: "a whole number, at least 0", float: "a number, at least 0"}
KILL_DELAY_S = 5
"""How much longer than the ranks' own deadline torchrun waits before it kills them."""
SCHEMA = 1
"""Of run.json and everything beside it."""


def main() -> None:
    if termination.path() is None:  # the ranks' exit reasons are wanted here, even if nobody else reads them
        os.environ[termination.FILE_VARIABLE] = os.path.join(tempfile.mkdtemp(prefix="miles-"), "termination")
    termination.clear()
    try:
        config = load()
        check(config)
    except (ValueError, StorageError) as error:
        termination.report(str(error))
        sys.exit(termination.FAILED if isinstance(error, Unavailable) else termination.USER_ERROR)
    patience = str(config.trainer.stop_grace_s + KILL_DELAY_S)
    code = torchrun(["--shutdown-timeout", patience, "-m", "pipeline.trainer"])
    sys.stdout.flush()
    os._exit(code)  # taking torch apart would cost a second, in which the run is over and nobody knows


def load() -> RunConfig:
    """The RunConfig that MILES_CONFIG names; raises ValueError with one line for all that is wrong with it."""
    try:
        return configuration.load()
    except KeyError:
        raise ValueError(f"{configuration.CONFIG_VARIABLE} is not set; it names the run's configuration file") from None
    except OSError as error:
        raise ValueError(f"{configuration.CONFIG_VARIABLE}: {error.filename}: {error.strerror}") from None
    except pydantic.ValidationError as error:
        faults = [".".join(map(str, fault["loc"])) + ": " + fault["msg"] for fault in error.errors()]
        raise ValueError("configuration: " + "; ".join(faults)) from None


def check(config: RunConfig) -> None:
    """Raise ValueError or StorageError, one line each, for what would fail later on."""
    check_algorithm(config)
    check_model(config)
    asyncio.run(check_store(config))


def check_algorithm(config: RunConfig) -> None:
    algorithm = config.algorithm
    entry = ALGORITHMS.get(algorithm.type)
    if entry is None:
        raise ValueError(f"algorithm.type: {algorithm.type!r} is not available; choose one of {', '.join(ALGORITHMS)}")
    if algorithm.group_size < entry.minimum_group_size:
        raise ValueError(
            f"algorithm.group_size: {algorithm.group_size} is too small; {algorithm.type} compares the samples of a "
            f"prompt and needs at least {entry.minimum_group_size}"
        )
    if algorithm.prompts_per_step % algorithm.updates_per_step:
        raise ValueError(
            f"algorithm.updates_per_step: {algorithm.updates_per_step} does not divide prompts_per_step "
            f"({algorithm.prompts_per_step})"
        )
    check_parameters(algorithm, entry)


def check_parameters(algorithm: AlgorithmConfig, entry: Algorithm) -> None:
    """Those that the algorithm reads, and no others: its code asks for them by name and for no default."""
    for name in algorithm.parameters.keys() - entry.parameters.keys():
        known = ", ".join(entry.parameters) or "none"
        raise ValueError(f"algorithm.parameters.{name}: unknown to {algorithm.type}; known are {known}")
    for name, default in entry.parameters.items():
        value: Any = algorithm.parameters.get(name)
        wanted = (int, float) if type(default) is float else (type(default),)
        if type(value) not in wanted or not 0 <= value < math.inf:
            raise ValueError(
                f"algorithm.parameters.{name}: got {json.dumps(value)}; {algorithm.type} needs {KINDS[type(default)]}, "
                f"such as its default, {json.dumps(default)}"
            )
        if (name in SHARES and value > 1) or (name in OFF_OR_ABOVE_1 and 0 < value <= 1):
            raise ValueError(
                f"algorithm.parameters.{name}: got {value}; give {'at most 1' if name in SHARES else '0, or above 1'}"
            )


def check_model(config: RunConfig) -> None:
    """The folder must hold a causal language model, as fetch leaves it."""
    folder = pathlib.Path(config.model.path)
    if not (folder / "config.json").is_file():
        raise ValueError(f"model.path: {folder} holds no config.json; fetch the model first (python -m pipeline.fetch)")
    try:
        fetch.check(folder)
        names = fetch.architectures(folder)
    except ValueError as error:
        raise ValueError(f"model.path: {error}") from None
    if not names or not names[0].endswith("ForCausalLM"):
        raise ValueError(f"model.uri: {config.model.uri} is {names}, not a causal language model")


async def check_store(config: RunConfig) -> None:
    """The run's prefix must keep the store's promises, and the output's must at least answer."""
    store = config.store
    storage = open_storage(store.uri, store.endpoint, store.region)
    await probe(storage)
    await check_origin(storage, config)
    if config.data.replay_from is not None:
        await archive.check(config, storage)
    await record(storage, config)
    if config.output is not None:
        await output.check(open_storage(config.output.uri, store.endpoint, store.region), config)


async def check_origin(storage: Storage, config: RunConfig) -> None:
    """The checkpoint of another run that this one begins from, if it does, must be there and fit."""
    if config.checkpoint.resume_from is not None:
        from pipeline import origin  # needs torch, for which nobody else has to wait here

        await origin.check(config, storage)


async def record(storage: Storage, config: RunConfig) -> None:
    """run.json, of the first attempt, and attempts/<n>.json; both are written once."""
    content = {"schema": SCHEMA, "attempt": config.attempt, "config": config.model_dump(mode="json")}
    for key in ("run.json", f"attempts/{config.attempt}.json"):
        with contextlib.suppress(Conflict):
            await storage.create(key, json.dumps(content).encode())


def torchrun(arguments: list[str]) -> int:
    """Run `arguments` under torchrun as PET_* say; 0, or the exit code of the rank that knew why it failed."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.run(run.parse_args(arguments))
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}
        known = codes & {termination.USER_ERROR, termination.STOPPED, termination.FENCED}
        return min(known) if known else termination.FAILED
    except SignalException:
        return termination.STOPPED if termination.STOPPED_PREFIX in termination.text() else termination.FAILED
    return termination.COMPLETE


if __name__ == "__main__":
    main()
