"""Why pods do not run, and how a trainer ended: from pods, Jobs, Deployments and events to a reason and one line. Pure.

A cause is the same on every look while nothing has changed: it counts no seconds and no restarts, and a container in a
crash loop is one, whether the kubelet lets it run just now or not.
"""

import dataclasses
import datetime
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from operators.figures import one_line
from operators.observed import Object

USER_ERROR, STOPPED, FENCED = 3, 4, 5  # exit codes of pipeline.termination
LOST_POD_S = 60.0
"""A pod that still exists so long after its grace is over is on a lost node, and nobody waits for it."""
LONGEST_MESSAGE = 900
LAST_LINES = 3
GAVE_UP = "asked to stop"
"""How a trainer's last line begins when no checkpoint was written within the grace of a stop."""
PULL = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
CONFIG = {"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}
ECHO = re.compile(r"(closed|reset) by peer|connection closed|broken pipe|remote process exited", re.IGNORECASE)
"""What a rank says when another one is gone: where there is another cause, this is none."""


@dataclasses.dataclass(frozen=True)
class Cause:
    reason: str
    message: str


@dataclasses.dataclass(frozen=True)
class End:
    """How an attempt of the trainer ended."""

    kind: Literal["complete", "stopped", "disruption", "failure", "refused"]
    """stopped: a checkpoint is written, as asked for. refused: trying again cannot help."""
    cause: Cause


@dataclasses.dataclass(frozen=True)
class Exit:
    """A container that ended badly."""

    pod: str
    container: str
    code: int
    reason: str
    lines: list[str]
    finished: str
    """RFC 3339."""
    removed: bool
    """Its pod had been asked to go before."""

    @property
    def echoes(self) -> bool:
        return any(ECHO.search(line) for line in self.lines)


# Pods that do not run


def trouble(pods: Iterable[Object]) -> Cause | None:
    """The worst of what keeps pods from running and being ready; None: they only need time."""
    found = [cause for pod in sorted(pods, key=name) if (cause := _pod_trouble(pod)) is not None]
    return min(found, key=lambda cause: TROUBLES.index(cause.reason), default=None)


TROUBLES = ("OOMKilled", "CrashLoop", "ImagePullFailed", "ConfigError", "Unschedulable")


def _pod_trouble(pod: Object) -> Cause | None:
    if "deletionTimestamp" in pod["metadata"] or ended(pod):
        return None
    scheduled = condition(pod, "PodScheduled")
    if scheduled is not None and scheduled["status"] == "False" and scheduled.get("reason") == "Unschedulable":
        return Cause("Unschedulable", shortened(f"pod {name(pod)}: {scheduled.get('message', '')}"))
    for status in containers(pod):
        cause = _container_trouble(pod, status)
        if cause is not None:
            return cause
    return None


def _container_trouble(pod: Object, status: Object) -> Cause | None:
    waiting = status.get("state", {}).get("waiting", {})
    text = f"container {status['name']} of pod {name(pod)}"
    if waiting.get("reason") in PULL:
        # The kubelet says the same with and without this beginning, in turns.
        why = waiting.get("message", "").partition("ErrImagePull: ")[2] or waiting.get("message", "")
        return Cause("ImagePullFailed", shortened(f"image {status.get('image')} of {text}: {why}"))
    if waiting.get("reason") in CONFIG:
        return Cause("ConfigError", shortened(f"{text}: {waiting.get('message', waiting['reason'])}"))
    exit = _exit(pod, status)
    if exit is None or status.get("ready"):
        return None
    return _crash(exit, "CrashLoop")


def _exit(pod: Object, status: Object) -> Exit | None:
    """The last bad end of a container, whether it was started again or not."""
    for state in (status.get("state", {}), status.get("lastState", {})):
        end = state.get("terminated")
        if end is not None and end["exitCode"] != 0:
            lines = [line.strip() for line in end.get("message", "").splitlines() if line.strip()]
            reason, finished = end.get("reason", ""), end.get("finishedAt") or ""
            removed = _was_asked_to_go(pod, finished)
            return Exit(name(pod), status["name"], end["exitCode"], reason, lines, finished, removed)
    return None


def _crash(exit: Exit, reason: str) -> Cause:
    if exit.reason == "OOMKilled":
        what = f"container {exit.container} of pod {exit.pod} used more memory than its limit"
        return Cause("OOMKilled", what)
    lines = exit.lines[:1] if exit.code in (USER_ERROR, STOPPED, FENCED) else exit.lines[-LAST_LINES:]
    said = " | ".join(lines) or exit.reason or "it gave no reason"
    return Cause(reason, shortened(f"container {exit.container} of pod {exit.pod}, exit {exit.code}: {said}"))


# Pods that could not be created


def refusal(owner: Object, events: Sequence[Object]) -> Cause | None:
    """Why the pods of a Job or Deployment could not be created, if they could not."""
    failed = condition(owner, "ReplicaFailure")
    if failed is not None and failed["status"] == "True":
        return refused(failed.get("message", ""))
    uid = owner["metadata"]["uid"]
    said = [
        event.get("message", "")
        for event in events
        if event.get("reason") == "FailedCreate" and event.get("involvedObject", {}).get("uid") == uid
    ]
    return refused(said[-1]) if said else None


def refused(message: str) -> Cause:
    """Why the API server takes an object not. The name of the pod that could not be, and what others use of the quota,
    change from try to try."""
    message = re.sub(r'^(Error creating: )?(pods "[^"]*" is forbidden: )?', "", message)
    message = re.sub(r"used: .*?, limited: ", "limited: ", message)
    return Cause("QuotaExceeded" if "exceeded quota" in message else "CreateFailed", shortened(message))


# How a trainer ended


def end(job: Object, pods: Sequence[Object], now: datetime.datetime) -> End | None:
    """How the attempt that this Job and these pods of its are ended; None: it has not. `job` is the trainer's Job."""
    if is_true(condition(job, "Complete")):
        return End("complete", Cause("Completed", "all steps are trained"))
    lost = next((pod for pod in pods if not ended(pod) and is_lost(pod, now)), None)
    if lost is not None:
        return _disruption(f"pod {name(lost)} is lost with its node {lost['spec'].get('nodeName', '')}")
    if not is_true(condition(job, "Failed")):
        return _tampered(job)
    exits = sorted(
        (exit for pod in pods for status in containers(pod) if (exit := _exit(pod, status)) is not None),
        key=lambda exit: (exit.finished, not exit.removed),
    )
    return _by_code(exits, USER_ERROR) or _evicted(job, pods) or _by_code(exits, FENCED, STOPPED) or _failure(exits)


def _by_code(exits: Sequence[Exit], *codes: int) -> End | None:
    exit = next((exit for exit in exits if exit.code in codes), None)
    if exit is None:
        return None
    if exit.code == FENCED:
        return _disruption(_crash(exit, "").message)
    if exit.code == STOPPED:
        return End("stopped", _crash(exit, "Preempted"))
    return End("refused", _crash(exit, _refusal_reason(exit)))


def _refusal_reason(exit: Exit) -> str:
    """A rank's line begins with its number; what is wrong before any rank has started is the configuration."""
    first = exit.lines[0] if exit.lines else ""
    if re.search(r"resume_?from", first, re.IGNORECASE):
        return "CheckpointNotFound"
    return "TrainerFailed" if first.startswith("[rank ") else "InvalidConfiguration"


def _store_is_away(exit: Exit) -> bool:
    """The words of pipeline.storage for a store that was down until the deadline of a request."""
    return any(re.search(r"[A-Z]{3,} \S+ failed for \d+ s: ", line) for line in exit.lines)


def _evicted(job: Object, pods: Sequence[Object]) -> End | None:
    for pod in sorted(pods, key=name):
        found = condition(pod, "DisruptionTarget")
        if is_true(found):
            assert found is not None
            return _disruption(f"pod {name(pod)}: {found.get('reason', '')}: {found.get('message', '')}")
    failed = condition(job, "Failed")
    if failed is not None and failed.get("reason") == "PodFailurePolicy":
        return _disruption(failed.get("message", ""))
    return None if pods else _disruption("its pods were removed")


def _failure(exits: Sequence[Exit]) -> End:
    """The first that ended by itself is to blame; its peers end because it is gone, or are removed with the Job."""
    own = [exit for exit in exits if not exit.removed]
    if not own:
        return _disruption(f"pod {exits[0].pod} was removed" if exits else "a pod was removed")
    first = min(own, key=lambda exit: (exit.echoes, exit.finished))
    if first.echoes and exits[0].removed:
        return _disruption(f"pod {exits[0].pod} was removed")
    if first.lines and first.lines[-1].startswith(GAVE_UP):
        return End("stopped", _crash(first, "Preempted"))
    away = next((exit for exit in own if _store_is_away(exit)), None)
    return End("failure", _crash(away, "StoreUnavailable") if away else _crash(first, "TrainerFailed"))


def _tampered(job: Object) -> End | None:
    spec = job["spec"]
    if spec.get("suspend"):
        return _disruption(f"somebody has suspended Job {name(job)}")
    if spec.get("parallelism") != spec.get("completions"):
        return _disruption(f"somebody has scaled Job {name(job)}")
    return None


def _disruption(message: str) -> End:
    return End("disruption", Cause("Preempted", shortened(message)))


# Reading objects


def name(found: Object) -> str:
    return str(found["metadata"]["name"])


def condition(found: Object, wanted: str) -> dict[str, Any] | None:
    conditions = found.get("status", {}).get("conditions", [])
    return next((entry for entry in conditions if entry["type"] == wanted), None)


def is_true(found: dict[str, Any] | None) -> bool:
    return found is not None and found["status"] == "True"


def containers(pod: Object) -> Iterator[Object]:
    status = pod.get("status", {})
    yield from status.get("initContainerStatuses", [])
    yield from status.get("containerStatuses", [])


def ended(pod: Object) -> bool:
    """No container of it will run again."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def is_ready(pod: Object) -> bool:
    return "deletionTimestamp" not in pod["metadata"] and is_true(condition(pod, "Ready"))


def _was_asked_to_go(pod: Object, then: str) -> bool:
    """Whether the pod was deleted before `then`; its deletionTimestamp is the end of its grace."""
    metadata = pod["metadata"]
    if "deletionTimestamp" not in metadata or not then:
        return False
    grace = datetime.timedelta(seconds=metadata.get("deletionGracePeriodSeconds", 0))
    return moment(metadata["deletionTimestamp"]) - grace <= moment(then)


def is_lost(pod: Object, now: datetime.datetime) -> bool:
    """Deleted, and still there long after its grace: its node does not answer."""
    deleted = pod["metadata"].get("deletionTimestamp")
    return deleted is not None and (now - moment(deleted)).total_seconds() > LOST_POD_S


def moment(time: str) -> datetime.datetime:
    """Of an RFC 3339 text."""
    return datetime.datetime.fromisoformat(time.replace("Z", "+00:00"))


def shortened(text: str) -> str:
    return one_line(text, LONGEST_MESSAGE)
