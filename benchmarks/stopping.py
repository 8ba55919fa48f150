"""Early stops, simulated: queries walk through their cells in the router's order and know what they found.

A cell can add to the top k only if its support value sigma_j(x), the largest <x, y> in it, exceeds the k-th
best score so far. sigma_j(x) is estimated before the cell is scanned, with residuals of standard deviation
s, and cells with estimate + z s below the k-th best score so far are not worth their scan. Scores are exact
and keys float32, so that a top key is found if and only if its cell is scanned: no index is needed.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from amips.cells import Cells
from amips.routers import RoutingEstimate, holds_mass, masses
from amips.vectors import Floats

Ints = NDArray[np.int64]
BLOCK = 256  # queries whose scores of all keys are in memory
# Of the cells, the first in a query's order: where it is decided, and what estimates are fitted to.
NEAR = 1 / 8
LOOSER = (0.25, 0.5, 0.75)  # by how much of the loss the mass bound alone loses less than both together
STEPS = 12  # of the bisection for z
Z_RANGE = (-4.0, 8.0)


def best_in_cells(keys: Floats, x: Floats, cells: Cells, k: int) -> Floats:
    """The k best scores of each query in each cell, best first, [m, c, k]; -inf where it has fewer keys."""
    order = np.argsort(cells.assignment, kind="stable")
    ends = np.cumsum(cells.sizes)
    by_cell = keys[order]
    best = np.full((len(x), cells.count, k), -np.inf, np.float32)
    for low in range(0, len(x), BLOCK):
        rows = slice(low, low + BLOCK)
        scores = x[rows] @ by_cell.T
        for cell, (size, end) in enumerate(zip(cells.sizes, ends, strict=True)):
            inside, count = scores[:, end - size : end], min(k, int(size))
            if count:
                some = np.partition(inside, size - count, axis=1)[:, size - count :]
                best[rows, cell, :count] = -np.sort(-some, axis=1)
    return best


def add(top: Floats, rows: Ints, more: Floats) -> None:
    """Put scores of a cell [len(rows), k], best first, among the k best so far [m, k], worst first."""
    better = more[:, 0] > top[rows, 0]
    rows, more = rows[better], more[better]
    top[rows] = np.sort(np.concatenate([top[rows], more], axis=1), axis=1)[:, -top.shape[1] :]


@dataclass(frozen=True)
class Estimate:
    """What sigma of each cell is taken for, [m, c] in the order of each query, and how well that is known."""

    values: Floats
    s: Floats  # [m]
    products: bool  # whether the products with the centroids are needed, which cost FLOPs


class Walk:
    """Some queries, and what they would find in each cell; all in the router's order of each query."""

    def __init__(
        self, keys: Floats, x: Floats, cells: Cells, routing: RoutingEstimate, router_flops: int
    ) -> None:
        self.routing, self.d, self.n, self.router_flops = routing, int(x.shape[1]), len(keys), router_flops
        order = np.argsort(-routing.scores, axis=1, kind="stable")
        place = np.argsort(order, axis=1)
        # Of the top keys' cells.
        self.places = np.take_along_axis(place, routing.top_cells.astype(np.int64), axis=1)
        self.sizes = cells.sizes[order]
        self.masses = np.take_along_axis(masses(routing.scores, routing.temperature), order, axis=1)
        self.logits = np.take_along_axis(routing.scores, order, axis=1) / np.float32(routing.temperature)
        # The log of the softmax's denominator, which is the best cell's logit less the log of its mass.
        whole = self.logits[:, :1] - np.log(self.masses[:, :1])
        self.whole = np.broadcast_to(whole, self.logits.shape)
        self.products = np.take_along_axis(x @ cells.centroids.T, order, axis=1)
        best = best_in_cells(keys, x, cells, routing.top_cells.shape[1])
        self.best = np.take_along_axis(best, order[:, :, None], axis=1)

    def cost(self, scanned: Ints, products: float = 0.0) -> float:
        """FLOPs as a share of a full scan; `products` with centroids are as dear as keys."""
        keys = float(scanned.mean()) + products
        return (self.router_flops / (2 * self.d) + keys) / self.n

    def estimate(self, products: bool) -> Estimate:
        """Least squares on one half of the queries, used on the other, both ways."""
        ones = np.ones_like(self.logits)
        features = np.stack(
            [ones, self.logits, self.whole, *([self.products] if products else [])], axis=2
        ).astype(np.float64)
        sigma, m = self.best[:, :, 0], len(self.best)
        near = max(1, math.ceil(NEAR * sigma.shape[1]))
        values, s = np.empty_like(sigma), np.empty(m, np.float32)
        for fitted in (0, 1):
            known = np.isfinite(sigma[fitted::2, :near])
            from_these, to_these = features[fitted::2, :near][known], sigma[fitted::2, :near][known]
            weights = np.linalg.lstsq(from_these, to_these, rcond=None)[0]
            values[1 - fitted :: 2] = features[1 - fitted :: 2] @ weights
            s[1 - fitted :: 2] = (from_these @ weights - to_these).std()
        return Estimate(values, s, products)

    def kth_best(self) -> Floats:
        """The k-th best score after the first cell, the first two, ..., if none is left out. [m, c]."""
        m, c, k = self.best.shape
        top = np.full((m, k), -np.inf, np.float32)
        after = np.empty((m, c), np.float32)
        for place in range(c):
            add(top, np.arange(m), self.best[:, place])
            after[:, place] = top[:, 0]
        return after

    def stopped(self, estimate: Estimate, recalls: tuple[float, ...]) -> list[float]:
        """Stop when estimate + z s is below the k-th best score for all cells that remain.

        Query q stops at the first place whose margin, in units of s, exceeds z. So a top key is found if the
        largest margin up to its place does not, and the z of a recall is a quantile.
        """
        rest = np.maximum.accumulate(estimate.values[:, ::-1], axis=1)[:, ::-1]
        margin = np.full_like(rest, -np.inf)  # the first cell is scanned in any case
        margin[:, 1:] = (self.kth_best()[:, :-1] - rest[:, 1:]) / estimate.s[:, None]
        margin = np.maximum.accumulate(margin, axis=1)
        needed = np.sort(np.take_along_axis(margin, self.places, axis=1).ravel())
        costs = []
        for recall in recalls:
            z = needed[max(0, math.ceil(recall * len(needed) - 1e-9) - 1)]
            scanned = (self.sizes * (margin <= z)).sum(axis=1)
            costs.append(self.cost(scanned, margin.shape[1] if estimate.products else 0))
        return costs

    def filtered(self, estimate: Estimate, bound: float, z: float) -> tuple[float, float]:
        """Scan cells of at least this mass with estimate + z s above the k-th best score: recall, cost."""
        m, _, k = self.best.shape
        top = np.full((m, k), -np.inf, np.float32)
        scanned = np.zeros(self.best.shape[:2], bool)
        hopes = estimate.values + np.float32(z) * estimate.s[:, None]
        asked = holds_mass(self.masses, self.logits, bound).sum(axis=1)  # masses fall along the order
        for place in range(int(asked.max())):
            rows = np.flatnonzero(asked > place)
            if place:
                rows = rows[hopes[rows, place] >= top[rows, 0]]
            scanned[rows, place] = True
            add(top, rows, self.best[rows, place])
        recall = float(np.take_along_axis(scanned, self.places, axis=1).mean())
        products = float(asked.mean()) if estimate.products else 0.0
        return recall, self.cost((self.sizes * scanned).sum(axis=1), products)

    def both(self, estimate: Estimate, recalls: tuple[float, ...]) -> list[float]:
        """The cheapest of a few looser bounds on the mass, each with the z at which a recall is reached."""
        costs = []
        for recall in recalls:
            by_bound = []
            for looser in LOOSER:
                bound = self.routing.min_mass_for(recall + looser * (1 - recall))
                low, high = Z_RANGE
                for _ in range(STEPS):
                    z = (low + high) / 2
                    low, high = (low, z) if self.filtered(estimate, bound, z)[0] >= recall else (z, high)
                z = high if high < Z_RANGE[1] else math.inf  # no z tried was enough
                by_bound.append(self.filtered(estimate, bound, z)[1])
            costs.append(min(by_bound))
        return costs

    def at_mass(self, recalls: tuple[float, ...]) -> list[float]:
        """What the recipe does: no more than the bound on the mass."""
        bounds = [self.routing.min_mass_for(recall) for recall in recalls]
        return [self.cost(self.routing.at_mass(bound).scanned) for bound in bounds]

    def oracle(self) -> float:
        """Stop as soon as all of the top k are found."""
        last = self.places.max(axis=1)
        return self.cost((self.sizes * (np.arange(self.sizes.shape[1]) <= last[:, None])).sum(axis=1))
