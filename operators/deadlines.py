"""The limits of runPolicy. Pure: counted from times in the status, so that no restart of the operator moves them."""

import dataclasses
import math
from collections.abc import Iterator

from operators.causes import Cause
from operators.conditions import timestamp
from operators.situation import Situation
from operators.spec.status import RLJobStatus


@dataclasses.dataclass(frozen=True)
class Limit:
    """One that runs now."""

    left_s: float
    cause: Cause
    """Of the job's failure when nothing is left."""


def overdue(here: Situation) -> Cause | None:
    """The limit that has passed, if one has."""
    return next((limit.cause for limit in _running(here) if limit.left_s < 0), None)


def left_s(here: Situation) -> float:
    """Seconds until the next limit passes; infinite where none runs."""
    return min((limit.left_s for limit in _running(here)), default=math.inf)


def _running(here: Situation) -> Iterator[Limit]:
    """None of them while the job is suspended; without workers only that of the whole job."""
    status, policy = here.status, here.job.spec.run_policy
    if status.start_time is None or here.is_suspending():
        return
    limit, worked = policy.active_deadline_seconds, here.seconds_since(status.start_time) - status.suspended_seconds
    if limit is not None:
        text = f"not complete after {limit} s (runPolicy.activeDeadlineSeconds)"
        yield Limit(limit - worked, Cause("DeadlineExceeded", f"{text}, at step {status.training.step}"))
    if not here.job.spec.data.replay_from and not (here.job.spec.rollout.replicas and status.rollout.desired):
        return
    since = status.rollout.scaled_up_time or status.start_time
    if has_stepped(status):
        assert status.training.last_progress_time is not None
        limit, since = policy.progress_deadline_seconds, max(since, status.training.last_progress_time)
        reason, text = "NoProgress", f"no step for {limit} s (runPolicy.progressDeadlineSeconds)"
    else:
        begun = status.attempt.not_before or status.attempt.time or status.start_time
        limit, since = policy.startup_deadline_seconds, max(since, begun)
        reason, text = "StartupDeadlineExceeded", f"no step after {limit} s (runPolicy.startupDeadlineSeconds)"
    yield Limit(limit - here.seconds_since(since), Cause(reason, f"{text}; {_waited_for(here)}"))


def awaiting(here: Situation, status: RLJobStatus) -> RLJobStatus:
    """`status` with the time from which on steps are awaited again, once workers are wanted after a time without."""
    if here.status.start_time is None or here.status.rollout.desired or not status.rollout.desired:
        return status
    rollout = status.rollout.model_copy(update={"scaled_up_time": timestamp(here.now)})
    return status.model_copy(update={"rollout": rollout})


def has_stepped(status: RLJobStatus) -> bool:
    """Whether the present attempt has finished a step."""
    begun, progress = status.attempt.time, status.training.last_progress_time
    return progress is not None and (begun is None or progress > begun)


def _waited_for(here: Situation) -> str:
    """What the status says was missing, in the words of the pass before."""
    for condition in here.status.conditions:
        if condition.type in ("TrainerReady", "RolloutReady") and condition.status != "True" and condition.message:
            return f"it waited for: {condition.message}"
    said = (here.observed.report or {}).get("waiting_for")
    return f"the trainer waited for: {said}" if said else "the trainer did not say what it waited for"
