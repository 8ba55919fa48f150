"""Edges of a graph: which of many candidates to keep, which keys the log asks for together, reverse edges.

Lists of neighbours are tables int32 [n, width]; -1 follows the last. Two functions are compiled where that
was possible (`amips.native`); in numpy they are slower and give the same lists, up to ties of rounding.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips import native
from amips.blas import threads_allowed
from amips.vectors import Floats

Lists = NDArray[np.int32]

ROWS_BYTES = 1 << 27  # of candidates, at a time, in numpy
ROUNDS = 20  # of connecting, at most: the second is rarely needed


def prune(
    vectors: Floats, candidates: Lists, degree: int, *, fill: bool = False, ordered: bool = False
) -> Lists:
    """At most `degree` of the candidates of each key: the relative-neighbour rule.

    Of the candidates of key i, from the nearest on, j is kept unless one that is kept already is at least as
    near to j as i is: a walk that wants to go to j then goes by way of that one. Near is a large inner
    product.

    Args:
        vectors: of norm 1, [n, d].
        candidates: [n, width]; -1 and i itself are passed over.
        fill: fill up with the first of those that were not kept.
        ordered: go through the candidates as they come, not from the nearest on.
    """
    out = np.full((len(vectors), degree), -1, np.int32)
    candidates = np.ascontiguousarray(candidates, np.int32)
    if native.compiled is not None:
        native.compiled.prune(vectors, candidates, fill, ordered, threads_allowed(), out)
        return out
    rows = max(1, ROWS_BYTES // (4 * max(1, candidates.shape[1]) * vectors.shape[1]))
    for low in range(0, len(vectors), rows):
        out[low : low + rows] = _pruned(vectors, low, candidates[low : low + rows], degree, fill, ordered)
    return out


def _pruned(vectors: Floats, low: int, ids: Lists, degree: int, fill: bool, ordered: bool) -> Lists:
    """`prune` for the keys from `low` on whose candidates these are."""
    ids = np.where(ids == np.arange(low, low + len(ids))[:, None], -1, ids)
    by_id = np.argsort(ids, axis=1, kind="stable")
    again = np.zeros(ids.shape, bool)
    ascending = np.take_along_axis(ids, by_id, 1)
    np.put_along_axis(again, by_id[:, 1:], ascending[:, 1:] == ascending[:, :-1], 1)
    ids = np.where(again, -1, ids)
    rows = vectors[np.maximum(ids, 0)]
    own = np.einsum("ijk,ik->ij", rows, vectors[low : low + len(ids)])
    own[ids < 0] = -np.inf
    order = np.lexsort((ids, -own), axis=1)
    if ordered:
        order = np.argsort(ids < 0, axis=1, kind="stable")
    ids, own = np.take_along_axis(ids, order, 1), np.take_along_axis(own, order, 1)
    rows = np.take_along_axis(rows, order[:, :, None], 1)
    kept = np.zeros(ids.shape, bool)
    for place in range(ids.shape[1]):
        between = np.einsum("ijk,ik->ij", rows[:, :place], rows[:, place])
        hidden = (kept[:, :place] & (between >= own[:, place, None])).any(axis=1)
        kept[:, place] = (ids[:, place] >= 0) & ~hidden & (kept[:, :place].sum(axis=1) < degree)
    ids = np.where(kept | (fill & (ids >= 0)), ids, -1)
    first = np.argsort(np.where(ids < 0, 2, np.where(kept, 0, 1)), axis=1, kind="stable")[:, :degree]
    out = np.full((len(ids), degree), -1, np.int32)
    out[:, : first.shape[1]] = np.take_along_axis(ids, first, 1)
    return out


def together(top: NDArray[np.integer[Any]], n: int, most: int) -> Lists:
    """For each of n keys the keys that stand beside it in the top lists of queries, most often first.

    Two keys at ranks a and b of one list count w(a) w(b), with w(a) = 1 / log2(a + 2) for a = 0, 1, ...

    Args:
        top: the top keys of queries, [m, length]; -1 where there is none.
        most: keys in each list, at most.
    """
    top = np.ascontiguousarray(top, np.int32)
    length = top.shape[1]
    weight = (1 / np.log2(np.arange(length) + 2)).astype(np.float32)
    flat = top.ravel()
    places = np.argsort(flat, kind="stable").astype(np.int64)
    start = np.searchsorted(flat[places], np.arange(n + 1)).astype(np.int64)
    out = np.full((n, most), -1, np.int32)
    if native.compiled is not None:
        native.compiled.together(top, start, places, weight, threads_allowed(), out)
        return out
    for key in range(n):
        at = places[start[key] : start[key + 1]]
        if not len(at):
            continue
        others, weights = top[at // length], weight[at % length][:, None] * weight[None, :]
        ids, where = np.unique(others, return_inverse=True)
        totals = np.bincount(where.ravel(), weights.ravel(), len(ids)).astype(np.float32)
        wanted = (ids != key) & (ids >= 0)
        ids, totals = ids[wanted], totals[wanted]
        best = np.lexsort((ids, -totals))[:most]
        out[key, : len(best)] = ids[best]
    return out


def reverse(lists: Lists, most: int) -> Lists:
    """For each key the keys that have it in their lists, those that have it first before the others."""
    n = len(lists)
    target = lists.T.ravel()  # all first neighbours, then all second ones, ...
    order = np.argsort(target, kind="stable")
    order = order[np.count_nonzero(target < 0) :]
    source, target = (order % n).astype(np.int32), target[order]
    rank = np.arange(len(target)) - np.searchsorted(target, np.arange(n))[target]
    within = rank < most
    out = np.full((n, most), -1, np.int32)
    out[target[within], rank[within]] = source[within]
    return out


def reached(lists: Lists, entries: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
    """Which keys a walk along the edges can reach from the entry points, [n]."""
    seen = np.zeros(len(lists), bool)
    _spread(lists, seen, np.unique(entries))
    return seen


def _spread(lists: Lists, seen: NDArray[np.bool_], front: NDArray[np.integer[Any]]) -> None:
    """Mark as seen the keys of the front, and all that can be reached from them."""
    while len(front):
        seen[front] = True
        beyond = lists[front]
        front = np.unique(beyond[beyond >= 0])
        front = front[~seen[front]]


def connect(lists: Lists, candidates: Lists, entries: NDArray[np.integer[Any]]) -> Lists:
    """The lists with edges to every key that no walk reached: from a candidate of it, or from any key.

    An edge takes a free place, or else that of the last neighbour that was there before.
    """
    lists = lists.copy()
    fixed = np.zeros(lists.shape, bool)  # edges made here, which stay
    full = np.zeros(len(lists), bool)  # whose edges were all made here
    for _ in range(ROUNDS):  # an edge that gave way may have been the only one to its key
        seen = reached(lists, entries)
        if seen.all():
            break
        for key in np.flatnonzero(~seen):
            if seen[key]:
                continue
            near = candidates[key]
            near = near[near >= 0]
            near = near[seen[near] & ~full[near]]
            source = int(near[0]) if len(near) else int(np.argmax(seen & ~full))
            if full[source]:
                return lists
            free = np.flatnonzero(lists[source] < 0)
            place = free[0] if len(free) else np.flatnonzero(~fixed[source])[-1]
            lists[source, place], fixed[source, place] = key, True
            full[source] = fixed[source].all()
            _spread(lists, seen, np.array([key]))
    return lists
