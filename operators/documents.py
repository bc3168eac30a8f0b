"""YAML as kubectl reads it (sigs.k8s.io/yaml, that is go-yaml v2 and then JSON), with the line of every value.

It differs from PyYAML: 2e-4 is a number, 010 is octal, y, no and off are booleans, 12:30 and 2025-09-01 are strings,
8.0 is 8, keys become strings; nothing may follow ---, and what begins with { must be JSON. Duplicate keys, tags beyond
the JSON types, endless aliases and very large files are refused, though kubectl takes the first two.
"""

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from typing import Any

import yaml

from operators.schema import Path

LARGEST_FILE = 2**20  # bytes
MOST_NODES = 100_000  # after aliases are expanded
_TAG = "tag:yaml.org,2002:"
_TRUE = {"y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"}
_FALSE = {"n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"}
_NULL = {"", "~", "null", "Null", "NULL"}
_ODD_FLOAT = {
    f"{sign}.{word}": value
    for sign, value in (("", math.inf), ("+", math.inf), ("-", -math.inf))
    for word in ("inf", "Inf", "INF")
} | dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan)
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INTEGER = re.compile(r"([-+]?)(?:0[xX]([0-9a-fA-F]+)|0[bB]([01]+)|0[oO]?([0-7]+)|(0|[1-9][0-9]*))")
_BASES = (16, 2, 8, 10)
_LONGEST_INTEGER = 20  # decimal digits of 2 ** 64
_DATE = re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt ].*)?")


class Unreadable(ValueError):
    """A file that is no YAML, or YAML that kubectl would not take; `line` counts from 1."""

    def __init__(self, message: str, line: int = 1):
        super().__init__(message)
        self.line = line


@dataclasses.dataclass(frozen=True)
class Document:
    """One YAML document: its value (JSON types only) and where each part of it was written."""

    value: Any
    node: yaml.Node

    def find(self, path: Path) -> yaml.Node:
        """The node at `path`, or the nearest one above it."""
        node = self.node
        for step in path:
            below = _child(node, step)
            if below is None:
                break
            node = below
        return node

    def line(self, path: Path) -> int:
        return int(self.find(path).start_mark.line) + 1

    def written(self, path: Path) -> str | None:
        """The text of the plain (unquoted) scalar at `path`; None for anything else."""
        node = self.find(path)
        return node.value if isinstance(node, yaml.ScalarNode) and not node.style else None


def read(text: str) -> list[Document]:
    """Every document of a file that is not empty. Raises Unreadable."""
    if len(text) > LARGEST_FILE:
        raise Unreadable(f"the file is larger than {LARGEST_FILE // 1024} KiB; put prompts into the store")
    _refuse_what_kubectl_cannot_split(text)
    try:
        return [Document(_value(node, _Budget()), node) for node in yaml.compose_all(text, _Loader) if _filled(node)]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise Unreadable(f"not YAML: {error.problem or error.context}", mark.line + 1 if mark else 1) from None
    except yaml.YAMLError as error:
        raise Unreadable(f"not YAML: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise Unreadable("nested too deeply") from None


def _refuse_what_kubectl_cannot_split(text: str) -> None:
    """kubectl cuts a file into documents before it reads any of them."""
    if text.lstrip().startswith("{"):
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            raise Unreadable("kubectl takes a file that begins with { for JSON; put --- above it") from None
    for number, line in enumerate(text.split("\n"), 1):
        if line.startswith("---") and line[3:].strip()[:1] not in ("", "#"):
            raise Unreadable("only a comment may follow ---; put the rest on a line of its own", number)
        if line.startswith("%"):
            raise Unreadable("YAML directives are not understood; remove the line", number)


def scalar(text: str) -> bool | int | float | str | None:
    """The value of a plain scalar, as go-yaml's resolve() finds it."""
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if text in _ODD_FLOAT:
        return _ODD_FLOAT[text]
    if text[0] not in "+-.0123456789" or _DATE.fullmatch(text):
        return text
    plain = text if text[0] == "." else text.replace("_", "")
    integer = _integer(plain)
    if integer is not None:
        return integer
    if _FLOAT.fullmatch(plain) and math.isfinite(float(plain)):
        return float(plain)
    return text


def _integer(text: str) -> int | None:
    match = _INTEGER.fullmatch(text)
    if match is None or len(match[5] or "") > _LONGEST_INTEGER:
        return None
    value = next(int(digits, base) for digits, base in zip(match.groups()[1:], _BASES, strict=True) if digits)
    value = -value if match[1] == "-" else value
    return value if -(2**63) <= value < (2**63 if match[1] else 2**64) else None


class _Loader(yaml.SafeLoader):
    def resolve(self, kind: type[yaml.Node], value: str | None, implicit: Any) -> str:
        if kind is not yaml.ScalarNode:
            return f"{_TAG}{'map' if kind is yaml.MappingNode else 'seq'}"
        plain = bool(implicit[0])
        if plain and value == "<<":
            return f"{_TAG}merge"
        return f"{_TAG}{_name(scalar(value or '')) if plain else 'str'}"


def _name(value: Any) -> str:
    return {type(None): "null", bool: "bool", int: "int", float: "float"}.get(type(value), "str")


class _Budget:
    """Bounds the nodes of a document after its aliases are expanded, and finds aliases that contain themselves."""

    def __init__(self) -> None:
        self.left = MOST_NODES
        self.open: set[int] = set()

    def enter(self, node: yaml.Node) -> None:
        self.left -= 1
        if self.left < 0:
            raise _refused(node, f"more than {MOST_NODES} values")
        if id(node) in self.open:
            raise _refused(node, "an alias that contains itself")
        self.open.add(id(node))

    def leave(self, node: yaml.Node) -> None:
        self.open.remove(id(node))


def _value(node: yaml.Node, budget: _Budget) -> Any:
    budget.enter(node)
    if isinstance(node, yaml.MappingNode):
        value: Any = _mapping(node, budget)
    elif isinstance(node, yaml.SequenceNode):
        value = [_value(item, budget) for item in node.value]
    else:
        assert isinstance(node, yaml.ScalarNode)
        value = _scalar_value(node)
    budget.leave(node)
    return value


def _mapping(node: yaml.MappingNode, budget: _Budget) -> dict[str, Any]:
    own: dict[str, Any] = {}
    merged: dict[str, Any] = {}
    for key_node, value_node in node.value:
        if key_node.tag == f"{_TAG}merge":
            sources = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
            for source in reversed(sources):
                if not isinstance(source, yaml.MappingNode):
                    raise _refused(source, "only a map can be merged into another")
                merged |= _value(source, budget)
            continue
        key = _key(key_node)
        if key in own:
            raise _refused(key_node, f'key "{key}" is given twice; remove one')
        own[key] = _value(value_node, budget)
    return merged | own


def _key(node: yaml.Node) -> str:
    value = _scalar_value(node) if isinstance(node, yaml.ScalarNode) else None
    if value is None or (isinstance(value, int) and value >= 2**63):
        raise _refused(node, "a key must be a string")
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


def _scalar_value(node: yaml.ScalarNode) -> Any:
    kind = node.tag.removeprefix(_TAG)
    value = scalar(node.value)
    if kind == "str":
        value = node.value
        if not value.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise _refused(node, "half a surrogate pair is no character")
    elif kind == "float" and type(value) is int:
        value = float(value)
    elif kind != _name(value):
        raise _refused(node, f"tag {node.tag.replace(_TAG, '!!')} is not understood; write a plain value")
    if isinstance(value, float) and not math.isfinite(value):
        raise _refused(node, f"{node.value} has no place in JSON; write a finite number")
    if isinstance(value, float) and value.is_integer() and -(2**63) <= value < 2**63:
        return int(value)  # JSON writes both alike
    return value


def _refused(node: yaml.Node, message: str) -> Unreadable:
    return Unreadable(message, node.start_mark.line + 1)


def _filled(node: yaml.Node | None) -> bool:
    return node is not None and not (isinstance(node, yaml.ScalarNode) and node.tag == f"{_TAG}null")


def _child(node: yaml.Node, step: str | int) -> yaml.Node | None:
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        return node.value[step]
    if isinstance(node, yaml.MappingNode):
        pairs: Sequence[tuple[yaml.Node, yaml.Node]] = node.value
        return next((value for key, value in pairs if isinstance(key, yaml.ScalarNode) and key.value == step), None)
    return None
