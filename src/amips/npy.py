"""Strict reading of `.npy` files: type, shape and exact size are known before anything is allocated.

numpy's own reader believes a header: one that says 2^40 rows is allocated or mapped first and found wrong
later, if at all.
"""

import ast
import errno
import io
import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import DTypeLike, NDArray

from amips.errors import AmipsError
from amips.untrusted import open_regular

MAGIC = b"\x93NUMPY"
HEADER_BYTES = 1 << 14  # of a header, at most: numpy's take 128
COMPARED_BYTES = 1 << 20  # at once, when a file is read back
LENGTHS = {(1, 0): 2, (2, 0): 4, (3, 0): 4}  # bytes of the length of the header, by version
_PLAIN_TYPE = re.compile(r"[<>|=][biuf]\d{1,2}|[<>|=]U\d{1,9}")  # no objects, no records

Shape = tuple[int | None, ...]  # None: any length


@dataclass(frozen=True)
class NpyHeader:
    """What the header of a `.npy` file says, and where its values begin."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    offset: int

    @property
    def values(self) -> int:
        """How many values there are."""
        return math.prod(self.shape)


def npy_header(
    path: Path, error: type[AmipsError], *, dtype: DTypeLike | None = None, shape: Shape | None = None
) -> NpyHeader:
    """The header of a `.npy` file, checked against the size of the file; one line of `error` if it is not so.

    Args:
        dtype: the type that the values must have; None allows any number, truth value or string.
        shape: what the shape must be; None as a length allows any.
    """
    with open_regular(path, error) as file:
        return _read_header(file, path, error, dtype, shape)


def parse_npy_header(file: BinaryIO, size: int, name: object, error: type[AmipsError]) -> NpyHeader:
    """The header of what is open at its beginning and has `size` bytes, checked as by `npy_header`."""
    try:
        header = _parse(file)
    except (OSError, ValueError) as problem:
        raise error(f"{name} is not a readable .npy file: {problem}") from None
    expected = header.offset + header.values * header.dtype.itemsize
    if size != expected:
        raise error(f"{name} is damaged: it has {size:,} bytes, its header says {expected:,}")
    return header


def load_npy(
    path: Path,
    error: type[AmipsError],
    *,
    dtype: DTypeLike | None = None,
    shape: Shape | None = None,
    mmap: bool = False,
) -> NDArray[Any]:
    """The array in a `.npy` file, read or (`mmap`) memory-mapped read-only; arguments as of `npy_header`."""
    with open_regular(path, error) as file:
        header = _read_header(file, path, error, dtype, shape)
        order = "F" if header.fortran else "C"
        if header.values == 0:
            return np.empty(header.shape, header.dtype)
        if mmap:
            return np.memmap(file, header.dtype, "r", header.offset, header.shape, order)  # type: ignore[call-overload,no-any-return]
        file.seek(header.offset)
        array: NDArray[Any] = np.fromfile(file, header.dtype, header.values)
    if array.size != header.values:
        raise error(f"{path} ended early: it is being changed")
    return array.reshape(header.shape, order=order)  # type: ignore[call-overload,no-any-return]


def parse_npy(data: bytes, name: str, error: type[AmipsError]) -> NDArray[Any]:
    """The array in the bytes of a `.npy` file, which it shares; one line of `error` if they are none."""
    try:
        header = _parse(io.BytesIO(data))
    except ValueError as problem:
        raise error(f"{name} is not a readable .npy file: {problem}") from None
    expected = header.offset + header.values * header.dtype.itemsize
    if len(data) != expected:
        raise error(f"{name} is damaged: it has {len(data):,} bytes, its header says {expected:,}")
    order = "F" if header.fortran else "C"
    array = np.frombuffer(data, header.dtype, header.values, header.offset)
    return array.reshape(header.shape, order=order)  # type: ignore[call-overload,no-any-return]


def _read_header(
    file: BinaryIO, path: Path, error: type[AmipsError], dtype: DTypeLike | None, shape: Shape | None
) -> NpyHeader:
    header = parse_npy_header(file, os.fstat(file.fileno()).st_size, path, error)
    if dtype is not None and header.dtype != np.dtype(dtype):
        raise error(f"{path} is damaged: values of type {header.dtype}, expected {np.dtype(dtype)}")
    if shape is not None and not _fits(header.shape, shape):
        wanted = ", ".join("any" if length is None else f"{length}" for length in shape)
        raise error(f"{path} is damaged: shape {list(header.shape)}, expected [{wanted}]")
    return header


def _fits(shape: tuple[int, ...], wanted: Shape) -> bool:
    return len(shape) == len(wanted) and all(
        want is None or length == want for length, want in zip(shape, wanted, strict=True)
    )


def _parse(file: BinaryIO) -> NpyHeader:
    """Read a header; ValueError says what is wrong with it."""
    head = file.read(len(MAGIC) + 2)
    if len(head) < len(MAGIC) + 2 or not head.startswith(MAGIC):
        raise ValueError("it does not begin as one")
    if (version := (head[-2], head[-1])) not in LENGTHS:
        raise ValueError(f"npy version {version[0]}.{version[1]} is not known")
    stated = file.read(LENGTHS[version])
    length = int.from_bytes(stated, "little")
    if len(stated) < LENGTHS[version] or length > HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes")
    text = file.read(length)
    if len(text) < length:
        raise ValueError("it ends within the header")
    try:
        values = ast.literal_eval(text.decode("latin1").strip())
    except Exception:  # the parser raises nearly anything
        raise ValueError("its header cannot be read") from None
    if not isinstance(values, dict) or values.keys() != {"descr", "fortran_order", "shape"}:
        raise ValueError("its header lacks descr, fortran_order or shape")
    kind, fortran, shape = values["descr"], values["fortran_order"], values["shape"]
    if not isinstance(kind, str) or not _PLAIN_TYPE.fullmatch(kind):
        raise ValueError(f"values of type {str(kind)[:40]} are not numbers")
    if not isinstance(fortran, bool) or not isinstance(shape, tuple) or len(shape) > 8:
        raise ValueError("its header does not give a shape")
    if not all(type(length) is int and 0 <= length < 1 << 48 for length in shape):
        raise ValueError(f"a shape of {shape}")
    try:
        dtype = np.dtype(kind)
    except TypeError:
        raise ValueError(f"values of type {kind!r}") from None
    if dtype.itemsize == 0:  # any number of them fits into a file of any size
        raise ValueError(f"values of type {kind!r}, which have no bytes")
    # Also of an array without values: numpy multiplies the other lengths.
    if math.prod(max(1, length) for length in shape) * dtype.itemsize >= 1 << 63:
        raise ValueError(f"a shape of {shape}")
    return NpyHeader(dtype, shape, fortran, len(MAGIC) + 2 + LENGTHS[version] + length)


def write_npy(
    path: Path, dtype: DTypeLike, shape: tuple[int, ...], blocks: Callable[[], Iterable[NDArray[Any]]]
) -> None:
    """Write a `.npy` file from blocks of its rows, and read it back: OSError unless that is what was written.

    Not `np.save`: that may lose the last error of a full disk, when it closes the file.
    """
    stated = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, stated)
    with path.open("wb") as file:
        file.write(head.getvalue())
        for block in blocks():
            file.write(_bytes(block).data)
    with path.open("rb") as file:
        same = file.read(head.tell()) == head.getvalue()
        for block in blocks():
            data = _bytes(block)
            for low in range(0, len(data), COMPARED_BYTES):
                part = data[low : low + COMPARED_BYTES]
                same = same and np.array_equal(np.frombuffer(file.read(len(part)), np.uint8), part)
        if not same or file.read(1):
            raise OSError(errno.EIO, "what was written is not what is there", str(path))


def save_npy(path: Path, array: NDArray[Any]) -> None:
    """`write_npy` of an array."""
    write_npy(path, array.dtype, array.shape, lambda: [array])


def _bytes(block: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(block).reshape(-1).view(np.uint8)
