"""What a partition and a router will cost, from the scores of held-out queries alone: no index is needed."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.route import fit_temperature
from amips.vectors import Floats


@dataclass(frozen=True)
class Expected:
    """The mean number of keys scanned to reach a recall, and the bound on the share that does it."""

    scanned: float
    share: float
    temperature: float


def expected(
    scores: Floats, assignment: NDArray[np.integer[Any]], top_ids: NDArray[np.integer[Any]], recall: float
) -> Expected:
    """What it takes to find this share of the top keys [m, k] when every query probes as it needs.

    A scan of a cell finds what is in it, so that a top key is found if and only if the expected share of its
    cell reaches the bound (or the cell is the query's best). The bound is then a quantile of the shares of
    the cells of the top keys.
    """
    cells = assignment[top_ids]
    temperature = fit_temperature(scores, cells)
    shares = np.exp((scores - scores.max(axis=1, keepdims=True)) / np.float32(temperature))
    best = shares >= 1  # before they are made to sum to 1
    shares /= shares.sum(axis=1, keepdims=True)
    found_anyway = np.take_along_axis(best, cells, axis=1)
    wanted = np.where(found_anyway, np.inf, np.take_along_axis(shares, cells, axis=1)).ravel()
    missed = int((1 - recall) * len(wanted))  # so many may be lost
    bound = float(np.partition(wanted, missed)[missed])
    sizes = np.bincount(assignment, minlength=scores.shape[1]).astype(np.float32)
    taken = best | (shares >= bound)
    return Expected(float((taken @ sizes).mean()), bound, temperature)
