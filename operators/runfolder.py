"""The folder of a local run: who may use it, its identity, and the files that its processes read.

lock            held while any process of the run lives; holds the pid of `miles run`
run-id          kept, so that the same command goes on with the same run in the store
attempt         number of the newest trainer attempt, counted before it starts
rljob.json      the job as it was run last, overrides included
run.json        the configuration that the newest attempt reads
logs/           one file per process, and the one before it (.1)
termination/    why each process ended, in its own words
volumes/        what the pods' volumes hold
"""

import contextlib
import fcntl
import json
import os
import pathlib
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import Any

from operators.placement import Placement
from operators.spec import RLJob

LOCK_SECONDS = 60.0
"""How long the processes of a killed run may take to end before a new one gives up."""
IMMUTABLE = (("metadata", "name"), ("spec", "model", "uri"), ("spec", "store", "uri"), ("spec", "algorithm", "type"))


class RunFolder:
    """A context that holds the folder's lock. `say` is told what is being waited for."""

    def __init__(self, path: str, say: Callable[[str], None]):
        self.shown = path  # as the user wrote it
        self.path = pathlib.Path(path).absolute()
        self.say = say
        self._summary = self.path / "summary.json"

    def __enter__(self) -> "RunFolder":
        for name in ("logs", "termination", "volumes"):
            (self.path / name).mkdir(parents=True, exist_ok=True)
        self.lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._acquire()
        except BaseException:
            os.close(self.lock)
            raise
        os.ftruncate(self.lock, 0)
        os.pwrite(self.lock, f"{os.getpid()}\n".encode(), 0)
        self._summary.unlink(missing_ok=True)
        self.run_id = self._once("run-id", str(uuid.uuid4()))
        # Short, since sockets are made in it and their paths may have no more than 107 bytes.
        self.scratch = pathlib.Path(tempfile.gettempdir(), f"miles-{self.run_id[:13]}")
        shutil.rmtree(self.scratch, ignore_errors=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.scratch, ignore_errors=True)
        os.close(self.lock)

    def _acquire(self) -> None:
        """Raises ValueError where another `miles run` lives, or what one left behind does not end in time."""
        deadline = time.monotonic() + LOCK_SECONDS
        told = False
        while not self._locked():
            owner = os.pread(self.lock, 32, 0).decode().strip()
            if owner and os.path.exists(f"/proc/{owner}"):
                raise ValueError(
                    f"{self.path} is in use by another `miles run` (process {owner}); "
                    "stop that one, or choose another folder with --run-dir"
                )
            if time.monotonic() > deadline:
                raise ValueError(f"{self.path}: the processes of an earlier run have not ended in {LOCK_SECONDS:.0f} s")
            if not told:
                self.say("waiting for the processes of an earlier run in this folder to end")
                told = True
            time.sleep(0.2)

    def _locked(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    def claim(self, job: RLJob) -> None:
        """Keep what is run here. Raises ValueError where this folder's run is of another job, model or store."""
        content = json.loads(job.model_dump_json(by_alias=True, exclude_none=True))
        file = self.path / "rljob.json"
        before = json.loads(file.read_text()) if file.exists() else content
        for path in IMMUTABLE:
            if dig(before, path) != dig(content, path):
                raise ValueError(
                    f"{'.'.join(path)}: differs from the run in {self.path}, which can only be resumed with the same "
                    "one; choose another folder with --run-dir"
                )
        self._write(file, json.dumps(content, indent=2))

    def next_attempt(self) -> int:
        """0 for the first. Counted before the attempt starts, so that no number is ever used twice."""
        file = self.path / "attempt"
        attempt = int(file.read_text()) + 1 if file.exists() else 0
        self._write(file, f"{attempt}\n")
        return attempt

    def prepare(self, placement: Placement) -> None:
        """Make the volumes, and put the mounted files into them."""
        for folder in placement.folders:
            pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        for path, text in placement.files.items():
            self._write(pathlib.Path(path), text)
            if path.endswith("/run.json"):
                self._write(self.path / "run.json", text)

    def summary(self) -> dict[str, Any]:
        """What the trainer says of the finished run; {} where it has not finished in this run of the command."""
        try:
            found = json.loads(self._summary.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _once(self, name: str, text: str) -> str:
        file = self.path / name
        if not file.exists():
            self._write(file, f"{text}\n")
        return file.read_text().strip()

    def _write(self, file: pathlib.Path, text: str) -> None:
        """Whole or not at all."""
        partial = file.with_name(file.name + ".partial")
        partial.write_text(text)
        os.replace(partial, file)


def dig(content: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        content = content.get(key, {})
    return content
