"""What a tenant can reach, asked of a real API server with the tenant's own ServiceAccount and manifests/ installed."""

import copy
import pathlib
import re

import pytest
import yaml

from operators.children import children
from operators.resolve import Platform
from operators.spec import RLJob
from tests.controlplane import ControlPlane
from tests.kubeapi import Api, ApiError, until
from tests.test_tenancy import MARKED_JOB, SMUGGLED

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(180)]
FOLDER = pathlib.Path(__file__).parent.parent / "manifests"
POLICIES = list(yaml.safe_load_all((FOLDER / "components/tenancy/policy.yaml").read_text()))
FORBIDDEN = 403
INVALID = 422
ALLOWED = """\
apiVersion: miles.dev/v1alpha1
kind: RLJob
metadata: {name: sums}
spec:
  model: {uri: hf://some/model, revision: abc, secretRef: {name: team-a-s3}}
  data:
    sets: [{generator: reasoning-gym/chain_sum}]
  rewards: [{name: judge, endpoint: "https://s3.example/judge"}]
  algorithm: {type: grpo, totalSteps: 10}
  rollout:
    replicas: 2
    image: registry.example/miles/rollout:1
    resources: {limits: {nvidia.com/gpu: 4}}
    tensorParallelSize: 4
    template:
      env: [{name: HF_TOKEN, valueFrom: {secretKeyRef: {name: team-a-s3, key: token}}}]
      annotations: {prometheus.io/scrape: "true"}
      tolerations: [{key: spot, operator: Exists}]
  trainer:
    nodes: 1
    resources: {limits: {nvidia.com/gpu: "8"}}
  evaluation: {sets: [{uri: "s3://team-a/held-out.jsonl"}]}
  store: {uri: s3://team-a/miles, endpoint: "https://s3.example/", secretRef: {name: team-a-s3}}
  output: {uri: s3://team-a/models}
  scheduling: {priorityClassName: research, serviceAccountName: team-a-trainer}
"""
REFUSED = {
    "a foreign service account": ("spec.scheduling.serviceAccountName", "admin", "is not among serviceAccounts"),
    "another priority": ("spec.scheduling.priorityClassName", "system-node-critical", "is not among priorityClasses"),
    "a foreign image of workers": ("spec.rollout.image", "evil.example/x", "does not begin as images"),
    "a foreign image of the trainer": ("spec.trainer.image", "registry.example/miles", "does not begin as images"),
    "a foreign bucket": ("spec.store.uri", "s3://team-b/miles", "does not begin as stores"),
    "a bucket with the same beginning": ("spec.store.uri", "s3://team-ab/miles", "does not begin as stores"),
    "a foreign bucket for the model": ("spec.output.uri", "s3://team-b/models", "does not begin as stores"),
    "a foreign endpoint": ("spec.store.endpoint", "http://169.254.169.254", "does not begin as endpoints"),
    "a foreign reward": ("spec.rewards.0.endpoint", "https://evil.example/", "does not begin as endpoints"),
    "another Secret for the store": ("spec.store.secretRef.name", "admin", "is not among secrets"),
    "another Secret for the model": ("spec.model.secretRef.name", "admin", "is not among secrets"),
    "another Secret in the environment": (
        "spec.rollout.template.env.0.valueFrom.secretKeyRef.name", "admin", "is not among secrets"
    ),
    "another Secret in the trainer": (
        "spec.trainer.template",
        {"env": [{"name": "X", "valueFrom": {"secretKeyRef": {"name": "admin", "key": "k"}}}]},
        "is not among secrets",
    ),
    "an annotation that other controllers act on": (
        "spec.trainer.template", {"annotations": {"iam.amazonaws.com/role": "admin"}}, "is not among annotations"
    ),
    "nodes of the control plane": (
        "spec.scheduling.tolerations",
        [{"key": "node-role.kubernetes.io/control-plane", "operator": "Exists"}],
        "none of the control plane",
    ),
    "every node": ("spec.trainer.template", {"tolerations": [{"operator": "Exists"}]}, "by its key"),
    "code of the model": ("spec.model.trustRemoteCode", True, "trustRemoteCode"),
    "too many GPUs in workers": ("spec.rollout.replicas", 3, "asks for 20 GPUs; maxGpus"),
    "too many GPUs in trainers": ("spec.trainer.nodes", 2, "asks for 24 GPUs"),
    "too many GPUs by autoscaling": ("spec.rollout.autoscale", {"min": 1, "max": 100}, "asks for 408 GPUs"),
    "too many GPUs in reward models": (
        "spec.rewards.0",
        {
            "name": "judge",
            "model": {"uri": "s3://team-a/judge", "replicas": 3, "resources": {"limits": {"nvidia.com/gpu": 1}}},
        },
        "asks for 19 GPUs",
    ),
    "a folder as store": ("spec.store.uri", "file:///var/lib", "pods share none|does not begin as stores"),
    "a folder as model": ("spec.model.uri", "file:///etc", "in place of file:///etc|a folder has no revisions"),
    "a folder as tokenizer": ("spec.model.tokenizer", "file:///etc", "pods share none"),
    "a folder as output": ("spec.output.uri", "file:///etc", "pods share none|does not begin as stores"),
    "a folder of prompts": ("spec.evaluation.sets.0.uri", "file:///etc/x.jsonl", "pods share none"),
    "a folder to begin from": ("spec.checkpoint.resumeFrom", "file:///runs/a/b/c", "pods share none"),
}  # fmt: skip


@pytest.fixture(scope="module")
def team(control_plane: ControlPlane):
    """A tenant's namespace as manifests/tenant makes it, and the API as the tenant's ServiceAccount sees it."""
    admin = control_plane.api
    admin.apply(yaml.safe_load((FOLDER / "crd/rljobs.yaml").read_text()))
    for role in yaml.safe_load_all((FOLDER / "rbac/people.yaml").read_text()):
        admin.apply(role)
    name = control_plane.new_namespace(
        **{"miles.dev/tenant": "true", "pod-security.kubernetes.io/enforce": "restricted"}
    )
    (limits,) = (
        each for each in yaml.safe_load_all((FOLDER / "tenant/limits.yaml").read_text()) if each["kind"] == "ConfigMap"
    )
    admin.apply(limits, name)
    tenant = Api(control_plane.service_account(name, "tenant"))
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "tenant"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "rljob-editor"},
        "subjects": [{"kind": "ServiceAccount", "name": "tenant", "namespace": name}],
    }
    admin.apply(binding, name)
    for policy in POLICIES:
        admin.apply(policy)
    for path, value in (
        ("spec.model.tokenizer", "file:///x"),
        ("spec.store.uri", "s3://team-b/x"),
    ):  # one of each policy
        until(lambda path=path, value=value: is_refused(tenant, name, path, value), "the policies are in force", 60)
    yield name, tenant
    for policy in reversed(POLICIES):
        admin.delete(policy["kind"], policy["metadata"]["name"])
    admin.delete("Namespace", name)


def changed(path: str, value) -> dict:
    found = copy.deepcopy(yaml.safe_load(ALLOWED))
    *above, last = path.split(".")
    place = found
    for step in above:
        place = place[int(step)] if step.isdigit() else place.setdefault(step, {})
    place[int(last) if last.isdigit() else last] = value
    return found


def is_refused(tenant: Api, namespace: str, path: str, value) -> bool:
    try:
        tenant.create(changed(path, value), namespace, dryRun="All")
    except ApiError as error:
        return error.code == INVALID
    return False


def test_the_policies_have_no_mistake_that_the_server_finds(team, api):
    def checked(name: str) -> dict | None:
        return api.get("ValidatingAdmissionPolicy", name).get("status")

    for policy in POLICIES[::2]:
        name = policy["metadata"]["name"]
        found = until(lambda name=name: checked(name), f"{name} is checked", 60)
        assert found["typeChecking"].get("expressionWarnings", []) == []


def test_a_job_within_the_limits_is_taken(team):
    namespace, tenant = team
    tenant.create(yaml.safe_load(ALLOWED), namespace, dryRun="All", fieldValidation="Strict")


@pytest.mark.parametrize(("path", "value", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_a_job_beyond_them_is_refused_with_the_reason(team, path, value, said):
    namespace, tenant = team
    with pytest.raises(ApiError) as refused:
        tenant.create(changed(path, value), namespace, dryRun="All", fieldValidation="Strict")
    assert refused.value.code == INVALID
    assert re.search(said, refused.value.message)  # of two policies that refuse, either may speak


def test_an_edit_does_not_lead_beyond_the_limits_either(team, api):
    namespace, tenant = team
    tenant.create(yaml.safe_load(ALLOWED), namespace)
    for path, value, said in REFUSED.values():
        if "replicas" in path or "Account" in path:
            patch = {"spec": changed(path, value)["spec"]}
            with pytest.raises(ApiError, match=said.split(";")[0]):
                tenant.patch("RLJob", "sums", namespace, patch)
    tenant.delete("RLJob", "sums", namespace)


def test_without_its_limits_a_tenants_namespace_takes_no_job(team, control_plane):
    _, _ = team
    name = control_plane.new_namespace(**{"miles.dev/tenant": "true"})
    with pytest.raises(ApiError, match="params"):
        control_plane.api.create(yaml.safe_load(ALLOWED), name, dryRun="All")
    control_plane.api.delete("Namespace", name)


def test_elsewhere_only_what_can_never_run_is_refused(team, control_plane, namespace):
    api = control_plane.api
    api.create(changed("spec.store.uri", "s3://team-b/miles"), namespace, dryRun="All")
    with pytest.raises(ApiError, match="pods share none"):
        api.create(changed("spec.store.uri", "file:///x"), namespace, dryRun="All")


def replaying(uri: str) -> dict:
    found = changed("spec.data", {"replayFrom": {"uri": uri}})
    del found["spec"]["rewards"], found["spec"]["evaluation"], found["spec"]["rollout"]
    return found


def test_a_job_without_prompt_sets_that_trains_stored_samples_is_taken(team):
    namespace, tenant = team
    tenant.create(replaying("s3://team-a/miles/team-a/sums/1"), namespace, dryRun="All", fieldValidation="Strict")
    with pytest.raises(ApiError, match="pods share none"):
        tenant.create(replaying("file:///runs/team-a/sums/1"), namespace, dryRun="All")


def test_a_job_beyond_the_limit_of_gpus_can_be_suspended_and_not_resumed(team):
    namespace, tenant = team
    tenant.create(changed("spec.suspend", True) | {"metadata": {"name": "scaled"}}, namespace)
    tenant.patch("RLJob", "scaled", namespace, {"spec": {"rollout": {"replicas": 100}}})
    with pytest.raises(ApiError, match="asks for 408 GPUs"):
        tenant.patch("RLJob", "scaled", namespace, {"spec": {"suspend": False}})
    tenant.delete("RLJob", "scaled", namespace)


def scaled(tenant: Api, namespace: str, replicas: int) -> None:
    tenant.patch("RLJob", "scaled", namespace, {"spec": {"replicas": replicas}}, "scale")


def test_the_limit_of_gpus_is_not_passed_by_the_scale_subresource(team):
    """A request there shows no policy what a worker takes, so it may lower the number alone."""
    namespace, tenant = team
    tenant.create(changed("spec.trainer.resources", {}) | {"metadata": {"name": "scaled"}}, namespace)
    until(lambda: scale_is_refused(tenant, namespace), "the policy is in force", 60)
    scaled(tenant, namespace, 1)
    with pytest.raises(ApiError, match="as kubectl miles scale does") as refused:
        scaled(tenant, namespace, 2)
    assert refused.value.code == INVALID
    tenant.patch("RLJob", "scaled", namespace, {"spec": {"rollout": {"replicas": 4}}})
    with pytest.raises(ApiError, match="asks for 20 GPUs"):
        tenant.patch("RLJob", "scaled", namespace, {"spec": {"rollout": {"replicas": 5}}})
    scaled(tenant, namespace, 0)
    tenant.delete("RLJob", "scaled", namespace)


def scale_is_refused(tenant: Api, namespace: str) -> bool:
    try:
        scaled(tenant, namespace, 3)
    except ApiError:
        return True
    scaled(tenant, namespace, 2)
    return False


def test_without_a_limit_of_gpus_an_autoscaler_may_raise_the_number(control_plane, team):
    api, name = control_plane.api, control_plane.new_namespace(**{"miles.dev/tenant": "true"})
    (limits,) = (each for each in yaml.safe_load_all((FOLDER / "tenant/limits.yaml").read_text())
                 if each["kind"] == "ConfigMap")  # fmt: skip
    del limits["data"]["maxGpus"]
    api.apply(limits, name)
    api.create(yaml.safe_load(ALLOWED) | {"metadata": {"name": "scaled"}}, name)
    scaled(api, name, 3)
    api.delete("Namespace", name)


HERE = [path for path in SMUGGLED if "env[1]" not in path and "from" not in path]
"""Those that have a place in the allowed job."""


@pytest.mark.parametrize("path", HERE)
def test_a_field_of_a_pod_that_an_rljob_does_not_have_is_refused_or_dropped(team, path):
    namespace, tenant = team
    dotted = path.replace("[", ".").replace("]", "")
    with pytest.raises(ApiError, match="unknown field"):
        tenant.create(changed(dotted, SMUGGLED[path]), namespace, dryRun="All", fieldValidation="Strict")
    place = tenant.create(changed(dotted, SMUGGLED[path]), namespace, dryRun="All", fieldValidation="Ignore")
    *above, last = dotted.split(".")
    for step in above:
        place = place[int(step)] if step.isdigit() else place.get(step, {})
    assert last not in place


BEYOND = [
    ("GET", "/api/v1/namespaces/{own}/secrets"),
    ("GET", "/api/v1/namespaces/{own}/pods"),
    ("GET", "/api/v1/namespaces/{own}/configmaps/miles-tenant"),
    ("GET", "/api/v1/namespaces/kube-system/secrets"),
    ("GET", "/api/v1/namespaces"),
    ("GET", "/apis/miles.dev/v1alpha1/rljobs"),
    ("GET", "/apis/miles.dev/v1alpha1/namespaces/default/rljobs"),
    ("DELETE", "/api/v1/namespaces/{own}/configmaps/miles-tenant"),
    ("DELETE", "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/rljobs-of-tenants.miles.dev"),
    ("POST", "/api/v1/namespaces/{own}/pods"),
    ("POST", "/apis/batch/v1/namespaces/{own}/jobs"),
    ("POST", "/apis/apps/v1/namespaces/{own}/deployments"),
    ("POST", "/api/v1/namespaces/{own}/serviceaccounts/default/token"),
    ("POST", "/api/v1/namespaces/{own}/pods/x/exec"),
    ("PUT", "/apis/miles.dev/v1alpha1/namespaces/{own}/rljobs/sums/status"),
]


@pytest.mark.parametrize(("method", "path"), BEYOND, ids=lambda text: text)
def test_a_tenant_may_do_nothing_but_rljobs_in_its_namespace(team, method, path):
    namespace, tenant = team
    with pytest.raises(ApiError) as denied:
        tenant.request(method, path.format(own=namespace), None if method == "GET" else {})
    assert denied.value.code == FORBIDDEN


def test_every_pod_of_the_job_that_uses_every_field_is_admitted_as_restricted(team, control_plane):
    """And so it can be neither privileged nor root, nor mount a path of its node."""
    namespace, _ = team
    moved = RLJob.model_validate(
        MARKED_JOB.model_dump(by_alias=True, exclude_none=True)
        | {"metadata": {"name": "marked", "namespace": namespace, "uid": "u"}}
    )
    found = children(moved, run_id="run", platform=Platform(service_accounts=("allowed-account",)))
    for workload in (child for child in found if child["kind"] in ("Deployment", "Job")):
        pod = copy.deepcopy(workload["spec"]["template"]) | {"apiVersion": "v1", "kind": "Pod"}
        pod["metadata"]["name"] = workload["metadata"]["name"]
        for name in ("priorityClassName", "serviceAccountName"):  # which would have to exist
            pod["spec"].pop(name, None)
        for container in [*pod["spec"]["initContainers"], *pod["spec"]["containers"]]:
            container.pop("resources")  # of kinds that no node has
        control_plane.api.create(pod, namespace, dryRun="All", fieldValidation="Strict")
