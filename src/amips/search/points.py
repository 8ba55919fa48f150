"""Operating points: what recall and cost a number of probes gives, measured on held-out queries."""

import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.arguments import check_recall
from amips.errors import AmipsError
from amips.metrics import TOP, assured_mean

NEARLY_ALL = 0.999  # of the top keys, beyond which no effort is measured
MOST_REFINE = 1 << 16  # candidates for each result that a file may ask for


@dataclass(frozen=True)
class Point:
    """What a search gives at one effort: mean figures on held-out queries, and what can be relied on.

    The effort is a number of probes, or a bound on the mass, and how many candidates codes are asked for. Of
    a graph it is a margin.
    """

    probes: int  # with a bound on the mass: the mean, rounded up
    recall1: float
    recall10: float
    scanned: float  # share of the keys, those in two cells counted twice
    flops: float  # routing and scan, for each query
    min_mass: float = 0.0  # 0: every query probes the same number of cells
    refine: int | None = None  # candidates of codes for each result; 0: no codes, every key itself is scored
    assured: tuple[float, ...] = ()  # of the top 1, 2, ...: the recall that new queries have, 95 % sure
    margin: float = 0.0  # of a graph; `probes` are then the keys visited
    recognised: float = 0.0  # share of the queries that a memory of the log answers; 0: it is not asked

    def recall_assured(self, k: int) -> float:
        """The recall of the top k that can be relied on; the mean where its uncertainty is not known."""
        if not self.assured:
            return self.recall1 if k == 1 else self.recall10
        return self.assured[min(k, len(self.assured)) - 1]

    @property
    def certain(self) -> bool:
        """Whether it scores every key, so that it misses nothing whatever is asked."""
        return bool(self.assured) and min(self.assured) == 1

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Point":
        """What `to_json` gave; ValueError or TypeError if it did not."""
        point = cls(**{**fields, "assured": tuple(fields["assured"])})
        shares = (point.recall1, point.recall10, point.min_mass, point.recognised, *point.assured)
        numbers = (*shares, point.scanned, point.flops, point.margin)
        # Compared, because a whole number may be too large for a float.
        if not all(type(value) in (int, float) and abs(value) <= sys.float_info.max for value in numbers):
            raise ValueError("an operating point has a figure that is not a finite number")
        if not all(0 <= share <= 1 for share in shares) or min(point.scanned, point.flops, point.margin) < 0:
            raise ValueError("an operating point has a figure that is out of range")
        wide = point.refine is None or (type(point.refine) is int and 0 <= point.refine <= MOST_REFINE)
        deep = 1 <= len(point.assured) <= TOP
        if type(point.probes) is not int or point.probes < 1 or not wide or not deep:
            raise ValueError("an operating point has an effort that cannot be")
        return point


def ladder(c: int, growth: float = 1.25) -> list[int]:
    """Numbers of probes from 1 to c, each about `growth` times the one before, and at least one more."""
    steps = {1, c}
    step = 1.0
    while step < c:
        steps.add(round(step))
        step = max(step + 1, step * growth)
    return sorted(s for s in steps if s <= c)


def mass_bounds() -> list[float]:
    """Bounds on the mass, from cheap to dear, each 2/3 of the one before."""
    return [0.4 * (2 / 3) ** i for i in range(36)]


def recalls(ids: NDArray[np.integer[Any]], true: NDArray[np.integer[Any]], k: int) -> NDArray[np.float64]:
    """For each query the share of its true top k that is among the first k ids."""
    k = min(k, true.shape[1])
    hits = (ids[:, :k, None] == true[:, None, :k]).any(axis=1)
    shares: NDArray[np.float64] = hits.mean(axis=1)
    return shares


def assured_recalls(
    hits: NDArray[np.bool_], source: NDArray[np.integer[Any]] | None = None, looks: int = 1
) -> tuple[float, ...]:
    """Of the top 1, 2, ..., k the recall that new queries have, 95 % sure.

    Args:
        hits: which of the true top keys of held-out queries, best first, were found, [m, k].
        source: the query that each is a copy of, [m]: noisy copies of one are no new evidence.
        looks: among how many points of different kinds one is chosen.
    """
    by_depth = np.cumsum(hits, axis=1) / np.arange(1, hits.shape[1] + 1)
    if source is not None:
        first, queries, counts = np.unique(source, return_inverse=True, return_counts=True)
        sums = np.zeros((len(first), hits.shape[1]))
        np.add.at(sums, queries, by_depth)
        by_depth = sums / counts[:, None]
    return tuple(assured_mean(by_depth, looks).tolist())


def all_found(point: Point) -> bool:
    """Whether more effort would not make a point surer: a ladder of points ends there."""
    return point.recall10 == 1 or point.recall_assured(TOP) >= NEARLY_ALL


def point_for(points: Sequence[Point], recall: float, k: int, best_effort: bool = False) -> Point:
    """The cheapest point whose recall of the top k is assured to be this.

    AmipsError if no point's is; with `best_effort` the highest then, and a warning.

    Points of one kind are gone through from the dearest on, as long as they hold: so each is only looked at
    if all that scan more held, and the confidence of the whole is that of one.
    """
    if not points:
        raise AmipsError("this index has no operating points; give probes instead of recall")
    check_recall(recall)
    depth = max(len(point.assured) for point in points) or TOP
    if k > depth:
        warnings.warn(
            f"recall is known of the top {depth}: of the top {k} it is lower; "
            f"give {'margin' if any(point.margin for point in points) else 'probes or min_mass'} instead",
            stacklevel=4,
        )
    enough = []
    for kind in _kinds(points):
        enough += list(takewhile(lambda point: point.recall_assured(k) >= recall, kind))[-1:]
    if enough:
        return min(enough, key=lambda point: (point.flops, point.probes))
    best = surest_point(points, k)
    text = (
        f"recall {recall} is out of reach: the highest recall@{min(k, depth)} that can be relied on is "
        f"{best.recall_assured(k):.4f}"
    )
    if not best_effort:
        raise AmipsError(f"{text}; ask for less, or take that with best_effort=True (--best-effort)")
    warnings.warn(text, stacklevel=4)
    return best


def served_point(points: Sequence[Point], recall: float, k: int = TOP) -> Point:
    """What serves a recall of the top k; the surest point, without a warning, where nothing does."""
    try:
        return point_for(points, recall, k)
    except AmipsError:
        return surest_point(points, k)


def surest_point(points: Sequence[Point], k: int) -> Point:
    """The point with the highest recall of the top k that `point_for` serves: the dearest of its kind."""
    return max((kind[0] for kind in _kinds(points)), key=lambda point: point.recall_assured(k))


def _kinds(points: Sequence[Point]) -> list[list[Point]]:
    """Points to choose from: those that differ only in how much is scanned together, the dearest first.

    These are of one stopping rule: by mass, where an index has it. What scans everything holds for certain.
    With a memory of the log in place they are of another kind.
    """
    by_mass = any(point.min_mass for point in points)
    kinds: dict[Any, list[Point]] = {}
    for point in sorted(points, key=lambda point: (-point.flops, -point.probes)):
        if point.certain:
            kinds.setdefault("certain", []).append(point)
        elif (point.min_mass > 0) == by_mass:
            kinds.setdefault((point.refine, point.recognised > 0), []).append(point)
    return list(kinds.values())
