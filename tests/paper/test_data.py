"""Experiments on the data and on the machine: shift, leak, timing; their mathematics and one run of each."""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch

from amips.bench import load_summary
from amips.learn import Network, evaluate
from amips.nets import KeyNet, SupportNet
from helpers import make_world
from paper import leak, shift, timing
from paper.claims import claims_of
from paper.workspace import Workspace

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    place = tmp_path_factory.mktemp("data")
    keys, queries = make_world(1600, 2600, 16, seed=5)
    (place / "data").mkdir()
    np.save(place / "data" / "keys.npy", keys)
    np.save(place / "data" / "queries.npy", queries)
    return Workspace(place / "data", "smoke", place / "out")


def check_summary(summary, workspace, tmp_path):
    """What every summary must have; it survives being written, and names no path."""
    assert summary.verdict
    assert summary.facts
    assert summary.method
    assert summary.command == f"python -m paper {summary.name} --data DATA --scale smoke --out OUT"
    assert "claims" in summary.values
    assert {claim.sentence() for claim in claims_of(summary)} <= set(summary.verdict)
    for table in summary.tables:
        assert {len(row) for row in table.rows} == {len(table.head)}
        assert all(cell and "nan" not in cell for row in table.rows for cell in row)
    summary.save(tmp_path)
    text = json.dumps(asdict(summary))
    assert json.loads(json.dumps(asdict(load_summary(tmp_path)))) == json.loads(text)
    assert str(workspace.out) not in text
    assert "/tmp" not in text


# shift


def planted(n, d, spread, seed):
    """Points near a random plane of R^d, and an orthonormal basis [2, d] of it; the first axis is longer."""
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.standard_normal((d, 2)))[0].T
    points = rng.standard_normal((n, 2)) * [3.0, 1.5]
    noise = spread * rng.standard_normal((n, d))
    return (points @ basis + noise + rng.standard_normal(d)).astype(np.float32), basis


def test_components_are_those_of_a_planted_plane():
    rows, basis = planted(20_000, 24, 0.1, seed=0)
    plane = shift.principal_plane(rows)
    np.testing.assert_allclose(plane.axes @ plane.axes.T, np.eye(2), atol=1e-12)
    np.testing.assert_allclose(np.abs(plane.axes @ basis.T), np.eye(2), atol=0.02)
    np.testing.assert_allclose(plane.variances, [9, 2.25], rtol=0.05)
    total = 9 + 2.25 + 24 * 0.01
    np.testing.assert_allclose(plane.explained, np.array([9, 2.25]) / total, rtol=0.05)
    projected = plane.project(rows)
    np.testing.assert_allclose(projected.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(projected.var(axis=0), plane.variances, rtol=1e-6)


def test_components_do_not_depend_on_the_blocks(monkeypatch):
    rows, _ = planted(500, 8, 0.3, seed=1)
    whole = shift.principal_plane(rows)
    monkeypatch.setattr(shift, "BLOCK", 64)
    parts = shift.principal_plane(rows)
    np.testing.assert_allclose(parts.axes, whole.axes, atol=1e-10)
    np.testing.assert_allclose(parts.project(rows), whole.project(rows), atol=1e-10)


def densities(p, q):
    edges = shift.edges_of(p, q)
    width = shift.scott(p, min(len(p), len(q)), edges)
    return shift.density(p, edges, width), shift.density(q, edges, width)


def test_densities_sum_to_one_also_at_the_border():
    rng = np.random.default_rng(0)
    for points in (rng.random((300, 2)), np.zeros((5, 2)), rng.standard_normal((1, 2))):
        for p in densities(points, points + 0.1):
            assert p.min() >= 0
            assert p.sum() == pytest.approx(1)


def test_a_density_is_highest_where_the_points_are():
    points = np.random.default_rng(0).normal([2.0, -1.0], 0.1, (2000, 2))
    far = np.array([[-5.0, -5.0], [5.0, 5.0]])
    edges = shift.edges_of(points, far)
    p = shift.density(points, edges, shift.scott(points, 2000, edges))
    i, j = np.unravel_index(p.argmax(), p.shape)
    assert edges[0][i] - 0.2 < 2.0 < edges[0][i + 1] + 0.2
    assert edges[1][j] - 0.2 < -1.0 < edges[1][j + 1] + 0.2


def test_overlap_of_the_same_of_separate_and_of_half_moved_clouds():
    rng = np.random.default_rng(0)
    cloud, again = rng.standard_normal((2, 20_000, 2))
    assert shift.overlap(*densities(cloud, cloud)) == pytest.approx(1)
    assert shift.overlap(*densities(cloud, again)) > 0.95
    assert shift.overlap(*densities(cloud, again + np.array([30, 0]))) < 0.001
    # Two Gaussians of standard deviation 1 whose means are 2 apart share erfc(1 / sqrt(2)) = 0.317.
    assert shift.overlap(*densities(cloud, again + np.array([2, 0]))) == pytest.approx(0.317, abs=0.03)


def test_shift(workspace, tmp_path):
    summary = shift.run(workspace)
    check_summary(summary, workspace, tmp_path)
    values = summary.values
    scores = (
        np.load(workspace.work / "queries.npy")[workspace.split == "test"] @ workspace.keys.load().T
    ).max(axis=1)
    assert values["top1_mean"] == pytest.approx(scores.mean(), abs=1e-5)
    assert values["top1_median"] == pytest.approx(np.median(scores), abs=1e-5)
    keys, queries = workspace.keys.load().astype(np.float64), workspace.queries.load().astype(np.float64)
    spread = np.sqrt(np.square(keys - keys.mean(axis=0)).sum(axis=1).mean())
    apart = np.linalg.norm(keys.mean(axis=0) - queries.mean(axis=0))
    assert values["apart_relative"] == pytest.approx(apart / spread)
    # The queries of this world are moved, and two halves of its keys are not.
    assert 0 < values["overlap"] < values["overlap_of_halves"] - 0.1
    assert [row[1] for row in summary.tables[0].rows[1:]] == ["0.86", "0.71", "0.74"]
    both, of_keys, of_queries = summary.charts[0].panels
    assert [len(series.x) for series in both.series] == [1500, 2000]
    for panel in (of_keys, of_queries):
        assert np.sum(panel.grids[0].z) == pytest.approx(1, abs=1e-3)
    # Rows of z are y: the density has its mean where the points have theirs.
    grid, cloud = of_queries.grids[0], both.series[1]
    z = np.array(grid.z)
    assert (z.sum(axis=0) * grid.x).sum() == pytest.approx(np.mean(cloud.x), abs=0.02)
    assert (z.sum(axis=1) * grid.y).sum() == pytest.approx(np.mean(cloud.y), abs=0.02)
    assert abs(np.mean(cloud.x) - np.mean(cloud.y)) > 0.05  # so that axes in the wrong order would show
    histogram = summary.charts[1].panels[0]
    assert sum(histogram.series[0].y) == pytest.approx(1, abs=1e-3)
    assert dict(histogram.marks) == {"mean": values["top1_mean"], "median": values["top1_median"]}
    assert shift.run(workspace).values == values


# leak


def test_bootstrap_draws_sources_not_rows():
    rng = np.random.default_rng(0)
    of_source = rng.standard_normal(400)
    alone = leak.bootstrap(of_source, np.arange(400), rng)
    assert alone.mean() == pytest.approx(of_source.mean(), abs=0.01)
    assert alone.std() == pytest.approx(of_source.std() / 20, rel=0.1)
    # Ten equal rows of every source tell no more than one.
    repeated = leak.bootstrap(np.repeat(of_source, 10), np.repeat(np.arange(400), 10), rng)
    assert repeated.std() == pytest.approx(alone.std(), rel=0.1)


def test_leak(workspace, tmp_path):
    summary = leak.run(workspace)
    check_summary(summary, workspace, tmp_path)
    values = summary.values
    # Memory alone does far better on leaky rows: the split does leak.
    memory = values["lookup"]
    assert memory["leaky"] > 0.5
    assert memory["leaky"] > 2 * memory["held_out"]
    assert memory["interval"][0] > 0.2
    assert (values["leaky_with_relatives"], values["held_out_with_relatives"]) == (1.0, 0.0)
    assert values["rows"] == {"train": 800, "leaky": 100, "held_out": 200}
    assert values["times_seen"] == pytest.approx(4096 / 800)
    for metric in leak.METRICS:
        one = values[metric]
        assert one["difference"] == pytest.approx(one["leaky"] - one["held_out"])
        assert one["interval"][0] <= one["difference"] <= one["interval"][1]
    assert leak.run(workspace).values == values
    splits = [claim.split for claim in claims_of(summary)]
    assert splits == ["rows", "rows", "source", "source"]
    # The searches of one index, once more: with every cell x finds what exact search finds.
    one = values["one_index"]
    assert one["probes"][-1] <= one["cells"] == round(math.sqrt(1500))
    for kind in ("leaky", "held_out"):
        for x, mapped, low, high in one[kind]:
            assert low - 1e-9 <= mapped - x <= high + 1e-9
        assert [row[0] for row in one[kind]] == sorted(row[0] for row in one[kind])


def test_leak_measures_what_evaluate_does(workspace):
    task = workspace.pool_tasks()["rows"]
    net = workspace.model(task, KeyNet("XS"), "leak")
    for split in (task.val, task.test):
        means = {name: value.mean() for name, value in leak.per_row(net, task, split).items()}
        expected = evaluate(net, task, split)
        assert means == pytest.approx({name: expected[name] for name in means}, rel=1e-5, abs=1e-6)


# timing


def test_turns_are_taken_round_by_round_after_a_warm_one():
    calls = []
    groups = [{name: lambda name=name: calls.append(name) for name in names} for names in ("ab", "cd")]
    times = timing.in_turns(groups, rounds=3)
    assert calls == list("aabccd" * 4)  # the first of a group once more, untimed
    assert {name: len(seconds) for name, seconds in times.items()} == dict.fromkeys("abcd", 3)


@pytest.mark.parametrize("spec", [SupportNet(width=12), KeyNet(width=12)], ids=["support", "key"])
def test_both_runtimes_compute_the_same(spec):
    x = make_world(10, 30, 16, seed=0)[1]
    work = timing.networks(Network(spec.architecture(1000, 16, 1), 0), x)
    for output in timing.OUTPUTS:
        torched, numpied = work["torch", output](), work["numpy", output]()
        assert not torched.requires_grad
        assert torched.shape == numpied.shape == ((30, 1) if output == "score" else (30, 1, 16))
        np.testing.assert_allclose(torched.numpy(), numpied, atol=1e-5)


def test_ratios_of_the_paper():
    support, key = timing.paper_ratios("SupportNet"), timing.paper_ratios("KeyNet")
    assert len(support) == len(key) == 9
    assert np.median(support) == pytest.approx(1.895, abs=0.001)
    assert (min(key), max(key)) == (pytest.approx(0.995, abs=0.001), pytest.approx(1.008, abs=0.001))


def every_work():
    """All that is timed but the matrix products."""
    parts = [(r, o, n, s) for r in timing.RUNTIMES for n, o in timing.COLUMNS for s in timing.TIMED_SIZES]
    return [timing.Work(*part) for part in parts]


def test_figures_are_derived_round_by_round():
    works = every_work()
    # A machine that becomes ten times slower: ratios within a round do not see it.
    pace = [1.0, 1.0, 10.0]
    times = {work: [(2.0 if work.output == "gradient" else 1.0) * p for p in pace] for work in works}
    times |= {timing.Work("torch", timing.PRODUCT): [0.5 * p for p in pace]}
    times |= {timing.Work("numpy", timing.PRODUCT): [1.0 * p for p in pace]}
    flops = dict.fromkeys(times, 1e9)
    values = timing.figures(times, flops)
    assert values["torch KeyNet M ratio"] == 2
    assert values["numpy / torch SupportNet L score"] == 1
    assert values["peak GFLOP/s"] == 2
    wanted = {"rate": 0.5, "seconds": 1, "quartiles": [1, 5.5], "flops": 1e9}
    assert values["torch SupportNet S score"] == wanted


@pytest.mark.parametrize(("support", "key", "held"), [(1.9, 1.0, (True, True)), (1.1, 1.3, (False, False))])
def test_the_claims_of_times_are_of_the_ratios_here(support, key, held):
    works = every_work()
    ratio = {"SupportNet": support, "KeyNet": key}
    times = {work: [ratio[work.network] if work.output == "gradient" else 1.0] for work in works}
    times |= {timing.Work(runtime, timing.PRODUCT): [0.5] for runtime in timing.RUNTIMES}
    *claims, _ = timing.compare(timing.figures(times, dict.fromkeys(times, 1e9)))
    assert tuple(claim.held for claim in claims) == held
    assert {claim.where for claim in claims} == {"Appendix A.1, Table 1"}


@pytest.mark.parametrize(("overlap", "top", "held"), [(0.7, 0.6, (True, True)), (0.97, 0.86, (False, False))])
def test_the_claims_of_the_shift(overlap, top, held):
    values = {"overlap": overlap, "overlap_of_halves": 0.98, "top1_mean": top, "top1_median": top}
    *claims, _ = shift.compare({**values, "apart_relative": 0.1})
    assert tuple(claim.held for claim in claims) == held


def test_timing(workspace, tmp_path):
    threads = torch.get_num_threads()
    summary = timing.run(workspace)
    assert torch.get_num_threads() == threads
    check_summary(summary, workspace, tmp_path)
    values = summary.values
    for size in timing.TIMED_SIZES:
        for kind, spec in timing.NETWORKS.items():
            a = spec(size=size, depth=4).architecture(workspace.keys.n, 16, 1)
            for runtime in timing.RUNTIMES:
                score, gradient = (values[str(timing.Work(runtime, o, kind, size))] for o in timing.OUTPUTS)
                assert score["flops"] == 256 * a.score_flops
                assert gradient["flops"] == 256 * a.key_flops()
                for one in (score, gradient):
                    assert 0 < one["quartiles"][0] <= one["seconds"] <= one["quartiles"][1]
                    assert 0 < one["rate"] < math.inf
                assert 0 < values[f"{runtime} {kind} {size} ratio"] < math.inf
    assert len(summary.tables[0].rows) == 3 * (2 + 3)
    assert len(summary.tables[1].rows) == 3 * 2
    assert summary.machine["torch"] == torch.__version__
