"""Exact search with torch on a device, fed from the host in pieces that it has memory for."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from amips.device.moving import ahead, as_tensor, moved, pinned
from amips.device.places import device_named, full_precision, settle
from amips.device.reducers import GROUP, SCORE_BYTES, CellOrder, Nearer, TopKeys, TopOfCells
from amips.errors import VectorError
from amips.vectors import Floats

Item = TypeVar("Item")
WIDEST = 1 << 16  # keys in a piece


class TorchEngine:
    """Products on a device and their reduction there.

    Args:
        device: its name.
        memory: bytes of the device that the scores of a piece of the keys, and two pieces, take half of at
            most. What a shard of queries takes beside them is the caller's to bound.
        rows: queries in a block, at most.
        d: the dimension.
    """

    def __init__(self, device: str, memory: int, rows: int, d: int) -> None:
        self.device = device_named(device, VectorError)
        # From the memory allowed, not from what is free: piece sizes decide the last bits of the scores.
        width = min(memory // 4 // (SCORE_BYTES * rows), memory // 4 // (8 * d), WIDEST)
        self.width = max(1, width // GROUP) * GROUP

    def top_keys(self, k: int) -> Callable[[Floats], TopKeys]:
        """What begins the top k keys of a block of queries [m, d]."""
        return lambda x: TopKeys(self._moved(x), k)

    def top_of_cells(
        self, order: NDArray[np.int64], bounds: NDArray[np.int64]
    ) -> Callable[[Floats], TopOfCells]:
        """What begins the top key of every cell for a block of queries [m, d]."""
        cells = CellOrder(order, bounds, self.device)
        return lambda x: TopOfCells(self._moved(x), cells)

    def nearer(self, points: Floats, limit: Floats) -> Nearer:
        """What counts the keys that are nearer to points [m, d] than a limit [m]."""
        return Nearer(self._moved(points), self._moved(limit))

    def blocks(self, blocks: Iterator[Item]) -> Iterator[Item]:
        """Blocks of keys, read ahead."""
        return ahead(blocks)

    def feed(self, reducers: Sequence[Any], keys: Floats, first: int) -> None:
        """Give keys first, first + 1, ... to each of the reducers."""
        with full_precision():
            for low in range(0, len(keys), self.width):
                staged = pinned(as_tensor(keys[low : low + self.width]), self.device)
                settle(self.device)  # with the piece before, so that there are never more than two
                piece = moved(staged, self.device)
                for reducer in reducers:
                    reducer.update(piece, first + low)

    def _moved(self, array: Floats) -> Any:
        return moved(pinned(as_tensor(array), self.device), self.device)
