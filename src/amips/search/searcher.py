"""The object a user holds: route with the model, scan with the query, return true inner products."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from amips.blas import threads as limit_threads
from amips.cells import fingerprint_of
from amips.errors import AmipsError
from amips.index import Engine
from amips.nets import Model
from amips.route import (
    CentroidRouter,
    MapperRouter,
    Router,
    best_cells,
    cells_by_share,
    check_fits,
    limit_probes,
    router_for,
)
from amips.search import inputs
from amips.search.inputs import checked_k, checked_probes, checked_queries
from amips.search.points import Point, point_for
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
    """Cells to probe, at most, for each query [m]; with a share, those expected to hold as much."""

    probes: Ids
    share: float | None = None


@dataclass(frozen=True)
class Searcher:
    """Keys in cells, a way to route, and what is known of the recall.

    `model` None routes by centroid. `labels` [n] gives the ids to return instead of 0..n-1. `temperature`
    makes the router's scores say what share of the top keys each cell holds (as their first cell); 0 if it
    is not known. `fingerprint` is that of the keys: of an engine that keeps it with them, its own.
    """

    engine: Engine
    model: Model | None
    points: list[Point] = field(default_factory=list)
    labels: NDArray[Any] | None = None
    fingerprint: str = ""
    temperature: float = 0.0

    def __post_init__(self) -> None:
        if known := getattr(self.engine, "fingerprint", ""):
            object.__setattr__(self, "fingerprint", known)
            if self.model is not None:
                check_fits(self.model, known, self.cells_fingerprint)

    @cached_property
    def router(self) -> Router:
        """How cells are chosen."""
        return router_for(self.model, self.engine.centroids)

    @property
    def n(self) -> int:
        """The number of keys."""
        return self.engine.n

    @property
    def d(self) -> int:
        """The dimension."""
        return self.engine.d

    @property
    def c(self) -> int:
        """The number of cells."""
        return len(self.engine.sizes)

    @property
    def cells(self) -> NDArray[np.int32]:
        """The cell of each key, [n]; the first, if it is in two."""
        return self.engine.assignment

    @property
    def spilled(self) -> int:
        """How many keys are in a second cell, too."""
        return 0 if self.engine.second is None else int((self.engine.second >= 0).sum())

    def search(
        self,
        x: Any,
        k: int = 10,
        probes: "int | NDArray[np.integer[Any]] | None" = None,
        *,
        recall: float | None = None,
        share: float | None = None,
        route: Literal["cells", "drop-in"] = "cells",
        rescore: bool = True,
        on_bad: Literal["error", "skip"] = "error",
        threads: int | None = None,
    ) -> tuple[Floats, NDArray[Any]]:
        """The k best keys of each query: scores float32 [m, k] and ids int64 [m, k], best first.

        Scores are true inner products <x, y>. Where fewer than k keys were scanned, the id is -1 (an
        empty string if ids are strings) and the score -inf.

        Args:
            x: queries [m, d], or one query [d].
            k: results for each query.
            probes: cells to scan: a number, or one for each query. 8 if nothing else is said.
            recall: choose the cheapest way that had this recall (of the true top 10; of the top key if k
                is 1) on held-out queries.
            share: scan the cells that are expected to hold at least this share of the query's top keys: as
                many as each query needs.
            route: "cells" lets the model choose the cells and x score the keys. "drop-in" puts the
                predicted key in the place of x throughout, as in the paper: for mappers only.
            rescore: with "drop-in", fetch more and score them again with x.
            on_bad: a query that is not finite is an error, or ("skip") gets no results.
            threads: limit numpy and FAISS to so many.
        """
        x, bad = checked_queries(x, self.d, on_bad)
        k = checked_k(k)
        if route not in ("cells", "drop-in"):
            raise AmipsError(f"route={route!r}: expected 'cells' or 'drop-in'")
        if route == "drop-in" and (recall is not None or share is not None):
            raise AmipsError('recall and share are for route="cells"; with "drop-in" give probes')
        effort = self._effort(probes, recall, share, k, len(x))
        scores = np.empty((len(x), k), np.float32)
        ids = np.empty((len(x), k), np.int64)
        with limit_threads(threads):
            for rows in self._batches(effort, k):
                if route == "drop-in":
                    scores[rows], ids[rows] = self._drop_in(x[rows], k, effort.probes[rows], rescore)
                else:
                    scores[rows], ids[rows] = self.engine.scan(x[rows], self._route(x[rows], effort, rows), k)
        scores[bad], ids[bad] = -np.inf, -1
        return scores, self._labelled(ids)

    def route(self, x: Any, probes: "int | NDArray[np.integer[Any]]", *, threads: int | None = None) -> Ids:
        """The cells that would be scanned, best first: int64 [m, min(probes, c)].

        With a number of probes for each query, rows end in -1 after theirs.
        """
        x, _ = checked_queries(x, self.d)
        effort = self._effort(probes, None, None, 1, len(x))
        width = min(int(np.max(probes, initial=1)), self.c)
        out = np.empty((len(x), width), np.int64)
        with limit_threads(threads):
            for rows in self._batches(effort, 1):
                out[rows] = self._route(x[rows], effort, rows)
        return out

    def cost(
        self,
        x: Any,
        probes: "int | NDArray[np.integer[Any]] | None" = None,
        k: int = 10,
        *,
        recall: float | None = None,
        share: float | None = None,
    ) -> Cost:
        """FLOPs (routing and scan), keys and cells scanned for each query, without scanning."""
        x, _ = checked_queries(x, self.d)
        effort = self._effort(probes, recall, share, k, len(x))
        scanned, probed = np.empty(len(x), np.int64), np.empty(len(x), np.int64)
        sizes = np.append(self.engine.sizes, 0)  # cell -1 holds nothing
        for rows in self._batches(effort, 1):
            cells = self._route(x[rows], effort, rows)
            scanned[rows], probed[rows] = sizes[cells].sum(axis=1), (cells >= 0).sum(axis=1)
        scan = self.engine.scan_flops(scanned, k)
        return Cost(self.router.network_flops, self.router.coarse_flops, scan, scanned, probed)

    def with_model(self, model: Model | None) -> "Searcher":
        """The same index routed by another model, or by centroid (None); nothing is known of its recall."""
        if model is not None:
            check_fits(model, self.fingerprint, self.cells_fingerprint)
        return Searcher(self.engine, model, [], self.labels, self.fingerprint)

    @cached_property
    def cells_fingerprint(self) -> str:
        """Which key is in which cell: a router must have been trained on just that."""
        return fingerprint_of(self.engine.assignment)

    def _route(self, x: Floats, effort: "_Effort", rows: slice) -> Ids:
        scores = self.router.scores(x)
        if effort.share is not None:
            return cells_by_share(scores, self.temperature, effort.share)
        counts = effort.probes[rows]
        most = int(counts.max(initial=1))
        cells = best_cells(scores, most)
        return cells if (counts == most).all() else limit_probes(cells, counts)

    def _drop_in(self, x: Floats, k: int, counts: Ids, rescore: bool) -> tuple[Floats, Ids]:
        if not isinstance(self.router, MapperRouter):
            raise AmipsError(
                'route="drop-in" needs a model that predicts one key: train on a task with cells=1'
            )
        mapped = self.router.map(x)
        most = int(counts.max(initial=1))
        cells = limit_probes(best_cells(CentroidRouter(self.engine.centroids).scores(mapped), most), counts)
        if not rescore:
            return self.engine.scan(mapped, cells, k)
        candidates = self.engine.scan(mapped, cells, k * DROP_IN_CANDIDATES)[1]
        return self.engine.score_again(x, candidates, k)

    def _effort(self, probes: Any, recall: float | None, share: float | None, k: int, m: int) -> "_Effort":
        """How many cells each query may probe."""
        if sum(given is not None for given in (probes, recall, share)) > 1:
            raise AmipsError("give one of probes, recall and share")
        if recall is not None:
            point = point_for(self.points, recall, k)
            probes, share = point.probes, point.share or None
        if share is None:
            return _Effort(checked_probes(8 if probes is None else probes, m, self.c))
        if not 0 < share <= 1:
            raise AmipsError(f"share={share}: expected a share between 0 and 1")
        if not self.temperature > 0:
            raise AmipsError("this index does not know what share of the top keys a cell holds: give probes")
        return _Effort(np.full(m, self.c), share)

    def _batches(self, effort: "_Effort", k: int) -> Iterator[slice]:
        """Parts of the queries whose scores, cells and results fit in the working memory together."""
        most = int(effort.probes.max(initial=1))
        each = 4 * self.d + 12 * self.c + 4 * self.router.floats + 24 * most + 64 * k * self.engine.refine
        step = max(1, inputs.BATCH_BYTES // each)
        return (slice(low, low + step) for low in range(0, len(effort.probes), step))

    def _labelled(self, ids: Ids) -> NDArray[Any]:
        if self.labels is None:
            return ids
        named = self.labels[np.maximum(ids, 0)]
        nothing: Any = -1 if self.labels.dtype.kind == "i" else ""
        return np.where(ids < 0, nothing, named).astype(self.labels.dtype)

    def __repr__(self) -> str:
        return (
            f"<Searcher: {self.n:,} keys, d = {self.d}, {self.c:,} cells ({self.engine.storage}"
            + (f", {self.spilled:,} keys in two" if self.spilled else "")
            + "), "
            f"routed by {self.router.name}>"
        )
