"""Vectors and ids from what data come in: data frames, Arrow tables, tensors, columns of files."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from amips.errors import AmipsError, VectorError
from amips.vectors import open_vectors, read_ids

N, D = 300, 5


@pytest.fixture
def rows():
    return np.random.default_rng(0).standard_normal((N, D)).astype(np.float32)


def lists(values):
    return pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])


def frames(rows):
    """The same vectors in every form that is read."""
    chunked = pa.chunked_array([lists(rows[:100]), lists(rows[100:])])
    table = pa.table({"id": np.arange(len(rows)), "embedding": chunked, "text": ["x"] * len(rows)})
    of_lists = pd.DataFrame({"text": "x", "embedding": rows.tolist()}, index=range(7, 7 + len(rows)))
    of_arrays = pd.DataFrame({"embedding": list(rows), "id": range(len(rows))})
    of_arrow = pd.DataFrame({"embedding": pd.Series(chunked, dtype=pd.ArrowDtype(chunked.type))})
    return {
        "pandas, lists": of_lists,
        "pandas, arrays": of_arrays,
        "pandas, a column": of_lists["embedding"],
        "pandas, Arrow lists": of_arrow,
        "pandas, a column a dimension": pd.DataFrame(rows),
        "Arrow table": table,
        "Arrow table, variable lists": table.set_column(1, "embedding", chunked.cast(pa.list_(pa.float32()))),
        "Arrow batch": table.combine_chunks().to_batches()[0],
        "Arrow column": table["embedding"],
        "Arrow array": lists(rows),
        "an array of arrays": np.array([*rows, None], object)[:-1],
        "lists": rows.tolist(),
        "tuples": tuple(map(tuple, rows.tolist())),
    }


@pytest.mark.parametrize("name", frames(np.zeros((1, 1), np.float32)))
def test_every_form_gives_the_same_rows(rows, name):
    source = frames(rows)[name]
    vectors = open_vectors(source)
    assert (vectors.n, vectors.d) == (N, D)
    np.testing.assert_array_equal(vectors.load(), rows)
    np.testing.assert_array_equal(vectors.rows(90, 130), rows[90:130])
    ids = np.array([250, 3, 99, 100, 3])
    np.testing.assert_array_equal(vectors.take(ids), rows[ids])


def test_torch_tensors(rows):
    torch = pytest.importorskip("torch")
    np.testing.assert_array_equal(open_vectors(torch.from_numpy(rows)).load(), rows)
    with pytest.raises(VectorError, match=r"keys are not a table of numbers: .*detach"):
        open_vectors(torch.zeros(2, 3, requires_grad=True))


def test_polars(rows):
    polars = pytest.importorskip("polars")
    for kind in (polars.Array(polars.Float32, D), polars.List(polars.Float32)):
        column = polars.Series("embedding", rows.tolist(), dtype=kind)
        frame = polars.DataFrame({"id": range(N), "embedding": column})
        for source in (frame, column):
            np.testing.assert_array_equal(open_vectors(source).load(), rows)
        assert read_ids(frame["id"]).tolist() == list(range(N))


class Frame:
    """As little of a data frame as is needed."""

    def __init__(self, **columns):
        self.of = columns

    columns = property(lambda self: list(self.of))

    def __getitem__(self, name):
        return self.of[name]


def test_a_frame_of_any_library(rows):
    np.testing.assert_array_equal(open_vectors(Frame(id=np.arange(N), v=rows)).load(), rows)


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (lambda rows: pd.DataFrame({"a": rows.tolist(), "b": rows.tolist()}), r"2 columns.*frame\['a'\]"),
        (lambda rows: pd.DataFrame({"id": [1], "text": ["x"]}), r"none of the columns \['id', 'text'\]"),
        (
            lambda rows: pd.DataFrame({"v": [[1.0, 2.0], [1.0]]}),
            "keys:v: row 1 has dimension 1, but row 0 has 2",
        ),
        (lambda rows: pd.DataFrame({"v": [[1.0, 2.0], None]}), "row 1 is no list of numbers but None"),
        (lambda rows: pd.DataFrame({"v": [["a", "b"]]}), "are not numbers"),
        (lambda rows: pd.DataFrame({"v": []}), "no rows|none of the columns|expected a table"),
        (lambda rows: pa.table({"a": lists(rows), "b": lists(rows)}), "2 list columns"),
        (lambda rows: pa.table({"id": [1, 2]}), "0 list columns"),
        (lambda rows: pa.array([1.0, 2.0]), "an Arrow array of double, expected lists"),
        (lambda rows: pa.chunked_array([[[1.0, 2.0], None]]), "empty cell"),
        (lambda rows: pa.scalar(3), "not a table of numbers"),
        (lambda rows: rows[0], r"expected a table of shape \[n, d\], got shape \[5\]"),
        (
            lambda rows: "ftp://host/keys.npy",
            "^ftp://host/keys.npy cannot be opened: Unrecognized file",
        ),
    ],
)
def test_what_is_no_table_is_one_line(rows, source, match):
    with pytest.raises(VectorError, match=match) as caught:
        open_vectors(source(rows)).load()
    assert "\n" not in str(caught.value)


def test_one_vector_where_one_is_expected(rows, tmp_path):
    np.save(tmp_path / "one.npy", rows[3])
    for source in (rows[3], tmp_path / "one.npy", rows[3].tolist(), rows[3:4]):
        np.testing.assert_array_equal(open_vectors(source, "queries", single=True).load(), rows[3:4])
    with pytest.raises(VectorError, match="got shape"):
        open_vectors(tmp_path / "one.npy", "queries")


NAMES = [f"Straße {i}" for i in range(N)]


@pytest.fixture
def files(tmp_path):
    table = pa.table({"product": NAMES, "number": np.arange(N) * 7, "v": lists(np.ones((N, 2), np.float32))})
    pq.write_table(table, tmp_path / "keys.parquet", row_group_size=64)
    pyarrow.feather.write_feather(table, tmp_path / "keys.feather", chunksize=64)
    pq.write_table(table.select(["product", "v"]), tmp_path / "one.parquet")
    np.save(tmp_path / "numbers.npy", np.arange(N) * 7)
    (tmp_path / "names.txt").write_text("".join(f"{name}\n" for name in NAMES), "utf-8")
    return tmp_path


@pytest.mark.parametrize(
    "source", ["keys.parquet:product", "keys.feather:product", "one.parquet", "names.txt"]
)
def test_names_from_files(files, source):
    ids = read_ids(f"{files}/{source}")
    assert ids.dtype.kind == "U"
    assert ids.tolist() == NAMES


@pytest.mark.parametrize("source", ["keys.parquet:number", "keys.feather:number", "numbers.npy"])
def test_numbers_from_files(files, source):
    ids = read_ids(files / source)
    assert ids.dtype == np.int64
    assert ids.tolist() == [7 * i for i in range(N)]


@pytest.mark.parametrize(
    "source",
    [
        pd.Series(NAMES),
        pd.Series(NAMES, dtype="category"),
        pa.chunked_array([NAMES[:9], NAMES[9:]]),
        pa.array(NAMES, pa.large_string()),
        np.array(NAMES),
        np.array(NAMES, object),
        tuple(NAMES),
    ],
)
def test_names_from_columns(source):
    assert read_ids(source).tolist() == NAMES


@pytest.mark.parametrize(
    "source", [pd.Series(range(3), index=[5, 6, 7]), pa.array([0, 1, 2], pa.uint16()), range(3), [0, 1, 2]]
)
def test_numbers_from_columns(source):
    ids = read_ids(source)
    assert (ids.dtype, ids.tolist()) == (np.dtype(np.int64), [0, 1, 2])


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (["b", "a", "c", "a", "b"], "ids: rows 1 and 3 have the same id 'a'; every key needs its own"),
        ([4, 4, 1, 1], "rows 0 and 1 have the same id 4"),
        (pa.array([1, None, 2, None]), "2 rows have no id"),
        (pa.array(["x", None]), "1 rows have no id"),
        (pd.Series(["x", None]), "expected whole numbers or strings"),
        ([0.5, 1.0], "ids of type float64: expected whole numbers or strings"),
        ([2**64 - 1], "does not fit in int64"),
    ],
)
def test_ids_that_cannot_be(source, match):
    with pytest.raises(AmipsError, match=match):
        read_ids(source)


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("keys.parquet", r"2 columns of numbers or strings \['product', 'number'\]; name one"),
        ("keys.parquet:price", r"no column 'price'; it has \['product', 'number', 'v'\]"),
        ("keys.parquet:v", "expected whole numbers or strings|cannot be read"),
        ("nothing.parquet:id", r"nothing\.parquet does not exist"),
        ("cut.npy", r"cut\.npy is not a readable \.npy file"),
        ("cut.parquet:id", r"cut\.parquet is not a readable \.parquet file"),
        ("binary.txt", "not UTF-8 text"),
    ],
)
def test_files_of_ids_that_cannot_be_read(files, source, match):
    for name in ("cut.npy", "cut.parquet", "binary.txt"):
        (files / name).write_bytes(b"\xff\xfe\x00cut")
    with pytest.raises(AmipsError, match=match) as caught:
        read_ids(f"{files}/{source}")
    assert "\n" not in str(caught.value)
