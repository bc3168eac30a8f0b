"""The table `Life cycle`; attempts and deletion have modules of their own."""

import json
import time
from typing import Any

from operators.causes import is_ready
from operators.spec.status import CONDITION_TYPES
from tests import podstatus
from tests.kubeapi import Dict, until
from tests.operator_cases import add, case, life
from tests.podstatus import Outcome, Step
from tests.stage import NAME, STOPPED, Scene, ago

DRIFT = "Another child is deleted or changed by somebody"
SUSPENDED = "`spec.suspend` becomes true"
DEADLINE = "A deadline of runPolicy passes"
FINISHED = "The job is Complete or Failed"
INVALID = "The spec is invalid for this release"
LAST_WORDS = (
    'report: {"phase": "complete", "step": 100, "version": [1, 100], "reward_mean": 0.9, "checkpoint_step": 100}'
)
COMPLETES = Outcome((Step("ready"), Step("ended", reason="Completed", message=LAST_WORDS)))
REWARD = {"name": "helpful", "model": {"uri": "s3://models/rm"}}


# It begins


@case(life("The job is created"))
def a_new_job_gets_all_children_and_conditions_and_attempt_0(scene: Scene) -> None:
    uid = scene.create()["metadata"]["uid"]
    scene.until_ready()
    made = scene.names()
    assert {("ConfigMap", "sums-config"), ("Deployment", "sums-rollout"), ("Job", "sums-trainer-0")} <= made
    assert {kind for kind, _ in made} >= {"NetworkPolicy", "PodDisruptionBudget", "Service"}
    owners = [each["metadata"]["ownerReferences"] for each in scene.children()]
    assert {(owner["uid"], owner["controller"]) for each in owners for owner in each} == {(uid, True)}
    assert [entry["type"] for entry in scene.status["conditions"]] == list(CONDITION_TYPES)
    assert {entry["observedGeneration"] for entry in scene.status["conditions"]} == {1}
    assert scene.status["attempt"]["number"] == 0
    assert "startTime" in scene.status


@case(life("The job is created"))
def a_trainer_of_two_nodes_gets_a_pod_for_each(scene: Scene) -> None:
    scene.create(trainer={"nodes": 2}, rollout={"replicas": 2})
    scene.until_ready()
    assert len(scene.pods(component="trainer")) == len(scene.pods(component="rollout")) == 2
    assert scene.status["trainer"] == {"desired": 2, "ready": 2}
    assert scene.status["rollout"]["summary"] == "2/2"


@case(life("The job is created"))
def a_reward_model_gets_a_server_and_generating_waits_for_it(scene: Scene) -> None:
    scene.script(podstatus.never_ready(), "reward-helpful")
    scene.create(rewards=[REWARD])
    scene.until_child("Deployment", "reward-helpful", lambda child: child["spec"]["replicas"] == 1, "a server")
    scene.until_child("Service", "reward-helpful", lambda child: True, "its address")
    scene.until(lambda told: told["rollout"]["summary"] == "1/1", "the worker is ready")
    assert scene.condition("RolloutReady")["reason"] == "WaitingForPods"
    scene.script(podstatus.runs(), "reward-helpful")
    scene.until_told("RolloutReady", "PodsReady", "True")


@case(life("It is created with `suspend: true`"))
def a_job_that_is_created_suspended_gets_all_but_the_trainer(scene: Scene) -> None:
    scene.create(suspend=True)
    scene.until_told("Suspended", "Suspended", "True")
    assert scene.status["phase"] == "Suspended"
    assert not scene.names("Job")
    assert scene.child("Deployment", "rollout")["spec"]["replicas"] == 0
    assert not scene.pods()
    scene.edit(suspend=False)
    scene.until_ready()
    assert scene.status["attempt"]["number"] == 0


@case(life("It has `checkpoint.resumeFrom`"), lasts_s=5)
def a_checkpoint_to_begin_from_reaches_the_trainer_and_one_that_does_not_fit_fails_the_job(scene: Scene) -> None:
    origin = "s3://team-a/miles/default/other/3f0c"
    scene.create(checkpoint={"resumeFrom": origin})
    scene.until_ready()
    run = json.loads(scene.child("ConfigMap", "config")["data"]["run.json"])
    assert run["checkpoint"]["resume_from"] == origin
    scene.end_trainer(podstatus.fails(3, f"checkpoint.resumeFrom: {origin} belongs to model a, this run has b"))
    told = scene.until_told("Failed", "CheckpointNotFound", "True")
    assert "belongs to model a, this run has b" in told["message"]
    assert (scene.status["attempt"]["number"], scene.status["restarts"]) == (0, 0)


# Drift


def suffixes(scene: Scene, kind: str) -> list[str]:
    return sorted(name.removeprefix(f"{NAME}-") for _, name in scene.names(kind))


CHANGES: dict[str, Dict] = {
    "ConfigMap": {"data": {"run.json": "{}"}},
    "Deployment": {"spec": {"replicas": 7}},
    "NetworkPolicy": {"spec": {"ingress": None, "egress": None}},
    "PodDisruptionBudget": {"spec": {"maxUnavailable": 5}},
    "Service": {"spec": {"publishNotReadyAddresses": False}},
}


def comes_back(scene: Scene, kind: str) -> None:
    scene.create()
    scene.until_ready()
    (suffix, *_) = suffixes(scene, kind)
    old = scene.child(kind, suffix)["metadata"]["uid"]
    scene.api.delete(kind, f"{NAME}-{suffix}", scene.namespace)
    scene.until_child(kind, suffix, lambda child: child["metadata"]["uid"] != old, "it is made again")
    assert scene.until_child("Job", "trainer-0", lambda child: True, "the trainer stays")
    assert scene.status["attempt"]["number"] == 0


def is_repaired(scene: Scene, kind: str, change: Dict) -> None:
    scene.create()
    scene.until_ready()
    (suffix, *_) = suffixes(scene, kind)
    before = scene.child(kind, suffix)
    theirs = {"metadata": {"annotations": {"example.org/cost": "42"}, "labels": {"team": "a"}}}
    scene.api.patch(kind, f"{NAME}-{suffix}", scene.namespace, change | theirs)
    part = next(iter(change))
    after = scene.until_child(kind, suffix, lambda child: child[part] == before[part], f"{part} is repaired")
    assert after["metadata"]["annotations"]["example.org/cost"] == "42"
    assert after["metadata"]["labels"]["team"] == "a"


for kind, change in CHANGES.items():
    add(f"a {kind} that is deleted comes back", life(DRIFT), comes_back, kind)
    add(f"a {kind} that is changed is repaired, what others add stays", life(DRIFT), is_repaired, kind, change)


# Workers


@case(life("Workers are lost"))
def workers_are_lost_while_one_is_left(scene: Scene) -> None:
    scene.create(rollout={"replicas": 2})
    scene.train()
    scene.script(podstatus.fails(1, "no device"), "rollout", times=1)
    scene.until_told("RolloutReady", "RolloutUnavailable", "False", said="no device")
    assert (scene.condition("Ready")["status"], scene.condition("Failed")["status"]) == ("True", "False")
    for pod in scene.pods(component="rollout"):
        if not is_ready(pod):
            scene.api.delete("Pod", pod["metadata"]["name"], scene.namespace)
    scene.until(lambda told: told["rollout"]["ready"] == 2, "it is replaced")
    assert scene.status["attempt"]["number"] == 0


@case(life("Workers are lost"))
def all_workers_are_lost_and_the_job_is_degraded_not_failed(scene: Scene) -> None:
    scene.create()
    scene.train()
    scene.script(podstatus.never_ready(), "rollout")
    scene.until_told("Ready", "RolloutUnavailable", "False")
    assert scene.condition("Failed")["status"] == "False"
    scene.script(podstatus.runs(), "rollout")
    scene.until_told("Ready", "Training", "True")


@case(life("`spec.rollout.replicas` becomes 0"))
def without_workers_the_limit_of_progress_does_not_run(scene: Scene) -> None:
    scene.create(runPolicy={"progressDeadlineSeconds": 60})
    scene.train()
    scene.edit(rollout={"replicas": 0})
    scene.until_told("Ready", "ScaledToZero", "False")
    long_ago = {"lastProgressTime": ago(3600)}
    scene.set_status(training=long_ago, attempt={"time": ago(7200)})
    scene.look()
    scene.edit(rollout={"replicas": 1})
    scene.until(lambda told: told["rollout"].get("scaledUpTime") and told["rollout"]["ready"] == 1, "workers are back")
    scene.until_told("Ready", "Training", "True")
    assert scene.condition("Failed")["status"] == "False"


# Suspension


@case(life(SUSPENDED))
def a_suspended_job_checkpoints_then_loses_all_pods_and_frees_the_quota(scene: Scene) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q"}, "spec": {"hard": {"pods": "9"}}}
    scene.api.create(quota, scene.namespace)
    scene.create()
    scene.train()
    scene.edit(suspend=True)
    scene.until_asked()
    scene.until_told("Ready", "Suspending", "False")
    assert scene.find("Job", "trainer-0") is not None, "it was deleted before it had stopped"
    scene.end_trainer(STOPPED)
    scene.until_told("Suspended", "Suspended", "True")
    assert not scene.pods()
    assert not scene.names("Job")
    assert (scene.status["restarts"], scene.status["disruptions"], scene.status["phase"]) == (0, 0, "Suspended")
    used = lambda: scene.api.get("ResourceQuota", "q", scene.namespace)["status"]["used"]["pods"]  # noqa: E731
    until(lambda: used() == "0", "the quota is free")


@case(life(SUSPENDED))
def a_trainer_that_does_not_stop_is_removed_after_its_grace(scene: Scene) -> None:
    scene.create()
    scene.until_ready()
    scene.edit(suspend=True)
    scene.until_asked()
    scene.set_status(suspendTime=ago(30))
    scene.look()
    time.sleep(0.5)
    assert scene.find("Job", "trainer-0") is not None
    scene.set_status(suspendTime=ago(57))
    scene.until_told("Suspended", "Suspended", "True")


@case(life(SUSPENDED))
def a_trainer_that_does_not_run_yet_is_removed_at_once(scene: Scene) -> None:
    scene.script(podstatus.image_pull_fails(), "trainer")
    scene.create()
    scene.until_told("TrainerReady", "ImagePullFailed")
    scene.edit(suspend=True)
    scene.until_told("Suspended", "Suspended", "True", limit_s=50)


@case(life("`spec.suspend` becomes false"))
def a_resumed_job_begins_the_next_attempt(scene: Scene) -> None:
    scene.create()
    scene.until_ready()
    scene.suspend()
    scene.edit(suspend=False)
    attempt = scene.until_attempt(1)
    assert attempt["cause"] == "Resumed"
    scene.until_ready(1)
    assert scene.status["restarts"] == 0
    assert "suspendTime" not in scene.status
    assert scene.condition("Suspended")["reason"] == "NotSuspended"


@case(life("The spec is edited"))
def an_edit_that_is_taken_back_starts_nothing(scene: Scene) -> None:
    scene.create()
    scene.until_ready()
    scene.edit(algorithm={"learningRate": "2e-6"})
    scene.until_asked()
    scene.edit(algorithm={"learningRate": None})
    scene.until_seen()
    scene.until(lambda told: "pauseTime" not in told["attempt"], "the pause is over")
    assert scene.status["attempt"]["number"] == 0


# Limits


def passes(scene: Scene, limits: Dict, told: Dict, reason: str) -> None:
    scene.create(runPolicy=limits)
    if reason == "StartupDeadlineExceeded":
        scene.until_ready()
    else:
        scene.train()
    scene.set_status(**told)
    scene.look()
    scene.until_told("Failed", reason, "True")
    until(lambda: not scene.pods(), f"{scene.namespace}: all pods are removed", 60)
    assert not scene.names("Job")


DEADLINES: dict[str, tuple[Dict, Dict]] = {
    "DeadlineExceeded": ({"activeDeadlineSeconds": 3600}, {"startTime": ago(3700)}),
    "NoProgress": (
        {"progressDeadlineSeconds": 60},
        {"training": {"lastProgressTime": ago(70)}, "attempt": {"time": ago(1000)}},
    ),
    "StartupDeadlineExceeded": ({"startupDeadlineSeconds": 60}, {"attempt": {"time": ago(70)}}),
}
for name, (limits, told) in DEADLINES.items():
    add(f"a deadline fails the job: {name}", life(DEADLINE), passes, limits, told, name)


@case(life(DEADLINE))
def time_spent_suspended_counts_towards_no_deadline(scene: Scene) -> None:
    scene.create(runPolicy={"activeDeadlineSeconds": 600})
    scene.until_ready()
    scene.suspend()
    scene.set_status(startTime=ago(4000), suspendTime=ago(3900))
    scene.edit(suspend=False)
    scene.until_ready(1)
    assert scene.status["suspendedSeconds"] >= 3900
    assert scene.condition("Failed")["status"] == "False"


# The end


def completes(scene: Scene, **spec: Any) -> None:
    scene.create(**spec)
    scene.until_ready()
    scene.end_trainer(COMPLETES)
    scene.until_told("Complete", "Completed", "True")


@case(life("All steps are trained"))
def a_complete_job_tells_of_its_last_step(scene: Scene) -> None:
    completes(scene)
    training = scene.status["training"]
    assert (training["progress"], training["policyVersion"]) == ("100/100", "t1-s100")
    assert scene.status["lastCheckpoint"]["step"] == 100
    assert {"name": "reward/mean", "value": "0.9"} in scene.status["metrics"]
    assert "completionTime" in scene.status
    assert scene.status["phase"] == "Complete"


@case(life(FINISHED))
def a_complete_job_loses_its_workers_and_reward_models(scene: Scene) -> None:
    completes(scene, rewards=[REWARD])
    for suffix in ("rollout", "reward-helpful"):
        scene.until_child("Deployment", suffix, lambda child: child["spec"]["replicas"] == 0, "no pods are wanted")
    scene.until(lambda told: told["rollout"]["summary"] == "0/0", "no worker is left")


@case(life(FINISHED))
def cleanup_none_leaves_the_workers(scene: Scene) -> None:
    completes(scene, runPolicy={"cleanup": "None"})
    scene.look()
    time.sleep(2)
    assert scene.child("Deployment", "rollout")["spec"]["replicas"] == 1
    assert len(scene.pods(component="rollout")) == 1


@case(life(FINISHED))
def of_a_job_that_is_over_nothing_is_made_again(scene: Scene) -> None:
    completes(scene)
    scene.until(lambda told: told["rollout"]["summary"] == "0/0", "no worker is left")
    for kind, name in scene.names():
        scene.api.delete(kind, name, scene.namespace)
    scene.edit(suspend=True, algorithm={"totalSteps": 200})
    scene.until_seen()
    time.sleep(1)
    assert not scene.names()
    assert scene.condition("Complete")["status"] == "True"


@case(life("`ttlSecondsAfterFinished` is over"))
def a_finished_job_is_deleted_after_its_time_to_live(scene: Scene) -> None:
    scene.create(runPolicy={"ttlSecondsAfterFinished": 3})
    scene.until_ready()
    scene.end_trainer(COMPLETES)
    scene.until_gone()


# Names and specs that cannot be acted on


def is_held(scene: Scene, body: Dict) -> None:
    scene.api.create(body, scene.namespace)
    scene.create()
    told = scene.until_told("Ready", "NameConflict", "False")
    kind, name = body["kind"], body["metadata"]["name"]
    assert f"{kind} {name}" in told["message"]
    assert scene.condition("Stalled")["status"] == "True"
    theirs = scene.api.get(kind, name, scene.namespace)
    assert "ownerReferences" not in theirs["metadata"]
    scene.api.delete(kind, name, scene.namespace)
    scene.until_ready()
    assert scene.condition("Stalled")["status"] == "False"


STRANGER = {"spec": {"containers": [{"name": "a", "image": "a"}], "restartPolicy": "Never"}}
STRANGERS: list[Dict] = [
    {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "sums-config"}, "data": {"theirs": "1"}},
    {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "sums-trainer"},
        "spec": {"clusterIP": "None", "selector": {"a": "b"}},
    },
    {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "sums-trainer-0"},
        "spec": {"suspend": True, "template": STRANGER},
    },
    {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "sums-rollout"},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": {"a": "b"}}},
    },
]
for body in STRANGERS:
    name = f"a {body['kind']} of somebody else has the name of a child"
    add(name, life("A child's name belongs to somebody else"), is_held, body)


@case(life(INVALID))
def what_the_server_stores_although_it_is_invalid_is_told_and_starts_nothing(scene: Scene) -> None:
    large = {"generator": "reasoning-gym/chain_sum", "parameters": {"text": "x" * 20_000}}
    scene.create(data={"sets": [large]})
    told = scene.until_told("Stalled", "InvalidSpec", "True")
    assert "parameters" in told["message"]
    assert not scene.names()


@case(life(INVALID))
def pods_of_a_job_whose_spec_became_invalid_go_on_until_it_is_mended(scene: Scene) -> None:
    scene.create()
    scene.train()
    pods = {pod["metadata"]["uid"] for pod in scene.pods()}
    scene.edit(scheduling={"serviceAccountName": "of-another"})
    assert "the operator allows none" in scene.until_told("Stalled", "InvalidSpec", "True")["message"]
    assert scene.status["phase"] == "Running"
    assert {pod["metadata"]["uid"] for pod in scene.pods()} == pods
    scene.edit(scheduling={"serviceAccountName": None})
    scene.until_told("Ready", "Training", "True")
    assert scene.condition("Stalled")["status"] == "False"
    assert {pod["metadata"]["uid"] for pod in scene.pods()} == pods
