"""The table `Conditions and reasons`: each is brought about, with the real cause in its message."""

import time

from tests import podstatus
from tests.kubeapi import Dict, until
from tests.operator_cases import add, case, reason
from tests.operator_cases.life_cycle import DEADLINES
from tests.podstatus import Outcome
from tests.stage import FRESH_S, LIMIT_S, STOPPED, Scene

SECRET = 'secret "s3" not found'
NOWHERE = {"nodeSelector": {"zone": "nowhere"}}


# All is well, or will be


@case(reason("Starting", "WaitingForPods", "Training", "PodsReady", "StoreAnswers", "AsSpecified", "NotSuspended"))
def a_job_on_its_way_to_training(scene: Scene) -> None:
    scene.script(podstatus.never_ready(), "trainer")
    scene.create()
    scene.until_told("TrainerReady", "WaitingForPods", "False")
    scene.until_told("RolloutReady", "PodsReady", "True")
    assert scene.condition("StoreReady")["status"] == "Unknown"
    scene.script(podstatus.runs(), "trainer")
    scene.until_ready()
    scene.until_told("Ready", "Starting", "False")
    assert "the first step" in scene.condition("Ready")["message"]
    scene.train()
    told = {entry["type"]: (entry["status"], entry["reason"]) for entry in scene.status["conditions"]}
    assert told == {
        "Ready": ("True", "Training"),
        "Reconciling": ("False", "AsSpecified"),
        "Stalled": ("False", "AsSpecified"),
        "StoreReady": ("True", "StoreAnswers"),
        "RolloutReady": ("True", "PodsReady"),
        "TrainerReady": ("True", "PodsReady"),
        "Suspended": ("False", "NotSuspended"),
        "Complete": ("False", "AsSpecified"),
        "Failed": ("False", "AsSpecified"),
    }
    scene.until_event("Training")


@case(reason("NothingGenerated"))
def a_job_that_trains_stored_samples_has_no_workers(scene: Scene) -> None:
    scene.create(data={"replayFrom": {"uri": "s3://team-a/miles/default/a/1"}})
    scene.until_told("RolloutReady", "NothingGenerated", "True")
    scene.train()
    scene.until_told("Ready", "Training", "True")
    assert scene.pods(component="rollout") == []


@case(reason("RollingOut"))
def workers_are_replaced_one_by_one(scene: Scene) -> None:
    scene.create(rollout={"replicas": 2})
    scene.train()
    scene.script(podstatus.never_ready(), "rollout", only_new=True)
    scene.edit(rollout={"replicas": 3, "image": "registry/miles:2"})
    scene.until_told("RolloutReady", "RollingOut", "False")
    assert scene.condition("Ready")["status"] == "True"
    assert scene.condition("Reconciling")["status"] == "True"
    scene.script(podstatus.runs(), "rollout")
    scene.until_told("RolloutReady", "PodsReady", "True")


@case(reason("RollingOut"))
def workers_that_are_added_are_no_trouble(scene: Scene) -> None:
    scene.create()
    scene.train()
    scene.script(podstatus.never_ready(), "rollout", only_new=True)
    scene.edit(rollout={"replicas": 3})
    scene.until_told("RolloutReady", "RollingOut", "False")
    scene.until_child("Deployment", "rollout", lambda child: child["status"].get("updatedReplicas") == 3, "3 pods")
    for _ in range(3):
        scene.look()
        time.sleep(1.2)
    scene.script(podstatus.runs(), "rollout")
    scene.until_told("RolloutReady", "PodsReady", "True")
    assert ("RolloutReady", "False", "RolloutUnavailable") not in scene.conditions
    assert "RolloutUnavailable" not in scene.events()


@case(reason("Restarting", "Editing"))
def an_edit_checkpoints_and_restarts(scene: Scene) -> None:
    scene.create()
    scene.until_ready()
    scene.edit(trainer={"compile": True})
    scene.until_told("Ready", "Editing", "False")
    scene.until_asked()
    scene.end_trainer(STOPPED)
    scene.until_heard("Ready", "Restarting", "False")
    scene.until_ready(1)


@case(reason("BackOff"), lasts_s=15)
def a_failed_trainer_waits_and_tells_why(scene: Scene) -> None:
    scene.create()
    scene.until_ready()
    scene.end_trainer(podstatus.fails(1, "line 1\nline 2\nRuntimeError: broken"))
    told = scene.until_heard("Ready", "BackOff", "False")
    assert "TrainerFailed: container trainer of pod sums-trainer-0-0-" in told["message"]
    assert "exit 1: line 1 | line 2 | RuntimeError: broken" in told["message"]
    assert ("TrainerReady", "False", "BackOff") in scene.conditions
    scene.until_ready(1)


@case(reason("Preempted"))
def an_evicted_trainer_tells_who_evicted_it(scene: Scene) -> None:
    scene.create()
    scene.until_ready()
    scene.end_trainer(podstatus.runs_out_of_node_memory())
    assert "The node was low on resource: memory." in scene.until_heard("Ready", "Preempted", "False")["message"]


@case(reason("Suspending", "Suspended", "Resumed"))
def a_job_is_suspended_and_resumed(scene: Scene) -> None:
    scene.create()
    scene.until_ready()
    scene.edit(suspend=True)
    scene.until_told("RolloutReady", "Suspending", "False")
    scene.until_asked()
    scene.end_trainer(STOPPED)
    for kind in ("Ready", "RolloutReady", "TrainerReady"):
        scene.until_told(kind, "Suspended", "False")
    scene.until_told("Suspended", "Suspended", "True")
    scene.edit(suspend=False)
    scene.until_attempt(1)
    scene.until_event("Resumed")


@case(reason("Completed"))
def a_job_whose_steps_are_all_trained(scene: Scene) -> None:
    scene.create()
    scene.until_ready()
    scene.end_trainer(podstatus.succeeds())
    scene.until_told("Complete", "Completed", "True")
    assert (scene.condition("Ready")["reason"], scene.status["phase"]) == ("Completed", "Complete")


# Pods that do not run


def is_troubled(scene: Scene, name: str, part: str, outcome: Outcome | None, spec: Dict, said: str) -> None:
    if outcome is not None:
        scene.script(outcome, part)
    scene.create(**spec)
    kind = "TrainerReady" if part == "trainer" else "RolloutReady"
    told = scene.until_told(kind, name, "False")
    assert said in told["message"], told["message"]
    assert scene.until_told("Ready", name, "False")["message"] == told["message"]
    assert scene.condition("Failed")["status"] == "False"
    scene.until_event(name)


TROUBLES: list[tuple[str, str, Outcome, str]] = [
    ("ImagePullFailed", "trainer", podstatus.image_pull_fails(), "manifest unknown"),
    ("ImagePullFailed", "rollout", podstatus.image_pull_fails(), "manifest unknown"),
    ("ImagePullFailed", "rollout", podstatus.image_pull_fails(container="worker"), "container worker"),
    ("ImagePullFailed", "trainer", podstatus.image_pull_fails(container="fetch"), "container fetch"),
    ("ImagePullFailed", "rollout", podstatus.waits("InvalidImageName", "couldn't parse"), "couldn't parse"),
    ("ConfigError", "trainer", podstatus.waits("CreateContainerConfigError", SECRET), SECRET),
    ("ConfigError", "rollout", podstatus.waits("CreateContainerConfigError", SECRET), SECRET),
    ("OOMKilled", "rollout", podstatus.oom_killed(), "container vllm"),
    ("OOMKilled", "rollout", podstatus.oom_killed("worker"), "container worker"),
    ("CrashLoop", "rollout", podstatus.fails(1, "no device"), "no device"),
    ("CrashLoop", "rollout", podstatus.fails(1, "no such model", container="fetch"), "container fetch"),
]
for name, part, outcome, said in TROUBLES:
    add(f"{name} of {part}: {said}", reason(name), is_troubled, name, part, outcome, {}, said)

for part in ("trainer", "rollout"):
    spec: Dict = {part: {"template": NOWHERE}}
    add(
        f"Unschedulable of {part}", reason("Unschedulable"), is_troubled, "Unschedulable", part, None, spec, "nodes are"
    )


def is_refused_a_pod(scene: Scene, name: str, body: Dict, spec: Dict, said: str) -> None:
    scene.api.create(body, scene.namespace)
    is_troubled(scene, name, "trainer", None, spec, said)
    scene.api.delete(body["kind"], body["metadata"]["name"], scene.namespace)


NO_PODS = {"hard": {"pods": "0"}}
LEAST = {"limits": [{"type": "Container", "max": {"memory": "4Gi"}}]}
QUOTA: Dict = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "full"}, "spec": NO_PODS}
RANGE: Dict = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "small"}, "spec": LEAST}
TOO_LARGE = {"trainer": {"resources": {"limits": {"memory": "8Gi"}}}}
add("QuotaExceeded", reason("QuotaExceeded"), is_refused_a_pod, "QuotaExceeded", QUOTA, {}, "exceeded quota: full")
add("CreateFailed", reason("CreateFailed"), is_refused_a_pod, "CreateFailed", RANGE, TOO_LARGE, "maximum memory usage")


def is_refused_a_child(scene: Scene, counted: str) -> None:
    quota = QUOTA | {"spec": {"hard": {f"count/{counted}": "0"}}}
    scene.api.create(quota, scene.namespace)
    until(
        lambda: scene.api.get("ResourceQuota", "full", scene.namespace).get("status", {}).get("hard"),
        "the quota",
        LIMIT_S,
    )
    part = "rollout" if counted == "deployments.apps" else "trainer"
    is_troubled(scene, "QuotaExceeded", part, None, {}, f"count/{counted}")
    scene.until_told("Ready", "QuotaExceeded", "False")
    scene.api.delete("ResourceQuota", "full", scene.namespace)
    scene.train()


for counted in ("jobs.batch", "deployments.apps", "configmaps", "secrets", "services"):
    add(f"QuotaExceeded of {counted}", reason("QuotaExceeded"), is_refused_a_child, counted)


@case(reason("CreateFailed"))
def a_child_that_is_invalid_is_told_with_the_field(scene: Scene) -> None:
    scene.create(trainer={"resources": {"limits": {"hugepages-2Mi": "3Mi", "memory": "1Gi"}}})
    scene.until_told("Ready", "CreateFailed", "False")
    assert "hugepages-2Mi" in scene.condition("Ready")["message"]


@case(reason("OOMKilled"))
def a_trainer_out_of_memory_names_the_container(scene: Scene) -> None:
    scene.create(runPolicy={"maxRestarts": 1})
    scene.until_ready()
    scene.end_trainer(podstatus.oom_killed())
    assert scene.until_attempt(1)["message"].startswith("OOMKilled: container trainer of pod sums-trainer-0-0-")
    scene.script(podstatus.oom_killed(), "rollout")
    scene.until_told("RolloutReady", "OOMKilled", "False")


@case(reason("RolloutUnavailable"))
def one_of_three_workers_is_missing(scene: Scene) -> None:
    scene.create(rollout={"replicas": 3})
    scene.train()
    scene.script(podstatus.fails(1, "no device"), "rollout", times=1)
    told = scene.until_told("RolloutReady", "RolloutUnavailable", "False", said="no device")
    assert "2 of 3 workers are ready; training goes on" in told["message"]
    assert scene.condition("Ready")["status"] == "True"
    scene.until_event("RolloutUnavailable")


@case(reason("ScaledToZero"))
def a_job_without_workers_says_so(scene: Scene) -> None:
    scene.create(rollout={"replicas": 0})
    for kind in ("Ready", "RolloutReady"):
        assert "spec.rollout.replicas is 0" in scene.until_told(kind, "ScaledToZero", "False")["message"]


# How it ends


def ends(scene: Scene, name: str, outcome: Outcome, said: str, spec: Dict) -> None:
    scene.create(**spec)
    scene.until_ready()
    scene.end_trainer(outcome)
    told = scene.until_told("Failed", name, "True")
    assert said in told["message"], told["message"]
    assert scene.condition("Stalled")["reason"] == scene.condition("Ready")["reason"] == name
    scene.until_event(name)


NO_CHECKPOINT = "checkpoint.resumeFrom: s3://b/run holds no checkpoint"
ENDS: list[tuple[str, Outcome, str, Dict]] = [
    ("TrainerFailed", podstatus.fails(3, "[rank 0] the gradient was not finite in 5 steps"), "not finite", {}),
    ("InvalidConfiguration", podstatus.fails(3, "model.uri: there is no such model"), "no such model", {}),
    ("InvalidConfiguration", podstatus.fails(3, "data: no such file", container="fetch"), "no such file", {}),
    ("CheckpointNotFound", podstatus.fails(3, NO_CHECKPOINT), "holds no checkpoint", {}),
    ("MaxRestartsExceeded", podstatus.oom_killed(), "used more memory", {"runPolicy": {"maxRestarts": 0}}),
]
for name, outcome, said, spec in ENDS:
    add(f"{name}: {said}", reason(name), ends, name, outcome, said, spec)


@case(reason("StoreUnavailable"), lasts_s=15)
def a_store_that_does_not_answer_is_named_until_it_does(scene: Scene) -> None:
    scene.create()
    scene.until_ready()
    scene.end_trainer(podstatus.fails(1, "PUT s3://team-a/miles/run.json failed for 30 s: 503"))
    told = scene.until_told("StoreReady", "StoreUnavailable", "False")
    assert "PUT s3://team-a/miles/run.json failed for 30 s: 503" in told["message"]
    scene.until_ready(1)
    scene.train(attempt=1)
    scene.until_told("StoreReady", "StoreAnswers", "True")


def passes(scene: Scene, name: str, part: str) -> None:
    """The limit has passed, and the message tells what it waited for."""
    limits, told = DEADLINES[name]
    scene.create(runPolicy=limits)
    scene.train() if name == "NoProgress" else scene.until_ready()
    scene.report(phase="waiting", step=1 if name == "NoProgress" else 0, waiting_for="3 of 32 groups")
    if part == "rollout":
        scene.script(podstatus.fails(1, "no device"), "rollout")
        scene.until_told("RolloutReady", "CrashLoop", "False")
    time.sleep(FRESH_S)
    scene.set_status(**told)
    scene.look()
    said = scene.until_told("Failed", name, "True")["message"]
    if name != "DeadlineExceeded":
        assert ("no device" if part == "rollout" else "3 of 32 groups") in said, said


for name in ("DeadlineExceeded", "StartupDeadlineExceeded", "NoProgress"):
    for part in ("rollout", "trainer"):
        add(f"{name} while the {part} keeps it waiting", reason(name), passes, name, part)


# The object


@case(reason("InvalidSpec"))
def a_spec_that_no_cluster_can_serve(scene: Scene) -> None:
    scene.create(store={"uri": "file:///tmp/store"})
    for kind, status in (("Ready", "False"), ("Stalled", "True")):
        assert "store.uri" in scene.until_told(kind, "InvalidSpec", status)["message"]
    scene.until_event("InvalidSpec")


@case(reason("NameConflict"))
def a_name_that_somebody_else_holds(scene: Scene) -> None:
    theirs = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "sums-config"}, "data": {"theirs": "1"}}
    scene.api.create(theirs, scene.namespace)
    scene.create()
    for kind, status in (("Ready", "False"), ("Stalled", "True")):
        assert "ConfigMap sums-config" in scene.until_told(kind, "NameConflict", status)["message"]
    assert scene.child("ConfigMap", "config")["data"] == {"theirs": "1"}
