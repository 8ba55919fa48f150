"""benchmarks/drawn_cells.py: SupportNet with the gradients of all cells and of two that are drawn."""

import importlib
import json
import sys

import numpy as np

from helpers import ROOT, make_world


def test_it_measures_both_for_as_many_steps(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    drawn_cells, common = (importlib.import_module(name) for name in ("drawn_cells", "common"))
    (tmp_path / "data").mkdir()
    for name, rows in zip(("keys", "queries"), make_world(600, 900, 16, seed=1), strict=True):
        np.save(tmp_path / "data" / f"{name}.npy", rows)
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    options = ["--steps", "2", "--seeds", "2", "--sizes", "XS", "--cells", "4"]
    monkeypatch.setattr(sys, "argv", ["drawn_cells.py", str(tmp_path / "data"), *options])
    drawn_cells.main()
    assert "c = 4; 2 steps of 1,024 samples" in capsys.readouterr().out
    results = json.loads((tmp_path / "results" / "drawn_cells.json").read_text())
    rows = [one["row"] for one in results["raw"]]
    assert [row[:2] for row in rows] == [["SupportNet XS", "all cells"], ["SupportNet XS", "two drawn cells"]]
    assert rows[0][3] == ""
    assert float(rows[1][3]) > 0
    for one in results["raw"]:
        assert len(one["runs"]) == 2
        assert all(run["score"] > 0 and run["gradient"] > 0 for run in one["runs"])
