"""Query-aware cells: keys are grouped by where the queries that want them are.

Before k-means, each key y is moved to normalize(y / ||y|| + s m_y), where

    m_y = sum_q w_q x_q / ||x_q|| / (1 + sum_q w_q),    w_q = 1 / sqrt(rank of y among q's top keys),

over the training queries q that have y among their top keys. A key that nobody asked for stays where it
is; one that few asked for moves little. The keys themselves are not changed: only the partition is. Keys
that are wanted together then lie together, so that a query finds its top keys in fewer cells.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.cells.clustering import ITERATIONS, Cells, check, kmeans
from amips.cluster import Cluster
from amips.errors import VectorError
from amips.metrics import TOP
from amips.vectors import Floats, Vectors, open_vectors, unit_rows

BLOCK_BYTES = 1 << 23  # of queries gathered at a time
STRENGTH = 1.5  # s, where nothing else is known
IN_MEMORY = 1 << 30  # bytes of moved keys that are held, where no bound on the memory is given;
SHARE = 4  # ... this part of it where one is. More are computed whenever they are read


def make_cells(
    keys: Any,
    count: int,
    queries: Any,
    top_ids: NDArray[np.integer[Any]],
    *,
    strength: float = STRENGTH,
    spherical: bool = True,
    runs: int = 1,
    iterations: int = ITERATIONS,
    points: int | None = None,
    seed: int = 0,
    memory: int | None = None,
    cluster: Cluster | None = None,
    progress: bool = False,
) -> Cells:
    """The cells of a task or a design: query-aware of this strength, or by k-means where it is 0.

    Args:
        queries, top_ids: training queries and their top keys, best first; the first 10 of each count.
        spherical, runs: of k-means; query-aware cells are spherical, of one run.
        memory: a bound on the bytes that it takes, where one is kept.
        cluster: whose workers find the nearest centroids; the cells are the same.
        progress: show how far it is.
    """
    if strength:
        return query_aware(
            keys,
            queries,
            np.asarray(top_ids)[:, :TOP],
            count,
            strength=strength,
            iterations=iterations,
            points=points,
            seed=seed,
            memory=memory,
            cluster=cluster,
            progress=progress,
        )
    return kmeans(
        keys,
        count,
        spherical=spherical,
        runs=runs,
        iterations=iterations,
        points=points,
        seed=seed,
        memory=memory,
        cluster=cluster,
        progress=progress,
    )


def query_aware(
    keys: Any,
    queries: Any,
    top_ids: NDArray[np.integer[Any]],
    count: int,
    *,
    strength: float = STRENGTH,
    iterations: int = ITERATIONS,
    points: int | None = None,
    seed: int = 0,
    memory: int | None = None,
    cluster: Cluster | None = None,
    progress: bool = False,
) -> Cells:
    """Partition keys into `count` cells by where they are and where the queries that want them are.

    Args:
        keys, queries: arrays or files; the queries are training queries.
        top_ids: the top keys of each query, best first, [m, k].
        strength: s above; 0 is plain spherical k-means.
        iterations, points, seed, cluster, progress: of k-means. The same seed gives the same cells.
        memory: a bound on the bytes that it takes, where one is kept.
    """
    keys, queries = open_vectors(keys, "keys"), open_vectors(queries, "queries")
    check_top(top_ids, queries.n, keys.n)
    check(int(count), 1, keys)
    if not 0 <= strength < np.inf:
        raise VectorError(f"strength={strength}: expected a finite number, not negative")
    points_of_keys = keys if strength == 0 else towards_queries(keys, queries, top_ids, strength, memory)
    options: Any = {"iterations": iterations, "points": points, "seed": seed}
    return kmeans(points_of_keys, count, memory=memory, cluster=cluster, progress=progress, **options)


def check_top(top_ids: NDArray[np.integer[Any]], m: int, n: int) -> None:
    """VectorError unless these can be the top keys of m queries among n keys."""
    if np.ndim(top_ids) != 2 or len(top_ids) != m:
        raise VectorError(f"top_ids of shape {list(np.shape(top_ids))}: expected [{m}, k]")
    if top_ids.size and not (top_ids.min() >= 0 and top_ids.max() < n):
        raise VectorError(f"top_ids: expected numbers from 0 to {n - 1}, one for each key")


def towards_queries(
    keys: Vectors,
    queries: Vectors,
    top_ids: NDArray[np.integer[Any]],
    strength: float = STRENGTH,
    memory: int | None = None,
) -> Vectors:
    """The points normalize(y / ||y|| + s m_y), [n, d]: in memory, or computed whenever they are read.

    `memory` is a bound on the bytes that they may take together with what else is held. Computing them once
    more costs less than a pass of k-means, and needs no room on a disk.
    """
    wanted = wanted_by(queries, top_ids, keys.n)

    def moved(start: int, stop: int) -> Floats:
        point = unit_rows(keys.rows(start, stop))[0]
        point += np.float32(strength) * wanted(start, stop)
        return unit_rows(point)[0]

    points = Vectors("keys towards their queries", keys.n, keys.d, moved)
    fits = IN_MEMORY if memory is None else memory // SHARE
    return open_vectors(points.load(), points.name) if 4 * keys.n * keys.d <= fits else points


def wanted_by(queries: Vectors, top_ids: NDArray[np.integer[Any]], n: int) -> Any:
    """A function of (start, stop) that gives m_y of the keys start..stop, [stop - start, d]."""
    k = top_ids.shape[1]
    flat = np.ascontiguousarray(top_ids).ravel()
    order = np.argsort(flat, kind="stable")  # the pairs (query, rank) of each key, key by key
    bounds = np.searchsorted(flat[order], np.arange(n + 1))
    weight_of_rank = (1 / np.sqrt(1 + np.arange(k))).astype(np.float32)
    step = max(1, BLOCK_BYTES // (4 * queries.d))

    def mean(start: int, stop: int) -> Floats:
        sums = np.zeros((stop - start, queries.d), np.float32)
        weights = np.zeros(stop - start, np.float32)
        for low in range(int(bounds[start]), int(bounds[stop]), step):
            pairs = order[low : min(low + step, int(bounds[stop]))]
            ids, weight = flat[pairs] - start, weight_of_rank[pairs % k]
            rows = unit_rows(queries.take(pairs // k))[0]
            rows *= weight[:, None]
            first = np.flatnonzero(np.append(True, ids[1:] != ids[:-1]))
            sums[ids[first]] += np.add.reduceat(rows, first, axis=0)
            weights[ids[first]] += np.add.reduceat(weight, first)
        return sums / (1 + weights)[:, None]

    return mean
