"""Arrays on their way to a device: the next ones are read and pinned while these are worked on."""

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Item = TypeVar("Item")


def as_tensor(array: NDArray[Any]) -> Tensor:
    """The same memory as a tensor; nothing is copied."""
    with warnings.catch_warnings():
        # torch wants memory it could write to; nothing is written
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(np.asarray(array))


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy that the device can fetch by itself; the tensor itself where the device has no use for one."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device. A pinned one is fetched while the caller goes on."""
    return tensor.to(device, non_blocking=True)


def ahead(items: Iterator[Item]) -> Iterator[Item]:
    """The same items; the next one is made in a thread while this one is used."""
    nothing: Any = object()
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(next, items, nothing)
        while (item := following.result()) is not nothing:
            following = pool.submit(next, items, nothing)
            yield item
            del item  # while the next one is waited for, it is gone


class Ahead(Generic[Item]):
    """`make(number)` for one number after the other: the next one is made in a thread meanwhile."""

    def __init__(self, make: Callable[[int], Item]) -> None:
        self.make, self.pool = make, ThreadPoolExecutor(1)
        self.number, self.following = -1, Future[Item]()

    def __call__(self, number: int) -> Item:
        """What belongs to this number; numbers may come in any order."""
        wanted = self.following if number == self.number else self.pool.submit(self.make, number)
        item = wanted.result()
        self.number, self.following = number + 1, self.pool.submit(self.make, number + 1)
        return item

    def close(self) -> None:
        """End the thread."""
        self.pool.shutdown(cancel_futures=True)
