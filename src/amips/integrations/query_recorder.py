"""A log of the queries that a store was asked, in one file that `amips.fit` reads.

The file is .npy, or .fvecs: every row the dimension (int32) and the query (float32), the newest at the end. A
row is appended under a lock on the file, so that threads and processes may share it; what a crash cuts off of
a row is dropped when the next one comes. The newest `size` queries are kept: when there are a quarter more,
the oldest are dropped, in one step.

    x = np.load("queries.npy")
    x = np.fromfile("queries.fvecs", np.float32).reshape(-1, d + 1)[:, 1:]
"""

import fcntl
import logging
import os
import re
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

ENDINGS = (".npy", ".fvecs")
HEAD = 128  # bytes before the rows of a .npy file
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
        if self.path.suffix not in ENDINGS:
            raise AmipsError(
                f"log={path}: expected a file {' or '.join(ENDINGS)}, to which queries can be appended"
            )
        self._head = HEAD if self.path.suffix == ".npy" else 0
        self.size = check_whole("log_size", size, 1)
        self._lock, self._process = threading.Lock(), os.getpid()
        self._handle: int | None = None
        self._failed = False
        self._d: int | None = None  # of the queries in the open file, once it is known

    def note(self, x: Any) -> None:
        """Append queries [m, d] or [d], but for zeros and what is not finite.

        A disk that is full, or a log of another dimension, ends the recording, with a line in the log of
        Python ("amips"): nobody's search fails for it.
        """
        with np.errstate(over="ignore"):
            rows = np.atleast_2d(np.asarray(x, np.float32))
        rows = rows[np.isfinite(rows).all(axis=1) & rows.any(axis=1)]
        if self._failed or not len(rows):
            return
        try:
            with self._alone() as handle:
                self._append(handle, rows)
        except (OSError, AmipsError) as problem:
            self._failed = True
            reason = problem.strerror if isinstance(problem, OSError) else problem
            log.warning("queries are not recorded any more: %s: %s", self.path, reason)

    def read(self) -> Floats:
        """The queries that were recorded, the newest last, float32 [m, d]; AmipsError if there are none."""
        try:
            with self._alone() as handle:
                d = self._dimension(handle)
                size = os.fstat(handle).st_size - self._head
                data = b"" if d is None else _bytes(handle, self._head, size)
        except OSError as problem:
            raise AmipsError(f"{self.path} cannot be read: {problem.strerror}") from None
        record = self._record(d or 1)
        rows = np.frombuffer(data, record, len(data) // record.itemsize)
        if d is None or not len(rows):
            raise AmipsError(f"{self.path} has no queries yet: give some (queries=)")
        if not self._head and (rows["d"] != d).any():
            raise AmipsError(f"{self.path} has queries of different dimensions: choose another log")
        return np.ascontiguousarray(rows["values"][-self.size :])

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._close()

    def _append(self, handle: int, rows: Floats) -> None:
        d, there = rows.shape[1], os.fstat(handle).st_size
        if self._d is None:
            self._d = self._dimension(handle)
        if self._d is not None and self._d != d:
            raise AmipsError(f"it has queries of dimension {self._d}, this store has {d}: choose another log")
        record = self._record(d)
        records = np.empty(len(rows), record)
        records["values"] = rows
        if not self._head:
            records["d"] = d
        count = max(0, there - self._head) // record.itemsize
        whole = self._head + count * record.itemsize
        if whole < there:  # a process that was killed has left a part of a row
            os.ftruncate(handle, whole)
        try:
            if not count:
                _write(handle, self._beginning(0, d), 0)
            _write(handle, records.tobytes(), whole)
        except OSError:
            os.ftruncate(handle, min(whole, there))
            raise
        count += len(rows)
        self._d = d
        if count > SPARE * self.size:
            kept = self.size * record.itemsize
            start = self._head + (count - self.size) * record.itemsize
            write_atomic(self.path, self._beginning(self.size, d) + _bytes(handle, start, kept))
        else:
            _write(handle, self._beginning(count, d), 0)

    def _record(self, d: int) -> "np.dtype[np.void]":
        """What a row of the file is."""
        values: Any = ("values", "<f4", (d,))
        return np.dtype([values] if self._head else [("d", "<i4"), values])

    def _beginning(self, count: int, d: int) -> bytes:
        """What stands before the rows."""
        if not self._head:
            return b""
        text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({count}, {d}), }}"
        length = HEAD - 10  # behind what says that it is a .npy file of version 1.0
        return b"\x93NUMPY\x01\x00" + length.to_bytes(2, "little") + text.ljust(length - 1).encode() + b"\n"

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
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                self._handle, self._d = os.open(self.path, flags, 0o600), None
            fcntl.flock(self._handle, fcntl.LOCK_EX)
            try:
                if os.path.samestat(os.fstat(self._handle), os.lstat(self.path)):
                    return self._handle
            except FileNotFoundError:
                pass
            self._close()  # its oldest queries were dropped by another, or somebody has moved it away

    def _dimension(self, handle: int) -> int | None:
        """Of the queries that are there; None of an empty file."""
        head = os.pread(handle, self._head or 4, 0)
        if len(head) < (self._head or 4):
            return None
        d = int.from_bytes(head, "little", signed=True) if not self._head else _npy_dimension(head)
        if not 0 < d <= MOST_DIMENSIONS:
            raise AmipsError(f"{self.path} is not a log of queries; choose another file")
        return d

    def _close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def _npy_dimension(head: bytes) -> int:
    """Of a .npy file as it is written here; 0 of others."""
    start = b"\x93NUMPY\x01\x00" + (HEAD - 10).to_bytes(2, "little")
    met = re.search(rb"'descr': '<f4', 'fortran_order': False, 'shape': \(\d+, (\d+)\)", head)
    return int(met[1]) if met is not None and head.startswith(start) else 0


def _write(handle: int, data: bytes, place: int) -> None:
    left = memoryview(data)
    while left:
        count = os.pwrite(handle, left, place)
        left, place = left[count:], place + count


def _bytes(handle: int, start: int, length: int) -> bytes:
    """A part of a file; the system gives no more than 2 GB at a time."""
    parts = []
    while length and (part := os.pread(handle, min(length, 1 << 30), start)):
        parts.append(part)
        start, length = start + len(part), length - len(part)
    return b"".join(parts)
