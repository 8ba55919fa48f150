"""kill -9 while keys come and go: what was acknowledged is there, and nothing half-done is seen.

AMIPS_KILLS says how many processes are killed (`make chaos`: 200), AMIPS_SEED at which moments.
"""

import multiprocessing
import os
import random
import shutil
import signal

import numpy as np
import pytest

import amips
from helpers import make_world

KILLS = int(os.environ.get("AMIPS_KILLS", "10"))
SEED = int(os.environ.get("AMIPS_SEED", "0"))
START = multiprocessing.get_context("forkserver")
START.set_forkserver_preload(["amips"])
N, D = 800, 16
REFITS = ("refitted", "rolled back")


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kills")
    keys, queries = make_world(N, 600, D, seed=3)
    task = amips.label(keys, queries, cells=10, val=100, test=80, k=10, out=folder / "task")
    amips.build(task, out=folder / "cells")
    amips.build(task, out=folder / "graph", structure="graph")
    return folder


def vector(number):
    """The key with an id: everyone can tell what it should be."""
    row = np.random.default_rng(number).standard_normal(D)
    return (row / np.linalg.norm(row)).astype(np.float32)


def other_queries():
    """Queries that nobody had asked: keys with much noise."""
    keys, rng = make_world(N, 1, D, seed=3)[0], np.random.default_rng(5)
    rows = keys[rng.integers(N, size=600)] + 0.7 * rng.standard_normal((600, D))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def work(bundle, begin, told, refits=False):
    """Add ten keys, remove five, update one and compact now and then; say what was acknowledged.

    With `refits`, refit and go back in between, or back where a killed process had refitted.
    """
    index = amips.load(bundle)
    step = begin
    while True:
        if refits:
            told.send(("begin", step))
            if index.origin.round:
                index.rollback()
                told.send(("rolled back", step))
            else:
                index.refit(other_queries(), minutes=0.01)
                told.send(("refitted", step))
        first = 10**6 + 10 * step
        ids = list(range(first, first + 10))
        told.send(("begin", step))
        index.add(np.array([vector(one) for one in ids]), ids)
        told.send(("added", step))
        index.remove(ids[:5])
        told.send(("removed", step))
        index.update(ids[9:], vector(-1 - step + 10**7)[None])
        told.send(("updated", step))
        if step % 3 == 0:
            index.compact()
        step += 1


@pytest.mark.parametrize("kind", ["cells", "graph"])
def test_nothing_acknowledged_is_lost(bundles, tmp_path, kind):
    bundle = tmp_path / "b"
    shutil.copytree(bundles / kind, bundle)
    moments, begin = random.Random(f"{SEED} {kind}"), 0
    done: dict[int, str] = {}
    for _ in range(max(1, KILLS // 2)):
        here, there = START.Pipe(duplex=False)
        process = START.Process(target=work, args=(bundle, begin, there))
        process.start()
        there.close()
        done |= killed(process, here, 0.6 * moments.random())
        check(amips.load(bundle), done)
        begin = max(done) + 1
    reader = amips.load(bundle)
    with amips.load(bundle) as index:  # no lock is left, and it can go on
        index.compact()
    assert reader.refresh()
    check(reader, done)


def test_a_refit_is_there_or_is_not(bundles, tmp_path):
    """Killed while it refits or goes back, between changes that stay whatever becomes of the refit.

    Of cells: a graph of so few keys can hardly become better, and both are put in place by the same lines.
    """
    bundle = tmp_path / "b"
    shutil.copytree(bundles / "cells", bundle)
    moments, begin = random.Random(f"{SEED} refit"), 0
    done: dict[int, str] = {}
    for _ in range(max(4, KILLS // 2)):
        here, there = START.Pipe(duplex=False)
        process = START.Process(target=work, args=(bundle, begin, there, True))
        process.start()
        there.close()
        told = killed(process, here, 2.5 * moments.random())
        index = amips.load(bundle)
        done |= {
            step: "begin" if what in ("refitted", "rolled back") else what for step, what in told.items()
        }
        check(index, done)
        if told[max(told)] in REFITS:  # acknowledged, and nothing refitted since
            assert index.origin.events[-1].what == told[max(told)]
        assert index.origin.round in (0, 1)
        begin = max(done) + 1
    with amips.load(bundle) as index:
        index.compact()
    check(amips.load(bundle), done)


def killed(process, here, seconds):
    """What a process had told when it was killed, some seconds after it began: the last word of each step."""
    assert here.poll(60)  # it is at it
    process.join(seconds)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL  # it did not end by itself
    told = {}
    while True:
        try:
            what, step = here.recv()
        except EOFError:
            return told
        told[step] = what


def check(index, done):
    """Each step is where it was acknowledged to be, or one change further: never between."""
    order = ["begin", "added", "removed", "updated"]
    ids = set((np.arange(index.snapshot.n) if index.labels is None else index.labels).tolist())
    alive = index.snapshot.alive
    if alive is not None:
        labels = np.arange(index.snapshot.n) if index.labels is None else index.labels
        ids = set(labels[alive.keys].tolist())
    assert set(range(N)) <= ids
    for step, what in done.items():
        first = 10**6 + 10 * step
        there = [one in ids for one in range(first, first + 10)]
        states = {"begin": [False] * 10, "added": [True] * 10}
        states["removed"] = states["updated"] = [False] * 5 + [True] * 5
        possible = [states[name] for name in order[order.index(what) : order.index(what) + 2]]
        assert there in possible, (step, what, there)
        if what == "updated":
            score, found = index.search(vector(-1 - step + 10**7), 1, recall=1.0)
            assert found.item() == first + 9
            assert score.item() == pytest.approx(1, abs=1e-5)
    assert ids <= set(range(N)) | {10**6 + 10 * step + i for step in done for i in range(10)}
