"""Scanning cells by matrix products: the keys of a cell times all queries that probe it."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from amips.index.top_keys import TopKeys, narrow_type
from amips.vectors import Floats

Ids = NDArray[np.int64]

PRODUCT_BLOCK = 1024  # queries in one product, at most


def scan_by_product(
    x: Floats,
    cells: Ids,
    k: int,
    sizes: Ids,
    keys_of: Callable[[int], tuple[Floats, Ids]],
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
            step = max(1, min(PRODUCT_BLOCK, tile_bytes // (4 * len(ids))))
            for first in range(low, high, step):
                rows = rows_by_cell[first : min(first + step, high)]
                best.take(rows, x[rows] @ keys.T, ids)
        best.compact()
    return best.finish()
