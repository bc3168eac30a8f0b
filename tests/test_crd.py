"""The CustomResourceDefinition: made from the spec, up to date in manifests/, small, and complete."""

import json
import pathlib
import re

import pytest
import yaml

from operators import cel, crd, schema
from operators.spec.status import RLJobStatus

ROOT = pathlib.Path(__file__).parent.parent
VERSION = crd.definition()["spec"]["versions"][0]
RESOURCE = VERSION["schema"]["openAPIV3Schema"]


def nodes(node, path=""):
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}".removeprefix("."))
    if "items" in node:
        yield from nodes(node["items"], f"{path}[]")
    if isinstance(node.get("additionalProperties"), dict):
        yield from nodes(node["additionalProperties"], f"{path}{{}}")


NODES = dict(nodes(RESOURCE))


def test_the_manifest_is_what_the_spec_says_now():
    assert (ROOT / "manifests/crd/rljobs.yaml").read_text() == crd.text(), "run make manifests"


def test_a_plain_kubectl_apply_can_hold_it_in_an_annotation():
    assert len(json.dumps(crd.definition())) < crd.LARGEST * 0.9


def test_every_field_of_the_spec_and_of_the_status_is_in_it():
    for name, tree in (("spec", schema.at(("spec",))), ("status", schema.of(RLJobStatus))):
        wanted = {path for path, _ in nodes(tree, name)}
        assert wanted <= NODES.keys()


def test_it_is_structural():
    for path, node in NODES.items():
        assert (
            not {"$ref", "allOf", "oneOf", "patternProperties", "const", "clusterOnly", "remedy", "between"}
            & node.keys()
        )
        assert ("type" in node) != ("x-kubernetes-int-or-string" in node), path
        assert not {"properties", "additionalProperties"} <= node.keys(), path


def test_only_free_parameters_keep_fields_that_nobody_knows():
    free = {path for path, node in NODES.items() if "x-kubernetes-preserve-unknown-fields" in node}
    assert free == {
        "spec.data.sets[].parameters",
        "spec.evaluation.sets[].parameters",
        "spec.environment.parameters",
        "spec.rewards[].parameters",
    }


def test_every_list_says_how_it_merges():
    kinds = {path: node["x-kubernetes-list-type"] for path, node in NODES.items() if node.get("type") == "array"}
    assert {path for path, kind in kinds.items() if kind == "map"} == set(crd.MAP_KEYS)
    for path, key in crd.MAP_KEYS.items():
        assert key in NODES[f"{path}[]"]["required"]


def test_defaults_are_those_of_the_spec():
    assert NODES["spec.rollout.replicas"]["default"] == 1
    assert NODES["spec.rollout"]["default"]["maxModelLen"] == 4096
    assert NODES["spec.algorithm.sampling"]["default"] == {"temperature": "1", "maxNewTokens": 512}
    for path in ("spec.trainer.lora", "spec.rewards", "spec.rollout.resources", "spec.algorithm.clip"):
        assert "default" not in NODES[path], path
    assert not any("default" in node for path, node in NODES.items() if path.startswith("status"))


def test_a_rule_stands_only_where_the_schema_has_a_place_for_it():
    assert {*cel.RULES, *cel.EDITS, *cel.SHAPES} <= NODES.keys()
    for path in cel.RULES.keys() | cel.EDITS.keys():
        wanted = {rule.message for rule in (*cel.RULES.get(path, ()), *cel.EDITS.get(path, ()))}
        assert wanted <= {rule["message"] for rule in NODES[path]["x-kubernetes-validations"]}


def test_rules_come_after_defaults_so_only_fields_without_one_are_asked_for():
    for path, node in NODES.items():
        for rule in node.get("x-kubernetes-validations", ()):
            for field in re.findall(r"has\(self\.(\w+)\)", rule["rule"]):
                assert "default" not in node["properties"][field.strip("_")], f"{path}: {field}"


def test_strings_whose_pattern_has_a_remedy_are_refused_with_it():
    rules = NODES["spec.model.uri"]["x-kubernetes-validations"]
    assert [rule["message"] for rule in rules] == [schema.at(("spec", "model", "uri"))["remedy"]]


def test_texts_are_whole_sentences_on_one_line():
    for path, node in NODES.items():
        text = node.get("description", "")
        assert "\n" not in text and "  " not in text, path


@pytest.mark.parametrize("path", [path for _, _, path in crd.COLUMNS if path.startswith(".status")])
def test_a_printer_column_reads_a_field_of_the_status(path):
    plain = re.sub(r"\[\?\(.*\)\]", "[]", path).removeprefix(".")
    assert plain in NODES


def test_scaling_reads_and_writes_fields_that_exist():
    scale = VERSION["subresources"]["scale"]
    assert {path.removeprefix(".") for path in scale.values()} <= NODES.keys()


def test_the_text_is_yaml_without_aliases():
    assert yaml.safe_load(crd.text()) == crd.definition()
    assert not re.search(r"^\s*[^'\"#]*: [&*]\w+", crd.text(), re.MULTILINE)
