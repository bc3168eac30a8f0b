"""The folder of a local run: who may use it, its identity, and the files that its processes read.

lock            held while any process of the run lives; holds the pid of `miles run`
run-id          kept, so that the same command goes on with the same run in the store
attempt         number of the newest trainer attempt, counted before it starts
rljob.json      the job as it was run last, overrides included, file:// URIs absolute
run.json        the configuration that the newest attempt reads
logs/           one file per process, and the one before it (.1)
termination/    why each process ended, in its own words
volumes/        what the pods' volumes hold

A job that is refused before anything was started leaves nothing here, one refused before its first step the logs of
what was started and, where a run was, a higher number of attempts: what the refused one wrote into the store keeps its.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import Any

from operators import edits, manifest, schema
from operators.names import RUN_ID
from operators.placement import Placement
from operators.processes import end_orphans
from operators.resolve import Platform, address
from operators.spec import RLJob

LOCK_SECONDS = 60.0
"""How long the processes of a killed run may take to end before a new one gives up."""
IDENTITY = {
    ("metadata", "name"): "the run's place in the store is named after it",
    ("metadata", "namespace"): "the run's place in the store is named after it",
}
"""Field → why it stays what it is while a run goes on, beside those of `operators.edits`."""
OTHER_FOLDER = "choose another folder with --run-dir"
LONGEST_VALUE = 60  # in a message
MOST_CHANGES = 5  # in a message
FOLDERS = ("logs", "termination", "volumes")
RECORDS = ("attempt", "rljob.json", "run.json", "summary.json", "metrics.jsonl", "tensorboard")
"""What a run overwrites or adds to; a run-id lies beside them, or they are somebody else's."""
RESTORED = ("rljob.json", "run.json")
"""What a refused job had changed in the folder of a run that was there."""


class RunFolder:
    """A context that holds the folder's lock. `say` is told what is being waited for."""

    def __init__(self, path: str, say: Callable[[str], None]):
        self.shown = path  # as the user wrote it
        self.path = pathlib.Path(path).absolute()
        self.say = say
        self._summary = self.path / "summary.json"
        self.earlier: dict[str, Any] = {}
        """The summary of an earlier run of the command that came to the end."""
        self.is_complete = False
        """Whether an earlier run of the command has done all that the job that is claimed asks for, in every field."""

    def __enter__(self) -> "RunFolder":
        """Raises ValueError where the folder cannot be that of a run."""
        try:
            return self._enter()
        except OSError as error:
            self._take_away()
            raise ValueError(
                f"{error.filename or self.shown}: {error.strerror}, so no run can be in {self.shown}; {OTHER_FOLDER}"
            ) from None

    def _enter(self) -> "RunFolder":
        # What a refusal takes away again.
        self._made = [self.path / name for name in (*FOLDERS, *RECORDS, "run-id", "lock")]
        self._made = [place for place in (*self._made, self.path, *self.path.parents) if not os.path.lexists(place)]
        self._claimed = False
        self._acquire()
        try:
            kept = self._run_id()
            self.is_new = kept is None
            self.run_id = str(uuid.uuid4()) if kept is None else kept
        except BaseException:
            self._take_away()
            os.close(self.lock)
            raise
        os.ftruncate(self.lock, 0)
        os.pwrite(self.lock, f"{os.getpid()}\n".encode(), 0)
        if count := end_orphans(str(self.path / "logs")):
            self.say(f"ended what an earlier run in this folder had left behind: {count} processes")
        self.earlier, self._earlier_change = self._read_summary(), self._summary_change()
        # Short, since sockets are made in it and their paths may have no more than 107 bytes.
        self.scratch = pathlib.Path(tempfile.gettempdir(), f"miles-{self.run_id[:13]}")
        shutil.rmtree(self.scratch, ignore_errors=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.scratch, ignore_errors=True)
        if not self._claimed:
            self._take_away()
        os.close(self.lock)

    def _acquire(self) -> None:
        """Raises ValueError where another `miles run` lives, or what one left behind does not end in time."""
        deadline = time.monotonic() + LOCK_SECONDS
        told = False
        while not self._locked():
            if time.monotonic() > deadline:
                raise ValueError(f"{self.path}: the processes of an earlier run have not ended in {LOCK_SECONDS:.0f} s")
            if not told:
                self.say("waiting for the processes of an earlier run in this folder to end")
                told = True
            time.sleep(0.2)

    def _locked(self) -> bool:
        """Whether the lock is ours now. A refused run takes its lock file away: then the next one's counts."""
        for name in FOLDERS:
            (self.path / name).mkdir(parents=True, exist_ok=True)
        file = self.path / "lock"
        lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = file.exists() and os.path.samestat(os.fstat(lock), file.stat())
        except BlockingIOError:
            mine = False
            owner = os.pread(lock, 32, 0).decode().strip()
            if owner and os.path.exists(f"/proc/{owner}"):
                os.close(lock)
                raise ValueError(
                    f"{self.path} is in use by another `miles run` (process {owner}); stop that one, or {OTHER_FOLDER}"
                ) from None
        if mine:
            self.lock = lock
        else:
            os.close(lock)
        return mine

    def claim(self, job: RLJob, platform: Platform) -> None:
        """Keep what is run here. Raises ValueError where the folder's run cannot go on as this job; nothing has been
        changed then. A stopped run takes the edits that a suspended job takes, and says which."""
        content = _absolute(_as_json(job), platform)
        kept = self._kept_job()
        done = self.earlier.get("run_id") == self.run_id
        done = done and self.earlier.get("steps") == job.spec.algorithm.total_steps
        self.is_complete = done and kept is not None and _absolute(kept, platform) == content
        if kept is not None and not self.is_complete:
            self._check_edits(_absolute(kept, platform), content)
        self._before = {name: self._bytes(name) for name in RESTORED}
        self._claimed = True
        self._write(self.path / "rljob.json", json.dumps(content, indent=2))
        if self.is_new:
            self._write(self.path / "run-id", f"{self.run_id}\n")

    def _check_edits(self, before: dict[str, Any], content: dict[str, Any]) -> None:
        old, new = leaves(before), leaves(content)
        changed = [path for path in old | new if old.get(path) != new.get(path)]
        for path in changed:
            if (why := bound(path)) is not None:
                got, kept = _shown(new.get(path)), _shown(old.get(path))
                raise ValueError(
                    f"{schema.dotted(path)}: got {got}, but the run in {self.shown} has {kept} and cannot change it: "
                    f"{why}; write what it has, or {OTHER_FOLDER}"
                )
        edited = [f"{schema.dotted(path)} {_shown(old.get(path))} → {_shown(new.get(path))}" for path in changed]
        more = [f"{len(edited) - MOST_CHANGES} more"] if len(edited) > MOST_CHANGES else []
        words = f" with {', '.join([*edited[:MOST_CHANGES], *more])}" if edited else ""
        self.say(f"the run in {self.shown} goes on{words}; to begin another, {OTHER_FOLDER} or delete this one")

    def release(self) -> str:
        """Undo `claim` and `prepare`, for a job that was refused before its first step: mended, it may differ in any
        field. Says in words what became of the folder."""
        for name, content in self._before.items():
            if content is None:
                (self.path / name).unlink(missing_ok=True)
            else:
                self._write(self.path / name, content)
        if not self.is_new:
            return "the run that was there stays as it was"
        # What lies in the store under this id belongs to nobody.
        self._take_away()
        return "only the logs are kept, and what the store has of it; once mended, the same command begins anew"

    def _take_away(self) -> None:
        """All that was not there before, but logs with something in them. Once: the next run may be at work then."""
        made, self._made = self._made, []
        logs = self.path / "logs"
        for place in made:
            if place == logs and logs.is_dir() and any(logs.iterdir()):
                continue
            if place in (self.path, *self.path.parents):
                with contextlib.suppress(OSError):  # something lies in it
                    place.rmdir()
            elif place.is_dir():
                shutil.rmtree(place, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):  # it never came to be
                    place.unlink()

    def _kept_job(self) -> dict[str, Any] | None:
        """The job that was run here last; None: none was. Raises ValueError where that cannot be known, since the
        run-id would then give the run of one job to another."""
        there = [name for name in RECORDS if (self.path / name).exists()]
        if self.is_new and there:
            raise ValueError(
                f"{self.shown} has no run-id but {', '.join(there)}, which a run would overwrite; "
                f"{OTHER_FOLDER}, or restore {self.shown}/run-id"
            )
        if not {"attempt", "rljob.json", "run.json"} & {*there}:
            return None
        try:
            text = self._bytes("rljob.json")
            fault = "missing" if text is None else ""
            found = None if text is None else json.loads(text)
        except (ValueError, RecursionError, OSError):
            found, fault = None, "not the JSON of a job"
        job, faults = (None, []) if fault else manifest.check(found)
        if job is None:
            fault = fault or f"not the JSON of a job ({faults[0]})"
            raise ValueError(
                f"{self.shown}/rljob.json: {fault}, so what ran here is unknown; restore the file, or {OTHER_FOLDER}"
            )
        return _as_json(job)

    def next_attempt(self) -> int:
        """0 for the first. Counted before the attempt starts, so that no number is ever used twice."""
        file = self.path / "attempt"
        text = file.read_text(errors="replace").strip() if file.exists() else None
        if text is not None and not re.fullmatch("[0-9]{1,9}", text):
            raise ValueError(
                f"{self.shown}/{file.name}: got {_shown(text)}, where the number of the newest attempt should stand; "
                f'write the "attempt" of {self.shown}/run.json into it, or {OTHER_FOLDER}'
            )
        attempt = 0 if text is None else int(text) + 1
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
        return {} if self._summary_change() == self._earlier_change else self._read_summary()

    def _read_summary(self) -> dict[str, Any]:
        try:
            found = json.loads(self._summary.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _summary_change(self) -> tuple[int, int] | None:
        """What differs once the summary has been written again; None: there is none."""
        try:
            found = self._summary.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    def _run_id(self) -> str | None:
        """None: no run has been here."""
        text = self._bytes("run-id")
        if text is None:
            return None
        kept = text.decode(errors="replace").strip()
        if not re.fullmatch(RUN_ID, kept):
            raise ValueError(
                f"{self.shown}/run-id: got {_shown(kept)}, which is no run id; restore it, or {OTHER_FOLDER}"
            )
        return kept

    def _bytes(self, name: str) -> bytes | None:
        file = self.path / name
        return file.read_bytes() if file.exists() else None

    def _write(self, file: pathlib.Path, content: str | bytes) -> None:
        """Whole or not at all."""
        partial = file.with_name(file.name + ".partial")
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(partial, file)


def _as_json(job: RLJob) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(job.model_dump_json(by_alias=True, exclude_none=True))
    return content


def _absolute(value: Any, platform: Platform) -> Any:
    """Job as JSON → the same with absolute file:// URIs: a relative one is another place in another folder."""
    if isinstance(value, dict):
        return {key: _absolute(item, platform) for key, item in value.items()}
    if isinstance(value, list):
        return [_absolute(item, platform) for item in value]
    return address(value, "uri", platform) if isinstance(value, str) else value


def leaves(content: dict[str, Any]) -> dict[schema.Path, Any]:
    """Field → value of a job as JSON, for fields without parts that differ from their default."""
    return {path: value for path, value, node in schema.set_values(content, schema.tree()) if not schema.fields(node)}


def bound(path: schema.Path) -> str | None:
    """Why the field stays what it is while a run goes on; None: it may change."""
    if path in IDENTITY:
        return IDENTITY[path]
    row = edits.row(path)
    return row[1] if row is not None and row[0] == edits.REFUSED else None


def _shown(value: Any) -> str:
    if value is None:
        return "the default"
    text = json.dumps(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"
