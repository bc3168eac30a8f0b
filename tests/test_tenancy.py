"""What a tenant, who may write RLJobs and nothing else, can reach through them: every field that ends in a pod is known
here, and none of them can make a pod more than it should be. Pure; test_tenancy_cluster.py asks the API server."""

import json
from collections.abc import Iterator

import pydantic
import pytest
import yaml

from operators import manifest, rules, schema
from operators.children import children
from operators.resolve import Platform
from operators.spec import RLJob
from tests.test_spec import job

UNPRIVILEGED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
CLUSTER = Platform(service_accounts=("allowed-account",))
MARKED = """\
apiVersion: miles.dev/v1alpha1
kind: RLJob
metadata:
  name: marked-name
  namespace: marked-namespace
  uid: marked-uid
  labels: {marked-label: marked-label-value}
  annotations: {marked-annotation: marked-annotation-value}
spec:
  managedBy: marked-manager
  model:
    uri: s3://marked/model
    revision: marked-revision
    tokenizer: s3://marked/tokenizer
    secretRef: {name: marked-model-secret}
  data:
    systemPrompt: marked-prompt
    sets:
      - name: marked-set
        uri: s3://marked/set.jsonl
        fields: {prompt: marked-column, answer: marked-answer}
        weight: "1.25"
      - {generator: reasoning-gym/marked_generator, parameters: {marked-parameter: marked-value}}
  environment:
    class: marked_environment.py:Marked
    from: {configMap: marked-environment}
    parameters: {marked-turns: marked-turns-value}
  rewards:
    - {name: marked-file, function: "marked.py:function", from: {configMap: marked-config-map}, clip: "1.75"}
    - {name: marked-endpoint, endpoint: "https://marked.example/score"}
    - {name: marked-library, library: length, parameters: {marked-buffer: marked-buffer-value}, weight: "1.5"}
    - name: marked-model
      model:
        uri: s3://marked/reward-model
        resources: {requests: {marked.example/rm-request: 1}, limits: {marked.example/rm-limit: 2}}
  algorithm:
    type: grpo
    totalSteps: 10
    sampling: {stop: [marked-stop], temperature: "0.75"}
    learningRate: "0.25"
    weightDecay: "0.125"
    maxGradNorm: "1.75"
    clip: {low: "0.375", high: "0.625"}
    kl: {coefficient: "0.875", target: "0.03125"}
    entropyCoefficient: "0.015625"
    correction:
      cap: "2.25"
      band: {low: "0.265625", high: "3.0625"}
      sequenceBand: {low: "0.28125", high: "3.125"}
      veto: "0.0078125"
    parameters:
      {dualClip: "1.4375", gamma: "0.96875", overlongBuffer: "0.34375", overlongPenalty: "0.40625",
       gaeLambda: "0.953125", valueClip: "0.1875", valueRegularization: "0.00390625", criticLearningRateScale: "3.25"}
  rollout:
    image: marked.example/rollout
    resources: {requests: {marked.example/r-request: 3}, limits: {marked.example/r-limit: 4}}
    template:
      env:
        - {name: MARKED_ROLLOUT, value: marked-rollout-value}
        - {name: MARKED_SECRET, valueFrom: {secretKeyRef: {name: marked-env-secret, key: marked-env-key}}}
      annotations: {marked-r-annotation: marked-r-annotation-value}
      nodeSelector: {marked-r-node: marked-r-node-value}
      tolerations: [{key: marked-r-taint, value: marked-r-taint-value}]
  trainer:
    lora: {targets: marked_layer}
    image: marked.example/trainer
    resources: {requests: {marked.example/t-request: 5}, limits: {marked.example/t-limit: 6}}
    template:
      env:
        - {name: MARKED_TRAINER, value: marked-trainer-value}
        - {name: MARKED_SECRET, valueFrom: {secretKeyRef: {name: marked-t-secret, key: marked-t-key}}}
      annotations: {marked-t-annotation: marked-t-annotation-value}
      nodeSelector: {marked-t-node: marked-t-node-value}
      tolerations: [{key: marked-t-taint, value: marked-t-taint-value}]
  evaluation:
    sets:
      - name: marked-evaluation
        uri: s3://marked/evaluation.jsonl
        fields: {prompt: marked-e-column, answer: marked-e-answer}
        temperature: "0.5"
      - {generator: reasoning-gym/marked_evaluation, parameters: {marked-ep: marked-ep-value}, limit: 3}
  checkpoint: {resumeFrom: s3://marked/checkpoint}
  store:
    uri: s3://marked/store
    endpoint: https://marked.example
    region: marked-region
    secretRef: {name: marked-store-secret}
  output: {uri: s3://marked-output/model}
  scheduling:
    serviceAccountName: allowed-account
    priorityClassName: marked-priority
    nodeSelector: {marked-node: marked-node-value}
    tolerations: [{key: marked-taint, value: marked-taint-value}]
    topologyKey: marked-topology
"""
"""Every field that takes free text, each with a text of its own."""

REACHING = {
    "metadata.name": "names of children, and labels",
    "metadata.namespace": "the namespace of every child",
    "metadata.uid": "a label and the owner reference",
    "spec.model.secretRef.name": "environment, by secretKeyRef",
    "spec.rewards.name": "names of volumes, mounts and reward models, and labels",
    "spec.environment.from.configMap": "a volume, by ConfigMap",
    "spec.rewards.from.configMap": "a volume, by ConfigMap",
    "spec.rewards.model.resources.requests": "resources",
    "spec.rewards.model.resources.limits": "resources",
    "spec.rollout.image": "image",
    "spec.rollout.resources.requests": "resources",
    "spec.rollout.resources.limits": "resources",
    "spec.rollout.template.env.name": "environment",
    "spec.rollout.template.env.value": "environment",
    "spec.rollout.template.env.valueFrom.secretKeyRef.name": "environment, by secretKeyRef",
    "spec.rollout.template.env.valueFrom.secretKeyRef.key": "environment, by secretKeyRef",
    "spec.rollout.template.annotations": "annotations of pods",
    "spec.rollout.template.nodeSelector": "nodeSelector",
    "spec.rollout.template.tolerations.key": "tolerations",
    "spec.rollout.template.tolerations.value": "tolerations",
    "spec.trainer.image": "image",
    "spec.trainer.resources.requests": "resources",
    "spec.trainer.resources.limits": "resources",
    "spec.trainer.template.env.name": "environment",
    "spec.trainer.template.env.value": "environment",
    "spec.trainer.template.env.valueFrom.secretKeyRef.name": "environment, by secretKeyRef",
    "spec.trainer.template.env.valueFrom.secretKeyRef.key": "environment, by secretKeyRef",
    "spec.trainer.template.annotations": "annotations of pods",
    "spec.trainer.template.nodeSelector": "nodeSelector",
    "spec.trainer.template.tolerations.key": "tolerations",
    "spec.trainer.template.tolerations.value": "tolerations",
    "spec.store.secretRef.name": "environment, by secretKeyRef",
    "spec.scheduling.serviceAccountName": "serviceAccountName, from an allow-list",
    "spec.scheduling.priorityClassName": "priorityClassName",
    "spec.scheduling.nodeSelector": "nodeSelector",
    "spec.scheduling.tolerations.key": "tolerations",
    "spec.scheduling.tolerations.value": "tolerations",
    "spec.scheduling.topologyKey": "the trainer's affinity to itself",
}
"""Fields whose text stands in a child outside run.json, and where. A new one has to be thought about, here."""


def is_map(node: dict) -> bool:
    """An object whose keys the user chooses."""
    return node.get("additionalProperties", False) is not False


def texts(value, node: dict, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """(path without positions, text) of every string of a resource; a map's keys and values are texts of the map."""
    if isinstance(value, str):
        yield ".".join(path), value
    elif isinstance(value, list):
        for item in value:
            yield from texts(item, node["items"], path)
    elif isinstance(value, dict) and is_map(node):
        yield from ((".".join(path), str(text)) for entry in value.items() for text in entry)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from texts(item, node["properties"][key], (*path, key))


def free_texts(node: dict, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Path of every field of the schema that takes text of the user's choice."""
    if "items" in node:
        yield from free_texts(node["items"], path)
    elif is_map(node) or (node.get("type") == "string" and not {"enum", "const"} & node.keys()):
        yield ".".join(path)
    for name, child in node.get("properties", {}).items():
        yield from free_texts(child, (*path, name))


MARKED_VALUE = yaml.safe_load(MARKED)
MARKED_JOB = RLJob.model_validate(MARKED_VALUE)
REPLAY_VALUE = {
    **MARKED_VALUE,
    "spec": {
        **MARKED_VALUE["spec"],
        "data": {"replayFrom": {"uri": "s3://marked/replay", "where": "set = 'marked-filter'"}},
    },
}
"""What has no place beside prompts."""
REPLAY_JOB = RLJob.model_validate(REPLAY_VALUE)


def pods_of(found: list[dict]) -> list[dict]:
    return [child["spec"]["template"] for child in found if child["kind"] in ("Deployment", "Job")]


def test_the_marked_job_sets_every_field_that_takes_text():
    set_ones = {path for value in (MARKED_VALUE, REPLAY_VALUE) for path, _ in texts(value, schema.tree())}
    assert set(free_texts(schema.tree())) - set_ones == set()


def test_stored_samples_reach_run_json_alone():
    found = children(REPLAY_JOB, run_id="run", platform=CLUSTER)
    shown = json.dumps([child for child in found if child["kind"] != "ConfigMap"])
    assert "marked/replay" not in shown
    assert "marked-filter" not in shown


def test_no_field_reaches_a_child_but_those_thought_about():
    found = children(MARKED_JOB, run_id="run", platform=CLUSTER)
    shown = json.dumps([child for child in found if child["kind"] != "ConfigMap"])
    reaching = {
        path for path, text in texts(MARKED_VALUE, schema.tree()) if f'"{text}' in shown and "marked" in text.lower()
    }
    reaching |= {"spec.scheduling.serviceAccountName"}
    assert reaching - REACHING.keys() == set(), "a new way into a pod: add it to REACHING and to ATTACKS"
    assert REACHING.keys() - reaching == set()


ALLOWED_POD = {
    "affinity", "automountServiceAccountToken", "containers", "enableServiceLinks", "initContainers", "nodeSelector",
    "priorityClassName", "restartPolicy", "securityContext", "serviceAccountName", "subdomain",
    "terminationGracePeriodSeconds", "tolerations", "volumes",
}  # fmt: skip
ALLOWED_CONTAINER = {
    "args", "command", "env", "image", "lifecycle", "livenessProbe", "name", "ports", "readinessProbe", "resources",
    "securityContext", "startupProbe", "terminationMessagePolicy", "volumeMounts",
}  # fmt: skip
KINDS = {"ConfigMap", "Deployment", "Job", "NetworkPolicy", "PodDisruptionBudget", "Service"}


def harmless(found: list[dict], namespace: str) -> None:
    """What holds for the children of every job, whatever its tenant wrote."""
    assert {child["kind"] for child in found} <= KINDS
    assert {child["metadata"]["namespace"] for child in found} == {namespace}
    for template in pods_of(found):
        pod = template["spec"]
        assert set(pod) <= ALLOWED_POD
        assert pod["automountServiceAccountToken"] is False
        assert pod.get("serviceAccountName", "allowed-account") == "allowed-account"
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for volume in pod["volumes"]:
            assert set(volume) - {"name"} in ({"emptyDir"}, {"configMap"}), volume
        for container in [*pod["initContainers"], *pod["containers"]]:
            check_container(container)
    for child in found:
        if child["kind"] == "Service":
            assert set(child["spec"]) <= {"clusterIP", "ports", "publishNotReadyAddresses", "selector"}


def check_container(container: dict) -> None:
    assert set(container) <= ALLOWED_CONTAINER
    assert container["securityContext"] == UNPRIVILEGED
    assert container["command"][:2] == ["python", "-m"]
    assert not any("hostPort" in port or "hostIP" in port for port in container.get("ports", []))
    for entry in container["env"]:
        source = entry.get("valueFrom", {})
        assert set(source) <= {"fieldRef", "secretKeyRef"}
        assert set(source.get("secretKeyRef", {})) <= {"name", "key", "optional"}
    names = [entry["name"] for entry in container["env"]]
    assert len(set(names)) == len(names)


def test_the_children_of_the_marked_job_are_harmless():
    harmless(children(MARKED_JOB, run_id="run", platform=CLUSTER), "marked-namespace")


TEXTS = (
    "../../kube-system/secret", "kube-system/secret", "default:admin", "/etc/passwd", "hostPath:/", "a\nhostNetwork: 1",
    '"}, "hostPID": true, {"', "$(id)", "`id`", "; id", "--privileged", "x,y", "", " ", "a" * 2000, "\x00", "é", "{}",
    "node-role.kubernetes.io/control-plane", "system:masters", "latest@sha256:x", "file:///etc/shadow",
)  # fmt: skip


def replaced(value, wanted: str, text: str, path: tuple[str, ...] = ()):
    """`value` with every text at the path `wanted` replaced; of a map, each key and then each value."""
    here = ".".join(path)
    if isinstance(value, str):
        return text if here == wanted else value
    if isinstance(value, list):
        return [replaced(item, wanted, text, path) for item in value]
    if isinstance(value, dict):
        if here == wanted:
            return {text: "1"} | dict.fromkeys(value, text)
        return {key: replaced(item, wanted, text, (*path, key)) for key, item in value.items()}
    return value


def without_foreign_names(found: list[dict]) -> None:
    """References are names of objects of the job's own namespace: no path, no namespace, no list."""
    for template in pods_of(found):
        pod = template["spec"]
        names = [volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume]
        for container in [*pod["initContainers"], *pod["containers"]]:
            sources = [
                entry["valueFrom"]["secretKeyRef"]
                for entry in container["env"]
                if "secretKeyRef" in entry.get("valueFrom", {})
            ]
            names += [source["name"] for source in sources]
        names += [pod["priorityClassName"]] if "priorityClassName" in pod else []
        for name in names:
            assert all(letter.isalnum() or letter in "-." for letter in name), name
            assert name[0].isalnum()


@pytest.mark.parametrize("path", [path for path in REACHING if path.startswith("spec.")])
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_an_attack_through_a_field_is_refused_or_stays_what_it_says(path, text):
    value = replaced(MARKED_VALUE, path, text)
    try:
        attacked = RLJob.model_validate(value)
        found = children(attacked, run_id="run", platform=CLUSTER)
    except (pydantic.ValidationError, ValueError):
        return
    harmless(found, "marked-namespace")
    without_foreign_names(found)


SMUGGLED = {
    "spec.serviceAccountName": "admin",
    "spec.rollout.template.hostNetwork": True,
    "spec.rollout.template.hostPID": True,
    "spec.rollout.template.serviceAccountName": "admin",
    "spec.rollout.template.securityContext": {"privileged": True},
    "spec.rollout.template.volumes": [{"name": "x", "hostPath": {"path": "/"}}],
    "spec.rollout.template.containers": [{"name": "x", "image": "x"}],
    "spec.rollout.template.labels": {"miles.dev/job-uid": "another"},
    "spec.trainer.template.spec": {"hostNetwork": True},
    "spec.trainer.securityContext": {"privileged": True},
    "spec.trainer.command": ["sh"],
    "spec.rollout.args": ["--host=0.0.0.0"],
    "spec.store.secretRef.namespace": "kube-system",
    "spec.model.secretRef.namespace": "kube-system",
    "spec.rewards[0].from.namespace": "kube-system",
    "spec.rewards[0].from.secret": "admin",
    "spec.environment.from.namespace": "kube-system",
    "spec.environment.from.secret": "admin",
    "spec.rollout.template.env[0].valueFrom.configMapKeyRef": {"name": "x", "key": "y"},
    "spec.rollout.template.env[0].valueFrom.fieldRef": {"fieldPath": "spec.serviceAccountName"},
    "spec.rollout.template.env[1].valueFrom.secretKeyRef.namespace": "kube-system",
    "spec.scheduling.affinity": {"podAffinity": {}},
    "spec.scheduling.nodeName": "control-plane-0",
    "spec.scheduling.runtimeClassName": "privileged",
    "spec.scheduling.schedulerName": "mine",
}


@pytest.mark.parametrize("path", SMUGGLED)
def test_a_field_of_a_pod_that_an_rljob_does_not_have_is_refused(path):
    value = json.loads(json.dumps(MARKED_VALUE))
    *above, last = path.replace("[", ".").replace("]", "").split(".")
    place = value
    for step in above:
        place = place[int(step)] if step.isdigit() else place.setdefault(step, {})
    place[last] = SMUGGLED[path]
    with pytest.raises(pydantic.ValidationError, match="Extra inputs are not permitted"):
        RLJob.model_validate(value)


@pytest.mark.parametrize(
    "name", ["PET_NNODES", "MASTER_ADDR", "MILES_CONFIG", "MILES_STATUS_TOKEN", "RANK", "WORLD_SIZE"]
)
def test_variables_by_which_the_parts_of_a_job_trust_each_other_are_not_the_tenants(name):
    attacked = job(rollout={"template": {"env": [{"name": name, "value": "x"}]}})
    assert any("Miles sets this variable itself" in remedy for _, remedy in rules.broken(attacked))


ACCOUNTS = {
    "of the list": ("allowed-account", CLUSTER, True),
    "none": (None, CLUSTER, True),
    "another": ("admin", CLUSTER, False),
    "the default by name": ("default", CLUSTER, False),
    "with an empty list": ("allowed-account", Platform(), False),
    "rendered with one's own rights": ("admin", Platform(service_accounts=None), True),
}


@pytest.mark.parametrize(("name", "platform", "allowed"), ACCOUNTS.values(), ids=ACCOUNTS.keys())
def test_a_service_account_is_taken_from_an_allow_list(name, platform, allowed):
    wanted = job(scheduling={"serviceAccountName": name})
    if allowed:
        for template in pods_of(children(wanted, run_id="r", platform=platform)):
            assert template["spec"].get("serviceAccountName") == name
            assert template["spec"]["automountServiceAccountToken"] is False
    else:
        with pytest.raises(ValueError, match=f'spec.scheduling.serviceAccountName: got "{name}"'):
            children(wanted, run_id="r", platform=platform)


def test_the_command_line_refuses_what_is_smuggled_with_one_line(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(MARKED.replace("    tokenizer:", "    hostPath: /\n    tokenizer:"))
    with pytest.raises(manifest.Invalid) as refused:
        manifest.load(str(file))
    assert any("spec.model.hostPath" in line for line in refused.value.lines)
