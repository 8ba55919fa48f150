"""New keys into a graph, in numpy: what `native/insert.cpp` does, for where that was not compiled.

A walk finds keys that are near to the new one. Half of its neighbours are the nearest of those, half are
what most of the nearest have as neighbours themselves (these carry the edges of the log); both by the
relative-neighbour rule of `amips.graph.prune`. Each of them gets an edge back, in a free place or in the
place of a neighbour that is nearer to the new key, which the new key then has as a neighbour: whatever could
be reached still can.
"""

from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.index.graph_walk import NumpyWalker
from amips.vectors import Floats

Ids = NDArray[np.int64]


class NumpyInsert:
    """Puts keys into the arrays of a `amips.index.graph_growth.Growing`, one after the other.

    Args:
        walker: of these arrays.
        width: keys that a walk finds.
        near: of those, the nearest, that neighbours are chosen from.
        links: keys that get an edge to a new one, if they have a place for it.
        weights: of the nearest, whose own neighbours are candidates, too.
    """

    def __init__(
        self, walker: NumpyWalker, growing: Any, width: int, near: int, links: int, weights: Floats
    ) -> None:
        self.walker, self.growing = walker, growing
        self.width, self.near, self.links, self.weights = width, near, links, weights
        self.row: list[int] = []  # neighbours of the new key

    def insert(self, first: int, asked: Floats) -> None:
        """Keys from `first` on, [m, d or r]: what each is looked for with."""
        for place, x in enumerate(asked):
            self._add(first + place, x)

    def _cosines(self, key: int, others: "Ids | list[int]") -> Floats:
        rows = self.growing.directions
        own, them = rows[key], rows[others]
        scales = np.ascontiguousarray(them[:, -32:-28]).view(np.float32)[:, 0]
        whole = them[:, :-32].astype(np.int32) @ own[:-32].astype(np.int32)
        result: Floats = whole.astype(np.float32) * (own[-32:-28].copy().view(np.float32)[0] * scales)
        return result

    def _add(self, key: int, x: Floats) -> None:
        lists, degree = self.growing.neighbours, self.growing.degree
        candidates = self.walker.nearest(x, self.width, self._known(key))
        near = candidates[np.lexsort((candidates, -self._cosines(key, candidates)))]
        self.row = []
        for other in near[: self.near].tolist():
            if len(self.row) < (degree + 1) // 2:
                self._keep(key, other)
        votes: dict[int, np.float32] = defaultdict(lambda: np.float32(0))
        for weight, voter in zip(self.weights, near, strict=False):
            for other in lists[voter, :degree].tolist():
                if other >= 0:
                    votes[other] += weight
        for other in sorted(votes, key=lambda one: (-votes[one], one))[: self.near]:
            if len(self.row) < degree:
                self._keep(key, other)
        kept = set(self.row)
        linked = sum(self._link(key, other, forced=False) for other in [*self.row])
        for other in near.tolist():
            if linked < self.links and other not in kept:
                linked += self._link(key, other, forced=False)
        if not linked and len(near):
            self._link(key, int(near[0]), forced=True)
        self.row += [other for other in near.tolist() if other not in self.row][: degree - len(self.row)]
        lists[key, : len(self.row)] = self.row

    def _known(self, key: int) -> NDArray[np.int32]:
        """The neighbours of the keys before this one."""
        lists: NDArray[np.int32] = self.growing.neighbours[:key, : self.growing.degree]
        return lists

    def _keep(self, key: int, other: int) -> None:
        """Take a candidate as a neighbour unless one that was taken is at least as near to it."""
        if other == key or other in self.row:
            return
        if self.row and (self._cosines(other, self.row) >= self._cosines(key, [other])[0]).any():
            return
        self.row.append(other)

    def _link(self, key: int, other: int, forced: bool) -> bool:
        """Make the key a neighbour of another, if there is a place or it must be; whether it is one."""
        degree = self.growing.degree
        row = self.growing.neighbours[other, :degree]
        if row[-1] < 0:
            row[np.argmax(row < 0)] = key
            return True
        nearer = self._cosines(key, row) - self._cosines(other, row)
        full = len(self.row) == degree
        mine = np.isin(row, self.row)
        able = np.ones(degree, bool) if forced else (nearer >= 0) & (mine | (not full))
        if not able.any():
            return False
        place = int(np.argmax(np.where(able, nearer, -np.inf)))
        if not mine[place]:
            if full:
                self.row.pop()
            self.row.append(int(row[place]))
        row[place] = key
        return True
