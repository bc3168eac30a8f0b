"""The row `The job is deleted`, at every moment of a life; and the same name applied again at once."""

import json
from collections.abc import Callable

from tests import podstatus
from tests.kubeapi import Dict, until
from tests.operator_cases import add, case, life
from tests.stage import NAME, Scene

DELETED = life("The job is deleted")


def just_created(scene: Scene) -> None:
    scene.create()


def half_made(scene: Scene) -> None:
    scene.create()
    until(lambda: scene.names("ConfigMap", "Deployment"), "some children are there")


def running(scene: Scene) -> None:
    scene.create(trainer={"nodes": 2})
    scene.until_ready()


def without_an_image(scene: Scene) -> None:
    scene.script(podstatus.image_pull_fails(), "trainer")
    scene.create()
    scene.until_told("Ready", "ImagePullFailed")


def suspending(scene: Scene) -> None:
    running(scene)
    scene.edit(suspend=True)
    scene.until_told("Ready", "Suspending")


def suspended(scene: Scene) -> None:
    running(scene)
    scene.suspend()


def editing(scene: Scene) -> None:
    running(scene)
    scene.edit(algorithm={"learningRate": "2e-6"})
    scene.until_told("Ready", "Editing")


def waiting_to_start_again(scene: Scene) -> None:
    running(scene)
    scene.end_trainer(podstatus.fails(1, "broken"))
    scene.until_heard("Ready", "BackOff", "False")


def complete(scene: Scene) -> None:
    running(scene)
    scene.end_trainer(podstatus.succeeds())
    scene.until_told("Complete", "Completed", "True")


def failed(scene: Scene) -> None:
    running(scene)
    scene.end_trainer(podstatus.fails(3, "model.uri: there is no such model"))
    scene.until_told("Failed", "InvalidConfiguration", "True")


def invalid(scene: Scene) -> None:
    scene.create(store={"uri": "file:///tmp/store"})
    scene.until_told("Stalled", "InvalidSpec", "True")


def slow_to_stop(scene: Scene) -> None:
    for part in ("trainer", "rollout"):
        scene.script(podstatus.runs(stop_s=3), part)
    scene.create()
    scene.until_ready()


MOMENTS: tuple[Callable[[Scene], None], ...] = (
    *(just_created, half_made, running, without_an_image, suspending, suspended, editing, waiting_to_start_again),
    *(complete, failed, invalid, slow_to_stop),
)


def leaves_nothing(scene: Scene, reach: Callable[[Scene], None]) -> None:
    reach(scene)
    scene.delete()
    scene.until_gone()


def is_another_job(scene: Scene, reach: Callable[[Scene], None]) -> None:
    """Deleted and applied again at once: the new job takes nothing over from the old one."""
    reach(scene)
    scene.kubelet.forget(scene.namespace)
    old = (scene.job or scene.api.get("RLJob", NAME, scene.namespace))["metadata"]["uid"]
    scene.delete()
    uid = scene.create()["metadata"]["uid"]
    scene.until(lambda told: scene.job and scene.job["metadata"]["uid"] == uid, "the new job is looked at")
    scene.conditions.clear()
    scene.until_ready()
    assert uid != old
    status = scene.status
    assert (status["attempt"]["number"], status["restarts"], status["disruptions"]) == (0, 0, 0)
    assert status["training"]["step"] == 0
    over = {(kind, state) for kind, state, _ in scene.conditions}
    assert not over & {("Complete", "True"), ("Failed", "True"), ("Suspended", "True")}
    until(lambda: {owner(child) for child in scene.children()} == {uid}, "the old children are gone")
    until(lambda: {uid_of(pod) for pod in scene.pods()} == {uid}, "the old pods are gone")
    assert json.loads(scene.child("ConfigMap", "config")["data"]["run.json"])["run_id"] == uid


def owner(child: Dict) -> str:
    return str(child["metadata"]["ownerReferences"][0]["uid"])


def uid_of(pod: Dict) -> str:
    return str(pod["metadata"]["labels"]["miles.dev/job-uid"])


for moment in MOMENTS:
    name = moment.__name__.replace("_", " ")
    add(f"deleted when {name}: nothing is left", DELETED, leaves_nothing, moment)
    add(f"deleted when {name}, applied again at once", DELETED, is_another_job, moment)


@case(DELETED)
def deleted_in_the_foreground_while_it_runs(scene: Scene) -> None:
    """Drift is not repaired meanwhile."""
    running(scene)
    scene.api.delete("RLJob", NAME, scene.namespace, propagationPolicy="Foreground")
    scene.until_gone()
