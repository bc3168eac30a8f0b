"""The configuration in a report: the values that a run was made with, by the names that its RLJob has for them."""

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pydantic
from pydantic.alias_generators import to_camel

from pipeline.config import RunConfig

SECRET = re.compile(r"(?<=://)[^/@\s]+@|(?<=[?&])[^=&\s]+=[^&\s]+")
"""Credentials and query strings of URLs: a report is sent to others."""
NAMES = {
    "namespace": "metadata.namespace",
    "name": "metadata.name",
    "data.sets.prompt_field": "data.sets.fields.prompt",
    "data.sets.answer_field": "data.sets.fields.answer",
    "evaluation.sets.prompt_field": "evaluation.sets.fields.prompt",
    "evaluation.sets.answer_field": "evaluation.sets.fields.answer",
    "rewards.model": "rewards.model.uri",
    "environment.code": "environment.class",
    "algorithm.lr_schedule": "algorithm.schedule",
    "algorithm.clip_low": "algorithm.clip.low",
    "algorithm.clip_high": "algorithm.clip.high",
    "algorithm.kl_coefficient": "algorithm.kl.coefficient",
    "algorithm.kl_estimator": "algorithm.kl.estimator",
    "algorithm.kl_placement": "algorithm.kl.placement",
    "algorithm.kl_target": "algorithm.kl.target",
    "algorithm.kl_horizon": "algorithm.kl.horizon",
    "algorithm.correction.low": "algorithm.correction.band.low",
    "algorithm.correction.high": "algorithm.correction.band.high",
    "algorithm.correction.sequence_low": "algorithm.correction.sequenceBand.low",
    "algorithm.correction.sequence_high": "algorithm.correction.sequenceBand.high",
}
"""Field of RunConfig → field of the RLJob (below spec), where that is not the same name in camelCase."""
UNITS = {"_s": "_seconds", "_mib": "_mebibytes"}
"""Suffix of a name in RunConfig → in full, as the RLJob has it."""
INTERNAL = {
    *("run_id", "attempt", "given", "model.path", "rewards.folder", "environment.folder"),
    *("data.sets.samples", "data.sets.temperature", "evaluation.sets.weight"),
    *("rollout.flush_s", "rollout.shard_groups", "rollout.poll_s", "rollout.heartbeat_s", "rollout.lease_timeout_s"),
    *("rollout.group_timeout_s", "rollout.max_failures"),
}
"""Fields of RunConfig that no RLJob has."""

Row = tuple[str, str, bool]
"""(field, value, whether it differs from the default)"""


def given(config: RunConfig) -> list[dict[str, Any]]:
    """The same for what the RLJob sets, in its own words; [] where the run's configuration does not tell."""
    found: dict[str, list[Row]] = {}
    for path, value in config.given.items():
        parent, _, name = path.rpartition(".")
        found.setdefault(parent or "spec", []).append((name, spelled(value), True))
    return [{"title": title, "rows": rows} for title, rows in found.items()]


def cards(config: RunConfig) -> list[dict[str, Any]]:
    """[{title, rows}]: the fields of each object of the RLJob, in order; items of lists by their names."""
    found: dict[str, list[Row]] = {}
    for path, item, value, differs in fields(config):
        parent, _, name = path.rpartition(".")
        title = f"{parent}: {item}" if item else parent or "spec"
        found.setdefault(title, []).append((name, spelled(value), differs))
    return [{"title": title, "rows": rows} for title, rows in found.items()]


def changes(attempts: list[tuple[int, RunConfig]]) -> list[tuple[int, str, str, str]]:
    """(attempt, field, before, after) of every field that an attempt changed."""
    found = []
    for (_, earlier), (number, later) in itertools.pairwise(attempts):
        before, after = _flat(earlier), _flat(later)
        for key in sorted({*before, *after}):
            if before.get(key) != after.get(key):
                found.append((number, key, before.get(key, "none"), after.get(key, "none")))
    return found


def fields(config: RunConfig) -> Iterator[tuple[str, str, Any, bool]]:
    """(path in the RLJob below spec, or from metadata; name of the list's item; value; whether it is no default)."""
    root = config.store.uri.removesuffix(f"/{config.namespace}/{config.name}/{config.run_id}")
    store = config.store.model_copy(update={"uri": root})
    return _fields(config.model_copy(update={"store": store}), "", "")


def _fields(model: pydantic.BaseModel, prefix: str, item: str) -> Iterator[tuple[str, str, Any, bool]]:
    for name, field in type(model).model_fields.items():
        path, value = f"{prefix}{name}", getattr(model, name)
        if path in INTERNAL:
            continue
        if isinstance(value, pydantic.BaseModel):
            yield from _fields(value, f"{path}.", item)
        elif isinstance(value, list) and value and isinstance(value[0], pydantic.BaseModel):
            for each in value:
                yield from _fields(each, f"{path}.", str(getattr(each, "name", "")))
        else:
            differs = field.is_required() or value != field.get_default(call_default_factory=True)
            yield NAMES.get(path) or _camel(path), item, value, differs


def _camel(path: str) -> str:
    for short, full in UNITS.items():
        if path.endswith(short):
            path = path.removesuffix(short) + full
    return ".".join(map(to_camel, path.split(".")))


def _flat(config: RunConfig) -> dict[str, str]:
    return {f"{path} ({item})" if item else path: spelled(value) for path, item, value, _ in fields(config)}


def spelled(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {spelled(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(spelled, value)) or "none"
    return redacted(str(value))


def redacted(text: str) -> str:
    return SECRET.sub(lambda match: "…@" if match[0].endswith("@") else f"{match[0].split('=')[0]}=…", text)
