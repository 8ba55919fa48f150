"""Cells after routing: a key goes where a router sends the queries that want it.

A router is trained for some cells; with that router, other cells may suit it better. Each key y stands for
the queries that want it, by z = normalize(y / ||y|| + s m_y) as in `aware`, and may move to the cell that the
router scores highest for z. A cell takes in keys only up to a limit on its size, those that gain most first.
Then a router can be trained for the new cells, and so on, while that pays on val queries.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.cells import STRENGTH, Cells, check_top, towards_queries
from amips.errors import VectorError
from amips.vectors import Floats, open_vectors

BLOCK_BYTES = 1 << 26  # of scores in memory at a time
LIMIT = 1.5  # times the mean size


def moved(
    cells: Cells,
    keys: Any,
    queries: Any,
    top_ids: NDArray[np.integer[Any]],
    scores: Callable[[Floats], Floats],
    *,
    strength: float = STRENGTH,
    limit: float = LIMIT,
) -> Cells:
    """The cells after each key went to the one that the router prefers for its queries.

    Args:
        cells: the cells that the router was trained for.
        keys, queries, top_ids: as for `query_aware`.
        scores: the router: [m, d] -> [m, c].
        strength: s above.
        limit: no cell takes in keys beyond so many times the mean size. One that is larger keeps what it has.
    """
    keys, queries = open_vectors(keys, "keys"), open_vectors(queries, "queries")
    if not 1 <= limit < np.inf:
        raise VectorError(f"limit={limit}: expected a number of times the mean size, at least 1")
    check_top(top_ids, queries.n, keys.n)
    target, gain = cells.assignment.copy(), np.zeros(keys.n, np.float32)
    step = max(1, BLOCK_BYTES // (4 * max(keys.d, cells.count)))
    for start, block in towards_queries(keys, queries, top_ids, strength).blocks(step):
        fits = scores(block)
        best, rows = fits.argmax(axis=1), np.arange(len(fits))
        target[start : start + step] = best
        gain[start : start + step] = fits[rows, best] - fits[rows, cells.assignment[start : start + step]]
    leaving = np.flatnonzero(gain > 0)
    leaving = leaving[np.lexsort((leaving, -gain[leaving], target[leaving]))]  # by cell, most gain first
    to = target[leaving]
    place = np.arange(len(to)) - np.searchsorted(to, to)
    room = np.maximum(0, int(limit * keys.n / cells.count) - cells.sizes)
    accepted = leaving[place < room[to]]
    assignment = cells.assignment.copy()
    assignment[accepted] = target[accepted]
    return Cells(assignment, cells.centroids)
