"""Conditions over attributes: strings in SQL's manner, expressions of pyarrow, or lists of tuples.

sqlglot reads the strings; what its tree says is said to pyarrow, which looks at the table. As in SQL, a
comparison with a missing value (NULL) is neither true nor false, and does not match.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.errors import AmipsError
from amips.extras import needs_extra

LONGEST = 1 << 16  # characters of a condition
DEEPEST = 200  # conditions within each other
SUPPORTED = (
    "comparisons of columns with values, AND, OR, NOT, IN (...), BETWEEN, LIKE, ILIKE, IS [NOT] NULL, and "
    "numbers, 'strings', TRUE, FALSE, DATE '2024-01-31' and TIMESTAMP '...'"
)


def matches(where: Any, table: Any) -> NDArray[np.bool_]:
    """Which rows of an Arrow table a condition holds for, [n]."""
    with needs_extra("where=", "filters", "pyarrow"):
        import pyarrow as pa
        import pyarrow.acero as acero
    expression = to_expression(where, table.schema)
    with _plain_errors(table.schema):
        source = acero.Declaration("table_source", acero.TableSourceNodeOptions(table))
        project = acero.Declaration("project", acero.ProjectNodeOptions([expression], ["match"]), [source])
        column = project.to_table(use_threads=False).column(0)
        if not pa.types.is_boolean(column.type):
            raise AmipsError(f"where: it is a value of type {column.type}, not a condition")
        mask: NDArray[np.bool_] = column.fill_null(False).to_numpy()
    return mask


def to_expression(where: Any, schema: Any) -> Any:
    """A condition as an expression of pyarrow; AmipsError if it is none, or of columns that are not there."""
    import pyarrow.compute as pc

    if isinstance(where, pc.Expression):
        return where
    if isinstance(where, str):
        return _Reader(schema).read(where)
    if isinstance(where, list | tuple) and where:
        from pyarrow.parquet import filters_to_expression

        try:
            return filters_to_expression(where)
        except (ValueError, TypeError, AttributeError):
            raise AmipsError(
                f"where: {where!r} is no list of conditions; give tuples (column, operator, value), such as "
                '[("price", "<", 20), ("lang", "in", ["en", "de"])]'
            ) from None
    raise AmipsError(
        f"where of type {type(where).__name__}: expected a string such as \"lang = 'en' and price < 20\", an "
        "expression of pyarrow.compute, or a list of tuples"
    )


@contextmanager
def _plain_errors(schema: Any) -> Iterator[None]:
    """Errors of pyarrow as one line."""
    import pyarrow as pa

    try:
        yield
    except AmipsError:
        raise
    except (pa.ArrowException, ValueError, TypeError, KeyError, OverflowError) as problem:
        line = (str(problem).splitlines() or [""])[0]
        if "No match for FieldRef" in line:
            wanted = line.partition("FieldRef.")[2].partition(" in ")[0].removeprefix("Name")
            raise _no_column(wanted.strip("()"), schema) from None
        raise AmipsError(f"where: {line or type(problem).__name__}") from None


def _no_column(name: str, schema: Any) -> AmipsError:
    return AmipsError(f"where: there is no column {name!r}; there are {', '.join(schema.names)}")


class _Reader:
    """Makes expressions of pyarrow of the tree that sqlglot reads out of a string."""

    def __init__(self, schema: Any) -> None:
        with needs_extra("where= as a string", "filters", "sqlglot"):
            import sqlglot
            from sqlglot import expressions
        import pyarrow as pa
        import pyarrow.compute as pc

        self.schema, self.pa, self.pc, self.sqlglot, self.exp = schema, pa, pc, sqlglot, expressions
        e = expressions
        self.comparisons: dict[Any, Callable[[Any, Any], Any]] = {
            e.EQ: lambda a, b: a == b,
            e.NEQ: lambda a, b: a != b,
            e.LT: lambda a, b: a < b,
            e.LTE: lambda a, b: a <= b,
            e.GT: lambda a, b: a > b,
            e.GTE: lambda a, b: a >= b,
        }

    def read(self, text: str) -> Any:
        """The expression that a string says."""
        if len(text) > LONGEST:
            raise AmipsError(f"where: {len(text):,} characters, expected at most {LONGEST:,}")
        try:
            tree = self.sqlglot.condition(text)
        except self.sqlglot.errors.SqlglotError:
            raise AmipsError(f"where: {text!r} is not a condition; there are {SUPPORTED}") from None
        except RecursionError:
            raise AmipsError("where: too many conditions within each other") from None
        with _plain_errors(self.schema):
            return self.condition(tree)

    def condition(self, node: Any, depth: int = 0) -> Any:
        """What is true or false."""
        e = self.exp
        if depth > DEEPEST:
            raise AmipsError("where: too many conditions within each other")
        negated = bool(node.args.get("negate"))
        if isinstance(node, e.Paren):
            expression = self.condition(self._parts(node, "this")[0], depth + 1)
        elif isinstance(node, e.And | e.Or):
            expression = self._chain(node, depth)
        elif isinstance(node, e.Not):
            expression = ~self.condition(self._parts(node, "this")[0], depth + 1)
        elif type(node) in self.comparisons:
            expression = self._comparison(node)
        elif isinstance(node, e.Between):
            this, low, high = self._parts(node, "this", "low", "high")
            column, kind = self._column(this)
            expression = (column >= self._value(low, kind)) & (column <= self._value(high, kind))
        elif isinstance(node, e.In):
            expression = self._in(node)
        elif isinstance(node, e.Like | e.ILike):
            this, pattern = self._parts(node, "this", "expression")
            column, kind = self._column(this)
            if not self._is_text(kind):
                raise AmipsError(f"where: LIKE is of strings; {this.name} is of type {kind}")
            text = self._value(pattern, self.pa.string()).as_py()
            expression = self.pc.match_like(column, text, ignore_case=isinstance(node, e.ILike))
        elif isinstance(node, e.Is):
            expression = self._is(node)
        elif isinstance(node, e.Column):
            expression, kind = self._column(node)
            if not self.pa.types.is_boolean(kind):
                raise AmipsError(f"where: {node.name} is of type {kind}, not a condition by itself")
        elif isinstance(node, e.Boolean):
            expression = self.pc.scalar(bool(node.this))
        else:
            raise self._unsupported(node)
        return ~expression if negated else expression

    def _parts(self, node: Any, *names: str) -> list[Any]:
        """The parts of a node by name; AmipsError if it has others, whose meaning would be lost."""
        others = {name for name, value in node.args.items() if value not in (None, False, [])}
        others -= {*names, "negate"}
        if others or any(node.args.get(name) is None for name in names):
            raise self._unsupported(node)
        return [node.args[name] for name in names]

    def _chain(self, node: Any, depth: int) -> Any:
        """All conditions that AND, or OR, joins one after the other: a tree of them may be very deep."""
        kind, last = type(node), []
        while type(node) is kind:
            node, right = self._parts(node, "this", "expression")
            last.append(right)
        expression = self.condition(node, depth + 1)
        for right in reversed(last):
            other = self.condition(right, depth + 1)
            expression = expression & other if kind is self.exp.And else expression | other
        return expression

    def _comparison(self, node: Any) -> Any:
        compare = self.comparisons[type(node)]
        left, right = self._parts(node, "this", "expression")
        if self._is_column(left) and self._is_column(right):
            return compare(self._column(left)[0], self._column(right)[0])
        if self._is_column(left):
            column, kind = self._column(left)
            return compare(column, self._value(right, kind))
        if not self._is_column(right):
            raise self._unsupported(node)
        column, kind = self._column(right)
        return compare(self.pc.scalar(self._value(left, kind)), column)

    def _in(self, node: Any) -> Any:
        this, values = self._parts(node, "this", "expressions")
        column, kind = self._column(this)
        values = [self._value(value, kind).as_py() for value in values]
        if self.pa.types.is_integer(kind):  # no other number is one of the column's
            values = [value for value in values if isinstance(value, int) and self._fits(value, kind)]
        nothing = self.pa.scalar(None, self.pa.bool_())  # is_in says False of what is missing
        return self.pc.if_else(column.is_valid(), column.isin(self.pa.array(values, kind)), nothing)

    def _fits(self, value: int, kind: Any) -> bool:
        try:
            self.pa.scalar(value, kind)
        except (self.pa.ArrowException, OverflowError):
            return False
        return True

    def _is(self, node: Any) -> Any:
        this, what = self._parts(node, "this", "expression")
        column, kind = self._column(this)
        if isinstance(what, self.exp.Null):
            return column.is_null()
        if isinstance(what, self.exp.Boolean) and self.pa.types.is_boolean(kind):
            return self.pc.if_else(column.is_valid(), column == bool(what.this), False)
        raise self._unsupported(node)

    def _is_column(self, node: Any) -> bool:
        while isinstance(node, self.exp.Paren):
            node = node.this
        return isinstance(node, self.exp.Column)

    def _column(self, node: Any) -> tuple[Any, Any]:
        """A column, and its type."""
        while isinstance(node, self.exp.Paren):
            node = node.this
        if not isinstance(node, self.exp.Column):
            raise self._unsupported(node)
        (identifier,) = self._parts(node, "this")
        if identifier.name not in self.schema.names:
            raise _no_column(identifier.name, self.schema)
        return self.pc.field(identifier.name), self.schema.field(identifier.name).type

    def _value(self, node: Any, kind: Any) -> Any:
        """A value to compare a column of a type with, as a scalar of Arrow."""
        value, shown = self._plain_value(node), node.sql()
        types = self.pa.types
        numeric = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
        fits = (
            (numeric and isinstance(value, int | float) and not isinstance(value, bool))
            or (self._is_text(kind) and isinstance(value, str))
            or (types.is_boolean(kind) and isinstance(value, bool))
            or (types.is_temporal(kind) and isinstance(value, str | date | datetime))
        )
        if not fits:
            raise AmipsError(f"where: {shown} cannot be compared with a column of type {kind}")
        if numeric:
            return self._number(value, kind)
        if types.is_temporal(kind):
            try:  # as Arrow reads strings, in the units and the time zone of the column
                text = value if isinstance(value, str) else value.isoformat()
                return self.pa.scalar(text).cast(kind)
            except self.pa.ArrowException:
                raise AmipsError(f"where: {shown} is not a value of type {kind}") from None
        return self.pa.scalar(value, kind)

    def _number(self, value: Any, kind: Any) -> Any:
        """A number as the column has them where that is exact, otherwise as it is written."""
        if self.pa.types.is_decimal(kind):
            return self.pa.scalar(Decimal(str(value)))
        if isinstance(value, float) and self.pa.types.is_integer(kind) and value.is_integer():
            value = int(value)
        if isinstance(value, int) and abs(value) >= 1 << 63:
            value = float(value)
        return self.pa.scalar(value)

    def _plain_value(self, node: Any) -> Any:
        """A number, a string, a truth value, a date or a time."""
        e = self.exp
        if isinstance(node, e.Paren):
            return self._plain_value(self._parts(node, "this")[0])
        if isinstance(node, e.Boolean):
            return bool(node.this)
        if isinstance(node, e.Neg):
            value = self._plain_value(self._parts(node, "this")[0])
            if isinstance(value, int | float) and not isinstance(value, bool):
                return -value
        elif isinstance(node, e.Literal) and node.is_string:
            return str(node.this)
        elif isinstance(node, e.Literal):
            text = str(node.this)
            return int(text) if text.isdigit() else float(text)
        elif isinstance(node, e.Cast) and isinstance(node.this, e.Literal) and node.this.is_string:
            kind = node.to.this.name
            try:
                if kind == "DATE":
                    return date.fromisoformat(str(node.this.this))
                if kind in ("TIMESTAMP", "TIMESTAMPTZ", "DATETIME"):
                    return datetime.fromisoformat(str(node.this.this))
            except ValueError:
                raise AmipsError(f"where: {node.this.sql()} is no {kind.lower()}") from None
        raise self._unsupported(node)

    def _is_text(self, kind: Any) -> bool:
        return bool(self.pa.types.is_string(kind) or self.pa.types.is_large_string(kind))

    def _unsupported(self, node: Any) -> AmipsError:
        return AmipsError(f"where: {node.sql()!r} is not supported; there are {SUPPORTED}")
