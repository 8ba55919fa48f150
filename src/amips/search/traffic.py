"""Traffic: the last queries that an index was asked, in a small ring.

Of single queries every fourth is kept, of many at a time every fourth row: so the ring spans some thousand
queries, and keeping one is a copy of its row. What else is to be known of them (their top scores, the mass
and the keys that they needed, how near they are to the log) is looked up when somebody asks, on the keys of
that moment: that it compares with the log then, whatever keys came and went.
"""

import itertools
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.vectors import Floats, unit_rows

RING = 1024  # queries that are kept
EVERY = 4  # of so many queries one is kept


class Traffic:
    """The last queries that were asked.

    Args:
        d: the dimension.
        size: of the ring.
        every: of so many queries one is kept.
    """

    def __init__(self, d: int, size: int = RING, every: int = EVERY) -> None:
        self.d, self.size, self.every = d, size, every
        self.count = 0  # queries that were kept so far
        self._rows: Floats | None = None  # made when the first comes
        self._calls = itertools.count()  # its next number is taken without a lock
        self._lock = threading.Lock()

    def note(self, x: Any) -> bool:
        """Keep what is due of the queries of one search, [m, d] or [d]; whether a ring was filled by it."""
        rows = x if type(x) is np.ndarray else np.asarray(x)
        if next(self._calls) % self.every and rows.size == self.d:
            return False
        return self._keep(rows)

    def _keep(self, x: NDArray[Any]) -> bool:
        rows = x.reshape(-1, self.d)
        if len(rows) > 1:
            rows = rows[next(self._calls) % min(self.every, len(rows)) :: self.every][-self.size :]
        with self._lock:
            if self._rows is None:
                self._rows = np.zeros((self.size, self.d), np.float32)
            at, before = self.count % self.size, self.count // self.size
            first = min(len(rows), self.size - at)
            with np.errstate(over="ignore"):  # what is too large becomes infinite, and is left out later
                self._rows[at : at + first] = rows[:first]
                if first < len(rows):
                    self._rows[: len(rows) - first] = rows[first:]
            self.count += len(rows)
            return self.count // self.size > before

    def recent(self) -> Floats:
        """The queries of the ring at norm 1, as often as they came, float32 [m, d]: no zeros, all finite."""
        with self._lock:
            if self._rows is None:
                return np.empty((0, self.d), np.float32)
            rows = self._rows[: self.count].copy()
        rows = rows[np.isfinite(rows).all(axis=1) & rows.any(axis=1)]
        return unit_rows(rows)[0] if len(rows) else rows

    def __getstate__(self) -> dict[str, Any]:
        return {"d": self.d, "size": self.size, "every": self.every}  # another process has other traffic

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]
