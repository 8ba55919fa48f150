"""Searching cells with the predicted key in the place of the query throughout, as in the paper."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from amips.errors import AmipsError
from amips.index import KeyMask, scan_allowed
from amips.routers import CentroidRouter, MapperRouter, best_cells, limit_probes
from amips.search.effort import Effort
from amips.search.inputs import restore_norms, split_norms
from amips.vectors import Floats

if TYPE_CHECKING:
    from amips.search.searcher import Searcher

Ids = NDArray[np.int64]

DROP_IN_CANDIDATES = 4  # candidates scored again with x, for each result asked for


def drop_in_search(
    index: "Searcher", x: Floats, k: int, effort: Effort, rescore: bool, allowed: KeyMask | None
) -> tuple[Floats, Ids]:
    """The k best keys by the predicted key in the place of x."""
    if not isinstance(index.router, MapperRouter):
        raise AmipsError("drop_in=True needs a model that predicts one key: train on a task with cells=1")
    scores, ids = np.empty((len(x), k), np.float32), np.empty((len(x), k), np.int64)
    counts, by_centroid = index.counts(effort, len(x)), CentroidRouter(index.store.centroids)
    for rows in index.batches(counts, k, index.store.refine):
        u, v, exponents = split_norms(x[rows])
        mapped = index.router.map(u)
        cells = best_cells(by_centroid.scores(mapped), int(counts[rows].max(initial=1)))
        cells = limit_probes(cells, counts[rows])
        if not rescore:
            scores[rows], ids[rows] = scan_allowed(index.store, mapped, cells, k, allowed)
            continue
        candidates = scan_allowed(index.store, mapped, cells, k * DROP_IN_CANDIDATES, allowed)[1]
        true, ids[rows] = index.store.score_again(v, candidates, k)
        scores[rows] = restore_norms(true, exponents)
    return scores, ids
