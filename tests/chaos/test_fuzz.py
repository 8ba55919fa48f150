"""Damaged and hostile directories: opening them ends in one line or in a right use, whatever was changed.

AMIPS_FUZZ=20000 AMIPS_FUZZ_SEED=7 tries so many for each kind, from another seed (`make fuzz`). Each copies a
good directory, changes one thing (`mutations`), in half of the tries makes hashes true again, and uses the
result in a child process. What is looked for: signals, hangs, errors that are not one line, ids out of range,
and files outside of the directory that were opened.
"""

import os
import random
import select
import shutil
import signal
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

import amips
from amips.bench import ResultsStore, System, bench, write_page
from amips.design import Design
from amips.nets import load_model, read_run_log
from amips.task import load_task
from amips.text import Embedded, Text, embed
from chaos.mutations import mutate, reseal

TRIES = int(os.environ.get("AMIPS_FUZZ", "0")) or 150
SEED = int(os.environ.get("AMIPS_FUZZ_SEED", "2026"))
HANGS_AFTER = 30.0  # seconds
N, D, C, M = 260, 8, 9, 160
OUTSIDE = {"/etc/passwd", "/dev/zero"}


def vectors(count, seed):
    return np.random.default_rng(seed).standard_normal((count, D)).astype(np.float32)


def small_task(out):
    return amips.label(vectors(N, 0), vectors(M, 1), cells=C, val=20, test=20, out=out, query_aware=0)


class Bundle:
    """Bundles of every storage, with and without a model, second cells and labels."""

    def __init__(self, place, storage, spill, labelled):
        task = small_task(None)
        model = amips.train(task, amips.Linear(rank=4), samples=256) if spill else None
        options = {"dimensions": 4} if storage == "lean" else {}
        ids = [f"key {i}" for i in range(N)] if labelled else None
        amips.build(
            task, model, storage=storage, spill_fraction=0.5 if spill else 0.0, ids=ids, out=place, **options
        )
        self.x = vectors(6, 2)

    def use(self, path, rng):
        index = amips.load(path, mmap=rng.random() < 0.3, verify=rng.random() < 0.7)
        names = {-1, *range(N)} if index.labels is None else {"", *index.labels.tolist()}
        for options in ({"probes": 3}, {"probes": C}, {}):
            scores, ids = index.search(self.x, 5, **options)
            assert set(ids.ravel().tolist()) <= names, "ids out of range"
            assert not np.isnan(scores).any(), "a score that is not a number"
        index.cost(self.x)
        repr(index)


class TaskKind:
    """Tasks, loaded and built of."""

    def __init__(self, place):
        small_task(place)

    def use(self, path, rng):
        task = load_task(path)
        index = amips.build(task, None, storage=rng.choice(["flat", "sq8"]), spill_fraction=0.0)
        ids = index.search(vectors(4, 2), 5, probes=4)[1]
        assert set(ids.ravel().tolist()) <= set(range(-1, N)), "ids out of range"


class RunKind:
    """Runs: the model, the log, and going on with training."""

    def __init__(self, place, task):
        self.task = task
        amips.train(task, amips.Linear(rank=4), samples=512, batch=64, out=place, evaluations=3)

    def use(self, path, rng):
        read_run_log(path)
        assert load_model(path).scores(vectors(4, 2)).shape == (4, C)
        amips.train(self.task, amips.Linear(rank=4), samples=512, batch=64, out=path, evaluations=3)


class Results:
    """Results of a bench: the runs read, and made into a page."""

    def __init__(self, place, task):
        self.systems = [System(Design.plain(cells)) for cells in (4, C)]
        bench(task, out=place, systems=self.systems, rounds=1, singles=4, all_threads=False)
        shutil.rmtree(place / "work", ignore_errors=True)

    def use(self, path, rng):
        for run in ResultsStore(path).runs(self.systems):
            assert np.isfinite(run.scanned).all()
        write_page(path, path / "report.html")


class Encoder:
    """Vectors by the length of a text."""

    name, d = "fake", D

    def encode(self, texts):
        return np.stack([np.eye(D, dtype=np.float32)[len(text) % D] for text in texts])


class Embeddings:
    """Texts and their vectors."""

    def __init__(self, place):
        embed([Text(f"id {i}", "", f"text {i}") for i in range(40)], encoder=Encoder(), out=place)

    def use(self, path, rng):
        embedded = Embedded(path, verify=rng.random() < 0.5)
        assert len(list(embedded.key_texts)) == len(embedded.key_texts)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return small_task(tmp_path_factory.mktemp("fuzz") / "task")


def kind_of(name, place, task):
    """The object that makes a good directory at `place` and uses a damaged one."""
    if name.startswith("bundle"):
        _, storage, *more = name.split("-")
        return Bundle(place, storage, "spill" in more, "ids" in more)
    if name in ("run", "results"):
        return {"run": RunKind, "results": Results}[name](place, task)
    return {"task": TaskKind, "embeddings": Embeddings}[name](place)


def attempt(kind, good, work, seed):
    """One try; nothing if it ended as it should, otherwise what was wrong."""
    rng = random.Random(f"{SEED}:{seed}")
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(good, work)
    change = mutate(work, rng)
    if sealed := rng.random() < 0.5:
        reseal(work)
    opened.clear()
    wrong = ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kind.use(work, rng)
    except amips.AmipsError as problem:
        if "\n" in str(problem) or len(str(problem)) > 2000:
            wrong = f"an error that is not one line: {str(problem)[:300]!r}"
    except BaseException as problem:
        at = problem.__traceback__
        while at.tb_next:
            at = at.tb_next
        where = f"{Path(at.tb_frame.f_code.co_filename).name}:{at.tb_lineno}"
        wrong = f"{type(problem).__name__} at {where}: {str(problem)[:300]}"
    if opened:
        wrong += f" opened {sorted(opened)}"
    return f"seed {SEED}:{seed} ({change}{', hashes true' if sealed else ''}): {wrong}" if wrong else ""


opened: set[str] = set()


def watch(event, arguments):
    """Note what is opened that is none of a directory's business."""
    if event == "open" and isinstance(arguments[0], str) and os.path.realpath(arguments[0]) in OUTSIDE:
        opened.add(arguments[0])


def child(kind, good, work, first, end, pipe):
    """Try from one seed on, and report each; never returns."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what libraries print of their own
    sys.addaudithook(watch)
    for seed in range(first, end):
        os.write(pipe, f"{seed}\n".encode())
        if wrong := attempt(kind, good, work, seed):
            os.write(pipe, f"! {wrong}\n".encode(errors="replace").replace(b"\0", b"?"))
    os.write(pipe, b"done\n")
    os._exit(0)


def campaign(kind, good, work, tries):
    """What was wrong, over so many tries; a child that dies or hangs is replaced by another."""
    wrongs, first = [], 0
    while first < tries:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                child(kind, good, work, first, tries, writer)
            finally:
                os._exit(70)
        os.close(writer)
        text, started = "", time.monotonic()
        while True:
            ready = select.select([reader], [], [], max(0.0, started + HANGS_AFTER - time.monotonic()))[0]
            block = os.read(reader, 1 << 16).decode(errors="replace") if ready else ""
            if not block:
                break
            text, started = text + block, time.monotonic()
        if not ready:
            os.kill(pid, signal.SIGKILL)
        os.close(reader)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        lines = text.splitlines()
        wrongs += [line[2:] for line in lines if line.startswith("! ")]
        if lines and lines[-1] == "done":
            break
        last = max((int(line) for line in lines if line.isdigit()), default=first)
        wrongs.append(f"seed {SEED}:{last}: {'hang' if not ready else f'the process ended with {status}'}")
        first = last + 1
    return wrongs


BUNDLES = [
    f"bundle-{kind}" for kind in ("flat", "flat-spill-ids", "sq8", "pq-spill", "lean-ids", "lean-spill")
]


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", [*BUNDLES, "task", "run", "results", "embeddings"])
def test_whatever_is_changed(name, task, tmp_path):
    tries = -(-TRIES // len(BUNDLES)) if name.startswith("bundle") else TRIES
    kind = kind_of(name, tmp_path / "good", task)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind.use(shutil.copytree(tmp_path / "good", tmp_path / "work"), random.Random(0))  # it can be used
    wrongs = campaign(kind, tmp_path / "good", tmp_path / "work", tries)
    sys.stdout.write(f"{name}: seed {SEED}, {tries:,} tries, {len(wrongs)} went wrong\n")
    assert not wrongs, "\n".join(wrongs[:40])
