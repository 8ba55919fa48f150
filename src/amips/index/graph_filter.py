"""Walks of a graph of whose keys only some may be results: how wide, and when scoring those is cheaper.

A walk for the ten best of a share s of the keys passes some 10 / s keys, so that its cost grows as the share
shrinks, and that of scoring all that are allowed falls with it. They meet where the number that is allowed is
about the root of (keys times results), times a constant that was measured (`DEARER`): for ten results of
100,000 keys at 6 %, of ten million at 0.6 %, and for many queries at once at twice that.

A filter that leaves out what is asked for leads a walk to keys that the log hardly wanted, where the edges
and the margin say less. It shows in the walk: fewer of the best keys that it met match than of all keys. Such
a query is walked for again, with a wider margin.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips import native
from amips.errors import AmipsError
from amips.index.top_keys import top_of_rows
from amips.vectors import Floats

Ids = NDArray[np.int64]

EVERY = np.zeros(0, np.uint8)  # instead of a mask, where every key may be a result
# For one query and for many, which share the reading of keys: what a walk costs for each result and each key
# that is passed for one that is allowed, in scores of keys.
DEARER, DEARER_TOGETHER = 40, 160
TOGETHER = 8  # queries from which on scoring shares the reading
VISIT = 10  # scores of keys that a visit costs as much as
PASSED = 32  # keys kept for each result and each key that is passed for one that is allowed
WIDEST = 1 << 13  # keys kept, at most
NEAREST = 64  # keys of a walk whose matches are counted, as in native/walk.hpp
SURE = 2.0  # standard deviations of a random mask, beyond which it was led away
# Times the margin, where it was, and what that costs: the recall was kept on the data it was tried on.
AWAY, DEARER_AWAY = 1.5, 2
MOST_IN_ORDER = 256  # results that are kept in order one by one


def allowed_keys(allowed: NDArray[Any], n: int) -> NDArray[np.uint8]:
    """A mask as compiled code reads it, 0 or 1; AmipsError if it is not one of n keys."""
    if allowed.shape != (n,) or allowed.dtype not in (np.bool_, np.uint8):
        raise AmipsError(f"allowed: expected bool or uint8 [{n}], got {allowed.dtype} {list(allowed.shape)}")
    whole = np.ascontiguousarray(allowed) if allowed.dtype == np.bool_ else allowed != 0
    result: NDArray[np.uint8] = whole.view(np.uint8)
    return result


def effort_for(n: int, matches: int, depth: int, m: int, least: int) -> tuple[int, int, int] | None:
    """Keys to keep in a walk, visits it may make, and matches that the best keys of it have by chance.

    None where scoring all that match is cheaper.

    Args:
        matches: keys that are allowed.
        depth: results, 10 at least.
        m: queries.
        least: keys that are kept where all are allowed.
    """
    dearer = DEARER if m < TOGETHER else DEARER_TOGETHER
    if matches * matches <= dearer * depth * n:
        return None
    width = min(WIDEST, max(least, PASSED * depth * n // matches))
    share = matches / n
    near = math.ceil(NEAREST * share - SURE * math.sqrt(NEAREST * share * (1 - share)))
    return width, min(width, matches // VISIT), near  # a walk that visits all it keeps was not wide enough


def led_away(counts: Ids, flops: Callable[[Ids], Ids], exact: int, visits: int) -> Ids:
    """Which queries to walk for again, of walks with these counts [m, 3]; negative visits become positive.

    Where that would cost more than scoring all that match, `exact`, as many visits are set as there may be.
    """
    away: Ids = np.flatnonzero(counts[:, 0] < 0)
    counts[:, 0] = np.abs(counts[:, 0])
    cheaper = (DEARER_AWAY * flops(counts[away]) < exact) & (counts[away, 0] < visits)
    counts[away[~cheaper], 0] = visits
    again: Ids = away[cheaper]
    return again


def exact_search(
    keys: Floats, x: Floats, allowed: NDArray[np.uint8], scores: Floats, ids: Ids, block_bytes: int
) -> None:
    """The best of the keys [n, d] that are allowed [n], written to scores [m, k] and ids [m, k]."""
    plain = keys.flags.c_contiguous and keys.dtype == np.float32
    if native.compiled is not None and plain and len(x) < TOGETHER and ids.shape[1] <= MOST_IN_ORDER:
        native.compiled.search_allowed(keys, allowed, np.ascontiguousarray(x), scores, ids)
    else:
        scores[:], ids[:] = top_of_rows(keys, x, ids.shape[1], block_bytes, allowed.view(bool))
