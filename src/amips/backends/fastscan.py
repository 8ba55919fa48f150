"""FAISS IVF with PQ FastScan codes and float32 refinement: what an expert would run.

Keys are kept by cell as product-quantised codes of 4 bits for each pair of dimensions, which FAISS scans from
registers; the best candidates are scored again with the float32 keys, so scores are true inner products.
"""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.backends.backend import Backend, BuildInputs, Ids, rungs
from amips.blas import faiss
from amips.cells import default_count, kmeans
from amips.errors import AmipsError, BundleError
from amips.index import scan_flops
from amips.routers import best_cells
from amips.search import Cost
from amips.vectors import Floats

INDEX = "index.faiss"


class FastScan(Backend):
    """Settings: `partitions` (cells), `refine`: candidates scored again for each result asked for."""

    title, budget = "FAISS IVF, PQ FastScan + refine", "probes"
    fewest = 16  # a code of 4 bits has as many values

    def __init__(self, index: Any, refine: int) -> None:
        self.index, self.refine = index, refine
        self.ivf = faiss.downcast_index(index.base_index)
        self.n, self.d = int(index.ntotal), int(index.d)

    @classmethod
    def settings(cls, n: int, d: int) -> dict[str, Any]:
        """As many cells as amips takes, ten candidates for each result."""
        return {"partitions": default_count(n), "refine": 10}

    @classmethod
    def make(cls, inputs: BuildInputs, directory: Path) -> list[str]:
        """Spherical k-means, then codes of half as many parts as there are dimensions."""
        keys, count = inputs.keys, inputs.settings["partitions"]
        if keys.n < cls.fewest:
            raise AmipsError(f"{cls.title} needs at least {cls.fewest} keys, got {keys.n}")
        if not 1 <= count <= keys.n:
            raise AmipsError(f"partitions={count}: expected 1 to the {keys.n} keys")
        quantizer = faiss.IndexFlatIP(keys.d)
        quantizer.add(kmeans(keys, count).centroids)
        parts = next(m for m in range(max(1, keys.d // 2), 0, -1) if keys.d % m == 0)
        ivf = faiss.IndexIVFPQFastScan(quantizer, keys.d, count, parts, 4, faiss.METRIC_INNER_PRODUCT)
        ivf.by_residual = False
        ivf.cp.min_points_per_centroid = ivf.pq.cp.min_points_per_centroid = 1
        index = faiss.IndexRefineFlat(ivf)
        most = min(keys.n, 1 << 16)
        index.train(keys.take(np.sort(np.random.default_rng(0).choice(keys.n, most, replace=False))))
        for _, block in keys.blocks():
            index.add(block)
        faiss.write_index(index, str(directory / INDEX))
        return [INDEX]

    @classmethod
    def open(
        cls, directory: Path, n: int, d: int, settings: dict[str, Any], address: str | None
    ) -> "FastScan":
        """Read the index."""
        try:
            return cls(faiss.read_index(str(directory / INDEX)), settings["refine"])
        except RuntimeError:
            raise BundleError(f"{directory / INDEX} is not a readable FAISS index") from None

    def budgets(self) -> list[int]:
        """Numbers of cells, up to all."""
        return rungs(int(self.ivf.nlist))

    def find(self, x: Floats, k: int, budget: int) -> tuple[Floats, Ids]:
        """FAISS's own search; the best candidates scored again with the float32 keys."""
        inner = faiss.SearchParametersIVF(nprobe=min(budget, int(self.ivf.nlist)))
        outer = faiss.IndexRefineSearchParameters(k_factor=float(self.refine), base_index_params=inner)
        scores, ids = self.index.search(x, k, params=outer)
        scores[ids < 0] = -np.inf
        # FAISS finds nothing for a query of zeros; all keys are equally good, and the lower ids come first.
        nothing = ~x.any(axis=1)
        scores[nothing], ids[nothing] = 0, np.arange(k)
        return scores, ids

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Keys in each cell."""
        return np.array([self.ivf.invlists.list_size(j) for j in range(self.ivf.nlist)], np.int64)

    @cached_property
    def centroids(self) -> Floats:
        """One vector for each cell."""
        rows: Floats = faiss.downcast_index(self.ivf.quantizer).reconstruct_n(0, self.ivf.nlist)
        return rows

    def find_cost(self, x: Floats, k: int, budget: int) -> Cost:
        """Coarse scores, one addition for each part of a code, a query's tables, candidates scored again."""
        cells = best_cells(x @ self.centroids.T, min(budget, len(self.sizes)))
        scanned = self.sizes[cells].sum(axis=1)
        scan = scan_flops("pq", scanned, self.d, k * self.refine, parts=int(self.ivf.pq.M))
        # The tables of 4-bit codes have 16 entries, not 256.
        scan = scan - 2 * (256 - 16) * self.d
        return Cost(0, 2 * self.centroids.size, scan, scanned, np.full(len(x), cells.shape[1]))
