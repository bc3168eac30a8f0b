"""A whole `miles run` for tests: start it, wait for a step, kill one of its processes, read what it has stored."""

import asyncio
import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from pipeline import codec
from pipeline.config import RunConfig, load
from pipeline.storage import Storage, open_storage
from pipeline.trainer_log import Plan, decode
from tests.s3server import S3Server

ROOT = pathlib.Path(__file__).parent.parent
TINY = ROOT / "manifests/samples/tiny.yaml"
PARTS = {
    "worker": b"pipeline.rollout",
    "vllm": b"pipeline.vllm_server",
    "rank": b"pipeline.trainer\0",
}
"""Process → what its command line holds; torchrun's own has `pipeline.trainer` last as well, but starts otherwise."""


@dataclasses.dataclass
class Job:
    folder: pathlib.Path
    arguments: list[str]
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "screen", "ab") as screen:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "operators.cli", "run", *self.arguments, "--run-dir", str(self.folder)],
                stdout=screen,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
            )

    def wait(self, timeout_s: float = 600) -> int:
        assert self.process is not None
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not finished within {timeout_s:.0f} s:\n{self.screen()}") from None

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def screen(self) -> str:
        return (self.folder / "screen").read_text(errors="replace")[-4000:]

    def metrics(self) -> list[dict[str, Any]]:
        """One row a step, of the highest term that trained it, in order."""
        rows: dict[int, dict[str, Any]] = {}
        with contextlib.suppress(FileNotFoundError):
            for line in (self.folder / "metrics.jsonl").read_text().splitlines():
                row = json.loads(line)
                if "reward/mean" in row and row["term"] >= rows.get(row["step"], row)["term"]:
                    rows[row["step"]] = row
        return [rows[step] for step in sorted(rows)]

    def until_step(self, step: int, timeout_s: float = 500) -> None:
        """Wait until `step` is trained, or the run is over."""
        deadline = time.monotonic() + timeout_s
        assert self.process is not None
        while self.process.poll() is None and not any(row["step"] >= step for row in self.metrics()):
            assert time.monotonic() < deadline, f"no step {step} within {timeout_s:.0f} s:\n{self.screen()}"
            time.sleep(0.1)

    def pids(self, part: str) -> list[int]:
        """Processes of this run whose command line shows that part, oldest first."""
        assert self.process is not None
        found = []
        for pid in descendants(self.process.pid):
            command = _read(f"/proc/{pid}/cmdline")
            if PARTS[part] in command and b"torch.distributed.run" not in command:
                found.append(pid)
        return sorted(found)

    def kill(self, part: str, number: int = 0) -> None:
        """SIGKILL one process of that part; `all`: every process of the run, `miles run` included, at once."""
        assert self.process is not None
        if part == "all":
            pids = [self.process.pid, *descendants(self.process.pid)]
        else:
            pids = self._until_there(part)
            pids = [pids[number % len(pids)]]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if part == "all":
            self.process.wait()

    def _until_there(self, part: str) -> list[int]:
        """Its processes; one that was killed before may still be on its way back."""
        deadline = time.monotonic() + 60.0
        while not (pids := self.pids(part)):
            assert time.monotonic() < deadline, f"no process of {part} to kill:\n{self.screen()}"
            time.sleep(0.1)
        return pids

    def config(self) -> RunConfig:
        return load(str(self.folder / "run.json"))

    def storage(self) -> Storage:
        store = self.config().store
        return open_storage(store.uri, store.endpoint, store.region)

    def plans(self) -> list[Plan]:
        return asyncio.run(_plans(self.storage()))

    def table(self, key: str) -> Any:
        """The shard of that key."""
        found = asyncio.run(self.storage().get(key))
        assert found is not None, key
        return codec.decode(found.data)


async def _plans(storage: Storage) -> list[Plan]:
    records, number = [], 0
    while (found := await storage.get(f"trainer/log/{number:020d}.json")) is not None:
        records.append(decode(found.data))
        number += 1
    return [record for record in records if isinstance(record, Plan)]


def check_exactly_once(job: Job, steps: int) -> collections.Counter[str]:
    """Every step planned once, every index planned once or dropped once, and none passed over; drops by reason."""
    config, plans = job.config().algorithm, job.plans()
    assert [plan.step for plan in plans] == list(range(1, steps + 1))
    trained = [group.index for plan in plans for group in plan.groups]
    dropped = [drop.index for plan in plans for drop in plan.drops]
    assert len(trained) == steps * config.prompts_per_step
    assert max(collections.Counter(trained + dropped).values()) == 1
    in_flight = max(trained) + 1 - len(trained) - sum(index < max(trained) for index in dropped)
    assert 0 <= in_flight <= config.max_staleness * config.prompts_per_step, "indices were passed over"
    return collections.Counter(drop.reason for plan in plans for drop in plan.drops)


def check_learned(job: Job) -> None:
    """The reward has risen from below 0.2 to above 0.8."""
    rewards = [row["reward/mean"] for row in job.metrics()]
    assert rewards[0] < 0.2
    assert sum(rewards[-5:]) / 5 > 0.8, f"rewards {[round(reward, 2) for reward in rewards]}"


def on_s3(server: S3Server) -> tuple[str, ...]:
    """Settings for a store there."""
    return ("spec.store.uri=s3://miles/jobs", f"spec.store.endpoint={server.endpoint}")


@contextlib.contextmanager
def running(folder: pathlib.Path, *arguments: str, sample: pathlib.Path = TINY) -> Iterator[Job]:
    """The started job, its store below `folder` unless the arguments name another; ended when the block is left."""
    elsewhere = any("spec.store.uri" in argument for argument in arguments)
    store = [] if elsewhere else [f"spec.store.uri=file://{folder}/store"]
    settings = [part for argument in [*store, *arguments] for part in ("--set", argument)]
    job = Job(folder / "run", [str(sample), *settings])
    job.start()
    try:
        yield job
    finally:
        job.end()


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, from /proc."""
    children: dict[int, list[int]] = collections.defaultdict(list)
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (status := _read(f"/proc/{entry}/stat")):
            children[int(status.rpartition(b")")[2].split()[1])].append(int(entry))
    found, todo = [], [pid]
    while todo:
        below = children[todo.pop()]
        found += below
        todo += below
    return found


def _read(path: str) -> bytes:
    try:
        return pathlib.Path(path).read_bytes()
    except OSError:
        return b""
