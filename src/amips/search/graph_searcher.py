"""The object a user holds, of a graph: walk with the query, return true inner products."""

import math
import os
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from amips.arguments import check_choice, check_number, check_whole
from amips.blas import one_thread
from amips.blas import threads as limit_threads
from amips.design import Design
from amips.errors import AmipsError
from amips.index import GraphStore, KeyMask
from amips.metrics import TOP
from amips.search.attributes import Attributes
from amips.search.cost import Cost
from amips.search.inputs import (
    checked_k,
    checked_queries,
    few_queries,
    labelled,
    restore_norms,
    split_norms,
)
from amips.search.label_room import LabelRoom
from amips.search.origin import Origin
from amips.search.points import Point, point_for
from amips.search.report import Report
from amips.vectors import Floats

Ids = NDArray[np.int64]

BATCH = 1 << 14  # queries walked for at a time
KNOWN = 64  # margins that are kept


@dataclass(frozen=True)
class GraphSearcher:
    """Keys at the nodes of a graph, and what is known of the recall.

    Args:
        store: the keys and the graph.
        points: recall and cost on held-out queries, by margin.
        labels: [n], the ids to return instead of 0..n-1.
        fingerprint: of the keys.
        target_recall: what `search` serves when nothing else is asked for; None if nothing was measured.
        design: what the index was made of; None if it was put together by hand.
        report: what was measured when it was chosen, if it was.
        alive: the keys that were not removed; None if none was.
        attributes: of the keys, which a search can be conditioned on; None if there are none.
        origin: what it was fitted on, and what was done to it since.
        label_room: where the labels are kept, with places for more; None if there are none.
        order: the user's place of each key number, [n] (`amips.search.key_order`); None if it is the number.
    """

    store: GraphStore
    points: list[Point] = field(default_factory=list)
    labels: NDArray[Any] | None = None
    fingerprint: str = ""
    target_recall: float | None = None
    design: Design | None = None
    report: Report | None = None
    alive: KeyMask | None = None
    attributes: Attributes | None = None
    origin: Origin = Origin()  # noqa: RUF009
    order: Ids | None = None
    label_room: LabelRoom | None = None

    model = None  # nothing chooses cells
    spilled = 0  # keys in second cells

    @property
    def n(self) -> int:
        """The number of keys."""
        return self.store.n

    @property
    def d(self) -> int:
        """The dimension."""
        return self.store.d

    @property
    def c(self) -> int:
        """The number of entry points."""
        return len(self.store.entries)

    def search(
        self,
        x: Any,
        k: int = 10,
        *,
        recall: float | None = None,
        margin: float | None = None,
        best_effort: bool = False,
        on_bad: Literal["error", "skip"] = "error",
        threads: int | None = None,
        probes: None = None,
        min_mass: None = None,
        allowed: KeyMask | None = None,
    ) -> tuple[Floats, NDArray[Any]]:
        """The k best keys of each query: scores float32 [m, k] and ids int64 [m, k], best first.

        Scores are true inner products <x, y>. Where fewer than k keys were found, the id is -1 (an empty
        string if ids are strings) and the score -inf. Without `recall` or `margin` it serves the recall that
        the index was made for, `target_recall`.

        Args:
            x: queries [m, d], or one query [d].
            k: results for each query.
            recall: choose the cheapest way that has this recall of the true top k (of the top 10 if k is
                more) with 95 % confidence, by held-out queries. What cannot be reached is an error.
            margin: visit keys whose scores are at most this far below the tenth best (the k-th, if k is
                more), in scores of a query of norm 1: as many as each query needs.
            best_effort: with `recall`, serve the highest recall that can be had, and warn, rather than fail.
            on_bad: a query that is not finite is an error, or ("skip") gets no results.
            threads: on which the queries are shared out; all there are, if None.
            probes, min_mass: of cells: a graph has none, and they are refused.
            allowed: the keys that may be results, in place of those that were not removed.
        """
        k = checked_k(k)
        allowed = allowed or self.alive
        if threads is not None:
            threads = min(check_whole("threads", threads, 1), os.cpu_count() or 1)
        margin = self._margin(recall, margin, k, best_effort, probes, min_mass)
        if on_bad != "error":
            check_choice("on_bad", on_bad, ("error", "skip"))
        few = None if margin is None else few_queries(x, self.d)
        if few is not None and (len(few[0]) == 1 or (allowed is None and self.store.walks(k))):
            # The calls are what costs, so as few as can be.
            some = None if allowed is None else allowed.keys
            scores, ids, _ = self.store.search(few[0], k, margin, threads, allowed=some)
            if np.any(few[1]):
                with np.errstate(over="ignore"):
                    scores = np.ldexp(scores, few[1])
            return scores, ids if self.labels is None else labelled(ids, self.labels)
        x, bad = checked_queries(x, self.d, on_bad)
        with one_thread() if threads is None and len(x) == 1 else limit_threads(threads):
            scores, ids, _ = self.search_with(x, k, margin, threads, allowed)
        scores[bad], ids[bad] = -np.inf, -1
        return scores, labelled(ids, self.labels)

    def prepare(self) -> None:
        """Make ready what the first search would otherwise wait for."""
        self.store.prepare()

    def search_with(
        self,
        x: Floats,
        k: int,
        margin: float | None,
        threads: int | None = None,
        allowed: KeyMask | None = None,
    ) -> tuple[Floats, Ids, Ids]:
        """Of float32 queries [m, d] scores, key numbers [m, k] and counts [m, 3]; None scores every key."""
        allowed = allowed or self.alive
        some = None if allowed is None else allowed.keys
        scores, ids = np.empty((len(x), k), np.float32), np.empty((len(x), k), np.int64)
        counts = np.zeros((len(x), 3), np.int64)
        for low in range(0, len(x), BATCH):
            rows = slice(low, low + BATCH)
            _, v, exponents = split_norms(x[rows])
            result = self.store.search(np.ascontiguousarray(v), k, margin, threads, allowed=some)
            scores[rows], ids[rows], counts[rows] = restore_norms(result[0], exponents), *result[1:]
        nothing = ~x.any(axis=1)  # every key is as good: the lower ids come first
        lowest = np.arange(min(k, self.n)) if allowed is None else allowed.numbers[:k]
        scores[nothing], ids[nothing] = -np.inf, -1
        scores[nothing, : len(lowest)], ids[nothing, : len(lowest)] = 0, lowest
        return scores, ids, counts

    def cost(
        self,
        x: Any,
        k: int = 10,
        *,
        recall: float | None = None,
        margin: float | None = None,
        best_effort: bool = False,
        probes: None = None,
        min_mass: None = None,
        allowed: KeyMask | None = None,
    ) -> Cost:
        """FLOPs of each query, keys that were scored (some more than once) and visited: the walk is made."""
        x, _ = checked_queries(x, self.d)
        k = checked_k(k)
        margin = self._margin(recall, margin, k, best_effort, probes, min_mass)
        return self.cost_of(self.search_with(x, k, margin, allowed=allowed)[2])

    def cost_of(self, counts: Ids) -> Cost:
        """The cost of walks with these counts [m, 3]."""
        return Cost(0, 0, self.store.flops(counts), counts[:, 1], counts[:, 0])

    def _margin(
        self,
        recall: float | None,
        margin: float | None,
        k: int,
        best_effort: bool,
        probes: Any,
        min_mass: Any,
    ) -> float | None:
        """The margin for what was asked; None if every key is to be scored."""
        if probes is not None or min_mass is not None:
            raise AmipsError("this index walks a graph, which has no cells: give recall or margin")
        if margin is not None:
            if recall is not None:
                raise AmipsError("give one of recall and margin")
            if type(margin) is float and 0 <= margin < math.inf:  # what is asked for most, at once
                return margin
            return check_number("margin", margin, least=0, what="a difference of scores")
        recall = self.target_recall if recall is None else recall
        if recall is None:
            raise AmipsError("nothing was measured on this index: give margin")
        if not self.points:
            raise AmipsError("this index has no operating points; give margin instead of recall")
        known = self._margins.get((recall, k)) if isinstance(recall, float) else None
        if known is not None:
            return known
        point = point_for(self.points, recall, k, best_effort)
        if point.certain:
            return None
        if k <= TOP and not best_effort:  # what warns must go on to
            if len(self._margins) >= KNOWN:
                self._margins.clear()
            self._margins[recall, k] = point.margin
        return point.margin

    @cached_property
    def _margins(self) -> dict[tuple[float, int], float]:
        """Margins that were looked up, by recall and k."""
        return {}

    def __repr__(self) -> str:
        words = "a graph" if self.design is None else self.design.describe()
        return f"<GraphSearcher: {self.n:,} keys, d = {self.d}; {words}>"
