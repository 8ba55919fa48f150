"""Which keys may be results: those that were not removed, or those that a filter lets through."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.blas import faiss

Ids = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class KeyMask:
    """The keys that may be results, as booleans [n] by key number; what is derived of them is kept.

    The array must not be changed afterwards.
    """

    keys: NDArray[np.bool_]

    @cached_property
    def count(self) -> int:
        """How many there are."""
        return int(np.count_nonzero(self.keys))

    @cached_property
    def numbers(self) -> Ids:
        """Which, ascending."""
        return np.flatnonzero(self.keys)

    @cached_property
    def selector(self) -> Any:
        """The same for FAISS."""
        return faiss.IDSelectorBitmap(np.packbits(self.keys, bitorder="little"))

    def __and__(self, other: "KeyMask") -> "KeyMask":
        return KeyMask(self.keys & other.keys)

    def without(self, numbers: Ids) -> "KeyMask":
        """The same without these keys."""
        keys = self.keys.copy()
        keys[numbers] = False
        return KeyMask(keys)

    def followed_by(self, more: int) -> "KeyMask":
        """The same, and so many more keys that may all be results."""
        return KeyMask(np.concatenate([self.keys, np.ones(more, np.bool_)]))

    def split(self, firsts: list[int]) -> "tuple[KeyMask, ...]":
        """The keys from each of these numbers on, up to the next."""
        known = self._split
        if known is None or known[0] != firsts:
            ends = [*firsts[1:], len(self.keys)]
            known = (
                firsts,
                tuple(KeyMask(self.keys[low:high]) for low, high in zip(firsts, ends, strict=True)),
            )
            object.__setattr__(self, "_split", known)
        return known[1]

    _split: "tuple[list[int], tuple[KeyMask, ...]] | None" = None
