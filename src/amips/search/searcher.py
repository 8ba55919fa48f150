"""The object a user holds: route with the model, scan with the query, return true inner products."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from amips.arguments import check_choice, check_whole
from amips.blas import one_thread
from amips.blas import threads as limit_threads
from amips.cells import fingerprint_of
from amips.design import Design
from amips.errors import AmipsError
from amips.index import CellStore, FewSearch, KeyMask, OwnCells, parts_of, scan_allowed
from amips.metrics import TOP
from amips.routers import (
    Router,
    best_cells,
    cells_above,
    check_fits,
    least_keys,
    limit_probes,
    router_for,
)
from amips.search import inputs
from amips.search.attributes import Attributes
from amips.search.cost import Cost
from amips.search.drop_in_search import drop_in_search
from amips.search.effort import Effort, effort_for
from amips.search.few_queries import search_few
from amips.search.filtered_cells import CellFilters
from amips.search.inputs import (
    checked_k,
    checked_probes,
    checked_queries,
    labelled,
    restore_norms,
    split_norms,
)
from amips.search.label_room import LabelRoom
from amips.search.origin import Origin
from amips.search.placing import BY_KEY, Placement
from amips.search.points import Point
from amips.search.report import Report
from amips.search.selectivity import Depth
from amips.vectors import Floats

Ids = NDArray[np.int64]

KNOWN = 64  # efforts that are kept


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
        alive: the keys that were not removed; None if none was.
        placement: where keys go that are added.
        attributes: of the keys, which a search can be conditioned on; None if there are none.
        depths: recall behind filters, by selectivity and effort; of all keys first.
        origin: what it was fitted on, and what was done to it since.
        label_room: where labels are kept, with places for more.
        order: the user's place of each key number, [n] (`amips.search.key_order`); None if it is the number.
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
    alive: KeyMask | None = None
    placement: Placement = BY_KEY
    attributes: Attributes | None = None
    depths: list[Depth] = field(default_factory=list)
    origin: Origin = Origin()  # noqa: RUF009
    order: Ids | None = None
    label_room: LabelRoom | None = None

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
        best_effort: bool = False,
        drop_in: bool = False,
        rescore: bool = True,
        on_bad: Literal["error", "skip"] = "error",
        threads: int | None = None,
        margin: None = None,
        allowed: KeyMask | None = None,
    ) -> tuple[Floats, NDArray[Any]]:
        """The k best keys of each query: scores float32 [m, k] and ids int64 [m, k], best first.

        Scores are true inner products <x, y>. Where fewer than k keys were scanned, the id is -1 (an
        empty string if ids are strings) and the score -inf. Without `recall`, `probes` or `min_mass` it
        serves the recall that the index was made for, `target_recall`.

        Args:
            x: queries [m, d], or one query [d].
            k: results for each query.
            recall: choose the cheapest way that has this recall of the true top k (of the top 10 if k is
                more) with 95 % confidence, by held-out queries. What cannot be reached is an error.
            probes: cells to scan: a number, or one for each query (FAISS calls it nprobe).
            min_mass: scan the cells that are expected to hold at least this share of the query's top keys: as
                many as each query needs.
            best_effort: with `recall`, serve the highest recall that can be had, and warn, rather than fail.
            drop_in: put the predicted key in the place of x throughout, as in the paper: for mappers only.
                Otherwise the model chooses the cells, and x scores the keys.
            rescore: with `drop_in`, fetch more and score them again with x.
            on_bad: a query that is not finite is an error, or ("skip") gets no results.
            threads: limit numpy and FAISS to so many; a few queries in compiled code have one.
            margin: of a graph: cells have none, and it is refused.
            allowed: the keys that may be results, in place of those that were not removed: the effort is then
                what the recall needs behind them.
        """
        if margin is not None:
            raise AmipsError("this index has cells, not a graph: give recall, probes or min_mass")
        k = checked_k(k)
        if on_bad != "error":
            check_choice("on_bad", on_bad, ("error", "skip"))
        if drop_in and probes is None:
            raise AmipsError(
                "drop_in=True needs probes: recall and min_mass are for cells that a model chooses"
            )
        # What is asked for most is looked up once; what warns is looked up again, and warns again.
        plain = probes is None and min_mass is None and not best_effort and k <= TOP
        key = (recall, k) if plain and (recall is None or type(recall) is float) else None
        effort = None if key is None else self._efforts.get(key)
        if effort is None:
            effort = effort_for(self, probes, recall, min_mass, k, best_effort)
            if key is not None and len(self._efforts) < KNOWN:
                self._efforts[key] = effort
        if threads is not None:
            check_whole("threads", threads, 1)
        if not drop_in and (result := self.search_few(x, k, effort, allowed, threads)) is not None:
            return result[0], labelled(result[1], self.labels)
        x, bad = checked_queries(x, self.d, on_bad)
        with one_thread() if threads is None and len(x) == 1 else limit_threads(threads):
            if drop_in:
                scores, ids = drop_in_search(self, x, k, effort, rescore, allowed or self.alive)
            else:
                scores, ids = self.search_with(x, k, effort, allowed)
        scores[bad], ids[bad] = -np.inf, -1
        return scores, labelled(ids, self.labels)

    _efforts = cached_property[dict[Any, Effort]](lambda _: {})  # by recall and k

    def search_few(
        self, x: Any, k: int, effort: Effort, allowed: KeyMask | None = None, threads: int | None = None
    ) -> tuple[Floats, Ids] | None:
        """Scores and key numbers of a few queries, in one compiled call; None where there is none."""
        return search_few(self, x, k, effort, self.filters.of(allowed), threads)

    @cached_property
    def filters(self) -> CellFilters:
        """The search behind filters."""
        return CellFilters(self)

    @cached_property
    def _few(self) -> FewSearch | None:
        """What searches for a few queries; None where nothing is compiled for this store."""
        store = self.store
        if not isinstance(store, OwnCells):
            return None
        base, *added = parts_of(store)
        return FewSearch.of(base, self.router.factors, *added)

    def prepare(self) -> None:
        """Make ready what the first search would otherwise wait for."""
        self._few  # noqa: B018
        if (filtered := self.filters.of(None)) is not None:  # many keys were removed
            filtered.lists  # noqa: B018

    def search_with(
        self, x: Floats, k: int, effort: Effort, allowed: KeyMask | None = None
    ) -> tuple[Floats, Ids]:
        """The k best keys of float32 queries [m, d] at one effort: scores [m, k] and key numbers [m, k]."""
        scores, ids = np.empty((len(x), k), np.float32), np.empty((len(x), k), np.int64)
        store, counts = self.store_for(effort.refine), self.counts(effort, len(x))
        filtered, allowed = self.filters.of(allowed), allowed or self.alive
        for rows in self.batches(counts, k, store.refine):
            u, v, exponents = split_norms(x[rows])
            if filtered is not None:
                result = filtered.search_with(v, k, effort.of_rows(rows))
            elif effort.refine == 0:
                assert isinstance(store, OwnCells)
                result = store.every_key(v, k, allowed)
            else:
                cells = self._choose(u, effort.min_mass, counts[rows], k)
                result = scan_allowed(store, v, cells, k, allowed)
            scores[rows], ids[rows] = restore_norms(result[0], exponents), result[1]
        return scores, ids

    def store_for(self, refine: int | None) -> CellStore:
        """The store, with so many candidates of codes for each result; None leaves them as they are."""
        if not refine or refine == self.store.refine:
            return self.store
        if refine not in self._wider:
            assert isinstance(self.store, OwnCells)
            self._wider[refine] = self.store.with_refine(refine)
        return self._wider[refine]

    @cached_property
    def _wider(self) -> dict[int, CellStore]:
        """Stores that `store_for` made, by their number of candidates."""
        return {}

    def choose_cells(
        self, x: Any, probes: "int | NDArray[np.integer[Any]]", *, threads: int | None = None
    ) -> Ids:
        """The cells that would be scanned, best first: int64 [m, min(probes, c)].

        With a number of probes for each query, rows end in -1 after theirs.
        """
        x, _ = checked_queries(x, self.d)
        counts = checked_probes(probes, len(x), self.c)
        out = np.empty((len(x), min(int(np.max(probes, initial=1)), self.c)), np.int64)
        with limit_threads(threads):
            for rows in self.batches(counts, 1, 1):
                cells = self._choose(split_norms(x[rows])[0], None, counts[rows], 1)
                out[rows] = -1
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
        allowed: KeyMask | None = None,
    ) -> Cost:
        """FLOPs (routing and scan), keys and cells scanned for each query, without scanning."""
        x, _ = checked_queries(x, self.d)
        effort = effort_for(self, probes, recall, min_mass, checked_k(k), best_effort)
        return self.cost_with(x, k, effort, allowed)

    def cost_with(self, x: Floats, k: int, effort: Effort, allowed: KeyMask | None = None) -> Cost:
        """The cost of float32 queries [m, d] at one effort."""
        if (filtered := self.filters.of(allowed)) is not None:
            return filtered.cost_with(x, k, effort)
        scanned, probed = np.full(len(x), self.n), np.full(len(x), self.c)
        if effort.refine == 0:  # no cell is chosen, no code is looked at
            return Cost(0, 0, 2 * self.d * scanned, scanned, probed)
        sizes = np.append(self.store.sizes, 0)  # cell -1 holds nothing
        counts = self.counts(effort, len(x))
        for rows in self.batches(counts, 1, 1):
            cells = self._choose(split_norms(x[rows])[0], effort.min_mass, counts[rows], k)
            scanned[rows], probed[rows] = sizes[cells].sum(axis=1), (cells >= 0).sum(axis=1)
        scan = self.store_for(effort.refine).scan_flops(scanned, k)
        return Cost(self.router.network_flops, self.router.coarse_flops, scan, scanned, probed)

    def with_model(self, model: Any) -> "Searcher":
        """The same keys routed by another model, or by centroid (None); nothing is known of its recall."""
        check_fits(model, self.fingerprint, self.cells_fingerprint)
        return Searcher(self.store, model, [], self.labels, self.fingerprint)

    @cached_property
    def cells_fingerprint(self) -> str:
        """Which key is in which cell: a router must have been trained on just that."""
        return fingerprint_of(self.store.assignment)

    def _choose(self, u: Floats, min_mass: float | None, counts: Ids, k: int) -> Ids:
        """The cells to scan for queries of norm 1, best first, k keys at least by mass; -1 after the last."""
        scores = self.router.scores(u)
        if min_mass is not None:
            keys = least_keys(k, self.store.second is not None)
            return cells_above(scores, self.temperature, min_mass, self.store.sizes, keys)
        most = int(counts.max(initial=1))
        cells = best_cells(scores, most)
        return cells if (counts == most).all() else limit_probes(cells, counts)

    def counts(self, effort: Effort, m: int) -> Ids:
        """How many cells each of m queries may probe, at most."""
        return np.full(m, self.c) if effort.probes is None else checked_probes(effort.probes, m, self.c)

    def batches(self, counts: Ids, k: int, refine: int) -> Iterator[slice]:
        """Parts of the queries whose scores, cells and results fit in the working memory together."""
        if len(counts) == 1:
            return iter((slice(0, 1),))
        most = int(counts.max(initial=1))
        each = 8 * self.d + 12 * self.c + 4 * self.router.floats + 24 * most + 64 * max(k, TOP) * refine
        step = max(1, inputs.BATCH_BYTES // each)
        return (slice(low, low + step) for low in range(0, len(counts), step))

    def __repr__(self) -> str:
        if self.design is not None:
            return f"<Searcher: {self.n:,} keys, d = {self.d}; {self.design.describe()}>"
        twice = f", {self.spilled:,} keys in two" if self.spilled else ""
        cells = f"{self.c:,} cells ({self.store.storage}{twice})"
        return f"<Searcher: {self.n:,} keys, d = {self.d}, {cells}, routed by {self.router.name}>"
