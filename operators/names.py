"""Names and labels of a job's children. Pure and stable: the same job always gives the same ones."""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from operators.spec import RLJob

RUN_ID = "[-0-9A-Za-z]{1,63}"
"""Of a run's id, the last part of its prefix in the store."""
ATTEMPT = "miles.dev/attempt"
LONGEST = 63  # characters of a DNS label, and of a label's value


def child_name(job: RLJob, suffix: str) -> str:
    """<job>-<suffix>; where that is too long, cut and made unique by a hash."""
    name = f"{job.metadata.name}-{suffix}"
    if len(name) <= LONGEST:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: LONGEST - 9].rstrip('-')}-{digest}"


def token_name(job: RLJob) -> str:
    """Of the Secret with the token of the status port. It may not be read, so whose it is must follow from its name."""
    return child_name(job, f"status-{job.metadata.uid[:8]}" if job.metadata.uid else "status")


def labels(job: RLJob, component: str, attempt: int | None = None) -> dict[str, str]:
    """Labels of a child; `attempt` only for those that belong to one attempt."""
    found = {
        "app.kubernetes.io/name": "miles",
        "app.kubernetes.io/instance": job.metadata.name,
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/part-of": "miles",
        "app.kubernetes.io/managed-by": "miles",
        "miles.dev/job-name": job.metadata.name,
        "miles.dev/component": component,
    }
    if job.metadata.uid is not None:
        found["miles.dev/job-uid"] = job.metadata.uid
    if attempt is not None:
        found[ATTEMPT] = str(attempt)
    return found


def selector(job: RLJob, component: str) -> dict[str, str]:
    """What picks the pods of one component; a subset of their labels that never changes."""
    return {"miles.dev/job-name": job.metadata.name, "miles.dev/component": component}


def attempt_of(metadata: Mapping[str, Any]) -> int:
    """The trainer's attempt that an object belongs to; 0 where somebody has changed the label to what is no number."""
    label = str(metadata.get("labels", {}).get(ATTEMPT, 0))
    return int(label) if re.fullmatch("[0-9]{1,9}", label, re.ASCII) else 0
