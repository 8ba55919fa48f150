"""The task: keys, cells, and queries split by source with their exact targets, on disk.

    task/
      task.json                     manifest, written last
      keys.npy                      float32 [n, d]
      cells.npy, centroids.npy      int32 [n], float32 [c, d]
      train/ val/ test/
        queries.npy                 float32 [m, d], the noisy copies included
        source.npy                  int64 [m], the row of the query in the log as it was given
        top/scores.npy, ids.npy     [m, k]: the top keys
        cells/scores.npy, ids.npy   [m, c]: the top key of each cell (only when c > 1)

The order matters: duplicates go first, then the log is split by source query, and only then are noisy
copies made. So no copy of a test query, however noisy, is ever trained on.
"""

import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips import cells as partition
from amips.errors import TaskError
from amips.files import read_manifest
from amips.vectors import Floats

MANIFEST = "task.json"
FORMAT = 1
SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Split:
    """One split of a task; every array is memory-mapped.

    `cell_scores` and `cell_ids` are [m, c], or [m, 0] in a task made without targets for each cell.
    """

    queries: Floats
    source: NDArray[np.int64]
    top_scores: Floats
    top_ids: NDArray[np.int32]
    cell_scores: Floats
    cell_ids: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.queries)


class Task:
    """A finished task directory. `Task(path)` checks the manifest, the sizes and the split."""

    def __init__(self, path: str | Path, verify: bool = False) -> None:
        self.path = Path(path)
        self.manifest = read_manifest(self.path, MANIFEST, "task", FORMAT, TaskError, verify)
        for field in ("n", "d", "c"):
            if not isinstance(self.manifest.get(field), int):
                raise TaskError(f"{self.path / MANIFEST} is damaged: it does not give {field}")
        self.has_cell_targets = self.c > 1 and "train/cells/ids.npy" in self.manifest["files"]
        if unlisted := [
            file for file in task_files(self.has_cell_targets) if file not in self.manifest["files"]
        ]:
            raise TaskError(f"{self.path / MANIFEST} is damaged: it does not list {unlisted[0]}")
        seen = np.concatenate([np.unique(getattr(self, split).source) for split in SPLITS])
        values, counts = np.unique(seen, return_counts=True)
        if (counts > 1).any():
            raise TaskError(f"{self.path}: source query {values[counts > 1][0]} is in two splits")

    def _load(self, name: str) -> NDArray[Any]:
        try:
            return np.lib.format.open_memmap(self.path / name, mode="r")
        except Exception as problem:  # a damaged header makes numpy raise nearly anything
            raise TaskError(f"{self.path / name} is damaged: {problem}") from None

    def _split(self, name: str) -> Split:
        top_scores, top_ids = self._load(f"{name}/top/scores.npy"), self._load(f"{name}/top/ids.npy")
        of_cells: tuple[NDArray[Any], NDArray[Any]] = (top_scores[:, :1], top_ids[:, :1])
        if self.has_cell_targets:
            of_cells = self._load(f"{name}/cells/scores.npy"), self._load(f"{name}/cells/ids.npy")
        elif self.c > 1:
            of_cells = top_scores[:, :0], top_ids[:, :0]
        return Split(
            self._load(f"{name}/queries.npy"),
            self._load(f"{name}/source.npy"),
            top_scores,
            top_ids,
            *of_cells,
        )

    @cached_property
    def keys(self) -> Floats:
        """float32 [n, d]."""
        return self._load("keys.npy")

    @cached_property
    def cells(self) -> partition.Cells:
        """The partition of the keys."""
        return partition.Cells(np.asarray(self._load("cells.npy")), np.asarray(self._load("centroids.npy")))

    @cached_property
    def train(self) -> Split:
        """The queries to learn from, with their noisy copies."""
        return self._split("train")

    @cached_property
    def val(self) -> Split:
        """The queries to choose by."""
        return self._split("val")

    @cached_property
    def test(self) -> Split:
        """The queries to report on, once."""
        return self._split("test")

    def with_cells(self, cells: partition.Cells) -> "Task":
        """The same keys, queries and top keys over another partition; without targets for each cell."""
        other = copy.copy(self)
        for split in SPLITS:  # as read with the targets of the old cells
            vars(other).pop(split, None)
        options = {**self.manifest["options"], "cells": partition.fingerprint_of(cells.assignment)}
        other.manifest = {**self.manifest, "c": cells.count, "options": options}
        other.has_cell_targets = False
        other.cells = cells
        return other

    @property
    def n(self) -> int:
        """The number of keys."""
        return int(self.manifest["n"])

    @property
    def d(self) -> int:
        """The dimension."""
        return int(self.manifest["d"])

    @property
    def c(self) -> int:
        """The number of cells."""
        return int(self.manifest["c"])

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the keys."""
        return str(self.manifest["keys"])

    def __repr__(self) -> str:
        sizes = ", ".join(f"{self.manifest['rows'][split]:,} {split}" for split in SPLITS)
        return f"<Task {self.path}: {self.n:,} keys, d = {self.d}, {self.c:,} cells; queries: {sizes}>"


def task_files(cell_targets: bool) -> list[str]:
    """Every file of a task but its manifest."""
    tables = ["queries.npy", "source.npy", "top/scores.npy", "top/ids.npy"]
    if cell_targets:
        tables += ["cells/scores.npy", "cells/ids.npy"]
    return ["keys.npy", "cells.npy", "centroids.npy", *(f"{split}/{t}" for split in SPLITS for t in tables)]
