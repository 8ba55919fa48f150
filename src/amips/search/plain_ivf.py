"""Plain IVF beside an index: what centroids would have found, for as many keys scored and at the same recall.

An index of cells is compared with centroid routing on its own cells. A graph has none: its keys are put in
cells by k-means. Of these only the cell of each key is kept, not another copy of the keys: 4 bytes a key.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from amips.blas import threads as limit_threads
from amips.cells import default_count, kmeans
from amips.errors import AmipsError
from amips.index import KeyMask
from amips.routers import CentroidRouter, RoutingEstimate
from amips.search.graph_searcher import GraphSearcher
from amips.search.inputs import split_norms
from amips.search.memory_searcher import Snapshot, plain_index
from amips.search.query_log import QueryLog
from amips.search.searcher import Searcher
from amips.vectors import Floats, open_vectors

Ids = NDArray[np.int64]
Cells = NDArray[np.int32]
Result = TypeVar("Result")

AS_MANY_KEYS, SAME_RECALL = "plain IVF, as many keys", "plain IVF, same recall"
MOST_BYTES = 1 << 29  # of keys, beyond which clustering them takes too long to be done beside a service
ITERATIONS = 10  # of k-means: for a comparison, not for an index that lasts
LOGGED = 500  # queries of the log that say how many probes a recall needs
BLOCK_BYTES = 1 << 26  # of keys that are gathered at a time
TIMES, TIMING_SECONDS = 5, 0.05  # that something is measured: so often, or for so long


@dataclass(frozen=True)
class Method:
    """What one way to search costs for one query.

    Args:
        seconds: of the query alone, in one thread.
        scanned: keys that were scored.
        probed: cells that were scanned, or keys of a graph that were visited.
        results: what it found: key numbers, or ids of another library's keys.
    """

    name: str
    seconds: float
    scanned: int
    probed: int
    results: Ids = field(repr=False, compare=False)


@dataclass(frozen=True)
class PlainIvf:
    """Plain IVF on the keys of an index.

    Args:
        store: of the index, while it has the same keys.
        centroids: [c, d].
        assignment, second: the cell of each key, [n], and another one or -1; None if no key has two.
        logged, top: queries of the log at norm 1 [m, d], and the numbers of their top keys [m, 10].
    """

    store: Any
    centroids: Floats
    assignment: Cells
    second: Cells | None
    logged: Floats
    top: Cells

    @classmethod
    def of(cls, snapshot: Snapshot, *, seed: int = 0) -> "PlainIvf":
        """For the keys of an index; AmipsError if it is a graph of too many to be clustered in passing."""
        index = plain_index(snapshot)
        logged = _logged(index.origin.log, index.d)
        if isinstance(index, Searcher):
            store = index.store
            return cls(store, store.centroids, store.assignment, store.second, *logged)
        if 4 * index.n * index.d > MOST_BYTES:
            raise AmipsError(f"{index.n:,} keys are too many to be put in plain cells for a comparison")
        keys = open_vectors(index.store.keys[: index.n], "keys")
        with limit_threads(1):
            cells = kmeans(keys, default_count(index.n), iterations=ITERATIONS, seed=seed)
        return cls(index.store, cells.centroids, cells.assignment, None, *logged)

    @property
    def c(self) -> int:
        """The number of cells."""
        return len(self.centroids)

    def methods(
        self,
        index: Searcher | GraphSearcher,
        x: Floats,
        k: int,
        allowed: KeyMask | None,
        scanned: int,
        recall: float | None,
    ) -> list[Method]:
        """What plain IVF makes of one query [1, d] if it scores as many keys, and at a recall.

        Args:
            index: with the same store.
            allowed: the keys that may be results.
            scanned: how many keys to score.
            recall: that the log has with a number of probes; None if none was asked for.
        """
        live = allowed or index.alive
        order = np.argsort(-(self.centroids @ split_norms(x)[0][0]), kind="stable")
        keys = np.cumsum(self._counts(live)[order])
        wanted = {AS_MANY_KEYS: min(self.c, 1 + int(np.searchsorted(keys, scanned)))}
        if recall is not None and self._estimate is not None:
            wanted[SAME_RECALL] = self._estimate.probes_for(recall)
        methods = []
        for name, probes in wanted.items():
            seconds, results = self._search(index, x, k, probes, allowed)
            methods.append(Method(name, seconds, int(keys[probes - 1]), probes, results))
        return methods

    @cached_property
    def _estimate(self) -> RoutingEstimate | None:
        """What centroids find of the log; None without one."""
        if not len(self.logged):
            return None
        router = CentroidRouter(self.centroids)
        parts = (self.logged, self.top, self.assignment, self._counts(None))
        return RoutingEstimate.by(router, *parts, second=self.second)

    def _counts(self, live: KeyMask | None) -> Ids:
        """Keys in each cell, of those that may be results."""
        cells = [self.assignment] if self.second is None else [self.assignment, self.second]
        rows = np.concatenate(cells if live is None else [part[live.numbers] for part in cells])
        return np.bincount(rows[rows >= 0], minlength=self.c)

    def _search(
        self, index: Searcher | GraphSearcher, x: Floats, k: int, probes: int, allowed: KeyMask | None
    ) -> tuple[float, Ids]:
        """The seconds that a search takes, and the numbers of the results."""
        if isinstance(index, Searcher):
            same = Searcher(index.store, None, alive=index.alive)
            seconds, (_, ids) = timed(lambda: same.search(x, k, probes=probes, allowed=allowed))
            return seconds, ids[0]
        runs = [self._scan(index, x, k, probes, allowed or index.alive) for _ in range(TIMES)]
        return min(seconds for seconds, _ in runs), runs[0][1]

    def _scan(
        self, index: GraphSearcher, x: Floats, k: int, probes: int, live: KeyMask | None
    ) -> tuple[float, Ids]:
        """The same in cells that are not laid out: the time is that of choosing cells and of scoring keys.

        Gathering keys is left out: in an index of these cells they lie beside each other.
        """
        u, v, _ = split_norms(x)
        start = time.perf_counter()
        scores = self.centroids @ u[0]
        cells = np.argpartition(-scores, probes - 1)[:probes]
        seconds = time.perf_counter() - start
        entries, starts = self._entries
        numbers = np.concatenate([entries[starts[cell] : starts[cell + 1]] for cell in cells])
        if live is not None:
            numbers = numbers[live.keys[numbers]]
        step, best = BLOCK_BYTES // (4 * index.d), [(np.empty(0, np.float32), np.empty(0, np.int32))]
        for low in range(0, len(numbers), step):
            some = numbers[low : low + step]
            rows = np.ascontiguousarray(index.store.keys[some], np.float32)
            start = time.perf_counter()
            products = rows @ v[0]
            places = np.argpartition(-products, k)[:k] if len(some) > k else np.arange(len(some))
            seconds += time.perf_counter() - start
            best.append((products[places], some[places]))
        products, ids = (np.concatenate(part) for part in zip(*best, strict=True))
        return seconds, ids[np.argsort(-products, kind="stable")[:k]].astype(np.int64)

    @cached_property
    def _entries(self) -> tuple[Cells, Ids]:
        """Key numbers cell by cell, [n], and where each cell begins, and the end, [c + 1]."""
        entries = np.argsort(self.assignment, kind="stable").astype(np.int32)
        return entries, np.append(0, np.cumsum(np.bincount(self.assignment, minlength=self.c)))


def timed(call: Callable[[], Result]) -> tuple[float, Result]:
    """The least of a few times that a call takes, and what it returns."""
    seconds, end = np.inf, time.perf_counter() + TIMING_SECONDS
    for _ in range(TIMES):
        start = time.perf_counter()
        result = call()
        now = time.perf_counter()
        seconds = min(seconds, now - start)
        if now > end:
            break
    return float(seconds), result


def _logged(log: QueryLog | None, d: int) -> tuple[Floats, Cells]:
    """Evenly spaced queries of a log, and their top keys, of those whose top keys are all there."""
    if log is None:
        return np.empty((0, d), np.float32), np.empty((0, 0), np.int32)
    rows = np.flatnonzero((log.top >= 0).all(axis=1))
    rows = rows[:: max(1, len(rows) // LOGGED)][:LOGGED]
    return log.train[rows].astype(np.float32), log.top[rows]
