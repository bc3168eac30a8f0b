"""The CustomResourceDefinition of RLJob, made from the typed spec and status: `python -m operators.crd` prints it,
`make manifests` writes it. Pure.

Types, bounds, defaults and texts come from `operators.spec`, rules that join fields from `operators.cel`. A default
that is an empty list or map is left out, so that stored objects stay small; status has none, its writer gives all.
"""

import sys
from typing import Any

import yaml

from operators import cel, schema
from operators.schema import Node
from operators.spec import API_VERSION, KIND
from operators.spec.status import RLJobStatus

NAME = "rljobs.miles.dev"
LARGEST = 262_144  # bytes; more does not fit the annotation that a plain `kubectl apply` writes
COLUMNS = (
    ("Phase", "string", ".status.phase"),
    ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status'),
    ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason'),
    ("Step", "string", ".status.training.progress"),
    ("Policy", "string", ".status.training.policyVersion"),
    ("Rollouts", "string", ".status.rollout.summary"),
    ("Restarts", "integer", ".status.restarts"),
    ("Age", "date", ".metadata.creationTimestamp"),
    ("Queue", "string", r".metadata.labels.kueue\.x-k8s\.io/queue-name"),
)
WIDE_COLUMNS = {"Queue"}  # shown by `kubectl get -o wide` alone
MAP_KEYS = {
    "spec.rewards": "name",
    "spec.rollout.template.env": "name",
    "spec.trainer.template.env": "name",
    "status.conditions": "type",
    "status.metrics": "name",
}
"""Lists whose items are told apart by a field: they merge by it, and the server refuses to have one twice."""
_COPIED = (
    "type",
    "format",
    "enum",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "pattern",
    "minItems",
    "maxItems",
    "maxProperties",
    "required",
    "x-kubernetes-int-or-string",
)


def definition() -> dict[str, Any]:
    """The whole object."""
    group, _, version = API_VERSION.partition("/")
    plural = NAME.partition(".")[0]
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": NAME},
        "spec": {
            "group": group,
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": plural,
                "singular": KIND.lower(),
                "shortNames": ["rlj"],
                "categories": ["all"],
            },
            "scope": "Namespaced",
            "versions": [
                {
                    "name": version,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": _resource()},
                    "additionalPrinterColumns": [
                        {"name": name, "type": kind, "jsonPath": path}
                        | ({"priority": 1} if name in WIDE_COLUMNS else {})
                        for name, kind, path in COLUMNS
                    ],
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.rollout.replicas",
                            "statusReplicasPath": ".status.rollout.ready",
                            "labelSelectorPath": ".status.rollout.selector",
                        },
                    },
                }
            ],
        },
    }


def _resource() -> Node:
    tree = schema.tree()
    fields = tree["properties"]
    return _with_rules(
        {
            "type": "object",
            "description": tree["description"],
            "required": ["spec"],
            "properties": {
                "apiVersion": {"type": "string", "description": fields["apiVersion"]["description"]},
                "kind": {"type": "string", "description": fields["kind"]["description"]},
                "metadata": {"type": "object", "properties": {"name": {"type": "string"}}},
                "spec": _structural(fields["spec"], "spec"),
                "status": _structural(schema.of(RLJobStatus), "status"),
            },
        },
        "",
        tree,
    )


def _structural(node: Node, path: str) -> Node:
    """`node` in the part of OpenAPI that a CRD may hold; `path` has no list positions."""
    made = {key: node[key] for key in _COPIED if key in node}
    if "const" in node:  # a choice of one
        made["enum"] = [node["const"]]
    if text := _description(node):
        made = {"description": text} | made
    if path.startswith("spec") and (default := _default(node)) is not None:
        made["default"] = default
    if "properties" in node:
        made["properties"] = {name: _structural(child, f"{path}.{name}") for name, child in node["properties"].items()}
    elif node.get("additionalProperties") is True:
        made["x-kubernetes-preserve-unknown-fields"] = True
    elif "additionalProperties" in node:
        made["additionalProperties"] = _structural(node["additionalProperties"], f"{path}{{}}")
    if "items" in node:
        made["items"] = _structural(node["items"], f"{path}[]")
        key = MAP_KEYS.get(path.replace("[]", ""))
        made["x-kubernetes-list-type"] = "map" if key else "atomic"
        made |= {"x-kubernetes-list-map-keys": [key]} if key else {}
    return _with_rules(made, path, node)


def _with_rules(node: Node, path: str, source: Node) -> Node:
    rules = [rule.as_dict() for rule in cel.rules(path, source)]
    return node | cel.SHAPES.get(path, {}) | ({"x-kubernetes-validations": rules} if rules else {})


def _description(node: Node) -> str:
    return " ".join(node.get("description", "").split())


def _default(node: Node) -> Any:
    """What the server fills in: for an object all that its fields default to, since its rules are tried on that."""
    default = node.get("default")
    if isinstance(default, dict):
        below = {name: _default(child) for name, child in node.get("properties", {}).items()}
        return {name: value for name, value in below.items() if value is not None} or None
    return None if default == [] else default


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def text() -> str:
    """The definition as YAML."""
    return yaml.dump(definition(), Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


if __name__ == "__main__":
    sys.stdout.write(text())
