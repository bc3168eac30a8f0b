"""The CustomResourceDefinition on a real API server: taken by a plain apply, defaults, rules in the words of the
command line, edits by the table of operators.edits, columns, scale, and objects stored by earlier releases."""

import copy
import json
import pathlib
import re

import pytest
import yaml
from pydantic.alias_generators import to_camel

from operators import cel, crd, edits, manifest
from pipeline.algorithms.registry import ALGORITHMS
from tests.judge import Judge, install
from tests.kubeapi import ApiError
from tests.test_spec import EVERYTHING, MINIMAL

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(120)]
TESTS = pathlib.Path(__file__).parent
SAMPLES = sorted((TESTS.parent / "manifests/samples").glob("*.yaml"))
STORED = sorted((TESTS / "stored").glob("*.yaml"))
BROKEN = sorted((TESTS / "broken").glob("*.yaml"))
STALLED = {"replay-where"}
"""What no rule of a schema can tell: stored all the same, such a job is Stalled, InvalidSpec."""
GPU = "nvidia.com/gpu"
GENERATOR = {"generator": "reasoning-gym/a"}
REWARD = {"name": "a", "library": "length"}


@pytest.fixture(scope="module")
def plane(control_plane):
    install(control_plane.api, crd.definition())
    return control_plane


@pytest.fixture(scope="module")
def judge(plane):
    return Judge(plane.api)


def job(text=MINIMAL, **changes):
    """The job in `text` with fields below spec set anew: a__b=1 sets spec.a.b, None removes it."""
    value = yaml.load(text, yaml.CSafeLoader)
    for path, item in changes.items():
        *above, last = path.split("__")
        place = value["spec"]
        for step in above:
            place = place.setdefault(step, {})
        place[last] = item
    return value


def test_a_plain_apply_of_the_manifest_works_and_a_second_one_changes_nothing(plane):
    file = str(TESTS.parent / "manifests/crd/rljobs.yaml")
    assert plane.kubectl("apply", "-f", file).returncode == 0
    second = plane.kubectl("apply", "-f", file)
    assert "unchanged" in second.stdout, second.stderr


@pytest.mark.parametrize("path", SAMPLES + STORED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_samples_of_today_and_of_earlier_releases_apply_without_a_warning(plane, path):
    result = plane.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", str(path))
    assert (result.returncode, result.stderr) == (0, ""), result.stdout


@pytest.mark.parametrize("path", BROKEN, ids=lambda path: path.stem)
def test_a_file_that_the_command_line_refuses_is_refused_by_the_server(judge, path):
    stored, reason = judge.verdict(path.read_text())
    assert (bool(stored), bool(reason)) == ((True, False) if path.stem in STALLED else (False, True)), reason


def wrong_parameters():
    """Each own parameter of an algorithm, given to one that lacks it."""
    values = {bool: True, int: 3, float: "0.5"}
    for name, default in {
        name: value for each in ALGORITHMS.values() for name, value in each.parameters.items()
    }.items():
        stranger = next(other for other, each in ALGORITHMS.items() if name not in each.parameters)
        yield job(
            algorithm__type=stranger,
            algorithm__groupSize=4,
            algorithm__parameters={to_camel(name): values[type(default)]},
        )


BREAKS = [
    job(model__trustRemoteCode=True),
    job(data__sets=[{"name": "a"}]),
    job(data__sets=[GENERATOR, GENERATOR]),
    job(data__replayFrom={"uri": "s3://team-a/miles/x"}),
    job(data={"replayFrom": {"uri": "s3://team-a/miles/x"}}, rewards=[REWARD]),
    job(data={"replayFrom": {"uri": "s3://team-a/miles/x"}}, output={"uri": "s3://team-a/miles/x/model"}),
    job(trainer__nodes=4, trainer__modelReplicas=3),
    job(trainer__offload="reference"),
    job(trainer__offload="reference", trainer__lora={}, algorithm__kl={"coefficient": "0.1"}),
    job(data__sets=[{"uri": "s3://data/a.csv"}], rewards=[REWARD]),
    job(data__sets=[{"uri": "s3://data/_.jsonl"}], rewards=[REWARD]),
    job(data__sets=[{"uri": "s3://data/a.jsonl"}]),
    job(data__sets=[GENERATOR | {"parameters": {"seed": 5}}]),
    job(evaluation__sets=[GENERATOR]),
    job(data__sets=[{"uri": "s3://data/a.jsonl"}], rewards=[{"name": "a", "library": "generator"}]),
    job(rewards=[{"name": "a"}]),
    job(rewards=[REWARD | {"from": {"configMap": "x"}}]),
    job(rewards=[{"name": "a", "library": "environment"}]),
    job(
        environment={"library": "reasoning-gym"},
        rewards=[{"name": "a", "library": "environment", "normalize": True}],
    ),
    job(environment={"maxTurns": 2}),
    job(environment={"class": "a:B", "from": {"configMap": "x"}}),
    job(environment={"library": "reasoning-gym"}, data__sets=[{"uri": "s3://data/a.jsonl"}]),
    *(
        job(algorithm__type=name, algorithm__groupSize=1)
        for name, each in ALGORITHMS.items()
        if each.minimum_group_size > 1
    ),
    *wrong_parameters(),
    job(algorithm__kl={"target": "0.02"}),
    job(trainer__lora={"targets": "q_proj,lm_head"}),
    job(algorithm__updatesPerStep=3),
    job(algorithm__warmupSteps=201),
    job(algorithm__type="ppo", algorithm__parameters={"criticWarmupSteps": 200}),
    job(algorithm__kl={"coefficient": "0.1", "target": "0.02", "horizon": 127}),
    job(algorithm__correction={"bypass": True, "veto": "0.1"}),
    job(algorithm__correction={"bypass": True, "sequenceBand": {}}),
    job(algorithm__correction={"bypass": True, "type": "masked-is"}),
    job(algorithm__kl={"estimator": "k1"}),
    job(algorithm__sampling={"maxNewTokens": 4096}),
    job(rollout__autoscale={"min": 3, "max": 2}),
    job(rollout__autoscale={"min": 2, "max": 3}),
    job(rollout__resources={"limits": {GPU: 2}}),
    job(rollout__adapterLoading="hot"),
    job(rollout__resources={"limits": {"cpu": "2k"}}),
    job(trainer__resources={"limits": {GPU: "1.5"}}),
    job(trainer__resources={"requests": {GPU: 1}}),
    job(trainer__resources={"requests": {"memory": "2Gi"}, "limits": {"memory": "2000M"}}),
    job(scheduling__tolerations=[{}]),
    job(scheduling__tolerations=[{"key": "a", "operator": "Exists", "value": "b"}]),
    job(scheduling__tolerations=[{"key": "a", "tolerationSeconds": 5}]),
    job(trainer__resources={"limits": {GPU: "2"}}, trainer__processesPerNode=4),
    job(trainer__maxTokensPerMicroBatch=64),
    job(trainer__template={"env": [{"name": "RANK", "value": ""}]}),
    job(trainer__template={"env": [{"name": "A"}]}),
    job(store__uri="s3://team-a/../x"),
    job(checkpoint__resumeFrom="s3://team-a/../x"),
    job(output={"uri": "s3://team-a/miles/x"}),
    job(output={"uri": "s3://team-a"}),
    job(output={"uri": "s3://models/base/x"}, model={"uri": "s3://models/base"}),
    job(output={"uri": "s3://models"}, model={"uri": "s3://models/base"}),
    job(model={"uri": "file:///models/base", "revision": "main"}),
    job(output={"uri": "s3://models/x", "what": "best"}),
    job() | {"metadata": {"name": "a" * 46}},
    job() | {"metadata": {"name": "1a"}},
]
"""One for each rule of operators.cel.RULES; its words are those of the command line."""
OTHER_WORDS = {
    "another set has the same name; give each one a name of its own",
    "its name, or that of its file, cannot be a set's name; give it one: name: …",
    *(rule.message for rules in cel.RULES.values() for rule in rules if rule.message.endswith("has this parameter")),
}
"""Rules that cannot name the culprit in CEL."""


@pytest.mark.parametrize("value", BREAKS, ids=lambda value: "")
def test_a_broken_rule_is_told_in_the_words_of_the_command_line(judge, value):
    _, reason = judge.verdict(json.dumps(value))
    told = [message for message in _messages() if message in reason]
    assert told, reason
    _, faults = manifest.check(value)
    assert faults
    said = " ".join(fault.problem for fault in faults)
    assert set(told) <= OTHER_WORDS or any(message in said for message in told), (told, said)


def test_every_rule_has_a_job_above_that_breaks_it(judge):
    told = " ".join(judge.verdict(json.dumps(value))[1] for value in BREAKS)
    assert {message for message in _messages() if message not in told} == set()


def _messages() -> set[str]:
    return {rule.message for rules in cel.RULES.values() for rule in rules}


@pytest.fixture
def stored(plane, namespace):
    """A job that the server holds: running, or suspended; `change` tries an edit of it."""

    def create(suspend: bool, status=None):
        made = job(EVERYTHING, suspend=suspend, checkpoint__resumeFrom="s3://team-a/miles/x")
        made["metadata"] = {"name": "a"}
        plane.api.create(made, namespace, fieldValidation="Strict")
        if status:
            plane.api.patch("RLJob", "a", namespace, {"status": status}, "status")

        def change(path: str, value) -> str:
            """The server's refusal; empty: the edit was taken."""
            body = value
            for step in reversed(path.split(".")):
                body = {step: body}
            try:
                plane.api.patch("RLJob", "a", namespace, body)
            except ApiError as error:
                return error.message
            return ""

        return change

    return create


EDITED = {
    "spec.managedBy": "another",
    "spec.model": {"revision": "x"},
    "spec.data": {"sets": [GENERATOR | {"parameters": {"a": 1}}]},
    "spec.environment": {"maxTurns": 3},
    "spec.algorithm.type": "grpo",
    "spec.algorithm.groupSize": 4,
    "spec.algorithm.promptsPerStep": 64,
    "spec.trainer.nodes": 3,
    "spec.trainer.processesPerNode": None,
    "spec.trainer.dtype": "float32",
    "spec.trainer.lora": {"alpha": 8},
    "spec.trainer.seed": 5,
    "spec.checkpoint.resumeFrom": None,
    "spec.store": {"region": "eu"},
}
REFUSED = [path for path, row in edits.TABLE.items() if row[0] == edits.REFUSED]
SUSPENDED = [path for path, row in edits.TABLE.items() if row[0] == edits.SUSPENDED]


@pytest.mark.parametrize("suspended", [False, True], ids=["running", "suspended"])
def test_the_table_of_edits_is_what_the_server_refuses(stored, suspended):
    change = stored(suspended)
    for path in REFUSED:
        assert f"cannot change: {edits.TABLE[path][1]}" in change(path, copy.deepcopy(EDITED[path])), path
    for path in SUSPENDED:
        said = change(path, copy.deepcopy(EDITED[path]))
        assert (said == "") if suspended else ("set suspend: true first" in said), f"{path}: {said}"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.suspend", True),
        ("spec.algorithm.learningRate", "1e-5"),
        ("spec.rollout.replicas", 5),
        ("spec.rollout.resources", {"limits": {"memory": "64Gi"}}),
        ("spec.trainer.image", "registry/miles:2"),
        ("spec.evaluation.everySteps", 10),
        ("spec.runPolicy.maxRestarts", 9),
        ("metadata.labels", {"team": "a"}),
    ],
)
def test_other_edits_are_taken_while_the_job_runs(stored, path, value):
    assert stored(suspend=False)(path, value) == ""


def test_the_adapter_of_a_job_that_has_started_stays_what_it_was_even_while_suspended(stored):
    change = stored(suspend=True, status={"startTime": "2026-01-01T00:00:00Z"})
    assert "its checkpoints hold this adapter" in change("spec.trainer.lora", {"rank": 8})
    assert "its checkpoints hold this adapter" in change("spec.trainer.lora", None)
    assert change("spec.trainer.lora", {"alpha": 8}) == ""


def test_a_job_says_how_it_is_doing_in_the_columns(plane, namespace, stored):
    stored(suspend=False)
    ready = {
        "type": "Ready",
        "status": "True",
        "reason": "Training",
        "message": "",
        "observedGeneration": 1,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    status = {
        "phase": "Running",
        "restarts": 1,
        "conditions": [ready],
        "training": {"step": 412, "totalSteps": 1000, "progress": "412/1000", "policyVersion": "t2-s412"},
        "rollout": {"desired": 4, "ready": 4, "summary": "4/4", "selector": "a=b"},
    }
    plane.api.patch("RLJob", "a", namespace, {"status": status}, "status")
    lines = plane.kubectl("get", "rlj", "-n", namespace).stdout.splitlines()
    assert lines[0].split() == ["NAME", "PHASE", "READY", "REASON", "STEP", "POLICY", "ROLLOUTS", "RESTARTS", "AGE"]
    assert lines[1].split()[:-1] == ["a", "Running", "True", "Training", "412/1000", "t2-s412", "4/4", "1"]
    assert "QUEUE" in plane.kubectl("get", "rlj", "-n", namespace, "-o", "wide").stdout


def test_kubectl_scale_changes_the_number_of_workers_within_its_bounds(plane, namespace, stored):
    stored(suspend=False)
    assert plane.kubectl("scale", "rlj/a", "--replicas=7", "-n", namespace).returncode == 0
    assert plane.api.get("RLJob", "a", namespace)["spec"]["rollout"]["replicas"] == 7
    refused = plane.kubectl("scale", "rlj/a", "--replicas=17", "-n", namespace)
    assert "must lie within autoscale" in refused.stderr


def test_a_status_with_an_unknown_field_or_value_is_not_stored(plane, namespace, stored):
    stored(suspend=False)
    with pytest.raises(ApiError, match="Unsupported value"):
        plane.api.patch("RLJob", "a", namespace, {"status": {"attempt": {"cause": "Boredom"}}}, "status")
    plane.api.patch("RLJob", "a", namespace, {"status": {"phase": "Running", "nonsense": 1}}, "status")
    assert plane.api.get("RLJob", "a", namespace)["status"] == {"phase": "Running"}


@pytest.mark.parametrize(
    "forged",
    [
        {"startTime": "2026-01-01t00:00:00z"},
        {"startTime": "2026-01-01T00:00:00+99:99"},
        {"startTime": "2026-02-30T00:00:00Z"},
        {"attempt": {"notBefore": "2026-01-01T00:00:00.5Z"}},
        {"training": {"rewards": ["0.5", "n/a"]}},
        {"metrics": [{"name": "reward/mean", "value": "NaN"}]},
        {"training": ["step", 3]},
        {"metrics": {"reward/mean": "0.5"}},
        {"conditions": [{"type": "Complete", "status": "True"}]},
    ],
)
def test_a_status_that_its_readers_could_not_read_is_refused(plane, namespace, stored, forged):
    stored(suspend=False)
    with pytest.raises(ApiError, match=r"Invalid value|Required value"):
        plane.api.patch("RLJob", "a", namespace, {"status": forged}, "status")


def test_explain_reads_well(plane):
    text = plane.kubectl("explain", "rljob.spec.trainer").stdout
    assert "The processes that train" in text
    assert re.search(r"dtype\t<string>\n  enum: auto, float32, bfloat16\n    Type of the weights in forward", text)
    assert "(s3|" not in plane.kubectl("explain", "rljob.spec.store").stdout


def test_the_fields_that_the_server_fills_in_are_the_defaults_of_the_spec(judge):
    (made,), _ = judge.verdict(MINIMAL)
    assert made["spec"]["trainer"] == {
        "nodes": 1,
        "dtype": "auto",
        "seed": 0,
        "compile": False,
        "activationCheckpointing": False,
        "modelReplicas": 1,
        "offload": "none",
        "stopGraceSeconds": 25,
    }
    read, _ = manifest.check(made)
    assert read is not None
    assert read.spec == manifest.check(yaml.safe_load(MINIMAL))[0].spec
