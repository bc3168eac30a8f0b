"""What a reconcile sees, and what it decides: the contract between `operators.reconcile` (pure) and those that look
and act (`operators.cluster`, `operators.handlers`). Plain data; objects are dicts as the API server holds them.
"""

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from typing import Any, Literal

Object = Mapping[str, Any]
CONTROLLER = "miles.dev/operator"
"""Value of spec.managedBy that means this operator, as its absence does."""


def concerns_us(job: Object) -> bool:
    """Neither being deleted nor managed by another controller."""
    return "deletionTimestamp" not in job["metadata"] and job["spec"].get("managedBy", CONTROLLER) == CONTROLLER


@dataclasses.dataclass(frozen=True)
class Key:
    """One object of the job's namespace."""

    kind: str
    name: str


@dataclasses.dataclass(frozen=True)
class Observed:
    job: Object
    """The RLJob; where the plan is carried out, of the very version that the API server holds."""
    children: Sequence[Object] = ()
    """Every object of a kind we create whose controller owner is this job's uid."""
    pods: Sequence[Object] = ()
    """Every pod with the job's uid in its labels, whatever its state."""
    foreign: frozenset[Key] = frozenset()
    """Objects with the name of a child that another owner, or nobody, holds."""
    refused: Mapping[Key, str] = dataclasses.field(default_factory=dict)
    """Children that the API server refused when they were last applied, and its answer."""
    report: Mapping[str, Any] | None = None
    """GET /status of trainer rank 0; None: it did not answer."""
    spot_nodes: frozenset[str] | None = None
    """Names of the nodes that the cloud may take away; None: not known."""
    events: Sequence[Object] = ()
    """Warning events about the job's children and pods, newest last (FailedCreate: exceeded quota …)."""


@dataclasses.dataclass(frozen=True)
class Deletion:
    """Deletes in the background, and only the very object that was observed."""

    key: Key
    uid: str


@dataclasses.dataclass(frozen=True)
class Event:
    """A Kubernetes event about the RLJob."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to do, in this order. An empty plan: nothing is to be done until something changes."""

    pause: bool = False
    """Ask trainer rank 0, by an authenticated POST, to write a checkpoint and stop. Asking twice does no harm."""
    apply: Sequence[Mapping[str, Any]] = ()
    """Objects to apply server-side, in order; only those that differ from what was observed."""
    delete: Sequence[Deletion] = ()
    delete_job: bool = False
    """The RLJob itself: its time to live is over."""
    status: Mapping[str, Any] | None = None
    """The whole new status; None: it stays as it is. Written last, against the observed resourceVersion."""
    events: Sequence[Event] = ()
    """Posted after the status was written."""
    again: datetime.timedelta | None = None
    """Look again after this time at the latest, even if nothing changes. None: only on a change or a resync."""
    stands: datetime.timedelta = datetime.timedelta(0)
    """For so long the same observation gives a plan that does nothing, whatever else the report tells than
    operators.training.counting."""

    @property
    def acts(self) -> bool:
        """Whether more is to be done now than to write the status and tell of it."""
        return bool(self.pause or self.apply or self.delete or self.delete_job)
