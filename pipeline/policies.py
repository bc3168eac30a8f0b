"""Policy versions on the worker's machine: fetched, merged where that is wanted, and handed to vLLM as folders."""

import asyncio
import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

from pipeline import weights
from pipeline.config import RunConfig
from pipeline.inference import Weights
from pipeline.storage import Storage
from pipeline.versions import Version

SCRATCH_VARIABLE = "MILES_SCRATCH"
"""Folder for weights on their way into the inference server, which must see it too."""
SHARED_MEMORY = "/dev/shm"


class Policies:
    """Policy versions on this machine, on their way into the engine.

    Adapters are merged into a float32 copy of the base beside the server, or handed over as they are (`hot`).
    """

    def __init__(self, storage: Storage, config: RunConfig, scratch: pathlib.Path) -> None:
        self.storage, self.scratch = storage, scratch
        self.base, self.merge = config.model.path, config.rollout.adapter_loading == "merge"

    async def prepare(self, version: Version) -> Weights:
        """Fetch `version`. Raises StorageError where it is not there or damaged."""
        folder = self.scratch / str(version)
        manifest = await weights.fetch(self.storage, version, str(folder), self.base)
        if manifest.kind == "base":
            return Weights(version, "base", self.base)
        if manifest.kind == "full" or not self.merge:
            return Weights(version, manifest.kind, str(folder))
        merged = folder / "merged"
        await asyncio.to_thread(weights.merge_adapter, self.base, str(folder), str(merged))
        return Weights(version, "merged", str(merged))

    def keep_only(self, version: Version) -> None:
        """Remove the files of other versions; an adapter that is served as it is may be read again."""
        for folder in self.scratch.iterdir():
            if folder.name != str(version) or self.merge:
                shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def scratch(config: RunConfig, instance: str) -> Iterator[pathlib.Path]:
    """A folder of this instance's own, empty even if its predecessor was killed: in memory where that has room for a
    float32 copy of a 16-bit model, unless MILES_SCRATCH names another place."""
    size = sum(path.stat().st_size for path in pathlib.Path(config.model.path).glob("*.safetensors"))
    roomy = os.path.isdir(SHARED_MEMORY) and shutil.disk_usage(SHARED_MEMORY).free > 2 * size
    parent = os.environ.get(SCRATCH_VARIABLE) or (SHARED_MEMORY if roomy else tempfile.gettempdir())
    folder = pathlib.Path(parent) / f"miles-{config.run_id}-{instance}".replace("/", "-")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
