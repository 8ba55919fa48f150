"""Filters of Haystack as conditions: comparisons of fields, and AND, OR, NOT of them.

A text that is a date of ISO 8601 is compared as a moment. What Haystack's own stores say of a document whose
value cannot be compared (a text with a number) is an error there, and no match here.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from haystack.errors import FilterError

from amips.errors import AmipsError
from amips.integrations.conditions import (
    All,
    Column,
    Compare,
    Condition,
    Field,
    Not,
    Operator,
    Some,
    dated,
    equal,
    moment_of,
    one_of,
    plain_value,
    shallow,
)

_COLUMNS: dict[str, Field] = {"id": Column("id"), "content": Column("text")}
_ORDERS: dict[str, Operator] = {">": ">", ">=": ">=", "<": "<", "<=": "<="}
_NOTHING = Some(())
_JOINTS: dict[str, Callable[[tuple[Condition, ...]], Condition]] = {
    "AND": All,
    "OR": Some,
    "NOT": lambda parts: Not(All(parts)),
}
_Made = TypeVar("_Made")


def condition_of(filters: dict[str, Any] | None) -> Condition | None:
    """A filter as a condition; None of none. FilterError, of Haystack, of what is no filter."""
    if not filters:
        return None
    try:
        return _condition(filters)
    except AmipsError as problem:
        raise FilterError(str(problem)) from None


@shallow
def _condition(filters: Any) -> Condition:
    if not isinstance(filters, dict):
        raise FilterError(f"a filter is a {type(filters).__name__}: expected a dict")
    if "field" not in filters:
        _check_has(filters, "operator", "conditions")
        if not isinstance(filters["conditions"], list | tuple):
            raise FilterError(f"'conditions' is {filters['conditions']!r}: expected a list of filters")
        parts = tuple(_condition(part) for part in filters["conditions"])
        return _known(_JOINTS, filters["operator"])(parts)
    _check_has(filters, "operator", "value")
    return _known(_OPERATORS, filters["operator"])(_field(filters["field"]), plain_value(filters["value"]))


def _field(name: Any) -> Field:
    if not isinstance(name, str):
        raise FilterError(f"'field' is {name!r}: expected a name, such as meta.year")
    return _COLUMNS[name] if name in _COLUMNS else name.removeprefix("meta.")


def _equal(field: Field, value: Any) -> Condition:
    same = equal(field, value)
    moment = moment_of(value) if isinstance(value, str) and isinstance(field, str) else None
    return same if moment is None else Some((same, dated(field, "=", moment)))


def _ordered(operator: Operator) -> Callable[[Field, Any], Condition]:
    def condition(field: Field, value: Any) -> Condition:
        if value is None:
            return _NOTHING
        if isinstance(value, int | float):
            return Compare(field, operator, value)
        moment = moment_of(value) if isinstance(value, str) else None
        if moment is None:
            raise FilterError(f"{operator} {value!r}: expected a number, or a date of ISO 8601")
        return dated(field, operator, moment)

    return condition


def _one_of(field: Field, value: Any) -> Condition:
    if not isinstance(value, list):
        raise FilterError(f"a filter for one of several values has {value!r}: expected a list")
    values = [plain_value(one) for one in value]
    dates = tuple(_equal(field, one) for one in values if isinstance(one, str) and moment_of(one) is not None)
    return Some((one_of(field, values), *dates))


_OPERATORS: dict[str, Callable[[Field, Any], Condition]] = {
    "==": _equal,
    "!=": lambda field, value: Not(_equal(field, value)),
    "in": _one_of,
    "not in": lambda field, value: Not(_one_of(field, value)),
    **{name: _ordered(operator) for name, operator in _ORDERS.items()},
}


def _known(table: dict[str, _Made], operator: Any) -> _Made:
    if operator not in table:
        raise FilterError(f"{operator!r} is not an operator here: expected one of {', '.join(table)}")
    return table[operator]


def _check_has(filters: dict[str, Any], *names: str) -> None:
    for name in names:
        if name not in filters:
            raise FilterError(f"a filter has no {name!r}: {filters}")
