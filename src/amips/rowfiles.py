"""Tables that are filled row by row, in memory or in files, and can be continued after a crash."""

import math
import os
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from amips.errors import AmipsError
from amips.files import ADVICE, local, read_json, write_json
from amips.npy import load_npy, npy_header

JOURNAL = "progress.json"

Columns = dict[str, tuple[Any, tuple[int, ...]]]  # name -> type and shape of a row


class RowFiles:
    """Several tables of m rows, written in order; `columns` gives the type and shape of each one's row.

    With a directory, each table is `<name>.npy` there; the journal says how many rows are safely on disk.
    Opening an unfinished directory with the same shapes, and the same `of` (what they are results of),
    continues after those rows; opening a finished one has nothing left to do. Without a directory the
    tables are plain arrays.
    """

    def __init__(self, out: str | Path | None, m: int, columns: Columns, of: str = "") -> None:
        self.m, self.columns, self.of = m, columns, of
        self.directory = local(out, AmipsError) if out is not None else None
        self.done = 0
        self.arrays: dict[str, NDArray[Any]] = {}
        self.handles: dict[str, BinaryIO] = {}
        self.shape = {name: [m, *row, np.dtype(kind).str] for name, (kind, row) in columns.items()}
        if self.directory is None:
            self.arrays = {name: np.empty((m, *row), kind) for name, (kind, row) in columns.items()}
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        self.done = self._resume_at()
        for name, (kind, row) in columns.items():
            path = self._path(name)
            if self.done == 0:
                _write_empty(path, np.dtype(kind), (m, *row))
            handle = path.open("r+b")
            remaining = (m - self.done) * math.prod(row) * np.dtype(kind).itemsize
            handle.seek(path.stat().st_size - remaining)
            self.handles[name] = handle
        self.written = self.done

    def _path(self, name: str) -> Path:
        assert self.directory is not None
        return self.directory / f"{name}.npy"

    def _resume_at(self) -> int:
        assert self.directory is not None
        try:
            state = read_json(self.directory / JOURNAL, AmipsError)
            rows, tables, of = state["rows"], state["tables"], state["of"]
        except (AmipsError, KeyError):
            return 0  # nothing was committed, or nobody can say what was
        if tables != self.shape or of != self.of:
            raise AmipsError(f"{self.directory} holds a result of other inputs; {ADVICE}")
        known = type(rows) is int and 0 <= rows <= self.m
        return rows if known and all(self._is_whole(name) for name in self.columns) else 0

    def _is_whole(self, name: str) -> bool:
        kind, row = self.columns[name]
        try:
            npy_header(self._path(name), AmipsError, dtype=kind, shape=(self.m, *row))
        except AmipsError:
            return False
        return True

    def append(self, rows: dict[str, NDArray[Any]]) -> None:
        """Add the next rows of every table."""
        if self.directory is None:
            for name, values in rows.items():
                self.arrays[name][self.done : self.done + len(values)] = values
            self.done += len(values)
            return
        for name, values in rows.items():
            kind, _ = self.columns[name]
            self.handles[name].write(np.ascontiguousarray(values, dtype=kind).data)
        self.written += len(values)

    def commit(self) -> None:
        """Make the rows appended so far survive a crash."""
        if self.directory is None:
            return
        for handle in self.handles.values():
            handle.flush()
            os.fsync(handle.fileno())
        self.done = self.written
        write_json(self.directory / JOURNAL, {"rows": self.done, "tables": self.shape, "of": self.of})

    def finish(self) -> dict[str, NDArray[Any]]:
        """The tables, whole; those on disk are memory-mapped read-only."""
        assert self.done == self.m, "finish() before every row was committed"
        if self.directory is None:
            return self.arrays
        return {name: load_npy(self._path(name), AmipsError, mmap=True) for name in self.columns}

    def __enter__(self) -> "RowFiles":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self.handles.values():
            handle.close()


def _write_empty(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """A `.npy` file of this shape whose values are still to be written; nothing of it is mapped."""
    fields = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, fields)
        file.truncate(file.tell() + math.prod(shape) * dtype.itemsize)
