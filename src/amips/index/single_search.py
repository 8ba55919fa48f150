"""One query in cells in one compiled call: which cells to scan, their codes, and the best keys scored again.

Many queries are shared out to matrix products and FAISS (`amips.index.faiss_store`); of one alone it is the
calls that would cost. The answers are the same but for rounding: of lean storage, which of two keys whose
codes score alike is scored again.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips import native
from amips.index.faiss_store import FaissCellStore
from amips.vectors import Floats

Ids = NDArray[np.int64]

MOST_SINGLE = 256  # results that are kept in order one by one
NOTHING = np.zeros((0, 0), np.float32)


class SingleSearch:
    """Searches a store for one query.

    Args:
        store: of storage "flat" or "lean".
        factors: of a linear router, W [c, r] and A [r, d] or None (`amips.routers.Router.factors`); without
            them the scores of the cells come with each query.
    """

    def __init__(self, store: FaissCellStore, factors: "tuple[Floats, Floats | None] | None") -> None:
        self.routed = factors is not None
        self._inputs = store, factors
        weights, below = factors or (NOTHING, None)
        coded = store.storage == "lean"
        book, projection = store.codebook, store.projection
        arrays = [store.keys if coded else None, projection, None if book is None else book[:, :, 0]]
        self._native = native.compiled.Scanner(
            store,
            store.addresses,
            store.starts,
            np.ascontiguousarray(store.entries, np.int64),
            store.d,
            *(NOTHING if array is None else _plain(array) for array in arrays),
            store.second is not None,
            _plain(weights),
            NOTHING if below is None else _plain(below),
        )

    @classmethod
    def of(cls, store: Any, factors: "tuple[Floats, Floats | None] | None") -> "SingleSearch | None":
        """What searches this store; None if nothing is compiled for it."""
        if native.compiled is None or not isinstance(store, FaissCellStore):
            return None
        if store.storage == "lean":
            keys = store.keys
            plain = keys is not None and keys.dtype == np.float32 and keys.flags.c_contiguous
            return cls(store, factors) if plain else None
        return cls(store, factors) if store.storage == "flat" else None

    def __reduce__(self) -> Any:
        """For pickle: made again of the store, or None where nothing is compiled."""
        return SingleSearch.of, self._inputs

    def __call__(
        self,
        x: Floats,
        scores: Floats | None,
        k: int,
        candidates: int,
        probes: int,
        temperature: float,
        min_mass: float,
        keys: int,
    ) -> tuple[Floats, Ids]:
        """The k best keys of x [1, d], of a norm near 1: scores [1, k] and key numbers [1, k].

        Args:
            scores: of the cells, [1, c], unless there is a linear router.
            candidates: entries that are scored again.
            probes: cells to scan; 0 for those that hold `min_mass` (`amips.routers.cells_above`).
            keys: that the cells hold at least, by mass.
        """
        best, ids = np.empty((1, k), np.float32), np.empty((1, k), np.int64)
        cell_scores = NOTHING if scores is None else _plain(scores)
        self._native.search(x, cell_scores, probes, temperature, min_mass, keys, candidates, best, ids)
        return best, ids


def _plain(array: NDArray[Any]) -> Floats:
    """As an array that compiled code can read; nothing is copied that already is one."""
    return np.ascontiguousarray(array, np.float32)
