"""The nearest keys of every key."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips import exact
from amips.blas import faiss
from amips.cells import default_count, kmeans
from amips.progress import Bar
from amips.rowfiles import RowFiles
from amips.vectors import Floats

EXACT_KEYS = (
    120_000  # up to which every pair is looked at: lists that miss one key in ten cost a point of recall
)
PROBES = 32  # cells that the nearest keys are looked for in
ITERATIONS, POINTS = 8, 64  # of k-means: cells need only be good enough
BLOCK = 4096  # keys at a time


def nearest_keys(
    vectors: Floats,
    count: int,
    *,
    asked: Floats | None = None,
    seed: int = 0,
    progress: bool = False,
    out: Path | None = None,
) -> NDArray[np.int32]:
    """For each key the `count` others with the largest inner product, best first, [n, count]; -1 fills up.

    Of more than some 100,000 keys only those in the same cells of a k-means partition, or in the nearest
    ones, are looked at: that finds nearly all, in a time that grows like n sqrt(n).

    Args:
        vectors: [n, d].
        asked: what the nearest are looked for of, [n, d], if not of the keys themselves.
        out: a directory where the lists are kept: what was interrupted goes on from there, and they are read
            from the file. AmipsError if it has lists of other keys.
    """
    n, asked = len(vectors), vectors if asked is None else asked
    wanted = min(count + 1, n)
    of = "" if out is None else _identity(vectors, asked, seed)
    with RowFiles(out, n, {"near": (np.int32, (count,))}, of) as files:
        first = files.done
        index = None if n <= EXACT_KEYS or first == n else _in_cells(vectors, seed)
        with Bar(n - first, "nearest keys", "keys", progress and first < n) as shown:
            for low in range(first, n, BLOCK):
                rows = asked[low : low + BLOCK]
                if index is None:
                    ids = exact.top_k(vectors, rows, wanted)[1]
                else:
                    ids = index.search(rows, wanted, params=faiss.SearchParametersIVF(nprobe=PROBES))[1]
                own = ids == np.arange(low, low + len(rows))[:, None]
                # The key itself goes, or the last if it is not there (equal keys may come first).
                own[~own.any(axis=1), -1] = True
                near = np.full((len(rows), count), -1, np.int32)
                near[:, : wanted - 1] = ids[~own].reshape(len(rows), wanted - 1)
                files.append({"near": near})
                files.commit()
                shown.update(len(rows))
        return files.finish()["near"]


def _identity(vectors: Floats, asked: Floats, seed: int) -> str:
    """What lists are of, and how they were found."""
    digest = hashlib.sha256(np.ascontiguousarray(vectors).data)
    if asked is not vectors:
        digest.update(np.ascontiguousarray(asked).data)
    how = "" if len(vectors) <= EXACT_KEYS else f" in {PROBES} cells, seed {seed}"
    return digest.hexdigest() + how


def _in_cells(vectors: Floats, seed: int) -> Any:
    """The keys by cell, for FAISS to scan."""
    cells = kmeans(vectors, default_count(len(vectors)), iterations=ITERATIONS, points=POINTS, seed=seed)
    quantizer = faiss.IndexFlatIP(vectors.shape[1])
    quantizer.add(cells.centroids)
    index = faiss.IndexIVFFlat(quantizer, vectors.shape[1], cells.count, faiss.METRIC_INNER_PRODUCT)
    index.is_trained = True
    rows, assignment = np.ascontiguousarray(vectors, np.float32), cells.assignment.astype(np.int64)
    index.add_core(len(rows), faiss.swig_ptr(rows), None, faiss.swig_ptr(assignment))
    return index
