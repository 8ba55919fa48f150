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

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips import cells as partition
from amips.arguments import check_flag, check_number, check_path, check_whole
from amips.errors import TaskError
from amips.files import (
    ADVICE,
    begin_output,
    check_output,
    check_same,
    read_json,
    read_manifest,
    remove_partials,
    write_atomically,
    write_manifest,
)
from amips.locks import locked
from amips.npy import load_npy
from amips.rowfiles import JOURNAL, RowFiles
from amips.scratch import Scratch
from amips.task.content import KEYS, SMALL, TaskContent, task_tables
from amips.task.task import BY_ROWS, SPLITS, Split, Task
from amips.untrusted import inside
from amips.vectors import Vectors, inspect, open_vectors

MANIFEST, PLAN, LOCK = "task.json", "plan.json", ".lock"
FORMAT = 2


class TaskStore:
    """A task directory: finished, being made, or not there yet."""

    def __init__(self, path: str | Path | Scratch) -> None:
        self.scratch = path if isinstance(path, Scratch) else None
        self.path = path.path if isinstance(path, Scratch) else Path(path)

    @property
    def unfinished(self) -> bool:
        """Whether a task was begun here, and `label` with the same arguments is to continue it."""
        if not (self.path / PLAN).is_file() or (self.path / MANIFEST).exists():
            return False
        return "kind" not in read_json(
            inside(self.path, PLAN, TaskError), TaskError
        )  # other plans say of what

    def read(self, verify: bool | None = None, *, written: bool = False) -> Task:
        """The finished task, checked; `written` says that this process has just written its files."""
        if self.unfinished:
            raise TaskError(f"{self.path} is not a finished task; the same amips label continues it")
        manifest = read_manifest(self.path, MANIFEST, "task", FORMAT, TaskError)
        content = self._content(manifest)
        content.check_headers()
        if written:
            content.note_written()
        elif verify is not False:
            content.verify(np.inf if verify else SMALL)
        cells = self._cells(int(manifest["n"]), int(manifest["c"]), int(manifest["d"]))
        splits = {name: self._split(name, content, cells.count) for name in SPLITS}
        sources = np.concatenate([np.unique(split.source) for split in splits.values()])
        values, counts = np.unique(sources, return_counts=True)
        if (counts > 1).any() and manifest["options"].get("split") != BY_ROWS:
            raise TaskError(f"{self.path}: source query {values[counts > 1][0]} is in two splits")
        return Task(
            self.path,
            open_vectors(self.path / KEYS),
            replace(cells, quantizer=str(manifest.get("quantizer", ""))),
            **splits,
            fingerprint=content.fingerprint,
            options=manifest["options"],
            facts={name: manifest.get(name) for name in ("unit_norm", "duplicate_queries")},
            content=content,
        )

    def _content(self, manifest: dict[str, Any]) -> TaskContent:
        """What the manifest says that the files hold; TaskError unless it says all of it."""
        rows, options = manifest.get("rows"), manifest.get("options")
        numbers = [manifest.get(name) for name in ("n", "d", "c")]
        numbers += [rows.get(name) for name in SPLITS] if isinstance(rows, dict) else [None]
        numbers += [options.get("k")] if isinstance(options, dict) else [None]
        if not all(type(number) is int and number >= 1 for number in numbers):
            raise TaskError(f"{self.path / MANIFEST} is damaged: it does not give n, d, c, k and the rows")
        self._check_options(options)
        n, d, c, *each, k = (int(number) for number in numbers if number is not None)
        cell_targets = c > 1 and "train/cells/ids.npy" in manifest["files"]
        tables = task_tables(n, d, c, dict(zip(SPLITS, each, strict=True)), min(k, n), cell_targets)
        return TaskContent(self.path, tables, manifest["files"], str(manifest.get("keys")), self.scratch)

    def _check_options(self, options: Any) -> None:
        """TaskError unless the options of the cells, all that is read of them, can have been asked for."""
        try:
            check_number("query_aware", options.get("query_aware", 0.0), least=0, error=TaskError)
            check_flag("spherical", options.get("spherical", True), error=TaskError)
            check_whole("runs", options.get("runs", 1), 1, error=TaskError)
            if not isinstance(options.get("cells"), (int, str)):
                raise TaskError("it does not say how the cells were made")
        except TaskError as problem:
            raise TaskError(f"{self.path / MANIFEST} is damaged: {problem}") from None

    def _split(self, name: str, content: TaskContent, c: int) -> Split:
        def table(file: str) -> NDArray[Any]:
            return load_npy(self.path / name / file, TaskError, mmap=True)

        top_scores, top_ids = table("top/scores.npy"), table("top/ids.npy")
        width = 1 if c == 1 else 0
        of_cells: tuple[NDArray[Any], NDArray[Any]] = (top_scores[:, :width], top_ids[:, :width])
        if f"{name}/cells/ids.npy" in content.tables:
            of_cells = table("cells/scores.npy"), table("cells/ids.npy")
        return Split(self.queries(name), table("source.npy"), top_scores, top_ids, *of_cells)

    def is_finished(self, plan: dict[str, Any]) -> bool:
        """Whether the task is there and made with this plan; TaskError if the directory is not its own."""
        check_task_place(self.path)
        if not (self.path / MANIFEST).exists():
            return False
        before = read_manifest(self.path, MANIFEST, "task", FORMAT, TaskError).get("options")
        check_same(self.path, before or {}, plan, TaskError, "a task")
        return not (self.path / PLAN).exists()  # killed before it was cleared

    @contextmanager
    def making(self, plan: dict[str, Any]) -> Iterator[bool]:
        """Begin or continue a task with this plan, kept from other processes; False if it is finished."""
        busy = TaskError(f"another amips label is at work in {self.path}; wait for it, or choose another out")
        with locked(self.path / LOCK, busy, remove=True, make=True):
            if (self.path / MANIFEST).exists():
                self.clear()
            if self.is_finished(plan):
                yield False
                return
            begin_output(self.path, plan, TaskError, what="an unfinished task", mark=PLAN)
            remove_partials(self.path)
            yield True

    def write_keys(self, keys: Vectors, fingerprint: str) -> Vectors:
        """Write the keys as float32, or continue to; what is there already must be of this fingerprint."""
        size = max(1, (1 << 25) // (4 * keys.d))
        with RowFiles(self.path, keys.n, {"keys": (np.float32, (keys.d,))}) as files:
            begun = files.done
            for start in range(files.done, keys.n, size):
                files.append({"keys": keys.rows(start, start + size)})
                files.commit()
        stored = open_vectors(self.path / KEYS)
        if begun and inspect(stored, zero="keep").fingerprint != fingerprint:
            raise TaskError(f"{self.path / KEYS} has changed since this task was begun; {ADVICE}")
        return stored

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
        return load_npy(self.top(split) / "ids.npy", TaskError, dtype=np.int32, mmap=True)

    def cell_targets(self, split: str) -> Path:
        """Where the top key of every cell goes."""
        return self.path / split / "cells"

    def read_cells(self, n: int, d: int) -> partition.Cells | None:
        """The partition of n keys, if it has been written whole."""
        try:
            return self._cells(n, None, d)
        except TaskError:
            return None

    def _cells(self, n: int, c: int | None, d: int) -> partition.Cells:
        """The partition; TaskError unless every cell number is one of a centroid, and these are finite."""
        centroids = load_npy(self.path / "centroids.npy", TaskError, dtype=np.float32, shape=(c, d))
        assignment = load_npy(self.path / "cells.npy", TaskError, dtype=np.int32, shape=(n,))
        if len(centroids) == 0 or assignment.min() < 0 or assignment.max() >= len(centroids):
            raise TaskError(f"{self.path / 'cells.npy'} is damaged: it names cells that there are not")
        if not np.isfinite(centroids).all():
            raise TaskError(f"{self.path / 'centroids.npy'} is damaged: it has values that are not finite")
        return partition.Cells(assignment, centroids)

    def write_cells(self, cells: partition.Cells) -> None:
        """Write the partition; the assignment goes last."""
        centroids = cells.centroids.astype(np.float32, copy=False)
        assignment = cells.assignment.astype(np.int32, copy=False)
        write_atomically(self.path / "centroids.npy", lambda file: np.save(file, centroids))
        write_atomically(self.path / "cells.npy", lambda file: np.save(file, assignment))

    def finish(self, fields: dict[str, Any], cell_targets: bool) -> Task:
        """Declare the task finished, and read it."""
        fields = {"kind": "task", "format": FORMAT, **fields}
        n, d, c, rows = (fields[name] for name in ("n", "d", "c", "rows"))
        tables = task_tables(n, d, c, rows, min(n, fields["options"]["k"]), cell_targets)
        write_manifest(self.path, MANIFEST, fields, tables)
        task = self.read(written=True)
        self.clear()
        return task

    def clear(self) -> None:
        """Remove what is needed only while a task is being made; only for who holds the lock."""
        for leftover in [*self.path.rglob(JOURNAL), self.path / PLAN]:
            leftover.unlink(missing_ok=True)
        remove_partials(self.path)


def check_task_place(path: str | Path) -> Path:
    """The path of a task to be; TaskError if writing it there could harm anything else."""
    return check_output(path, TaskError, what="a task", marks=[MANIFEST, PLAN])


def load_task(path: "str | Path | Task", verify: bool | None = None) -> Task:
    """A task from its directory; a task that is in memory already is returned as it is.

    Args:
        verify: True reads every file and checks its SHA-256 (of the keys their fingerprint); None those of up
            to 64 MB, and `build`, `train`, `fit` and `bench` the others before they use them; False none.
            Sizes, headers and cell numbers are always checked.
    """
    if not isinstance(path, Task):
        return TaskStore(check_path("task", path, error=TaskError)).read(verify)
    if verify:
        path.verify()
    return path
