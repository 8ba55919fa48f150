"""Searching cells behind a filter: cells without a match are passed over, few matches are scored themselves.

For each query the cheapest way is taken, by FLOPs: to score all keys that match, or to probe as many cells as
the recall needs (`amips.search.selectivity`) and score the matches in them; where there are codes, by their
codes, or, if few match, themselves.
"""

import weakref
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from amips.errors import AmipsError
from amips.index import KeyMask, Matches, OwnCells, best_matches, parts_of
from amips.routers import best_cells, cells_above, least_keys, limit_probes
from amips.search.cost import Cost
from amips.search.effort import Effort
from amips.search.inputs import split_norms
from amips.search.selectivity import Depths
from amips.vectors import Floats

if TYPE_CHECKING:
    from amips.search.searcher import Searcher

Ids = NDArray[np.int64]
Bools = NDArray[np.bool_]

KEPT_BYTES = 1 << 23  # of keys that match, kept beside each other for the next search
SCATTERED = 4  # what reading a key that lies anywhere costs, in codes and keys read in order, for each byte
TOGETHER = 16  # queries from which on they share what is read
SHARED = 2.5  # FLOPs of one product for many queries that take the time of one in scattered cells
# Of all keys, and of those of a cell beyond what chance takes (so many standard deviations): where more were
# removed, the others are searched as behind a filter.
FEW_REMOVED, BY_CHANCE = 0.1, 3.0
KEPT = 16  # filters that something is kept for


@dataclass(frozen=True)
class Plan:
    """How queries are searched: those in `exact` [m] by scoring all that match, others in cells [m, p]."""

    exact: Bools
    codes: Bools  # whether codes are scanned in the cells, rather than the keys that match
    cells: Ids  # -1 fills up
    scanned: Ids  # keys or codes in those cells, [m]
    flops: Ids  # but for routing, [m]


class FilteredCells:
    """An index of cells of whose keys only some may be results.

    Args:
        index: a `Searcher` of keys of its own.
        allowed: which.
    """

    def __init__(self, index: "Searcher", allowed: KeyMask) -> None:
        self.index, self.allowed = index, allowed
        assert isinstance(index.store, OwnCells)
        self.store: OwnCells = index.store
        self.coded = self.store.storage != "flat"

    @cached_property
    def lists(self) -> Matches:
        """The keys that match, cell by cell."""
        return Matches.of(self.store, self.allowed)

    @cached_property
    def rows(self) -> Floats | None:
        """The keys that match, [count, d], if they are few enough to be kept."""
        if 4 * self.index.d * self.allowed.count > KEPT_BYTES:
            return None
        return np.ascontiguousarray(self.store.keys_at(self.allowed.numbers), np.float32)

    def search_with(self, x: Floats, k: int, effort: Effort) -> tuple[Floats, Ids]:
        """The k best keys of float32 queries [m, d] of norms near 1: scores [m, k] and key numbers [m, k]."""
        if self._only_exact(effort):
            return self.exact(x, k)
        plan = self.plan(split_norms(x)[0], k, effort)
        if plan.exact.all():
            return self.exact(x, k)
        scores, ids = np.empty((len(x), k), np.float32), np.empty((len(x), k), np.int64)
        if plan.exact.any():
            scores[plan.exact], ids[plan.exact] = self.exact(x[plan.exact], k)
        for rows, scan in ((plan.codes, self._scan_cells), (~plan.exact & ~plan.codes, self._scan_matches)):
            if rows.any():
                scores[rows], ids[rows] = scan(x[rows], plan.cells[rows], k, effort)
        return scores, ids

    def _only_exact(self, effort: Effort) -> bool:
        """Whether scoring all that match costs less than choosing cells."""
        flops = 2 * self.index.d * self.allowed.count
        return bool(effort.refine == 0 or flops <= self.index.router.flops)

    def exact(self, x: Floats, k: int) -> tuple[Floats, Ids]:
        """The k best of all keys that match."""
        return best_matches(self.store, self.allowed.numbers, self.rows, x, k)

    def plan(self, u: Floats, k: int, effort: Effort) -> Plan:
        """What is scored for queries of norm 1 [m, d]."""
        index, matches = self.index, self.lists.counts
        scores = index.router.scores(u)
        probed = self._probed(scores, k, effort)
        probed &= matches > 0
        counts = np.stack([matches, self.store.sizes], axis=1).astype(np.float64)
        have, of = (probed @ counts).astype(np.int64).T
        enough = min(self.allowed.count, k) * (2 if self.store.twice else 1)
        exact = have < enough  # fewer than may be asked for
        whole = 2 * index.d * self.allowed.count - index.router.flops
        flops, scanned = 2 * index.d * have, have
        codes = np.zeros(len(u), np.bool_)
        if self.coded:
            by_code = self._code_flops(have, of, k, effort)
            codes = self._faster_by_codes(have, of) & (by_code < whole) & ~exact
            flops, scanned = np.where(codes, by_code, flops), np.where(codes, of, have)
        exact |= flops >= whole
        if len(u) >= TOGETHER:  # one product for all of them
            exact |= 2 * index.d * self.allowed.count <= SHARED * (index.router.flops + flops)
        codes &= ~exact
        probed[exact] = False
        flops = np.where(exact, 2 * index.d * self.allowed.count, flops)
        return Plan(exact, codes, _table(probed, scores), scanned, flops)

    def cells(self, u: Floats, k: int, effort: Effort) -> Ids | None:
        """The cells that are scanned for one query of norm 1 [1, d]; None if all that match are scored."""
        plan = None if self._only_exact(effort) else self.plan(u, k, effort)
        return None if plan is None or plan.exact[0] else plan.cells[0][plan.cells[0] >= 0]

    def _probed(self, scores: Floats, k: int, effort: Effort) -> Bools:
        """Which cells are probed, [m, c]."""
        index, sizes = self.index, self.store.sizes
        depths = index.filters.depths(effort, k)
        if depths is not None:
            probed: Bools = depths.probed(scores, index.temperature, self.lists.counts, sizes, k)
            return probed
        if not effort.asked:  # nothing was measured behind filters
            return np.ones(scores.shape, np.bool_)
        if effort.min_mass is not None:
            keys = least_keys(k, self.store.twice)
            cells = cells_above(scores, index.temperature, effort.min_mass, sizes, keys)
        else:
            counts = index.counts(effort, len(scores))
            cells = limit_probes(best_cells(scores, int(counts.max(initial=1))), counts)
        probed = np.zeros((len(scores), index.c + 1), np.bool_)
        probed[np.arange(len(scores))[:, None], cells] = True  # -1 is the last
        return probed[:, :-1]

    def _code_flops(self, matches: Ids, keys: Ids, k: int, effort: Effort) -> Ids:
        """FLOPs of scanning the codes of so many keys, of which so many match, [m]."""
        store = self._store_for(effort)
        candidates = store.candidates(k)
        again = 2 * self.index.d * (np.minimum(candidates, keys) - np.minimum(candidates, matches))
        flops: Ids = store.scan_flops(keys, k) - again
        return flops

    def _faster_by_codes(self, matches: Ids, keys: Ids) -> Bools:
        """For which queries reading the codes of all keys takes less time than reading those that match."""
        store = parts_of(self.store)[0]
        width = self.index.d if store.projection is None else len(store.projection)
        bits = 4 if self.store.storage == "lean" else 8
        each = SCATTERED if len(matches) < TOGETHER else 1
        return np.asarray(keys * width * bits / 8 < each * matches * 4 * self.index.d)

    def _scan_cells(self, x: Floats, cells: Ids, k: int, effort: Effort) -> tuple[Floats, Ids]:
        return self._store_for(effort).scan(x, cells, k, self.allowed)

    def _store_for(self, effort: Effort) -> OwnCells:
        """The store, with as many candidates of codes as an effort has."""
        store = self.index.store_for(effort.refine)
        assert isinstance(store, OwnCells)
        return store

    def _scan_matches(self, x: Floats, cells: Ids, k: int, effort: Effort) -> tuple[Floats, Ids]:
        if not self.coded and len(x) < TOGETHER:
            return self._scan_cells(x, cells, k, effort)
        return self.lists.scan(x, cells, k)

    def search_one(self, v: Floats, k: int, effort: Effort) -> tuple[Floats, Ids]:
        """One query of a norm near 1 [1, d], in compiled code: scores [1, k] and key numbers [1, k]."""
        if self._only_exact(effort):
            return self.exact(v, k)
        plan = self.plan(split_norms(v)[0], k, effort)
        if plan.exact[0]:
            return self.exact(v, k)
        if self.coded and not plan.codes[0]:
            return self.lists.scan(v, plan.cells, k)
        probes, store = plan.cells.shape[1], self._store_for(effort)
        wanted = np.full((1, self.index.c), -np.inf, np.float32)  # scores that choose just these cells
        wanted[0, plan.cells[0]] = -np.arange(probes, dtype=np.float32)
        compiled = self.index._few
        assert compiled is not None
        return compiled(v, wanted, k, store.candidates(k), probes, 1.0, 0.0, 0, self.allowed.keys)

    def cost_with(self, x: Floats, k: int, effort: Effort) -> Cost:
        """The cost of float32 queries [m, d]."""
        index, count = self.index, self.allowed.count
        scanned, probed = np.full(len(x), count), np.zeros(len(x), np.int64)
        whole = np.full(len(x), 2 * index.d * count)
        if self._only_exact(effort):
            return Cost(0, 0, whole, scanned, probed)
        plan = self.plan(split_norms(x)[0], k, effort)
        scanned, probed = np.where(plan.exact, count, plan.scanned), (plan.cells >= 0).sum(axis=1)
        return Cost(index.router.network_flops, index.router.coarse_flops, plan.flops, scanned, probed)


class CellFilters:
    """What was prepared for filters of an index of cells, and how deep to search behind them."""

    def __init__(self, index: "Searcher") -> None:
        # The index has these filters: a cycle would keep what was replaced until Python looks for cycles.
        self.index: Searcher = weakref.proxy(index)
        self._filtered: dict[KeyMask, FilteredCells] = {}
        self._depths: dict[Any, Depths | None] = {}

    def of(self, allowed: KeyMask | None) -> FilteredCells | None:
        """The search behind a filter; None without one, unless many keys were removed, or many of a cell."""
        if allowed is None:
            allowed = self.index.alive
            if allowed is None or self._few_removed:
                return None
        if not isinstance(self.index.store, OwnCells):
            raise AmipsError("this index leaves its keys with another library, which cannot leave some out")
        known = self._filtered.get(allowed)
        if known is None:
            if len(self._filtered) >= KEPT:
                self._filtered.pop(next(iter(self._filtered)), None)  # the oldest
            known = self._filtered[allowed] = FilteredCells(self.index, allowed)
        return known

    @cached_property
    def _few_removed(self) -> bool:
        """Whether so few keys were removed, of each cell, that a search goes as deep as before."""
        alive, store = self.index.alive, self.index.store
        assert alive is not None
        if alive.count < (1 - FEW_REMOVED) * self.index.n:
            return False
        if not isinstance(store, OwnCells):
            return True
        removed, first, counts = np.flatnonzero(~alive.keys), 0, np.zeros(self.index.c, np.int64)
        for part in parts_of(store):  # the cells of the largest are known: it is shared by snapshots
            low, high = np.searchsorted(removed, [first, first + part.n])
            counts += np.bincount(part.assignment[removed[low:high] - first], minlength=len(counts))
            first += part.n
        expected = len(removed) / self.index.n * store.sizes
        return bool((counts <= 1 + FEW_REMOVED * store.sizes + BY_CHANCE * np.sqrt(expected)).all())

    def depths(self, effort: Effort, k: int) -> Depths | None:
        """How deep to go for the recall of an effort; None where it was asked for, or was not measured."""
        if effort.asked or effort.refine == 0:
            return None
        key = (effort.min_mass, effort.probes, k)
        if key not in self._depths:
            by_mass = effort.min_mass is not None
            value = effort.min_mass if by_mass else effort.probes
            self._depths[key] = Depths.of(self.index.depths, float(value or 0), k, by_mass)
        return self._depths[key]


def _table(probed: Bools, scores: Floats) -> Ids:
    """Cells [m, c] as a table [m, p], the best first; -1 fills up."""
    counts = probed.sum(axis=1)
    most = int(counts.max(initial=0))
    if len(scores) == 1:
        cells = np.flatnonzero(probed[0])
        return cells[np.argsort(-scores[0, cells], kind="stable")][None]
    table = np.full((len(scores), most), -1, np.int64)
    rows, columns = np.nonzero(probed)
    place = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    table[rows, place] = columns
    if most:
        first = np.where(probed, scores, -np.inf).argmax(axis=1)
        swapped = table == first[:, None]
        table[swapped] = np.broadcast_to(table[:, :1], table.shape)[swapped]
        table[:, 0] = np.where(counts > 0, first, -1)
    return table
