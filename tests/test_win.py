"""benchmarks/win.py: engines that search by themselves as references."""

import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from amips.bench.derive import Family, Measured
from amips.bench.store import Run
from amips.bench.systems import System
from amips.engines import scann_engine
from conftest import Silent

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "win.py"


@pytest.fixture
def win():
    spec = importlib.util.spec_from_file_location("win", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("scanned", "right", "said"), [(30, 1, "30.00%"), (30, 0, "not reached"), (-1, 1, "-"), (-1, 0, "-")]
)
def test_flops_are_a_share_or_not_reached_or_not_told(win, scanned, right, said):
    ids = np.full((5, 1), 1 - right)
    cost = np.full(5, scanned)
    run = Run(System(engine="scann"), 1, ids, np.zeros((5, 1), np.float32), ids[:, 0], cost, cost, 0, 0, {})
    family = Family("ScaNN", "reference", [Measured(run, slice(None), np.zeros((5, 1), int), 100)])
    assert win.share(family, "recall@1", 0.9, 100) == said


def test_a_library_that_is_missing_is_said_before_anything_is_run(win, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "scann", None)
    arguments = ["win.py", str(tmp_path / "none"), "--out", str(tmp_path / "out"), "--engine", "soar"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit):
        win.main()
    assert capsys.readouterr().err.endswith("error: SOAR needs scann; pip install 'amips[scann]'\n")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_engines_stand_beside_hnsw_and_are_timed_around_the_same_recalls(win, task, tmp_path, monkeypatch):
    monkeypatch.setattr(scann_engine, "ScaNN", Silent)
    out, page = tmp_path / "out", tmp_path / "win.md"
    arguments = ["win.py", str(task.path), "--out", str(out), "--write", str(page), "--engine", "scann"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--minutes", "0.001", "--rounds", "2"])
    win.main()
    text = page.read_text()
    rows = {
        cells[1].strip(): cells[2:-1] for line in text.splitlines() if len(cells := line.split("|")) == 11
    }
    assert {"centroid", "HNSW, 32 links", "ScaNN"} <= rows.keys()
    told = {name: [cell.strip() for cell in row] for name, row in rows.items()}
    assert told["ScaNN"][:4] == ["-"] * 4
    assert all(re.fullmatch(r"\d+ us", cell) for cell in told["ScaNN"][4:])
    assert all(cell.endswith("%") for cell in told["HNSW, 32 links"][:4])
    assert "--engine scann`" in text
    assert "(- where an engine does not tell them)" in text
    # All four budgets are answered; timed are those around a recall@10 of 0.90 and of 0.95.
    answered = {path.stem.rsplit("-b")[-1] for path in (out / "runs").glob("scann-*.json")}
    timed = {path.name.rsplit("-b")[-1].split(".")[0] for path in (out / "runs").glob("scann-*.times.npz")}
    assert answered == {str(budget) for budget in range(1, 5)}
    assert timed == {"3", "4"}
