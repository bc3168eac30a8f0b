"""What a change of the spec of a running job means, field by field. Pure; the table in README.md is this one.

A field counts with all that lies below it, unless a longer row says otherwise. Refusals are the API server's: the CRD
has a rule for each of them.
"""

import hashlib
import json
from collections.abc import Callable
from typing import Literal

from operators import schema
from operators.spec import RLJob

Effect = Literal["live", "new attempt", "while suspended", "refused"]
LIVE: Effect = "live"
ATTEMPT: Effect = "new attempt"
SUSPENDED: Effect = "while suspended"
REFUSED: Effect = "refused"

TABLE: dict[str, tuple[Effect, str]] = {
    "spec.suspend": (LIVE, "true: checkpoint, then all pods are removed; false: a new attempt from that checkpoint"),
    "spec.managedBy": (REFUSED, "two controllers would act on one job"),
    "spec.model": (REFUSED, "checkpoints belong to one base model"),
    "spec.data": (REFUSED, "the order of prompts is fixed by seed and sets when the job begins"),
    "spec.environment": (REFUSED, "as for data"),
    "spec.rewards": (ATTEMPT, "scores count from the next completions on"),
    "spec.rewards.model.replicas": (LIVE, "servers are added or removed"),
    "spec.rewards.model.resources": (LIVE, "the servers are replaced one by one"),
    "spec.algorithm": (ATTEMPT, "holds from the step after the checkpoint on"),
    "spec.algorithm.type": (REFUSED, "a checkpoint continues one algorithm"),
    "spec.algorithm.groupSize": (REFUSED, "groups in the store have this size"),
    "spec.algorithm.promptsPerStep": (REFUSED, "logged steps have this size"),
    "spec.rollout.replicas": (LIVE, "workers are added or removed; `kubectl scale` writes this field"),
    "spec.rollout.autoscale": (LIVE, "bounds of the number of workers, which starts from replicas"),
    "spec.rollout.tensorParallelSize": (LIVE, "the workers are replaced one by one"),
    "spec.rollout.maxModelLen": (ATTEMPT, "the trainer's batches hold samples of this length"),
    "spec.rollout.maxConcurrentGroups": (LIVE, "the workers are replaced one by one"),
    "spec.rollout.compile": (LIVE, "the workers are replaced one by one"),
    "spec.rollout.adapterLoading": (LIVE, "the workers are replaced one by one"),
    "spec.rollout.spot": (LIVE, "the workers are replaced one by one"),
    "spec.rollout.image": (LIVE, "the workers are replaced one by one"),
    "spec.rollout.resources": (LIVE, "the workers are replaced one by one"),
    "spec.rollout.template": (LIVE, "the workers are replaced one by one"),
    "spec.trainer": (ATTEMPT, "the trainer stops after a checkpoint and goes on from it in new pods"),
    "spec.trainer.nodes": (SUSPENDED, "the shape of the trainer changes between two attempts only"),
    "spec.trainer.processesPerNode": (SUSPENDED, "as for nodes"),
    "spec.trainer.dtype": (SUSPENDED, "as for nodes"),
    "spec.trainer.lora": (SUSPENDED, "alpha at will; a checkpoint has one rank and one set of targets"),
    "spec.trainer.seed": (REFUSED, "it makes the weights that a job begins with"),
    "spec.evaluation": (ATTEMPT, "as for trainer"),
    "spec.checkpoint": (ATTEMPT, "as for trainer"),
    "spec.checkpoint.resumeFrom": (REFUSED, "a job begins once"),
    "spec.store": (REFUSED, "the run's checkpoints and samples lie there"),
    "spec.output": (ATTEMPT, "as for trainer"),
    "spec.scheduling": (ATTEMPT, "all pods are replaced, the trainer's after a checkpoint"),
    "spec.runPolicy": (LIVE, "limits hold at once, counted from the times in the status"),
}
"""Field → what a change of it does while the job runs, and why."""
COUNTS = (
    *("spec.suspend", "spec.rollout.replicas", "spec.rollout.autoscale", "spec.rewards.model.replicas"),
    "spec.runPolicy",
)
"""Rows that say how many pods there are, and for how long."""


def effect(path: schema.Path) -> Effect | None:
    """What a change of the field means; None for one that has no row of its own and is not below one."""
    found = row(path)
    return found[0] if found else None


def row(path: schema.Path) -> tuple[Effect, str] | None:
    """The row that counts for the field: the longest that it is or lies below."""
    field = _row_of(path)
    return TABLE[field] if field else None


def _row_of(path: schema.Path) -> str | None:
    names = [step for step in path if isinstance(step, str)]
    rows = (".".join(names[:length]) for length in range(len(names), 1, -1))
    return next((field for field in rows if field in TABLE), None)


def digest(job: RLJob) -> str:
    """Of all that an attempt of the trainer cannot take on while it runs."""
    return _digest(job, lambda path: effect(path) in (ATTEMPT, SUSPENDED))


def asked(job: RLJob) -> str:
    """Digest of all that says what a job's pods are, but not how many."""
    return _digest(job, lambda path: _row_of(path) not in (None, *COUNTS))


def _digest(job: RLJob, counts: Callable[[schema.Path], bool]) -> str:
    """Fields with their defaults do not count, so that a release with new fields changes nothing of a running job."""
    values = schema.set_values(job.model_dump(by_alias=True), schema.tree())
    counted = [
        [schema.dotted(path), None if _has_parts(node) else value] for path, value, node in values if counts(path)
    ]
    return hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()[:16]


def _has_parts(node: schema.Node) -> bool:
    """Whether its parts are values of their own; then only its presence counts here."""
    return bool(schema.fields(node))
