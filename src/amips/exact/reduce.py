"""Reducers: tiles of scores in, the best keys so far kept."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.errors import VectorError
from amips.vectors import Floats

Ids = NDArray[np.int32]

# A tile of scores is 1024 keys by 1024 queries: large enough for a matrix product near full speed, and its
# 4 MB are still in the core's caches when they are reduced.
TILE = 1024
FOLD = 4  # keys that share one maximum when looking for entries above the threshold
MOST_HITS = 1 << 14  # such groups taken in at once, unless one key has more


class Tiles:
    """Tiles of scores, each in the memory of the one before: fresh pages cost more than their use.

    A tile is valid until the next one is made.
    """

    def __init__(self, x: Floats) -> None:
        self.x = x
        self.memory = np.empty(len(x) * TILE, np.float32)

    def by_query(self, keys: Floats) -> Floats:
        """x y^T, [m, w], for up to TILE keys."""
        tile = self.memory[: len(self.x) * len(keys)].reshape(len(self.x), len(keys))
        return np.matmul(self.x, keys.T, out=tile)

    def by_key(self, keys: Floats) -> Floats:
        """y x^T, [w, m], for up to TILE keys."""
        tile = self.memory[: len(self.x) * len(keys)].reshape(len(keys), len(self.x))
        return np.matmul(keys, self.x.T, out=tile)


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
        tiles = Tiles(self.x)
        for start in range(0, len(keys), TILE):
            tile = tiles.by_key(keys[start : start + TILE])
            if np.isneginf(self.threshold[0]) and len(tile) >= self.k:
                self._first_threshold(tile)
            self._take(tile, first + start)

    def _first_threshold(self, tile: Floats) -> None:
        """Just below the k-th best of one tile: all but some k entries of it need not be looked at."""
        place = len(tile) - self.k
        best = np.partition(np.ascontiguousarray(tile.T), place, axis=1)[:, place]
        self.threshold = np.maximum(self.threshold, np.nextafter(best, np.float32(-np.inf)))

    def _take(self, tile: Floats, first: int) -> None:
        """Take in the scores [w, m] of keys first, first + 1, ..."""
        width, m = tile.shape
        step = width // FOLD if width % FOLD == 0 else width
        # Most tiles hold few entries above the threshold: the maximum over keys j, j + step, ... finds
        # them at a fraction of the cost of looking at every comparison.
        peaks = tile[:step]
        for low in range(step, width, step):
            peaks = np.maximum(peaks, tile[low : low + step])
        hits = np.flatnonzero(peaks > self.threshold)
        if hits.size == 0:
            return
        if hits.size > MOST_HITS and width > 1:  # while the threshold is still low: bounds the memory
            self._take(tile[: width // 2], first)
            self._take(tile[width // 2 :], first + width // 2)
            return
        entries = (hits[:, None] + np.arange(0, width, step) * m).ravel()
        above = tile.ravel()[entries] > np.repeat(self.threshold[hits % m], width // step)
        entries = np.sort(entries[above])  # by ascending id: ties are settled by arrival
        ids, rows = np.divmod(entries, m)
        self.pending.append((rows, tile.ravel()[entries], (first + ids).astype(np.int32)))
        self.waiting += len(entries)
        if self.waiting > max(m * self.k, MOST_HITS):
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
        if len(self.scores) != len(self.x) * self.k:
            raise VectorError("inner products of keys and queries are not finite numbers; check both")
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
        tiles, queries, bounds = Tiles(self.x), np.arange(len(self.x)), self.bounds
        for start in range(first, first + len(keys), TILE):
            tile = tiles.by_query(keys[start - first : start - first + TILE])
            stop = start + tile.shape[1]
            cell = int(np.searchsorted(bounds, start, "right")) - 1
            while bounds[cell] < stop:
                low, high = max(start, int(bounds[cell])), min(stop, int(bounds[cell + 1]))
                if low < high:
                    top = tile[:, low - start : high - start].argmax(axis=1) + (low - start)
                    value = tile.ravel()[top + queries * tile.shape[1]]
                    # A cell may span several tiles: a later one wins only if it is strictly better.
                    better = value > self.scores[cell]
                    self.scores[cell][better] = value[better]
                    self.ids[cell][better] = self.order[start + top[better]]
                cell += 1
                if cell == len(bounds) - 1:
                    break

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
