"""Operating points of a searcher: its recall and cost on held-out queries, for a ladder of efforts."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from amips.index import OwnCells, best_behind
from amips.metrics import TOP
from amips.routers import Probing, RoutingEstimate
from amips.search.effort import Effort
from amips.search.graph_searcher import GraphSearcher
from amips.search.points import Point, all_found, assured_recalls, ladder, mass_bounds, point_for
from amips.search.searcher import Searcher
from amips.search.selectivity import DEPTH_QUERIES, Depth, measure_depths
from amips.task import Split
from amips.vectors import Floats, unit_rows

MOST_SCANNED = 0.9  # of the keys: beyond, every key may as well be scored
STEPS = 5  # that the step of the ladder at the target is divided into
WIDER = 80  # candidates for each result, where codes lose more with fewer, and how many times as many
WIDER_TIMES, WIDEST = 8, 0.01  # ... where they still do, up to this share of the keys for all results
SPREAD_SAMPLE = 1000  # keys that say how much scores differ
MARGINS = 64  # in a ladder, at most
QUARTILES = 1.35  # between which a normal distribution lies, in standard deviations
LOSS = 0.001  # ... this share of the top keys that were scanned
AROUND = (2.0, 1.0, 0.5)  # times the bound on the mass that serves a recall
LEVEL = 4  # steps of a ladder in which more effort must find more
LOOKS, LOOSER, TIGHTER = 8, 1.2, 0.6  # efforts about a recall: how many, from where on, in what steps


def calibrated(
    searcher: Searcher,
    split: Split,
    target_recall: float,
    temperature: float = 0.0,
    *,
    every: int = 1,
    depth_queries: int = DEPTH_QUERIES,
) -> Searcher:
    """The searcher with the temperature of its stopping rule and operating points, measured on a split.

    Args:
        temperature: one that is given stays: efforts are then those of other points with it.
        every: measure every so manieth step of the ladders of efforts only, where there is little time; with
            0 none of them.
        depth_queries: how many queries filters are measured on.
    """
    temperature = temperature or estimate_routing(searcher, split).temperature
    known = replace(searcher, temperature=temperature, target_recall=target_recall)
    points = measure(known, split, every=every) if every else []
    if _by_mass(searcher) and every:
        by_mass = measure_masses(known, split, every=every)
        points += by_mass + measure_masses(known, split, _between(by_mass, target_recall))
    if _is_coded(searcher):
        points += [*_wider(known, split, points), _every_key(known)]
    return replace(known, points=points, depths=_depths(known, split, depth_queries))


def near_target(
    searcher: Searcher, split: Split, target_recall: float, late: Callable[[], bool] = lambda: False
) -> Searcher:
    """The searcher with operating points about one recall only: enough to compare it with others.

    Float32 keys have all points: they are known without a search. Codes are searched from the effort on that
    would do if they lost nothing, with more candidates where that does not reach the recall, until it is
    `late`.
    """
    routing = estimate_routing(searcher, split)
    known = replace(searcher, temperature=routing.temperature, target_recall=target_recall)
    if not _is_coded(searcher):
        points = measure_masses(known, split) if _by_mass(searcher) else measure(known, split)
        return replace(known, points=points + measure_masses(known, split, _between(points, target_recall)))
    points = []
    widths = [None, *_widths(searcher.n)]
    for refine in widths:
        rungs = list[Point]()
        for step in range(LOOKS):
            if _by_mass(searcher):
                bound = min(1.0, routing.min_mass_for(target_recall) * LOOSER * TIGHTER**step)
                rungs += measure_masses(known, split, [bound], refine)
            else:
                probes = min(searcher.c, math.ceil(routing.probes_for(target_recall) * TIGHTER ** (1 - step)))
                rungs += measure(known, split, [probes], refine)
            if rungs[-1].recall_assured(TOP) >= target_recall or _level(rungs) or late():
                break
            if refine != widths[-1] and _lost(routing, rungs[-1]) > 1 - target_recall:
                break  # however many cells are scanned
        points += rungs
        reached = rungs[-1].recall_assured(TOP) >= target_recall
        if reached and not late():
            points += measure_masses(known, split, _between(rungs, target_recall)[1::2], refine)
        if reached or late():
            break
    return replace(known, points=[*points, _every_key(known)])


def _lost(routing: RoutingEstimate, point: Point) -> float:
    """The share of the top keys that were scanned and not among the candidates of codes."""
    by_mass = point.min_mass > 0
    probing = routing.at_mass(point.min_mass) if by_mass else routing.at_probes(point.probes)
    return probing.recall - point.recall10


def measure_about(searcher: Searcher, split: Split, target_recall: float) -> list[Point]:
    """Recall and cost on a split at the effort that serves a recall, and at more and less of it."""
    point = point_for(searcher.points, target_recall, TOP, best_effort=True)
    if point.min_mass:
        bounds = [min(1.0, point.min_mass * factor) for factor in AROUND]
        return measure_masses(searcher, split, bounds, point.refine)
    if point.certain:
        return [point]
    probes = [min(searcher.c, max(1, round(point.probes / factor))) for factor in AROUND]
    return measure(searcher, split, probes, point.refine)


def _by_mass(searcher: Searcher) -> bool:
    """Whether it stops by the mass of cells."""
    return searcher.design is None or searcher.design.stop == "mass"


def _level(points: list[Point]) -> bool:
    """Whether more effort has not found more for some steps: codes have lost the rest."""
    return len(points) > LEVEL and points[-1].recall10 - points[-1 - LEVEL].recall10 < LOSS


def _depths(searcher: Searcher, split: Split, queries: int = DEPTH_QUERIES) -> list[Depth]:
    """How deep the top keys behind filters are; none of keys that are with another library."""
    store = searcher.store
    if not isinstance(store, OwnCells):
        return []

    def exact(x: Floats, masks: list[NDArray[np.bool_]]) -> list[NDArray[np.int64]]:
        return best_behind(store, masks, x, TOP)

    parts = (store, searcher.temperature, _by_mass(searcher), queries)
    return measure_depths(searcher.router, split, exact, *parts)


def calibrated_graph(index: GraphSearcher, split: Split, target_recall: float) -> GraphSearcher:
    """The index with operating points, measured on a split, finer ones at the target."""
    points = measure_margins(index, split)
    loose = [point.margin for point in points if point.recall_assured(TOP) < target_recall]
    tight = [point.margin for point in points if point.recall_assured(TOP) >= target_recall]
    if loose and tight:
        low, high = max(loose), min(tight)
        between = [low + (high - low) * step / STEPS for step in range(1, STEPS)] if low < high else []
        points += measure_margins(index, split, between) if between else []
    return replace(index, points=[*points, _every_key(index)], target_recall=target_recall)


def measure_margins(index: GraphSearcher, split: Split, margins: list[float] | None = None) -> list[Point]:
    """Recall and cost on a split for margins, by default a ladder up to where all top keys are found."""
    x, top = np.asarray(split.queries), np.asarray(split.top_ids)[:, :TOP]
    points: list[Point] = []
    for margin in margin_ladder(index) if margins is None else margins:
        _, ids, counts = index.search_with(x, TOP, margin)
        hits = (top[:, :, None] == ids[:, None, :]).any(axis=2)
        cost = index.cost_of(counts)
        points.append(
            Point(
                math.ceil(cost.probed.mean()),
                float(hits[:, 0].mean()),
                float(hits.mean()),
                float(cost.scanned.mean() / index.n),
                float(cost.flops.mean()),
                margin=margin,
                assured=assured_recalls(hits, split.source),
            )
        )
        enough = all_found(points[-1]) or points[-1].scanned >= MOST_SCANNED
        # A pool that is full does not grow with the margin.
        enough = enough or (len(points) > MARGINS // 2 and points[-1].scanned == points[-2].scanned)
        if margins is None and enough:
            break
    return points


def margin_ladder(index: GraphSearcher) -> list[float]:
    """Margins, each a seventh more than the one before, in units of how much the scores of keys differ."""
    rng = np.random.default_rng(0)
    keys = index.store.keys[np.sort(rng.choice(index.n, min(index.n, SPREAD_SAMPLE), replace=False))]
    # Quantiles, because a few keys of very large norm must not be the measure.
    low, high = np.quantile(unit_rows(keys)[0] @ keys.T, [0.25, 0.75], axis=1)
    spread = float(np.median(high - low)) / QUARTILES or 1.0
    return [0.05 * spread * (8 / 7) ** step for step in range(MARGINS)]


def measure(
    searcher: Searcher,
    split: Split,
    probes: list[int] | None = None,
    refine: int | None = None,
    *,
    every: int = 1,
) -> list[Point]:
    """Recall and cost on a split for numbers of probes, by default (every so manieth of) a ladder of them.

    Codes are searched for real, with `refine` candidates for each result. Of float32 keys the recall follows
    from which cells are probed.
    """
    routing, points = estimate_routing(searcher, split), list[Point]()
    for count in probes or ladder(searcher.c)[::every]:
        point = _point(searcher, split, routing.at_probes(min(count, searcher.c)), count, refine=refine)
        points.append(point)
        enough = all_found(point) or point.scanned >= MOST_SCANNED
        if probes is None and searcher.store.storage != "flat" and (enough or _level(points)):
            break
    return points


def measure_masses(
    searcher: Searcher,
    split: Split,
    bounds: list[float] | None = None,
    refine: int | None = None,
    *,
    every: int = 1,
) -> list[Point]:
    """The same for bounds on the mass, by default a ladder down to where all top keys are found."""
    routing = replace(estimate_routing(searcher, split), known_temperature=searcher.temperature)
    points: list[Point] = []
    for min_mass in mass_bounds()[::every] if bounds is None else bounds:
        points.append(_point(searcher, split, routing.at_mass(min_mass), None, min_mass, refine))
        enough = all_found(points[-1]) or points[-1].scanned >= MOST_SCANNED
        if bounds is None and (enough or (_is_coded(searcher) and _level(points))):
            break
    return points


def _between(points: list[Point], recall: float) -> list[float]:
    """Bounds between the last point that misses a recall and the first that reaches it.

    A step of the ladder costs up to half as much again as the one before; what is asked for most should not.
    """
    reached = next((i for i, point in enumerate(points) if point.recall_assured(TOP) >= recall), 0)
    if reached == 0 or not points[reached].min_mass:
        return []
    loose, tight = points[reached - 1].min_mass, points[reached].min_mass
    return [loose * (tight / loose) ** (step / STEPS) for step in range(1, STEPS)]


def _widths(n: int) -> list[int]:
    """Numbers of candidates for each result to try where codes lose top keys.

    Among more keys more have nearly the same score, and codes tell them apart no better.
    """
    widths = [WIDER]
    while widths[-1] * WIDER_TIMES * TOP <= WIDEST * n:
        widths.append(widths[-1] * WIDER_TIMES)
    return widths


def _wider(searcher: Searcher, split: Split, points: list[Point]) -> list[Point]:
    """Points with more candidates, where codes lose top keys that were scanned, until all are found."""
    routing = replace(estimate_routing(searcher, split), known_temperature=searcher.temperature)
    masses = sorted((point for point in points if point.min_mass), key=lambda point: -point.min_mass)
    rungs = masses or points  # of the stopping rule that is used
    wide = list[Point]()
    for refine in _widths(searcher.n):
        better = dict[int, Point]()
        for place, point in enumerate(rungs):
            probing = routing.at_mass(point.min_mass) if masses else routing.at_probes(point.probes)
            if probing.recall - point.recall10 <= LOSS:
                continue
            probes, min_mass = (None, point.min_mass) if masses else (point.probes, None)
            better[place] = _point(searcher, split, probing, probes, min_mass, refine)
            if all_found(better[place]) or _level(list(better.values())):
                break
        wide += better.values()
        rungs = [better.get(place, point) for place, point in enumerate(rungs)]
    return wide


def _every_key(searcher: Searcher | GraphSearcher) -> Point:
    """Scoring every key itself: nothing is missed, whichever query asks."""
    return scored_all(searcher, searcher.n)


def scored_all(searcher: Searcher | GraphSearcher, n: int) -> Point:
    """Scoring so many keys themselves, all that may be results."""
    d = searcher.d
    looked_at = n if isinstance(searcher, GraphSearcher) else searcher.c
    scanned = n / searcher.n
    return Point(looked_at, 1.0, 1.0, scanned, 2.0 * n * d, refine=0, assured=(1.0,) * TOP)


def _is_coded(searcher: Searcher) -> bool:
    """Whether codes are scanned, and the keys themselves are there to score more candidates with."""
    return isinstance(searcher.store, OwnCells) and searcher.store.storage != "flat"


def estimate_routing(searcher: Searcher, split: Split) -> RoutingEstimate:
    """The router's scores for the queries of a split, and the cells of their top keys."""
    store, x, top = searcher.store, np.asarray(split.queries), np.asarray(split.top_ids)[:, :TOP]
    return RoutingEstimate.by(searcher.router, x, top, store.assignment, store.sizes, second=store.second)


def _point(
    searcher: Searcher,
    split: Split,
    probing: Probing,
    probes: int | None,
    min_mass: float | None = None,
    refine: int | None = None,
) -> Point:
    hits, every_cell = probing.hits, bool((probing.probes == searcher.c).all())
    if searcher.store.storage != "flat":
        unlabelled = replace(searcher, labels=None)  # the split knows keys by number, not by label
        top = np.asarray(split.top_ids)[:, :TOP]
        effort = Effort(probes, min_mass, refine)
        ids = unlabelled.search_with(np.asarray(split.queries), TOP, effort)[1]
        hits = (top[:, :, None] == ids[:, None, :]).any(axis=2)
        every_cell = False
    looks = 1 + len(_widths(searcher.n)) if _is_coded(searcher) else 1  # numbers of candidates to choose from
    scan = searcher.store_for(refine).scan_flops(probing.scanned, TOP)
    return Point(
        math.ceil(probing.probes.mean()),
        float(hits[:, 0].mean()),
        float(hits.mean()),
        float(probing.scanned.mean() / searcher.n),
        float(searcher.router.flops + scan.mean()),
        min_mass or 0.0,
        refine,
        # Scanning every float32 key misses nothing, whichever query asks.
        (1.0,) * hits.shape[1] if every_cell and probes else assured_recalls(hits, split.source, looks),
    )
