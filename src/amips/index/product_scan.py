"""Scanning float32 keys by cell: times all queries that probe a cell, or query by query from disk."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.blas import faiss
from amips.index.key_mask import KeyMask
from amips.index.top_keys import TopKeys, best_of, narrow_type, reaching
from amips.vectors import Floats

Ids = NDArray[np.int64]

PRODUCT_BLOCK = 1024  # queries in one product, at most


def scan_by_product(
    x: Floats,
    cells: Ids,
    k: int,
    sizes: Ids,
    keys_of: Callable[[int], tuple[Floats, NDArray[np.integer[Any]]]],
    *,
    twice: bool,
    tile_bytes: int,
) -> tuple[Floats, Ids]:
    """Scores [m, k] and ids [m, k] of the best keys by <x, y> within cells [m, p]; -1 skips.

    The first probe of every query is scanned before the others: it gives the k-th score that most keys of
    the later cells then fall short of.

    Args:
        sizes: how many keys each cell has, [c].
        keys_of: the keys of a cell and their ids, [s, d] and [s].
        twice: whether a key may be in two cells.
        tile_bytes: what the scores of one product may take.
    """
    best = TopKeys(len(x), k, twice=twice)
    for probes in (cells[:, :1], cells[:, 1:]):
        if probes.shape[1] == 0:
            continue
        rows_of, places = np.nonzero(probes >= 0)
        if len(rows_of) == 0:  # nobody probes more than one cell
            continue
        flat = probes[rows_of, places].astype(narrow_type(len(sizes)))  # sorted by radix, if narrow
        order = np.argsort(flat, kind="stable")
        present, starts = np.unique(flat[order], return_index=True)
        ends = np.append(starts[1:], len(flat))
        rows_by_cell = rows_of[order]
        for cell, low, high in zip(present, starts, ends, strict=True):
            if sizes[cell] == 0:
                continue
            keys, ids = keys_of(int(cell))
            if not len(ids):  # no key of it is allowed
                continue
            step = max(1, min(PRODUCT_BLOCK, tile_bytes // (4 * len(ids))))
            for first in range(low, high, step):
                rows = rows_by_cell[first : min(first + step, high)]
                best.take(rows, x[rows] @ keys.T, ids)
        best.compact()
    return best.finish()


def scan_each(
    x: Floats,
    cells: Ids,
    k: int,
    sizes: Ids,
    entries: NDArray[np.int32],
    rows: Floats,
    *,
    twice: bool,
    allowed: KeyMask | None = None,
) -> tuple[Floats, Ids]:
    """The same query by query, of keys on disk, of which only the probed cells are read.

    Args:
        entries, rows: the keys of the cells, one after the other: their ids [e], and themselves [e, d].
        allowed: the keys that may be results; all, if None.
    """
    best = np.full((len(x), k), -np.inf, np.float32), np.full((len(x), k), -1, np.int64)
    x, starts = np.ascontiguousarray(x, np.float32), np.append(0, np.cumsum(sizes))
    for row, probed in enumerate(cells):
        counts = sizes[chosen := probed[probed >= 0]]
        if not counts.any():
            continue
        ends = np.cumsum(counts)
        places = np.repeat(starts[chosen] + counts - ends, counts) + np.arange(ends[-1])
        if allowed is not None:
            places = places[allowed.keys[entries[places]]]
        scores = np.empty(len(places), np.float32)
        pointers = [faiss.swig_ptr(a) for a in (scores, x[row], rows, places)]
        faiss.fvec_inner_products_by_idx(*pointers, x.shape[1], 1, len(places))
        scores, ids = reaching(scores, entries[places].astype(np.int64), k, twice=twice)
        best[0][row : row + 1], best[1][row : row + 1] = best_of(scores[None], ids[None], k)
    return best
