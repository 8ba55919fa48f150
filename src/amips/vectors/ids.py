"""Ids of keys: from arrays, columns of a data frame or an Arrow table, and files."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.errors import AmipsError
from amips.npy import load_npy
from amips.vectors.arrow import ARROW, read_column
from amips.vectors.reading import one_line

LONGEST = 256  # characters of an id


def read_ids(source: Any, *, unique: bool = True) -> NDArray[Any]:
    """Ids as an array of int64 or of strings, [n].

    Raises AmipsError where one is missing or, if `unique`, comes twice.

    Args:
        source: what numpy reads as an array of whole numbers or strings (a list, a column of a data frame,
            an Arrow array), or a file: .npy; .parquet .arrow .feather, with the name of a column after a
            colon (`keys.parquet:product_id`; without it, the only column of numbers or strings); or text
            with one id a line.
    """
    name = "ids"
    if isinstance(source, str | Path):
        name, source = str(source), _read_file(str(source))
    nulls = getattr(source, "null_count", 0)  # of Arrow and polars: numpy would make floats of whole numbers
    if nulls := nulls() if callable(nulls) else nulls:
        raise AmipsError(f"{name}: {nulls:,} rows have no id; every key needs one")
    with one_line(f"{name} cannot be read as a list"):
        ids = np.asarray(source)
    if ids.dtype.kind in "iu":
        if ids.max(initial=0) > np.iinfo(np.int64).max:
            raise AmipsError(f"{name}: {ids.max()} does not fit in int64")
        ids = ids.astype(np.int64)
    elif ids.dtype.kind in "UOT" and all(isinstance(one, str) for one in _elements(source, ids)):
        if any(one.endswith("\0") for one in _elements(source, ids)):
            raise AmipsError(f"{name}: an id ends in a NUL character, which no array keeps")
        ids = ids.astype(np.str_)
        _check_strings(ids, name)
    elif ids.shape == (0,):  # of no type that says anything
        ids = np.empty(0, np.int64)
    else:
        raise AmipsError(f"{name} of type {ids.dtype}: expected whole numbers or strings")
    if unique and ids.ndim == 1:
        _check_unique(ids, name)
    return ids


def _elements(source: Any, ids: NDArray[Any]) -> Any:
    """The elements as they were: numpy makes strings of the numbers of a mixed list."""
    return source if isinstance(source, list | tuple) and ids.ndim == 1 else ids.ravel().tolist()


def _check_strings(ids: NDArray[Any], name: str) -> None:
    """AmipsError unless all can be kept as they are."""
    if not ids.size:
        return
    if (width := ids.dtype.itemsize // 4) > LONGEST:
        raise AmipsError(f"{name}: an id has {width:,} characters; {LONGEST} at most, as all take that room")
    points = np.ascontiguousarray(ids).view(np.uint32)
    if width and ((points >= 0xD800) & (points <= 0xDFFF)).any():
        raise AmipsError(f"{name}: an id has characters that do not exist (half of a surrogate pair)")


def _check_unique(ids: NDArray[Any], name: str) -> None:
    order = np.argsort(ids, kind="stable")
    again = order[1:][ids[order[1:]] == ids[order[:-1]]]
    if again.size:
        row = int(again.min())
        first = int(np.flatnonzero(ids == ids[row])[0])
        raise AmipsError(
            f"{name}: rows {first} and {row} have the same id {ids[row].item()!r}; every key needs its own"
        )


def _read_file(source: str) -> Any:
    head, colon, tail = source.rpartition(":")
    path, column = (
        (Path(head), tail) if colon and Path(head).suffix.lower() in ARROW else (Path(source), None)
    )
    if not path.exists():
        raise AmipsError(f"{path} does not exist")
    ending = path.suffix.lower()
    with one_line(f"{path} is not a readable {ending or 'text'} file"):
        if ending in ARROW:
            return read_column(path, column)
        if ending == ".npy":
            return load_npy(path, AmipsError)
        try:
            lines = path.read_text("utf-8").split("\n")
        except UnicodeDecodeError:
            raise AmipsError(f"{path} is not UTF-8 text with one id a line") from None
    lines = lines[:-1] if lines[-1] == "" else lines
    if "" in lines:
        raise AmipsError(f"{path}: line {lines.index('') + 1} has no id; every line needs one")
    return lines
