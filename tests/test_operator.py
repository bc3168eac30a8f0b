"""The operator as a process on a real API server, as its own ServiceAccount: what it does and what it survives."""

import base64
import contextlib
import json
import pathlib
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from tests import podstatus, replica
from tests.controlplane import ControlPlane, Request
from tests.kubeapi import Api, path, until
from tests.kubelet import Kubelet
from tests.replica import Replica, StatusPorts, rljob
from tests.stage import MANAGED

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]
CHILDREN = ("ConfigMap", "Deployment", "Job", "NetworkPolicy", "PodDisruptionBudget", "Service")
Start = Callable[..., Replica]


@pytest.fixture
def ports() -> Iterator[StatusPorts]:
    with StatusPorts().serving() as ports:
        yield ports


@pytest.fixture
def start(
    operator_account: pathlib.Path, ports: StatusPorts, namespace: str, tmp_path: pathlib.Path
) -> Iterator[Start]:
    """Starts a replica for the test's namespace; those that still run are stopped afterwards."""
    started: list[Replica] = []

    def start(*more: str, wait: bool = True) -> Replica:
        arguments = [f"--namespace={namespace}", f"--status-url={ports.url}", "--log-level=debug", *more]
        started.append(Replica(operator_account, tmp_path, f"replica-{len(started)}", arguments))
        if wait:
            started[-1].wait_until_leading()
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            with contextlib.suppress(Exception):
                each.stop()
            each.kill()


@pytest.fixture
def operator(start: Start) -> Replica:
    return start()


def children(api: Api, namespace: str, job: str | None = None) -> set[tuple[str, str]]:
    """(kind, name) of everything that the operator made."""
    selector = "app.kubernetes.io/managed-by=miles" + (f",miles.dev/job-name={job}" if job else "")
    return {
        (child["kind"], child["metadata"]["name"])
        for kind in CHILDREN
        for child in api.list(kind, namespace, labels=selector)
    }


def status(api: Api, namespace: str, job: str) -> dict:
    return api.get("RLJob", job, namespace).get("status", {})


def reason(api: Api, namespace: str, job: str, condition: str = "Ready") -> str | None:
    found = [each for each in status(api, namespace, job).get("conditions", []) if each["type"] == condition]
    return found[0]["reason"] if found else None


def writes(plane: ControlPlane, mark: int) -> list[Request]:
    """What the operator wrote since `mark`, its Lease aside."""
    return [each for each in plane.requests(mark, user=replica.USER) if each.writes and each.resource != "leases"]


def running(api: Api, namespace: str, count: int = 1) -> None:
    """Until so many jobs have their trainer's pods ready, by their status."""
    until(
        lambda: (
            sum(job.get("status", {}).get("trainer", {}).get("ready", 0) >= 1 for job in api.list("RLJob", namespace))
            == count
        ),
        f"{count} jobs have their trainers ready",
        120,
    )


def quiet(plane: ControlPlane, seconds: float = 3.0, limit_s: float = 40.0) -> None:
    """Until the operator has written nothing for `seconds`."""
    deadline = time.monotonic() + limit_s
    while True:
        mark = plane.mark()
        time.sleep(seconds)
        if not writes(plane, mark):
            return
        assert time.monotonic() < deadline, f"the operator goes on writing: {writes(plane, mark)}"


def test_a_new_job_gets_its_children_and_a_status(
    api: Api, namespace: str, kubelet: Kubelet, operator: Replica
) -> None:
    api.create(rljob("sums", namespace), fieldValidation="Strict")
    running(api, namespace)
    made = children(api, namespace)
    assert {("ConfigMap", "sums-config"), ("Deployment", "sums-rollout"), ("Job", "sums-trainer-0")} <= made
    assert {("Service", "sums-trainer"), ("PodDisruptionBudget", "sums-rollout")} <= made
    assert status(api, namespace, "sums")["observedGeneration"] == 1
    uid = api.get("RLJob", "sums", namespace)["metadata"]["uid"]
    for kind, name in made:
        (owner,) = api.get(kind, name, namespace)["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (uid, True)


def test_nothing_of_kopf_is_left_on_the_job(api: Api, namespace: str, kubelet: Kubelet, operator: Replica) -> None:
    api.create(rljob("sums", namespace))
    running(api, namespace)
    metadata = api.get("RLJob", "sums", namespace)["metadata"]
    assert "finalizers" not in metadata
    assert "annotations" not in metadata
    assert {field["manager"] for field in metadata["managedFields"] if field.get("subresource")} == {"miles"}


def test_drift_is_repaired_and_what_others_add_is_left_alone(
    api: Api, namespace: str, kubelet: Kubelet, operator: Replica
) -> None:
    api.create(rljob("sums", namespace))
    running(api, namespace)
    before = children(api, namespace)
    api.patch("Deployment", "sums-rollout", namespace, {"spec": {"replicas": 7}})
    api.delete("Service", "sums-trainer", namespace)
    unlabelled = {"metadata": {"labels": {"app.kubernetes.io/managed-by": None}, "annotations": {"theirs": "kept"}}}
    api.patch("ConfigMap", "sums-config", namespace, unlabelled)
    until(lambda: api.get("Deployment", "sums-rollout", namespace)["spec"]["replicas"] == 1, "replicas are repaired")
    until(lambda: children(api, namespace) == before, "the Service and the label are there again")
    assert api.get("ConfigMap", "sums-config", namespace)["metadata"]["annotations"]["theirs"] == "kept"


def test_a_job_that_is_deleted_while_no_operator_runs_takes_everything_with_it(
    api: Api, namespace: str, kubelet: Kubelet, operator: Replica
) -> None:
    api.create(rljob("sums", namespace))
    running(api, namespace)
    operator.kill()
    api.delete("RLJob", "sums", namespace)
    until(lambda: not children(api, namespace), "all children are gone", 30)
    until(lambda: not api.list("Pod", namespace), "all pods are gone", 30)
    assert api.list("Secret", namespace, labels=MANAGED) == []
    assert api.find("RLJob", "sums", namespace) is None


def test_a_hundred_jobs_deleted_while_no_operator_runs_are_gone_within_30_seconds(
    api: Api, namespace: str, kubelet: Kubelet, operator: Replica
) -> None:
    for number in range(100):
        api.create(rljob(f"sums-{number}", namespace))
    running(api, namespace, 100)
    objects = len(children(api, namespace)) + len(api.list("Pod", namespace))
    operator.kill()
    began = time.monotonic()
    api.request("DELETE", path("RLJob", namespace), {"propagationPolicy": "Background"})
    until(lambda: not api.list("Pod", namespace), "all pods are gone", 120)
    until(lambda: not children(api, namespace), "all children are gone", 120)
    took_s = time.monotonic() - began
    print(f"100 jobs with {objects} children and pods are gone {took_s:.1f} s after their deletion")
    assert not api.list("RLJob", namespace)
    assert took_s <= 30


def test_an_unchanged_job_is_looked_at_ten_times_without_a_write_or_an_event(
    control_plane: ControlPlane, api: Api, namespace: str, kubelet: Kubelet, operator: Replica
) -> None:
    api.create(rljob("sums", namespace))
    running(api, namespace)
    quiet(control_plane)
    mark, passes = control_plane.mark(), operator.metrics()['miles_reconciles_total{result="ok"}']
    events = len(api.list("Event", namespace))
    for number in range(10):
        api.patch("RLJob", "sums", namespace, {"metadata": {"annotations": {"touched": str(number)}}})
        done = passes + number + 1
        until(lambda done=done: operator.metrics()['miles_reconciles_total{result="ok"}'] >= done, "a pass is over")
    assert writes(control_plane, mark) == []
    assert len(api.list("Event", namespace)) == events


def test_a_restart_with_fifty_idle_jobs_writes_nothing(
    control_plane: ControlPlane, api: Api, namespace: str, kubelet: Kubelet, start: Start
) -> None:
    first = start()
    for number in range(50):
        api.create(rljob(f"sums-{number}", namespace))
    running(api, namespace, 50)
    quiet(control_plane)
    first.stop()
    mark, second = control_plane.mark(), start()
    until(lambda: second.metrics()['miles_reconciles_total{result="ok"}'] >= 50, "every job was looked at")
    quiet(control_plane)
    assert writes(control_plane, mark) == []


def images(pods: list[dict]) -> set[str]:
    return {container["image"] for pod in pods for container in pod["spec"]["containers"]}


def test_an_upgrade_replaces_no_pod_and_the_next_attempt_takes_it_on(
    control_plane: ControlPlane, api: Api, namespace: str, kubelet: Kubelet, start: Start
) -> None:
    first = start()
    api.create(rljob("sums", namespace))
    running(api, namespace)
    quiet(control_plane)
    first.stop()
    before = {pod["metadata"]["uid"] for pod in api.list("Pod", namespace)}
    old = images(api.list("Pod", namespace))
    mark = control_plane.mark()
    second = start("--image=registry/miles:2", "--gpu-image=registry/miles:2-gpu")
    until(lambda: second.metrics()['miles_reconciles_total{result="ok"}'] >= 1, "the job was looked at")
    quiet(control_plane)
    assert writes(control_plane, mark) == []
    api.patch("RLJob", "sums", namespace, {"spec": {"rollout": {"replicas": 2}}})
    until(lambda: len(api.list("Pod", namespace)) == 3, "a worker is added")
    assert before < {pod["metadata"]["uid"] for pod in api.list("Pod", namespace)}
    assert images(api.list("Pod", namespace)) == old
    kubelet.script(podstatus.fails(1, "broken"), namespace, {}, "sums-trainer-0-*")
    until(lambda: api.find("Job", "sums-trainer-1", namespace), "the next attempt begins")
    until(lambda: images(api.list("Pod", namespace)) == {"registry/miles:2"}, "all pods are of the new release")


def test_of_two_replicas_one_acts_and_the_other_is_ready_to(
    api: Api, namespace: str, kubelet: Kubelet, start: Start
) -> None:
    first, second = start(), start(wait=False)
    until(lambda: second.get("/readyz")[0] == 200, "the second stands by", 90)
    api.create(rljob("sums", namespace))
    running(api, namespace)
    assert first.metrics()["miles_leading"] == 1
    assert second.metrics()["miles_leading"] == 0
    assert second.metrics()['miles_reconciles_total{result="ok"}'] == 0
    assert second.get("/healthz") == (200, "ok\n")


def test_a_replica_that_is_stopped_hands_over_within_seconds(
    api: Api, namespace: str, kubelet: Kubelet, start: Start
) -> None:
    first, second = start(), start(wait=False)
    until(lambda: second.get("/readyz")[0] == 200, "the second stands by", 90)
    took_s = first.stop()
    assert first.process.returncode == 0, first.log.read_text()[-2000:]
    began = time.monotonic()
    second.wait_until_leading(15)
    print(f"stopped in {took_s:.1f} s, the other leads {time.monotonic() - began:.1f} s later")
    assert took_s < 10


def test_a_replica_killed_during_a_hundred_creations_is_succeeded_and_nothing_is_doubled(
    api: Api, namespace: str, kubelet: Kubelet, start: Start
) -> None:
    first, second = start(), start(wait=False)
    until(lambda: second.get("/readyz")[0] == 200, "the second stands by", 90)
    killed = 0.0
    for number in range(100):
        api.create(rljob(f"sums-{number}", namespace))
        if number == 50:
            first.kill()
            killed = time.monotonic()
    second.wait_until_leading(20)
    took_s = time.monotonic() - killed
    print(f"taken over {took_s:.1f} s after the kill")
    assert took_s <= 20
    running(api, namespace, 100)
    per_job = len(children(api, namespace, "sums-0"))
    assert len(children(api, namespace)) == 100 * per_job
    assert len(api.list("Pod", namespace, labels="miles.dev/component=trainer")) == 100
    for job in api.list("RLJob", namespace):
        assert job["status"]["attempt"]["number"] == 0, job["metadata"]["name"]


def test_what_rank_0_reports_is_in_the_status(
    api: Api, namespace: str, kubelet: Kubelet, ports: StatusPorts, operator: Replica
) -> None:
    report = {"phase": "training", "step": 0, "total_steps": 100, "version": [0, 0]}
    ports.reports[namespace] = report
    api.create(rljob("sums", namespace))
    until(lambda: status(api, namespace, "sums").get("trainer", {}).get("ready") == 1, "the trainer is ready")
    time.sleep(1.1)  # times in the status have whole seconds, and a step counts if it is later than its attempt
    ports.reports[namespace] = report | {"step": 12, "version": [0, 12]}
    until(lambda: status(api, namespace, "sums").get("training", {}).get("step") == 12, "the step is told")
    until(lambda: reason(api, namespace, "sums") == "Training", "the job counts as training")


def test_a_suspended_trainer_is_asked_to_pause_with_the_token_of_its_secret(
    api: Api, namespace: str, kubelet: Kubelet, ports: StatusPorts, operator: Replica
) -> None:
    ports.reports[namespace] = {"phase": "training", "step": 12, "total_steps": 100}
    api.create(rljob("sums", namespace))
    running(api, namespace)
    api.patch("RLJob", "sums", namespace, {"spec": {"suspend": True}})
    until(lambda: ports.pauses, "rank 0 is asked to pause")
    place, authorization = ports.pauses[0]
    assert place.startswith(f"{namespace}/sums-trainer-0-0-")
    (secret,) = api.list("Secret", namespace, labels=MANAGED)
    assert authorization == f"Bearer {base64.b64decode(secret['data']['token']).decode()}"
    (trainer,) = api.get("Job", "sums-trainer-0", namespace)["spec"]["template"]["spec"]["containers"]
    (entry,) = [each for each in trainer["env"] if each["name"] == "MILES_STATUS_TOKEN"]
    assert entry["valueFrom"]["secretKeyRef"] == {"name": secret["metadata"]["name"], "key": "token", "optional": True}


def test_the_operator_reads_no_secret_but_its_own_key(
    control_plane: ControlPlane, api: Api, namespace: str, kubelet: Kubelet, start: Start
) -> None:
    mark = control_plane.mark()
    start()
    api.create(rljob("sums", namespace))
    running(api, namespace)
    asked = [each for each in control_plane.requests(mark, user=replica.USER) if each.resource == "secrets"]
    reads = {(each.namespace, each.name) for each in asked if not each.writes}
    assert reads == {(replica.NAMESPACE, "miles-operator-key")}
    assert [each.verb for each in asked if each.namespace == namespace] == ["create"]


def test_a_name_that_somebody_else_holds_is_told_not_taken(
    api: Api, namespace: str, kubelet: Kubelet, operator: Replica
) -> None:
    theirs = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "sums-config"}, "data": {"theirs": "1"}}
    api.create(theirs, namespace)
    api.create(rljob("sums", namespace))
    until(lambda: reason(api, namespace, "sums") == "NameConflict", "the conflict is told")
    found = api.get("ConfigMap", "sums-config", namespace)
    assert found["data"] == {"theirs": "1"}
    assert "ownerReferences" not in found["metadata"]
    api.delete("ConfigMap", "sums-config", namespace)
    running(api, namespace)
    assert json.loads(api.get("ConfigMap", "sums-config", namespace)["data"]["run.json"])["name"] == "sums"


def test_a_job_that_is_deleted_and_made_again_at_once_has_only_children_of_its_own(
    api: Api, namespace: str, kubelet: Kubelet, operator: Replica
) -> None:
    api.create(rljob("sums", namespace))
    running(api, namespace)
    api.delete("RLJob", "sums", namespace)
    uid = api.create(rljob("sums", namespace))["metadata"]["uid"]
    running(api, namespace)

    def owners() -> set[str]:
        return {
            owner["uid"]
            for kind, name in children(api, namespace)
            for owner in (api.find(kind, name, namespace) or {"metadata": {}})["metadata"].get("ownerReferences", [])
        }

    until(lambda: owners() == {uid}, "the old children are gone", 30)
    run = json.loads(api.get("ConfigMap", "sums-config", namespace)["data"]["run.json"])
    assert run["run_id"] == uid


def test_metrics_tell_what_there_is_and_the_log_is_json(
    api: Api, namespace: str, kubelet: Kubelet, operator: Replica
) -> None:
    api.create(rljob("sums", namespace))
    running(api, namespace)
    metrics = operator.metrics()

    def counted() -> float | None:
        return operator.metrics().get(f'miles_jobs{{phase="{status(api, namespace, "sums")["phase"]}"}}')

    until(lambda: counted() == 1, "the job is counted")
    assert metrics["miles_reconcile_seconds_count"] >= 1
    for kind in (*CHILDREN, "Pod", "Event"):
        assert f'miles_watch_age_seconds{{kind="{kind} in {namespace}"}}' in metrics
    assert metrics["process_resident_memory_bytes"] > 0
    assert {"time", "level", "logger", "message"} <= operator.said()[0].keys()


def test_a_replica_that_was_frozen_and_lost_its_lease_stands_by_again(
    api: Api, namespace: str, kubelet: Kubelet, start: Start
) -> None:
    first, second = start(), start(wait=False)
    until(lambda: second.get("/readyz")[0] == 200, "the second stands by", 90)
    first.process.send_signal(signal.SIGSTOP)
    second.wait_until_leading(20)
    first.process.send_signal(signal.SIGCONT)
    until(lambda: first.metrics().get("miles_leading") == 0, "the first has stepped down")
    api.create(rljob("sums", namespace))
    running(api, namespace)
    second.kill()
    first.wait_until_leading(30)
    api.patch("Deployment", "sums-rollout", namespace, {"spec": {"replicas": 7}})
    until(lambda: api.get("Deployment", "sums-rollout", namespace)["spec"]["replicas"] == 1, "the first acts again")
