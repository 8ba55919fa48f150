"""Fitting the gate of a memory, and measuring an index with the memory in place, on held-out queries."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.metrics import TOP
from amips.search.effort import effort_of
from amips.search.graph_searcher import GraphSearcher
from amips.search.measuring import measure_margins, measure_masses
from amips.search.memory import Memory
from amips.search.memory_searcher import MemorySearcher, Snapshot
from amips.search.points import Point, assured_recalls, point_for, surest_point
from amips.search.searcher import Searcher
from amips.task import Split

# What the answers of the memory may miss, in parts of what the target recall lets be missed: a gate for each.
LOOSE = (0.2, 0.5, 1.0)
WINDOW = 25  # queries next to each other by cosine, over which recall is averaged
STEPS = 4  # that the step of the ladder at the target is divided into


@dataclass(frozen=True)
class Answers:
    """What a memory answers to each of m queries, were it recognised.

    Args:
        cosine: with the nearest logged query, [m].
        hits: which of the true top keys are among what that one found, [m, TOP].
        looking: FLOPs of the look-up, [m].
        scoring: FLOPs of scoring what was found.
    """

    cosine: NDArray[np.float32]
    hits: NDArray[np.bool_]
    looking: NDArray[np.int64]
    scoring: int

    @classmethod
    def of(cls, memory: Memory, split: Split) -> "Answers":
        """The answers to the queries of a split, which have norm 1."""
        x, top = np.asarray(split.queries), np.asarray(split.top_ids)[:, :TOP]
        cosine, ids = memory.nearest(x)
        hits = (top[:, :, None] == memory.top[ids][:, None, :]).any(axis=2)
        return cls(cosine, hits, memory.flops(x), 2 * x.shape[1] * memory.depth)

    def gates(self, recall: float) -> list[float]:
        """Cosines down to which answers have about this recall, and some above.

        Those at the gate, not all above it together: new queries must not pay for what comes again.
        """
        order = np.argsort(-self.cosine, kind="stable")
        sums = np.concatenate([[0.0], np.cumsum(self.hits.mean(axis=1)[order])])
        ends = np.arange(1, len(order) + 1)
        starts = np.maximum(0, ends - WINDOW)
        means = (sums[ends] - sums[starts]) / (ends - starts)
        gates = []
        for loose in LOOSE:
            short = np.flatnonzero((means < 1 - loose * (1 - recall)) & (ends >= WINDOW))
            last = len(order) if not len(short) else int(short[0]) - WINDOW // 2
            if last > 0 and self.cosine[order[last - 1]] > 0:
                gates.append(float(self.cosine[order[last - 1]]))
        return list(dict.fromkeys(gates))


def with_memory(
    index: Searcher | GraphSearcher, memory: Memory, split: Split, recall: float
) -> MemorySearcher | None:
    """The index with the memory in front, its gate and points fitted on a split; None if that does not pay.

    It pays if it makes the recall cheaper, in FLOPs. The index is searched at each of its own points; what
    the memory would answer takes the place of what was found for the queries that a gate lets through.
    """
    answers = Answers.of(memory, split)
    gates = answers.gates(recall)
    efforts = [point for point in index.points if _usable(index, point)]
    searched = [_searched(index, split, point) for point in efforts] if gates else []
    best, least = None, _cost(index.points, recall)
    for gate in gates:
        gated = memory.with_gate(gate)
        points = [_point(*one, gated, answers, split, len(gates)) for one in searched]
        cost = _cost([*index.points, *points], recall)
        if cost < least:
            best, least = MemorySearcher(index, gated, [*index.points, *points]), cost
    if best is None:
        return None
    finer = [_searched(index, split, point) for point in _between(best.points, recall)]
    more = [_point(*one, best.memory, answers, split, len(gates)) for one in finer]
    return replace(best, points=[*best.points, *more])


def measure_index(index: Snapshot, split: Split, every: int = 1) -> list[Point]:
    """Recall and cost of an index on a split, by its stopping rule; with its memory in place and without.

    `every` so manieth step of the ladder of efforts of cells is measured.
    """
    if isinstance(index, GraphSearcher):
        return measure_margins(index, split)
    if isinstance(index, Searcher):
        return measure_masses(index, split, every=every)
    return [*measure_index(index.index, split, every), *measure_memory(index, split)]


def measure_memory(index: MemorySearcher, split: Split) -> list[Point]:
    """Recall and cost on a split with the memory in place, at the points that were measured with it."""
    answers = Answers.of(index.memory, split)
    efforts = [point for point in index.points if point.recognised]
    searched = [_searched(index.index, split, point) for point in efforts]
    return [_point(*one, index.memory, answers, split, 1) for one in searched]


Searched = tuple[Point, NDArray[np.bool_], NDArray[np.int64], NDArray[np.float64], float]


def _usable(index: Searcher | GraphSearcher, point: Point) -> bool:
    """Whether a point is of the stopping rule that is used, and does not score every key."""
    by_mass = any(one.min_mass for one in index.points)
    return not point.certain and (point.min_mass > 0) == by_mass


def _searched(index: Searcher | GraphSearcher, split: Split, point: Point) -> Searched:
    """A point, which of the top keys the index finds at it [m, TOP], FLOPs [m], shares of the keys that are
    scored [m], and the share that one key is.
    """
    x, top = np.asarray(split.queries), np.asarray(split.top_ids)[:, :TOP]
    if isinstance(index, GraphSearcher):
        _, ids, counts = index.search_with(x, TOP, point.margin)
        cost = index.cost_of(counts)
    else:
        ids = index.search_with(x, TOP, effort_of(point))[1]
        cost = index.cost_with(x, TOP, effort_of(point))
    hits = (top[:, :, None] == ids[:, None, :]).any(axis=2)
    return point, hits, cost.flops, cost.scanned / index.n, 1 / index.n


def _point(
    point: Point,
    index_hits: NDArray[np.bool_],
    flops: NDArray[np.int64],
    scanned: NDArray[np.float64],
    one_key: float,
    memory: Memory,
    answers: Answers,
    split: Split,
    looks: int,
) -> Point:
    """The same effort with the memory in place; `looks` is among how many gates one was chosen."""
    known = answers.cosine >= memory.floor
    hits = np.where(known[:, None], answers.hits, index_hits)
    cost = answers.looking + np.where(known, answers.scoring, flops)
    figures: dict[str, Any] = {
        "recall1": float(hits[:, 0].mean()),
        "recall10": float(hits.mean()),
        "scanned": float(np.where(known, memory.depth * one_key, scanned).mean()),
        "flops": float(cost.mean()),
        "recognised": float(known.mean()),
        "assured": assured_recalls(hits, split.source, looks),
    }
    return replace(point, **figures)


def _between(points: Sequence[Point], recall: float) -> list[Point]:
    """Efforts between the point that serves a recall and the next cheaper one with the memory."""
    chosen = point_for(points, recall, TOP)
    cheaper = [p for p in points if p.recognised and p.refine == chosen.refine and p.flops < chosen.flops]
    if not cheaper:
        return []
    below = max(cheaper, key=lambda point: point.flops)
    parts = [step / STEPS for step in range(1, STEPS)]
    if chosen.margin:
        span = chosen.margin - below.margin
        return [replace(chosen, margin=below.margin + part * span) for part in parts]
    if chosen.min_mass:
        ratio = chosen.min_mass / below.min_mass
        return [replace(chosen, min_mass=below.min_mass * ratio**part) for part in parts]
    return []


def _cost(points: Sequence[Point], recall: float) -> float:
    """FLOPs at a recall; infinite if it is out of reach."""
    if not points or surest_point(points, TOP).recall_assured(TOP) < recall:
        return math.inf
    return point_for(points, recall, TOP).flops
