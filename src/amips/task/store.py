"""A task on disk: the only module that knows the files of a task directory.

    task/
      task.json                     manifest, written last
      keys.npy                      float32 [n, d]
      cells.npy, centroids.npy      int32 [n], float32 [c, d]
      train/ val/ test/
        queries.npy                 float32 [m, d], the noisy copies included
        source.npy                  int64 [m], the row of the query in the log as it was given
        top/scores.npy, ids.npy     [m, k]: the top keys
        cells/scores.npy, ids.npy   [m, c]: the top key of each cell (only when asked for)

While it is being made, `plan.json` says of what, and journals how far it has come: the same call continues.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips import cells as partition
from amips.errors import TaskError
from amips.files import (
    begin_output,
    check_output,
    check_same,
    read_json,
    read_manifest,
    write_atomically,
    write_manifest,
)
from amips.rowfiles import JOURNAL, RowFiles
from amips.task.task import SPLITS, Split, Task
from amips.vectors import Vectors, open_vectors

MANIFEST, PLAN = "task.json", "plan.json"
FORMAT = 1


class TaskStore:
    """A task directory: finished, being made, or not there yet."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def read(self, verify: bool = False) -> Task:
        """The finished task; checks the manifest, the sizes and that no source query is in two splits."""
        manifest = read_manifest(self.path, MANIFEST, "task", FORMAT, TaskError, verify)
        for field in ("n", "d", "c"):
            if not isinstance(manifest.get(field), int):
                raise TaskError(f"{self.path / MANIFEST} is damaged: it does not give {field}")
        c = int(manifest["c"])
        cell_targets = c > 1 and "train/cells/ids.npy" in manifest["files"]
        if unlisted := [file for file in task_files(cell_targets) if file not in manifest["files"]]:
            raise TaskError(f"{self.path / MANIFEST} is damaged: it does not list {unlisted[0]}")
        splits = {name: self._split(name, c, cell_targets) for name in SPLITS}
        sources = np.concatenate([np.unique(split.source) for split in splits.values()])
        values, counts = np.unique(sources, return_counts=True)
        if (counts > 1).any():
            raise TaskError(f"{self.path}: source query {values[counts > 1][0]} is in two splits")
        centroids, assignment = self._load("centroids.npy"), self._load("cells.npy")
        return Task(
            self.path,
            self._vectors("keys.npy", "keys"),
            partition.Cells(
                np.asarray(assignment), np.asarray(centroids), str(manifest.get("quantizer", ""))
            ),
            **splits,
            fingerprint=str(manifest["keys"]),
            options=manifest["options"],
            facts={name: manifest.get(name) for name in ("unit_norm", "duplicate_queries")},
        )

    def _load(self, name: str) -> NDArray[Any]:
        try:
            return np.lib.format.open_memmap(self.path / name, mode="r")
        except Exception as problem:  # a damaged header makes numpy raise nearly anything
            raise TaskError(f"{self.path / name} is damaged: {problem}") from None

    def _vectors(self, name: str, role: str) -> Vectors:
        self._load(name)  # says what is wrong with it
        return open_vectors(self.path / name, role)

    def _split(self, name: str, c: int, cell_targets: bool) -> Split:
        top_scores, top_ids = self._load(f"{name}/top/scores.npy"), self._load(f"{name}/top/ids.npy")
        width = 1 if c == 1 else 0
        of_cells: tuple[NDArray[Any], NDArray[Any]] = (top_scores[:, :width], top_ids[:, :width])
        if cell_targets:
            of_cells = self._load(f"{name}/cells/scores.npy"), self._load(f"{name}/cells/ids.npy")
        queries = self._vectors(f"{name}/queries.npy", f"{name} queries")
        return Split(queries, self._load(f"{name}/source.npy"), top_scores, top_ids, *of_cells)

    def begin(self, plan: dict[str, Any]) -> bool:
        """Make the directory ready to be begun or continued with this plan; False if the task is finished."""
        check_task_place(self.path)
        if (self.path / MANIFEST).exists():
            before = read_json(self.path / MANIFEST, TaskError).get("options")
            check_same(self.path, before or {}, plan, TaskError, "a task")
            return False
        begin_output(self.path, plan, TaskError, what="an unfinished task", mark=PLAN)
        return True

    def write_keys(self, keys: Vectors) -> Vectors:
        """Write the keys as float32, or continue to."""
        size = max(1, (1 << 25) // (4 * keys.d))
        with RowFiles(self.path, keys.n, {"keys": (np.float32, (keys.d,))}) as files:
            for start in range(files.done, keys.n, size):
                files.append({"keys": keys.rows(start, start + size)})
                files.commit()
        return open_vectors(self.path / "keys.npy")

    def query_files(self, split: str, m: int, d: int) -> RowFiles:
        """Tables "queries" [m, d] and "source" [m] of a split, to be filled row by row."""
        return RowFiles(self.path / split, m, {"queries": (np.float32, (d,)), "source": (np.int64, ())})

    def queries(self, split: str) -> Vectors:
        """The queries of a split that have been written."""
        return open_vectors(self.path / split / "queries.npy", f"{split} queries")

    def top(self, split: str) -> Path:
        """Where the top keys of a split go."""
        return self.path / split / "top"

    def top_ids(self, split: str) -> NDArray[np.int32]:
        """The top keys of a split that have been found."""
        ids: NDArray[np.int32] = np.load(self.top(split) / "ids.npy", mmap_mode="r")
        return ids

    def cell_targets(self, split: str) -> Path:
        """Where the top key of every cell goes."""
        return self.path / split / "cells"

    def read_cells(self) -> partition.Cells | None:
        """The partition, if it has been written."""
        if not (self.path / "cells.npy").exists():
            return None
        return partition.Cells(np.load(self.path / "cells.npy"), np.load(self.path / "centroids.npy"))

    def write_cells(self, cells: partition.Cells) -> None:
        """Write the partition; the assignment goes last."""
        np.save(self.path / "centroids.npy", cells.centroids)
        assignment = cells.assignment.astype(np.int32)
        write_atomically(self.path / "cells.npy", lambda file: np.save(file, assignment))

    def finish(self, fields: dict[str, Any], cell_targets: bool) -> Task:
        """Declare the task finished, and read it."""
        fields = {"kind": "task", "format": FORMAT, **fields}
        write_manifest(self.path, MANIFEST, fields, task_files(cell_targets))
        for leftover in [*self.path.rglob(JOURNAL), self.path / PLAN]:
            leftover.unlink()
        return self.read()


def check_task_place(path: str | Path) -> Path:
    """The path of a task to be; TaskError if writing it there could harm anything else."""
    return check_output(path, TaskError, what="a task", marks=[MANIFEST, PLAN])


def load_task(path: "str | Path | Task", verify: bool = False) -> Task:
    """A task from its directory; a task that is in memory already is returned as it is.

    `verify` checks the SHA-256 of every file; sizes are always checked.
    """
    return path if isinstance(path, Task) else TaskStore(path).read(verify)


def task_files(cell_targets: bool) -> list[str]:
    """Every file of a task but its manifest."""
    tables = ["queries.npy", "source.npy", "top/scores.npy", "top/ids.npy"]
    if cell_targets:
        tables += ["cells/scores.npy", "cells/ids.npy"]
    return ["keys.npy", "cells.npy", "centroids.npy", *(f"{split}/{t}" for split in SPLITS for t in tables)]
