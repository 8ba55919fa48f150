"""A graph of some of the keys of another.

A key that loses neighbours gets candidates in their place: what they had as neighbours, by the rule of the
build (`amips.graph.prune`). Where few keys are left, half of the neighbours are among the nearest keys again.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from amips.errors import AmipsError
from amips.graph import connect, near_lists, prune
from amips.index.graph_growth import coding_of
from amips.vectors import Floats, unit_rows

if TYPE_CHECKING:
    from amips.index.graph_store import GraphStore

Ids = NDArray[np.int64]
Lists = NDArray[np.int32]

PASSED = 4  # neighbours that are gone, whose own neighbours are looked at
REPAIRED = (
    0.4  # of the keys, that must be left for lists to be repaired: of fewer, nearest keys are looked for
)
ROWS = 1 << 13  # keys at a time


def compacted(store: "GraphStore", kept: NDArray[np.integer[Any]]) -> "GraphStore":
    """A store of the keys `kept` [m] alone, in arrays of its own, numbered in this order."""
    ids: Ids = np.asarray(kept, np.int64)
    fits = ids.ndim == 1 and len(ids) and ids.min() >= 0 and ids.max() < store.n
    if not fits or len(np.unique(ids)) < len(ids):
        raise AmipsError(f"kept: expected numbers of keys, at least one, no two the same, below {store.n}")
    if store.storage == "lean" and store.coding is None:
        store = replace(store, coding=coding_of(store))
    lists = store.lists
    number = np.full(store.n + 1, -1, np.int32)  # of -1: -1
    number[ids] = np.arange(len(ids))
    unit = np.concatenate([_unit(store, ids[low : low + ROWS]) for low in range(0, len(ids), ROWS)])
    neighbours, candidates = _without(lists, ids, number)
    affected = candidates[:, 0] != -2
    candidates[~affected] = -1
    if len(ids) < REPAIRED * store.n:  # what is left of the old lists leads nowhere
        near = prune(unit, near_lists(unit), lists.shape[1])[:, : lists.shape[1] // 2]
        candidates, affected[:] = np.concatenate([near, candidates], axis=1), True
    pruned = prune(unit, candidates, lists.shape[1], fill=True, ordered=True)
    neighbours[affected] = pruned[affected]
    entries = number[store.entries]
    if (entries < 0).any():
        gone = _unit(store, store.entries[entries < 0].astype(np.int64))
        entries[entries < 0] = (gone @ unit.T).argmax(axis=1)
    entries = np.unique(entries)
    return replace(
        store,
        neighbours=connect(neighbours, neighbours, entries),
        entries=entries,
        keys=store.keys[ids],
        codes=None if store.codes is None else store.codes[ids],
        directory=None,
        growing=None,
    )


def _unit(store: "GraphStore", ids: Ids) -> Floats:
    """Keys at norm 1 in the space in which edges are chosen."""
    rows = np.asarray(store.keys[ids])
    if store.storage == "lean":
        assert store.coding is not None
        rows = rows @ store.coding[:, :-1].T
    return np.ascontiguousarray(unit_rows(rows)[0], np.float32)


def _without(lists: Lists, kept: Ids, number: Lists) -> tuple[Lists, Lists]:
    """By their new numbers: the neighbours of each kept key that are left, and candidates for its list.

    A row of candidates begins with -2 where nothing is missing, otherwise with the neighbours left.
    """
    m, degree = len(kept), lists.shape[1]
    neighbours = np.empty((m, degree), np.int32)
    candidates = np.full((m, degree * (1 + PASSED)), -1, np.int32)
    for low in range(0, m, ROWS):
        own = lists[kept[low : low + ROWS]]
        left = number[own]
        gone = (own >= 0) & (left < 0)
        left = np.take_along_axis(left, np.argsort(left < 0, axis=1, kind="stable"), 1)
        first = np.argsort(~gone, axis=1, kind="stable")[:, :PASSED]
        passed = np.where(np.take_along_axis(gone, first, 1), np.take_along_axis(own, first, 1), -1)
        beyond = np.where(passed[:, :, None] >= 0, number[lists[passed]], -1)
        out = candidates[low : low + ROWS]
        out[:, :degree] = left
        beyond = beyond.transpose(0, 2, 1).reshape(len(own), -1)  # the first of each, then the second, ...
        out[:, degree : degree + beyond.shape[1]] = beyond
        out[~gone.any(axis=1), 0] = -2
        neighbours[low : low + ROWS] = left
    return neighbours, candidates
