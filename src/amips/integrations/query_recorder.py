"""A log of the queries that a store was asked, in one file that `amips.fit` reads.

The file is .fvecs: every row is the dimension (int32) and the query (float32), the newest at the end. A row
is appended under a lock on the file, so that threads and processes may share it; what a crash cuts off of a
row is dropped when the next one comes. The newest `size` queries are kept: when there are a quarter more,
the oldest are dropped, in one step.

    x = np.fromfile("queries.fvecs", np.float32).reshape(-1, d + 1)[:, 1:]
"""

import fcntl
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from amips.arguments import check_whole
from amips.errors import AmipsError
from amips.files import check_output_file, write_atomic
from amips.vectors import Floats

ENDING = ".fvecs"
SIZE = 100_000  # queries that are kept by default
MOST_DIMENSIONS = 1 << 20
SPARE = 1.25  # times as many are there before the oldest are dropped

log = logging.getLogger("amips")


class QueryRecorder:
    """Appends queries to a file, and reads them back.

    Args:
        path: the file, made when the first query comes.
        size: the newest queries that are kept, at least.
    """

    def __init__(self, path: str | Path, size: int = SIZE) -> None:
        self.path = check_output_file(path, AmipsError).absolute()
        if self.path.suffix != ENDING:
            raise AmipsError(f"log={path}: expected a file {ENDING}, to which queries can be appended")
        self.size = check_whole("log_size", size, 1)
        self._lock, self._process = threading.Lock(), os.getpid()
        self._handle: int | None = None
        self._failed = False
        self._checked = False

    def note(self, x: Any) -> None:
        """Append queries [m, d] or [d], but for zeros and what is not finite.

        A disk that is full ends the recording, with a line in the log of Python ("amips"): nobody's search
        fails for it.
        """
        with np.errstate(over="ignore"):
            rows = np.atleast_2d(np.asarray(x, np.float32))
        rows = rows[np.isfinite(rows).all(axis=1) & rows.any(axis=1)]
        if self._failed or not len(rows):
            return
        records = np.empty(len(rows), _record(rows.shape[1]))
        records["d"], records["values"] = rows.shape[1], rows
        try:
            with self._alone() as handle:
                self._append(handle, records.tobytes(), records.itemsize)
        except OSError as problem:
            self._failed = True
            log.warning("queries are not recorded any more: %s: %s", self.path, problem.strerror)

    def read(self) -> Floats:
        """The queries that were recorded, the newest last, float32 [m, d]; AmipsError if there are none."""
        try:
            with self._alone() as handle:
                d = self._dimension(handle)
                data = b"" if d is None else _bytes(handle, 0, os.fstat(handle).st_size)
        except OSError as problem:
            raise AmipsError(f"{self.path} cannot be read: {problem.strerror}") from None
        if d is None:
            raise AmipsError(f"{self.path} has no queries yet: give some (queries=)")
        record = _record(d)
        rows = np.frombuffer(data, record, len(data) // record.itemsize)
        if (rows["d"] != d).any():
            raise AmipsError(f"{self.path} has queries of different dimensions: choose another log")
        return np.ascontiguousarray(rows["values"][-self.size :])

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._close()

    def _append(self, handle: int, data: bytes, row: int) -> None:
        there = os.fstat(handle).st_size
        if not self._checked:
            d = self._dimension(handle)
            if d is not None and d != row // 4 - 1:
                raise AmipsError(f"{self.path} has queries of dimension {d}, this store has {row // 4 - 1}")
            self._checked = True
        whole = there - there % row  # a process that was killed may have left a part of a row
        if whole < there:
            os.ftruncate(handle, whole)
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(handle, left) :]
        except OSError:
            os.ftruncate(handle, whole)
            raise
        if whole + len(data) > SPARE * self.size * row:
            kept = self.size * row
            write_atomic(self.path, _bytes(handle, whole + len(data) - kept, kept))

    @contextmanager
    def _alone(self) -> Iterator[int]:
        """The open file, locked against threads and processes."""
        if os.getpid() != self._process:  # forked: a file that is open in both is locked by both
            self._lock, self._process, self._handle = threading.Lock(), os.getpid(), None
        with self._lock:
            handle = self._locked()
            try:
                yield handle
            finally:
                fcntl.flock(handle, fcntl.LOCK_UN)

    def _locked(self) -> int:
        while True:
            if self._handle is None:
                flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                self._handle, self._checked = os.open(self.path, flags, 0o600), False
            fcntl.flock(self._handle, fcntl.LOCK_EX)
            try:
                if os.path.samestat(os.fstat(self._handle), os.lstat(self.path)):
                    return self._handle
            except FileNotFoundError:
                pass
            self._close()  # its oldest queries were dropped by another, or somebody has moved it away

    def _dimension(self, handle: int) -> int | None:
        """Of the first row; None of an empty file."""
        head = os.pread(handle, 4, 0)
        if len(head) < 4:
            return None
        d = int.from_bytes(head, "little", signed=True)
        if not 0 < d <= MOST_DIMENSIONS:
            raise AmipsError(f"{self.path} is not a log of queries; choose another file")
        return d

    def _close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def _record(d: int) -> "np.dtype[np.void]":
    return np.dtype([("d", "<i4"), ("values", "<f4", (d,))])


def _bytes(handle: int, start: int, length: int) -> bytes:
    """A part of a file; the system gives no more than 2 GB at a time."""
    parts = []
    while length and (part := os.pread(handle, min(length, 1 << 30), start)):
        parts.append(part)
        start, length = start + len(part), length - len(part)
    return b"".join(parts)
