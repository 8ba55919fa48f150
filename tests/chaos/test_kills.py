"""kill -9 at random moments: nothing that was whole is lost, and the same call comes to the same end.

AMIPS_KILLS says how many processes are killed (`make chaos`: 200), AMIPS_SEED at which moments.
"""

import contextlib
import multiprocessing
import os
import random
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

import amips
from amips.nets import load_model
from amips.task import load_task
from helpers import make_world

KILLS = int(os.environ.get("AMIPS_KILLS", "10"))
SEED = int(os.environ.get("AMIPS_SEED", "0"))
# Children of a process that has the library loaded and has not used it: they begin at once.
START = multiprocessing.get_context("forkserver")
START.set_forkserver_preload(["amips", "amips.learn"])


def label(folder):
    amips.label(folder / "keys.npy", folder / "queries.npy", out=folder / "task", cells=16, copies=1)


def train(folder):
    task, options = folder / "whole" / "task", {"samples": 40_000, "batch": 200, "evaluations": 8}
    amips.train(task, out=folder / "run", resume="auto", **options)


def build(folder):
    """Replaces the bundle that is there by another."""
    amips.build(folder / "whole" / "task", storage="sq8", out=folder / "bundle")


def fit(folder):
    amips.fit(
        folder / "keys.npy", folder / "queries.npy", out=folder / "fitted", minutes=0.02, cells=12, quiet=True
    )


def make(call, folder):
    """Make the call with a place of its own for what is temporary: who is killed leaves that."""
    tempfile.tempdir = str(folder.parent / "temporary")
    Path(tempfile.tempdir).mkdir(exist_ok=True)
    call(folder)


def content(folder):
    """Every file with its bytes, but for logs, which have times in them."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "log.jsonl")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Keys and queries in files, and what comes of them without interruption."""
    folder = tmp_path_factory.mktemp("kills")
    keys, queries = make_world(4000, 1500, 16, seed=2)
    np.save(folder / "keys.npy", keys)
    np.save(folder / "queries.npy", queries)
    label(folder)
    (folder / "whole").mkdir()
    (folder / "task").rename(folder / "whole" / "task")
    amips.build(folder / "whole" / "task", out=folder / "bundle")
    return folder


def run(call, folder):
    """Let a process make the call; how long it took."""
    process, started = START.Process(target=make, args=(call, folder)), time.monotonic()
    process.start()
    process.join()
    assert process.exitcode == 0
    return time.monotonic() - started


def kill(call, folder, seconds):
    """Kill a process that makes the call, after so many seconds; whether it was still at it."""
    process = START.Process(target=make, args=(call, folder))
    process.start()
    process.join(seconds)
    process.kill()
    process.join()
    return process.exitcode != 0


def check(folder):
    """What is there is whole, or says that it is not finished."""
    for name, read in (("task", load_task), ("run", load_model)):
        with contextlib.suppress(amips.AmipsError):
            read(folder / name)
    assert amips.load(folder / "bundle").n == 4000
    if (folder / "fitted" / "manifest.json").exists():
        assert amips.load(folder / "fitted").n == 4000


@pytest.mark.parametrize("call", [label, train, build, fit], ids=lambda call: call.__name__)
def test_killed_at_any_moment(inputs, tmp_path, call):
    folder = tmp_path / "x"
    folder.mkdir()
    for name in ("keys.npy", "queries.npy", "whole"):
        (folder / name).symlink_to(inputs / name)
    amips.load(inputs / "bundle").save(folder / "bundle")
    seconds = run(call, folder)  # how long it takes, and what comes of it
    made = {label: "task", train: "run", build: "bundle", fit: "fitted"}[call]
    (folder / made).rename(tmp_path / "reference")
    amips.load(inputs / "bundle").save(folder / "bundle")
    moments = random.Random(f"{SEED} {call.__name__}")
    for _ in range(max(1, KILLS // 4)):
        kill(call, folder, seconds * moments.random())
        check(folder)
    run(call, folder)
    check(folder)
    if call in (label, train):  # the same bytes; an index is measured anew
        expected = content(tmp_path / "reference")
        different = {name for name, data in content(folder / made).items() if expected.get(name) != data}
        assert different <= {"checkpoint.safetensors", "model.json", "config.json", ".lock"}
        assert content(folder / made).keys() >= expected.keys()
    else:
        assert amips.load(folder / made).c == amips.load(tmp_path / "reference").c
    assert [path for path in folder.rglob("*.tmp") if path.name != "manifest.json"] == []
    assert not Path(f"{folder / made}.work").exists()
