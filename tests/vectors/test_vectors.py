"""Reading, checking and fingerprinting vectors: every format, and files that lie."""

import hashlib
import io
import subprocess
import sys

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from amips.errors import VectorError
from amips.vectors import first_equal, inspect, open_vectors, row_norms, unit_rows
from amips.vectors import vectors as vector_table

N, D = 41, 6


@pytest.fixture
def rows():
    return np.random.default_rng(0).standard_normal((N, D)).astype(np.float32)


@pytest.fixture
def small_ints():
    return np.random.default_rng(1).integers(-100, 100, (N, D)).astype(np.int8)


def write_vecs(path, values):
    values = np.ascontiguousarray(values)
    head = np.full((len(values), 1), values.shape[1], "<i4").view(np.uint8)
    np.hstack([head, values.view(np.uint8)]).tofile(path)


def write_bin(path, values):
    path.write_bytes(np.array(values.shape, "<u4").tobytes() + np.ascontiguousarray(values).tobytes())


def write_hdf5(path, **tables):
    with h5py.File(path, "w") as file:
        for name, values in tables.items():
            file[name] = values


def fixed_lists(values):
    return pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])


def write_parquet(path, column, rows_per_group=10, **others):
    pq.write_table(pa.table({"embedding": column, **others}), path, row_group_size=rows_per_group)


def write_any(path, values, rows_per_group=10):
    """Write float32 rows in the format of the ending of `path`."""
    ending = path.suffix
    if ending == ".npy":
        np.save(path, values)
    elif ending == ".fvecs":
        write_vecs(path, values)
    elif ending == ".fbin":
        write_bin(path, values)
    elif ending in (".hdf5", ".h5"):
        write_hdf5(path, train=values)
    elif ending == ".parquet":
        write_parquet(path, fixed_lists(values), rows_per_group)
    else:
        table = pa.table({"embedding": fixed_lists(values)})
        pyarrow.feather.write_feather(table, path, compression="uncompressed", chunksize=rows_per_group)


FORMATS = [".npy", ".fvecs", ".fbin", ".hdf5", ".h5", ".parquet", ".feather", ".arrow"]


def check_reads(vectors, expected):
    """Blocks of awkward sizes, single rows and scattered rows all give `expected`."""
    expected = expected.astype(np.float32)
    n = len(expected)
    assert (vectors.n, vectors.d, len(vectors)) == (n, expected.shape[1], n)
    assert np.array_equal(vectors.load(), expected)
    for size in (1, 7, 10, 13, n, 10 * n):
        starts, blocks = zip(*vectors.blocks(size), strict=True)
        assert starts == tuple(range(0, n, size))
        assert all(block.dtype == np.float32 and block.flags.c_contiguous for block in blocks)
        assert np.array_equal(np.concatenate(blocks), expected)
    for start, stop in ((0, 1), (9, 11), (8, 32), (n - 1, n), (n - 3, n + 50), (5, 5)):
        assert np.array_equal(vectors.rows(start, stop), expected[start:stop])
    ids = np.array([n - 1, 0, 17, 3, 3, 20, 0, 19])
    assert np.array_equal(vectors.take(ids), expected[ids])
    assert vectors.take(ids[:0]).shape == (0, expected.shape[1])
    with pytest.raises(IndexError):
        vectors.take(np.array([0, n]))


class TestFormats:
    @pytest.mark.parametrize("ending", FORMATS)
    def test_float32_from_every_format(self, tmp_path, rows, ending):
        path = tmp_path / f"data{ending}"
        write_any(path, rows)
        vectors = open_vectors(path)
        check_reads(vectors, rows)
        assert vectors.name.startswith(str(path))

    @pytest.mark.parametrize("kind", ["f4", "f2", "f8", "i1", "u1", "i4", "i8", ">f4", ">f8"])
    @pytest.mark.parametrize("order", ["C", "F"])
    def test_npy_of_any_number_type_and_order(self, tmp_path, small_ints, kind, order):
        values = np.asarray(np.abs(small_ints), dtype=kind, order=order)
        np.save(tmp_path / "a.npy", values)
        check_reads(open_vectors(tmp_path / "a.npy"), values)
        check_reads(open_vectors(values), values)

    def test_npy_of_float16_and_float64_is_rounded_like_a_cast(self, tmp_path):
        values = np.random.default_rng(2).standard_normal((N, D))
        for kind in (np.float16, np.float64):
            np.save(tmp_path / "a.npy", values.astype(kind))
            check_reads(open_vectors(tmp_path / "a.npy"), values.astype(kind))

    def test_npy_is_memory_mapped(self, tmp_path, rows):
        np.save(tmp_path / "a.npy", rows)
        vectors = open_vectors(tmp_path / "a.npy")
        assert isinstance(vectors.array, np.memmap)
        assert vectors.resident is None
        assert open_vectors(rows).resident is rows

    @pytest.mark.parametrize(("ending", "kind"), [(".fvecs", "<f4"), (".ivecs", "<i4"), (".bvecs", "u1")])
    def test_vecs_family(self, tmp_path, small_ints, ending, kind):
        values = np.abs(small_ints).astype(kind)
        write_vecs(tmp_path / f"a{ending}", values)
        check_reads(open_vectors(tmp_path / f"a{ending}"), values)

    @pytest.mark.parametrize(
        ("ending", "kind"), [(".fbin", "<f4"), (".ibin", "<i4"), (".u8bin", "u1"), (".i8bin", "i1")]
    )
    def test_bin_family(self, tmp_path, small_ints, ending, kind):
        values = (np.abs(small_ints) if kind == "u1" else small_ints).astype(kind)
        write_bin(tmp_path / f"a{ending}", values)
        check_reads(open_vectors(tmp_path / f"a{ending}"), values)

    def test_hdf5_gives_each_role_its_data_set(self, tmp_path, rows):
        path = tmp_path / "a.hdf5"
        write_hdf5(path, train=rows, test=2 * rows, learn=3 * rows, neighbors=np.zeros((N, 10), np.int32))
        check_reads(open_vectors(path, "keys"), rows)
        check_reads(open_vectors(path, "queries"), 3 * rows)
        check_reads(open_vectors(f"{path}:test", "queries"), 2 * rows)
        check_reads(open_vectors(f"{path}:learn", "keys"), 3 * rows)
        assert open_vectors(f"{path}:test").name == f"{path}:test"

    def test_hdf5_without_learn_gives_test_as_queries(self, tmp_path, rows):
        write_hdf5(tmp_path / "a.h5", train=rows, test=2 * rows)
        check_reads(open_vectors(tmp_path / "a.h5", "queries"), 2 * rows)

    @pytest.mark.parametrize("kind", [np.float16, np.float64, np.int8])
    def test_hdf5_of_other_types(self, tmp_path, small_ints, kind):
        write_hdf5(tmp_path / "a.h5", train=small_ints.astype(kind))
        check_reads(open_vectors(tmp_path / "a.h5"), small_ints)

    def test_hdf5_in_a_group(self, tmp_path, rows):
        write_hdf5(tmp_path / "a.h5", **{"deep/er": rows})
        check_reads(open_vectors(f"{tmp_path / 'a.h5'}:deep/er"), rows)

    @pytest.mark.parametrize("ending", [".parquet", ".feather"])
    @pytest.mark.parametrize("kind", [pa.float32(), pa.float16(), pa.float64(), pa.int8()])
    @pytest.mark.parametrize("shape", ["fixed", "list", "large"])
    def test_arrow_lists_of_any_kind(self, tmp_path, small_ints, ending, kind, shape):
        nested = {
            "fixed": lambda: pa.list_(kind, D),
            "list": lambda: pa.list_(kind),
            "large": lambda: pa.large_list(kind),
        }[shape]()
        flat = pa.array(small_ints.ravel()).cast(kind)
        column = pa.FixedSizeListArray.from_arrays(flat, D).cast(nested)
        path = tmp_path / f"a{ending}"
        table = pa.table({"id": list(range(N)), "embedding": column})
        if ending == ".parquet":
            pq.write_table(table, path, row_group_size=10)
        else:
            pyarrow.feather.write_feather(table, path, chunksize=10)
        check_reads(open_vectors(path), small_ints)

    def test_parquet_with_several_list_columns_needs_a_name(self, tmp_path, rows):
        path = tmp_path / "a.parquet"
        write_parquet(path, fixed_lists(rows), other=fixed_lists(2 * rows), text=["x"] * N)
        with pytest.raises(VectorError, match="name the one to read"):
            open_vectors(path)
        check_reads(open_vectors(f"{path}:other"), 2 * rows)
        with pytest.raises(VectorError, match="no list column 'text'"):
            open_vectors(f"{path}:text")

    def test_parquet_whose_first_row_group_is_empty(self, tmp_path, rows):
        table = pa.table({"embedding": fixed_lists(rows).cast(pa.list_(pa.float32()))})
        with pq.ParquetWriter(tmp_path / "a.parquet", table.schema) as writer:
            writer.write_table(table.slice(0, 0), row_group_size=10)
            writer.write_table(table, row_group_size=10)
        check_reads(open_vectors(tmp_path / "a.parquet"), rows)

    def test_blocks_smaller_and_larger_than_row_groups(self, tmp_path, monkeypatch, rows):
        write_parquet(tmp_path / "a.parquet", fixed_lists(rows), rows_per_group=5)
        for rows_per_block in (3, 12):
            monkeypatch.setattr(vector_table, "BLOCK_BYTES", rows_per_block * 4 * D)
            check_reads(open_vectors(tmp_path / "a.parquet"), rows)

    def test_scattered_rows_of_a_row_group_file_are_read_once(self, tmp_path, monkeypatch, rows):
        write_parquet(tmp_path / "a.parquet", fixed_lists(rows), rows_per_group=5)
        monkeypatch.setattr(vector_table, "BLOCK_BYTES", 4 * 4 * D)
        vectors = open_vectors(tmp_path / "a.parquet")
        asked = []
        counting = vector_table.Vectors(
            vectors.name, vectors.n, vectors.d, lambda a, b: asked.append((a, b)) or vectors.read(a, b)
        )
        counting.take(np.array([40, 22, 21, 22]))
        assert asked == [(21, 23), (40, 41)]

    def test_what_is_open_already_is_returned_as_it_is(self, rows):
        vectors = open_vectors(rows)
        assert open_vectors(vectors) is vectors

    def test_views_lists_and_transposes_in_memory(self, rows):
        check_reads(open_vectors(rows[::-1, ::2]), rows[::-1, ::2])
        check_reads(open_vectors(rows.tolist()), rows)

    def test_upper_case_endings(self, tmp_path, rows):
        with (tmp_path / "A.NPY").open("wb") as f:
            np.save(f, rows)
        check_reads(open_vectors(str(tmp_path / "A.NPY")), rows)


def use_all(source):
    """Open and read all of a file, as labelling does."""
    vectors = open_vectors(source)
    inspect(vectors, zero="keep")
    first_equal(vectors)


def refused(source, match=None, names=None):
    """The one line that a file is refused with; it names the file."""
    with pytest.raises(VectorError, match=match) as caught:
        use_all(source)
    message = str(caught.value)
    assert "\n" not in message
    assert str(names or source) in message
    return message


class TestHostileFiles:
    @pytest.mark.parametrize("ending", FORMATS)
    def test_cut_anywhere(self, tmp_path, rows, ending):
        path = tmp_path / f"a{ending}"
        write_any(path, rows)
        whole = path.read_bytes()
        for size in [0, 1, 3, 7, 9, 40, 100, len(whole) // 2, len(whole) - 5, len(whole) - 1]:
            path.write_bytes(whole[:size])
            refused(path)

    @pytest.mark.parametrize("ending", FORMATS)
    def test_random_bytes(self, tmp_path, ending):
        path = tmp_path / f"a{ending}"
        path.write_bytes(np.random.default_rng(3).bytes(1000))
        refused(path)

    @pytest.mark.parametrize("ending", [".hdf5", ".parquet", ".feather", ".arrow", ".npy"])
    def test_flipped_bytes_never_end_in_another_error(self, tmp_path, ending):
        """Damage may go unnoticed where the format has no checksum; it must not crash."""
        path = tmp_path / f"a{ending}"
        write_any(path, np.ones((30, 4), np.float32))
        whole = bytearray(path.read_bytes())
        rng = np.random.default_rng(4)
        refusals = []
        for place in rng.integers(0, len(whole), 150):
            damaged = whole.copy()
            damaged[place] ^= int(rng.integers(1, 256))
            path.write_bytes(damaged)
            try:
                use_all(path)
            except VectorError as problem:
                refusals.append(str(problem))
        assert refusals
        assert all(str(path) in line and "\n" not in line for line in refusals)

    @pytest.mark.parametrize("ending", FORMATS)
    def test_no_rows(self, tmp_path, ending):
        path = tmp_path / f"a{ending}"
        write_any(path, np.empty((0, D), np.float32))
        refused(path, "empty" if ending == ".fvecs" else "no rows")

    @pytest.mark.parametrize("ending", [".npy", ".fbin", ".hdf5"])
    def test_no_columns(self, tmp_path, ending):
        write_any(tmp_path / f"a{ending}", np.empty((5, 0), np.float32))
        refused(tmp_path / f"a{ending}", "dimension 0")

    def test_missing_file_directory_and_unknown_ending(self, tmp_path):
        refused(tmp_path / "nothing.npy", "does not exist")
        (tmp_path / "folder.npy").mkdir()
        refused(tmp_path / "folder.npy", "is a directory")
        (tmp_path / "keys.txt").write_text("1 2 3")
        refused(tmp_path / "keys.txt", "unknown kind of vector file '.txt'; known: .npy")
        (tmp_path / "keys").write_text("1 2 3")
        refused(tmp_path / "keys", "unknown kind")
        refused(f"{tmp_path / 'nothing.hdf5'}:train", "does not exist", tmp_path / "nothing.hdf5")

    @pytest.mark.parametrize("shape", [(), (7,), (2, 3, 4)])
    def test_npy_of_another_number_of_axes(self, tmp_path, shape):
        np.save(tmp_path / "a.npy", np.ones(shape, np.float32))
        refused(tmp_path / "a.npy", r"expected a table of shape \[n, d\]")

    @pytest.mark.parametrize(
        "values",
        [
            np.array([["a", "b"]]),
            np.array([[b"a", b"b"]]),
            np.ones((3, 2), bool),
            np.ones((3, 2), complex),
            np.zeros((3, 2), "M8[s]"),
            np.zeros((3, 2), [("x", "f4")]),
        ],
    )
    def test_values_that_are_not_numbers(self, tmp_path, values):
        np.save(tmp_path / "a.npy", values)
        refused(tmp_path / "a.npy", "are not numbers")
        refused(values, "are not numbers", "keys")

    def test_pickles_are_never_loaded(self, tmp_path):
        np.save(tmp_path / "a.npy", np.array([[{"x": 1}, None]], object), allow_pickle=True)
        refused(tmp_path / "a.npy", "not a readable .npy file")

    def test_an_npz_archive_named_npy(self, tmp_path, rows):
        memory = io.BytesIO()
        np.savez(memory, rows)
        (tmp_path / "a.npy").write_bytes(memory.getvalue())
        refused(tmp_path / "a.npy", "not a readable .npy file")

    @pytest.mark.parametrize(
        "header",
        [
            "{'descr': '<f4', 'fortran_order': False, 'shape': (1000, 1000)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 4)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (4611686018427387904, 4611686018427387904)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999999, 4)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': ('a', 4)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (True, 4)}",
            "{'descr': 'zz', 'fortran_order': False, 'shape': (2, 4)}",
            "{'descr': '<f4', 'fortran_order': ",
            "((((",
            "__import__('os').abort()",
        ],
    )
    def test_npy_whose_header_lies(self, tmp_path, header):
        text = header.encode().ljust(117) + b"\n"
        head = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little")
        (tmp_path / "a.npy").write_bytes(head + text + bytes(64))
        refused(tmp_path / "a.npy")

    def test_npy_that_is_cut_after_it_was_opened(self, tmp_path, rows):
        path = tmp_path / "a.npy"
        np.save(path, rows)
        vectors = open_vectors(path)
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(VectorError, match="has been cut"):
            inspect(vectors)

    def test_vecs_with_a_row_of_another_dimension(self, tmp_path, rows):
        path = tmp_path / "a.fvecs"
        write_vecs(path, rows)
        raw = np.fromfile(path, "<i4")
        raw[17 * (D + 1)] = D - 1
        raw.tofile(path)
        refused(path, "row 17 has another dimension")

    @pytest.mark.parametrize("d", [0, -1, 2**31 - 1, 5])
    def test_vecs_with_a_wrong_first_dimension(self, tmp_path, rows, d):
        path = tmp_path / "a.fvecs"
        write_vecs(path, rows)
        raw = np.fromfile(path, "<i4")
        raw[0] = d
        raw.tofile(path)
        refused(path)

    @pytest.mark.parametrize("header", [(N + 1, D), (N, D - 1), (2**32 - 1, 2**32 - 1), (0, D)])
    def test_bin_whose_header_lies(self, tmp_path, rows, header):
        path = tmp_path / "a.fbin"
        path.write_bytes(np.array(header, "<u4").tobytes() + rows.tobytes())
        refused(path, "its header says")

    def test_hdf5_data_sets_that_are_not_tables(self, tmp_path):
        path = tmp_path / "a.h5"
        with h5py.File(path, "w") as file:
            file.create_group("train")
            file["nothing"] = h5py.Empty("f")
            file["one"] = 3.0
            file["words"] = [["a", "b"]]
            file["broken"] = h5py.SoftLink("/nowhere")
            file["elsewhere"] = h5py.ExternalLink("nowhere.h5", "/x")
        for source in (path, *(f"{path}:{name}" for name in ("train", "broken", "elsewhere", "/", "absent"))):
            refused(source, "no data set", path)
        for name in ("nothing", "one"):
            refused(f"{path}:{name}", "expected a table")
        refused(f"{path}:words", "are not numbers")

    def test_hdf5_without_the_data_set_says_what_it_has(self, tmp_path, rows):
        write_hdf5(tmp_path / "a.h5", base=rows, other=rows)
        assert "no data set train; it has base other" in refused(tmp_path / "a.h5")
        with pytest.raises(VectorError, match="no data set learn or test"):
            open_vectors(tmp_path / "a.h5", "queries")

    def test_hdf5_with_damaged_data(self, tmp_path, rows):
        path = tmp_path / "a.h5"
        with h5py.File(path, "w") as file:
            file.create_dataset("train", data=rows, compression="gzip", chunks=(N, D), fletcher32=True)
            place = file["train"].id.get_chunk_info(0).byte_offset
        raw = bytearray(path.read_bytes())
        raw[place + 20] ^= 255
        path.write_bytes(raw)
        refused(path, "damaged")

    def test_parquet_with_an_empty_cell(self, tmp_path, rows):
        cells = rows.tolist()
        for place in (3, 33):  # in the first row group, which is read on opening, and in a later one
            write_parquet(
                tmp_path / "a.parquet",
                pa.array([*cells[:place], None, *cells[place + 1 :]], pa.list_(pa.float32())),
            )
            refused(
                tmp_path / "a.parquet", f"empty cell in rows {place // 10 * 10} to {place // 10 * 10 + 10}"
            )

    @pytest.mark.parametrize("place", [3, 33])
    def test_parquet_with_an_empty_value(self, tmp_path, rows, place):
        cells = rows.tolist()
        cells[place][2] = None
        write_parquet(tmp_path / "a.parquet", pa.array(cells, pa.list_(pa.float32())))
        refused(tmp_path / "a.parquet", f"row {place} has a value that is NaN")

    @pytest.mark.parametrize("group", [0, 3])
    def test_parquet_with_lists_of_several_lengths(self, tmp_path, rows, group):
        """Also when the lengths of a row group have the right sum."""
        cells = rows.tolist()
        cells[10 * group + 2].append(1.0)
        write_parquet(tmp_path / "a.parquet", pa.array(cells, pa.list_(pa.float32())))
        refused(tmp_path / "a.parquet", f"lists differ in length near row {10 * group}")
        cells[10 * group + 3].pop()
        write_parquet(tmp_path / "a.parquet", pa.array(cells, pa.list_(pa.float32())))
        refused(tmp_path / "a.parquet", f"lists differ in length near row {10 * group}")

    def test_parquet_with_row_groups_of_another_dimension(self, tmp_path, rows):
        cells = [*rows[:20].tolist(), *rows[20:, :4].tolist()]
        write_parquet(tmp_path / "a.parquet", pa.array(cells, pa.list_(pa.float32())))
        refused(tmp_path / "a.parquet", "row 20 has dimension 4, not 6")

    def test_parquet_of_words_and_without_lists(self, tmp_path):
        write_parquet(tmp_path / "a.parquet", pa.array([["a"], ["b"]]))
        refused(tmp_path / "a.parquet", "are not numbers")
        write_parquet(tmp_path / "b.parquet", pa.array([1.0, 2.0]))
        refused(tmp_path / "b.parquet", "0 list columns")

    def test_parquet_with_damaged_data(self, tmp_path, rows):
        path = tmp_path / "a.parquet"
        pq.write_table(pa.table({"embedding": fixed_lists(rows)}), path, compression="zstd")
        raw = bytearray(path.read_bytes())
        raw[30:60] = bytes(30)
        path.write_bytes(raw)
        refused(path, "damaged")

    @pytest.mark.parametrize("offset", [2**30, -6])
    def test_feather_whose_offsets_point_elsewhere(self, tmp_path, rows, offset):
        path = tmp_path / "a.feather"
        table = pa.table({"embedding": fixed_lists(rows).cast(pa.list_(pa.float32()))})
        pyarrow.feather.write_feather(table, path, compression="uncompressed")
        offsets = np.arange(0, N * D + 1, D, dtype="<i4")
        whole = path.read_bytes()
        assert whole.count(offsets.tobytes()) == 1
        damaged = offsets.copy()
        damaged[20] = offset
        path.write_bytes(whole.replace(offsets.tobytes(), damaged.tobytes()))
        refused(path, "not a readable .feather file")

    def test_lists_in_memory_that_are_not_a_table(self):
        for wrong in ([[1.0, 2.0], [3.0]], [1.0, 2.0], None, [["a"]]):
            refused(wrong, names="keys")
        refused(np.empty((0, 3)), "no rows", "keys")


class TestInspect:
    @pytest.mark.parametrize(
        ("value", "word"), [(np.nan, "NaN"), (np.inf, "infinite"), (-np.inf, "infinite")]
    )
    def test_the_first_bad_row_is_named(self, rows, monkeypatch, value, word):
        rows[[23, 30], 2] = value
        for block in (5, 1000):
            monkeypatch.setattr(vector_table, "BLOCK_BYTES", block * 4 * D)
            with pytest.raises(VectorError, match=f"^queries: row 23 has a value that is {word}"):
                inspect(open_vectors(rows, "queries"))

    def test_values_whose_squares_overflow(self, rows):
        rows[5] = 1e30
        with pytest.raises(VectorError, match="row 5 has a value that is too large"):
            inspect(open_vectors(rows))

    @pytest.mark.parametrize("kind", ["npy", "parquet"])
    def test_float64_beyond_float32(self, tmp_path, rows, kind):
        wide = rows.astype(np.float64)
        wide[7, 1] = 1e200
        path = tmp_path / f"a.{kind}"
        write_any(path, wide)
        with pytest.raises(VectorError, match="row 7 has a value that is infinite"):
            inspect(open_vectors(path))
        assert np.isinf(open_vectors(path).take(np.array([7]))).any()

    def test_zero_rows(self, rows):
        rows[[4, 9]] = 0
        with pytest.raises(VectorError, match="row 4 is all zero"):
            inspect(open_vectors(rows))
        facts = inspect(open_vectors(rows), zero="keep")
        assert facts.zero_rows == 2
        assert facts.min_norm == 0
        with pytest.raises(VectorError, match="expected"):
            inspect(open_vectors(rows), zero="maybe")

    def test_facts(self, rows):
        facts = inspect(open_vectors(rows))
        norms = np.linalg.norm(rows.astype(np.float64), axis=1)
        assert (facts.n, facts.d, facts.zero_rows) == (N, D, 0)
        assert facts.min_norm == pytest.approx(norms.min(), rel=1e-6)
        assert facts.max_norm == pytest.approx(norms.max(), rel=1e-6)
        assert not facts.unit_norm

    def test_unit_norm(self, rows):
        unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        assert inspect(open_vectors(unit)).unit_norm
        assert inspect(open_vectors(unit.astype(np.float16))).unit_norm
        unit[3] *= 1.01
        assert not inspect(open_vectors(unit)).unit_norm
        unit[3] *= 0.97
        assert not inspect(open_vectors(unit)).unit_norm

    def test_the_fingerprint_is_of_the_content_only(self, tmp_path, rows, monkeypatch):
        expected = hashlib.sha256(f"{N}x{D}:f32".encode() + rows.tobytes()).hexdigest()
        seen = {
            inspect(open_vectors(rows)).fingerprint,
            inspect(open_vectors(np.asfortranarray(rows))).fingerprint,
        }
        for ending in FORMATS:
            write_any(tmp_path / f"a{ending}", rows)
            seen.add(inspect(open_vectors(tmp_path / f"a{ending}")).fingerprint)
        monkeypatch.setattr(vector_table, "BLOCK_BYTES", 7 * 4 * D)
        for ending in FORMATS:
            seen.add(inspect(open_vectors(tmp_path / f"a{ending}")).fingerprint)
        np.save(tmp_path / "wide.npy", rows.astype(np.float64))
        seen.add(inspect(open_vectors(tmp_path / "wide.npy")).fingerprint)
        assert seen == {expected}

    def test_the_fingerprint_changes_with_one_bit_the_order_and_the_shape(self, rows):
        changed = rows.copy()
        changed.view(np.uint32)[20, 3] ^= 1
        variants = [rows, changed, rows[::-1], rows.reshape(-1, 2), rows[:-1]]
        assert len({inspect(open_vectors(v)).fingerprint for v in variants}) == len(variants)

    def test_row_norms(self, rows):
        assert np.allclose(row_norms(rows), np.linalg.norm(rows, axis=1), rtol=1e-6)

    @pytest.mark.parametrize("exponent", [-140, -80, 0, 80, 120])
    def test_rows_at_norm_1_whatever_their_norm(self, rows, exponent):
        unit, norms = unit_rows(np.ldexp(rows, exponent))
        assert unit.dtype == np.float32
        np.testing.assert_allclose(
            norms, np.linalg.norm(np.ldexp(rows, exponent).astype(float), axis=1), rtol=1e-6
        )
        if exponent > -140:  # there, digits are lost before
            np.testing.assert_array_equal(unit, unit_rows(rows)[0])
        np.testing.assert_allclose(np.linalg.norm(unit.astype(float), axis=1), 1, rtol=1e-6)

    def test_a_row_at_norm_1_does_not_depend_on_the_others(self, rows):
        alone = unit_rows(rows)[0]
        odd = np.array([0.0, 1e30, 1e-30, np.inf, np.nan], np.float32)[:, None] * np.ones(
            rows.shape[1], np.float32
        )
        unit, norms = unit_rows(np.concatenate([odd, rows]))
        np.testing.assert_array_equal(unit[5:], alone)
        assert (unit[0] == 0).all()
        np.testing.assert_allclose(unit[1:3], 1 / np.sqrt(rows.shape[1]), rtol=1e-6)
        np.testing.assert_array_equal(np.isfinite(norms[:5]), [True, True, True, False, False])


def brute_first_equal(rows):
    seen = {}
    return [seen.setdefault(tuple((row + 0.0).tolist()), i) for i, row in enumerate(rows)]


class TestFirstEqual:
    def test_against_brute_force(self, tmp_path, monkeypatch):
        rows = np.random.default_rng(5).integers(-1, 2, (500, 4)).astype(np.float32)
        expected = brute_first_equal(rows)
        assert len(set(expected)) < 90
        assert first_equal(open_vectors(rows)).tolist() == expected
        monkeypatch.setattr(vector_table, "BLOCK_BYTES", 64)
        write_parquet(tmp_path / "a.parquet", fixed_lists(rows), rows_per_group=33)
        assert first_equal(open_vectors(tmp_path / "a.parquet")).tolist() == expected

    def test_no_doubles(self, rows):
        assert first_equal(open_vectors(rows)).tolist() == list(range(N))

    def test_minus_zero_is_zero(self):
        rows = np.array([[0.0, 1.0], [-0.0, 1.0], [0.0, -1.0], [-0.0, -1.0]], np.float32)
        assert first_equal(open_vectors(rows)).tolist() == [0, 0, 2, 2]

    def test_at_norm_1(self, rows):
        scales = np.float32(2) ** np.arange(-100, 101, 50)
        log = open_vectors(np.concatenate([rows * scale for scale in scales] + [-rows]))
        assert first_equal(log).tolist() == list(range(6 * N))
        assert first_equal(log, unit=True).tolist() == [*list(range(N)) * 5, *range(5 * N, 6 * N)]

    def test_rows_that_differ_in_one_bit_differ(self, rows):
        near = rows.copy()
        near.view(np.uint32)[:, 0] ^= 1
        assert first_equal(open_vectors(np.concatenate([rows, near, rows]))).tolist() == [
            *range(2 * N),
            *range(N),
        ]

    def test_rows_of_signs_are_told_apart_whatever_the_hash(self):
        """Their bits differ in one place of 32, which leaves little to hash: some rows collide."""
        signs = np.random.default_rng(0).integers(0, 2, (1 << 17, 24)).astype(np.float32) * 2 - 1
        codes = (signs > 0) @ (1 << np.arange(24))
        _, first, inverse = np.unique(np.tile(codes, 2), return_index=True, return_inverse=True)
        assert np.array_equal(first_equal(open_vectors(np.tile(signs, (2, 1)))), first[inverse])


MEASURE = """
import sys, numpy as np
from amips.vectors import inspect, open_vectors
def peak():
    status = open("/proc/self/status").read()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
vectors = open_vectors(sys.argv[1])
first = vectors.rows(0, 10)
before = peak()
{work}
print(peak() - before)
"""


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A float64 .npy of 205 MB (mostly holes, where the file system has them)."""
    path = tmp_path_factory.mktemp("wide") / "wide.npy"
    array = np.lib.format.open_memmap(path, "w+", np.float64, (200_000, 128))
    array[:, 0] = 1
    array.flush()
    del array
    yield path
    path.unlink()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
class TestMemory:
    def grown(self, path, work):
        """By how many bytes the peak memory of a process grows with `work`."""
        done = subprocess.run(
            [sys.executable, "-c", MEASURE.format(work=work), str(path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    def test_checking_converts_block_by_block(self, wide):
        """A block of the file, its conversion and the one before: 4 x 33 MB, not the 205 MB of the file."""
        assert self.grown(wide, "inspect(vectors)") < 150e6

    def test_loading_holds_the_float32_table_and_a_block(self, wide):
        table = 200_000 * 128 * 4
        assert table <= self.grown(wide, "x = vectors.load()") < table + 150e6

    def test_scattered_rows_do_not_hold_the_pages_of_the_file(self, wide):
        work = "x = vectors.take(np.arange(0, vectors.n, 40)[::-1])"
        assert self.grown(wide, work) < 60e6


class TestGather:
    """Scattered rows of a file, in one pass."""

    @pytest.fixture
    def mapped(self, tmp_path):
        rows = np.random.default_rng(3).standard_normal((5000, D)).astype(np.float32)
        np.save(tmp_path / "rows.npy", rows)
        return rows, np.load(tmp_path / "rows.npy", mmap_mode="r")

    @pytest.mark.parametrize("around", [1, 1 << 30], ids=["far apart", "dense"])
    @pytest.mark.parametrize("count", [0, 1, 700])
    def test_rows_come_in_the_order_asked_for(self, mapped, monkeypatch, count, around):
        monkeypatch.setattr(vector_table, "GATHER", 64)
        monkeypatch.setattr(vector_table, "READ_AROUND", around)
        rows, file = mapped
        ids = np.random.default_rng(4).integers(0, len(rows), count)  # some of them twice
        np.testing.assert_array_equal(vector_table.gather(file, ids), rows[ids])

    def test_a_row_that_is_not_there(self, mapped):
        with pytest.raises(IndexError):
            vector_table.gather(mapped[1], np.array([0, 5000]))

    def test_the_file_is_read_from_low_to_high(self, mapped, monkeypatch):
        monkeypatch.setattr(vector_table, "GATHER", 16)
        asked = []

        class Noted(np.memmap):
            def __getitem__(self, ids):
                asked.append(ids)
                return np.asarray(self)[ids]

        file = mapped[1].view(Noted)
        vector_table.gather(file, np.random.default_rng(4).permutation(100))
        assert np.concatenate(asked).tolist() == list(range(100))
