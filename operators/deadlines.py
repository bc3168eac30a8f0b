"""The limits of runPolicy. Pure: counted from times in the status, so that no restart of the operator moves them."""

from operators.causes import Cause
from operators.conditions import timestamp
from operators.situation import Situation
from operators.spec.status import RLJobStatus


def overdue(here: Situation) -> Cause | None:
    """The limit that has passed, if one has. None of them runs while the job is suspended; without workers only that
    of the whole job does."""
    status, policy = here.status, here.job.spec.run_policy
    if status.start_time is None or here.is_suspending():
        return None
    limit, worked = policy.active_deadline_seconds, here.seconds_since(status.start_time) - status.suspended_seconds
    if limit is not None and worked > limit:
        text = f"not complete after {limit} s (runPolicy.activeDeadlineSeconds)"
        return Cause("DeadlineExceeded", f"{text}, at step {status.training.step}")
    if not here.job.spec.data.replay_from and not (here.job.spec.rollout.replicas and status.rollout.desired):
        return None
    since = status.rollout.scaled_up_time or status.start_time
    if has_stepped(status):
        assert status.training.last_progress_time is not None
        if here.seconds_since(max(since, status.training.last_progress_time)) > policy.progress_deadline_seconds:
            text = f"no step for {policy.progress_deadline_seconds} s (runPolicy.progressDeadlineSeconds)"
            return Cause("NoProgress", f"{text}; {_waited_for(here)}")
        return None
    begun = status.attempt.not_before or status.attempt.time or status.start_time
    if here.seconds_since(max(since, begun)) > policy.startup_deadline_seconds:
        text = f"no step after {policy.startup_deadline_seconds} s (runPolicy.startupDeadlineSeconds)"
        return Cause("StartupDeadlineExceeded", f"{text}; {_waited_for(here)}")
    return None


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
