"""FAISS inverted files whose cells are given from outside.

Storage: "flat" keeps float32 keys; "sq8" 8 bits a value; "pq" product-quantised codes; "lean" 4 bits a value
of a learned projection to fewer dimensions (see `amips.lean`), which FAISS scans from registers (FastScan).
All but the first find candidates in codes and score them again with the float32 keys, so every score is a
true inner product.

A batch is scanned in one of two ways, with the same answers. FAISS goes query by query, which is best for
few queries. When many queries meet in a cell, the cell's keys are multiplied with all of them at once.

A key may be in a second cell, too ("spilled"): it is then found by queries that probe either, and returned
once.
"""

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.blas import faiss
from amips.design import Storage
from amips.errors import BundleError
from amips.index.costs import scan_flops
from amips.index.fill import fill
from amips.index.read import check_entries, read_array, read_lean, read_second
from amips.index.top_keys import TopKeys, best_first, best_of, score_candidates
from amips.lean import Projection
from amips.vectors import Floats, Vectors

Ids = NDArray[np.int64]

INDEX, KEYS, LEAN, SECOND = "index.faiss", "keys.npy", "lean.npz", "second.npy"
TYPES = {
    "flat": "IndexIVFFlat",
    "sq8": "IndexIVFScalarQuantizer",
    "pq": "IndexIVFPQ",
    "lean": "IndexIVFPQFastScan",
}
# What each storage keeps beside the FAISS file.
BESIDE: dict[str, list[str]] = {"flat": [], "sq8": [KEYS], "pq": [KEYS], "lean": [KEYS, LEAN]}
# From how many queries a cell on, on average, the matrix product beats FAISS's scan.
MEETINGS_FOR_PRODUCT = 4.0
PRODUCT_BLOCK = 1024
REFINE_BYTES = 1 << 26
REFINE = 10  # candidates that quantised storage scores again, for each result asked for


@dataclass(frozen=True)
class FaissCellStore:
    """A `faiss.IndexIVF` with given cells. `keys` is what quantised storage scores candidates with."""

    index: Any
    storage: Storage
    keys: Floats | None = None
    refine: int = REFINE  # quantised storage: candidates for each result asked for
    projection: Floats | None = None  # "lean": what queries are multiplied with, [r, d],
    full_centroids: Floats | None = None  # ... and the centroids, which FAISS has in r dimensions only
    second: NDArray[np.int32] | None = None  # the second cell of each key, -1 for none

    @classmethod
    def build(
        cls,
        keys: Vectors,
        assignment: NDArray[np.integer[Any]],
        centroids: Floats,
        storage: Storage,
        projection: Projection | None = None,
        second: NDArray[np.int32] | None = None,
    ) -> "FaissCellStore":
        """Put every key into the cell that `assignment` names; "lean" needs a projection.

        `second` [n] names another cell for some keys to be in, too; -1 for none.
        """
        index = fill(keys, assignment, centroids, storage, projection, second)
        if storage == "flat":
            return cls(index, storage, second=second)
        # Float32 keys beside small codes: left in their file where they have one, read as they are needed.
        addressable = keys.array is not None and keys.array.dtype == np.float32
        rows = keys.array if addressable else keys.load()
        if projection is None:
            return cls(index, storage, rows, second=second)
        index = faiss.IndexIVFPQFastScan(index)  # the same codes in the order in which they are scanned
        return cls(
            index, storage, rows, projection=projection.queries, full_centroids=centroids, second=second
        )

    @property
    def n(self) -> int:
        """The number of keys."""
        return int(self.index.ntotal) if self.second is None else len(self.second)

    @property
    def d(self) -> int:
        """The dimension."""
        return int(self.index.d if self.projection is None else self.projection.shape[1])

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Keys in each cell, those for which it is the second among them."""
        lists = self.index.invlists
        return np.array([lists.list_size(j) for j in range(self.index.nlist)], np.int64)

    @cached_property
    def centroids(self) -> Floats:
        """The coarse centroids, [c, d]."""
        if self.full_centroids is not None:
            return self.full_centroids
        rows: Floats = self.index.quantizer.reconstruct_n(0, self.index.nlist)
        return rows

    @cached_property
    def assignment(self) -> NDArray[np.int32]:
        """The cell of each key."""
        cells = np.full(self.n, -1, np.int32)
        for j in range(self.index.nlist):
            cells[self._ids_of(j)[self._own(j)]] = j
        return cells

    def scan(self, x: Floats, cells: Ids, k: int) -> tuple[Floats, Ids]:
        """The k best keys by <x, y> within cells [m, p]; -1 skips."""
        if len(x) == 0 or cells.shape[1] == 0:
            return np.full((len(x), k), -np.inf, np.float32), np.full((len(x), k), -1, np.int64)
        if self.storage == "flat":
            # A small index reads its codes from cache, and a large batch shares them.
            if len(x) > 1 and (cells >= 0).sum() >= MEETINGS_FOR_PRODUCT * len(self.sizes):
                return self._scan_by_product(x, cells, k)
            if self.second is None:
                return self._settle_ties(x, cells, *self._scan_by_faiss(x, cells, k + 1))
            entries = _once(*self._scan_by_faiss(x, cells, 2 * k + 2))
            return self._settle_ties(x, cells, *best_of(*entries, k + 1))
        candidates = self._scan_by_faiss(x, cells, self._candidates(k))[1]
        if self.second is not None:
            candidates.sort(axis=1)
            candidates[:, 1:][candidates[:, 1:] == candidates[:, :-1]] = -1
        return self.score_again(x, candidates, k)

    def _candidates(self, k: int) -> int:
        """How many are looked for; where some may be found twice as many more, twice k at least."""
        wanted = min(k * self.refine, max(1, self.n))
        if self.second is None:
            return wanted
        return max(2 * k, round(wanted * int(self.index.ntotal) / self.n))

    def scan_flops(self, keys: Ids, k: int) -> Ids:
        """FLOPs of scanning so many keys for k results, for each query; see `amips.index.costs`."""
        parts = int(self.index.pq.M) if self.storage == "pq" else 0
        r = 0 if self.projection is None else len(self.projection)
        return scan_flops(self.storage, keys, self.d, self._candidates(k), r, parts)

    def _scan_by_faiss(self, x: Floats, cells: Ids, k: int) -> tuple[Floats, Ids]:
        m, p = cells.shape
        if self.projection is not None:
            x = x @ self.projection.T
            x[~x.any(axis=1)] = 1  # FastScan finds nothing for zeros, to which every key is as near
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
        best = TopKeys(len(x), k, twice=self.second is not None)
        for probes in (cells[:, :1], cells[:, 1:]):
            if probes.shape[1] == 0:
                continue
            rows_of, places = np.nonzero(probes >= 0)
            if len(rows_of) == 0:  # nobody probes more than one cell
                continue
            flat = probes[rows_of, places].astype(_narrow(len(self.sizes)))  # sorted by radix, if narrow
            order = np.argsort(flat, kind="stable")
            present, starts = np.unique(flat[order], return_index=True)
            ends = np.append(starts[1:], len(flat))
            rows_by_cell = rows_of[order]
            for cell, low, high in zip(present, starts, ends, strict=True):
                if self.sizes[cell] == 0:
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
        keys = self.keys
        if keys is None or keys.dtype != np.float32 or not keys.flags.c_contiguous:
            return score_candidates(self._keys_at, x, candidates, k, REFINE_BYTES)
        x, ids = np.ascontiguousarray(x, np.float32), np.ascontiguousarray(candidates, np.int64)
        scores = np.empty(ids.shape, np.float32)
        pointers = [faiss.swig_ptr(a) for a in (scores, x, keys, ids)]
        faiss.fvec_inner_products_by_idx(*pointers, self.d, *ids.shape)  # -inf where an id is -1
        return best_of(scores, ids, k)

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
            own = self._own(j)
            places[self._ids_of(j)[own]] = np.arange(self.sizes[j])[own]
        return places

    def _own(self, cell: int) -> Any:
        """Where in a cell the keys are for which it is not the second."""
        return slice(None) if self.second is None else self.second[self._ids_of(cell)] != cell

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
        """Write the FAISS file; keys, projection and second cells beside it, where there are any."""
        faiss.write_index(_in_memory(self.index), str(directory / INDEX))
        if self.keys is not None:
            np.save(directory / KEYS, self.keys)
        if self.projection is not None:
            assert self.full_centroids is not None
            np.savez(directory / LEAN, projection=self.projection, centroids=self.full_centroids)
        if self.second is None:
            return [INDEX, *BESIDE[self.storage]]
        np.save(directory / SECOND, self.second)
        return [INDEX, *BESIDE[self.storage], SECOND]

    @classmethod
    def load(cls, directory: Path, storage: Storage, mmap: bool, spilled: bool = False) -> "FaissCellStore":
        """Read what `save` wrote; `mmap` leaves lists on disk, where the keys for refining always stay.

        `spilled` says that there are keys in second cells.
        """
        path = directory / INDEX
        # FAISS cannot map the codes of "lean", which are small; its float32 keys stay on disk.
        flags = faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY if mmap and storage != "lean" else 0
        try:
            index = faiss.read_index(os.fspath(path), flags)
        except RuntimeError as problem:
            reason = str(problem).strip().splitlines()[-1]
            raise BundleError(f"{path} is not a readable FAISS index: {reason}") from None
        expected = TYPES.get(storage)
        if type(index).__name__ != expected:
            raise BundleError(f"{path} holds a {type(index).__name__}, expected {expected or storage!r}")
        second = read_second(directory / SECOND, index) if spilled else None
        if storage == "flat":
            store = cls(index, storage, second=second)
            if second is not None:
                check_entries(path, [store._ids_of(j) for j in range(index.nlist)], second, store.n)
            return store
        lean = read_lean(directory / LEAN, index) if storage == "lean" else {}
        d = lean["projection"].shape[1] if lean else index.d
        n = index.ntotal if second is None else len(second)
        keys = read_array(directory / KEYS, (n, d), "f", mmap=True)
        store = cls(index, storage, keys, REFINE, lean.get("projection"), lean.get("centroids"), second)
        check_entries(path, [store._ids_of(j) for j in range(index.nlist)], second, store.n)
        return store


def _once(scores: Floats, ids: Ids) -> tuple[Floats, Ids]:
    """The same, best first, without a key that is there a second time; -inf and -1 fill up."""
    if len(ids) == 1:  # one query: the calls are what costs, so as few as can be
        kept = np.sort(np.unique(ids[0], return_index=True)[1])
        return scores[:, kept], ids[:, kept]
    order = np.argsort(ids, axis=1, kind="stable")
    scores, ids = np.take_along_axis(scores, order, 1), np.take_along_axis(ids, order, 1)
    again = ids[:, 1:] == ids[:, :-1]
    scores[:, 1:][again], ids[:, 1:][again] = -np.inf, -1
    return scores, ids


def _narrow(count: int) -> Any:
    """The smallest type that numbers so many cells."""
    return np.uint16 if count < 1 << 16 else np.int64


def _in_memory(index: Any) -> Any:
    """The index itself, or a copy in memory of one that is mapped: FAISS would write its file's name."""
    in_memory = (faiss.ArrayInvertedLists, faiss.BlockInvertedLists)
    if isinstance(faiss.downcast_InvertedLists(index.invlists), in_memory):
        return index
    copy = faiss.deserialize_index(faiss.serialize_index(index), faiss.IO_FLAG_SKIP_IVF_DATA)
    lists = faiss.ArrayInvertedLists(index.nlist, index.code_size)
    index.invlists.copy_subset_to(lists, faiss.InvertedLists.SUBSET_TYPE_ID_RANGE, 0, index.ntotal)
    copy.replace_invlists(lists, True)
    lists.this.disown()
    return copy
