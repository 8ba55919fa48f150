"""The best of the keys that are listed for each query, as a memory of the log lists them, in one call."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips import native
from amips.index.faiss_store import FaissCellStore
from amips.index.top_keys import score_candidates
from amips.vectors import Floats, mapped_file

Ids = NDArray[np.int64]

NO_KEYS, IN_ORDER = np.zeros((0, 0), np.float32), np.zeros(0, np.uint64)
BLOCK_BYTES = 1 << 26  # of listed keys, at once


class ListedKeys:
    """The keys of a store, to be scored by number.

    Args:
        store: of cells or a graph, ours or a backend's, to which no keys were added.
    """

    def __init__(self, store: Any) -> None:
        self.store, keys = store, store.keys
        self.rows: NDArray[np.uint64] = IN_ORDER
        self.keys: Floats | None = None
        if keys is not None:
            if keys.dtype == np.float32 and keys.flags.c_contiguous:
                self.keys = keys
        elif isinstance(store, FaissCellStore) and store.storage == "flat":
            inside = store.places - store.starts[store.assignment]
            self.keys = NO_KEYS
            self.rows = store.addresses[store.assignment] + (4 * store.d * inside).astype(np.uint64)

    def __reduce__(self) -> Any:
        """For pickle: made again of the store, which lies elsewhere in another process."""
        return ListedKeys, (self.store,)

    def search(self, x: Floats, listed: NDArray[np.int32], k: int) -> tuple[Floats, Ids]:
        """Scores and ids [m, k] of the k best of the keys [m, l] listed for queries, by <x, y>; -1 skips."""
        keys = self.keys
        # Of many queries, a store that keeps its keys on disk reads each key once.
        if native.compiled is None or keys is None or (len(x) > 1 and mapped_file(keys) is not None):
            return self._again(x, listed.astype(np.int64), k)
        scores, ids = np.empty((len(x), k), np.float32), np.empty((len(x), k), np.int64)
        native.compiled.search_listed(keys, self.rows, listed, np.ascontiguousarray(x), scores, ids)
        return scores, ids

    def _again(self, x: Floats, listed: Ids, k: int) -> tuple[Floats, Ids]:
        if hasattr(self.store, "score_again"):
            scored: tuple[Floats, Ids] = self.store.score_again(x, listed, k)
            return scored
        return score_candidates(self.store.keys.__getitem__, x, listed, k, BLOCK_BYTES)
