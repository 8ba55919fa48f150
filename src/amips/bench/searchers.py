"""Systems opened for searching, each with its costs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from amips.backends import Backend, DropIn
from amips.backends.backend import rungs
from amips.bench.systems import System
from amips.blas import faiss
from amips.search import Cost, Searcher
from amips.search.points import mass_bounds
from amips.search.searcher import DROP_IN_CANDIDATES
from amips.vectors import Floats, Vectors

Ids = NDArray[np.int64]
Search = Callable[[Floats, int, int], tuple[Floats, Ids]]

NOT_TOLD = -1  # keys, cells and FLOPs of a search whose engine does not tell


class SystemSearch(Protocol):
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
class CellSearch:
    """Cells, routed; the budget is the number of probes, or the number of a bound on the share."""

    system: System
    searcher: Searcher

    def search(self, x: Floats, k: int, budget: int) -> tuple[Floats, Ids]:
        """Route, then scan."""
        if self.system.stop == "share":
            return self.searcher.search(x, k, share=mass_bounds()[budget])
        if self.system.route == "cells":
            return self.searcher.search(x, k, budget)
        rescore = self.system.route == "drop-in-rescored"
        return self.searcher.search(x, k, budget, route="drop-in", rescore=rescore)

    def cost(self, x: Floats, k: int, budget: int) -> Cost:
        """Network, coarse and scan; a drop-in that scores candidates again pays for them."""
        if self.system.stop == "share":
            return self.searcher.cost(x, k=k, share=mass_bounds()[budget])
        cost = self.searcher.cost(x, budget, k)
        if self.system.route != "drop-in-rescored":
            return cost
        again = 2 * self.searcher.d * np.minimum(cost.scanned, k * DROP_IN_CANDIDATES)
        return replace(cost, scan=cost.scan + again)

    @property
    def ways(self) -> dict[str, Search]:
        """Centroid routing can be left to FAISS altogether: the baseline may have the faster of both."""
        ways: dict[str, Search] = {"amips": self.search}
        engine: Any = self.searcher.store
        if self.system.role == "baseline" and self.system.storage == "flat":
            ways["faiss"] = faiss_search(engine.index)
        return ways


@dataclass(frozen=True)
class ExactSearch:
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
class BackendSearch:
    """An engine that searches by itself, with x or with the predicted key; the budget is its own."""

    engine: Backend | DropIn

    def search(self, x: Floats, k: int, budget: int) -> tuple[Floats, Ids]:
        """The engine's."""
        return self.engine.find(x, k, budget)

    def cost(self, x: Floats, k: int, budget: int) -> Cost:
        """What the engine tells."""
        cost = self.engine.cost(x, k, budget)
        if cost is not None:
            return cost
        unknown = np.full(len(x), NOT_TOLD, np.int64)
        return Cost(0, 0, unknown, unknown, unknown)

    @property
    def ways(self) -> dict[str, Search]:
        """The engine's."""
        return {"engine": self.search}


def budgets(system: System) -> list[int]:
    """The ladder of a system, from cheap to dear; for cells 1, 2, 3, 4, 6, 8, 12, 17, ... up to all."""
    if system.engine == "flat":
        return [1]
    return list(range(len(mass_bounds()))) if system.stop == "share" else rungs(system.cells)


def spent(system: System, budget: int) -> str:
    """What a budget of a system of cells means, in words."""
    return f"shares from {mass_bounds()[budget]:.2g}" if system.stop == "share" else f"{budget:,} probes"


def faiss_search(index: Any) -> Search:
    """FAISS's own search of an inverted file, with the number of probes as the budget."""

    def search(x: Floats, k: int, budget: int) -> tuple[Floats, Ids]:
        scores, ids = index.search(x, k, params=faiss.SearchParametersIVF(nprobe=budget))
        return scores, ids

    return search


def open_flat(keys: Vectors) -> ExactSearch:
    """Every key in a FAISS flat index."""
    index = faiss.IndexFlatIP(keys.d)
    for _, block in keys.blocks():
        index.add(block)
    return ExactSearch(index)
