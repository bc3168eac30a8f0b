"""What is wrong with a job, why, and what to do: three lines for a person. Pure.

The operator's conditions say why, with the cause from pods and events in the message; what their reasons mean and what
to do is in `operators.conditions`. A job that no operator has looked at is the one trouble that no condition tells.
"""

import dataclasses
import datetime
from collections.abc import Mapping
from typing import Any

from operators.conditions import REASONS
from operators.figures import duration

Object = Mapping[str, Any]
UNSEEN_S = 60
"""Age from which a job without a status is trouble."""


@dataclasses.dataclass(frozen=True)
class Trouble:
    reason: str
    """One word, for tables."""
    what: str
    why: str
    remedy: str


def of(job: Object, now: datetime.datetime) -> Trouble | None:
    """None where all is well, or will be by itself."""
    age = seconds_since(job["metadata"].get("creationTimestamp"), now)
    found = conditions(job)
    if not found:
        return _unseen(age) if age is not None and age >= UNSEEN_S else None
    for kind, bad in (("Failed", "True"), ("Stalled", "True"), ("Ready", "False"), ("RolloutReady", "False")):
        entry = found.get(kind)
        if entry is not None and entry["status"] == bad and not _is_calm(found, entry):
            return _advised(job, entry)
    return None


def _is_calm(found: Mapping[str, Object], entry: Object) -> bool:
    """Time will mend it; or the job is complete or suspended, and has no workers as it should be."""
    if entry["type"] in ("Failed", "Stalled"):
        return False
    known = REASONS.get(str(entry.get("reason")))
    at_rest = any(found.get(kind, {}).get("status") == "True" for kind in ("Complete", "Suspended"))
    return at_rest or (known is not None and known.type == "Normal")


def conditions(job: Object) -> dict[str, Object]:
    return {entry["type"]: entry for entry in job.get("status", {}).get("conditions", [])}


def holds(job: Object, kind: str) -> bool:
    return conditions(job).get(kind, {}).get("status") == "True"


def seconds_since(time: Any, now: datetime.datetime) -> float | None:
    """None: there is no time, or none that can be read."""
    then = moment(time)
    return None if then is None else (now - then).total_seconds()


def moment(time: Any) -> datetime.datetime | None:
    """Of an RFC 3339 text."""
    try:
        found = datetime.datetime.fromisoformat(str(time).upper())
    except ValueError:
        return None
    return found if found.tzinfo is not None else None


def _unseen(age: float) -> Trouble:
    return Trouble(
        "NoOperator",
        f"no operator has looked at it for {duration(age)}",
        "its status is empty",
        "see whether the operator runs and watches this namespace: kubectl -n miles-system get pods",
    )


def _advised(job: Object, condition: Object) -> Trouble:
    reason, message = str(condition.get("reason", "")), str(condition.get("message", ""))
    events = f"kubectl miles events {job['metadata']['name']}"
    known = REASONS.get(reason)
    if known is None:
        return Trouble(reason, reason or "it is not ready", message or "the operator does not say", events)
    remedy = known.remedy if known.remedy != "nothing" else events
    return Trouble(reason, known.meaning, message or reason, remedy)
