"""How many rollout workers run where rollout.autoscale gives bounds: a rule on who waits for whom. Pure.

Trainer rank 0 tells two shares of the time of its last steps: that in which it waited for experience, and that in which
no worker had anything to do. Their difference says which side is too slow; where generation and training take turns
(maxStaleness 0) both are large, and it is the balance that counts.

    trainer − rollout ≥ 0.2      more: as many as would have kept the trainer busy, at most twice as many
    rollout − trainer ≥ 0.4      fewer: by a tenth, at least one
    between the two              as many as there are

After a change nothing is decided until all workers are ready and the told steps all lie behind that. What was decided
stands in the status (rollout.autoscaled), so that a restart of the operator forgets nothing; spec.rollout.replicas is
where it starts, and starts anew when somebody edits it. 0 there means none, as without bounds.
"""

import math
from collections.abc import Mapping
from typing import Any

from operators.situation import Situation
from operators.spec import RLJob
from operators.spec.status import Autoscaled, RLJobStatus

MORE, FEWER = 0.2, 0.4
"""Differences from which on workers are added or removed; apart, so that one change never asks for the other."""
SHRINK = 0.1
FEWEST_STEPS = 5
"""Told steps that a decision needs."""


def applied(job: RLJob, status: RLJobStatus) -> RLJob:
    """The job with the number of workers that was decided in place of spec.rollout.replicas."""
    rollout, decided = job.spec.rollout, status.rollout.autoscaled
    if rollout.autoscale is None or decided is None or decided.start != rollout.replicas:
        return job
    replicas = _within(rollout.autoscale.min, decided.replicas, rollout.autoscale.max)
    spec = job.spec.model_copy(update={"rollout": rollout.model_copy(update={"replicas": replicas})})
    return job.model_copy(update={"spec": spec})


def updated(here: Situation, status: RLJobStatus) -> RLJobStatus:
    """`status` with what is decided now; `here.job` is as `applied` made it."""
    return status.model_copy(
        update={"rollout": status.rollout.model_copy(update={"autoscaled": _decided(here, status)})}
    )


def _decided(here: Situation, status: RLJobStatus) -> Autoscaled | None:
    bounds, replicas = here.job.spec.rollout.autoscale, here.job.spec.rollout.replicas
    start, step = here.observed.job["spec"].get("rollout", {}).get("replicas", 1), status.training.step
    if bounds is None or start == 0:
        return None
    before = status.rollout.autoscaled
    if before is None or before.start != start:
        return Autoscaled(start=start, replicas=replicas, step=step)
    if not here.status.rollout.ready == status.rollout.ready == replicas:  # ready as well when it was looked at before
        return before.model_copy(update={"replicas": replicas, "step": step})
    waits = (here.observed.report or {}).get("waits")
    if not isinstance(waits, Mapping) or not _is_over(waits, step - before.step):
        return before.model_copy(update={"replicas": replicas})
    wanted, why = rule(replicas, float(waits["trainer"]), float(waits["rollout"]))
    wanted = _within(max(1, bounds.min), wanted, bounds.max)
    if wanted == replicas:
        return before.model_copy(update={"replicas": replicas})
    return Autoscaled(start=start, replicas=wanted, step=step, message=f"{replicas} to {wanted} at step {step}: {why}")


def rule(replicas: int, trainer: float, rollout: float) -> tuple[int, str]:
    """(workers wanted, why), from the shares of time in which trainer and workers waited."""
    if trainer - rollout >= MORE:
        enough = math.ceil(replicas / (1 - min(trainer, 0.5)))
        return enough, f"the trainer waited {trainer:.0%} of the time for completions"
    if rollout - trainer >= FEWER:
        return replicas - max(1, int(replicas * SHRINK)), f"the workers had nothing to do {rollout:.0%} of the time"
    return replicas, ""


def _is_over(waits: Mapping[str, Any], since: int) -> bool:
    """Whether all steps that the report tells of came after the last change, and are enough. The step in which that
    was is none of them."""
    told = [waits.get(name) for name in ("trainer", "rollout", "steps")]
    return all(isinstance(each, int | float) for each in told) and since > int(waits["steps"]) >= FEWEST_STEPS


def _within(low: int, value: int, high: int) -> int:
    return min(max(low, value), high)
