"""benchmarks/backends.py: what its table and its sentences say of planted measurements, and one small run."""

import json
import subprocess
import sys

import numpy as np
import pytest

from amips.backends import backend_class
from amips.bench import System
from amips.design import Design
from helpers import ROOT, load_script, make_world

FOLDER = ROOT / "benchmarks"
ALWAYS_THERE = """
import runpy
import amips.backends
from amips.backends import registry
there = {name: registry.BACKENDS[name] for name in ("hnsw", "leanvec")}
registry.BACKENDS = amips.backends.BACKENDS = there
runpy.run_path("backends.py", run_name="__main__")
"""


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return load_script("backends")


def measured(script, backend, way, single, batch, tells=True):
    """Times at recall 0.9 and 0.95, in microseconds; None is not reached."""
    costs = {}
    for target, one, many in zip(script.TARGETS, single, batch, strict=True):
        known = one is not None and tells
        costs[target] = {
            "single/1": None if one is None else one * 1e-6,
            "batch/1": None if many is None else many * 1e-6,
            "scanned": 0.125 if known else None,
            "flops": 0.25 if known else None,
        }
    points = [{"recall@10": 0.5, **({"flops": 1.0} if tells else {})}, {"recall@10": 0.97}]
    return script.Measured(backend, way, points, costs)


def test_every_system_is_of_one_way(script):
    run, plain = "/runs/keynet", Design.plain(8)
    assert script.way_of(System(plain)) == "x"
    assert script.way_of(System(plain, run=run)) == "routed by KeyNet"
    assert script.way_of(System(plain, run=run, mode="drop-in-rescored")) == "drop-in"
    assert script.way_of(System(backend="hnsw")) == "x"
    assert script.way_of(System(plain, backend="leanvec")) == "x"
    assert script.way_of(System(Design(8), backend="leanvec")) == "amips"


def test_a_row_says_what_it_takes_and_how_many_times_less_that_is(script):
    with_x = measured(script, "LeanVec", "x", (100, 200), (10, 20))
    own = measured(script, "LeanVec", "amips", (50, None), (20, None))
    assert script.row(with_x, with_x) == ["LeanVec", "x", "0.970", "100", "10", "200", "20", "12.5%", "25.0%"]
    assert script.row(own, with_x) == ["LeanVec", "amips", "0.970", "50 (2.00)", "20 (0.50)", *"----"]
    silent = measured(script, "ScaNN", "x", (100, 200), (10, 20), tells=False)
    assert script.row(silent, silent)[-2:] == ["not told", "not told"]


def test_what_was_gained_and_who_did_not_reach_a_recall(script):
    found = {
        ("hnsw", "x"): measured(script, "HNSW", "x", (100, None), (10, None)),
        ("hnsw", "drop-in"): measured(script, "HNSW", "drop-in", (None, 50), (None, 5)),
        ("leanvec", "x"): measured(script, "LeanVec", "x", (100, 200), (10, 20)),
        ("leanvec", "amips"): measured(script, "LeanVec", "amips", (50, 50), (20, 4)),
    }
    lines = script.summary(found, 1000).splitlines()
    assert lines[0] == "- drop-in, recall@10 0.9: not reached on HNSW."
    assert lines[1] == "- drop-in, recall@10 0.95: not reached with x on HNSW."
    assert (
        lines[-1] == "- amips, recall@10 0.95: times less time than x (batch 1 / 1,000): LeanVec 4.00 / 5.00."
    )


def test_what_backends_support_is_what_their_classes_say(script):
    found = {
        ("hnsw", "x"): measured(script, "HNSW", "x", (1, 1), (1, 1)),
        ("pgvector", "x"): measured(script, "pgvector", "x", (1, 1), (1, 1), tells=False),
        ("pgvector", "routed by KeyNet"): measured(script, "pgvector", "routed", (1, 1), (1, 1)),
    }
    lines = script.supports(["hnsw", "pgvector"], found).splitlines()
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    assert cells[3] == ["HNSW", "`hnsw`", "yes", "no", "no", backend_class("hnsw").budget, "no", "yes", "no"]
    assert cells[4][2:5] == ["yes", "yes", "no"]
    assert cells[4][6:] == ["yes", "no", "yes"]


@pytest.mark.slow
def test_the_script_runs_as_a_user_types_it(tmp_path):
    """In a copy, so that the committed table stays; with the backends that are always there."""
    data = tmp_path / "data"
    data.mkdir()
    keys, queries = make_world(400, 900, 16, seed=3)
    np.save(data / "keys.npy", keys)
    np.save(data / "queries.npy", queries)
    for name in ("backends.py", "common.py"):
        (tmp_path / name).write_text((FOLDER / name).read_text())
    (tmp_path / "always_there.py").write_text(ALWAYS_THERE)
    options = "--keys 400 --queries 600 --samples 2048 --minutes 0.01 --rounds 1"
    command = [sys.executable, "always_there.py", "data", *options.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "results" / "backends.md").read_text()
    assert f"`python benchmarks/backends.py DATA {options}`" in text
    assert "held-out queries" in text
    raw = json.loads((tmp_path / "results" / "backends.json").read_text())["raw"]
    assert {(one["backend"], one["way"]) for one in raw} >= {
        ("FAISS IVF", "x"),
        ("FAISS IVF", "amips"),
        ("HNSW", "drop-in"),
        ("LeanVec", "amips"),
    }
    assert str(tmp_path) not in text
