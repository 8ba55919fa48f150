"""The walk of a graph in numpy: what `native/walk.cpp` does, for where that was not compiled.

From the best entry points on, the best key that was not visited yet is visited: its neighbours are scored. It
ends when that key's score lies more than a margin below the score of the tenth best (or the k-th, if more
are asked for): a query whose best keys stand out ends early, one with many that are nearly as good goes on.
Keys within a part of the margin are scored again, with float32 keys and x.

Scores are whole numbers. Of "lean", x is multiplied by a projection of small whole numbers, each value times
the step of its codes, at a scale at which sums of products with 4-bit codes fit into 16 bits.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.vectors import Floats

STARTS, AHEAD, NEAREST = 8, 2, 64  # as in native/walk.cpp
UNITS, WIDEST, LARGEST = 1 << 28, 1 << 33, 2_000_000_000
FLOAT = np.float32


def codes_of_values(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Values 0..15 [n, r] as bytes [n, r / 2]: of each four, the first two with the others above them."""
    parts = values.reshape(len(values), -1, 4)
    codes = parts[:, :, :2] | np.left_shift(parts[:, :, 2:], 4, dtype=np.uint8)
    return codes.reshape(len(values), -1)


def values_of_codes(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The inverse of `codes_of_values`."""
    parts = codes.reshape(*codes.shape[:-1], -1, 2)
    return np.concatenate([parts & 15, parts >> 4], axis=-1).reshape(*codes.shape[:-1], -1)


@dataclass(frozen=True)
class NumpyWalker:
    """The arguments of the compiled `Walker`, and its `search`.

    Lists of neighbours may name keys that are not there yet: those are passed over.
    """

    neighbours: NDArray[np.int32]
    entries: NDArray[np.int32]
    keys: Floats
    storage: str
    codes: NDArray[Any]
    step: Floats
    projection: NDArray[np.int8]
    scale: Floats
    largest: float

    def search(
        self,
        x: Floats,
        depth: int,
        width: int,
        margin: float,
        refine: float,
        threads: int,
        scores: Floats,
        ids: NDArray[np.int64],
        counts: NDArray[np.int64],
        allowed: NDArray[np.uint8],
        results: int,
        visits: int,
        near: int,
    ) -> None:
        """Walk for each query [m, d]; scores [m, k], ids [m, k] and counts [m, 3] are written.

        `allowed` [n] says which keys may be results, empty if all may; then of those `results` are kept, and
        a walk ends after so many `visits`. Where fewer than `near` of the best 64 keys may be results, the
        count of visits is negative.
        """
        limits = (allowed, results, visits, near) if len(allowed) else None
        for row in range(len(x)):
            best, counts[row] = self._walk(x[row], ids.shape[1], depth, width, margin, refine, limits)
            with np.errstate(invalid="ignore"):
                true = (self.keys[best] * x[row]).sum(axis=1)  # a product would round equal keys differently
            order = np.lexsort((best, -true))[: ids.shape[1]]
            scores[row], ids[row] = -np.inf, -1
            scores[row, : len(order)], ids[row, : len(order)] = true[order], best[order]

    def _walk(
        self,
        x: Floats,
        k: int,
        depth: int,
        width: int,
        margin: float,
        refine: float,
        limits: tuple[NDArray[np.uint8], int, int, int] | None,
    ) -> tuple[NDArray[np.int64], tuple[int, int, int]]:
        """The keys to score again, and how many were visited, scored, and are scored again."""
        query, units = self._prepared(x)
        wide = margin * float(np.sqrt(np.dot(x, x))) * units
        below = int(wide) if wide < WIDEST else WIDEST
        best, counted = self._pool(query, units, self.neighbours, depth, width, below, limits)
        count = len(best) if len(best) <= depth else min(len(best), k)
        if len(best) > depth:
            bound = -best[depth - 1][0] - int(FLOAT(refine) * FLOAT(below))
            while count < len(best) and -best[count][0] >= bound:
                count += 1
        return np.array([-entry[1] for entry in best[:count]], np.int64), (*counted, count)

    def nearest(self, x: Floats, width: int, neighbours: NDArray[np.int32]) -> NDArray[np.int64]:
        """The best keys of a walk along other lists that keeps `width`, best first.

        Of "lean" x is not a query but what codes are multiplied with.
        """
        query, units = self._rounded(x) if self.storage == "lean" else self._prepared(x)
        pool, _ = self._pool(query, units, neighbours, width + 1, width, WIDEST, None)
        return np.array([-entry[1] for entry in pool], np.int64)

    def _pool(
        self,
        query: NDArray[Any],
        units: float,
        neighbours: NDArray[np.int32],
        depth: int,
        width: int,
        below: int,
        limits: tuple[NDArray[np.uint8], int, int, int] | None,
    ) -> tuple[list[tuple[int, int]], tuple[int, int]]:
        """(-score, -id) of the best keys, of those that may be results; how many were visited and scored."""
        pool: list[tuple[int, int]] = []  # (-score, -id) of the best keys, best first
        some: list[tuple[int, int]] = []  # and of the best that may be results
        best = pool if limits is None else some
        scored, flags = 0, dict[int, int]()  # 1: fetched, 2: visited

        def take(keys: NDArray[np.int32], most: int, bound: int) -> None:
            nonlocal scored
            keys = keys[keys >= 0]
            scored += len(keys)
            keys = keys[keys < len(neighbours)]
            values = self._scores(query, units, keys)
            entries = sorted((-int(s), -int(i)) for s, i in zip(values, keys, strict=True) if s >= bound)
            for entry in entries[:most]:
                _insert(pool, entry, width)
                if limits is not None and limits[0][-entry[1]]:
                    _insert(some, entry, limits[1])

        def floor() -> int:
            full = -pool[-1][0] if len(pool) == width else -(1 << 31)
            return full if len(best) < depth else max(full, -best[depth - 1][0] - below)

        take(self.entries, STARTS, -(1 << 31))
        visited, every = 0, len(self.entries) <= STARTS
        while True:
            waiting = [entry for entry in pool if flags.get(-entry[1], 0) < 2]
            if not waiting and not every:  # nowhere to go: the other entry points may lead on
                every = True
                take(self.entries, width, floor())
                continue
            if not waiting or (visited and -waiting[0][0] < floor()):
                break
            if limits is not None and visited == limits[2]:
                break
            ahead = [-entry[1] for entry in waiting[:AHEAD]]
            key = next((one for one in ahead if one in flags), ahead[0])
            flags.update({one: max(1, flags.get(one, 0)) for one in ahead})
            flags[key] = 2
            visited += 1
            take(neighbours[key], width, floor())
        if limits is not None:
            near = [int(limits[0][-entry[1]]) for entry in pool[:NEAREST]]
            visited = -visited if sum(near) * NEAREST < limits[3] * len(near) else visited
        return best, (visited, scored)

    def _prepared(self, x: Floats) -> tuple[NDArray[Any], float]:
        """The query as whole numbers (as it is for "flat"), and how many units a true score of 1 has."""
        if self.storage == "flat":
            return x, UNITS / (self.largest * float(np.sqrt(np.dot(x, x))) + 1e-290)
        if self.storage == "sq8":
            stepped = x * self.step
            largest = max(FLOAT(1e-30), np.abs(stepped).max())
            unit = min(FLOAT(32767), FLOAT(2147483647) / FLOAT(128) / FLOAT(len(x))) / largest
            return np.rint(stepped * unit).astype(np.int64), float(unit)
        unit = FLOAT(127) / max(FLOAT(1e-30), np.abs(x).max())
        whole = self.projection.astype(np.int64) @ (np.rint(x * unit).astype(np.int64))
        return self._rounded(whole.astype(np.float32) * self.scale * self.step / unit)

    def _rounded(self, values: Floats) -> tuple[NDArray[Any], float]:
        """What codes of "lean" are multiplied with, as whole numbers, and how many units 1 has."""
        up, down = np.maximum(values, 0).sum() + FLOAT(1e-30), np.maximum(-values, 0).sum() + FLOAT(1e-30)
        room = FLOAT(32767) / FLOAT(15) - FLOAT(0.5) * FLOAT(len(values))
        times = min(FLOAT(127) / max(FLOAT(1e-30), np.abs(values).max()), room / max(up, down))
        return np.rint(values * times).astype(np.int64), float(times)

    def _scores(self, query: NDArray[Any], units: float, keys: NDArray[np.int32]) -> NDArray[np.int64]:
        if self.storage == "flat":
            with np.errstate(invalid="ignore"):  # a key that was not checked may not be a number
                products: NDArray[np.float64] = (self.keys[keys] * query).sum(axis=1).astype(np.float64)
            whole = np.nan_to_num(products * units, nan=-LARGEST, posinf=LARGEST, neginf=-LARGEST)
            return np.clip(whole, -LARGEST, LARGEST).astype(np.int64)
        rows = self.codes[keys]
        if self.storage == "lean":
            rows = values_of_codes(rows)
        result: NDArray[np.int64] = rows.astype(np.int64) @ query
        return result


def _insert(pool: list[tuple[int, int]], entry: tuple[int, int], width: int) -> None:
    """Put an entry into its place, unless it is there; `width` are kept."""
    place = bisect_left(pool, entry)
    if place == len(pool) or pool[place] != entry:
        pool.insert(place, entry)
        del pool[width:]
