"""Codes of a cell store as plain rows, one an entry: to encode keys, and to put cells together."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.blas import faiss
from amips.index.cell_files import scanned_bytes
from amips.index.faiss_store import FaissCellStore
from amips.index.fill import BLOCK, Bytes, filled
from amips.vectors import Floats

Ids = NDArray[np.int64]

# How FastScan orders the 32 entries of a block: byte p has entry _ORDER[p] and the one 16 after it.
_ORDER = np.array([0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15])


def code_rows(store: FaissCellStore) -> Bytes:
    """The codes of all entries, [e, bytes], in the order of the entries; "flat" has the float32 keys."""
    if store.rows is not None:
        return store.rows.view(np.uint8)
    parts = [np.empty(0, np.uint8), *scanned_bytes(store.parts)]
    if store.storage != "lean":
        return np.concatenate(parts).reshape(len(store.entries), -1)
    pairs = -(-int(store.index.d) // 2)
    blocks = np.concatenate(parts).reshape(-1, pairs, BLOCK)
    return _unpacked(blocks)[_padded_places(store.sizes)]


def encode(store: FaissCellStore, keys: Floats, cells: NDArray[np.integer[Any]]) -> Bytes:
    """Codes of keys [m, d] in these cells [m], as `code_rows` has them, by the codebook of the store."""
    keys = np.ascontiguousarray(keys, np.float32)
    if store.storage == "flat":
        return keys.view(np.uint8)
    if store.storage == "lean":
        assert store.key_projection is not None
        assert store.codebook is not None
        return _nearest_values(keys @ store.key_projection.T, store.codebook[:, :, 0])
    codes = np.empty((len(keys), int(store.index.code_size)), np.uint8)
    numbers = np.ascontiguousarray(cells, np.int64)
    store.index.encode_vectors(len(keys), *(faiss.swig_ptr(a) for a in (keys, numbers, codes)))
    return codes


def _nearest_values(rows: Floats, book: Floats) -> Bytes:
    """The nearest of the 16 values [r, 16] of each dimension of rows [m, r], two a byte.

    What FAISS does, in passes over all rows: between the values in order lie 15 bounds, and how many of them
    a number exceeds says which it is nearest to.
    """
    order = np.argsort(book, axis=1, kind="stable").astype(np.uint8)
    values = np.take_along_axis(book, order.astype(np.int64), axis=1)
    exceeded = np.zeros(rows.shape, np.uint8)
    for bound in ((values[:, 1:] + values[:, :-1]) / 2).T:
        exceeded += rows > bound
    codes = order[np.arange(len(book)), exceeded]
    if codes.shape[1] % 2:
        codes = np.pad(codes, ((0, 0), (0, 1)))
    packed: Bytes = codes[:, ::2] | codes[:, 1::2] << np.uint8(4)
    return packed


def put_together(
    store: FaissCellStore,
    keys: Floats | None,
    first: NDArray[np.int32],
    second: NDArray[np.int32] | None,
    codes: Bytes,
    second_codes: Bytes | None,
) -> FaissCellStore:
    """A store of other keys with the cells and the codebook of this one.

    Args:
        keys: float32 [n, d]; None for "flat", whose codes they are.
        first, second: the cells of each key [n], of the second -1 for none.
        codes: of each key in its first cell, [n, bytes].
        second_codes: of those keys that have one, in their second cell; None if they are the same.
    """
    c = len(store.sizes)
    cells, numbers = first.astype(np.int64), np.arange(len(first))
    if second is not None and (twice := np.flatnonzero(second >= 0)).size:
        cells, numbers = np.append(cells, second[twice]), np.append(numbers, twice)
        codes = np.concatenate([codes, codes[twice] if second_codes is None else second_codes])
    else:
        second = None
    cells = np.ascontiguousarray(cells, np.int64)
    sizes, entries = np.bincount(cells, minlength=c), numbers[np.argsort(cells, kind="stable")]
    index = filled(store.storage, store.centroids, store.means, store.codebook, numbers, cells, codes)
    return FaissCellStore(
        index,
        store.storage,
        sizes,
        entries,
        store.centroids,
        keys,
        store.refine,
        store.projection,
        second,
        store.means,
        key_projection=store.key_projection,
    )


def _padded_places(sizes: Ids) -> Ids:
    """Where each entry is if every cell takes whole blocks, [e]."""
    starts = np.append(0, np.cumsum(-(-sizes // BLOCK) * BLOCK))[:-1]
    return np.repeat(starts - np.append(0, np.cumsum(sizes))[:-1], sizes) + np.arange(int(sizes.sum()))


def _unpacked(blocks: Bytes) -> Bytes:
    """Codes of two 4-bit values a byte, rows [32 b, pairs], of the blocks [b, pairs, 32] of FastScan."""
    columns = np.empty(blocks.shape, np.uint8)
    low, high = blocks[:, :, :16], blocks[:, :, 16:]
    columns[:, :, _ORDER] = (low & 15) | (high & 15) << 4
    columns[:, :, _ORDER + 16] = (low >> 4) | (high >> 4) << 4
    return np.ascontiguousarray(columns.transpose(0, 2, 1)).reshape(-1, blocks.shape[1])
