"""A refit: what an index can learn from new queries in a minute, beginning with what it is.

    points alone                   measured anew on the newest queries
    cells: second cells            for keys that new queries want elsewhere
    cells: keys moved              by some rounds of k-means that begin with the cells there are
    cells: router trained          from its weights, on new queries and the sample of the log
    graph: edges                   of keys that new queries want together, and entry points of the mixed log

Each step of cells is kept if it costs less on the newest queries, as its routing estimates it; the result is
built, measured, and compared with the index as it was, query by query: what is put in place costs less with
95 % confidence.
"""

import math
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips import exact
from amips.cells import Cells, fingerprint_of
from amips.errors import AmipsError
from amips.fitting.refit_cells import CellsRefit
from amips.fitting.refit_graph import with_log_edges
from amips.graph import LOG_DEPTH
from amips.index import FaissCellStore
from amips.metrics import TOP, mean_interval
from amips.search import (
    GraphSearcher,
    MemorySearcher,
    QueryLog,
    Refit,
    Searcher,
    Snapshot,
    calibrated,
    calibrated_graph,
    plain_index,
    recalls,
    served_point,
    with_facts,
    with_memory,
)
from amips.task import Split, Task
from amips.vectors import Floats, Vectors, first_equal, inspect, open_vectors, unit_rows

LEAST, LEAST_KEYS = 400, 2 * TOP  # new queries, and keys to find them in
HELD_OUT, LEAST_HELD_OUT, PARTS = 1000, 200, 5  # of the new queries: the newest fifth, between these bounds
REFERENCE = 300  # held-out queries of the log that the recall is told of, before and after
LABEL_TIME = 0.55  # of the time given, to search exactly
WORTH = 0.98  # of the cost, at most, that a change must come down to
SURE = 1.645  # deviations of a mean, that 95 % of means are above


def refitted(snapshot: Snapshot, queries: Any, minutes: float, seed: int) -> Refit:
    """A better index than a snapshot for queries like the newest of these; AmipsError if there is none."""
    plain = plain_index(snapshot)
    if not plain.points or plain.target_recall is None:
        raise AmipsError("nothing was measured on this index when it was made: there is nothing to refit")
    if plain.n < LEAST_KEYS:
        raise AmipsError(f"refused: of {plain.n:,} keys all are scored as fast as any are found")
    material = Material.of(snapshot, queries, 60 * minutes, seed)
    target, val = plain.target_recall, material.task.val
    unlabelled = replace(plain, labels=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        recall, flops = _served(unlabelled, val, target)
        before = _calibrated(unlabelled, val, target)
        tried = {"its points": _cost(before, target)}
        ways: dict[str, Searcher | GraphSearcher] = {"its points measured anew": before}
        for what, index in _candidates(unlabelled, material, target, tried):
            ways[what] = _calibrated(index, val, target)
            tried[what] = _cost(ways[what], target)
        what = min(ways, key=lambda name: _cost(ways[name], target))
        anew, cost = _served(before, val, target)[1], float(flops.mean())
        gained = what != "its points measured anew" and (
            _reaches(ways[what], target) > _reaches(before, target)
            or surely_cheaper(_served(ways[what], val, target)[1], anew)
        )
    if not gained:
        what = "its points measured anew"
        missed = mean_interval(recall)[1] < target
        if not missed and not surely_cheaper(anew, flops):
            raise AmipsError(
                f"refused: on the newest {len(val):,} queries nothing is better than what is there "
                f"(recall@10 {recall.mean():.3f} at {cost:.2%} of a full scan; tried: {_listed(tried)})"
            )
    origin = snapshot.origin
    log = origin.log
    if log is not None:
        most = max(len(log.train), len(material.new))
        log = log.followed_by(material.new, material.new_top, np.asarray(val.queries), most)
    else:
        log = _first_log(material)
    facts: dict[str, Any] = {"labels": plain.labels, "report": None}  # which told of other queries
    facts["origin"] = origin.after("refitted", round=origin.round + 1, log=log)
    better: Snapshot = with_facts(ways[what], **facts)
    if isinstance(snapshot, MemorySearcher):
        behind = plain_index(better)
        better = with_memory(behind, snapshot.memory, val, target) or behind
    return Refit(
        queries=len(material.new),
        older=material.older,
        held_out=len(val),
        what=what,
        of_log=_of_log_recalls(material.reference, unlabelled, ways[what], target),
        recall=float(recall.mean()),
        cost=cost,
        cost_recalibrated=_cost(before, target),
        cost_now=_cost(ways[what], target),
        target=target,
        tried=tried,
        index=better,
    )


@dataclass(frozen=True)
class Material:
    """What a refit learns from.

    Args:
        task: the live keys in their cells; as train, queries of the log and new ones, mixed; as val, the
            newest.
        new: the new queries that were used, [m, d].
        older: queries of the log among those of train.
        wanted: keys that the new queries want.
        reference: held-out queries of the log, as many as there was time for; None if none.
        seconds: that are left.
        rate: FLOPs a second, of exact search.
    """

    task: Task
    new: Floats
    older: int
    wanted: NDArray[np.int64]
    reference: Split | None
    seconds: float
    rate: float
    seed: int

    @property
    def new_top(self) -> NDArray[np.int32]:
        """The top keys of the new queries, best first."""
        return np.asarray(self.task.train.top_ids)[self.older :, :TOP]

    @classmethod
    def of(cls, snapshot: Snapshot, queries: Any, seconds: float, seed: int) -> "Material":
        """Search exactly for as many of the queries as there is time for, the newest first."""
        started = time.monotonic()
        x = _checked(queries, snapshot.d)
        keys = _keys(snapshot)
        held_out = max(LEAST_HELD_OUT, min(HELD_OUT, len(x) // PARTS))
        label = _Labeller(keys, snapshot.d, started + LABEL_TIME * seconds)
        val = label(x[-held_out:], everything=True)
        new = label(x[:-held_out][::-1])  # the newest first
        fresh = x[:-held_out][::-1][: len(new[1])]
        reference = _reference(snapshot.origin.log, label)
        old, older = _of_log(snapshot.origin.log, label, seed)
        width = min(older.shape[1], new[1].shape[1])
        train, ids = np.concatenate([old, fresh]), np.concatenate([older[:, :width], new[1][:, :width]])
        scores = np.zeros(ids.shape, np.float32)  # which nothing here learns from
        plain = plain_index(snapshot)
        if isinstance(plain, Searcher):
            cells = Cells(plain.store.assignment.astype(np.int32), plain.store.centroids)
        else:
            cells = Cells(np.zeros(plain.n, np.int32), np.zeros((1, plain.d), np.float32))
        fingerprint = plain.fingerprint or inspect(keys, zero="keep").fingerprint
        task = Task(
            Path("refit"),
            keys,
            cells,
            _split(train, scores, ids, 0),
            _split(x[-held_out:], *val, len(train)),
            _split(x[-held_out:], *val, len(train)),
            fingerprint,
            {"cells": fingerprint_of(cells.assignment), "split": "time"},
        )
        wanted = np.unique(new[1][:, :TOP]).astype(np.int64)
        left = seconds - (time.monotonic() - started)
        return cls(task, fresh, len(old), wanted, reference, left, label.rate, seed)


class _Labeller:
    """Exact search until a time has come."""

    def __init__(self, keys: Vectors, d: int, until: float) -> None:
        self.keys, self.until = keys, until
        self.each = 0.0  # seconds of a query
        self.depth = min(LOG_DEPTH, keys.n)

    @property
    def rate(self) -> float:
        """FLOPs a second."""
        return 2.0 * self.keys.n * self.keys.d / max(self.each, 1e-9)

    def __call__(self, x: Floats, everything: bool = False) -> tuple[Floats, NDArray[np.int32]]:
        """Top scores and keys of the first of these queries, as many as there is time for."""
        if not everything and self.each:
            x = x[: max(0, int((self.until - time.monotonic()) / self.each))]
        if not len(x):
            return np.empty((0, self.depth), np.float32), np.empty((0, self.depth), np.int32)
        started = time.monotonic()
        scores, ids = exact.top_k(self.keys, x, self.depth)
        self.each = (time.monotonic() - started) / len(x)
        return np.asarray(scores), np.asarray(ids).astype(np.int32)


def _reference(log: QueryLog | None, label: _Labeller) -> Split | None:
    """Held-out queries of the log, to see what becomes of what was asked before."""
    if log is None:
        return None
    x = log.reference[:REFERENCE]
    scores, ids = label(x)
    return _split(x[: len(ids)], scores, ids, 0) if len(ids) else None


def _of_log(log: QueryLog | None, label: _Labeller, seed: int) -> tuple[Floats, NDArray[np.int32]]:
    """Queries of the sample of the log and their top keys.

    Those that want a key that has gone are searched for again, as many as there is time for.
    """
    if log is None:
        return np.empty((0, label.keys.d), np.float32), np.empty((0, label.depth), np.int32)
    x, top = log.older(seed)
    whole = (top >= 0).all(axis=1)
    again = label(x[~whole])[1][:, : top.shape[1]]
    if again.shape[1] < top.shape[1]:  # fewer keys are left than a list holds
        return x[~whole][: len(again)], again
    return np.concatenate([x[whole], x[~whole][: len(again)]]), np.concatenate([top[whole], again])


def _split(x: Floats, scores: Floats, ids: NDArray[np.int32], first: int) -> Split:
    nothing = np.empty((len(x), 0), np.float32)
    source = np.arange(first, first + len(x))
    return Split(open_vectors(x, "queries"), source, scores, ids, nothing, nothing.astype(np.int32))


def _checked(queries: Any, d: int) -> Floats:
    """New queries at norm 1, each once, in their order."""
    vectors = open_vectors(queries, "queries")
    if vectors.d != d:
        raise AmipsError(f"{vectors.name} has dimension {vectors.d}, this index has {d}")
    inspect(vectors, zero="keep", any_norm=True)
    x = vectors.load()
    x = unit_rows(x[x.any(axis=1)])[0]
    x = x[first_equal(open_vectors(x, "queries")) == np.arange(len(x))] if len(x) else x
    if len(x) < LEAST:
        raise AmipsError(
            f"{len(x):,} different queries: a refit needs {LEAST}, and chooses on {LEAST_HELD_OUT} of them"
        )
    return x


def _keys(snapshot: Snapshot) -> Vectors:
    plain = plain_index(snapshot)
    if isinstance(plain, GraphSearcher):
        return open_vectors(plain.store.keys, "keys")
    if not isinstance(plain.store, FaissCellStore):
        raise AmipsError("a refit needs the keys themselves: this index leaves them with another library")
    keys = plain.store.keys
    return open_vectors(plain.store.keys_at(np.arange(plain.n)) if keys is None else keys, "keys")


def _candidates(
    index: Searcher | GraphSearcher, material: Material, target: float, tried: dict[str, float]
) -> list[tuple[str, Searcher | GraphSearcher]]:
    if isinstance(index, GraphSearcher):
        return [
            ("edges and entry points of the new log", with_log_edges(index, material.task, material.seed))
        ]
    if not len(material.task.train) or index.c < 2:
        return []
    parts = (material.wanted, target, material.seconds, material.rate, material.seed)
    refit = CellsRefit(index, material.task, *parts, tried)
    better = refit.run()
    return [] if better is None else [better]


def _calibrated(index: Searcher | GraphSearcher, val: Split, target: float) -> Searcher | GraphSearcher:
    if isinstance(index, GraphSearcher):
        return calibrated_graph(index, val, target)
    return calibrated(index, val, target)


def _cost(index: Searcher | GraphSearcher, target: float) -> float:
    """FLOPs at the target, as a share of a full scan; more than that where it is out of reach."""
    point = served_point(index.points, target)
    return point.flops / (2.0 * index.n * index.d) + (0 if _reaches(index, target) else 1)


def _reaches(index: Searcher | GraphSearcher, target: float) -> bool:
    return served_point(index.points, target).recall_assured(TOP) >= target


def surely_cheaper(cost: NDArray[np.float64], than: NDArray[np.float64]) -> bool:
    """Whether one cost of the same queries [m] is so much less than another that it pays, 95 % sure."""
    gains = WORTH * than - cost
    return float(gains.mean()) > SURE * float(gains.std(ddof=1)) / math.sqrt(len(gains))


def _served(
    index: Searcher | GraphSearcher, val: Split, target: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Recall@10 of each query of a split, and its cost, as the index serves the target."""
    x = np.asarray(val.queries)
    ids = index.search(x, TOP, recall=target, best_effort=True)[1]
    flops = index.cost(x, TOP, recall=target, best_effort=True).flops
    return recalls(ids, np.asarray(val.top_ids), TOP), flops / (2.0 * index.n * index.d)


def _of_log_recalls(
    reference: Split | None,
    before: Searcher | GraphSearcher,
    now: Searcher | GraphSearcher,
    target: float,
) -> tuple[float, float] | None:
    """Recall@10 of held-out queries of the log, before and now; None without any."""
    if reference is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        old, new = (_served(index, reference, target)[0].mean() for index in (before, now))
    return float(old), float(new)


def _listed(tried: dict[str, float]) -> str:
    return ", ".join(f"{name} {cost:.2%}" for name, cost in tried.items())


def _first_log(material: Material) -> QueryLog:
    """A sample of the log of an index that had none."""
    empty = np.empty((0, material.task.d), np.float16)
    rounds = np.empty(0, np.int16)
    nothing = QueryLog(empty, empty, rounds, rounds, np.empty((0, TOP), np.int32))
    val = np.asarray(material.task.val.queries)
    return nothing.followed_by(material.new, material.new_top, val, len(material.new))
