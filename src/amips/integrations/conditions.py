"""Conditions on documents: what the filters of every framework become, and what SQL is made of.

A document's metadata is kept as rows of a table, (name, kind, value, number of the document), in that order:
a comparison is a range of an index, whatever the number of documents. A condition holds for a document or
does not: what is missing equals nothing, is in no range, and is unequal to everything.
"""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any, Literal

import numpy as np

from amips.errors import AmipsError

Operator = Literal["=", "<", "<=", ">", ">="]
Scalar = str | int | float | bool
Row = tuple[str, int, Any]  # name, kind, value

# Kinds of rows. Single values are compared neither with elements of a list nor with a list or a mapping as a
# whole.
NUMBER, TRUTH, TEXT, ELEMENT, WHOLE = range(5)
# A text that is a date of ISO 8601 also has its microseconds: as it stands, without a time zone; in UTC, with
# one; as it stands, with one.
NAIVE, AWARE, LOCAL = range(5, 8)

MOST_VALUES = 30_000  # of a list in a condition: SQLite takes 32,766 parameters
LARGEST = 2**63  # whole numbers beyond are kept as floats


@dataclass(frozen=True)
class Column:
    """What every document has beside its metadata: its id, or its text."""

    name: Literal["id", "text"]


Field = str | Column  # a name in the metadata, those of mappings within joined by dots


@dataclass(frozen=True)
class Compare:
    """A single value that is a number, a truth value or a text; True is 1, as in Python."""

    field: Field
    operator: Operator
    value: Scalar


@dataclass(frozen=True)
class Equal:
    """A list or a mapping that is this one, as JSON."""

    field: Field
    value: str


@dataclass(frozen=True)
class OneOf:
    """A single value that is one of these."""

    field: Field
    values: tuple[Scalar, ...]


@dataclass(frozen=True)
class Has:
    """A list with this element."""

    field: Field
    value: Scalar


@dataclass(frozen=True)
class Matches:
    """A text that this is a part of; a pattern if `like`, in which % is any text, and _ any character."""

    field: Field
    value: str
    ignore_case: bool = False
    like: bool = False


@dataclass(frozen=True)
class Dated:
    """A text that is a date, compared as a moment; of two, one without a time zone has that of the other.

    Args:
        local, utc: what `microseconds` makes of the moment.
    """

    field: Field
    operator: Operator
    local: int
    utc: int | None


@dataclass(frozen=True)
class Exists:
    """Anything but None."""

    field: Field


@dataclass(frozen=True)
class All:
    """Every one of these; of none, everything."""

    parts: tuple["Condition", ...]


@dataclass(frozen=True)
class Some:
    """One of these at least; of none, nothing."""

    parts: tuple["Condition", ...]


@dataclass(frozen=True)
class Not:
    """What it is not."""

    part: "Condition"


Condition = Compare | Equal | OneOf | Has | Matches | Dated | Exists | All | Some | Not


def equal(field: Field, value: Any) -> Condition:
    """The condition that a field has this value, of any type; None: that it has none."""
    if value is None:
        return Not(Exists(field))
    if isinstance(value, dict | list | tuple):
        return Equal(field, whole(value))
    return Compare(field, "=", scalar(value))


def dated(field: Field, operator: Operator, moment: datetime) -> Condition:
    """The condition that a field is a date on one side of a moment, or that moment."""
    return Dated(field, operator, *microseconds(moment))


def one_of(field: Field, values: Iterable[Any]) -> Condition:
    """The condition that a field has one of these values."""
    listed = list(values)
    plain = [value for value in listed if not isinstance(value, dict | list | tuple) and value is not None]
    others = [value for value in listed if isinstance(value, dict | list | tuple) or value is None]
    parts: list[Condition] = [equal(field, value) for value in others]
    for low in range(0, len(plain), MOST_VALUES):
        parts.append(OneOf(field, tuple(scalar(value) for value in plain[low : low + MOST_VALUES])))
    return parts[0] if len(parts) == 1 else Some(tuple(parts))


def scalar(value: Any) -> Scalar:
    """A single value as plain Python's; AmipsError of anything else."""
    value = plain_value(value)
    if not isinstance(value, str | int | float):
        raise AmipsError(
            f"a filter compares with a {type(value).__name__}: expected text, number, True, False"
        )
    return value


def plain_value(value: Any) -> Any:
    """What JSON keeps, of numpy's numbers and of dates; other values as they are."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    return value.isoformat() if isinstance(value, date) else value


def whole(value: Any) -> str:
    """A list or a mapping as JSON, equal where Python's values are equal: 1, 1.0 and True are."""
    return json.dumps(_even(value), sort_keys=True)


def _even(value: Any) -> Any:
    value = plain_value(value)
    if isinstance(value, dict):
        return {str(name): _even(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_even(one) for one in value]
    if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    return value


def rows_of(metadata: dict[str, Any]) -> set[Row]:
    """The rows by which conditions find metadata; of None and NaN, which equal nothing, there are none."""
    return {row for name, value in metadata.items() for row in _rows(str(name), plain_value(value))}


def _rows(name: str, value: Any) -> Iterator[Row]:
    if isinstance(value, dict | list | tuple):
        yield name, WHOLE, whole(value)
    if isinstance(value, dict):
        for inner, one in value.items():
            yield from _rows(f"{name}.{inner}", plain_value(one))
    elif isinstance(value, list | tuple):
        for one in value:
            element = plain_value(one)
            if isinstance(element, str | int | float) and element == element:
                yield name, ELEMENT, _bound(element)
    elif isinstance(value, bool):
        yield name, TRUTH, int(value)
    elif isinstance(value, str):
        yield name, TEXT, value
        if (moment := moment_of(value)) is not None:
            local, utc = microseconds(moment)
            yield name, NAIVE if utc is None else LOCAL, local
            if utc is not None:
                yield name, AWARE, utc
    elif isinstance(value, int | float) and not math.isnan(value):
        yield name, NUMBER, _bound(value)


def _bound(value: Scalar) -> Any:
    """A value as SQLite takes it."""
    if isinstance(value, int) and not -LARGEST <= value < LARGEST:
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return value


def moment_of(text: str) -> datetime | None:
    """The moment that a text of the form YYYY-MM-DD[THH:MM:SS...] names; None if it names none."""
    if len(text) < 10 or text[4] != "-" or text[7] != "-" or not text[:4].isdigit():
        return None
    try:
        return datetime.fromisoformat(text.removesuffix("Z") + ("+00:00" if text.endswith("Z") else ""))
    except ValueError:
        return None


def microseconds(moment: datetime) -> tuple[int, int | None]:
    """Since 1970, as the clock of the moment's time zone shows it; in UTC, None if it has no time zone."""
    epoch, step = datetime(1970, 1, 1), timedelta(microseconds=1)
    local = (moment.replace(tzinfo=None) - epoch) // step
    offset = moment.utcoffset()
    return local, None if offset is None else local - offset // step


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
            test, values = f"value {operator} ?", [_bound(value)]
            kinds = [TEXT] if isinstance(value, str) else [NUMBER, TRUTH]
            if value != value:  # NaN is in no range, and SQLite takes it for nothing
                return "0", []
        case Equal(_, value):
            test, values, kinds = "value = ?", [value], [WHOLE]
        case OneOf(_, several):
            if isinstance(field, Column):  # SQLite takes a number for its digits there
                several = tuple(value for value in several if isinstance(value, str))
            values = [_bound(value) for value in several if value == value]
            test, kinds = f"value IN ({', '.join('?' * len(values))})", [NUMBER, TRUTH, TEXT]
        case Has(_, value):
            test, values, kinds = "value = ?", [_bound(value)], [ELEMENT]
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
