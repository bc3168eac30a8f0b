"""`make bench-operator`: the operator under a thousand RLJobs, on a real API server, as the table of its limits.

    python -m tests.bench_operator [--jobs 1000] [--quiet-s 300]

Etcd, API server, controllers, scheduler and the stand-in for the nodes share this machine with the operator, so that
the figures are upper bounds. Times are the API server's own, from its log of requests.
"""

import argparse
import contextlib
import dataclasses
import datetime
import json
import math
import pathlib
import statistics
import tempfile
import time
from collections.abc import Iterator

from tests import controlplane, replica
from tests.controlplane import ControlPlane
from tests.kubeapi import Api, until
from tests.kubelet import Kubelet
from tests.replica import Replica, rljob

CHILDREN = {"configmaps", "deployments", "jobs", "networkpolicies", "poddisruptionbudgets", "services"}
EDITS = 100
NAMESPACE = "bench"
LIMIT_S = 900.0
"""Longest wait for anything."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answered request."""

    user: str
    verb: str
    resource: str
    name: str
    code: int
    received: float
    answered: float


@dataclasses.dataclass
class Row:
    what: str
    found: float
    limit: float
    unit: str

    def __str__(self) -> str:
        verdict = "ok" if self.found <= self.limit else "MISSED"
        return f"| {self.what} | {self.found:.4g} {self.unit} | ≤ {self.limit:g} {self.unit} | {verdict} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--quiet-s", type=float, default=300.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="miles-bench-") as folder:
        for row in measure(pathlib.Path(folder), options.jobs, options.quiet_s):
            print(row, flush=True)


def measure(folder: pathlib.Path, jobs: int, quiet_s: float) -> Iterator[Row]:
    plane_folder = folder / "plane"
    plane_folder.mkdir()
    with contextlib.ExitStack() as stack:
        plane = stack.enter_context(controlplane.running(plane_folder))
        stack.enter_context(Kubelet(Api(plane.kubelet_kubeconfig)))
        plane.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        until(lambda: plane.api.find("ServiceAccount", "default", NAMESPACE), "the namespace is ready")
        account = replica.install(plane)
        first = start(stack, account, folder, "first")
        first.wait_until_leading()
        print(f"\n| {jobs} RLJobs | measured | limit | |\n|---|---|---|---|", flush=True)
        yield from creation(plane, first, folder, jobs)
        yield from edits(plane, min(EDITS, jobs))
        yield memory(first, "after creation")
        yield from quietness(plane, quiet_s)
        first.stop()
        second = start(stack, account, folder, "second")
        yield restarted(plane, second, jobs)
        yield memory(second, "after a restart")
        third = start(stack, account, folder, "third")
        until(lambda: third.get("/readyz")[0] == 200, "the third stands by", LIMIT_S)
        second.kill()
        killed = time.monotonic()
        third.wait_until_leading(LIMIT_S)
        yield Row("replica killed → the other leads", time.monotonic() - killed, 20, "s")


def start(stack: contextlib.ExitStack, account: pathlib.Path, folder: pathlib.Path, name: str) -> Replica:
    found = Replica(account, folder, name, ["--status-url=http://127.0.0.1:9"])  # where nobody listens
    stack.callback(found.kill)
    return found


def creation(plane: ControlPlane, operator: Replica, folder: pathlib.Path, jobs: int) -> Iterator[Row]:
    """How far the children are behind `kubectl create`."""
    file = folder / "jobs.json"
    items = [rljob(f"job-{number:04}", NAMESPACE) for number in range(jobs)]
    file.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    mark, began = plane.mark(), time.monotonic()
    done = plane.kubectl("create", "-f", str(file), limit_s=LIMIT_S)
    assert done.returncode == 0, done.stderr[-2000:]
    print(f"| kubectl create | {jobs / (time.monotonic() - began):.0f} RLJobs/s | | |", flush=True)
    settled(plane, jobs)
    answers = list(read(plane, mark))
    made = {each.name: each.answered for each in answers if each.resource == "rljobs" and each.verb == "create"}
    last: dict[str, float] = {}
    for each in answers:
        if each.user == replica.USER and each.resource in CHILDREN and each.code == 201:
            job = each.name[:8]
            last[job] = max(last.get(job, 0.0), each.answered)
    yield Row("create → last child, p95", p95([last[job] - made[job] for job in made]), 3, "s")
    yield Row("one pass under this load, p95", histogram_p95(operator, "miles_reconcile_seconds"), 0.5, "s")


def edits(plane: ControlPlane, count: int) -> Iterator[Row]:
    """From an edit of a job, two a second, to its status, once the work of creation is done."""
    settle_writes(plane)
    mark = plane.mark()
    for number in range(count):
        plane.api.patch("RLJob", f"job-{number:04}", NAMESPACE, {"spec": {"rollout": {"replicas": 2}}})
        time.sleep(0.5)
    until(lambda: len(told(plane, mark)) == count, f"{count} edits are told of in the status", LIMIT_S)
    yield Row("edit → status, p95", p95(list(told(plane, mark).values())), 0.5, "s")


def told(plane: ControlPlane, mark: int) -> dict[str, float]:
    """By edited job, the seconds until its status was written."""
    edited: dict[str, float] = {}
    took: dict[str, float] = {}
    for each in read(plane, mark):
        if each.resource == "rljobs" and each.verb == "patch":
            edited[each.name] = each.answered
        elif each.resource == "rljobs/status" and each.code == 200 and each.name in edited:
            took.setdefault(each.name, each.answered - edited[each.name])
    return took


def quietness(plane: ControlPlane, seconds: float) -> Iterator[Row]:
    settle_writes(plane)
    mark = plane.mark()
    time.sleep(seconds)
    found = [
        each for each in read(plane, mark) if each.user == replica.USER and each.verb not in ("get", "list", "watch")
    ]
    written = [each for each in found if each.resource not in ("leases", "events")]
    yield Row(f"writes in {seconds:.0f} quiet s, Leases aside", len(written), 0, "")
    yield Row(f"events in {seconds:.0f} quiet s", sum(each.resource == "events" for each in found), 0, "")


def restarted(plane: ControlPlane, operator: Replica, jobs: int) -> Row:
    began = time.monotonic()
    operator.wait_until_leading(LIMIT_S)
    until(lambda: operator.metrics()['miles_reconciles_total{result="ok"}'] >= jobs, "every job is looked at", LIMIT_S)
    until(lambda: operator.metrics()["miles_queue_depth"] == 0, "the queue is empty", LIMIT_S)
    return Row("restart → every job looked at", time.monotonic() - began, 60, "s")


def memory(operator: Replica, when: str) -> Row:
    return Row(f"resident memory {when}", operator.metrics()["process_resident_memory_bytes"] / 2**20, 256, "MiB")


def settled(plane: ControlPlane, jobs: int) -> None:
    """Until the trainers of all jobs are ready, by their status. All of them are not listed while the last are made,
    which would cost the API server more than those."""
    settle_writes(plane)

    def ready() -> bool:
        found = plane.api.list("RLJob", NAMESPACE)
        return sum(job.get("status", {}).get("trainer", {}).get("ready", 0) for job in found) == jobs

    until(ready, f"the trainers of {jobs} jobs are ready", LIMIT_S)


def settle_writes(plane: ControlPlane) -> None:
    """Until the operator has written nothing for five seconds."""

    def still() -> bool:
        mark = plane.mark()
        time.sleep(5)
        return all(
            each.user != replica.USER or each.resource == "leases" or each.verb == "get" for each in read(plane, mark)
        )

    until(still, "the operator writes nothing", LIMIT_S)


def read(plane: ControlPlane, mark: int) -> Iterator[Answer]:
    """The API server's log of requests from `mark` on."""
    with open(plane.folder / "audit.log", "rb") as log:
        log.seek(mark)
        for line in log:
            told = json.loads(line)
            target = told.get("objectRef", {})
            yield Answer(
                told["user"]["username"],
                told["verb"],
                "/".join(filter(None, (target.get("resource"), target.get("subresource")))),
                target.get("name", ""),
                told.get("responseStatus", {}).get("code", 0),
                moment(told["requestReceivedTimestamp"]),
                moment(told["stageTimestamp"]),
            )


def moment(text: str) -> float:
    return datetime.datetime.fromisoformat(text).timestamp()


def p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1] if len(values) > 1 else values[0]


def histogram_p95(operator: Replica, name: str) -> float:
    """Upper bound of the bucket in which the 95th of a hundred lies."""
    metrics = operator.metrics()
    wanted = 0.95 * metrics[f"{name}_count"]
    bounds = sorted(
        (math.inf if "+Inf" in sample else float(sample.split('"')[1]), count)
        for sample, count in metrics.items()
        if sample.startswith(f"{name}_bucket")
    )
    return next(bound for bound, count in bounds if count >= wanted)


if __name__ == "__main__":
    main()
