"""Conditions on documents: what the filters of every framework become; `condition_sql` makes SQL of them.

A document's metadata is kept as rows of a table, (name, kind, value, number of the document), in that order:
a comparison is a range of an index, whatever the number of documents. A condition holds for a document or
does not: what is missing equals nothing, is in no range, and is unequal to everything.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from functools import wraps
from typing import Any, Literal, TypeVar

import numpy as np

from amips.errors import AmipsError

Operator = Literal["=", "<", "<=", ">", ">="]
Scalar = str | int | float | bool
Row = tuple[str, int, Any]  # name, kind, value
Filters = TypeVar("Filters")
Made = TypeVar("Made")

# Kinds of rows. Single values are compared neither with elements of a list nor with a list or a mapping as a
# whole.
NUMBER, TRUTH, TEXT, ELEMENT, WHOLE = range(5)
# A text that is a date of ISO 8601 also has its microseconds: as it stands, without a time zone; in UTC, with
# one; as it stands, with one.
NAIVE, AWARE, LOCAL = range(5, 8)

MOST_LEVELS = 100  # of conditions in each other
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
    if plain:
        parts.append(OneOf(field, tuple(map(scalar, plain))))
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
                yield name, ELEMENT, bound(element)
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
        yield name, NUMBER, bound(value)


def bound(value: Scalar) -> Any:
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


def shallow(build: Callable[[Filters], Made]) -> Callable[[Filters], Made]:
    """A function that makes conditions of filters, with one line of AmipsError where they are too deep."""

    @wraps(build)
    def call(filters: Filters) -> Made:
        problem = f"filter: it is nested too deeply: at most {MOST_LEVELS} filters in each other"
        try:
            condition = build(filters)
        except RecursionError:
            raise AmipsError(problem) from None
        layer: list[Any] = [condition]
        for _ in range(MOST_LEVELS + 1):
            layer = [one for part in layer for one in _inner(part)]
        if layer:
            raise AmipsError(problem)
        return condition

    return call


def _inner(condition: Any) -> "tuple[Condition, ...]":
    match condition:
        case All(parts) | Some(parts):
            return parts
        case Not(part):
            return (part,)
    return ()


def is_everything(condition: "Condition | None") -> bool:
    """Whether a condition says nothing, so that every document meets it."""
    match condition:
        case None:
            return True
        case All(parts):
            return all(map(is_everything, parts))
        case Some(parts):
            return any(map(is_everything, parts))
        case Not(part):
            return is_nothing(part)
    return False


def is_nothing(condition: "Condition") -> bool:
    """Whether no document meets a condition, whatever it has."""
    match condition:
        case All(parts):
            return any(map(is_nothing, parts))
        case Some(parts):
            return all(map(is_nothing, parts))
        case Not(part):
            return is_everything(part)
    return False
