"""Backends whose cells can be addressed: they search by themselves, or scan the cells that amips chooses.

Such a backend is also an `amips.index.CellStore`: `Searcher(backend, model)` routes it with any model.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.backends.backend import Backend, BuildInputs, Ids, Row, from_rows
from amips.cells import Cells, default_count, kmeans
from amips.errors import AmipsError, BundleError
from amips.vectors import Floats, Vectors

ASSIGNMENT, CENTROIDS = "assignment.npy", "centroids.npy"

ROWS_AT_ONCE = 4096


class RoutableBackend(Backend):
    """What a directory with cells gives; `scan`, `score_again` and `scan_flops` are the backend's own."""

    routable = True
    refine = 1
    second = None

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
        """What the keys are kept in: the name of the backend."""
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
        """AmipsError: a bundle cannot hold the keys of a backend."""
        raise AmipsError(f"{self.title} keeps its keys in {self.directory}; a bundle cannot hold them")


class TableBackend(RoutableBackend):
    """A database with a table of keys; `id` and `cell` are columns, and conditions of an exact search.

    Of equal keys the lower id comes first; which of them are left out after the k-th is up to the database.
    """

    def scan(self, x: Floats, cells: Ids, k: int) -> tuple[Floats, Ids]:
        """The k best keys within cells [m, p]; -1 skips. Every key of them is looked at."""
        return self._each("cell", x, cells, k)

    def score_again(self, x: Floats, candidates: Ids, k: int) -> tuple[Floats, Ids]:
        """True inner products of the candidates [m, r] (-1 skips), and the k best of them."""
        return self._each("id", x, candidates, k)

    @abstractmethod
    def among(self, column: str, values: list[int], x: Floats, k: int) -> Row:
        """The k best keys by <x, y>, for one x, of those whose `column` is among the values; at least one."""

    def _each(self, column: str, x: Floats, values: Ids, k: int) -> tuple[Floats, Ids]:
        """One request for each query: each has a condition of its own."""
        rows: list[Row] = []
        for query, some in zip(x, values, strict=True):
            wanted = some[some >= 0].tolist()
            rows.append(self.among(column, wanted, query, k) if wanted else ([], []))
        return from_rows(rows, k)


def write_cells(inputs: BuildInputs, directory: Path) -> tuple[Cells, list[str]]:
    """The cells that were given, or spherical k-means, and the files they are kept in."""
    cells = inputs.cells
    if cells is None:
        cells = kmeans(inputs.keys, default_count(inputs.keys.n))
    np.save(directory / ASSIGNMENT, np.asarray(cells.assignment, np.int32))
    np.save(directory / CENTROIDS, np.asarray(cells.centroids, np.float32))
    return cells, [ASSIGNMENT, CENTROIDS]


def by_cell(keys: Vectors, cells: Cells) -> Iterator[tuple[Ids, NDArray[np.int32], Floats]]:
    """Blocks of (ids, cells, keys) in the order of the cells: a cell is then read from one place."""
    order = np.argsort(cells.assignment, kind="stable")
    for low in range(0, keys.n, ROWS_AT_ONCE):
        ids = order[low : low + ROWS_AT_ONCE]
        yield ids, np.asarray(cells.assignment[ids], np.int32), keys.take(ids)


def plain_name(table: Any) -> str:
    """The name of a table as it was given, if it can stand in a request as it is."""
    if not isinstance(table, str) or not table.isidentifier():
        raise AmipsError(f"table={table!r}: expected a plain name")
    return table


@contextmanager
def undone_by(drop: Callable[[], Any]) -> Iterator[None]:
    """Drop what was made on a server if not all of it can be, or whoever waits for it interrupts."""
    try:
        yield
    except BaseException:
        with suppress(Exception):  # the server may be gone; what happened first is what is raised
            drop()
        raise


def _read(path: Path) -> NDArray[Any]:
    try:
        rows: NDArray[Any] = np.load(path, allow_pickle=False)
        return rows
    except (ValueError, EOFError, OSError) as problem:
        raise BundleError(f"{path} is damaged: {problem}") from None
