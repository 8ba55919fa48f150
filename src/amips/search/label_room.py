"""Ids of keys in an array with spare places behind them: adding keys does not copy those that are there.

Snapshots that grew out of each other share the array, each its first rows: what is written behind the last is
seen by none of them.
"""

from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

LEAST = 1024  # spare places


class LabelRoom:
    """The array, and how many of its places are taken."""

    def __init__(self) -> None:
        self._array: NDArray[Any] = np.empty(0, np.int64)
        self._used = 0
        self._writing = Lock()

    def __reduce__(self) -> Any:
        """For pickle: without the array, which is copied when ids are added."""
        return LabelRoom, ()

    def followed_by(self, labels: NDArray[Any], more: NDArray[Any]) -> "tuple[NDArray[Any], LabelRoom]":
        """Labels and more of them, and the room that they are in: this one, if the labels are its last."""
        dtype, n, end = np.result_type(labels, more), len(labels), len(labels) + len(more)
        with self._writing:
            last = labels.base is self._array and self._used == n and dtype == self._array.dtype
            if last and end <= len(self._array):
                self._array[n:end] = more
                self._used = end
                return self._array[:end], self
        room = LabelRoom()
        room._array, room._used = np.empty(end + max(LEAST, end // 2), dtype), end
        room._array[:n], room._array[n:end] = labels, more
        return room._array[:end], room
