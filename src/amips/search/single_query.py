"""One query alone in cells: as few calls as can be, and one that is compiled for the rest."""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from amips.blas import one_thread
from amips.index import MOST_SINGLE, OwnCells
from amips.routers import least_keys
from amips.search.effort import Effort
from amips.search.inputs import checked_probes, labelled, one_query, split_norms
from amips.vectors import Floats

if TYPE_CHECKING:
    from amips.search.filtered_cells import FilteredCells
    from amips.search.searcher import Searcher


def search_one(
    index: "Searcher", x: Any, k: int, effort: Effort, filtered: "FilteredCells | None"
) -> tuple[Floats, NDArray[Any]] | None:
    """Scores [1, k] and ids [1, k]; None of many queries, of a bad one, and where nothing is compiled."""
    single = index._single
    one = None if single is None or k > MOST_SINGLE else one_query(x, index.d)
    if one is None:
        return None
    v, exponent = one
    if filtered is not None:
        with one_thread():
            best, ids = filtered.search_one(v, k, effort)
    elif effort.refine == 0:
        return None
    else:
        assert single is not None
        scores = None
        if not single.routed:
            with one_thread():
                scores = index.router.scores(split_norms(v)[0])
        store = index.store_for(effort.refine)
        assert isinstance(store, OwnCells)
        probes, min_mass = 0, effort.min_mass
        if min_mass is None:
            probes, min_mass = int(checked_probes(effort.probes, 1, index.c)[0]), 0.0
        candidates, keys = store.candidates(k), least_keys(k, store.second is not None)
        alive = None if index.alive is None else index.alive.keys
        best, ids = single(v, scores, k, candidates, probes, index.temperature, min_mass, keys, alive)
    if exponent:
        with np.errstate(over="ignore"):
            best = np.ldexp(best, exponent)
    return best, labelled(ids, index.labels)
