"""`search`, `cost` and measured recall of whatever finds keys within a budget."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from amips.arguments import check_whole
from amips.blas import threads as limit_threads
from amips.errors import AmipsError
from amips.metrics import TOP
from amips.search import (
    Cost,
    Point,
    all_found,
    assured_recalls,
    checked_k,
    checked_queries,
    effort_for,
    recalls,
    restore_norms,
    split_norms,
)
from amips.task import Split
from amips.vectors import Floats

Ids = NDArray[np.int64]


class Searchable(Protocol):
    """What finds keys within a budget, and what was measured of it."""

    @property
    def n(self) -> int:
        """The number of keys."""
        ...

    @property
    def d(self) -> int:
        """The dimension."""
        ...

    @property
    def points(self) -> Sequence[Point]:
        """Recall by budget."""
        ...

    @property
    def target_recall(self) -> float | None:
        """The recall to serve."""
        ...

    @property
    def temperature(self) -> float:
        """0: a backend does not know what mass a cell holds."""
        ...

    def budgets(self) -> list[int]:
        """Budgets from cheap to dear."""
        ...

    def find(self, x: Floats, k: int, budget: int) -> tuple[Floats, Ids]:
        """Scores and ids of the k best keys within a budget, [m, k]."""
        ...

    def find_cost(self, x: Floats, k: int, budget: int) -> Cost | None:
        """What that costs, for each query; None if it is not known."""
        ...


class BudgetSearch:
    """`search` of whatever is `Searchable`: backends, and backends asked for the predicted key."""

    points: Sequence[Point] = ()  # recall by budget, on held-out queries, if `measure` was called
    target_recall: float | None = None  # what `search` serves when nothing else is asked for
    temperature: ClassVar[float] = 0.0

    def search(
        self: Searchable,
        x: Any,
        k: int = 10,
        *,
        recall: float | None = None,
        probes: int | None = None,
        min_mass: float | None = None,
        best_effort: bool = False,
        on_bad: Literal["error", "skip"] = "error",
        threads: int | None = None,
    ) -> tuple[Floats, Ids]:
        """The k best keys of each query: scores float32 [m, k] and ids int64 [m, k], best first.

        Scores are true inner products <x, y>. Where fewer than k are found, the id is -1 and the score -inf.
        With neither `recall` nor `probes` it serves the recall that it was measured for. The norm of a query
        changes no id.

        Args:
            x: queries [m, d], or one query [d].
            recall: the cheapest budget that has this recall of the true top k (of the top 10 if k is more)
                with 95 % confidence, by held-out queries; needs `measure` first. What cannot be reached is an
                error.
            probes: the budget itself. What it counts is in `self.budget`; `budgets()` is a ladder of them.
            min_mass: an error: a backend does not know what mass a cell holds.
            best_effort: with `recall`, serve the highest recall that can be had, and warn, rather than fail.
            on_bad: a query that is not finite is an error, or ("skip") gets no results.
            threads: a limit for numpy and for libraries that run in this process (FAISS, usearch, SymphonyQG,
                LoRANN, ScaNN, Intel's); databases have their own.
        """
        x, bad = checked_queries(x, self.d, on_bad)
        k = checked_k(k)
        budget = _budget_for(self, k, recall, probes, min_mass, best_effort)
        if len(x) == 0:
            return padded(np.empty((0, 0), np.float32), np.empty((0, 0), np.int64), k)
        _, v, exponents = split_norms(x)
        with limit_threads(threads):
            scores, ids = padded(*self.find(v, min(k, self.n), budget), k)
        scores = restore_norms(scores, exponents)
        if bad.any():
            scores[bad], ids[bad] = -np.inf, -1
        return scores, ids

    def cost(
        self: Searchable,
        x: Any,
        k: int = 10,
        *,
        recall: float | None = None,
        probes: int | None = None,
        min_mass: float | None = None,
        best_effort: bool = False,
    ) -> Cost | None:
        """What `search` costs for each query; None where the library does not tell: then there is only time.

        Libraries search again to find out, so this takes as long as searching.
        """
        x, _ = checked_queries(x, self.d)
        k = checked_k(k)
        budget = _budget_for(self, k, recall, probes, min_mass, best_effort)
        return self.find_cost(split_norms(x)[1], min(k, self.n), budget)


def measured_points(index: Searchable, split: Split) -> list[Point]:
    """Recall@1 and @10 on the queries of a split for each budget, until all top keys are found.

    FLOPs and keys scanned are 0 where the library does not tell: then the smallest budget is the cheapest.
    """
    x, true = np.asarray(split.queries), np.asarray(split.top_ids)
    k, points = min(TOP, index.n), list[Point]()
    for budget in index.budgets():
        ids, cost = index.find(x, k, budget)[1], index.find_cost(x, k, budget)
        scanned = 0.0 if cost is None else float(cost.scanned.mean() / index.n)
        flops = 0.0 if cost is None else float(cost.flops.mean())
        first, all_of_them = (float(recalls(ids, true, top).mean()) for top in (1, k))
        hits = (true[:, :k, None] == ids[:, None, :]).any(axis=2)
        assured = assured_recalls(hits, split.source)
        points.append(Point(budget, first, all_of_them, scanned, flops, assured=assured))
        if all_found(points[-1]):
            break
    return points


def _budget_for(
    index: Searchable,
    k: int,
    recall: float | None,
    probes: Any,
    min_mass: float | None,
    best_effort: bool,
) -> int:
    """The budget for what was asked; AmipsError if that cannot be."""
    if min_mass is not None:
        raise AmipsError(
            "min_mass is for cells that a model chooses, and a backend chooses by itself: give probes"
        )
    if probes is None and not index.points:
        raise AmipsError("its recall was not measured: give probes, or call measure(task) first")
    return check_whole("probes", effort_for(index, probes, recall, None, k, best_effort).probes, 1)


def padded(scores: Floats, ids: Ids, k: int) -> tuple[Floats, Ids]:
    """Results [m, r] as [m, k]: cut, or filled with -inf and -1."""
    width = k - ids.shape[1]
    if width <= 0:
        return scores[:, :k], ids[:, :k]
    wide = ((0, 0), (0, width))
    return (
        np.pad(scores, wide, constant_values=-np.inf),
        np.pad(ids, wide, constant_values=-1),
    )
