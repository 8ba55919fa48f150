"""Operating points of a searcher: its recall and cost on held-out queries, for a ladder of efforts."""

import math
from dataclasses import replace

import numpy as np

from amips.routers import Probing, RoutingEstimate
from amips.search.points import TOP, Point, ladder, mass_bounds
from amips.search.searcher import Searcher
from amips.task import Split

# A ladder ends where nearly all top keys are found, or a third of the keys is scanned: beyond, exact search
# is faster.
NEARLY_ALL, MOST_SCANNED = 0.999, 0.3
STEPS = 5  # that the step of the ladder at the target is divided into


def calibrated(searcher: Searcher, split: Split, target_recall: float) -> Searcher:
    """The searcher with the temperature of its stopping rule and operating points, measured on a split."""
    known = replace(
        searcher, temperature=estimate_routing(searcher, split).temperature, target_recall=target_recall
    )
    points = measure(known, split)
    if searcher.design is None or searcher.design.stop == "mass":
        by_mass = measure_masses(known, split)
        points += by_mass + measure_masses(known, split, _between(by_mass, target_recall))
    return replace(known, points=points)


def measure(searcher: Searcher, split: Split, probes: list[int] | None = None) -> list[Point]:
    """Recall and cost on a split for numbers of probes, by default a ladder of them.

    Codes are searched for real. Of float32 keys the recall follows from which cells are probed.
    """
    routing, points = estimate_routing(searcher, split), list[Point]()
    for count in probes or ladder(searcher.c):
        points.append(_point(searcher, split, routing.at_probes(min(count, searcher.c)), count))
        if probes is None and searcher.store.storage != "flat" and points[-1].scanned >= MOST_SCANNED:
            break
    return points


def measure_masses(searcher: Searcher, split: Split, bounds: list[float] | None = None) -> list[Point]:
    """The same for bounds on the mass, by default a ladder down to where nearly all top keys are found."""
    routing = replace(estimate_routing(searcher, split), known_temperature=searcher.temperature)
    points: list[Point] = []
    for min_mass in mass_bounds() if bounds is None else bounds:
        points.append(_point(searcher, split, routing.at_mass(min_mass), None, min_mass))
        enough = points[-1].recall10 >= NEARLY_ALL or points[-1].scanned >= MOST_SCANNED
        if bounds is None and enough:
            break
    return points


def _between(points: list[Point], recall: float) -> list[float]:
    """Bounds between the last point that misses a recall and the first that reaches it.

    A step of the ladder costs up to half as much again as the one before; what is asked for most should not.
    """
    reached = next((i for i, point in enumerate(points) if point.recall10 >= recall), 0)
    if reached == 0:
        return []
    loose, tight = points[reached - 1].min_mass, points[reached].min_mass
    return [loose * (tight / loose) ** (step / STEPS) for step in range(1, STEPS)]


def estimate_routing(searcher: Searcher, split: Split) -> RoutingEstimate:
    """The router's scores for the queries of a split, and the cells of their top keys."""
    store, x, top = searcher.store, np.asarray(split.queries), np.asarray(split.top_ids)[:, :TOP]
    return RoutingEstimate.by(searcher.router, x, top, store.assignment, store.sizes, second=store.second)


def _point(
    searcher: Searcher, split: Split, probing: Probing, probes: int | None, min_mass: float | None = None
) -> Point:
    hits = probing.hits
    if searcher.store.storage != "flat":
        unlabelled = replace(searcher, labels=None)  # the split knows keys by number, not by label
        top = np.asarray(split.top_ids)[:, :TOP]
        ids = unlabelled.search(np.asarray(split.queries), TOP, probes=probes, min_mass=min_mass)[1]
        hits = (top[:, :, None] == ids[:, None, :]).any(axis=2)
    scan = searcher.store.scan_flops(probing.scanned, TOP)
    return Point(
        math.ceil(probing.probes.mean()),
        float(hits[:, 0].mean()),
        float(hits.mean()),
        float(probing.scanned.mean() / searcher.n),
        float(searcher.router.flops + scan.mean()),
        min_mass or 0.0,
    )
