"""The table `Edits while running`: each row, and fields below it, edited while the job runs."""

import json
import time
from collections.abc import Callable
from typing import Any

from operators import edits
from tests import podstatus, replica
from tests.kubeapi import ApiError, Dict, until
from tests.operator_cases import Row, add, case, edit, life
from tests.stage import FRESH_S, NAME, STOPPED, Scene

Check = Callable[[Scene], Any]
GENERATOR = {"generator": "reasoning-gym/chain_sum"}
HELPFUL = {"name": "helpful", "model": {"uri": "s3://models/rm"}}
EVALUATED = {"everySteps": 10, "sets": [{"generator": "reasoning-gym/chain_sum", "name": "held-out", "limit": 8}]}


def row(field: str) -> tuple[Row, ...]:
    """The row that counts for a field below spec."""
    names = field.split(".")
    known = (".".join(names[:length]) for length in range(len(names), 0, -1))
    return edit(next(each for each in known if f"spec.{each}" in edits.TABLE))


def change(field: str, value: Any) -> Dict:
    """The body of a merge patch of the spec."""
    for step in reversed(field.split(".")):
        value = {step: value}
    return value


# live


def is_live(scene: Scene, spec: Dict, body: Dict, suffix: str, shows: Callable[[Dict], Any]) -> None:
    scene.create(**spec)
    scene.until_ready()
    trainer = scene.child("Job", "trainer-0")["metadata"]["uid"]
    scene.edit(**body)
    scene.until_seen()
    scene.until_child("Deployment", suffix, shows, f"{body} is taken on")
    scene.until(lambda told: told["rollout"]["ready"] == told["rollout"]["desired"], "the workers are ready")
    assert scene.child("Job", "trainer-0")["metadata"]["uid"] == trainer
    assert (scene.status["attempt"]["number"], "pauseTime" in scene.status["attempt"]) == (0, False)


def argument(*expected: str) -> Callable[[Dict], bool]:
    """Whether vLLM's command line has these in a row."""

    def holds(deployment: Dict) -> bool:
        vllm = deployment["spec"]["template"]["spec"]["containers"][0]
        line = " ".join([*vllm.get("command", []), *vllm.get("args", [])])
        return " ".join(expected) in line

    return holds


def replaced(deployment: Dict) -> bool:
    """The pods' template is no longer the first one."""
    return int(deployment["metadata"]["annotations"]["deployment.kubernetes.io/revision"]) > 1


LIVE: list[tuple[str, Any, Dict, str, Callable[[Dict], Any]]] = [
    ("rewards", [HELPFUL | {"model": HELPFUL["model"] | {"replicas": 2}}], {"rewards": [HELPFUL]}, "reward-helpful",
     lambda child: child["spec"]["replicas"] == 2),
    ("rewards", [HELPFUL | {"model": HELPFUL["model"] | {"resources": {"limits": {"memory": "8Gi"}}}}],
     {"rewards": [HELPFUL]}, "reward-helpful", replaced),
    ("rollout.replicas", 3, {}, "rollout", lambda child: child["status"].get("readyReplicas") == 3),
    ("rollout.autoscale", {"min": 1, "max": 4}, {}, "rollout", lambda child: child["spec"]["replicas"] == 1),
    ("rollout.tensorParallelSize", 2, {}, "rollout", argument("--tensor-parallel-size", "2")),
    ("rollout.maxConcurrentGroups", 32, {}, "rollout", replaced),
    ("rollout.compile", True, {}, "rollout", replaced),
    ("rollout.adapterLoading", "hot", {"trainer": {"lora": {}}}, "rollout", replaced),
    ("rollout.spot", True, {}, "rollout", replaced),
    ("rollout.image", "registry/miles:2", {}, "rollout",
     lambda child: child["spec"]["template"]["spec"]["containers"][0]["image"] == "registry/miles:2"),
    ("rollout.resources", {"limits": {"memory": "8Gi"}}, {}, "rollout", replaced),
    ("rollout.template", {"annotations": {"a": "b"}}, {}, "rollout", replaced),
    ("rollout.template.env", [{"name": "A", "value": "1"}], {}, "rollout", replaced),
    ("runPolicy.startupDeadlineSeconds", 600, {}, "rollout",
     lambda child: child["spec"]["progressDeadlineSeconds"] == 600),
]  # fmt: skip
MODEL_ROWS = iter(("rewards.model.replicas", "rewards.model.resources"))
for field, value, spec, suffix, shows in LIVE:
    name = next(MODEL_ROWS) if field == "rewards" else field
    add(f"live: {name}", row(name), is_live, spec, change(field, value), suffix, shows)


@case(edit("suspend"))
def live_suspend(scene: Scene) -> None:
    scene.create()
    scene.until_ready()
    scene.suspend()
    assert scene.status["attempt"]["number"] == 0
    assert scene.status["observedGeneration"] == 2


@case(edit("runPolicy"))
def limits_hold_at_once(scene: Scene) -> None:
    scene.create(runPolicy={"maxRestarts": 5})
    scene.until_ready()
    scene.edit(runPolicy={"maxRestarts": 0})
    scene.until_seen()
    scene.end_trainer(podstatus.fails(1, "broken"))
    scene.until_told("Failed", "MaxRestartsExceeded", "True")


@case(edit("rollout.replicas"))
def kubectl_scale_adds_and_removes_workers(scene: Scene) -> None:
    scene.create()
    scene.until_ready()
    for count in (3, 1):
        scaled = scene.stage.plane.kubectl("scale", f"rlj/{NAME}", f"--replicas={count}", "-n", scene.namespace)
        assert scaled.returncode == 0, scaled.stderr
        scene.until(lambda told, count=count: told["rollout"]["summary"] == f"{count}/{count}", f"{count} workers")
    assert scene.status["attempt"]["number"] == 0


@case(edit("rollout.replicas"), lasts_s=25)
def an_autoscaler_reads_and_writes_the_scale_subresource(scene: Scene) -> None:
    """Kubernetes' own, which without metrics keeps a target within its bounds."""
    scene.create()
    scene.until_ready()
    scale = scene.api.request("GET", f"/apis/miles.dev/v1alpha1/namespaces/{scene.namespace}/rljobs/{NAME}/scale")
    assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (1, 1)
    found = scene.api.list("Pod", scene.namespace, labels=scale["status"]["selector"])
    assert [pod["metadata"]["labels"]["miles.dev/component"] for pod in found] == ["rollout"]
    target = {"apiVersion": "miles.dev/v1alpha1", "kind": "RLJob", "name": NAME}
    bounds = {"scaleTargetRef": target, "minReplicas": 3, "maxReplicas": 5}
    autoscaler = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": NAME}}
    scene.api.create(autoscaler | {"spec": bounds}, scene.namespace)
    scene.until(lambda told: told["rollout"]["summary"] == "3/3", "the autoscaler's workers run", 90)
    assert scene.status["attempt"]["number"] == 0


@case(
    (*edit("rollout.autoscale"), *life("`rollout.autoscale` is set, and trainer or workers wait for the other side")),
    lasts_s=25,
)
def workers_follow_the_demand_of_the_trainer_within_their_bounds(scene: Scene) -> None:
    scene.create(rollout={"replicas": 1, "autoscale": {"min": 1, "max": 3}})
    scene.train()
    for step, trainer, rollout, count in ((10, 0.6, 0.0, 2), (20, 0.6, 0.0, 3), (30, 0.0, 0.9, 2)):
        time.sleep(FRESH_S)
        waits = {"trainer": trainer, "rollout": rollout, "steps": 5}
        scene.report(phase="training", step=step, version=[0, step], waits=waits)
        scene.until(lambda told, count=count: told["rollout"]["summary"] == f"{count}/{count}", f"{count} workers")
        assert scene.child("Deployment", "rollout")["spec"]["replicas"] == count
    assert "had nothing to do 90%" in scene.status["rollout"]["autoscaled"]["message"]
    assert scene.api.get("RLJob", NAME, scene.namespace)["spec"]["rollout"]["replicas"] == 1
    scene.edit(rollout={"replicas": 3})
    scene.until(lambda told: told["rollout"]["summary"] == "3/3", "it starts anew from what the user wrote")
    scene.edit(rollout={"autoscale": {"max": 2}, "replicas": 2})
    scene.until(lambda told: told["rollout"]["summary"] == "2/2", "bounds hold at once")
    assert scene.status["attempt"]["number"] == 0


# new attempt


def starts_a_new_attempt(scene: Scene, body: Dict) -> None:
    scene.create()
    scene.until_ready()
    before = scene.child("Job", "trainer-0")["metadata"]["annotations"]["miles.dev/edition"]
    scene.edit(**body)
    scene.until_asked()
    scene.until_told("Ready", "Editing", "False")
    assert scene.find("Job", "trainer-0") is not None, "it was deleted before it had stopped"
    scene.end_trainer(STOPPED)
    assert scene.until_attempt(1)["cause"] == "Edit"
    assert scene.until_trainer(1)["metadata"]["annotations"]["miles.dev/edition"] != before
    scene.until(lambda told: told["trainer"]["ready"] == 1, "the next attempt runs")
    assert (scene.status["restarts"], scene.status["disruptions"]) == (0, 0)
    assert scene.names("Job") == {("Job", "sums-trainer-1")}


NEW_ATTEMPT: list[tuple[str, Any]] = [
    ("rewards", [{"name": "sums", "library": "generator", "weight": "2"}]),
    ("algorithm.learningRate", "2e-6"),
    ("algorithm.totalSteps", 200),
    ("algorithm.maxStaleness", 2),
    ("algorithm.sampling.temperature", "0.9"),
    ("algorithm.kl.coefficient", "0.01"),
    ("rollout.maxModelLen", 8192),
    ("trainer.image", "registry/miles:2"),
    ("trainer.resources", {"limits": {"memory": "8Gi"}}),
    ("trainer.template.env", [{"name": "A", "value": "1"}]),
    ("trainer.compile", True),
    ("trainer.activationCheckpointing", True),
    ("trainer.maxTokensPerMicroBatch", 8192),
    ("trainer.stopGraceSeconds", 60),
    ("evaluation", EVALUATED),
    ("checkpoint.everySteps", 5),
    ("output", {"uri": "s3://team-a/models/sums"}),
    ("scheduling.nodeSelector", {"kubernetes.io/os": "linux"}),
    ("scheduling.tolerations", [{"key": "a", "operator": "Exists"}]),
]
for field, value in NEW_ATTEMPT:
    add(f"new attempt: {field}", row(field), starts_a_new_attempt, change(field, value), lasts_s=5)
WITH_A_SERVER = {"rewards": [HELPFUL, {"name": "sums", "library": "generator"}]}
add("new attempt: a reward with a server", row("rewards"), starts_a_new_attempt, WITH_A_SERVER, lasts_s=5)


@case(edit("trainer"))
def what_waits_for_its_image_takes_a_new_one_on_at_once(scene: Scene) -> None:
    scene.script(podstatus.image_pull_fails(), "trainer", times=1)
    scene.create()
    scene.until_told("TrainerReady", "ImagePullFailed")
    scene.edit(trainer={"image": "registry/right:1"})
    assert scene.until_attempt(1)["cause"] == "Edit"
    scene.until_ready(1)
    assert not any(place.startswith(scene.namespace) for place, _ in scene.ports.pauses)


@case(edit("algorithm"))
def an_edit_is_in_the_configuration_that_the_new_attempt_reads(scene: Scene) -> None:
    scene.create()
    scene.until_ready()
    scene.edit(algorithm={"totalSteps": 200})
    scene.until_asked()
    scene.end_trainer(STOPPED)
    scene.until_trainer(1)
    run = json.loads(scene.child("ConfigMap", "config")["data"]["run.json"])
    assert (run["algorithm"]["total_steps"], run["attempt"]) == (200, 1)


# while suspended


def is_taken_while_suspended(scene: Scene, spec: Dict, body: Dict, field: str) -> None:
    scene.create(**spec)
    scene.until_ready()
    assert "set suspend: true first" in refusal(scene, body)
    scene.suspend()
    scene.edit(**body)
    scene.until_seen()
    before = scene.status["attempt"]["config"]
    scene.edit(suspend=False)
    attempt = scene.until_attempt(1)
    assert (attempt["cause"], attempt["config"] != before) == ("Resumed", True)
    made = scene.until_trainer(1)["spec"]
    assert made["completions"] == (2 if field == "trainer.nodes" else 1)
    scene.until_ready(1)


WHILE_SUSPENDED: list[tuple[str, Any, Dict]] = [
    ("trainer.nodes", 2, {}),
    ("trainer.processesPerNode", 2, {}),
    ("trainer.dtype", "float32", {}),
    ("trainer.lora", {"alpha": 8}, {"trainer": {"lora": {}}}),
]
for field, value, spec in WHILE_SUSPENDED:
    name = f"while suspended: {field}"
    add(name, row(field), is_taken_while_suspended, spec, change(field, value), field, lasts_s=5)


# refused


def refusal(scene: Scene, body: Dict) -> str:
    """The server's words; empty: it took the edit."""
    try:
        scene.edit(**body)
    except ApiError as error:
        return error.message
    return ""


def is_refused(scene: Scene, body: Dict, why: str, suspended: bool) -> None:
    scene.create()
    scene.until_ready()
    if suspended:
        scene.suspend()
    generation = scene.api.get("RLJob", NAME, scene.namespace)["metadata"]["generation"]
    assert f"cannot change: {why}" in refusal(scene, body)
    assert scene.api.get("RLJob", NAME, scene.namespace)["metadata"]["generation"] == generation
    assert scene.status["attempt"]["number"] == 0


REFUSED: dict[str, Any] = {
    "managedBy": "another.example/controller",
    "model": {"revision": "x"},
    "data": {"sets": [GENERATOR | {"parameters": {"max_terms": 3}}]},
    "environment": {"library": "reasoning-gym"},
    "algorithm.type": "rloo",
    "algorithm.groupSize": 4,
    "algorithm.promptsPerStep": 64,
    "trainer.seed": 5,
    "checkpoint.resumeFrom": "s3://team-a/miles/x",
    "store": {"region": "eu"},
}
for field, value in REFUSED.items():
    for suspended in (False, True):
        name = f"refused{' while suspended' if suspended else ''}: {field}"
        add(name, row(field), is_refused, change(field, value), edits.TABLE[f"spec.{field}"][1], suspended)


@case(edit("managedBy"))
def a_job_of_another_controller_is_left_alone(scene: Scene) -> None:
    mark = scene.stage.plane.mark()
    scene.create(managedBy="another.example/controller")
    until(lambda: scene.job, "the job is heard of")
    scene.look()
    time.sleep(2)
    assert not scene.names()
    assert not scene.status
    assert not any(each.writes for each in scene.stage.plane.requests(mark, replica.USER, scene.namespace))
