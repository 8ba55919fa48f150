"""Which cells to probe, given the scores of a router: the best few, or those that hold enough mass.

The *mass* of cell j is the share of a query's top keys that it is expected to hold,

    mass_j(x) = softmax(f(x) / t)_j,

with the temperature t fitted to held-out queries. To scan a cell costs as many products as it has keys,
whichever query asks, so one bound on the mass, the same for all queries, finds the most for a given cost over
all of them: easy queries end after a cell or two, hard ones go on. This module is the only place that knows
this rule; `amips.routers.estimate` applies it to held-out queries, `Searcher` to those that are asked.
"""

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.metrics import TOP
from amips.vectors import Floats

ROWS = 256  # queries whose cells are counted at a time
STEP, LOWEST, HIGHEST = 1.1, -36, 24  # of the grid of temperatures, around the spread of the scores


def masses(scores: Floats, temperature: float) -> Floats:
    """softmax(scores / temperature), [m, c]."""
    relative: Floats = np.exp((scores - scores.max(axis=1, keepdims=True)) / np.float32(temperature))
    relative /= relative.sum(axis=1, keepdims=True)
    return relative


def least_keys(k: int, twice: bool) -> int:
    """How many entries the probed cells hold at least, for k results; `twice`: some keys are in two cells.

    As many for one result as for ten: the recall of a bound on the mass is measured of the top ten.
    """
    return max(k, TOP) * (2 if twice else 1)


def keys_in(probed: NDArray[np.bool_], sizes: "NDArray[np.integer[Any]]") -> NDArray[np.int64]:
    """How many keys the cells have that each query probes, [m], of cells of these sizes [c]."""
    keys, floats = np.empty(len(probed), np.int64), sizes.astype(np.float64)
    for low in range(0, len(probed), ROWS):  # numpy makes a float of each truth value
        keys[low : low + ROWS] = probed[low : low + ROWS] @ floats
    return keys


def holds_mass(
    mass: Floats,
    scores: Floats,
    min_mass: float,
    sizes: "NDArray[np.integer[Any]] | None" = None,
    keys: int = 0,
) -> NDArray[np.bool_]:
    """Which cells are probed, [m, c]: those with at least this mass, and each query's best in any case.

    With the sizes of the cells [c]: as many of the best as hold so many keys, at least. An answer should not
    be short for want of looking.
    """
    probed = mass >= np.float32(min_mass)
    # Of cells that tie for the best one is enough: nothing asks for a scan of all of them.
    probed[np.arange(len(scores)), scores.argmax(axis=1)] = True
    if sizes is None:
        return probed
    short = np.flatnonzero(keys_in(probed, sizes) < keys)
    if len(short):
        order = np.argsort(-scores[short], axis=1, kind="stable")
        before = np.cumsum(sizes[order], axis=1) - sizes[order]
        probed[short[:, None], order] = before < keys
    return probed


def cells_above(
    scores: Floats,
    temperature: float,
    min_mass: float,
    sizes: "NDArray[np.integer[Any]] | None" = None,
    keys: int = 0,
) -> NDArray[np.int64]:
    """The cells that `holds_mass` says, as a table [m, p]; -1 fills up.

    The best cell comes first; of one query the others follow in order.
    """
    probed = holds_mass(masses(scores, temperature), scores, min_mass, sizes, keys)
    if len(scores) == 1:  # FAISS keeps fewer candidates for a moment when the best cells come first
        cells = np.flatnonzero(probed[0])
        return cells[np.argsort(-scores[0, cells], kind="stable")][None]
    best = scores.argmax(axis=1)
    rows, columns = np.nonzero(probed)
    first = np.searchsorted(rows, np.arange(len(scores)))
    place = np.arange(len(rows)) - first[rows]
    table = np.full((len(scores), int(place.max(initial=0)) + 1), -1, np.int64)
    table[rows, place] = columns
    swapped = table == best[:, None]
    table[swapped] = table[:, 0]
    table[:, 0] = best
    return table


def best_cells(scores: Floats, probes: int) -> NDArray[np.int64]:
    """The `probes` best cells of each row, best first, [m, probes]; ties go to the lower cell."""
    c = scores.shape[1]
    if probes >= c:
        return np.argsort(-scores, axis=1, kind="stable")
    if len(scores) == 1:  # one query: the calls are what costs, so as few as can be
        row = scores[0]
        reached = np.flatnonzero(row >= np.partition(row, c - probes)[c - probes])
        if len(reached) >= probes:  # fewer where scores are not numbers: the way for many takes those
            return reached[np.argsort(-row[reached], kind="stable")[:probes]][None]
    chosen = np.sort(np.argpartition(scores, c - probes, axis=1)[:, c - probes :], axis=1)
    # argpartition takes any of the cells that tie for the last place: such rows are sorted in full.
    last = np.take_along_axis(scores, chosen, axis=1).min(axis=1)
    tied = (scores >= last[:, None]).sum(axis=1) > probes
    if tied.any():
        chosen[tied] = np.sort(np.argsort(-scores[tied], axis=1, kind="stable")[:, :probes], axis=1)
    order = np.argsort(-np.take_along_axis(scores, chosen, axis=1), axis=1, kind="stable")
    return np.take_along_axis(chosen, order, axis=1)


def limit_probes(cells: NDArray[np.int64], probes: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Keep the first probes[i] cells of row i; the others become -1, which a scan skips."""
    return np.ascontiguousarray(np.where(np.arange(cells.shape[1]) < probes[:, None], cells, -1))


def fit_temperature(scores: Floats, cells: NDArray[np.integer[Any]]) -> float:
    """The temperature t at which softmax(scores / t) best predicts the cells [m, k] of the top keys.

    It has the least cross-entropy, over a grid of steps of 10 % around the spread of the scores. The
    cross-entropy is convex in 1 / t, so that bisection finds the step: every look at it takes an exponential
    of every score.
    """
    spread = float(np.std(scores - scores.mean(axis=1, keepdims=True)))
    if not spread > 0:
        return 1.0
    wanted = np.take_along_axis(scores, cells, axis=1).mean(axis=1)
    high = scores.max(axis=1)

    @cache
    def entropy(step: int) -> float:
        t = spread * STEP**step
        total = np.log(np.exp((scores - high[:, None]) / np.float32(t)).sum(axis=1))
        return float((total + (high - wanted) / t).mean())

    low, last = LOWEST, HIGHEST - 1
    while low < last:
        middle = (low + last) // 2
        low, last = (low, middle) if entropy(middle) <= entropy(middle + 1) else (middle + 1, last)
    return float(spread * STEP**low)
