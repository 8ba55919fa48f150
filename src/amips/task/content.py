"""What the files of a task must hold, and checking that they do.

A manifest lists the size and SHA-256 of every file. Reading all of a large task for that takes longer than
opening it: SHA-256 runs at 0.5 to 1.5 GB a second, so keys of 1.5 GB take one to three seconds. So there are
two moments:

- When a task is loaded: sizes, headers, cell numbers and centroids of every task, and the content of files
  up to `SMALL`.
- Before anything is built or trained of it (`Task.verify`): the content of every file, once.

Content is the SHA-256, and that values are finite and ids in range. Of the keys it is their fingerprint
instead, since that is what models and bundles are known by.
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.errors import TaskError, VectorError
from amips.files import check_file
from amips.npy import Shape, npy_header
from amips.scratch import Scratch
from amips.untrusted import open_regular
from amips.vectors import inspect, open_vectors

SMALL = 1 << 26  # bytes of a file that is read whole when a task is loaded: 0.1 s at most
CHUNK = 1 << 22
KEYS = "keys.npy"

FileStamp = tuple[int, int, int]  # inode, size, time of the last change


@dataclass(frozen=True)
class Table:
    """What a file must hold: its type and shape; of ids, the lowest and the first that is too high."""

    dtype: Any
    shape: Shape
    low: int = 0
    high: int = 1 << 62


def task_tables(n: int, d: int, c: int, rows: dict[str, int], k: int, cell_targets: bool) -> dict[str, Table]:
    """Every file of a task but its manifest, and what it must hold."""
    tables = {
        KEYS: Table(np.float32, (n, d)),
        "cells.npy": Table(np.int32, (n,), 0, c),
        "centroids.npy": Table(np.float32, (c, d)),
    }
    for split, m in rows.items():
        tables |= {
            f"{split}/queries.npy": Table(np.float32, (m, d)),
            f"{split}/source.npy": Table(np.int64, (m,)),
            f"{split}/top/scores.npy": Table(np.float32, (m, k)),
            f"{split}/top/ids.npy": Table(np.int32, (m, k), 0, n),
        }
        if cell_targets:
            tables |= {
                f"{split}/cells/scores.npy": Table(np.float32, (m, c)),
                f"{split}/cells/ids.npy": Table(np.int32, (m, c), 0, n),
            }
    return tables


@dataclass
class TaskContent:
    """The files of a task on disk, and which of them have been read and were as the manifest says.

    Args:
        files: size and SHA-256 of each, as the manifest has them.
        fingerprint: of the keys.
        scratch: the temporary directory that they are in; it is there as long as somebody uses the task.
    """

    path: Path
    tables: dict[str, Table]
    files: dict[str, dict[str, Any]]
    fingerprint: str
    scratch: Scratch | None = None
    verified_files: dict[str, FileStamp] = field(default_factory=dict)

    def check_headers(self) -> None:
        """TaskError unless every file is there and has the type and shape that it must have."""
        for name, table in self.tables.items():
            if name not in self.files:
                raise TaskError(f"{self.path}: the manifest does not list {name}; label again")
            npy_header(self.path / name, TaskError, dtype=table.dtype, shape=table.shape)

    def note_written(self) -> None:
        """Take note that every file has just been written and hashed."""
        self.verified_files = {name: self._stamp(name) for name in self.tables}

    def verify(self, most: float = np.inf) -> None:
        """Read every file of up to `most` bytes that has not been read; TaskError if one has changed."""
        for name, table in self.tables.items():
            before = self._stamp(name)
            if self.verified_files.get(name) == before or self.files[name]["size"] > most:
                continue
            self._check(name, table)
            self.verified_files[name] = before

    def _stamp(self, name: str) -> FileStamp:
        try:
            stat = (self.path / name).stat()
        except OSError as problem:
            raise TaskError(f"{self.path / name} cannot be read: {problem.strerror}") from None
        return stat.st_ino, stat.st_size, stat.st_mtime_ns

    def _check(self, name: str, table: Table) -> None:
        path = self.path / name
        if name == KEYS:
            try:
                fingerprint = inspect(open_vectors(path), zero="keep").fingerprint
            except VectorError as problem:
                raise TaskError(f"the keys of the task have changed: {problem}") from None
            if fingerprint != self.fingerprint:
                raise TaskError(f"{path} does not hold the keys of this task: its content has changed")
            return
        check_file(self.path, name, self.files[name], TaskError, verify=False)
        digest, wrong = hashlib.sha256(), ""
        for block in _blocks(path, table, digest):
            if block.dtype.kind == "f" and not np.isfinite(block).all():
                wrong = "it has values that are not finite"
            if block.dtype.kind == "i" and (block.min() < table.low or block.max() >= table.high):
                wrong = f"it has numbers outside of {table.low} to {table.high - 1}"
        if digest.hexdigest() != self.files[name]["sha256"]:
            raise TaskError(f"{path} does not have the SHA-256 of the manifest: its content has changed")
        if wrong:
            raise TaskError(f"{path} is damaged: {wrong}")


def _blocks(path: Path, table: Table, digest: Any) -> Iterator[NDArray[Any]]:
    """The values of a file, block by block; all of its bytes are added to `digest`."""
    header = npy_header(path, TaskError, dtype=table.dtype, shape=table.shape)
    with open_regular(path, TaskError) as file:
        digest.update(file.read(header.offset))
        remaining = os.fstat(file.fileno()).st_size - header.offset
        while remaining:
            data = file.read(min(remaining, CHUNK))
            if not data or len(data) % header.dtype.itemsize:
                raise TaskError(f"{path} ended early: it is being changed")
            digest.update(data)
            remaining -= len(data)
            yield np.frombuffer(data, header.dtype)
