"""A pool of source queries for both splits: noisy copies first, then rows, as in the paper; and queries that
were set aside before.

    source queries --+-- pool -- original + copies each --+-- train          what networks learn from
                     |                                    +-- val, test      split "rows": relatives in train
                     +-- set aside -- one row of each -------- val, test     split "source": none in train

Held-out rows of both kinds are made by the same rule from queries of the same log, and one network is
measured on both: what differs is whether a relative of the query was trained on, and nothing else.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from amips.files import partial
from amips.task import BY_ROWS, BY_SOURCE, Split, Task
from amips.vectors import Vectors, open_vectors, row_norms

Ids = NDArray[np.int64]
NOISE = 0.02  # the paper's
COPIES = 4  # the least number of noisy copies: the paper makes the queries 5 to 100 times as many
BLOCK_FLOATS = 1 << 22


@dataclass(frozen=True)
class Pool:
    """Rows [m]: the query that each is made from, whether noise is added, and what it is for.

    Args:
        source: the query of each row.
        noisy: whether a row is a noisy copy, or the query itself.
        role: "train", "val" or "test".
        by: of a held-out row the split it belongs to, "rows" or "source"; "" of others.
    """

    source: Ids
    noisy: NDArray[np.bool_]
    role: NDArray[np.str_]
    by: NDArray[np.str_]


def draw_pool(
    ids: Ids, roles: NDArray[np.str_], copies: int, held_out: int, sources: int | None, seed: int
) -> Pool:
    """Draw the pool and split its rows at random, as the authors do; the queries set aside give one row each.

    Args:
        ids: queries of which no two are equal.
        roles: what each of them is for: "train" for the pool, "val" and "test" are set aside.
        copies: noisy copies of each query of the pool.
        held_out: rows of the pool that are held out for val, and as many for test; at most a tenth each.
        sources: queries in the pool, at most.
    """
    rng = np.random.default_rng([seed, 4])
    each = 1 + copies
    chosen = ids[roles == "train"]
    if sources is not None and sources < len(chosen):
        chosen = np.sort(rng.choice(chosen, sources, replace=False))
    m = len(chosen) * each
    size = min(held_out, max(1, m // 10))
    role = np.full(m, "train", "<U5")
    order = rng.permutation(m)
    role[order[:size]], role[order[size : 2 * size]] = "val", "test"
    aside = roles != "train"
    return Pool(
        source=np.concatenate([np.repeat(chosen, each), ids[aside]]),
        noisy=np.concatenate([np.arange(m) % each, rng.integers(each, size=int(aside.sum()))]) > 0,
        role=np.concatenate([role, roles[aside].astype("<U5")]),
        by=np.concatenate([np.where(role == "train", "", BY_ROWS), np.full(int(aside.sum()), BY_SOURCE)]),
    )


def write_rows(path: Path, queries: Vectors, pool: Pool, seed: int) -> Vectors:
    """The rows of a pool as a file: x itself, or x + noise ||x|| eps, eps ~ N(0, I), at x's norm."""
    if not path.exists():
        with partial(path) as temporary:
            out = open_memmap(temporary, "w+", np.float32, (len(pool.source), queries.d))
            rng = np.random.default_rng([seed, 5])
            step = max(1, BLOCK_FLOATS // queries.d)
            for low in range(0, len(pool.source), step):
                distinct, places = np.unique(pool.source[low : low + step], return_inverse=True)
                x = queries.take(distinct)[places]
                norms = row_norms(x)
                eps = rng.standard_normal(x.shape, np.float32) * pool.noisy[low : low + step, None]
                x += NOISE * norms[:, None] * eps
                x *= (norms / row_norms(x))[:, None]
                out[low : low + len(x)] = x
            out.flush()
    return open_vectors(path, "rows")


def pool_view(task: Task, pool: Pool, by: str) -> Task:
    """A task of a pool's rows with the held-out rows of one split; sources are the queries of the log."""

    def part(split: Split) -> Split:
        rows = np.flatnonzero(pool.by[split.source] == by)
        return Split(
            open_vectors(np.asarray(split.queries)[rows]),
            pool.source[split.source[rows]],
            np.asarray(split.top_scores)[rows],
            np.asarray(split.top_ids)[rows],
            np.asarray(split.cell_scores)[rows],
            np.asarray(split.cell_ids)[rows],
        )

    train = replace(task.train, source=pool.source[np.asarray(task.train.source)])
    options = {**task.options, "split": by}
    return replace(task, train=train, val=part(task.val), test=part(task.test), options=options)
