"""The files of a cell store: plain arrays, each checked by itself and against the others.

    sizes.npy         int64 [c]: how many keys each cell has, those for which it is the second among them
    entries.npy       int64 [e]: which, cell by cell
    codes.npy         what is scanned, in the order of the entries: "flat" float32 [e, d], "sq8" uint8 [e, d],
                      "pq" uint8 [e, parts]; "lean" uint8 [blocks, bytes], 32 entries of a cell a block
    centroids.npy     float32 [c, d]
    codebook.npy      all but "flat": float32, see `amips.index.fill.codebook_of`
    projection.npy    "lean": float32 [r, d], what queries are multiplied with
    keyprojection.npy "lean": float32 [r, d], what keys are multiplied with before they are coded
    keys.npy          all but "flat": float32 [n, d], by id
    means.npy         "pq": float32 [c, d], the mean key of each cell, relative to which keys are coded
    second.npy        int32 [n], where keys are in second cells

FAISS checks nothing of what it is handed, so nothing reaches it that has not been checked: a file may be
damaged or made to do harm. No file of FAISS's own is read.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from amips.design import Storage
from amips.errors import BundleError
from amips.index.fill import BLOCK, Bytes, Entries32, Ids, assemble, block_bytes, codebook_of, codes_of
from amips.npy import Shape, load_npy, npy_header, save_npy, write_npy
from amips.untrusted import open_regular
from amips.vectors import Floats

SIZES, ENTRIES, CODES, CENTROIDS = "sizes.npy", "entries.npy", "codes.npy", "centroids.npy"
CODEBOOK, PROJECTION, KEYS, SECOND = "codebook.npy", "projection.npy", "keys.npy", "second.npy"
MEANS, KEY_PROJECTION = "means.npy", "keyprojection.npy"
ALWAYS = [SIZES, ENTRIES, CODES, CENTROIDS]
FILES: dict[str, list[str]] = {
    "flat": ALWAYS,
    "sq8": [*ALWAYS, CODEBOOK, KEYS],
    "pq": [*ALWAYS, CODEBOOK, KEYS, MEANS],
    "lean": [*ALWAYS, CODEBOOK, KEYS, PROJECTION, KEY_PROJECTION],
}
FINITE_BLOCK = 1 << 17  # values that are looked at at once, in the cache of one core
READ_BYTES = 4 * FINITE_BLOCK  # of codes, at once
SAVED_BYTES = 1 << 24  # of keys on disk that are written again, at once
MOST_CELLS = 1 << 31
_ZEROS = np.zeros(FINITE_BLOCK, np.float32)


@dataclass(frozen=True)
class CellParts:
    """What a cell store is put together from; `rows` are the codes of "flat" that FAISS does not have."""

    index: Any
    sizes: Ids
    entries: Entries32
    centroids: Floats
    keys: Floats | None
    projection: Floats | None
    second: NDArray[np.int32] | None
    rows: Floats | None = None
    means: Floats | None = None
    key_projection: Floats | None = None


def read_array(
    path: Path, dtype: DTypeLike | None, shape: Shape, *, mmap: bool = False, finite: bool = True
) -> NDArray[Any]:
    """An .npy of a bundle with this type and shape (None: any); BundleError on anything else.

    Args:
        mmap: map it into memory instead of reading it.
        finite: look at every float, too: NaN and infinite values are an error.
    """
    try:
        array = load_npy(path, BundleError, dtype=dtype, shape=shape, mmap=mmap).view(np.ndarray)
    except MemoryError:
        raise BundleError(f"{path} does not fit in memory: load it with mmap=True") from None
    if not (array.flags.c_contiguous and array.flags.aligned):
        raise BundleError(f"{path} is damaged: its values are not in the order of rows")
    if finite and array.dtype == np.float32:
        with np.errstate(invalid="ignore"):
            check_finite(array, path)
    return array


def check_finite(array: Floats, path: Path) -> None:
    """BundleError if a value is NaN or infinite: the product with zeros is NaN then, and the fastest test."""
    flat = array.reshape(-1)
    for low in range(0, len(flat), FINITE_BLOCK):
        part = flat[low : low + FINITE_BLOCK]
        if part.dot(_ZEROS[: len(part)]) != 0:
            raise BundleError(f"{path} is damaged: it has values that are not finite")


def read_cells(directory: Path, storage: Storage, mmap: bool, spilled: bool, finite: bool) -> CellParts:
    """Read and check the files of a cell store.

    Args:
        mmap: leave float32 keys on disk; codes are read.
        spilled: whether there are keys in second cells.
        finite: whether keys that are left on disk are looked at for NaN and infinite values.
    """
    if storage not in FILES:
        raise BundleError(
            f"{directory}: storage {storage!r} is not known; expected one of {', '.join(FILES)}"
        )
    sizes = read_array(directory / SIZES, np.int64, (None,))
    entries = read_array(directory / ENTRIES, np.int64, (None,))
    second = read_array(directory / SECOND, np.int32, (None,)) if spilled else None
    n = len(entries) if second is None else len(second)
    if second is not None:
        _check_second(directory / SECOND, second, len(sizes), len(entries))
    _check_sizes(directory / SIZES, sizes, len(entries))
    check_entries(directory / ENTRIES, sizes, entries, second, n)
    entries = entries.astype(np.int32)
    c = len(sizes)
    centroids = read_array(directory / CENTROIDS, np.float32, (c, None))
    d = centroids.shape[1]
    if d < 1:
        raise BundleError(f"{directory / CENTROIDS} is damaged: shape {[c, d]}")
    path = directory / CODES
    if storage == "flat":
        if mmap:
            rows = read_array(path, np.float32, (len(entries), d), mmap=True, finite=finite)
            return CellParts(None, sizes, entries, centroids, None, None, second, rows)
        with _reader(path, np.float32, (len(entries), d)) as read:
            index = assemble(storage, sizes, entries, centroids, None, None, read)
        return CellParts(index, sizes, entries, centroids, None, None, second)
    codebook = _read_codebook(directory / CODEBOOK, storage, d)
    projection = key_projection = None
    if storage == "lean":
        projection = read_array(directory / PROJECTION, np.float32, (len(codebook), d))
        key_projection = read_array(directory / KEY_PROJECTION, np.float32, (len(codebook), d))
    means = read_array(directory / MEANS, np.float32, (c, d)) if storage == "pq" else None
    with _reader(path, np.uint8, code_shape(storage, sizes, codebook, d)) as read:
        index = assemble(storage, sizes, entries, centroids, means, codebook, read)
    keys = read_array(directory / KEYS, np.float32, (n, d), mmap=mmap, finite=finite or not mmap)
    more = {"means": means, "key_projection": key_projection}
    return CellParts(index, sizes, entries, centroids, keys, projection, second, **more)


def write_cells(directory: Path, storage: Storage, parts: CellParts) -> list[str]:
    """Write the files of a cell store; their names."""
    codebook = None if parts.rows is not None else codebook_of(parts.index, storage)
    arrays: dict[str, NDArray[Any] | None]
    entries = parts.entries.astype(np.int64)
    arrays = {SIZES: parts.sizes, ENTRIES: entries, CENTROIDS: parts.centroids, CODEBOOK: codebook}
    arrays |= {PROJECTION: parts.projection, KEYS: parts.keys, SECOND: parts.second, MEANS: parts.means}
    arrays[KEY_PROJECTION] = parts.key_projection
    present = {name: array for name, array in arrays.items() if array is not None}
    for name, array in present.items():
        save_npy(directory / name, array)
    dtype = np.float32 if storage == "flat" else np.uint8
    shape = code_shape(storage, parts.sizes, codebook, parts.centroids.shape[1])
    write_npy(directory / CODES, dtype, shape, lambda: scanned_bytes(parts))
    return [*present, CODES]


def scanned_bytes(parts: CellParts) -> Iterator[Bytes]:
    """What is scanned, codes or float32 keys, in the order of the entries."""
    if parts.rows is None:
        present = np.flatnonzero(parts.sizes).tolist()
        return (codes_of(parts.index, j, int(parts.sizes[j])) for j in present)
    rows, step = parts.rows, max(1, SAVED_BYTES // (4 * parts.rows.shape[1]))
    return (rows[low : low + step].reshape(-1).view(np.uint8) for low in range(0, len(rows), step))


def code_shape(storage: Storage, sizes: Ids, codebook: Floats | None, d: int) -> tuple[int, int]:
    """The shape of the codes of such cells."""
    if codebook is None:
        return int(sizes.sum()), d
    if storage == "lean":
        return int((-(-sizes // BLOCK)).sum()), block_bytes(len(codebook), 1)
    return int(sizes.sum()), d if storage == "sq8" else len(codebook)


def _read_codebook(path: Path, storage: Storage, d: int) -> Floats:
    if storage == "sq8":
        return read_array(path, np.float32, (2, d))
    codebook: Floats = read_array(path, np.float32, (None, 16 if storage == "lean" else 256, None))
    parts, _, width = codebook.shape
    fits = parts >= 1 and (1 <= parts <= d and width == 1 if storage == "lean" else parts * width == d)
    if not fits:
        raise BundleError(f"{path} is damaged: shape {list(codebook.shape)} does not fit dimension {d}")
    return codebook


def _check_sizes(path: Path, sizes: Ids, entries: int) -> None:
    """BundleError unless the cells have as many keys together as there are entries."""
    if not 1 <= len(sizes) < MOST_CELLS:
        raise BundleError(f"{path} is damaged: {len(sizes)} cells")
    # None is larger than the sum, so that the sum cannot pass over the largest number without being seen.
    sums = np.cumsum(sizes)
    if sizes.min() < 0 or sizes.max() > entries or sums.min() < 0 or sums[-1] != entries:
        raise BundleError(f"{path} is damaged: the cells do not have {entries} entries together")


def _check_second(path: Path, second: NDArray[np.int32], c: int, entries: int) -> None:
    """BundleError unless these are cells, or -1, and as many as there are entries more than keys."""
    fits = len(second) > 0 and second.min() >= -1 and second.max() < c
    if not fits or len(second) + int((second >= 0).sum()) != entries:
        raise BundleError(f"{path} does not fit the index: {entries} entries in {c} cells")


def check_entries(path: Path, sizes: Ids, entries: Ids, second: NDArray[np.int32] | None, n: int) -> None:
    """BundleError unless every key is in one cell, and in its second if it has one."""
    if n < 1 or len(entries) < n:
        raise BundleError(f"{path} is damaged: {len(entries)} entries of {n} keys")
    if entries.min() < 0 or entries.max() >= n:
        wrong = int(np.flatnonzero((entries < 0) | (entries >= n))[0])
        cell = int(np.searchsorted(np.cumsum(sizes), wrong, side="right"))
        raise BundleError(f"{path} is damaged: cell {cell} names a key that is not there")
    right = len(entries) == n
    if second is not None:
        again = second_entries(sizes, entries, second)
        right = bool((np.bincount(entries[again], minlength=n) == (second >= 0)).all())
        entries = entries[~again]
    if not right or (np.bincount(entries, minlength=n) != 1).any():
        raise BundleError(f"{path} is damaged: a key is in the wrong number of cells")


def second_entries(
    sizes: Ids, entries: NDArray[np.integer[Any]], second: NDArray[np.int32]
) -> NDArray[np.bool_]:
    """Which entries [e] are of keys whose second cell that is."""
    return np.asarray(second[entries] == np.repeat(np.arange(len(sizes), dtype=np.int32), sizes))


@contextmanager
def _reader(path: Path, dtype: DTypeLike, shape: tuple[int, int]) -> Iterator[Callable[[Bytes], None]]:
    """What fills memory with the next bytes of the values of an .npy file."""
    header = npy_header(path, BundleError, dtype=dtype, shape=shape)
    if header.fortran and min(shape) > 1:
        raise BundleError(f"{path} is damaged: its values are not in the order of rows")
    with open_regular(path, BundleError) as file, np.errstate(invalid="ignore"):
        file.seek(header.offset)

        def read(memory: Bytes) -> None:
            for low in range(0, len(memory), READ_BYTES):
                part = memory[low : low + READ_BYTES]
                if file.readinto(part.data) != len(part):  # type: ignore[attr-defined]
                    raise BundleError(f"{path} has changed while it was read")
                if dtype == np.float32:  # while it is in the cache
                    check_finite(part.view(np.float32), path)

        yield read
