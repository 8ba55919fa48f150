"""Studies that search: routing, routing128, ivf, ood; once each as a user types them, in one place."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from amips.bench import load_summary
from amips.bench.derive import Bootstrap, Family, Measured, on_test, on_val, within
from amips.bench.results import Run
from paper import ivf, ood, routing
from paper.ivf import counts
from amips.bench.systems import System, sweep
from amips.cli import main
from helpers import make_world

pytest.importorskip("matplotlib", reason="figures need matplotlib: pip install 'amips[bench]'")

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Data in files; `out` is shared by all studies."""
    place = tmp_path_factory.mktemp("studies")
    keys, queries = make_world(1200, 1500, 16, seed=7)
    (place / "data").mkdir()
    np.save(place / "data" / "keys.npy", keys)
    np.save(place / "data" / "queries.npy", queries)
    return place


@pytest.fixture
def study(place, monkeypatch, capfd):
    """`amips study NAME` on the shared data, without a new process."""

    def run(name):
        monkeypatch.chdir(place)
        arguments = ["study", name, "--data", "data", "--scale", "smoke", "--out", "out"]
        monkeypatch.setattr(sys, "argv", ["amips", *arguments])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code
        done = subprocess.CompletedProcess(arguments, code or 0, *capfd.readouterr())
        assert done.returncode == 0, done.stderr
        return checked(name, place, done.stdout)

    return run


def checked(name, place, printed):
    """What every study must leave behind and say."""
    folder = place / "out" / name
    summary = load_summary(folder)
    assert summary.name == name
    assert printed.splitlines()[: len(summary.verdict)] == summary.verdict
    assert printed.endswith(f"out/{name}: everything is there; see it with: amips report out/{name}\n")
    told = (folder / "table.md").read_text()
    for table in summary.tables:
        assert table.title in told
        assert {len(row) for row in table.rows} == {len(table.head)}
        measured = [row for row in table.rows if not row[0].startswith("the paper")]
        assert measured
        assert all(cell and "nan" not in cell for row in measured for cell in row)
    for chart in summary.charts:
        assert {f"{chart.name}.png", f"{chart.name}.svg"} <= {path.name for path in folder.iterdir()}
    assert summary.command == f"amips study {name} --data DATA --scale smoke --out OUT"
    assert str(place) not in json.dumps(json.loads((folder / "summary.json").read_text()))
    assert "nan" not in " ".join(summary.verdict)
    return summary


def files(place, *parts):
    return {p: p.stat().st_mtime_ns for p in place.joinpath("out", *parts).rglob("*") if p.is_file()}


class Queries:
    """Of a split, its length, its top keys and where they come from."""

    def __init__(self, top_ids, source=None):
        self.top_ids, self.source = top_ids, source

    def __len__(self):
        return len(self.top_ids)


# ood, without running it


@pytest.mark.parametrize("sigma", [0.01, 0.06])
def test_noise_keeps_norms_and_its_targets_are_exact(task1, sigma):
    noisy = ood.perturbed(task1, sigma, seed=0)
    keys = np.asarray(task1.keys, np.float64)
    for name in ("val", "test"):
        before, after = getattr(task1, name), getattr(noisy, name)
        x = np.asarray(after.queries, np.float64)
        norms = np.linalg.norm(before.queries, axis=1)
        np.testing.assert_allclose(np.linalg.norm(x, axis=1), norms, rtol=1e-5)
        moved = np.linalg.norm(x - before.queries, axis=1) / norms
        assert moved.mean() == pytest.approx(sigma * np.sqrt(task1.d), rel=0.15)
        scores = x @ keys.T
        order = np.argsort(-scores, axis=1, kind="stable")[:, : before.top_ids.shape[1]]
        np.testing.assert_array_equal(after.top_ids, order)
        np.testing.assert_allclose(after.top_scores, np.take_along_axis(scores, order, axis=1), atol=1e-5)
        assert after.top_ids.dtype == before.top_ids.dtype
        assert len(after) == len(before)
    assert noisy.train is task1.train
    again = ood.perturbed(task1, sigma, seed=0)
    np.testing.assert_array_equal(noisy.test.queries, again.test.queries)
    other = ood.perturbed(task1, sigma, seed=1)
    assert (noisy.test.queries != other.test.queries).any()
    assert not np.array_equal(noisy.val.queries - task1.val.queries, noisy.test.queries - task1.test.queries)


def test_noise_is_relative_to_the_norm_and_leaves_the_task_alone(task1):
    before = np.array(task1.test.queries)
    ood.perturbed(task1, 0.05, seed=0)
    np.testing.assert_array_equal(task1.test.queries, before)
    assert ood.perturbed(task1, 0.0, seed=0) is task1


def curve(flops, recall):
    return {"flops": flops, "recall": recall}


def test_the_gap_is_below_zero_where_the_mapping_is_ahead():
    original = curve([1e6, 4e6, 16e6], [0.2, 0.6, 1.0])
    better = curve([2e6, 4e6, 16e6], [0.5, 0.8, 1.0])
    grid, gaps = ood.gap(original, better)
    assert grid[0] == pytest.approx(2e6)  # only where both are known
    assert grid[-1] == pytest.approx(16e6)
    assert gaps[0] == pytest.approx(0.4 - 0.5)  # 2e6 is half way from 1e6 to 4e6 in the log
    assert max(gaps) <= 1e-12
    assert min(ood.gap(better, original)[1]) >= -1e-12
    assert ood.gap(original, original)[1] == pytest.approx([0] * len(grid))
    assert ood.gap(original, curve([20e6, 30e6], [0.1, 0.2])) == ([], [])


def test_the_verdict_of_noise_says_where_the_mapping_is_ahead():
    def ways(original, mapped):
        probes = [1.0, 4.0, 16.0]
        flops = [1e6, 4e6, 16e6]
        made = {"original": original, "mapped": mapped, "routed": original}
        return {way: {"flops": flops, "recall": recall, "probes": probes} for way, recall in made.items()}

    ahead = ways([0.2, 0.6, 0.9], [0.3, 0.7, 0.9])
    behind = ways([0.1, 0.5, 0.8], [0.1, 0.3, 0.7])
    first, tail = ood._verdict({"0.00": ahead, "0.03": behind})
    assert first == (
        "From sigma = 0.00 to 0.03, recall at 4 probes falls: original 10.0 points, mapped 40.0 points, "
        "routed 10.0 points."
    )
    assert tail == "Somewhere in the budgets the mapping is ahead by more than a point at sigma = 0.00."
    none = "At no strength and no budget is the mapped query ahead of the original by a point."
    assert ood._verdict({"0.00": behind})[1] == none
    hardly = ways([0.2, 0.6, 0.9], [0.209, 0.609, 0.9])
    assert ood._verdict({"0.00": hardly})[1] == none


# routing, without running it


def test_networks_of_the_routing_study():
    (support, key) = routing.entries("smoke", ("XS",))
    assert (support.name, key.name) == ("SupportNet XS, L = 2, n_x = 1", "KeyNet XS, L = 2, n_x = 1")
    full = routing.entries("full", ("XS", "S", "M", "L"))
    assert len(full) == len({entry.name for entry in full}) == 2 * 4 * 3 * 2
    small = [entry.name for entry in routing.entries("small", ("XS", "S"))]
    assert "SupportNet XS, L = 4, n_x = 0" in small
    assert "KeyNet S, L = 4, n_x = 3" in small


def test_the_router_told_of_is_the_one_chosen_on_val():
    """`other` is right on every test query, `linear` on most val queries."""
    true = np.zeros((100, 1), int)
    right = {"centroid": (0.3, 0.3), "linear": (0.8, 0.5), "/runs/other": (0.4, 1.0)}
    runs = []
    for router, shares in right.items():
        ids = np.concatenate([np.where(np.arange(100) < 100 * share, 0, 1) for share in shares])[:, None]
        scan = np.full(200, 64)
        rank = (ids[:, 0] == 0).astype(np.int32)
        system = System(cells=4, router=router)
        runs.append(Run(system, 1, ids, np.zeros((200, 1), np.float32), rank, scan, scan, 0, 0, {}))
    task = SimpleNamespace(val=Queries(true), test=Queries(true, source=np.arange(100)), n=1000, d=16)
    base, *contenders = on_test(runs, task)
    chosen = routing._best(on_val(runs, task))
    said = routing._verdict(base, contenders, chosen, task)
    assert "centroids find 30.0% of the top keys of 100 held-out queries" in said[0]
    assert "best on val, linear, finds 50.0%: +20.0 points" in said[0]
    assert said[0].endswith("for 0.2% instead of 0.2% of the FLOPs of a full scan.")  # 64 of 2 * 1000 * 16
    assert said[1] == "Surely better than centroids at k = 1: linear; other."
    # All rows of a few sources tell no more than these few: nothing is sure any longer.
    task.test.source = np.arange(100) // 34
    said = routing._verdict(base, contenders[:1], chosen, task)
    assert "(no sure difference)" in said[0]
    assert len(said) == 1


# ivf, without running it


def family(name, role, ranks, scan, times, n):
    """One run with these ranks of the top key; seconds in units of the yardstick."""
    m = len(ranks)
    system = System(cells=4) if role == "baseline" else System(cells=4, router="/runs/x", label=name)
    taken = {}
    for mode in ("single/1", "batch/1"):
        taken |= {f"amips/{mode}": np.full(3, times), f"yardstick/amips/{mode}": np.ones(3)}
    ids, scores = np.zeros((m, 1), np.int32), np.zeros((m, 1), np.float32)
    cost = np.full(m, scan)
    run = Run(system, 1, ids, scores, np.asarray(ranks), cost, cost, 0, 0, taken)
    return Family(name, role, [Measured(run, slice(0, None), np.zeros((m, 1), int), n)])


@pytest.mark.parametrize("metric", ivf.METRICS)
def test_no_times_of_drop_in_where_more_results_are_needed_than_were_timed(metric):
    n = 10_000
    first = np.ones(50, int)
    base = family("centroid", "baseline", first, 400, 4.0, n)
    tested = [
        base,
        family("KeyNet XS", "contender", first, 200, 2.0, n),
        family("KeyNet XS, drop-in", "contender", first, 100, 1.0, n),
    ]
    bootstrap = Bootstrap(50)
    table = ivf._table(base, tested, bootstrap, metric)
    assert table.head[4:] == ["time, batch 1", "time, large batch"]
    assert len(table.rows) == 2 * len(ivf.TARGETS)
    for row in table.rows:
        factor = "4.00 (4.00 to 4.00)" if "drop-in" in row[1] else "2.00 (2.00 to 2.00)"
        timed = "drop-in" not in row[1] or metric == "recall@0.01%"
        assert row[2:] == [factor, factor, *[factor if timed else "-"] * 2]
    drawn = ivf._chart(tested, metric, {"single/1": 1e-4}, SimpleNamespace(n=n))
    time, keys, flops = drawn.panels
    assert ("KeyNet XS, drop-in" in [series.name for series in time.series]) == (metric == "recall@0.01%")
    for panel in (keys, flops):
        assert [series.name for series in panel.series] == ["original", "KeyNet XS", "KeyNet XS, drop-in"]


def test_no_times_of_drop_in_where_a_ten_thousandth_is_more_than_was_timed():
    """Of 200,000 keys that is 20; 10 were timed."""
    for n, timed in ((100_000, True), (200_000, False)):
        one = family("KeyNet XS, drop-in", "contender", np.ones(5, int), 100, 1.0, n)
        assert ivf._has_time(one, "single/1", "recall@0.01%") == timed
        assert ivf._has_time(one, "flops", "recall@0.01%")


def test_the_size_told_of_is_the_one_that_was_best_on_val():
    n, first = 10_000, np.ones(50, int)
    base = family("centroid", "baseline", first, 400, 4.0, n)
    names = ("KeyNet XS", "KeyNet S", "KeyNet XS, drop-in", "KeyNet S, drop-in")

    def contenders(*scans):
        return [
            family(name, "contender", first, scan, 1.0, n) for name, scan in zip(names, scans, strict=True)
        ]

    test, val = contenders(200, 100, 800, 400), contenders(10, 20, 10, 20)
    task = SimpleNamespace(test=range(50))
    dropped, routed = ivf._verdict(base, [base, *test], [base, *val], Bootstrap(50), task)
    assert dropped == (
        "At recall@0.1% = 0.90 on 50 held-out queries, the index searched with the predicted key (drop-in) "
        "(KeyNet XS, drop-in, the best size on val) against the best index searched with x: 2.00x more FLOPs "
        "(ratio of FLOPs 0.50, 95 % interval 0.50 to 0.50)."
    )
    assert routed == (
        "At recall@0.1% = 0.90 on 50 held-out queries, the index routed by the prediction (KeyNet XS, the "
        "best size on val) against the best index searched with x: 2.00x fewer FLOPs (ratio of FLOPs 2.00, "
        "95 % interval 2.00 to 2.00)."
    )
    missed = [family(name, "contender", 0 * first, 10, 1.0, n) for name in names]
    said = ivf._verdict(base, [base, *missed], [base, *missed], Bootstrap(50), task)
    assert said == [
        "The index searched with the predicted key (drop-in) does not reach recall@0.1% = 0.90 within the "
        "budgets tried.",
        "The index routed by the prediction does not reach recall@0.1% = 0.90 within the budgets tried.",
    ]
    lost = family("centroid", "baseline", 0 * first, 400, 4.0, n)
    said = ivf._verdict(lost, [lost, *test], [lost, *val], Bootstrap(50), task)
    assert said == ["Searched with x the index does not reach recall@0.1% = 0.90."] * 2


# as a user types them


@pytest.mark.parametrize(
    ("name", "cells", "ks"), [("routing", 10, [1, 2, 3, 4, 5]), ("routing128", 128, [1, 2, 4, 8, 16, 32])]
)
def test_routing(study, place, name, cells, ks):
    summary = study(name)
    values = summary.values
    assert values["k"] == ks
    assert "linear" in values["samples"]
    learned = ["SupportNet XS, L = 2"]
    if name == "routing":
        learned = ["SupportNet XS, L = 2, n_x = 1", "KeyNet XS, L = 2, n_x = 1"]
    assert set(values["accuracy"]) == {"centroid", "linear", *learned}
    for accuracy, flops in zip(values["accuracy"].values(), values["flops"].values(), strict=True):
        assert (np.diff(accuracy) >= 0).all()  # more cells, sure to find no less
        assert (np.diff(flops) > 0).all()
        assert accuracy[-1] <= 1
    assert values["accuracy"]["centroid"][0] > 2 / cells  # far above chance
    found = re.search(r"centroids find ([\d.]+)%", summary.verdict[0])
    assert float(found[1]) == pytest.approx(100 * values["accuracy"]["centroid"][0], abs=0.06)
    # The router it tells of is the best on val, from the raw runs; what it finds is of test.
    on_val = {}
    for path in place.glob(f"out/{name}/runs/*-model-*-b1.json"):
        with np.load(path.with_suffix(".npz")) as run:
            on_val[json.loads(path.read_text())["system"]["label"]] = (run["rank"][:200] == 1).mean()
    assert set(on_val) == {"linear", *learned}
    told = re.search(r"best on val, (.+), finds ([\d.]+)%", summary.verdict[0])
    assert on_val[told[1]] == max(on_val.values())
    assert float(told[2]) == pytest.approx(100 * values["accuracy"][told[1]][0], abs=0.06)
    # The centroid row once more, from the raw runs: the top key is in the k best cells.
    raw = sorted(place.glob(f"out/{name}/runs/ivf-{cells}-centroid-*-b{ks[1]}.npz"))
    with np.load(raw[0]) as run:
        assert (run["rank"][200:] == 1).mean() == pytest.approx(values["accuracy"]["centroid"][1])
    # Below what was measured, what the paper says in words, where it does.
    (table,) = summary.tables
    assert table.head == ["routed by", "million samples", *(f"k = {k}" for k in ks)]
    assert [row[0] for row in table.rows[: 2 + len(learned)]] == ["centroid", *sorted(learned), "linear"]
    paper = table.rows[2 + len(learned) :]
    assert "The paper" in table.note
    if name == "routing":
        assert paper == []
    else:
        assert paper == [
            ["the paper, NQ: centroid", "-", "56 %", "", "", "", "95 %", ""],
            ["the paper, NQ: SupportNet XS, L = 8", "1,000", "72 %", "", "95 %", "", "", ""],
        ]
    before = files(place, "work") | files(place, name, "runs")
    assert study(name).values == values
    assert files(place, "work") | files(place, name, "runs") == before


@pytest.mark.slow
def test_ivf_and_ood_share_their_network(study, place):
    told = study("ivf")
    names = {"centroid", "KeyNet XS", "KeyNet XS, drop-in"}
    assert set(told.values["flops"]) == names
    for metric, found in told.values["recall"].items():
        assert set(found) == names
        for family, recall in found.items():
            assert len(recall) == len(told.values["flops"][family]) == len(told.values["seconds"][family])
            assert all(0 <= r <= 1 for r in recall), metric
    assert all(s > 0 for seconds in told.values["seconds"].values() for s in seconds)
    assert len(told.verdict) == 2
    assert "(drop-in)" in told.verdict[0]
    assert "routed by the prediction" in told.verdict[1]
    for metric, table in zip(("0.01%", "0.1%", "0.5%"), told.tables, strict=True):
        assert table.title == f"Recall@{metric}: against searching with x"
        assert [row[1] for row in table.rows] == 3 * ["KeyNet XS", "KeyNet XS, drop-in"]
        for row in table.rows:
            without = metric != "0.01%" and row[1].endswith("drop-in")
            assert [cell == "-" for cell in row] == [False] * 4 + 2 * [without]
    cells = {p.name.split("-")[1] for p in place.glob("out/ivf/runs/ivf-*-centroid-*.json")}
    assert cells == {str(c) for c in {*sweep(1200), *counts(1200)}}  # the baseline over the whole sweep
    assert {p.name.split("-")[1] for p in place.glob("out/ivf/runs/ivf-*-model-*.json")} == {
        str(c) for c in counts(1200)
    }
    # Of a drop-in the paper's recalls are read off the rank, not off the first ten keys.
    raw = next(place.glob("out/ivf/runs/*drop-in*-b4.npz"))
    with np.load(raw) as run:
        rank = run["rank"][200:]
    deep = within(1200)
    assert deep == [1, 2, 6]
    share = ((rank > 0) & (rank <= deep[2])).mean()
    assert any(r == pytest.approx(share) for r in told.values["recall"]["recall@0.5%"]["KeyNet XS, drop-in"])

    before = {p: t for p, t in files(place, "work").items() if "run-keynet-xs-" in str(p)}
    assert before
    drift = study("ood")
    assert {p: t for p, t in files(place, "work").items() if "run-keynet-xs-" in str(p)} == before
    assert list(drift.values["curves"]) == ["0.00", "0.03"]
    for ways in drift.values["curves"].values():
        assert set(ways) == {"original", "mapped", "routed"}
        for one in ways.values():
            assert (np.diff(one["probes"]) > 0).all()
            assert (np.diff(one["flops"]) > 0).all()
    clean = drift.values["curves"]["0.00"]
    assert clean["original"]["recall"][-1] > 0.9
    # Without noise it is an index of the ivf study.
    for recall in clean["original"]["recall"]:
        assert any(r == pytest.approx(recall) for r in told.values["recall"]["recall@0.01%"]["centroid"])
    # Curves once more, from the raw runs.
    for way, files_of in (
        ("original", "centroid-cells"),
        ("mapped", "model-drop-in"),
        ("routed", "model-cells"),
    ):
        for probes, recall in zip(clean[way]["probes"], clean[way]["recall"], strict=True):
            (raw,) = place.glob(f"out/ood/sigma-0.00/runs/ivf-35-{files_of}-*-b{probes:.0f}.npz")
            with np.load(raw) as run:
                assert recall == pytest.approx((run["rank"][200:] == 1).mean())
