"""A user's YAML file → RLJobs, or all that is wrong with it, one line each:

job.yaml:14: spec.algorithm.learningRate: got 1e-6 (number): rates are strings; quote it: "1e-6"
"""

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pydantic
from pydantic_core import ErrorDetails

from operators import explain, overrides, rules, schema
from operators.documents import LARGEST_FILE, Document, Unreadable, read
from operators.schema import Node, Path
from operators.spec import API_VERSION, KIND, RLJob
from operators.spec.status import RLJobStatus

LONGEST_VALUE = 60
MOST_FAULTS = 50  # per document
TYPE_NAMES = {bool: "boolean", int: "number", float: "number", str: "string", list: "list", dict: "object"}
UID = re.compile("[-a-zA-Z0-9]{1,63}")
SERVER_METADATA = {
    "creationTimestamp",
    "deletionGracePeriodSeconds",
    "deletionTimestamp",
    "finalizers",
    "generateName",
    "generation",
    "managedFields",
    "ownerReferences",
    "resourceVersion",
    "selfLink",
}
"""What the API server keeps in an object's metadata, and checks itself; no concern of the job's."""


@dataclasses.dataclass(frozen=True)
class Fault:
    path: Path
    problem: str
    """What was found, if anything, and what to write instead."""

    def __str__(self) -> str:
        return f"{schema.dotted(self.path)}: {self.problem}" if self.path else self.problem


class Invalid(ValueError):
    """No valid RLJob; one line for each fault."""

    def __init__(self, lines: list[str]):
        super().__init__("\n".join(lines))
        self.lines = lines


def load(file: str) -> list[RLJob]:
    """Every RLJob in a YAML file; documents of other kinds are passed over. Raises Invalid, lines as FILE:LINE: …"""
    ours = [document for document in _documents(file) if _is_ours(document.value)]
    if not ours:
        raise Invalid([f"{file}:1: no RLJob here; write apiVersion: {API_VERSION} and kind: {KIND}"])
    lines, jobs = [], []
    for document in ours:
        job, faults = check(document.value, document)
        lines += [f"{file}:{document.line(fault.path)}: {fault}" for fault in faults]
        jobs += [job] if job else []
    if lines:
        raise Invalid(lines)
    return jobs


def load_one(file: str, settings: Sequence[str] = ()) -> RLJob:
    """The only RLJob of a file, with `settings` (PATH=VALUE, as for --set) put over it. Raises Invalid."""
    ours = [document for document in _documents(file) if _is_ours(document.value)]
    if len(ours) > 1:
        raise Invalid([f"{file}:{ours[1].line(())}: a second RLJob; put the one that is meant into a file of its own"])
    if not ours or not settings:
        return load(file)[0]
    value = ours[0].value
    try:
        for setting in settings:
            value = overrides.apply(value, setting)
    except ValueError as error:
        raise Invalid([str(error)]) from None
    job, faults = check(value)
    if job is None:
        raise Invalid([f"{file}, with --set: {fault}" for fault in faults])
    return job


def load_to_run(file: str, settings: Sequence[str] = ()) -> tuple[RLJob, list[str]]:
    """The RLJob to run on this machine, and warnings. Raises Invalid for one that only a cluster can run."""
    job = load_one(file, settings)
    notices = rules.passed_over(job, local=True)
    refused = [f"{file}: {notice}" for notice in notices if not notice.harmless]
    if refused:
        raise Invalid(refused)
    return job, [str(notice) for notice in notices]


def check(value: Any, document: Document | None = None) -> tuple[RLJob | None, list[Fault]]:
    """An object as the API server or a file holds it → the job, or its faults. `document` knows how it was written."""
    try:
        job = RLJob.model_validate(as_written(value))
    except pydantic.ValidationError as error:
        faults = [_fault(detail, value, document) for detail in error.errors()[:MOST_FAULTS]]
        return None, sorted(set(faults), key=lambda fault: document.line(fault.path) if document else 0)
    faults = [Fault(path, _got(path, value, document) + remedy) for path, remedy in rules.broken(job)]
    faults += [Fault(path, explain.unknown(name, node)) for path, name, node in _unknown_status(value)]
    return (None, faults) if faults else (job, [])


def _unknown_status(value: Any) -> Iterator[tuple[Path, str, Node]]:
    """The server takes no status from users, but refuses fields in it that it does not know."""
    for path, node in schema.unknown(value.get("status"), schema.of(RLJobStatus), ("status",)):
        yield path, str(path[-1]), node


def _documents(file: str) -> list[Document]:
    try:
        with open(file, "rb") as opened:
            data = opened.read(LARGEST_FILE + 1)
        return read(data.decode())
    except OSError as error:
        raise Invalid([f"{file}: {error.strerror or error}"]) from None
    except UnicodeDecodeError as error:
        raise Invalid([f"{file}:{data[: error.start].count(10) + 1}: not UTF-8; save the file as UTF-8"]) from None
    except Unreadable as error:
        raise Invalid([f"{file}:{error.line}: {error}"]) from None


def _is_ours(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    kind, version = str(value.get("kind")), str(value.get("apiVersion"))
    return kind.lower() == KIND.lower() or version.startswith(API_VERSION.partition("/")[0])


def as_written(value: Any) -> Any:
    """The object without what the API server keeps in it; no namespace is the default one, as for kubectl, and a uid
    that is none of the server's is overwritten by it."""
    if not isinstance(value, dict):
        return value
    metadata = value.get("metadata")
    if isinstance(metadata, dict):
        absent = SERVER_METADATA | ({"namespace"} if metadata.get("namespace") == "" else set())
        if isinstance(metadata.get("uid"), str) and not UID.fullmatch(metadata["uid"]):
            absent |= {"uid"}
        metadata = {key: item for key, item in metadata.items() if key not in absent}
        value = value | {"metadata": metadata}
    return {key: item for key, item in value.items() if key != "status"}


def _fault(error: ErrorDetails, value: Any, document: Document | None) -> Fault:
    path: Path = error["loc"]
    is_key = path[-1:] == ("[key]",)
    path = path[:-1] if is_key else path
    if error["type"] == "missing":
        parent = schema.at(path) or {}
        return Fault(path, f"missing; add it: {_lowered(parent.get('description', ''))}")
    node = schema.at(path) or {}
    if error["type"] == "extra_forbidden":
        return Fault(path, explain.unknown(str(path[-1]), schema.at(path[:-1]) or {}))
    if is_key:
        names = (schema.at(path[:-1]) or {}).get("propertyNames", {})
        return Fault(path, f"not a possible key; {names.get('remedy', 'write a shorter one')}")
    written = document.written(path) if document else None
    return Fault(path, _got(path, value, document) + _remedy(error, node, written))


def _remedy(error: ErrorDetails, node: Node, written: str | None) -> str:
    kind, given = error["type"], error["input"]
    if kind == "value_error":
        return str(error["ctx"]["error"])
    if "type" in node and not _fits(given, node["type"]):
        return _retype(given, node, written)
    choices = node.get("enum") or ([node["const"]] if "const" in node else None)
    if choices:
        near = explain.nearest(given, map(str, choices)) if isinstance(given, str) else None
        hint = f'; did you mean "{near}"?' if near and len(choices) > 1 else ""
        return f"must be {'one of ' if len(choices) > 1 else ''}{', '.join(map(str, choices))}{hint}"
    if "minimum" in node:
        return f"must lie from {node['minimum']} to {node['maximum']}"
    if kind == "string_too_long":
        return f"at most {node['maxLength']} characters, there are {len(given)}"
    if kind == "string_too_short":
        return "must not be empty; " + node.get("remedy", "write a value or remove the field")
    if kind in ("too_long", "too_short"):
        low = node.get("minItems", node.get("minProperties", 0))
        return f"must have {low} to {node.get('maxItems', node.get('maxProperties'))} entries, it has {len(given)}"
    return str(node.get("remedy", error["msg"].lower()))


def _fits(value: Any, kind: str) -> bool:
    wanted = {"string": str, "integer": int, "boolean": bool, "array": list, "object": dict}[kind]
    return isinstance(value, wanted) and (kind == "boolean" or not isinstance(value, bool))


def _retype(given: Any, node: Node, written: str | None) -> str:
    """For a value of another type than `node`'s: the same value as it should be written, if there is one."""
    kind = node["type"]
    if kind == "string" and isinstance(given, bool | int | float):
        quoted = json.dumps(written if written is not None else str(given))
        is_rate = "decimal number" in node.get("remedy", "")
        return ("rates are strings; " if is_rate else "must be a string; ") + f"quote it: {quoted}"
    if isinstance(given, str) and kind == "integer" and re.fullmatch("-?[0-9]{1,19}", given.strip()):
        return f"write it without quotes: {given.strip()}"
    if isinstance(given, str) and kind == "boolean" and given.lower() in ("true", "false"):
        return f"write it without quotes: {given.lower()}"
    if kind == "object" and "properties" in node:
        return f"must be an object with fields such as {', '.join(list(node['properties'])[:3])}"
    wanted = {"string": "a string", "integer": "a whole number", "boolean": "true or false", "array": "a list (- …)"}
    return f"must be {wanted.get(kind, 'an object {key: value}')}"


def _got(path: Path, value: Any, document: Document | None) -> str:
    """`got 1e-6 (number): `, or nothing where nothing stands."""
    for step in path:
        try:
            value = value[step]
        except (LookupError, TypeError):
            return ""
    if value is None:
        return ""
    written = document.written(path) if document and not isinstance(value, str) else None
    return f"got {shown(value, written)} ({TYPE_NAMES.get(type(value), 'value')}): "


def shown(value: Any, written: str | None = None) -> str:
    """A value on one line, shortened."""
    text = written if written is not None else json.dumps(value, ensure_ascii=not str(value).isprintable(), default=str)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"


def _lowered(text: str) -> str:
    """The first sentence of a field's text, to go on a sentence with."""
    first = text.partition(". ")[0].rstrip(".").replace("\n", " ")
    return first[:1].lower() + first[1:]
