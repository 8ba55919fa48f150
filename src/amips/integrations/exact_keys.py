"""Keys that are all scored: what is searched as long as there is no log to learn from."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.errors import AmipsError
from amips.search import checked_k, checked_queries
from amips.vectors import Floats

Numbers = NDArray[np.int64]

LEAST = 100  # keys: with fewer, all are scored as fast as any are found
BLOCK_BYTES = 1 << 26  # of scores at a time
GATHER = 8  # where fewer keys than one in so many may be found, these alone are scored
SPARE = 1.5  # times the room that keys need is made for them, so that adding one does not move them all


@dataclass(frozen=True)
class _State:
    """What there is at one moment: rows of keys, their numbers (ascending), and whether they are there."""

    rows: Floats
    numbers: Numbers
    alive: NDArray[np.bool_]


class ExactKeys:
    """Keys by number, searched by scoring all of them: `search`, `add` and `remove` as of an `Index`.

    Threads may search while one changes it: a search sees all of a change or nothing.
    """

    def __init__(self) -> None:
        self._room = np.empty((0, 0), np.float32)  # whose first rows are those of the state
        self._state = _State(self._room, np.empty(0, np.int64), np.empty(0, np.bool_))

    def replace(self, ids: Numbers, keys: Floats) -> None:
        """Have these keys [n, d] and no others; their numbers ascend."""
        self._room, self._state = keys, _State(keys, ids, np.ones(len(ids), np.bool_))

    @property
    def n(self) -> int:
        """The number of keys."""
        return int(self._state.alive.sum())

    @property
    def d(self) -> int | None:
        """The dimension; None as long as there was no key."""
        return self._state.rows.shape[1] or None

    @property
    def numbers(self) -> Numbers:
        """Of the keys that are there, ascending."""
        return self._state.numbers[self._state.alive]

    def add(self, keys: Floats, ids: Numbers) -> None:
        """Add keys [m, d], whose numbers are greater than all that were there before, and ascend."""
        state, count = self._state, len(self._state.numbers) + len(keys)
        if not len(keys):
            return
        last = state.numbers[-1] if len(state.numbers) else -1
        if (np.diff(ids, prepend=last) <= 0).any():
            raise AmipsError("the numbers of added keys do not follow those before")
        if count > len(self._room) or self.d != keys.shape[1]:
            room = np.empty((int(SPARE * count), keys.shape[1]), np.float32)
            if len(state.rows):
                room[: len(state.rows)] = state.rows
            self._room = room
        self._room[len(state.rows) : count] = keys  # behind what earlier states show
        alive = np.concatenate([state.alive, np.ones(len(keys), np.bool_)])
        self._state = _State(self._room[:count], np.concatenate([state.numbers, ids]), alive)

    def remove(self, ids: Numbers) -> None:
        """Remove keys by their numbers; when half of them have gone, the room of those is free."""
        state = self._state
        alive = state.alive & ~np.isin(state.numbers, ids)
        if 2 * alive.sum() < len(alive):
            self.replace(state.numbers[alive], state.rows[alive])
        else:
            self._state = replace(state, alive=alive)

    def search(self, x: Any, k: int = 10, *, filter: Numbers | None = None) -> tuple[Floats, Numbers]:
        """Scores float32 [m, k] and numbers int64 [m, k] of the k best keys, best first, as of an `Index`.

        Of equal scores the lower number is first.

        Args:
            filter: the numbers of the keys that may be results.
        """
        state, k = self._state, checked_k(k)
        if not len(state.rows):
            m = 1 if np.ndim(x) == 1 else len(x)
            return np.full((m, k), -np.inf, np.float32), np.full((m, k), -1)
        x, _ = checked_queries(x, state.rows.shape[1], None)
        allowed = state.alive if filter is None else state.alive & np.isin(state.numbers, filter)
        rows, numbers = state.rows, state.numbers
        if GATHER * allowed.sum() < len(rows):
            rows, numbers, allowed = rows[allowed], numbers[allowed], allowed[allowed]
        scores = np.full((len(x), k), -np.inf, np.float32)
        ids = np.full((len(x), k), -1)
        step = max(1, BLOCK_BYTES // max(1, 4 * len(rows)))
        for low in range(0, len(x), step):
            with np.errstate(over="ignore"):
                block = x[low : low + step] @ rows.T
            if not allowed.all():
                block[:, ~allowed] = -np.inf
            best, columns = _best(block, min(k, int(allowed.sum())))
            scores[low : low + step, : best.shape[1]] = best
            ids[low : low + step, : best.shape[1]] = numbers[columns]
        return scores, ids


def _best(scores: Floats, k: int) -> tuple[Floats, Numbers]:
    """The k largest of each row of scores [m, n], and their columns; of equal ones the first."""
    if k == 0:
        return scores[:, :0], np.empty((len(scores), 0), np.int64)
    bounds = -np.partition(-scores, k - 1, axis=1)[:, k - 1]
    best, columns = np.empty((len(scores), k), np.float32), np.empty((len(scores), k), np.int64)
    for row, bound in enumerate(bounds):
        wanted = np.flatnonzero(scores[row] >= bound)
        wanted = wanted[np.argsort(-scores[row][wanted], kind="stable")][:k]
        best[row], columns[row] = scores[row][wanted], wanted
    return best, columns
