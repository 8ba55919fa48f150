"""Files that a builder makes once."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from amips.cells import Cells
from amips.errors import RunError
from amips.files import write_atomically

Value = TypeVar("Value")


def cached(
    path: Path, make: Callable[[], Value], write: Callable[[Any, Value], None], read: Callable[[Path], Value]
) -> Value:
    """What is in the file, or what `make` gives, written there; a damaged file is made again.

    Files are npz archives: each array in one has a checksum, that numpy compares.
    """
    with contextlib.suppress(Exception):  # a damaged file makes numpy raise nearly anything
        return read(path)
    value = make()
    write_atomically(path, lambda file: write(file, value))
    return value


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of an npz archive, by name."""
    with path.open("rb") as file, np.load(file) as arrays:  # numpy leaves a file that it cannot read open
        return {name: arrays[name] for name in arrays.files}


def write_cells(file: Any, cells: Cells) -> None:
    """Write a partition."""
    np.savez(file, assignment=cells.assignment, centroids=cells.centroids)


def read_cells(path: Path, n: int, c: int, d: int) -> Cells:
    """The partition; an error unless every cell number is one of a centroid."""
    arrays = read_arrays(path)
    assignment, centroids = arrays["assignment"].astype(np.int32), arrays["centroids"].astype(np.float32)
    if assignment.shape != (n,) or centroids.shape != (c, d) or not np.isfinite(centroids).all():
        raise RunError(f"{path} is damaged")
    _check_range(assignment, 0, c, path)
    return Cells(assignment, centroids)


def write_second(file: Any, second: NDArray[np.int32] | None) -> None:
    """Write second cells."""
    np.savez(file, second=np.empty(0, np.int32) if second is None else second)


def read_second(path: Path, n: int, c: int) -> NDArray[np.int32] | None:
    """The second cells of n keys; an error unless each is one of c, or -1."""
    second = read_arrays(path)["second"].astype(np.int32)
    if second.shape not in ((0,), (n,)):
        raise RunError(f"{path} is damaged")
    _check_range(second, -1, c, path)
    return second if len(second) else None


def _check_range(numbers: NDArray[np.int32], low: int, high: int, path: Path) -> None:
    if numbers.size and not (low <= numbers.min() and numbers.max() < high):
        raise RunError(f"{path} is damaged")
