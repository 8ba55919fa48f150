"""benchmarks/defaults.py: every way in is measured on the same queries, and the defaults gain."""

import json
import sys

import numpy as np
import pytest

import amips
from amips.builder import Builder
from amips.learn import loop
from amips.search import measure
from helpers import ROOT, generate, load_script


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return load_script("defaults")


@pytest.fixture
def data(tmp_path):
    keys, queries = generate(3000, 7000, 32, seed=1)
    np.save(tmp_path / "keys.npy", keys)
    np.save(tmp_path / "queries.npy", queries)
    return tmp_path


def test_the_log_and_what_is_measured_on_share_no_query(script):
    queries = np.repeat(generate(50, 300, 8)[1], 2, axis=0)
    log, x = script.split(queries, 250)
    assert (len(log), len(x)) == (250, 30)
    assert not {row.tobytes() for row in log} & {row.tobytes() for row in x}


def test_points_are_those_of_the_builder(script):
    """On the queries of a split, the ladder of probes is what `measure` says of plain IVF."""
    keys, queries = generate(1500, 3000, 16, seed=2)
    task = amips.label(keys, queries, val=300, test=300)
    index = Builder(task).searcher(amips.Design.plain(40))
    held_out = script.HeldOut.of(keys, np.asarray(task.test.queries))
    np.testing.assert_array_equal(held_out.top, np.asarray(task.test.top_ids)[:, :10])
    expected = [(p.flops / held_out.full, p.recall10) for p in measure(index, task.test)]
    points = held_out.points(index)
    np.testing.assert_allclose(points, expected[: len(points)], atol=1e-6)


@pytest.mark.slow
def test_every_way_in_is_in_the_table_and_gains(script, data, monkeypatch, capsys):
    results = data / "results"
    monkeypatch.setattr(sys.modules["common"], "RESULTS", results)
    short = script.readme_block().replace('out="bundle"', 'out="bundle", minutes=0.1')
    assert "minutes=0.1" in short
    monkeypatch.setattr(script, "readme_block", lambda: short)
    monkeypatch.setattr(loop, "DEFAULT_MINUTES", 0.03)  # the data are small
    words = ["defaults.py", str(data), "--keys", "3000", "--queries", "6000", "--minutes", "0.1"]
    monkeypatch.setattr(sys, "argv", words)
    script.main()
    assert (results / "defaults.md").read_text() in capsys.readouterr().out
    rows = {row["name"]: row for row in json.loads((results / "defaults.json").read_text())["raw"]}
    plain = rows.pop("FAISS IVF, the best")
    assert len(rows) == 6
    for name in ("label, train, build", "fit, 0.1 minutes", "README's Python block"):
        assert rows[name]["cost"] < plain["cost"], name
    for row in rows.values():
        assert 0 < row["cost"] < 1
        assert row["served"][1] > 0.9
    full = rows["label, train, build; rank d, no projection"]
    assert "full rank" in full["index"]
