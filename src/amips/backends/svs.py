"""Intel's LeanVec (scalable-vs): a graph over keys projected and in 8 bits, candidates scored in full.

On a processor that it does not know the library ends the process as soon as vectors are to be encoded. So it
is first tried in another one.
"""

import importlib.util
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from amips.backends.backend import BLOCK_BYTES, Backend, BuildInputs, Ids, library
from amips.backends.leanvec import KEYS
from amips.blas import threads_allowed
from amips.errors import AmipsError
from amips.index import score_candidates
from amips.vectors import Floats

FOLDERS = ("config", "graph", "data")
BUDGETS = (10, 14, 20, 28, 40, 56, 80, 113, 160, 226, 320, 452, 640)
LEARN_FROM = 100_000  # keys, as the library advises
TRIAL_SECONDS = 120.0
# As `make` does it: what ends the process is the code of the codes, not that of the graph.
TRIAL = """
import tempfile
import numpy as np, svs
rows = np.random.default_rng(0).standard_normal((200, 16)).astype(np.float32)
with tempfile.TemporaryDirectory() as place:
    svs.write_vecs(rows, place + "/rows.fvecs")
    data = svs.VectorDataLoader(place + "/rows.fvecs", svs.DataType.float32, 16)
    kinds = {"primary_kind": svs.LeanVecKind.lvq8, "secondary_kind": svs.LeanVecKind.float16}
    loader = svs.LeanVecLoader(data, 8, **kinds)
    shape = svs.VamanaBuildParameters(alpha=0.95, graph_max_degree=32, window_size=128)
    index = svs.Vamana.build(shape, loader, svs.DistanceType.MIP, num_threads=1)
    index.search(rows[:1], 1)
"""


@cache
def runs_here() -> bool:
    """Whether the library works on this processor; one that gives no answer in two minutes does not."""
    command = [sys.executable, "-c", TRIAL]
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=TRIAL_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


class SVS(Backend):
    """Settings.

    `dimensions` of the projection, `degree` of the graph, `construction`: its window while building.
    """

    title, budget, extra = "LeanVec (Intel)", "search window", "svs"
    needs, learns = ("svs",), True

    def __init__(self, index: Any, keys: Floats) -> None:
        self.index, self.keys = index, keys
        self.n, self.d = keys.shape
        self._lock = threading.Lock()  # the window belongs to the index, not to the call

    @classmethod
    def settings(cls, n: int, d: int) -> dict[str, Any]:
        """Half of the dimensions; the degree that was fastest of those measured."""
        return {"dimensions": max(1, d // 2), "degree": 64, "construction": 128}

    @classmethod
    def require(cls) -> None:
        """AmipsError unless the library is here and runs on this processor."""
        if importlib.util.find_spec("svs") is not None and not runs_here():
            raise AmipsError("scalable-vs does not run on this processor; take the backend 'leanvec'")
        super().require()

    @classmethod
    def make(cls, inputs: BuildInputs, directory: Path) -> list[str]:
        """Learn the projections (PCA without queries), build the graph."""
        svs, o, keys = library(cls, "svs"), inputs.settings, inputs.keys.load()
        if not 1 <= o["dimensions"] <= inputs.keys.d:
            raise AmipsError(f"dimensions={o['dimensions']}: expected 1 to {inputs.keys.d}")
        np.save(directory / KEYS, keys)
        matrices = {}
        if inputs.queries is not None:
            drawn = np.random.default_rng(0).permutation(len(keys))[:LEARN_FROM]
            of_keys, of_queries = svs.compute_leanvec_matrices(
                keys[drawn], inputs.queries.load(), o["dimensions"]
            )
            matrices = {"data_matrix": of_keys, "query_matrix": of_queries}
        rows = directory / "keys.fvecs"  # the only way in for the library
        svs.write_vecs(keys, str(rows))
        kinds = {"primary_kind": svs.LeanVecKind.lvq8, "secondary_kind": svs.LeanVecKind.float16}
        data = svs.VectorDataLoader(str(rows), svs.DataType.float32, inputs.keys.d)
        loader = svs.LeanVecLoader(data, o["dimensions"], **kinds, **matrices)
        shape = svs.VamanaBuildParameters(
            alpha=0.95, graph_max_degree=o["degree"], window_size=o["construction"]
        )
        index = svs.Vamana.build(shape, loader, svs.DistanceType.MIP, num_threads=threads_allowed())
        index.save(*(str(directory / folder) for folder in FOLDERS))
        rows.unlink()
        files = [path for folder in FOLDERS for path in sorted((directory / folder).iterdir())]
        return [KEYS, *(str(path.relative_to(directory)) for path in files)]

    @classmethod
    def open(cls, directory: Path, n: int, d: int, settings: dict[str, Any], address: str | None) -> "SVS":
        """Read the graph; the full keys stay in their file."""
        svs = library(cls, "svs")
        config, graph, data = (str(directory / folder) for folder in FOLDERS)
        index = svs.Vamana(config, svs.GraphLoader(graph), svs.LeanVecLoader(data), svs.DistanceType.MIP)
        return cls(index, np.load(directory / KEYS, mmap_mode="r"))

    def budgets(self) -> list[int]:
        """Candidates kept while walking."""
        return list(BUDGETS)

    def find(self, x: Floats, k: int, budget: int) -> tuple[Floats, Ids]:
        """Walk the graph in the reduced space; the library orders what it found by full vectors of 16 bits.

        Scoring with the keys makes these scores true.
        """
        with self._lock:
            self.index.num_threads = threads_allowed()
            self.index.search_window_size = max(k, budget)
            candidates = self.index.search(x, k)[0].astype(np.int64)
        candidates[candidates >= self.n] = -1  # what it fills up with, as an unsigned number
        return score_candidates(self.keys.__getitem__, x, candidates, k, BLOCK_BYTES)
