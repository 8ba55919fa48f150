"""Codes of a cell store as plain rows, one an entry: to encode keys, and to make one store of several."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.blas import faiss
from amips.index.cell_files import scanned_bytes
from amips.index.faiss_store import FaissCellStore
from amips.index.fill import BLOCK, Bytes, assemble
from amips.index.top_keys import narrow_type
from amips.vectors import Floats

Ids = NDArray[np.int64]

# How FastScan orders the 32 entries of a block: byte p has entry _ORDER[p] and the one 16 after it.
_ORDER = np.array([0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15])


def second_cells(store: FaissCellStore) -> NDArray[np.int32]:
    """The second cells of the keys, -1 for none, [n]."""
    return np.full(store.n, -1, np.int32) if store.second is None else store.second


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


@dataclass(frozen=True)
class Entries:
    """Keys in their cells, of which a store is made.

    Args:
        store: one with these cells and this codebook.
        sizes, numbers: how many entries each cell has [c], and the keys that they are of, cell by cell [e].
        keys: float32 [n, d]; None for "flat", whose codes they are.
        second: the second cells of the keys, -1 for none, [n].
        rows: the codes of the entries, [e, bytes]; None for those of the store.
    """

    store: FaissCellStore
    sizes: Ids
    numbers: NDArray[np.integer[Any]]
    keys: Floats | None
    second: NDArray[np.int32]
    rows: Bytes | None = None

    @classmethod
    def of_store(cls, store: FaissCellStore) -> "Entries":
        """All of a store."""
        return cls(store, store.sizes, store.entries, store.keys, second_cells(store))

    @classmethod
    def of_keys(
        cls, store: FaissCellStore, keys: Floats, first: NDArray[np.int32], second: NDArray[np.int32] | None
    ) -> "Entries":
        """Keys [m, d] in the cells of a store; -1 for no second."""
        keys, codes = np.ascontiguousarray(keys, np.float32), encode(store, keys, first)
        second = np.full(len(keys), -1, np.int32) if second is None else second
        twice = np.flatnonzero(second >= 0)
        # Codes of "pq" depend on the cell.
        again = codes[twice] if store.means is None else encode(store, keys[twice], second[twice])
        cells, numbers = np.append(first, second[twice]), np.append(np.arange(len(keys)), twice)
        order, sizes = _by_cell(cells, len(store.sizes))
        rows = np.concatenate([codes, again])[order]
        return cls(store, sizes, numbers[order], None if store.keys is None else keys, second, rows)

    def of(self, kept: Ids) -> "Entries":
        """Those of these keys (ascending), numbered anew."""
        numbers = np.full(len(self.second), -1)
        numbers[kept] = np.arange(len(kept))
        numbers = numbers[self.numbers]
        some = np.flatnonzero(numbers >= 0)
        sizes = np.bincount(self.cells[some], minlength=len(self.sizes))
        keys = None if self.keys is None else self.keys[kept]
        return Entries(self.store, sizes, numbers[some], keys, self.second[kept], self.codes()[some])

    @property
    def cells(self) -> Ids:
        """The cell of each entry, [e]."""
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    @cached_property
    def starts(self) -> Ids:
        """Where each cell begins, [c]."""
        return np.cumsum(self.sizes) - self.sizes

    def codes(self) -> Bytes:
        """Of all entries, [e, bytes]."""
        return code_rows(self.store) if self.rows is None else self.rows

    def codes_in(self, cell: int) -> Bytes:
        """Of the entries of a cell, one after the other; not of "lean"."""
        if self.rows is None:
            return self.store.codes_in(cell)
        return self.rows[self.starts[cell] : self.starts[cell] + self.sizes[cell]].reshape(-1)


def one_store(parts: list[Entries], *, light: bool, key_order: Ids | None = None) -> FaissCellStore:
    """A store of these keys, numbered part after part, or so that key i is the `key_order[i]`-th of them.

    `light`: FAISS has no copy of float32 keys: quicker to make, slower for some queries with few probes.
    """
    store, c = parts[0].store, len(parts[0].sizes)
    firsts = np.cumsum([0, *(len(part.second) for part in parts)])
    order, sizes = _by_cell(np.concatenate([part.cells for part in parts]), c)
    numbers = [part.numbers + first for part, first in zip(parts, firsts, strict=False)]
    entries, second = np.concatenate(numbers)[order], np.concatenate([part.second for part in parts])
    float_keys = [part.keys for part in parts if part.keys is not None]
    keys = np.concatenate(float_keys) if float_keys else None
    if key_order is not None:
        entries, second = np.argsort(key_order)[entries], second[key_order]
        keys = None if keys is None else keys[key_order]
    entries = entries.astype(np.int32)
    index = rows = None
    if light and store.storage == "flat":
        rows = _in_order(parts, order).view(np.float32)
    else:
        codes = _by_cells(parts, sizes, order)

        def read(memory: Bytes) -> None:
            memory[:] = next(codes)

        index = assemble(store.storage, sizes, entries, store.centroids, store.means, store.codebook, read)
    return replace(
        store,
        index=index,
        rows=rows,
        directory=None,
        sizes=sizes,
        entries=entries,
        keys=keys,
        second=second if (second >= 0).any() else None,
    )


def _by_cells(parts: list[Entries], sizes: Ids, order: Ids) -> Iterator[Bytes]:
    """The codes of each cell that has any, as FAISS keeps them."""
    cells = np.flatnonzero(sizes).tolist()
    if parts[0].store.storage != "lean":
        for cell in cells:
            yield np.concatenate([part.codes_in(cell) for part in parts if part.sizes[cell]])
        return
    rows = _in_order(parts, order)
    padded = np.zeros((int((-(-sizes // BLOCK)).sum()) * BLOCK, rows.shape[1]), np.uint8)
    padded[_padded_places(sizes)] = rows
    blocks, low = _packed(padded).reshape(-1), 0
    for cell in cells:
        length = -(-int(sizes[cell]) // BLOCK) * BLOCK * rows.shape[1]
        yield blocks[low : low + length]
        low += length


def _in_order(parts: list[Entries], order: Ids) -> Bytes:
    """The codes of all entries, [e, bytes], in this order of them."""
    places, low = np.empty_like(order), 0
    places[order] = np.arange(len(order))
    rows = np.empty((len(order), 0), np.uint8)
    for part in parts:
        codes = part.codes()
        if not low:
            rows = np.empty((len(order), codes.shape[1]), np.uint8)
        rows[places[low : low + len(codes)]] = codes
        low += len(codes)
    return rows


def _by_cell(cells: NDArray[np.integer[Any]], c: int) -> tuple[Ids, Ids]:
    """The order of entries in which they lie cell by cell [e], and how many each cell has [c]."""
    return np.argsort(cells.astype(narrow_type(c)), kind="stable"), np.bincount(cells, minlength=c)


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


def _packed(rows: Bytes) -> Bytes:
    """The inverse of `_unpacked`."""
    columns = rows.reshape(-1, BLOCK, rows.shape[1]).transpose(0, 2, 1)
    blocks = np.empty(columns.shape, np.uint8)
    former, latter = columns[:, :, _ORDER], columns[:, :, _ORDER + 16]
    blocks[:, :, :16] = (former & 15) | (latter & 15) << 4
    blocks[:, :, 16:] = former >> 4 | (latter & 0xF0)
    return blocks
