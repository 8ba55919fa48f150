"""The study backends: what it says of planted runs, and one run as a user types it."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from amips import engines
from amips.bench import load_summary
from amips.bench.derive import on_test, on_val
from amips.bench.results import Run
from paper import backends
from paper.mapped_backends import Hosted, _titled, by_engine
from paper.search_runs import front_of
from amips.bench.systems import System
from amips.cli import cli
from amips.backends import scann_engine
from helpers import Silent, make_world

pytest.importorskip("matplotlib", reason="figures need matplotlib: pip install 'amips[bench]'")

torch.set_num_threads(1)

N, M = 1000, 100  # keys; val queries, and as many test queries
LADDER = (10, 20, 40)  # keys scanned
AHEAD, BEHIND = (0.5, 0.7, 0.9), (0.2, 0.3, 0.4)
WITH_X = (0.4, 0.6, 0.8)


def planted(engine, size, right, cells=False, told=True, time=1.0, on_val=None):
    """Runs of an engine that find the top key of these shares of the test queries; x if `size` is None."""
    settings = {"engine": engine, "cells": 8 if engine in ("ivf", "leanvec") else 0}
    if size is not None:
        route = "cells" if cells else "drop-in-rescored"
        settings |= {"router": f"/runs/{size}", "route": route, "label": f"KeyNet {size}"}
    runs = []
    for budget, share, val in zip(LADDER, right, on_val or right, strict=True):
        found = np.concatenate([np.arange(M) < M * part for part in (val, share)])
        rank = found.astype(np.int32)
        ids = np.where(found, 0, 1)[:, None]
        scanned = np.full(2 * M, budget if told else -1)
        taken = {}
        for mode in ("single/1", "batch/1"):
            taken |= {f"e/{mode}": np.full(3, time * budget), f"yardstick/e/{mode}": np.ones(3)}
        scores = np.zeros((2 * M, 1), np.float32)
        runs.append(Run(System(**settings), budget, ids, scores, rank, scanned, scanned, 0, 0, taken))
    return runs


class Split:
    """Queries whose top key is 0."""

    top_ids = np.zeros((M, 1), int)

    def __len__(self):
        return M


def found_of(*systems):
    """Pairs on test and on val."""
    task = SimpleNamespace(val=Split(), test=Split(), n=N)
    runs = [run for system in systems for run in system]
    return [by_engine([_titled(family) for family in of(runs, task)]) for of in (on_test, on_val)]


def test_leads_are_by_hand_and_only_of_what_is_told():
    ((pair,), _) = found_of(planted("ivf", None, WITH_X), planted("ivf", "XS", (0.45, 0.7, 0.75), time=1.5))
    got = backends.leads(*pair)
    assert list(got) == ["flops", "scanned", "batch/1"]
    assert got["flops"] == got["scanned"] == pytest.approx(0.1, abs=2e-3)
    # 15, 30 and 60 long: at 30 x has 0.7, and so has it; at 15 it has 0.45 against 0.5.
    assert got["batch/1"] == pytest.approx(0.0, abs=2e-3)
    ((pair,), _) = found_of(
        planted("scann", None, WITH_X, told=False), planted("scann", "XS", AHEAD, told=False)
    )
    assert list(backends.leads(*pair)) == ["batch/1"]


def test_a_run_that_was_not_timed_is_no_point_of_the_front():
    """The best run of x has no times: at equal time x then finds 0.6 at most."""
    with_x = planted("ivf", None, WITH_X)
    with_x[-1].times.clear()
    ((pair,), _) = found_of(with_x, planted("ivf", "XS", (0.1, 0.8, 0.9)))
    assert backends.leads(*pair)["batch/1"] == pytest.approx(0.2)
    cost, recall = front_of(pair[0], "batch/1", "recall@1")
    assert cost.tolist() == [10, 20]
    assert recall == pytest.approx([0.4, 0.6])


def test_the_size_is_chosen_on_val():
    """S is ahead on test, XS on val; each way has its own."""
    test, val = found_of(
        planted("leanvec", None, WITH_X),
        planted("leanvec", "XS", BEHIND, on_val=AHEAD),
        planted("leanvec", "S", AHEAD, on_val=BEHIND),
        planted("leanvec", "XS", AHEAD, cells=True, on_val=BEHIND),
        planted("leanvec", "S", BEHIND, cells=True, on_val=AHEAD),
    )
    best = {ours.name for _, ours in backends.chosen(test, val)}
    assert best == {"LeanVec: KeyNet XS, drop-in, scored again", "LeanVec: KeyNet S"}


@pytest.mark.parametrize("scann", [AHEAD, BEHIND])
def test_a_claim_of_the_paper_is_held_against_every_axis_and_backend(scann):
    systems = [planted(engine, None, WITH_X, told=engine != "scann") for engine in ("ivf", "scann", "hnsw")]
    systems += [
        planted("ivf", "XS", AHEAD),
        planted("ivf", "XS", BEHIND, cells=True),
        planted("scann", "XS", scann, told=False),
        planted("hnsw", "XS", AHEAD),
    ]
    said = backends._verdict(backends.chosen(*found_of(*systems)), ["XS", "S"])
    of = {line.split(" (")[0]: line for line in said}
    mapped = of["FAISS IVF searched with the predicted key"]
    assert "(KeyNet XS, the best on val)" in mapped
    assert (
        "+10.0 points (FLOPs), +10.0 points (keys scanned), +10.0 points (time, large batch): as in" in mapped
    )
    routed = of["FAISS IVF routed by the prediction"]
    assert routed.endswith(
        "-20.0 points (FLOPs), -20.0 points (keys scanned), -20.0 points (time, large batch)."
    )
    assert of["HNSW, 32 links searched with the predicted key"].endswith("+10.0 points (time, large batch).")
    silent = of["ScaNN searched with the predicted key"]
    assert "FLOPs" not in silent
    held = scann is AHEAD
    assert ("as in the paper" in silent, "not reproduced (the paper: " in silent) == (held, not held)
    assert f"on {2 if held else 1} of the 2 backends of the paper that were run" in said[-1]
    assert ("as in the paper" in said[-1]) == held
    assert len(said) == 5


def test_ahead_on_one_axis_alone_is_not_enough():
    """Twice as slow: what is ahead in FLOPs is behind in time."""
    found = found_of(planted("ivf", None, WITH_X), planted("ivf", "XS", (0.5, 0.61, 0.7), time=2))
    (mapped, _) = backends._verdict(backends.chosen(*found), ["XS"])
    assert "+10.0 points (FLOPs)" in mapped
    assert "not reproduced" in mapped


@pytest.mark.parametrize(("val", "ends"), [(AHEAD, "as in the paper"), (BEHIND, "not reproduced")])
def test_sizes_are_told_of_where_there_are_large_ones(val, ends):
    systems = [planted("ivf", None, WITH_X), planted("ivf", "XS", AHEAD, on_val=val)]
    systems.append(planted("ivf", "L", AHEAD, on_val=(0.45, 0.65, 0.85)))
    last = backends._verdict(backends.chosen(*found_of(*systems)), ["XS", "L"])[-1]
    assert last.startswith(
        f"The size that leads most on val is XS or S on {int(val is AHEAD)} of 1 backends: {ends}"
    )


def test_no_cost_in_common_is_said_and_counts_against_the_claim():
    found = found_of(planted("ivf", None, WITH_X), planted("ivf", "XS", AHEAD, time=100))
    first, last = backends._verdict(backends.chosen(*found), ["XS"])
    assert "no cost in common (time, large batch): not reproduced" in first
    assert "on 0 of the 1 backends" in last
    (row,) = backends._lead_table(found[0]).rows
    assert row == ["FAISS IVF: KeyNet XS, drop-in, scored again", "0.800", "0.900", "+0.100", "+0.100", "-"]


def test_charts_have_every_cost_that_is_told():
    test, val = found_of(
        planted("scann", None, WITH_X, told=False), planted("scann", "XS", AHEAD, told=False)
    )
    families = [family for pair in test for family in pair]
    made = Hosted(SimpleNamespace(n=N, d=4), families, [], {"single/1": 1e-6, "batch/1": 1e-7}, 64)
    chart = made.chart("c", "ScaNN", "recall@1", families)
    assert [panel.x_label for panel in chart.panels] == [
        "us a query, batch 1, 1 thread",
        "us a query, large batch, 1 thread",
    ]
    base, ours = chart.panels[0].series
    assert (base.group, ours.group) == ("baseline", "contender")
    assert base.x == pytest.approx(LADDER)
    assert base.y == pytest.approx(WITH_X)
    assert val


def files(place, *parts):
    return {p: p.stat().st_mtime_ns for p in place.joinpath(*parts).rglob("*") if p.is_file()}


@pytest.mark.slow
def test_as_a_user_types_it(tmp_path, monkeypatch):
    """ScaNN's library is not here; later it is, and only ScaNN is run."""
    keys, queries = make_world(1200, 1500, 16, seed=7)
    np.save(tmp_path / "keys.npy", keys)
    np.save(tmp_path / "queries.npy", queries)
    monkeypatch.setitem(sys.modules, "scann", None)
    out = tmp_path / "out"
    command = ["study", "backends", "--data", str(tmp_path), "--scale", "smoke", "--out", str(out)]

    def run():
        done = CliRunner().invoke(cli, command)
        assert done.exit_code == 0, done.output
        return load_summary(out / "backends")

    made = run()
    of = {
        "FAISS IVF": ("", ": KeyNet XS", ": KeyNet XS, drop-in, scored again"),
        "LeanVec": ("", ": KeyNet XS", ": KeyNet XS, drop-in, scored again"),
        "HNSW, 32 links": ("", ": KeyNet XS, drop-in, scored again"),
    }
    names = {title + way for title, ways in of.items() for way in ways}
    assert set(made.values["recall"]) == set(made.values["flops"]) == set(made.values["seconds"]) == names
    assert all(max(made.values["recall"][title]) > 0.95 for title in of)
    assert set(made.values["lead"]) == names - set(of)
    assert made.verdict[-2:] == [
        "Not run: ScaNN needs scann; pip install 'amips[scann]'.",
        "Not run: SOAR needs scann; pip install 'amips[scann]'.",
    ]
    facts = dict(made.facts)
    assert facts["backends"] == "FAISS IVF; LeanVec; HNSW, 32 links"
    assert facts["not run"] == "ScaNN, SOAR"
    assert sum("as in the paper" in line or "not reproduced" in line for line in made.verdict) == 3
    assert made.command == "amips study backends --data DATA --scale smoke --out OUT"
    assert [chart.name for chart in made.charts] == ["backends-ivf", "backends-leanvec", "backends-hnsw"]
    assert all((out / "backends" / f"{chart.name}.png").exists() for chart in made.charts)
    lead, ratios = made.tables
    assert [row[0] for row in lead.rows] == [
        *("FAISS IVF: KeyNet XS, drop-in, scored again", "FAISS IVF: KeyNet XS"),
        *("LeanVec: KeyNet XS, drop-in, scored again", "LeanVec: KeyNet XS"),
        "HNSW, 32 links: KeyNet XS, drop-in, scored again",
    ]
    assert {row[1] for row in ratios.rows} == names - set(of)
    # The recall of a drop-in once more, from the raw runs: the top key comes first.
    raw = next((out / "backends" / "runs").glob("ivf-*-drop-in-rescored-*-b4.npz"))
    with np.load(raw) as stored:
        share = (stored["rank"][200:] == 1).mean()
    assert any(
        r == pytest.approx(share)
        for r in made.values["recall"]["FAISS IVF: KeyNet XS, drop-in, scored again"]
    )

    before = files(out, "work") | files(out, "backends", "runs")
    monkeypatch.setattr(scann_engine, "ScaNN", Silent)
    more = run()
    after = files(out, "work") | files(out, "backends", "runs")
    assert before.items() <= after.items()
    assert all("scann" in str(path.relative_to(out)) for path in after.keys() - before.keys())
    assert set(more.values["recall"]) == {*names, "ScaNN", "ScaNN: KeyNet XS, drop-in, scored again"}
    assert set(more.values["flops"]) == names
    for name in names:
        assert more.values["recall"][name] == made.values["recall"][name]
    assert "ScaNN: FLOPs and keys scanned are not told; there is only time." in more.verdict
    row = next(row for row in more.tables[0].rows if row[0].startswith("ScaNN"))
    assert row[3:5] == ["not told"] * 2
    assert more.verdict[-1] == "Not run: SOAR needs scann; pip install 'amips[scann]'."
    assert str(tmp_path) not in json.dumps(json.loads((out / "backends" / "summary.json").read_text()))


def test_what_is_missing_is_named_with_the_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "scann", None)
    assert engines.missing(["hnsw", "soar", "leanvec"]) == {
        "soar": "SOAR needs scann; pip install 'amips[scann]'"
    }
    assert "hnsw" not in engines.missing()
