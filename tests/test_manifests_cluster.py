"""manifests/ on a real API server: rendered by kubectl's own kustomize, taken without a warning, and enforced."""

import copy
import os
import pathlib

import pytest
import yaml

from operators import cluster, containers, election
from tests.controlplane import ControlPlane
from tests.kubeapi import API_VERSIONS, ApiError, until

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(180)]
FOLDER = pathlib.Path(__file__).parent.parent / "manifests"
COMPONENTS = ("tenancy", "prometheus")
FOREIGN = {
    "prometheusrules.monitoring.coreos.com": "PrometheusRule",
    "podmonitors.monitoring.coreos.com": "PodMonitor",
    "servicemonitors.monitoring.coreos.com": "ServiceMonitor",
    "applications.argoproj.io": "Application",
}
"""Kinds of others, whose definitions stand-ins with any content take the place of here."""


def stub(name: str, kind: str) -> dict:
    plural, _, group = name.partition(".")
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1alpha1" if kind == "Application" else "v1", "served": True, "storage": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": name},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"plural": plural, "singular": kind.lower(), "kind": kind},
            "versions": [version | {"schema": {"openAPIV3Schema": anything}}],
        },
    }


@pytest.fixture(scope="module")
def plane(control_plane: ControlPlane):
    """With the kinds of Prometheus and Argo CD; what is installed meanwhile is removed in the end."""
    api = control_plane.api
    for name, kind in FOREIGN.items():
        api.apply(stub(name, kind))
    for name in (*FOREIGN, "rljobs.miles.dev"):
        if name == "rljobs.miles.dev":
            api.apply(yaml.safe_load((FOLDER / "crd/rljobs.yaml").read_text()))
        until(lambda name=name: established(api, name), f"{name} is served")
    yield control_plane
    for kind in ("ValidatingAdmissionPolicyBinding", "ValidatingAdmissionPolicy"):
        for name in ("rljobs-in-clusters", "rljobs-of-tenants", "rljobs-scaled-by-tenants"):
            api.delete(kind, f"{name}.miles.dev")
    for kind, name in (
        ("ClusterRoleBinding", "miles-operator"),
        ("ClusterRoleBinding", "miles-operator-nodes"),
        ("Namespace", "miles-system"),
        ("Namespace", "argocd"),
        ("PriorityClass", "research"),
    ):
        api.delete(kind, name)
    for name in FOREIGN:
        api.delete("CustomResourceDefinition", name)


def established(api, name: str) -> bool:
    found = api.get("CustomResourceDefinition", name).get("status", {}).get("conditions")
    return any(entry["type"] == "Established" and entry["status"] == "True" for entry in found or ())


def overlay(folder: pathlib.Path, name: str) -> str:
    """A folder like a user's own: an overlay with every component."""
    top = pathlib.Path(os.path.relpath(FOLDER, folder.resolve()))
    (folder / "kustomization.yaml").write_text(
        yaml.safe_dump(
            {
                "apiVersion": "kustomize.config.k8s.io/v1beta1",
                "kind": "Kustomization",
                "resources": [str(top / "overlays" / name)],
                "components": [str(top / "components" / component) for component in COMPONENTS],
            }
        )
    )
    return str(folder)


def silently(result) -> str:
    assert (result.returncode, result.stderr) == (0, ""), result.stdout + result.stderr
    return result.stdout


def install(plane: ControlPlane, folder: str) -> None:
    silently(plane.kubectl("apply", "--server-side", "--force-conflicts", "--validate=strict", "-k", folder))


@pytest.mark.parametrize("name", ["cluster", "namespaced", "dev"])
def test_an_overlay_is_taken_without_a_warning_and_a_second_apply_changes_nothing(plane, tmp_path, name):
    if plane.api.find("Namespace", "team-a") is None:
        plane.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team-a"}})
    folder = overlay(tmp_path, name)
    install(plane, folder)
    assert silently(plane.kubectl("diff", "--server-side", "--force-conflicts", "-k", folder)) == ""


def test_plain_apply_works_too(plane):
    """It keeps a copy in an annotation of at most 262,144 bytes."""
    result = plane.kubectl("apply", "--dry-run=server", "-k", str(FOLDER / "crd"))
    assert result.returncode == 0, result.stderr


def test_settings_of_a_users_own_overlay_reach_the_operator(plane, tmp_path):
    folder = pathlib.Path(overlay(tmp_path, "cluster"))
    own = yaml.safe_load((folder / "kustomization.yaml").read_text())
    own["images"] = [{"name": "miles-operator", "newName": "registry.example/op", "newTag": "2"}]
    own["configMapGenerator"] = [
        {
            "name": "miles-settings",
            "namespace": "miles-system",
            "behavior": "merge",
            "literals": ["image=registry.example/m:2"],
        }
    ]
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(own))
    found = list(yaml.safe_load_all(silently(plane.kubectl("kustomize", str(folder)))))
    (deployment,) = (each for each in found if each["kind"] == "Deployment")
    configurations = [each for each in found if each["kind"] == "ConfigMap"]
    (settings,) = (each for each in configurations if each["metadata"]["name"].startswith("miles-settings"))
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry.example/op:2"
    assert settings["data"]["image"] == "registry.example/m:2"
    assert settings["data"]["gpu-image"] == "miles:0.1.0-gpu"
    named = {
        entry["valueFrom"]["configMapKeyRef"]["name"]
        for entry in container["env"]
        if "configMapKeyRef" in entry.get("valueFrom", {})
    }
    assert named == {settings["metadata"]["name"]}


def test_the_operators_pods_are_admitted_where_pods_are_restricted(plane, tmp_path):
    install(plane, overlay(tmp_path, "cluster"))
    pods = until(lambda: plane.api.list("Pod", "miles-system"), "pods of the operator")
    labels = plane.api.get("Namespace", "miles-system")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    assert pods[0]["spec"]["serviceAccountName"] == "miles-operator"


def test_argo_cds_own_settings_stay_beside_ours(plane):
    api = plane.api
    if api.find("Namespace", "argocd") is None:
        api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "argocd"}})
    theirs = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "argocd-cm"}, "data": {"url": "https://x"}}
    api.apply(theirs, "argocd", manager="argocd")
    rendered = silently(plane.kubectl("kustomize", str(FOLDER / "argocd")))
    silently(plane.kubectl("apply", "--server-side", "--field-manager=miles", "-f", "-", text=rendered))
    data = api.get("ConfigMap", "argocd-cm", "argocd")["data"]
    assert data["url"] == "https://x"
    assert data["resource.customizations.health.miles.dev_RLJob"] == (FOLDER / "argocd/health.lua").read_text()
    assert len(data) == 4
    silently(plane.kubectl("apply", "--server-side", "-f", str(FOLDER / "argocd/application.yaml")))


GROUPS = (
    "apps",
    "batch",
    "coordination.k8s.io",
    "miles.dev",
    "networking.k8s.io",
    "policy",
    "rbac.authorization.k8s.io",
)


def can(plane: ControlPlane, user: str, verb: str, resource: str, namespace: str = "", name: str = "") -> bool:
    """Whether a ServiceAccount "namespace/name" may, says the API server; resource: [group/]plural[/sub]."""
    first, _, rest = resource.partition("/")
    group, resource = (first, rest) if first in GROUPS else ("", resource)
    plural, _, subresource = resource.partition("/")
    attributes = {"verb": verb, "group": group, "resource": plural, "subresource": subresource}
    account, _, own_name = user.partition("/")
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": f"system:serviceaccount:{account}:{own_name}",
            "groups": ["system:serviceaccounts", f"system:serviceaccounts:{account}", "system:authenticated"],
            "resourceAttributes": attributes | {"namespace": namespace, "name": name},
        },
    }
    return plane.api.request("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", body)["status"]["allowed"]


OPERATOR = "miles-system/miles-operator"
EVERY_VERB = ("get", "list", "watch", "create", "patch", "delete")
CHILDREN = (
    "apps/deployments",
    "batch/jobs",
    "configmaps",
    "networking.k8s.io/networkpolicies",
    "policy/poddisruptionbudgets",
    "services",
)
NEEDED = [
    *(("miles.dev/rljobs", verb) for verb in ("get", "list", "watch", "delete")),
    ("miles.dev/rljobs/status", "update"),
    ("miles.dev/rljobs/finalizers", "update"),
    *((kind, verb) for kind in CHILDREN for verb in EVERY_VERB),
    ("pods", "list"),
    ("pods", "watch"),
    ("pods", "delete"),
    ("events", "list"),
    ("events", "watch"),
    ("events", "create"),
    ("secrets", "create"),
    ("nodes", "list"),
]  # fmt: skip
DENIED = [
    ("miles.dev/rljobs", "update"),
    ("miles.dev/rljobs", "patch"),
    ("miles.dev/rljobs", "create"),
    ("secrets", "get"),
    ("secrets", "list"),
    ("secrets", "watch"),
    ("secrets", "delete"),
    ("pods", "create"),
    ("pods", "patch"),
    ("pods/exec", "create"),
    ("pods/log", "get"),
    ("serviceaccounts/token", "create"),
    ("serviceaccounts", "impersonate"),
    ("nodes", "get"),
    ("nodes", "watch"),
    ("namespaces", "list"),
    ("rbac.authorization.k8s.io/rolebindings", "create"),
]


def test_the_operator_may_do_what_it_does_and_no_more(plane, tmp_path):
    install(plane, overlay(tmp_path, "cluster"))
    assert [each for each in NEEDED if not can(plane, OPERATOR, each[1], each[0], "default")] == []
    assert [each for each in DENIED if can(plane, OPERATOR, each[1], each[0], "default")] == []


def test_the_operators_own_lease_and_key_are_its_only_ones(plane, tmp_path):
    install(plane, overlay(tmp_path, "cluster"))
    lease, key = "coordination.k8s.io/leases", "secrets"
    assert can(plane, OPERATOR, "update", lease, "miles-system", election.NAME)
    assert can(plane, OPERATOR, "get", key, "miles-system", cluster.KEY_SECRET)
    assert not can(plane, OPERATOR, "update", lease, "kube-system", "kube-scheduler")
    assert not can(plane, OPERATOR, "update", lease, "miles-system", "another")
    assert not can(plane, OPERATOR, "get", key, "miles-system", "another")


def test_an_operator_for_one_namespace_sees_no_other(plane, tmp_path):
    install(plane, overlay(tmp_path, "namespaced"))
    for binding in ("miles-operator", "miles-operator-nodes"):
        plane.api.delete("ClusterRoleBinding", binding)
    until(lambda: not can(plane, OPERATOR, "list", "miles.dev/rljobs", "default"), "the binding is gone")
    assert can(plane, OPERATOR, "list", "miles.dev/rljobs", "team-a")
    assert not can(plane, OPERATOR, "list", "miles.dev/rljobs", "")
    assert not can(plane, OPERATOR, "list", "nodes", "")
    assert not can(plane, OPERATOR, "create", "secrets", "default")


def test_who_may_edit_a_namespace_may_edit_its_rljobs(plane, tmp_path, namespace):
    install(plane, overlay(tmp_path, "cluster"))
    for role in ("view", "edit"):
        binding = {
            "apiVersion": API_VERSIONS["RoleBinding"],
            "kind": "RoleBinding",
            "metadata": {"name": role},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
            "subjects": [{"kind": "ServiceAccount", "name": role, "namespace": namespace}],
        }
        plane.api.create(binding, namespace)
    until(lambda: can(plane, f"{namespace}/view", "list", "miles.dev/rljobs", namespace), "roles are aggregated")
    until(lambda: can(plane, f"{namespace}/edit", "create", "miles.dev/rljobs", namespace), "roles are aggregated")
    assert can(plane, f"{namespace}/edit", "patch", "miles.dev/rljobs/scale", namespace)
    assert not can(plane, f"{namespace}/view", "create", "miles.dev/rljobs", namespace)
    assert not can(plane, f"{namespace}/edit", "update", "miles.dev/rljobs/status", namespace)
    assert not can(plane, f"{namespace}/edit", "create", "miles.dev/rljobs", "default")


def test_the_example_of_a_tenant_is_taken_as_it_is_and_pods_may_be_what_its_jobs_may_name(plane):
    folder = str(FOLDER / "tenant")
    silently(plane.kubectl("apply", "--server-side", "--validate=strict", "-k", folder))
    assert silently(plane.kubectl("diff", "--server-side", "-k", folder)) == ""
    allowed = plane.api.get("ConfigMap", "miles-tenant", "team-a")["data"]
    for account in allowed["serviceAccounts"].split():
        for priority in allowed["priorityClasses"].split():
            pod = copy.deepcopy(ADMITTED)
            pod["spec"] |= {"serviceAccountName": account, "priorityClassName": priority}
            made = plane.api.create(pod, "team-a", dryRun="All", fieldValidation="Strict")
            assert made["spec"]["preemptionPolicy"] == "Never"
            assert "volumes" not in made["spec"], "a token of the account is mounted"


ADMITTED = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "worker"},
    "spec": {
        "securityContext": {"runAsNonRoot": True, "runAsUser": 10001, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [{"name": "worker", "image": "a", "securityContext": containers.RESTRICTED}],
    },
}


def test_the_status_port_of_the_network_policies_is_the_trainers(plane):
    silently(plane.kubectl("apply", "--server-side", "--validate=strict", "-k", str(FOLDER / "tenant")))
    found = plane.api.get("NetworkPolicy", "rljobs-metrics", "team-a")
    assert found["spec"]["ingress"][0]["ports"][0]["port"] == containers.STATUS_PORT
    with pytest.raises(ApiError):
        plane.api.get("NetworkPolicy", "rljobs-metrics", "default")
