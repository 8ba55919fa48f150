"""Reducers on a device: scores of a piece of the keys in, the best keys so far kept.

A score and an id are packed into one integer that orders by score, and of equal scores puts the lower id
first: the largest integers are the top keys, ties settled, in whatever order a device looks at them. Nothing
here waits for the device; `finish` does.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amips.device.moving import as_tensor
from amips.errors import VectorError
from amips.vectors import Floats

GROUP = 32  # neighbouring keys that share one maximum
SCORE_BYTES = 32  # working memory of one score: itself, rearranged, packed, sorted
LAST_ID = 2**31 - 1
LOWEST = -(2**63)  # packed: less than any score


def packed(scores: Tensor, ids: Tensor) -> Tensor:
    """One int64 for each score [..., w] and id (broadcast to it): larger for better, then for lower ids."""
    bits = (scores + 0.0).view(torch.int32)  # -0 becomes 0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.long() << 32) + (LAST_ID - ids)


def unpacked(values: Tensor) -> tuple[Tensor, Tensor]:
    """The scores and ids of packed integers."""
    ordered = (values >> 32).int()
    bits = torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    return bits.view(torch.float32), LAST_ID - (values & 0xFFFFFFFF)


class TopKeys:
    """The running top k of queries x [m, d]."""

    def __init__(self, x: Tensor, k: int) -> None:
        self.x, self.k = x, k
        self.best: Tensor | None = None  # packed, [m, k]
        self.broken = torch.zeros((), dtype=torch.bool, device=x.device)

    def update(self, keys: Tensor, first: int) -> None:
        """Take in keys [w, d] with ids first, first + 1, ..."""
        candidates = self._candidates(self.x @ keys.T, first)
        if self.best is not None:
            candidates = torch.cat([self.best, candidates], dim=1)
        self.best = candidates.topk(min(self.k, candidates.shape[1])).values

    def _candidates(self, scores: Tensor, first: int) -> Tensor:
        """Packed scores [m, ...] among which the k best of scores [m, w] are.

        They are in the k best groups of neighbours: each group before that of a score has a better one, or an
        equal one of a lower id.
        """
        width = scores.shape[1]
        ids = torch.arange(first, first + width, device=scores.device)
        count = width // GROUP
        if count < 2 * self.k:
            self.broken |= scores.isnan().any()
            return packed(scores, ids)
        end = count * GROUP
        groups = scores[:, :end].view(-1, count, GROUP)
        peaks = groups.amax(dim=2)
        self.broken |= peaks.isnan().any() | scores[:, end:].isnan().any()
        numbers = torch.arange(count, device=scores.device)
        chosen = unpacked(packed(peaks, numbers).topk(self.k).values)[1]
        members = groups.gather(1, chosen[:, :, None].expand(-1, -1, GROUP))
        inside = packed(members, ids[:end].view(count, GROUP)[chosen]).flatten(1)
        return torch.cat([inside, packed(scores[:, end:], ids[end:])], dim=1)

    def finish(self) -> tuple[Floats, NDArray[np.int32]]:
        """Scores [m, k] and ids [m, k], best first."""
        assert self.best is not None
        scores, ids = unpacked(self.best)
        _check(self.broken | scores.isneginf().any())
        return scores.cpu().numpy(), ids.int().cpu().numpy()


class CellOrder:
    """Keys in the order of cells, and how a piece of them is cut into chunks that lie in one cell each.

    `order` [n] lists key ids by cell, ascending within each; cell j is order[bounds[j] : bounds[j + 1]].
    """

    def __init__(self, order: NDArray[np.int64], bounds: NDArray[np.int64], device: torch.device) -> None:
        self.order, self.bounds, self.device = order, bounds, device
        self.place = (-1, -1)
        self.pieces: tuple[Tensor, ...] = ()

    def chunks(self, first: int, count: int) -> tuple[Tensor, ...]:
        """Of the keys at first, first + 1, ...: ids [w], columns [chunks, g], and the cell [chunks] of each.

        A chunk has g columns; where its cell has fewer keys left, the last one is repeated.
        """
        if self.place != (first, count):  # every block of queries asks for the same piece
            self.place = (first, count)
            arrays = (self.order[first : first + count], *self._cut(first, first + count))
            self.pieces = tuple(as_tensor(array).to(self.device) for array in arrays)
        return self.pieces

    def _cut(self, first: int, stop: int) -> tuple[NDArray[Any], NDArray[Any]]:
        low, high = np.searchsorted(self.bounds, [first, stop - 1], "right")
        edges = np.clip(self.bounds[low - 1 : high + 1], first, stop) - first
        cells = np.arange(low - 1, high)
        starts, sizes = edges[:-1], np.diff(edges)
        cells, starts, sizes = (values[sizes > 0] for values in (cells, starts, sizes))
        size = max(1, min(GROUP, (stop - first) // len(cells)))  # so that at most half is repeated
        numbers = -(-sizes // size)
        within = np.arange(numbers.sum()) - np.repeat(np.cumsum(numbers) - numbers, numbers)
        begins = np.repeat(starts, numbers) + size * within
        last = np.repeat(starts + sizes, numbers) - 1
        columns = np.minimum(begins[:, None] + np.arange(size), last[:, None])
        return columns, np.repeat(cells, numbers)


class TopOfCells:
    """The running top key of every cell for queries x [m, d], fed with keys in the order of cells."""

    def __init__(self, x: Tensor, cells: CellOrder) -> None:
        self.x, self.cells = x, cells
        shape = (len(x), len(cells.bounds) - 1)
        self.best = torch.full(shape, LOWEST, dtype=torch.int64, device=x.device)  # packed
        self.broken = torch.zeros((), dtype=torch.bool, device=x.device)

    def update(self, keys: Tensor, first: int) -> None:
        """Take in the keys [w, d] at positions first, first + 1, ... of the order."""
        ids, columns, cells = self.cells.chunks(first, len(keys))
        scores = (self.x @ keys.T).index_select(1, columns.flatten()).view(-1, *columns.shape)
        values, places = scores.max(dim=2)  # of equal ones the first: the lowest id
        self.broken |= values.isnan().any()
        tops = packed(values, ids[columns[:, 0] + places])
        self.best.scatter_reduce_(1, cells.expand(len(tops), -1), tops, "amax")

    def finish(self) -> tuple[Floats, NDArray[np.int32]]:
        """Scores [m, c] and ids [m, c]."""
        _check(self.broken)
        empty = self.best == LOWEST
        scores, ids = unpacked(self.best)
        scores, ids = scores.masked_fill(empty, -torch.inf), ids.masked_fill(empty, -1)
        return scores.cpu().numpy(), ids.int().cpu().numpy()


class Nearer:
    """How many keys are nearer to a point than a limit: <p, y> - ||y||^2 / 2 is larger."""

    def __init__(self, points: Tensor, limit: Tensor) -> None:
        self.points, self.limit = points, limit[:, None]
        self.count = torch.zeros(len(points), dtype=torch.int64, device=points.device)

    def update(self, keys: Tensor, first: int) -> None:
        """Take in keys [w, d]."""
        near = self.points @ keys.T - 0.5 * keys.square().sum(dim=1)
        self.count += (near > self.limit).sum(dim=1)

    def finish(self) -> NDArray[np.int64]:
        """The counts [m]."""
        return self.count.cpu().numpy()


def _check(broken: Tensor) -> None:
    if bool(broken):
        raise VectorError("inner products of keys and queries are not finite numbers; check both")
