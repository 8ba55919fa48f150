"""Spilling: keys in a second cell, where queries find them that are not sent to the first.

Partitions lose keys at their borders: a query is sent to one side, its key lies on the other. A key y stands
for where it and its queries are, z = normalize(y / ||y|| + s m_y) as for query-aware cells. With c_j the mean
of these points in cell j, r = z - c_own and r' = z - c_j, the second cell of y is the one with the least

    ||r'||^2 + w <r, r'>^2 / ||r||^2 - u saved_j(y).

The first two terms are SOAR's (Sun et al., 2023): the key should be near the other cell, too, and where its
first cell misleads, the second should not mislead in the same way. The third is from the log: with probes
enough for a given recall, training queries miss some of their top keys; saved_j(y) is how many of those that
miss y are sent to cell j.

Keys go into their second cell up to a fraction of all keys, first those for which this is least in terms of
||r||^2. What it costs is memory and longer cells.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.arguments import check_array
from amips.cells import STRENGTH, Cells, cell_means, towards_queries
from amips.design import SPILL_FRACTION, checked_fraction
from amips.errors import AmipsError
from amips.metrics import TARGET_RECALL, TOP
from amips.routers import Router, RoutingEstimate
from amips.task import Task
from amips.vectors import Vectors

PARALLEL, SAVED = 3.0, 0.1  # w and u
MOST_QUERIES = 1 << 18  # of the log that are looked at
BLOCK_FLOATS = 1 << 21
CODE_BYTES = 4 * 48  # of a pair of missed key and cell: its copies, in a quarter of the memory


def second_cells(
    task: Task,
    router: Router,
    spill_fraction: float = SPILL_FRACTION,
    recall: float = TARGET_RECALL,
    *,
    strength: float = STRENGTH,
    saved: float = SAVED,
    memory: int | None = None,
) -> NDArray[np.int32] | None:
    """The second cell of each key [n], -1 for none: this fraction of the keys has one. None if no key has.

    Args:
        recall: of the top keys: what training queries miss with as many probes as that takes.
        strength: s above; for plain cells, too, it pays to know where the queries are.
        saved: u above. With strength and this 0 the rule is SOAR's.
        memory: a bound on the bytes that it takes, where one is kept.
    """
    spill_fraction = checked_fraction(spill_fraction)
    if task.c == 1 or not round(spill_fraction * task.n):
        return None
    return first_of(*ranked(task, router, recall, strength, saved, memory), spill_fraction)


def first_of(second: NDArray[np.int32], order: NDArray[np.int64], spill_fraction: float) -> NDArray[np.int32]:
    """Second cells of this fraction of the keys only, the first in order."""
    kept = np.full_like(second, -1)
    chosen = order[: round(spill_fraction * len(order))]
    kept[chosen] = second[chosen]
    return kept


def ranked(
    task: Task,
    router: Router,
    recall: float = TARGET_RECALL,
    strength: float = STRENGTH,
    saved: float = SAVED,
    memory: int | None = None,
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """A second cell for every key [n], and the keys in the order in which they should get it."""
    second, value = np.full(task.n, -1, np.int32), np.full(task.n, np.inf, np.float32)
    keys, queries = task.key_vectors, task.train.vectors
    codes, times = _saved(task, router, queries, recall, memory)
    own, step = task.cells.assignment, max(1, BLOCK_FLOATS // task.c)
    points = towards_queries(keys, queries, np.asarray(task.train.top_ids)[:, :TOP], strength, memory)
    means = cell_means(points, own, task.c)
    squares = (means**2).sum(axis=1)
    for low, z in points.blocks(step):
        cells = own[low : low + step]
        rows, r = np.arange(len(z)), z - means[cells]
        length = np.maximum((r**2).sum(axis=1), 1e-12)
        loss = (z**2).sum(axis=1)[:, None] - 2 * z @ means.T + squares
        along = (r * z).sum(axis=1)[:, None] - r @ means.T
        loss += np.float32(PARALLEL) * along**2 / length[:, None]
        first, last = np.searchsorted(codes, (low * task.c, (low + len(z)) * task.c))
        key, cell = np.divmod(codes[first:last], task.c)
        loss[key - low, cell] -= np.float32(saved) * times[first:last]
        loss[rows, cells] = np.inf
        second[low : low + step] = loss.argmin(axis=1)
        value[low : low + step] = loss[rows, second[low : low + step]] / length
    return second, np.argsort(value, kind="stable")


def _saved(
    task: Task, router: Router, queries: Vectors, recall: float, memory: int | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How often each cell would have saved a key, as key * c + cell, ascending, and how often.

    With a bound on the memory, of as many queries, drawn at random, as there is room for.
    """
    cells = task.cells
    x, top = np.asarray(task.val.queries), np.asarray(task.val.top_ids)[:, :TOP]
    on_val = RoutingEstimate.by(router, x, top, cells.assignment, cells.sizes)
    min_mass = on_val.min_mass_for(recall)
    rows = np.arange(queries.n)
    if queries.n > MOST_QUERIES:
        rows = np.sort(np.random.default_rng(0).choice(queries.n, MOST_QUERIES, replace=False))
    room = None if memory is None else memory // CODE_BYTES
    if room is not None:
        rows = np.random.default_rng(1).permutation(rows)
    codes = []
    step = max(1, BLOCK_FLOATS // cells.count)
    for low in range(0, len(rows), step):
        block = rows[low : low + step]
        x, top = queries.take(block), np.asarray(task.train.top_ids[block])[:, :TOP].astype(np.int64)
        block_routing = RoutingEstimate.by(
            router, x, top, cells.assignment, cells.sizes, temperature=on_val.temperature
        )
        probed = block_routing.probed(min_mass)
        of, place = np.nonzero(~np.take_along_axis(probed, block_routing.top_cells, axis=1))
        pair, cell = np.nonzero(probed[of])
        codes.append(top[of, place][pair] * cells.count + cell)
        if room is not None and (room := room - len(pair)) <= 0:
            break
    return np.unique(np.concatenate(codes), return_counts=True)


def checked_second(second_cells: Any, cells: Cells) -> NDArray[np.int32] | None:
    """Second cells that were given; None if no key has one."""
    second = check_array("second_cells", second_cells)
    if second.shape != cells.assignment.shape or second.dtype.kind not in "iu":
        what = f"{second.dtype} {list(second.shape)}"
        raise AmipsError(
            f"second_cells: {what}, expected a whole number for each of the {len(cells.assignment)} keys"
        )
    if not (second.min() >= -1 and second.max() < cells.count):
        raise AmipsError(f"second_cells: expected cells from 0 to {cells.count - 1}, or -1 for none")
    if (second == cells.assignment).any():
        raise AmipsError("second_cells: a key has the same cell twice")
    return np.ascontiguousarray(second, np.int32) if (second >= 0).any() else None
