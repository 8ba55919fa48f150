"""Adaptation: recent queries are searched exactly, and the efforts that they need are served.

Recall is kept, and what rises is the cost: an effort serves a recall only if it has that recall on the
queries the index was measured with *and* on recent ones. Where centroids choose the same cells cheaper than
the learned router does on recent queries, they choose from then on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from amips.errors import AmipsError
from amips.metrics import TOP
from amips.search.auditing import Recall, effort_in_words, exact_split
from amips.search.drift import Drift
from amips.search.effort import effort_of
from amips.search.graph_searcher import GraphSearcher
from amips.search.measuring import (
    MOST_SCANNED,
    estimate_routing,
    measure,
    measure_margins,
    measure_masses,
)
from amips.search.memory_measuring import measure_memory
from amips.search.memory_searcher import MemorySearcher, Snapshot, plain_index
from amips.search.origin import Origin
from amips.search.points import Point, recalls, served_point
from amips.search.searcher import Searcher
from amips.task import Split
from amips.vectors import Floats, open_vectors

SAMPLE, LEAST_SAMPLE = 1000, 200  # recent queries to search exactly: as many as the FLOPs below allow
MOST_FLOPS = 1e11  # of exact search: some seconds of one core
BELOW, STEP, MOST_STEPS, PARTS = (0.3, 0.6, 0.8), 1.4, 14, (0.25, 0.5, 0.75)  # efforts that are tried
POWER = 1.5  # of the effort, that a bound on the mass falls with
ENOUGH = 0.99  # of the top keys, beyond which no effort is tried
LEAST_MASS = 1e-9
WORTH = 0.98  # of the cost of the learned router, that centroids must come down to


@dataclass(frozen=True)
class Adaptation:
    """How an index serves while traffic is another than its log.

    Args:
        drift: what was noticed.
        queries: recent ones that were searched for exactly.
        target: the recall@10 asked for.
        before: recall@10 on them, as the index was fitted; `after` as it is served now.
        cost_before, cost: FLOPs of a query, as a share of a full scan.
        point: the effort that serves the target now.
        by_centroids: whether centroids choose the cells now, because the learned router costs more.
        points, temperature: what is served, see `Searcher`.
    """

    drift: Drift
    queries: int
    target: float
    before: Recall
    after: float
    cost_before: float
    cost: float
    point: Point
    by_centroids: bool
    points: list[Point]
    temperature: float = 0.0
    origin: Origin | None = None

    def fits(self, snapshot: Snapshot) -> bool:
        """Whether it was made for this index, not for one before a refit or another router."""
        origin = snapshot.origin
        return self.origin is None or (origin.round, origin.events) == (self.origin.round, self.origin.events)

    def on(self, snapshot: Snapshot) -> Snapshot:
        """A snapshot as it is served; a memory of the log stays in front, at its gate."""
        index, points = plain_index(snapshot), [point for point in self.points if not point.recognised]
        if isinstance(index, GraphSearcher):
            behind: Searcher | GraphSearcher = replace(index, points=points)
        else:
            model = None if self.by_centroids else index.model
            depths = [] if self.by_centroids else index.depths  # those of the learned router
            behind = replace(index, points=points, temperature=self.temperature, model=model, depths=depths)
        if not isinstance(snapshot, MemorySearcher):
            return behind
        return replace(snapshot, index=behind, points=self.points)

    def to_json(self) -> dict[str, Any]:
        """Plain values, for a monitor."""
        values = {name: getattr(self, name) for name in ("queries", "target", "after", "cost_before", "cost")}
        values |= {"before": vars(self.before), "by_centroids": self.by_centroids}
        return {**values, "point": self.point.to_json(), "drift": self.drift.to_json()}

    def __str__(self) -> str:
        lines = [
            f"adapted to {self.queries:,} recent queries, searched exactly",
            f"recall@10 {self.before} as it was fitted, {self.after:.3f} now; the target is {self.target:g}",
            f"cost {self.cost:.2%} of a full scan, {self.cost_before:.2%} before: "
            f"{effort_in_words(self.point)}",
        ]
        if self.by_centroids:
            lines.append(
                "centroids choose the cells: on such queries the learned router costs more; refit it"
            )
        return "\n".join(lines)


def adaptation(snapshot: Snapshot, recent: Floats, drift: Drift, seed: int = 0) -> Adaptation:
    """What a snapshot needs for recent queries, of norm 1 [m, d]."""
    plain = plain_index(snapshot)
    if not plain.points or plain.target_recall is None:
        raise AmipsError("nothing was measured on this index when it was made: there is nothing to adapt")
    target, full = plain.target_recall, 2.0 * plain.n * plain.d
    most = int(min(SAMPLE, max(LEAST_SAMPLE, MOST_FLOPS / full)))
    split, _ = exact_split(plain, open_vectors(recent, "queries"), most, seed, "skip", None)
    unlabelled = replace(plain, labels=None)
    served = served_point(plain.points, target)
    before, flops = _served(unlabelled, split, served)
    points = safer(plain.points, around(unlabelled, split, served, target))
    point, by_centroids, temperature = served_point(points, target), False, 0.0
    if isinstance(unlabelled, Searcher):
        temperature = unlabelled.temperature
        central = _by_centroids(unlabelled, split, target)
        if central is not None:
            others = around(central, split, served_point(central.points, target), target)
            cheapest = served_point(others, target)
            enough = cheapest.recall_assured(TOP) >= min(target, point.recall_assured(TOP))
            if enough and cheapest.flops < WORTH * point.flops:
                by_centroids, point = True, cheapest
                points, temperature = others, central.temperature
    if isinstance(snapshot, MemorySearcher):
        behind = unlabelled
        if by_centroids:
            assert isinstance(unlabelled, Searcher)
            behind = replace(unlabelled, model=None, temperature=temperature)
        points = [*points, *_with_memory(snapshot, behind, points, split)]
        point = served_point(points, target)
    return Adaptation(
        drift=drift,
        queries=len(split),
        target=target,
        before=before,
        after=point.recall10,
        cost_before=flops / full,
        cost=point.flops / full,
        point=point,
        by_centroids=by_centroids,
        points=points,
        origin=plain.origin,
        temperature=temperature,
    )


def safer(fitted: Sequence[Point], recent: Sequence[Point]) -> list[Point]:
    """Points of recent queries that promise no more than those of the fit do at the same effort.

    At an effort between two of the fit, the lesser one counts; at one below all of them nothing is promised.
    Efforts of the fit beyond the last of recent queries, which find as much at least, promise what that does.
    """
    points = [point for point in recent if point.certain]
    kinds = {_kind(point) for point in [*fitted, *recent] if not point.certain}
    for kind in kinds:
        older = sorted((p for p in fitted if not p.certain and _kind(p) == kind), key=_effort)
        newer = sorted((p for p in recent if not p.certain and _kind(p) == kind), key=_effort)
        for point in newer:
            lesser = [one for one in older if _effort(one) <= _effort(point) * (1 + 1e-9)]
            if lesser:
                promised = zip(point.assured, lesser[-1].assured, strict=False)
                points.append(replace(point, assured=tuple(min(pair) for pair in promised)))
        for one in older if newer else []:
            if _effort(one) > _effort(newer[-1]) * (1 + 1e-9):
                promised = zip(one.assured, newer[-1].assured, strict=False)
                points.append(replace(one, assured=tuple(min(pair) for pair in promised)))
    return points or list(fitted)


def _with_memory(
    snapshot: MemorySearcher, behind: Searcher | GraphSearcher, points: list[Point], split: Split
) -> list[Point]:
    """The points of what is behind a memory, with it in front: its answers to recent queries count, too."""
    by_mass = any(point.min_mass for point in points)
    efforts = [one for one in points if not one.certain and (one.min_mass > 0) == by_mass]
    asked = MemorySearcher(behind, snapshot.memory, [replace(one, recognised=1.0) for one in efforts])
    recent = [one for one in measure_memory(asked, split) if one.recognised]
    return safer([one for one in snapshot.points if one.recognised], recent) if recent else []


def _kind(point: Point) -> tuple[Any, ...]:
    return point.refine, point.min_mass > 0, point.margin > 0, point.recognised > 0


def _effort(point: Point) -> float:
    """Grows with how much is looked at, within a kind."""
    if point.margin:
        return point.margin
    return 1 / point.min_mass if point.min_mass else float(point.probes)


def around(index: Searcher | GraphSearcher, split: Split, served: Point, target: float) -> list[Point]:
    """Points on other queries at efforts around one: three below, and above up to where nearly all is found.

    Few, because each is a search: the step at which the target is reached is divided again.
    """
    if served.certain:
        return [served]
    below = [_at(index, split, served, factor) for factor in BELOW]
    above = [_at(index, split, served, 1.0)]
    while len(above) < MOST_STEPS and not _nearly_all(above[-1]) and not _everything(index, above[-1]):
        above.append(_at(index, split, served, STEP ** len(above)))
    reached = next((i for i, point in enumerate(above) if point.recall_assured(TOP) >= target), 0)
    between = [STEP ** (reached - 1 + part) for part in PARTS] if reached else []
    points = [*below, *above, *(_at(index, split, served, factor) for factor in between)]
    # Of codes and of graphs what scores every key is sure, whatever is asked.
    points += [point for point in index.points if point.certain]
    return points


def _at(index: Searcher | GraphSearcher, split: Split, served: Point, factor: float) -> Point:
    """The point of `factor` times the effort of one, measured on a split."""
    if isinstance(index, GraphSearcher):
        return measure_margins(index, split, [factor * served.margin])[0]
    if served.min_mass:
        return measure_masses(index, split, [min(1.0, served.min_mass / factor**POWER)], served.refine)[0]
    probes = min(index.c, max(1, round(factor * served.probes)))
    return measure(index, split, [probes], served.refine)[0]


def _nearly_all(point: Point) -> bool:
    return point.recall_assured(TOP) >= ENOUGH


def _everything(index: Searcher | GraphSearcher, point: Point) -> bool:
    return point.scanned >= MOST_SCANNED or (isinstance(index, Searcher) and point.probes >= index.c)


def _by_centroids(index: Searcher, split: Split, target: float) -> Searcher | None:
    """The same cells chosen by centroids, if that looks cheaper on a split; the point is an estimate."""
    if index.model is None:
        return None
    central = replace(index, model=None)
    costs = []
    for one in (index, central):
        routing = estimate_routing(one, split)
        bound = routing.min_mass_for(target)
        scan = one.store.scan_flops(routing.at_mass(bound).scanned, TOP)
        costs.append((float(one.router.flops + scan.mean()), bound, routing.temperature))
    (learned, _, _), (flops, bound, temperature) = costs
    if flops >= WORTH * learned:
        return None
    point = Point(1, target, target, 0.0, flops, max(bound, LEAST_MASS), assured=(target,) * TOP)
    sure = [one for one in index.points if one.certain]
    return replace(central, temperature=temperature, points=[point, *sure])


def _served(index: Searcher | GraphSearcher, split: Split, point: Point) -> tuple[Recall, float]:
    """Recall and mean FLOPs of a point on other queries."""
    x, top = np.asarray(split.queries), np.asarray(split.top_ids)
    if isinstance(index, GraphSearcher):
        _, ids, counts = index.search_with(x, TOP, None if point.certain else point.margin)
        flops = index.cost_of(counts).flops
    else:
        effort = effort_of(point)
        ids, flops = index.search_with(x, TOP, effort)[1], index.cost_with(x, TOP, effort).flops
    return Recall.of(recalls(ids, top, TOP)), float(np.mean(flops))
