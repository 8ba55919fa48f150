"""A FAISS index from elsewhere as a cell store: what measuring its recall needs of it."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.blas import faiss
from amips.cells import IVFParts, Placement
from amips.errors import BundleError, VectorError
from amips.vectors import Floats, read_ids

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class WrappedStore:
    """The keys of a task where they are in an index; `scan` answers in rows of the task's keys.

    Args:
        parts: the index.
        placement: where each key is in it.
        scanner: its `scan_cells(x, cells, k)`, which answers in the index's own ids.
    """

    parts: IVFParts
    placement: Placement
    scanner: Any
    second = None
    refine = 1

    @property
    def n(self) -> int:
        """The number of keys, those that were added later included."""
        return int(self.parts.ivf.ntotal)

    @property
    def d(self) -> int:
        """The dimension of queries."""
        return int(self.parts.index.d)

    @cached_property
    def sizes(self) -> Ids:
        """Keys in each cell, [c]."""
        return self.parts.sizes

    @property
    def centroids(self) -> Floats:
        """[c, d]. Behind a transform there are none in this space: only their number counts."""
        own = self.parts.centroids
        return own if own.shape[1] == self.d else np.zeros((len(own), self.d), np.float32)

    @property
    def assignment(self) -> NDArray[np.int32]:
        """The cell of each of the task's keys."""
        return self.placement.cells

    @property
    def storage(self) -> str:
        """ "flat" if a key that is scanned is found; otherwise only a search can tell."""
        return "flat" if self.parts.exact else type(self.parts.ivf).__name__

    def scan(self, x: Floats, cells: Ids, k: int) -> tuple[Floats, Ids]:
        """As `CellStore.scan`, among the task's keys alone: those that were added later are left out."""
        known, _ = self._rows
        more = k if self.n == len(known) else 2 * k * -(-self.n // len(known))
        scores, names = self.scanner(x, cells, more)
        rows = self.rows(names)
        if more > k:
            first = np.argsort(rows < 0, axis=1, kind="stable")[:, :k]
            scores, rows = np.take_along_axis(scores, first, 1), np.take_along_axis(rows, first, 1)
        return scores, rows

    def rows(self, names: Ids) -> Ids:
        """The rows of the task's keys that have these ids in the index; -1 for others."""
        known, order = self._rows
        at = np.minimum(np.searchsorted(known, names), len(known) - 1)
        return np.where((known[at] == names) & (names >= 0), order[at], -1)

    @cached_property
    def _rows(self) -> tuple[Ids, Ids]:
        """The ids of the task's keys in order, and the rows that have them."""
        if self.placement.ids is None:
            raise VectorError("which key has which id in the index is not known: give wrap the ids, ids=")
        order = np.argsort(self.placement.ids, kind="stable")
        return self.placement.ids[order], order

    def scan_flops(self, keys: Ids, k: int) -> Ids:
        """See `faiss_scan_flops`."""
        return faiss_scan_flops(self.parts, keys)

    def score_again(self, x: Floats, candidates: Ids, k: int) -> tuple[Floats, Ids]:
        """Not here: the keys themselves are elsewhere."""
        raise BundleError("a wrapped index does not score again: it holds no keys of its own")

    def save(self, directory: Path) -> list[str]:
        """Not here: the index is a file of its own."""
        raise BundleError("a wrapped index is saved with its save(directory)")


def selector_of(parts: IVFParts, chosen: Any) -> Any:
    """What tells FAISS which keys may be results: those with these ids, or, by number, of a mask [n]."""
    mask = np.asarray(chosen) if not isinstance(chosen, str | Path) else None
    if mask is not None and mask.dtype == np.bool_:
        if mask.shape != (parts.ivf.ntotal,):
            raise VectorError(f"filter: a mask {list(mask.shape)}, expected [{parts.ivf.ntotal}]")
        if not parts.numbered:
            raise VectorError("filter: the keys of this index have ids of their own: give ids, not a mask")
        # A bit a key: the set that IDSelectorBatch makes of as many ids takes longer than the search.
        return faiss.IDSelectorBitmap(np.packbits(mask, bitorder="little"))
    if mask is not None and not mask.size:
        ids = np.empty(0, np.int64)
    else:
        ids = read_ids(chosen, unique=False)
        if ids.ndim == 1 and len(ids) == parts.ivf.ntotal > 2 and set(np.unique(ids).tolist()) <= {0, 1}:
            raise VectorError("filter: this looks like a mask, of numbers; give it as bool")
        if ids.ndim != 1 or ids.dtype.kind != "i":
            raise VectorError(f"filter of type {ids.dtype} {list(ids.shape)}: expected ids, or bool [n]")
    if parts.id_map is not None:  # inverted lists have numbers, and a map of their own says whose they are
        names = faiss.rev_swig_ptr(parts.id_map.data(), parts.id_map.size())
        ids = np.flatnonzero(np.isin(names, ids))
    return faiss.IDSelectorBatch(np.ascontiguousarray(ids, np.int64))


def faiss_scan_flops(parts: IVFParts, keys: Ids) -> Ids:
    """FLOPs of scanning so many keys [m] of an index, for each query.

    A PQ code costs one addition for each part, and a query its tables; every other key, in whatever form it
    is stored, counts as an inner product in the inner dimension. Transforms of the query come on top.
    """
    d, ivf = int(parts.ivf.d), parts.ivf
    before = sum(2 * transform.d_in * transform.d_out for transform in parts.transforms)
    if isinstance(ivf, faiss.IndexIVFPQ | faiss.IndexIVFPQFastScan):
        return np.asarray(ivf.pq.M * keys + 2 * ivf.pq.ksub * d + before)
    return np.asarray(2 * d * keys + before)
