"""How deep a search goes behind a filter: by how many of the keys near a query match.

What counts is the mass of the keys that match: that of a cell, times the share of its keys that match, as a
share of all that is left,

    mass'_j(x) = mass_j(x) s_j / z(x),   z(x) = sum_j mass_j(x) s_j.

Cells are probed in its order, down to a bound on it (or so many of them). The ten best keys that match are
the ten best of all, if all match; of a share s they lie as deep as the 10 / s best of all, in more cells.
So the bound is measured when the index is made, on held-out queries (`measure_depths`): behind masks drawn at
random, of several selectivities, and behind masks that lead away from what is asked, which leave out the keys
that queries want. There the router knows less well which cell is the next best, and the mass of the keys that
match says too much: how much, depends on z(x) as a share of s, the share of all keys that match.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.arguments import check_number
from amips.metrics import TOP
from amips.routers import masses
from amips.search.points import assured_recalls
from amips.task import Split
from amips.vectors import Floats

Bools = NDArray[np.bool_]

SELECTIVITIES = (1.0, 0.5, 0.25, 0.1, 0.05, 0.025, 0.01, 0.005, 0.0025, 0.001)
DEPTH_QUERIES = 500  # that depths are measured on, at most
STEP = 2 / 3  # from one bound on the mass to the next, and 1 / STEP from one number of probes to the next
STEPS = 48
NEARLY_ALL = 0.9995  # of the top keys, beyond which no bound is measured
LEAST_MATCHES = 4 * TOP  # in a mask that something is measured behind
AWAY = (0.97, 0.9, 0.75, 0.5, 0.25, 0.1)  # selectivities of masks that lead away from what is asked
AWAY_QUERIES = 200  # that those masks are made from, and measured on
LOCAL = (0.95, 0.85, 0.7, 0.5, 0.35, 0.2, 0.1, 0.05, 0.02, 0.01, 0.003)  # limits of z / s between them
LEAST_ROWS = 100  # queries between two limits, with fewer of which nothing is measured there
ROWS = 1 << 13  # keys at a time
SURE = 2.0  # standard deviations of a random mask, beyond which a query is looked at as led away


@dataclass(frozen=True)
class Depth:
    """Recall behind a filter of one selectivity, by effort: which cells must be probed, codes left aside.

    Args:
        selectivity: the share of the keys that match.
        efforts: bounds on the mass, falling; or numbers of probes, rising.
        assured: of the top 1, 2, ... at each effort, the recall that new queries have, 95 % sure.
        local: how often a key matches where the query looks, by how often any key does; 1 behind masks drawn
            at random. Less: the worst of masks of several selectivities.
    """

    selectivity: float
    efforts: tuple[float, ...]
    assured: tuple[tuple[float, ...], ...]
    local: float = 1.0

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
        fields = {"selectivity": self.selectivity, "local": self.local}
        return {**fields, "efforts": list(self.efforts), "assured": rounded}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Depth":
        """What `to_json` gave; ValueError, TypeError, KeyError or AmipsError if it did not."""
        efforts = tuple(check_number("effort", one, above=0) for one in fields["efforts"])
        assured = tuple(
            tuple(check_number("recall", one, least=0, most=1) for one in row) for row in fields["assured"]
        )
        if not 0 < len(efforts) == len(assured) <= 1000 or any(not 0 < len(row) <= TOP for row in assured):
            raise ValueError("depths of filters that do not fit each other")
        selectivity = check_number("selectivity", fields["selectivity"], above=0, most=1)
        local = check_number("local", fields.get("local", 1.0), above=0, most=1)
        return cls(selectivity, efforts, assured, local)


@dataclass(frozen=True)
class Depths:
    """What effort a selectivity needs for one recall: both fall together.

    Args:
        logs: logarithms of selectivities, rising, [r].
        efforts: logarithms of the bounds on the mass, or of numbers of probes, [r].
        local_logs, local_efforts: the same for the selectivity where a query looks, by that of all keys.
        by_mass: whether it is a bound on the mass.
    """

    logs: NDArray[np.float64]
    efforts: NDArray[np.float64]
    local_logs: NDArray[np.float64]
    local_efforts: NDArray[np.float64]
    by_mass: bool

    @classmethod
    def of(cls, depths: Sequence[Depth], effort: float, k: int, by_mass: bool) -> "Depths | None":
        """As deep behind filters as an effort is without: the same recall; None if nothing was measured."""
        if not depths or depths[0].selectivity != 1:
            return None
        recall, deepest = depths[0].recall_at(effort, k), min if by_mass else max
        drawn, away = [(0.0, math.log(effort))], [(0.0, math.log(effort))]
        for depth in depths[1:]:
            rows, by = (drawn, depth.selectivity) if depth.local == 1 else (away, depth.local)
            needed = depth.effort_for(recall, k)
            # Where even all that was measured does not reach the recall, every cell is probed.
            last = math.log(needed) if needed is not None else (-np.inf if by_mass else np.inf)
            rows.append((math.log(by), deepest(last, rows[-1][1])))
        logs, efforts = np.array([row for row in drawn[::-1] if np.isfinite(row[1])]).T
        local_logs, local_efforts = np.array([row for row in away[::-1] if np.isfinite(row[1])]).T
        return cls(logs, efforts, local_logs, local_efforts, by_mass)

    def effort(self, selectivity: NDArray[np.float64], local: NDArray[np.float64]) -> NDArray[np.float64]:
        """The effort for each of the selectivities [m]; every cell below those that were measured."""
        drawn = self._needed(selectivity, self.logs, self.efforts)
        away = self._needed(local, self.local_logs, self.local_efforts)
        return np.minimum(drawn, away) if self.by_mass else np.maximum(drawn, away)

    def _needed(
        self, at: NDArray[np.float64], logs: NDArray[np.float64], efforts: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        where = np.log(np.maximum(at, 1e-300))
        values: NDArray[np.float64] = np.exp(np.interp(where, logs, efforts))
        return np.where(where < logs[0] - 1e-9, 0.0 if self.by_mass else np.inf, values)

    def probed(
        self,
        scores: Floats,
        temperature: float,
        matches: NDArray[np.int64],
        sizes: NDArray[np.int64],
        k: int,
    ) -> Bools:
        """Which cells are probed, [m, c], given the scores of a router [m, c].

        Args:
            matches, sizes: keys of each cell that match, and all, [c].
            k: results.
        """
        mass, selectivity, local = looked_at(scores, temperature, matches, sizes)
        # The 100 best of all lie as deep as the 10 best of a tenth.
        bound = self.effort(selectivity * (TOP / max(k, TOP)), local)[:, None]
        probed: Bools = mass >= bound.astype(np.float32) if self.by_mass else _places(mass) < bound
        probed[np.arange(len(scores)), mass.argmax(axis=1)] = True
        return probed


def looked_at(
    scores: Floats, temperature: float, matches: NDArray[np.int64], sizes: NDArray[np.int64]
) -> tuple[Floats, NDArray[np.float64], NDArray[np.float64]]:
    """The mass of the keys that match in each cell [m, c], and for each query z, and z / s at most.

    z / s is 1 unless so few match where the query looks as would hardly happen to a mask drawn at random.
    """
    mass, share = masses(scores, temperature), matches / np.maximum(sizes, 1)
    overall = matches.sum() / max(1, sizes.sum())
    z = (mass @ share.astype(np.float32)).astype(np.float64)
    keys = float(sizes.mean()) / np.einsum("mc,mc->m", mass, mass)  # that the query looks at
    by_chance = SURE * np.sqrt(keys * overall * (1 - overall))
    local = np.minimum(1, (keys * z + by_chance) / np.maximum(1e-12, keys * overall))
    mass *= share.astype(np.float32)
    mass /= np.maximum(z, 1e-30)[:, None].astype(np.float32)
    return mass, z, local


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

    And behind masks that lead away from the queries, in the order of z / s.

    Args:
        exact: scores and true top keys of queries under masks: queries [m, d], masks -> [m, 10] of each.
        store: of cells.
        queries: on which it is measured, at most.
    """
    rows = slice(0, queries)
    x, source = np.asarray(split.queries[rows]), np.asarray(split.source)[rows]
    rng, n = np.random.default_rng(0), store.n
    known = _Cells(store, router.scores(x), temperature, by_mass)

    def worth(mask: Bools) -> bool:
        return bool(mask.sum() >= LEAST_MATCHES and router.flops < 2.0 * store.d * mask.sum())

    drawn = [(one, rng.random(n) < one) for one in SELECTIVITIES]
    drawn = [(one, mask) for one, mask in drawn if worth(mask)]
    depths = list[Depth]()
    for (selectivity, mask), top in zip(drawn, exact(x, [mask for _, mask in drawn]), strict=True):
        values, _ = known.efforts_of(np.arange(len(x)), mask, top)
        depths.append(known.depth(selectivity, 1.0, [(values, source)]))
    some = np.arange(min(len(x), AWAY_QUERIES))
    groups: list[list[tuple[NDArray[Any], NDArray[Any]]]] = [[] for _ in LOCAL[1:]]
    for kind in _leading_away(x[some], store):  # one by one: together they would take much memory
        masks = [mask for mask in kind if worth(mask)]
        if not masks:
            continue
        tops = exact(x[some], masks)
        pairs = [known.efforts_of(some, mask, top) for mask, top in zip(masks, tops, strict=True)]
        every, local = (np.concatenate(part) for part in zip(*pairs, strict=True))
        sources = np.tile(source[some], len(pairs))
        for place, group in enumerate(groups):
            between = (local < LOCAL[place]) & (local >= LOCAL[place + 1])
            if len(np.unique(sources[between])) >= LEAST_ROWS:
                group.append((every[between], sources[between]))
    for place, group in enumerate(groups):
        if group:
            depths.append(known.depth(1.0, math.sqrt(LOCAL[place] * LOCAL[place + 1]), group))
    return depths


class _Cells:
    """What a search behind masks finds: the efforts at which keys are found, of queries with these scores."""

    def __init__(self, store: Any, scores: Floats, temperature: float, by_mass: bool) -> None:
        self.store, self.scores, self.temperature, self.by_mass = store, scores, temperature, by_mass

    def efforts_of(
        self, rows: NDArray[np.int64], mask: Bools, top: NDArray[np.int64]
    ) -> tuple[NDArray[Any], NDArray[np.float64]]:
        """The least effort that finds each of the top keys [m, k] of some queries, and their z / s, [m].

        A bound on the mass, or minus the number of probes: what finds more is less.
        """
        cells, second, count = self.store.assignment, self.store.second, len(self.store.sizes)
        matches = np.bincount(cells[mask], minlength=count)
        if second is not None:
            also = second[mask]
            matches += np.bincount(also[also >= 0], minlength=count)
        mass, _, local = looked_at(self.scores[rows], self.temperature, matches, self.store.sizes)
        values: NDArray[Any] = mass.copy() if self.by_mass else -(_places(mass) + 1.0)
        values[np.arange(len(rows)), mass.argmax(axis=1)] = np.inf  # the best is probed in any case
        best: NDArray[Any] = np.take_along_axis(values, cells[top], axis=1)
        if second is not None:
            others = np.take_along_axis(values, np.maximum(second[top], 0), axis=1)
            best = np.maximum(best, np.where(second[top] >= 0, others, -np.inf))
        return best, local

    def depth(
        self, selectivity: float, local: float, groups: list[tuple[NDArray[Any], NDArray[Any]]]
    ) -> Depth:
        """Recall for a ladder of efforts up to where all top keys are found: of the worst group."""
        efforts, assured, probes = list[float](), list[tuple[float, ...]](), 1.0
        most = len(self.store.sizes)
        for step in range(STEPS):
            effort = 0.6 * STEP**step if self.by_mass else min(float(round(probes)), most)
            bound = np.float32(effort) if self.by_mass else -effort
            hits = [(values >= bound, source) for values, source in groups]
            efforts.append(effort)
            assured.append(tuple(np.min([assured_recalls(*pair) for pair in hits], axis=0).tolist()))
            probes = max(probes + 1, probes / STEP)
            if assured[-1][-1] >= NEARLY_ALL or all(pair[0].all() for pair in hits) or effort >= most:
                break
        return Depth(selectivity, tuple(efforts), tuple(assured), local)


def _leading_away(x: Floats, store: Any) -> Iterator[list[Bools]]:
    """Masks of several selectivities that leave out what the queries want, by kind.

    The keys that some query wants most, those nearest to the mean of the queries, and to one of them; and all
    but those nearest to one.
    """
    best, n = np.empty(store.n, np.float32), store.n
    some = np.stack([x.mean(axis=0), x[0], x[len(x) // 2]])
    along = np.empty((len(some), n), np.float32)
    for low in range(0, n, ROWS):
        keys = store.keys_at(np.arange(low, min(n, low + ROWS)))
        best[low : low + ROWS] = (keys @ x.T).max(axis=1)
        along[:, low : low + ROWS] = some @ keys.T
    kinds = [best, *along, -along[1]]
    for one in kinds:
        yield [one <= np.quantile(one, share) for share in AWAY]


def _places(values: Floats) -> NDArray[np.int64]:
    """The place of each cell in its query's order, [m, c]."""
    order = np.argsort(-values, axis=1, kind="stable")
    places = np.empty_like(order)
    np.put_along_axis(places, order, np.broadcast_to(np.arange(order.shape[1]), order.shape), axis=1)
    return places
