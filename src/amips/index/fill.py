"""FAISS inverted files whose cells are given: filled with keys, or with codes that were kept."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.blas import faiss
from amips.cells import cell_means
from amips.design import Storage
from amips.errors import AmipsError
from amips.lean import Projection
from amips.vectors import Floats, Vectors

Ids = NDArray[np.int64]
Entries32 = NDArray[np.int32]
Bytes = NDArray[np.uint8]

FEWEST_KEYS = {"pq": 256, "lean": 16}  # as many as a code has values
PQ_DIMENSIONS_PER_BYTE = 4
SAMPLE_BYTES = 1 << 24  # of keys that codes are learned from
# Codes are put into their cells so many at a time, as each cell takes microseconds: a part of them all.
LEAST_WAITING, MOST_WAITING, WAITING_PARTS = 1 << 20, 1 << 24, 16
MOST_ENTRIES = (1 << 31) - 1


def fill(
    keys: Vectors,
    assignment: NDArray[np.integer[Any]],
    centroids: Floats,
    storage: Storage,
    projection: Projection | None,
    second: NDArray[np.int32] | None,
) -> tuple[Any, Floats | None]:
    """A `faiss.IndexIVF` with every key, as this storage keeps it, in its cell, and in its second, if any;
    and for "pq" the mean key of each cell, [c, d].

    "pq" codes what is left of a key after the mean of its cell. That of the centroid would not do: centroids
    are for choosing cells, often of norm 1, and may be far from all keys.
    """
    if (storage == "lean") != (projection is not None):
        raise AmipsError("storage='lean' needs a projection, and no other storage has one")
    _check_cells(assignment, len(centroids), 0)
    if second is not None:
        _check_cells(second, len(centroids), -1)
    c, d = len(centroids), centroids.shape[1] if projection is None else projection.r
    means = cell_means(keys, assignment, c) if storage == "pq" else None
    centers = centroids if means is None else means
    quantizer = _quantizer(centers if projection is None else centers @ projection.keys.T)
    if storage == "lean":  # codes of 4 bits for each dimension; their order for FastScan is made at the end
        index = faiss.IndexIVFPQ(quantizer, d, c, d, 4, faiss.METRIC_INNER_PRODUCT)
        index.by_residual = False
    else:
        index = _empty(storage, quantizer, d, c, pq_parts(d))
    index.own_fields = True
    quantizer.this.disown()
    _train(index, keys, storage, projection)
    lists = _ExactLists(index, assignment, second)
    for start, block in keys.blocks():
        if projection is not None:
            block = block @ projection.keys.T
        ids = np.arange(start, start + len(block), dtype=np.int64)
        cells = np.asarray(assignment[start : start + len(block)], np.int64)
        if second is not None:
            twice = np.flatnonzero(second[ids] >= 0)
            block = np.concatenate([block, block[twice]])
            ids, cells = np.append(ids, ids[twice]), np.append(cells, second[ids[twice]])
        block, cells = np.ascontiguousarray(block), np.ascontiguousarray(cells, np.int64)
        lists.add(block, ids, cells)
    lists.write()
    return faiss.IndexIVFPQFastScan(index) if storage == "lean" else index, means


class _ExactLists:
    """Fills the cells of an index whose sizes are known.

    FAISS would let each cell grow by doubling: what it leaves behind takes more memory than the codes.
    """

    def __init__(
        self, index: Any, assignment: NDArray[np.integer[Any]], second: NDArray[np.int32] | None
    ) -> None:
        self.index, c = index, int(index.nlist)
        sizes = np.bincount(assignment, minlength=c)
        if second is not None:
            sizes = sizes + np.bincount(second[second >= 0], minlength=c)
        count = int(sizes.sum())
        if count > MOST_ENTRIES:
            raise AmipsError(
                f"{count:,} entries: cells hold {MOST_ENTRIES:,} at most; spread the keys over shards"
            )
        self.width, self.filled = int(index.code_size), np.zeros(c, np.int64)
        self.sizes = sizes
        self._waiting: list[tuple[Bytes, Ids, Ids]] = []  # codes, ids and cells
        most = count * (self.width + 16) // WAITING_PARTS
        self._waiting_bytes = min(MOST_WAITING, max(LEAST_WAITING, most))
        for cell, size in enumerate(sizes.tolist()):
            if size:
                index.invlists.resize(cell, size)
        index.ntotal = count

    def add(self, rows: Floats, ids: Ids, cells: Ids) -> None:
        """Code the next keys, whose turn it then is in their cells."""
        codes = np.empty((len(rows), self.width), np.uint8)
        self.index.encode_vectors(len(rows), *(faiss.swig_ptr(a) for a in (rows, cells, codes)))
        self._waiting.append((codes, ids, cells))
        if sum(part.nbytes for parts in self._waiting for part in parts) >= self._waiting_bytes:
            self.write()

    def write(self) -> None:
        """Put what is coded at the end of what is in its cells."""
        if not self._waiting:
            return
        codes, ids, cells = (np.concatenate(parts) for parts in zip(*self._waiting, strict=True))
        self._waiting.clear()
        order = np.argsort(cells, kind="stable")
        present, starts = np.unique(cells[order], return_index=True)
        codes, ids, lists = codes[order], ids[order], self.index.invlists
        for cell, low, high in zip(present.tolist(), starts, np.append(starts, len(ids))[1:], strict=True):
            size, first = int(self.sizes[cell]), int(self.filled[cell])
            last = first + int(high - low)
            faiss.rev_swig_ptr(lists.get_ids(cell), size)[first:last] = ids[low:high]
            memory = faiss.rev_swig_ptr(lists.get_codes(cell), size * self.width)
            memory[first * self.width : last * self.width] = codes[low:high].ravel()
            self.filled[cell] = last


def _check_cells(cells: NDArray[np.integer[Any]], c: int, least: int) -> None:
    """FAISS writes outside of its memory for a cell that is not there."""
    if len(cells) and not (cells.min() >= least and cells.max() < c):
        raise AmipsError(f"cells of keys: expected numbers from {least} to {c - 1}")


def pq_parts(d: int) -> int:
    """Parts of a PQ code, a byte each: at most one for four dimensions, and a divisor of d."""
    return next(m for m in range(max(1, d // PQ_DIMENSIONS_PER_BYTE), 0, -1) if d % m == 0)


def assemble(
    storage: Storage,
    sizes: Ids,
    entries: Entries32,
    centroids: Floats,
    means: Floats | None,
    codebook: Floats | None,
    read: Callable[[Bytes], None],
) -> Any:
    """A `faiss.IndexIVF` with codes that were kept; all arguments must have been checked.

    FAISS has the centroids ("pq": the means) of all storages but "lean", whose codes it scans without.

    Args:
        sizes, entries: how many keys each cell has [c], and which, cell by cell [e].
        codebook: of the codes, as `codebook_of` gives it.
        read: fills memory with the next bytes of the codes, cell by cell, as `codes_of` gives them.
    """
    c, d = centroids.shape
    parts = 0
    if storage in ("pq", "lean"):
        assert codebook is not None
        parts = len(codebook)
    centers = centroids if means is None else means
    quantizer = faiss.IndexFlatIP(parts) if storage == "lean" else _quantizer(centers)
    index = _empty(storage, quantizer, parts if storage == "lean" else d, c, parts)
    index.own_fields = True
    quantizer.this.disown()
    if codebook is not None:
        vector = index.sq.trained if storage == "sq8" else index.pq.centroids
        faiss.copy_array_to_vector(codebook.ravel(), vector)
    index.is_trained = True
    lists, code_size, low = index.invlists, int(index.code_size), 0
    for cell, size in zip(np.flatnonzero(sizes).tolist(), sizes[sizes > 0].tolist(), strict=True):
        lists.resize(cell, size)
        faiss.rev_swig_ptr(lists.get_ids(cell), size)[:] = entries[low : low + size]
        length = block_bytes(parts, size) if storage == "lean" else size * code_size
        read(faiss.rev_swig_ptr(lists.get_codes(cell), length))
        low += size
    index.ntotal = len(entries)
    return index


def _quantizer(centroids: Floats) -> Any:
    quantizer = faiss.IndexFlatIP(centroids.shape[1])
    quantizer.add(np.ascontiguousarray(centroids))
    return quantizer


def _empty(storage: Storage, quantizer: Any, d: int, c: int, parts: int) -> Any:
    """An inverted file without keys; of "lean" one that scans codes in the order of FastScan."""
    metric = faiss.METRIC_INNER_PRODUCT
    if storage == "flat":
        return faiss.IndexIVFFlat(quantizer, d, c, metric)
    if storage == "sq8":
        # Not the residual: its range is no smaller for a key in a cell that is not its nearest.
        return faiss.IndexIVFScalarQuantizer(quantizer, d, c, faiss.ScalarQuantizer.QT_8bit, metric, False)
    if storage == "pq":
        return faiss.IndexIVFPQ(quantizer, d, c, parts, 8, metric)
    if storage == "lean":
        index = faiss.IndexIVFPQFastScan(quantizer, d, c, d, 4, metric)
        index.by_residual = False
        return index
    raise AmipsError(f"storage={storage!r}: expected 'flat', 'sq8', 'pq' or 'lean'")


BLOCK = 32  # entries whose codes FastScan keeps together


def block_bytes(dimensions: int, entries: int) -> int:
    """Bytes of the codes of a cell with so many entries, in lean storage: whole blocks, two values a byte."""
    return -(-entries // BLOCK) * BLOCK * (-(-dimensions // 2))


def codes_of(index: Any, cell: int, size: int) -> Bytes:
    """The codes of a cell with so many entries: FAISS's own memory, not a copy."""
    lists = index.invlists
    lean = isinstance(index, faiss.IndexIVFPQFastScan)
    length = block_bytes(index.d, size) if lean else size * index.code_size
    if length == 0:
        return np.empty(0, np.uint8)
    codes: Bytes = faiss.rev_swig_ptr(lists.get_codes(cell), length)
    return codes


def entries_of(index: Any) -> tuple[Ids, Entries32]:
    """How many keys each cell has [c], and which, cell by cell [e]: a copy."""
    lists = index.invlists
    sizes = np.array([lists.list_size(j) for j in range(index.nlist)], np.int64)
    entries, low = np.empty(int(sizes.sum()), np.int32), 0
    for j in np.flatnonzero(sizes).tolist():
        size = int(sizes[j])
        entries[low : low + size] = faiss.rev_swig_ptr(lists.get_ids(j), size)
        low += size
    return sizes, entries


def codebook_of(index: Any, storage: Storage) -> Floats | None:
    """What codes stand for: "sq8" [2, d], the least value and the range of each dimension; "pq" and "lean"
    [parts, values, d / parts]; None for "flat".
    """
    if storage == "flat":
        return None
    if storage == "sq8":
        return np.asarray(faiss.vector_to_array(index.sq.trained), np.float32).reshape(2, -1)
    pq = index.pq
    return np.asarray(faiss.vector_to_array(pq.centroids), np.float32).reshape(pq.M, pq.ksub, pq.dsub)


def check_enough_keys(storage: str, n: int) -> None:
    """AmipsError if codes of this storage cannot be trained on n keys."""
    fewest = FEWEST_KEYS.get(storage, 0)
    if n < fewest:
        raise AmipsError(f"storage={storage!r} needs at least {fewest} keys, got {n}; use 'flat' or 'sq8'")


def _train(index: Any, keys: Vectors, storage: Storage, projection: Projection | None) -> None:
    """Train the codes; the centroids are given. A sample is enough: FAISS itself uses at most 64k."""
    if storage == "flat":
        index.is_trained = True
        return
    # Of lean codes FAISS looks at 256 rows for each of 16 values, of PQ codes for each of 256.
    most = 1 << 13 if storage == "lean" else max(1 << 14, min(1 << 16, SAMPLE_BYTES // (4 * keys.d)))
    sample = (
        keys.load()
        if keys.n <= most
        else keys.take(np.sort(np.random.default_rng(0).choice(keys.n, most, replace=False)))
    )
    if storage in FEWEST_KEYS:
        check_enough_keys(storage, len(sample))
        index.cp.min_points_per_centroid = index.pq.cp.min_points_per_centroid = 1
    index.train(sample if projection is None else sample @ projection.keys.T)
