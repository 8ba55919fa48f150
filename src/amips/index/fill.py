"""Filling a FAISS inverted file whose cells are given."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.blas import faiss
from amips.design import Storage
from amips.errors import AmipsError
from amips.lean import Projection
from amips.vectors import Floats, Vectors

FEWEST_KEYS = {"pq": 256, "lean": 16}  # as many as a code has values
PQ_DIMENSIONS_PER_BYTE = 4


def fill(
    keys: Vectors,
    assignment: NDArray[np.integer[Any]],
    centroids: Floats,
    storage: Storage,
    projection: Projection | None,
    second: NDArray[np.int32] | None,
) -> Any:
    """A `faiss.IndexIVF` with every key, as this storage keeps it, in its cell, and in its second, if any."""
    if (storage == "lean") != (projection is not None):
        raise AmipsError("storage='lean' needs a projection, and no other storage has one")
    c, d = len(centroids), centroids.shape[1] if projection is None else projection.r
    quantizer = faiss.IndexFlatIP(d)
    inside = centroids if projection is None else centroids @ projection.keys.T
    quantizer.add(np.ascontiguousarray(inside))
    metric = faiss.METRIC_INNER_PRODUCT
    if storage == "flat":
        index = faiss.IndexIVFFlat(quantizer, d, c, metric)
    elif storage == "lean":
        index = faiss.IndexIVFPQ(quantizer, d, c, d, 4, metric)  # a code of 4 bits for each dimension
        index.by_residual = False
    elif storage == "sq8":
        # Not the residual: its range is no smaller for a key in a cell that is not its nearest.
        index = faiss.IndexIVFScalarQuantizer(quantizer, d, c, faiss.ScalarQuantizer.QT_8bit, metric, False)
    elif storage == "pq":
        parts = pq_parts(d)
        index = faiss.IndexIVFPQ(quantizer, d, c, parts, 8, metric)
    else:
        raise AmipsError(f"storage={storage!r}: expected 'flat', 'sq8', 'pq' or 'lean'")
    index.own_fields = True
    quantizer.this.disown()
    _train(index, keys, storage, projection)
    for start, block in keys.blocks():
        if projection is not None:
            block = block @ projection.keys.T
        ids = np.arange(start, start + len(block), dtype=np.int64)
        cells = np.asarray(assignment[start : start + len(block)], np.int64)
        if second is not None:
            twice = np.flatnonzero(second[ids] >= 0)
            block = np.concatenate([block, block[twice]])
            ids, cells = np.append(ids, ids[twice]), np.append(cells, second[ids[twice]])
        block, cells = np.ascontiguousarray(block), np.ascontiguousarray(cells, np.int64)
        pointers = [faiss.swig_ptr(a) for a in (block, ids, cells)]
        index.add_core(len(block), *pointers)
    return index


def pq_parts(d: int) -> int:
    """Parts of a PQ code, a byte each: at most one for four dimensions, and a divisor of d."""
    return next(m for m in range(max(1, d // PQ_DIMENSIONS_PER_BYTE), 0, -1) if d % m == 0)


def _train(index: Any, keys: Vectors, storage: Storage, projection: Projection | None) -> None:
    """Train the codes; the centroids are given. A sample is enough: FAISS itself uses at most 64k."""
    if storage == "flat":
        index.is_trained = True
        return
    most = 1 << 16
    sample = (
        keys.load()
        if keys.n <= most
        else keys.take(np.sort(np.random.default_rng(0).choice(keys.n, most, replace=False)))
    )
    if storage in FEWEST_KEYS:
        if len(sample) < FEWEST_KEYS[storage]:
            few = f"storage={storage!r} needs at least {FEWEST_KEYS[storage]} keys, got {len(sample)}"
            raise AmipsError(f"{few}; use 'flat' or 'sq8'")
        index.cp.min_points_per_centroid = index.pq.cp.min_points_per_centroid = 1
    index.train(sample if projection is None else sample @ projection.keys.T)
