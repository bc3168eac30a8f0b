"""Rows of the table `Life cycle` about attempts of the trainer: how one ends, and what that counts as."""

import datetime
from typing import Any

from tests import podstatus
from tests.kubeapi import Dict, until
from tests.kubelet import evict
from tests.operator_cases import add, case, life
from tests.podstatus import Outcome
from tests.stage import LIMIT_S, Scene

FAILS = "A container of the trainer fails"
DISRUPTED = "A pod of the trainer is evicted, deleted or lost with its node"
TAMPERED = "The trainer's Job is suspended or scaled by somebody"


def moment(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text)


def fails(scene: Scene, outcome: Outcome, cause: str, nodes: int) -> None:
    scene.create(trainer={"nodes": nodes})
    scene.until_trainer(0)
    scene.end_trainer(outcome, pod=f"{nodes - 1}-*")
    attempt = scene.until_attempt(1)
    assert (attempt["cause"], scene.status["restarts"]) == ("Failure", 1)
    assert cause in attempt["message"], attempt
    scene.until_heard("Ready", "BackOff", "False")
    began = scene.until_trainer(1)["metadata"]["creationTimestamp"]
    assert moment(began) >= moment(attempt["notBefore"])
    assert scene.names("Job") == {("Job", "sums-trainer-1")}
    scene.until_ready(1)
    assert {pod["metadata"]["labels"]["miles.dev/attempt"] for pod in scene.pods(component="trainer")} == {"1"}
    assert (scene.status["restarts"], scene.status["disruptions"]) == (1, 0)


FAILURES: dict[str, tuple[Outcome, str, int]] = {
    "its main container": (podstatus.fails(1, "RuntimeError: broken"), "exit 1: RuntimeError: broken", 1),
    "one of two nodes": (podstatus.fails(1, "RuntimeError: broken"), "sums-trainer-0-1-", 2),
    "its init container": (podstatus.fails(1, "hub: 503", container="fetch"), "container fetch", 1),
    "out of memory": (podstatus.oom_killed(), "OOMKilled: container trainer", 1),
    "killed": (podstatus.fails(137), "exit 137", 1),
}
for name, failure in FAILURES.items():
    add(f"a failed trainer is counted and starts again: {name}", life(FAILS), fails, *failure, lasts_s=15)


def blames(scene: Scene, peer_first: bool) -> None:
    """Of two nodes one is killed, and the other notices."""
    scene.create(trainer={"nodes": 2})
    scene.until_ready()
    closed = podstatus.fails(1, "[rank 0] RuntimeError: Connection closed by peer [10.0.0.4]:9")
    ends = [(podstatus.fails(1, "[rank 1] OSError: disk"), "1-*"), (closed, "0-*")]
    for outcome, pod in ends[::-1] if peer_first else ends:
        scene.end_trainer(outcome, pod=pod)
    assert "OSError: disk" in scene.until_attempt(1)["message"]


for peer_first in (True, False):
    name = f"the rank that failed is to blame, not its peer that noticed{' first' if peer_first else ''}"
    add(name, life(FAILS), blames, peer_first)


def pauses(scene: Scene, restarts: int, pause_s: int) -> None:
    scene.create(runPolicy={"maxRestarts": 100})
    scene.until_ready()
    scene.set_status(restarts=restarts)
    scene.end_trainer(podstatus.fails())
    attempt = scene.until_attempt(1)
    assert scene.status["restarts"] == restarts + 1
    assert (moment(attempt["notBefore"]) - moment(attempt["time"])).total_seconds() == pause_s


for restarts, pause_s in ((1, 20), (2, 40), (9, 300)):
    add(f"after {restarts} restarts the next waits {pause_s} s", life(FAILS), pauses, restarts, pause_s)


@case(life("It failed more often than `runPolicy.maxRestarts`", "The job is Complete or Failed"))
def too_many_failures_end_the_job(scene: Scene) -> None:
    scene.create(runPolicy={"maxRestarts": 0})
    scene.until_ready()
    scene.end_trainer(podstatus.fails(1, "broken"))
    assert "broken" in scene.until_told("Failed", "MaxRestartsExceeded", "True")["message"]
    assert scene.status["restarts"] == 0
    scene.until_child("Deployment", "rollout", lambda child: child["spec"]["replicas"] == 0, "workers are removed")
    assert scene.names("Job") <= {("Job", "sums-trainer-0")}


@case(life("Model, data or store is refused (exit 3)"))
def what_trying_again_cannot_mend_fails_the_job_at_once(scene: Scene) -> None:
    scene.create()
    scene.until_ready()
    scene.end_trainer(podstatus.fails(3, "model.uri: there is no such model"))
    told = scene.until_told("Failed", "InvalidConfiguration", "True")
    assert "model.uri: there is no such model" in told["message"]
    assert (scene.status["restarts"], scene.status["phase"]) == (0, "Failed")


@case(life("The store did not answer at the start"))
def a_store_that_does_not_answer_is_tried_again(scene: Scene) -> None:
    scene.create()
    scene.until_trainer(0)
    scene.end_trainer(podstatus.fails(1, "PUT s3://team-a/miles/run.json failed for 30 s: 503", container="fetch"))
    assert scene.until_attempt(1)["cause"] == "Failure"
    scene.until_told("StoreReady", "StoreUnavailable", "False")
    assert scene.status["restarts"] == 1


def is_disrupted(scene: Scene, nodes: int, disrupt: Any) -> None:
    scene.create(trainer={"nodes": nodes})
    scene.until_ready()
    disrupt(scene, scene.pods(component="trainer")[0]["metadata"]["name"])
    attempt = scene.until_attempt(1)
    assert attempt["cause"] == "Disruption", attempt
    assert (scene.status["restarts"], scene.status["disruptions"]) == (0, 1)
    assert (moment(attempt["notBefore"]) - moment(attempt["time"])).total_seconds() == 10
    scene.until_heard("Ready", "Preempted", "False")
    scene.until_ready(1)


DISRUPTIONS: dict[str, Any] = {
    "evicted": lambda scene, pod: evict(scene.api, scene.namespace, pod),
    "evicted by its node": lambda scene, pod: scene.end_trainer(podstatus.runs_out_of_node_memory(), pod="0-*"),
    "deleted": lambda scene, pod: scene.api.delete("Pod", pod, scene.namespace),
    "fenced by a newer trainer": lambda scene, pod: scene.end_trainer(podstatus.fails(5, "a higher term")),
}
for nodes in (1, 2):
    for name, disrupt in DISRUPTIONS.items():
        add(f"one of {nodes} pods is {name}: not counted", life(DISRUPTED), is_disrupted, nodes, disrupt, lasts_s=15)


@case(life(DISRUPTED), lasts_s=90)
def a_pod_that_is_lost_with_its_node_is_replaced_although_it_never_ends(scene: Scene) -> None:
    node = "node-apart"
    template = {
        "nodeSelector": {"kubernetes.io/hostname": node},
        "tolerations": [{"key": "apart", "operator": "Exists"}],
    }
    scene.create(trainer={"template": template})
    scene.until_ready()
    (pod,) = scene.pods(component="trainer")
    scene.kubelet.lose_node(node)
    scene.api.delete("Pod", pod["metadata"]["name"], scene.namespace, gracePeriodSeconds=1)
    attempt = scene.until_attempt(1, 100)
    assert (attempt["cause"], node in attempt["message"]) == ("Disruption", True)
    scene.until_trainer(1)
    assert pod["metadata"]["uid"] in {each["metadata"]["uid"] for each in scene.pods(component="trainer")}


def is_tampered_with(scene: Scene, change: Dict) -> None:
    scene.create()
    scene.until_ready()
    scene.api.patch("Job", "sums-trainer-0", scene.namespace, {"spec": change})
    assert scene.until_attempt(1)["cause"] == "Disruption"
    scene.until_ready(1)
    assert scene.status["restarts"] == 0


add("the trainer's Job is suspended by somebody", life(TAMPERED), is_tampered_with, {"suspend": True}, lasts_s=12)
add("the trainer's Job is scaled by somebody", life(TAMPERED), is_tampered_with, {"parallelism": 0}, lasts_s=12)


def begins_again(scene: Scene, propagation: str) -> None:
    scene.create()
    scene.until_ready()
    first = scene.child("Job", "trainer-0")["metadata"]["uid"]
    scene.api.delete("Job", "sums-trainer-0", scene.namespace, propagationPolicy=propagation)
    scene.until_child("Job", "trainer-0", lambda child: child["metadata"]["uid"] != first, "the attempt begins again")
    second = scene.child("Job", "trainer-0")["metadata"]["uid"]

    def owners() -> list[str]:
        pods = scene.pods(component="trainer")
        return [owner["uid"] for pod in pods for owner in pod["metadata"].get("ownerReferences", ())]

    # The status of before may still stand, and the first pod still go.
    until(lambda: owners() == [second] and scene.status["trainer"]["ready"] == 1, "its pod runs, alone", LIMIT_S)
    assert (scene.status["attempt"]["number"], scene.status["restarts"], scene.status["disruptions"]) == (0, 0, 0)


for policy in ("Background", "Foreground", "Orphan"):
    name = f"the trainer's Job is deleted by somebody: {policy}"
    add(name, life("The trainer's Job is deleted by somebody"), begins_again, policy)
