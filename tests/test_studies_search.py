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
from amips.bench.derive import families, families_on_val, within
from amips.bench.store import Run
from amips.bench.studies import ood, routing
from amips.bench.systems import System
from amips.cli import main
from conftest import make_world

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
        assert all(cell and "nan" not in cell for row in table.rows for cell in row)
    for chart in summary.charts:
        assert {f"{chart.name}.png", f"{chart.name}.svg"} <= {path.name for path in folder.iterdir()}
    assert summary.command == f"amips study {name} --data DATA --scale smoke --out OUT"
    assert str(place) not in json.dumps(json.loads((folder / "summary.json").read_text()))
    assert "nan" not in " ".join(summary.verdict)
    return summary


def files(place, *parts):
    return {p: p.stat().st_mtime_ns for p in place.joinpath("out", *parts).rglob("*") if p.is_file()}


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
    assert tail == "Somewhere in the budgets the mapping is ahead at sigma = 0.00."
    assert ood._verdict({"0.00": behind})[1].startswith("At no strength and no budget")


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
    base, *contenders = families(runs, 100, true, 1000)
    chosen = routing._best(families_on_val(runs, 100, true, 1000))
    said = routing._verdict(base, contenders, chosen, SimpleNamespace(test=range(100)))
    assert "centroids find 30.0% of the top keys of 100 held-out queries" in said[0]
    assert "best on val, linear, finds 50.0%: +20.0 points" in said[0]
    assert said[1] == "Surely better than centroids at k = 1: linear; other."


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
    before = files(place, "work") | files(place, name, "runs")
    assert study(name).values == values
    assert files(place, "work") | files(place, name, "runs") == before


@pytest.mark.slow
def test_ivf_and_ood_share_their_network(study, place):
    ivf = study("ivf")
    names = {"centroid", "KeyNet XS", "KeyNet XS, drop-in"}
    assert set(ivf.values["flops"]) == names
    for metric, found in ivf.values["recall"].items():
        assert set(found) == names
        for family, recall in found.items():
            assert len(recall) == len(ivf.values["flops"][family]) == len(ivf.values["seconds"][family])
            assert all(0 <= r <= 1 for r in recall), metric
    assert all(s > 0 for seconds in ivf.values["seconds"].values() for s in seconds)
    assert len(ivf.verdict) == 2
    assert "drop-in" in ivf.verdict[0]
    # Of a drop-in the paper's recalls are read off the rank, not off the first ten keys.
    raw = next(place.glob("out/ivf/runs/*drop-in*-b4.npz"))
    with np.load(raw) as run:
        rank = run["rank"][200:]
    deep = within(1200)
    assert deep == [1, 2, 6]
    share = ((rank > 0) & (rank <= deep[2])).mean()
    assert any(r == pytest.approx(share) for r in ivf.values["recall"]["recall@0.5%"]["KeyNet XS, drop-in"])

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
    # Without noise it is the index of the ivf study.
    for recall in clean["routed"]["recall"]:
        assert any(r == pytest.approx(recall) for r in ivf.values["recall"]["recall@0.01%"]["KeyNet XS"])
