"""FAISS's HNSW: a graph over the keys, searched greedily with a list of candidates."""

from pathlib import Path
from typing import Any

import numpy as np

from amips.backends.backend import Backend, BuildInputs, Ids
from amips.blas import faiss
from amips.blas import threads as limit_threads
from amips.errors import AmipsError, BundleError
from amips.search import Cost
from amips.vectors import Floats

INDEX = "index.faiss"
BUDGETS = (10, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


class HNSW(Backend):
    """Settings: `links` of each key (M), `construction` (efConstruction)."""

    title, budget = "HNSW", "efSearch"

    def __init__(self, index: Any) -> None:
        self.index, self.n, self.d = index, int(index.ntotal), int(index.d)

    @classmethod
    def settings(cls, n: int, d: int) -> dict[str, Any]:
        """32 links, efConstruction 80."""
        return {"links": 32, "construction": 80}

    @classmethod
    def make(cls, inputs: BuildInputs, directory: Path) -> list[str]:
        """Build the graph; with inner products as FAISS does it."""
        links = inputs.settings["links"]
        if links < 2:
            raise AmipsError(f"links={links}: expected at least 2")
        index = faiss.IndexHNSWFlat(inputs.keys.d, links, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = inputs.settings["construction"]
        for _, block in inputs.keys.blocks():
            index.add(block)
        faiss.write_index(index, str(directory / INDEX))
        return [INDEX]

    @classmethod
    def open(cls, directory: Path, n: int, d: int, settings: dict[str, Any], address: str | None) -> "HNSW":
        """Read the graph."""
        try:
            return cls(faiss.read_index(str(directory / INDEX)))
        except RuntimeError:
            raise BundleError(f"{directory / INDEX} is not a readable FAISS index") from None

    def budgets(self) -> list[int]:
        """Candidates kept while walking."""
        return list(BUDGETS)

    def find(self, x: Floats, k: int, budget: int) -> tuple[Floats, Ids]:
        """Walk the graph."""
        parameters = faiss.SearchParametersHNSW(efSearch=max(k, budget))
        scores, ids = self.index.search(x, k, params=parameters)
        scores[ids < 0] = -np.inf
        return scores, ids

    def find_cost(self, x: Floats, k: int, budget: int) -> Cost:
        """FAISS counts the distances it computes, for all queries of a call: so one call for each."""
        stats = faiss.cvar.hnsw_stats
        scanned = np.empty(len(x), np.int64)
        with limit_threads(1):
            for row in range(len(x)):
                stats.reset()
                self.find(x[row : row + 1], k, budget)
                scanned[row] = stats.ndis
        return Cost(0, 0, 2 * self.d * scanned, scanned, np.zeros_like(scanned))
