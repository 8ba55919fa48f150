"""`amips.fit` with graphs: asked for, chosen where they cost less, refused where options are of cells."""

from types import SimpleNamespace

import numpy as np
import pytest

import amips
from amips import exact, native
from amips.fitting import fitting
from amips.fitting.clock import Clock
from amips.fitting.settings import Settings
from amips.search import GraphSearcher, Report, recalls
from helpers import generate, unit

MINUTES = 0.15  # enough to label every query, however slow the machine


@pytest.fixture(scope="module")
def data():
    """2,000 keys, 2,500 queries to fit, 700 fresh ones and their top 10."""
    keys, queries = generate(2000, 3200, 32, seed=1)
    return keys, queries[:2500], queries[2500:], exact.top_k(keys, queries[2500:], 10)[1]


@pytest.fixture(scope="module")
def fitted(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("fit") / "bundle"
    return amips.fit(
        data[0], data[1], structure="graph", minutes=MINUTES, out=out, recall=0.9, quiet=True
    ), out


def structures(report, measured=True):
    """The structures of the designs that were tried, but for plain IVF."""
    tried = [trial for trial in report.trials if trial.measured == measured and trial.design.learned]
    return {trial.design.structure for trial in tried}


def test_a_graph_that_was_asked_for(fitted, data):
    index, out = fitted
    assert isinstance(index.snapshot, GraphSearcher)
    assert index.design.structure == "graph"
    assert structures(index.report) == {"graph"}  # no cells were built, but plain IVF to compare with
    assert index.report.best == index.design
    assert index.report.baseline.structure == "cells"
    assert not index.report.baseline.learned
    kept = recalls(index.search(data[2])[1], data[3], 10).mean()
    assert kept > 0.885
    loaded = amips.load(out, keys=data[0])
    np.testing.assert_array_equal(loaded.search(data[2])[1], index.search(data[2])[1])
    assert loaded.report == index.report
    assert [path.name for path in out.parent.iterdir()] == ["bundle"]  # the work is cleaned up


def test_the_report_says_what_was_gained(fitted, data):
    index = fitted[0]
    report, text = index.report, str(index.report)
    assert report.pays
    assert "chosen: graph of degree 32" in text
    assert "against: plain IVF, the best of" in text
    gain = report.gain(0.9)
    assert gain > 1
    assert f"{gain:.2f}x" in text
    assert Report.from_json(report.to_json()) == report
    rows = {row.system: row for row in report.rows if row.recall == 0.9}
    assert rows["best design"].served == pytest.approx(
        recalls(index.search(data[2])[1], data[3], 10).mean(), abs=0.03
    )
    flops = index.cost(data[2]).flops.mean() / (2 * index.n * index.d)
    assert rows["best design"].served_flops == pytest.approx(flops, rel=0.15)
    assert report.cost < report.baseline_cost


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"cells": 20}, "cells=20"),
        ({"spill_fraction": 0.5}, "spill_fraction=0.5"),
        ({"storage": "pq"}, "storage=pq"),
    ],
)
def test_options_of_cells_are_refused(data, options, word, tmp_path):
    with pytest.raises(amips.AmipsError) as caught:
        amips.fit(data[0], data[1], structure="graph", out=tmp_path / "b", **options)
    text = str(caught.value)
    assert "\n" not in text
    assert word in text
    assert "graph" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", ["tree", 1, ["graph"], "Graph"])
def test_structures_that_there_are_not(data, wrong):
    with pytest.raises(amips.AmipsError, match=r"structure=.*expected one of cells, graph"):
        amips.fit(data[0], data[1], structure=wrong)


@pytest.fixture
def low(monkeypatch):
    monkeypatch.setattr(fitting, "GRAPH_FROM", 100)


@pytest.mark.skipif(native.compiled is None, reason="not compiled: no graph is tried")
@pytest.mark.parametrize("recall", [0.8, 0.98])
def test_the_cheaper_of_both_is_chosen(data, low, recall):
    index = amips.fit(data[0], data[1], minutes=MINUTES, recall=recall, quiet=True)
    report = index.report
    assert structures(report) == {"cells", "graph"}
    costs = {structure: [] for structure in ("cells", "graph")}
    for trial in report.trials:
        if trial.measured and trial.cost is not None:
            costs[trial.design.structure].append(trial.cost)
    least = {structure: min(some) for structure, some in costs.items()}
    # Second cells take memory: they must cost 2 % less to be taken.
    assert report.cost <= min(least.values()) / fitting.WORTH
    cheaper = min(least, key=lambda structure: least[structure])
    if max(least.values()) > min(least.values()) / fitting.WORTH:
        assert index.design.structure == cheaper
    assert index.design == report.design
    kept = recalls(index.search(data[2])[1], data[3], 10).mean()
    assert kept > recall - 0.015


class BegunError(Exception):
    """A fit that got as far as its work."""


@pytest.mark.parametrize(
    "options",
    [
        {"cells": 20},
        {"spill_fraction": 0.1},
        {"spill_fraction": 0},
        {"storage": "pq"},
        {"structure": "cells"},
    ],
)
def test_who_asks_for_cells_gets_no_graph(data, low, monkeypatch, options):
    def run(self, keys, queries):
        raise BegunError(self.settings.structure)

    monkeypatch.setattr(fitting.Fitting, "run", run)
    with pytest.raises(BegunError, match="cells"):
        amips.fit(data[0], data[1], quiet=True, **options)
    with pytest.raises(BegunError, match="None"):
        amips.fit(data[0], data[1], quiet=True, storage="sq8")


def test_without_compiled_code_no_graph_is_tried(data, low, monkeypatch):
    monkeypatch.setattr(native, "compiled", None)
    index = amips.fit(data[0][:600], data[1][:800], minutes=0.02, quiet=True)
    assert {trial.design.structure for trial in index.report.trials} == {"cells"}


def test_a_fit_in_few_dimensions_can_be_loaded(tmp_path):
    """There float32 keys are walked by, as codes would save nothing."""
    keys, queries = generate(2000, 2000, 12, seed=2)
    index = amips.fit(keys, queries, structure="graph", minutes=0.02, out=tmp_path / "b", quiet=True)
    assert (index.design.structure, index.design.storage) == ("graph", "flat")
    loaded = amips.load(tmp_path / "b")
    assert loaded.design == index.design
    np.testing.assert_array_equal(loaded.search(queries[:50])[1], index.search(queries[:50])[1])


def test_of_very_few_keys(data):
    index = amips.fit(data[0][:12], data[1][:200], structure="graph", minutes=0.02, quiet=True)
    assert (index.design.structure, index.design.storage) == ("graph", "flat")


def test_ids_of_the_user(data):
    labels = [f"key {i}" for i in range(600)]
    index = amips.fit(data[0][:600], data[1][:900], structure="graph", minutes=0.02, ids=labels, quiet=True)
    ids = index.search(data[2][:20], 1, recall=1.0)[1]
    true = exact.top_k(data[0][:600], data[2][:20], 1)[1]
    assert ids.tolist() == [[f"key {row[0]}"] for row in true]


def test_more_entries_where_keys_are_in_tight_clusters(tmp_path, capsys):
    """A walk has no way from one cluster into another: it must begin in the right ones."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((60, 64))
    keys = unit(centres[rng.integers(60, size=8000)] + 0.3 * rng.standard_normal((8000, 64)))
    first, second = centres[rng.integers(60, size=(2, 5000))]
    share = rng.random((5000, 1))
    queries = share * first + (1 - share) * second + 0.3 * rng.standard_normal((5000, 64))
    keys, queries = (rows.astype(np.float32) for rows in (keys, queries))
    options = {"structure": "graph", "minutes": MINUTES, "out": tmp_path / "b"}
    index = amips.fit(keys, queries[:4000], **options)
    tried = [trial for trial in index.report.trials if trial.design.structure == "graph"]
    assert {trial.design.cells for trial in tried if trial.cost is None} == {64}
    assert index.design.cells == 256
    found = index.search(queries[4000:])[1]
    assert recalls(found, exact.top_k(keys, queries[4000:], 10)[1], 10).mean() > 0.94
    assert "256 entries" in capsys.readouterr().out
    assert index.cost(queries[4000:]).flops.mean() < 0.5 * 2 * index.n * index.d


@pytest.mark.parametrize(("late", "tried"), [(False, [64, 256, 1024]), (True, [64])])
def test_more_entries_are_tried_while_there_is_time(monkeypatch, tmp_path, capsys, late, tried):
    """No number of entries reaches the recall; each graph takes most of the time, or hardly any."""
    now, measured = [0.0], []

    def measure(self, builder, candidate):
        measured.append(candidate.design)
        now[0] += 50.0 if late else 0.1
        return "graph", np.inf

    monkeypatch.setattr(fitting.Fitting, "_measured", measure)
    monkeypatch.setattr(fitting, "graph_design", lambda task, **options: options["entries"])
    settings = Settings(1, None, 0.9, "flops", None, None, "graph", None, 0, 0, None)
    fit = fitting.Fitting(tmp_path, settings, False, None, None, Clock(60.0, lambda: now[0]))
    builder = SimpleNamespace(task=SimpleNamespace(n=10**6), resolved=lambda design: design)
    assert fit._with_graph(builder, None) == "graph"
    assert measured == tried
    assert ("no time to try graphs of 256 entries" in capsys.readouterr().out) == late
