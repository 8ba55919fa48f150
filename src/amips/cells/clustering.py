"""Partitions of the keys into cells by k-means, spherical or plain."""

import hashlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from amips.arguments import check_whole
from amips.blas import faiss
from amips.cells.lloyd import kmeans_on
from amips.cluster import Cluster, Job
from amips.errors import VectorError
from amips.progress import Bar
from amips.vectors import (
    Floats,
    Source,
    Vectors,
    open_vectors,
    reopened,
    row_norms,
    shared_source,
    unit_rows,
)

POINTS_PER_CELL = 256  # k-means learns little from more points a cell, where there are hundreds of cells
FEW_CELLS = 512  # with fewer, k-means takes more points, up to the products that so many cells cost it
ITERATIONS = 20  # of k-means, where nothing else is said
POINT_BYTES = 1 << 30  # that points may take together, where no bound on the memory is given
POINT_SHARE = 8  # ... and this part of it where one is: FAISS has a copy of them
ASSIGN_FLOATS = 1 << 22  # scores of cells at a time
DEFAULT_COUNT, FEWEST_KEYS = 4.0, 8  # cells in units of sqrt(n), and keys in each at least, on average


@dataclass(frozen=True)
class Cells:
    """A partition: the cell of each key, and one centroid a cell.

    Centroids of spherical k-means have norm 1, and a key belongs to the cell with the largest
    <y, centroid>; of plain k-means, to the nearest centroid.

    Args:
        assignment: the cell of each key, [n].
        centroids: [c, d].
        quantizer: fingerprint of the FAISS quantizer that they come from, if it is not that of the centroids.
    """

    assignment: NDArray[np.int32]
    centroids: Floats
    quantizer: str = ""

    @property
    def count(self) -> int:
        """The number of cells, c."""
        return len(self.centroids)

    @property
    def quantizer_fingerprint(self) -> str:
        """SHA-256 of what decides the cell of a key; it stays the same when keys are added to an index."""
        return self.quantizer or hashlib.sha256(np.asarray(self.centroids, np.float32).tobytes()).hexdigest()

    @property
    def sizes(self) -> NDArray[np.int64]:
        """How many keys each cell holds."""
        return np.bincount(self.assignment, minlength=self.count).astype(np.int64)

    @property
    def imbalance(self) -> float:
        """c sum_j n_j^2 / n^2: 1 when all cells are equal; the factor by which a random probe costs more."""
        sizes = self.sizes.astype(np.float64)
        return float(self.count * (sizes**2).sum() / sizes.sum() ** 2)


def default_count(n: int, factor: float = DEFAULT_COUNT, fewest: int = FEWEST_KEYS) -> int:
    """factor sqrt(n) cells, but `fewest` keys a cell at least on average, and at least one cell.

    The defaults are what pays where nothing else is known.
    """
    return max(1, min(round(factor * math.sqrt(n)), n // fewest))


def kmeans(
    keys: Any,
    count: int,
    *,
    spherical: bool = True,
    runs: int = 1,
    pick: Literal["even", "first"] = "even",
    iterations: int = ITERATIONS,
    points: int | None = None,
    seed: int = 0,
    memory: int | None = None,
    cluster: Cluster | None = None,
    progress: bool = False,
) -> Cells:
    """Partition keys into `count` cells by k-means, none of them empty.

    With several `runs` (each from its own seed, end to end) the most even partition is kept, as in the
    paper's routing experiments; `pick="first"` keeps the first. The same seed gives the same cells.

    Args:
        points: keys a cell that k-means learns from, drawn at random, 1 GiB of them at most; None takes as
            many as `points_for` says: all keys where cells are few.
        memory: a bound on the bytes it takes, where one is kept: with little, it learns from fewer keys.
        cluster: whose workers find the nearest centroids; the cells are the same.
        progress: show how far it is; of k-means itself on a cluster only, FAISS is silent.
    """
    keys = open_vectors(keys, "keys")
    count = check(int(count), runs, keys)
    if points is not None:
        points = check_whole("points", points, 1, error=VectorError)
    if pick not in ("even", "first"):
        raise VectorError(f"pick={pick!r}: expected 'even' or 'first'")
    if count == 1:
        return trivial(keys)
    settings = spherical, iterations, points
    tried = (_one_run(keys, count, *settings, seed + i, memory, cluster, progress) for i in range(runs))
    return min(tried, key=lambda cells: cells.imbalance) if pick == "even" else next(tried)


def check(cells: int | Cells, runs: int, keys: Vectors) -> int:
    """The number of cells; VectorError if these keys cannot have them."""
    if isinstance(cells, int):
        if not 1 <= cells <= keys.n:
            raise VectorError(f"cells={cells}: the number of cells must be between 1 and the {keys.n} keys")
        if runs < 1:
            raise VectorError(f"runs={runs}: expected at least 1")
        return cells
    if cells.assignment.shape != (keys.n,) or cells.centroids.shape[1:] != (keys.d,):
        raise VectorError(
            f"cells: {len(cells.assignment)} assignments, centroids {list(cells.centroids.shape)} "
            f"do not fit {keys.n} keys of dimension {keys.d}"
        )
    if cells.assignment.min() < 0 or cells.assignment.max() >= cells.count:
        raise VectorError(f"cells: assignments must lie in 0..{cells.count - 1}, one for each centroid")
    return cells.count


def trivial(keys: Vectors) -> Cells:
    """One cell that holds every key; its centroid is the mean."""
    total = np.zeros(keys.d)
    for _, block in keys.blocks():
        total += block.sum(axis=0, dtype=np.float64)
    return Cells(np.zeros(keys.n, np.int32), (total / keys.n).astype(np.float32)[None])


def points_for(count: int) -> int:
    """Keys a cell that k-means learns from, where nothing else is said: 256, and more where cells are few.

    A pass of k-means costs count^2 times this many products with keys. Few cells get as many keys as keep
    that below the cost of 512 cells of 256 each. On 100,000 passages in 10 cells, keys then have a mean
    cosine of 0.298 with their centroid instead of 0.288, in 128 cells 0.454 instead of 0.450 (four seeds).
    Cells are more even in the second case (imbalance 1.086, not 1.099), not in the first (1.034, 1.022).
    """
    return max(POINTS_PER_CELL, POINTS_PER_CELL * FEW_CELLS**2 // count**2)


def _one_run(
    keys: Vectors,
    count: int,
    spherical: bool,
    iterations: int,
    points: int | None,
    seed: int,
    memory: int | None,
    cluster: Cluster | None,
    progress: bool,
) -> Cells:
    rng = np.random.default_rng(seed)
    each = points_for(count) if points is None else points
    most_bytes = POINT_BYTES if memory is None else min(POINT_BYTES, memory // POINT_SHARE)
    most = max(count, min(count * each, most_bytes // (4 * keys.d)))
    sample = keys.load() if keys.n <= most else keys.take(np.sort(rng.choice(keys.n, most, replace=False)))
    centroids = (
        _centroids(sample, count, spherical, iterations, seed + 1)
        if cluster is None
        else kmeans_on(cluster, sample, count, spherical, iterations, seed + 1, progress)
    )
    if spherical:  # faiss leaves them as they are when there is one for each key
        centroids = unit_rows(centroids)[0]
    del sample
    assignment, nearness = assign(keys, centroids, spherical, cluster, progress)
    fill_empty(keys, assignment, nearness, centroids, spherical)
    return Cells(assignment, centroids)


def _centroids(sample: Floats, count: int, spherical: bool, iterations: int, seed: int) -> Floats:
    means = faiss.Kmeans(
        sample.shape[1],
        count,
        niter=iterations,
        seed=seed,
        spherical=spherical,
        min_points_per_centroid=1,  # silences a warning about small sets: they are the user's choice
        max_points_per_centroid=-(-len(sample) // count),  # all: faiss would draw 256 a cell of them
    )
    means.train(sample)
    return np.array(means.centroids)


def assign(
    keys: Vectors,
    centroids: Floats,
    spherical: bool,
    cluster: Cluster | None = None,
    progress: bool = False,
) -> tuple[NDArray[np.int32], Floats]:
    """Each key's cell and how near it is (larger is nearer), block by block; by workers, if there are any."""
    half = np.zeros(len(centroids), np.float32) if spherical else 0.5 * row_norms(centroids) ** 2
    assignment = np.empty(keys.n, np.int32)
    nearness = np.empty(keys.n, np.float32)
    size, start = max(1, ASSIGN_FLOATS // (keys.d + len(centroids))), 0
    parts = (
        (assign_block(block, centroids, half) for _, block in keys.blocks(size))
        if cluster is None
        else _assigned_on(cluster, keys, centroids, half, size)
    )
    began = time.monotonic()
    with Bar(keys.n, "cells of keys", "keys", progress) as shown:
        for best, near in parts:
            assignment[start : start + len(best)], nearness[start : start + len(best)] = best, near
            start += len(best)
            shown.update(len(best))
            if cluster is not None:
                cluster.note(shown, began)
    return assignment, nearness


def assign_block(block: Floats, centroids: Floats, half: Floats) -> tuple[NDArray[np.int32], Floats]:
    """The best centroid of each row by <y, centroid> - half, and that value."""
    scores = block @ centroids.T
    scores -= half
    best = scores.argmax(axis=1)
    return best.astype(np.int32), np.take_along_axis(scores, best[:, None], axis=1)[:, 0]


def _assigned_on(
    cluster: Cluster, keys: Vectors, centroids: Floats, half: Floats, size: int
) -> Iterator[tuple[NDArray[np.int32], Floats]]:
    source, handed, halves = shared_source(keys, cluster), cluster.put(centroids), cluster.put(half)

    def jobs() -> Iterator[Job]:
        for start in range(0, keys.n, size):
            if source is None:
                yield assign_block, cluster.put(keys.rows(start, start + size)), handed, halves
            else:
                yield assign_rows, source, start, start + size, handed, halves

    return cluster.map(jobs())


def assign_rows(
    source: Source, start: int, stop: int, centroids: Floats, half: Floats
) -> tuple[NDArray[np.int32], Floats]:
    """What a worker does: `assign_block` of rows start..stop of a file."""
    return assign_block(reopened(source).rows(start, stop), centroids, half)


def fill_empty(
    keys: Vectors, assignment: NDArray[np.int32], nearness: Floats, centroids: Floats, spherical: bool
) -> None:
    """Give every empty cell the key that fits its own, largest cell worst; changes its arguments."""
    sizes = np.bincount(assignment, minlength=len(centroids))
    for empty in np.flatnonzero(sizes == 0):
        donor = int(sizes.argmax())
        members = np.flatnonzero(assignment == donor)
        moved = members[nearness[members].argmin()]
        row = keys.take(np.array([moved]))
        centroids[empty] = unit_rows(row)[0][0] if spherical else row[0]
        assignment[moved] = empty
        nearness[moved] = np.inf  # it stays where it was put
        sizes[donor] -= 1
        sizes[empty] = 1


def cell_means(points: Vectors, assignment: NDArray[np.integer[Any]], count: int) -> Floats:
    """The mean of the points of each cell, float32 [count, d]; 0 of one without points.

    Args:
        points: [n, d]; keys, or what stands for them.
        assignment: the cell of each, [n], from 0 to count - 1.
    """
    sums = np.zeros((count, points.d))
    for start, block in points.blocks():
        cells = assignment[start : start + len(block)]
        order = np.argsort(cells, kind="stable")
        present, starts = np.unique(cells[order], return_index=True)
        sums[present] += np.add.reduceat(block[order], starts, axis=0, dtype=np.float64)
    sizes = np.bincount(assignment, minlength=count)
    return np.asarray(sums / np.maximum(sizes, 1)[:, None], np.float32)


def fingerprint_of(assignment: NDArray[np.integer[Any]]) -> str:
    """SHA-256 of which key is in which cell: a router is only good for the cells it was trained on."""
    return hashlib.sha256(np.ascontiguousarray(assignment, np.int32).tobytes()).hexdigest()
