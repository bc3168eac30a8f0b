"""Conditions on samples: what they mean, and that they can do nothing else."""

import re

import hypothesis
import hypothesis.strategies as st
import pytest

from pipeline import codec, selection, where
from pipeline.experience import SCHEMA, Rollout, RolloutGroup
from pipeline.versions import Version


def rollout(text: str, reward: float | None, invalid: str | None = None, tokens: int = 2) -> Rollout:
    parts = {} if reward is None else {"sum": reward}
    return Rollout([7] * tokens, [-0.5] * tokens, text, "stop", reward, parts, invalid, [(0, Version(1, 3))])


@pytest.fixture(scope="module")
def table():
    """Rows: five 0, four 1, it's 1 with three tokens; then an unscored one."""
    first = [rollout("five", 0.0), rollout("four", 1.0), rollout("it's", 1.0, tokens=3)]
    second = [rollout("none", None, "no score"), rollout("four", 0.5), rollout("100%", 0.25)]
    groups = [
        RolloutGroup(4, "sums", "2 + 2 =", "4", [5, 9], first, 0.0),
        RolloutGroup(9, "words", "say", None, [5], second, 0.0),
    ]
    return codec.decode(codec.encode(groups))


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("reward > 0.5", [1, 2]),
        ("reward >= .5 AND index = 9", [4]),
        ("reward = 1 or reward = 0 and completion = 'five'", [0, 1, 2]),
        ("(reward = 1 or reward = 0) and completion = 'five'", [0]),
        ("not reward > 0.5", [0, 4, 5]),  # null is neither
        ("reward is null", [3]),
        ("reward is not null and not index in (4, 5)", [4, 5]),
        ("index not in (4)", [3, 4, 5]),
        ("reward between 0.25 and 0.5", [4, 5]),
        ("reward not between 0.25 and 0.5", [0, 1, 2]),
        ("completion like 'f%r'", [1, 4]),
        ("completion not like '____'", []),
        ("completion = 'it''s'", [2]),
        ("\"set\" <> 'sums'", [3, 4, 5]),
        ("len(completion_ids) > 2", [2]),
        ("len(turns) is null", [0, 1, 2, 3, 4, 5]),
        ("rewards['sum'] < 0.3", [0, 5]),
        ("rewards['other'] is null", [0, 1, 2, 3, 4, 5]),
        ("invalid = 'no score'", [3]),
        ("answer = '4' and version_step <= 3", [0, 1, 2]),
        ("1 = 1", [0, 1, 2, 3, 4, 5]),
        ("index < 99999999999999999999999999", [0, 1, 2, 3, 4, 5]),
        ("reward > -1e-3", [0, 1, 2, 4, 5]),
        ("reward < 9223372036854775807 and reward > -1e-3", [0, 1, 2, 4, 5]),
    ],
)
def test_a_condition_chooses_the_rows_that_sql_would(table, text, rows):
    assert selection.matching(table, where.parse(text)).nonzero()[0].tolist() == rows


@pytest.mark.parametrize(
    "text",
    [
        "reward > 0.5 and completion like 'f%'",
        "not (reward = 1 or reward is null)",
        "len(completion_ids) between 2 and 2 and index in (4, 9)",
        "reward not in (1, 0.5)",
    ],
)
def test_duckdb_reads_the_same_condition_in_the_same_way(table, text):
    duckdb = pytest.importorskip("duckdb")
    flat = table.drop_columns(["rewards"])  # noqa: F841  read by name
    chosen = duckdb.sql(f"select completion from flat where {text}").fetchall()
    assert [row[0] for row in chosen] == selection.rows(table, where.parse(text))["completion"].to_pylist()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "character 1: expected a column, a number or 'text', got the end"),
        ("reward", "character 7: expected a comparison, got the end"),
        ("reword > 1", "character 1: there is no column reword; there are index, sample"),
        ("set = sums", "created; a text is written 'sums'"),
        ("reward == 1", "character 9: expected a column, a number or 'text', got =; equal is a single ="),
        ("invalid = NULL", "there is no column NULL; a missing value is asked for by `is null`"),
        ("step > 3", "there is no column step; version_step is the step of the policy that sampled"),
        ("reward > 'a'", "character 10: a number cannot be compared with a text"),
        ("completion_ids = 1", "there is no column completion_ids; of a list ask for its length: len(completion_ids)"),
        ("reward > 1 reward", "character 12: expected `and`, `or` or the end, got reward"),
        ("(reward > 1", "expected `)`, got the end"),
        ("reward in (1, 'a')", "character 15: a number cannot be compared with a text"),
        ("index like 'a'", "character 12: a number cannot be compared with a text"),
        ("(" * 40 + "1=1" + ")" * 40, "more than 32 brackets and `not` within each other"),
        ("1 = 1 or " * 300 + "1 = 1", "the condition has 2705 characters, at most 2048 are read"),
        # What a stranger may try
        ("reward > 1; drop table samples", "character 11: ';' begins nothing"),
        ("1 = 1) union select 1", "character 6: expected `and`, `or` or the end"),
        ("index in (select 1)", "there is no column select"),
        ("read_text('/etc/passwd') = 'a'", "there is no column read_text"),
        ("completion = getenv('HOME')", "there is no column getenv"),
        ("prompt like __import__('os')", "there is no column __import__"),
        ("reward > 1 -- and more", "character 12: '-' begins nothing"),
        ("completion = 'a\nb' and x\n= 1", "there is no column x"),
    ],
)
def test_what_is_no_condition_is_refused_in_one_line_that_names_the_place(text, words):
    with pytest.raises(ValueError, match="(?s)" + re.escape(words)) as caught:
        where.parse(text)
    assert "\n" not in str(caught.value)


@hypothesis.given(st.text(alphabet=" ()'\"[],<>=!-.0159abeEnotrwdsilkRL%_\n;é", max_size=60))
@hypothesis.settings(max_examples=300, deadline=None)
def test_any_text_is_a_condition_or_a_value_error(table, text):
    try:
        condition = where.parse(text)
    except ValueError:
        return
    assert len(selection.matching(table, condition)) == table.num_rows


def test_columns_are_those_of_the_schema():
    assert set(where.COLUMNS) | set(where.LISTS) <= set(SCHEMA.names)
    numbers = {field.name for field in SCHEMA if str(field.type) in ("int32", "int64", "double")}
    assert {name for name, kind in where.COLUMNS.items() if kind == "number"} == numbers


def test_groups_stay_whole_and_the_others_of_a_group_take_no_part(table):
    narrowed = selection.narrowed(table, where.parse("reward = 1"))
    assert narrowed.num_rows == table.num_rows
    left_out = selection.LEFT_OUT
    assert narrowed["invalid"].to_pylist() == [left_out, None, None, "no score", left_out, left_out]


def test_the_rewards_that_a_condition_asks_for_are_known_by_name():
    asked = "not (rewards['a'] > 1 and index in (1, 2)) or rewards['b'] is null or reward > 0.5"
    assert where.rewards(where.parse(asked)) == {"a", "b"}
