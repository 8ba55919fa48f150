"""Cells to shards: a balanced partition of the cells in which the top keys of a query lie in few shards.

With M_qs the share of query q's top 10 keys that lie in shard s, the expected number of shards that ten keys
drawn from that distribution lie in is

    sum_s 1 - (1 - M_qs)^10,

and its mean over the training queries is made small, while no shard holds more than (1 + slack) n / S keys.
Shards begin as groups of neighbouring cells (spherical k-means of the centroids, filled up to the bound).
Then cells move one at a time to the shard where they cost least, or change places with a cell of a shard
that is full, as long as that helps.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.blas import faiss
from amips.metrics import TOP
from amips.progress import Bar
from amips.vectors import Floats

Ints = NDArray[np.int64]

ROUNDS = 12  # over all cells, at most
SETTLED = 0.002  # of the cells: where fewer moved in a round, it ends
PARTNERS = 24  # cells of a full shard that are tried for an exchange
LEAST_GAIN = 1e-4  # in shards, over all queries: what is less may be rounding


class Wants:
    """What queries want of each cell: for each cell the queries, and the share of their top keys in it.

    Args:
        cells: of the top keys of m queries, [m, k].
        count: of cells.
    """

    def __init__(self, cells: NDArray[np.integer[Any]], count: int) -> None:
        self.m, k = cells.shape
        self.count = count
        rows = np.repeat(np.arange(self.m, dtype=np.int64), k)
        codes, times = np.unique(cells.ravel().astype(np.int64) * self.m + rows, return_counts=True)
        self.queries = codes % self.m
        self.shares = (times / k).astype(np.float32)
        self.bounds = np.searchsorted(codes // self.m, np.arange(count + 1))

    def of(self, cell: int) -> tuple[Ints, Floats]:
        """The queries that want keys of a cell, and which share of their top keys it holds."""
        part = slice(self.bounds[cell], self.bounds[cell + 1])
        return self.queries[part], self.shares[part]

    def by_shard(self, group: Ints, shards: int) -> Floats:
        """M above, [m, S]."""
        table = np.zeros((self.m, shards), np.float32)
        cells = np.repeat(np.arange(self.count), np.diff(self.bounds))
        np.add.at(table, (self.queries, group[cells]), self.shares)
        return table


def expected_shards(table: Floats) -> Floats:
    """1 - (1 - M)^10 of shares of the top keys: how likely a shard holds at least one of ten."""
    return np.asarray(1 - np.clip(1 - table, 0, 1) ** TOP, np.float32)


def group_cells(
    wants: Wants,
    centroids: Floats,
    sizes: Ints,
    shards: int,
    *,
    slack: float,
    seed: int = 0,
    progress: bool = False,
) -> Ints:
    """The shard of each cell, [c]; no shard is empty, and each holds (1 + slack) n / S keys at most.

    Where single cells are too large for that bound, the largest shard may exceed it by one cell.

    Args:
        centroids, sizes: of the cells, [c, d] and [c].
        slack: how uneven shards may be.
    """
    most = (1 + slack) * float(sizes.sum()) / shards
    group = _neighbours(centroids, sizes, shards, most, seed)
    moves = _Moves(wants, group, sizes, shards, most)
    rng = np.random.default_rng(seed)
    with Bar(ROUNDS * wants.count, "grouping", "cells", progress) as shown:
        for _ in range(ROUNDS):
            moved = 0
            for cell in rng.permutation(wants.count).tolist():
                moved += moves.improve(cell, rng)
                shown.update()
            if moved <= SETTLED * wants.count:
                break
    return moves.group


class _Moves:
    """A grouping that cells of it can move in, with what that costs."""

    def __init__(self, wants: Wants, group: Ints, sizes: Ints, shards: int, most: float) -> None:
        self.wants, self.group, self.sizes, self.most = wants, group, sizes.astype(np.float64), most
        self.load = np.bincount(group, weights=self.sizes, minlength=shards)
        self.members = np.bincount(group, minlength=shards)
        self.table = wants.by_shard(group, shards)

    def improve(self, cell: int, rng: "np.random.Generator") -> bool:
        """Move a cell to where it costs least, alone or in exchange for another; whether it moved."""
        here, size = int(self.group[cell]), self.sizes[cell]
        if self.members[here] == 1:
            return False  # a shard is not emptied
        costs = self._costs(cell, here)
        costs -= costs[here]
        fits = self.load + size <= self.most
        fits[here] = False
        if fits.any():
            there = int(np.flatnonzero(fits)[costs[fits].argmin()])
            # A shard that is too large gives cells away at any cost.
            if costs[there] < -LEAST_GAIN or self.load[here] > self.most:
                self._move(cell, there)
                return True
        there = int(costs.argmin())
        return bool(costs[there] < -LEAST_GAIN) and self._exchange(
            cell, here, there, float(costs[there]), rng
        )

    def _exchange(self, cell: int, here: int, there: int, cost: float, rng: "np.random.Generator") -> bool:
        """Give the first of a few cells of a full shard for this one, if both together gain."""
        partners = rng.permutation(np.flatnonzero(self.group == there))[:PARTNERS]
        for other in partners.tolist():
            larger = self.sizes[cell] - self.sizes[other]
            if self.load[there] + larger > self.most or self.load[here] - larger > self.most:
                continue
            back = self._costs(other, there)
            if cost + float(back[here] - back[there]) < -LEAST_GAIN:
                self._move(cell, there)
                self._move(other, here)
                return True
        return False

    def _costs(self, cell: int, here: int) -> NDArray[np.float64]:
        """The expected shards that a cell adds in each shard, over all queries, [S]."""
        queries, shares = self.wants.of(cell)
        without = self.table[queries]
        without[:, here] -= shares
        added = expected_shards(without + shares[:, None]) - expected_shards(without)
        return np.asarray(added.sum(axis=0), np.float64)

    def _move(self, cell: int, there: int) -> None:
        here = self.group[cell]
        queries, shares = self.wants.of(cell)
        self.table[queries, here] -= shares
        self.table[queries, there] += shares
        for shard, sign in ((here, -1), (there, 1)):
            self.load[shard] += sign * self.sizes[cell]
            self.members[shard] += sign
        self.group[cell] = there


def _neighbours(centroids: Floats, sizes: Ints, shards: int, most: float, seed: int) -> Ints:
    """Cells that lie together in a shard each, up to a number of keys: where shards begin."""
    means = faiss.Kmeans(
        centroids.shape[1],
        shards,
        niter=30,
        seed=seed + 1,
        spherical=True,
        nredo=3,
        min_points_per_centroid=1,
    )
    means.train(np.ascontiguousarray(centroids, np.float32), weights=sizes.astype(np.float32))
    nearness = centroids @ means.centroids.T
    two = -np.partition(-nearness, 1, axis=1)[:, :2]
    group, load = np.full(len(sizes), -1, np.int64), np.zeros(shards)
    # Those first for which the second best shard is much worse.
    for cell in np.argsort(two[:, 1] - two[:, 0], kind="stable").tolist():
        fits = np.flatnonzero(load + sizes[cell] <= most)
        there = int(fits[nearness[cell, fits].argmax()]) if len(fits) else int(load.argmin())
        group[cell] = there
        load[there] += sizes[cell]
    for empty in np.flatnonzero(np.bincount(group, minlength=shards) == 0).tolist():
        rich = np.flatnonzero(np.bincount(group, minlength=shards)[group] > 1)
        group[rich[sizes[rich].argmin()]] = empty
    return group
