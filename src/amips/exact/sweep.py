"""Exact answers by blocked matrix products: the top keys of a query, and the top key of every cell.

The score matrix X Y^T is never held: it is made one cache-sized tile at a time, and each tile is reduced
while it is still in cache. Ties go to the lower id. Rows of the result are written shard by shard, so a
killed run that was given `out` continues where it stopped and gives the same bytes.

Exactly equal keys deserve care: two columns of a matrix product may be rounded differently though their
inputs are the same. So doubles are scored once and expanded (`top_k`) or named by their lowest id
(`cell_maxima`); ties between different keys are ties of the computed scores.

With a `cluster` its workers do what is done here, each for a part of the keys (`exact.ranges`). With a
`device` torch multiplies and reduces there (`amips.device`). What is asked, in which shards, and where it
resumes are the same, so that the ids are, too, where scores differ by more than rounding.
"""

import hashlib
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.blas import parallel
from amips.cluster import Cluster
from amips.errors import VectorError
from amips.exact.engine import Engine, NumpyEngine, TopKeys, TopOfCells, torch_engine
from amips.exact.ranges import Plan, slices, swept_on
from amips.exact.reduce import TILE, Doubles, Ids, Tiles, lowest_double_in_cell
from amips.progress import Bar
from amips.rowfiles import Columns, RowFiles
from amips.vectors import Floats, Vectors, first_equal, inspect, open_vectors, row_norms

MEMORY = 10**9
QUERY_BLOCK = 1024  # rows of a tile, see reduce.TILE
LEAST_BLOCK = 16  # where memory is short
FEW = 4  # threads for which blocks are made small enough
RESIDENT = 256 * TILE  # keys between two looks at how far it is, where they are in memory; whole tiles
SHARD_BLOCKS = 16  # query blocks between two commits, at most
TOP_BYTES, CELL_BYTES = 96, 8  # working memory of a query for each of its k keys, each of its c cells


def top_k(
    keys: Any,
    queries: Any,
    k: int,
    *,
    memory: int = MEMORY,
    out: str | Path | None = None,
    device: str | None = None,
    cluster: Cluster | None = None,
    progress: bool = False,
) -> tuple[Floats, Ids]:
    """The k keys with the largest <x, y> for each query: scores [m, k] and ids [m, k], best first.

    `memory` bounds the working set in bytes, beside arrays the caller holds and some 50 bytes a key.
    With `out`, a directory, the results are memory-mapped files there, and a call with the same arguments
    resumes. With `device`, "cuda" for example, torch multiplies there; `memory` then bounds what is taken of
    the device, too. With `cluster`, its workers multiply, each within this memory, and the result is the same
    to the last bit on processors of the same kind. k is cut to n.
    """
    keys, queries = _opened(keys, queries)
    if k < 1:
        raise VectorError(f"k is {k}; it must be at least 1")
    k = min(k, keys.n)
    firsts = first_equal(keys)
    unique = np.flatnonzero(firsts == np.arange(keys.n))
    doubles = Doubles(firsts) if len(unique) < keys.n else None
    width = min(k, len(unique))

    def expanded(scores: Floats, ids: Ids) -> tuple[Floats, Ids]:
        return (scores, ids) if doubles is None else doubles.expand(scores, unique[ids], k)

    order = None if doubles is None else unique
    return _sweep(
        "top keys",
        "",
        TopKeys(width),
        expanded,
        keys,
        order,
        queries,
        k,
        k * TOP_BYTES,
        memory,
        out,
        device,
        cluster,
        progress,
    )


def cell_maxima(
    keys: Any,
    cells: NDArray[np.integer[Any]],
    queries: Any,
    *,
    count: int | None = None,
    memory: int = MEMORY,
    out: str | Path | None = None,
    device: str | None = None,
    cluster: Cluster | None = None,
    progress: bool = False,
) -> tuple[Floats, Ids]:
    """The top key of every cell for each query: support values sigma_j(x) [m, c] and key ids [m, c].

    `cells` [n] holds each key's cell in 0..count-1 (count = max + 1 when not given). An empty cell has
    support value -inf and id -1. `memory`, `out`, `device` and `cluster` are as in `top_k`.
    """
    keys, queries = _opened(keys, queries)
    cells = np.asarray(cells)
    if cells.shape != (keys.n,) or cells.dtype.kind not in "iu":
        raise VectorError(f"cells must be {keys.n} integers, one for each key; got shape {list(cells.shape)}")
    c = int(cells.max()) + 1 if count is None else count
    if cells.min() < 0 or cells.max() >= c:
        raise VectorError(f"cells must lie in 0..{c - 1}; found {cells.min()}..{cells.max()}")
    order = np.argsort(cells, kind="stable")
    bounds = np.searchsorted(cells[order], np.arange(c + 1))
    name = lowest_double_in_cell(first_equal(keys), cells)

    def renamed(scores: Floats, ids: Ids) -> tuple[Floats, Ids]:
        return scores, np.where(ids < 0, -1, name[ids])

    return _sweep(
        "cell maxima",
        hashlib.sha256(order.tobytes() + bounds.tobytes()).hexdigest(),
        TopOfCells(order, bounds),
        renamed,
        keys,
        order,
        queries,
        c,
        c * CELL_BYTES,
        memory,
        out,
        device,
        cluster,
        progress,
    )


def _sweep(
    what: str,
    digest: str,
    wanted: TopKeys | TopOfCells,
    complete: Callable[[Floats, Ids], tuple[Floats, Ids]],
    keys: Vectors,
    order: NDArray[np.int64] | None,
    queries: Vectors,
    width: int,
    bytes_per_query: int,
    memory: int,
    out: str | Path | None,
    device: str | None,
    cluster: Cluster | None,
    progress: bool,
) -> tuple[Floats, Ids]:
    """Feed all keys (in `order`) to a reducer for each block of queries, shard by shard."""
    plan = _plan(keys, queries, memory, bytes_per_query, copies_keys=order is not None)
    tables: Columns = {"scores": (np.float32, (width,)), "ids": (np.int32, (width,))}
    of = ""
    if out is not None:
        of = " ".join(
            [what, str(plan), *(inspect(v, zero="keep").fingerprint for v in (keys, queries)), digest]
        )
    started = time.monotonic()
    with RowFiles(out, queries.n, tables, of) as files:
        shards = (
            queries.rows(start, start + plan.shard) for start in range(files.done, queries.n, plan.shard)
        )
        with Bar(queries.n, what, " queries", progress, files.done) as shown:
            moved, whole = float(files.done), min(plan.shard, queries.n - files.done)

            def move(count: float) -> None:
                """Show that so many queries more are done, or a part of the keys for more of them."""
                nonlocal moved
                moved += count
                shown.update(min(round(moved), queries.n) - shown.n)
                if cluster is not None:
                    cluster.note(shown, started)

            # Tasks of a cluster end in any order: the last shard counts as much as any.
            swept = (
                _swept_here(wanted, keys, order, shards, plan, memory, device, move)
                if cluster is None
                else swept_on(cluster, wanted, keys, order, shards, plan, lambda part: move(part * whole))
            )
            with closing(swept):
                for blocks in swept:
                    for block in blocks:
                        scores, ids = complete(*block)
                        files.append({"scores": scores, "ids": ids})
                    files.commit()
        result = files.finish()
    return result["scores"], result["ids"]


def _swept_here(
    wanted: TopKeys | TopOfCells,
    keys: Vectors,
    order: NDArray[np.int64] | None,
    shards: Iterator[Floats],
    plan: Plan,
    memory: int,
    device: str | None,
    moved: Callable[[float], None],
) -> Generator[Iterator[tuple[Floats, Ids]]]:
    """Scores and ids of each block of queries, shard by shard, by this process.

    `moved` is told, after each block of keys, how many queries that would be with all keys.
    """
    engine: Engine = NumpyEngine(plan.workers)
    if device is not None:
        engine = torch_engine(device, memory, plan.query_block, keys.d)
    begin = wanted.begin(engine)
    for x in shards:
        blocks = [begin(x[rows]) for rows in slices(len(x), plan.query_block)]
        for first, y in engine.blocks(_key_blocks(keys, order, plan.key_block)):
            engine.feed(blocks, y, first)
            moved(len(x) * len(y) / (keys.n if order is None else len(order)))
            del y  # before the next one is waited for
        yield (block.finish() for block in blocks)


def ranks(
    keys: Any,
    points: Floats,
    targets: NDArray[np.integer[Any]],
    *,
    memory: int = MEMORY,
    device: str | None = None,
) -> NDArray[np.int64]:
    """Rank of key targets[i] among all keys by distance from points[i]; 1 is the nearest.

    Nearness orders by <p, y> - ||y||^2 / 2. A key as near as the target, to rounding, is not before it.
    `memory` and `device` are as in `top_k`.
    """
    keys, rows = _opened(keys, points)
    plan = _plan(keys, rows, memory, per_query=64, copies_keys=False)
    above = np.zeros(rows.n, np.int64)
    targets = np.asarray(targets)
    wanted = keys.take(targets)
    squared = np.einsum("md,md->m", wanted, wanted)
    own = np.einsum("md,md->m", rows.load(), wanted) - 0.5 * squared
    # The target's own score comes from another summation order than the tile's: allow for its rounding,
    # so that a target is not outranked by itself or by its exact double.
    slack = 1e-6 * (row_norms(rows.load()) * np.sqrt(squared) + 0.5 * squared)
    if device is not None:
        engine = torch_engine(device, memory, plan.query_block, keys.d)
        parts = slices(rows.n, plan.query_block)
        blocks = [engine.nearer(rows.rows(part.start, part.stop), (own + slack)[part]) for part in parts]
        for first, y in engine.blocks(_key_blocks(keys, None, plan.key_block)):
            engine.feed(blocks, y, first)
        return np.concatenate([block.finish() for block in blocks]) + 1
    for _, y in _key_blocks(keys, None, plan.key_block):
        half = 0.5 * np.einsum("nd,nd->n", y, y)

        def count(part: slice, y: Floats = y, half: Floats = half) -> None:
            x, limit = rows.rows(part.start, part.stop), (own + slack)[part, None]
            tiles = Tiles(x)
            for start in range(0, len(y), TILE):
                tile = tiles.by_query(y[start : start + TILE])
                tile -= half[start : start + TILE]
                above[part] += np.count_nonzero(tile > limit, axis=1)

        parallel(count, slices(rows.n, plan.query_block), plan.workers)
    return above + 1


def check_memory(memory: int, d: int, k: int, c: int) -> None:
    """Raise VectorError if `memory` is too little for the top k keys or for the maxima of c cells."""
    _row_bytes(memory, d, max(k * TOP_BYTES, c * CELL_BYTES))


def least_memory(d: int, k: int) -> int:
    """Bytes that finding the top k keys takes at least."""
    return _least(_rows_of(d, k * TOP_BYTES))


def _row_bytes(memory: int, d: int, per_query: int) -> tuple[int, int, int]:
    """What one row takes: of a shard, of a block of queries at work, of a block of keys."""
    rows = _rows_of(d, per_query)
    if memory < (least := _least(rows)):
        raise VectorError(f"memory={memory} bytes is too little for d = {d}; at least {least} are needed")
    return rows


def _rows_of(d: int, per_query: int) -> tuple[int, int, int]:
    # One thing resident for each query of a shard: its vector and its running result (twice over while
    # it is sorted or transposed); for each query of a block at work: a row of the widest tile.
    shard_row = 2 * (4 * d + per_query)
    return shard_row, 2 * 4 * TILE + shard_row, 2 * 4 * d


def _least(rows: tuple[int, int, int]) -> int:
    return LEAST_BLOCK * rows[1] + TILE * rows[2]


def _plan(keys: Vectors, queries: Vectors, memory: int, per_query: int, copies_keys: bool) -> Plan:
    shard_row, block_row, key_row = _row_bytes(memory, keys.d, per_query)
    resident = keys.resident is not None and not copies_keys
    for_keys = 0 if resident else min(keys.n * key_row, memory // 2)
    for_queries = max(memory - for_keys, LEAST_BLOCK * block_row) // 2
    # Room for a few threads. Block sizes decide the last bits of the scores, so they depend on the memory
    # given but not on the machine, which may have threads that then stay idle.
    query_block = int(max(LEAST_BLOCK, min(QUERY_BLOCK, queries.n, for_queries // (FEW * block_row))))
    workers = int(max(1, for_queries // (query_block * block_row)))
    key_block = min(keys.n, RESIDENT) if resident else max(TILE, for_keys // key_row)
    # Large shards: keys that must be read or gathered are so once a shard, and every shard waits for the
    # disk once. But not so large that a killed run loses much.
    blocks = min(SHARD_BLOCKS, max(1, for_queries // (query_block * shard_row)))
    return Plan(query_block * int(blocks), query_block, int(key_block), workers)


def _key_blocks(keys: Vectors, order: NDArray[np.int64] | None, size: int) -> Iterator[tuple[int, Floats]]:
    """(position, rows) over all keys, or over keys[order], at most `size` rows at a time."""
    if order is None:
        if keys.resident is None:
            yield from keys.blocks(size)
            return
        for start in range(0, keys.n, size):
            yield start, keys.resident[start : start + size]
        return
    for start in range(0, len(order), size):
        yield start, keys.take(order[start : start + size])


def _opened(keys: Any, queries: Any) -> tuple[Vectors, Vectors]:
    keys, queries = open_vectors(keys, "keys"), open_vectors(queries, "queries")
    if keys.d != queries.d:
        raise VectorError(f"keys have dimension {keys.d} but queries have dimension {queries.d}")
    if keys.n >= 1 << 31:
        raise VectorError(f"{keys.n} keys; at most 2^31 - 1 are supported")
    return keys, queries
