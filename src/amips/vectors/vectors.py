"""The table of vectors that every other room is given."""

import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

BLOCK_BYTES = 1 << 25
GATHER = 256  # rows taken from a memory-mapped file before its pages are given back


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
        return _float32(self.read(start, min(stop, self.n)))

    def take(self, ids: NDArray[np.integer[Any]]) -> Floats:
        """Scattered rows, in the order of `ids`."""
        if self.array is not None and not isinstance(self.array, np.memmap):
            return _float32(self.array[ids])
        out = np.empty((len(ids), self.d), np.float32)
        if self.array is not None:
            for low in range(0, len(ids), GATHER):
                out[low : low + GATHER] = _float32(self.array[ids[low : low + GATHER]])
                _give_back(self.array)
            return out
        order = np.argsort(ids, kind="stable")
        ascending = ids[order]
        if len(ids) and not (ascending[0] >= 0 and ascending[-1] < self.n):
            raise IndexError(f"rows {ascending[0]} to {ascending[-1]} of {self.n}")
        size, low = self._block_rows(), 0
        while low < len(ids):
            start = int(ascending[low])
            high = int(np.searchsorted(ascending, start + size))
            block = self.rows(start, int(ascending[high - 1]) + 1)
            out[order[low:high]] = block[ascending[low:high] - start]
            low = high
        return out

    def blocks(self, size: int | None = None) -> Iterator[tuple[int, Floats]]:
        """(first row, rows) pairs that cover the table in order, each at most `size` rows."""
        size = size or self._block_rows()
        for start in range(0, self.n, size):
            yield start, self.rows(start, start + size)

    def _block_rows(self) -> int:
        return max(1, BLOCK_BYTES // (4 * self.d))

    def load(self) -> Floats:
        """The whole table as float32, converted block by block; the array itself when it is ready."""
        if self.resident is not None:
            return self.resident
        out = np.empty((self.n, self.d), np.float32)
        for start, block in self.blocks():
            out[start : start + len(block)] = block
        return out


def _float32(raw: NDArray[Any]) -> Floats:
    """Contiguous float32; what is too large becomes infinite, which `inspect` names."""
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(raw, dtype=np.float32)


def _give_back(array: NDArray[Any]) -> None:
    """Drop the file pages mapped so far: scattered access would in time hold the whole file in memory."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        base.madvise(mmap.MADV_DONTNEED)
