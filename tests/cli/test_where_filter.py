"""`--attributes`, `--where` and `--filter` as a user types them."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import amips
from amips.cli import cli
from helpers import make_world

N, D = 500, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("filters")
    keys, queries = make_world(N, 400, D, seed=2)
    amips.label(keys, queries, out=folder / "task", cells=8)
    np.save(folder / "fresh.npy", queries[:5])
    table = pa.table({"lang": ["en" if i % 2 else "de" for i in range(N)], "price": np.arange(N)})
    pq.write_table(table, folder / "attributes.parquet")
    run(folder, "build task --storage flat --out bundle --attributes attributes.parquet")
    return folder


def run(folder, line):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        cli(line.split(" ") if isinstance(line, str) else line, standalone_mode=False)


def hits(folder, capsys, *options):
    capsys.readouterr()
    run(folder, ["search", "bundle", "fresh.npy", *options])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 5
    return [{hit["id"] for hit in line["hits"]} for line in lines]


def test_where_and_filter(folder, capsys):
    for ids in hits(folder, capsys, "--where", "lang = 'en' and price < 9"):
        assert {1, 3, 5, 7} == ids
    (folder / "ids.txt").write_text("7\n8\n9\n")
    for ids in hits(folder, capsys, "--filter", "ids.txt"):
        assert {7, 8, 9} == ids
    for ids in hits(folder, capsys, "--filter", "ids.txt", "--where", "lang = 'en'"):
        assert {7, 9} == ids


def test_info_lists_the_columns(folder, capsys):
    run(folder, "info bundle")
    assert "lang string, price int64" in capsys.readouterr().out


@pytest.mark.parametrize("where", ["size = 1", "price < 'x'", "drop table", "price + 1 = 2"])
def test_a_wrong_condition_is_one_line(folder, where):
    with pytest.raises(amips.AmipsError, match="where: "):
        run(folder, ["search", "bundle", "fresh.npy", "--where", where])


def test_a_wrong_table_is_one_line(folder):
    pq.write_table(pa.table({"a": [1]}), folder / "short.parquet")
    with pytest.raises(amips.AmipsError, match="1 rows for 500 keys"):
        run(folder, "build task --storage flat --out other --attributes short.parquet")
    assert not (folder / "other").exists()
