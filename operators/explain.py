"""`miles explain PATH`: type, default, text and children of a field, as kubectl explain shows them."""

import difflib
import re
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

from operators import schema
from operators.schema import Node

WIDTH = 100
MOST_PLACES = 5
FILE_RULE = "A relative file:// URI (file://./… or file://../…) starts at the folder of the file that holds the spec."


def explain(path: str) -> str:
    """The text for a dotted path such as `spec.trainer.lora`; `trainer.lora` and `spec.rewards[0].weight` will do.

    Raises ValueError for one that does not exist.
    """
    steps = [step for step in re.sub(r"\[[^]]*\]", "", path).split(".") if step]
    if steps and steps[0] in schema.fields(schema.tree()["properties"]["spec"]):
        steps.insert(0, "spec")
    node, done = schema.tree(), list[str]()
    for step in steps:
        children = schema.fields(node)
        if step not in children:
            places = elsewhere(steps) if not done else []
            meant = f"did you mean {' or '.join(places)}?" if places else unknown(step, node)
            raise ValueError(f"{'.'.join([*done, step])}: {meant}")
        node = children[step]
        done.append(step)
    return "\n".join(_page(".".join(steps) or "rljob", node))


def elsewhere(steps: list[str]) -> list[str]:
    """Fields anywhere whose paths end in `steps`, the shortest first; at most MOST_PLACES."""
    found = [path for path in _paths(schema.tree(), ()) if path[-len(steps) :] == tuple(steps)]
    return [".".join(path) for path in sorted(found, key=len)[:MOST_PLACES]]


def _paths(node: Node, above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for name, child in schema.fields(node).items():
        yield (*above, name)
        yield from _paths(child, (*above, name))


def unknown(name: str, above: Node) -> str:
    """Refuses the field `name` of the object `above`: says why, suggests the nearest field, or lists them all."""
    known = schema.fields(above)
    refused = above.get("items", above).get("refused", {})
    if name in refused:
        return f"refused; {refused[name]}"
    if above is schema.tree() and name in schema.fields(known["spec"]):
        return "unknown field here; it belongs below spec, indent it"
    near = nearest(name, known)
    if near:
        return f'unknown field; did you mean "{near}"?'
    return f"unknown field; known are {', '.join(known)}" if known else "unknown field; this takes none"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known word that was probably meant; spelling, case, dashes and underscores aside."""
    folded = _folded(name)
    likeness = {word: difflib.SequenceMatcher(None, folded, _folded(word)).ratio() for word in known}
    best = max(likeness, key=likeness.__getitem__, default=None)
    return best if best is not None and likeness[best] >= 0.7 else None


def _folded(word: str) -> str:
    return re.sub("[^a-z0-9]", "", word.lower())


def _page(path: str, node: Node) -> list[str]:
    lines = ["KIND:     RLJob", "VERSION:  miles.dev/v1alpha1", "", f"FIELD:    {path} <{type_name(node)}>", ""]
    lines += _wrapped(node.get("description", ""), "  ")
    lines += _facts(node, "  ")
    if children := schema.fields(node):
        required = (node.get("items") or node).get("required", [])
        lines += ["", "FIELDS:"]
        for name, child in children.items():
            lines += ["", f"  {name} <{type_name(child)}>" + (" (required)" if name in required else "")]
            lines += _wrapped(child.get("description", ""), "    ")
            lines += _facts(child, "    ")
    return lines


def type_name(node: Node) -> str:
    """string, integer, boolean, Object, []string, map[string]string …"""
    if "x-kubernetes-int-or-string" in node:
        return "quantity"
    if "items" in node:
        return "[]" + type_name(node["items"])
    if node.get("type") == "object" and "properties" not in node:
        values = node.get("additionalProperties")
        return f"map[string]{type_name(values) if isinstance(values, dict) else 'any'}"
    kind = str(node.get("type", "any"))
    return "Object" if kind == "object" else kind


def _facts(node: Node, indent: str) -> list[str]:
    facts = []
    if "enum" in node or "const" in node:
        facts.append("one of: " + ", ".join(map(str, node.get("enum", [node.get("const")]))))
    if "minimum" in node or "maximum" in node:
        facts.append(f"from {node['minimum']} to {node['maximum']}")
    if bounds := node.get("between"):
        facts.append(bounds["remedy"].removeprefix("must be "))
    default = node.get("default")
    if default is not None and default not in ({}, []) and not isinstance(default, dict):
        facts.append(f"default: {shown(default)}")
    if mark := node.get("clusterOnly"):
        facts.append(f"only in a cluster: {mark['instead']}")
    if str(node.get("remedy", "")).find("file://") >= 0:
        facts.append(FILE_RULE)
    return [line for fact in facts for line in _wrapped(fact, indent)]


def shown(value: Any) -> str:
    """A default as it is written in YAML."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent)
