"""benchmarks/drawn_cells.py: SupportNet with the gradients of all cells and of two that are drawn."""

import importlib
import json
import sys

import numpy as np
import pytest

from helpers import ROOT, make_world


def test_it_measures_both_for_as_many_steps(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    drawn_cells, common = (importlib.import_module(name) for name in ("drawn_cells", "common"))
    (tmp_path / "data").mkdir()
    for name, rows in zip(("keys", "queries"), make_world(600, 900, 16, seed=1), strict=True):
        np.save(tmp_path / "data" / f"{name}.npy", rows)
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    options = ["--steps", "40", "--seeds", "2", "--sizes", "XS", "--cells", "4"]
    monkeypatch.setattr(sys, "argv", ["drawn_cells.py", str(tmp_path / "data"), *options])
    drawn_cells.main()
    assert "c = 4; 40 steps of 1,024 samples" in capsys.readouterr().out
    results = json.loads((tmp_path / "results" / "drawn_cells.json").read_text())
    rows = [one["row"] for one in results["raw"]]
    assert [row[:2] for row in rows] == [["SupportNet XS", "all cells"], ["SupportNet XS", "two drawn cells"]]
    assert rows[0][3] == ""
    assert float(rows[1][3]) > 0
    every, drawn = (one["runs"] for one in results["raw"])
    assert len(every) == len(drawn) == 2
    for whole, part in zip(every, drawn, strict=True):
        assert whole["gradient"] != part["gradient"]  # other cells were drawn than all
        assert part["gradient"] < 2.5  # it learns: untrained, the error is 4.7,
        assert part["gradient"] == pytest.approx(whole["gradient"], rel=0.05)  # ... and as much in a step
