"""The table of vectors that every other room is given."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

BLOCK_BYTES = 1 << 25


@dataclass(frozen=True)
class Vectors:
    """n rows of dimension d, read as float32.

    `read(start, stop)` gives raw rows in the stored type. `array` is the whole table where one is
    addressable (in memory, or a memory-mapped file), which makes `take` of scattered rows cheap.
    """

    name: str
    n: int
    d: int
    read: Callable[[int, int], NDArray[Any]]
    array: NDArray[Any] | None = None

    def __len__(self) -> int:
        return self.n

    @property
    def resident(self) -> Floats | None:
        """The table itself when it is a contiguous float32 array in memory: using it costs no copy."""
        a = self.array
        ready = a is not None and a.dtype == np.float32 and a.flags.c_contiguous
        return a if ready and not isinstance(a, np.memmap) else None

    def rows(self, start: int, stop: int) -> Floats:
        """Rows start..stop as contiguous float32."""
        return np.ascontiguousarray(self.read(start, min(stop, self.n)), dtype=np.float32)

    def take(self, ids: NDArray[np.integer[Any]]) -> Floats:
        """Scattered rows, in the order of `ids`."""
        if self.array is not None:
            return np.ascontiguousarray(self.array[ids], dtype=np.float32)
        out = np.empty((len(ids), self.d), np.float32)
        order = np.argsort(ids, kind="stable")
        for start, block in self.blocks():
            low, high = np.searchsorted(ids[order], [start, start + len(block)])
            wanted = order[low:high]
            out[wanted] = block[ids[wanted] - start]
        return out

    def blocks(self, size: int | None = None) -> Iterator[tuple[int, Floats]]:
        """(first row, rows) pairs that cover the table in order, each at most `size` rows."""
        size = size or max(1, BLOCK_BYTES // (4 * self.d))
        for start in range(0, self.n, size):
            yield start, self.rows(start, start + size)

    def load(self) -> Floats:
        """The whole table as float32, converted block by block; the array itself when it is ready."""
        if self.resident is not None:
            return self.resident
        out = np.empty((self.n, self.d), np.float32)
        for start, block in self.blocks():
            out[start : start + len(block)] = block
        return out
