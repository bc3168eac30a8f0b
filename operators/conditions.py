"""What an RLJob's status says in conditions: every reason with its meaning and remedy, and how conditions change. Pure.

The table in README.md is REASONS.
"""

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from typing import Literal

from operators.causes import Cause
from operators.spec.status import CONDITION_TYPES, Condition

Facts = Mapping[str, "Fact"]
"""Condition type → what holds now."""


@dataclasses.dataclass(frozen=True)
class Reason:
    type: Literal["Normal", "Warning"]
    """Of the event when it becomes the reason of Ready."""
    meaning: str
    remedy: str = "nothing"


@dataclasses.dataclass(frozen=True)
class Fact:
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str = ""

    @classmethod
    def of(cls, holds: bool, cause: Cause) -> "Fact":
        return cls("True" if holds else "False", cause.reason, cause.message)


def _normal(meaning: str, remedy: str = "nothing") -> Reason:
    return Reason("Normal", meaning, remedy)


def _warning(meaning: str, remedy: str) -> Reason:
    return Reason("Warning", meaning, remedy)


REAPPLY = "mend the cause, delete the job and apply it again"
REASONS: dict[str, Reason] = {
    # All is well, or will be
    "Starting": _normal("pods are being created, or load the model; no step of this attempt is finished yet"),
    "WaitingForPods": _normal("pods exist and are not ready yet, without an error so far"),
    "Training": _normal("steps are being finished"),
    "PodsReady": _normal("all pods of this part are ready"),
    "NothingGenerated": _normal("the job trains stored samples (data.replayFrom), and has no workers"),
    "StoreAnswers": _normal("the trainer reads and writes the store"),
    "AsSpecified": _normal("all children are as the spec wants them; or, of a condition, that it does not hold"),
    "RollingOut": _normal("pods are replaced after an edit, or workers are added"),
    "Restarting": _normal("an attempt of the trainer has ended; its pods are removed before the next begins"),
    "BackOff": _normal("the trainer failed and starts again after a pause", "read the cause in the message"),
    "Preempted": _normal(
        "pods were evicted or lost with their node; the trainer starts again and maxRestarts does not count it"
    ),
    "Editing": _normal("the trainer writes a checkpoint, so that an edit of the spec can be taken on"),
    "Resumed": _normal("suspend is false again; the trainer goes on from its checkpoint"),
    "Suspending": _normal("the trainer writes a checkpoint, then all pods are removed"),
    "Suspended": _normal("no pod is left; the checkpoint lies in the store", "set spec.suspend to false to go on"),
    "NotSuspended": _normal("spec.suspend is false"),
    "Completed": _normal("all steps are trained"),
    # Pods that do not run
    "ImagePullFailed": _warning(
        "an image cannot be pulled", "correct rollout.image or trainer.image, or give the nodes access to the registry"
    ),
    "Unschedulable": _warning(
        "no node has room for a pod, or none fits nodeSelector and tolerations",
        "wait, add nodes, or ask for less in resources and scheduling",
    ),
    "QuotaExceeded": _warning(
        "the namespace's ResourceQuota leaves no room for a pod, or for another of the job's objects",
        "free some, raise the quota, or ask for less; kubectl describe quota has the numbers, and it goes on by itself",
    ),
    "CreateFailed": _warning(
        "the API server refuses a pod, or another of the job's objects",
        "follow the message: an admission rule, a limit range, or a field of the spec",
    ),
    "ConfigError": _warning(
        "a container cannot be created: a Secret, ConfigMap or key is missing", "create what the message names"
    ),
    "OOMKilled": _warning(
        "a container used more memory than its limit",
        "raise resources.limits.memory, or lower maxTokensPerMicroBatch or maxModelLen",
    ),
    "CrashLoop": _warning("a container ends again and again", "read its last lines in the message"),
    "RolloutUnavailable": _warning(
        "workers are missing; while one is left, training goes on",
        "read the cause in the message; missing workers come back once it is gone",
    ),
    "ScaledToZero": _warning(
        "spec.rollout.replicas is 0; the limits of progress do not run", "raise it: kubectl miles scale"
    ),
    # The trainer
    "TrainerFailed": _warning("the trainer ended with an error", f"{REAPPLY}, if it does not start again by itself"),
    "InvalidConfiguration": _warning("model, data, store or a setting is wrong; trying again cannot help", REAPPLY),
    "CheckpointNotFound": _warning(
        "there is no checkpoint at checkpoint.resumeFrom, or none that fits this job", REAPPLY
    ),
    "StoreUnavailable": _warning(
        "the store did not answer; the trainer starts again", "check store.endpoint, the network and the service"
    ),
    "MaxRestartsExceeded": _warning(
        "the trainer failed more often than runPolicy.maxRestarts", f"{REAPPLY}: the message has the last failure"
    ),
    "DeadlineExceeded": _warning("the job ran for runPolicy.activeDeadlineSeconds", "raise it, and apply again"),
    "StartupDeadlineExceeded": _warning(
        "no step was finished within runPolicy.startupDeadlineSeconds of an attempt's beginning",
        "read in the message what it waited for; raise it for large models",
    ),
    "NoProgress": _warning(
        "no step was finished for runPolicy.progressDeadlineSeconds", "read in the message what it waited for"
    ),
    # The object
    "InvalidSpec": _warning("the spec breaks a rule", "correct it: kubectl edit"),
    "NameConflict": _warning(
        "an object with the name of a child belongs to somebody else",
        "delete that object, or give the job another name; after deleting a job, wait a moment",
    ),
}
"""Reason → what it means and what to do."""


def assemble(before: Sequence[Condition], facts: Facts, generation: int, now: datetime.datetime) -> list[Condition]:
    """All conditions, in a fixed order; the time of a transition moves with the status only."""
    known = {condition.type: condition for condition in before}
    return [_condition(kind, known.get(kind), facts[kind], generation, now) for kind in CONDITION_TYPES]


def _condition(kind: str, before: Condition | None, fact: Fact, generation: int, now: datetime.datetime) -> Condition:
    told = (fact.status, generation, fact.reason, fact.message)
    if before and told == (before.status, before.observed_generation, before.reason, before.message):
        return before
    return Condition(
        type=kind,
        status=fact.status,
        observed_generation=generation,
        last_transition_time=before.last_transition_time if before and before.status == fact.status else timestamp(now),
        reason=fact.reason,
        message=fact.message,
    )


def find(conditions: Sequence[Condition], kind: str) -> Condition | None:
    return next((condition for condition in conditions if condition.type == kind), None)


def holds(conditions: Sequence[Condition], kind: str) -> bool:
    found = find(conditions, kind)
    return found is not None and found.status == "True"


def timestamp(now: datetime.datetime) -> str:
    """RFC 3339, whole seconds, as Kubernetes writes times."""
    return now.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
