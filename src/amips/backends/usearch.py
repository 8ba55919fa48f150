"""usearch: a graph over the keys (HNSW), searched greedily with a list of candidates."""

import threading
from pathlib import Path
from typing import Any

import numpy as np

from amips.backends.backend import Backend, BuildInputs, Ids, library
from amips.backends.hnsw import BUDGETS
from amips.blas import threads_allowed
from amips.errors import AmipsError, BundleError
from amips.search import Cost
from amips.vectors import Floats

INDEX = "index.usearch"


class USearch(Backend):
    """Settings: `links` of each key (connectivity), `construction` (expansion_add)."""

    title, budget, extra = "usearch", "expansion_search", "usearch"
    needs = ("usearch",)

    def __init__(self, index: Any) -> None:
        self.index, self.n, self.d = index, len(index), int(index.ndim)
        self._lock = threading.Lock()  # the expansion belongs to the index, not to the call

    @classmethod
    def settings(cls, n: int, d: int) -> dict[str, Any]:
        """As many links as FAISS's HNSW has here; the library's own expansion."""
        return {"links": 32, "construction": 128}

    @classmethod
    def make(cls, inputs: BuildInputs, directory: Path) -> list[str]:
        """Build the graph."""
        links, construction = inputs.settings["links"], inputs.settings["construction"]
        if links < 2:
            raise AmipsError(f"links={links}: expected at least 2")
        shape = {"ndim": inputs.keys.d, "connectivity": links, "expansion_add": construction}
        index = library(cls, "usearch.index").Index(metric="ip", dtype="f32", **shape)
        for start, block in inputs.keys.blocks():
            index.add(np.arange(start, start + len(block)), block, threads=threads_allowed())
        index.save(str(directory / INDEX))
        return [INDEX]

    @classmethod
    def open(
        cls, directory: Path, n: int, d: int, settings: dict[str, Any], address: str | None
    ) -> "USearch":
        """Read the graph."""
        try:
            return cls(library(cls, "usearch.index").Index.restore(str(directory / INDEX)))
        except (ValueError, RuntimeError):
            raise BundleError(f"{directory / INDEX} is not a readable usearch index") from None

    def budgets(self) -> list[int]:
        """Candidates kept while walking."""
        return list(BUDGETS)

    def find(self, x: Floats, k: int, budget: int) -> tuple[Floats, Ids]:
        """Walk the graph. The library keeps 1 - <x, y>, in 32 bits."""
        matches = self._walk(x, k, budget)
        if len(x) == 1:  # the library then gives one row, and only what it found
            ids, distances = matches.keys[None], matches.distances[None]
            return 1 - distances, ids.astype(np.int64)
        # Behind what was found there is anything: keys that were not, distances that are no numbers.
        missing = np.arange(k) >= matches.counts[:, None]
        ids = np.where(missing, -1, matches.keys.astype(np.int64))
        return 1 - np.where(missing, np.float32(np.inf), matches.distances), ids

    def find_cost(self, x: Floats, k: int, budget: int) -> Cost:
        """The library counts the distances it computes, for all queries of a call: so one call for each."""
        rows = range(len(x))
        counted = [self._walk(x[row : row + 1], k, budget).computed_distances for row in rows]
        scanned = np.array(counted, np.int64)
        return Cost(0, 0, 2 * self.d * scanned, scanned, np.zeros_like(scanned))

    def _walk(self, x: Floats, k: int, budget: int) -> Any:
        with self._lock:
            self.index.expansion_search = max(k, budget)
            return self.index.search(x, k, threads=threads_allowed())
