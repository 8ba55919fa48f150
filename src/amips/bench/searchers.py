"""Systems opened for searching, each with its costs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from amips.backends import Backend, DropIn, backend_class, rungs
from amips.bench.systems import EXACT, System, searches_by_itself
from amips.blas import faiss, threads_allowed
from amips.search import (
    DROP_IN_CANDIDATES,
    MARGINS,
    Cost,
    GraphSearcher,
    Searcher,
    margin_ladder,
    mass_bounds,
)
from amips.vectors import Floats, Vectors

Ids = NDArray[np.int64]
Search = Callable[[Floats, int, int], tuple[Floats, Ids]]

UNKNOWN_COST = -1  # keys, cells and FLOPs of a search whose backend does not tell


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
    """Cells, routed; the budget is the number of probes, or the number of a bound on the mass."""

    system: System
    searcher: Searcher

    def search(self, x: Floats, k: int, budget: int) -> tuple[Floats, Ids]:
        """Choose cells with the model or the centroids, then scan them with x, or with the predicted key."""
        if self.system.mode == "cells":
            return self.searcher.search(x, k, **effort(self.system, budget))
        rescore = self.system.mode == "drop-in-rescored"
        return self.searcher.search(x, k, probes=budget, drop_in=True, rescore=rescore)

    def cost(self, x: Floats, k: int, budget: int) -> Cost:
        """Network, coarse and scan; a drop-in that scores candidates again pays for them."""
        cost = self.searcher.cost(x, k, **effort(self.system, budget))
        if self.system.mode != "drop-in-rescored":
            return cost
        again = 2 * self.searcher.d * np.minimum(cost.scanned, k * DROP_IN_CANDIDATES)
        return replace(cost, scan=cost.scan + again)

    @property
    def ways(self) -> dict[str, Search]:
        """Centroid routing can be left to FAISS altogether: the baseline may have the faster of both."""
        ways: dict[str, Search] = {"amips": self.search}
        store: Any = self.searcher.store
        if self.system.role == "baseline" and store.storage == "flat":
            ways["faiss"] = faiss_search(store.index)
        return ways


@dataclass(frozen=True)
class GraphSearch:
    """A graph; the budget is the number of a margin."""

    searcher: GraphSearcher

    def search(self, x: Floats, k: int, budget: int) -> tuple[Floats, Ids]:
        """Walk with x."""
        threads = None if len(x) == 1 else threads_allowed()  # one query has one thread
        return self.searcher.search(x, k, margin=self._margins[budget], threads=threads)

    def cost(self, x: Floats, k: int, budget: int) -> Cost:
        """Projection, neighbours and what is scored again."""
        return self.searcher.cost(x, k, margin=self._margins[budget])

    @property
    def ways(self) -> dict[str, Search]:
        """One way."""
        return {"amips": self.search}

    @cached_property
    def _margins(self) -> list[float]:
        return margin_ladder(self.searcher)


@dataclass(frozen=True)
class ExactSearch:
    """Every key; there is no budget."""

    index: Any

    def search(self, x: Floats, k: int, budget: int) -> tuple[Floats, Ids]:
        """Score every key with FAISS; the budget is not looked at."""
        scores, ids = self.index.search(x, k)
        return scores, ids

    def cost(self, x: Floats, k: int, budget: int) -> Cost:
        """2 n d FLOPs and n keys, for every query."""
        scanned = np.full(len(x), self.index.ntotal, np.int64)
        return Cost(0, 0, 2 * self.index.d * scanned, scanned, np.zeros_like(scanned))

    @property
    def ways(self) -> dict[str, Search]:
        """One way: the flat index of FAISS."""
        return {"faiss": self.search}


@dataclass(frozen=True)
class BackendSearch:
    """A backend that searches by itself, with x or with the predicted key; the budget is its own."""

    backend: Backend | DropIn

    def search(self, x: Floats, k: int, budget: int) -> tuple[Floats, Ids]:
        """What the backend finds with a budget of its own."""
        return self.backend.find(x, k, budget)

    def cost(self, x: Floats, k: int, budget: int) -> Cost:
        """What the backend tells of its search, or -1 where it does not."""
        cost = self.backend.find_cost(x, k, budget)
        if cost is not None:
            return cost
        unknown = np.full(len(x), UNKNOWN_COST, np.int64)
        return Cost(0, 0, unknown, unknown, unknown)

    @property
    def ways(self) -> dict[str, Search]:
        """One way: the backend itself."""
        return {"backend": self.search}


def effort(system: System, budget: int) -> dict[str, Any]:
    """What a budget of a system of cells is for `Searcher.search`: so many probes, or a bound on the mass."""
    assert system.design is not None
    return {"min_mass": mass_bounds()[budget]} if system.design.stop == "mass" else {"probes": budget}


def budgets(system: System) -> list[int]:
    """The ladder of a system, from cheap to dear; for cells 1, 2, 3, 4, 6, 8, 12, 17, ... up to all."""
    if system.backend == EXACT:
        return [1]
    if system.graph:
        return list(range(MARGINS))
    assert system.design is not None
    return list(range(len(mass_bounds()))) if system.design.stop == "mass" else rungs(system.cells)


def spent(system: System, budget: int) -> str:
    """What a budget means, in words."""
    if system.graph:
        return f"margin {budget} of {MARGINS}"
    if system.backend == EXACT:
        return "every key"
    if searches_by_itself(system):
        return f"{backend_class(str(system.backend)).budget} {budget:,}"
    bound = effort(system, budget).get("min_mass")
    return f"{budget:,} probes" if bound is None else f"cells with a mass of at least {bound:.2g}"


def where_at(system: System, budget: int) -> str:
    """The cells of a system, if it has any, and what a budget means."""
    return (f"{system.cells:,} cells, " if system.cells else "") + spent(system, budget)


def faiss_search(index: Any) -> Search:
    """FAISS's own search of an inverted file, with the number of probes as the budget."""

    def search(x: Floats, k: int, budget: int) -> tuple[Floats, Ids]:
        scores, ids = index.search(x, k, params=faiss.SearchParametersIVF(nprobe=budget))
        return scores, ids

    return search


def open_exact(keys: Vectors) -> ExactSearch:
    """Every key in a FAISS flat index."""
    index = faiss.IndexFlatIP(keys.d)
    for _, block in keys.blocks():
        index.add(block)
    return ExactSearch(index)
