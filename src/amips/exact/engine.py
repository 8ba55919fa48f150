"""Where products are made and reduced: numpy on the CPU, or torch on a device."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from amips.blas import parallel
from amips.errors import VectorError
from amips.exact.reduce import Best, CellBest, Ids
from amips.extras import needs_extra
from amips.vectors import Floats

Item = TypeVar("Item")


class Reducer(Protocol):
    """The best keys so far of a block of queries."""

    def finish(self) -> tuple[Floats, Ids]:
        """Scores and ids, [m, k] or [m, c]."""


class Engine(Protocol):
    """What a sweep over the keys is made with."""

    def top_keys(self, k: int) -> Callable[[Floats], Reducer]:
        """What begins the top k keys of a block of queries [m, d]."""

    def top_of_cells(
        self, order: NDArray[np.int64], bounds: NDArray[np.int64]
    ) -> Callable[[Floats], Reducer]:
        """What begins the top key of every cell, `order` and `bounds` as in `CellBest`."""

    def blocks(self, blocks: Iterator[Item]) -> Iterator[Item]:
        """Blocks of keys, read ahead where that pays."""

    def feed(self, reducers: Sequence[Any], keys: Floats, first: int) -> None:
        """Give keys first, first + 1, ... to each of the reducers."""


class NumpyEngine:
    """Products with numpy, a thread for each block of queries, `workers` at most."""

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def top_keys(self, k: int) -> Callable[[Floats], Best]:
        """What begins the top k keys of a block of queries [m, d]."""
        return lambda x: Best(x, k)

    def top_of_cells(
        self, order: NDArray[np.int64], bounds: NDArray[np.int64]
    ) -> Callable[[Floats], CellBest]:
        """What begins the top key of every cell for a block of queries [m, d]."""
        return lambda x: CellBest(x, order, bounds)

    def blocks(self, blocks: Iterator[Item]) -> Iterator[Item]:
        """Blocks of keys as they come."""
        return blocks

    def feed(self, reducers: Sequence[Any], keys: Floats, first: int) -> None:
        """Give keys first, first + 1, ... to each of the reducers."""
        parallel(partial(_update, keys=keys, first=first), reducers, self.workers)


@dataclass(frozen=True)
class TopKeys:
    """What is asked of a sweep: the top k keys of each query."""

    k: int

    def begin(self, engine: Engine) -> Callable[[Floats], Reducer]:
        """What begins a block of queries."""
        return engine.top_keys(self.k)


@dataclass(frozen=True)
class TopOfCells:
    """What is asked of a sweep: the top key of every cell, `order` and `bounds` as in `CellBest`."""

    order: NDArray[np.int64]
    bounds: NDArray[np.int64]

    def begin(self, engine: Engine) -> Callable[[Floats], Reducer]:
        """What begins a block of queries."""
        return engine.top_of_cells(self.order, self.bounds)


def _update(reducer: Best | CellBest, keys: Floats, first: int) -> None:
    reducer.update(keys, first)


def check_device(device: Any) -> None:
    """VectorError unless there is such a device, AmipsError if there is no torch to use it with."""
    with needs_extra("exact search on a device", "train", "torch"):
        from amips.device import device_named
    device_named(device, VectorError)


def torch_engine(device: str, memory: int, rows: int, d: int) -> Any:
    """The engine of a device, see `amips.device.TorchEngine`; torch is imported here and no earlier."""
    with needs_extra("exact search on a device", "train", "torch"):
        from amips.device import TorchEngine
    return TorchEngine(device, memory, rows, d)
