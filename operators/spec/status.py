"""What the operator tells about an RLJob. Written by it alone; one source of the CRD's status schema.

An admin can write it too: what was stored under an earlier schema and is no value today is left out by `as_stored`.
"""

import datetime
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from operators.spec.fields import Model, text


def _moment(time: str) -> str:
    datetime.datetime.fromisoformat(time)
    return time


Time = Annotated[
    str,
    Field(
        max_length=32,
        pattern="^[1-9][0-9]{3}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$",
        json_schema_extra={"format": "date-time"},
    ),
    pydantic.AfterValidator(_moment),
]
"""UTC in whole seconds, in one way of writing: times are compared as texts. The API server's own check of a date-time
takes others, some of which no library reads."""
Number = Annotated[str, text(32, r"-?[0-9]+(\.[0-9]+)?(e[-+][0-9]{2,3})?")]
"""A decimal number, as "%g" writes it."""
Short = Annotated[str, text(256, shortest=0)]
CONDITION_TYPES = (
    "Ready",
    "Reconciling",
    "Stalled",
    "StoreReady",
    "RolloutReady",
    "TrainerReady",
    "Suspended",
    "Complete",
    "Failed",
)
PHASES = (
    "Pending",
    "Starting",
    "Running",
    "Suspending",
    "Suspended",
    "Restarting",
    "Complete",
    "Failed",
    "Deleting",
)


class Told(Model):
    """A part of the status: unlike the spec it is made in code, by the names of its fields."""

    model_config = pydantic.ConfigDict(populate_by_name=True)


class Condition(Told):
    """One observation of the job, as for every Kubernetes object."""

    type: Annotated[str, text(64)]
    """What is told: Ready (the summary), Reconciling, Stalled, StoreReady, RolloutReady, TrainerReady, Suspended,
    Complete or Failed."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    observed_generation: Annotated[int, Field(ge=0)] = 0
    """metadata.generation of the job that this was told of."""
    last_transition_time: Time
    """When `status` last changed."""
    reason: Annotated[str, text(128, "[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")]
    """One word in CamelCase for machines."""
    message: Annotated[str, text(4096, shortest=0)] = ""
    """The cause, and what to do, for people."""


class TrainingStatus(Told):
    """How far the training is, as trainer rank 0 reports it."""

    step: Annotated[int, Field(ge=0)] = 0
    """Finished steps."""
    total_steps: Annotated[int, Field(ge=0)] = 0
    """Steps to do."""
    progress: Short = ""
    """step/totalSteps, for display."""
    policy_version: Short = ""
    """Newest published policy, such as t2-s412."""
    last_progress_time: Time | None = None
    """When a step was last seen to finish."""
    eta_seconds: Annotated[int, Field(ge=0)] | None = None
    """Estimated seconds to the end."""
    rewards: Annotated[list[Number], Field(max_length=16)] = []
    """Mean reward over the run, oldest first: the last that was told in each sixteenth of totalSteps."""


class Autoscaled(Told):
    """How many workers were decided on within rollout.autoscale."""

    start: Annotated[int, Field(ge=0)]
    """spec.rollout.replicas, from which on it was decided; when that is edited, it starts anew."""
    replicas: Annotated[int, Field(ge=0)]
    """Workers wanted."""
    step: Annotated[int, Field(ge=0)] = 0
    """Step at which so many were last seen to become ready; only later ones count for the next decision."""
    message: Annotated[str, text(256, shortest=0)] = ""
    """The last change, and why."""


class RolloutStatus(Told):
    """The rollout workers."""

    desired: Annotated[int, Field(ge=0)] = 0
    """Pods wanted."""
    ready: Annotated[int, Field(ge=0)] = 0
    """Pods that hold a policy and generate."""
    spot: Annotated[int, Field(ge=0)] | None = None
    """Those of them that run on nodes which the cloud may take away, whether rollout.spot asks for such nodes or not;
    nothing where the operator may not list nodes."""
    summary: Short = ""
    """ready/desired, for display."""
    selector: Annotated[str, text(512, shortest=0)] = ""
    """Label selector of the pods, for autoscalers."""
    autoscaled: Autoscaled | None = None
    """With rollout.autoscale: what was decided."""
    scaled_up_time: Time | None = None
    """When workers were asked for after a time without any; the limits of progress count from then at the earliest."""


class TrainerStatus(Told):
    """The trainer's pods."""

    desired: Annotated[int, Field(ge=0)] = 0
    """Pods wanted."""
    ready: Annotated[int, Field(ge=0)] = 0
    """Pods that are ready."""


class CheckpointStatus(Told):
    """The newest complete checkpoint."""

    uri: Annotated[str, text(1100, shortest=0)] = ""
    """Where it lies."""
    step: Annotated[int, Field(ge=0)] = 0
    """Its step."""
    time: Time | None = None
    """When the operator first saw it reported."""


class StoreStatus(Told):
    """What lies in the store for this job, as its trainer counts it after each checkpoint."""

    bytes: Annotated[int, Field(ge=0)] = 0
    """Size of all objects."""
    objects: Annotated[int, Field(ge=0)] = 0
    """How many there are."""


class Metric(Told):
    """One number of the newest step."""

    name: Annotated[str, text(128)]
    """Name, as in the metrics files: reward/mean."""
    value: Number
    """Value, in decimal."""


class Attempt(Told):
    """Why the present attempt of the trainer began."""

    number: Annotated[int, Field(ge=0)] = 0
    """Number of the attempt; part of the trainer Job's name."""
    cause: Literal["Started", "Failure", "Disruption", "Edit", "Resumed"] = "Started"
    """Failure counts against maxRestarts; Disruption (eviction, lost node), Edit and Resumed do not."""
    message: Annotated[str, text(1024, shortest=0)] = ""
    """The cause of the failure or disruption, from the pods."""
    time: Time | None = None
    """When the attempt was decided; with a back-off, its pods start later."""
    not_before: Time | None = None
    """End of the back-off."""
    pause_time: Time | None = None
    """When the trainer was asked to checkpoint and stop, because an edit of the spec needs a new attempt."""
    config: Annotated[str, text(64, shortest=0)] = ""
    """Digest of the trainer's part of the spec that this attempt runs."""


class RLJobStatus(Told):
    """What the operator has observed."""

    observed_generation: Annotated[int, Field(ge=0)] = 0
    """Newest metadata.generation that the operator has acted on."""
    phase: Annotated[str, text(32, shortest=0)] = ""
    """For display only, derived from the conditions: Pending, Starting, Running, Suspending, Suspended, Restarting,
    Complete, Failed or Deleting."""
    start_time: Time | None = None
    """When the operator first created pods for the job."""
    completion_time: Time | None = None
    """When the job completed or failed."""
    attempt: Attempt = Attempt()
    """The present attempt of the trainer."""
    restarts: Annotated[int, Field(ge=0)] = 0
    """Restarts after failures, counted against runPolicy.maxRestarts."""
    disruptions: Annotated[int, Field(ge=0)] = 0
    """Restarts after evictions and lost nodes; not counted against it."""
    suspend_time: Time | None = None
    """When the present suspension was asked for."""
    suspended_seconds: Annotated[int, Field(ge=0)] = 0
    """Length of all suspensions before; runPolicy.activeDeadlineSeconds leaves them out."""
    training: TrainingStatus = TrainingStatus()
    """How far the training is."""
    rollout: RolloutStatus = RolloutStatus()
    """The rollout workers."""
    trainer: TrainerStatus = TrainerStatus()
    """The trainer's pods."""
    last_checkpoint: CheckpointStatus | None = None
    """The newest complete checkpoint."""
    store: StoreStatus | None = None
    """What lies in the store; nothing until the first checkpoint has been read back."""
    metrics: Annotated[list[Metric], Field(max_length=16)] = []
    """Numbers of the newest step."""
    conditions: Annotated[list[Condition], Field(max_length=16)] = []
    """All that is told of the job, by type."""


def as_stored(told: Mapping[str, Any]) -> RLJobStatus:
    """The status without the parts of it that are not as they should be; but a condition stays for what it says, since
    it alone tells that a job is over for good."""
    try:
        return RLJobStatus.model_validate(told)
    except pydantic.ValidationError as error:
        faults = {fault["loc"][:2] for fault in error.errors()}
    left = {name: _sound(name, value, faults) for name, value in told.items() if (name,) not in faults}
    return RLJobStatus.model_validate(left)


def _sound(name: str, value: Any, faults: Collection[tuple[int | str, ...]]) -> Any:
    if isinstance(value, Mapping):
        return {key: part for key, part in value.items() if (name, key) not in faults}
    if not isinstance(value, list):
        return value
    mended = [(_bare(item) if (name, number) in faults else item) for number, item in enumerate(value)]
    return [item for item in mended if item is not None]


def _bare(item: Any) -> Any | None:
    """Type and status of a condition, if it is one."""
    try:
        said = {"type": item["type"], "status": item["status"]}
        made = Condition.model_validate(said | {"reason": "Unreadable", "lastTransitionTime": "1970-01-01T00:00:00Z"})
    except (pydantic.ValidationError, TypeError, KeyError):
        return None
    return made.model_dump(by_alias=True)
