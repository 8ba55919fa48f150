"""The changes of a bundle since it was written: an append-only file beside its immutable ones.

    changes-<id>.log    of the data directory data-<id>; goes with it when the bundle is replaced

It begins with a line that names the format. Each record is

    head     magic, number of the record (1, 2, ...), length of the body, CRC-32 of the body and of the head
    body     length of the description; the description, JSON: kind, and name, type and shape of each array;
             the arrays, one after the other; the end, which is not zero

A record is acknowledged when it is on disk. One that is cut off at the end of the file was not: it is
dropped. So is a last one of which some blocks are missing, with a warning: blocks of a file reach the disk in
any order, and what a crash left of a record cannot be told from what befell it later. A record that does not
fit and that others follow is damage, and an error that names it.
"""

import json
import os
import struct
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from amips.errors import BundleError
from amips.files import CHUNK, fsync_directory
from amips.resources import resource_error
from amips.untrusted import open_regular

FIRST_LINE = b"amips changes 2\n"
HEAD = struct.Struct("<4sQQI")  # and the CRC-32 of these
MAGIC, END, CRC, LENGTH = b"AMCH", b"DONE", struct.Struct("<I"), struct.Struct("<I")
HEAD_SIZE = HEAD.size + CRC.size
MOST_DESCRIPTION = 1 << 16
KINDS = ("add", "remove", "update", "attributes")


@dataclass(frozen=True)
class Change:
    """One change: its kind, and arrays by name. See `amips.search.applying` for what it does."""

    kind: str
    arrays: dict[str, NDArray[Any]]

    def encoded(self) -> bytes:
        """The body of its record."""
        arrays = {name: np.ascontiguousarray(array) for name, array in self.arrays.items()}
        listed = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
        description = json.dumps({"kind": self.kind, "arrays": listed}).encode()
        parts = [LENGTH.pack(len(description)), description, *(array.tobytes() for array in arrays.values())]
        return b"".join([*parts, END])

    @classmethod
    def decoded(cls, body: bytes) -> "Change":
        """The inverse of `encoded`; ValueError of anything else."""
        (length,) = LENGTH.unpack_from(body) if len(body) >= LENGTH.size else (0,)
        at = LENGTH.size + length
        if not 0 < length <= MOST_DESCRIPTION or at > len(body):
            raise ValueError("it has no description")
        description = json.loads(body[LENGTH.size : at])
        if not isinstance(description, dict) or description.get("kind") not in KINDS:
            raise ValueError("it is of a kind that is not known")
        arrays: dict[str, NDArray[Any]] = {}
        for name, type_name, shape in description["arrays"]:
            dtype = np.dtype(str(type_name))
            if (
                dtype.hasobject
                or dtype.kind not in "iufUb"
                or any(type(s) is not int or s < 0 for s in shape)
            ):
                raise ValueError(f"{name!r} is no array")
            size = dtype.itemsize
            for one in shape:
                size *= one
            if size > len(body) - at:
                raise ValueError(f"{name!r} is longer than the record")
            arrays[str(name)] = np.frombuffer(body, dtype, size // max(1, dtype.itemsize), at).reshape(shape)
            at += size
        if body[at:] != END:
            raise ValueError("it is longer than what it describes")
        return cls(str(description["kind"]), arrays)


@dataclass(frozen=True)
class Place:
    """How far a file of changes was read: the bytes, the number of the last record, and its head.

    By the head it is known again: a record that was not acknowledged may be another when one looks again.
    """

    offset: int = 0
    number: int = 0
    head: bytes = b""

    def stands_in(self, file: int) -> bool:
        """Whether the record before it is still the one that was read, in a file that is open."""
        if not self.number:
            return True
        begin = self.offset - HEAD_SIZE - HEAD.unpack_from(self.head)[2]
        return os.fstat(file).st_size >= self.offset and os.pread(file, HEAD_SIZE, begin) == self.head

    def stands(self, path: Path) -> bool:
        """The same of a file by its path, which may be gone."""
        if not self.number:
            return True
        if not os.path.lexists(path):
            return False
        with open_regular(path, BundleError, follow=False) as file:
            return self.stands_in(file.fileno())


START = Place()


def changes_file(bundle: Path, data: str) -> Path:
    """The changes of a bundle with this data directory."""
    return bundle / f"changes-{data.removeprefix('data-')}.log"


def read_changes(path: Path, since: Place = START) -> Iterator[tuple[Change, Place]]:
    """The changes in a file after a place, each with the place behind it; none where there is no file.

    A last record that is not whole ends it. BundleError on a damaged one, when it is reached.
    """
    if not os.path.lexists(path):
        return
    with open_regular(path, BundleError, follow=False) as file:
        size = os.fstat(file.fileno()).st_size
        if not since.stands_in(file.fileno()):
            raise _other_file(path)
        at, number = since.offset, since.number
        if at == 0:
            first = file.read(len(FIRST_LINE))
            if len(first) < len(FIRST_LINE) and FIRST_LINE.startswith(first):
                return
            if first != FIRST_LINE:
                if FIRST_LINE.startswith(first.rstrip(b"\0")) and _ends_in_zeros(file):
                    return
                raise BundleError(f"{path} is damaged: it does not begin as a file of changes does")
            at = len(FIRST_LINE)
        file.seek(at)
        while (record := _read_record(path, file, number + 1, size)) is not None:
            number += 1
            head, body = record
            try:
                change = Change.decoded(body)
            except (ValueError, TypeError, KeyError, RecursionError) as problem:
                raise BundleError(f"{path}: record {number} is damaged: {problem}") from None
            yield change, Place(file.tell(), number, head)


def _read_record(path: Path, file: BinaryIO, number: int, size: int) -> tuple[bytes, bytes] | None:
    """Head and body of the next record; None at the end of the file, and of a last one that is not whole."""
    head = file.read(HEAD_SIZE)
    if len(head) < HEAD_SIZE:
        return None
    _, stated, length, crc = HEAD.unpack_from(head)
    if not _is_head(head) or stated != number:
        behind = file.tell()
        if _ends_in_zeros(file):
            return None
        file.seek(behind)
        if _is_head(head) or _another_follows(file, number):
            raise BundleError(f"{path}: record {number} is damaged: its head is not what was written")
        _warn_dropped(path, number)
        return None
    if length > size - file.tell():
        return None
    body = file.read(length)
    if len(body) < length:
        return None
    if zlib.crc32(body) != crc:
        if not _ends_in_zeros(file):
            raise BundleError(f"{path}: record {number} is damaged: its bytes are not what was written")
        if not body.endswith(bytes(len(END))):
            _warn_dropped(path, number)
        return None
    return head, body


def _other_file(path: Path) -> BundleError:
    return BundleError(f"{path} is not what it was any more: load the bundle again")


def _warn_dropped(path: Path, number: int) -> None:
    text = f"{path}: the last record, {number}, is not whole, and is dropped: of a crash, or damaged later"
    warnings.warn(text, stacklevel=2)


def _is_head(data: bytes) -> bool:
    """Whether these bytes are the head of some record."""
    (crc,) = CRC.unpack_from(data, HEAD.size)
    return data.startswith(MAGIC) and zlib.crc32(data[: HEAD.size]) == crc


def _another_follows(file: BinaryIO, number: int) -> bool:
    """Whether what follows has the head of the record of this number, or of a later one."""
    window = b""
    while block := file.read(CHUNK):
        window += block
        at = window.find(MAGIC)
        while 0 <= at <= len(window) - HEAD_SIZE:
            head = window[at : at + HEAD_SIZE]
            if _is_head(head) and HEAD.unpack_from(head)[1] >= number:
                return True
            at = window.find(MAGIC, at + 1)
        window = window[1 - HEAD_SIZE :]
    return False


def _ends_in_zeros(file: BinaryIO) -> bool:
    """Whether only zeros follow, or nothing."""
    while block := file.read(CHUNK):
        if any(block):
            return False
    return True


class ChangeWriter:
    """Appends records to a file of changes; whoever makes one is the only writer of the bundle.

    Args:
        place: where the last whole record ends; what is behind it was never acknowledged, and is cut off.

    BundleError if the file does not have that record.
    """

    def __init__(self, path: Path, place: Place) -> None:
        self.path, self.place = path, place
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._handle = os.open(path, flags, 0o644)
        except OSError as problem:
            raise BundleError(f"{path} cannot be written: {problem.strerror}") from None
        self.close = finalize(self, os.close, self._handle)  # also when it is forgotten
        if not place.stands_in(self._handle):
            self.close()
            raise _other_file(path)
        self._cut()
        if place.offset == 0:
            self._write(FIRST_LINE)
            fsync_directory(path.parent)
            self.place = Place(len(FIRST_LINE), 0)

    def append(self, change: Change) -> Place:
        """Write a record; it is on disk when this returns. What fails leaves the file as it was."""
        self._cut()  # what an interrupt has left behind the place was not acknowledged
        body, number = change.encoded(), self.place.number + 1
        head = HEAD.pack(MAGIC, number, len(body), zlib.crc32(body))
        head += CRC.pack(zlib.crc32(head))
        self._write(head + body)
        self.place = Place(self.place.offset + len(head) + len(body), number, head)
        return self.place

    def _write(self, data: bytes) -> None:
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(self._handle, left) :]
            os.fdatasync(self._handle)
        except OSError as problem:
            self._cut()
            raise resource_error(problem) or BundleError(
                f"{self.path} cannot be written: {problem.strerror}"
            ) from None
        except BaseException:  # interrupted: the record was not acknowledged
            self._cut()
            raise

    def _cut(self) -> None:
        """Back to the end of the last whole record."""
        os.ftruncate(self._handle, self.place.offset)
        os.lseek(self._handle, self.place.offset, os.SEEK_SET)
