"""benchmarks/stopping.py and tried.py: simulated early stops do what a search would do."""

import importlib
import sys

import numpy as np
import pytest

from amips.cells import Cells
from amips.routers import RoutingEstimate
from helpers import ROOT, make_world

FOLDER = ROOT / "benchmarks"
K, RECALLS = 10, (0.90, 0.95)


@pytest.fixture
def stopping(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "stopping", raising=False)
    return importlib.import_module("stopping")


@pytest.fixture
def small():
    """Keys, queries, cells of which one is empty, and noisy scores of the cells."""
    rng = np.random.default_rng(0)
    keys, x = make_world(800, 61, 16, seed=0)
    centroids = keys[:40].copy()
    assignment = (keys @ centroids[:39].T).argmax(axis=1).astype(np.int32)
    cells = Cells(assignment, centroids)
    top = np.argsort(-(x @ keys.T), axis=1)[:, :K]
    scores = (8 * x @ centroids.T + 0.5 * rng.standard_normal((61, 40))).astype(np.float32)
    return keys, x, cells, RoutingEstimate(scores, assignment[top], cells.sizes), top


@pytest.fixture
def walk(stopping, small):
    keys, x, cells, seen, _ = small
    return stopping.Walk(keys, x, cells, seen, router_flops=2 * 16 * 80)


def search(small, estimate, query, go_on):
    """Scan cells in the router's order; `go_on(place, kth)` says whether: yes, no, or None to stop."""
    keys, x, cells, seen, _ = small
    found, scanned = np.empty(0, np.float32), []
    for place, cell in enumerate(np.argsort(-seen.scores[query], kind="stable")):
        kth = np.sort(found)[-K] if len(found) >= K else -np.inf
        answer = True if place == 0 else go_on(place, kth)
        if answer is None:
            break
        if answer:
            scanned.append(cell)
            found = np.concatenate([found, keys[cells.assignment == cell] @ x[query]])
    return scanned


def told(small, scanned):
    """Recall and mean number of keys of what each query scanned."""
    _, _, cells, seen, _ = small
    recall = np.mean([np.isin(seen.top_cells[q], s).mean() for q, s in enumerate(scanned)])
    return recall, np.mean([cells.sizes[s].sum() for s in scanned])


@pytest.mark.parametrize("products", [False, True])
def test_a_stop_costs_what_a_search_that_stops_would(walk, small, products):
    estimate = walk.estimate(products)
    cells = small[2].count
    costs = walk.stopped(estimate, RECALLS)
    # The smallest z of a fine ladder that reaches the recall: no cheaper, and hardly dearer.
    for recall, cost in zip(RECALLS, costs, strict=True):
        for z in np.arange(-6, 12, 0.05):
            hopes = estimate.values + z * estimate.s[:, None]
            scanned = [
                search(small, estimate, q, lambda p, kth, q=q, hopes=hopes: hopes[q, p:].max() >= kth or None)
                for q in range(len(hopes))
            ]
            reached, keys = told(small, scanned)
            if reached >= recall:
                break
        searched = (80 + keys + (cells if products else 0)) / 800
        assert cost <= searched + 1e-9
        assert cost == pytest.approx(searched, rel=0.02)
    assert costs[0] < costs[1]


def test_a_filter_beside_the_mass_bound_costs_what_a_search_would(walk, small):
    estimate, bound, z = walk.estimate(products=True), small[3].min_mass_for(0.97), 0.3
    hopes = estimate.values + np.float32(z) * estimate.s[:, None]
    asked = np.maximum(1, (walk.masses >= bound).sum(axis=1))

    def go_on(query):
        return lambda place, kth: None if place >= asked[query] else hopes[query, place] >= kth

    recall, keys = told(small, [search(small, estimate, q, go_on(q)) for q in range(len(hopes))])
    found, cost = walk.filtered(estimate, bound, z)
    assert found == pytest.approx(recall)
    assert found < 0.97
    assert cost == pytest.approx((80 + keys + asked.mean()) / 800)


def test_with_no_doubt_at_all_the_filter_is_the_mass_bound(walk, small):
    seen = small[3]
    bound = seen.min_mass_for(0.9)
    found, cost = walk.filtered(walk.estimate(products=False), bound, np.inf)
    assert found == pytest.approx(seen.at_mass(bound).recall)
    assert cost == walk.at_mass((0.9,))[0]


def test_both_together_reach_the_recall(stopping, walk, monkeypatch):
    seen = []
    true = stopping.Walk.filtered

    def watched(self, *how):
        seen.append(true(self, *how))
        return seen[-1]

    monkeypatch.setattr(stopping.Walk, "filtered", watched)
    (cost,) = walk.both(walk.estimate(products=False), (0.9,))
    assert min(recall for recall, c in seen if c == cost) >= 0.9
    seen.clear()
    monkeypatch.setattr(stopping, "Z_RANGE", (-9.0, -8.0))  # none is enough
    (without,) = walk.both(walk.estimate(products=False), (0.9,))
    assert min(recall for recall, c in seen if c == without) >= 0.9


def test_true_support_values_stop_where_the_oracle_does(stopping, walk, small):
    exact = stopping.Estimate(walk.best[:, :, 0], np.ones(61, np.float32), False)
    (cost,) = walk.stopped(exact, (1.0,))
    assert cost == pytest.approx(walk.oracle())
    seen, last = small[3], walk.places.max(axis=1)
    order = np.argsort(-seen.scores, axis=1, kind="stable")
    keys = np.mean([small[2].sizes[order[q, : last[q] + 1]].sum() for q in range(61)])
    assert walk.oracle() == pytest.approx((80 + keys) / 800)


def test_an_estimate_is_fitted_on_the_other_half(stopping, walk):
    before = walk.estimate(products=True).values
    walk.best[::2, :, 0] += 1.0
    after = walk.estimate(products=True).values
    np.testing.assert_allclose(after[1::2] - before[1::2], 1.0, atol=1e-4)
    np.testing.assert_array_equal(after[::2], before[::2])


@pytest.mark.slow
def test_the_page_says_whether_early_stops_gain(stopping, task, tmp_path, monkeypatch, capsys):
    tried = importlib.import_module("tried")
    page = tmp_path / "tried.md"
    words = ["tried.py", str(task.path), "--out", str(tmp_path / "runs"), "--write", str(page)]
    monkeypatch.setattr(sys, "argv", [*words, "--samples", "5000"])
    monkeypatch.setattr(tried, "EXTRA", 100)
    tried.main()
    text = page.read_text()
    printed = capsys.readouterr().out.splitlines()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + len(printed)
    costs = {row[0]: [float(cell.rstrip("%")) for cell in row[1:]] for row in rows[2:]}
    stops = {name: cost for name, cost in costs.items() if "10th score so far" in name}
    assert len(stops) == 4
    base = next(costs[name] for name in costs if name.startswith("the recipe"))
    for name, (cost, _) in stops.items():
        said = text.split(f"- {name}, against the mass bound alone: ")[1].split(", ")[0]
        ratio = float(said.split("(")[1].split(" times")[0])
        assert ratio == pytest.approx(cost / base[0], abs=0.01)
        assert said.startswith("gain" if ratio < 0.98 else "loss" if ratio > 1.02 else "about the same")
