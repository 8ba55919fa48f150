"""The SQL of conditions, on a row of the table `documents`: see `documents` for the tables."""

import json
from typing import Any

from amips.errors import AmipsError
from amips.integrations.conditions import (
    AWARE,
    ELEMENT,
    LARGEST,
    LOCAL,
    NAIVE,
    NUMBER,
    TEXT,
    TRUTH,
    WHOLE,
    All,
    Column,
    Compare,
    Condition,
    Dated,
    Equal,
    Exists,
    Has,
    Matches,
    Not,
    OneOf,
    Some,
    bound,
)


def sql_of(condition: Condition) -> tuple[str, list[Any]]:
    """A condition on a row of the table `documents` as SQL, and its parameters."""
    match condition:
        case All(parts) | Some(parts):
            if not parts:
                return ("1" if isinstance(condition, All) else "0"), []
            texts, values = zip(*(sql_of(part) for part in parts), strict=True)
            word = "AND" if isinstance(condition, All) else "OR"
            return _joined(texts, word), [one for some in values for one in some]
        case Not(part):
            text, values = sql_of(part)
            return f"NOT {text}", values
        case Exists(Column("id")):
            return "1", []
        case Exists(Column()):
            return _of_text("text IS NOT NULL", [])
        case Exists(field):
            return "number IN (SELECT number FROM fields WHERE name = ?)", [field]
        case Dated():
            return _dated(condition)
        case _:
            return _single(condition)


def _joined(texts: tuple[str, ...], word: str) -> str:
    """One after the other, in a tree that is not deep: SQLite takes a depth of 1,000."""
    if len(texts) == 1:
        return texts[0]
    half = len(texts) // 2
    return f"({_joined(texts[:half], word)} {word} {_joined(texts[half:], word)})"


def _single(condition: Compare | Equal | OneOf | Has | Matches) -> tuple[str, list[Any]]:
    """A condition that one value of a field meets."""
    field, kinds = condition.field, [TEXT]
    match condition:
        case Compare(_, operator, value):
            test, values = f"value {operator} ?", [bound(value)]
            kinds = [TEXT] if isinstance(value, str) else [NUMBER, TRUTH]
            if value != value:  # NaN is in no range, and SQLite takes it for nothing
                return "0", []
        case Equal(_, value):
            test, values, kinds = "value = ?", [value], [WHOLE]
        case OneOf(_, several):
            if isinstance(field, Column):  # SQLite takes a number for its digits there
                several = tuple(value for value in several if isinstance(value, str))
            test, values = _listed([bound(value) for value in several if value == value])
            kinds = [NUMBER, TRUTH, TEXT]
        case Has(_, value):
            test, values, kinds = "value = ?", [bound(value)], [ELEMENT]
        case Matches(_, value, False, False):
            test, values = "instr(value, ?)", [value]
        case Matches(_, value, ignore_case, like):
            test, values = f"matches(value, ?, {ignore_case:d}, {like:d})", [value]
    if isinstance(field, Column):
        column = test.replace("value", field.name)
        if TEXT not in kinds:  # a number, or a list: no text is one
            return "0", []
        return (column, values) if field.name == "id" else _of_text(column, values)
    listed = ", ".join(map(str, kinds))
    text = f"number IN (SELECT number FROM fields WHERE name = ? AND kind IN ({listed}) AND {test})"
    return text, [field, *values]


def _listed(values: list[Any]) -> tuple[str, list[Any]]:
    """The test that a value is one of these, which go as one parameter: SQLite takes 32,766 of them.

    Fractions, which SQLite's JSON may read with another last bit, and what JSON has no word for go by
    themselves.
    """
    apart = [value for value in values if _goes_apart(value)]
    others = [int(value) if isinstance(value, float) else value for value in values if not _goes_apart(value)]
    test = "value IN (SELECT atom FROM json_each(?))"
    if apart:
        test = f"({test} OR value IN ({', '.join('?' * len(apart))}))"
    return test, [json.dumps(others, ensure_ascii=False), *apart]


def _goes_apart(value: Any) -> bool:
    if isinstance(value, str):
        return "\0" in value
    return isinstance(value, float) and not (value.is_integer() and abs(value) < LARGEST)


def _of_text(test: str, values: list[Any]) -> tuple[str, list[Any]]:
    return f"number IN (SELECT number FROM contents WHERE {test})", values


def _dated(condition: Dated) -> tuple[str, list[Any]]:
    field, operator = condition.field, condition.operator
    if isinstance(field, Column):
        raise AmipsError(f"the {field.name} of a document is no date: compare a field of its metadata")
    if condition.utc is None:
        test, values = f"kind IN ({NAIVE}, {LOCAL}) AND value {operator} ?", [condition.local]
    else:
        test = f"(kind = {AWARE} AND value {operator} ? OR kind = {NAIVE} AND value {operator} ?)"
        values = [condition.utc, condition.local]
    return f"number IN (SELECT number FROM fields WHERE name = ? AND {test})", [field, *values]
