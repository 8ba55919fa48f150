"""The experiment on backends: what it says of planted runs, and one run as a user types it."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from amips import Design
from amips.backends import missing
from amips.backends import scann as scann_module
from amips.bench import System, load_summary, on_test, on_val
from amips.bench.results import Run
from helpers import Silent, make_world
from paper import backends
from paper.claims import Claim, claims_of
from paper.mapped_backends import Measurement, _titled, with_x
from paper.search_runs import Searched, Way, front_of

pytest.importorskip("matplotlib", reason="figures need matplotlib: pip install 'amips[bench]'")

torch.set_num_threads(1)

N, M = 1000, 100  # keys; val queries, and as many test queries
LADDER = (10, 20, 40)  # keys scanned
JUDGED = "recall@0.1%"  # of 1,000 keys: the first
AHEAD, BEHIND = (0.5, 0.7, 0.9), (0.2, 0.3, 0.4)
WITH_X = (0.4, 0.6, 0.8)


def planted(backend, size, right, cells=False, told=True, time=1.0, on_val=None):
    """(way, runs) of a backend that find the top key of these fractions of the test queries; x if no size."""
    routable = backend in ("ivf", "leanvec")
    settings = {"design": Design.plain(8) if routable else None}
    settings |= {"backend": backend} if backend != "ivf" else {}
    if size is not None:
        mode = "cells" if cells else "drop-in-rescored"
        settings |= {"run": f"/runs/{size}", "mode": mode, "label": f"KeyNet {size}"}
    runs = []
    for budget, fraction, val in zip(LADDER, right, on_val or right, strict=True):
        hit = np.concatenate([np.arange(M) < M * part for part in (val, fraction)])
        rank = hit.astype(np.int32)
        ids = np.where(hit, 0, 1)[:, None]
        scanned = np.full(2 * M, budget if told else -1)
        times = {}
        for mode in ("single/1", "batch/1"):
            times |= {f"e/{mode}": np.full(3, time * budget), f"yardstick/e/{mode}": np.ones(3)}
        scores = np.zeros((2 * M, 1), np.float32)
        runs.append(Run(System(**settings), budget, ids, scores, rank, scanned, scanned, 0, 0, times))
    way = Way("original" if size is None else "routed" if cells else "mapped", size or "", backend)
    return way, runs


class Split:
    """Queries whose top key is 0."""

    top_ids = np.zeros((M, 1), int)

    def __len__(self):
        return M


def pairs_of(*planted_runs):
    """(x, mapper) by way, on test and on val."""
    task = SimpleNamespace(val=Split(), test=Split(), n=N)
    sides = []
    for of in (on_test, on_val):
        families = {}
        for way, runs in planted_runs:
            (family,) = of(runs, task)
            families[way] = _titled(way, family)
        sides.append(with_x(families))
    return sides


def compared(planted_runs, sizes, absent=None):
    """What is said of the best size of each."""
    test, val = pairs_of(*planted_runs)
    test, val = ({way: pair for way, pair in by.items() if of_the_paper(way)} for by in (test, val))
    best = backends.best_on_val(test, val, JUDGED)
    return backends.compare({way: test[way] for way in best}, sizes, absent or {})


def of_the_paper(way):
    return way.query == "mapped" and way.backend in backends.OF_THE_PAPER


def test_leads_are_by_hand_and_only_of_what_is_told():
    test, _ = pairs_of(planted("ivf", None, WITH_X), planted("ivf", "XS", (0.45, 0.7, 0.75), time=1.5))
    (pair,) = test.values()
    got = backends.leads(*pair, JUDGED)
    assert list(got) == ["flops", "scanned", "batch/1"]
    assert got["flops"] == got["scanned"] == pytest.approx(0.1, abs=2e-3)
    # 15, 30 and 60 long: at 30 x has 0.7, and so has it; at 15 it has 0.45 against 0.5.
    assert got["batch/1"] == pytest.approx(0.0, abs=2e-3)
    test, _ = pairs_of(planted("scann", None, WITH_X, told=False), planted("scann", "XS", AHEAD, told=False))
    (pair,) = test.values()
    assert list(backends.leads(*pair, JUDGED)) == ["batch/1"]


def test_a_run_that_was_not_timed_is_no_point_of_the_front():
    """The best run of x has no times: at equal time x then finds 0.6 at most."""
    way, runs = planted("ivf", None, WITH_X)
    runs[-1].times.clear()
    test, _ = pairs_of((way, runs), planted("ivf", "XS", (0.1, 0.8, 0.9)))
    (pair,) = test.values()
    assert backends.leads(*pair, JUDGED)["batch/1"] == pytest.approx(0.2)
    cost, recall = front_of(pair[0], "batch/1", "recall@1")
    assert cost.tolist() == [10, 20]
    assert recall == pytest.approx([0.4, 0.6])


def test_the_size_is_chosen_on_val():
    """S is ahead on test, XS on val; each way has its own."""
    test, val = pairs_of(
        planted("leanvec", None, WITH_X),
        planted("leanvec", "XS", BEHIND, on_val=AHEAD),
        planted("leanvec", "S", AHEAD, on_val=BEHIND),
        planted("leanvec", "XS", AHEAD, cells=True, on_val=BEHIND),
        planted("leanvec", "S", BEHIND, cells=True, on_val=AHEAD),
    )
    assert set(backends.best_on_val(test, val, "recall@1")) == {
        Way("mapped", "XS", "leanvec"),
        Way("routed", "S", "leanvec"),
    }


@pytest.mark.parametrize("scann", [AHEAD, BEHIND])
def test_a_claim_of_the_paper_is_held_against_every_axis_and_backend(scann):
    systems = [planted(name, None, WITH_X, told=name != "scann") for name in ("ivf", "scann", "hnsw")]
    systems += [
        planted("ivf", "XS", AHEAD),
        planted("ivf", "XS", BEHIND, cells=True),
        planted("scann", "XS", scann, told=False),
        planted("hnsw", "XS", AHEAD),
    ]
    findings = compared(systems, ["XS", "S"])
    claims = {one.text: one for one in findings if isinstance(one, Claim)}
    test, val = pairs_of(*systems)
    best = backends.best_on_val(test, val, "recall@1")
    lines = backends.rescored({way: test[way] for way in best})
    assert len(lines) == 4
    mapped = claims["mapped queries lead in the middle of the budgets on FAISS IVF"]
    assert mapped.held
    assert mapped.where == "Appendix A.8, Figures 16 to 18"
    assert mapped.evidence.startswith(
        "FAISS IVF searched with the predicted key (KeyNet XS, the best on val)"
    )
    assert mapped.evidence.endswith(
        "+10.0 points (FLOPs), +10.0 points (keys scanned), +10.0 points (time, large batch)"
    )
    again, routed, _, hnsw = lines
    assert again.startswith(
        "FAISS IVF searched with the predicted key (KeyNet XS, the best on val): recall@1 "
    )
    assert again.endswith("+10.0 points (time, large batch), scored again with x.")
    assert routed.startswith("FAISS IVF routed by the prediction")
    assert routed.endswith(
        "-20.0 points (FLOPs), -20.0 points (keys scanned), -20.0 points (time, large batch)."
    )
    assert hnsw.startswith("HNSW searched with the predicted key")
    silent = claims["mapped queries lead in the middle of the budgets on ScaNN"]
    assert "FLOPs" not in silent.evidence
    assert silent.held is (scann is AHEAD)
    everywhere = claims["the same picture on all backends and axes"]
    assert f"on {2 if silent.held else 1} of the 2 backends of the paper that were run" in everywhere.evidence
    assert everywhere.held is silent.held
    assert len(findings) == 3


def test_ahead_on_one_axis_alone_is_not_enough():
    """Twice as slow: what is ahead in FLOPs is behind in time."""
    (mapped, _) = compared(
        [planted("ivf", None, WITH_X), planted("ivf", "XS", (0.5, 0.61, 0.7), time=2)], ["XS"]
    )
    assert "+10.0 points (FLOPs)" in mapped.evidence
    assert mapped.held is False


@pytest.mark.parametrize(("val", "held"), [(AHEAD, True), (BEHIND, False)])
def test_sizes_are_told_of_where_there_are_large_ones(val, held):
    systems = [planted("ivf", None, WITH_X), planted("ivf", "XS", AHEAD, on_val=val)]
    systems.append(planted("ivf", "L", AHEAD, on_val=(0.45, 0.65, 0.85)))
    last = compared(systems, ["XS", "L"])[-1]
    assert last.held is held
    assert last.evidence.endswith(f"is XS or S on {int(held)} of 1 backends")


def test_no_cost_in_common_is_said_and_counts_against_the_claim():
    systems = [planted("ivf", None, WITH_X), planted("ivf", "XS", AHEAD, time=100)]
    first, last = compared(systems, ["XS"])
    assert first.evidence.endswith("no cost in common (time, large batch)")
    assert first.held is False
    assert "on 0 of the 1 backends" in last.evidence
    (row,) = backends._lead_table(list(pairs_of(*systems)[0].values()), "recall@1").rows
    assert row == ["FAISS IVF: KeyNet XS, drop-in, scored again", "0.800", "0.900", "+0.100", "+0.100", "-"]


def test_what_was_not_run_is_not_decided():
    reason = "ScaNN needs scann; pip install 'amips[scann]'"
    systems = [planted("ivf", None, WITH_X), planted("ivf", "XS", AHEAD)]
    _, absent, everywhere = compared(systems, ["XS"], {"scann": reason})
    assert (absent.held, absent.where) == (None, "Appendix A.8, Figures 19 to 21")
    assert absent.sentence() == (
        f"Not run: {reason}: not decided (the paper: mapped queries lead in the middle of the budgets on "
        "ScaNN)."
    )
    assert everywhere.held
    assert compared(systems, ["XS"], {"hnsw": "no HNSW"})[1] == "Not run: no HNSW."


def test_charts_have_every_cost_that_is_told():
    test, _ = pairs_of(planted("scann", None, WITH_X, told=False), planted("scann", "XS", AHEAD, told=False))
    ((way, (base, ours)),) = test.items()
    families = {Way("original", backend="scann"): base, way: ours}
    searched = Searched(families, families, {"single/1": 1e-6, "batch/1": 1e-7})
    chart = Measurement(SimpleNamespace(n=N, d=4), searched, 64).chart("c", "ScaNN", "recall@1", "scann")
    assert [panel.x_label for panel in chart.panels] == [
        "us a query, batch 1, 1 thread",
        "us a query, large batch, 1 thread",
    ]
    base, ours = chart.panels[0].series
    assert (base.group, ours.group) == ("baseline", "contender")
    assert base.x == pytest.approx(LADDER)
    assert base.y == pytest.approx(WITH_X)


def files(place, *parts):
    return {p: p.stat().st_mtime_ns for p in place.joinpath(*parts).rglob("*") if p.is_file()}


@pytest.mark.slow
def test_as_a_user_types_it(tmp_path, monkeypatch, paper_command):
    """ScaNN's library is not here; later it is, and only ScaNN is run."""
    keys, queries = make_world(1200, 1500, 16, seed=7)
    np.save(tmp_path / "keys.npy", keys)
    np.save(tmp_path / "queries.npy", queries)
    monkeypatch.setitem(sys.modules, "scann", None)
    out = tmp_path / "out"

    def run():
        done = paper_command("backends", "--data", tmp_path, "--scale", "smoke", "--out", out)
        assert done.returncode == 0, done.stderr
        return load_summary(out / "backends")

    made = run()
    of = {
        "FAISS IVF": ("", ": KeyNet XS", ": KeyNet XS, drop-in, scored again"),
        "LeanVec": ("", ": KeyNet XS", ": KeyNet XS, drop-in, scored again"),
        "HNSW": ("", ": KeyNet XS, drop-in, scored again"),
    }
    names = {title + way for title, ways in of.items() for way in ways}
    assert set(made.values["recall"]) == set(made.values["flops"]) == set(made.values["seconds"]) == names
    assert all(max(made.values["recall"][title]) > 0.95 for title in of)
    assert set(made.values["lead"]) == names - set(of)
    by_text = {claim.text: claim for claim in claims_of(made)}
    assert [text.split(" on ")[-1] for text, claim in by_text.items() if claim.held is None] == [
        "ScaNN",
        "SOAR",
    ]
    assert len(by_text) == 5
    assert {claim.sentence() for claim in by_text.values()} <= set(made.verdict)
    facts = dict(made.facts)
    assert facts["backends"] == "FAISS IVF; LeanVec; HNSW"
    assert facts["not run"] == "ScaNN, SOAR"
    assert made.command == "python -m paper backends --data DATA --scale smoke --out OUT"
    names_of_charts = [
        "returned-ivf",
        "returned-leanvec",
        "backends-ivf",
        "backends-leanvec",
        "backends-hnsw",
    ]
    assert [chart.name for chart in made.charts] == names_of_charts
    assert all((out / "backends" / f"{chart.name}.png").exists() for chart in made.charts)
    *returned, lead, ratios = made.tables
    assert [table.title for table in returned] == [
        f"Recall@{fraction}: the largest lead over searching with x" for fraction in ("0.01%", "0.1%", "0.5%")
    ]
    of_paper = ["FAISS IVF: KeyNet XS, drop-in", "LeanVec: KeyNet XS, drop-in"]
    for table in returned:
        assert [row[0] for row in table.rows] == of_paper  # HNSW is not among the paper's engines
        assert (table.rows[0][-1] == "not told") == ("0.1%" not in table.title)  # times of one fraction
    # What the engine returned for the predicted key, once more from the raw runs: no scoring with x.
    for metric, deep in zip(made.values["returned"], (1, 2, 6), strict=True):
        folder = f"returned-{metric.removeprefix('recall@').removesuffix('%')}"
        found = made.values["returned"][metric]
        assert set(found) == {*of_paper, "FAISS IVF", "LeanVec"}
        for name, files_of in (
            ("FAISS IVF: KeyNet XS, drop-in", "cells-35"),
            ("LeanVec: KeyNet XS, drop-in", "leanvec-*"),
        ):
            for budget, recall in zip(found[name]["budget"], found[name]["recall"], strict=True):
                (raw,) = (out / "backends" / folder / "runs").glob(
                    f"{files_of}-model-drop-in-*-b{budget}.npz"
                )
                with np.load(raw) as stored:
                    rank = stored["rank"][200:]
                assert recall == pytest.approx(((rank > 0) & (rank <= deep)).mean())
    assert [row[0] for row in lead.rows] == [
        *("FAISS IVF: KeyNet XS, drop-in, scored again", "FAISS IVF: KeyNet XS"),
        *("LeanVec: KeyNet XS, drop-in, scored again", "LeanVec: KeyNet XS"),
        "HNSW: KeyNet XS, drop-in, scored again",
    ]
    assert {row[1] for row in ratios.rows} == names - set(of)
    # The recall of a drop-in once more, from the raw runs: the top key comes first.
    raw = next((out / "backends" / "runs").glob("cells-*-drop-in-rescored-*-b4.npz"))
    with np.load(raw) as stored:
        share = (stored["rank"][200:] == 1).mean()
    assert any(
        r == pytest.approx(share)
        for r in made.values["recall"]["FAISS IVF: KeyNet XS, drop-in, scored again"]
    )

    before = files(out, "work") | files(out, "backends", "runs")
    monkeypatch.setattr(scann_module, "ScaNN", Silent)
    more = run()
    after = files(out, "work") | files(out, "backends", "runs")
    assert before.items() <= after.items()
    assert all("scann" in str(path.relative_to(out)) for path in after.keys() - before.keys())
    assert set(more.values["recall"]) == {*names, "ScaNN", "ScaNN: KeyNet XS, drop-in, scored again"}
    assert set(more.values["flops"]) == names
    for name in names:
        assert more.values["recall"][name] == made.values["recall"][name]
    assert "ScaNN: FLOPs and keys scanned are not told; there is only time." in more.verdict
    row = next(row for row in more.tables[1].rows if row[0].startswith("ScaNN"))
    assert row[3:5] == ["not told"] * 2
    assert [claim.text for claim in claims_of(more) if claim.held is None] == [
        "mapped queries lead in the middle of the budgets on SOAR"
    ]
    assert str(tmp_path) not in json.dumps(json.loads((out / "backends" / "summary.json").read_text()))


def test_what_is_missing_is_named_with_the_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "scann", None)
    assert missing(["hnsw", "soar", "leanvec"]) == {"soar": "SOAR needs scann; pip install 'amips[scann]'"}
    assert "hnsw" not in missing()
