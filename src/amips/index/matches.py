"""The keys of each cell that may be results: to skip cells without one, and to score few keys themselves."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.index.key_mask import KeyMask
from amips.index.living_cells import OwnCells, parts_of
from amips.index.product_scan import scan_by_product
from amips.index.top_keys import TopKeys, best_of, reaching
from amips.vectors import Floats

Ids = NDArray[np.int64]

SCORE_BYTES = 1 << 23  # of scores, and of keys, at once
BEHIND_BYTES = (
    1 << 21
)  # the same, where several masks copy their part: a fit with a bound on its memory does it


@dataclass(frozen=True, eq=False)
class Matches:
    """Keys of a store that are allowed, cell by cell.

    Args:
        starts: where those of each cell begin, and the end, [c + 1].
        numbers: of the keys; one of two cells is there twice.
    """

    store: OwnCells
    allowed: KeyMask
    starts: Ids
    numbers: Ids

    @classmethod
    def of(cls, store: OwnCells, allowed: KeyMask) -> "Matches":
        """Of the keys of a store those that are allowed."""
        parts = parts_of(store)
        numbers, cells, first = list[Ids](), list[Ids](), 0
        for part in parts:
            places = np.flatnonzero(allowed.keys[first : first + part.n][part.entries])
            numbers.append(part.entries[places].astype(np.int64) + first)
            cells.append(np.searchsorted(part.starts, places, side="right") - 1)
            first += part.n
        every, cell = np.concatenate(numbers), np.concatenate(cells)
        if len(parts) > 1:
            order = np.argsort(cell, kind="stable")
            every, cell = every[order], cell[order]
        starts = np.append(0, np.cumsum(np.bincount(cell, minlength=len(store.sizes))))
        return cls(store, allowed, starts, every)

    def after(self, store: OwnCells, allowed: KeyMask) -> "Matches":
        """Of a store that grew out of this one, from which keys went and to which others came.

        The same as `of`, in a few passes over the numbers.
        """
        stay = allowed.keys[self.numbers]
        numbers, ends = self.numbers[stay], np.append(0, np.cumsum(stay))[self.starts]
        more, cells, first = list[NDArray[np.integer[Any]]](), list[Ids](), 0
        for part in parts_of(store):
            if first + part.n > self.store.n:
                places = np.flatnonzero(part.entries >= self.store.n - first)
                places = places[allowed.keys[part.entries[places] + first]]
                more.append(part.entries[places] + first)
                cells.append(np.searchsorted(part.starts, places, side="right") - 1)
            first += part.n
        if more:
            cell = np.concatenate(cells)
            order = np.argsort(cell, kind="stable")
            numbers = np.insert(numbers, ends[cell[order] + 1], np.concatenate(more)[order])
            ends = ends + np.append(0, np.cumsum(np.bincount(cell, minlength=len(ends) - 1)))
        return Matches(store, allowed, ends, numbers)

    @cached_property
    def counts(self) -> Ids:
        """How many each cell has, [c]."""
        return np.diff(self.starts)

    def scan(self, x: Floats, cells: Ids, k: int) -> tuple[Floats, Ids]:
        """The k best by <x, y> within cells [m, p], each key scored with the query itself; -1 skips."""
        if len(x) > 1:
            parts = (self.counts, self._keys_of)
            return scan_by_product(x, cells, k, *parts, twice=self.store.twice, tile_bytes=SCORE_BYTES)
        chosen = cells[0, cells[0] >= 0]
        counts = self.counts[chosen]
        ends = np.cumsum(counts)
        if not len(ends) or not ends[-1]:
            return np.full((1, k), -np.inf, np.float32), np.full((1, k), -1, np.int64)
        numbers = self.numbers[np.repeat(self.starts[chosen] + counts - ends, counts) + np.arange(ends[-1])]
        if self.store.twice:
            numbers = np.unique(numbers)
        return self.store.score_again(x, numbers[None], k)

    def _keys_of(self, cell: int) -> tuple[Floats, Ids]:
        numbers = self.numbers[self.starts[cell] : self.starts[cell + 1]]
        return self.store.keys_at(numbers), numbers


def best_matches(store: OwnCells, numbers: Ids, rows: Floats | None, x: Floats, k: int) -> tuple[Floats, Ids]:
    """The k best of these keys by <x, y>: scores [m, k] and key numbers [m, k].

    `rows` are the keys themselves, if they are at hand; otherwise they are read, so many bytes at a time.
    """
    if len(x) == 1 and rows is not None:  # one query: the calls are what costs, so as few as can be
        scores, ids = reaching(rows @ x[0], numbers, k, twice=False)
        return best_of(scores[None], ids[None], k)
    best, every = TopKeys(len(x), k), np.arange(len(x))
    step = max(1, SCORE_BYTES // (4 * max(len(x), store.d)))
    for low in range(0, len(numbers), step):
        ids = numbers[low : low + step]
        block = store.keys_at(ids) if rows is None else rows[low : low + step]
        best.take(every, x @ block.T, ids)
    return best.finish()


def best_behind(store: OwnCells, masks: list[NDArray[np.bool_]], x: Floats, k: int) -> list[Ids]:
    """The numbers of the k best keys behind each of several masks, [m, k]: every key is scored once."""
    best, every = [TopKeys(len(x), k) for _ in masks], np.arange(len(x))
    step = max(1, BEHIND_BYTES // (4 * max(len(x), store.d)))
    for low in range(0, store.n, step):
        numbers = np.arange(low, min(store.n, low + step))
        scores = x @ store.keys_at(numbers).T
        for mask, top in zip(masks, best, strict=True):
            some = np.flatnonzero(mask[numbers])
            top.take(every, scores[:, some], numbers[some])
    return [top.finish()[1] for top in best]
