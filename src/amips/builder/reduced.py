"""How many dimensions are enough to find candidates in."""

from collections.abc import Callable

import numpy as np

from amips import exact
from amips.index import REFINE
from amips.lean import STEP, Projection, reduced_dimension
from amips.metrics import TOP
from amips.task import Task

LEAN_FRACTIONS = (
    0.25,
    1 / 3,
    0.4,
    0.5,
    0.6,
)  # of the dimensions, of lean storage: the smallest that will do,
LEAN_RECALL = 0.99  # ... which is: so many of the true top keys are among the candidates
LEAN_SAMPLE = 200  # queries this is looked up for


def fewest_dimensions(
    task: Task,
    projection: Callable[[int], Projection],
    candidates: int = REFINE * TOP,
    memory: int | None = None,
) -> int | None:
    """The fewest dimensions whose candidates hold nearly all of the true top keys; None if none are few.

    `memory` is a bound on the bytes that it takes.
    """
    if task.n <= candidates or task.d <= STEP:
        return None  # every key is a candidate, or nothing is saved
    x, top = np.asarray(task.val.queries[:LEAN_SAMPLE]), np.asarray(task.val.top_ids[:LEAN_SAMPLE, :TOP])
    for r in dict.fromkeys(reduced_dimension(task.d, fraction) for fraction in LEAN_FRACTIONS):
        if r >= task.d:
            return None
        reduced = projection(r)
        bound = exact.MEMORY if memory is None else memory // 2
        best = exact.top_k(
            reduced.of_keys(task.key_vectors), x @ reduced.queries.T, candidates, memory=bound
        )[1]
        if (top[:, :, None] == best[:, None, :]).any(axis=2).mean() >= LEAN_RECALL:
            return r
    return None
