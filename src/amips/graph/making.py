"""From keys and a log to a graph: edges, and the entry points of a walk."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips import exact
from amips.cells import kmeans
from amips.graph.edges import Lists, connect, prune, reverse, together
from amips.graph.near import nearest_keys
from amips.vectors import Floats, unit_rows

DEGREE = 32  # neighbours of a key: as many as are scored together
ENTRIES = 64  # keys that a walk may begin at: the best eight of them
NEAR = 64  # nearest keys that neighbours are chosen from
BESIDE, LOG_DEPTH = 96, 16  # keys of the log that they are chosen from, and top keys of a query that count
REVERSE = 2  # reverse edges, in units of the degree
NORMS_DIFFER = 0.05  # standard deviation of the norms of keys, relative to their mean, from which they count


@dataclass(frozen=True)
class Graph:
    """Neighbours of each key, int32 [n, degree], -1 after the last; and keys to begin at, int32 [e]."""

    neighbours: Lists
    entries: Lists


def make_graph(
    keys: Floats,
    queries: Floats | None,
    top: NDArray[np.integer[Any]] | None,
    *,
    degree: int = DEGREE,
    entries: int = ENTRIES,
    near: Lists | None = None,
    seed: int = 0,
    progress: bool = False,
) -> Graph:
    """A graph over keys whose edges come from the keys and, if there is one, from a log of queries.

    Half of the neighbours of a key are among its nearest keys, half among the keys that stand beside it in
    the top lists of queries. Both halves are pruned by the relative-neighbour rule, and reverse edges fill
    up.

    Args:
        keys: [n, d]; projected keys do as well (`amips.lean`).
        queries: the log, as the entry points are looked for with, [m, d]; None for none.
        top: the top keys of the log's queries, [m, 10 or more].
        near: what `near_lists` gives, if it is at hand.
    """
    unit = unit_rows(keys)[0]
    if near is None:
        near = near_lists(keys, seed=seed, progress=progress)
    own = prune(unit, near, degree)
    if top is not None and len(top):
        own = np.concatenate([own[:, : degree // 2], log_edges(unit, top, degree // 2)], axis=1)
    both = np.concatenate([own, reverse(own, REVERSE * degree)], axis=1)
    starts = entry_points(keys, queries, entries, seed=seed)
    neighbours = connect(prune(unit, both, degree, fill=True, ordered=True), near, starts)
    return Graph(neighbours, starts)


def near_lists(keys: Floats, *, seed: int = 0, progress: bool = False, out: Path | None = None) -> Lists:
    """Keys that each key may have as neighbours, [n, width]: the nearest, by the angle.

    Where norms differ, also those that it would find if it were a query: large ones, of which a walk for
    inner products must know.

    Args:
        out: a directory from which what was interrupted goes on; AmipsError if it has lists of other keys.
    """
    unit, norms = unit_rows(keys)
    places = [None if out is None else out / name for name in ("by-angle", "by-product")]
    find = partial(nearest_keys, seed=seed, progress=progress)
    near = find(unit, min(NEAR, len(keys) - 1), out=places[0])
    if norms.std() <= NORMS_DIFFER * norms.mean():
        return near
    large = find(keys, min(NEAR // 2, len(keys) - 1), asked=unit, out=places[1])
    return np.concatenate([near, large], axis=1)


def log_edges(unit: Floats, top: NDArray[np.integer[Any]], degree: int) -> Lists:
    """Neighbours from the log: keys that stand beside a key in top lists, most often first, pruned."""
    return prune(unit, together(top[:, :LOG_DEPTH], len(unit), BESIDE), degree, ordered=True)


def entry_points(keys: Floats, queries: Floats | None, count: int, *, seed: int = 0) -> Lists:
    """Keys to begin at: the top keys of the centres of the log, or of the keys where there is none, [e]."""
    rows = keys if queries is None or len(queries) < count else queries
    count = min(count, len(keys), len(rows))
    centres = kmeans(rows, count, iterations=10, seed=seed).centroids
    best: Lists = exact.top_k(keys, centres, 1)[1][:, 0].astype(np.int32)
    return np.unique(best)
