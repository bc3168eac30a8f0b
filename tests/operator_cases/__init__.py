"""What the tables of operators/README.md promise, row by row: each case plays one job before a running operator.

A case is a function of a Scene (tests.stage) and names the rows that it proves. `tests.test_operator_tables` plays all
of them at once and holds the tables against them.
"""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable
from typing import Any

from tests.stage import Scene

README = (pathlib.Path(__file__).parent.parent.parent / "operators" / "README.md").read_text()
SECTIONS = {"life cycle": "## Life cycle", "edit": "## Edits while running", "reason": "## Conditions and reasons"}


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a table of the README, known by its first cell."""

    table: str
    first: str


@dataclasses.dataclass(frozen=True)
class Case:
    rows: tuple[Row, ...]
    play: Callable[[Scene], None]
    lasts_s: float
    """At least; the longest begin first."""


CASES: dict[str, Case] = {}


def life(*first: str) -> tuple[Row, ...]:
    return tuple(Row("life cycle", each) for each in first)


def edit(*fields: str) -> tuple[Row, ...]:
    return tuple(Row("edit", f"`{field}`") for field in fields)


def reason(*names: str) -> tuple[Row, ...]:
    """The case fails unless it has seen each of them."""
    return tuple(Row("reason", name) for name in names)


def case(rows: tuple[Row, ...], lasts_s: float = 0.0) -> Callable[[Callable[[Scene], None]], Callable[[Scene], None]]:
    def enter(play: Callable[[Scene], None]) -> Callable[[Scene], None]:
        add(play.__name__.replace("_", " "), rows, play, lasts_s=lasts_s)
        return play

    return enter


def add(name: str, rows: tuple[Row, ...], play: Callable[..., None], *values: Any, lasts_s: float = 0.0) -> None:
    """`values` are given to `play` after the scene."""
    assert name not in CASES, name
    assert set(rows) <= {row for table in SECTIONS for row in table_of(table)}, f"{name}: no such row"
    CASES[name] = Case(rows, lambda scene: play(scene, *values), lasts_s)


@functools.cache
def table_of(table: str) -> tuple[Row, ...]:
    """The rows of the README's table, in its order."""
    text = README.partition(SECTIONS[table])[2].partition("\n## ")[0]
    lines = re.findall(r"^\| (.*?) \|.*$", text, re.MULTILINE)
    return tuple(Row(table, first) for first in lines[1:])  # without the heading


def coverage() -> dict[str, tuple[int, int, int, list[str]]]:
    """Table → (rows with a case, rows, cases, rows without)."""
    found = {}
    for table in SECTIONS:
        rows = table_of(table)
        cases = [each for each in CASES.values() if any(row.table == table for row in each.rows)]
        covered = {row for each in cases for row in each.rows}
        bare = [row.first for row in rows if row not in covered]
        found[table] = len(rows) - len(bare), len(rows), len(cases), bare
    return found
