"""What a pod is doing, in a few words, and which of its containers a person wants to hear. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any

from operators.names import attempt_of

Pod = Mapping[str, Any]
HARMLESS = ("PodInitializing", "ContainerCreating")
MAIN = {"trainer": "trainer", "rollout": "worker"}


def component(pod: Pod) -> str:
    return str(pod["metadata"].get("labels", {}).get("miles.dev/component", ""))


def name(pod: Pod) -> str:
    return str(pod["metadata"]["name"])


def of(pods: Iterable[Pod], wanted: str) -> list[Pod]:
    """The pods of one component, by name; "reward" stands for all reward models."""
    found = [pod for pod in pods if component(pod) == wanted or component(pod).startswith(f"{wanted}-")]
    return sorted(found, key=name)


def is_ready(pod: Pod) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions)


def words(pod: Pod) -> str:
    """ "ready", "running vllm, worker", "fetching the model", "ImagePullBackOff (vllm)", "not scheduled: 0/1 …"."""
    status = pod.get("status", {})
    if pod["metadata"].get("deletionTimestamp"):
        return "stopping"
    if status.get("phase") in ("Succeeded", "Failed"):
        return _ended(status)
    if is_ready(pod):
        return "ready"
    scheduled = next((entry for entry in status.get("conditions", []) if entry["type"] == "PodScheduled"), None)
    if scheduled is not None and scheduled["status"] == "False":
        return f"not scheduled: {scheduled.get('message', scheduled.get('reason', ''))}"
    for container in _containers(status):
        waiting = container.get("state", {}).get("waiting")
        if waiting and waiting.get("reason", "") not in HARMLESS:
            return f"{waiting.get('reason', 'waiting')} ({container['name']})"
    running = [entry["name"] for entry in _containers(status) if "running" in entry.get("state", {})]
    if running:
        return "fetching the model" if running == ["fetch"] else f"running {', '.join(running)}"
    return "starting"


def restarts(pod: Pod) -> int:
    return sum(entry.get("restartCount", 0) for entry in _containers(pod.get("status", {})))


def speaking(pod: Pod) -> str:
    """The container whose log tells most: the one that is stuck, else the first that is not done, else the main."""
    status = pod.get("status", {})
    for container in status.get("initContainerStatuses", []):
        if container.get("state", {}).get("terminated", {}).get("exitCode") != 0:
            return str(container["name"])
    containers = status.get("containerStatuses", [])
    failed = [entry for entry in containers if entry.get("state", {}).get("terminated", {}).get("exitCode", 0) != 0]
    if failed:
        return str(failed[0]["name"])
    return MAIN.get(component(pod), str(pod["spec"]["containers"][0]["name"]))


def loudness(pod: Pod) -> tuple[int, bool, int]:
    """Orders pods by how much a person wants to hear them: the newest attempt, then those in trouble, then rank 0."""
    labels = pod["metadata"].get("labels", {})
    rank_0 = labels.get("batch.kubernetes.io/job-completion-index", "0") == "0"
    return attempt_of(pod["metadata"]), words(pod).startswith("failed"), rank_0


def _ended(status: Mapping[str, Any]) -> str:
    if status["phase"] == "Succeeded":
        return "finished"
    ends = [(entry["name"], entry["state"]["terminated"]) for entry in _containers(status) if _failed(entry)]
    if not ends:
        return f"failed: {status.get('reason') or status.get('message') or 'no container says why'}"
    container, end = ends[0]
    how = end["reason"] if end.get("reason") not in (None, "Error") else f"exit {end['exitCode']}"
    return f"failed: {how} ({container})"


def _failed(container: Mapping[str, Any]) -> bool:
    return bool(container.get("state", {}).get("terminated", {}).get("exitCode"))


def _containers(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
