"""Keys that are added to a graph while others search it.

A store is a snapshot: of n keys, for good. Those that grew out of each other share arrays with spare places
at the end. New keys are written behind the n of every snapshot there is; then their neighbours get an edge to
them, in place. A walk passes over keys that its own snapshot does not have, and reads a row again that was
written meanwhile (`native/rows.hpp`). So readers need no lock, and never see a part of what is added.

Edges are chosen among directions: keys at norm 1, of "lean" in the dimensions that are walked, as 8-bit
numbers with a scale for each key.
"""

from dataclasses import dataclass, field, replace
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from amips import native
from amips.errors import AmipsError
from amips.graph import connect
from amips.index.graph_insert import NumpyInsert
from amips.index.graph_walk import codes_of_values, values_of_codes
from amips.index.graph_walkers import largest_norm, packed, padded_lists
from amips.vectors import Floats, unit_rows

if TYPE_CHECKING:
    from amips.index.graph_store import GraphStore

Lists = NDArray[np.int32]

WIDTH = 64  # keys that the neighbours of a new one are looked for among
NEAR = 64  # of those, the nearest, and as many of their neighbours, that are candidates
LINKS = 24  # keys that get an edge to a new one, where they have a place for it
WEIGHTS = (1 / np.log2(np.arange(12) + 2)).astype(np.float32)  # of the nearest, whose neighbours count
ROWS = 1 << 13  # keys that are multiplied at a time
SAMPLE = 1 << 14  # keys that a projection is found from
LEAST_SPARE = 1024  # places for new keys


@dataclass
class Growing:
    """Arrays with spare places that snapshots share; the first `used` places are taken."""

    neighbours: Lists  # [places, degree, padded]
    keys: Floats
    codes: NDArray[Any]
    blocks: NDArray[np.uint8]  # codes of neighbours beside each other, "lean" where it is compiled
    versions: NDArray[np.uint32]  # odd while a row is written
    directions: NDArray[
        np.int8
    ]  # and in the last 32 bytes of a row, as float32, what a unit of it stands for
    degree: int
    used: int
    largest: float
    writing: Any = field(default_factory=Lock)

    @classmethod
    def of(cls, store: "GraphStore", places: int) -> "Growing":
        """A copy of the arrays of a store, with so many places."""
        n, lists = store.n, store.lists
        if store.growing is not None and store.growing.used != n:  # edges to what it does not have are gone
            lists = connect(lists, lists, store.entries)
        codes = np.zeros((n, 0), np.uint8) if store.codes is None else store.codes
        table = padded_lists(lists)
        blocks = np.zeros((n, 0), np.uint8)
        if store.storage == "lean" and native.compiled is not None:
            blocks = packed(codes, table)
        old = store.growing
        if old is None:
            directions = directions_of(store, store.keys)
            largest = largest_norm(store.keys) if store.storage == "flat" else 0.0
        else:
            directions, largest = old.directions[:n], old.largest
        arrays = (table, store.keys, codes, blocks, np.zeros(n, np.uint32), directions)
        table, keys, codes, blocks, versions, directions = (_with_room(array, places) for array in arrays)
        sizes = (lists.shape[1], n, largest)
        return cls(table, keys, codes, blocks, versions, directions, *sizes)


def grown(store: "GraphStore", keys: Floats) -> "GraphStore":
    """A store with these keys [m, d] behind those that it has.

    What is written in place is shared with this store and older ones. One that is not the newest of its
    kind, or has no places left, is copied first.
    """
    keys = np.ascontiguousarray(keys, np.float32)
    if keys.ndim != 2 or keys.shape[1] != store.d:
        raise AmipsError(f"keys: expected [m, {store.d}], got {list(keys.shape)}")
    if not np.isfinite(keys).all():
        raise AmipsError("keys: some values are not finite")
    m, n = len(keys), store.n
    if m == 0:
        return store
    if n + m >= 1 << 30:
        raise AmipsError(f"a graph has fewer than {1 << 30:,} keys")
    if store.storage == "lean" and store.coding is None:
        store = replace(store, coding=coding_of(store))
    if store.growing is None:
        return _insert(store, Growing.of(store, _places(n + m)), keys)
    with store.growing.writing:
        growing = store.growing
        if growing.used != n or len(growing.neighbours) < n + m:
            growing = Growing.of(store, _places(n + m))
        return _insert(store, growing, keys)


def _insert(store: "GraphStore", growing: Growing, keys: Floats) -> "GraphStore":
    n, m = store.n, len(keys)
    rows = slice(n, n + m)
    growing.used = n + m
    growing.keys[rows] = keys
    growing.directions[rows] = directions_of(store, keys)
    growing.versions[rows] = 0
    growing.neighbours[rows] = -1
    asked = unit_rows(keys)[0]
    if store.storage == "flat":
        growing.largest = max(growing.largest, largest_norm(keys))
    elif store.storage == "sq8":
        growing.codes[rows] = _whole(keys, np.zeros_like(store.step), store.step * store.unit, -127, 127)
    else:
        assert store.coding is not None
        projected = keys @ store.coding[:, :-1].T
        values = _whole(projected, store.coding[:, -1], store.step * store.unit, 0, 15)
        growing.codes[rows] = codes_of_values(values.astype(np.uint8))
        asked = unit_rows(projected)[0] * store.step
    asked = np.ascontiguousarray(asked, np.float32)
    result = _snapshot(store, growing, n + m)
    walker = result._walker
    if native.compiled is None:
        NumpyInsert(walker, growing, WIDTH, NEAR, LINKS, WEIGHTS).insert(n, asked)
    else:
        walker.insert(
            *(growing.neighbours, growing.blocks, growing.versions, growing.codes.view(np.uint8)),
            *(growing.directions, growing.degree, n, asked, WIDTH, NEAR, LINKS, WEIGHTS),
        )
    return result


def _snapshot(store: "GraphStore", growing: Growing, n: int) -> "GraphStore":
    """The first n keys of the arrays."""
    return replace(
        store,
        neighbours=growing.neighbours[:n, : growing.degree],
        keys=growing.keys[:n],
        codes=None if store.codes is None else growing.codes[:n],
        directory=None,
        growing=growing,
    )


def known_lists(lists: Lists, n: int) -> Lists:
    """The lists without keys from n on; a copy, in which -1 follows the last."""
    lists = np.where(lists < n, lists, -1)
    return np.ascontiguousarray(np.take_along_axis(lists, np.argsort(lists < 0, axis=1, kind="stable"), 1))


def _places(n: int) -> int:
    return 2 * n + LEAST_SPARE


def _with_room(array: NDArray[Any], places: int) -> NDArray[Any]:
    """A copy with so many rows, of which the last are not written yet."""
    out = np.empty((places, *array.shape[1:]), array.dtype)
    out[: len(array)] = array
    return out


def directions_of(store: "GraphStore", keys: Floats) -> NDArray[np.int8]:
    """Keys at norm 1 as 8-bit numbers [m, a multiple of 32], and behind them what one of a row stands for."""
    dimensions = store.r if store.storage == "lean" else store.d
    length = dimensions + -dimensions % 32
    directions = np.zeros((len(keys), length + 32), np.int8)
    for low in range(0, len(keys), ROWS):
        rows = np.asarray(keys[low : low + ROWS])
        if store.storage == "lean":
            assert store.coding is not None
            rows = rows @ store.coding[:, :-1].T
        unit = unit_rows(rows)[0]
        scale = (np.abs(unit).max(axis=1, initial=0) / 127).astype(np.float32)
        out = directions[low : low + ROWS]
        out[:, :dimensions] = np.rint(unit / np.where(scale > 0, scale, 1)[:, None])
        out[:, length : length + 4] = scale[:, None].view(np.int8)
    return directions


def _whole(values: Floats, low: Floats, step: Floats, least: int, most: int) -> NDArray[Any]:
    """(value - low) / step as whole numbers within least ... most, 0 where there is no step."""
    rounded = np.rint((values - low) / np.where(step > 0, step, 1))
    return np.where(step > 0, np.clip(rounded, least, most), 0)


def coding_of(store: "GraphStore") -> Floats:
    """What keys were multiplied with, and what a code of 0 stands for: least squares of keys and codes."""
    assert store.codes is not None
    rows = np.linspace(0, store.n - 1, min(store.n, SAMPLE)).astype(np.int64)
    keys = np.asarray(store.keys[rows], np.float64)
    values = values_of_codes(store.codes[rows]) * (store.step * store.unit).astype(np.float64)
    middle, mean = keys.mean(axis=0), values.mean(axis=0)
    moment = (keys - middle).T @ (keys - middle)
    moment += np.eye(store.d) * (1e-6 * np.trace(moment) / store.d + 1e-300)
    matrix = np.linalg.solve(moment, (keys - middle).T @ (values - mean)).T
    return np.column_stack([matrix, matrix @ middle - mean]).astype(np.float32)
