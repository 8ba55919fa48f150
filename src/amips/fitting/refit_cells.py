"""What cells can learn from new queries: where keys are, what chooses cells, which keys have a second one."""

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.cells import STRENGTH, Cells, cell_means, towards_queries
from amips.design import Design
from amips.errors import AmipsError
from amips.extras import needs_extra
from amips.index import FaissCellStore
from amips.lean import Projection
from amips.metrics import TOP
from amips.nets import AffineNet, Linear, Model, Recipe
from amips.routers import RoutingEstimate, router_for
from amips.search import Searcher, first_of, ranked
from amips.task import Task
from amips.vectors import Floats, Vectors, unit_rows

TRAIN_TIME = 0.5  # of the time that is left
OVER = 1.5  # times the time that is left, that moving keys may take: it gains most
WORTH = 0.99  # of the cost, at most, that a step must come down to: each of them moves keys, or may
BLOCK = 1 << 13  # keys that are looked at together
ROUNDS = 2  # of k-means
ELSEWHERE = 0.05  # of a cosine: how much nearer a second cell must be than the first
RATE = 3e-4  # of learning: the weights are good already
LEAST_SECONDS, EVALUATIONS = 1.0, 8  # of training

Cells32 = NDArray[np.int32]


@dataclass
class CellsRefit:
    """The steps of a refit of cells; each is kept if the newest queries cost less.

    Args:
        index: as it is.
        task: its keys and cells; queries to learn from, and the newest.
        wanted: the keys that new queries want.
        target: the recall@10 that counts.
        seconds: that are left.
        rate: FLOPs a second, of exact search.
        tried: takes in what every step is estimated to cost, as a share of a full scan.
    """

    index: Searcher
    task: Task
    wanted: NDArray[np.int64]
    target: float
    seconds: float
    rate: float
    seed: int
    tried: dict[str, float]

    def run(self) -> tuple[str, Searcher] | None:
        """What was changed, in words, and the index; None if nothing pays."""
        store, until = self.index.store, time.monotonic() + self.seconds
        assert isinstance(store, FaissCellStore)
        now = Layout(store.assignment, store.centroids, store.second, self.index.model)
        cost, words = self._noted("as it is", now), list[str]()
        if store.storage in ("flat", "lean"):  # others would have to learn their codes again
            changes = [("second cells for some keys", self._with_second, 0.0)]
            if self.index.design is None or self.index.design.query_aware:
                changes.append(("keys moved", self._moved, self._moving_seconds))
            ways = [(cost, "", now)]
            for name, change, seconds in changes:
                if seconds <= OVER * (until - time.monotonic()):
                    other = change(now)
                    ways.append((self._noted(name, other), name, other))
            better, name, other = min(ways, key=lambda way: way[0])
            if better < WORTH * cost:
                moved = int((other.cells != now.cells).sum())
                cost, now = better, other
                words.append(f"{moved:,} keys moved" if moved else name)
        learned = self._trained(now, TRAIN_TIME * (until - time.monotonic()))
        if learned is not None and (better := self._noted("router trained", learned)) < WORTH * cost:
            cost, now = better, learned
            words.append("the router trained")
        return (", ".join(words), self._built(now)) if words else None

    @property
    def _moving_seconds(self) -> float:
        """What moving keys takes, as exact search went: rounds of k-means, and second cells."""
        product = 2.0 * self.index.n * self.index.c * self.index.d
        return (ROUNDS + 1 + 2 * (self.index.spilled > 0)) * product / self.rate

    def _noted(self, name: str, layout: "Layout") -> float:
        """What the target costs on the newest queries, estimated from the routing: a share of a full scan."""
        store, val, c = self.index.store, self.task.val, self.index.c
        router = router_for(layout.model, layout.centroids)
        sizes = np.bincount(layout.cells, minlength=c)
        if layout.second is not None:
            sizes = sizes + np.bincount(layout.second[layout.second >= 0], minlength=c)
        x, top = np.asarray(val.queries), np.asarray(val.top_ids)[:, :TOP]
        routing = RoutingEstimate.by(router, x, top, layout.cells, sizes, second=layout.second)
        scanned = routing.at_mass(routing.min_mass_for(self.target)).scanned
        flops = router.flops + store.scan_flops(scanned, TOP).mean()
        self.tried[f"estimate: {name}"] = cost = float(flops) / (2.0 * self.index.n * self.index.d)
        return cost

    def _with_second(self, now: "Layout") -> "Layout":
        """Keys without a second cell that new queries want have one where these are, if that is elsewhere."""
        second = np.full(self.task.n, -1, np.int32) if now.second is None else now.second.copy()
        rows = self.wanted[second[self.wanted] < 0]
        points = self._points()
        for low in range(0, len(rows), BLOCK):
            part = rows[low : low + BLOCK]
            scores = points.take(part) @ now.centroids.T
            best = scores.argmax(axis=1)
            own = np.take_along_axis(scores, now.cells[part][:, None], axis=1)[:, 0]
            far = scores.max(axis=1) > own + ELSEWHERE
            second[part[far]] = best[far]
        return replace(now, second=second if (second >= 0).any() else None)

    def _moved(self, now: "Layout") -> "Layout":
        """Some more rounds of k-means, with where new queries and those of the log want the keys.

        A cell stays about where it is, and so its router needs no new training: it moves with the centroid.
        """
        c, cells, centroids = self.index.c, now.cells, now.centroids.copy()
        points = self._points()
        for step in range(ROUNDS + 1):
            nearest = [(block @ centroids.T).argmax(axis=1) for _, block in points.blocks(BLOCK)]
            cells = np.concatenate(nearest).astype(np.int32)
            if step == ROUNDS:
                break
            means = cell_means(points, cells, c)
            moved = means.any(axis=1)  # a cell without keys stays
            centroids[moved] = unit_rows(means[moved])[0]
        model = self._shifted(now.model, centroids - now.centroids)
        layout = Layout(cells, centroids, None, model)
        if now.second is None:
            return layout
        fraction = float((now.second >= 0).mean())
        order = ranked(self._task(layout), router_for(model, centroids), self.target)
        return replace(layout, second=first_of(*order, fraction))

    def _points(self) -> Vectors:
        """Where keys and the queries that want them are, see `amips.cells.aware`."""
        top = np.asarray(self.task.train.top_ids)[:, :TOP]
        return towards_queries(self.task.key_vectors, self.task.train.vectors, top, STRENGTH)

    def _shifted(self, model: Any, change: Floats) -> Any:
        """A linear router whose cells have moved by so much: <w_j + R change_j, A x> for <w_j, A x>.

        R is what brings <change, x> nearest to <R change, A x> over the queries. Other routers stay.
        """
        if not isinstance(model, AffineNet):
            return model
        weights = dict(model.weights)
        change = np.repeat(change, model.architecture.pieces, axis=0)
        if "A" in weights:
            x, a = self.task.train.vectors.load().astype(np.float64), weights["A"].astype(np.float64)
            below = a @ (x.T @ x)
            square = below @ a.T
            square += 1e-6 * np.trace(square) / len(square) * np.eye(len(square))
            change = change @ np.linalg.solve(square, below).T
        weights["W"] = (weights["W"] + change).astype(np.float32)
        return replace(model, weights=weights)

    def _trained(self, now: "Layout", seconds: float) -> "Layout | None":
        """The layout with its router after some training; None of one that training cannot go on from."""
        if not isinstance(now.model, AffineNet | None) or seconds < LEAST_SECONDS:
            return None
        try:
            with needs_extra("refit", "train", "torch"):
                from amips.learn import train
        except AmipsError:
            return None  # what needs no training is tried all the same
        start: Any = Linear() if now.model is None else now.model
        recipe = replace(_recipe(self.index.design), rate=RATE)
        options: Any = {"minutes": seconds / 60, "seed": self.seed, "evaluations": EVALUATIONS}
        return replace(now, model=train(self._task(now), start, recipe=recipe, **options))

    def _task(self, layout: "Layout") -> Task:
        return replace(self.task, cells=Cells(layout.cells, layout.centroids))

    def _built(self, layout: "Layout") -> Searcher:
        store, model, design = self.index.store, layout.model, self.index.design
        assert isinstance(store, FaissCellStore)
        if layout.cells is not store.assignment or layout.second is not store.second:
            keys, projection = self.task.key_vectors, None
            if store.projection is not None and store.key_projection is not None:
                nothing = np.empty((0, 0), np.float32)
                projection = Projection(store.projection, store.key_projection, nothing, np.empty(0))
            parts = (layout.cells, layout.centroids, store.storage, projection, layout.second)
            store = FaissCellStore.build(keys, *parts)
        if isinstance(model, Model):
            known = self._task(layout).fingerprints
            model = replace(model, about={**model.about, **known})
        if design is not None and isinstance(model, AffineNet):
            if not isinstance(self.index.model, Model):
                design = replace(design, router=Linear(rank=model.architecture.rank), recipe=Recipe())
            second = layout.second
            spilled = 0.0 if second is None else float((second >= 0).mean())
            design = replace(design, spill_fraction=min(1.0, spilled))
        facts: dict[str, Any] = {"design": design, "fingerprint": self.task.fingerprint}
        return replace(self.index, store=store, model=model, **facts)


@dataclass(frozen=True)
class Layout:
    """Which key is in which cells, and what chooses them."""

    cells: Cells32
    centroids: Floats
    second: Cells32 | None
    model: Any


def _recipe(design: Design | None) -> Recipe:
    return Recipe() if design is None or design.recipe is None else design.recipe
