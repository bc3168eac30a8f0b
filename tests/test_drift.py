"""When a live object is applied again, and when not."""

import copy

import pytest

from operators import drift
from operators.children import children
from operators.resolve import Platform
from tests.test_spec import EVERYTHING, job

WANTED = {
    "kind": "Deployment",
    "metadata": {"name": "a", "labels": {"x": "1"}, "ownerReferences": [{"uid": "u", "controller": True}]},
    "spec": {
        "replicas": 2,
        "template": {
            "spec": {
                "containers": [
                    {
                        "name": "vllm",
                        "image": "miles:1",
                        "env": [{"name": "A", "value": "1"}, {"name": "EMPTY", "value": ""}],
                        "resources": {"limits": {"cpu": "1000m", "memory": "1024Mi"}},
                        "volumeMounts": [
                            {"name": "tmp", "mountPath": "/tmp", "subPath": "a"},
                            {"name": "tmp", "mountPath": "/other"},
                        ],
                    }
                ],
                "tolerations": [{"key": "gpu", "operator": "Exists"}],
            }
        },
    },
}


def live(change=lambda value: None) -> dict:
    """As the API server gives it back, after somebody's `change`."""
    value = copy.deepcopy(drift.marked(WANTED))
    container = value["spec"]["template"]["spec"]["containers"][0]
    value["metadata"] |= {"uid": "1", "resourceVersion": "7", "managedFields": []}
    value["metadata"]["labels"]["added-by-others"] = "1"
    value["spec"]["revisionHistoryLimit"] = 1
    container["resources"]["limits"] = {"cpu": "1", "memory": "1Gi"}
    container["env"][1] = {"name": "EMPTY"}
    container["imagePullPolicy"] = "IfNotPresent"
    value["status"] = {"readyReplicas": 1}
    change(value)
    return value


def container(value) -> dict:
    return value["spec"]["template"]["spec"]["containers"][0]


FOREIGN = {
    "nothing": lambda value: None,
    "a sidecar": lambda value: value["spec"]["template"]["spec"]["containers"].insert(0, {"name": "proxy"}),
    "a variable": lambda value: container(value)["env"].insert(0, {"name": "B", "value": "2"}),
    "another order": lambda value: container(value)["volumeMounts"].reverse(),
    "an owner": lambda value: value["metadata"]["ownerReferences"].append({"uid": "v"}),
}
OURS = {
    "replicas": lambda value: value["spec"].update(replicas=3),
    "replicas removed": lambda value: value["spec"].pop("replicas"),
    "image": lambda value: container(value).update(image="miles:2"),
    "a variable": lambda value: container(value)["env"][0].update(value="2"),
    "a variable removed": lambda value: container(value)["env"].pop(0),
    "a quantity": lambda value: container(value)["resources"]["limits"].update(cpu="2"),
    "a mount": lambda value: container(value)["volumeMounts"][0].update(subPath="b"),
    "a label": lambda value: value["metadata"]["labels"].pop("x"),
    "the owner": lambda value: value["metadata"].update(ownerReferences=[]),
    "a toleration added": lambda value: value["spec"]["template"]["spec"]["tolerations"].append({"key": "b"}),
    "a release with another wish": lambda value: value["metadata"]["annotations"].update({drift.APPLIED: "0"}),
}


@pytest.mark.parametrize("change", FOREIGN.values(), ids=FOREIGN.keys())
def test_what_others_add_is_left_alone(change):
    assert not drift.differs(live(change), drift.marked(WANTED))


@pytest.mark.parametrize("change", OURS.values(), ids=OURS.keys())
def test_a_change_of_our_own_fields_is_repaired(change):
    assert drift.differs(live(change), drift.marked(WANTED))


@pytest.mark.parametrize(
    ("one", "other"), [("500m", "0.5"), ("1Gi", "1073741824"), ("2k", "2000"), ("16Gi", "16384Mi")]
)
def test_quantities_are_compared_by_value(one, other):
    wanted = drift.marked({"metadata": {}, "limits": {"x": one}})
    assert not drift.differs(drift.marked({"metadata": {}, "limits": {"x": one}}) | {"limits": {"x": other}}, wanted)
    assert drift.differs(wanted | {"limits": {"x": "3"}}, wanted)


def test_a_value_that_only_looks_like_a_quantity_is_a_text():
    wanted = drift.marked({"metadata": {}, "data": {"x": "1Gi"}})
    assert drift.differs(wanted | {"data": {"x": "1024Mi"}}, wanted)


def test_every_child_holds_once_it_was_applied_and_its_mark_changes_with_it():
    for child in children(job(EVERYTHING), run_id="r", platform=Platform()):
        wanted = drift.marked(child)
        assert not drift.differs(wanted, wanted)
        assert drift.marked(child | {"extra": 1})["metadata"]["annotations"] != wanted["metadata"]["annotations"]
        assert drift.APPLIED not in child["metadata"].get("annotations", {})
