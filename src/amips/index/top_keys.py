"""Keeping the best keys so far, for queries whose cells are visited in any order, and scoring candidates."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.exact import keep_best
from amips.vectors import Floats

Ids = NDArray[np.int64]

FEW_ROWS = 16  # for which it is the calls that cost


class TopKeys:
    """The k best entries so far of m rows that are visited in any order."""

    def __init__(self, m: int, k: int, twice: bool = False) -> None:
        self.m, self.k = m, k
        self.twice = twice  # a row may meet a key twice
        self.threshold = np.full(m, -np.inf, np.float32)
        self.kept = (np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.int64))
        self.pending: list[tuple[Ids, Floats, Ids]] = []
        self.waiting = 0

    def take(self, rows: Ids, tile: Floats, ids: NDArray[np.integer[Any]]) -> None:
        """Scores [r, w] of the given rows against the keys `ids` [w]."""
        width = tile.shape[1]
        limits = self.threshold[rows]
        if width > 2 * self.k and np.isneginf(limits).any():
            # Nothing to compare with yet: the k-th best of this tile is a threshold for the rest of it.
            limits = np.maximum(limits, np.partition(tile, width - self.k, axis=1)[:, width - self.k])
        reached = np.flatnonzero(tile >= limits[:, None])
        row, column = np.divmod(reached, width)
        self.pending.append((rows[row], tile.ravel()[reached], ids[column].astype(np.int64, copy=False)))
        self.waiting += len(reached)
        if self.waiting > max(4 * self.m * self.k, 1 << 16):
            self.compact()

    def compact(self) -> None:
        """Keep the k best of each row; ties go to the lower id."""
        if not self.pending:
            return
        rows, scores, ids = (np.concatenate(parts) for parts in zip(self.kept, *self.pending, strict=True))
        if self.twice:
            by_id = np.unique(rows * (1 + ids.max(initial=0)) + ids, return_index=True)[1]
        else:
            by_id = np.argsort(ids, kind="stable")
        self.kept = keep_best(rows[by_id], scores[by_id], ids[by_id], self.m, self.k)
        self.pending, self.waiting = [], 0
        counts = np.bincount(self.kept[0], minlength=self.m)
        full = counts >= self.k
        self.threshold[full] = self.kept[1][np.cumsum(counts)[full] - 1]

    def finish(self) -> tuple[Floats, Ids]:
        """Scores [m, k] and ids [m, k], padded with -inf and -1."""
        self.compact()
        rows, scores, ids = self.kept
        starts = np.searchsorted(rows, np.arange(self.m))
        place = np.arange(len(rows)) - starts[rows]
        out_scores = np.full((self.m, self.k), -np.inf, np.float32)
        out_ids = np.full((self.m, self.k), -1, np.int64)
        out_scores[rows, place] = scores
        out_ids[rows, place] = ids
        return out_scores, out_ids


def best_first(scores: Floats, ids: Ids, k: int) -> tuple[Floats, Ids]:
    """The k best of each row in order; ties go to the lower id."""
    width = scores.shape[1]
    if (
        4 * k < width and len(scores) > FEW_ROWS
    ):  # where many rows are sorted, only what reaches the k-th score
        reached = scores >= np.partition(scores, width - k, axis=1)[:, width - k, None]
        most = int(reached.sum(axis=1).max(initial=k))
        if 2 * most < width:
            kept = np.argsort(~reached, axis=1, kind="stable")[:, :most]
            scores, ids = np.take_along_axis(scores, kept, 1), np.take_along_axis(ids, kept, 1)
    order = np.lexsort((ids, -scores), axis=1)[:, :k]
    rows = np.arange(len(scores))[:, None]
    return scores[rows, order], ids[rows, order]


def best_of(scores: Floats, candidates: Ids, k: int) -> tuple[Floats, Ids]:
    """As `best_first`, for candidates [m, r] that may be fewer than k: then -inf and -1 follow."""
    short = k - candidates.shape[1]
    if short > 0:  # padding costs as much as scoring one query: only where it must be
        missing = ((0, 0), (0, short))
        scores = np.pad(scores, missing, constant_values=-np.inf)
        candidates = np.pad(candidates, missing, constant_values=-1)
    return best_first(scores, candidates, k)


def score_candidates(
    keys_at: Callable[[Ids], Floats], x: Floats, candidates: Ids, k: int, block_bytes: int
) -> tuple[Floats, Ids]:
    """True inner products of the candidates [m, r] (-1 skips), and the k best of them, [m, k].

    `keys_at` gives keys by id, [..., d]; `block_bytes` of them at a time.
    """
    scores = np.empty(candidates.shape, np.float32)
    step = max(1, block_bytes // max(1, 4 * x.shape[1] * candidates.shape[1]))
    for low in range(0, len(x), step):
        ids = candidates[low : low + step]
        rows = keys_at(np.maximum(ids, 0))
        true = np.matmul(rows, x[low : low + step, :, None])[:, :, 0]
        scores[low : low + step] = np.where(ids < 0, -np.inf, true)
    return best_of(scores, candidates, k)


def cell_products(centers: Floats, x: Floats, cells: Ids, block_bytes: int) -> Floats:
    """<x, center> of the cells [m, p] of each query (-1 counts as the first), so many bytes at a time."""
    products = np.empty(cells.shape, np.float32)
    step = max(1, block_bytes // (4 * x.shape[1] * max(1, cells.shape[1])))
    for low in range(0, len(x), step):
        rows = centers[np.maximum(cells[low : low + step], 0)]
        products[low : low + step] = np.matmul(rows, x[low : low + step, :, None])[:, :, 0]
    return products


def top_of_rows(
    keys: Floats, x: Floats, k: int, block_bytes: int, allowed: NDArray[Any] | None = None
) -> tuple[Floats, Ids]:
    """The k best of all keys [n, d] by <x, y>, scores [m, k] and ids [m, k]; so many bytes at a time.

    `allowed` [n] says which keys may be results; all, if None.
    """
    best, rows = TopKeys(len(x), k), np.arange(len(x))
    step = max(1, block_bytes // (4 * max(len(x), keys.shape[1])))
    some = None if allowed is None else np.flatnonzero(allowed)
    for low in range(0, len(keys) if some is None else len(some), step):
        ids = np.arange(low, min(low + step, len(keys))) if some is None else some[low : low + step]
        block = keys[low : low + step] if some is None else keys[ids]
        best.take(rows, x @ block.T, ids)
    return best.finish()


def once(scores: Floats, ids: Ids) -> tuple[Floats, Ids]:
    """The same, best first, without a key that is there a second time; -inf and -1 fill up."""
    if len(ids) == 1:  # one query: the calls are what costs, so as few as can be
        kept = np.sort(np.unique(ids[0], return_index=True)[1])
        return scores[:, kept], ids[:, kept]
    order = np.argsort(ids, axis=1, kind="stable")
    scores, ids = np.take_along_axis(scores, order, 1), np.take_along_axis(ids, order, 1)
    again = ids[:, 1:] == ids[:, :-1]
    scores[:, 1:][again], ids[:, 1:][again] = -np.inf, -1
    return scores, ids


def narrow_type(count: int) -> Any:
    """The smallest type that numbers so many cells."""
    return np.uint16 if count < 1 << 16 else np.int64


def reaching(scores: Floats, ids: Ids, k: int, twice: bool) -> tuple[Floats, Ids]:
    """Of one query, scores [w] and ids [w] among which the k best are, in any order; each key once.

    `twice` says that a key may be there two times.
    """
    wanted = 2 * k if twice else k
    if len(scores) > wanted:
        reached = scores >= np.partition(scores, len(scores) - wanted)[len(scores) - wanted]
        scores, ids = scores[reached], ids[reached]
    if twice:
        ids, first = np.unique(ids, return_index=True)
        scores = scores[first]
    return scores, ids
