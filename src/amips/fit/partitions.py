"""Partitions that a fit tries: numbers of cells, plain and query-aware, by what they cost on val queries."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from amips import lean
from amips.cells import POINTS_PER_CELL, STRENGTH, Cells, fingerprint_of, query_aware
from amips.index import Storage
from amips.nets import AffineNet, Linear, Model
from amips.route import router_for
from amips.search.expected import Routed
from amips.task import Task
from amips.vectors import Vectors, open_vectors

Objective = Literal["flops", "latency", "throughput"]
Second = NDArray[np.int32]

TOP = 10  # the true top keys whose cells the router learns to find
TRIAL_SHARE = 0.25  # of the time given
# Cells tried, in units of sqrt(n): the likeliest first, as time may run out.
COUNTS = (4.0, 8.0, 1.0, 2.0, 0.5, 16.0)
STRENGTHS = (STRENGTH, 0.0, 2 * STRENGTH)  # of query-aware cells; 0 is plain k-means
ITERATIONS = 10  # of k-means
TRIALS, FEWEST_POINTS = 6, 16  # k-means looks at fewer points a cell, if so many trials would take too long


@dataclass(frozen=True)
class Settings:
    """What `fit` was asked for."""

    minutes: float
    cells: int | None
    recall: float
    objective: Objective
    storage: Storage | None
    spill: float | None
    regroup: int
    seed: int


@dataclass(frozen=True)
class Trial:
    """A partition, and what it costs to search with and without learning."""

    cells: Cells
    strength: float
    model: Model  # centroids in the reduced space: nothing is trained
    centroid: float  # FLOPs of plain IVF at the recall asked for: the same probes for every query
    routed: float  # ... of the model, as many probes as each query needs

    @property
    def kind(self) -> str:
        """What its cells are, in a word or two."""
        return f"query-aware {self.strength:g}" if self.strength else "plain"


class Partitions:
    """What is tried in one call of `fit`; `rate` is how many FLOPs a second labelling reached."""

    def __init__(self, work: Path, settings: Settings, rate: float, say: Callable[[str], None]) -> None:
        self.work, self.settings, self.rate, self.say = work, settings, rate, say
        self.seconds = 60 * settings.minutes

    def tried(self, task: Task) -> list[Trial]:
        """Partitions, by what they cost on val: as many as there is time for, two at least."""
        keys = open_vectors(task.path / "keys.npy")
        queries = open_vectors(task.path / "train" / "queries.npy")
        projection = lean.learn(keys, queries, lean.rank_for(task.d, lean.ROUTE_SHARE))
        full, recall = 2 * task.n * task.d, self.settings.recall
        self.say("trying cells; cost as a share of scanning all keys, on held-out queries:")
        trials: list[Trial] = []
        started = time.perf_counter()
        for count, strength in self._candidates(task.n):
            spent = time.perf_counter() - started
            if len(trials) >= 2 and spent * (1 + 1 / len(trials)) > self.seconds * TRIAL_SHARE:
                break
            cells = self._cells(task, keys, queries, count, strength)
            model = _untrained(task, cells, projection)
            plain = seen(task.with_cells(cells), None)
            centroid = 2 * task.d * (count + plain.by_probes(plain.probes_for(recall)).scanned.mean())
            routed = flops_at(task.with_cells(cells), model, recall)
            trials.append(Trial(cells, strength, model, centroid, routed))
            self.say(
                f"  {count:6,} cells, {trials[-1].kind:15}  plain IVF {centroid / full:6.2%}   "
                f"share-bounded, reduced routing {routed / full:6.2%}"
            )
        return trials

    def _cells(self, task: Task, keys: Vectors, queries: Vectors, count: int, strength: float) -> Cells:
        """A partition, kept for a call that continues."""
        path = self.work / f"cells-{count}-{strength:g}.npz"
        if path.exists():
            with np.load(path) as found:
                return Cells(found["assignment"], found["centroids"])
        top = np.asarray(task.train.top_ids)[:, :TOP]
        # Points a cell such that a trial takes a part of the time for trials, as labelling went.
        product = 2 * ITERATIONS * count * count * task.d
        points = int(self.rate * self.seconds * TRIAL_SHARE / TRIALS / product)
        made = query_aware(
            keys,
            queries,
            top,
            count,
            strength=strength,
            iterations=ITERATIONS,
            points=max(FEWEST_POINTS, min(POINTS_PER_CELL, points)),
            seed=self.settings.seed,
        )
        partial = path.with_suffix(".partial.npz")
        np.savez(partial, assignment=made.assignment, centroids=made.centroids)
        partial.rename(path)
        return made

    def counts(self, n: int) -> list[int]:
        """The numbers of cells that would be tried, if there is time: the one asked for, or several."""
        if self.settings.cells is not None:
            return [self.settings.cells]
        most = max(2, n // 8)
        return list(dict.fromkeys(min(max(2, round(f * n**0.5)), most) for f in COUNTS))

    def _candidates(self, n: int) -> Iterator[tuple[int, float]]:
        """Numbers of cells and strengths, the likeliest first; both kinds of cells come early."""
        counts = self.counts(n)
        pairs = [(count, strength) for strength in STRENGTHS for count in counts]
        # By turns: an aware and a plain partition of each number, the third strength last.
        early = [pair for count in counts for pair in ((count, STRENGTHS[0]), (count, STRENGTHS[1]))]
        yield from dict.fromkeys([*early, *pairs])


def flops_at(task: Task, model: Model, recall: float, second: Second | None = None) -> float:
    """Of a query, on average, at this recall: on val, with float32 keys and as many probes as each needs."""
    found = seen(task, model, second)
    scanned = found.by_share(found.share_for(recall)).scanned.mean()
    return float(model.architecture.score_flops + 2 * task.d * scanned)


def seen(task: Task, model: Model | None, second: Second | None = None) -> Routed:
    """The val queries as a router sees them."""
    router, cells = router_for(model, task.cells.centroids), task.cells
    x, true = np.asarray(task.val.queries), np.asarray(task.val.top_ids)[:, :TOP]
    sizes = cells.sizes
    if second is not None:
        sizes = sizes + np.bincount(second[second >= 0], minlength=cells.count)
    return Routed.by(router, x, true, cells.assignment, sizes, second=second)


def _untrained(task: Task, cells: Cells, projection: lean.Projection) -> Model:
    """A linear router that scores centroids in the reduced space."""
    about = {"keys": task.fingerprint, "cells": fingerprint_of(cells.assignment)}
    weights = {"A": projection.queries, "W": projection.weights(cells.centroids)}
    return AffineNet(Linear(rank=projection.r).architecture(task.n, task.d, cells.count), weights, about)
