"""LoRANN: cells whose keys are scored by a regression of low rank, in 8 bits, and the best again in float32.

The projection and the regression of each cell are learned from queries (Jääsaari, Hyvönen and Roos, 2024). A
cell learns from them where at least as many are near it as it has keys, from its keys otherwise. The library
does not tell what it looked at, so there is only time.
"""

from pathlib import Path
from typing import Any

import numpy as np

from amips.arguments import check_whole
from amips.backends.backend import (
    MANIFEST,
    Backend,
    BuildInputs,
    Ids,
    library,
    one_line,
    rungs,
)
from amips.backends.symphonyqg import widened
from amips.blas import threads_allowed
from amips.cells import default_count
from amips.errors import AmipsError, BundleError
from amips.files import check_file, read_json
from amips.vectors import Floats

INDEX, LOST, LOST_KEYS = "index.lorann", "lost.npy", "lost-keys.npy"
MOST_LOST = 1024  # keys that the library does not find, and that are scored with every query instead
NARROWEST = 64  # dimensions that the library takes
LANES = 32  # reduced dimensions are multiples of it
REDUCED_FROM = 200  # dimensions: below, the library's authors advise to keep all
REFINE = 10  # candidates scored with the keys for each result,
REFINE_CELL = 4  # ... and at least so many for each cell


class LoRANN(Backend):
    """Settings: `partitions` (cells), `dimensions` queries are reduced to, `rank` of the regressions."""

    title, budget, extra = "LoRANN", "clusters searched", "lorann"
    needs, learns = ("lorann",), True

    def __init__(self, index: Any, lost: Ids, lost_keys: Floats) -> None:
        self.index, self.n, self.d = index, int(index.n_samples), int(lost_keys.shape[1])
        self.lost, self.lost_keys = lost, lost_keys  # ids and keys that the library does not find

    @classmethod
    def settings(cls, n: int, d: int) -> dict[str, Any]:
        """1.6 sqrt(n) cells of 64 keys or more; half of the dimensions, all where they are few."""
        width = max(d, NARROWEST)
        reduced = round(width / 2 / LANES) if width >= REDUCED_FROM else width // LANES
        return {"partitions": default_count(n, 1.6, fewest=64), "dimensions": reduced * LANES, "rank": 32}

    @classmethod
    def make(cls, inputs: BuildInputs, directory: Path) -> list[str]:
        """Learn the projection, the cells and their regressions; without queries from the keys."""
        lorann, o, keys = library(cls, "lorann"), inputs.settings, inputs.keys
        width = max(keys.d, NARROWEST)
        partitions, dimensions = (check_whole(name, o[name], 1) for name in ("partitions", "dimensions"))
        if partitions > keys.n:
            raise AmipsError(f"partitions={partitions}: expected 1 to the {keys.n} keys")
        if dimensions % LANES or dimensions > width:
            raise AmipsError(f"dimensions={dimensions}: expected a multiple of {LANES}, at most {width}")
        queries = None if inputs.queries is None else widened(inputs.queries.load(), NARROWEST)
        if queries is not None and not queries.any():
            raise AmipsError("queries are all zero: there is nothing to learn a projection from")
        shape = {"n_clusters": partitions, "global_dim": dimensions, "quantization_bits": 8}
        shape |= {"rank": check_whole("rank", o["rank"], 1), "distance": lorann.IP}
        with one_line(cls.title, ValueError, RuntimeError):
            index = lorann.LorannIndex(widened(keys.load(), NARROWEST), **shape)
            index.build(training_queries=queries, n_threads=threads_allowed())
        index.save(str(directory / INDEX))
        lost = _without_score(index, keys.d)
        if len(lost) > MOST_LOST:
            raise AmipsError(
                f"{cls.title} cannot score {len(lost)} of the keys: they are zero, or too much alike"
            )
        np.save(directory / LOST, lost)
        np.save(directory / LOST_KEYS, keys.take(lost))
        return [INDEX, LOST, LOST_KEYS]

    @classmethod
    def open(cls, directory: Path, n: int, d: int, settings: dict[str, Any], address: str | None) -> "LoRANN":
        """Read the index, which holds the keys.

        Hashes of the files are checked: of one with other content the library ends the process.
        """
        files = read_json(directory / MANIFEST, BundleError)["files"]
        for file in (INDEX, LOST, LOST_KEYS):
            if file not in files:
                raise BundleError(f"{directory / MANIFEST} is damaged: it does not list {file}")
            check_file(directory, file, files[file], BundleError)
        with one_line(f"{directory} is not readable", OSError, ValueError, EOFError, error=BundleError):
            index = library(cls, "lorann").LorannIndex.load(str(directory / INDEX))
            lost, lost_keys = np.load(directory / LOST), np.load(directory / LOST_KEYS)
        if lost.ndim != 1 or lost_keys.shape != (len(lost), d) or not ((lost >= 0) & (lost < n)).all():
            raise BundleError(f"{directory / LOST_KEYS} is damaged: shape {list(lost_keys.shape)}")
        return cls(index, lost, lost_keys)

    def budgets(self) -> list[int]:
        """Numbers of cells, up to all."""
        return rungs(int(self.index.n_clusters))

    def find(self, x: Floats, k: int, budget: int) -> tuple[Floats, Ids]:
        """Search cells, score the best candidates with the keys; several threads may at once.

        The library is asked for two results or more: for one it ends the process where all cells searched are
        empty. And for no more cells than there are: it would search one of them again.
        """
        cells, width = min(budget, int(self.index.n_clusters)), max(k, 2)
        refined, threads = max(REFINE * k, REFINE_CELL * cells), threads_allowed()
        numbers, distances = self.index.search(widened(x, NARROWEST), width, cells, refined, True, threads)
        scores, ids = (-distances).astype(np.float32), numbers.astype(np.int64)
        if len(self.lost):
            scores = np.where(np.isin(ids, self.lost), np.float32(-np.inf), scores)
            ids = np.hstack([np.where(np.isneginf(scores), -1, ids), np.tile(self.lost, (len(x), 1))])
            scores = np.hstack([scores, x @ self.lost_keys.T])
        if (scores[:, 1:] > scores[:, :-1]).any():  # cells that hold no more than k are given as they are
            order = np.argsort(-scores, axis=1, kind="stable")
            scores, ids = np.take_along_axis(scores, order, 1), np.take_along_axis(ids, order, 1)
        return scores[:, :k], ids[:, :k]


def _without_score(index: Any, d: int) -> Ids:
    """The ids of keys whose score in the regression of their cell is no number.

    The only key of a cell has none, nor have most keys that are zero: the library divides 0 by 0. It finds
    them only where all candidates are scored again. Asked to score none again, it gives every key's score.
    """
    query = widened(np.random.default_rng(0).standard_normal((1, d)).astype(np.float32), NARROWEST)
    ids, scores = index.search(query, index.n_samples, index.n_clusters, 0, True, 1)
    return np.sort(ids[np.isnan(scores)]).astype(np.int64)
