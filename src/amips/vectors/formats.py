"""Vectors at the door: arrays, data frames, and files (npy, fvecs and fbin families, HDF5, Parquet, Arrow).

Each reader gives a `Vectors` with a function that reads a range of rows from the file into
fresh memory. Blocks are read, not mapped, so that a pass over a large file does not fill the memory with
its pages; the memory map beside it is for scattered access.
"""

import os
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.errors import VectorError
from amips.extras import needs_extra
from amips.files import is_address, whole_address
from amips.npy import load_npy, npy_header, parse_npy_header
from amips.untrusted import open_regular
from amips.vectors.addresses import StoredFile
from amips.vectors.arrow import ARROW, from_arrow, open_arrow
from amips.vectors.frames import from_frame, is_frame, stacked
from amips.vectors.reading import Read, check_table, checked, one_line
from amips.vectors.vectors import Source, Vectors

# Element type of one value, by file ending.
VECS: dict[str, np.dtype[Any]] = {
    ".fvecs": np.dtype("<f4"),
    ".ivecs": np.dtype("<i4"),
    ".bvecs": np.dtype("u1"),
}
BINS: dict[str, np.dtype[Any]] = {
    ".fbin": np.dtype("<f4"),
    ".ibin": np.dtype("<i4"),
    ".u8bin": np.dtype("u1"),
    ".i8bin": np.dtype("i1"),
}
HDF5 = (".hdf5", ".h5")


def open_vectors(source: Any, role: str = "keys", *, single: bool = False) -> Vectors:
    """Open keys or queries from an array, a data frame or a file.

    In memory: anything that numpy reads as a table of numbers (arrays, lists of lists, torch tensors), a data
    frame of pandas or polars or an Arrow table or record batch (its only column of vectors is read), or such
    a column itself.

    Files: .npy, .fvecs .bvecs .ivecs, .fbin .u8bin .i8bin .ibin, .hdf5 .h5 (ann-benchmarks and VIBE),
    .parquet .arrow .feather. After a colon a data set or column may be named: `data.hdf5:learn`,
    `data.parquet:embedding`. Without it an HDF5 file gives `train` as keys and `learn`, or else `test`,
    as queries; a Parquet file gives its only list column.

    Addresses: the same files but HDF5 wherever pyarrow reads from, `s3://bucket/keys.npy`, `gs://...`,
    `file:///...`. They are read in blocks, and never copied here as a whole.

    Args:
        role: what they are, for messages and for HDF5 files: "keys" or "queries".
        single: one vector, of shape [d], counts as a table of one row.
    """
    if isinstance(source, Vectors):
        return source
    if isinstance(source, str | Path):
        vectors = _open_file(str(source), role, single)
    elif type(source).__module__.partition(".")[0] == "pyarrow":
        with one_line(f"{role} are not a table of numbers"):
            vectors = from_arrow(source, role)
    else:
        vectors = _in_memory(source, role, single)
    if vectors.n == 0:
        raise VectorError(f"{vectors.name}: no rows; at least one vector is needed")
    if vectors.d == 0:
        raise VectorError(f"{vectors.name}: rows of dimension 0")
    return vectors


def _in_memory(source: Any, role: str, single: bool) -> Vectors:
    name = role
    with one_line(f"{role} are not a table of numbers"):
        if is_frame(source):
            name, source = from_frame(source, role)
        array = np.asarray(source)
        if array.dtype == object and array.ndim == 1 and len(array):
            array = stacked(array, name)
    if single and array.ndim == 1:
        array = array[None]
    check_table(array.shape, array.dtype, name)
    n, d = array.shape
    return Vectors(name, n, d, lambda start, stop: array[start:stop], array)


def _open_file(source: str, role: str, single: bool) -> Vectors:
    if is_address(source):
        return _open_address(whole_address(source), role, single)
    name, inner = _split_inner(source)
    path = Path(name)
    if not path.exists():
        raise VectorError(f"{path} does not exist")
    if path.is_dir():
        raise VectorError(f"{path} is a directory; give the vector file inside it")
    with open_regular(path, VectorError) as file:  # a pipe would be waited for, without end
        facts = os.fstat(file.fileno())
    ending = path.suffix.lower()
    with one_line(f"{path} is not a readable {ending} file"):
        vectors = _open_kind(path, ending, inner, role, single)
    stated = str(path.resolve()) + (f":{inner}" if inner else "")
    return replace(vectors, source=Source(stated, role, (facts.st_size, facts.st_mtime_ns)))


def _open_kind(path: Path, ending: str, inner: str | None, role: str, single: bool) -> Vectors:
    if ending == ".npy":
        return _open_npy(path, single)
    if ending in VECS:
        return _open_vecs(path, VECS[ending])
    if ending in BINS:
        return _open_bin(path, BINS[ending])
    if ending in HDF5:
        return _open_hdf5(path, inner, role)
    if ending in ARROW:
        return open_arrow(path, inner)
    raise _unknown(str(path), ending)


def _unknown(name: str, ending: str, *without: str) -> VectorError:
    known = " ".join(one for one in [".npy", *VECS, *BINS, *HDF5, *ARROW] if one not in without)
    return VectorError(f"{name}: unknown kind of vector file {ending!r}; known: {known}")


def _open_address(address: str, role: str, single: bool) -> Vectors:
    """Vectors at an address: the file is read in blocks, where it is."""
    name, inner = _split_inner(address)
    file = StoredFile.open(name)
    ending = Path(file.path).suffix.lower()
    with one_line(f"{name} is not a readable {ending} file"):
        if ending == ".npy":
            header = parse_npy_header(file.beginning(), file.size, name, VectorError)
            shape = (1, *header.shape) if single and len(header.shape) == 1 else header.shape
            check_table(shape, header.dtype, name)
            if header.fortran and min(shape) > 1:
                raise VectorError(f"{name} is stored column by column: save it with np.ascontiguousarray")
            n, d = shape
            vectors = Vectors(name, n, d, file.rows(header.dtype, header.offset, d))
        elif ending in BINS:
            head = file.values(np.dtype("<u4"), 0, 2)
            n, d = map(int, _checked_bin(name, head, BINS[ending], file.size))
            vectors = Vectors(name, n, d, file.rows(BINS[ending], 8, d))
        elif ending in VECS:
            n, d, record = _checked_vecs(name, file.values(np.dtype("<i4"), 0, 1), VECS[ending], file.size)
            vectors = Vectors(name, n, d, _vecs_reader(name, file.rows(record, 0, 1), d))
        elif ending in ARROW:
            vectors = open_arrow(Path(file.path), inner, file.handle, name)
        else:
            raise _unknown(name, ending, *HDF5)
    stated = name + (f":{inner}" if inner else "")
    return replace(vectors, name=stated, source=Source(stated, role, file.stamp))


def _split_inner(source: str) -> tuple[str, str | None]:
    head, colon, tail = source.rpartition(":")
    if colon and Path(head).suffix.lower() in (*HDF5, *ARROW):
        return head, tail
    return source, None


def _flat_reader(path: Path, dtype: np.dtype[Any], offset: int, columns: int) -> Read:
    """Read rows of `columns` values from a file of fixed-size rows that begin at `offset`.

    The file stays open, so that what is read is what was checked, whatever happens to its name.
    """
    row = columns * dtype.itemsize
    with open_regular(path, VectorError) as file:
        handle = os.dup(file.fileno())

    def read(start: int, stop: int) -> NDArray[Any]:
        values: NDArray[Any] = np.empty((max(0, stop - start), columns), dtype)
        rest, at = values.view(np.uint8).reshape(-1).data, offset + start * row
        while len(rest):
            size = os.preadv(handle, [rest], at)
            if size == 0:
                raise VectorError(f"{path} ended early while reading rows {start} to {stop}: it has been cut")
            rest, at = rest[size:], at + size
        return values

    weakref.finalize(read, os.close, handle).atexit = False
    return read


def _open_npy(path: Path, single: bool) -> Vectors:
    header = npy_header(path, VectorError)
    shape = (1, *header.shape) if single and len(header.shape) == 1 else header.shape
    check_table(shape, header.dtype, str(path))
    array = load_npy(path, VectorError, mmap=True).reshape(shape)
    n, d = shape
    if not isinstance(array, np.memmap) or not array.flags.c_contiguous:
        return Vectors(str(path), n, d, lambda a, b: np.asarray(array[a:b]), array)
    return Vectors(str(path), n, d, _flat_reader(path, header.dtype, header.offset, d), array)


def _open_vecs(path: Path, dtype: np.dtype[Any]) -> Vectors:
    """.fvecs and its kin: every row is an int32 dimension followed by that many values."""
    n, d, record = _checked_vecs(str(path), np.fromfile(path, "<i4", 1), dtype, path.stat().st_size)
    read = _vecs_reader(str(path), _flat_reader(path, record, 0, 1), d)
    return Vectors(str(path), n, d, read, np.memmap(path, record, "r")["values"])


def _checked_vecs(
    name: str, head: NDArray[Any], dtype: np.dtype[Any], size: int
) -> tuple[int, int, np.dtype[Any]]:
    """Rows, dimension, and a row as a record, of a file that begins with `head` and has `size` bytes."""
    d = int(head[0]) if head.size else 0
    if d <= 0:
        raise VectorError(
            f"{name}: the first row has dimension {d}; the file is empty or not {Path(name).suffix}"
        )
    row = 4 + d * dtype.itemsize
    if size % row:
        raise VectorError(f"{name}: {size} bytes is not a whole number of rows of {row} bytes (d = {d})")
    return size // row, d, np.dtype([("d", "<i4"), ("values", dtype, (d,))])


def _vecs_reader(name: str, read_records: Read, d: int) -> Read:
    def read(start: int, stop: int) -> NDArray[Any]:
        rows = read_records(start, stop)[:, 0]
        if (rows["d"] != d).any():
            bad = start + int(np.flatnonzero(rows["d"] != d)[0])
            raise VectorError(f"{name}: row {bad} has another dimension than the first row ({d})")
        values: NDArray[Any] = rows["values"]
        return values

    return read


def _open_bin(path: Path, dtype: np.dtype[Any]) -> Vectors:
    """.fbin and its kin: uint32 n, uint32 d, then n x d values."""
    head = np.fromfile(path, "<u4", 2)
    n, d = map(int, _checked_bin(str(path), head, dtype, path.stat().st_size))
    array = np.memmap(path, dtype, "r", offset=8, shape=(n, d)) if n and d else np.empty((n, d), dtype)
    return Vectors(str(path), n, d, _flat_reader(path, dtype, 8, d), array)


def _checked_bin(name: str, head: NDArray[Any], dtype: np.dtype[Any], size: int) -> NDArray[Any]:
    """The header (n, d) of a file of `size` bytes."""
    if head.size < 2:
        raise VectorError(f"{name}: too short to hold the header (n, d)")
    n, d = int(head[0]), int(head[1])
    expected = 8 + n * d * dtype.itemsize
    if size != expected:
        raise VectorError(f"{name}: {size} bytes, but its header says {n} x {d}, which takes {expected}")
    return head


def _open_hdf5(path: Path, inner: str | None, role: str) -> Vectors:
    with needs_extra(f"reading {path}", "formats", "h5py"):
        import h5py
    file = h5py.File(path, "r")
    wanted = [inner] if inner else ["train"] if role == "keys" else ["learn", "test"]
    name = next((w for w in wanted if isinstance(file.get(w), h5py.Dataset)), None)
    if name is None:
        has = " ".join(sorted(file)) or "nothing"
        raise VectorError(f"{path}: no data set {' or '.join(wanted)}; it has {has}. Name one: {path}:NAME")
    data = file[name]
    check_table(data.shape or (), data.dtype, f"{path}:{name}")
    n, d = data.shape
    return Vectors(f"{path}:{name}", n, d, checked(str(path), lambda a, b: np.asarray(data[a:b])))
