"""benchmarks/win.py: backends that search by themselves as references, sentences, the picture, the lock."""

import re
import sys
from dataclasses import replace

import numpy as np
import pytest

from amips.backends import scann
from amips.bench.derive import Bootstrap, Family, Measured
from amips.bench.results import Run
from amips.bench.systems import System
from amips.design import Design
from amips.errors import ResultsError
from amips.locks import locked
from helpers import ROOT, Silent, load_script


@pytest.fixture
def win(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return load_script("win")


@pytest.fixture
def tables():
    return load_script("win_tables")


@pytest.mark.parametrize(
    ("scanned", "right", "said"), [(30, 1, "30.00%"), (30, 0, "not reached"), (-1, 1, "-"), (-1, 0, "-")]
)
def test_flops_are_a_share_or_not_reached_or_not_told(tables, scanned, right, said):
    ids = np.full((5, 1), 1 - right)
    cost = np.full(5, scanned)
    run = Run(System(backend="scann"), 1, ids, np.zeros((5, 1), np.float32), ids[:, 0], cost, cost, 0, 0, {})
    family = Family("ScaNN", "reference", [Measured(run, slice(None), np.zeros((5, 1), int), 100)])
    assert tables.flops(family, "recall@1", 0.9, 100) == said


def test_a_library_that_is_missing_is_said_before_anything_is_run(win, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "scann", None)
    arguments = ["win.py", str(tmp_path / "none"), "--out", str(tmp_path / "out"), "--backend", "soar"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit):
        win.main()
    assert capsys.readouterr().err.endswith("error: SOAR needs scann; pip install 'amips[scann]'\n")
    assert not (tmp_path / "out").exists()


def timed_family(name, role, seconds, top=1.0):
    """One run for each time: the last finds a share `top` of the top 10, earlier ones less, evenly."""
    true = np.tile(np.arange(10), (40, 1))
    own = Design(4, 0.0, None, None, "mass", 0.0, "flat")
    system = System(backend="hnsw") if role == "reference" else System(own, label=name)
    members = []
    for i, taken in enumerate(seconds, start=1):
        ids = np.where(
            400 * top * (0.7 + 0.3 * i / len(seconds)) > np.arange(400).reshape(10, 40).T, true, -1
        )
        each = np.full(5, taken)
        times = {"own/single/1": each, "own/batch/1": each / 2}
        times |= {f"yardstick/{way}": np.ones(5) for way in times}
        cost = np.full(40, 10 * i)
        run = Run(system, i, ids, np.zeros((40, 10), np.float32), ids[:, 0], cost, cost, 0, 0, times)
        members.append(Measured(run, slice(None), true, 100))
    return Family(name, role, members)


def test_sentences_say_where_a_backend_is_faster_slower_or_neither(tables):
    full = timed_family("amips", "contender", [10, 20, 30, 40, 50, 60])
    lean = timed_family("amips, lean", "contender", [4, 5, 6, 7, 8, 9], top=0.9)
    quick = timed_family("HNSW", "reference", [2, 2.1, 2.2, 30, 60, 300])
    half = timed_family("ScaNN", "reference", [8, 10, 12, 14, 16, 18], top=0.9)
    sentences = tables.verdict(
        [(full, full), (lean, lean)], {f.name: f for f in (quick, half)}, Bootstrap(40, draws=100)
    )
    single, batch, other, _ = sentences
    assert single.startswith("HNSW, batch 1: faster at 0.80 (")
    assert batch == single.replace("batch 1:", "batch 1,024:")
    # Where lean storage does not come, it is compared with what does.
    assert re.search(r"; slower at .*0\.98 \([\d.]+ times as long, [\d.]+ to [\d.]+; amips\)", single)
    assert re.search(r"faster at 0\.80 \([\d.]+ times as fast, [\d.]+ to [\d.]+; amips, lean\)", single)
    assert other.startswith("ScaNN, batch 1: slower at 0.80 (2.00 times as long, 2.00 to 2.00; amips, lean)")
    assert "0.95 (not reached by ScaNN), 0.98 (not reached by ScaNN)." in other
    assert (
        "0.98 (not reached by HNSW and amips)"
        in tables.verdict(
            [(lean, lean)],
            {half.name: half, quick.name: timed_family(quick.name, "reference", [1], top=0.9)},
            Bootstrap(40, draws=100),
        )[2]
    )


def test_a_time_taken_once_decides_nothing(tables):
    ours, other = (timed_family(n, "contender", [t]) for n, t in (("amips", 10), ("other", 30)))
    once = [
        Family(
            f.name,
            f.role,
            [
                Measured(
                    replace(m.run, times={k: v[:1] for k, v in m.run.times.items()}), m.rows, m.true, m.n
                )
                for m in f.runs
            ],
        )
        for f in (ours, other)
    ]
    assert tables.verdict([(ours, ours)], {"other": other}, Bootstrap(40, draws=100))[0].startswith(
        "other, batch 1: slower at 0.80 (3.00 times as long"
    )
    assert tables.verdict([(once[0], once[0])], {"other": once[1]}, Bootstrap(40, draws=100))[0].startswith(
        "other, batch 1: undecided at 0.80 (3.00 times as long; amips)"
    )


def test_the_picture_has_two_times_and_flops_and_the_best_of_each(tables):
    ours = timed_family(
        "amips", "contender", [10, 20, 15]
    )  # the second is slower than the third, which finds more
    silent = timed_family("ScaNN", "reference", [8, 9, 10])
    for member in silent.runs:
        member.run.scanned[:] = -1
    clock = {"single/1": 1e-6, "batch/1": 1e-6}
    drawn = tables.chart("win", {tables.FAISS_SCANNED: ours, "ScaNN": silent}, clock, 1000)
    assert [panel.title for panel in drawn.panels] == ["Batch 1", "Batch 1,024", "FLOPs"]
    assert all(panel.log_y for panel in drawn.panels)
    single, batch, flops = (panel.series for panel in drawn.panels)
    assert single[0].y == [10, 15]
    assert batch[0].y == [5, 7.5]
    assert single[0].x == pytest.approx([0.8, 1.0])
    assert single[1].group == "reference"
    assert flops == []  # one is another way to compute the same, the other does not tell


def test_it_does_not_run_beside_a_bench_in_the_same_results(win, task, tmp_path, monkeypatch):
    out, page = tmp_path / "out", tmp_path / "win.md"
    out.mkdir()
    monkeypatch.setattr(sys, "argv", ["win.py", str(task.path), "--out", str(out), "--write", str(page)])
    with locked(out / ".lock"), pytest.raises(ResultsError, match="another amips bench is at work"):
        win.main()
    assert not list((out / "runs").iterdir())
    assert not page.exists()


@pytest.mark.slow
def test_backends_stand_beside_hnsw_and_are_timed_around_the_same_recalls(win, task, tmp_path, monkeypatch):
    monkeypatch.setattr(scann, "ScaNN", Silent)
    out, page = tmp_path / "out", tmp_path / "win.md"
    arguments = ["win.py", str(task.path), "--out", str(out), "--write", str(page), "--backend", "scann"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--minutes", "0.001", "--rounds", "2"])
    win.main()
    text = page.read_text()
    first, second = (
        {row[0]: row[1:] for line in part.splitlines() if (row := line.strip("| ").split(" | "))}
        for part in text.split("\n\n")[2:4]
    )
    assert {"centroid", "HNSW", "ScaNN"} <= first.keys() == second.keys() - {"time"} | {"FLOPs"}
    assert first["ScaNN"] == ["-"] * 6
    assert all(cell.endswith("%") for cell in first["HNSW"])
    assert len(second["ScaNN"]) == 8
    assert all(re.fullmatch(r"\d+ us", cell) for cell in second["ScaNN"])
    assert "\n- ScaNN, batch 1,024: " in text
    assert "![Cost of a recall: lower is better](win.png)" in text
    assert 10_000 < (tmp_path / "win.png").stat().st_size < 150_000
    assert "--backend scann`" in text
    assert "(- where a backend does not tell them)" in text
    # All four budgets are answered; timed are those around the recalls of interest, all above what 3 find.
    answers = (path for path in (out / "runs").glob("scann-*.json") if ".times" not in path.name)
    answered = {path.stem.rsplit("-b")[-1] for path in answers}
    timed = {path.name.rsplit("-b")[-1].split(".")[0] for path in (out / "runs").glob("scann-*.times.npz")}
    assert answered == {str(budget) for budget in range(1, 5)}
    assert timed == {"3", "4"}
