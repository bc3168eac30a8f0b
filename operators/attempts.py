"""The trainer's attempts: when one begins, how it is stopped, what its end means. Pure.

    failed            → counted, a pause, the next attempt; refused configuration, or too often → Failed
    evicted or lost   → the next attempt, not counted
    edited            → asked to checkpoint and stop, then the next attempt
    suspended         → asked to checkpoint and stop, then all pods are removed; resumed → the next attempt
    complete          → Complete

A decision that is to be remembered is `settled`: its status is written before anything else is done, and the pass
ends. Only the next pass, which reads that status, removes the Jobs of earlier attempts, and only when no pod of the
trainer is left does it create the Job of the new one. So two attempts never run at once, and an end counts once,
whenever the operator is killed.
"""

import dataclasses
import datetime
from typing import Literal

from operators import causes
from operators.causes import Cause, End
from operators.conditions import timestamp
from operators.deadlines import overdue
from operators.observed import Deletion
from operators.situation import Situation, deletion
from operators.spec.status import Attempt, RLJobStatus

FIRST_BACK_OFF_S = 10
LONGEST_BACK_OFF_S = 300
STOP_MARGIN_S = 30
"""Added to trainer.stopGraceSeconds: how long a stop that was asked for is waited for."""
HURRY = datetime.timedelta(seconds=2)
"""How often a trainer that was asked to stop is looked at."""

Cause_ = Literal["Started", "Failure", "Disruption", "Edit", "Resumed"]


@dataclasses.dataclass(frozen=True)
class Decision:
    """What becomes of the trainer now."""

    status: RLJobStatus
    settled: bool = False
    """The status is to be written before anything else."""
    ended: Literal["Complete", "Failed"] | None = None
    begin: bool = False
    """Create the Job of the present attempt."""
    pause: bool = False
    delete: tuple[Deletion, ...] = ()
    cause: Cause | None = None
    """Why it ended, or why no trainer is at work; None: one is."""
    again: datetime.timedelta | None = None


def decide(here: Situation) -> Decision:
    job = here.current
    end = causes.end(job, here.pods_of(job), here.now) if job is not None else None
    if end is not None and end.kind == "complete":
        return finish(here, "Complete", end.cause)
    if end is not None and not (end.kind == "stopped" and _was_asked(here)):
        return _after(here, end)
    late = overdue(here)
    if late is not None:
        return finish(here, "Failed", late)
    if here.job.spec.suspend:
        return _suspend(here, stopped=end is not None)
    if here.status.suspend_time is not None:
        return _resume(here, here.status.suspend_time)
    if job is None:
        return _begin(here)
    if end is not None:
        return _next(here, "Edit", "the spec was edited")
    return _edit(here) if here.edited else _go_on(here)


def finish(here: Situation, ended: Literal["Complete", "Failed"], cause: Cause) -> Decision:
    status = _numbered(here).model_copy(update={"completion_time": timestamp(here.now), "suspend_time": None})
    if ended == "Complete":
        total = here.job.spec.algorithm.total_steps
        done = {"step": total, "total_steps": total, "progress": f"{total}/{total}", "eta_seconds": 0}
        training = status.training.model_copy(update=done)
        status = status.model_copy(update={"training": training})
    return Decision(status, settled=True, ended=ended, cause=cause)


def _was_asked(here: Situation) -> bool:
    return here.is_suspending() or here.edited or here.status.attempt.pause_time is not None


def _after(here: Situation, end: End) -> Decision:
    """The attempt has ended without having been asked to."""
    status, most = here.status, here.job.spec.run_policy.max_restarts
    if end.kind == "refused":
        return finish(here, "Failed", end.cause)
    if end.kind in ("disruption", "stopped"):
        counted = here.status.model_copy(update={"disruptions": status.disruptions + 1})
        return _next(here, "Disruption", end.cause.message, counted, FIRST_BACK_OFF_S)
    if status.restarts >= most:
        times = f"the trainer failed {status.restarts + 1} times, runPolicy.maxRestarts is {most}"
        return finish(here, "Failed", Cause("MaxRestartsExceeded", f"{times}; the last time: {end.cause.message}"))
    back_off = min(FIRST_BACK_OFF_S * 2 ** min(status.restarts, 16), LONGEST_BACK_OFF_S)
    counted = status.model_copy(update={"restarts": status.restarts + 1})
    return _next(here, "Failure", f"{end.cause.reason}: {end.cause.message}", counted, back_off)


def _next(
    here: Situation, cause: Cause_, message: str, status: RLJobStatus | None = None, back_off_s: int = 0
) -> Decision:
    later = here.now + datetime.timedelta(seconds=back_off_s)
    attempt = Attempt(
        number=here.attempt + 1,
        cause=cause,
        message=message[:1024],
        time=timestamp(here.now),
        not_before=timestamp(later) if back_off_s else None,
        config=here.edition,
    )
    status = (status or here.status).model_copy(update={"attempt": attempt})
    return Decision(status, settled=True, cause=_waiting(attempt))


def _suspend(here: Situation, stopped: bool) -> Decision:
    since = here.status.suspend_time or timestamp(here.now)
    status = _numbered(here).model_copy(update={"suspend_time": since})
    cause = Cause("Suspending", "the trainer writes a checkpoint, then all pods are removed")
    job = here.current
    if job is not None and not stopped and _can_be_asked(here) and not _stop_is_late(here, since):
        return Decision(status, pause=True, delete=tuple(here.left_over), cause=cause, again=HURRY)
    ended = [] if job is None or "deletionTimestamp" in job["metadata"] else [deletion(job)]
    return Decision(status, delete=(*here.left_over, *ended), cause=cause)


def _resume(here: Situation, suspended: str) -> Decision:
    so_far = here.status.suspended_seconds + max(0, int(here.seconds_since(suspended)))
    changes = {"suspend_time": None, "suspended_seconds": so_far}
    if here.status.start_time is None and here.current is None:  # it never ran
        return Decision(here.status.model_copy(update=changes), settled=True, cause=Cause("Starting", "it begins"))
    return _next(here, "Resumed", "spec.suspend is false again", here.status.model_copy(update=changes))


def _begin(here: Situation) -> Decision:
    """There is no Job of the present attempt; it comes as soon as no other trainer can be at work."""
    status = _numbered(here)
    attempt = status.attempt.model_copy(
        update={"config": here.edition, "time": status.attempt.time or timestamp(here.now)}
    )
    status = status.model_copy(update={"attempt": attempt})
    delete = tuple(here.left_over)
    older = [job for number, job in here.trainer_jobs.items() if number != here.attempt]
    pod = here.remaining(here.component("trainer"))
    if older or pod:
        return Decision(status, delete=delete, cause=_waiting(attempt))
    if attempt.not_before is not None and here.seconds_since(attempt.not_before) < 0:
        again = datetime.timedelta(seconds=-here.seconds_since(attempt.not_before))
        return Decision(status, delete=delete, cause=_waiting(attempt), again=again)
    return Decision(status, begin=True, delete=delete, cause=_waiting(attempt))


def _edit(here: Situation) -> Decision:
    since = here.status.attempt.pause_time or timestamp(here.now)
    if not _can_be_asked(here) or _stop_is_late(here, since):
        return _next(here, "Edit", "the spec was edited")
    status = _numbered(here)
    attempt = status.attempt.model_copy(update={"pause_time": since})
    cause = Cause("Editing", "the trainer writes a checkpoint; then an attempt with the edited spec begins")
    status = status.model_copy(update={"attempt": attempt})
    return Decision(status, pause=True, delete=tuple(here.left_over), cause=cause, again=HURRY)


def _go_on(here: Situation) -> Decision:
    status = _numbered(here)
    assert here.current is not None
    attempt = status.attempt.model_copy(
        update={"config": here.edition, "pause_time": None, "time": status.attempt.time or timestamp(here.now)}
    )
    return Decision(status.model_copy(update={"attempt": attempt}), delete=tuple(here.left_over))


def _numbered(here: Situation) -> RLJobStatus:
    attempt = here.status.attempt.model_copy(update={"number": here.attempt})
    return here.status.model_copy(update={"attempt": attempt})


def _can_be_asked(here: Situation) -> bool:
    """Whether a trainer is at work that could write a checkpoint."""
    assert here.current is not None
    if "deletionTimestamp" in here.current["metadata"]:
        return False
    return any(pod.get("status", {}).get("phase") == "Running" for pod in here.pods_of(here.current))


def _stop_is_late(here: Situation, since: str) -> bool:
    return here.seconds_since(since) > here.job.spec.trainer.stop_grace_seconds + STOP_MARGIN_S


def _waiting(attempt: Attempt) -> Cause:
    """Why no trainer is at work although one is wanted."""
    if attempt.cause == "Failure" and attempt.not_before is not None:
        return Cause("BackOff", f"the trainer starts again at {attempt.not_before}: {attempt.message}")
    if attempt.cause == "Disruption":
        return Cause("Preempted", f"the trainer starts again: {attempt.message}")
    if attempt.cause == "Started":
        return Cause("Starting", "the trainer's pods are being created")
    return Cause("Restarting", f"the next attempt begins when the pods of the one before are gone: {attempt.message}")
