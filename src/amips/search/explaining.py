"""What does a search of one query look at, and what would exact search and plain IVF have made of it?

All of it is timed in one thread, one query alone, the best of a few times. Nothing of it is traffic: what an
index keeps of its queries is not touched.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from amips.blas import threads as limit_threads
from amips.errors import AmipsError
from amips.index import KeyMask, OwnCells
from amips.metrics import TOP
from amips.search.auditing import every_key
from amips.search.effort import effort_for, effort_of
from amips.search.graph_searcher import GraphSearcher
from amips.search.inputs import checked_k, checked_queries, labelled, one_query, split_norms
from amips.search.memory_searcher import MemorySearcher, Snapshot, plain_index, with_facts
from amips.search.plain_ivf import AS_MANY_KEYS, Method, PlainIvf, timed
from amips.search.searcher import Searcher
from amips.search.wrapped import WrappedIndex
from amips.tables import text_table
from amips.vectors import Floats

Ids = NDArray[np.int64]
Way = Literal["cells", "graph", "memory", "every key"]

OURS, EXACT = "amips", "exact search"
NOT_COMPARED = "a graph has no cells: it is not compared with plain IVF"
MOST_BYTES = 1 << 31  # of keys that are scored one by one: a second or so


@dataclass(frozen=True)
class Explanation:
    """How an index answered one query, beside other ways.

    Args:
        way: how it was searched: in cells, along a graph, by the memory of the log, or every key.
        scores, ids: the results as `search` gives them, without empty places.
        numbers: the key numbers of the results; None where another library has the keys.
        top_scores, top_ids, top_numbers: the true top keys, likewise; None if they are not known.
        cells: the cells that were scanned, best first; `c` is how many there are.
        n: keys that could be results.
        methods: amips first.
        notes: what was not compared, and why.
    """

    way: Way
    scores: Floats
    ids: NDArray[Any]
    numbers: Ids | None
    top_scores: Floats | None
    top_ids: NDArray[Any] | None
    top_numbers: Ids | None
    cells: Ids
    c: int
    n: int
    methods: tuple[Method, ...]
    notes: tuple[str, ...] = ()

    def hits(self, method: Method) -> int | None:
        """How many of the true top keys a method found; None if these are not known."""
        top = self.top_ids if self.top_numbers is None else self.top_numbers
        return None if top is None else int(np.isin(top, method.results).sum())

    def __str__(self) -> str:
        of = 0 if self.top_ids is None else len(self.top_ids)
        rows = [
            [
                one.name,
                f"{1e6 * one.seconds:,.0f} us",
                f"{one.scanned:,}",
                f"{one.probed:,}",
                "" if of == 0 else f"{self.hits(one)} of {of}",
            ]
            for one in self.methods
        ]
        head = ["", "time", "keys scored", "cells, or keys visited", "found"]
        return "\n".join([text_table(head, rows), *self.notes])


def explain(
    index: "Snapshot | WrappedIndex",
    x: Any,
    k: int = TOP,
    *,
    allowed: KeyMask | None = None,
    plain: PlainIvf | None = None,
    **effort: Any,
) -> Explanation:
    """How an index answers one query, beside exact search and plain IVF; see `Index.explain`.

    Args:
        allowed: the keys that may be results; of a wrapped index all are.
        plain: on the same keys, if it is at hand; of a graph it is not made here.
    """
    x, k = checked_queries(x, index.d)[0], checked_k(k)
    if len(x) != 1:
        raise AmipsError(f"{len(x):,} queries: one at a time is explained")
    with limit_threads(1):
        if isinstance(index, WrappedIndex):
            return _explain_wrapped(index, x, k, effort)
        return _explain_own(index, x, k, allowed, plain, effort)


def _explain_own(
    index: Snapshot, x: Floats, k: int, allowed: KeyMask | None, plain: PlainIvf | None, effort: Any
) -> Explanation:
    behind, notes = plain_index(index), list[str]()
    options = {**effort, **({} if allowed is None else {"allowed": allowed})}
    seconds, (scores, ids) = timed(lambda: index.search(x, k, **options))
    numbers = ids if behind.labels is None else with_facts(index, labels=None).search(x, k, **options)[1]
    there = numbers[0] >= 0
    numbers, cost = numbers[0][there], index.cost(x, k, **options)
    ours = Method(OURS, seconds, int(cost.scanned[0]), int(cost.probed[0]), numbers)
    live = allowed or behind.alive
    n = behind.n if live is None else live.count
    methods = [ours]
    top_scores: Floats | None = None
    top: Ids | None = None
    if isinstance(behind, Searcher) and not isinstance(behind.store, OwnCells):
        notes.append("the keys are with another library: there is nothing to compare with")
    elif 4 * n * index.d > MOST_BYTES:
        notes.append(_too_many(n))
    elif n:
        seconds, (all_scores, all_numbers) = timed(lambda: every_key(behind, x, allowed, min(k, n)))
        top_scores, top = all_scores[0], all_numbers[0]
        same = _plain(behind, plain, notes)
        if same is not None:
            named = any(effort.get(name) is not None for name in ("probes", "min_mass", "margin"))
            recall = effort.get("recall") or index.target_recall
            asked = None if named or allowed is not None else recall
            methods += same.methods(behind, x, k, allowed, ours.scanned, asked)
        methods.append(Method(EXACT, seconds, n, 0, top))
    way, cells = _way(index, x, k, allowed, **effort)
    return Explanation(
        way,
        scores[0][there],
        ids[0][there],
        numbers,
        top_scores,
        None if top is None else labelled(top[None], behind.labels)[0],
        top,
        cells,
        behind.c if isinstance(behind, Searcher) else 0,
        n,
        tuple(methods),
        tuple(notes),
    )


def _plain(index: Searcher | GraphSearcher, plain: PlainIvf | None, notes: list[str]) -> PlainIvf | None:
    """Plain IVF on the same keys; None where there is none, which is then noted."""
    if isinstance(index, Searcher) and index.model is None:
        notes.append("this index chooses cells by centroids itself: it is plain IVF")
        return None
    if plain is not None and plain.store is index.store:
        return plain
    if isinstance(index, Searcher):
        return PlainIvf.of(index)
    notes.append(NOT_COMPARED)
    return None


def _way(
    index: Snapshot,
    x: Floats,
    k: int,
    allowed: KeyMask | None,
    *,
    recall: float | None = None,
    probes: Any = None,
    min_mass: float | None = None,
    margin: float | None = None,
    best_effort: bool = False,
) -> tuple[Way, Ids]:
    """How the index was searched, and the cells that were scanned."""
    nothing, behind, point = np.empty(0, np.int64), plain_index(index), None
    if isinstance(index, MemorySearcher):
        point = index._point(recall, k, best_effort, (margin, probes, min_mass, allowed))
        one = None if point is None else one_query(x, index.d)
        if one is not None and index.memory.recognise_one(one[0], behind.alive) is not None:
            return "memory", nothing
    if isinstance(behind, GraphSearcher):
        return "graph", nothing
    effort = (
        effort_for(behind, probes, recall, min_mass, k, best_effort) if point is None else effort_of(point)
    )
    u, filtered = split_norms(x)[0], behind.filters.of(allowed)
    if filtered is not None:
        matching = filtered.cells(u, k, effort)
        return ("every key", nothing) if matching is None else ("cells", matching)
    if effort.refine == 0:
        return "every key", nothing
    cells = behind._choose(u, effort.min_mass, behind.counts(effort, 1), k)[0]
    return "cells", cells[cells >= 0]


def _explain_wrapped(index: WrappedIndex, x: Floats, k: int, effort: Any) -> Explanation:
    """An index of FAISS: what it finds in all of its cells is taken for true."""
    seconds, (scores, ids) = timed(lambda: index.search(x, k, **effort))
    cost, notes = index.cost(x, k, **effort), list[str]()
    there = ids[0] >= 0
    ours = Method(OURS, seconds, int(cost.scanned[0]), int(cost.probed[0]), ids[0][there])
    methods = [ours]
    top_scores: Floats | None = None
    top: Ids | None = None
    if 4 * index.n * index.d > MOST_BYTES:
        notes.append(_too_many(index.n))
    else:
        seconds, (all_scores, all_ids) = timed(lambda: index.search(x, k, probes=index.c))
        top_scores, top = all_scores[0][all_ids[0] >= 0], all_ids[0][all_ids[0] >= 0]
        if index.model is None:
            notes.append("this index chooses cells by its own quantizer: it is plain IVF")
        else:
            methods.append(_own_quantizer(index, x, k, ours.scanned))
        methods.append(Method(EXACT, seconds, index.n, index.c, top))
        if not index.parts.exact:
            notes.append("the index holds codes: what they find in all cells is taken for true")
    cells = index.choose_cells(x, max(1, ours.probed))[0]
    results = (scores[0][there], ids[0][there], None, top_scores, top, None)
    return Explanation("cells", *results, cells, index.c, index.n, tuple(methods), tuple(notes))


def _own_quantizer(index: WrappedIndex, x: Floats, k: int, scanned: int) -> Method:
    """The index as it was before it was wrapped, which scores as many keys."""
    own = replace(index, model=None, points=[], target_recall=None)
    keys = np.cumsum(index.parts.sizes[own.choose_cells(x, index.c)[0]])
    probes = min(index.c, 1 + int(np.searchsorted(keys, scanned)))
    seconds, (_, ids) = timed(lambda: own.search(x, k, probes=probes))
    return Method(AS_MANY_KEYS, seconds, int(keys[probes - 1]), probes, ids[0])


def _too_many(n: int) -> str:
    return f"scoring all of {n:,} keys would take too long: there is nothing to compare with"
