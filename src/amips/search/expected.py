"""What a router finds and what it costs, from its scores of held-out queries alone: no index is needed.

A scan of a cell finds what is in it. So a top key is found if and only if its cell is probed (one of them, if
it is in two), and keys that are scored with x itself need no search to know the recall.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.route import Router, fit_temperature
from amips.vectors import Floats

BLOCK_FLOATS = 1 << 24


@dataclass(frozen=True)
class Probed:
    """What was probed for each query, and which of its top keys were there."""

    found: NDArray[np.bool_]  # [m, k]
    probed: NDArray[np.int64]  # cells, [m]
    scanned: NDArray[np.int64]  # keys, [m]


@dataclass(frozen=True)
class Routed:
    """Scores [m, c] of the cells of some queries, and the cells [m, k] that hold their top keys."""

    scores: Floats
    wanted: NDArray[np.integer[Any]]
    sizes: NDArray[np.int64]  # keys in each cell
    given: float = 0.0  # the temperature, if it is known; 0: fitted to these queries
    also: NDArray[np.integer[Any]] | None = None  # second cells [m, k] of the top keys, -1 for none

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
    ) -> "Routed":
        """Of queries [m, d] with these top keys [m, k], where `cells` [n] holds the cell of each key."""
        step = max(1, BLOCK_FLOATS // router.floats)
        scores = [router.scores(x[low : low + step]) for low in range(0, len(x), step)]
        also = None if second is None else second[top_ids]
        return cls(np.concatenate(scores), cells[top_ids], sizes, temperature, also)

    @cached_property
    def temperature(self) -> float:
        """At which softmax(scores / t) says what share of the top keys has each cell as its first."""
        return self.given or fit_temperature(self.scores, self.wanted)

    @cached_property
    def _shares(self) -> tuple[Floats, NDArray[np.bool_]]:
        """The expected share of each cell, and which cell is a query's best, probed in any case."""
        apart = self.scores - self.scores.max(axis=1, keepdims=True)
        relative = np.exp(apart / np.float32(self.temperature))
        best = np.arange(self.scores.shape[1]) == self.scores.argmax(axis=1)[:, None]
        return relative / relative.sum(axis=1, keepdims=True), best

    @cached_property
    def _ordered(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The place of each top key's cell in its query's order, and the keys scanned up to each place."""
        order = np.argsort(-self.scores, axis=1, kind="stable")
        place = np.empty_like(order)
        np.put_along_axis(place, order, np.broadcast_to(np.arange(order.shape[1]), order.shape), axis=1)
        return self._either(place, np.minimum, order.shape[1]), np.cumsum(self.sizes[order], axis=1)

    def _either(self, values: NDArray[Any], better: Callable[..., NDArray[Any]], none: Any) -> NDArray[Any]:
        """Of values of the cells [m, c] those of the top keys' cells, [m, k]; of two cells the better."""
        first = np.take_along_axis(values, self.wanted, axis=1)
        if self.also is None:
            return first
        other = np.take_along_axis(values, np.maximum(self.also, 0), axis=1)
        return better(first, np.where(self.also >= 0, other, none))

    def by_probes(self, probes: int) -> Probed:
        """The same number of cells for every query."""
        places, scanned = self._ordered
        return Probed(places < probes, np.full(len(places), probes), scanned[:, probes - 1])

    def taken(self, share: float) -> NDArray[np.bool_]:
        """Which cells are expected to hold at least this share of the query's top keys, [m, c]."""
        shares, best = self._shares
        return best | (shares >= share)

    def by_share(self, share: float) -> Probed:
        """Those cells for each query."""
        taken = self.taken(share)
        scanned = (taken @ self.sizes.astype(np.float64)).astype(np.int64)
        return Probed(self._either(taken, np.logical_or, False), taken.sum(axis=1), scanned)

    def share_for(self, recall: float) -> float:
        """The largest bound on the share that finds so many of the top keys: a quantile of their cells'."""
        shares, best = self._shares
        anyway = self._either(best, np.logical_or, False)
        each = np.where(anyway, np.inf, self._either(shares, np.maximum, 0)).ravel()
        lost = min(len(each) - 1, int((1 - recall) * len(each) + 1e-9))
        return min(1.0, float(np.partition(each, lost)[lost]))

    def probes_for(self, recall: float) -> int:
        """The fewest probes, the same for every query, that find so many of the top keys."""
        places = np.sort(self._ordered[0].ravel())
        return int(places[max(0, int(np.ceil(recall * len(places) - 1e-9)) - 1)]) + 1
