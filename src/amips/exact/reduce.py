"""Reducers: tiles of scores in, the best keys so far kept."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.vectors import Floats

Ids = NDArray[np.int32]

# A tile of scores is 1024 queries x 512 keys: large enough for a matrix product at full speed, and its
# 2 MB are still in the core's cache when they are reduced.
TILE = 512
FOLD = 4  # columns that share one maximum when looking for entries above the threshold


class Tiles:
    """Tiles of scores x y^T, each in the memory of the one before: fresh pages cost more than their use."""

    def __init__(self, x: Floats) -> None:
        self.x = x
        self.memory = np.empty(len(x) * TILE, np.float32)

    def __call__(self, keys: Floats) -> Floats:
        """The tile for up to TILE keys; it is valid until the next call."""
        tile = self.memory[: len(self.x) * len(keys)].reshape(len(self.x), len(keys))
        return np.matmul(self.x, keys.T, out=tile)


class Best:
    """The running top k of a block of queries, fed with tiles of keys in ascending order of id."""

    def __init__(self, x: Floats, k: int) -> None:
        self.x, self.k = x, k
        self.threshold = np.full(len(x), -np.inf, np.float32)  # the k-th score so far
        self.rows = np.empty(0, np.int64)
        self.scores = np.empty(0, np.float32)
        self.ids = np.empty(0, np.int32)
        self.pending: list[tuple[NDArray[np.int64], Floats, Ids]] = []
        self.waiting = 0

    def update(self, keys: Floats, first: int) -> None:
        """Take in keys [n, d] with ids first, first + 1, ..."""
        scores = Tiles(self.x)
        for start in range(0, len(keys), TILE):
            self._take_tile(scores(keys[start : start + TILE]), first + start)

    def _take_tile(self, tile: Floats, first: int) -> None:
        width = tile.shape[1]
        step = width // FOLD if width % FOLD == 0 else width
        # Most tiles hold few entries above the threshold: the maximum over columns j, j + step, ...
        # finds them at a fraction of the cost of looking at every comparison.
        peaks = tile[:, :step]
        for low in range(step, width, step):
            peaks = np.maximum(peaks, tile[:, low : low + step])
        hits = np.flatnonzero(peaks > self.threshold[:, None])
        if hits.size == 0:
            return
        rows, columns = np.divmod(hits, step)
        entries = ((rows * width + columns)[:, None] + np.arange(0, width, step)).ravel()
        above = tile.ravel()[entries] > np.repeat(self.threshold[rows], width // step)
        entries = np.sort(entries[above])  # ascending ids in each row: ties are settled by arrival
        rows, columns = np.divmod(entries, width)
        self.pending.append((rows, tile.ravel()[entries], (first + columns).astype(np.int32)))
        self.waiting += len(entries)
        if self.waiting > max(len(self.x) * self.k, 1 << 14):
            self._compact()

    def _compact(self) -> None:
        """Keep the k best of each row and raise the thresholds."""
        if self.pending:
            rows, scores, ids = zip((self.rows, self.scores, self.ids), *self.pending, strict=True)
            self.rows, self.scores, self.ids = keep_best(
                np.concatenate(rows), np.concatenate(scores), np.concatenate(ids), len(self.x), self.k
            )
            self.pending, self.waiting = [], 0
        counts = np.bincount(self.rows, minlength=len(self.x))
        ends = np.cumsum(counts)
        full = counts >= self.k
        self.threshold[full] = self.scores[ends[full] - 1]

    def finish(self) -> tuple[Floats, Ids]:
        """Scores [m, k] and ids [m, k], best first."""
        self._compact()
        return self.scores.reshape(-1, self.k), self.ids.reshape(-1, self.k)


def keep_best(
    rows: NDArray[np.int64], scores: Floats, ids: NDArray[Any], count: int, k: int
) -> tuple[NDArray[np.int64], Floats, NDArray[Any]]:
    """The k best entries of each of `count` rows, sorted by row, then best score, then order of arrival.

    Row and score are packed into one integer, so that one sort does it: the bits of a float order like
    integers once negative values are flipped.
    """
    bits = (scores + np.float32(0)).view(np.uint32)
    ascending = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    packed = (rows.astype(np.uint64) << np.uint64(32)) | (~ascending).astype(np.uint64)
    order = np.argsort(packed, kind="stable")
    rows = rows[order]
    starts = np.searchsorted(rows, np.arange(count))
    kept = np.flatnonzero(np.arange(len(rows)) - starts[rows] < k)
    chosen = order[kept]
    return rows[kept], scores[chosen], ids[chosen]


class CellBest:
    """The running top key of every cell for a block of queries, fed with keys in the order of cells.

    `order` [n] lists key ids by cell, ascending within each; cell j is order[bounds[j] : bounds[j + 1]].
    """

    def __init__(self, x: Floats, order: NDArray[np.int64], bounds: NDArray[np.int64]) -> None:
        self.x, self.order, self.bounds = x, order, bounds
        self.scores = np.full((len(bounds) - 1, len(x)), -np.inf, np.float32)
        self.ids = np.full(self.scores.shape, -1, np.int32)

    def update(self, keys: Floats, first: int) -> None:
        """Take in the keys at positions first, first + 1, ... of the order."""
        tiles, offsets, bounds = Tiles(self.x), np.arange(len(self.x)), self.bounds
        last = first + len(keys)
        cell = int(np.searchsorted(bounds, first, "right")) - 1
        position = first
        while position < last:
            while bounds[cell + 1] <= position:
                cell += 1
            stop = min(int(bounds[cell + 1]), last, position + TILE)
            tile = tiles(keys[position - first : stop - first])
            top = tile.argmax(axis=1)
            value = tile.ravel()[top + offsets * tile.shape[1]]
            # A cell may span several tiles: a later one wins only if it is strictly better.
            better = value > self.scores[cell]
            self.scores[cell][better] = value[better]
            self.ids[cell][better] = self.order[position + top[better]]
            position = stop

    def finish(self) -> tuple[Floats, Ids]:
        """Scores [m, c] and ids [m, c]."""
        return self.scores.T, self.ids.T


class Doubles:
    """Groups of exactly equal keys, to expand a ranking of distinct keys into one of all keys."""

    def __init__(self, firsts: NDArray[np.int64]) -> None:
        self.members = np.argsort(firsts, kind="stable")  # by group, ascending ids within one
        self.starts = np.searchsorted(firsts[self.members], np.arange(len(firsts)))
        self.sizes = np.bincount(firsts, minlength=len(firsts))

    def expand(self, scores: Floats, firsts: NDArray[np.int64], k: int) -> tuple[Floats, Ids]:
        """From the distinct top keys [m, k'] to the top k keys [m, k], doubles included."""
        out_scores = np.empty((len(firsts), k), np.float32)
        out_ids = np.empty((len(firsts), k), np.int32)
        step = max(1, (1 << 20) // (k * k))
        for low in range(0, len(firsts), step):
            part = firsts[low : low + step]
            sizes = np.minimum(self.sizes[part], k).ravel()
            entry = np.repeat(np.arange(part.size), sizes)
            within = np.arange(len(entry)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
            ids = self.members[self.starts[part.ravel()[entry]] + within]
            values = scores[low : low + step].ravel()[entry]
            by_id = np.argsort(ids, kind="stable")  # arrival in order of id settles ties
            _, best, chosen = keep_best(
                (entry // part.shape[1])[by_id], values[by_id], ids[by_id], len(part), k
            )
            out_scores[low : low + step] = best.reshape(-1, k)
            out_ids[low : low + step] = chosen.reshape(-1, k)
        return out_scores, out_ids


def lowest_double_in_cell(firsts: NDArray[np.int64], cells: NDArray[Any]) -> Ids:
    """For each key the lowest id of an equal key in the same cell."""
    name = np.arange(len(firsts), dtype=np.int32)
    group = np.flatnonzero(np.bincount(firsts, minlength=len(firsts))[firsts] > 1)
    if group.size:
        pairs = np.stack([firsts[group], cells[group].astype(np.int64)], axis=1)
        _, lowest, inverse = np.unique(pairs, axis=0, return_index=True, return_inverse=True)
        name[group] = group[lowest[inverse.ravel()]]
    return name
