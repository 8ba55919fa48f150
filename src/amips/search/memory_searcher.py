"""The object a user holds, with a memory of the log: what is recognised is answered by it, the rest searched.

The memory serves what is asked by recall, for at most `TOP` results: that is what was measured with it in
place. Asked by margin, probes or min_mass, or for more, the index alone is searched.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from amips.arguments import check_whole
from amips.blas import one_thread
from amips.blas import threads as limit_threads
from amips.design import Design
from amips.errors import AmipsError
from amips.index import KeyMask, ListedKeys
from amips.metrics import TOP
from amips.search.attributes import Attributes
from amips.search.cost import Cost
from amips.search.effort import effort_of
from amips.search.graph_searcher import GraphSearcher
from amips.search.inputs import (
    checked_k,
    checked_queries,
    labelled,
    one_query,
    restore_norms,
    split_norms,
)
from amips.search.memory import Memory
from amips.search.origin import Origin
from amips.search.points import Point, point_for
from amips.search.report import Report
from amips.search.searcher import Searcher
from amips.vectors import Floats

Ids = NDArray[np.int64]

BATCH = 1 << 14  # queries looked up at a time


@dataclass(frozen=True)
class MemorySearcher:
    """A memory of the log in front of an index.

    Args:
        index: what is searched for queries that are not recognised. Its points are those without the memory.
        memory: logged queries and their top keys.
        points: recall and cost on held-out queries: those of the index, and those with the memory in place.
    """

    index: Searcher | GraphSearcher
    memory: Memory
    points: list[Point] = field(default_factory=list)

    @property
    def n(self) -> int:
        """The number of keys."""
        return self.index.n

    @property
    def d(self) -> int:
        """The dimension."""
        return self.index.d

    @property
    def c(self) -> int:
        """The number of cells, or of entry points."""
        return self.index.c

    @property
    def store(self) -> Any:
        """The keys of the index."""
        return self.index.store

    @property
    def model(self) -> Any:
        """What chooses the cells of the index, if it has any."""
        return self.index.model

    @property
    def spilled(self) -> int:
        """How many keys are in a second cell, too."""
        return self.index.spilled

    @property
    def labels(self) -> NDArray[Any] | None:
        """The ids to return instead of 0..n-1."""
        return self.index.labels

    @property
    def attributes(self) -> Attributes | None:
        """Of the keys."""
        return self.index.attributes

    @property
    def fingerprint(self) -> str:
        """Of the keys."""
        return self.index.fingerprint

    @property
    def target_recall(self) -> float | None:
        """What `search` serves when nothing else is asked for."""
        return self.index.target_recall

    @property
    def design(self) -> Design | None:
        """What the index was made of, the memory included."""
        return self.index.design

    @property
    def report(self) -> Report | None:
        """What was measured when it was chosen, if it was."""
        return self.index.report

    @property
    def origin(self) -> Origin:
        """What the index was fitted on, and what was done to it since."""
        return self.index.origin

    def search(
        self,
        x: Any,
        k: int = 10,
        *,
        recall: float | None = None,
        margin: float | None = None,
        probes: "int | NDArray[np.integer[Any]] | None" = None,
        min_mass: float | None = None,
        best_effort: bool = False,
        on_bad: Literal["error", "skip"] = "error",
        threads: int | None = None,
        allowed: KeyMask | None = None,
    ) -> tuple[Floats, NDArray[Any]]:
        """The k best keys of each query: scores float32 [m, k] and ids int64 [m, k], best first.

        Scores are true inner products <x, y>. Arguments are those of the index behind the memory: see
        `Searcher.search` and `GraphSearcher.search`. By `recall` and for at most 10 results the memory
        answers what it recognises; otherwise, and where not every key may be a result, the index alone is
        searched.
        """
        k = checked_k(k)
        point = self._point(recall, k, best_effort, (margin, probes, min_mass, allowed))
        if point is None:
            options: Any = {"recall": recall, "margin": margin, "probes": probes, "min_mass": min_mass}
            options |= {"best_effort": best_effort, "on_bad": on_bad, "threads": threads, "allowed": allowed}
            return self.index.search(x, k, **options)
        if threads is not None:
            check_whole("threads", threads, 1)
        if (result := self._search_one(x, k, point)) is not None:
            return result
        x, bad = checked_queries(x, self.d, on_bad)
        with one_thread() if threads is None and len(x) == 1 else limit_threads(threads):
            scores, ids, _ = self.search_with(x, k, point, threads)
        scores[bad], ids[bad] = -np.inf, -1
        return scores, labelled(ids, self.labels)

    def _search_one(self, x: Any, k: int, point: Point) -> tuple[Floats, NDArray[Any]] | None:
        """One query, with as few calls as can be; None of many, and of a bad one."""
        one = one_query(x, self.d)
        if one is None:
            return None
        v, exponent = one
        candidates = self.memory.recognise_one(v, self.index.alive)
        if candidates is None:
            if isinstance(self.index, GraphSearcher):
                return self.index.search(x, k, margin=point.margin)
            result = self.index.search_few(x, k, effort_of(point))
            return None if result is None else (result[0], labelled(result[1], self.labels))
        scores, ids = self._listed.search(v, candidates, k)
        if exponent:
            scores = restore_norms(scores, np.array([exponent], np.int32))
        return scores, labelled(ids, self.labels)

    def search_with(
        self, x: Floats, k: int, point: Point, threads: int | None = None
    ) -> tuple[Floats, Ids, NDArray[np.bool_]]:
        """Of float32 queries [m, d] scores and key numbers [m, k] at a point, and which were recognised."""
        scores, ids = np.empty((len(x), k), np.float32), np.empty((len(x), k), np.int64)
        recognised = np.zeros(len(x), np.bool_)
        for low in range(0, len(x), BATCH):
            u, v, exponents = split_norms(x[low : low + BATCH])
            known, candidates = self.memory.recognise(u, self.index.alive)
            if known.any():
                rows = low + np.flatnonzero(known)
                best, ids[rows] = self._listed.search(v[known], candidates, k)
                scores[rows] = restore_norms(best, None if exponents is None else exponents[known])
                recognised[rows] = True
        others = ~recognised
        if others.any():
            scores[others], ids[others] = self._search_index(x[others], k, point, threads)
        return scores, ids, recognised

    @cached_property
    def _listed(self) -> ListedKeys:
        """The keys of the index, as the memory lists them."""
        return ListedKeys(self.store)

    def _search_index(self, x: Floats, k: int, point: Point, threads: int | None) -> tuple[Floats, Ids]:
        if isinstance(self.index, GraphSearcher):
            return self.index.search_with(x, k, point.margin, threads)[:2]
        effort = effort_of(point)
        result = self.index.search_few(x, k, effort)
        return self.index.search_with(x, k, effort) if result is None else result

    def cost(
        self,
        x: Any,
        k: int = 10,
        *,
        recall: float | None = None,
        margin: float | None = None,
        probes: "int | NDArray[np.integer[Any]] | None" = None,
        min_mass: float | None = None,
        best_effort: bool = False,
        allowed: KeyMask | None = None,
    ) -> Cost:
        """FLOPs of each query, the look-up included; keys that were scored, and cells or nodes visited."""
        k = checked_k(k)
        point = self._point(recall, k, best_effort, (margin, probes, min_mass, allowed))
        if margin is not None and isinstance(self.index, Searcher):
            raise AmipsError("this index has cells, not a graph: give recall, probes or min_mass")
        if point is None:
            efforts = {"margin": margin, "probes": probes, "min_mass": min_mass, "allowed": allowed}
            effort: Any = {name: value for name, value in efforts.items() if value is not None}
            return self.index.cost(x, k, recall=recall, best_effort=best_effort, **effort)
        return self.cost_with(checked_queries(x, self.d)[0], k, point)

    def cost_with(self, x: Floats, k: int, point: Point) -> Cost:
        """The cost of float32 queries [m, d] at a point."""
        u = split_norms(x)[0]
        known, _ = self.memory.recognise(u, self.index.alive)
        depth = self.memory.depth
        flops, scanned = np.full(len(x), 2 * self.d * depth), np.full(len(x), depth)
        probed = np.zeros(len(x), np.int64)
        if not known.all():
            cost = self._index_cost(x[~known], k, point)
            flops[~known], scanned[~known], probed[~known] = cost.flops, cost.scanned, cost.probed
        return Cost(0, 0, flops + self.memory.flops(u), scanned, probed)

    def _index_cost(self, x: Floats, k: int, point: Point) -> Cost:
        if isinstance(self.index, GraphSearcher):
            return self.index.cost(x, k, margin=point.margin)
        return self.index.cost_with(x, k, effort_of(point))

    def _point(
        self, recall: float | None, k: int, best_effort: bool, efforts: tuple[Any, ...]
    ) -> Point | None:
        """The point that serves what was asked, if the memory is part of it; None if the index alone is."""
        if k > TOP or any(effort is not None for effort in efforts):
            return None
        recall = self.target_recall if recall is None else recall
        if recall is None or not self.points:
            return None  # which the index refuses
        known = self._points.get((recall, k)) if type(recall) is float else None
        if known is None:
            known = point_for(self.points, recall, k, best_effort)
            if type(recall) is float and not best_effort and len(self._points) < KNOWN:
                self._points[recall, k] = known
        return known if known.recognised else None

    @cached_property
    def _points(self) -> dict[tuple[float, int], Point]:
        """Points that were looked up, by recall and k."""
        return {}

    def prepare(self) -> None:
        """Make ready what the first search would otherwise wait for."""
        self.memory.prepare()
        self.index.prepare()
        self._listed  # noqa: B018

    def __repr__(self) -> str:
        words = "a memory of the log" if self.design is None else self.design.describe()
        return f"<MemorySearcher: {self.n:,} keys, d = {self.d}; {words}>"


KNOWN = 64  # points that are kept

Snapshot = Searcher | GraphSearcher | MemorySearcher  # what `build`, `fit` and `load` give


def plain_index(index: Snapshot) -> Searcher | GraphSearcher:
    """The index behind a memory; one without a memory as it is."""
    return index.index if isinstance(index, MemorySearcher) else index


def with_facts(index: Snapshot, **facts: Any) -> Snapshot:
    """The index with other labels, report, design or target recall."""
    if isinstance(index, MemorySearcher):
        return replace(index, index=replace(index.index, **facts))
    return replace(index, **facts)
