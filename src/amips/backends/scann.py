"""ScaNN: a tree of leaves, codes with an anisotropic loss in them, and a final scoring with the keys.

SOAR is the same with every key in two leaves, the second chosen so that its error is orthogonal to that of
the first. Leaves cannot be given from outside, so there is no routing; and ScaNN does not tell what it
looked at, so there is only time.
"""

import threading
from pathlib import Path
from typing import Any

import numpy as np

from amips.backends.backend import Backend, BuildInputs, Ids, library, one_line, rungs
from amips.blas import threads_allowed
from amips.cells import default_count
from amips.errors import AmipsError, BundleError
from amips.vectors import Floats

FOLDER = "scann"
FEWEST = 64  # keys; with fewer there is nothing to train codes on, and all are scored


class ScaNN(Backend):
    """Settings.

    `leaves`, `dimensions` of a block that one code stands for, `threshold` of the anisotropic loss, `refine`:
    candidates scored with the keys for each result asked for.
    """

    title, budget, extra = "ScaNN", "leaves searched", "scann"
    needs = ("scann",)

    def __init__(self, searcher: Any, n: int, d: int, settings: dict[str, Any]) -> None:
        self.searcher, self.n, self.d, self._settings = searcher, n, d, settings
        self._lock = threading.Lock()  # the threads belong to the index, not to the call
        self._threads = 0  # not known

    @classmethod
    def settings(cls, n: int, d: int) -> dict[str, Any]:
        """2 sqrt(n) leaves of 16 keys or more, and as ScaNN's authors advise."""
        leaves = default_count(n, 2.0, fewest=16)
        return {"leaves": leaves, "dimensions": 2, "threshold": 0.2, "refine": 10}

    @classmethod
    def make(cls, inputs: BuildInputs, directory: Path) -> list[str]:
        """Train the tree and the codes, encode the keys, and write the folder `scann`."""
        scann, o, n = library(cls, "scann"), inputs.settings, inputs.keys.n
        if not 1 <= o["leaves"] <= n:
            raise AmipsError(f"leaves={o['leaves']}: expected 1 to the {n} keys")
        builder = scann.scann_ops_pybind.builder(inputs.keys.load(), 10, "dot_product")
        if n < FEWEST:
            searcher = builder.score_brute_force().build()
        else:
            tree = {"num_leaves": o["leaves"], "num_leaves_to_search": max(1, o["leaves"] // 10)}
            tree |= {name: o[name] for name in ("soar_lambda", "overretrieve_factor") if name in o}
            builder = builder.tree(training_sample_size=min(n, 250_000), **tree)
            codes = builder.score_ah(o["dimensions"], anisotropic_quantization_threshold=o["threshold"])
            searcher = codes.reorder(100).build()
        folder = directory / FOLDER
        folder.mkdir()
        searcher.serialize(str(folder), relative_path=True)
        return [f"{FOLDER}/{path.name}" for path in sorted(folder.iterdir())]

    @classmethod
    def open(cls, directory: Path, n: int, d: int, settings: dict[str, Any], address: str | None) -> "ScaNN":
        """Read what `make` wrote."""
        scann, folder = library(cls, "scann"), directory / FOLDER
        with one_line(f"{folder} is not a readable ScaNN index", RuntimeError, error=BundleError):
            searcher = scann.scann_ops_pybind.load_searcher(str(folder))
        return cls(searcher, n, d, settings)

    def budgets(self) -> list[int]:
        """Numbers of leaves, up to all."""
        return rungs(self._settings["leaves"] if self.n >= FEWEST else 1)

    def find(self, x: Floats, k: int, budget: int) -> tuple[Floats, Ids]:
        """Search leaves, score codes, score the best again."""
        counts = {"final_num_neighbors": k}
        if self.n >= FEWEST:
            counts["pre_reorder_num_neighbors"] = min(k * self._settings["refine"], self.n)
            counts["leaves_to_search"] = min(budget, self._settings["leaves"])
        allowed = threads_allowed()
        if len(x) > 1 and allowed > 1:
            with self._lock:
                if self._threads != allowed:  # which makes them anew
                    self.searcher.set_num_threads(allowed)
                    self._threads = allowed
                numbers, scores = self.searcher.search_batched_parallel(x, **counts)
        else:
            numbers, scores = self.searcher.search_batched(x, **counts)
        # Where leaves hold too few keys, ScaNN fills up with scores that are not numbers.
        missing = np.isnan(scores)
        ids = np.where(missing, -1, numbers.astype(np.int64))
        return np.where(missing, np.float32(-np.inf), scores), ids


class SOAR(ScaNN):
    """Settings: those of ScaNN, `soar_lambda` (the weight of orthogonality), `overretrieve_factor`."""

    title = "SOAR"

    @classmethod
    def settings(cls, n: int, d: int) -> dict[str, Any]:
        """As ScaNN's authors advise."""
        return {**super().settings(n, d), "soar_lambda": 1.5, "overretrieve_factor": 2.0}
