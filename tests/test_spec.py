"""The RLJob's fields: examples, defaults, and that all of it can become a CRD."""

import pydantic
import pytest
import yaml

from operators import explain, rules, schema
from operators.spec import RLJob
from operators.spec.fields import Model
from pipeline.algorithms.registry import ALGORITHMS

MINIMAL = """\
apiVersion: miles.dev/v1alpha1
kind: RLJob
metadata:
  name: arithmetic
spec:
  model:
    uri: hf://HuggingFaceTB/SmolLM2-135M-Instruct
  data:
    sets:
      - generator: reasoning-gym/chain_sum
  algorithm:
    type: grpo
    totalSteps: 200
  store:
    uri: s3://team-a/miles
"""
EVERYTHING = r"""
apiVersion: miles.dev/v1alpha1
kind: RLJob
metadata:
  name: math-7b
  labels: {kueue.x-k8s.io/queue-name: research}
spec:
  suspend: false
  model:
    uri: s3://models/qwen2.5-7b-instruct
    revision: "2025-09-01"
    trustRemoteCode: false
  data:
    systemPrompt: Think step by step, then give the answer in \boxed{}.
    seed: 7
    sets:
      - {name: gsm8k, uri: s3://data/gsm8k/train.parquet, fields: {prompt: question, answer: answer}, weight: "1"}
      - {name: sums, generator: reasoning-gym/chain_sum, parameters: {max_terms: 4}, weight: "0.2"}
  rewards:
    - {name: correct, library: math-verify, weight: "1", timeoutSeconds: 5, onError: dropSample}
    - {name: brief, function: rewards.py:brevity, from: {configMap: math-rewards}, weight: "0.1"}
    - {name: helpful, model: {uri: s3://models/rm-1b, replicas: 1}, weight: "0.3"}
  algorithm:
    type: ppo
    totalSteps: 1000
    promptsPerStep: 128
    groupSize: 8
    maxStaleness: 2
    sampling: {temperature: "1.0", maxNewTokens: 2048}
    learningRate: "1e-6"
    clip: {low: "0.2", high: "0.28"}
    kl: {coefficient: "0.01", placement: loss, estimator: k3, target: "0.02", horizon: 20000}
    correction: {type: masked-is, cap: "2", band: {low: "0.5"}, sequenceBand: {high: "3"}, veto: "1e-4"}
    entropyCoefficient: "0.001"
    aggregation: token-mean
    parameters: {gaeLambda: "0.95", valueClip: "0.2", criticWarmupSteps: 10}
  rollout:
    replicas: 4
    autoscale: {min: 1, max: 16}
    tensorParallelSize: 1
    resources: {limits: {nvidia.com/gpu: 1}}
    spot: true
  trainer:
    nodes: 2
    processesPerNode: 8
    resources: {limits: {nvidia.com/gpu: 8}}
    lora: {rank: 32, alpha: 64, targets: all-linear}
    compile: true
    activationCheckpointing: true
    maxTokensPerMicroBatch: 16384
  evaluation:
    everySteps: 50
    sets: [{name: aime, uri: s3://data/aime24.jsonl, samples: 16}]
  checkpoint: {everySteps: 20, keepLast: 3}
  store:
    uri: s3://team-a/miles
    secretRef: {name: team-a-s3}
    retention: window
  output: {uri: s3://team-a/models/math-7b, what: best}
  runPolicy: {maxRestarts: 5, progressDeadlineSeconds: 3600, ttlSecondsAfterFinished: 86400}
"""


def job(text: str = MINIMAL, **spec) -> RLJob:
    """The RLJob in `text`, with some fields of its spec replaced."""
    value = yaml.safe_load(text)
    value["spec"] |= spec
    return RLJob.model_validate(value)


@pytest.mark.parametrize("text", [MINIMAL, EVERYTHING], ids=["minimal", "everything"])
def test_the_examples_of_the_reference_are_valid(text):
    assert list(rules.broken(job(text))) == []


def test_a_job_survives_a_round_trip_by_alias():
    for text in (MINIMAL, EVERYTHING):
        assert RLJob.model_validate(job(text).model_dump(by_alias=True)) == job(text)


def test_the_least_job_has_the_defaults_a_careful_colleague_would_choose():
    spec = job().spec
    assert (spec.algorithm.group_size, spec.algorithm.max_staleness) == (8, 1)
    assert (spec.rollout.replicas, spec.trainer.nodes, spec.trainer.lora) == (1, 1, None)
    assert (spec.checkpoint.every_steps, spec.store.retention, spec.output) == (20, "all", None)


def test_values_are_never_converted():
    for wrong in ({"totalSteps": "200"}, {"totalSteps": 200.0}, {"totalSteps": True}, {"learningRate": 1}):
        with pytest.raises(pydantic.ValidationError):
            job(algorithm={"type": "grpo", "totalSteps": 200} | wrong)


def test_an_own_parameter_of_the_algorithm_without_a_value_is_absent_and_an_unknown_one_refused():
    spec = {"type": "grpo", "totalSteps": 200, "parameters": {"dualClip": None}}
    assert job(algorithm=spec).spec.algorithm.parameters == {}
    assert list(rules.broken(job(algorithm=spec | {"parameters": {"lambda": None}})))


def test_a_generator_has_no_seed_of_its_own_unless_it_has_no_value():
    def seeded(seed):
        return job(data={"sets": [{"generator": "reasoning-gym/a", "parameters": {"seed": seed, "b": None}}]})

    assert seeded(None).spec.data.sets[0].parameters == {"b": None}
    assert [remedy for _, remedy in rules.broken(seeded(5))] == ["use data.seed, which all sets follow"]


def test_only_what_is_used_and_passed_over_is_noticed():
    assert rules.passed_over(job()) == []
    assert {schema.dotted(notice.path): notice.harmless for notice in rules.passed_over(job(EVERYTHING))} == {
        'metadata.labels["kueue.x-k8s.io/queue-name"]': True,
    }


STORED = {"replayFrom": {"uri": "s3://team-a/miles/default/a/1", "where": "reward > 0.5"}}


@pytest.mark.parametrize(
    ("spec", "paths"),
    [
        ({"data": STORED}, []),
        ({"data": {}}, ["spec.data"]),
        ({"data": STORED | {"sets": [{"generator": "reasoning-gym/chain_sum"}]}}, ["spec.data"]),
        ({"data": STORED, "rewards": [{"name": "a", "library": "math-verify"}]}, ["spec.rewards"]),
        ({"data": STORED, "environment": {"library": "reasoning-gym"}}, ["spec.environment"]),
        (
            {"data": STORED, "evaluation": {"sets": [{"uri": "s3://data/a.jsonl"}]}},
            ["spec.evaluation.sets"],
        ),
        ({"data": STORED, "output": {"uri": "s3://team-a/miles/default/a/1/m"}}, ["spec.output.uri"] * 2),
        ({"data": {"replayFrom": {"uri": "s3://team-a/../b"}}}, ["spec.data.replayFrom.uri"]),
        ({"data": {"replayFrom": {"uri": "s3://team-a/b", "where": "reword > 1"}}}, ["spec.data.replayFrom.where"]),
    ],
)
def test_stored_samples_stand_in_for_prompts_rewards_and_evaluation(spec, paths):
    assert [schema.dotted(path) for path, _ in rules.broken(job(**spec))] == paths


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suspend", True),
    ],
)
def test_a_field_that_would_change_the_run_keeps_it_from_starting(field, value):
    assert [notice.harmless for notice in rules.passed_over(job(**{field: value}), local=True)] == [False]


def test_what_only_the_operator_acts_on_is_noticed_by_a_local_run_alone():
    paused = job(
        suspend=True,
        managedBy="another",
        rollout={"spot": True, "autoscale": {"min": 1, "max": 2}},
        runPolicy={"ttlSecondsAfterFinished": 60, "cleanup": "None"},
    )
    assert rules.passed_over(paused) == []
    assert [str(notice).partition(":")[0] for notice in rules.passed_over(paused, local=True)] == [
        "spec.suspend",
        "spec.managedBy",
        "spec.rollout.autoscale",
        "spec.rollout.spot",
        "spec.runPolicy.ttlSecondsAfterFinished",
        "spec.runPolicy.cleanup",
    ]
    assert all("only in a cluster" in str(notice) for notice in rules.passed_over(paused, local=True))


def test_every_algorithm_has_a_name_in_the_schema():
    node = schema.at(("spec", "algorithm", "type"))
    assert node is not None
    assert node["enum"] == list(ALGORITHMS)


def nodes(node, path="spec"):
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    if "items" in node:
        yield from nodes(node["items"], f"{path}[]")
    if isinstance(node.get("additionalProperties"), dict):
        yield from nodes(node["additionalProperties"], f"{path}{{}}")


SPEC_NODES = list(nodes(schema.at(("spec",))))


def test_the_schema_is_structural_every_node_has_a_type_and_none_is_a_float():
    for path, node in SPEC_NODES:
        assert not {"$ref", "anyOf", "oneOf", "allOf", "patternProperties"} & node.keys(), path
        assert "x-kubernetes-int-or-string" in node or node["type"] in {
            "string",
            "integer",
            "boolean",
            "array",
            "object",
        }, path


def test_every_string_list_map_and_number_is_bounded():
    for path, node in SPEC_NODES:
        if "x-kubernetes-int-or-string" in node or "enum" in node or "const" in node:
            continue
        match node["type"]:
            case "string":
                assert "maxLength" in node, path
            case "array":
                assert "maxItems" in node, path
            case "integer":
                assert {"minimum", "maximum"} <= node.keys(), path
            case "object":
                assert "properties" in node or "maxProperties" in node, path


def test_every_field_is_documented():
    for path, node in SPEC_NODES:
        if not path.endswith(("[]", "{}")):
            assert node.get("description", "").endswith((".", ")")), path


def test_a_default_never_stands_in_a_field_that_needs_a_value():
    for path, node in SPEC_NODES:
        for name in node.get("required", []):
            assert "default" not in node["properties"][name], f"{path}.{name}"


def test_unknown_keys_are_refused_at_every_level():
    def models(cls):
        yield cls
        for below in cls.__subclasses__():
            yield from models(below)

    assert all(model.model_config["extra"] == "forbid" for model in models(Model))


def test_explain_shows_type_default_text_and_fields():
    text = explain.explain("spec.trainer")
    assert "FIELD:    spec.trainer <Object>" in text
    assert "  nodes <integer>\n    Pods, one a node.\n    from 1 to 512\n    default: 1" in text
    assert "one of: auto, float32, bfloat16" in text


def test_explain_goes_through_lists_and_names_what_is_required():
    assert "  name <string> (required)" in explain.explain("spec.rewards")
    assert "FIELD:    spec.data.sets.weight <string>" in explain.explain("spec.data.sets.weight")
    assert "<map[string]quantity>" in explain.explain("spec.rollout.resources")
    assert "spec <Object> (required)" in explain.explain("")


def test_explain_says_where_relative_files_start():
    assert "starts at the folder of the file that holds the spec" in " ".join(explain.explain("spec.store.uri").split())


def test_explain_suggests_the_field_that_was_meant():
    with pytest.raises(ValueError, match=r'^spec\.trainer\.loar: unknown field; did you mean "lora"\?$'):
        explain.explain("spec.trainer.loar")
