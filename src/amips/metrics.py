"""What is reported of predictions and searches: transport error, ranks, routing accuracy, cost at a recall.

Definitions are the paper's; `erel` is the mean log ratio of squared distances as its formula has it,
`erel_half` the mean log ratio of distances that its prose and published code use.
"""

import math
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

TOP = 10  # the true top keys whose recall is measured
TARGET_RECALL = 0.95  # of these, what an index is made for where nothing else is asked
SCAN = f"scan@{TARGET_RECALL}"  # the metric of routers: share of the keys scanned for that recall


def transport_error(predicted: Floats, x: Floats, target: Floats) -> NDArray[np.float64]:
    """log(||y^ - y*||^2 / ||x - y*||^2), one value for each row of [..., d] arrays."""
    tiny = np.finfo(np.float32).tiny
    missed = np.square(predicted - target, dtype=np.float64).sum(axis=-1)
    apart = np.square(x - target, dtype=np.float64).sum(axis=-1)
    errors: NDArray[np.float64] = np.log(np.maximum(missed, tiny)) - np.log(np.maximum(apart, tiny))
    return errors


def rank_metrics(ranks: NDArray[np.integer[Any]], at: tuple[int, ...] = (10, 100)) -> dict[str, float]:
    """Match rate (rank 1), recall at k and mean reciprocal rank of the true top key."""
    recalls = {f"recall@{k}": float((ranks <= k).mean()) for k in at}
    return {"match": float((ranks == 1).mean()), **recalls, "mrr": float((1.0 / ranks).mean())}


def routing_accuracy(
    scores: Floats, cell: NDArray[np.integer[Any]], at: tuple[int, ...] | None = None
) -> dict[str, float]:
    """Share of queries whose true cell is among the k best-scored ones; k doubles from 1 unless given.

    A tie counts as won only by the lower cell, as in a stable sort.
    """
    c = scores.shape[1]
    own = np.take_along_axis(scores, cell[:, None], axis=1)
    ahead = (scores > own).sum(axis=1) + ((scores == own) & (np.arange(c) < cell[:, None])).sum(axis=1)
    ks = at if at is not None else tuple(2**i for i in range(c.bit_length()) if 2**i < c)
    return {f"routing@{k}": float((ahead < k).mean()) for k in ks}


CONFIDENCE = 0.95
MISSES = 1.5  # that are counted in: with these the bound holds for success rates of any size and number


def assured_mean(values: NDArray[Any], looks: int = 1) -> NDArray[np.float64]:
    """What the mean of new values of the same kind is at least, with 95 % confidence; over rows of [m, ...].

    For values between 0 and 1, such as the recall of m held-out queries: with one and a half zeros counted
    in, m' = m + 1.5 values of mean v and deviation s,

        v - z s / sqrt(m'),        z = 1.645.

    That nothing failed in m trials does not mean that nothing will: so m times 1 gives about 1 - 3.5 / m,
    where the exact bound of a success rate is 1 - 3.0 / m. `looks` is among how many such bounds one chooses:
    all of them hold together.
    """
    m = len(values) + MISSES
    mean = values.sum(axis=0) / m
    squares = np.square(values, dtype=np.float64).sum(axis=0) / m
    spread = np.sqrt(np.maximum(squares - mean**2, 0) * m / (m - 1))
    quantile = NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / looks)
    bound: NDArray[np.float64] = np.maximum(mean - quantile * spread / math.sqrt(m), 0.0)
    return bound


def mean_interval(values: NDArray[Any]) -> tuple[float, float]:
    """Between what the mean of new values of the same kind lies, with 95 % confidence; values [m], 0 to 1."""
    low, missed = assured_mean(values, 2), assured_mean(1 - values, 2)
    return float(low), float(1 - missed)


def front(cost: Doubles, recall: Doubles) -> NDArray[np.intp]:
    """Indices of the points that no other point beats, by rising cost (and recall)."""
    order = np.lexsort((-recall, cost))
    rising = recall[order]
    before = np.concatenate([[-np.inf], np.maximum.accumulate(rising)[:-1]])
    return order[rising > before]


def cost_at(cost: Doubles, recall: Doubles, target: float) -> float:
    """The cost at which a recall is reached along the front of these points; nan if it is not.

    Below the cheapest point the cost is that point's.
    """
    best = front(cost, recall)
    cost, recall = cost[best], recall[best]
    i = int(np.searchsorted(recall, target - 1e-12))
    if i == len(recall):
        return math.nan
    if i == 0:
        return float(cost[0])
    part = (target - recall[i - 1]) / (recall[i] - recall[i - 1])
    return float(cost[i - 1] + part * (cost[i] - cost[i - 1]))
