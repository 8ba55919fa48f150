"""Files at an address, wherever pyarrow's file systems read from: S3 and what speaks like it, GCS, HDFS, file://.

A file is read in ranges of bytes where it is; nothing is copied to this machine first.
"""

import io
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from amips.errors import VectorError
from amips.extras import needs_extra
from amips.vectors.reading import Read, checked, one_line

BEGINNING = 1 << 15  # bytes that hold the header of any file here


@dataclass(frozen=True)
class StoredFile:
    """A file on one of pyarrow's file systems, open for reading.

    Args:
        name: its address, for messages.
        path: within its file system, without what the address says of that.
        handle: of pyarrow; reads of several threads at a time are allowed.
        stamp: its size, and when it was changed in nanoseconds (0 where the file system does not say).
    """

    name: str
    path: str
    handle: Any
    stamp: tuple[int, int]

    @classmethod
    def open(cls, address: str) -> "StoredFile":
        """Open the file at an address; VectorError in one line if there is none, or nobody answers."""
        with needs_extra(f"reading {address}", "formats", "pyarrow"):
            from pyarrow import fs
        with one_line(f"{address} cannot be opened"):
            system, path = fs.FileSystem.from_uri(address)
            facts = system.get_file_info(path)
            if facts.type == fs.FileType.NotFound:
                raise VectorError(f"{address} does not exist")
            if facts.type == fs.FileType.Directory:
                raise VectorError(f"{address} is a directory; give the vector file inside it")
            return cls(address, path, system.open_input_file(path), (facts.size, facts.mtime_ns or 0))

    @property
    def size(self) -> int:
        """In bytes."""
        return self.stamp[0]

    def beginning(self) -> BinaryIO:
        """The first bytes, as a file to read a header from."""
        return io.BytesIO(self.handle.read_at(min(self.size, BEGINNING), 0))

    def values(self, dtype: np.dtype[Any], offset: int, count: int) -> NDArray[Any]:
        """So many values from a place in the file on; fewer where it ends before."""
        data = self.handle.read_at(count * dtype.itemsize, offset)
        whole = len(data) // dtype.itemsize * dtype.itemsize
        return np.frombuffer(data[:whole], dtype).copy()

    def rows(self, dtype: np.dtype[Any], offset: int, columns: int) -> Read:
        """A reader of rows of `columns` values that begin at `offset`."""
        row = columns * dtype.itemsize

        def read(start: int, stop: int) -> NDArray[Any]:
            count = max(0, stop - start) * columns
            values = self.values(dtype, offset + start * row, count)
            if len(values) != count:
                raise VectorError(f"{self.name} ended early while reading rows {start} to {stop}")
            return values.reshape(-1, columns)

        return checked(self.name, read)
