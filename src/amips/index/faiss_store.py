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

from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.blas import faiss
from amips.design import Storage
from amips.errors import BundleError
from amips.index.cell_files import CellParts, read_cells, scanned_bytes, second_entries, write_cells
from amips.index.costs import candidates_of, scan_flops
from amips.index.fill import Bytes, Entries32, assemble, codebook_of, codes_of, entries_of, fill
from amips.index.key_mask import KeyMask
from amips.index.product_scan import scan_by_product, scan_each
from amips.index.top_keys import (
    best_first,
    best_of,
    cell_products,
    once,
    score_candidates,
    top_of_rows,
)
from amips.lean import Projection
from amips.vectors import Floats, Vectors, gather, mapped_file

Ids = NDArray[np.int64]

# From how many queries a cell on, on average, the matrix product beats FAISS's scan.
MEETINGS_FOR_PRODUCT = 4.0
REFINE_BYTES = 1 << 23
DISK_BYTES = 1 << 24  # of keys on disk that are read at a time
FEW_ON_DISK = 1 << 12  # candidates, up to which keys on disk are read as they come
EXACT_BYTES = 1 << 22  # of scores, at once, where every key is scored
REFINE = 10  # candidates that quantised storage scores again, for each result asked for


@dataclass(frozen=True)
class FaissCellStore:
    """Keys in given cells, scanned by FAISS; the entries of cells are arrays of ours, and FAISS has a copy.

    Args:
        index: a `faiss.IndexIVF` with the codes; None where float32 keys stay on disk (`rows`).
        sizes, entries: how many keys each cell has [c], and which, cell by cell [e]: 4 bytes each.
        centroids: [c, d].
        keys: float32 [n, d], with which quantised storage scores its candidates.
        refine: of quantised storage: candidates for each result asked for.
        projection, key_projection: of "lean": what queries and keys are multiplied with, [r, d].
        second: the second cell of each key, -1 for none.
        means: of "pq": the mean key of each cell [c, d], relative to which keys are coded.
        rows: of "flat" that stays on disk: the keys of the entries, [e, d].
        directory: where it was loaded from, if something stays there.
    """

    index: Any
    storage: Storage
    sizes: Ids
    entries: Entries32
    centroids: Floats
    keys: Floats | None = None
    refine: int = REFINE
    projection: Floats | None = None
    second: NDArray[np.int32] | None = None
    means: Floats | None = None
    rows: Floats | None = None
    directory: Path | None = None
    key_projection: Floats | None = None

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
        index, means = fill(keys, assignment, centroids, storage, projection, second)
        parts = (index, storage, *entries_of(index), np.ascontiguousarray(centroids, np.float32))
        if storage == "flat":
            return cls(*parts, second=second)
        # Float32 keys beside small codes: left in their file where they have one, read as they are needed.
        addressable = keys.array is not None and keys.array.dtype == np.float32
        rows = keys.array if addressable else keys.load()
        store = cls(*parts, rows, second=second, means=means)
        if projection is None:
            return store
        return replace(store, projection=projection.queries, key_projection=projection.keys)

    @property
    def n(self) -> int:
        """The number of keys."""
        return len(self.entries) if self.second is None else len(self.second)

    @property
    def d(self) -> int:
        """The dimension."""
        return int(self.centroids.shape[1])

    @property
    def twice(self) -> bool:
        """Whether there are keys in a second cell."""
        return self.second is not None

    @cached_property
    def assignment(self) -> NDArray[np.int32]:
        """The cell of each key."""
        return self._of_first(np.repeat(np.arange(len(self.sizes), dtype=np.int32), self.sizes))

    @cached_property
    def starts(self) -> Ids:
        """Where in the entries each cell begins, and the end, [c + 1]."""
        return np.append(0, np.cumsum(self.sizes))

    @cached_property
    def places(self) -> NDArray[np.int32]:
        """Where in the entries each key is, in its first cell, [n]."""
        return self._of_first(np.arange(len(self.entries), dtype=np.int32))

    def _of_first(self, values: NDArray[Any]) -> NDArray[Any]:
        """Values of entries [e] as values of keys [n], of the entry in a key's first cell."""
        entries = self.entries
        if self.second is not None:
            first = ~second_entries(self.sizes, entries, self.second)
            entries, values = entries[first], values[first]
        by_key = np.empty(self.n, values.dtype)
        by_key[entries] = values
        return by_key

    @property
    def codebook(self) -> Floats | None:
        """What codes stand for (`amips.index.fill.codebook_of`); None if there are none."""
        return None if self.index is None else codebook_of(self.index, self.storage)

    @cached_property
    def addresses(self) -> NDArray[np.uint64]:
        """Where in memory the codes (or float32 keys) of each cell are, [c]; this store must be kept."""
        if self.rows is not None:
            return (self.rows.ctypes.data + self.starts[:-1] * 4 * self.d).astype(np.uint64)
        addresses = np.zeros(len(self.sizes), np.uint64)
        for cell in np.flatnonzero(self.sizes).tolist():
            addresses[cell] = int(self.index.invlists.get_codes(cell))
        return addresses

    def scan(self, x: Floats, cells: Ids, k: int, allowed: KeyMask | None = None) -> tuple[Floats, Ids]:
        """The k best keys by <x, y> within cells [m, p], of those that are allowed; -1 skips."""
        if len(x) == 0 or cells.shape[1] == 0:
            return np.full((len(x), k), -np.inf, np.float32), np.full((len(x), k), -1, np.int64)
        if self.storage == "flat":
            # A small index reads its codes from cache, and a large batch shares them.
            if len(x) > 1 and (cells >= 0).sum() >= MEETINGS_FOR_PRODUCT * len(self.sizes):
                return self._scan_by_product(x, cells, k, allowed)
            if self.rows is not None:
                parts = (self.sizes, self.entries, self.rows)
                return scan_each(x, cells, k, *parts, twice=self.second is not None, allowed=allowed)
            if self.second is None:
                best = self._scan_by_faiss(x, cells, k + 1, allowed)
            else:
                best = best_of(*once(*self._scan_by_faiss(x, cells, 2 * k + 2, allowed)), k + 1)
            return self._settle_ties(x, cells, *best, allowed)
        candidates = self._scan_by_faiss(x, cells, self.candidates(k), allowed)[1]
        if self.second is not None:
            candidates.sort(axis=1)
            candidates[:, 1:][candidates[:, 1:] == candidates[:, :-1]] = -1
        return self.score_again(x, candidates, k)

    def candidates(self, k: int) -> int:
        """How many are looked for; where some may be found twice as many more, twice k at least."""
        return candidates_of(k, self.refine, self.n, len(self.entries))

    def scan_flops(self, keys: Ids, k: int) -> Ids:
        """FLOPs of scanning so many keys for k results, for each query; see `amips.index.costs`."""
        parts = int(self.index.pq.M) if self.storage == "pq" else 0
        r = 0 if self.projection is None else len(self.projection)
        return scan_flops(self.storage, keys, self.d, self.candidates(k), r, parts)

    def every_key(self, x: Floats, k: int, allowed: KeyMask | None = None) -> tuple[Floats, Ids]:
        """The k best of all keys that are allowed, each scored with the query itself."""
        if self.keys is None:
            return self.scan(x, np.tile(np.arange(len(self.sizes)), (len(x), 1)), k, allowed)
        return top_of_rows(self.keys, x, k, EXACT_BYTES, None if allowed is None else allowed.keys)

    def with_refine(self, refine: int) -> "FaissCellStore":
        """The same with so many candidates of codes for each result."""
        return replace(self, refine=refine)

    def _scan_by_faiss(self, x: Floats, cells: Ids, k: int, allowed: KeyMask | None) -> tuple[Floats, Ids]:
        m, p = cells.shape
        if self.projection is not None:
            x = x @ self.projection.T
            x[~x.any(axis=1)] = 1  # FastScan finds nothing for zeros, to which every key is as near
        x, cells = np.ascontiguousarray(x, np.float32), np.ascontiguousarray(cells, np.int64)
        base = np.zeros((m, p), np.float32)
        if self.means is not None:  # codes of what is left of a key: FAISS adds <x, y - mean> to this
            base = cell_products(self.means, x, cells, REFINE_BYTES)
        scores, ids = np.empty((m, k), np.float32), np.empty((m, k), np.int64)
        # The number of probes goes with the call: setting index.nprobe would race with other threads.
        arguments = [faiss.swig_ptr(a) for a in (cells, base, scores, ids)]
        chosen = {} if allowed is None else {"sel": allowed.selector}
        parameters = faiss.SearchParametersIVF(nprobe=p, **chosen)
        self.index.search_preassigned_c(m, faiss.swig_ptr(x), k, *arguments, False, parameters)
        scores[ids < 0] = -np.inf
        return scores, ids

    def _settle_ties(
        self, x: Floats, cells: Ids, scores: Floats, ids: Ids, allowed: KeyMask | None
    ) -> tuple[Floats, Ids]:
        """From FAISS's k + 1 results the k best, ties to the lower id; FAISS leaves their order open."""
        k = ids.shape[1] - 1
        if not (scores[:, 1:] == scores[:, :-1]).any():  # FAISS's order is the only one
            return scores[:, :k], ids[:, :k]
        tied = (scores[:, k - 1] == scores[:, k]) & (ids[:, k] >= 0)  # more keys than these may tie
        scores, ids = best_first(scores, ids, k)
        if tied.any():
            scores[tied], ids[tied] = self._scan_by_product(x[tied], cells[tied], k, allowed)
        return scores, ids

    def _scan_by_product(self, x: Floats, cells: Ids, k: int, allowed: KeyMask | None) -> tuple[Floats, Ids]:
        """Cell by cell: the queries that probe it, times its keys."""

        def keys_of(cell: int) -> tuple[Floats, Entries32]:
            keys, ids = self._keys_of(cell)
            if allowed is None:
                return keys, ids
            kept = allowed.keys[ids]
            return keys[kept], ids[kept]

        twice = self.second is not None
        return scan_by_product(x, cells, k, self.sizes, keys_of, twice=twice, tile_bytes=REFINE_BYTES)

    def score_again(self, x: Floats, candidates: Ids, k: int) -> tuple[Floats, Ids]:
        """True inner products of the candidates [m, r] (-1 skips), and the k best of them."""
        keys = self.keys
        if keys is None or keys.dtype != np.float32 or not keys.flags.c_contiguous:
            return score_candidates(self.keys_at, x, candidates, k, REFINE_BYTES)
        x, ids = np.ascontiguousarray(x, np.float32), np.ascontiguousarray(candidates, np.int64)
        scores = np.empty(ids.shape, np.float32)
        on_disk = ids.size > FEW_ON_DISK and mapped_file(keys) is not None
        step = max(1, DISK_BYTES // (4 * self.d * max(1, ids.shape[1]))) if on_disk else max(1, len(x))
        for low in range(0, len(x), step):
            rows, places = keys, ids[low : low + step]
            if on_disk:  # each key that any of these queries asks for once, from the first to the last
                wanted, inverse = np.unique(places, return_inverse=True)
                rows = gather(keys, np.maximum(wanted, 0))
                places = np.where(places < 0, -1, inverse.reshape(places.shape))
            parts = (scores[low : low + step], x[low : low + step], rows, places)
            # -inf where an id is -1
            faiss.fvec_inner_products_by_idx(*map(faiss.swig_ptr, parts), self.d, *places.shape)
        return best_of(scores, ids, k)

    def keys_at(self, ids: Ids) -> Floats:
        """Float32 keys by id, [..., d]."""
        if self.keys is not None:
            return self.keys[ids]
        flat = ids.ravel()
        places, cells = self.places[flat], self.assignment[flat]
        if self.rows is not None:
            return self.rows[places].reshape(*ids.shape, self.d)
        rows = np.empty((ids.size, self.d), np.float32)
        order = np.argsort(cells, kind="stable")
        present, starts = np.unique(cells[order], return_index=True)
        for cell, low, high in zip(present, starts, np.append(starts, ids.size)[1:], strict=True):
            wanted = order[low:high]
            rows[wanted] = self._rows_of(int(cell))[places[wanted] - self.starts[cell]]
        return rows.reshape(*ids.shape, self.d)

    def _keys_of(self, cell: int) -> tuple[Floats, Entries32]:
        """The keys of a cell, and their ids."""
        return self._rows_of(cell), self.entries[self.starts[cell] : self.starts[cell + 1]]

    def _rows_of(self, cell: int) -> Floats:
        """Keys of a cell, of "flat"; not a copy."""
        rows: Floats = self.codes_in(cell).view(np.float32).reshape(-1, self.d)
        return rows

    def codes_in(self, cell: int) -> Bytes:
        """What is scanned of a cell, one after the other: FAISS's own memory or the file's, not a copy."""
        if self.rows is not None:
            return self.rows[self.starts[cell] : self.starts[cell + 1]].reshape(-1).view(np.uint8)
        return codes_of(self.index, cell, int(self.sizes[cell]))

    def save(self, directory: Path) -> list[str]:
        """Write the files of `amips.index.cell_files`; their names."""
        return write_cells(directory, self.storage, self.parts)

    @property
    def parts(self) -> CellParts:
        """What it is put together from."""
        return CellParts(**{field.name: getattr(self, field.name) for field in fields(CellParts)})

    @classmethod
    def load(
        cls, directory: Path, storage: Storage, mmap: bool, spilled: bool = False, finite: bool = True
    ) -> "FaissCellStore":
        """Read what `save` wrote; see `amips.index.cell_files.read_cells`."""
        parts = read_cells(directory, storage, mmap, spilled, finite)
        source = directory.absolute() if mmap else None
        return cls(storage=storage, directory=source, **vars(parts))

    def __reduce__(self) -> Any:
        """For pickle: opened again where keys stay on disk and still are there, otherwise copied."""
        if self.directory is not None and self.directory.is_dir():
            return _reopen, (self.directory, self.storage, self.second is not None, self.refine)
        codes = None if self.rows is not None else np.concatenate([*scanned_bytes(self.parts)])
        names = [field.name for field in fields(self) if field.name not in ("index", "directory")]
        return _restore, ({name: getattr(self, name) for name in names}, codes, self.codebook)


def _reopen(directory: Path, storage: Storage, spilled: bool, refine: int) -> FaissCellStore:
    if not directory.is_dir():
        raise BundleError(f"{directory} is gone: its bundle was replaced or removed; load it again")
    return replace(FaissCellStore.load(directory, storage, True, spilled, finite=False), refine=refine)


def _restore(values: dict[str, Any], codes: Bytes | None, codebook: Floats | None) -> FaissCellStore:
    if codes is None:
        return FaissCellStore(None, **values)
    at = 0

    def read(memory: Bytes) -> None:
        nonlocal at
        memory[:] = codes[at : at + len(memory)]
        at += len(memory)

    kept = {name: values[name] for name in ("storage", "sizes", "entries", "centroids", "means")}
    return FaissCellStore(assemble(**kept, codebook=codebook, read=read), **values)
