"""Files that a builder makes once."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

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
