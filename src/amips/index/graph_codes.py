"""Codes that a graph is walked by: which values of a dimension they span, and keys as whole numbers."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.vectors import Floats, Vectors

TAIL = 0.001  # of the values of a dimension, at each end, that codes need not tell apart
SAMPLE = 1 << 15  # keys that the range of codes is taken of
LARGEST_WHOLE = 63  # of the projection: products of two with bytes fit into 16 bits together


def code_range(
    keys: Vectors, below: Floats | None, wanted: NDArray[np.integer[Any]] | None
) -> tuple[Floats, Floats]:
    """The values of each dimension that codes must span, least and largest, both [r].

    Of keys in general and of those that queries want: where norms differ, these are the large ones.
    """
    rng = np.random.default_rng(0)
    every = np.sort(rng.choice(keys.n, min(keys.n, SAMPLE), replace=False))
    samples = [every]
    if wanted is not None and wanted.size:
        samples.append(np.sort(rng.choice(np.asarray(wanted).ravel(), min(wanted.size, SAMPLE))))
    ends = []
    for ids in samples:
        rows = keys.take(ids)
        rows = rows if below is None else rows @ below.T
        ends.append(np.quantile(rows, [TAIL, 1 - TAIL], axis=0).astype(np.float32))
    return np.min([one[0] for one in ends], axis=0), np.max([one[1] for one in ends], axis=0)


def normal_steps(step: NDArray[np.floating[Any]]) -> tuple[Floats, Floats]:
    """Steps divided by a power of two, so that the largest is near 1, and that power, [1]."""
    exponent = int(np.frexp(step.max(initial=0))[1])
    return np.ldexp(step, -exponent).astype(np.float32), np.ldexp(np.ones(1, np.float32), exponent)


def coded(
    keys: Vectors, below: Floats | None, low: Floats, step: Floats, least: int, most: int, dtype: Any
) -> NDArray[Any]:
    """Keys [n, r] as whole numbers: (y - low) / step, within least..most."""
    out = np.empty((keys.n, len(step)), dtype)
    divisor = np.where(step > 0, step, 1)
    for start, block in keys.blocks():
        values = block if below is None else block @ below.T
        whole = np.rint((values - low) / divisor)
        out[start : start + len(block)] = np.where(step > 0, np.clip(whole, least, most), 0)
    return out


def whole_projection(projection: Floats) -> tuple[NDArray[np.int8], Floats]:
    """A projection [r, d] as small whole numbers, and what one of each row stands for, [r]."""
    largest = np.abs(projection).max(axis=1)
    scale = np.where(largest > 0, largest / LARGEST_WHOLE, 1).astype(np.float32)
    return np.rint(projection / scale[:, None]).astype(np.int8), scale
