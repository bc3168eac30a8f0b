"""Jobs, pods and children in the states that the reconciler is asked about, as plain dicts."""

import datetime
from collections.abc import Mapping
from typing import Any

import yaml

from operators.conditions import timestamp
from operators.observed import Key, Observed, Plan
from operators.reconcile import reconcile
from operators.resolve import Platform
from tests.test_spec import MINIMAL

NOW = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)
PLATFORM = Platform()
UID = "5b2e"

Dict = dict[str, Any]


def after(seconds: float) -> datetime.datetime:
    return NOW + datetime.timedelta(seconds=seconds)


def rljob(**spec: Any) -> Dict:
    value: Dict = yaml.safe_load(MINIMAL)
    value["metadata"] |= {"uid": UID, "namespace": "default", "generation": 1, "resourceVersion": "1"}
    value["spec"] |= spec
    return value


def at(now: datetime.datetime, job: Dict, **seen: Any) -> Plan:
    return reconcile(Observed(job, **seen), now, PLATFORM)


class Story:
    """A job as the API server holds it while the operator acts on it: each `look` carries the plan out at once."""

    def __init__(self, **spec: Any) -> None:
        self.job = rljob(**spec)
        self.children: dict[tuple[str, str], Dict] = {}
        self.pods: list[Dict] = []
        self.report: Dict | None = None
        self.events: list[Dict] = []
        self.spot_nodes: frozenset[str] | None = None
        self.foreign: frozenset[Any] = frozenset()
        self.refused: Dict = {}  # children that the API server does not take
        self.now = NOW
        self.told: list[tuple[str, str]] = []  # (type, reason) of every event
        self.deleted: list[tuple[str, str]] = []

    def look(self, seconds: float = 0) -> Plan:
        self.now += datetime.timedelta(seconds=seconds)
        plan = at(
            self.now,
            self.job,
            children=list(self.children.values()),
            pods=self.pods,
            report=self.report,
            events=self.events,
            foreign=self.foreign,
            refused=self.refused,
            spot_nodes=self.spot_nodes,
        )
        for child in plan.apply:
            key = child["kind"], child["metadata"]["name"]
            if Key(*key) in self.refused:
                continue
            known = self.children.get(key, {"metadata": {"uid": f"uid-{key[0]}-{key[1]}".lower()}})
            self.children[key] = known | child | {"metadata": known["metadata"] | child["metadata"]}
        for deletion in plan.delete:
            self.deleted.append((deletion.key.kind, deletion.key.name))
            self.children.pop((deletion.key.kind, deletion.key.name), None)
            self.pods = [pod for pod in self.pods if pod["metadata"]["uid"] != deletion.uid]
        if plan.status is not None:
            self.job["status"] = dict(plan.status)
        self.told += [(event.type, event.reason) for event in plan.events]
        return plan

    def edit(self, **spec: Any) -> None:
        self.job["spec"] |= spec
        self.job["metadata"]["generation"] += 1

    @property
    def status(self) -> Dict:
        found: Dict = self.job["status"]
        return found

    def condition(self, kind: str) -> tuple[str, str]:
        """(status, reason)"""
        found = self.entry(kind)
        return found["status"], found["reason"]

    def entry(self, kind: str) -> Dict:
        return next(entry for entry in self.status["conditions"] if entry["type"] == kind)

    def trainer(self, attempt: int = 0) -> Dict:
        return self.children["Job", f"arithmetic-trainer-{attempt}"]

    def workers(self) -> Dict:
        return self.children["Deployment", "arithmetic-rollout"]

    # What the rest of the cluster does

    def run_workers(self, ready: int) -> None:
        deployment = self.workers()
        deployment["status"] = {"readyReplicas": ready, "replicas": deployment["spec"]["replicas"]}

    def run_trainer(self, attempt: int = 0, **status: Any) -> Dict:
        """Its pod, ready unless `status` says otherwise."""
        ready = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        self.pods = [pod(self.trainer(attempt), **(ready | status))]
        return self.pods[0]

    def train(self, step: int = 1, seconds: float = 30) -> Plan:
        """One step is finished; brings up what is not up yet."""
        attempt = max(int(name.rpartition("-")[2]) for kind, name in self.children if kind == "Job")
        if not self.pods:
            self.run_trainer(attempt)
        if ("Deployment", "arithmetic-rollout") in self.children:
            self.run_workers(self.workers()["spec"]["replicas"])
        self.report = {"phase": "training", "step": step, "version": [1, step]}
        self.look(seconds)
        return self.look()

    def end_trainer(self, attempt: int = 0, code: int = 1, message: str = "", reason: str = "Error") -> None:
        """Its pod ends, and the Job with it."""
        self.run_trainer(attempt, **ended(code, message, reason))
        self.trainer(attempt)["status"] = {"conditions": [{"type": "Failed", "status": "True", "reason": "Backoff"}]}
        self.report = None


def pod(owner: Mapping[str, Any], name: str | None = None, **status: Any) -> Dict:
    reference = {"uid": owner["metadata"]["uid"], "controller": True}
    name = name or f"{owner['metadata']['name']}-0"
    labels = owner["spec"]["template"]["metadata"]["labels"]
    metadata = {"name": name, "uid": f"uid-{name}", "labels": labels, "ownerReferences": [reference]}
    return {"kind": "Pod", "metadata": metadata, "spec": {"nodeName": "node-1"}, "status": status}


def ended(code: int, message: str = "", reason: str = "Error", container: str = "trainer") -> Dict:
    """Status of a pod whose container has ended for good."""
    end = {"exitCode": code, "reason": reason, "message": message, "finishedAt": timestamp(NOW)}
    return {
        "phase": "Failed",
        "conditions": [],
        "containerStatuses": [{"name": container, "state": {"terminated": end}}],
    }


def waits(reason: str, message: str = "", container: str = "vllm", **more: Any) -> Dict:
    """Status of a pod with a container that does not start."""
    state = {"name": container, "image": "miles:1", "ready": False, "state": {"waiting": {"reason": reason}}}
    state["state"]["waiting"]["message"] = message
    return {"phase": "Pending", "conditions": [], "containerStatuses": [state | more]}
