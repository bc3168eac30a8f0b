"""Checkpoints of a run, one at a time, uploaded while training goes on.

The ranks stand still only while each copies what it holds into local files (`begin`). From there each rank's event
loop brings them into the store, without a collective. Between steps the ranks tell each other how far they are
(`settle`): when the files of all of them have been uploaded and read back, rank 0 writes the manifest, and deletes
older checkpoints behind it. A checkpoint that could not be written is reported and costs only itself; the second in a
row is an error. The store has deadlines, and so has a process that is asked to stop: nobody waits without end.
"""

import concurrent.futures
import logging
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import torch

from pipeline import checkpoint, distributed
from pipeline.background import Background
from pipeline.checkpoint import Files, Staged
from pipeline.storage import Storage, StorageError
from pipeline.versions import Version

log = logging.getLogger(__name__)

SLICE_S = 0.5
"""How often ranks that wait ask each other."""
FAILURES_IN_A_ROW = 2

Completed = Callable[[Version, bool], Coroutine[Any, Any, None]]
"""Awaited with a version that has become a checkpoint, and whether that has been read back."""


class Outcome(NamedTuple):
    files: Files
    failure: str = ""


class Saver:
    def __init__(self, storage: Storage, background: Background, completed: Completed | None) -> None:
        """`completed` is there on rank 0 only."""
        self.storage, self.background, self.completed = storage, background, completed
        self.saved: Version | None = None
        """The newest checkpoint."""
        self._failures = 0
        self._staged: Staged | None = None
        self._read_back = True
        self._uploaded = False
        self._future: concurrent.futures.Future[Files]

    def begin(
        self, version: Version, tensors: dict[str, torch.Tensor], state: dict[str, Any], *, read_back: bool = True
    ) -> None:
        """Copy the checkpoint `version` and let its upload begin; waits for the one before. Collective."""
        self.settle(wait=True)
        self._staged = checkpoint.stage(version, tensors, state)
        self._read_back, self._uploaded = read_back, False
        self._future = self.background.submit(checkpoint.upload(self.storage, self._staged, read_back=read_back))

    def settle(self, wait: bool = False) -> None:
        """Take the checkpoint under way a stage further if all ranks are done with one, or (`wait`) to its end.

        Collective. Raises StorageError if two in a row could not be written.
        """
        while self._staged is not None and (outcomes := self._outcomes(wait)):
            failures = [outcome.failure for outcome in outcomes if outcome.failure]
            if failures:
                self._fail(self._staged.version, failures[0])
            elif self._uploaded:
                self.saved, self._failures, self._staged = self._staged.version, 0, None
            else:
                self._uploaded = True
                files = {name: entry for outcome in outcomes for name, entry in outcome.files.items()}
                self._future = self.background.submit(self._complete(self._staged, files))

    def discard(self) -> None:
        """Remove what has been copied here and is still being uploaded; before a process that has failed ends."""
        if self._staged is not None:
            self._staged.local.cleanup()

    def _outcomes(self, wait: bool) -> list[Outcome]:
        """Of every rank; empty if one of them is not done."""
        while True:
            concurrent.futures.wait([self._future], SLICE_S if wait else 0)
            found = distributed.gather(_outcome(self._future))
            outcomes = [outcome for outcome in found if outcome]
            if not wait or len(outcomes) == len(found):
                return outcomes if len(outcomes) == len(found) else []

    async def _complete(self, staged: Staged, files: Files) -> Files:
        if self.completed is not None:
            await checkpoint.complete(self.storage, staged, files)
            try:
                await self.completed(staged.version, self._read_back)
            except StorageError as error:  # not a failure to write it
                raise RuntimeError(f"behind checkpoint {staged.version}: {error}") from error
        return {}

    def _fail(self, version: Version, reason: str) -> None:
        self._failures, self._staged = self._failures + 1, None
        if self._failures >= FAILURES_IN_A_ROW:
            raise StorageError(
                f"{self._failures} checkpoints in a row could not be written, the last {version}: {reason}"
            )
        log.warning(
            "checkpoint %s could not be written (%s); the one before it, %s, stands", version, reason, self.saved
        )


def _outcome(future: concurrent.futures.Future[Files]) -> Outcome | None:
    """None: it is not done. Raises what is not the store's fault, or this disk's."""
    if not future.done():
        return None
    try:
        return Outcome(future.result())
    except (StorageError, OSError) as error:
        return Outcome({}, str(error))
