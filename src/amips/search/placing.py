"""Where a key goes that is added to cells: where the queries are that will want it.

Cells are made of the points normalize(y / ||y|| + s m_y) (`amips.cells.aware`), with m_y the mean of the
logged queries that want y. For a new key nobody has asked yet: m_y is predicted from the key itself, by the
linear map that predicts it best for the keys that were asked for:

    W = argmin sum_y ||W' y / ||y|| - m_y||^2 + r ||W||^2.

Its first cell is the one whose centroid is nearest to that point, or the one that the router would send the
point to, or the one nearest to the key alone: what serves held-out queries best is chosen when the index is
made. Its second cell follows the rule of the build (`amips.search.spill`), up to the same bound.
"""

import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from amips.cells import STRENGTH, wanted_by
from amips.index import OwnCells
from amips.metrics import TOP
from amips.routers import Router
from amips.search.spill import PARALLEL
from amips.task import Task
from amips.vectors import Floats, row_norms, unit_rows

Cells32 = NDArray[np.int32]
Rule = Literal["key", "log", "router"]

RIDGE = 10.0  # r: about as much as ten keys
FEWEST_WANTED = 1000  # keys that were asked for, with fewer of which nothing is predicted
ROW_COPIES = 16  # of the keys of a sample, while the map is learned: some of them in float64
SAMPLE = 1 << 16  # keys that the map, the means and the bound are taken of
LONG, LONG_SAMPLE = (
    2.0,
    1 << 12,
)  # times as long as any of so many keys: queries everywhere may want such a key
GRAM_CELLS, GRAM_KEYS = 1 << 11, 100  # most cells whose products are kept, for so many keys at a time: 16 MB
BLOCK_FLOATS = 1 << 22  # scores of cells at a time


@dataclass(frozen=True)
class Placement:
    """How the cells of new keys are chosen.

    Args:
        rule: the first cell by the "key" alone, by the "log", or by the "router" for the point of the log.
        demand: W above, [d, d]; None if nothing is known of the log.
    """

    rule: Rule = "key"
    demand: Floats | None = None

    def points(self, keys: Floats) -> Floats:
        """Where the keys and the queries that will want them are, of norm 1, [m, d]."""
        unit = unit_rows(keys)[0]
        if self.demand is None:
            return unit
        return unit_rows(unit + np.float32(STRENGTH) * (unit @ self.demand))[0]

    def first(self, keys: Floats, centroids: Floats, router: Router) -> Cells32:
        """The cell of each key, [m]."""
        cells, step = np.empty(len(keys), np.int32), max(1, BLOCK_FLOATS // len(centroids))
        for low in range(0, len(keys), step):
            block = keys[low : low + step]
            points = unit_rows(block)[0] if self.rule == "key" else self.points(block)
            cells[low : low + step] = self.best(points, centroids, router)
        return cells

    def best(self, points: Floats, centroids: Floats, router: Router) -> Cells32:
        """The cell of each point, [m]."""
        scores = router.scores(points) if self.rule == "router" else points @ centroids.T
        cells: Cells32 = scores.argmax(axis=1).astype(np.int32)
        return cells


BY_KEY = Placement()


@dataclass(frozen=True)
class Demand:
    """What the log says of where keys are wanted: learned once of a task, whatever its cells.

    Args:
        rows: the keys that were looked at, ascending, [m]; all, if they are not too many.
        unit: these keys at norm 1, [m, d].
        half: W above, learned on every other of them: to try rules on the others.
        whole: W above; None if too few keys were asked for.
    """

    rows: NDArray[np.int64]
    unit: Floats
    half: Floats | None
    whole: Floats | None

    @classmethod
    def of(cls, task: Task, memory: int | None = None) -> "Demand":
        """Learn it of the training queries of a task, from no more keys than `memory` bytes allow."""
        rows, most = np.arange(task.n), SAMPLE
        if memory is not None:
            most = min(SAMPLE, max(FEWEST_WANTED, memory // (ROW_COPIES * 4 * task.d)))
        if task.n > most:
            rows = np.sort(np.random.default_rng(0).choice(task.n, most, replace=False))
        unit = unit_rows(task.key_vectors.take(rows))[0]
        mean = _means_of_queries(task, np.asarray(task.train.top_ids)[:, :TOP], rows)
        wanted = np.flatnonzero(mean.any(axis=1))
        if len(wanted) < FEWEST_WANTED:
            return cls(rows, unit, None, None)
        even = wanted[wanted % 2 == 0]
        return cls(rows, unit, _map(unit[even], mean[even]), _map(unit[wanted], mean[wanted]))


def learn_placement(task: Task, demand: Demand, router: Router, centroids: Floats) -> Placement:
    """The placement that serves the val queries of a task best, tried on keys that the map has not seen."""
    places = np.full(task.n, -1)
    places[demand.rows] = np.arange(len(demand.rows))
    val = places[np.asarray(task.val.top_ids)[:, :TOP]]
    query, rank = np.nonzero(val % 2 == 1)  # of -1, too
    query, key = query[known := val[query, rank] >= 0], val[query, rank][known]
    if demand.half is None or len(centroids) < 2 or not len(key):
        return Placement("key", demand.whole)
    ranks = _ranks(router.scores(unit_rows(np.asarray(task.val.queries))[0]))
    keys, which = np.unique(key, return_inverse=True)
    rules: tuple[Rule, ...] = ("key", "log", "router")
    served = []
    for rule in rules:
        cells = Placement(rule, demand.half).first(demand.unit[keys], centroids, router)
        # The logarithm, because a cell that is far down costs more probes, but not in proportion.
        served.append(float(np.log2(1 + ranks[query, cells[which]]).mean()))
    return Placement(rules[int(np.argmin(served))], demand.whole)


def _means_of_queries(task: Task, top: NDArray[Any], rows: NDArray[np.int64]) -> Floats:
    """m_y of these keys, [m, d]."""
    wanted = wanted_by(task.train.vectors, top, task.n)
    out = np.empty((len(rows), task.d), np.float32)
    step = 1 << 13
    for low in range(0, task.n, step):
        within = (rows >= low) & (rows < low + step)
        if within.any():
            out[within] = wanted(low, min(low + step, task.n))[rows[within] - low]
    return out


def _map(unit: Floats, mean: Floats) -> Floats:
    square = unit.T.astype(np.float64) @ unit + RIDGE * np.eye(unit.shape[1])
    return np.ascontiguousarray(np.linalg.solve(square, unit.T @ mean), np.float32)


def _ranks(scores: Floats) -> NDArray[np.int64]:
    """The place of each cell in the order of a query, [m, c]."""
    order = np.argsort(-scores, axis=1, kind="stable")
    ranks = np.empty_like(order)
    np.put_along_axis(ranks, order, np.arange(scores.shape[1])[None], axis=1)
    return ranks


@dataclass(frozen=True)
class Placer:
    """Chooses the cells of new keys.

    Args:
        centroids: of the cells, [c, d].
        scales: how long the mean point of each cell is in the direction of its centroid, [c].
        means: of the cells, in that direction, [c, d]. Their products with each other are kept where cells
            are few; of many they are made as they are asked for: 640 MB for ten million keys.
        bound: how good a second cell must be: as many keys get one as there were; None for none at all.
        longest: norm of the longest of some keys.
    """

    placement: Placement
    router: Router
    centroids: Floats
    scales: Floats
    means: Floats
    bound: float | None
    longest: float = np.inf

    @classmethod
    def of(cls, placement: Placement, store: OwnCells, router: Router) -> "Placer":
        """What is needed of the keys of a store; the store itself is not kept."""
        centroids, second = store.centroids, store.second
        longest = float(row_norms(store.keys_at(_sample(store.n, LONG_SAMPLE))).max(initial=0.0)) or np.inf
        if second is None or len(centroids) < 2:
            return cls(placement, router, centroids, centroids[:0, 0], centroids[:0], None, longest)
        rows = _sample(store.n, SAMPLE)
        placer = cls(placement, router, centroids, *_means(placement, store, rows), 0.0, longest)
        some = rows[:: max(1, len(rows) // 4096)]
        points, values = placement.points(store.keys_at(some)), []
        step = max(1, BLOCK_FLOATS // len(centroids))
        for low in range(0, len(some), step):
            block, own = points[low : low + step], store.assignment[some[low : low + step]]
            values.append(placer._second(block @ centroids.T, block, own)[1])
        bound = float(np.quantile(np.concatenate(values), float((second >= 0).mean())))
        return replace(placer, bound=bound)

    def __call__(self, keys: Floats) -> tuple[Cells32, Cells32 | None]:
        """The first cell of each key [m], and the second, -1 for none; None if no key has one."""
        if long := int(np.count_nonzero(row_norms(keys) > LONG * self.longest)):
            warnings.warn(
                f"{long:,} added keys are more than {LONG:g} times as long as those that cells were made of: "
                "queries everywhere may want them, and some will not find them; audit says what the recall "
                "is, and a new fit puts them where the log wants them",
                stacklevel=5,
            )
        if self.bound is None:
            return self.placement.first(keys, self.centroids, self.router), None
        first, second = np.empty(len(keys), np.int32), np.empty(len(keys), np.int32)
        step = max(1, BLOCK_FLOATS // len(self.centroids))
        for low in range(0, len(keys), step):
            rows = slice(low, low + step)
            points = self.placement.points(keys[rows])
            products = points @ self.centroids.T
            if self.placement.rule == "log":  # the same products say both
                first[rows] = products.argmax(axis=1)
            else:
                own = unit_rows(keys[rows])[0] if self.placement.rule == "key" else points
                first[rows] = self.placement.best(own, self.centroids, self.router)
            second[rows], value = self._second(products, points, first[rows])
            second[rows][value > self.bound] = -1
        return first, second

    @cached_property
    def _gram(self) -> Floats:
        """<c_i, c_j> of the means, [c, c]."""
        gram: Floats = self.means @ self.means.T
        return gram

    @cached_property
    def _lengths(self) -> Floats:
        """|c_j|^2 of the means, [c]."""
        lengths: Floats = np.einsum("ij,ij->i", self.means, self.means)
        return lengths

    def _second(self, products: Floats, points: Floats, own: Cells32) -> tuple[Cells32, Floats]:
        """The best second cell of points z [m, d], and how good it is: less is better.

        The rule of `amips.search.spill` with c_j = s_j centroid_j for the mean of a cell, which lies in that
        direction: then <z, c_j>, from `products` with the centroids, is all that is needed of z. They are
        overwritten.
        """
        means, lengths = self.means, self._lengths
        rows, squares = np.arange(len(points)), np.einsum("ij,ij->i", points, points)
        products *= self.scales
        to_own = products[rows, own].copy()
        length = np.maximum(squares - 2 * to_own + lengths[own], 1e-12)
        # <r, r'> = |z|^2 - <z, c_own> - <z, c_j> + <c_own, c_j>, in passes over one table.
        if len(means) <= GRAM_CELLS and len(points) >= GRAM_KEYS:
            loss = self._gram[own]
        else:
            loss = means[own] @ means.T
        loss -= products
        loss += (squares - to_own)[:, None]
        np.square(loss, out=loss)
        loss *= (np.float32(PARALLEL) / length)[:, None]
        products *= -2
        products += lengths
        loss += products
        loss[rows, own] = np.inf
        second = loss.argmin(axis=1)
        return second.astype(np.int32), (loss[rows, second] + squares) / length


def _sample(n: int, most: int) -> NDArray[np.int64]:
    """Numbers of keys, ascending: all, or so many of them."""
    if n <= most:
        return np.arange(n)
    return np.sort(np.random.default_rng(0).choice(n, most, replace=False))


def _means(placement: Placement, store: OwnCells, rows: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """`scales` and `means` of a `Placer`, from these keys."""
    cells, centroids = store.assignment[rows], store.centroids
    sums, step = np.zeros(len(centroids)), 1 << 14
    for low in range(0, len(cells), step):
        points = placement.points(store.keys_at(rows[low : low + step]))
        along = np.einsum("ij,ij->i", points, centroids[cells[low : low + step]])
        sums += np.bincount(cells[low : low + step], along, len(centroids))
    counts = np.bincount(cells, minlength=len(centroids))
    squares = np.maximum(np.einsum("ij,ij->i", centroids, centroids), 1e-30)
    scales = np.where(counts > 0, sums / np.maximum(counts, 1) / squares, 1).astype(np.float32)
    return scales, centroids * scales[:, None]
