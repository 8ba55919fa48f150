"""What a scan costs, counted from shapes; a multiply-add is 2 FLOPs."""

import numpy as np
from numpy.typing import NDArray

from amips.design import Storage

Counts = NDArray[np.int64]


def scan_flops(
    storage: Storage, keys: Counts, d: int, candidates: int, dimensions: int = 0, parts: int = 0
) -> Counts:
    """FLOPs of scanning so many keys, for each query.

    2 d for each key scanned and, for quantised storage, for each candidate that is scored again. A lean key
    counts as the inner product in r dimensions that its code stands for, 2 r, and a query 2 r d for its
    projection and 2 * 16 r for its tables. A PQ code costs one addition for each part, and a query 2 * 256 d
    for its tables.

    Args:
        keys: scanned, [m].
        candidates: that are scored again, at most, with quantised storage.
        dimensions: r, of lean storage.
        parts: of a PQ code.
    """
    if storage == "flat":
        return 2 * d * keys
    again: Counts = 2 * d * np.minimum(keys, candidates)
    if storage == "lean":
        return np.asarray(2 * dimensions * (keys + d + 16) + again)
    if storage == "sq8":
        return np.asarray(2 * d * keys + again)
    return np.asarray(parts * keys + 2 * 256 * d + again)
