"""Keys that came and went between two versions of an index, by their ids."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.search.applying import applied, compacted, own_cells
from amips.search.changes import Change
from amips.search.key_order import live_numbers
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
    numbers, changed = live_numbers(before), plain_index(before).alive is not None
    at = _places_in(now, ids_of(before)[numbers])
    stays = at >= 0
    for low in range(0, len(numbers), BLOCK):
        rows = low + np.flatnonzero(stays[low : low + BLOCK])
        stays[rows] = (keys_at(before, numbers[rows]) == keys_at(now, at[rows])).all(axis=1)
    stay, gone, at = numbers[stays], numbers[~stays], at[stays]
    fresh = np.setdiff1d(np.arange(now.n), at)
    if len(gone):
        before = applied(before, Change("remove", {"numbers": gone}))
    if len(fresh):
        added = _added(before, keys_at(now, fresh), ids_of(now)[fresh])
        before = applied(before, Change("add", added))
    order = np.zeros(before.n, np.int64)
    order[stay], order[before.n - len(fresh) :] = at, fresh
    if changed or len(gone) or len(fresh) or (np.diff(order) < 0).any():
        before = compacted(with_facts(before, order=order))
    return with_facts(before, attributes=plain_index(now).attributes)


def ids_of(snapshot: Snapshot) -> NDArray[Any]:
    """The id of each key number, [n]."""
    return np.arange(snapshot.n) if snapshot.labels is None else snapshot.labels


def _places_in(snapshot: Snapshot, ids: NDArray[Any]) -> NDArray[np.int64]:
    """The key numbers of these ids; -1 where there is none."""
    known = ids_of(snapshot)
    order = np.argsort(known, kind="stable")
    at = order[np.minimum(np.searchsorted(known, ids, sorter=order), len(known) - 1)]
    return np.where(known[at] == ids, at, -1)


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
