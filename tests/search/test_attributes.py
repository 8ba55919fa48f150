"""Attributes of keys: where they come from, where they are kept, and files that someone has tampered with."""

import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import amips
from amips.files import sha256
from amips.search.attributes import read_table
from helpers import make_world, reseal

N, D = 400, 8


@pytest.fixture(scope="module")
def task():
    return amips.label(*make_world(N, 300, D, seed=1), cells=8)


@pytest.fixture(scope="module")
def table():
    return pa.table({"number": np.arange(N), "lang": [("en", "de")[i % 2] for i in range(N)]})


def forms(table, folder):
    """The same table in every form in which it may come."""
    pq.write_table(table, folder / "a.parquet")
    with pa.OSFile(str(folder / "a.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    coded = table.set_column(1, "lang", table["lang"].dictionary_encode())
    (batch,) = table.combine_chunks().to_batches()
    return [table, batch, table.to_pandas(), folder / "a.parquet", str(folder / "a.arrow"), coded]


def test_every_form_is_the_same_table(table, tmp_path):
    for form in forms(table, tmp_path):
        assert read_table(form, N).equals(table)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (pa.table({"a": [1, 2]}), "2 rows for 400 keys"),
        (pa.table({"a": [[1]] * N}), "a is of type list<item: int64>"),
        (pa.table([np.arange(N), np.arange(N)], names=["a", "a"]), "two columns 'a'"),
        (pd.DataFrame(index=range(N)), "has no columns"),
        (np.arange(N), "expected an Arrow table"),
        ("nowhere.parquet", "does not exist"),
    ],
)
def test_what_is_no_table_of_attributes_is_refused(task, wrong, words):
    with pytest.raises(amips.AmipsError, match=words):
        amips.build(task, storage="flat", attributes=wrong)


def test_a_damaged_file_of_a_user(tmp_path, table):
    for name in ("a.parquet", "a.arrow"):
        (tmp_path / name).write_bytes(b"PAR1 or so")
        with pytest.raises(amips.AmipsError, match="cannot be read as a table"):
            read_table(tmp_path / name, N)


@pytest.fixture
def bundle(task, table, tmp_path):
    amips.build(task, storage="flat", out=tmp_path / "bundle", attributes=table).close()
    return tmp_path / "bundle"


def replace_file(bundle, content):
    """Put another file in the place of the attributes, and state its size and digest, as a forger would."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    name = f"{manifest['data']}/attributes.arrow"
    (bundle / name).write_bytes(content)
    stated = manifest["files"][name]
    stated = {**stated, "bytes": len(content), "sha256": sha256(bundle / name)}
    reseal(bundle / "manifest.json", files={**manifest["files"], name: stated})


def as_file(table):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def test_hostile_files_are_one_line(bundle, table, task):
    x = np.asarray(task.val.queries)[:1]
    good = as_file(table)
    rng = np.random.default_rng(0)
    broken = [bytearray(good) for _ in range(30)]
    for one in broken:
        for place in rng.integers(8, len(one) - 8, 20):
            one[place] = rng.integers(256)
    contents = [
        b"",
        b"ARROW1ARROW1",
        b"ARROW1" + bytes(1000) + b"ARROW1",
        good[: len(good) // 2] + b"ARROW1",
        as_file(table.slice(0, N - 1)),
        as_file(pa.table({"a": [[1]] * N})),
        as_file(pa.table([np.arange(N), np.arange(N)], names=["a", "a"])),
        *map(bytes, broken),
    ]
    problems = []
    for content in contents:
        replace_file(bundle, content)
        try:
            amips.load(bundle).search(x, where="number < 100 and lang = 'en'")
        except amips.AmipsError as problem:
            problems.append(str(problem))
    assert len(problems) >= 7
    assert not any("\n" in problem for problem in problems)
    replace_file(bundle, good)
    assert (amips.load(bundle).search(x, where="number < 5 and lang = 'en'")[1] >= 0).sum() == 3


def test_a_changed_byte_is_noticed(bundle):
    (file,) = bundle.glob("data-*/attributes.arrow")
    file.write_bytes(file.read_bytes()[:-10] + b"ARROW1")
    with pytest.raises(amips.BundleError, match="attributes"):
        amips.load(bundle)


def test_set_later_and_replaced(task, table, tmp_path):
    index = amips.build(task, storage="flat", out=tmp_path / "bundle")
    x = np.asarray(task.val.queries)[:4]
    with pytest.raises(amips.AmipsError, match="no attributes; set_attributes"):
        index.search(x, where="number = 1")
    with pytest.raises(amips.AmipsError, match="no attributes: give all keys some"):
        index.add(np.ones((1, D), np.float32), attributes=pa.table({"number": [1]}))
    index.set_attributes(table)
    index.remove([0, 1, 2])
    with pytest.raises(amips.AmipsError, match="400 rows for 397 keys"):
        index.set_attributes(table)
    index.set_attributes(pa.table({"other": np.arange(N - 3)}))
    for again in (index, amips.load(tmp_path / "bundle")):
        assert set(again.search(x, where="other < 2")[1][0]) == {3, 4, -1}
        with pytest.raises(amips.AmipsError, match="no column 'number'"):
            again.search(x, where="number = 1")
    index.compact()
    assert set(amips.load(tmp_path / "bundle").search(x, where="other < 2")[1][0]) == {3, 4, -1}
    index.update([3], np.ones((1, D), np.float32), attributes=pa.table({"other": [7]}))
    index.update([4], np.ones((1, D), np.float32))
    assert set(index.search(x, where="other < 2")[1][0]) == {4, -1}
    assert set(amips.load(tmp_path / "bundle").search(x, where="other = 7")[1][0]) == {3, 10, -1}
    index.close()


def test_many_small_additions_with_and_without(task, table, tmp_path):
    index = amips.build(task, storage="flat", out=tmp_path / "bundle", attributes=table)
    rng = np.random.default_rng(0)
    for i in range(40):
        rows = {"attributes": pa.table({"number": [1000 + i]})} if i % 3 else {}
        index.add(rng.standard_normal((1, D)).astype(np.float32), **rows)
    index.close()
    x = np.asarray(task.val.queries)[:1]
    for again in (index, amips.load(tmp_path / "bundle")):
        assert (again.search(x, 30, probes=8, where="number >= 1000")[1] >= 0).sum() == 26
        assert (again.search(x, 30, probes=8, where="number is null")[1] >= 0).sum() == 14
    assert again.attributes.columns == [("number", "int64"), ("lang", "string")]
