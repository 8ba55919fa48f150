"""Experiments on several data: encoders and scaling; their mathematics and one run of each."""

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from amips import Design, exact
from amips.bench import Family, Measured, System, load_summary, peak_memory, sweep, within
from amips.bench.results import Run
from amips.cells import kmeans
from amips.errors import AmipsError
from amips.index import FaissCellStore
from amips.learn import evaluate, loop
from amips.metrics import cost_at
from amips.nets import load_model
from helpers import make_world
from paper import encoders, mixtures, run_experiment, scaling, scaling_summary, search_runs
from paper.claims import claims_of
from paper.workspace import SCALES, Workspace, find

torch.set_num_threads(1)


def save(directory, keys, queries):
    directory.mkdir(parents=True)
    np.save(directory / "keys.npy", keys)
    np.save(directory / "queries.npy", queries)
    return directory


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two data of different dimension; `out` is shared."""
    place = tmp_path_factory.mktemp("growth")
    save(place / "first", *make_world(600, 900, 16, seed=7))
    save(place / "second", *make_world(500, 800, 24, seed=8))
    return place


def checked(summary, place, tmp_path):
    """What every summary must have; it survives being written, and names no path."""
    assert summary.verdict
    assert summary.facts
    assert summary.method
    for table in summary.tables:
        assert {len(row) for row in table.rows} == {len(table.head)}
        assert all(cell and "nan" not in cell for row in table.rows for cell in row)
    assert "nan" not in " ".join(summary.verdict)
    assert {claim.sentence() for claim in claims_of(summary)} <= set(summary.verdict)
    summary.save(tmp_path)
    text = json.dumps(asdict(summary), allow_nan=False)
    assert json.loads(json.dumps(asdict(load_summary(tmp_path)))) == json.loads(text)
    assert str(place) not in text
    return summary


def files(folder, *parts):
    return {p: p.stat().st_mtime_ns for p in folder.joinpath(*parts).rglob("*") if p.is_file()}


def family(name, role, points):
    """A family of runs with these (recall@1, FLOPs a query) of 100 queries."""
    runs = []
    for budget, (recall, flops) in enumerate(points, start=1):
        ids = np.where(np.arange(100) < round(100 * recall), 0, 1)[:, None].astype(np.int32)
        run = "" if role == "baseline" else "/runs/x"
        system = System(Design.plain(4), run=run, label=name if run else "")
        cost = np.full(100, flops)
        rank = (ids[:, 0] == 0).astype(np.int32)
        run = Run(system, budget, ids, np.zeros((100, 1), np.float32), rank, cost, cost, 0, 0, {})
        runs.append(Measured(run, slice(0, None), np.zeros((100, 1), int), 1000))
    return Family(name, role, runs)


# reading fronts


def test_recall_at_a_cost_is_read_off_the_front():
    one = family("a", "baseline", [(0.2, 100), (0.1, 150), (0.6, 300)])
    assert search_runs.recall_at(one, "flops", "recall@1", 200) == pytest.approx(0.4)
    assert search_runs.recall_at(one, "flops", "recall@1", 900) == pytest.approx(0.6)
    assert math.isnan(search_runs.recall_at(one, "flops", "recall@1", 99))
    assert search_runs.none_if_nan(math.nan) is None
    assert search_runs.none_if_nan(0.0) == 0


def test_the_lead_is_the_largest_at_equal_cost():
    base = family("a", "baseline", [(0.2, 100), (0.6, 300), (0.9, 900)])
    ahead = family("b", "contender", [(0.1, 100), (0.7, 300), (0.9, 900)])
    assert search_runs.lead(base, ahead, "flops", "recall@1") == pytest.approx(0.1, abs=0.01)
    behind = family("b", "contender", [(0.1, 100), (0.5, 300), (0.85, 900)])
    assert search_runs.lead(base, behind, "flops", "recall@1") == pytest.approx(-0.05, abs=0.01)
    assert search_runs.lead(base, base, "flops", "recall@1") == 0
    dear = family("b", "contender", [(0.9, 1000), (1.0, 2000)])
    assert math.isnan(search_runs.lead(base, dear, "flops", "recall@1"))


# scaling, without running it


@pytest.mark.parametrize(("factor", "exponent"), [(3.0, 1.0), (0.02, 0.5), (7e5, -1.25), (1.0, 0.0)])
def test_the_exponent_of_exact_data_is_found(factor, exponent):
    n = [10_000, 31_623, 100_000, 2_000_000]
    found = scaling_summary.growth_of(n, [factor * count**exponent for count in n])
    assert found.exponent == pytest.approx(exponent, abs=1e-9)
    assert found.factor == pytest.approx(factor)
    assert found.off == pytest.approx(0, abs=1e-9)


def test_a_fit_says_how_far_its_points_are_off_and_leaves_out_what_is_missing():
    n = [10, 100, 1000]
    bent = scaling_summary.growth_of(n, [1.0, 20.0, 100.0])
    assert bent.exponent == pytest.approx(1)
    assert bent.factor == pytest.approx(2 ** (1 / 3) / 10)
    assert bent.off == pytest.approx(2 ** (2 / 3) - 1)
    assert scaling_summary.growth_of(n, [1.0, math.nan, 100.0]).exponent == pytest.approx(1)
    assert scaling_summary.growth_of(n, [0.0, 10.0, 100.0]).exponent == pytest.approx(1)
    assert scaling_summary.growth_of(n, [math.nan, 0.0, 100.0]) is None


def test_the_numbers_of_keys():
    assert scaling.ladder("smoke", 1000) == [100, 316, 1000]
    for scale, most in (("small", 2_000_000), ("full", 15_000_000)):  # the paper's BioASQ has as many
        found = scaling.ladder(scale, 100_000)
        assert (found[0], found[-1]) == (10_000, most)
        assert found == sorted(found)
    assert scaling.ladder("replica", 100_000) == [20_000, 44_721, 100_000]
    assert sweep(10_000, scaling.FACTORS) == [200, 400, 800]
    assert sweep(60, scaling.FACTORS) == [15, 30]  # two keys a cell at least


def test_generated_keys_lie_among_those_of_their_cell(place, tmp_path):
    workspace = Workspace(place / "first", replace(SCALES["smoke"], keys=None), tmp_path / "out")
    folder = mixtures.data_with_mixtures(workspace, 1500)
    keys, own = np.load(folder / "keys.npy"), workspace.keys.load()
    assert keys.shape == (1500, 16)
    np.testing.assert_array_equal(keys[:600], own)
    made = keys[600:]
    np.testing.assert_allclose(np.linalg.norm(made, axis=1), 1, atol=1e-5)
    nearest = (made @ own.T).max(axis=1)
    drawn = np.random.default_rng(0).standard_normal(made.shape)
    drawn /= np.linalg.norm(drawn, axis=1, keepdims=True)
    assert nearest.mean() > (drawn @ own.T).max(axis=1).mean() + 0.1
    assert len(np.unique(keys, axis=0)) == 1500  # no copies
    # The queries are the workspace's, and find the generated keys too: about as often as there are of them.
    queries = np.load(find(folder, "queries")[0])
    np.testing.assert_array_equal(queries, np.load(place / "first" / "queries.npy"))
    _, top = exact.top_k(keys, queries[:300], 1)
    assert 0.2 < (top >= 600).mean() < 0.9
    again = mixtures.data_with_mixtures(workspace, 1500)
    assert again == folder
    np.testing.assert_array_equal(np.load(again / "keys.npy"), keys)


def test_queries_that_were_moved_are_linked_again(place, tmp_path):
    workspace = Workspace(place / "first", replace(SCALES["smoke"], keys=None), tmp_path / "out")
    link = mixtures.data_with_mixtures(workspace, 700) / "queries.npy"
    link.unlink()
    link.symlink_to(tmp_path / "gone.npy")
    assert mixtures.data_with_mixtures(workspace, 700) == link.parent
    np.testing.assert_array_equal(np.load(link), np.load(place / "first" / "queries.npy"))


def test_a_mixture_lies_between_two_keys_of_one_cell(place, tmp_path):
    """Fitted by two keys of one cell alone, it is met exactly, with weights that are not below 0."""
    workspace = Workspace(
        place / "first", replace(SCALES["smoke"], keys=32, queries=50, held_out=10), tmp_path / "out"
    )
    made = np.load(mixtures.data_with_mixtures(workspace, 64) / "keys.npy")[32:]
    own = workspace.keys.load().astype(np.float64)
    cell = kmeans(workspace.keys, 4, seed=0).assignment  # eight keys a cell
    pairs = [[i, j] for i in range(32) for j in range(i, 32) if cell[i] == cell[j]]
    assert 32 < len(pairs) < 400  # of 528
    for row in made.astype(np.float64):
        errors = []
        for pair in pairs:
            weights, *_ = np.linalg.lstsq(own[pair].T, row, rcond=None)
            if min(weights) > -1e-6:
                errors.append(np.abs(own[pair].T @ weights - row).max())
        assert min(errors) < 1e-5


def test_the_peak_of_memory_is_seen_and_errors_are_not_hidden():
    grown = peak_memory(lambda: np.ones(1 << 25).sum())  # 256 MB that are freed again
    # What the allocator and other threads take meanwhile is the machine's affair: it may be some more.
    assert grown is None or 250e6 < grown < 400e6

    def broken():
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk"):
        peak_memory(broken)


def rows(flops, leads):
    """Values of the experiment with these costs, by way, and leads, at 10 and 1,000."""
    made = []
    for n, costs, lead in zip((10, 1000), flops, leads, strict=True):
        made.append(
            {
                "n": n,
                "labelling seconds": float(n),
                "labelling memory": None,
                "training seconds": n**0.5,
                "network bytes": n,
                "index bytes": n,
                "own bytes": n,
                "flops": dict(zip(scaling_summary.WAYS, costs, strict=True)),
                "scanned": dict.fromkeys(scaling_summary.WAYS),
                "lead": {scaling_summary.MAPPED: lead},
                "erel": -0.3,
                "samples": 2_000_000,
            }
        )
    grows = {}
    for what, pick in scaling_summary.MEASURES.items():
        found = scaling_summary.growth_of(
            [10, 1000], [math.nan if pick(row) is None else pick(row) for row in made]
        )
        grows[what] = None if found is None else vars(found)
    return {"rows": made, "control": None, "growth": grows, "labelled": 100}


COSTS = [(100.0, None, 50.0, 200.0, 25.0), (1000.0, None, 250.0, 1000.0, 500.0)]


def test_scaling_says_what_grows_and_what_was_not_reproduced():
    values = rows(COSTS, [0.05, 0.04])
    grow, cost, own, linear, routed, mapped = scaling_summary.findings(values)
    assert "labelling a query grows as n^1.00, training KeyNet XS on a sample as n^0.50" in grow
    assert "x n^0.50, mapped (drop-in) does not reach it" in cost
    assert "amips needs 4.00 times fewer FLOPs at 10 keys and 2.00 times fewer at 1,000" in own
    assert own.endswith("shrinks.")
    assert (
        "needs 2.00 times more FLOPs at 10 keys and 1.00 times fewer at 1,000: with n, what it is worth"
        in linear
    )
    assert linear.endswith("grows.")
    assert "2.00 times fewer FLOPs at 10 keys and 4.00 times fewer at 1,000" in routed
    assert mapped.held
    assert mapped.evidence.endswith("+5.0 points at 10, +4.0 points at 1,000")
    assert "generated" not in grow
    for leads in ([0.05, 0.0], [0.05, None]):
        assert scaling_summary.findings(rows(COSTS, leads))[-1].held is False


@pytest.mark.parametrize(("low", "held"), [(0.02, True), (-0.02, None)])
def test_leads_are_judged_by_their_intervals_where_there_are_any(low, held):
    values = rows(COSTS, [0.05, 0.04])
    for row in values["rows"]:
        row["lead interval"] = {scaling_summary.MAPPED: [low, 0.08]}
    claim = scaling_summary.findings(values)[-1]
    assert claim.held is held
    assert not claim.bare
    assert f"+4.0 points ({100 * low:+.1f} to +8.0) at 1,000" in claim.evidence


def test_a_network_that_is_no_nearer_than_the_query_decides_nothing():
    values = rows(COSTS, [0.05, -0.9])
    values["rows"][-1] |= {"erel": 0.02, "samples": 30_000}
    claim = scaling_summary.findings(values)[-1]
    assert claim.held is None
    assert claim.evidence.endswith("untrained (erel of 0 and more): 1,000 keys, 0.03 million samples")


def test_generated_keys_are_said_to_be_and_compared_with_those_of_the_data():
    values = rows(COSTS, [0.05, 0.04])
    values["control"] = {
        "n": 300,
        "flops": dict(zip(scaling_summary.WAYS, (90.0, 1.0, 1.0, 1.0, 30.0), strict=True)),
    }
    *said, _ = scaling_summary.findings(values)
    assert "(generated ones among them)" in said[0]
    (compared,) = [line for line in said if "of the data alone" in line]
    assert "Of the 300 keys of the data alone, amips needs 3.00 times fewer FLOPs than x" in compared
    assert compared.endswith("of 1,000 keys with generated ones among them, 2.00 times fewer.")
    values["control"]["flops"] = dict.fromkeys(scaling_summary.WAYS)
    assert not any("of the data alone" in line for line in scaling_summary.findings(values)[:-1])


# encoders, without running it


def test_an_encoder_is_called_what_embed_recorded_or_its_directory(place, tmp_path):
    assert encoders.encoder_of(place / "first") == "first"
    (tmp_path / "embed.json").write_text('{"encoder": "somewhere/all-mpnet-base-v2"}')
    assert encoders.encoder_of(tmp_path) == "all-mpnet-base-v2"


def test_encoders_want_other_data_and_other_experiments_none(place, tmp_path):
    with pytest.raises(AmipsError, match="add --also DIR with keys and queries of another") as caught:
        run_experiment("encoders", data=place / "first", out=tmp_path / "out", scale="smoke")
    assert "\n" not in str(caught.value)
    with pytest.raises(AmipsError, match="ood: only encoders compares data"):
        run_experiment(
            "ood", data=place / "first", out=tmp_path / "out", scale="smoke", also=[place / "second"]
        )
    with pytest.raises(AmipsError, match="two of the data are called 'first'"):
        run_experiment(
            "encoders", data=place / "first", out=tmp_path / "x", scale="smoke", also=[place / "first"]
        )


def test_texts_beside_vectors_are_not_data(tmp_path):
    for file in ("keys.npy", "keys.jsonl", "queries.npy", "queries.jsonl"):
        (tmp_path / file).touch()
    assert find(tmp_path, "keys") == (tmp_path / "keys.npy", False)


@pytest.mark.slow
def test_texts_are_encoded_and_compared(tmp_path, monkeypatch, paper_command):
    """`--encoder wordllama` where the data hold texts; a stand-in for the encoder's vectors as the data."""
    pytest.importorskip("wordllama", reason="the static encoder: pip install 'amips[text]'")
    words = ["index", "query", "cell", "key", "route", "scan", "recall", "probe", "graph", "score", "noise"]
    rng = np.random.default_rng(0)
    data = save(tmp_path / "data", *make_world(150, 400, 8, seed=1))
    for side, count in (("keys", 150), ("queries", 400)):
        texts = [" ".join(rng.choice(words, 6)) + f" {side} {i}" for i in range(count)]
        lines = [json.dumps({"id": str(i), "title": "", "text": text}) for i, text in enumerate(texts)]
        (data / f"{side}.jsonl").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    done = paper_command(
        "losses", "--data", "data", "--encoder", "wordllama", "--scale", "smoke", "--out", "out"
    )
    assert done.returncode == 2
    assert "No such option" in done.stderr
    done = paper_command(
        "encoders", "--data", "data", "--encoder", "wordllama", "--scale", "smoke", "--out", "out"
    )
    assert done.returncode == 0, done.stderr
    values = load_summary(tmp_path / "out" / "encoders").values["encoders"]
    assert {name: (one["n"], one["d"]) for name, one in values.items()} == {
        "data": (150, 8),
        "wordllama": (150, 256),
    }


# one run of each


@pytest.mark.slow
def test_encoders(place, tmp_path):
    workspace = Workspace(place / "first", "smoke", place / "out", also=[place / "second"])
    summary = checked(encoders.run(workspace), place, tmp_path)
    values = summary.values["encoders"]
    assert {name: (one["n"], one["d"]) for name, one in values.items()} == {
        "first": (600, 16),
        "second": (500, 24),
    }
    second = Workspace(place / "second", "smoke", place / "out" / "encoders" / "second")
    for name, own in (("first", workspace), ("second", second)):
        task = own.mapping_task()
        for size in ("XS", "S"):
            metrics = evaluate(load_model(own.run_directory(f"keynet-{size.lower()}", task)), task, task.test)
            (row,) = [row for row in summary.tables[0].rows if row[0] == name and row[2] == f"KeyNet {size}"]
            both = metrics["erel"], metrics["erel_half"]
            shown = [*both, *map(math.exp, both), metrics["mrr"]]
            assert [float(cell) for cell in row[5:]] == pytest.approx(shown, abs=6e-4)
        # Recalls once more, from the raw runs.
        held = len(task.val)
        for kind, found in (("centroid", "centroid"), ("model-drop-in", "KeyNet XS, drop-in")):
            counted = []
            for raw in place.glob(f"out/encoders/{name}/search/runs/*{kind}-*-b*[0-9].npz"):
                with np.load(raw) as run:
                    rank = run["rank"][held:]
                counted.append(((rank > 0) & (rank <= within(task.n)[1])).mean())
            assert set(np.round(values[name]["recall"][found], 9)) <= set(np.round(counted, 9))
            assert counted
        cells = {
            p.name.split("-")[1] for p in place.glob(f"out/encoders/{name}/search/runs/cells-*centroid*.json")
        }
        assert cells == {str(count) for count in sweep(task.n)}
        taken = values[name]["seconds"]
        assert {way: len(seconds) for way, seconds in taken.items()} == {
            way: len(recalls) for way, recalls in values[name]["recall"].items()
        }
        assert all(s is None or s > 0 for seconds in taken.values() for s in seconds)
    assert "time at 0.90" in summary.tables[1].head
    assert [chart.name for chart in summary.charts] == ["training", "search-first", "search-second"]
    axes = [panel.x_label for panel in summary.charts[1].panels]
    assert axes == 3 * ["FLOPs a query"] + 3 * ["us a query, large batch"]
    assert len(summary.verdict) == 2 + 2 * 2
    for size, said in zip(("XS", "S"), summary.verdict, strict=False):
        errors = [float(row[5]) for row in summary.tables[0].rows if row[2] == f"KeyNet {size}"]
        assert ("not all below 0" in said) == (max(errors) >= 0)
    for claim in claims_of(summary)[:2]:
        assert "not all below 0" not in claim.evidence or claim.held is False
    before = files(place, "out")
    assert encoders.run(workspace).values["encoders"] == values
    assert files(place, "out") == before  # nothing trained, labelled or searched again


@pytest.mark.slow
def test_scaling(place, tmp_path, monkeypatch):
    workspace = Workspace(place / "first", "smoke", place / "out")
    summary = checked(scaling.run(workspace), place, tmp_path)
    found = summary.values["rows"]
    assert [row["n"] for row in found] == [60, 190, 600]
    for row in found:
        n = row["n"]
        own = Workspace(
            workspace.data, replace(workspace.scale, keys=n), place / "out" / "scaling" / f"n-{n}"
        )
        task = own.mapping_task()
        assert task.n == n
        run = own.run_directory("keynet-xs", task)
        model = load_model(run)
        metrics = evaluate(model, task, task.test)
        assert (row["erel"], row["mrr"]) == pytest.approx((metrics["erel"], metrics["mrr"]), rel=1e-5)
        assert row["network bytes"] == sum(weight.nbytes for weight in model.weights.values())
        index = FaissCellStore.build(own.keys, np.zeros(n, np.int32), own.keys.load()[:1], "flat").index
        listed = n * (index.code_size + np.dtype(np.int64).itemsize)
        assert row["index bytes"] == listed + 4 * 16 * sweep(n, scaling.FACTORS)[-1]
        own_cells = min(round(4 * n**0.5), n // 8)  # eight keys a cell, or more
        builder = search_runs.runner_of(own, task, "search", **scaling.BENCH).builder
        router = builder.model(scaling.ways_of(task, str(run))["own"][0].design)
        copies = round(1.5 * n) * (index.code_size + 8)  # half of the keys are in two cells
        weights = sum(weight.nbytes for weight in router.weights.values())
        assert row["own bytes"] == copies + 4 * 16 * own_cells + weights
        assert row["training seconds"] == pytest.approx(1e6 * model.about["seconds"] / 4096)
        assert row["recall"]["original"] == pytest.approx(0.9) or row["flops"]["original"] is None
        # FLOPs at the level once more: between the two nearest points of the raw runs' front.
        points, by_cells = [], {}
        for raw in place.glob(f"out/scaling/n-{n}/search/runs/cells-*-centroid-*.json"):
            about = json.loads(raw.read_text())
            with np.load(raw.with_suffix(".npz")) as stored:
                held = len(task.val)
                rank, scan = stored["rank"][held:], stored["scan"][held:]
            recall = ((rank > 0) & (rank <= within(n)[1])).mean()
            points.append((float(recall), float(about["coarse"] + scan.mean())))
            by_cells.setdefault(int(raw.name.split("-")[1]), []).append(points[-1])
        recalls, costs = np.array(points).T
        assert row["flops"]["original"] == pytest.approx(cost_at(costs, recalls, 0.9))
        cheapest = {count: cost_at(*np.array(found).T[::-1], 0.9) for count, found in by_cells.items()}
        assert row["cells of x"] == min(cheapest, key=cheapest.get)
        assert row["labelling seconds"] > 0
    # The same queries, whatever the number of keys; keys of the data.
    first, last = (np.load(place / "out" / "scaling" / f"n-{n}" / "work" / "queries.npy") for n in (60, 600))
    np.testing.assert_array_equal(first, last)
    few = np.load(place / "out" / "scaling" / "n-60" / "work" / "keys.npy")
    assert {row.tobytes() for row in few} <= {row.tobytes() for row in np.load(place / "first" / "keys.npy")}
    grows = summary.values["growth"]
    again = scaling_summary.growth_of([60, 190, 600], [row["network bytes"] for row in found])
    assert grows["network, bytes"]["exponent"] == pytest.approx(again.exponent)
    shown = {row[0]: row[1] for row in summary.tables[0].rows}
    assert shown["network, bytes"] == f"{again.exponent:.2f}"
    monkeypatch.setattr(loop.Run, "step", lambda self, done: pytest.fail("trained again"))
    before = files(place, "out", "work") | files(place, "out", "scaling")
    repeated = scaling.run(workspace).values["rows"]
    assert files(place, "out", "work") | files(place, "out", "scaling") == before
    for one, two in zip(found, repeated, strict=True):
        assert {k: v for k, v in one.items() if "memory" not in k and k != "labelling seconds"} == {
            k: v for k, v in two.items() if "memory" not in k and k != "labelling seconds"
        }


@pytest.mark.slow
def test_scaling_beyond_the_data_generates_keys(place, tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "ladder", lambda scale, n: [200, 900])
    workspace = Workspace(place / "first", "smoke", tmp_path / "out")
    summary = checked(scaling.run(workspace), tmp_path, tmp_path / "saved")
    assert [row["n"] for row in summary.values["rows"]] == [200, 900]
    assert ("which keys", "600 of the data, and mixtures") in summary.facts
    assert "(generated ones among them)" in summary.verdict[0]
    assert summary.values["control"]["n"] == 600
    assert [row[0] for row in summary.tables[1].rows] == ["200", "900", "600, of the data alone"]
    keys = np.load(tmp_path / "out" / "scaling" / "n-900" / "work" / "keys.npy")
    assert keys.shape == (900, 16)
    stored = {row.tobytes() for row in np.load(place / "first" / "keys.npy")}
    assert sum(row.tobytes() in stored for row in keys) == 600
