"""`--set spec.trainer.nodes=2`: fields of an RLJob given on the command line, in place of those in its file. Pure."""

import copy
import itertools
import re
from typing import Any

from operators import documents, schema

POSITION = re.compile("[0-9]{1,9}")
"""Of an item in a list."""


def apply(value: Any, setting: str) -> Any:
    """A copy of the object `value` with one field set: "spec.data.sets[0].weight=2" (or sets.0.weight).

    Raises ValueError for a setting that has no field, no value, or no place in the object.
    """
    name, equals, text = setting.partition("=")
    path = parse_path(name)
    if not equals or len(path) < 2 or path[0] not in ("spec", "metadata"):
        raise ValueError(f"--set {_on_one_line(setting)}: write spec.field=value, such as spec.algorithm.totalSteps=20")
    setting = _on_one_line(setting)
    changed = copy.deepcopy(value)
    parent = changed
    for step, below in itertools.pairwise(path):
        parent = child(parent, step, below, setting)
    if isinstance(parent, list) and path[-1] not in range(len(parent)):
        raise ValueError(f"--set {setting}: there is no item {path[-1]}, the list has {len(parent)}")
    parent[path[-1]] = typed(text, path)
    return changed


def child(parent: Any, step: str | int, below: str | int, setting: str) -> Any:
    """The list or object at `step`, ready to hold `below`; an object is made if there is none yet."""
    if isinstance(parent, list):
        if step not in range(len(parent)):
            raise ValueError(f"--set {setting}: there is no item {step}, the list has {len(parent)}")
    elif parent.get(step) is None:
        parent[step] = {}
    if isinstance(below, str) and isinstance(parent[step], list):
        raise ValueError(f"--set {setting}: {step} is a list; name an item by its position, as in {step}[0]")
    if not isinstance(parent[step], list if isinstance(below, int) else dict):
        raise ValueError(f"--set {setting}: {step} has no parts that could be set")
    return parent[step]


def parse_path(name: str) -> schema.Path:
    """ "spec.data.sets[0].weight" → ("spec", "data", "sets", 0, "weight")."""
    return tuple(int(step) if POSITION.fullmatch(step) else step for step in re.split(r"[.\[\]]+", name) if step)


def typed(text: str, path: schema.Path) -> Any:
    """A string where the field is one, so that rates need no quotes here; else what YAML makes of it."""
    node = schema.at(path) or {}
    if node.get("type") == "string" or not text:
        return text
    shown = _on_one_line(f"{schema.dotted(path)}={text}")
    try:
        found = documents.read(f"---\n{text}")  # below ---, what begins with { may be YAML
    except documents.Unreadable as error:
        raise ValueError(f"--set {shown}: {error}") from None
    if len(found) > 1:
        raise ValueError(f"--set {shown}: there are {len(found)} YAML documents; write one value")
    return found[0].value if found else None


def _on_one_line(text: str) -> str:
    return " ".join(text.split())
