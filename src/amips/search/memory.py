"""A memory of the log: logged queries with their top keys, and a cheap way to recognise one.

Logged queries are kept in few dimensions, at norm 1, in plain cells. A query is recognised if the nearest of
them in the cells it probes is as near as the gate: its cosine there is at least that. What the logged query
found is then scored with the query itself.

    logged.npy              float32 [m, r]: the logged queries, cell by cell
    loggedsizes.npy         int64 [c]: how many each cell has
    loggedcentroids.npy     float32 [c, r]
    loggedprojection.npy    float32 [r, d]: what queries are multiplied with
    loggedtop.npy           int32 [m, depth]: the top keys of each, best first; -1 for one that was removed

A logged query of which more than a few top keys were removed is not recognised any more: others have taken
their places, and it does not know which.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.cells import kmeans
from amips.errors import BundleError
from amips.index import FaissCellStore, FewSearch, KeyMask, read_array
from amips.npy import save_npy
from amips.search.searcher import Searcher
from amips.vectors import Floats, open_vectors, unit_rows

Ids = NDArray[np.int64]

MEMORY_FILES = [f"logged{name}.npy" for name in ("", "sizes", "centroids", "projection", "top")]
DIMENSIONS = 32  # enough to recognise a query
PROBES = 2  # of the square root of the logged queries: one misses three times as many
LEFT = 0.875  # of the top keys of a logged query, that must be there for it to be recognised
TOGETHER = 64  # queries that are looked up in one compiled call: what it needs stays in the cache


@dataclass(frozen=True)
class Memory:
    """Logged queries, the top keys of each, and when one is recognised; see above for the arrays.

    Args:
        gate: the least cosine at which a query counts as recognised.
    """

    logged: Floats
    sizes: Ids
    centroids: Floats
    projection: Floats
    top: NDArray[np.int32]
    gate: float = 1.0

    @classmethod
    def build(cls, queries: Floats, top: NDArray[np.integer[Any]], projection: Floats, seed: int) -> "Memory":
        """A memory of distinct queries [m, d] and their top keys [m, depth], known by A x [r, d]."""
        vectors = unit_rows(queries @ projection.T)[0]
        cells = kmeans(vectors, max(1, round(math.sqrt(len(vectors)))), seed=seed)
        order = np.argsort(cells.assignment, kind="stable")
        return cls(
            np.ascontiguousarray(vectors[order]),
            cells.sizes.astype(np.int64),
            np.ascontiguousarray(cells.centroids, np.float32),
            np.ascontiguousarray(projection, np.float32),
            np.ascontiguousarray(np.asarray(top)[order], np.int32),
        )

    @property
    def depth(self) -> int:
        """Top keys of each logged query."""
        return int(self.top.shape[1])

    @property
    def floor(self) -> float:
        """The cosine from which on a query is recognised, a rounding below the gate."""
        return self.gate - 1e-6

    def with_gate(self, gate: float) -> "Memory":
        """The same logged queries, recognised from this cosine on."""
        return replace(self, gate=gate)

    def nearest(self, u: Floats) -> tuple[Floats, Ids]:
        """The cosine with the nearest logged query, and its number, of queries of norm 1: [m] and [m]."""
        scores, ids = self._look_up(self._reduced(u))
        return scores[:, 0], ids[:, 0]

    def recognise(
        self, u: Floats, alive: KeyMask | None = None
    ) -> tuple[NDArray[np.bool_], NDArray[np.int32]]:
        """Which queries of norm 1 [m, d] are recognised, and the candidates of those [recognised, depth].

        `alive` are the keys that were not removed; -1 is in the place of the others.
        """
        cosine, ids = self.nearest(u)
        known = cosine >= self.floor
        candidates = _present(self.top[ids[known]], alive)
        enough = _enough(candidates)
        known[known] = enough
        return known, candidates[enough]

    def recognise_one(self, v: Floats, alive: KeyMask | None = None) -> NDArray[np.int32] | None:
        """The candidates [1, depth] of one query [1, d] of any norm but 0; None if it is not recognised.

        What `recognise` does for many, at a fraction of the calls.
        """
        reduced = v @ self.projection.T
        norm = math.sqrt(float(np.vdot(reduced, reduced)))
        scores, ids = self._look_up(reduced)
        if not norm or scores[0, 0] < self.floor * norm:
            return None
        place = int(ids[0, 0])
        candidates = _present(self.top[place : place + 1], alive)
        return candidates if _enough(candidates)[0] else None

    def renumbered(self, kept: Ids, n: int) -> "Memory | None":
        """The same where of n keys these are left, numbered anew; None if it recognises nothing then."""
        numbers = np.full(n + 1, -1, np.int32)  # of -1: -1
        numbers[kept] = np.arange(len(kept))
        top = numbers[self.top]
        enough = _enough(top)
        if not enough.any():
            return None
        cells = np.repeat(np.arange(len(self.sizes)), self.sizes)[enough]
        sizes = np.bincount(cells, minlength=len(self.sizes))
        return replace(self, logged=self.logged[enough], sizes=sizes, top=top[enough])

    def flops(self, u: Floats) -> Ids:
        """FLOPs of looking up queries of norm 1 [m, d], recognised or not."""
        looking = self._index.cost(self._reduced(u), 1, probes=self._probes).flops
        return 2 * self.projection.size + looking

    @property
    def _probes(self) -> int:
        return min(PROBES, len(self.sizes))

    def _reduced(self, u: Floats) -> Floats:
        return unit_rows(u @ self.projection.T)[0]

    def _look_up(self, reduced: Floats) -> tuple[Floats, Ids]:
        """The best score among logged queries and its number, [m, 1] each, of queries in few dimensions."""
        few, count = self._few, len(reduced)
        if few is None:
            return self._index.search(reduced, 1, probes=self._probes)
        if count <= TOGETHER:
            return few(reduced, None, 1, 1, self._probes, 1.0, 0.0, 1)
        scores, ids = np.empty((count, 1), np.float32), np.empty((count, 1), np.int64)
        for low in range(0, count, TOGETHER):
            rows = slice(low, low + TOGETHER)
            scores[rows], ids[rows] = few(reduced[rows], None, 1, 1, self._probes, 1.0, 0.0, 1)
        return scores, ids

    @cached_property
    def _index(self) -> Searcher:
        """The logged queries as an index of their own."""
        return Searcher(self._store, None)

    @cached_property
    def _store(self) -> FaissCellStore:
        """The logged queries, cell by cell."""
        assignment = np.repeat(np.arange(len(self.sizes)), self.sizes)
        vectors = open_vectors(self.logged, "logged queries")
        return FaissCellStore.build(vectors, assignment, self.centroids, "flat")

    @property
    def _few(self) -> FewSearch | None:
        """What looks up in one compiled call; None where nothing is compiled."""
        return self._index._few

    def prepare(self) -> None:
        """Make ready what the first search would otherwise wait for."""
        self._index.prepare()

    def save(self, directory: Path) -> list[str]:
        """Write the files above; their names. The gate goes into the manifest."""
        arrays: list[NDArray[Any]] = [self.logged, self.sizes, self.centroids, self.projection, self.top]
        for file, array in zip(MEMORY_FILES, arrays, strict=True):
            save_npy(directory / file, array)
        return list(MEMORY_FILES)

    @classmethod
    def load(cls, directory: Path, gate: float, n: int, d: int) -> "Memory":
        """Read what `save` wrote for n keys of dimension d, and check it."""
        paths = [directory / file for file in MEMORY_FILES]
        logged = read_array(paths[0], np.float32, (None, None))
        m, r = logged.shape
        sizes = read_array(paths[1], np.int64, (None,))
        centroids = read_array(paths[2], np.float32, (len(sizes), r))
        projection = read_array(paths[3], np.float32, (r, d))
        top = read_array(paths[4], np.int32, (m, None))
        # None is larger than the sum, so that the sum cannot pass over the largest number without being seen.
        if not m or not r or not len(sizes) or sizes.min() < 0 or sizes.max() > m or sizes.sum() != m:
            raise BundleError(f"{paths[1]} is damaged: the cells do not have {m} logged queries together")
        if not top.size or top.min() < -1 or top.max() >= n or not _enough(top).all():
            raise BundleError(f"{paths[4]} is damaged: it names a key that is not there")
        return cls(logged, sizes, centroids, projection, top, gate)


def _present(top: NDArray[np.int32], alive: KeyMask | None) -> NDArray[np.int32]:
    """Listed keys, with -1 in the place of those that were removed."""
    return top if alive is None else np.where((top >= 0) & alive.keys[top], top, np.int32(-1))


def _enough(top: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Of which rows [m, depth] enough keys are there."""
    enough: NDArray[np.bool_] = (top >= 0).sum(axis=1) >= LEFT * top.shape[1]
    return enough
