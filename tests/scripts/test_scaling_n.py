"""benchmarks/scaling_n.py: what its table says of planted measurements, and the sweep of IVF PQ FastScan."""

import numpy as np
import pytest

import amips
from helpers import ROOT, generate, load_script

PQ = "IVF PQ"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return load_script("scaling_n")


def line(system, test, n=1000, **more):
    val = {} if system.startswith("IVF") else {"val": test}
    return {"n": n, "log": "fixed", "system": system, "setting": "one", **val, "test": test, **more}


def test_a_baseline_that_missed_the_recall_is_not_beaten(script):
    missed = line(PQ, None, refines=[10, 40], recall=0.9)
    ((_, _, _, ivf, pq, cells, graph, gain),), _ = script.table(
        [line("IVF", 0.2), missed, line("graph", 0.05)]
    )
    assert (ivf, graph, cells) == ("20.000%", "5.000%", "not measured")
    assert pq == "did not reach 0.95: 0.900 at best (refine 10, 40)"
    assert gain == "4.00x, over IVF"


def test_the_gain_is_over_the_best_baseline(script):
    lines = [line("IVF", 0.2), line(PQ, 0.1), line(PQ, None), line("cells", 0.08), line("graph", 0.05)]
    rows, _ = script.table(lines)
    assert rows[0][-1] == "2.00x, over IVF PQ"


def test_without_a_baseline_or_a_figure_of_ours_there_is_no_gain(script):
    rows, _ = script.table([line("IVF", None), line("graph", 0.05), line("IVF", 0.2, n=2000)])
    assert [row[-1] for row in rows] == ["none to tell", "none to tell"]


def test_what_is_chosen_on_val_and_missed_on_test_did_not_reach_the_recall(script):
    rows, _ = script.table([line("IVF", 0.2), {**line("cells", 0.01), "test": None}, line("cells", 0.1)])
    assert rows[0][5] == "did not reach 0.95"


def test_only_a_miss_with_other_candidates_is_measured_again(script):
    assert not script.finished(line(PQ, None))
    assert not script.finished(line(PQ, None, refines=[10]))
    assert script.finished(line(PQ, None, refines=list(script.REFINES)))
    assert script.finished(line(PQ, 0.1))
    assert script.finished(line("IVF", None))


def test_more_candidates_reach_what_few_do_not(script, monkeypatch):
    """The ceiling of the recall is that of the codes' candidates: more of them lift it."""
    keys, queries = generate(2000, 4000, 16, seed=3)
    task = amips.label(keys, queries, val=300, test=300)
    monkeypatch.setattr(script, "REFINES", (1,))
    few = script.fastscan(task, 20)
    assert np.isnan(few["test"])
    assert few["recall"] < script.TARGET
    monkeypatch.setattr(script, "REFINES", (1, 4, 16))
    many = script.fastscan(task, 20)
    assert 0 < many["test"] < 0.5
    assert many["recall"] >= script.TARGET
    assert many["refines"] == [1, 4, 16]
