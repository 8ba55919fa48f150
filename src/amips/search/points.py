"""Operating points: what recall and cost a number of probes gives, measured on held-out queries."""

import warnings
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.errors import BundleError

TOP = 10  # the true top keys whose recall is measured


@dataclass(frozen=True)
class Point:
    """Mean figures on held-out queries for one number of probes, or for one bound on the mass."""

    probes: int  # with a bound on the mass: the mean, rounded up
    recall1: float
    recall10: float
    scanned: float  # share of the keys, those in two cells counted twice
    flops: float  # routing and scan, for each query
    min_mass: float = 0.0  # 0: every query probes the same number of cells

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def ladder(c: int) -> list[int]:
    """Numbers of probes from 1 to c, each about a quarter more than the one before."""
    steps = {1, c}
    step = 1.0
    while step < c:
        steps.add(round(step))
        step = max(step + 1, step * 1.25)
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


def point_for(points: list[Point], recall: float, k: int) -> Point:
    """The cheapest point that reached this recall; with a warning, the highest when none did."""
    if not points:
        raise BundleError("this index has no operating points; give probes instead of recall")
    if not 0 < recall <= 1:
        raise BundleError(f"recall={recall}: expected a share between 0 and 1")
    if k > TOP:
        warnings.warn(
            f"recall is known of the top {TOP}: of the top {k} it is lower; give probes or min_mass instead",
            stacklevel=5,
        )
    which = "recall1" if k == 1 else "recall10"
    reached = [point for point in points if getattr(point, which) >= recall]
    if reached:
        return min(reached, key=lambda p: p.flops)
    best = max(points, key=lambda p: float(getattr(p, which)))
    warnings.warn(
        f"recall {recall} is out of reach: the highest measured {which.replace('recall', 'recall@')} is "
        f"{getattr(best, which):.4f}, with {best.probes} probes",
        stacklevel=5,
    )
    return best
