"""Ids of keys: from arrays, columns of a data frame or an Arrow table, and files."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.errors import AmipsError
from amips.npy import load_npy
from amips.vectors.arrow import ARROW, read_column
from amips.vectors.reading import one_line


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
    elif ids.dtype.kind in "UOT" and all(isinstance(one, str) for one in ids.ravel().tolist()):
        ids = ids.astype(np.str_)
    else:
        raise AmipsError(f"{name} of type {ids.dtype}: expected whole numbers or strings")
    if unique and ids.ndim == 1:
        _check_unique(ids, name)
    return ids


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
        return path.read_text("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError:
        raise AmipsError(f"{path} is not UTF-8 text with one id a line") from None
