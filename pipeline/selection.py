"""Which samples a condition (pipeline.where) is true for. Nothing here reads or runs what the condition's text says."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.where import And, Column, Comparison, Condition, Constant, IsNull, Length, Like, Not, OneOf, Or, Value

LEFT_OUT = "left out by data.replayFrom.where"
"""Why a sample is `invalid` that a condition did not choose."""
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}


def matching(table: pa.Table, condition: Condition) -> np.ndarray:
    """[N] bool: the rows for which `condition` is true; as in SQL it is neither true nor false where a null decides."""
    found = _truth(table, condition)
    if isinstance(found, pa.Scalar):  # no column in it
        return np.full(table.num_rows, bool(found.as_py()))
    return np.asarray(pc.fill_null(found, False).to_numpy(zero_copy_only=False), np.bool_)


def rows(table: pa.Table, condition: Condition | None) -> pa.Table:
    """The rows for which `condition` is true; None: all."""
    return table if condition is None else table.filter(pa.array(matching(table, condition)))


def narrowed(table: pa.Table, condition: Condition | None) -> pa.Table:
    """All rows, so that groups stay whole; those that `condition` is not true for are invalid."""
    if condition is None:
        return table
    place, known = table.schema.get_field_index("invalid"), table["invalid"].combine_chunks()
    keep = pc.or_(pa.array(matching(table, condition)), pc.is_valid(known))
    marked = pc.if_else(keep, known, pa.scalar(LEFT_OUT, known.type))
    return table.set_column(place, table.schema.field(place), marked)


def _truth(table: pa.Table, condition: Condition) -> Any:
    if isinstance(condition, And):
        return pc.and_kleene(_truth(table, condition.left), _truth(table, condition.right))
    if isinstance(condition, Or):
        return pc.or_kleene(_truth(table, condition.left), _truth(table, condition.right))
    if isinstance(condition, Not):
        return pc.invert(_truth(table, condition.condition))
    if isinstance(condition, Comparison):
        return _COMPARE[condition.operator](_value(table, condition.left), _value(table, condition.right))
    value = _value(table, condition.value)
    if isinstance(condition, IsNull):
        return pc.is_null(value)
    if isinstance(condition, Like):
        return pc.match_like(value, condition.pattern)
    assert isinstance(condition, OneOf)
    found = pc.equal(value, pa.scalar(condition.choices[0]))
    for choice in condition.choices[1:]:
        found = pc.or_kleene(found, pc.equal(value, pa.scalar(choice)))
    return found


def _value(table: pa.Table, value: Value) -> Any:
    if isinstance(value, Column):
        return table[value.name].combine_chunks()
    if isinstance(value, Length):
        return pc.list_value_length(table[value.column].combine_chunks())
    if isinstance(value, Constant):
        return pa.scalar(value.value)
    return pc.map_lookup(table["rewards"].combine_chunks(), pa.scalar(value.name, pa.string()), "first")
