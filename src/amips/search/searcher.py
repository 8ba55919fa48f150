"""The object a user holds: route with the model, scan with the query, return true inner products."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from amips.blas import threads as limit_threads
from amips.cells import fingerprint_of
from amips.design import Design
from amips.errors import AmipsError
from amips.index import CellStore
from amips.routers import (
    CentroidRouter,
    MapperRouter,
    Router,
    best_cells,
    cells_above,
    check_fits,
    limit_probes,
    router_for,
)
from amips.search import inputs
from amips.search.effort import effort_for
from amips.search.inputs import checked_k, checked_probes, checked_queries
from amips.search.points import Point
from amips.search.report import Report
from amips.vectors import Floats

Ids = NDArray[np.int64]

DROP_IN_CANDIDATES = 4  # candidates scored again with x, for each result asked for


@dataclass(frozen=True)
class Cost:
    """What searching costs, for each query."""

    network: int  # FLOPs of the model,
    coarse: int  # ... of scoring centroids,
    scan: NDArray[np.int64]  # ... and of scoring keys
    scanned: NDArray[np.int64]  # keys
    probed: NDArray[np.int64]  # cells

    @property
    def flops(self) -> NDArray[np.int64]:
        """All three together."""
        return self.network + self.coarse + self.scan


@dataclass(frozen=True)
class _Effort:
    """Cells to probe, at most, for each query [m]; with a bound, those that hold as much mass."""

    probes: Ids
    min_mass: float | None = None


@dataclass(frozen=True)
class Searcher:
    """Keys in cells, a way to route, and what is known of the recall.

    Args:
        store: the keys by cell.
        model: what chooses the cells: a trained model, any object with `scores(x)`, or None for centroids.
        points: recall and cost on held-out queries, by effort.
        labels: [n], the ids to return instead of 0..n-1.
        fingerprint: of the keys; of a store that keeps it with them, its own.
        temperature: of the stopping rule (`amips.routers.masses`); 0 if it is not known.
        target_recall: what `search` serves when nothing else is asked for; None if nothing was measured.
        design: what the index was made of; None if it was put together by hand.
        report: what was measured when it was chosen, if it was.
    """

    store: CellStore
    model: Any
    points: list[Point] = field(default_factory=list)
    labels: NDArray[Any] | None = None
    fingerprint: str = ""
    temperature: float = 0.0
    target_recall: float | None = None
    design: Design | None = None
    report: Report | None = None

    def __post_init__(self) -> None:
        if known := getattr(self.store, "fingerprint", ""):
            object.__setattr__(self, "fingerprint", known)
            check_fits(self.model, known, self.cells_fingerprint)

    @cached_property
    def router(self) -> Router:
        """How cells are chosen."""
        return router_for(self.model, self.store.centroids)

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
        """The number of cells."""
        return len(self.store.sizes)

    @property
    def cells(self) -> NDArray[np.int32]:
        """The cell of each key, [n]; the first, if it is in two."""
        return self.store.assignment

    @property
    def spilled(self) -> int:
        """How many keys are in a second cell, too."""
        return 0 if self.store.second is None else int((self.store.second >= 0).sum())

    def search(
        self,
        x: Any,
        k: int = 10,
        *,
        recall: float | None = None,
        probes: "int | NDArray[np.integer[Any]] | None" = None,
        min_mass: float | None = None,
        drop_in: bool = False,
        rescore: bool = True,
        on_bad: Literal["error", "skip"] = "error",
        threads: int | None = None,
    ) -> tuple[Floats, NDArray[Any]]:
        """The k best keys of each query: scores float32 [m, k] and ids int64 [m, k], best first.

        Scores are true inner products <x, y>. Where fewer than k keys were scanned, the id is -1 (an
        empty string if ids are strings) and the score -inf. Without `recall`, `probes` or `min_mass` it
        serves the recall that the index was made for, `target_recall`.

        Args:
            x: queries [m, d], or one query [d].
            k: results for each query.
            recall: choose the cheapest way that had this recall (of the true top 10; of the top key if k
                is 1) on held-out queries.
            probes: cells to scan: a number, or one for each query (FAISS calls it nprobe).
            min_mass: scan the cells that are expected to hold at least this share of the query's top keys: as
                many as each query needs.
            drop_in: put the predicted key in the place of x throughout, as in the paper: for mappers only.
                Otherwise the model chooses the cells, and x scores the keys.
            rescore: with `drop_in`, fetch more and score them again with x.
            on_bad: a query that is not finite is an error, or ("skip") gets no results.
            threads: limit numpy and FAISS to so many.
        """
        x, bad = checked_queries(x, self.d, on_bad)
        k = checked_k(k)
        if drop_in and probes is None:
            raise AmipsError(
                "drop_in=True needs probes: recall and min_mass are for cells that a model chooses"
            )
        effort = self._effort(probes, recall, min_mass, k, len(x))
        scores = np.empty((len(x), k), np.float32)
        ids = np.empty((len(x), k), np.int64)
        with limit_threads(threads):
            for rows in self._batches(effort, k):
                if drop_in:
                    scores[rows], ids[rows] = self._drop_in(x[rows], k, effort.probes[rows], rescore)
                else:
                    cells = self._choose(x[rows], effort, rows)
                    scores[rows], ids[rows] = self.store.scan(x[rows], cells, k)
        scores[bad], ids[bad] = -np.inf, -1
        return scores, self._labelled(ids)

    def choose_cells(
        self, x: Any, probes: "int | NDArray[np.integer[Any]]", *, threads: int | None = None
    ) -> Ids:
        """The cells that would be scanned, best first: int64 [m, min(probes, c)].

        With a number of probes for each query, rows end in -1 after theirs.
        """
        x, _ = checked_queries(x, self.d)
        effort = self._effort(probes, None, None, 1, len(x))
        width = min(int(np.max(probes, initial=1)), self.c)
        out = np.empty((len(x), width), np.int64)
        with limit_threads(threads):
            for rows in self._batches(effort, 1):
                out[rows] = self._choose(x[rows], effort, rows)
        return out

    def cost(
        self,
        x: Any,
        k: int = 10,
        *,
        recall: float | None = None,
        probes: "int | NDArray[np.integer[Any]] | None" = None,
        min_mass: float | None = None,
    ) -> Cost:
        """FLOPs (routing and scan), keys and cells scanned for each query, without scanning."""
        x, _ = checked_queries(x, self.d)
        effort = self._effort(probes, recall, min_mass, k, len(x))
        scanned, probed = np.empty(len(x), np.int64), np.empty(len(x), np.int64)
        sizes = np.append(self.store.sizes, 0)  # cell -1 holds nothing
        for rows in self._batches(effort, 1):
            cells = self._choose(x[rows], effort, rows)
            scanned[rows], probed[rows] = sizes[cells].sum(axis=1), (cells >= 0).sum(axis=1)
        scan = self.store.scan_flops(scanned, k)
        return Cost(self.router.network_flops, self.router.coarse_flops, scan, scanned, probed)

    def with_model(self, model: Any) -> "Searcher":
        """The same keys routed by another model, or by centroid (None); nothing is known of its recall."""
        check_fits(model, self.fingerprint, self.cells_fingerprint)
        return Searcher(self.store, model, [], self.labels, self.fingerprint)

    @cached_property
    def cells_fingerprint(self) -> str:
        """Which key is in which cell: a router must have been trained on just that."""
        return fingerprint_of(self.store.assignment)

    def _choose(self, x: Floats, effort: _Effort, rows: slice) -> Ids:
        scores = self.router.scores(x)
        if effort.min_mass is not None:
            return cells_above(scores, self.temperature, effort.min_mass)
        counts = effort.probes[rows]
        most = int(counts.max(initial=1))
        cells = best_cells(scores, most)
        return cells if (counts == most).all() else limit_probes(cells, counts)

    def _drop_in(self, x: Floats, k: int, counts: Ids, rescore: bool) -> tuple[Floats, Ids]:
        if not isinstance(self.router, MapperRouter):
            raise AmipsError("drop_in=True needs a model that predicts one key: train on a task with cells=1")
        mapped = self.router.map(x)
        most = int(counts.max(initial=1))
        cells = limit_probes(best_cells(CentroidRouter(self.store.centroids).scores(mapped), most), counts)
        if not rescore:
            return self.store.scan(mapped, cells, k)
        candidates = self.store.scan(mapped, cells, k * DROP_IN_CANDIDATES)[1]
        return self.store.score_again(x, candidates, k)

    def _effort(self, probes: Any, recall: float | None, min_mass: float | None, k: int, m: int) -> _Effort:
        """How many cells each query may probe."""
        probes, bound = effort_for(self, probes, recall, min_mass, k)
        if bound is not None:
            return _Effort(np.full(m, self.c), bound)
        return _Effort(checked_probes(probes, m, self.c))

    def _batches(self, effort: _Effort, k: int) -> Iterator[slice]:
        """Parts of the queries whose scores, cells and results fit in the working memory together."""
        most = int(effort.probes.max(initial=1))
        each = 4 * self.d + 12 * self.c + 4 * self.router.floats + 24 * most + 64 * k * self.store.refine
        step = max(1, inputs.BATCH_BYTES // each)
        return (slice(low, low + step) for low in range(0, len(effort.probes), step))

    def _labelled(self, ids: Ids) -> NDArray[Any]:
        if self.labels is None:
            return ids
        named = self.labels[np.maximum(ids, 0)]
        nothing: Any = -1 if self.labels.dtype.kind == "i" else ""
        return np.where(ids < 0, nothing, named).astype(self.labels.dtype)

    def __repr__(self) -> str:
        if self.design is not None:
            return f"<Searcher: {self.n:,} keys, d = {self.d}; {self.design.describe()}>"
        twice = f", {self.spilled:,} keys in two" if self.spilled else ""
        cells = f"{self.c:,} cells ({self.store.storage}{twice})"
        return f"<Searcher: {self.n:,} keys, d = {self.d}, {cells}, routed by {self.router.name}>"
