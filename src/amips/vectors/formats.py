"""Vector file formats at the door: npy, the fvecs and fbin families, HDF5, Parquet and Arrow.

Each reader gives a `Vectors` with a function that reads a range of rows from the file into
fresh memory. Blocks are read, not mapped, so that a pass over a large file does not fill the memory with
its pages; the memory map beside it is for scattered access.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.errors import VectorError
from amips.vectors.vectors import Vectors

Read = Callable[[int, int], NDArray[Any]]

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
ARROW = (".parquet", ".arrow", ".feather")


def check_table(shape: tuple[int, ...], dtype: np.dtype[Any], name: str) -> None:
    """Raise VectorError unless this is a two-dimensional table of numbers."""
    if len(shape) != 2:
        raise VectorError(f"{name}: expected a table of shape [n, d], got shape {list(shape)}")
    if dtype.kind not in "fiu":
        raise VectorError(f"{name}: values of type {dtype} are not numbers; use float32, float16 or int8")


def open_vectors(source: Vectors | NDArray[Any] | str | Path, role: str = "keys") -> Vectors:
    """Open keys or queries from an array or a file.

    Files: .npy, .fvecs .bvecs .ivecs, .fbin .u8bin .i8bin .ibin, .hdf5 .h5 (ann-benchmarks and VIBE),
    .parquet .arrow .feather. After a colon a data set or column may be named: `data.hdf5:learn`,
    `data.parquet:embedding`. Without it an HDF5 file gives `train` as keys and `learn`, or else `test`,
    as queries; a Parquet file gives its only list column.
    """
    if isinstance(source, Vectors):
        return source
    if isinstance(source, (str, Path)):
        vectors = _open_file(str(source), role)
    else:
        with _one_line(f"{role} are not a table of numbers"):
            array = np.asarray(source)
        check_table(array.shape, array.dtype, role)
        vectors = Vectors(role, array.shape[0], array.shape[1], lambda a, b: array[a:b], array)
    if vectors.n == 0:
        raise VectorError(f"{vectors.name}: no rows; at least one vector is needed")
    if vectors.d == 0:
        raise VectorError(f"{vectors.name}: rows of dimension 0")
    return vectors


def _open_file(source: str, role: str) -> Vectors:
    path, inner = _split_inner(source)
    if not path.exists():
        raise VectorError(f"{path} does not exist")
    if path.is_dir():
        raise VectorError(f"{path} is a directory; give the vector file inside it")
    ending = path.suffix.lower()
    with _one_line(f"{path} is not a readable {ending} file"):
        if ending == ".npy":
            return _open_npy(path)
        if ending in VECS:
            return _open_vecs(path, VECS[ending])
        if ending in BINS:
            return _open_bin(path, BINS[ending])
        if ending in HDF5:
            return _open_hdf5(path, inner, role)
        if ending in ARROW:
            return _open_arrow(path, inner)
    known = " ".join([".npy", *VECS, *BINS, *HDF5, *ARROW])
    raise VectorError(f"{path}: unknown kind of vector file {ending!r}; known: {known}")


def _split_inner(source: str) -> tuple[Path, str | None]:
    head, colon, tail = source.rpartition(":")
    if colon and Path(head).suffix.lower() in (*HDF5, *ARROW):
        return Path(head), tail
    return Path(source), None


def _flat_reader(path: Path, dtype: np.dtype[Any], offset: int, columns: int) -> Read:
    """Read rows of `columns` values from a file of fixed-size rows that begin at `offset`."""
    row = columns * dtype.itemsize

    def read(start: int, stop: int) -> NDArray[Any]:
        values = np.fromfile(path, dtype, max(0, stop - start) * columns, offset=offset + start * row)
        if values.size != max(0, stop - start) * columns:
            raise VectorError(f"{path} ended early while reading rows {start} to {stop}: it has been cut")
        return values.reshape(-1, columns)

    return read


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Turn any error into one line of VectorError: libraries raise nearly anything on damaged files."""
    try:
        yield
    except VectorError:
        raise
    except Exception as problem:
        reason = " ".join(str(problem).split())
        raise VectorError(f"{what}: {reason or type(problem).__name__}") from None


def _checked(path: Path, read: Read) -> Read:
    """`read`, whose errors become one line that names the file."""

    def checked(start: int, stop: int) -> NDArray[Any]:
        with _one_line(f"{path} is damaged in or near rows {start} to {stop}"):
            return read(start, stop)

    return checked


def _open_npy(path: Path) -> Vectors:
    with np.errstate(over="ignore"):
        array = np.lib.format.open_memmap(path, mode="r")
    check_table(array.shape, array.dtype, str(path))
    n, d = array.shape
    if not isinstance(array, np.memmap) or not array.flags.c_contiguous:
        return Vectors(str(path), n, d, lambda a, b: np.asarray(array[a:b]), array)
    return Vectors(str(path), n, d, _flat_reader(path, array.dtype, array.offset, d), array)


def _open_vecs(path: Path, dtype: np.dtype[Any]) -> Vectors:
    """.fvecs and its kin: every row is an int32 dimension followed by that many values."""
    size = path.stat().st_size
    head = np.fromfile(path, "<i4", 1)
    d = int(head[0]) if head.size else 0
    if d <= 0:
        raise VectorError(f"{path}: the first row has dimension {d}; the file is empty or not {path.suffix}")
    row = 4 + d * dtype.itemsize
    if size % row:
        raise VectorError(f"{path}: {size} bytes is not a whole number of rows of {row} bytes (d = {d})")
    record = np.dtype([("d", "<i4"), ("values", dtype, (d,))])
    read_records = _flat_reader(path, record, 0, 1)

    def read(start: int, stop: int) -> NDArray[Any]:
        rows = read_records(start, stop)[:, 0]
        if (rows["d"] != d).any():
            bad = start + int(np.flatnonzero(rows["d"] != d)[0])
            raise VectorError(f"{path}: row {bad} has another dimension than the first row ({d})")
        values: NDArray[Any] = rows["values"]
        return values

    return Vectors(str(path), size // row, d, read, np.memmap(path, record, "r")["values"])


def _open_bin(path: Path, dtype: np.dtype[Any]) -> Vectors:
    """.fbin and its kin: uint32 n, uint32 d, then n x d values."""
    head = np.fromfile(path, "<u4", 2)
    if head.size < 2:
        raise VectorError(f"{path}: too short to hold the header (n, d)")
    n, d = int(head[0]), int(head[1])
    expected, size = 8 + n * d * dtype.itemsize, path.stat().st_size
    if size != expected:
        raise VectorError(f"{path}: {size} bytes, but its header says {n} x {d}, which takes {expected}")
    array = np.memmap(path, dtype, "r", offset=8, shape=(n, d)) if n and d else np.empty((n, d), dtype)
    return Vectors(str(path), n, d, _flat_reader(path, dtype, 8, d), array)


def _open_hdf5(path: Path, inner: str | None, role: str) -> Vectors:
    try:
        import h5py
    except ImportError:
        raise VectorError(f"{path}: reading HDF5 needs h5py; pip install 'amips[formats]'") from None
    file = h5py.File(path, "r")
    wanted = [inner] if inner else ["train"] if role == "keys" else ["learn", "test"]
    name = next((w for w in wanted if isinstance(file.get(w), h5py.Dataset)), None)
    if name is None:
        has = " ".join(sorted(file)) or "nothing"
        raise VectorError(f"{path}: no data set {' or '.join(wanted)}; it has {has}. Name one: {path}:NAME")
    data = file[name]
    check_table(data.shape or (), data.dtype, f"{path}:{name}")
    n, d = data.shape
    return Vectors(f"{path}:{name}", n, d, _checked(path, lambda a, b: np.asarray(data[a:b])))


def _open_arrow(path: Path, inner: str | None) -> Vectors:
    try:
        import pyarrow as pa
        import pyarrow.feather
        import pyarrow.parquet as pq
    except ImportError:
        raise VectorError(f"{path}: reading it needs pyarrow; pip install 'amips[formats]'") from None
    if path.suffix.lower() == ".parquet":
        file = pq.ParquetFile(path)
        schema = file.schema_arrow
        sizes = [file.metadata.row_group(g).num_rows for g in range(file.num_row_groups)]

        def group(g: int, column: str) -> Any:
            return file.read_row_group(g, columns=[column]).column(column)
    else:
        table = pyarrow.feather.read_table(path, memory_map=True)
        schema = table.schema
        sizes = [len(chunk) for chunk in table.column(0).chunks] if table.num_columns else []

        def group(g: int, column: str) -> Any:
            start = sum(sizes[:g])
            return table.column(column).slice(start, sizes[g])

    def is_list(kind: Any) -> bool:
        kinds = pa.types
        return bool(kinds.is_fixed_size_list(kind) or kinds.is_list(kind) or kinds.is_large_list(kind))

    lists = [field.name for field in schema if is_list(field.type)]
    if inner is None and len(lists) != 1:
        raise VectorError(f"{path}: {len(lists)} list columns {lists}; name the one to read: {path}:NAME")
    column = inner or lists[0]
    if column not in lists:
        raise VectorError(f"{path}: no list column {column!r}; it has {lists}")
    starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    kind = schema.field(column).type
    fixed = kind.list_size if pa.types.is_fixed_size_list(kind) else None
    cache: dict[int, NDArray[Any]] = {}

    def rows_of(g: int) -> NDArray[Any]:
        """One row group as a table; the last one read is kept, since blocks are smaller than groups."""
        if g not in cache:
            cells = group(g, column).combine_chunks()
            cells = cells.chunk(0) if isinstance(cells, pa.ChunkedArray) else cells
            cells.validate(full=True)  # offsets of a damaged file could point anywhere
            if cells.null_count:
                raise VectorError(f"{path}:{column} has an empty cell in rows {starts[g]} to {starts[g + 1]}")
            flat = cells.flatten().to_numpy(zero_copy_only=False)
            width = fixed if fixed is not None else len(flat) // max(1, len(cells))
            if fixed is None and (np.diff(cells.offsets.to_numpy()) != width).any():
                raise VectorError(f"{path}:{column}: lists differ in length near row {starts[g]}")
            cache.clear()
            cache[g] = flat.reshape(len(cells), width)
        return cache[g]

    def read(start: int, stop: int) -> NDArray[Any]:
        parts = []
        for g in range(int(np.searchsorted(starts, start, "right")) - 1, len(sizes)):
            if starts[g] >= stop:
                break
            part = rows_of(g)
            if part.shape[1] != d:
                raise VectorError(f"{path}:{column}: row {starts[g]} has dimension {part.shape[1]}, not {d}")
            parts.append(part[max(0, start - starts[g]) : stop - starts[g]])
        return np.concatenate(parts) if parts else np.empty((0, d), np.float32)

    filled = next((g for g, size in enumerate(sizes) if size), None)
    if filled is None:
        return Vectors(f"{path}:{column}", 0, fixed or 0, read)
    sample = rows_of(filled)
    check_table(sample.shape, sample.dtype, f"{path}:{column}")
    d = sample.shape[1]
    return Vectors(f"{path}:{column}", int(starts[-1]), d, _checked(path, read))
