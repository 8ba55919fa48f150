"""A few queries in cells: as few calls as can be, and one that is compiled for the rest."""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from amips.blas import one_thread, threads_allowed
from amips.index import MOST_IN_ORDER, OwnCells
from amips.routers import least_keys
from amips.search.effort import Effort
from amips.search.inputs import MOST_FEW, checked_probes, few_queries, split_norms
from amips.vectors import Floats

if TYPE_CHECKING:
    from amips.search.filtered_cells import FilteredCells
    from amips.search.searcher import Searcher


def search_few(
    index: "Searcher",
    x: Any,
    k: int,
    effort: Effort,
    filtered: "FilteredCells | None",
    threads: int | None = None,
) -> tuple[Floats, NDArray[np.int64]] | None:
    """Scores and key numbers [m, k]; None of more queries, of a bad one, and where nothing is compiled.

    Args:
        threads: of the call; None is as many as there are. On one alone, more queries of lean storage are
            searched a few at a time: the codes of a cell take FAISS longer than compiled code.
    """
    compiled = index._few
    if compiled is not None and compiled.lean and filtered is None and _are_many(x):
        return _in_turns(index, x, k, effort) if (threads or threads_allowed()) == 1 else None
    few = None if compiled is None or k > MOST_IN_ORDER else few_queries(x, index.d)
    if few is None:
        return None
    v, exponents = few
    if filtered is not None:
        if len(v) > 1:  # which share more behind a filter
            return None
        with one_thread():
            best, ids = filtered.search_one(v, k, effort)
    elif effort.refine == 0:
        return None
    else:
        assert compiled is not None
        probes, min_mass = 0, effort.min_mass
        if min_mass is None:
            counts = checked_probes(effort.probes, len(v), index.c)
            probes, min_mass = int(counts[0]), 0.0
            if len(v) > 1 and (counts != probes).any():
                return None
        scores = None
        if not compiled.routed:
            with one_thread():
                scores = index.router.scores(split_norms(v)[0])
        store = index.store_for(effort.refine)
        assert isinstance(store, OwnCells)
        candidates, keys = store.candidates(k), least_keys(k, store.twice)
        alive = None if index.alive is None else index.alive.keys
        best, ids = compiled(v, scores, k, candidates, probes, index.temperature, min_mass, keys, alive)
    if np.any(exponents):
        with np.errstate(over="ignore"):
            best = np.ldexp(best, exponents)
    return best, ids


def _are_many(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.ndim == 2 and len(x) > MOST_FEW


def _in_turns(
    index: "Searcher", x: NDArray[Any], k: int, effort: Effort
) -> tuple[Floats, NDArray[np.int64]] | None:
    """Many queries, a few at a time; None where some cannot be searched like this."""
    scores, ids = np.empty((len(x), k), np.float32), np.empty((len(x), k), np.int64)
    for low in range(0, len(x), MOST_FEW):
        rows = slice(low, low + MOST_FEW)
        part = search_few(index, x[rows], k, effort.of_rows(rows), None)
        if part is None:
            return None
        scores[rows], ids[rows] = part
    return scores, ids
