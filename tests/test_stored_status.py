"""Whatever status is stored, by an admin's hand or under an earlier schema, is read: by `kubectl miles`, which shows no
traceback, and by the operator, for which a job that is over stays over."""

import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from operators import schema
from operators.observed import Observed
from operators.plugin import status, tables
from operators.reconcile import reconcile
from operators.schema import Node
from operators.spec.status import CONDITION_TYPES, RLJobStatus, as_stored
from tests.situations import PLATFORM, rljob

NOW = datetime.datetime(2026, 3, 1, 12, tzinfo=datetime.UTC)
TIMES = (
    *("2026-01-01T00:00:00Z", "2027-01-01T00:00:00Z", "1970-01-01T00:00:00Z", "9999-12-31T23:59:59Z"),
    *("2026-01-01t00:00:00z", "2026-01-01T00:00:00x5z", "2026-01-01T00:00:00.123456789+01:30"),
    *("2026-01-01T00:00:00+99:99", "0000-01-01T00:00:00Z", "0001-01-01T00:00:00+23:59"),
)
"""What the API server's own check of a date-time takes; the second half of it is no time for Python, or an odd one."""
WORDS = ("", "a", "é\x1b[2J", "-0.25", "1e-06", "1e+400", "NaN", "-inf", "n/a", "1_0", "x" * 32)


def values(node: Node) -> st.SearchStrategy[Any]:
    """What may lie in the store: as the schema says, but for patterns, which earlier ones did not have."""
    if node.get("format") == "date-time":
        return st.sampled_from(TIMES)
    if "enum" in node:
        return st.sampled_from(node["enum"])
    if node["type"] == "integer":
        return st.sampled_from([0, 1, 3, 1000, 2**63 - 1])
    if node["type"] == "string":
        return st.sampled_from([word for word in WORDS if node.get("minLength", 0) <= len(word)])
    if node["type"] == "array":
        return st.lists(values(node["items"]), max_size=4)
    fields, required = node["properties"], node.get("required", ())
    return st.fixed_dictionaries(
        {name: values(fields[name]) for name in required},
        optional={name: values(each) for name, each in fields.items() if name not in required},
    )


def conditions() -> st.SearchStrategy[Any]:
    """By type, as the server keeps them."""
    entry = values(schema.of(RLJobStatus)["properties"]["conditions"]["items"])
    made = st.dictionaries(st.sampled_from(CONDITION_TYPES), entry, max_size=9)
    return made.map(lambda found: [entry | {"type": kind} for kind, entry in found.items()])


def statuses() -> st.SearchStrategy[Any]:
    names = "metrics", "training", "conditions"
    whole = values(schema.of(RLJobStatus))
    told = st.fixed_dictionaries({name: values(schema.of(RLJobStatus)["properties"][name]) for name in names[:2]})
    return st.tuples(whole, told, conditions()).map(lambda parts: parts[0] | parts[1] | {"conditions": parts[2]})


def job(told: Any) -> Any:
    found = rljob()
    found["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    return found | {"status": told}


@settings(max_examples=300, deadline=None)
@given(told=statuses())
def test_the_plugin_shows_whatever_is_stored(told: Any) -> None:
    named = [{"name": name, "value": entry["value"]} for name, entry in zip(METRICS, told["metrics"], strict=False)]
    for found in (job(told), job(told | {"metrics": named})):
        assert status.screen(found, [], NOW).startswith("arithmetic  ")
        assert "arithmetic" in tables.jobs([found], NOW, with_namespace=True)
        assert tables.top(found, [], {})


METRICS = ("reward/mean", "reward/a", "staleness/mean", "tokens_per_s/trained")


@settings(max_examples=200, deadline=None)
@given(told=statuses())
def test_the_operator_reads_whatever_is_stored_and_what_is_over_stays_over(told: Any) -> None:
    over = {entry["type"] for entry in told["conditions"] if entry["status"] == "True"} & {"Complete", "Failed"}
    plan = reconcile(Observed(job(told)), NOW, PLATFORM)
    if over:
        assert not any(child["kind"] == "Job" for child in plan.apply)
    if plan.status is not None:
        RLJobStatus.model_validate(plan.status)
        assert over <= {entry["type"] for entry in plan.status["conditions"] if entry["status"] == "True"}


GOOD = {"type": "Complete", "status": "True", "reason": "Completed", "lastTransitionTime": "2026-01-01T00:00:00Z"}


@pytest.mark.parametrize(
    ("told", "read"),
    [
        ({"restarts": 2, "startTime": "2026-01-01t00:00:00z"}, {"restarts": 2}),
        ({"startTime": "2026-02-30T00:00:00Z"}, {}),
        ({"attempt": {"number": 3, "time": "soon"}}, {"attempt": {"number": 3}}),
        ({"training": [1], "restarts": 2}, {"restarts": 2}),
        ({"training": {"step": 3, "rewards": ["0.5", "n/a"]}}, {"training": {"step": 3}}),
        (
            {"metrics": [{"name": "a", "value": "x"}, {"name": "b", "value": "1"}]},
            {"metrics": [{"name": "b", "value": "1"}]},
        ),
        ({"conditions": ["odd", {"type": 3}, GOOD]}, {"conditions": [GOOD]}),
        ({"ofALaterRelease": {"a": 1}, "restarts": 2}, {"restarts": 2}),
    ],
)
def test_only_what_is_not_as_it_should_be_is_left_out(told: Any, read: Any) -> None:
    assert as_stored(told) == RLJobStatus.model_validate(read)


@pytest.mark.parametrize(
    "wrong", [{"lastTransitionTime": "2026-01-01t00:00:00z"}, {"reason": "two words"}, {"more": 1}]
)
def test_a_condition_stays_for_what_it_says(wrong: Any) -> None:
    (kept,) = as_stored({"conditions": [GOOD | wrong]}).conditions
    assert (kept.type, kept.status) == ("Complete", "True")
