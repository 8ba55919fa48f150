"""Which keys a search may return: a mask, a list of ids, or a condition over attributes, as one `KeyMask`.

Masks that were asked for last are kept, so that a search that comes again with the same filter does not work
it out again.
"""

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.errors import AmipsError
from amips.index import KeyMask
from amips.search.applying import live_keys
from amips.search.key_ids import check_kind
from amips.search.key_order import live_numbers, place_count
from amips.search.memory_searcher import Snapshot, plain_index
from amips.vectors import read_ids

KEPT = 16  # masks
COLUMN = 1000  # values of a column that are looked at for what it is of


class Filters:
    """The filters of one snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._index = plain_index(snapshot)
        self._masks: tuple[tuple[Any, Any, KeyMask], ...] = ()  # filter, condition, what they let through

    def allowed(self, chosen: Any, where: Any) -> KeyMask | None:
        """The keys that may be results: not removed, let through by the filter, and by the condition.

        None if there is neither filter nor condition.

        Args:
            chosen: bool [n] in the order of the keys, those that were removed in it or left out; or ids.
            where: see `amips.search.where`.
        """
        if chosen is None and where is None:
            return None
        if chosen is not None:
            labels = self._index.labels
            lone = isinstance(chosen, str) and labels is not None and labels.dtype.kind == "U"
            chosen = _as_array([chosen] if lone else chosen)  # where ids are strings, a string is one
        masks = self._masks
        for place, (known_filter, known_where, mask) in enumerate(masks):
            if _same_array(known_filter, chosen) and _same_condition(known_where, where):
                if place:
                    self._masks = (masks[place], *masks[:place], *masks[place + 1 :])
                return mask
        keys = np.ones(self._index.n, np.bool_) if chosen is None else self._chosen(chosen)
        if where is not None:
            keys &= self._matching(where)
        if self._index.alive is not None:
            keys &= self._index.alive.keys
        mask = KeyMask(keys)
        if not isinstance(where, list):  # which its owner may change
            kept = None if chosen is None else chosen.copy(), where
            self._masks = ((*kept, mask), *masks[: KEPT - 1])
        return mask

    def _matching(self, where: Any) -> NDArray[np.bool_]:
        attributes = self._index.attributes
        if attributes is None:
            raise AmipsError(
                "where: the keys of this index have no attributes; set_attributes gives them some"
            )
        from amips.search.where import matches  # it needs libraries that other searches do not

        return matches(where, attributes.table)

    def _chosen(self, chosen: NDArray[Any]) -> NDArray[np.bool_]:
        """A mask of all keys, by number."""
        n, every, live = self._index.n, place_count(self._index), live_keys(self._index)
        if chosen.dtype == np.bool_:
            if chosen.shape == (every,):
                return chosen.copy() if self._index.order is None else chosen[self._index.order]
            if chosen.shape == (live,):
                keys = np.zeros(n, np.bool_)
                keys[live_numbers(self._index)[chosen]] = True
                return keys
            raise AmipsError(
                f"filter: a mask of shape {list(chosen.shape)}, expected one value a key, [{live}]"
            )
        keys, labels = np.zeros(n, np.bool_), self._index.labels
        as_long = len(chosen) > 2 and len(chosen) in (every, live) and chosen.dtype.kind == "i"
        if as_long and chosen.min() >= 0 and chosen.max() <= 1:  # nobody names two ids so often
            raise AmipsError("filter: this looks like a mask, of numbers; give it as bool")
        check_kind(chosen, labels is not None and labels.dtype.kind == "U")
        if labels is None:
            keys[chosen[(chosen >= 0) & (chosen < n)].astype(np.int64)] = True
            return keys
        order, values = self._by_label
        low, high = (np.searchsorted(values, chosen, side) for side in ("left", "right"))
        # An id that was removed and came again is there twice; of the two one is alive.
        for more in range(int((high - low).max(initial=0))):
            keys[order[(low + more)[low + more < high]]] = True
        return keys

    @cached_property
    def _by_label(self) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Key numbers in the order of their ids, and these ids."""
        labels = self._index.labels
        assert labels is not None
        order = np.argsort(labels, kind="stable")
        return order, labels[order]


def _as_array(chosen: Any) -> NDArray[Any]:
    """A mask, or ids, as an array [n] or [m]."""
    if isinstance(chosen, np.ndarray) and chosen.dtype == np.bool_:
        return chosen
    if isinstance(chosen, list | tuple) and chosen and all(isinstance(one, bool) for one in chosen):
        return np.array(chosen)
    if not isinstance(chosen, str | np.ndarray | list | tuple) and hasattr(chosen, "__array__"):
        column = np.asarray(chosen)  # of a data frame, or an Arrow array
        if column.dtype == np.bool_:
            return column
        if column.dtype == object and any(isinstance(one, bool | np.bool_) for one in column[:COLUMN]):
            raise AmipsError("filter: a mask with values that are missing; fill them in")
    if len(chosen) == 0 if isinstance(chosen, list | tuple | np.ndarray) else False:
        return np.empty(0, np.int64)
    try:
        ids = np.atleast_1d(read_ids(chosen, unique=False))
    except AmipsError as problem:
        raise AmipsError(f"filter: expected bool [n], or ids; {problem}") from None
    if ids.ndim != 1:
        raise AmipsError(f"filter of shape {list(ids.shape)}: expected a mask [n], or a list of ids")
    return ids


def _same_array(known: NDArray[Any] | None, asked: NDArray[Any] | None) -> bool:
    if known is None or asked is None:
        return known is asked
    return known.dtype == asked.dtype and known.shape == asked.shape and bool((known == asked).all())


def _same_condition(known: Any, asked: Any) -> bool:
    if type(known) is not type(asked) or isinstance(asked, list):
        return False
    equals = getattr(known, "equals", None)  # of pyarrow's expressions, for which == makes another
    return bool(known == asked if equals is None else equals(asked))
