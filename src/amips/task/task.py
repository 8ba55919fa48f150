"""What a task is: keys, cells, and split queries with their exact targets, in memory."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips import cells as partition
from amips.task.content import TaskContent
from amips.vectors import Floats, Vectors

SPLITS = ("train", "val", "test")
BY_SOURCE, BY_ROWS, BY_TIME = "source", "rows", "time"  # ways to split the queries


@dataclass(frozen=True)
class Split:
    """One split of a task; arrays may be memory-mapped.

    Args:
        vectors: the queries, [m, d], noisy copies included.
        source: [m], the row of the query in the log as it was given.
        top_scores, top_ids: [m, k], the top keys, best first.
        cell_scores, cell_ids: [m, c], the top key of each cell, or [m, 0] where that was not looked for.
    """

    vectors: Vectors
    source: NDArray[np.int64]
    top_scores: Floats
    top_ids: NDArray[np.int32]
    cell_scores: Floats
    cell_ids: NDArray[np.int32]

    def __len__(self) -> int:
        return self.vectors.n

    @property
    def queries(self) -> Floats:
        """The queries as an array, [m, d]."""
        assert self.vectors.array is not None
        return self.vectors.array


@dataclass(frozen=True)
class Task:
    """Keys, a partition of them, and held-out and training queries with their exact targets.

    Args:
        path: where it was read from; for messages and for names of what is made of it.
        key_vectors: the keys, [n, d].
        cells: the partition of the keys.
        train, val, test: queries to learn from, to choose by, and to report on, once.
        fingerprint: SHA-256 of the keys.
        options: what it was made with, as `label` was told.
        facts: what was noticed: `unit_norm`, `duplicate_queries`.
        content: the files behind it; None for a task that was put together in memory.
    """

    path: Path
    key_vectors: Vectors
    cells: partition.Cells
    train: Split
    val: Split
    test: Split
    fingerprint: str
    options: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    content: TaskContent | None = field(default=None, repr=False, compare=False)

    def verify(self) -> None:
        """Read every file that has not been read since it was opened; TaskError if one has changed.

        What is built or trained is known by the fingerprint of the keys: whoever does so calls this first.
        """
        if self.content is not None:
            self.content.verify()

    @property
    def keys(self) -> Floats:
        """The keys as an array, [n, d]."""
        assert self.key_vectors.array is not None
        return self.key_vectors.array

    @property
    def n(self) -> int:
        """The number of keys."""
        return self.key_vectors.n

    @property
    def d(self) -> int:
        """The dimension."""
        return self.key_vectors.d

    @property
    def c(self) -> int:
        """The number of cells."""
        return self.cells.count

    @property
    def fingerprints(self) -> dict[str, str]:
        """What a model trained on it is good for: the keys, which is in which cell, what decides that."""
        return {
            "keys": self.fingerprint,
            "cells": partition.fingerprint_of(self.cells.assignment),
            "quantizer": self.cells.quantizer_fingerprint,
        }

    @property
    def shares_sources(self) -> bool:
        """Whether held-out rows have relatives in train: noisy copies of one query (`split="rows"`)."""
        return self.options.get("split") == BY_ROWS

    @property
    def by_time(self) -> bool:
        """Whether held-out rows are the last of the log, and what comes again was kept (`split="time"`)."""
        return self.options.get("split") == BY_TIME

    @property
    def has_cell_targets(self) -> bool:
        """Whether the top key of every cell is known; of one cell it is the top key."""
        return bool(self.train.cell_ids.shape[1] == self.c > 1)

    @property
    def query_aware(self) -> float | None:
        """How strongly its cells follow the queries; None if they were given by hand."""
        known = isinstance(self.options.get("cells"), int) and self.options.get("spherical", True)
        return (
            float(self.options.get("query_aware", 0.0))
            if known and self.options.get("runs", 1) == 1
            else None
        )

    def with_cells(self, cells: partition.Cells) -> "Task":
        """The same keys, queries and top keys over another partition; without targets for each cell."""
        options = {**self.options, "cells": partition.fingerprint_of(cells.assignment)}
        width = 1 if cells.count == 1 else 0

        def without_targets(split: Split) -> Split:
            scores, ids = split.top_scores[:, :width], split.top_ids[:, :width]
            return replace(split, cell_scores=scores, cell_ids=ids)

        train, val, test = (without_targets(split) for split in (self.train, self.val, self.test))
        return replace(self, cells=cells, options=options, train=train, val=val, test=test)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{len(getattr(self, split)):,} {split}" for split in SPLITS)
        shared = "; held-out rows have relatives in train" if self.shares_sources else ""
        shared = "; held-out rows are the last of the log" if self.by_time else shared
        cells = f"{self.n:,} keys, d = {self.d}, {self.c:,} cells"
        return f"<Task {self.path}: {cells}; queries: {sizes}{shared}>"
