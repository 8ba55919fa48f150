"""What a router finds and what it costs, from its scores of held-out queries alone: no index is needed.

A scan of a cell finds what is in it. So a top key is found if and only if its cell is probed (one of them, if
it is in two), and for keys that are scored with x itself the recall needs no search to be known.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.routers.routers import Router
from amips.routers.stopping import fit_temperature, holds_mass, keys_in, least_keys, masses
from amips.vectors import Floats

BLOCK_FLOATS = 1 << 22
ROWS = 64  # queries whose cells are sorted at a time


@dataclass(frozen=True)
class Probing:
    """What was probed for each of m queries, and which of their top keys were there."""

    hits: NDArray[np.bool_]  # [m, k]
    probes: NDArray[np.int64]  # cells, [m]
    scanned: NDArray[np.int64]  # keys, [m]

    @property
    def recall(self) -> float:
        """The share of all top keys that were found."""
        return float(self.hits.mean())


@dataclass(frozen=True)
class RoutingEstimate:
    """Scores [m, c] of the cells of some queries, and the cells [m, k] that hold their top keys.

    Args:
        sizes: keys in each cell, [c].
        known_temperature: of the stopping rule; 0 fits it to these queries.
        second: second cells [m, k] of the top keys, -1 for none.
    """

    scores: Floats
    top_cells: NDArray[np.integer[Any]]
    sizes: NDArray[np.int64]
    known_temperature: float = 0.0
    second: NDArray[np.integer[Any]] | None = None

    @classmethod
    def by(
        cls,
        router: Router,
        x: Floats,
        top_ids: NDArray[np.integer[Any]],
        cells: NDArray[np.integer[Any]],
        sizes: NDArray[np.int64],
        *,
        temperature: float = 0.0,
        second: NDArray[np.int32] | None = None,
    ) -> "RoutingEstimate":
        """Of queries [m, d] with these top keys [m, k], where `cells` [n] holds the cell of each key."""
        step = max(1, BLOCK_FLOATS // router.floats)
        scores = [router.scores(x[low : low + step]) for low in range(0, len(x), step)]
        also = None if second is None else second[top_ids]
        return cls(np.concatenate(scores), cells[top_ids], sizes, temperature, also)

    @cached_property
    def temperature(self) -> float:
        """At which softmax(scores / t) says what share of the top keys has each cell as its first."""
        return self.known_temperature or fit_temperature(self.scores, self.top_cells)

    @cached_property
    def _masses(self) -> Floats:
        return masses(self.scores, self.temperature)

    @cached_property
    def _ordered(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """The place of each top key's cell in its query's order, and the keys scanned up to each place."""
        m, c = self.scores.shape
        places, scanned = np.empty(self.top_cells.shape, np.int64), np.empty((m, c), np.int32)
        for low in range(0, m, ROWS):  # a row of whole numbers takes more than one of scores
            rows = slice(low, low + ROWS)
            order = np.argsort(-self.scores[rows], axis=1, kind="stable")
            place = np.empty_like(order)
            np.put_along_axis(place, order, np.broadcast_to(np.arange(c), order.shape), axis=1)
            places[rows] = self._either(place, np.minimum, c, rows)
            scanned[rows] = np.cumsum(self.sizes[order], axis=1)
        return places, scanned

    def _either(
        self,
        values: NDArray[Any],
        better: Callable[..., NDArray[Any]],
        none: Any,
        rows: slice = slice(None),
    ) -> NDArray[Any]:
        """Of values of the cells [m, c] those of the top keys' cells, [m, k]; of two cells the better."""
        first = np.take_along_axis(values, self.top_cells[rows], axis=1)
        if self.second is None:
            return first
        second = self.second[rows]
        other = np.take_along_axis(values, np.maximum(second, 0), axis=1)
        return better(first, np.where(second >= 0, other, none))

    def at_probes(self, probes: int) -> Probing:
        """With the same number of cells for every query."""
        places, scanned = self._ordered
        return Probing(places < probes, np.full(len(places), probes), scanned[:, probes - 1].astype(np.int64))

    def probed(self, min_mass: float) -> NDArray[np.bool_]:
        """Which cells are probed with a bound on the mass, [m, c]."""
        keys = least_keys(self.top_cells.shape[1], self.second is not None)
        return holds_mass(self._masses, self.scores, min_mass, self.sizes, keys)

    def at_mass(self, min_mass: float) -> Probing:
        """With the cells of each query that hold at least this mass."""
        probed = self.probed(min_mass)
        scanned = keys_in(probed, self.sizes)
        return Probing(self._either(probed, np.logical_or, False), probed.sum(axis=1), scanned)

    def min_mass_for(self, recall: float) -> float:
        """The largest bound on the mass that finds so many of the top keys: a quantile of their cells'."""
        best = np.arange(self.scores.shape[1]) == self.scores.argmax(axis=1)[:, None]
        anyway = self._either(best, np.logical_or, False)
        each = np.where(anyway, np.inf, self._either(self._masses, np.maximum, 0)).ravel()
        lost = min(len(each) - 1, int((1 - recall) * len(each) + 1e-9))
        return min(1.0, float(np.partition(each, lost)[lost]))

    def probes_for(self, recall: float) -> int:
        """The fewest probes, the same for every query, that find so many of the top keys."""
        places = np.sort(self._ordered[0].ravel())
        return int(places[max(0, int(np.ceil(recall * len(places) - 1e-9)) - 1)]) + 1
