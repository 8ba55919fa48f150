"""`amips fit` as a user types it."""

import re
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import amips
from amips.cli import main
from helpers import make_world

N, D = 800, 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli-fit")
    keys, queries = make_world(N, 600, D, seed=4)
    np.save(folder / "keys.npy", keys)
    np.save(folder / "queries.npy", queries)
    np.save(folder / "few.npy", queries[:2])
    np.save(folder / "same.npy", np.repeat(queries[:1], 50, axis=0))
    np.save(folder / "narrow.npy", queries[:, :5])
    keys[3] = 0
    np.save(folder / "zero.npy", keys)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.load(folder / "keys.npy").ravel()), D)
    table = pa.table({"id": [f"Straße {i}" for i in range(N)], "embedding": vectors})
    pq.write_table(table, folder / "keys.parquet")
    (folder / "task").mkdir()
    (folder / "task" / "notes.txt").write_text("mine")
    return folder


@pytest.fixture
def run(folder, monkeypatch, capfd):
    """The command without a new process; (exit code, stdout, stderr)."""

    def call(line, *more):
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["amips", *line.split(), *map(str, more)])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
        return code, *capfd.readouterr()

    return call


def test_from_a_parquet_file_to_a_bundle_that_serves_what_was_asked_for(run, folder, tmp_path):
    out = tmp_path / "b"
    line = "fit keys.parquet queries.npy --minutes 0.02 --cells 8 --recall 0.9 --ids keys.parquet:id --out"
    code, text, _ = run(line, out)
    assert code == 0
    assert "recall@10" in text
    assert f"saved {out}" in text
    index = amips.load(out, keys=folder / "keys.npy")
    assert (index.c, index.target_recall) == (8, 0.9)
    assert index.labels[3] == "Straße 3"
    assert list(tmp_path.iterdir()) == [out]
    code, text, _ = run("info", out)
    assert code == 0
    assert str(index.report) in text
    assert index.design.describe() in text


def test_quiet(run, tmp_path):
    code, out, err = run("fit keys.npy queries.npy --minutes 0.01 --cells 8 --quiet --out", tmp_path / "b")
    assert (code, out, err) == (0, "", "")


OPTIONS = {
    "--out",
    "--minutes",
    "--cells",
    "--recall",
    "--objective",
    "--storage",
    "--spill-fraction",
    "--ids",
    "--seed",
}


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("fit keys.npy narrow.npy --out new", "dimension 12 but queries have dimension 5"),
        ("fit keys.npy queries.npy --minutes 0 --out new", "minutes"),
        ("fit keys.npy nothing.npy --out new", r"nothing\.npy"),
        ("fit keys.npy queries.npy --out task", "not a bundle"),
        (
            "fit keys.npy queries.npy --out s3://bucket/b",
            "^error: s3://bucket/b is an address, not a directory",
        ),
        ("fit keys.npy queries.npy --ids keys.parquet:price --out new", "no column 'price'"),
        ("fit keys.npy queries.npy --cells 1 --out new", "cells=1"),
        ("fit keys.npy queries.npy --cells 900 --out new", "between 2 and the 800 keys"),
        ("fit keys.npy queries.npy --spill-fraction 3 --out new", "spill_fraction=3"),
        ("fit zero.npy queries.npy --out new", "row 3 is all zero"),
        ("fit keys.npy few.npy --out new", "2 distinct queries are too few"),
        ("fit keys.npy same.npy --out new", "1 distinct queries are too few"),
    ],
)
def test_errors_are_one_line_and_name_options_that_it_has(run, folder, line, match):
    before = sorted(path.name for path in folder.iterdir())
    code, _, err = run(line)
    assert code == 1, err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert re.search(match, err), err
    assert set(re.findall(r"--[a-z-]+", err)) <= OPTIONS
    assert "lower val" not in err
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.parametrize(
    "line", ["fit keys.npy --out new", "fit keys.npy queries.npy", "fit a b --out c --regroup 2"]
)
def test_usage_errors(run, line):
    code, out, err = run(line)
    assert (code, out) == (2, "")
    assert re.search("Missing|No such option", err)
