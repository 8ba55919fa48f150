"""`python -m paper`: what it lists, what it refuses, and that it is no part of the installed package."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from amips.errors import AmipsError
from helpers import ROOT, make_world
from paper import EXPERIMENTS, run_experiment

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    place = tmp_path_factory.mktemp("command") / "data"
    place.mkdir()
    keys, queries = make_world(1200, 1500, 16, seed=7)
    np.save(place / "keys.npy", keys)
    np.save(place / "queries.npy", queries)
    return place


def test_help_lists_the_experiments_as_a_user_runs_it():
    done = subprocess.run(
        [sys.executable, "-m", "paper", "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for name in (*EXPERIMENTS, "collect", "page"):
        assert f"\n  {name} " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ("routing", "--data", "nowhere", "--out", "out"),
            "error: nowhere is not a directory: expected one with",
        ),
        (("routing", "--data", "empty", "--out", "out"), "error: empty holds no keys: expected keys.npy"),
        (
            ("encoders", "--data", "data", "--out", "out", "--scale", "smoke"),
            "error: encoders compares data of",
        ),
        (("routing", "--data", "data", "--out", "s3://bucket/x"), "error: "),
        (
            ("dynamics", "--data", "data", "--out", "on", "--scale", "smoke", "--device", "nowhere"),
            "error: device='nowhere'",
        ),
    ],
)
def test_what_goes_wrong_is_one_line(data, monkeypatch, paper_command, arguments, line):
    (data.parent / "empty").mkdir(exist_ok=True)
    monkeypatch.chdir(data.parent)
    done = paper_command(*arguments)
    assert done.returncode == 1
    assert done.stderr.startswith(line)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("routin", "--data", "x", "--out", "y"), "No such command 'routin'"),
        (("routing", "--data", "x"), "Missing option '--out'"),
        (("routing", "--data", "x", "--out", "y", "--scale", "huge"), "'huge' is not one of"),
        (("losses", "--data", "x", "--out", "y", "--no-times"), "No such option"),
    ],
)
def test_wrong_usage_ends_with_2(paper_command, arguments, match):
    done = paper_command(*arguments)
    assert done.returncode == 2
    assert match in done.stderr


def test_an_interrupt_says_how_to_continue(data, monkeypatch, paper_command):
    from paper import shift

    def interrupted(workspace):
        raise KeyboardInterrupt

    monkeypatch.chdir(data.parent)
    monkeypatch.setattr(shift, "run", interrupted)
    done = paper_command("shift", "--data", "data", "--out", "stopped", "--scale", "smoke")
    assert done.returncode == 130
    assert done.stderr.strip() == "stopped; the same command continues where it was"


def test_from_python_names_are_checked_too(data, tmp_path):
    with pytest.raises(AmipsError, match="there is no experiment 'routin'; there are routing, routing128"):
        run_experiment("routin", data=data, out=tmp_path)
    with pytest.raises(AmipsError, match="routing: only ivf and ood run without times"):
        run_experiment("routing", times=False, data=data, out=tmp_path)


def test_the_readme_says_what_each_experiment_asks():
    text = (ROOT / "paper" / "README.md").read_text()
    for name, experiment in EXPERIMENTS.items():
        assert f"| `{name}` | {experiment.question} |" in text


def test_it_is_no_part_of_the_wheel():
    assert 'wheel.packages = ["src/amips"]\n' in (ROOT / "pyproject.toml").read_text()
    assert not (ROOT / "src" / "amips" / "paper").exists()
