"""A sweep on a cluster: a task is a shard of queries times a range of keys; ranges are merged as a tree.

A worker multiplies the same tiles as one process would: a range begins and ends where tiles do. Which keys
are best then follows from the same scores, and ties go to the lower id in every merge, so that the result
does not depend on how many workers there are, or which of them are lost.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.cluster import Cluster, Job
from amips.exact.engine import TopKeys, TopOfCells
from amips.exact.reduce import TILE, Best, CellBest, Ids, keep_best
from amips.files import is_address
from amips.vectors import Floats, Source, Vectors, reopened, shared_source

TASK_PRODUCTS = 1 << 37  # multiply-adds of a task: some seconds of a core
HANDED_BYTES = 1 << 26  # of keys in a task, where they are handed to it
READ_TILES = 8  # of keys that a worker reads at a time


@dataclass(frozen=True)
class Plan:
    """Block sizes that keep the working set within the memory given."""

    shard: int
    query_block: int
    key_block: int
    workers: int


@dataclass(frozen=True)
class Part:
    """The best keys of a shard of queries in a range of keys.

    Args:
        scores, ids: [m, k] of top keys, fewer where the range has not so many; [m, cells] of top keys of
            cells, from cell `first` on.
    """

    scores: Floats
    ids: Ids
    first: int = 0
    k: int = 0


@dataclass(frozen=True)
class KeyRange:
    """Positions start..stop of the keys in their order, for a worker.

    Args:
        source: where to read them; None if they are handed over.
        ids: the rows to read, [stop - start]; None for rows start..stop.
        bounds: of cells `first`, `first` + 1, ... within the range, [cells + 1]; None for top keys.
    """

    start: int
    stop: int
    k: int
    query_block: int
    source: Source | None
    ids: NDArray[np.int64] | None
    first: int = 0
    bounds: NDArray[np.int64] | None = None


def swept_on(
    cluster: Cluster,
    wanted: TopKeys | TopOfCells,
    keys: Vectors,
    order: NDArray[np.int64] | None,
    shards: Iterable[Floats],
    plan: Plan,
    moved: Callable[[float], None],
) -> Generator[Iterator[tuple[Floats, Ids]]]:
    """Scores and ids of each block of queries, shard by shard, by the workers of a cluster.

    `moved` is told, whenever tasks have ended, which part of a shard's work they were.
    """
    source = shared_source(keys, cluster)
    if source is not None and isinstance(wanted, TopOfCells) and is_address(source.name):
        source = None  # keys of a cell lie all over the file: over a network each would be a request
    count = keys.n if order is None else len(order)
    rows = TASK_PRODUCTS // (plan.shard * keys.d)
    rows = rows if source is not None else min(rows, HANDED_BYTES // (4 * keys.d))
    ranges = [
        _key_range(wanted, source, order, plan, *bounds)
        for bounds in _bounds(count, plan.key_block, max(1, rows // TILE) * TILE)
    ]
    handed = [None if source is None else cluster.put(one) for one in ranges]  # once, for every shard

    def jobs(x: Floats) -> Iterator[Job]:
        queries = cluster.put(x)
        for one, reference in zip(ranges, handed, strict=True):
            if reference is None:
                yield sweep_range, cluster.put(one), queries, cluster.put(_rows(keys, order, one))
            else:
                yield sweep_range, reference, queries

    def ended(tasks: int) -> None:
        moved(tasks / len(ranges))

    merge = merge_top if isinstance(wanted, TopKeys) else merge_cells
    for part in cluster.merged((jobs(x) for x in shards), merge, ended):
        whole = part if isinstance(wanted, TopKeys) else _all_cells(part, len(wanted.bounds) - 1)
        yield ((whole.scores[rows], whole.ids[rows]) for rows in slices(len(whole.scores), plan.query_block))


def slices(count: int, size: int) -> list[slice]:
    """Slices of at most `size` that cover 0..count."""
    return [slice(low, min(low + size, count)) for low in range(0, count, size)]


def _bounds(count: int, key_block: int, rows: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most `rows` positions; tiles begin anew with every block of keys, and so do ranges."""
    for block in slices(count, key_block):
        for part in slices(block.stop - block.start, rows):
            yield block.start + part.start, block.start + part.stop


def _key_range(
    wanted: TopKeys | TopOfCells,
    source: Source | None,
    order: NDArray[np.int64] | None,
    plan: Plan,
    start: int,
    stop: int,
) -> KeyRange:
    ids = None if order is None else order[start:stop]
    if isinstance(wanted, TopKeys):
        return KeyRange(start, stop, wanted.k, plan.query_block, source, ids)
    first = int(np.searchsorted(wanted.bounds, start, "right")) - 1
    last = int(np.searchsorted(wanted.bounds, stop, "left"))
    bounds = np.clip(wanted.bounds[first : last + 1], start, stop) - start
    return KeyRange(start, stop, 0, plan.query_block, source, ids, first, bounds)


def _rows(keys: Vectors, order: NDArray[np.int64] | None, one: KeyRange) -> Floats:
    return keys.rows(one.start, one.stop) if order is None else keys.take(order[one.start : one.stop])


def sweep_range(one: KeyRange, x: Floats, rows: Floats | None = None) -> Part:
    """What a worker does: the best keys of a range for a shard of queries."""
    blocks = [x[part] for part in slices(len(x), one.query_block)]
    reducers: list[Any] = (
        [Best(block, min(one.k, one.stop - one.start)) for block in blocks]
        if one.bounds is None
        else [CellBest(block, np.asarray(one.ids), one.bounds) for block in blocks]
    )
    for part in slices(one.stop - one.start, READ_TILES * TILE):
        y = rows[part] if rows is not None else _read(one, part)
        for reducer in reducers:
            reducer.update(y, part.start + (one.start if one.bounds is None else 0))
    scores, ids = zip(*(reducer.finish() for reducer in reducers), strict=True)
    return Part(np.concatenate(scores), np.concatenate(ids), one.first, one.k)


def _read(one: KeyRange, part: slice) -> Floats:
    assert one.source is not None
    keys = reopened(one.source)
    if one.ids is None:
        return keys.rows(one.start + part.start, one.start + part.stop)
    return keys.take(one.ids[part])


def merge_top(parts: list[Part]) -> Part:
    """The best keys in neighbouring ranges together; of equal scores the earlier one's."""
    m, widths = len(parts[0].scores), [part.scores.shape[1] for part in parts]
    rows = np.concatenate([np.repeat(np.arange(m), width) for width in widths])
    scores, ids = (
        np.concatenate([getattr(part, name).ravel() for part in parts]) for name in ("scores", "ids")
    )
    _, best, chosen = keep_best(rows, scores, ids, m, parts[0].k)
    return Part(best.reshape(m, -1), chosen.reshape(m, -1), k=parts[0].k)


def merge_cells(parts: list[Part]) -> Part:
    """The top keys of the cells of neighbouring ranges; a cell may reach from one range into the next."""
    first = parts[0].first
    stop = max(part.first + part.scores.shape[1] for part in parts)
    m = len(parts[0].scores)
    scores = np.full((m, stop - first), -np.inf, np.float32)
    ids = np.full(scores.shape, -1, np.int32)
    for part in parts:
        place = slice(part.first - first, part.first - first + part.scores.shape[1])
        better = part.scores > scores[:, place]  # strictly: ties stay with the earlier range
        scores[:, place][better] = part.scores[better]
        ids[:, place][better] = part.ids[better]
    return Part(scores, ids, first)


def _all_cells(part: Part, count: int) -> Part:
    """With the cells before and after, which are empty."""
    shape = len(part.scores), count
    empty = Part(np.full(shape, -np.inf, np.float32), np.full(shape, -1, np.int32))
    return merge_cells([empty, part])
