"""What a kubelet would say of a pod: pure functions from a pod and a scripted outcome to the pod's status."""

import dataclasses
import datetime
from typing import Any, Literal

Dict = dict[str, Any]
SIGTERM = 143  # exit code of a program that does not handle it


@dataclasses.dataclass(frozen=True)
class Step:
    """One status of a pod, written `after_s` seconds after the one before it."""

    state: Literal["ready", "unready", "waiting", "ended", "stopped", "evicted"]
    after_s: float = 0.0
    container: str | None = None  # whom it is about, maybe an init container; None: the first main one
    exit_code: int = 0
    reason: str = ""
    message: str = ""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What becomes of a pod once it is bound to a node; see the functions below."""

    steps: tuple[Step, ...]
    stop: Step = Step("stopped", exit_code=SIGTERM, reason="Error")
    """When the pod is deleted while it runs."""


def runs(ready_s: float = 0.0, stop_code: int = SIGTERM, stop_s: float = 0.0) -> Outcome:
    """Running at once and Ready `ready_s` seconds later. When deleted, its main containers end with `stop_code` after
    `stop_s` seconds, at most the pod's grace period."""
    start = (Step("unready"),) if ready_s > 0 else ()
    return Outcome((*start, Step("ready", ready_s)), Step("stopped", stop_s, exit_code=stop_code, reason="Error"))


def never_ready() -> Outcome:
    """Running, but its readiness probe fails."""
    return Outcome((Step("unready"),))


def succeeds(after_s: float = 0.0) -> Outcome:
    """Ready at once; every container ends with exit code 0 after `after_s` seconds."""
    return Outcome((Step("ready"), Step("ended", after_s, reason="Completed")))


def fails(exit_code: int = 1, message: str = "", container: str | None = None, after_s: float = 0.0) -> Outcome:
    """A container ends with `exit_code` and the termination message `message`, `after_s` seconds after the pod was
    Ready: the pod is Failed where nothing restarts it, and in CrashLoopBackOff where something does."""
    return Outcome((Step("ready"), Step("ended", after_s, container, exit_code, "Error", message)))


def oom_killed(container: str | None = None, after_s: float = 0.0) -> Outcome:
    return Outcome((Step("ready"), Step("ended", after_s, container, 137, "OOMKilled")))


def waits(reason: str, message: str = "", container: str | None = None) -> Outcome:
    """A container that does not start: ImagePullBackOff, ErrImagePull, CreateContainerConfigError, InvalidImageName."""
    return Outcome((Step("waiting", container=container, reason=reason, message=message),))


def image_pull_fails(message: str = "manifest unknown", container: str | None = None) -> Outcome:
    return waits("ImagePullBackOff", f"Back-off pulling image: {message}", container)


def runs_out_of_node_memory(after_s: float = 0.0) -> Outcome:
    """Evicted by its node; an eviction that a user or a drain asks for is `tests.kubelet.evict`."""
    return Outcome((Step("ready"), Step("evicted", after_s, message="The node was low on resource: memory.")))


def status(pod: Dict, step: Step, ip: str, now: datetime.datetime) -> Dict:
    """The status at `step`, as a strategic merge patch: conditions that others wrote stay."""
    main, init = pod["spec"]["containers"], pod["spec"].get("initContainers", [])
    subject = step.container or main[0]["name"]
    stuck = next((index for index, each in enumerate(init) if each["name"] == subject), None)
    containers = [_main(pod, each, subject, stuck, step, now) for each in main]
    phase = _phase(pod, step, stuck)
    ready = phase == "Running" and all(each["ready"] for each in containers)
    conditions = {
        "PodReadyToStartContainers": phase in ("Pending", "Running"),
        "Initialized": stuck is None,
        "ContainersReady": ready,
        "Ready": ready,
    }
    found: Dict = {
        "phase": phase,
        "podIP": ip,
        "podIPs": [{"ip": ip}],
        "startTime": pod["status"].get("startTime", _text(now)),
        "initContainerStatuses": [_init(pod, each, index, stuck, step, now) for index, each in enumerate(init)],
        "containerStatuses": containers,
        "conditions": [_condition(pod, kind, value, now) for kind, value in conditions.items()],
    }
    if step.state == "evicted":
        why = {"reason": "TerminationByKubelet", "message": step.message}
        found["conditions"].append(_condition(pod, "DisruptionTarget", True, now) | why)
        found |= {"reason": "Evicted", "message": step.message}
    return found


def _restarts(pod: Dict, step: Step) -> bool:
    policy = pod["spec"].get("restartPolicy", "Always")
    return step.state == "ended" and (policy == "Always" or (policy == "OnFailure" and step.exit_code != 0))


def _phase(pod: Dict, step: Step, stuck: int | None) -> str:
    if step.state in ("ended", "stopped", "evicted") and not _restarts(pod, step):
        return "Succeeded" if step.exit_code == 0 and step.state != "evicted" else "Failed"
    return "Pending" if step.state == "waiting" or stuck is not None else "Running"


def _init(pod: Dict, container: Dict, index: int, stuck: int | None, step: Step, now: datetime.datetime) -> Dict:
    if stuck is not None and index > stuck:
        return _container(container, {"waiting": {"reason": "PodInitializing"}})
    if index == stuck:
        return _subject(pod, container, step, now)
    if container.get("restartPolicy") == "Always":  # a sidecar
        return _container(container, {"running": {"startedAt": _text(now)}}, ready=True)
    return _container(container, _terminated(0, "Completed", "", now), ready=True)


def _main(pod: Dict, container: Dict, subject: str, stuck: int | None, step: Step, now: datetime.datetime) -> Dict:
    if stuck is not None:
        return _container(container, {"waiting": {"reason": "PodInitializing"}})
    if step.state == "stopped":
        return _container(container, _terminated(step.exit_code, step.reason, "", now))
    if step.state == "evicted":
        return _container(container, _terminated(137, "Error", "", now))
    if container["name"] == subject and step.state in ("waiting", "ended"):
        return _subject(pod, container, step, now)
    if step.state == "ended" and not _restarts(pod, step):
        return _container(container, _terminated(0, "Completed", "", now))
    return _container(container, {"running": {"startedAt": _text(now)}}, ready=step.state != "unready")


def _subject(pod: Dict, container: Dict, step: Step, now: datetime.datetime) -> Dict:
    """The container that a step is about: it waits, has ended, or has ended and waits to be started again."""
    if step.state == "waiting":
        return _container(container, {"waiting": {"reason": step.reason, "message": step.message}})
    ended = _terminated(step.exit_code, step.reason, step.message, now)
    if not _restarts(pod, step):
        return _container(container, ended)
    message = f"back-off 10s restarting failed container={container['name']}"
    crash_loop = {"waiting": {"reason": "CrashLoopBackOff", "message": message}}
    return _container(container, crash_loop) | {"lastState": ended, "restartCount": 1}


def _container(container: Dict, state: Dict, ready: bool = False) -> Dict:
    return {
        "name": container["name"],
        "image": container["image"],
        "imageID": "",
        "state": state,
        "ready": ready,
        "started": "running" in state,
        "restartCount": 0,
    }


def _terminated(exit_code: int, reason: str, message: str, now: datetime.datetime) -> Dict:
    ended = {"exitCode": exit_code, "reason": reason, "message": message}
    return {"terminated": ended | {"startedAt": _text(now), "finishedAt": _text(now)}}


def _condition(pod: Dict, kind: str, value: bool, now: datetime.datetime) -> Dict:
    found = {"type": kind, "status": str(value), "lastTransitionTime": _text(now)}
    before: Dict = next((each for each in pod["status"].get("conditions", []) if each["type"] == kind), {})
    if before.get("status") == found["status"]:
        found["lastTransitionTime"] = before["lastTransitionTime"]
    return found


def _text(time: datetime.datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")
