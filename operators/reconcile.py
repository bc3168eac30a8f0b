"""Observed → Plan: what an RLJob needs next. Pure: the plan follows from what is observed alone, so it is right after
any restart, with any event lost or repeated.

A job that is being deleted, or that another controller manages, gets an empty plan. What has finished stays finished.
"""

import dataclasses
import datetime
import functools
import json
import marshal
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from operators import (
    attempts,
    autoscale,
    causes,
    children,
    conditions,
    drift,
    edits,
    health,
    manifest,
    rendition,
    schema,
    training,
)
from operators.attempts import Decision
from operators.causes import is_true
from operators.conditions import Fact, Facts, timestamp
from operators.deadlines import awaiting, has_stepped, left_s
from operators.observed import Deletion, Event, Key, Object, Observed, Plan, concerns_us
from operators.resolve import Platform
from operators.situation import EDITION, Situation, deletion, key
from operators.spec import RLJob
from operators.spec.status import RLJobStatus, as_stored

Child = dict[str, Any]

LOOK = datetime.timedelta(seconds=10)
"""How often a job with pods is looked at: pods are not watched, and progress is asked for."""
STANDS = datetime.timedelta(seconds=60)
"""For how long nothing but changes, and what the trainer tells, is looked at where there was nothing to do."""
AT_ONCE = datetime.timedelta(0)
REMEMBERED = 2048
"""Jobs whose spec as read (20 KB), and sets of children as rendered (4 KB), are kept from look to look: both follow
from the text of the job alone, and would take most of a look."""


def reconcile(observed: Observed, now: datetime.datetime, platform: Platform) -> Plan:
    """What to do now for the job; an empty plan where nothing differs from what is wanted."""
    if not concerns_us(observed.job):
        return Plan()
    status = as_stored(observed.job.get("status") or {})
    over = conditions.holds(status.conditions, "Complete") or conditions.holds(status.conditions, "Failed")
    written = json.dumps(manifest.as_written(observed.job), sort_keys=True)
    try:
        job, edition = _parsed(written)
        here = Situation(autoscale.applied(job, status), edition, status, observed, now)
        rendered = _rendered(written, here.job.spec.rollout.replicas, here.attempt, platform, over)
        wanted: list[Child] = marshal.loads(zlib.decompress(rendered))
    except ValueError as error:
        return _clear(observed) if over else _invalid(observed, status, causes.shortened(str(error)), now)
    if over:
        return _finished(here, wanted)
    decision = attempts.decide(here)
    return _settled(here, decision, platform) if decision.settled else _working(here, decision, wanted, platform)


@functools.lru_cache(REMEMBERED)
def _parsed(written: str) -> tuple[RLJob, str]:
    """(the job, the digest of what an attempt runs). Raises ValueError with all that is wrong with it as one line.

    A field that the API server keeps and this operator does not know is a later release's, whose definition is applied
    before its operator, and fills in the field's default in every job."""
    job, faults = manifest.check(schema.known(json.loads(written), schema.tree()))
    if job is None:
        raise ValueError("; ".join(map(str, faults)))
    return job, edits.digest(job)


@functools.lru_cache(REMEMBERED)
def _rendered(written: str, replicas: int, attempt: int, platform: Platform, over: bool) -> bytes:
    """The children of an attempt, with so many workers, compressed, which takes a tenth of the memory; of a job that is
    over, without pods. Raises ValueError for what no cluster can serve."""
    job, edition = _parsed(written)
    asked = edits.asked(job)
    rollout = job.spec.rollout.model_copy(update={"replicas": replicas})
    changes = {"rollout": rollout, "suspend": over or job.spec.suspend}
    job = job.model_copy(update={"spec": job.spec.model_copy(update=changes)})
    found = children.children(job, run_id=job.metadata.uid or "", platform=platform, attempt=attempt)
    for child in found:
        if child["kind"] == "Job":
            child["metadata"]["annotations"] = {EDITION: edition}
    return zlib.compress(marshal.dumps([drift.marked(rendition.signed(child, asked, attempt)) for child in found]))


# A job at work


def _working(here: Situation, decision: Decision, wanted: Sequence[Child], platform: Platform) -> Plan:
    conflicts = sorted({key(child) for child in wanted} & here.observed.foreign, key=str)
    apply = [] if conflicts else _to_apply(here, wanted, decision.begin)
    surplus = _surplus(here, wanted)
    status = decision.status
    if status.start_time is None and (here.current is not None or any(child["kind"] == "Job" for child in apply)):
        status = status.model_copy(update={"start_time": timestamp(here.now)})
    status = awaiting(here, health.counted(here, training.updated(here, status, platform)))
    status = autoscale.updated(here, status)
    refused = [found for found in here.observed.refused if _is_to_come(found, apply)]
    status = _told(here, status, health.facts(here, decision, status, conflicts, refused))
    resting = conditions.holds(status.conditions, "Suspended") and not apply and not decision.delete
    plan = Plan(
        pause=decision.pause,
        apply=apply,
        delete=[*decision.delete, *surplus],
        status=_changed(here.observed, here.status, status),
        events=_events(here, status),
        again=None if resting else decision.again or LOOK,
    )
    return dataclasses.replace(plan, stands=_stands(here, plan))


def _stands(here: Situation, plan: Plan) -> datetime.timedelta:
    """Nothing is to be done, and time alone changes that only when a limit passes: no trainer begins or ends, no pod is
    on its way out, and no step waits to be told."""
    observed = here.observed
    if (
        plan.acts
        or plan.status is not None
        or plan.events
        or plan.again != LOOK
        or observed.foreign
        or observed.refused
    ):
        return AT_ONCE
    leaving = any("deletionTimestamp" in found["metadata"] for found in (*observed.children, *observed.pods))
    at_work = list(here.trainer_jobs) == [here.status.attempt.number] and not here.is_suspending()
    if leaving or not at_work or not training.is_told(here.status, observed.report):
        return AT_ONCE
    return max(AT_ONCE, min(STANDS, datetime.timedelta(seconds=min(left_s(here), STANDS.total_seconds()))))


def _to_apply(here: Situation, wanted: Sequence[Child], begin: bool) -> list[Child]:
    """What is missing or differs. A trainer's Job is made once, for its attempt, and never changed."""
    live = {key(child): child for child in here.observed.children}
    found = []
    for child in wanted:
        if child["kind"] == "Job":
            found += [child] if begin else []
        elif key(child) not in live:
            found.append(child)
        else:
            settled = rendition.settled(child, live[key(child)])
            found += [settled] if settled is not None and drift.differs(live[key(child)], settled) else []
    return found


def _is_to_come(found: Key, apply: Sequence[Child]) -> bool:
    """The Secret of the trainer's token comes with its Job."""
    return any(key(child) == found or (child["kind"], found.kind) == ("Job", "Secret") for child in apply)


def _surplus(here: Situation, wanted: Sequence[Child]) -> list[Deletion]:
    """What the spec wants no longer, such as the server of a reward that was removed."""
    known = {key(child) for child in wanted}
    return [
        deletion(child)
        for child in here.observed.children
        if child["kind"] not in ("Job", "Secret") and key(child) not in known and _may_go(child)
    ]


def _may_go(child: Object) -> bool:
    return "deletionTimestamp" not in child["metadata"]


# Decisions that are written down before they are acted on


def _settled(here: Situation, decision: Decision, platform: Platform) -> Plan:
    status = health.counted(here, decision.status)
    if decision.ended is None:
        status = awaiting(here, training.updated(here, status, platform))
        told = health.facts(here, decision, status, (), ())
    else:
        assert decision.cause is not None
        if decision.ended == "Complete":
            status = training.concluded(here, status, platform)
        told = _ended(here, decision.ended, decision.cause)
    status = _told(here, status, told)
    return Plan(status=_changed(here.observed, here.status, status), events=_events(here, status), again=AT_ONCE)


def _ended(here: Situation, ended: str, cause: conditions.Cause) -> Facts:
    over, no = Fact.of(False, cause), Fact.of(False, health.NORMAL)
    failed = Fact.of(True, cause)
    before = conditions.find(here.status.conditions, "StoreReady")
    return {
        "Ready": over,
        "Reconciling": no,
        "Stalled": failed if ended == "Failed" else no,
        "StoreReady": Fact(before.status, before.reason, before.message) if before else Fact("Unknown", cause.reason),
        "RolloutReady": over,
        "TrainerReady": over,
        "Suspended": Fact("False", "NotSuspended"),
        "Complete": Fact.of(True, cause) if ended == "Complete" else no,
        "Failed": failed if ended == "Failed" else no,
    }


# A job that is over


def _finished(here: Situation, wanted: Sequence[Child]) -> Plan:
    """Its pods are removed as runPolicy.cleanup says, itself as runPolicy.ttlSecondsAfterFinished says."""
    policy, since = here.job.spec.run_policy, here.status.completion_time
    if policy.ttl_seconds_after_finished is not None and since is not None:
        left = policy.ttl_seconds_after_finished - here.seconds_since(since)
        if left <= 0:
            return Plan(delete_job=True)
        again = datetime.timedelta(seconds=left)
    else:
        again = None
    apply = []
    if policy.cleanup == "All":
        busy = {key(child): child for child in here.deployments() if child["spec"].get("replicas") != 0}
        apply = [_that_one(child, busy[key(child)]) for child in wanted if key(child) in busy]
    delete = list(here.left_over)
    if here.current is not None and not _is_over(here.current) and _may_go(here.current):
        delete.append(deletion(here.current))
    status = here.status
    if policy.cleanup == "All":
        status = health.counted(here, status)
        rollout = status.rollout.model_copy(update={"desired": 0, "summary": f"{status.rollout.ready}/0"})
        status = status.model_copy(update={"rollout": rollout})
    status = status.model_copy(update={"observed_generation": _generation(here.observed)})
    # Workers that are on their way out are still to be counted.
    again = min(again or LOOK, LOOK) if apply or delete or status.rollout.ready else again
    return Plan(apply=apply, delete=delete, status=_changed(here.observed, here.status, status), again=again)


def _that_one(wanted: Child, live: Object) -> Child:
    """With the uid the API server changes the live object, and makes none if it has gone meanwhile."""
    return wanted | {"metadata": wanted["metadata"] | {"uid": live["metadata"]["uid"]}}


def _clear(observed: Observed) -> Plan:
    """It is over, and its spec has become unreadable: what has pods goes as a whole."""
    left = [child for child in observed.children if child["kind"] in ("Job", "Deployment")]
    return Plan(delete=[deletion(child) for child in left if not _is_over(child) and _may_go(child)])


def _is_over(job: Object) -> bool:
    return any(
        entry["type"] in ("Complete", "Failed") and is_true(entry)
        for entry in job.get("status", {}).get("conditions", [])
    )


# A job that cannot be understood


def _invalid(observed: Observed, status: RLJobStatus, text: str, now: datetime.datetime) -> Plan:
    """Its children are left alone: it may have been valid for the release before this one."""
    wrong, unknown = Fact("True", "InvalidSpec", text), Fact("Unknown", "InvalidSpec")
    told = dict.fromkeys(conditions.CONDITION_TYPES, unknown) | {
        "Ready": Fact("False", "InvalidSpec", text),
        "Reconciling": Fact.of(False, health.NORMAL),
        "Stalled": wrong,
        "Suspended": Fact("False", "NotSuspended"),
        "Complete": Fact.of(False, health.NORMAL),
        "Failed": Fact.of(False, health.NORMAL),
    }
    generation = _generation(observed)
    new = status.model_copy(
        update={
            "conditions": conditions.assemble(status.conditions, told, generation, now),
            "observed_generation": generation,
            "phase": "Pending" if status.start_time is None else status.phase,
        }
    )
    events = [] if conditions.holds(status.conditions, "Stalled") else [Event("Warning", "InvalidSpec", text)]
    return Plan(status=_changed(observed, status, new), events=events)


# The status


def _told(here: Situation, status: RLJobStatus, facts: Facts) -> RLJobStatus:
    generation = _generation(here.observed)
    found = conditions.assemble(here.status.conditions, facts, generation, here.now)
    status = status.model_copy(update={"conditions": found, "observed_generation": generation})
    return status.model_copy(update={"phase": _phase(here, status)})


def _phase(here: Situation, status: RLJobStatus) -> str:
    """One word for people."""
    for kind in ("Failed", "Complete", "Suspended"):
        if conditions.holds(status.conditions, kind):
            return kind
    if here.job.spec.suspend:
        return "Suspending"
    if has_stepped(status):
        return "Running"
    if status.attempt.number > 0 and status.attempt.cause != "Resumed":
        return "Restarting"
    return "Starting" if status.trainer.ready else "Pending"


def _generation(observed: Observed) -> int:
    return int(observed.job["metadata"].get("generation", 0))


def _changed(observed: Observed, before: RLJobStatus, after: RLJobStatus) -> dict[str, Any] | None:
    """The status to write; None: the API server has it already."""
    if observed.job.get("status") and before == after:
        return None
    return after.model_dump(by_alias=True, exclude_none=True)


# Events

ATTEMPT_EVENTS: Mapping[str, tuple[Literal["Normal", "Warning"], str]] = {
    "Failure": ("Warning", "BackOff"),
    "Disruption": ("Warning", "Preempted"),
    "Edit": ("Normal", "Restarting"),
    "Resumed": ("Normal", "Resumed"),
}


def _events(here: Situation, status: RLJobStatus) -> list[Event]:
    """What has changed between two statuses, as far as a person wants to be told."""
    attempt = status.attempt
    if attempt.number > here.status.attempt.number and attempt.cause in ATTEMPT_EVENTS:
        kind, reason = ATTEMPT_EVENTS[attempt.cause]
        return [_event(kind, reason, f"attempt {attempt.number}: {attempt.message}")]
    now, before = (conditions.find(each.conditions, "Ready") for each in (status, here.status))
    workers, known = (conditions.find(each.conditions, "RolloutReady") for each in (status, here.status))
    assert now is not None and workers is not None
    events = []
    if before is None or (now.status, now.reason) != (before.status, before.reason):
        events.append(_event(conditions.REASONS[now.reason].type, now.reason, now.message))
    degraded = workers.reason == "RolloutUnavailable" and now.reason != workers.reason
    if degraded and (known is None or known.reason != workers.reason):
        events.append(_event("Warning", workers.reason, workers.message))
    return events


def _event(kind: Literal["Normal", "Warning"], reason: str, message: str) -> Event:
    return Event(kind, reason, message[:1000])
