"""From ids to key numbers, while keys come and go."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.errors import AmipsError
from amips.index import KeyMask
from amips.vectors import read_ids

Ids = NDArray[np.int64]


LARGEST = int(np.iinfo(np.int64).max)  # which no key is given by itself


def next_id(labels: NDArray[Any] | None, n: int) -> int:
    """The number behind all ids, at most the largest that there is; 0 if they are strings."""
    if labels is None:
        return n
    return min(LARGEST, 1 + int(labels.max(initial=-1))) if labels.dtype.kind == "i" else 0


def check_kind(ids: NDArray[Any], strings: bool) -> None:
    """AmipsError unless ids are strings, or whole numbers, as those of an index are."""
    kinds = ("whole numbers", "strings")
    if len(ids) and (ids.dtype.kind == "U") != strings:
        raise AmipsError(f"the ids of this index are {kinds[strings]}, not {kinds[not strings]}")


def check_usable(ids: NDArray[Any]) -> None:
    """AmipsError if a key cannot have one of these ids: -1, or "", stands for no result."""
    nothing: Any = "" if ids.dtype.kind == "U" else -1
    if (ids == nothing).any():
        raise AmipsError(f"ids: {nothing!r} means that there is no result, so no key can have it")


class KeyIds:
    """The numbers of the keys of an index by their ids: a sorted table, and what has changed since.

    Args:
        labels: the id of each key number, [n]; None if they are the same.
        alive: the keys that were not removed; None if none was.
        least: numbers below it were ids once: no key gets one of them by itself.
    """

    def __init__(self, labels: NDArray[Any] | None, n: int, alive: KeyMask | None, least: int = 0) -> None:
        self.n, self._labels = n, labels
        self._alive = np.ones(n, np.bool_) if alive is None else alive.keys
        self._changed: dict[Any, int] = {}  # -1: removed
        self._next = max(least, next_id(labels, n))  # the id that a key gets which comes without one
        if labels is not None:
            numbers = np.arange(n) if alive is None else alive.numbers
            self._order = numbers[np.argsort(labels[numbers], kind="stable")]
            self._sorted = labels[self._order]

    @property
    def strings(self) -> bool:
        """Whether ids are strings."""
        return self._labels is not None and self._labels.dtype.kind == "U"

    @property
    def numbered(self) -> bool:
        """Whether ids are key numbers."""
        return self._labels is None

    def numbers(self, ids: NDArray[Any]) -> Ids:
        """The key numbers of ids [m]; -1 where there is none."""
        if self._labels is None:
            numbers = np.where((ids >= 0) & (ids < self.n), ids, -1)
            numbers[~self._alive[numbers]] = -1
        else:
            numbers = np.full(len(ids), -1)
            if len(self._order):
                places = np.minimum(np.searchsorted(self._sorted, ids), len(self._order) - 1)
                numbers = np.where(self._sorted[places] == ids, self._order[places], -1)
        if self._changed:
            for row, one in enumerate(ids.tolist()):
                numbers[row] = self._changed.get(one, numbers[row])
        return numbers.astype(np.int64)

    def known(self, ids: Any) -> tuple[NDArray[Any], Ids]:
        """Ids that a caller gave as an array, and their key numbers; AmipsError if one is not there."""
        values = self.checked(ids)
        numbers = self.numbers(values)
        if (numbers < 0).any():
            missing = values[numbers < 0]
            more = f" (and {len(missing) - 1:,} more)" if len(missing) > 1 else ""
            raise AmipsError(f"id {missing[0].item()!r}{more} is not in this index; nothing was changed")
        return values, numbers

    def new(self, ids: Any, m: int) -> NDArray[Any] | None:
        """The ids of m new keys, as labels; None if they are the next key numbers.

        AmipsError if one is taken, or comes twice, or if strings are needed and there are none.
        """
        if ids is None:
            if self.strings:
                raise AmipsError("the ids of this index are strings: give one for each key that is added")
            if self._next + m > LARGEST:
                raise AmipsError("there are no numbers left behind the largest id: give ids of your own")
            numbers = np.arange(self._next, self._next + m)
            return None if self._labels is None and self._next == self.n else numbers
        values = self.checked(ids)
        if len(values) != m:
            raise AmipsError(f"{len(values):,} ids for {m:,} keys: give one for each; nothing was changed")
        check_usable(values)
        if (present := self.numbers(values) >= 0).any():
            raise AmipsError(
                f"id {values[present][0].item()!r} is in this index already: update it, or choose another; "
                "nothing was changed"
            )
        if self._labels is None and (values == np.arange(self.n, self.n + m)).all():
            return None
        return values

    def checked(self, ids: Any) -> NDArray[Any]:
        """Ids as an array of the kind that this index has, each once.

        A string is an id where ids are strings, and a file otherwise; a `Path` is a file.
        """
        lone = isinstance(ids, int | np.integer) or (isinstance(ids, str) and self.strings)
        values = np.atleast_1d(read_ids([ids] if lone else ids))
        if values.ndim != 1:
            raise AmipsError(f"ids of shape {list(values.shape)}: expected a list")
        if not len(values):
            return np.empty(0, np.str_ if self.strings else np.int64)
        check_kind(values, self.strings)
        return values

    def added(self, labels: NDArray[Any] | None, first: int, m: int) -> None:
        """Note m new keys from this number on, with these ids, or none of their own."""
        if labels is None:
            self._alive = np.concatenate([self._alive, np.ones(m, np.bool_)])
            self.n = self._next = first + m
            return
        self._changed.update(zip(labels.tolist(), range(first, first + m), strict=True))
        if not self.strings:
            self._next = max(self._next, next_id(labels, 0))

    def removed(self, ids: NDArray[Any]) -> None:
        """Note that these are gone."""
        self._changed.update(dict.fromkeys(ids.tolist(), -1))
