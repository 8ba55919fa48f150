"""Data frames with a column of vectors, of pandas, polars or any library that speaks as they do.

Nothing is imported: a frame has `columns`, a column is what `frame[name]` gives, and numpy reads it.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.errors import VectorError
from amips.vectors.reading import check_table

LOOK = 100  # rows of a column that are looked at to see what it holds
STEP = 4096  # rows that are converted at a time


def is_frame(source: Any) -> bool:
    """Whether this is a data frame."""
    return hasattr(source, "columns") and hasattr(source, "__getitem__") and not hasattr(source, "read")


def from_frame(frame: Any, role: str) -> tuple[str, Any]:
    """The only column of vectors and its name; the frame itself where all of its columns are numbers."""
    names = list(frame.columns)
    vectors = [name for name in names if _holds_vectors(frame[name])]
    if len(vectors) == 1:
        return f"{role}:{vectors[0]}", frame[vectors[0]]
    if vectors:
        raise VectorError(
            f"{role}: {len(vectors)} columns of vectors {vectors}; give one: frame[{vectors[0]!r}]"
        )
    if names and all(np.asarray(frame[name][:1]).dtype.kind in "fiu" for name in names):
        return role, frame
    raise VectorError(f"{role}: none of the columns {names} holds vectors; expected one column of lists")


def _holds_vectors(column: Any) -> bool:
    values = np.asarray(column[:LOOK])
    if values.ndim == 2:
        return True
    return values.dtype == object and any(isinstance(row, list | tuple | np.ndarray) for row in values)


def stacked(column: NDArray[Any], name: str) -> NDArray[np.float32]:
    """Rows that are objects, lists or arrays of numbers, as one table [n, d] of float32."""
    lengths = np.fromiter((_length(row) for row in column), np.int64, len(column))
    if (empty := np.flatnonzero(lengths < 0)).size:
        raise VectorError(f"{name}: row {empty[0]} is no list of numbers but {column[empty[0]]!r}")
    if (other := np.flatnonzero(lengths != lengths[0])).size:
        raise VectorError(
            f"{name}: row {other[0]} has dimension {lengths[other[0]]}, but row 0 has {lengths[0]}"
        )
    out = np.empty((len(column), lengths[0]), np.float32)
    for low in range(0, len(column), STEP):
        rows = np.asarray(column[low : low + STEP].tolist())
        check_table(rows.shape, rows.dtype, name)
        with np.errstate(over="ignore"):  # what is too large becomes infinite, which `inspect` names
            out[low : low + STEP] = rows
    return out


def _length(row: Any) -> int:
    return (
        len(row) if isinstance(row, list | tuple) or (isinstance(row, np.ndarray) and row.ndim == 1) else -1
    )
