"""The table of vectors that every other room is given."""

import mmap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

BLOCK_BYTES = (
    1 << 23
)  # that a pass holds at a time: the least memory that anything here needs follows from it
GATHER = 128  # rows taken from a memory-mapped file before its pages are given back
READERS = 4  # threads that wait for scattered rows of a file: a disk answers many requests at once
READ_AROUND = 1 << 17  # bytes that the system reads of a mapped file where one is asked for


@dataclass(frozen=True)
class Source:
    """A file that vectors were opened from, so that another process can open it, too.

    Args:
        name: what `open_vectors` was given: an absolute path or an address, with what is named inside.
        role: as there.
        stamp: size and time of the file, by which another one is told from it.
    """

    name: str
    role: str
    stamp: tuple[int, int]


@dataclass(frozen=True)
class Vectors:
    """n rows of dimension d, read as float32.

    `read(start, stop)` gives raw rows in the stored type. `array` is the whole table where one is
    addressable (in memory, or a memory-mapped file), which makes `take` of scattered rows cheap. `source`
    is the file that they are read from, if it is one.
    """

    name: str
    n: int
    d: int
    read: Callable[[int, int], NDArray[Any]]
    array: NDArray[Any] | None = None
    source: Source | None = None

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
        if self.array is not None:
            return gather(self.array, ids)
        out = np.empty((len(ids), self.d), np.float32)
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


def rows_of(vectors: Vectors, ids: NDArray[np.int64]) -> Vectors:
    """These rows (ascending) of vectors, read where they are when they are asked for."""
    return Vectors(vectors.name, len(ids), vectors.d, lambda low, high: vectors.take(ids[low:high]))


def gather(array: NDArray[Any], ids: NDArray[np.integer[Any]]) -> Floats:
    """Rows of a memory-mapped table as float32, in the order of `ids`, read in one pass from low to high.

    Its pages are given back: scattered access would in time hold the whole file in memory. Where rows are
    far apart, several threads wait for them, and the system reads only what is asked for.
    """
    order = np.argsort(ids, kind="stable")
    out = np.empty((len(ids), *array.shape[1:]), np.float32)

    def read(low: int) -> None:
        part = order[low : low + GATHER]
        with np.errstate(over="ignore"):
            out[part] = array[ids[part]]

    starts, file = range(0, len(ids), GATHER), mapped_file(array)
    if file is None or not hasattr(mmap, "MADV_RANDOM"):
        for low in starts:
            read(low)
        return out

    def read_and_give_back(low: int) -> None:
        read(low)
        file.madvise(mmap.MADV_DONTNEED)  # the system maps 16 pages for one; who still needs one has it again

    far_apart = len(ids) * READ_AROUND < array.nbytes
    if far_apart:
        file.madvise(mmap.MADV_RANDOM)
    try:
        if far_apart and len(starts) > 1:
            with ThreadPoolExecutor(READERS) as pool:
                for _ in pool.map(read_and_give_back, starts):
                    pass
        else:
            for low in starts:
                read_and_give_back(low)
    finally:
        if far_apart:
            file.madvise(mmap.MADV_NORMAL)
    return out


def _float32(raw: NDArray[Any]) -> Floats:
    """Contiguous float32; what is too large becomes infinite, which `inspect` names."""
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(raw, dtype=np.float32)


def mapped_file(array: NDArray[Any]) -> mmap.mmap | None:
    """What maps the file that an array is in; None of one in memory."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, mmap.mmap) else None
