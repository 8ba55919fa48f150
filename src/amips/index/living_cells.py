"""Cells to which keys were added: what was there, and the new keys in cells of the same kind beside it.

Both parts are immutable. Adding makes a new small part of all keys that were added so far, which is cheap as
long as they are few; from a share of the first part on, both become one. Whoever searches holds a store that
does not change.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.blas import faiss
from amips.design import Storage
from amips.errors import AmipsError
from amips.index.cell_store import CellStore
from amips.index.code_rows import code_rows, encode, put_together
from amips.index.faiss_store import FaissCellStore
from amips.index.fill import Bytes
from amips.index.key_mask import KeyMask
from amips.index.top_keys import best_first
from amips.vectors import Floats

Ids = NDArray[np.int64]
Cells32 = NDArray[np.int32]

FOLD, FOLD_SHARE = 1 << 13, 1 / 4  # keys that are kept beside the others: so many, or this share of those


@dataclass(frozen=True)
class LivingCells:
    """A store of cells and the keys that were added to it; keys of the second follow those of the first.

    Args:
        base: the keys that were there.
        added: the others, with the same cells and codes.
        codes: of those, in their first cells and, those that have one, in their second, as
            `amips.index.code_rows` has them: what the next addition begins with.
    """

    base: FaissCellStore
    added: FaissCellStore
    codes: tuple[Bytes, Bytes]

    @property
    def n(self) -> int:
        """The number of keys."""
        return self.base.n + self.added.n

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
        return self.base.sizes + self.added.sizes

    @cached_property
    def assignment(self) -> Cells32:
        """The cell of each key, [n]."""
        return np.concatenate([self.base.assignment, self.added.assignment])

    @cached_property
    def second(self) -> Cells32 | None:
        """Another cell that a key is in, too, or -1, [n]; None if no key is."""
        if self.base.second is None and self.added.second is None:
            return None
        return np.concatenate([_second(self.base), _second(self.added)])

    def scan(self, x: Floats, cells: Ids, k: int, allowed: KeyMask | None = None) -> tuple[Floats, Ids]:
        """The k best keys by <x, y> within cells [m, p], of those that are allowed; -1 skips."""
        masks = (None, None) if allowed is None else allowed.split(self.base.n)
        return self._best(self.base.scan(x, cells, k, masks[0]), self.added.scan(x, cells, k, masks[1]), k)

    def every_key(self, x: Floats, k: int, allowed: KeyMask | None = None) -> tuple[Floats, Ids]:
        """The k best of all keys that are allowed, each scored with the query itself."""
        masks = (None, None) if allowed is None else allowed.split(self.base.n)
        return self._best(self.base.every_key(x, k, masks[0]), self.added.every_key(x, k, masks[1]), k)

    def score_again(self, x: Floats, candidates: Ids, k: int) -> tuple[Floats, Ids]:
        """True inner products of the candidates [m, r] (-1 skips), and the k best of them."""
        n = self.base.n
        older = np.where(candidates < n, candidates, -1)
        newer = np.where(candidates >= n, candidates - n, -1)
        return self._best(self.base.score_again(x, older, k), self.added.score_again(x, newer, k), k)

    def _best(self, older: tuple[Floats, Ids], newer: tuple[Floats, Ids], k: int) -> tuple[Floats, Ids]:
        ids = np.where(newer[1] < 0, -1, newer[1] + self.base.n)
        return best_first(np.hstack([older[0], newer[0]]), np.hstack([older[1], ids]), k)

    def keys_at(self, ids: Ids) -> Floats:
        """Float32 keys by number, [..., d]."""
        keys, newer = np.empty((*ids.shape, self.d), np.float32), ids >= self.base.n
        keys[~newer] = self.base.keys_at(ids[~newer])
        keys[newer] = self.added.keys_at(ids[newer] - self.base.n)
        return keys

    def candidates(self, k: int) -> int:
        """How many are looked for in codes, in both parts together."""
        return self.base.candidates(k) + self.added.candidates(k)

    def scan_flops(self, keys: Ids, k: int) -> Ids:
        """FLOPs of scanning so many keys for k results, for each query; see `amips.index.costs`."""
        return self.base.scan_flops(keys, k)

    def with_refine(self, refine: int) -> "LivingCells":
        """The same with so many candidates of codes for each result."""
        return replace(self, base=self.base.with_refine(refine), added=self.added.with_refine(refine))

    def save(self, directory: Path) -> list[str]:
        """Write the files of one store with all keys; their names."""
        return kept_cells(self, None).save(directory)

    def __reduce__(self) -> Any:
        return LivingCells, (self.base, self.added, self.codes)


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


def with_added(store: OwnCells, keys: Floats, first: Cells32, second: Cells32 | None) -> OwnCells:
    """The store with more keys [m, d], numbered from its n on, in these cells; -1 for no second.

    What is held of `store` goes on as it was.
    """
    base = store.base if isinstance(store, LivingCells) else store
    codes = encode(base, keys, first)
    twice = np.empty(0, np.int64) if second is None else np.flatnonzero(second >= 0)
    again = codes[twice]
    if second is not None and base.means is not None:  # codes that depend on the cell
        again = encode(base, keys[twice], second[twice])
    seconds = np.full(len(keys), -1, np.int32) if second is None else second
    if isinstance(store, LivingCells):
        older = store.added
        codes, again = np.concatenate([store.codes[0], codes]), np.concatenate([store.codes[1], again])
        first = np.concatenate([older.assignment, first])
        seconds = np.concatenate([_second(older), seconds])
        keys = keys if base.keys is None else np.concatenate([_keys(older), keys])
    kept = None if base.keys is None else np.ascontiguousarray(keys, np.float32)
    added = put_together(base, kept, first.astype(np.int32), seconds, codes, again)
    grown = LivingCells(base, added, (codes, again))
    if added.n > max(FOLD, FOLD_SHARE * base.n) and base.directory is None:
        return kept_cells(grown, None) if base.storage == "lean" else _folded(base, added)
    return grown


def _folded(base: FaissCellStore, added: FaissCellStore) -> FaissCellStore:
    """Both parts as one, as `kept_cells` makes it, by FAISS, which copies whole cells; not of "lean"."""
    index = faiss.clone_index(base.index)
    index.merge_from(faiss.clone_index(added.index), base.n)
    cells = np.concatenate([np.repeat(np.arange(len(p.sizes)), p.sizes) for p in (base, added)])
    entries = np.concatenate([base.entries, added.entries + base.n])[np.argsort(cells, kind="stable")]
    second = None
    if base.second is not None or added.second is not None:
        second = np.concatenate([_second(base), _second(added)])
    keys = None if base.keys is None else np.concatenate([base.keys, _keys(added)])
    return replace(
        base, index=index, sizes=base.sizes + added.sizes, entries=entries, keys=keys, second=second
    )


def kept_cells(store: OwnCells, numbers: Ids | None) -> FaissCellStore:
    """One store of these keys (ascending; all, if None), numbered anew."""
    parts = (store.base, store.added) if isinstance(store, LivingCells) else (store,)
    base, low = parts[0], 0
    keys, first, second, codes, again = ([] for _ in range(5))
    for part in parts:
        if numbers is None:
            chosen = np.arange(part.n)
        else:
            chosen = numbers[(numbers >= low) & (numbers < low + part.n)] - low
        low += part.n
        rows = code_rows(part)
        twice = chosen[_second(part)[chosen] >= 0]
        codes.append(rows[part.places[chosen]])
        again.append(rows[part.second_places[twice]])
        first.append(part.assignment[chosen])
        second.append(_second(part)[chosen])
        if base.keys is not None:
            keys.append(_keys(part) if numbers is None else _keys(part)[chosen])
    return put_together(
        base,
        np.concatenate(keys) if keys else None,
        np.concatenate(first).astype(np.int32),
        np.concatenate(second),
        np.concatenate(codes),
        np.concatenate(again),
    )


def _second(store: FaissCellStore) -> Cells32:
    """The second cells of the keys, -1 for none."""
    return np.full(store.n, -1, np.int32) if store.second is None else store.second


def _keys(store: FaissCellStore) -> Floats:
    assert store.keys is not None
    return store.keys
