"""What a change does to an index: another index, and the one before as it was.

    add      keys [m, d], ids [m] or nothing, first and second cells [m] of an index of cells
    remove   numbers [m]
    update   numbers [m] of the keys that go, and keys [m, d], ids and cells of those that come in their place
    attributes   of all keys, in the place of those that there were

Of keys that are added there may be attributes: streams of Arrow IPC (`amips.search.attributes`) as uint8 [b].

Key numbers are given in the order in which keys come, and never again until the bundle is compacted.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.cells import fingerprint_of
from amips.errors import AmipsError, BundleError
from amips.index import GraphStore, KeyMask, OwnCells, kept_cells, with_added
from amips.nets import Model
from amips.search.attributes import Attributes
from amips.search.changes import Change
from amips.search.graph_searcher import GraphSearcher
from amips.search.key_ids import next_id
from amips.search.key_order import live_numbers, places_with
from amips.search.label_room import LabelRoom
from amips.search.memory_searcher import MemorySearcher, Snapshot, plain_index, with_facts
from amips.search.searcher import Searcher
from amips.vectors import inspect, open_vectors

Ids = NDArray[np.int64]


def live_keys(index: Snapshot) -> int:
    """How many keys can be found."""
    alive = plain_index(index).alive
    return index.n if alive is None else alive.count


def applied(index: Snapshot, change: Change) -> Snapshot:
    """The index after a change; BundleError if the change is none of it."""
    arrays = change.arrays
    try:
        if change.kind == "attributes":
            streams = _checked_streams(arrays["attributes"])
            return with_facts(index, attributes=Attributes(((index.n, streams.tobytes()),)))
        if change.kind != "add":
            index = _without(index, _checked_numbers(index, arrays["numbers"]))
        if change.kind != "remove":
            index = _with(index, arrays)
    except KeyError as problem:
        raise BundleError(f"a change lacks {problem}") from None
    return index


def _checked_numbers(index: Snapshot, numbers: NDArray[Any]) -> Ids:
    alive = plain_index(index).alive
    fits = numbers.ndim == 1 and numbers.dtype == np.int64 and len(np.unique(numbers)) == len(numbers)
    fits = fits and (not len(numbers) or (numbers.min() >= 0 and numbers.max() < index.n))
    if not fits or (alive is not None and not alive.keys[numbers].all()):
        raise BundleError("a change removes keys that are not there")
    return numbers


def _without(index: Snapshot, numbers: Ids) -> Snapshot:
    plain = plain_index(index)
    alive = (plain.alive or KeyMask(np.ones(plain.n, np.bool_))).without(numbers)
    if not isinstance(plain, Searcher):
        return with_facts(index, alive=alive)
    after = _follows(plain, alive=alive)
    return replace(index, index=after) if isinstance(index, MemorySearcher) else after


def _follows(before: Searcher, **changed: Any) -> Searcher:
    """The index with these changes; what was made ready to search it is taken over, or brought up to date."""
    after = replace(before, **changed)
    names = ["router", "_efforts", *(["_few", "_wider"] if after.store is before.store else [])]
    vars(after).update({name: vars(before)[name] for name in names if name in vars(before)})
    many, more = before.filters.of(None), after.filters.of(None)
    if many is not None and more is not None and "lists" in vars(many):
        vars(more)["lists"] = many.lists.after(more.store, more.allowed)
    return after


def _with(index: Snapshot, arrays: dict[str, NDArray[Any]]) -> Searcher | GraphSearcher:
    """The index with more keys. A memory of the log goes: its queries may want them, and it cannot know."""
    plain = plain_index(index)
    keys = arrays["keys"]
    if keys.ndim != 2 or keys.dtype != np.float32 or keys.shape[1] != plain.d or not np.isfinite(keys).all():
        raise BundleError("a change adds keys of another kind")
    m = len(keys)
    alive = None if plain.alive is None else plain.alive.followed_by(m)
    labels, room = _labels_with(plain, arrays.get("ids"), m)
    attributes = _more_attributes(plain.attributes, m, arrays.get("attributes"))
    replaced = arrays.get("numbers")
    if replaced is not None and len(replaced) != m:
        raise BundleError("a change puts keys in the place of more, or of fewer")
    order = places_with(plain, m, replaced)
    changed: dict[str, Any] = {"alive": alive, "labels": labels, "attributes": attributes, "order": order}
    changed |= {"fingerprint": "", "label_room": room}
    if isinstance(plain, GraphSearcher):
        return replace(plain, store=plain.store.with_added(keys), **changed)
    store = own_cells(plain)
    first, second = arrays["first"], arrays.get("second")
    _check_cells(first, m, 0, plain.c)
    if second is not None:
        _check_cells(second, m, -1, plain.c)
        if (second == first).any():
            raise BundleError("a change puts a key into the same cell twice")
    return _follows(plain, store=with_added(store, keys, first, second), **changed)


def _more_attributes(
    attributes: Attributes | None, m: int, streams: NDArray[Any] | None
) -> Attributes | None:
    """The attributes with those of m more keys; what comes without any has no values."""
    if streams is None:
        return None if attributes is None else attributes.with_rows(m, None)
    if attributes is None:
        raise BundleError("a change adds attributes to keys that have none")
    return attributes.with_rows(m, _checked_streams(streams))


def _checked_streams(streams: NDArray[Any]) -> NDArray[np.uint8]:
    if streams.ndim != 1 or streams.dtype != np.uint8 or not len(streams):
        raise BundleError("a change has attributes of another kind")
    return streams


def _check_cells(cells: NDArray[Any], m: int, least: int, c: int) -> None:
    fits = cells.shape == (m,) and cells.dtype == np.int32
    if not fits or (m and not (cells.min() >= least and cells.max() < c)):
        raise BundleError("a change names cells that are not there")


def own_cells(index: Searcher) -> OwnCells:
    """The store of an index whose keys are its own; AmipsError if they are another library's."""
    if not isinstance(index.store, OwnCells):
        raise AmipsError("this index leaves its keys with another library: change them there")
    return index.store


def _labels_with(
    plain: Searcher | GraphSearcher, ids: NDArray[Any] | None, m: int
) -> tuple[NDArray[Any] | None, LabelRoom | None]:
    """The ids of the keys and of m more, and where they are kept; None if all are key numbers."""
    labels = plain.labels
    if ids is None:
        if labels is not None:
            raise BundleError("a change adds keys without ids to keys that have some")
        return None, None
    if ids.shape != (m,) or ids.dtype.kind not in "iU":
        raise BundleError("a change adds keys with ids of another kind")
    older = np.arange(plain.n) if labels is None else labels
    if (older.dtype.kind == "i") != (ids.dtype.kind == "i"):
        raise BundleError("a change adds ids of another kind than there are")
    return (plain.label_room or LabelRoom()).followed_by(older, ids)


def compacted(index: Snapshot) -> Snapshot:
    """The same keys without those that were removed, numbered anew in the user's order, in one store."""
    if isinstance(index, MemorySearcher):
        memory = index.memory.renumbered(live_numbers(index), index.n)
        plain = compacted(index.index)
        assert not isinstance(plain, MemorySearcher)
        return plain if memory is None else MemorySearcher(plain, memory, index.points)
    kept = live_numbers(index)
    if not len(kept):
        raise AmipsError("every key was removed: there is nothing to keep; add keys, or delete the bundle")
    labels, attributes = index.labels, index.attributes
    if len(kept) < index.n or index.order is not None:
        labels = kept if labels is None else labels[kept]
        attributes = None if attributes is None else attributes.rows_of(kept)
    known: dict[str, Any] = {"alive": None, "labels": labels, "attributes": attributes, "order": None}
    known["label_room"] = None
    latest = max(index.origin.next_id, next_id(index.labels, index.n))
    known["origin"] = replace(index.origin.renumbered(kept, index.n), next_id=latest)
    if isinstance(index, GraphSearcher):
        graph: GraphStore = index.store.compacted(kept)
        return replace(index, store=graph, fingerprint=_fingerprint(graph.keys), **known)
    store = kept_cells(own_cells(index), kept)
    keys = store.keys if store.keys is not None else store.keys_at(np.arange(store.n))
    fingerprint, model = _fingerprint(keys), index.model
    if isinstance(model, Model):  # it goes on routing cells to which keys have come and from which they went
        belongs = {"keys": fingerprint, "cells": fingerprint_of(store.assignment)}
        model = replace(model, about={**model.about, **belongs})
    return replace(index, store=store, model=model, fingerprint=fingerprint, **known)


def _fingerprint(keys: Any) -> str:
    return inspect(open_vectors(keys, "keys"), zero="keep").fingerprint
