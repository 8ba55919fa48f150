"""LeanVec on FAISS: inner products in fewer dimensions, learned from keys and queries, then full ones.

Keys y and queries x are projected, y -> B y and x -> A x with r of d dimensions, so that <A x, B y> is near
<x, y> for the queries that are asked (LeanVec-OOD: Tepper et al., 2023); A and B have a closed form, which is
in `amips.lean`. Without queries the keys stand for them, and it is PCA of the keys (about zero).

Keys are kept by cell in r dimensions (FAISS IVF); the best candidates found there are scored in full.
"""

from pathlib import Path
from typing import Any

import numpy as np

from amips.backends.backend import BLOCK_BYTES, BuildInputs, Ids, rungs
from amips.backends.routable import RoutableBackend, write_cells
from amips.errors import AmipsError
from amips.index import FaissCellStore, score_candidates
from amips.lean import learn_projection
from amips.routers import best_cells
from amips.search import Cost
from amips.vectors import Floats

KEYS, OF_QUERIES, OF_KEYS = "keys.npy", "query-projection.npy", "key-projection.npy"
INNER = "reduced"  # the folder of the projected keys by cell


class LeanVec(RoutableBackend):
    """Settings: `dimensions` r, `refine`: candidates scored in full for each result asked for."""

    title, budget, learns = "LeanVec", "probes", True

    def __init__(
        self, directory: Path, inner: FaissCellStore, of_queries: Floats, keys: Floats, refine: int
    ) -> None:
        self.directory, self.inner, self.of_queries, self.keys = directory, inner, of_queries, keys
        self.refine = refine
        self.n, self.d = keys.shape

    @classmethod
    def settings(cls, n: int, d: int) -> dict[str, Any]:
        """Half of the dimensions."""
        return {"dimensions": max(1, d // 2), "refine": 10}

    @classmethod
    def make(cls, inputs: BuildInputs, directory: Path) -> list[str]:
        """Learn the projections and keep the projected keys by cell."""
        keys, r = inputs.keys, inputs.settings["dimensions"]
        if not 1 <= r <= keys.d:
            raise AmipsError(f"dimensions={r}: expected 1 to {keys.d}")
        if inputs.queries is not None and not any(block.any() for _, block in inputs.queries.blocks()):
            raise AmipsError("queries are all zero: there is nothing to learn a projection from")
        cells, files = write_cells(inputs, directory)
        projection = learn_projection(keys, keys if inputs.queries is None else inputs.queries, r)
        np.save(directory / OF_QUERIES, projection.queries)
        np.save(directory / OF_KEYS, projection.keys)
        full = np.lib.format.open_memmap(directory / KEYS, "w+", np.float32, (keys.n, keys.d))
        for start, block in keys.blocks():
            full[start : start + len(block)] = block
        full.flush()
        centroids = np.ascontiguousarray(cells.centroids @ projection.keys.T)
        inner = FaissCellStore.build(projection.of_keys(keys), cells.assignment, centroids, "flat")
        (directory / INNER).mkdir()
        parts = [f"{INNER}/{name}" for name in inner.save(directory / INNER)]
        return [*files, OF_QUERIES, OF_KEYS, KEYS, *parts]

    @classmethod
    def open(
        cls, directory: Path, n: int, d: int, settings: dict[str, Any], address: str | None
    ) -> "LeanVec":
        """Read the index; the full keys stay in their file."""
        inner = FaissCellStore.load(directory / INNER, "flat", mmap=False)
        keys = np.load(directory / KEYS, mmap_mode="r")
        return cls(directory, inner, np.load(directory / OF_QUERIES), keys, settings["refine"])

    def budgets(self) -> list[int]:
        """Numbers of cells, up to all."""
        return rungs(len(self.inner.sizes))

    def find(self, x: Floats, k: int, budget: int) -> tuple[Floats, Ids]:
        """Choose cells and candidates in r dimensions; score these in full."""
        reduced = x @ self.of_queries.T
        return self._scan(x, reduced, self._cells(reduced, budget), k)

    def scan(self, x: Floats, cells: Ids, k: int) -> tuple[Floats, Ids]:
        """The same within cells [m, p] that were chosen elsewhere; -1 skips."""
        return self._scan(x, x @ self.of_queries.T, cells, k)

    def score_again(self, x: Floats, candidates: Ids, k: int) -> tuple[Floats, Ids]:
        """True inner products of the candidates [m, r] (-1 skips), and the k best of them."""
        return score_candidates(self.keys.__getitem__, x, candidates, k, BLOCK_BYTES)

    def scan_flops(self, keys: Ids, k: int) -> Ids:
        """The query's projection, 2 r for each key scanned, 2 d for each candidate scored in full."""
        r = len(self.of_queries)
        return np.asarray(2 * self.d * r + 2 * r * keys + 2 * self.d * np.minimum(keys, k * self.refine))

    def find_cost(self, x: Floats, k: int, budget: int) -> Cost:
        """Coarse scores, then `scan_flops`."""
        cells = self._cells(x @ self.of_queries.T, budget)
        scanned, probed = self.sizes[cells].sum(axis=1), np.full(len(x), cells.shape[1])
        return Cost(0, 2 * self.inner.centroids.size, self.scan_flops(scanned, k), scanned, probed)

    def _cells(self, reduced: Floats, budget: int) -> Ids:
        return best_cells(reduced @ self.inner.centroids.T, budget)

    def _scan(self, x: Floats, reduced: Floats, cells: Ids, k: int) -> tuple[Floats, Ids]:
        candidates = self.inner.scan(reduced, cells, min(k * self.refine, self.n))[1]
        return self.score_again(x, candidates, k)
