"""Systems opened for searching, each with its costs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from amips.bench.systems import System
from amips.blas import faiss
from amips.blas import threads as limit_threads
from amips.search import Cost, Searcher
from amips.search.points import shares
from amips.search.searcher import DROP_IN_CANDIDATES
from amips.vectors import Floats, Vectors

Ids = NDArray[np.int64]
Search = Callable[[Floats, int, int], tuple[Floats, Ids]]

GROWTH = 2**0.5  # from one budget to the next
HNSW_CONSTRUCTION = 80
HNSW_BUDGETS = (10, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # efSearch


class Opened(Protocol):
    """A system that can be searched with a budget, whatever that means for it."""

    def search(self, x: Floats, k: int, budget: int) -> tuple[Floats, Ids]:
        """Scores and ids, [m, k]."""
        ...

    def cost(self, x: Floats, k: int, budget: int) -> Cost:
        """FLOPs and keys scanned for each query."""
        ...

    @property
    def ways(self) -> dict[str, Search]:
        """Ways to compute the same answers, by name: the fastest counts."""
        ...


@dataclass(frozen=True)
class OpenedIVF:
    """Cells, routed; the budget is the number of probes, or the number of a bound on the share."""

    system: System
    searcher: Searcher

    def search(self, x: Floats, k: int, budget: int) -> tuple[Floats, Ids]:
        """Route, then scan."""
        if self.system.stop == "share":
            return self.searcher.search(x, k, share=shares()[budget])
        if self.system.route == "cells":
            return self.searcher.search(x, k, budget)
        rescore = self.system.route == "drop-in-rescored"
        return self.searcher.search(x, k, budget, route="drop-in", rescore=rescore)

    def cost(self, x: Floats, k: int, budget: int) -> Cost:
        """Network, coarse and scan; a drop-in that scores candidates again pays for them."""
        if self.system.stop == "share":
            return self.searcher.cost(x, k=k, share=shares()[budget])
        cost = self.searcher.cost(x, budget, k)
        if self.system.route != "drop-in-rescored":
            return cost
        again = 2 * self.searcher.d * np.minimum(cost.scanned, k * DROP_IN_CANDIDATES)
        return replace(cost, scan=cost.scan + again)

    @property
    def ways(self) -> dict[str, Search]:
        """Centroid routing can be left to FAISS altogether: the baseline may have the faster of both."""
        ways: dict[str, Search] = {"amips": self.search}
        engine: Any = self.searcher.engine
        if self.system.role == "baseline" and self.system.storage == "flat":
            ways["faiss"] = faiss_search(engine.index)
        return ways


@dataclass(frozen=True)
class OpenedFlat:
    """Every key; there is no budget."""

    index: Any

    def search(self, x: Floats, k: int, budget: int) -> tuple[Floats, Ids]:
        """Exact."""
        scores, ids = self.index.search(x, k)
        return scores, ids

    def cost(self, x: Floats, k: int, budget: int) -> Cost:
        """2 n d."""
        scanned = np.full(len(x), self.index.ntotal, np.int64)
        return Cost(0, 0, 2 * self.index.d * scanned, scanned, np.zeros_like(scanned))

    @property
    def ways(self) -> dict[str, Search]:
        """FAISS's."""
        return {"faiss": self.search}


@dataclass(frozen=True)
class OpenedHNSW:
    """A graph over the keys; the budget is efSearch."""

    index: Any

    def search(self, x: Floats, k: int, budget: int) -> tuple[Floats, Ids]:
        """Walk the graph."""
        parameters = faiss.SearchParametersHNSW(efSearch=max(k, budget))
        scores, ids = self.index.search(x, k, params=parameters)
        return scores, ids

    def cost(self, x: Floats, k: int, budget: int) -> Cost:
        """FAISS counts the distances it computes, for all queries of a call: so one call for each."""
        stats = faiss.cvar.hnsw_stats
        scanned = np.empty(len(x), np.int64)
        with limit_threads(1):
            for row in range(len(x)):
                stats.reset()
                self.search(x[row : row + 1], k, budget)
                scanned[row] = stats.ndis
        return Cost(0, 0, 2 * self.index.d * scanned, scanned, np.zeros_like(scanned))

    @property
    def ways(self) -> dict[str, Search]:
        """FAISS's."""
        return {"faiss": self.search}


def budgets(system: System) -> list[int]:
    """The ladder of a system, from cheap to dear; for cells 1, 2, 3, 4, 6, 8, 12, 17, ... up to all."""
    if system.engine == "flat":
        return [1]
    if system.engine == "hnsw":
        return list(HNSW_BUDGETS)
    if system.stop == "share":
        return list(range(len(shares())))
    return rungs(system.cells)


def rungs(most: int) -> list[int]:
    """Budgets from 1 to `most`, each at least 1 and about 1.4 times more than the one before."""
    steps, step = {1, most}, 1.0
    while step < most:
        steps.add(round(step))
        step = max(step + 1, step * GROWTH)
    return sorted(steps)


def faiss_search(index: Any) -> Search:
    """FAISS's own search of an inverted file, with the number of probes as the budget."""

    def search(x: Floats, k: int, budget: int) -> tuple[Floats, Ids]:
        scores, ids = index.search(x, k, params=faiss.SearchParametersIVF(nprobe=budget))
        return scores, ids

    return search


def open_flat(keys: Vectors) -> OpenedFlat:
    """Every key in a FAISS flat index."""
    index = faiss.IndexFlatIP(keys.d)
    _fill(index, keys)
    return OpenedFlat(index)


def open_hnsw(keys: Vectors, links: int) -> OpenedHNSW:
    """Build the graph; with inner products as FAISS does it."""
    index = faiss.IndexHNSWFlat(keys.d, links, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = HNSW_CONSTRUCTION
    _fill(index, keys)
    return OpenedHNSW(index)


def _fill(index: Any, keys: Vectors) -> None:
    for _, block in keys.blocks():
        index.add(block)
