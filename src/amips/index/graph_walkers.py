"""What walks a graph store: compiled, with the codes of neighbours beside each other, or in numpy."""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from amips import native
from amips.blas import threads_allowed
from amips.design import GraphStorage
from amips.index.graph_walk import NumpyWalker
from amips.vectors import Floats, unit_rows

if TYPE_CHECKING:
    from amips.index.graph_store import GraphStore

BLOCK = 32  # neighbours whose codes are kept together
NORM_ROWS = 1 << 14  # keys whose norms are taken at a time
NUMBERS: dict[GraphStorage, int] = {"flat": 0, "sq8": 1, "lean": 2}  # as in native/walk.hpp
NONE, NO_VERSIONS = np.zeros(0, np.uint8), np.zeros(0, np.uint32)


def walker_of(store: "GraphStore") -> Any:
    """What walks this store; of one that grows, in the arrays that it shares with later ones."""
    growing = store.growing
    largest = 0.0
    if store.storage == "flat":
        largest = largest_norm(store.keys) if growing is None else growing.largest
    projection = np.zeros((0, store.d), np.int8) if store.projection is None else store.projection
    codes: NDArray[Any] = NONE if store.codes is None else store.codes
    if native.compiled is None:
        parts = (store.neighbours, store.entries, np.ascontiguousarray(store.keys), store.storage, codes)
        return NumpyWalker(*parts, store.step, projection, store.scale, largest)
    lists = padded_lists(store.neighbours) if growing is None else growing.neighbours
    keys = np.ascontiguousarray(store.keys) if growing is None else growing.keys
    entries = np.pad(store.entries, (0, -len(store.entries) % lists.shape[1]), constant_values=-1)
    entry_codes, versions = NONE, NO_VERSIONS
    if store.storage == "lean":
        entry_codes = packed(codes, entries.reshape(-1, lists.shape[1]))
        codes = packed(codes, lists) if growing is None else growing.blocks
    elif growing is not None:
        codes = growing.codes
    if growing is not None:
        versions = growing.versions
    offset = 128 * projection.sum(axis=1, dtype=np.float32)
    aligned = np.pad(projection, ((0, 0), (0, -store.d % 32)))
    numbers = (store.r, store.step, aligned, store.scale, offset, largest, versions)
    arrays = (store.n, lists, entries, keys, NUMBERS[store.storage], codes.view(np.uint8), entry_codes)
    return native.compiled.Walker(*arrays, *numbers)


def padded_lists(lists: NDArray[np.int32]) -> NDArray[np.int32]:
    """Lists of neighbours [n, degree] with places up to a multiple of 32, which stay free."""
    spare = -lists.shape[1] % BLOCK
    return np.ascontiguousarray(np.pad(lists, ((0, 0), (0, spare)), constant_values=-1) if spare else lists)


def packed(codes: NDArray[np.uint8], lists: NDArray[np.int32]) -> NDArray[np.uint8]:
    """The codes of the keys in lists [rows, degree] beside each other."""
    out = np.empty((len(lists), lists.shape[1] * codes.shape[1]), np.uint8)
    native.compiled.pack(np.ascontiguousarray(codes), lists, threads_allowed(), out)
    return out


def largest_norm(keys: Floats) -> float:
    """The largest norm of the keys that have one: what is not finite says nothing about the others."""
    blocks = (keys[low : low + NORM_ROWS] for low in range(0, len(keys), NORM_ROWS))
    with np.errstate(all="ignore"):
        norms = [unit_rows(block)[1] for block in blocks]
    return float(max(one[np.isfinite(one)].max(initial=0) for one in norms))
