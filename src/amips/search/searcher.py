"""The object a user holds: route with the model, scan with the query, return true inner products."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from amips.blas import threads as limit_threads
from amips.errors import AmipsError, VectorError
from amips.index import FaissIVF
from amips.nets import Model
from amips.route import CentroidRouter, MapperRouter, Router, best_cells, limit_probes, router_for
from amips.search.points import Point, probes_for
from amips.vectors import Floats

Ids = NDArray[np.int64]
Probes = "int | NDArray[np.integer[Any]]"

BATCH_BYTES = 1 << 28  # working memory of one block of queries
DROP_IN_CANDIDATES = 4  # candidates scored again with x, for each result asked for


@dataclass(frozen=True)
class Cost:
    """What searching costs, for each query."""

    flops: NDArray[np.int64]
    scanned: NDArray[np.int64]  # keys


@dataclass(frozen=True)
class Searcher:
    """Keys in cells, a way to route, and what is known of the recall.

    `model` None routes by centroid. `labels` [n] gives the ids to return instead of 0..n-1.
    """

    engine: FaissIVF
    model: Model | None
    points: list[Point] = field(default_factory=list)
    labels: NDArray[Any] | None = None
    fingerprint: str = ""
    path: Path | None = None

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
        x, bad = self._checked(x, on_bad)
        if k < 1:
            raise VectorError(f"k is {k}; it must be at least 1")
        if route not in ("cells", "drop-in"):
            raise AmipsError(f"route={route!r}: expected 'cells' or 'drop-in'")
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

    def route(self, x: Any, probes: int, *, threads: int | None = None) -> Ids:
        """The cells that would be scanned, best first: int64 [m, min(probes, c)]."""
        x, _ = self._checked(x, "error")
        counts = self._probes(probes, None, 1, len(x))
        out = np.empty((len(x), min(max(probes, 1), self.c)), np.int64)
        step = self._batch(counts, 1)
        with limit_threads(threads):
            for low in range(0, len(x), step):
                out[low : low + step] = self._route(x[low : low + step], counts[low : low + step])
        return out

    def cost(self, x: Any, probes: "int | NDArray[np.integer[Any]]", k: int = 10) -> Cost:
        """FLOPs (routing and scan) and keys scanned for each query, without scanning."""
        x, _ = self._checked(x, "error")
        counts = self._probes(probes, None, 1, len(x))
        scanned = np.empty(len(x), np.int64)
        sizes = np.append(self.engine.sizes, 0)  # cell -1 holds nothing
        step = self._batch(counts, 1)
        for low in range(0, len(x), step):
            cells = self._route(x[low : low + step], counts[low : low + step])
            scanned[low : low + step] = sizes[cells].sum(axis=1)
        return Cost(self.router.flops + self.engine.scan_flops(scanned, k), scanned)

    def with_model(self, model: Model | None) -> "Searcher":
        """The same index routed by another model, or by centroid (None); without operating points."""
        return Searcher(self.engine, model, [], self.labels, self.fingerprint)

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

    def _checked(self, x: Any, on_bad: str) -> tuple[Floats, NDArray[np.bool_]]:
        """Queries as contiguous float32 [m, d], bad rows zeroed, and which rows are bad."""
        array = np.asarray(x)
        if array.ndim == 1 and array.shape == (self.d,):
            array = array[None]
        if array.ndim != 2 or array.shape[1] != self.d or array.dtype.kind not in "fiu":
            raise VectorError(
                f"queries of type {array.dtype} and shape {list(array.shape)}; "
                f"this index needs numbers [m, {self.d}]"
            )
        with np.errstate(over="ignore"):  # float64 beyond float32 becomes inf, which is found below
            array = np.ascontiguousarray(array, np.float32)
        bad = ~np.isfinite(array).all(axis=1)
        if bad.any():
            if on_bad != "skip":
                row = int(np.flatnonzero(bad)[0])
                raise VectorError(f'query {row} is not finite; repair it, or pass on_bad="skip"')
            array = np.where(bad[:, None], np.float32(0), array)
        return array, bad

    def _probes(self, probes: Any, recall: float | None, k: int, m: int) -> Ids:
        """How many cells each query may probe, [m]."""
        if probes is not None and recall is not None:
            raise AmipsError("give probes or recall, not both")
        if recall is not None:
            probes = probes_for(self.points, recall, k)
        counts = np.asarray(8 if probes is None else probes)
        if counts.dtype.kind not in "iu" or counts.shape not in ((), (m,)):
            raise AmipsError(f"probes must be a whole number, or {m} of them, one for each query")
        if counts.size and counts.min() < 1:
            raise AmipsError(f"probes is {counts.min()}; it must be at least 1")
        return np.broadcast_to(np.minimum(counts, self.c).astype(np.int64), (m,))

    def _batch(self, counts: Ids, k: int) -> int:
        """Queries whose scores, cells and results fit in the working memory together."""
        each = 4 * self.d + 16 * self.c + 24 * int(counts.max(initial=1)) + 64 * k * self.engine.refine
        return max(1, BATCH_BYTES // each)

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
