"""What a scan costs, counted from shapes (a multiply-add is 2 FLOPs), and what memory an index takes."""

import numpy as np
from numpy.typing import NDArray

from amips.design import Storage
from amips.metrics import TOP

Counts = NDArray[np.int64]


BESIDE_CODES = 24  # bytes a key that cells take beside codes: numbers of keys in FAISS (8) and here, cells
GROWTH = 1.25  # of what memory that was given back leaves between the codes of cells


def cell_bytes(
    storage: Storage, n: int, d: int, dimensions: int = 0, parts: int = 0, spill: float = 0.0
) -> int:
    """Bytes of memory that n keys of dimension d take in cells, while they are built at most.

    The float32 keys beside codes are not among them: they are read from their file.

    Args:
        dimensions: r, of lean storage.
        parts: of a PQ code.
        spill: the fraction of the keys in a second cell.
    """
    code = {"flat": 4 * d, "sq8": d, "pq": parts, "lean": -(-dimensions // 2)}[storage]
    each = GROWTH * code + BESIDE_CODES
    if storage == "lean":  # FAISS has codes and numbers twice, while they are put in the order of FastScan
        each += GROWTH * code + 8
    return int(n * (1 + spill) * each)


def graph_bytes(n: int, degree: int, dimensions: int) -> int:
    """Bytes of memory that a graph over n keys takes while it is made, walked in so many dimensions."""
    projected, lists = 3 * 4 * dimensions, 4 * (3 * degree + 2 * 64 + 96)
    return n * (projected + lists + degree * dimensions // 2)


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


def candidates_of(k: int, refine: int, n: int, entries: int) -> int:
    """How many entries are looked for in codes of n keys."""
    # As many for one result as for ten: of codes, too, the recall was measured of the top ten.
    wanted = min(max(k, TOP) * refine, max(1, n))
    return wanted if entries <= n else max(2 * k, round(wanted * entries / n))
