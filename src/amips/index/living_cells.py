"""Cells to which keys were added: what was there, and the new keys in stores like it beside it.

All parts are immutable. What is added becomes a part; the last parts become one as soon as the one before is
not much larger than they are together. So there are few parts, each some times as large as the next, and a
key is copied a number of times that grows with the logarithm of how many were added. Whoever searches holds a
store that does not change.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.design import Storage
from amips.errors import AmipsError
from amips.index.cell_store import CellStore
from amips.index.code_rows import Entries, one_store, second_cells
from amips.index.costs import candidates_of
from amips.index.faiss_store import FaissCellStore
from amips.index.key_mask import KeyMask
from amips.index.top_keys import best_first
from amips.vectors import Floats

Ids = NDArray[np.int64]
Cells32 = NDArray[np.int32]

FEW = 1 << 11  # keys of a part to which more are added at any rate: copying them costs little
LARGER = 4  # times as many keys as the parts behind it has a part that stays by itself
FOLD = 1 << 13  # keys that are kept beside the first part, at least


@dataclass(frozen=True)
class LivingCells:
    """A store of cells and keys that were added to it.

    Args:
        parts: what was there, and what was added, in the same cells and by the same codebook; two at least.
            Keys of one are numbered behind those of the parts before.
    """

    parts: tuple[FaissCellStore, ...]

    @property
    def base(self) -> FaissCellStore:
        """What was there."""
        return self.parts[0]

    @cached_property
    def n(self) -> int:
        """The number of keys."""
        return sum(part.n for part in self.parts)

    @property
    def d(self) -> int:
        """The dimension."""
        return self.base.d

    @property
    def storage(self) -> Storage:
        """How keys are kept."""
        return self.base.storage

    @property
    def refine(self) -> int:
        """Candidates looked at for each result asked for."""
        return self.base.refine

    @property
    def centroids(self) -> Floats:
        """One vector for each cell, [c, d]."""
        return self.base.centroids

    @cached_property
    def sizes(self) -> Ids:
        """Keys in each cell, [c]."""
        sizes: Ids = np.sum([part.sizes for part in self.parts], axis=0)
        return sizes

    @cached_property
    def assignment(self) -> Cells32:
        """The cell of each key, [n]."""
        return np.concatenate([part.assignment for part in self.parts])

    @cached_property
    def second(self) -> Cells32 | None:
        """Another cell that a key is in, too, or -1, [n]; None if no key is."""
        return np.concatenate([second_cells(part) for part in self.parts]) if self.twice else None

    @cached_property
    def twice(self) -> bool:
        """Whether there are keys in a second cell."""
        return any(part.twice for part in self.parts)

    @cached_property
    def firsts(self) -> list[int]:
        """The number of the first key of each part."""
        return list(accumulate((part.n for part in self.parts[:-1]), initial=0))

    def scan(self, x: Floats, cells: Ids, k: int, allowed: KeyMask | None = None) -> tuple[Floats, Ids]:
        """The k best keys by <x, y> within cells [m, p], of those that are allowed; -1 skips."""
        masks = self._masks(allowed)
        return self._best([p.scan(x, cells, k, m) for p, m in zip(self.parts, masks, strict=True)], k)

    def every_key(self, x: Floats, k: int, allowed: KeyMask | None = None) -> tuple[Floats, Ids]:
        """The k best of all keys that are allowed, each scored with the query itself."""
        masks = self._masks(allowed)
        return self._best([p.every_key(x, k, m) for p, m in zip(self.parts, masks, strict=True)], k)

    def score_again(self, x: Floats, candidates: Ids, k: int) -> tuple[Floats, Ids]:
        """True inner products of the candidates [m, r] (-1 skips), and the k best of them."""
        results = []
        for part, first in zip(self.parts, self.firsts, strict=True):
            own = (candidates >= first) & (candidates < first + part.n)
            results.append(part.score_again(x, np.where(own, candidates - first, -1), k))
        return self._best(results, k)

    def _masks(self, allowed: KeyMask | None) -> "tuple[KeyMask | None, ...]":
        return (None,) * len(self.parts) if allowed is None else allowed.split(self.firsts)

    def _best(self, results: list[tuple[Floats, Ids]], k: int) -> tuple[Floats, Ids]:
        """The k best of what each part has found."""
        ids = [np.where(own < 0, -1, own + low) for (_, own), low in zip(results, self.firsts, strict=True)]
        return best_first(np.hstack([scores for scores, _ in results]), np.hstack(ids), k)

    def keys_at(self, ids: Ids) -> Floats:
        """Float32 keys by number, [..., d]."""
        keys = np.empty((*ids.shape, self.d), np.float32)
        for part, first in zip(self.parts, self.firsts, strict=True):
            own = (ids >= first) & (ids < first + part.n)
            keys[own] = part.keys_at(ids[own] - first)
        return keys

    def candidates(self, k: int) -> int:
        """How many are looked for in codes, in all parts together: as many as in one store of these keys."""
        return candidates_of(k, self.refine, self.n, int(self.sizes.sum()))

    def scan_flops(self, keys: Ids, k: int) -> Ids:
        """FLOPs of scanning so many keys for k results, for each query; see `amips.index.costs`."""
        return self.base.scan_flops(keys, k)

    def with_refine(self, refine: int) -> "LivingCells":
        """The same with so many candidates of codes for each result."""
        return LivingCells(tuple(part.with_refine(refine) for part in self.parts))

    def save(self, directory: Path) -> list[str]:
        """Write the files of one store with all keys; their names."""
        return kept_cells(self, None).save(directory)

    def __reduce__(self) -> Any:
        return LivingCells, (self.parts,)


OwnCells = FaissCellStore | LivingCells  # keys of our own, which can be added to and masked


def scan_allowed(
    store: CellStore, x: Floats, cells: Ids, k: int, allowed: KeyMask | None
) -> tuple[Floats, Ids]:
    """The k best keys in these cells, of those that are allowed; any store can do it where all are."""
    if allowed is None:
        return store.scan(x, cells, k)
    if not isinstance(store, OwnCells):
        raise AmipsError("this index leaves its keys with another library, which cannot leave some out")
    return store.scan(x, cells, k, allowed)


def parts_of(store: OwnCells) -> tuple[FaissCellStore, ...]:
    """What a store consists of; the keys of a part are numbered behind those of the parts before."""
    return store.parts if isinstance(store, LivingCells) else (store,)


def with_added(store: OwnCells, keys: Floats, first: Cells32, second: Cells32 | None) -> OwnCells:
    """The store with more keys [m, d], numbered from its n on, in these cells; -1 for no second.

    What is held of `store` goes on as it was.
    """
    parts, together = parts_of(store), len(keys)
    kept = len(parts)  # as they are; the others and the new keys become one
    while kept > 1 and parts[kept - 1].n < max(FEW, LARGER * together):
        kept -= 1
        together += parts[kept].n
    added = len(keys) + sum(part.n for part in parts[1:])
    folds = added > FOLD and parts[0].n < LARGER * added and parts[0].directory is None
    if folds:
        kept = 0
    last = [*map(Entries.of_store, parts[kept:]), Entries.of_keys(parts[0], keys, first, second)]
    one = one_store(last, light=not folds)
    return one if folds else LivingCells((*parts[:kept], one))


def kept_cells(store: OwnCells, numbers: Ids | None) -> FaissCellStore:
    """One store of these keys (all, if None), which become 0, 1, ... in this order."""
    entries, low = list[Entries](), 0
    ascending = None if numbers is None else np.sort(numbers)
    for part in parts_of(store):
        own = Entries.of_store(part)
        if ascending is not None:
            first, last = np.searchsorted(ascending, [low, low + part.n])
            own = own.of(ascending[first:last] - low)
        entries.append(own)
        low += part.n
    order = None
    if numbers is not None and ascending is not None and (numbers != ascending).any():
        order = np.searchsorted(ascending, numbers)
    return one_store(entries, light=False, key_order=order)
