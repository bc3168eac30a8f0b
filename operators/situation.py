"""One look at a job: what was observed, sorted by what it is to the job. Pure."""

import dataclasses
import datetime
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from operators import causes
from operators.causes import moment
from operators.names import attempt_of
from operators.observed import Deletion, Key, Object, Observed
from operators.spec import RLJob
from operators.spec.status import RLJobStatus

COMPONENT = "miles.dev/component"
EDITION = "miles.dev/edition"
"""Annotation of a trainer's Job: the digest (operators.edits) of the fields that it runs."""


@dataclasses.dataclass(frozen=True)
class Situation:
    job: RLJob
    edition: str
    """Digest (operators.edits) of what an attempt that begins now runs."""
    status: RLJobStatus
    """As the last pass left it."""
    observed: Observed
    now: datetime.datetime

    @functools.cached_property
    def trainer_jobs(self) -> dict[int, Object]:
        """Attempt → its Job."""
        jobs = [child for child in self.observed.children if child["kind"] == "Job"]
        return {attempt_of(job["metadata"]): job for job in jobs}

    @functools.cached_property
    def attempt(self) -> int:
        """Number of the present attempt; a Job knows it, should the status be lost."""
        return max([self.status.attempt.number, *self.trainer_jobs])

    @property
    def current(self) -> Object | None:
        """Job of the present attempt."""
        return self.trainer_jobs.get(self.attempt)

    @property
    def edited(self) -> bool:
        """Whether the spec wants what the present attempt cannot take on."""
        running = self.current and self.current["metadata"].get("annotations", {}).get(EDITION)
        return running is not None and running != self.edition

    def component(self, name: str) -> list[Object]:
        """Pods of a part of the job."""
        return [pod for pod in self.observed.pods if pod["metadata"]["labels"].get(COMPONENT) == name]

    def deployments(self) -> list[Object]:
        return [child for child in self.observed.children if child["kind"] == "Deployment"]

    def pods_of(self, job: Object) -> list[Object]:
        uid = job["metadata"]["uid"]
        return [pod for pod in self.component("trainer") if uid == controller(pod)]

    @functools.cached_property
    def left_over(self) -> list[Deletion]:
        """Jobs of earlier attempts, and trainer pods that no Job answers for any longer."""
        jobs = [job for number, job in self.trainer_jobs.items() if number != self.attempt]
        orphans = [pod for pod in self.component("trainer") if controller(pod) is None]
        return [deletion(found) for found in (*jobs, *orphans) if "deletionTimestamp" not in found["metadata"]]

    def remaining(self, pods: Sequence[Object]) -> Object | None:
        """A pod that may still run, on a node that is there."""
        return next((pod for pod in pods if not causes.ended(pod) and not causes.is_lost(pod, self.now)), None)

    @property
    def has_pods(self) -> bool:
        """Whether any pod is left, but for those of a lost node, and workers that have ended: nobody removes these
        soon, and they hold nothing."""
        trainers = [pod for pod in self.component("trainer") if not causes.is_lost(pod, self.now)]
        return bool(trainers) or self.remaining(self.observed.pods) is not None

    def is_suspending(self) -> bool:
        return self.job.spec.suspend or self.status.suspend_time is not None

    def seconds_since(self, time: str) -> float:
        return (self.now - moment(time)).total_seconds()


def controller(found: Object) -> str | None:
    """uid of the object that answers for this one."""
    owners = found["metadata"].get("ownerReferences", [])
    return next((owner["uid"] for owner in owners if owner.get("controller")), None)


def deletion(found: Object) -> Deletion:
    return Deletion(key(found), found["metadata"]["uid"])


def key(found: Mapping[str, Any]) -> Key:
    return Key(found["kind"], found["metadata"]["name"])
