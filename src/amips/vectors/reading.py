"""What readers of vectors share: checks, and errors in one line."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.errors import AmipsError, VectorError

Read = Callable[[int, int], NDArray[Any]]


def check_table(shape: tuple[int, ...], dtype: np.dtype[Any], name: str) -> None:
    """Raise VectorError unless this is a two-dimensional table of numbers."""
    if len(shape) != 2:
        raise VectorError(f"{name}: expected a table of shape [n, d], got shape {list(shape)}")
    if dtype.kind not in "fiu":
        raise VectorError(f"{name}: values of type {dtype} are not numbers; use float32, float16 or int8")


@contextmanager
def one_line(what: str) -> Iterator[None]:
    """Turn any error into one line of VectorError: libraries raise nearly anything on damaged files."""
    try:
        yield
    except AmipsError:
        raise
    except Exception as problem:
        reason = " ".join(str(problem).split())
        raise VectorError(f"{what}: {reason or type(problem).__name__}") from None


def checked(name: str, read: Read) -> Read:
    """`read`, whose errors become one line that names the file."""

    def read_checked(start: int, stop: int) -> NDArray[Any]:
        with one_line(f"{name} is damaged in or near rows {start} to {stop}"):
            return read(start, stop)

    return read_checked
