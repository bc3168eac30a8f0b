"""The control plane for tests, with its stand-in for a kubelet: what acts is real, what is scripted happens."""

import pytest

from tests import podstatus
from tests.kubeapi import until
from tests.kubelet import evict

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_the_server_is_ready_and_knows_its_users(control_plane, namespace):
    tenant = control_plane.service_account(namespace, "tenant")
    assert control_plane.api.request("GET", "/version")["major"] == "1"
    refused = control_plane.kubectl("get", "secrets", kubeconfig=tenant)
    assert f"system:serviceaccount:{namespace}:tenant" in refused.stderr and "forbidden" in refused.stderr


def test_requests_are_counted_by_user_and_verb(control_plane, namespace, api):
    before = control_plane.mark()
    api.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "seen"}}, namespace)
    api.get("ConfigMap", "seen", namespace)
    requests = control_plane.requests(before, user="admin", namespace=namespace)
    assert [(each.verb, each.resource, each.name, each.code, each.writes) for each in requests] == [
        ("create", "configmaps", "seen", 201, True),
        ("get", "configmaps", "seen", 200, False),
    ]


def job(name="work", pods=2, **spec):
    container = {"name": "main", "image": "none"}
    template = {"spec": {"restartPolicy": "Never", "containers": [container]}}
    spec = {"completionMode": "Indexed", "completions": pods, "parallelism": pods, "backoffLimit": 0} | spec
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec | {"template": template}}


def conditions(api, kind, name, namespace):
    """Type → (reason, message) of the conditions that are true."""
    found = api.get(kind, name, namespace)["status"].get("conditions", [])
    return {each["type"]: (each.get("reason"), each.get("message")) for each in found if each["status"] == "True"}


def pods(api, namespace, *phases):
    return [pod for pod in api.list("Pod", namespace) if not phases or pod["status"]["phase"] in phases]


def test_an_indexed_job_completes_when_its_pods_succeed(api, namespace, kubelet):
    kubelet.script(podstatus.succeeds(), namespace)
    api.create(job(), namespace)
    until(lambda: "Complete" in conditions(api, "Job", "work", namespace), "the Job to complete")
    assert api.get("Job", "work", namespace)["status"]["completedIndexes"] == "0,1"


def test_a_failed_pod_fails_the_job_and_leaves_its_exit_code_and_last_words(api, namespace, kubelet):
    kubelet.script(podstatus.fails(3, "bad learning rate"), namespace)
    api.create(job(pods=1), namespace)
    until(lambda: "Failed" in conditions(api, "Job", "work", namespace), "the Job to fail")
    [pod] = pods(api, namespace, "Failed")
    ended = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    assert (ended["exitCode"], ended["message"]) == (3, "bad learning rate")


DISRUPTION_FAILS_JOB = {
    "rules": [{"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
}


@pytest.mark.parametrize("how", ["asked for", "by the node"])
def test_an_eviction_is_remembered_by_the_job(api, namespace, kubelet, how):
    api.create(job(pods=1, podFailurePolicy=DISRUPTION_FAILS_JOB), namespace)
    [pod] = until(lambda: pods(api, namespace, "Running"), "the pod to run")
    if how == "asked for":
        evict(api, namespace, pod["metadata"]["name"])
    else:
        kubelet.script(podstatus.runs_out_of_node_memory(), namespace)
    until(lambda: "Failed" in conditions(api, "Job", "work", namespace), "the Job to fail")
    reason, message = conditions(api, "Job", "work", namespace)["Failed"]
    assert reason == "PodFailurePolicy" and "DisruptionTarget" in message


def deployment(replicas=2):
    template = {"metadata": {"labels": {"app": "web"}}, "spec": {"containers": [{"name": "main", "image": "none"}]}}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "web"},
        "spec": {"replicas": replicas, "selector": {"matchLabels": {"app": "web"}}, "template": template},
    }


def test_a_deployment_becomes_available_when_its_pods_are_ready(api, namespace, kubelet):
    kubelet.script(podstatus.never_ready(), namespace)
    api.create(deployment(), namespace)
    until(lambda: len(pods(api, namespace, "Running")) == 2, "two pods to run")
    assert "Available" not in conditions(api, "Deployment", "web", namespace)
    kubelet.script(podstatus.runs(), namespace)
    until(lambda: "Available" in conditions(api, "Deployment", "web", namespace), "the Deployment to be available")
    assert api.get("Deployment", "web", namespace)["status"]["readyReplicas"] == 2


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (podstatus.image_pull_fails(), "ImagePullBackOff"),
        (podstatus.waits("CreateContainerConfigError"), "CreateContainerConfigError"),
        (podstatus.fails(2), "CrashLoopBackOff"),
        (podstatus.oom_killed(), "CrashLoopBackOff"),
    ],
)
def test_a_container_that_cannot_run_waits_with_its_reason(api, namespace, kubelet, outcome, reason):
    kubelet.script(outcome, namespace)
    api.create(deployment(1), namespace)

    def waiting():
        states = [pod["status"].get("containerStatuses", [{"state": {}}])[0] for pod in pods(api, namespace)]
        return [each for each in states if each["state"].get("waiting", {}).get("reason") == reason]

    [state] = until(waiting, reason)
    if outcome == podstatus.oom_killed():
        assert state["lastState"]["terminated"]["reason"] == "OOMKilled"


def test_a_pod_that_fits_no_node_is_unschedulable(api, namespace, kubelet):
    unfit = job(pods=1)
    unfit["spec"]["template"]["spec"]["nodeSelector"] = {"gpu": "of-another-world"}
    api.create(unfit, namespace)

    def refusals():
        found = [each for pod in pods(api, namespace) for each in pod["status"].get("conditions", [])]
        return [each for each in found if each.get("reason") == "Unschedulable"]

    [refusal] = until(refusals, "the scheduler's refusal")
    assert "2 node(s) didn't match Pod's node affinity/selector" in refusal["message"]


def test_a_script_with_times_is_used_up_and_the_latest_that_fits_counts(api, namespace, kubelet):
    kubelet.script(podstatus.never_ready(), namespace)
    kubelet.script(podstatus.runs(), namespace, labels={"app": "web"})
    kubelet.script(podstatus.fails(1), namespace, name="web-*", times=1)
    api.create(deployment(3), namespace)

    def reasons():
        states = [each["state"] for pod in pods(api, namespace) for each in pod["status"].get("containerStatuses", [])]
        return sorted(state.get("waiting", {}).get("reason", "running") for state in states)

    until(lambda: reasons() == ["CrashLoopBackOff", "running", "running"], "one of three to fail")
    until(lambda: api.get("Deployment", "web", namespace)["status"].get("readyReplicas") == 2, "the others to be ready")


def test_objects_are_collected_with_their_owner_pods_too(api, namespace, kubelet):
    owner = api.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "owner"}}, namespace)
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["metadata"]["uid"]}
    for child in (job(), deployment()):
        child["metadata"]["ownerReferences"] = [reference]
        api.create(child, namespace)
    until(lambda: len(pods(api, namespace, "Running")) == 4, "all pods to run")
    api.delete("ConfigMap", "owner", namespace)
    for kind in ("Job", "Deployment", "ReplicaSet", "Pod"):
        until(lambda kind=kind: not api.list(kind, namespace), f"every {kind} to be gone")


def test_a_deleted_pod_stops_first_and_is_then_gone(api, namespace, kubelet):
    kubelet.script(podstatus.runs(stop_code=4, stop_s=1.0), namespace)
    api.create(job(pods=1), namespace)
    [pod] = until(lambda: pods(api, namespace, "Running"), "the pod to run")
    api.delete("Pod", pod["metadata"]["name"], namespace, gracePeriodSeconds=30)
    assert "deletionTimestamp" in api.get("Pod", pod["metadata"]["name"], namespace)["metadata"]
    until(lambda: not pods(api, namespace), "the pod to be gone", 10)
    until(lambda: "Failed" in conditions(api, "Job", "work", namespace), "the Job to fail")


@pytest.mark.timeout(120)  # 22 s
def test_pods_of_a_lost_node_are_marked_and_hang_until_it_is_back(api, namespace, kubelet):
    api.create(job(pods=1), namespace)
    [pod] = until(lambda: pods(api, namespace, "Running"), "the pod to run")
    kubelet.lose_node(pod["spec"]["nodeName"])

    def leaving():
        return [each for each in pods(api, namespace) if "deletionTimestamp" in each["metadata"]]

    [left] = until(leaving, "the pod to be told to leave", 60)
    found = {each["type"]: each for each in left["status"]["conditions"]}
    assert found["Ready"]["status"] == "False" and found["DisruptionTarget"]["status"] == "True"
    kubelet.recover()
    until(lambda: not leaving(), "the pod to be gone")


@pytest.mark.timeout(180)
def test_hundreds_of_pods_run_and_are_gone_again(api, namespace, kubelet):
    api.create(deployment(300), namespace)

    def ready():
        return api.get("Deployment", "web", namespace)["status"].get("readyReplicas")

    until(lambda: ready() == 300, "300 pods to be ready", 90)
    api.delete("Deployment", "web", namespace)
    until(lambda: not pods(api, namespace), "all pods to be gone", 60)
