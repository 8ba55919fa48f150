"""FAISS inverted files whose cells are given from outside.

Storage: "flat" keeps float32 keys; "sq8" 8 bits a value; "pq" product-quantised codes. The last two find
candidates in codes and score them again with the float32 keys, so every score is a true inner product.

A batch is scanned in one of two ways, with the same answers. FAISS goes query by query, which is best for
few queries. When many queries meet in a cell, the cell's keys are multiplied with all of them at once.
"""

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from amips.blas import faiss
from amips.errors import AmipsError, BundleError
from amips.index.running import Running, best_first, score_candidates
from amips.vectors import Floats, Vectors

Storage = Literal["flat", "sq8", "pq"]
Ids = NDArray[np.int64]

INDEX, KEYS = "index.faiss", "keys.npy"
TYPES = {"flat": "IndexIVFFlat", "sq8": "IndexIVFScalarQuantizer", "pq": "IndexIVFPQ"}
# From how many queries a cell on, on average, the matrix product beats FAISS's scan.
MEETINGS_FOR_PRODUCT = 4.0
PRODUCT_BLOCK = 1024
REFINE_BYTES = 1 << 26
PQ_DIMENSIONS_PER_BYTE = 4


@dataclass(frozen=True)
class FaissIVF:
    """A `faiss.IndexIVF` with given cells. `keys` is what quantised storage scores candidates with."""

    index: Any
    storage: Storage
    keys: Floats | None = None
    refine: int = 10  # quantised storage: candidates for each result asked for

    @classmethod
    def build(
        cls, keys: Vectors, assignment: NDArray[np.integer[Any]], centroids: Floats, storage: Storage
    ) -> "FaissIVF":
        """Put every key into the cell that `assignment` names."""
        c, d = centroids.shape
        quantizer = faiss.IndexFlatIP(d)
        quantizer.add(np.ascontiguousarray(centroids))
        metric = faiss.METRIC_INNER_PRODUCT
        if storage == "flat":
            index = faiss.IndexIVFFlat(quantizer, d, c, metric)
        elif storage == "sq8":
            # Not the residual: its range is no smaller for a key in a cell that is not its nearest.
            index = faiss.IndexIVFScalarQuantizer(
                quantizer, d, c, faiss.ScalarQuantizer.QT_8bit, metric, False
            )
        elif storage == "pq":
            parts = next(m for m in range(max(1, d // PQ_DIMENSIONS_PER_BYTE), 0, -1) if d % m == 0)
            index = faiss.IndexIVFPQ(quantizer, d, c, parts, 8, metric)
        else:
            raise AmipsError(f"storage={storage!r}: expected 'flat', 'sq8' or 'pq'")
        index.own_fields = True
        quantizer.this.disown()
        _train(index, keys, storage)
        for start, block in keys.blocks():
            ids = np.arange(start, start + len(block), dtype=np.int64)
            cells = np.ascontiguousarray(assignment[start : start + len(block)], np.int64)
            pointers = [faiss.swig_ptr(a) for a in (block, ids, cells)]
            index.add_core(len(block), *pointers)
        if storage == "flat":
            return cls(index, storage)
        # Float32 keys beside small codes: left in their file where they have one, read as they are needed.
        addressable = keys.array is not None and keys.array.dtype == np.float32
        return cls(index, storage, keys.array if addressable else keys.load())

    @property
    def n(self) -> int:
        """The number of keys."""
        return int(self.index.ntotal)

    @property
    def d(self) -> int:
        """The dimension."""
        return int(self.index.d)

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Keys in each cell."""
        lists = self.index.invlists
        return np.array([lists.list_size(j) for j in range(self.index.nlist)], np.int64)

    @cached_property
    def centroids(self) -> Floats:
        """The coarse centroids, [c, d]."""
        rows: Floats = self.index.quantizer.reconstruct_n(0, self.index.nlist)
        return rows

    @cached_property
    def assignment(self) -> NDArray[np.int32]:
        """The cell of each key."""
        cells = np.empty(self.n, np.int32)
        for j in range(self.index.nlist):
            cells[self._ids_of(j)] = j
        return cells

    def scan(self, x: Floats, cells: Ids, k: int) -> tuple[Floats, Ids]:
        """The k best keys by <x, y> within cells [m, p]; -1 skips."""
        if len(x) == 0 or cells.shape[1] == 0:
            return np.full((len(x), k), -np.inf, np.float32), np.full((len(x), k), -1, np.int64)
        if self.storage == "flat":
            # A small index reads its codes from cache, and a large batch shares them.
            if cells.size >= MEETINGS_FOR_PRODUCT * len(self.sizes) and len(x) > 1:
                return self._scan_by_product(x, cells, k)
            return self._settle_ties(x, cells, *self._scan_by_faiss(x, cells, k + 1))
        candidates = self._scan_by_faiss(x, cells, min(k * self.refine, max(1, self.n)))[1]
        return self.score_again(x, candidates, k)

    def scan_flops(self, keys: Ids, k: int) -> Ids:
        """2 d for each key scanned and, for quantised storage, for each candidate scored again.

        A PQ code costs one addition for each part, and a query 2 * 256 d for its tables.
        """
        if self.storage == "flat":
            return 2 * self.d * keys
        again: Ids = 2 * self.d * np.minimum(keys, k * self.refine)
        if self.storage == "sq8":
            return np.asarray(2 * self.d * keys + again)
        return np.asarray(int(self.index.pq.M) * keys + 2 * 256 * self.d + again)

    def _scan_by_faiss(self, x: Floats, cells: Ids, k: int) -> tuple[Floats, Ids]:
        m, p = cells.shape
        x, cells = np.ascontiguousarray(x, np.float32), np.ascontiguousarray(cells, np.int64)
        base = np.zeros((m, p), np.float32)
        if self.storage == "pq":  # residual codes: FAISS adds <x, y - centroid> to this
            step = max(1, REFINE_BYTES // (4 * self.d * p))
            for low in range(0, m, step):
                rows = self.centroids[np.maximum(cells[low : low + step], 0)]
                base[low : low + step] = np.matmul(rows, x[low : low + step, :, None])[:, :, 0]
        scores, ids = np.empty((m, k), np.float32), np.empty((m, k), np.int64)
        # The number of probes goes with the call: setting index.nprobe would race with other threads.
        arguments = [faiss.swig_ptr(a) for a in (cells, base, scores, ids)]
        parameters = faiss.SearchParametersIVF(nprobe=p)
        self.index.search_preassigned_c(m, faiss.swig_ptr(x), k, *arguments, False, parameters)
        scores[ids < 0] = -np.inf
        return scores, ids

    def _settle_ties(self, x: Floats, cells: Ids, scores: Floats, ids: Ids) -> tuple[Floats, Ids]:
        """From FAISS's k + 1 results the k best, ties to the lower id; FAISS leaves their order open."""
        k = ids.shape[1] - 1
        if not (scores[:, 1:] == scores[:, :-1]).any():  # FAISS's order is the only one
            return scores[:, :k], ids[:, :k]
        tied = (scores[:, k - 1] == scores[:, k]) & (ids[:, k] >= 0)  # more keys than these may tie
        scores, ids = best_first(scores, ids, k)
        if tied.any():
            scores[tied], ids[tied] = self._scan_by_product(x[tied], cells[tied], k)
        return scores, ids

    def _scan_by_product(self, x: Floats, cells: Ids, k: int) -> tuple[Floats, Ids]:
        """Cell by cell: the queries that probe it, times its keys.

        The first probe of every query is scanned before the others: it gives the k-th score that most
        keys of the later cells then fall short of.
        """
        best = Running(len(x), k)
        for probes in (cells[:, :1], cells[:, 1:]):
            if probes.shape[1] == 0:
                continue
            flat = probes.ravel()
            order = np.argsort(flat, kind="stable")
            flat_sorted = flat[order]
            present, starts = np.unique(flat_sorted, return_index=True)
            ends = np.append(starts[1:], len(flat_sorted))
            rows_by_cell = order // probes.shape[1]
            for cell, low, high in zip(present, starts, ends, strict=True):
                if cell < 0 or self.sizes[cell] == 0:
                    continue
                keys, ids = self._rows_of(int(cell)), self._ids_of(int(cell))
                step = max(1, min(PRODUCT_BLOCK, REFINE_BYTES // (4 * len(ids))))
                for first in range(low, high, step):
                    rows = rows_by_cell[first : min(first + step, high)]
                    best.take(rows, x[rows] @ keys.T, ids)
            best.compact()
        return best.finish()

    def score_again(self, x: Floats, candidates: Ids, k: int) -> tuple[Floats, Ids]:
        """True inner products of the candidates [m, r] (-1 skips), and the k best of them."""
        return score_candidates(self._keys_at, x, candidates, k, REFINE_BYTES)

    def _keys_at(self, ids: Ids) -> Floats:
        """Float32 keys by id, [..., d]."""
        if self.keys is not None:
            return self.keys[ids]
        cells, places = self.assignment[ids.ravel()], self._places[ids.ravel()]
        rows = np.empty((ids.size, self.d), np.float32)
        order = np.argsort(cells, kind="stable")
        present, starts = np.unique(cells[order], return_index=True)
        for cell, low, high in zip(present, starts, np.append(starts[1:], ids.size), strict=True):
            wanted = order[low:high]
            rows[wanted] = self._rows_of(int(cell))[places[wanted]]
        return rows.reshape(*ids.shape, self.d)

    @cached_property
    def _places(self) -> NDArray[np.int32]:
        """Where in its cell each key is."""
        places = np.empty(self.n, np.int32)
        for j in range(self.index.nlist):
            places[self._ids_of(j)] = np.arange(self.sizes[j])
        return places

    def _ids_of(self, cell: int) -> Ids:
        """Key ids of a cell: FAISS's own memory, not a copy."""
        if self.sizes[cell] == 0:
            return np.empty(0, np.int64)
        ids: Ids = faiss.rev_swig_ptr(self.index.invlists.get_ids(cell), int(self.sizes[cell]))
        return ids

    def _rows_of(self, cell: int) -> Floats:
        """Keys of a cell: FAISS's own memory, not a copy."""
        lists = self.index.invlists
        size = lists.list_size(cell)
        codes = faiss.rev_swig_ptr(lists.get_codes(cell), size * lists.code_size)
        rows: Floats = codes.view(np.float32).reshape(size, self.d)
        return rows

    def save(self, directory: Path) -> list[str]:
        """Write the FAISS file, and the keys where candidates are scored with them."""
        faiss.write_index(_in_memory(self.index), str(directory / INDEX))
        if self.keys is None:
            return [INDEX]
        np.save(directory / KEYS, self.keys)
        return [INDEX, KEYS]

    @classmethod
    def load(cls, directory: Path, storage: Storage, mmap: bool) -> "FaissIVF":
        """Read what `save` wrote; `mmap` leaves lists on disk, where the keys for refining always stay."""
        path = directory / INDEX
        flags = faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY if mmap else 0
        try:
            index = faiss.read_index(os.fspath(path), flags)
        except RuntimeError as problem:
            reason = str(problem).strip().splitlines()[-1]
            raise BundleError(f"{path} is not a readable FAISS index: {reason}") from None
        expected = TYPES.get(storage)
        if type(index).__name__ != expected:
            raise BundleError(f"{path} holds a {type(index).__name__}, expected {expected or storage!r}")
        if storage == "flat":
            return cls(index, storage)
        return cls(index, storage, read_array(directory / KEYS, (index.ntotal, index.d), "f", mmap=True))


def _in_memory(index: Any) -> Any:
    """The index itself, or a copy in memory of one that is mapped: FAISS would write its file's name."""
    if isinstance(faiss.downcast_InvertedLists(index.invlists), faiss.ArrayInvertedLists):
        return index
    copy = faiss.deserialize_index(faiss.serialize_index(index), faiss.IO_FLAG_SKIP_IVF_DATA)
    lists = faiss.ArrayInvertedLists(index.nlist, index.code_size)
    index.invlists.copy_subset_to(lists, faiss.InvertedLists.SUBSET_TYPE_ID_RANGE, 0, index.ntotal)
    copy.replace_invlists(lists, True)
    lists.this.disown()
    return copy


def read_array(path: Path, shape: tuple[int, ...], kinds: str, mmap: bool = False) -> NDArray[Any]:
    """An .npy of a bundle, which must have this shape and one of these kinds of type."""
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r" if mmap else None, allow_pickle=False)
    except Exception as problem:  # a damaged header makes numpy raise nearly anything
        raise BundleError(f"{path} is damaged: {str(problem).splitlines()[0]}") from None
    if array.shape != shape or array.dtype.kind not in kinds:
        raise BundleError(f"{path} holds {array.dtype} {list(array.shape)}, expected shape {list(shape)}")
    return array


def _train(index: Any, keys: Vectors, storage: Storage) -> None:
    """Train the codes; the centroids are given. A sample is enough: FAISS itself uses at most 64k."""
    if storage == "flat":
        index.is_trained = True
        return
    most = 1 << 16
    sample = (
        keys.load()
        if keys.n <= most
        else keys.take(np.sort(np.random.default_rng(0).choice(keys.n, most, replace=False)))
    )
    if storage == "pq" and len(sample) < 1 << index.pq.nbits:
        raise AmipsError(f"storage='pq' needs at least 256 keys, got {len(sample)}; use 'flat' or 'sq8'")
    if storage == "pq":
        index.cp.min_points_per_centroid = index.pq.cp.min_points_per_centroid = 1
    index.train(sample)
