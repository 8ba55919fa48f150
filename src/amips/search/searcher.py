"""The object a user holds: route with the model, scan with the query, return true inner products."""

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
from amips.route import CentroidRouter, MapperRouter, Router, best_cells, check_fits, limit_probes, router_for
from amips.search import inputs
from amips.search.inputs import checked_k, checked_probes, checked_queries
from amips.search.points import Point, probes_for
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

    @property
    def flops(self) -> NDArray[np.int64]:
        """All three together."""
        return self.network + self.coarse + self.scan


@dataclass(frozen=True)
class Searcher:
    """Keys in cells, a way to route, and what is known of the recall.

    `model` None routes by centroid. `labels` [n] gives the ids to return instead of 0..n-1.
    """

    engine: Engine
    model: Model | None
    points: list[Point] = field(default_factory=list)
    labels: NDArray[Any] | None = None
    fingerprint: str = ""

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
        """The cell of each key, [n]."""
        return self.engine.assignment

    def search(
        self,
        x: Any,
        k: int = 10,
        probes: "int | NDArray[np.integer[Any]] | None" = None,
        *,
        recall: float | None = None,
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
            probes: cells to scan: a number, or one for each query. 8 if neither this nor `recall` is given.
            recall: choose the fewest probes that had this recall (of the true top 10; of the top key if k
                is 1) on held-out queries.
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
        if route == "drop-in" and recall is not None:
            raise AmipsError('recall was measured with route="cells"; with "drop-in" give probes')
        counts = self._probes(probes, recall, k, len(x))
        scores = np.empty((len(x), k), np.float32)
        ids = np.empty((len(x), k), np.int64)
        step = self._batch(counts, k)
        with limit_threads(threads):
            for low in range(0, len(x), step):
                rows = slice(low, low + step)
                if route == "drop-in":
                    scores[rows], ids[rows] = self._drop_in(x[rows], k, counts[rows], rescore)
                else:
                    scores[rows], ids[rows] = self.engine.scan(x[rows], self._route(x[rows], counts[rows]), k)
        scores[bad], ids[bad] = -np.inf, -1
        return scores, self._labelled(ids)

    def route(self, x: Any, probes: "int | NDArray[np.integer[Any]]", *, threads: int | None = None) -> Ids:
        """The cells that would be scanned, best first: int64 [m, min(probes, c)].

        With a number of probes for each query, rows end in -1 after theirs.
        """
        x, _ = checked_queries(x, self.d)
        counts = self._probes(probes, None, 1, len(x))
        width = min(int(np.max(probes, initial=1)), self.c)
        out = np.empty((len(x), width), np.int64)
        step = self._batch(counts, 1)
        with limit_threads(threads):
            for low in range(0, len(x), step):
                out[low : low + step] = self._route(x[low : low + step], counts[low : low + step])
        return out

    def cost(self, x: Any, probes: "int | NDArray[np.integer[Any]]", k: int = 10) -> Cost:
        """FLOPs (routing and scan) and keys scanned for each query, without scanning."""
        x, _ = checked_queries(x, self.d)
        counts = self._probes(probes, None, 1, len(x))
        scanned = np.empty(len(x), np.int64)
        sizes = np.append(self.engine.sizes, 0)  # cell -1 holds nothing
        step = self._batch(counts, 1)
        for low in range(0, len(x), step):
            cells = self._route(x[low : low + step], counts[low : low + step])
            scanned[low : low + step] = sizes[cells].sum(axis=1)
        scan = self.engine.scan_flops(scanned, k)
        return Cost(self.router.network_flops, self.router.coarse_flops, scan, scanned)

    def with_model(self, model: Model | None) -> "Searcher":
        """The same index routed by another model, or by centroid (None); without operating points."""
        if model is not None:
            check_fits(model, self.fingerprint, self.cells_fingerprint)
        return Searcher(self.engine, model, [], self.labels, self.fingerprint)

    @cached_property
    def cells_fingerprint(self) -> str:
        """Which key is in which cell: a router must have been trained on just that."""
        return fingerprint_of(self.engine.assignment)

    def _route(self, x: Floats, counts: Ids) -> Ids:
        most = int(counts.max(initial=1))
        cells = best_cells(self.router.scores(x), most)
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

    def _probes(self, probes: Any, recall: float | None, k: int, m: int) -> Ids:
        """How many cells each query may probe, [m]."""
        if probes is not None and recall is not None:
            raise AmipsError("give probes or recall, not both")
        if recall is not None:
            probes = probes_for(self.points, recall, k)
        return checked_probes(8 if probes is None else probes, m, self.c)

    def _batch(self, counts: Ids, k: int) -> int:
        """Queries whose scores, cells and results fit in the working memory together."""
        each = 4 * self.d + 16 * self.c + 24 * int(counts.max(initial=1)) + 64 * k * self.engine.refine
        if self.model is not None:  # a KeyNet's keys of all cells are far larger than its scores
            each += 4 * self.model.architecture.floats
        return max(1, inputs.BATCH_BYTES // each)

    def _labelled(self, ids: Ids) -> NDArray[Any]:
        if self.labels is None:
            return ids
        named = self.labels[np.maximum(ids, 0)]
        nothing: Any = -1 if self.labels.dtype.kind == "i" else ""
        return np.where(ids < 0, nothing, named).astype(self.labels.dtype)

    def __repr__(self) -> str:
        return (
            f"<Searcher: {self.n:,} keys, d = {self.d}, {self.c:,} cells ({self.engine.storage}), "
            f"routed by {self.router.name}>"
        )
