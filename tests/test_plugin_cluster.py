"""`kubectl miles` against a real API server, through the real kubectl; the statuses are written by hand."""

import os
import pathlib
import subprocess
import sys

import pytest
import yaml

from operators.plugin import command
from tests.controlplane import ControlPlane
from tests.kubeapi import Api, ApiError, until
from tests.test_spec import MINIMAL

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(120)]
FOLDER = pathlib.Path(__file__).parent.parent / "manifests"
SINCE = "2026-01-01T00:00:00Z"
STATUS = {
    "observedGeneration": 1,
    "phase": "Running",
    "startTime": SINCE,
    "training": {"step": 7, "totalSteps": 200, "policyVersion": "t1-s7"},
    "rollout": {"desired": 1, "ready": 0},
    "trainer": {"desired": 1, "ready": 1},
    "metrics": [{"name": "reward/mean", "value": "0.25"}],
}


def condition(kind: str, status: str, reason: str, message: str = "") -> dict:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "observedGeneration": 1,
        "lastTransitionTime": SINCE,
    }


@pytest.fixture(scope="module")
def plane(control_plane: ControlPlane):
    control_plane.api.apply(yaml.safe_load((FOLDER / "crd/rljobs.yaml").read_text()))
    for role in yaml.safe_load_all((FOLDER / "rbac/people.yaml").read_text()):
        control_plane.api.apply(role)
    until(lambda: served(control_plane.api), "RLJobs are served", 60)
    return control_plane


def served(api: Api) -> bool:
    try:
        api.list("RLJob", "default")
    except ApiError:
        return False
    return True


@pytest.fixture
def miles(plane: ControlPlane, namespace: str, monkeypatch):
    """Runs the plugin as the admin, or as the user of a kubeconfig, in a fresh namespace."""
    monkeypatch.setenv("KUBECTL", plane._kubectl)

    def run(name: str, *arguments: str, kubeconfig: pathlib.Path = plane.kubeconfig) -> int:
        return command.main([name, *arguments, "--namespace", namespace, "--kubeconfig", str(kubeconfig)])

    return run


@pytest.fixture
def job(plane: ControlPlane, namespace: str) -> dict:
    return plane.api.create(yaml.safe_load(MINIMAL), namespace)


def tell(api: Api, job: dict, *conditions: dict, **status) -> None:
    patch = {"status": STATUS | {"conditions": list(conditions)} | status}
    api.patch("RLJob", job["metadata"]["name"], job["metadata"]["namespace"], patch, "status")


def add_pod(api: Api, job: dict, part: str = "rollout") -> None:
    """It stays pending: no node is there for it, whatever nodes other tests have brought."""
    labels = {"miles.dev/job-uid": job["metadata"]["uid"], "miles.dev/component": part}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"arithmetic-{part}-x", "labels": labels},
        "spec": {
            "nodeSelector": {"nowhere": "true"},
            "containers": [{"name": "vllm", "image": "nowhere/vllm"}, {"name": "worker", "image": "nowhere/w"}],
        },
    }
    api.create(pod, job["metadata"]["namespace"])


def test_a_running_job(plane, miles, job, capsys):
    tell(plane.api, job, condition("Ready", "True", "Training"))
    add_pod(plane.api, job)
    assert miles("status", "arithmetic") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("arithmetic  Running for ")
    assert "step 7 of 200 · policy t1-s7" in lines[0]
    assert lines[1] == "reward   0.250"
    assert lines[2].startswith("rollout  0/1 ready · arithmetic-rollout-x ")
    assert lines[-1] == f"store    s3://team-a/miles/{job['metadata']['namespace']}/arithmetic/{job['metadata']['uid']}"


def test_a_job_in_trouble(plane, miles, job, capsys):
    tell(
        plane.api, job, condition("Ready", "False", "ImagePullFailed", "image nowhere/vllm: not found"), phase="Pending"
    )
    assert miles("status", "arithmetic") == 0
    first, why, do, *_ = capsys.readouterr().out.splitlines()
    assert "an image cannot be pulled" in first
    assert why == "why      image nowhere/vllm: not found"
    assert do.startswith("do       correct rollout.image")


def test_the_list_of_a_namespace_and_of_all(plane, miles, job, namespace, capsys):
    tell(plane.api, job, condition("Failed", "True", "TrainerFailed", "exit 1"), phase="Failed", restarts=3)
    assert miles("list") == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:6] == ["arithmetic", "Failed", "7/200", "0.250", "0/1", "3"]
    assert command.main(["list", "-A", "--kubeconfig", str(plane.kubeconfig)]) == 0
    assert f"{namespace} " in capsys.readouterr().out


def test_an_empty_namespace(miles, capsys):
    assert miles("list") == 0
    assert "no RLJobs here" in capsys.readouterr().err


def test_suspend_and_resume_change_the_spec_and_nothing_else(plane, miles, job, namespace, capsys):
    before = plane.api.get("RLJob", "arithmetic", namespace)["spec"]
    assert miles("suspend", "arithmetic") == 0
    assert plane.api.get("RLJob", "arithmetic", namespace)["spec"] == before | {"suspend": True}
    assert miles("resume", "rljob/arithmetic") == 0
    assert plane.api.get("RLJob", "arithmetic", namespace)["spec"] == before | {"suspend": False}


def test_scale_changes_the_number_of_workers_where_admission_policies_see_the_job(plane, miles, job, namespace, capsys):
    mark = plane.mark()
    before = plane.api.get("RLJob", "arithmetic", namespace)["spec"]
    assert miles("scale", "arithmetic", "3") == 0
    after = plane.api.get("RLJob", "arithmetic", namespace)["spec"]
    assert after == before | {"rollout": before["rollout"] | {"replicas": 3}}
    assert {"rljobs"} == {each.resource for each in plane.requests(mark, namespace=namespace) if each.writes}


def test_events_of_the_job_and_of_its_pods(plane, miles, job, namespace, capsys):
    add_pod(plane.api, job)
    for kind, name in (("Pod", "arithmetic-rollout-x"), ("Pod", "foreign")):
        about = {"kind": kind, "name": name, "namespace": namespace}
        event = {"apiVersion": "v1", "kind": "Event", "metadata": {"generateName": "e-"}, "involvedObject": about}
        plane.api.create(
            event | {"type": "Warning", "reason": "Failed", "lastTimestamp": "2027-01-01T00:00:00Z"}, namespace
        )
    assert miles("events", "arithmetic") == 0
    shown = capsys.readouterr().out
    assert "Pod/arithmetic-rollout-x" in shown
    assert "foreign" not in shown


def test_logs_name_pod_container_and_state_and_leave_the_rest_to_kubectl(plane, miles, job, capfd):
    add_pod(plane.api, job)
    assert miles("logs", "arithmetic", "rollout") == 0
    assert "== arithmetic-rollout-x, container worker: " in capfd.readouterr().err
    assert miles("logs", "arithmetic", "rollout", "--container", "nothing") == 1
    assert "container nothing is not valid" in capfd.readouterr().err
    assert miles("logs", "arithmetic") == 2
    assert 'no pod or part "trainer"; it has rollout' in capfd.readouterr().err


def test_top_without_a_metrics_server_still_shows_the_pods(plane, miles, job, capsys):
    add_pod(plane.api, job)
    assert miles("top", "arithmetic") == 0
    shown = capsys.readouterr()
    assert "CPU and memory are unknown: Metrics API not available" in shown.err
    assert "arithmetic-rollout-x" in shown.out


def test_a_tenant_without_a_right_to_pods_sees_the_job_and_no_traceback(plane, miles, job, namespace, capsys):
    tenant = plane.service_account(namespace, "tenant")
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "tenant"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "rljob-viewer"},
        "subjects": [{"kind": "ServiceAccount", "name": "tenant", "namespace": namespace}],
    }
    plane.api.create(binding, namespace)
    tell(plane.api, job, condition("Ready", "True", "Training"))
    until(lambda: miles("status", "arithmetic", kubeconfig=tenant) == 0, "the role is in force")
    assert "you may not list them" in capsys.readouterr().out
    assert miles("suspend", "arithmetic", kubeconfig=tenant) == 2
    assert "ask for the role rljob-editor" in capsys.readouterr().err
    assert miles("top", "arithmetic", kubeconfig=tenant) == 2
    assert "you may not list pods" in capsys.readouterr().err


def test_a_job_that_is_not_there(miles, capsys):
    assert miles("status", "nothing") == 2
    assert capsys.readouterr().err == 'kubectl miles: status: rljobs.miles.dev "nothing" not found\n'


def test_a_context_that_is_not_there(miles, capsys):
    assert miles("status", "x", "--context", "nowhere") == 2
    assert "get-contexts" in capsys.readouterr().err


def test_a_cluster_that_does_not_answer(plane, miles, tmp_path, capsys):
    dead = tmp_path / "kubeconfig"
    dead.write_text(plane.kubeconfig.read_text().replace(plane.api.host, "https://127.0.0.1:1"))
    assert miles("list", kubeconfig=dead) == 2
    said = capsys.readouterr().err
    assert "the cluster does not answer" in said
    assert said.count("\n") == 1


def test_kubectl_finds_the_plugin(plane, job, namespace, tmp_path):
    plugin = tmp_path / "kubectl-miles"
    plugin.write_text(f'#!/bin/sh\nexec {sys.executable} -m operators.plugin.command "$@"\n')
    plugin.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{pathlib.Path(plane._kubectl).parent}:{os.environ['PATH']}",
        "KUBECONFIG": str(plane.kubeconfig),
    }
    done = subprocess.run(
        [plane._kubectl, "miles", "status", "arithmetic", "-n", namespace],
        env=environment, cwd=FOLDER.parent, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("arithmetic  Pending for ")
