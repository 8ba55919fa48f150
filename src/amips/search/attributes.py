"""Attributes of keys: an Arrow table, one row a key in the order of the key numbers.

    attributes.arrow    in a bundle: an Arrow IPC file, not compressed

pyarrow is imported when the table is looked at, not before: who searches without a condition needs none. Rows
of keys that are added are streams of Arrow IPC, in a record of the changes as bytes; several may follow each
other.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from amips.errors import AmipsError, BundleError
from amips.extras import needs_extra
from amips.files import write_atomic, write_atomically
from amips.untrusted import open_regular

Bytes = NDArray[np.uint8]

ATTRIBUTES = "attributes.arrow"
MAGIC = b"ARROW1"
MOST_PARTS = 32  # that are kept apart


@dataclass(frozen=True, eq=False)
class Attributes:
    """A table of n rows, in parts: each its number of rows, and a table, bytes of one, or None for no values.

    Args:
        parts: the first says what columns there are.
        name: of the file, for messages.
    """

    parts: tuple[tuple[int, Any], ...]
    name: str = "attributes"

    @classmethod
    def of(cls, table: Any) -> "Attributes":
        """The attributes in a table that `read_table` gave."""
        return cls(((table.num_rows, table),))

    @classmethod
    def load(cls, path: Path, n: int) -> "Attributes":
        """The file of a bundle with n keys; what is in it is looked at when it is needed."""
        with open_regular(path, BundleError, follow=False) as file:
            data = file.read(os.fstat(file.fileno()).st_size)
        if len(data) < 2 * len(MAGIC) or not data.startswith(MAGIC) or not data.endswith(MAGIC):
            raise BundleError(f"{path} is damaged: it is no Arrow file")
        return cls(((n, data),), str(path))

    @property
    def n(self) -> int:
        """The number of rows."""
        return sum(rows for rows, _ in self.parts)

    @cached_property
    def table(self) -> Any:
        """The whole table."""
        pa = arrow("attributes")
        tables: list[Any] = []
        for rows, part in self.parts:
            with damaged(self.name):
                if part is None:
                    part = nothing(tables[0].schema, rows)
                elif isinstance(part, bytes):
                    part = checked_table(_decoded(part), self.name)
                if part.num_rows != rows:
                    raise BundleError(f"{self.name} is damaged: {part.num_rows:,} rows, expected {rows:,}")
                if tables and part.schema != tables[0].schema:
                    raise BundleError(f"{self.name} is damaged: rows of other columns than there are")
            tables.append(part)
        return tables[0] if len(tables) == 1 else pa.concat_tables(tables).combine_chunks()

    @property
    def columns(self) -> list[tuple[str, str]]:
        """Names and types."""
        return [(field.name, str(field.type)) for field in self.table.schema]

    def with_rows(self, rows: int, streams: Bytes | None) -> "Attributes":
        """The same with more rows; None for rows without values."""
        if streams is None and self.parts[-1][1] is None:
            parts = (*self.parts[:-1], (self.parts[-1][0] + rows, None))
        else:
            parts = (*self.parts, (rows, None if streams is None else streams.tobytes()))
        more = Attributes(parts, self.name)
        return Attributes.of(more.table) if len(parts) > MOST_PARTS else more

    def rows_of(self, numbers: NDArray[np.int64]) -> "Attributes":
        """The rows of these keys alone."""
        return Attributes.of(self.table.take(numbers).combine_chunks())

    def save(self, directory: Path) -> list[str]:
        """Write the file of a bundle; its name."""
        path = directory / ATTRIBUTES
        first = self.parts[0][1]
        if len(self.parts) == 1 and isinstance(first, bytes) and first.startswith(MAGIC):
            write_atomic(path, first)
        else:
            write_atomically(path, self._write)
        return [ATTRIBUTES]

    def _write(self, file: BinaryIO) -> None:
        with arrow("attributes").ipc.new_file(file, self.table.schema) as writer:
            writer.write_table(self.table)


def read_table(source: Any, n: int, what: str = "attributes") -> Any:
    """An Arrow table of n rows, whose columns can be filtered by.

    Args:
        source: an Arrow table or record batch, a pandas data frame, or a Parquet or Arrow file.
    """
    pa = arrow(what)
    if isinstance(source, str | Path):
        what, source = str(source), _read_file(Path(source), what)
    elif isinstance(source, pa.RecordBatch):
        source = pa.Table.from_batches([source])
    elif not isinstance(source, pa.Table):
        if not hasattr(source, "columns") or not hasattr(source, "dtypes"):
            raise AmipsError(
                f"{what} of type {type(source).__name__}: expected an Arrow table, a pandas data frame, or a "
                "Parquet or Arrow file"
            )
        with one_line(f"{what} cannot be read as a table"):
            source = pa.Table.from_pandas(source, preserve_index=False)
    with one_line(f"{what} cannot be used"):
        table = checked_table(_plain(source), what, AmipsError)
    if table.num_rows != n:
        raise AmipsError(f"{what}: {table.num_rows:,} rows for {n:,} keys: give one for each, in their order")
    return table.combine_chunks()


def rows_like(source: Any, m: int, schema: Any) -> Any:
    """A table of m rows with the columns of a schema; those that it lacks have no values.

    AmipsError if it has others, or of another type.
    """
    pa, table = arrow("attributes"), read_table(source, m)
    if others := [name for name in table.schema.names if name not in schema.names]:
        raise AmipsError(
            f"attributes: there is no column {others[0]!r}; there are {', '.join(schema.names)}; "
            "nothing was changed"
        )
    columns = []
    for field in schema:
        if field.name not in table.schema.names:
            columns.append(pa.nulls(m, field.type))
            continue
        column = table.column(field.name)
        try:
            if not _alike(column.type, field.type):
                raise pa.ArrowInvalid
            columns.append(column.cast(field.type, safe=True))
        except pa.ArrowException:
            raise AmipsError(
                f"attributes: {field.name} is of type {column.type}, expected {field.type}; "
                "nothing was changed"
            ) from None
    return pa.table(columns, schema=schema).combine_chunks()


def spread(table: Any, numbers: NDArray[np.int64], n: int) -> Any:
    """A table of n rows: those of a table at these numbers, and no values elsewhere."""
    if len(numbers) == n and (np.diff(numbers) > 0).all():
        return table
    places = np.full(n, len(numbers))  # a row without values, behind the others
    places[numbers] = np.arange(len(numbers))
    return arrow("attributes").concat_tables([table, nothing(table.schema, 1)]).take(places)


def encoded(table: Any) -> Bytes:
    """The table as a stream of Arrow IPC."""
    pa = arrow("attributes")
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return np.frombuffer(sink.getvalue(), np.uint8)


def nothing(schema: Any, rows: int) -> Any:
    """So many rows without values."""
    pa = arrow("attributes")
    return pa.table([pa.nulls(rows, field.type) for field in schema], schema=schema)


def checked_table(table: Any, what: str, error: type[AmipsError] = BundleError) -> Any:
    """A table whose columns have names of their own and single values, all of it valid."""
    names, kinds = table.schema.names, arrow("attributes").types
    if not names:
        raise error(f"{what} has no columns")
    if again := [name for name in names if names.count(name) > 1]:
        raise error(f"{what} has two columns {again[0]!r}")
    for field in table.schema:
        numeric = kinds.is_integer(field.type) or kinds.is_floating(field.type)
        numeric = numeric or kinds.is_decimal(field.type)
        single = kinds.is_boolean(field.type) or kinds.is_string(field.type) or kinds.is_temporal(field.type)
        if not (numeric or single or kinds.is_null(field.type)):
            raise error(
                f"{what}: {field.name} is of type {field.type}; attributes are numbers, strings, truth "
                "values, dates and times"
            )
    table.validate(full=True)
    return table.replace_schema_metadata(None)


def arrow(what: str) -> Any:
    """pyarrow, with what is used of it here."""
    with needs_extra(what, "filters", "pyarrow"):
        import pyarrow as pa
        import pyarrow.ipc
        import pyarrow.types
    return pa


def _decoded(data: bytes) -> Any:
    """The table in an Arrow file, or in streams that follow each other."""
    pa = arrow("attributes")
    if data.startswith(MAGIC):
        return pa.ipc.open_file(pa.BufferReader(data)).read_all()
    reader, tables = pa.BufferReader(data), []
    while reader.tell() < len(data):
        tables.append(pa.ipc.open_stream(reader).read_all())
    return pa.concat_tables(tables)


def _plain(table: Any) -> Any:
    """The same with one type for strings, and values in the place of dictionaries."""
    pa = arrow("attributes")
    kinds, fields = pa.types, []
    for field in table.schema:
        kind = field.type.value_type if kinds.is_dictionary(field.type) else field.type
        view = getattr(kinds, "is_string_view", lambda kind: False)
        text = kinds.is_large_string(kind) or view(kind)
        fields.append(pa.field(field.name, pa.string() if text else kind))
    return table.cast(pa.schema(fields))


def _alike(one: Any, other: Any) -> bool:
    """Whether values of one type may be those of another: numbers both, or the same."""
    kinds = arrow("attributes").types

    def numeric(kind: Any) -> bool:
        return bool(kinds.is_integer(kind) or kinds.is_floating(kind) or kinds.is_decimal(kind))

    dates = kinds.is_temporal(one) and kinds.is_temporal(other)
    return bool(one == other or kinds.is_null(one) or (numeric(one) and numeric(other)) or dates)


def _read_file(path: Path, what: str) -> Any:
    pa = arrow(f"reading {path}")
    if not path.is_file():
        raise AmipsError(f"{what}: {path} does not exist")
    with one_line(f"{path} cannot be read as a table"):
        if path.suffix.lower() == ".parquet":
            import pyarrow.parquet as pq

            return pq.read_table(path)
        with pa.OSFile(str(path)) as file:
            return pa.ipc.open_file(file).read_all()


@contextmanager
def one_line(what: str, error: type[AmipsError] = AmipsError) -> Iterator[None]:
    """Turn any error into one line: pyarrow raises nearly anything on damaged data."""
    try:
        yield
    except AmipsError:
        raise
    except Exception as problem:
        line = (str(problem).splitlines() or [""])[0]
        raise error(f"{what}: {line or type(problem).__name__}") from None


def damaged(name: str) -> Any:
    """Errors as BundleError that names the file."""
    return one_line(f"{name} is damaged", BundleError)
