"""The bench from end to end on a small task: run, stored, told, continued."""

import json
import re
import shutil
from dataclasses import asdict

import numpy as np
import pytest
import torch

import amips
from amips.bench import System, bench, derive, load_summary
from amips.bench.comparison import _command
from amips.bench.derive import AXES
from amips.bench.facts import facts
from amips.bench.lineup import own_systems, sweep
from amips.bench.page import write_page
from amips.bench.runner import Runner, Settings
from amips.bench.summarize import METRICS
from amips.builder import Builder
from amips.design import Design
from amips.errors import AmipsError, ResultsError, RunError
from amips.locks import locked
from amips.nets import AffineNet, Net
from amips.nets.affine import AffineArchitecture
from chaos.mutations import reseal
from helpers import make_world, with_linear
from reference import architecture, random_net

torch.set_num_threads(1)

QUICK = {"rounds": 1, "batch": 32, "minutes": 0.005}
EIGHT = System(Design.plain(8))
FEW = [EIGHT, System(Design.plain(24)), System(with_linear(8), label="linear"), System(backend="exact")]


@pytest.fixture(autouse=True)
def every_round_counts(monkeypatch):
    """What is derived twice is the same on a busy machine too, where a held-up yardstick drops rounds."""
    monkeypatch.setattr("amips.bench.derive.HELD_UP", float("inf"))


@pytest.fixture(scope="module")
def mapper(task, tmp_path_factory):
    """A run that predicts one key, badly."""
    net = random_net(architecture("key", d=16, c=1))
    out = tmp_path_factory.mktemp("runs") / "mapper"
    Net(net.architecture, net.weights, {"keys": task.fingerprint}).save(out)
    return out


@pytest.fixture(scope="module")
def done(task, tmp_path_factory):
    """A bench of few systems: (where, what came of it)."""
    out = tmp_path_factory.mktemp("few") / "results"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(derive, "HELD_UP", np.inf)  # one round, whatever else the machine does
        return out, bench(task, out=out, systems=FEW, **QUICK)


def stamps(out):
    """When each raw file was written."""
    return {path.name: path.stat().st_mtime_ns for path in (out / "runs").iterdir()}


def plain(summary):
    return json.loads(json.dumps(asdict(summary)))


def test_the_summary_is_saved_and_loads(done):
    out, made = done
    assert plain(load_summary(out)) == plain(made)
    assert made.name == "bench"
    assert made.title == "Learned search on 600 keys"
    assert not list(out.rglob("*.tmp"))
    for table in made.tables:
        assert table.rows
        assert {len(row) for row in table.rows} == {len(table.head)}


def test_points_are_derived_from_the_stored_runs(done, task):
    """Recall and cost once more, from the files and plain loops."""
    out, made = done
    true = np.asarray(task.test.top_ids)
    points = {(p["system"], p["budget"]): p for p in made.values["points"]}
    stored = sorted(set((out / "runs").glob("*.json")) - set((out / "runs").glob("*.times.json")))
    assert len(points) == len(stored)
    for path in stored:
        about = json.loads(path.read_text())
        point = points[about["name"], about["budget"]]
        with np.load(path.with_suffix(".npz")) as raw:
            ids, scan, scanned = raw["ids"][100:], raw["scan"][100:], raw["scanned"][100:]
        hits = [len(set(a) & set(b)) / 10 for a, b in zip(ids, true[:, :10], strict=True)]
        assert point["recall@10"] == pytest.approx(np.mean(hits))
        assert point["recall@1"] == pytest.approx(np.mean(ids[:, 0] == true[:, 0]))
        assert point["flops"] == pytest.approx(about["network"] + about["coarse"] + scan.mean())
        assert point["scanned"] == pytest.approx(scanned.mean())
        assert set(METRICS) <= set(point)
        assert point["single/1"] > 0
        assert point["batch/1"] > 0


def test_costs_at_a_recall_are_shares_of_a_full_scan(done):
    made = done[1]
    exact = [c for c in made.values["costs"] if c["family"] == "exact, all keys"]
    assert len(exact) == 4
    for cost in exact:
        assert cost["flops"] == 1
        assert cost["scanned"] == 1
        assert set(AXES) <= set(cost)
    assert made.values["contender"] == "linear"
    assert re.search(
        r"on 100 held-out queries, linear \(8 cells, \d probes\) against the best FAISS IVF \((8|24) cells, "
        r"\d+ probes\), one thread: ",
        made.verdict[1],
    )
    assert made.verdict[3].startswith("FLOPs, against centroid routing: ")
    assert re.fullmatch(
        r"For reference, at recall@10 = 0\.\d\d on one thread, exact, all keys: [\d.]+x (slower|faster) at "
        r"batch 1 \([\d,]+ us a query\) and [\d.]+x (slower|faster) at batch 32 \([\d,]+ us a query\) "
        r"than linear\.",
        made.verdict[-1],
    )


def test_times_of_one_round_have_no_interval_and_no_say(done):
    """FLOPs have one."""
    table = done[1].tables[0]
    assert table.title == "Against the best FAISS IVF"
    assert table.head[2:] == [
        "FLOPs",
        "keys scanned",
        "time: batch 1, 1 thread",
        "batch 1, all",
        "batch 32, 1 thread",
        "batch 32, all",
    ]
    for row in table.rows:  # each time was taken once: there is no interval to show
        assert all(re.fullmatch(r"-|not taken|\d+\.\d\d", cell) for cell in row[4:])
    known = [row for row in table.rows if row[4] != "-"]
    assert known
    assert any(" to " in row[2] for row in known)
    assert "inf" not in "".join(cell for row in table.rows for cell in row)
    assert "Learning pays on this data." not in done[1].verdict


def test_copies_of_a_query_are_drawn_together(done, task, monkeypatch):
    """The intervals are over the sources of the test queries."""
    asked = []
    real = derive.Bootstrap

    def recording(queries, **options):
        asked.append(queries)
        return real(queries, **options)

    monkeypatch.setattr("amips.bench.summarize.Bootstrap", recording)
    bench(task, out=done[0], systems=FEW, **QUICK)
    (sources,) = asked
    np.testing.assert_array_equal(sources, task.test.source)


def test_the_command_is_what_was_typed_without_places(done, task, mapper, tmp_path):
    told = "--minutes 0.005 --rounds 1 --batch 32 --singles 64 --seed 0 --out RESULTS"
    assert done[1].command == f"amips bench TASK --systems SYSTEMS.toml {told}"
    settings = Settings(minutes=0.5, rounds=3, batch=1024, seed=7)
    rest = "--minutes 0.5 --rounds 3 --batch 1024 --singles 64 --seed 7 --out RESULTS"
    assert _command(settings, [], False) == f"amips bench TASK {rest}"
    models = ["/tmp/deep/one", "runs/two"]
    assert _command(settings, models, False) == f"amips bench TASK --models one --models two {rest}"
    assert _command(settings, models[:1], True) == (
        f"amips bench TASK --models one --systems SYSTEMS.toml {rest}"
    )
    assert _command(settings, [], False, ["hnsw", "scann"]) == (
        f"amips bench TASK --backend hnsw --backend scann {rest}"
    )


def test_models_beside_systems(task, mapper, tmp_path):
    """The systems given instead of the default ones, and the models as they would be with those."""
    out = tmp_path / "results"
    made = bench(task, out=out, systems=[EIGHT, System(backend="exact")], models=[mapper], **QUICK)
    counts = sorted({*sweep(task.n), task.c})
    ways = ("KeyNet mapper", "KeyNet mapper, drop-in")
    expected = {f"{way}, {c:,} cells" for way in ways for c in counts}
    assert {p["system"] for p in made.values["points"]} == expected | {"centroid, 8 cells", "exact, all keys"}
    assert made.command.startswith("amips bench TASK --models mapper --systems SYSTEMS.toml ")
    assert str(tmp_path) not in (out / "summary.json").read_text()
    assert str(mapper.parent) not in (out / "summary.json").read_text()


def test_the_training_of_linear_routers_is_shown(done):
    chart = next(chart for chart in done[1].curves if chart.name == "training-routing")
    groups = {series.name: series.group for series in chart.panels[0].series}
    assert groups == {"linear, 8 cells": "contender", "centroid routing": "reference"}


def test_storages_of_the_baseline_are_one_in_the_verdict(task, tmp_path):
    systems = [EIGHT, System(Design.plain(24, "sq8")), System(with_linear(24), label="linear")]
    made = bench(task, out=tmp_path / "results", systems=systems, **QUICK)
    assert {p["family"] for p in made.values["points"]} == {"centroid", "centroid, sq8", "linear"}
    assert {row[1] for row in made.tables[0].rows} == {"linear"}
    points = [p for p in made.values["points"] if p["family"].startswith("centroid")]
    target = float(re.match(r"At recall@10 = (0\.\d\d) ", made.verdict[1])[1])
    best = min((p for p in points if p["recall@10"] >= target), key=lambda p: p["flops"])
    count = {"centroid, 8 cells": 8, "centroid, sq8, 24 cells": 24}[best["system"]]
    assert f"against the best FAISS IVF ({count} cells, {best['budget']} probes)" in made.verdict[1]


def test_the_report_page_is_written(done, tmp_path):
    pytest.importorskip("plotly")
    page = write_page(done[0], tmp_path / "page.html").read_text()
    assert done[1].title in page
    assert "linear" in page


def test_a_second_call_runs_nothing_and_says_the_same(done, task, monkeypatch):
    out, made = done
    before = stamps(out)
    monkeypatch.setattr(Runner, "open", lambda *_: pytest.fail("run again"))
    again = bench(task.path, out=out, systems=FEW, **QUICK)
    assert plain(again) == plain(made)
    assert stamps(out) == before


def test_systems_added_later_keep_the_old_runs(done, task, tmp_path):
    out = tmp_path / "results"
    shutil.copytree(done[0], out)
    before = stamps(out)
    more = bench(task, out=out, systems=[*FEW, System(Design.plain(12))], **QUICK)
    after = stamps(out)
    new = set(after) - set(before)
    assert new
    assert all(name.startswith("cells-12-") for name in new)
    assert {name: after[name] for name in before} == before
    assert any(p["system"] == "centroid, 12 cells" for p in more.values["points"])
    # Runs of systems that are not asked for are left out of what is told, and stay.
    fewer = bench(task, out=out, systems=FEW, **QUICK)
    assert plain(fewer) == plain(done[1])
    assert stamps(out) == after


FASTSCAN = "FAISS IVF, PQ FastScan + refine"


@pytest.mark.slow
def test_the_default_systems(task, mapper, tmp_path):
    made = bench(task, out=tmp_path / "results", models=[mapper], **QUICK)
    names = {p["system"] for p in made.values["points"]}
    counts = sorted({*sweep(task.n), task.c})
    families = ("centroid", "KeyNet mapper", "KeyNet mapper, drop-in")
    expected = {f"{family}, {c:,} cells" for family in families for c in counts}
    own_ones = own_systems(Builder(task))
    own = {system.name for system in own_ones}
    assert names == expected | own | {"amips graph, lean", "exact, all keys", "HNSW", FASTSCAN}
    against = {table.title: table for table in made.tables}["Against FAISS IVF with FastScan codes"]
    assert {row[1] for row in against.rows} > {"amips graph, lean"}
    assert sum(FASTSCAN in sentence for sentence in made.verdict) == 2  # how far it is, and what is gained
    costs = {table.title: table for table in made.tables}["What a recall costs"]
    learns = {row[1]: row[2] for row in costs.rows}
    assert {name for name, told in learns.items() if told == "no"} == {
        *("centroid", "exact, all keys", "HNSW", FASTSCAN)
    }
    assert [chart.name for chart in made.charts] == [
        "recall10-cost",
        "recall10-time",
        "recall1-cost",
        "recall1-time",
        "top-scores",
    ]
    (training,) = (chart for chart in made.curves if chart.name == "training-routing")
    # One router for each number of cells, whatever the storage.
    trained = [system.name for system in own_ones if system.design.storage == "flat"]
    assert [series.name for series in training.panels[0].series if series.group == "contender"] == trained
    assert made.command.startswith("amips bench TASK --models mapper --minutes 0.005 ")


def test_a_run_is_known_by_its_weights(task, mapper, tmp_path):
    """Moved, it is not run again; gone altogether, the rest can still be told."""
    shutil.copytree(mapper, tmp_path / "here")
    out = tmp_path / "results"
    bench(task, out=out, systems=[EIGHT, System(EIGHT.design, run=str(tmp_path / "here"))], **QUICK)
    before = stamps(out)
    (tmp_path / "here").rename(tmp_path / "there")
    moved = [EIGHT, System(EIGHT.design, run=str(tmp_path / "there"), label="ours")]
    again = bench(task, out=out, systems=moved, **QUICK)
    assert stamps(out) == before
    assert {p["family"] for p in again.values["points"]} == {"centroid", "ours"}
    shutil.rmtree(tmp_path / "there")
    assert bench(task, out=out, systems=moved[:1], **QUICK).values["contender"] is None
    assert stamps(out) == before


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"rounds": 0}, "rounds=0"),
        ({"batch": 0}, "batch=0"),
        ({"minutes": 0.0}, "minutes=0.0"),
        ({"minutes": float("nan")}, "minutes=nan"),
        ({"minutes": float("inf")}, "minutes=inf"),
        ({"seed": -1}, "seed=-1"),
        ({"systems": FEW, "models": ["x"]}, "x is not a finished run: it has no model.safetensors"),
        ({"systems": "nowhere.toml"}, r"nowhere\.toml does not exist"),
        ({"models": ["nowhere"]}, "nowhere is not a finished run"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(task, tmp_path, options, match):
    with pytest.raises(AmipsError, match=match) as caught:
        bench(task, out=tmp_path / "results", **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "results").exists()


def test_a_task_that_knows_too_few_top_keys(tmp_path):
    task = amips.label(*make_world(100, 80, 8, seed=2), val=10, test=10, k=9, out=tmp_path / "task")
    with pytest.raises(AmipsError, match="knows only the top 9: label with -k 10 or more"):
        bench(task, out=tmp_path / "results")


def test_the_nearest_other_key_is_another_whatever_the_norms(tmp_path):
    """A long key scores more with a short one than that does with itself."""
    keys, queries = make_world(300, 60, 8, seed=4)
    keys *= np.random.default_rng(0).uniform(0.2, 5, (300, 1)).astype(np.float32)
    task = amips.label(keys, queries, val=10, test=10, k=10, out=tmp_path / "task")
    scores = keys.astype(np.float64) @ keys.T
    own = scores.diagonal().copy()
    np.fill_diagonal(scores, -np.inf)
    nearest = scores.max(axis=1)
    assert 20 < (nearest > own).sum() < 280  # both kinds
    found = dict(facts(task))
    assert found["score of a key's nearest other key"] == f"mean {nearest.mean():.3f}"
    norms = np.linalg.norm(keys, axis=1)
    told = f"{norms.min():.3f} to {norms.max():.3f}, mean {norms.mean():.3f}"
    assert found["norms of keys (a sample)"] == told


def test_the_nearest_other_key_of_a_key_that_is_there_twice_is_its_twin(tmp_path):
    keys, queries = make_world(50, 60, 8, seed=4)
    task = amips.label(np.concatenate([keys, keys]), queries, val=10, test=10, k=10, out=tmp_path / "task")
    assert dict(facts(task))["score of a key's nearest other key"] == "mean 1.000"


def test_results_of_another_task_are_not_mixed(done, task, task1):
    with pytest.raises(ResultsError, match=r"of other inputs or options \(task\)"):
        bench(task1, out=done[0], systems=FEW, **QUICK)
    with pytest.raises(ResultsError, match=r"\(batch, minutes\)"):
        bench(task, out=done[0], systems=FEW, **{**QUICK, "batch": 16, "minutes": 0.01})


def test_more_rounds_are_not_other_settings(done, task, tmp_path):
    """Times that are there are kept."""
    shutil.copytree(done[0], tmp_path / "results")
    before = stamps(tmp_path / "results")
    made = bench(task, out=tmp_path / "results", systems=FEW, **{**QUICK, "rounds": 2})
    assert made.values == done[1].values
    assert made.tables == done[1].tables
    assert any(
        "warm, 1 rounds, on 1 and on " in text for text in made.method
    )  # what was taken, not asked for
    assert stamps(tmp_path / "results") == before


@pytest.mark.parametrize("method", ["_run", "_modes"])
def test_an_interrupted_bench_is_continued(done, task, tmp_path, monkeypatch, method):
    """In the middle of the answers, or of the times: the answers are in the end the same."""
    real = getattr(Runner, method)
    calls = 0

    def stop(self, *rest):
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return real(self, *rest)

    out = tmp_path / "results"
    with monkeypatch.context() as patched:
        patched.setattr(Runner, method, stop)
        with pytest.raises(KeyboardInterrupt):
            bench(task, out=out, systems=FEW, **QUICK)
    before = stamps(out)
    assert before
    made = bench(task, out=out, systems=FEW, **QUICK)
    after = stamps(out)
    assert {name: after[name] for name in before} == before
    assert len(after) > len(before)
    told = {(p["system"], p["budget"]) for p in made.values["points"]}
    assert told >= {key for key in points(done[1]) if "linear" not in key[0]}
    for key, point in points(made).items():
        if "linear" not in key[0]:  # how far that gets in its time is another matter
            assert point["recall@10"] == points(done[1])[key]["recall@10"]
            assert point["flops"] == points(done[1])[key]["flops"]


def test_damaged_times_are_named_in_one_line(done, task, tmp_path):
    out = tmp_path / "results"
    shutil.copytree(done[0], out)
    path = next((out / "runs").glob("cells-24-centroid-*-b2.times.npz"))
    np.savez(path, **{"amips/batch/1": np.ones(2)})
    with pytest.raises(AmipsError, match=r"b2\.times\.npz has \d+ bytes, expected \d+$"):
        bench(task, out=out, systems=FEW, **QUICK)
    reseal(out)
    match = r"b2\.times\.npz is damaged: it lacks the yardstick of amips/batch/1$"
    with pytest.raises(AmipsError, match=match) as caught:
        bench(task, out=out, systems=FEW, **QUICK)
    assert "\n" not in str(caught.value)


@pytest.fixture
def aware(tmp_path):
    """A task of query-aware cells, and the run of a router of them."""
    keys, queries = make_world(600, 500, 16, seed=1)
    task = amips.label(keys, queries, cells=12, query_aware=1.5, out=tmp_path / "task")
    weights = {"W": np.ascontiguousarray(task.cells.centroids)}
    AffineNet(AffineArchitecture(16, 12), weights, dict(task.fingerprints)).save(tmp_path / "router")
    return task, str(tmp_path / "router")


def test_a_model_of_query_aware_cells_is_compared_on_them(aware, tmp_path):
    task, run = aware
    summary = bench(task.path, out=tmp_path / "results", models=[run], **QUICK)
    points = [point for point in summary.values["points"] if point["family"] == "linear router"]
    assert {point["system"] for point in points} == {"linear router, 12 cells"}
    assert max(point["recall@10"] for point in points) > 0.9


def test_a_model_of_query_aware_cells_on_plain_ones_is_refused_before_anything_is_run(aware, tmp_path):
    task, run = aware
    named = [System(Design.plain(9)), System(Design.plain(12), run=run, label="mine")]
    with pytest.raises(RunError, match=r"^mine, 12 cells: the model was trained on other cells") as caught:
        bench(task, out=tmp_path / "results", systems=named, **QUICK)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "results").glob("runs/*"))


def test_one_bench_at_a_time(done, task):
    with locked(done[0] / ".lock"), pytest.raises(AmipsError, match="another") as caught:
        bench(task, out=done[0], systems=FEW, **QUICK)
    assert "\n" not in str(caught.value)


def points(summary):
    return {(p["system"], p["budget"]): p for p in summary.values["points"]}
