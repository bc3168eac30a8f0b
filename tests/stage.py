"""Scenes before a running operator: each has one RLJob, in a namespace of its own, so many are played at once.

What the API server tells of RLJobs is followed by one watch for all scenes: a scene waits for what it hears, and misses
no status from then on, however short it held. What may be over by then is asked for by `until_heard`, or the stage is
held still meanwhile, such as by pods that do not get ready before they are told to. Trainers' reports are those of
`StatusPorts`, pods those of the stand-in kubelet.
"""

import contextlib
import datetime
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests import podstatus
from tests.controlplane import ControlPlane
from tests.kubeapi import Api, Dict, until
from tests.kubelet import Kubelet
from tests.podstatus import Outcome
from tests.replica import StatusPorts, rljob

NAME = "sums"
TRAINER = {"miles.dev/component": "trainer"}
STOPPED = podstatus.fails(4, "[rank 0] stopped on request: checkpoint t0-s1 is written")
CHILDREN = ("ConfigMap", "Deployment", "Job", "NetworkPolicy", "PodDisruptionBudget", "Service")
MANAGED = "app.kubernetes.io/managed-by=miles"
FRESH_S = 3.1
"""After a report was asked for, until it is asked for again."""
LIMIT_S = 120.0


class Stage:
    def __init__(self, plane: ControlPlane, kubelet: Kubelet, ports: StatusPorts):
        self.plane, self.kubelet, self.ports = plane, kubelet, ports
        self.api: Api = plane.api
        self._scenes: dict[str, Scene] = {}
        threading.Thread(target=self._follow, name="stage", daemon=True).start()

    @contextlib.contextmanager
    def scene(self) -> Iterator["Scene"]:
        scene = Scene(self, self.plane.new_namespace())
        self._scenes[scene.namespace] = scene
        try:
            yield scene
        finally:
            self.kubelet.forget(scene.namespace)
            self.api.delete("RLJob", NAME, scene.namespace)
            self.api.delete("Namespace", scene.namespace)
            del self._scenes[scene.namespace]

    def _follow(self) -> None:
        """Until this process ends, or the control plane does."""
        with contextlib.suppress(OSError):
            for what, job in self.api.follow("RLJob"):
                if scene := self._scenes.get(job["metadata"]["namespace"]):
                    scene.hear(None if what == "DELETED" else job)


class Scene:
    def __init__(self, stage: Stage, namespace: str):
        self.stage, self.namespace = stage, namespace
        self.api, self.kubelet, self.ports = stage.api, stage.kubelet, stage.ports
        self.job: Dict | None = None
        """As last heard; None: there is none."""
        self.conditions: dict[tuple[str, str, str], Dict] = {}
        """(type, status, reason) of all that were heard → each as last told."""
        self._statuses: list[Dict] = [{}]
        """All that were heard; empty: there was no job, or nothing told of it."""
        self._changed = threading.Condition()
        self.report(phase="starting", step=0)

    # The job

    def hear(self, job: Dict | None) -> None:
        with self._changed:
            self.job = job
            for entry in (job or {}).get("status", {}).get("conditions", ()):
                self.conditions[entry["type"], entry["status"], entry["reason"]] = entry
            self._statuses.append(self.status)
            self._changed.notify_all()

    @property
    def status(self) -> Dict:
        return (self.job or {}).get("status", {})

    def condition(self, kind: str) -> Dict:
        return condition(self.status, kind)

    def create(self, **spec: Any) -> Dict:
        return self.api.create(rljob(NAME, self.namespace, **spec), fieldValidation="Strict")

    def edit(self, **spec: Any) -> Dict:
        """A merge patch of the spec; raises ApiError where the server refuses it."""
        return self.api.patch("RLJob", NAME, self.namespace, {"spec": spec})

    def set_status(self, **status: Any) -> None:
        """As if it had been so for long; times in the status are all that the operator counts from."""
        self.api.patch("RLJob", NAME, self.namespace, {"status": status}, "status")

    def delete(self) -> None:
        self.api.delete("RLJob", NAME, self.namespace)

    def look(self) -> None:
        """Have the operator look now, not in ten seconds."""
        touched = {"touched": str(time.monotonic())}
        self.api.patch("RLJob", NAME, self.namespace, {"metadata": {"annotations": touched}})

    def until(self, holds: Callable[[Dict], Any], what: str, limit_s: float = LIMIT_S) -> Dict:
        """The first status that `holds`, of the present one and those to come. Raises TimeoutError naming `what`."""
        with self._changed:
            unread = len(self._statuses) - 1

            def found() -> Dict | None:
                nonlocal unread
                while unread < len(self._statuses):
                    told, unread = self._statuses[unread], unread + 1
                    if told and holds(told):
                        return told
                return None

            return self._wait_for(found, what, limit_s)

    def _wait_for(self, found: Callable[[], Dict | None], what: str, limit_s: float) -> Dict:
        if (told := self._changed.wait_for(found, limit_s)) is None:
            now = [(each["type"], each["status"], each["reason"]) for each in self.status.get("conditions", ())]
            raise TimeoutError(
                f"{self.namespace}: not within {limit_s:.0f} s: {what}; {self.status.get('attempt')} {now}"
            )
        return told

    def until_told(
        self, kind: str, reason: str, status: str | None = None, limit_s: float = LIMIT_S, said: str = ""
    ) -> Dict:
        """The condition once it has this reason, and `said` in its message: it does, or will."""

        def holds(told: Dict) -> bool:
            found = condition(told, kind)
            is_it = found.get("reason") == reason and status in (None, found["status"])
            return is_it and said in found.get("message", "")

        return condition(self.until(holds, f"{kind} is {reason}", limit_s), kind)

    def until_heard(self, kind: str, reason: str, status: str) -> Dict:
        """The condition as it was told with this reason: it was, is or will be. For what may be over at any moment."""
        with self._changed:
            return self._wait_for(lambda: self.conditions.get((kind, status, reason)), f"{kind} was {reason}", LIMIT_S)

    def until_seen(self) -> None:
        """The operator has acted on the newest edit."""
        wanted = self.api.get("RLJob", NAME, self.namespace)["metadata"]["generation"]
        self.until(lambda told: told.get("observedGeneration", 0) >= wanted, f"generation {wanted} is observed")

    def until_attempt(self, number: int, limit_s: float = LIMIT_S) -> Dict:
        """The attempt of the trainer, once it is decided."""
        told = self.until(lambda told: told.get("attempt", {}).get("number", 0) >= number, f"attempt {number}", limit_s)
        assert told["attempt"]["number"] == number
        return told["attempt"]

    def events(self) -> set[str]:
        """Reasons of those that the operator has posted about the job."""
        found = self.api.list("Event", self.namespace)
        return {event["reason"] for event in found if event["source"].get("component") == "miles-operator"}

    def until_event(self, reason: str) -> None:
        until(lambda: reason in self.events(), f"{self.namespace}: an event tells {reason}", LIMIT_S)

    # Its children

    def children(self, *kinds: str) -> list[Dict]:
        return [each for kind in kinds or CHILDREN for each in self.api.list(kind, self.namespace, labels=MANAGED)]

    def names(self, *kinds: str) -> set[tuple[str, str]]:
        return {(each["kind"], each["metadata"]["name"]) for each in self.children(*kinds)}

    def child(self, kind: str, suffix: str) -> Dict:
        return self.api.get(kind, f"{NAME}-{suffix}", self.namespace)

    def find(self, kind: str, suffix: str) -> Dict | None:
        return self.api.find(kind, f"{NAME}-{suffix}", self.namespace)

    def until_child(self, kind: str, suffix: str, holds: Callable[[Dict], Any], what: str) -> Dict:
        def found() -> Dict | None:
            child = self.find(kind, suffix)
            return child if child is not None and holds(child) else None

        live = until(found, f"{self.namespace}: {kind} {suffix}: {what}", LIMIT_S)
        assert live is not None
        return live

    def until_trainer(self, attempt: int, limit_s: float = LIMIT_S) -> Dict:
        """The Job of that attempt, once it is created."""
        found = until(lambda: self.find("Job", f"trainer-{attempt}"), f"{self.namespace}: attempt {attempt}", limit_s)
        assert found is not None
        return found

    def pods(self, **labels: str) -> list[Dict]:
        wanted = ",".join([MANAGED, *(f"miles.dev/{name}={value}" for name, value in labels.items())])
        return self.api.list("Pod", self.namespace, labels=wanted)

    def until_gone(self, limit_s: float = LIMIT_S) -> None:
        """The job, its children and its pods."""
        until(lambda: self.api.find("RLJob", NAME, self.namespace) is None, "the job is gone", limit_s)
        until(lambda: not self.children(), f"{self.namespace}: children are gone", limit_s)
        until(lambda: not self.pods(), f"{self.namespace}: pods are gone", limit_s)
        assert self.api.list("Secret", self.namespace, labels=MANAGED) == []

    # What the rest of the cluster does

    def script(self, outcome: Outcome, component: str, **which: Any) -> None:
        """`which`: see Kubelet.script."""
        self.kubelet.script(outcome, self.namespace, {"miles.dev/component": component}, **which)

    def until_ready(self, attempt: int = 0) -> None:
        """Trainer and workers are."""

        def holds(told: Dict) -> bool:
            number, trainer, rollout = told["attempt"]["number"], told["trainer"], told["rollout"]
            full = trainer["ready"] == trainer["desired"] > 0 and rollout["ready"] == rollout["desired"]
            return bool(number == attempt and full)

        self.until(holds, f"attempt {attempt} is ready")

    def report(self, **told: Any) -> None:
        self.ports.reports[self.namespace] = {"total_steps": 100} | told

    def train(self, step: int = 1, attempt: int = 0, **told: Any) -> None:
        """One step more is finished, by a trainer that is brought up if need be."""
        self.until_ready(attempt)
        time.sleep(FRESH_S)
        self.report(phase="training", step=step, version=[attempt, step], **told)
        self.look()
        self.until_told("Ready", "Training")

    def end_trainer(self, outcome: Outcome, attempt: int = 0, pod: str = "*") -> None:
        """The running pods of that attempt end so; `pod`: only those whose name ends so, such as 0-* for the first."""
        self.kubelet.script(outcome, self.namespace, TRAINER, f"{NAME}-trainer-{attempt}-{pod}")

    def until_asked(self, attempt: int = 0) -> None:
        """Rank 0 is asked to write a checkpoint and to stop."""
        place = f"{self.namespace}/{NAME}-trainer-{attempt}-0-"
        until(lambda: any(asked.startswith(place) for asked, _ in self.ports.pauses), f"{place} is asked", LIMIT_S)

    def suspend(self, attempt: int = 0) -> None:
        """Until nothing of it runs."""
        self.edit(suspend=True)
        self.until_asked(attempt)
        self.end_trainer(STOPPED, attempt)
        self.until_told("Suspended", "Suspended", "True")


def condition(status: Dict, kind: str) -> Dict:
    return next((each for each in status.get("conditions", ()) if each["type"] == kind), {})


def ago(seconds: float) -> str:
    """RFC 3339."""
    return (datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")
