"""Do two samples come from the same distribution? Kolmogorov-Smirnov, several at a time."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

TERMS = 40  # of the series of the limit distribution


def kolmogorov_smirnov(one: NDArray[Any], other: NDArray[Any]) -> tuple[float, float]:
    """The largest difference of the two distribution functions, and its p-value.

    The p-value is that of the limit distribution with Stephens' correction for few values,

        p = 2 sum_k (-1)^(k-1) exp(-2 k^2 l^2),   l = (sqrt(e) + 0.12 + 0.11 / sqrt(e)) D,
        e = m m' / (m + m'),

    which is on the safe side where values are equal.
    """
    one, other = np.sort(one), np.sort(other)
    both = np.concatenate([one, other])
    below = np.searchsorted(one, both, side="right") / len(one)
    below_other = np.searchsorted(other, both, side="right") / len(other)
    difference = float(np.abs(below - below_other).max())
    root = math.sqrt(len(one) * len(other) / (len(one) + len(other)))
    scaled = (root + 0.12 + 0.11 / root) * difference
    if scaled < 0.2:  # where the series is slow, and 1 to many places
        return difference, 1.0
    terms = np.arange(1, TERMS)
    p = 2 * float(((-1.0) ** (terms - 1) * np.exp(-2 * (terms * scaled) ** 2)).sum())
    return difference, min(1.0, max(0.0, p))


def holm(p: NDArray[Any]) -> NDArray[np.float64]:
    """p-values [t] corrected for their number: each below a has a false-alarm rate of a for all together."""
    order = np.argsort(p)
    corrected = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    out = np.empty(len(p))
    out[order] = np.minimum(corrected, 1)
    return out
