"""Learned routing for a FAISS index that was built elsewhere. The index itself is not changed."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from amips.arguments import check_recall
from amips.blas import faiss
from amips.blas import threads as limit_threads
from amips.cells import IVFParts, place_keys
from amips.errors import AmipsError
from amips.metrics import TARGET_RECALL, TOP
from amips.nets import DESCRIPTION, WEIGHTS, Model
from amips.routers import CellRouter, OwnRouter, Router, best_cells, cells_above, least_keys, limit_probes
from amips.search import inputs
from amips.search.bundle_directory import replace_bundle
from amips.search.cost import Cost
from amips.search.effort import Effort, effort_for
from amips.search.inputs import checked_k, checked_probes, checked_queries
from amips.search.measuring import calibrated
from amips.search.points import Point, recalls, surest_point
from amips.search.quantizer import QuantizerRouter
from amips.search.query_norms import QueryNorms
from amips.search.routing_kind import routing_of
from amips.search.searcher import Searcher
from amips.search.wrapped_store import WrappedStore, faiss_scan_flops, selector_of
from amips.task import Task, load_task
from amips.vectors import Floats, row_norms

Ids = NDArray[np.int64]

OUTSIDE = "outside"  # the storage that a bundle states whose index is a file of its own


@dataclass(frozen=True)
class WrappedIndex:
    """A FAISS IVF index whose cells a model chooses; `search` answers in the index's own metric and ids.

    Keys that are added to the index later are found like the others, as long as its quantizer is the same.

    Args:
        parts: the index, taken apart.
        model: what chooses the cells: a trained router or mapper, any object with `scores(x)`, or None for
            the index's own quantizer.
        points: recall and cost on held-out queries, by effort.
        temperature: of the stopping rule (`amips.routers.masses`); 0 if it is not known.
        target_recall: what `search` serves when nothing else is asked for; None for the index's own nprobe.
        key_norm: the norm of its keys; 0 if it is not known (see `amips.search.query_norms`).
        file: where the index was read from, if it was.
    """

    parts: IVFParts
    model: Any
    points: list[Point] = field(default_factory=list)
    temperature: float = 0.0
    target_recall: float | None = None
    key_norm: float = 0.0
    file: str = ""

    @property
    def index(self) -> Any:
        """The FAISS index."""
        return self.parts.index

    @property
    def n(self) -> int:
        """The number of keys now."""
        return int(self.parts.ivf.ntotal)

    @cached_property
    def d(self) -> int:
        """The dimension of queries."""
        return int(self.parts.index.d)

    @cached_property
    def c(self) -> int:
        """The number of cells."""
        return int(self.parts.ivf.nlist)

    @cached_property
    def router(self) -> Router:
        """How cells are chosen."""
        if self.model is None or (isinstance(self.model, Model) and self.model.c == 1):
            return QuantizerRouter(self.parts, self.model, self.norms.scale)
        return CellRouter(self.model) if isinstance(self.model, Model) else OwnRouter(self.model, self.c)

    @cached_property
    def norms(self) -> QueryNorms:
        """How queries of any norm are asked."""
        return QueryNorms(self.parts, self.key_norm)

    def search(
        self,
        x: Any,
        k: int = 10,
        *,
        filter: Any = None,
        recall: float | None = None,
        probes: "int | NDArray[np.integer[Any]] | None" = None,
        min_mass: float | None = None,
        best_effort: bool = False,
        on_bad: Literal["error", "skip"] = "error",
        threads: int | None = None,
    ) -> tuple[Floats, Ids]:
        """As `faiss.Index.search`, in cells that the model chooses: scores [m, k] and ids [m, k], best first.

        Scores are those of the index: inner products or squared distances, approximate if it holds codes.
        The norm of a query changes no id, and scores as it should.
        Without `recall`, `probes` or `min_mass` it serves `target_recall`, or the index's nprobe if nothing
        was measured.

        Args:
            x: queries [m, d], or one query [d].
            k: results for each query.
            filter: the keys that may be results: their ids in the index, or bool [n] in the order of adding
                (not of an IVF that was given ids). A query whose cells hold fewer than k of them is searched
                for in every cell. Its recall is not known: with `recall` it is refused, ask for more probes.
            recall: choose the cheapest way that has this recall of the true top k (of the top 10 if k is
                more) with 95 % confidence, by held-out queries. What cannot be reached is an error.
            probes: cells to scan: a number, or one for each query (FAISS calls it nprobe).
            min_mass: scan the cells that are expected to hold at least this share of the query's top keys.
            best_effort: with `recall`, serve the highest recall that can be had, and warn, rather than fail.
            on_bad: a query that is not finite is an error, or ("skip") gets no results.
            threads: limit numpy and FAISS to so many.
        """
        x, bad = checked_queries(x, self.d, on_bad)
        k = checked_k(k)
        if filter is not None and recall is not None:
            raise AmipsError("recall: of a wrapped index it is not known behind a filter; give probes")
        effort = effort_for(self, probes, recall, min_mass, k, best_effort, self.parts.ivf.nprobe)
        counts, bound = self._counts(effort, len(x)), effort.min_mass
        scores, ids = np.empty((len(x), k), np.float32), np.empty((len(x), k), np.int64)
        selector = None if filter is None else selector_of(self.parts, filter)
        with limit_threads(threads):
            for rows in self._batches(len(x), k):
                asked = self.norms.asked(x[rows])
                inner = self.parts.transformed(asked.x)
                some = counts if counts is None else counts[rows]
                cells, base = self._choose(asked.u, inner, some, bound, k)
                block = scores[rows]
                self._scan(inner, cells, base, block, ids[rows], selector)
                if selector is not None and (short := ids[rows, -1] < 0).any():
                    self._scan_all(inner, short, block, ids[rows], selector)
                if (restored := asked.restored(block, ids[rows])) is not block:
                    scores[rows] = restored
        if self.parts.id_map is not None:
            ids = self.parts.external(ids)
        if bad.any():
            scores[bad], ids[bad] = -np.inf if self.parts.inner_product else np.inf, -1
        return scores, ids

    def choose_cells(
        self, x: Any, probes: "int | NDArray[np.integer[Any]]", *, threads: int | None = None
    ) -> Ids:
        """The cells that would be scanned, best first: int64 [m, most probes], -1 after those of a query."""
        x, _ = checked_queries(x, self.d)
        counts = checked_probes(probes, len(x), self.c)
        out = np.full((len(x), int(counts.max(initial=1))), -1, np.int64)
        with limit_threads(threads):
            for rows in self._batches(len(x), 1):
                asked = self.norms.asked(x[rows])
                cells = self._choose(asked.u, self.parts.transformed(asked.x), counts[rows], None, 1)[0]
                out[rows, : cells.shape[1]] = cells
        return out

    def cost(
        self,
        x: Any,
        k: int = 10,
        *,
        recall: float | None = None,
        probes: "int | NDArray[np.integer[Any]] | None" = None,
        min_mass: float | None = None,
        best_effort: bool = False,
    ) -> Cost:
        """FLOPs (routing and scan), keys and cells scanned for each query, without scanning."""
        x, _ = checked_queries(x, self.d)
        effort = effort_for(self, probes, recall, min_mass, checked_k(k), best_effort, self.parts.ivf.nprobe)
        counts, bound = self._counts(effort, len(x)), effort.min_mass
        scanned, probed = np.empty(len(x), np.int64), np.empty(len(x), np.int64)
        sizes = np.append(self.parts.sizes, 0)  # cell -1 holds nothing
        for rows in self._batches(len(x), 1):
            asked = self.norms.asked(x[rows])
            inner = self.parts.transformed(asked.x)
            some = counts if counts is None else counts[rows]
            cells, _ = self._choose(asked.u, inner, some, bound, k)
            scanned[rows], probed[rows] = sizes[cells].sum(axis=1), (cells >= 0).sum(axis=1)
        scan = faiss_scan_flops(self.parts, scanned)
        return Cost(self.router.network_flops, self.router.coarse_flops, scan, scanned, probed)

    def measured(
        self, task: "Task | str | Path", *, recall: float = TARGET_RECALL, ids: Any = None
    ) -> "WrappedIndex":
        """The same with operating points, measured on the task's val queries: `recall=` can be asked for.

        Args:
            task: whose keys the index holds; others may have been added after them.
            recall: what `search` serves when nothing else is asked for.
            ids: [n], the ids of the task's keys in the index, if they were not added in the task's order.
        """
        recall = check_recall(recall)
        task = load_task(task, verify=True)
        norms = sum(float(row_norms(block).sum(dtype=np.float64)) for _, block in task.key_vectors.blocks())
        index = replace(self, key_norm=norms / task.n)
        model = index.router if isinstance(index.router, QuantizerRouter) else self.model
        known = calibrated(Searcher(index._store(task, ids), model), task.val, recall)
        highest = surest_point(known.points, TOP).recall_assured(TOP)
        target: float | None = recall
        if highest < recall:
            target = None
            warnings.warn(
                f"recall {recall} is out of reach of this index: the highest is {highest:.3f}; "
                "search without options uses its nprobe",
                stacklevel=2,
            )
        return replace(index, points=known.points, temperature=known.temperature, target_recall=target)

    def recall_on(self, task: "Task | str | Path", *, ids: Any = None, **effort: Any) -> float:
        """Recall@10 on the task's test queries, which nothing was chosen by.

        Args:
            task, ids: as for `measured`.
            effort: `recall`, `probes` or `min_mass`, as for `search`.
        """
        task = load_task(task, verify=True)
        answers = self.search(np.asarray(task.test.queries), TOP, **effort)[1]
        return float(recalls(self._store(task, ids).rows(answers), np.asarray(task.test.top_ids), TOP).mean())

    def _store(self, task: Task, ids: Any) -> WrappedStore:
        return WrappedStore(self.parts, place_keys(self.parts, task.key_vectors, ids), self._scan_cells)

    def save(self, directory: str | Path) -> None:
        """Write everything beside the FAISS index: model, what was measured, which index it belongs to.

        `amips.load(directory, index=...)` brings both together again. A router of your own is not in it: give
        it as `model`. A crash leaves the old or the new.
        """
        replace_bundle(directory, self._write)

    def _write(self, data: Path) -> tuple[dict[str, Any], list[str]]:
        fields = {
            "storage": OUTSIDE,
            "router": routing_of(self.model),
            **self.parts.identity,
            "n": self.n,
            "file": self.file,
            "temperature": self.temperature,
            "points": [point.to_json() for point in self.points],
            "target_recall": self.target_recall,
            "key_norm": self.key_norm,
        }
        if not isinstance(self.model, Model):
            return fields, []
        self.model.save(data)
        return fields, [DESCRIPTION, WEIGHTS]

    def _counts(self, effort: Effort, m: int) -> Ids | None:
        """How many cells each of m queries may probe; None with a bound on their mass."""
        return None if effort.probes is None else checked_probes(effort.probes, m, self.c)

    def _choose(
        self, u: Floats, inner: Floats, counts: Ids | None, min_mass: float | None, k: int
    ) -> tuple[Ids, Floats | None]:
        """The cells of each query, -1 after the last; and what FAISS has for them if it chose them itself."""
        if min_mass is not None:
            enough = self.parts.sizes, least_keys(k, False)
            return cells_above(self.router.scores(u), self.temperature, min_mass, *enough), None
        assert counts is not None
        most = int(counts.max(initial=1))
        base: Floats | None = None
        if isinstance(self.router, QuantizerRouter):
            asked = inner if self.model is None else self.router.points(u)
            base, cells = self.parts.ivf.quantizer.search(asked, most)
            base = base if self.model is None else None
        else:
            cells = best_cells(self.router.scores(u), most)
        return (cells, base) if (counts == most).all() else (limit_probes(cells, counts), base)

    def _scan_all(self, inner: Floats, some: NDArray[np.bool_], scores: Floats, ids: Ids, sel: Any) -> None:
        """FAISS's own scan of every cell for some of the queries."""
        cells = np.tile(np.arange(self.c), (int(some.sum()), 1))
        best, keys = scores[some], ids[some]
        self._scan(np.ascontiguousarray(inner[some]), cells, None, best, keys, sel)
        scores[some], ids[some] = best, keys

    def _scan(
        self, inner: Floats, cells: Ids, base: Floats | None, scores: Floats, ids: Ids, selector: Any = None
    ) -> None:
        """FAISS's own scan of these cells, into `scores` and `ids` [m, k]."""
        ivf = self.parts.ivf
        base = self._coarse(inner, cells) if base is None else base
        arguments = [faiss.swig_ptr(a) for a in (cells, base, scores, ids)]
        parameters = _parameters(cells.shape[1], ivf.max_codes)
        if selector is not None:
            # What is asked for may lie anywhere: no limit on the codes that are looked at.
            parameters = faiss.SearchParametersIVF(nprobe=cells.shape[1], sel=selector)
        ivf.search_preassigned_c(
            len(inner), faiss.swig_ptr(inner), scores.shape[1], *arguments, False, parameters
        )

    def _scan_cells(self, x: Floats, cells: Ids, k: int) -> tuple[Floats, Ids]:
        """The k best keys of each query in these cells, as the index has them."""
        scores, ids = np.empty((len(x), k), np.float32), np.empty((len(x), k), np.int64)
        asked = self.norms.asked(x)
        self._scan(self.parts.transformed(asked.x), cells, None, scores, ids)
        return asked.restored(scores, ids), self.parts.external(ids)

    def _coarse(self, inner: Floats, cells: Ids) -> Floats:
        """What FAISS would have for the chosen cells: <x, centroid>, or the squared distance to it."""
        if type(self.parts.ivf) is faiss.IndexIVFFlat:  # which scores the keys alone, and does not look
            return np.zeros(cells.shape, np.float32)
        centroids = self.parts.centroids
        products: Floats
        if len(inner) == 1:  # of many queries, one matrix product is faster than gathering centroids of each
            products = (centroids[cells[0]] @ inner[0])[None]
        else:
            products = np.take_along_axis(inner @ centroids.T, np.maximum(cells, 0), axis=1)
        if self.parts.inner_product:
            return products
        norms = np.einsum("md,md->m", inner, inner)[:, None]
        squares: Floats = norms + self.parts.squares[np.maximum(cells, 0)] - 2 * products
        return np.maximum(squares, 0)

    def _batches(self, m: int, k: int) -> Iterator[slice]:
        """Parts of the queries whose scores, cells and results fit in the working memory together."""
        if m == 1:
            return iter((slice(0, 1),))
        each = 16 * self.d + 4 * self.router.floats + 32 * self.c + 16 * k
        step = max(1, inputs.BATCH_BYTES // each)
        return (slice(low, low + step) for low in range(0, m, step))

    def __repr__(self) -> str:
        kind = type(self.parts.ivf).__name__
        line = f"{kind} of {self.n:,} keys, d = {self.d}, {self.c:,} cells, routed by {self.router.name}"
        serves = "" if self.target_recall is None else f", for recall {self.target_recall:g}"
        return f"<WrappedIndex: {line}{serves}>"


@lru_cache(maxsize=1024)
def _parameters(probes: int, max_codes: int) -> Any:
    """What goes with one call, so that the index's own nprobe stays as it is. Made once: it takes time."""
    return faiss.SearchParametersIVF(nprobe=probes, max_codes=max_codes)
