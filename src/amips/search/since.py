"""Keys that came and went between two versions of an index, by their ids."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.search.applying import applied, compacted, own_cells
from amips.search.attributes import Attributes
from amips.search.changes import Change
from amips.search.memory_searcher import Snapshot, plain_index, with_facts
from amips.search.placing import Placer
from amips.search.searcher import Searcher
from amips.vectors import Floats

BLOCK = 1 << 15  # keys that are compared at a time


def with_changes_of(before: Snapshot, now: Snapshot) -> Snapshot:
    """An older version with the keys of a newer one: what was added, removed and updated since is so there.

    So are the attributes that keys have now, and their order.

    `now` has no removed keys in it.
    """
    alive, new = plain_index(before).alive, ids_of(now)
    numbers = np.arange(before.n) if alive is None else alive.numbers
    stay = _stayed(before, now, numbers)
    gone, fresh = np.setdiff1d(numbers, stay), np.arange(len(stay), now.n)
    if len(gone):
        before = applied(before, Change("remove", {"numbers": gone}))
    if len(fresh):
        before = applied(before, Change("add", _added(before, keys_at(now, fresh), new[fresh])))
    if len(gone) or len(fresh) or alive is not None:
        before = compacted(before)
    return with_facts(before, attributes=_attributes(now, ids_of(before)))


def ids_of(snapshot: Snapshot) -> NDArray[Any]:
    """The id of each key number, [n]."""
    return np.arange(snapshot.n) if snapshot.labels is None else snapshot.labels


def _stayed(before: Snapshot, now: Snapshot, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Those of these keys that `now` begins with, in the order of their numbers, as they were.

    What was added or updated since comes behind them: it is added again, so that the order of keys stays.
    """
    old, new = ids_of(before)[numbers], ids_of(now)
    if not len(old):
        return numbers
    order = np.argsort(old, kind="stable")
    places = order[np.minimum(np.searchsorted(old, new, sorter=order), len(order) - 1)]
    stayed = old[places] == new
    stayed[1:] &= places[1:] > places[:-1]
    count = len(new) if stayed.all() else int(stayed.argmin())
    kept = numbers[places[:count]]
    for low in range(0, count, BLOCK):
        rows = np.arange(low, min(low + BLOCK, count))
        differs = (keys_at(before, kept[rows]) != keys_at(now, rows)).any(axis=1)
        if differs.any():
            return kept[: low + int(differs.argmax())]
    return kept


def _attributes(now: Snapshot, ids: NDArray[Any]) -> Attributes | None:
    """Those that keys have now, in the order of these ids of all of them."""
    attributes = plain_index(now).attributes
    if attributes is None:
        return None
    order = np.argsort(ids_of(now), kind="stable")
    return attributes.rows_of(order[np.searchsorted(ids_of(now), ids, sorter=order)])


def keys_at(snapshot: Snapshot, numbers: NDArray[Any]) -> Floats:
    """Float32 keys by number, [m, d]."""
    plain = plain_index(snapshot)
    if isinstance(plain, Searcher):
        return own_cells(plain).keys_at(numbers)
    return np.asarray(plain.store.keys[numbers], np.float32)


def _added(snapshot: Snapshot, keys: Floats, ids: NDArray[Any]) -> dict[str, NDArray[Any]]:
    plain = plain_index(snapshot)
    arrays: dict[str, NDArray[Any]] = {"keys": np.ascontiguousarray(keys, np.float32), "ids": ids}
    if isinstance(plain, Searcher):
        arrays["first"], second = Placer.of(plain.placement, own_cells(plain), plain.router)(arrays["keys"])
        if second is not None:
            arrays["second"] = second
    return arrays
