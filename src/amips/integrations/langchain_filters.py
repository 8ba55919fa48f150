"""Filters of LangChain's stores, in the words of most of them, as conditions.

    {"lang": "en", "year": {"$gte": 2020}}                      all of these
    {"$or": [{"tags": {"$contains": "new"}}, {"price": None}]}

Operators of fields: $eq $ne $gt $gte $lt $lte $in $nin $between $exists $like $ilike, $contains (a list with
this element); of filters: $and $or $not. What is within a mapping is named with dots.
"""

from collections.abc import Callable
from typing import Any

from amips.errors import AmipsError
from amips.integrations.conditions import (
    All,
    Compare,
    Condition,
    Exists,
    Has,
    Matches,
    Not,
    Operator,
    Some,
    equal,
    one_of,
    scalar,
    shallow,
)

Filter = dict[str, Any]

_ORDERS: dict[str, Operator] = {"$gt": ">", "$gte": ">=", "$lt": "<", "$lte": "<="}
_FIELD_OPERATORS: dict[str, Callable[[str, Any], Condition]] = {
    "$eq": equal,
    "$ne": lambda field, value: Not(equal(field, value)),
    "$in": lambda field, value: one_of(field, _listed(value)),
    "$nin": lambda field, value: Not(one_of(field, _listed(value))),
    "$exists": lambda field, value: Exists(field) if _flag(value) else Not(Exists(field)),
    "$between": lambda field, value: _between(field, *value),
    "$contains": lambda field, value: Has(field, scalar(value)),
    "$like": lambda field, value: Matches(field, _text(value), like=True),
    "$ilike": lambda field, value: Matches(field, _text(value), ignore_case=True, like=True),
}


@shallow
def condition_of(filter: Filter | None) -> Condition | None:
    """A filter as a condition; None of none."""
    if filter is None:
        return None
    if not isinstance(filter, dict):
        raise AmipsError(f"filter: a {type(filter).__name__}, expected a dict such as {{'lang': 'en'}}")
    parts: list[Condition] = []
    for name, value in filter.items():
        if not isinstance(name, str):
            raise AmipsError(f"filter: {name!r} is no name of a field")
        if name in ("$and", "$or"):
            if not isinstance(value, list | tuple):
                raise AmipsError(f"filter: {name} does not take {value!r}: expected a list of filters")
            inner = tuple(one for one in map(condition_of, value) if one is not None)
            parts.append(All(inner) if name == "$and" else Some(inner))
        elif name == "$not":
            parts.append(Not(condition_of(value) or All(())))
        elif name.startswith("$"):
            raise AmipsError(f"filter: {name} is not an operator of filters: expected $and, $or, $not")
        elif isinstance(value, dict) and any(str(one).startswith("$") for one in value):
            parts += [_operation(name, operator, operand) for operator, operand in value.items()]
        else:
            parts.append(equal(name, value))
    return parts[0] if len(parts) == 1 else All(tuple(parts))


def _operation(field: str, operator: str, value: Any) -> Condition:
    try:
        if operator in _ORDERS:
            return Compare(field, _ORDERS[operator], scalar(value))
        return _FIELD_OPERATORS[operator](field, value)
    except KeyError:
        known = ", ".join([*_ORDERS, *_FIELD_OPERATORS])
        raise AmipsError(f"filter: {operator} is not an operator of fields: expected {known}") from None
    except TypeError:
        raise AmipsError(f"filter: {operator} does not take {value!r}") from None


def _listed(value: Any) -> Any:
    if isinstance(value, str | dict):  # which would be taken apart
        raise TypeError
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _between(field: str, low: Any, high: Any) -> Condition:
    return All((Compare(field, ">=", scalar(low)), Compare(field, "<=", scalar(high))))
