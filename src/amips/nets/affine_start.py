"""Where linear and max-affine routers begin their training: at the centroids as projected queries see them.

That is centroid routing in fewer dimensions, and a good router already: a design without a recipe is it.
"""

from collections.abc import Callable

import numpy as np

from amips.lean import Projection, learn_projection
from amips.nets.affine import AffineNet, Linear, MaxAffine
from amips.nets.spec_json import spec_to_json
from amips.task import Task
from amips.vectors import Floats, Vectors, unit_rows

ROUNDS = 5  # of k-means within each cell


def initial_model(
    task: Task,
    network: Linear | MaxAffine,
    seed: int = 0,
    projection: Callable[[int], Projection] | None = None,
) -> AffineNet:
    """The router that training begins with: pieces at the centroids of the cells, or of their sub-clusters.

    Args:
        task: keys, cells and the training queries that a projection is learned from.
        seed: of the sub-clusters of a max-affine router.
        projection: what gives the projection to r dimensions, if it is known; learned from the task if None.
    """
    a = network.architecture(task.n, task.d, task.c)
    keys, pieces = task.key_vectors, task.cells.centroids
    if a.pieces > 1:
        pieces = _sub_centroids(keys, task, a.pieces, seed)
    weights = {"W": pieces}
    if a.rank:
        reduced = projection(a.rank) if projection else learn_projection(keys, task.train.vectors, a.rank)
        weights = {"A": reduced.queries, "W": reduced.weights(pieces)}
    if a.bias:
        weights["b"] = np.zeros(len(pieces), np.float32)
    # Blend 0: none of the way to trained weights.
    return AffineNet(a, weights, {**task.fingerprints, "network": spec_to_json(network), "blend": 0.0})


def _sub_centroids(keys: Vectors, task: Task, pieces: int, seed: int) -> Floats:
    """Spherical k-means within every cell at once, [c p, d]; a cell's pieces begin at keys of its own."""
    cells, c = task.cells.assignment, task.c
    shuffled = np.random.default_rng([seed, 17]).permutation(keys.n)
    order = shuffled[np.argsort(cells[shuffled], kind="stable")]
    sizes = np.bincount(cells, minlength=c)
    starts = np.append(0, np.cumsum(sizes))[:-1]
    drawn = starts[:, None] + np.arange(pieces) % np.maximum(sizes, 1)[:, None]
    first = unit_rows(keys.take(order[np.minimum(drawn, keys.n - 1)].ravel()))[0]
    # Half way to the centroid: a lone key is a poor centre. Cells with fewer keys than pieces repeat some.
    centres = unit_rows(first + np.repeat(task.cells.centroids, pieces, axis=0))[0]
    for _ in range(ROUNDS):
        sums = np.zeros((c * pieces, keys.d), np.float32)
        for start, block in keys.blocks():
            own = cells[start : start + len(block)]
            near = np.stack(
                [np.einsum("nd,nd->n", block, centres[own * pieces + p]) for p in range(pieces)], axis=1
            )
            np.add.at(sums, own * pieces + near.argmax(axis=1), block)
        moved = sums.any(axis=1)  # a piece without keys stays
        centres[moved] = unit_rows(sums[moved])[0]
    return centres
