"""k-means on a cluster: workers find the nearest centroids, this process sums; FAISS's result, bit for bit.

An iteration is nearly all products of points with centroids. Those are made by workers, block by block, with
FAISS's own search; what follows is a pass over the points, done here in their order, so that the sums, and so
the cells, are those of `faiss.Kmeans` on one machine.
"""

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.blas import faiss
from amips.cluster import Cluster
from amips.progress import Bar
from amips.vectors import Floats

BLOCK = 1 << 14  # points in a task, a multiple of those that FAISS multiplies at a time (4,096)
NUDGE = np.float32(1 / 1024)  # FAISS's, by which the two halves of a split cell differ
SPLIT_SEED = 1234  # FAISS's


def kmeans_on(
    cluster: Cluster,
    points: Floats,
    count: int,
    spherical: bool,
    iterations: int,
    seed: int,
    progress: bool = False,
) -> Floats:
    """Centroids [count, d] of points [n, d], as `faiss.Kmeans` finds them with this seed."""
    if len(points) == count:
        return points.copy()
    order = np.empty(len(points), np.int32)
    faiss.rand_perm(faiss.swig_ptr(order), len(points), seed + 1)
    centroids = _finished(points[order[:count]], spherical)
    blocks = [cluster.put(points[low : low + BLOCK]) for low in range(0, len(points), BLOCK)]
    began = time.monotonic()
    with Bar(iterations * len(points), "k-means", "points", progress) as shown:
        for _ in range(iterations):
            handed = cluster.put(centroids)
            assigned = []
            for part in cluster.map((nearest, block, handed, spherical) for block in blocks):
                assigned.append(part)
                shown.update(len(part))
                cluster.note(shown, began)
            centroids, sizes = _means(points, np.concatenate(assigned), count)
            _split(centroids, sizes, len(points))
            centroids = _finished(centroids, spherical)
    return centroids


def nearest(points: Floats, centroids: Floats, spherical: bool) -> NDArray[np.int64]:
    """What a worker does: the nearest centroid of each point, by inner product or by distance."""
    index = (faiss.IndexFlatIP if spherical else faiss.IndexFlatL2)(centroids.shape[1])
    index.add(centroids)
    ids: NDArray[np.int64] = index.search(points, 1)[1][:, 0]
    return ids


def _finished(centroids: Floats, spherical: bool) -> Floats:
    centroids = np.ascontiguousarray(centroids)
    if spherical:
        faiss.normalize_L2(centroids)
    return centroids


def _means(points: Floats, assignment: NDArray[np.int64], count: int) -> tuple[Floats, Floats]:
    """The mean of the points of each centroid, each summed in the order of the points, and their numbers.

    The first points of all cells are added at once, then the second ones, and so on: each cell is summed
    one by one, which decides the last bits, and numpy is called as often as the largest cell has points.
    """
    sizes = np.bincount(assignment, minlength=count)
    order = np.argsort(assignment, kind="stable")
    starts = np.cumsum(sizes) - sizes
    large = np.argsort(-sizes, kind="stable")  # cells with points left come first
    means = np.zeros((count, points.shape[1]), np.float32)
    active = int(np.count_nonzero(sizes))
    for rank in range(int(sizes.max())):
        while sizes[large[active - 1]] <= rank:
            active -= 1
        cells = large[:active]
        means[cells] += points[order[starts[cells] + rank]]
    weights = sizes.astype(np.float32)
    filled = np.flatnonzero(sizes)
    means[filled] *= (np.float32(1) / weights[filled])[:, None]
    return means, weights


def _split(centroids: Floats, sizes: Floats, n: int) -> None:
    """Give every empty cell half of a large one, drawn by size, as FAISS does; changes its arguments."""
    count, d = centroids.shape
    random: Any = faiss.RandomGenerator(SPLIT_SEED)
    signs = np.where(np.arange(d) % 2 == 0, NUDGE, -NUDGE).astype(np.float32)
    for empty in range(count):
        if sizes[empty] != 0:
            continue
        donor = 0
        while not random.rand_float() < np.float32((float(sizes[donor]) - 1.0) / (n - count)):
            donor = (donor + 1) % count
        centroids[empty] = centroids[donor]
        centroids[empty] *= np.float32(1) + signs
        centroids[donor] *= np.float32(1) - signs
        sizes[empty] = sizes[donor] / 2
        sizes[donor] -= sizes[empty]
