"""`amips train` with several seeds, and what makes it faster on a device."""

import re
import subprocess
import sys

import pytest
import torch

import amips
from amips.cli import main
from amips.learn import train_seeds
from amips.nets import read_run_config
from helpers import make_world

torch.set_num_threads(1)
OPTIONS = ("--samples", "640", "--batch", "32", "--evaluations", "2")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    keys, queries = make_world(500, 400, 12, seed=0)
    return amips.label(keys, queries, cells=6, out=tmp_path_factory.mktemp("cli-train") / "task")


@pytest.fixture
def run(task, monkeypatch, capfd):
    """The command without a new process."""

    def run(out, *options):
        words = ["amips", "train", task.path, "--out", out, *OPTIONS, *options]
        monkeypatch.setattr(sys, "argv", [str(word) for word in words])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
        return subprocess.CompletedProcess(sys.argv, code, *capfd.readouterr())

    return run


@pytest.mark.parametrize(("seeds", "numbers"), [("2", [0, 1]), ("3,1", [3, 1])])
def test_a_run_for_each_seed_and_a_table(run, task, tmp_path, seeds, numbers):
    out = tmp_path / "runs"
    done = run(out, "--seeds", seeds)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in out.iterdir()) == sorted(f"seed-{number}" for number in numbers)
    same = train_seeds(task, amips.Linear(), seeds=numbers, out=out, samples=640, batch=32, evaluations=2)
    lines = done.stdout.splitlines()
    assert f"{out}: Linear, seeds {', '.join(map(str, numbers))}" in lines
    head = next(i for i, line in enumerate(lines) if line.startswith("on val"))
    assert re.split("  +", lines[head].strip())[1:] == ["mean", "spread", *(f"seed {n}" for n in numbers)]
    row = next(line.split() for line in lines[head:] if line.startswith("scan@0.95"))
    values = (same.mean["scan@0.95"], same.spread["scan@0.95"], *same.val["scan@0.95"])
    assert row[1:] == [f"{value:.4f}" for value in values]
    again = run(out, "--seeds", seeds, "--resume")  # all of them are finished
    assert (again.returncode, again.stdout.splitlines()[-2:]) == (0, lines[-2:])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (("--seeds", "some"), "--seeds some: expected a number of seeds, or some like 0,1,2"),
        (("--seeds", "2", "--seed", "0"), "give --seed or --seeds, not both"),
        (("--seeds", "0"), "seeds=0: expected a whole number, at least 1"),
        (("--seeds", "1,1"), "different seeds"),
        (("--precision", "fp8"), "'fp8' is not one of"),
        (("--device", "cuda:99"), "device='cuda:99' cannot be used"),
    ],
)
def test_what_cannot_be(run, tmp_path, options, match):
    done = run(tmp_path / "runs", *options)
    assert done.returncode != 0
    assert match in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_options_for_a_device(run, tmp_path):
    out = tmp_path / "run"
    done = run(out, "--device", "cpu", "--precision", "bf16", "--tensorboard")
    assert done.returncode == 0, done.stderr
    assert read_run_config(out)["precision"] == "bf16"
    assert any((out / "tensorboard").iterdir())
