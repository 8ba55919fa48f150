"""How deep a search goes behind a filter: by how many of the keys near a query match.

The ten best keys that match are the ten best of all, if all match; of a share s of them they lie as deep as
the 10 / s best of all, in more cells, and a bound on the mass that found nine of ten finds fewer. How much
lower it must be is measured when the index is made: behind masks drawn at random, of several selectivities,
on held-out queries (`measure_depths`).

Filters are not drawn at random: what a query asks for may match often where it looks, or hardly ever. So the
selectivity that counts is a query's own, z: the share of keys that match in each cell, weighted by the mass
of the cells. Where that is lower than the share s of all keys that match, the filter leads away from where
the query looks, to cells whose order the router knows less well: it is then taken for lower still, z * z / s.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.arguments import check_number
from amips.metrics import TOP
from amips.routers import RoutingEstimate, masses
from amips.search.points import assured_recalls
from amips.task import Split
from amips.vectors import Floats

SELECTIVITIES = (1.0, 0.5, 0.25, 0.1, 0.05, 0.025, 0.01, 0.005, 0.0025, 0.001)
DEPTH_QUERIES = 500  # that depths are measured on, at most
STEP = 2 / 3  # from one bound on the mass to the next, and 1 / STEP from one number of probes to the next
STEPS = 48
NEARLY_ALL = 0.9995  # of the top keys, beyond which no bound is measured
LEAST_MATCHES = 4 * TOP  # in a mask that something is measured behind


@dataclass(frozen=True)
class Depth:
    """Recall behind a filter of one selectivity, by effort: which cells must be probed, codes left aside.

    Args:
        selectivity: the share of the keys that match.
        efforts: bounds on the mass, falling; or numbers of probes, rising.
        assured: of the top 1, 2, ... at each effort, the recall that new queries have, 95 % sure.
    """

    selectivity: float
    efforts: tuple[float, ...]
    assured: tuple[tuple[float, ...], ...]

    def recall_at(self, effort: float, k: int) -> float:
        """The recall of the top k at an effort, between those measured."""
        values = [one[min(k, len(one)) - 1] for one in self.assured]
        order = np.argsort(np.log(self.efforts))
        return float(np.interp(math.log(effort), np.log(self.efforts)[order], np.array(values)[order]))

    def effort_for(self, recall: float, k: int) -> float | None:
        """The least effort with this recall of the top k; None if none has it."""
        values = np.maximum.accumulate([one[min(k, len(one)) - 1] for one in self.assured])
        at = int(np.searchsorted(values, recall))
        if at == len(values):
            return None
        if at == 0 or values[at] == values[at - 1]:
            return self.efforts[at]
        part = (recall - values[at - 1]) / (values[at] - values[at - 1])
        return float(self.efforts[at - 1] * (self.efforts[at] / self.efforts[at - 1]) ** part)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        rounded = [[round(value, 5) for value in one] for one in self.assured]
        return {"selectivity": self.selectivity, "efforts": list(self.efforts), "assured": rounded}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Depth":
        """What `to_json` gave; ValueError, TypeError, KeyError or AmipsError if it did not."""
        efforts = tuple(check_number("effort", one, above=0) for one in fields["efforts"])
        assured = tuple(
            tuple(check_number("recall", one, least=0, most=1) for one in row) for row in fields["assured"]
        )
        if not 0 < len(efforts) == len(assured) <= 1000 or any(not 0 < len(row) <= TOP for row in assured):
            raise ValueError("depths of filters that do not fit each other")
        return cls(check_number("selectivity", fields["selectivity"], above=0, most=1), efforts, assured)


@dataclass(frozen=True)
class Depths:
    """What effort a selectivity needs for one recall: both fall together.

    Args:
        logs: logarithms of selectivities, rising, [r].
        efforts: logarithms of the bounds on the mass, or of numbers of probes, [r].
        by_mass: whether it is a bound on the mass.
    """

    logs: NDArray[np.float64]
    efforts: NDArray[np.float64]
    by_mass: bool

    @classmethod
    def of(cls, depths: Sequence[Depth], effort: float, k: int, by_mass: bool) -> "Depths | None":
        """As deep behind filters as an effort is without: the same recall; None if nothing was measured."""
        if not depths or depths[0].selectivity != 1:
            return None
        recall, rows = depths[0].recall_at(effort, k), [(0.0, math.log(effort))]
        for depth in depths[1:]:
            needed = depth.effort_for(recall, k)
            if needed is None:
                break
            deepest = min if by_mass else max  # of fewer keys, never less
            rows.append((math.log(depth.selectivity), deepest(math.log(needed), rows[-1][1])))
        logs, efforts = np.array(rows[::-1]).T
        return cls(logs, efforts, by_mass)

    def effort(self, selectivity: NDArray[np.float64]) -> NDArray[np.float64]:
        """The effort for each of the selectivities [m]; every cell below those that were measured."""
        logs = np.log(np.maximum(selectivity, 1e-300))
        efforts: NDArray[np.float64] = np.exp(np.interp(logs, self.logs, self.efforts))
        return np.where(logs < self.logs[0] - 1e-9, 0.0 if self.by_mass else np.inf, efforts)

    def probed(
        self,
        scores: Floats,
        temperature: float,
        matches: NDArray[np.int64],
        sizes: NDArray[np.int64],
        k: int,
    ) -> NDArray[np.bool_]:
        """Which cells are probed, [m, c], given the scores of a router [m, c].

        Args:
            matches, sizes: keys of each cell that match, and all, [c].
            k: results.
        """
        mass, share = masses(scores, temperature), matches / np.maximum(sizes, 1)
        local = mass @ share.astype(np.float32)
        local = local * np.minimum(1, local / max(1e-12, matches.sum() / max(1, sizes.sum())))
        # The 100 best of all lie as deep as the 10 best of a tenth.
        bound = self.effort(local * (TOP / max(k, TOP)))[:, None]
        probed: NDArray[np.bool_] = (
            mass >= bound.astype(np.float32) if self.by_mass else _places(scores) < bound
        )
        probed[np.arange(len(scores)), scores.argmax(axis=1)] = True
        return probed


def measure_depths(
    router: Any,
    split: Split,
    exact: Any,
    store: Any,
    temperature: float,
    by_mass: bool,
    queries: int = DEPTH_QUERIES,
) -> list[Depth]:
    """Depths behind masks drawn at random, from all keys down to where scoring all that match is cheaper.

    Args:
        exact: the true top keys of queries under a mask: queries [m, d], mask [n] -> numbers [m, 10].
        store: of cells.
        queries: on which it is measured, at most.
    """
    rows = slice(0, queries)
    x, source = np.asarray(split.queries[rows]), np.asarray(split.source)[rows]
    rng, depths, n = np.random.default_rng(0), list[Depth](), store.n
    estimate: RoutingEstimate | None = None
    for selectivity in SELECTIVITIES:
        mask = rng.random(n) < selectivity
        if mask.sum() < LEAST_MATCHES or router.flops >= 2.0 * store.d * mask.sum():
            break
        top = exact(x, mask)
        second = None if store.second is None else store.second[top]
        if estimate is None:
            estimate = RoutingEstimate.by(
                router, x, top, store.assignment, store.sizes, temperature=temperature, second=store.second
            )
        estimate = replace(estimate, top_cells=store.assignment[top], second=second)
        depths.append(_depth(estimate, selectivity, source, by_mass))
    return depths


def _depth(
    estimate: RoutingEstimate, selectivity: float, source: NDArray[np.integer[Any]], by_mass: bool
) -> Depth:
    """Recall for a ladder of efforts up to where all top keys are found."""
    efforts, assured, probes = list[float](), list[tuple[float, ...]](), 1.0
    for step in range(STEPS):
        effort = 0.6 * STEP**step if by_mass else min(float(round(probes)), len(estimate.sizes))
        probing = estimate.at_mass(effort) if by_mass else estimate.at_probes(int(effort))
        efforts.append(effort)
        assured.append(assured_recalls(probing.hits, source))
        probes = max(probes + 1, probes / STEP)
        if assured[-1][-1] >= NEARLY_ALL or probing.hits.all() or effort >= len(estimate.sizes):
            break
    return Depth(selectivity, tuple(efforts), tuple(assured))


def _places(scores: Floats) -> NDArray[np.int64]:
    """The place of each cell in its query's order, [m, c]."""
    order = np.argsort(-scores, axis=1, kind="stable")
    places = np.empty_like(order)
    np.put_along_axis(places, order, np.broadcast_to(np.arange(order.shape[1]), order.shape), axis=1)
    return places
