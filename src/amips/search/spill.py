"""Spilling: a key that its queries miss is put into a second cell, one that they are sent to.

Partitions lose keys at their borders: a query is sent to one side, its key lies on the other. The log of
queries says which keys these are. With probes enough for a given recall, a training query misses some of its
top keys; each of the cells that it does probe would have saved them. The second cell of a key is the one that
saves it most often, and the keys that are saved most often are put into theirs, up to a share of all keys:
what they cost is memory and a little longer cells.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.cells import Cells
from amips.errors import AmipsError
from amips.route import Router
from amips.search.expected import Routed
from amips.task import Task
from amips.vectors import open_vectors

SPILL = 0.1  # share of the keys that get a second cell, where that pays
RECALL = 0.95  # of the top keys: what is missed with as many probes as that takes is looked at
TOP = 10
LEAST = 2  # queries that a second cell must serve: what one query asks for is chance
MOST_QUERIES = 1 << 18  # of the log that are looked at
BLOCK_FLOATS = 1 << 23


def second_cells(
    task: Task, router: Router, share: float = SPILL, recall: float = RECALL
) -> NDArray[np.int32]:
    """The second cell of each key [n], -1 for none: at most this share of the keys has one.

    They are those that pay most where searches reach this recall on val queries.
    """
    if not 0 <= share <= 1:
        raise AmipsError(f"spill={share}: expected a share of the keys, from 0 to 1")
    cells, second = task.cells, np.full(task.n, -1, np.int32)
    x, top = np.asarray(task.val.queries), np.asarray(task.val.top_ids)[:, :TOP]
    seen = Routed.by(router, x, top, cells.assignment, cells.sizes)
    bound = seen.share_for(recall)
    train = open_vectors(task.path / "train" / "queries.npy")
    rows = np.arange(train.n)
    if train.n > MOST_QUERIES:
        rows = np.sort(np.random.default_rng(0).choice(train.n, MOST_QUERIES, replace=False))
    saved = []  # for each key that a query missed, and each cell that this query probed: key * c + cell
    step = max(1, BLOCK_FLOATS // cells.count)
    for low in range(0, len(rows), step):
        block = rows[low : low + step]
        top = np.asarray(task.train.top_ids[block])[:, :TOP].astype(np.int64)
        x = train.take(block)
        found = Routed.by(router, x, top, cells.assignment, cells.sizes, temperature=seen.temperature)
        taken = found.taken(bound)
        of, place = np.nonzero(~np.take_along_axis(taken, found.wanted, axis=1))
        pair, cell = np.nonzero(taken[of])
        saved.append(top[of, place][pair] * cells.count + cell)
    codes, times = np.unique(np.concatenate(saved), return_counts=True)
    by_times = np.argsort(-times, kind="stable")  # ties go to the lower key, then to the lower cell
    codes, times = codes[by_times], times[by_times]
    first = np.unique(codes // cells.count, return_index=True)[1]
    often = np.sort(first[times[first] >= LEAST])[: round(share * task.n)]
    second[codes[often] // cells.count] = codes[often] % cells.count
    return second


def checked_second(second: NDArray[np.integer[Any]], cells: Cells) -> NDArray[np.int32]:
    """Second cells that were given."""
    if second.shape != cells.assignment.shape or second.dtype.kind not in "iu":
        what = f"{second.dtype} {list(second.shape)}"
        raise AmipsError(
            f"spill: {what}, expected a whole number for each of the {len(cells.assignment)} keys"
        )
    if not (second.min() >= -1 and second.max() < cells.count):
        raise AmipsError(f"spill: expected cells from 0 to {cells.count - 1}, or -1 for none")
    if (second == cells.assignment).any():
        raise AmipsError("spill: a key has the same cell twice")
    return np.ascontiguousarray(second, np.int32)
