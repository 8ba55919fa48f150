"""Arrow columns of vectors: Parquet and Arrow files, and tables, batches and arrays in memory."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.errors import VectorError
from amips.extras import needs_extra
from amips.vectors.reading import check_table, checked, one_line
from amips.vectors.vectors import Vectors

PARQUET = ".parquet"
ARROW = (PARQUET, ".arrow", ".feather")


@dataclass(frozen=True)
class Groups:
    """A table in groups of rows: the row groups of a Parquet file, or the chunks of what is in memory.

    Args:
        name: of the file, or of what the table is for.
        schema: of Arrow.
        sizes: rows in each group.
        read: a column of a group, as an Arrow array.
    """

    name: str
    schema: Any
    sizes: list[int]
    read: Callable[[int, str], Any]


def open_arrow(path: Path, column: str | None, file: Any = None, name: str = "") -> Vectors:
    """The vectors in a column of a Parquet or Arrow file: the one named, or its only list column.

    `file` is what to read in the place of `path` where that is not on this machine, `name` what to call it.
    """
    groups = file_groups(path, file, name)
    return _vectors(groups, _vector_column(groups, column))


def from_arrow(source: Any, role: str) -> Vectors:
    """The vectors in an Arrow table or record batch (its only list column), or in an array of lists."""
    import pyarrow as pa

    if isinstance(source, pa.Array | pa.ChunkedArray):
        source = pa.table({role: source})
        groups = table_groups(source, role)
        if not _is_list(source.schema.field(0).type):
            raise VectorError(
                f"{role}: an Arrow array of {source.schema.field(0).type}, expected lists of numbers"
            )
        return _vectors(groups, role)
    table = pa.Table.from_batches([source]) if isinstance(source, pa.RecordBatch) else source
    groups = table_groups(table, role)
    return _vectors(groups, _vector_column(groups, None))


def read_column(path: Path, column: str | None) -> Any:
    """A column that is no list, whole: the one named, or the only one of whole numbers or strings."""
    groups = file_groups(path)
    import pyarrow as pa

    names = [field.name for field in groups.schema if _is_id(field.type)]
    if column is None and len(names) != 1:
        raise VectorError(
            f"{path}: {len(names)} columns of numbers or strings {names}; name one: {path}:NAME"
        )
    column = column or names[0]
    if column not in groups.schema.names:
        raise VectorError(f"{path}: no column {column!r}; it has {groups.schema.names}")
    with one_line(f"{path}:{column} is damaged"):
        parts = [groups.read(g, column) for g in range(len(groups.sizes))]
        chunks = [chunk for part in parts for chunk in getattr(part, "chunks", [part])]
        return pa.chunked_array(chunks, groups.schema.field(column).type)


def file_groups(path: Path, file: Any = None, name: str = "") -> Groups:
    """The rows of a Parquet or Arrow file, of which a group is read at a time; as in `open_arrow`."""
    source, name = (path if file is None else file), name or str(path)
    with needs_extra(f"reading {path}", "formats", "pyarrow"):
        import pyarrow.feather
        import pyarrow.parquet as pq
    if path.suffix.lower() != PARQUET:
        return table_groups(pyarrow.feather.read_table(source, memory_map=file is None), name)
    parquet = pq.ParquetFile(source)
    sizes = [parquet.metadata.row_group(g).num_rows for g in range(parquet.num_row_groups)]

    def read(g: int, column: str) -> Any:
        return parquet.read_row_group(g, columns=[column]).column(column)

    return Groups(name, parquet.schema_arrow, sizes, read)


def table_groups(table: Any, name: str) -> Groups:
    """The rows of an Arrow table in memory, in groups that are as long as the chunks of its first column."""
    sizes = [len(chunk) for chunk in table.column(0).chunks] if table.num_columns else []
    starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).tolist()

    def read(g: int, column: str) -> Any:
        return table.column(column).slice(starts[g], sizes[g])

    return Groups(name, table.schema, sizes, read)


def _is_list(kind: Any) -> bool:
    import pyarrow.types as kinds

    return bool(kinds.is_fixed_size_list(kind) or kinds.is_list(kind) or kinds.is_large_list(kind))


def _is_id(kind: Any) -> bool:
    import pyarrow.types as kinds

    strings = kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_string_view(kind)
    return bool(strings or kinds.is_integer(kind))


def _vector_column(groups: Groups, column: str | None) -> str:
    lists = [field.name for field in groups.schema if _is_list(field.type)]
    if column is None and len(lists) != 1:
        raise VectorError(
            f"{groups.name}: {len(lists)} list columns {lists}; name the one to read: {groups.name}:NAME"
        )
    column = column or lists[0]
    if column not in lists:
        raise VectorError(f"{groups.name}: no list column {column!r}; it has {lists}")
    return column


def _vectors(groups: Groups, column: str) -> Vectors:
    """The lists of a column as rows."""
    name = groups.name if groups.name == column else f"{groups.name}:{column}"
    kind, sizes = groups.schema.field(column).type, groups.sizes
    starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    fixed = getattr(kind, "list_size", None)
    cache: dict[int, NDArray[Any]] = {}

    def rows_of(g: int) -> NDArray[Any]:
        """One group as a table; the last one read is kept, since blocks are smaller than groups."""
        if g not in cache:
            rows = _rows(groups.read(g, column), fixed, name, int(starts[g]))
            cache.clear()
            cache[g] = rows
        return cache[g]

    def read(start: int, stop: int) -> NDArray[Any]:
        parts = []
        for g in range(int(np.searchsorted(starts, start, "right")) - 1, len(sizes)):
            if starts[g] >= stop:
                break
            part = rows_of(g)
            if part.shape[1] != d:
                raise VectorError(f"{name}: row {starts[g]} has dimension {part.shape[1]}, not {d}")
            parts.append(part[max(0, start - starts[g]) : stop - starts[g]])
        return np.concatenate(parts) if parts else np.empty((0, d), np.float32)

    filled = next((g for g, size in enumerate(sizes) if size), None)
    if filled is None:
        return Vectors(name, 0, fixed or 0, read)
    sample = rows_of(filled)
    check_table(sample.shape, sample.dtype, name)
    d = sample.shape[1]
    return Vectors(name, int(starts[-1]), d, checked(groups.name, read))


def _rows(column: Any, fixed: int | None, name: str, start: int) -> NDArray[Any]:
    """The lists of one group as a table; `start` is its first row, for messages."""
    import pyarrow as pa

    cells = column.combine_chunks()
    cells = cells.chunk(0) if isinstance(cells, pa.ChunkedArray) else cells
    cells.validate(full=True)  # offsets of a damaged file could point anywhere
    if cells.null_count:
        raise VectorError(f"{name} has an empty cell in rows {start} to {start + len(cells)}")
    flat = cells.flatten().to_numpy(zero_copy_only=False)
    width = fixed if fixed is not None else len(flat) // max(1, len(cells))
    if fixed is None and (np.diff(cells.offsets.to_numpy()) != width).any():
        raise VectorError(f"{name}: lists differ in length near row {start}")
    rows: NDArray[Any] = flat.reshape(len(cells), width)
    return rows
