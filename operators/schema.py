"""The RLJob's schema as one plain tree: what `miles explain` prints, and what names, limits and remedies in error
messages come from. Derived from the models in `operators.spec`; nothing is written twice.

A node is a JSON-schema dict without $ref, null branches or titles. Beside the usual keys it may hold `remedy` (what to
write instead of a wrong value), `between` (bounds of a rate) and `clusterOnly` ({instead,
harmless}: what `miles run` does not act on).
"""

import functools
import json
import re
from collections.abc import Iterator
from typing import Any

import pydantic

from operators.spec import RLJob

Node = dict[str, Any]
Path = tuple[str | int, ...]
"""Keys and list positions from the top of the resource, as the user spells them."""


@functools.cache
def tree() -> Node:
    """The whole schema of what a user writes; do not change it."""
    return of(RLJob)


@functools.cache
def of(model: type[pydantic.BaseModel]) -> Node:
    """The schema of any model of the resource, as one plain tree."""
    schema = model.model_json_schema()
    return _inlined(schema, schema["$defs"])


def _inlined(node: Any, definitions: dict[str, Node]) -> Node:
    branches = [branch for branch in node.get("anyOf", []) if branch.get("type") != "null"]
    assert len(branches) <= 1, "a field has one type"
    merged: Node = {}
    for part in (*branches, node):
        if "$ref" in part:
            merged |= _inlined(definitions[part["$ref"].rpartition("/")[2]], definitions)
        merged |= {key: part[key] for key in part if key not in {"$ref", "anyOf", "title", "$defs"}}
    if "properties" in merged:
        merged["properties"] = {key: _inlined(child, definitions) for key, child in merged["properties"].items()}
    if "items" in merged:
        merged["items"] = _inlined(merged["items"], definitions)
    if patterns := merged.pop("patternProperties", None):
        ((pattern, merged["additionalProperties"]),) = patterns.items()
        merged["propertyNames"] = merged["propertyNames"] | {"pattern": pattern}
    if isinstance(merged.get("additionalProperties"), dict):
        merged["additionalProperties"] = _inlined(merged["additionalProperties"], definitions)
    return merged


def at(path: Path) -> Node | None:
    """The node that `path` leads to from an RLJob, through objects, lists and maps; None if there is none.

    The position in a list may be left out: (spec, rewards, name) is the name of any reward.
    """
    node: Node | None = tree()
    for step in path:
        if node is None:
            break
        node = node.get("items") if isinstance(step, int) else _child(node, step)
    return node


def fields(node: Node) -> dict[str, Node]:
    """The named fields of an object, or of the objects in a list."""
    found: dict[str, Node] = node.get("items", node).get("properties", {})
    return found


def _child(node: Node, name: str) -> Node | None:
    values = node.get("items", node).get("additionalProperties")
    anything: Node | None = {} if values is True else None
    return fields(node).get(name, values if isinstance(values, dict) else anything)


def set_values(value: Any, node: Node, path: Path = (), defaults: bool = False) -> Iterator[tuple[Path, Any, Node]]:
    """Every (path, value, node) of a resource dumped by alias whose value is not the field's default; with `defaults`
    all that it holds."""
    if value is None or (value == node.get("default") and not defaults):
        return
    yield path, value, node
    if isinstance(value, dict):
        for key, child in node.get("properties", {}).items():
            yield from set_values(value.get(key), child, (*path, key), defaults)
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from set_values(item, node["items"], (*path, number), defaults)


def unknown(value: Any, node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Every (path of a key that its object does not have, node of the object)."""
    if isinstance(value, dict) and "properties" in node:
        for key, item in value.items():
            if key in node["properties"]:
                yield from unknown(item, node["properties"][key], (*path, key))
            else:
                yield (*path, key), node
    if isinstance(value, list) and "items" in node:
        for number, item in enumerate(value):
            yield from unknown(item, node["items"], (*path, number))


def known(value: Any, node: Node) -> Any:
    """The value without the keys that its objects do not have."""
    if isinstance(value, dict) and "properties" in node:
        return {key: known(item, node["properties"][key]) for key, item in value.items() if key in node["properties"]}
    if isinstance(value, list) and "items" in node:
        return [known(item, node["items"]) for item in value]
    return value


def dotted(path: Path) -> str:
    """spec.data.sets[0].uri; a key that is no plain word stands in brackets."""
    parts = []
    for step in path:
        if isinstance(step, int):
            parts.append(f"[{step}]")
        else:
            parts.append(f".{step}" if re.fullmatch(r"[A-Za-z_][-A-Za-z0-9_]*", step) else f"[{json.dumps(step)}]")
    return "".join(parts).removeprefix(".")
