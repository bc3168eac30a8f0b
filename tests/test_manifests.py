"""manifests/: that every file is sound by itself, and in step with the code it installs."""

import json
import pathlib
import re
import sys

import pytest
import yaml

from operators import __main__ as operator
from operators import cluster, containers, election, liveness, telemetry
from operators.children import children
from operators.conditions import REASONS
from operators.resolve import Platform
from operators.spec.status import PHASES
from tests.test_tenancy import MARKED_JOB

FOLDER = pathlib.Path(__file__).parent.parent / "manifests"
FILES = sorted(path for path in FOLDER.rglob("*.yaml") if "samples" not in path.parts)
KUSTOMIZATIONS = [path for path in FILES if path.name == "kustomization.yaml"]


def documents(path: pathlib.Path) -> list[dict]:
    return list(yaml.load_all(path.read_text(), yaml.CSafeLoader))


def named(file: str, kind: str, name: str | None = None) -> dict:
    (found,) = (
        each for each in documents(FOLDER / file) if each["kind"] == kind and name in (None, each["metadata"]["name"])
    )
    return found


DEPLOYMENT = named("operator/deployment.yaml", "Deployment")
POD = DEPLOYMENT["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
OBJECTS = [
    each for path in FILES for each in documents(path) if "kind" in each and not each["kind"].startswith("Kustom")
]
ROLES = [each for each in OBJECTS if each["kind"] in ("Role", "ClusterRole")]


def test_every_kustomization_names_what_exists_and_leaves_no_file_out():
    used = set()
    for path in KUSTOMIZATIONS:
        content = yaml.safe_load(path.read_text())
        generated = [
            file.partition("=")[2]
            for generator in content.get("configMapGenerator", [])
            for file in generator.get("files", [])
        ]
        for entry in [*content.get("resources", []), *generated]:
            found = (path.parent / entry).resolve()
            assert found.exists(), f"{path}: {entry}"
            used.add(found)
    alone = {FOLDER / "argocd" / "application.yaml", *KUSTOMIZATIONS}  # an example, not part of an installation
    assert {path.resolve() for path in FILES} - used == {path.resolve() for path in alone}


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role["metadata"]["name"])
def test_no_role_has_a_wildcard(role):
    for rule in role["rules"]:
        assert "*" not in [*rule["verbs"], *rule["resources"], *rule["apiGroups"]]


def verbs(role: dict, resource: str) -> set[str]:
    return {verb for rule in role["rules"] if resource in rule["resources"] for verb in rule["verbs"]}


def test_the_operator_reads_no_secret_but_its_own_key_and_enters_no_pod():
    everywhere, own = named("rbac/operator.yaml", "ClusterRole"), named("rbac/operator-own.yaml", "Role")
    assert verbs(everywhere, "secrets") == {"create"}
    assert verbs(everywhere, "pods") == {"list", "watch", "delete"}
    assert not any(
        "/exec" in resource or "/log" in resource for rule in everywhere["rules"] for resource in rule["resources"]
    )
    (reading,) = (rule for rule in own["rules"] if "secrets" in rule["resources"] and "get" in rule["verbs"])
    assert reading["resourceNames"] == [cluster.KEY_SECRET]
    (leading,) = (rule for rule in own["rules"] if "leases" in rule["resources"] and "get" in rule["verbs"])
    assert leading["resourceNames"] == [election.NAME]


def test_the_operator_never_writes_a_spec():
    assert verbs(named("rbac/operator.yaml", "ClusterRole"), "rljobs") == {"get", "list", "watch", "delete"}


def test_viewers_only_look_and_both_roles_concern_rljobs_alone():
    viewer, editor = (named("rbac/people.yaml", "ClusterRole", name) for name in ("rljob-viewer", "rljob-editor"))
    assert {verb for rule in viewer["rules"] for verb in rule["verbs"]} == {"get", "list", "watch"}
    assert {group for role in (viewer, editor) for rule in role["rules"] for group in rule["apiGroups"]} == {
        "miles.dev"
    }
    assert verbs(editor, "rljobs/status") == {"get"}


def test_the_operators_pod_is_restricted():
    assert POD["securityContext"]["runAsNonRoot"] is True
    assert POD["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert CONTAINER["securityContext"] == containers.RESTRICTED
    assert CONTAINER["resources"]["limits"]["memory"]
    assert {"hostNetwork", "hostPID", "hostIPC"}.isdisjoint(POD)


def test_what_the_deployment_passes_is_understood_by_the_operator(monkeypatch):
    assert CONTAINER["command"] == ["python", "-m", "operators"]
    literals = dict(
        literal.split("=", 1)
        for literal in yaml.safe_load((FOLDER / "operator/kustomization.yaml").read_text())["configMapGenerator"][0][
            "literals"
        ]
    )
    values = {
        entry["name"]: literals[entry["valueFrom"]["configMapKeyRef"]["key"]]
        for entry in CONTAINER["env"]
        if "configMapKeyRef" in entry.get("valueFrom", {})
    }
    arguments = [re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], text) for text in CONTAINER["args"]]
    monkeypatch.setattr(sys, "argv", ["operators", *arguments])
    options = operator.arguments()
    assert (options.image, options.gpu_image) == (literals["image"], literals["gpu-image"])
    assert not options.namespace
    assert not options.service_accounts
    assert options.port == CONTAINER["ports"][0]["containerPort"]
    assert (options.egress_cidrs, options.egress_ports) == (Platform.egress_cidrs, Platform.egress_ports)
    assert len(literals) == len(values)


def test_everything_that_selects_the_operator_selects_its_pods():
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    selectors = [
        DEPLOYMENT["spec"]["selector"]["matchLabels"],
        POD["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"],
        named("operator/service.yaml", "Service")["spec"]["selector"],
        named("operator/disruption.yaml", "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        named("operator/network.yaml", "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
    ]
    assert all(selector.items() <= labels.items() for selector in selectors)
    monitored = named("components/prometheus/monitor.yaml", "ServiceMonitor")["spec"]["selector"]["matchLabels"]
    assert monitored.items() <= named("operator/service.yaml", "Service")["metadata"]["labels"].items()


def test_a_replica_can_be_moved_while_the_other_acts():
    assert DEPLOYMENT["spec"]["replicas"] == 2
    assert named("operator/disruption.yaml", "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1


def test_probes_ask_what_the_operator_serves():
    paths = {name: CONTAINER[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/healthz", "liveness": "/healthz", "readiness": "/readyz"}


def test_status_ports_may_be_asked():
    operators = named("operator/network.yaml", "NetworkPolicy")["spec"]["egress"]
    trainers = named("tenant/network.yaml", "NetworkPolicy", "rljobs-metrics")["spec"]["ingress"]
    for rules in (operators, trainers):
        assert containers.STATUS_PORT in [port["port"] for rule in rules for port in rule["ports"]]


def exported() -> set[str]:
    """The samples of an operator that has jobs in every phase."""
    served = telemetry.Telemetry(liveness.Health())
    served.jobs = lambda: [telemetry.JobState("team", phase, phase, False, "Starting") for phase in PHASES]
    served.health.beat("RLJob")
    served.counted("GET", 200)
    return {sample.name for family in served.registry.collect() for sample in family.samples}


RULES = [rule for group in named("components/prometheus/rules.yaml", "PrometheusRule")["spec"]["groups"]
         for rule in group["rules"]]  # fmt: skip
DASHBOARD = json.loads(named("components/prometheus/dashboard.yaml", "ConfigMap")["data"]["miles-operator.json"])
QUERIES = {rule["alert"]: rule["expr"] for rule in RULES} | {
    panel["title"]: target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]
}


@pytest.mark.parametrize("expr", QUERIES.values(), ids=QUERIES)
def test_alerts_and_the_dashboard_ask_for_what_the_operator_exports(expr):
    assert (asked := set(re.findall(r"(?:miles|process)_\w+", expr)))
    assert asked <= exported()
    assert set(re.findall(r'phase="(\w+)"', expr)) <= set(PHASES)
    (reasons,) = re.findall(r'reason=~"([\w|]+)"', expr) or [""]
    assert set(filter(None, reasons.split("|"))) <= REASONS.keys()


def test_metrics_that_an_alert_tells_to_look_at_exist():
    names = exported()
    for rule in RULES:
        for name in re.findall(r"miles_\w+", rule["annotations"]["description"]):
            assert {name, f"{name}_count"} & names, rule["alert"]


def test_a_job_is_told_ready_or_not_until_it_is_over_or_suspended():
    served = telemetry.Telemetry(liveness.Health())
    served.jobs = lambda: [
        telemetry.JobState("team-a", "sums", "Running", True, "Training"),
        telemetry.JobState("team-a", "stuck", "Pending", False, "InvalidSpec"),
        *(telemetry.JobState("team-a", phase, phase, False, phase) for phase in ("Complete", "Failed", "Suspended")),
    ]
    (family,) = (each for each in served.registry.collect() if each.name == "miles_job_ready")
    told = {(sample.labels["name"], sample.labels["reason"]): sample.value for sample in family.samples}
    assert told == {("sums", "Training"): 1, ("stuck", "InvalidSpec"): 0}


def test_prometheus_reads_the_ports_that_pods_of_jobs_serve():
    monitor = named("components/prometheus/monitor.yaml", "PodMonitor")["spec"]
    platform = Platform(service_accounts=("allowed-account",))
    made = children(MARKED_JOB, run_id="run", platform=platform)
    (rule,) = monitor["podMetricsEndpoints"][0]["relabelings"]
    assert rule["sourceLabels"][0] == "__meta_kubernetes_pod_label_miles_dev_component"
    for template in (child["spec"]["template"] for child in made if child["kind"] in ("Deployment", "Job")):
        labels = template["metadata"]["labels"]
        assert monitor["selector"]["matchLabels"].items() <= labels.items()
        ports = {port["name"] for each in template["spec"]["containers"] for port in each.get("ports", ())}
        part = labels["miles.dev/component"]
        read = {index for index in ("", "0", "1") if re.fullmatch(rule["regex"], f"{part};{index}")}
        assert read == {"trainer": {"0"}, "rollout": {""}}.get(part, set())
        assert not read or monitor["podMetricsEndpoints"][0]["port"] in ports


def test_argo_cd_installs_the_crd_before_the_operator_and_both_before_jobs():
    waves = {
        path: yaml.safe_load((FOLDER / path / "kustomization.yaml").read_text())["commonAnnotations"]
        for path in ("crd", "rbac", "operator")
    }
    assert {path: next(iter(found.values())) for path, found in waves.items()} == {
        "crd": "-2",
        "rbac": "-1",
        "operator": "-1",
    }
    for overlay in ("cluster", "namespaced"):
        (binding,) = documents(FOLDER / "overlays" / overlay / "binding.yaml")
        assert binding["metadata"]["annotations"] == waves["operator"]


def test_argo_cd_removes_the_crd_neither_by_pruning_nor_with_its_application():
    """Whichever folder an Application installs: each takes the CRD from there."""
    annotations = yaml.safe_load((FOLDER / "crd/kustomization.yaml").read_text())["commonAnnotations"]
    options = annotations["argocd.argoproj.io/sync-options"].split(",")
    assert {"Prune=false", "Delete=false"} <= set(options)
    assert "../crd" in yaml.safe_load((FOLDER / "base/kustomization.yaml").read_text())["resources"]
    for overlay in ("cluster", "namespaced", "dev"):
        resources = yaml.safe_load((FOLDER / "overlays" / overlay / "kustomization.yaml").read_text())["resources"]
        assert {"../../base", "../cluster"} & set(resources), overlay


def test_every_policy_is_bound_and_denies():
    found = documents(FOLDER / "components/tenancy/policy.yaml")
    policies = {each["metadata"]["name"] for each in found if each["kind"] == "ValidatingAdmissionPolicy"}
    bindings = [each["spec"] for each in found if each["kind"] == "ValidatingAdmissionPolicyBinding"]
    assert {binding["policyName"] for binding in bindings} == policies
    assert all(binding["validationActions"] == ["Deny"] for binding in bindings)


def test_the_example_of_a_tenant_has_every_limit_that_the_policy_reads():
    policy = (FOLDER / "components/tenancy/policy.yaml").read_text()
    read = set(re.findall(r"'(\w+)' in variables\.data", policy))
    assert read == set(named("tenant/limits.yaml", "ConfigMap")["data"])


def test_the_example_of_a_tenant_brings_what_its_jobs_may_name():
    allowed = named("tenant/limits.yaml", "ConfigMap")["data"]
    for key, kind in (("serviceAccounts", "ServiceAccount"), ("priorityClasses", "PriorityClass")):
        made = {each["metadata"]["name"] for each in documents(FOLDER / "tenant/identity.yaml") if each["kind"] == kind}
        assert set(allowed[key].split()) == made


@pytest.mark.parametrize(
    "folder", ["crd", "overlays/cluster", "overlays/namespaced", "overlays/dev", "tenant", "argocd"]
)
def test_the_readme_names_every_part(folder):
    assert folder in (FOLDER / "README.md").read_text()
