"""A few queries in cells in one compiled call: cells, codes, the best keys scored again.

Many queries are shared out to matrix products and FAISS (`amips.index.faiss_store`); of a few it is the calls
that would cost. Their answers are those of each alone, as far as scores of cells that come with them are the
same. Those of many are the same but for rounding: of lean storage, which of two keys whose codes score alike
is scored again.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips import native
from amips.errors import AmipsError
from amips.index.faiss_store import FaissCellStore
from amips.index.graph_filter import EVERY, allowed_keys
from amips.vectors import Floats

Ids = NDArray[np.int64]

NOTHING = np.zeros((0, 0), np.float32)


class FewSearch:
    """Searches a store for a few queries.

    Args:
        store: of storage "flat" or "lean".
        factors: of a linear router, W [c, r] and A [r, d] or None (`amips.routers.Router.factors`); without
            them the scores of the cells come with the queries.
        added: stores of keys that were added later, in the same cells and with the same codes; their numbers
            follow those of the store, in this order. Cells are chosen by what all hold.
    """

    def __init__(
        self,
        store: FaissCellStore,
        factors: "tuple[Floats, Floats | None] | None",
        *added: FaissCellStore,
    ) -> None:
        self.routed, self.lean = factors is not None, store.storage == "lean"
        parts = (store, *added)
        self.n = sum(part.n for part in parts)
        self._inputs = store, factors, *added
        weights, below = factors or (NOTHING, None)
        arrays = [store.projection, None if store.codebook is None else store.codebook[:, :, 0]]
        self._native = native.compiled.Scanner(
            len(store.sizes),
            store.d,
            *(NOTHING if array is None else _plain(array) for array in arrays),
            any(part.second is not None for part in parts),
            _plain(weights),
            NOTHING if below is None else _plain(below),
        )
        first = 0
        for part in parts:
            keys = NOTHING if part.keys is None or part.storage == "flat" else _plain(part.keys)
            self._native.part(part, part.addresses, part.starts, part.entries, keys, first)
            first += part.n

    @classmethod
    def of(
        cls,
        store: Any,
        factors: "tuple[Floats, Floats | None] | None",
        *added: FaissCellStore,
    ) -> "FewSearch | None":
        """What searches this store, and keys that were added; None if nothing is compiled for it."""
        if native.compiled is None or not isinstance(store, FaissCellStore):
            return None
        parts = (store, *(part for part in added if part.n))
        for part in parts:
            if part.storage not in ("flat", "lean"):
                return None
            keys = part.keys
            if part.storage == "lean" and (
                keys is None or keys.dtype != np.float32 or not keys.flags.c_contiguous
            ):
                return None
            if (part.storage, part.centroids.shape) != (store.storage, store.centroids.shape):
                raise AmipsError("added keys are in other cells, or in another storage")
        return cls(store, factors, *parts[1:])

    def __reduce__(self) -> Any:
        """For pickle: made again of the store, or None where nothing is compiled."""
        return FewSearch.of, self._inputs

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
        allowed: NDArray[Any] | None = None,
    ) -> tuple[Floats, Ids]:
        """The k best keys of queries [m, d] of norms near 1: scores [m, k] and key numbers [m, k].

        Args:
            scores: of the cells, [m, c], unless there is a linear router.
            candidates: entries that are scored again.
            probes: cells to scan; 0 for those that hold `min_mass` (`amips.routers.cells_above`).
            keys: that the cells hold at least, by mass.
            allowed: which keys may be results, bool or uint8 [n]; all, if None.
        """
        best, ids = np.empty((len(x), k), np.float32), np.empty((len(x), k), np.int64)
        cell_scores = NOTHING if scores is None else _plain(scores)
        some = EVERY if allowed is None else allowed_keys(allowed, self.n)
        self._native.search(x, cell_scores, probes, temperature, min_mass, keys, candidates, best, ids, some)
        return best, ids


def _plain(array: NDArray[Any]) -> Floats:
    """As an array that compiled code can read; nothing is copied that already is one."""
    return np.ascontiguousarray(array, np.float32)
