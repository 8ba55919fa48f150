"""Engines whose cells can be addressed: they search by themselves, or scan the cells they are told to.

Such an engine is also an `amips.index.Engine`: `Searcher(engine, model)` routes it with any model.
"""

from abc import abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.cells import Cells, kmeans
from amips.engines.finder import Finder, Given, Ids
from amips.errors import AmipsError, BundleError
from amips.vectors import Floats

ASSIGNMENT, CENTROIDS = "assignment.npy", "centroids.npy"
CELLS = 4.0  # when none are given, in units of sqrt(n)
KEYS_PER_CELL = 4  # ... and at least so many keys in each, on average


class Celled(Finder):
    """What a directory with cells gives; `scan`, `score_again` and `scan_flops` are the engine's own."""

    celled = True
    refine = 1
    second = None
    directory: Path

    @cached_property
    def assignment(self) -> NDArray[np.int32]:
        """The cell of each key."""
        cells: NDArray[np.int32] = _read(self.directory / ASSIGNMENT)
        return cells

    @cached_property
    def centroids(self) -> Floats:
        """One vector for each cell."""
        rows: Floats = _read(self.directory / CENTROIDS)
        return rows

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Keys in each cell."""
        return np.bincount(self.assignment, minlength=len(self.centroids)).astype(np.int64)

    @property
    def storage(self) -> str:
        """The engine."""
        return self.title

    @abstractmethod
    def scan(self, x: Floats, cells: Ids, k: int) -> tuple[Floats, Ids]:
        """The k best keys by <x, y> within cells [m, p]; -1 skips."""

    @abstractmethod
    def score_again(self, x: Floats, candidates: Ids, k: int) -> tuple[Floats, Ids]:
        """True inner products of the candidates [m, r] (-1 skips), and the k best of them."""

    def scan_flops(self, keys: Ids, k: int) -> Ids:
        """FLOPs for scanning so many keys, for each query."""
        return 2 * self.d * keys

    def save(self, directory: Path) -> list[str]:
        """Not into a bundle."""
        raise AmipsError(f"{self.title} keeps its keys in {self.directory}; a bundle cannot hold them")


def write_cells(given: Given, directory: Path) -> tuple[Cells, list[str]]:
    """The cells that were given, or spherical k-means, and the files they are kept in."""
    n = given.keys.n
    count = max(1, min(round(CELLS * n**0.5), n // KEYS_PER_CELL))
    cells = kmeans(given.keys, count) if given.cells is None else given.cells
    np.save(directory / ASSIGNMENT, np.asarray(cells.assignment, np.int32))
    np.save(directory / CENTROIDS, np.asarray(cells.centroids, np.float32))
    return cells, [ASSIGNMENT, CENTROIDS]


def _read(path: Path) -> NDArray[Any]:
    try:
        rows: NDArray[Any] = np.load(path, allow_pickle=False)
        return rows
    except (ValueError, EOFError, OSError) as problem:
        raise BundleError(f"{path} is damaged: {problem}") from None
