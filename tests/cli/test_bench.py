"""`amips bench` and `amips report` as a user types them."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from amips.cells import fingerprint_of
from amips.cli import main
from amips.nets import Net
from helpers import kill_when
from reference import architecture, random_net

pytest.importorskip("plotly", reason="the report needs plotly: pip install 'amips[bench]'")
pytest.importorskip("matplotlib", reason="figures need matplotlib: pip install 'amips[bench]'")

AMIPS = shutil.which("amips", path=str(Path(sys.executable).parent)) or shutil.which("amips")
QUICK = ("--rounds", "1", "--batch", "32", "--minutes", "0.005")
SYSTEMS = """
[[system]]
cells = [8, 24, 12]

[[system]]
cells = 8
router = "linear"
label = "linear"

[[system]]
backend = "exact"
"""


@pytest.fixture(scope="module")
def folder(task, tmp_path_factory):
    """A task, a list of systems, and files that are neither."""
    folder = tmp_path_factory.mktemp("cli-bench")
    (folder / "task").symlink_to(task.path)
    (folder / "systems.toml").write_text(SYSTEMS)
    (folder / "bad.toml").write_text("[[system]]\ncells = true\n")
    (folder / "nonsense").mkdir()
    (folder / "nonsense" / "notes.txt").write_text("mine")
    (folder / "damaged").mkdir()
    (folder / "damaged" / "summary.json").write_text('{"kind": "summary", "format": 1}')
    (folder / "unfinished").mkdir()
    (folder / "unfinished" / "config.json").write_text("{}")
    return folder


@pytest.fixture
def in_process(folder, monkeypatch, capfd):
    """The command without a new process, which would take most of the time."""

    def run(*arguments):
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["amips", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code
        return subprocess.CompletedProcess(sys.argv, code or 0, *capfd.readouterr())

    return run


@pytest.fixture(scope="module")
def done(folder):
    """The bench, in a process of its own."""
    command = [AMIPS, "bench", "task", "--systems", "systems.toml", "--out", "results", *QUICK]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_bench_tells_the_verdict_the_table_and_where_the_rest_is(done, folder):
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    summary = json.loads((folder / "results" / "summary.json").read_text())
    assert lines[: len(summary["verdict"])] == summary["verdict"]
    assert "held-out queries, linear (8 cells, " in done.stdout
    assert "FLOPs, against centroid routing: " in done.stdout
    # Not in words: they tell of times, and one round in which the machine was held up counts for nothing.
    assert "exact, all keys" in {point["system"] for point in summary["values"]["points"]}
    assert summary["command"].startswith("amips bench TASK --systems SYSTEMS.toml --minutes 0.005 ")
    assert "Against the best FAISS IVF" in lines
    assert lines[-1] == "results: everything is there; see it with: amips report results"
    assert "Traceback" not in done.stderr
    assert "%|" not in done.stderr  # no progress bar where there is no terminal


def test_the_same_command_again_runs_nothing(done, folder, in_process):
    runs = folder / "results" / "runs"
    before = {path.name: path.stat().st_mtime_ns for path in runs.iterdir()}
    again = in_process("bench", "task", "--systems", "systems.toml", "--out", "results", *QUICK)
    assert again.returncode == 0
    assert again.stdout == done.stdout
    assert {path.name: path.stat().st_mtime_ns for path in runs.iterdir()} == before


def test_models_beside_systems(in_process, folder, task):
    net = random_net(architecture("support", d=16, c=8))
    cells = fingerprint_of(np.asarray(task.cells.assignment))
    Net(net.architecture, net.weights, {"keys": task.fingerprint, "cells": cells}).save(folder / "mine")
    (folder / "one.toml").write_text("[[system]]\ncells = 8\n")
    ran = in_process(
        "bench", "task", "--systems", "one.toml", "--models", "mine", "--out", "both", *QUICK, "--seed", "3"
    )
    assert ran.returncode == 0, ran.stderr
    summary = json.loads((folder / "both" / "summary.json").read_text())
    assert {p["system"] for p in summary["values"]["points"]} == {
        "centroid, 8 cells",
        "SupportNet mine, 8 cells",
    }
    assert summary["command"] == (
        "amips bench TASK --models mine --systems SYSTEMS.toml --minutes 0.005 --rounds 1 --batch 32 "
        "--singles 64 --seed 3 --out RESULTS"
    )


def test_damaged_work_is_made_again(done, folder, in_process):
    out = folder / "harmed"
    shutil.copytree(folder / "results", out)
    files = list((out / "work").glob("cells-*"))
    for path in files:
        path.write_bytes(b"")
    for path in (out / "runs").glob("cells-12-*"):
        path.unlink()
    ran = in_process("bench", "task", "--systems", "systems.toml", "--out", "harmed", *QUICK)
    assert ran.returncode == 0, ran.stderr
    assert files
    assert all(path.stat().st_size for path in files if "-12-" in path.name)


def test_report_writes_a_page_and_figures(done, folder, in_process, tmp_path):
    shown = in_process("report", "results")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout == "results/report.html: open it in a browser\n"
    page = (folder / "results" / "report.html").read_text()
    assert page.startswith("<!doctype html>") or page.startswith("<!DOCTYPE html>")
    assert "Learned search on 600 keys" in page
    shown = in_process(
        "report", "results", "--out", tmp_path / "p.html", "--figures", tmp_path / "deep" / "f"
    )
    assert shown.returncode == 0, shown.stderr
    drawn = sorted(path.name for path in (tmp_path / "deep" / "f").iterdir())
    assert "recall10-cost.png" in drawn
    assert "recall10-cost.svg" in drawn
    assert shown.stdout.endswith(f"f: {len(drawn)} figures\n")
    assert (tmp_path / "p.html").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("bench", "nowhere", "--out", "x"), "nowhere is not a directory: expected a finished task"),
        (("bench", "nonsense", "--out", "x"), "nonsense is not a finished task"),
        (("bench", "task", "--out", "nonsense"), "nonsense exists and is not the results of a bench"),
        (("bench", "task", "--out", "bad.toml"), r"bad\.toml exists and is not the results of a bench"),
        (("bench", "task", "--out", "x", "--rounds", "0"), "rounds=0"),
        (("bench", "task", "--out", "x", "--singles", "0"), "singles=0"),
        (("bench", "task", "--out", "x", "--systems", "nowhere.toml"), r"nowhere\.toml does not exist"),
        (("bench", "task", "--out", "x", "--systems", "nonsense"), "nonsense"),
        (("bench", "task", "--out", "x", "--systems", "bad.toml"), "cells=True: expected int"),
        (
            ("bench", "task", "--out", "x", "--systems", "systems.toml", "--model", "task"),
            r"task is not a finished run: it has no model\.safetensors",
        ),
        (("bench", "task", "--out", "x", "--models", "unfinished"), "unfinished is not a finished run"),
        (("bench", "task", "--out", "x", "--model", "nowhere"), "nowhere is not a finished run"),
        (("report", "nowhere"), r"nowhere holds no summary\.json: "),
        (("report", "nonsense"), r"nonsense holds no summary\.json"),
        (("report", "damaged"), r"damaged/summary\.json is damaged"),
        (("report", "bad.toml"), r"bad\.toml"),
    ],
)
def test_errors_are_one_line(in_process, folder, arguments, match):
    done = in_process(*arguments)
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert re.search(match, done.stderr), done.stderr
    assert not (folder / "x").exists()
    assert not (folder / "y").exists()
    assert not list(folder.glob("non*/report.html"))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("bench", "task"), "Missing option '--out'"),
        (("bench", "--out", "x"), "Missing argument 'TASK'"),
        (("bench", "task", "--out", "x", "--rounds", "many"), "'many' is not a valid integer"),
        (("report",), "Missing argument 'RESULTS'"),
    ],
)
def test_wrong_usage_ends_with_2(in_process, arguments, match):
    done = in_process(*arguments)
    assert done.returncode == 2
    assert match in done.stderr
    assert "Traceback" not in done.stderr


def test_results_of_other_settings_are_refused(done, in_process):
    again = in_process("bench", "task", "--systems", "systems.toml", "--out", "results", "--batch", "16")
    assert again.returncode == 1
    assert "of other inputs or options (batch, minutes); choose another directory" in again.stderr


def test_an_interrupt_says_how_to_continue(in_process, folder, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("amips.bench.runner.Runner.answer", stop)
    done = in_process("bench", "task", "--systems", "systems.toml", "--out", "stopped", *QUICK)
    assert done.returncode == 130
    assert "continue when the same command is given again" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_names_what_there_is(in_process):
    shown = in_process("bench", "--help")
    assert shown.returncode == 0
    for word in ("--systems", "--models", "--minutes", "--rounds", "--batch", "HNSW"):
        assert word in shown.stdout


def answers(out):
    """The arrays of every run but the linear router's, which gets as far as its time allows."""
    found = {}
    for path in sorted((out / "runs").glob("*.npz")):
        if "linear" not in path.name and "times" not in path.name:
            with np.load(path) as raw:
                found[path.name] = {name: raw[name].tobytes() for name in raw.files}
    return found


@pytest.mark.slow
def test_a_killed_bench_continues(done, folder):
    """SIGKILL in the middle; the same command goes on, keeps what there was, and ends in the same answers."""
    out = folder / "killed"
    command = [AMIPS, "bench", "task", "--systems", "systems.toml", "--out", "killed", *QUICK]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    kill_when(process, lambda: len(list(out.glob("runs/*.times.json"))) >= 3)
    before = {path: path.stat().st_mtime_ns for path in out.glob("runs/*.json")}
    sealed = (path.with_suffix(".npz") for path in before)  # arrays without a description are made again
    before |= {path: path.stat().st_mtime_ns for path in sealed}
    assert not (out / "summary.json").exists()
    again = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len(list(out.glob("runs/*.json"))) > sum(path.suffix == ".json" for path in before)
    assert answers(out) == answers(folder / "results")
