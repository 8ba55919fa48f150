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
import tempfile
import time
import warnings
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import amips
from amips.bench import ResultsStore, System, bench, load_summary, write_page
from amips.cli import cli
from amips.design import Design
from amips.nets import load_model, read_run_log
from amips.search import Index, Memory, MemorySearcher
from amips.task import load_task
from amips.text import Asker, Embedded, Text, attach, embed
from chaos.mutations import mutate, reseal

TRIES = int(os.environ.get("AMIPS_FUZZ", "0")) or 150
SEED = int(os.environ.get("AMIPS_FUZZ_SEED", "2026"))
HANGS_AFTER = 30.0  # seconds
N, D, C, M = 260, 8, 9, 160
# Where Python, its libraries and the system have files; a directory that is opened needs no others.
PLACES = {sys.prefix, sys.base_prefix, *sys.path, str(Path(amips.__file__).parent), "/proc", "/sys"}
PREFIXES = (
    *(os.path.realpath(place) + os.sep for place in sorted(PLACES) if place and Path(place).is_dir()),
    *("/dev/null", "/dev/urandom", "/dev/shm/", "/lib", "/usr/lib", "/usr/local/lib", "/usr/share/"),
)


def vectors(count, seed):
    return np.random.default_rng(seed).standard_normal((count, D)).astype(np.float32)


def small_task(out):
    return amips.label(vectors(N, 0), vectors(M, 1), cells=C, val=20, test=20, out=out, query_aware=0)


def describe(path):
    """`amips info`, in this process."""
    cli.main(["info", str(path)], standalone_mode=False)


class Bundle:
    """Bundles of every storage, with and without a model, second cells and labels."""

    efforts = ({"probes": 3}, {"probes": C}, {})

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
        for options in self.efforts:
            scores, ids = index.search(self.x, 5, **options)
            assert set(ids.ravel().tolist()) <= names, "ids out of range"
            assert not np.isnan(scores).any(), "a score that is not a number"
        index.cost(self.x)
        repr(index)
        describe(path)


class GraphBundle(Bundle):
    """Bundles of graphs, with and without labels."""

    efforts = ({"margin": 0.1}, {"margin": 1e9}, {"recall": 1.0}, {})

    def __init__(self, place, storage, labelled):
        options = {"dimensions": 6} if storage == "lean" else {}
        ids = [f"key {i}" for i in range(N)] if labelled else None
        amips.build(small_task(None), structure="graph", storage=storage, ids=ids, out=place, **options)
        self.x = vectors(6, 2)


class MemoryBundle(Bundle):
    """Bundles of graphs with a memory of the log, which answers half of the queries."""

    efforts = GraphBundle.efforts

    def __init__(self, place, storage):
        task = small_task(None)
        index = amips.build(task, structure="graph", storage=storage)
        self.x = vectors(6, 2)
        logged = np.concatenate([self.x[:3], vectors(20, 3)])
        top = np.random.default_rng(0).integers(N, size=(23, 6))
        memory = Memory.build(logged, top, np.eye(D, dtype=np.float32)[:4], 0).with_gate(0.999)
        points = [replace(point, recognised=0.5, flops=point.flops / 2) for point in index.points]
        Index(MemorySearcher(index.snapshot, memory, [*index.points, *points])).save(place)


class TaskKind:
    """Tasks, loaded and built of."""

    def __init__(self, place):
        small_task(place)

    def use(self, path, rng):
        task = load_task(path)
        index = amips.build(task, None, storage=rng.choice(["flat", "sq8"]), spill_fraction=0.0)
        ids = index.search(vectors(4, 2), 5, probes=4)[1]
        assert set(ids.ravel().tolist()) <= set(range(-1, N)), "ids out of range"
        describe(path)


class RunKind:
    """Runs: the model, the log, and going on with training."""

    def __init__(self, place, task):
        self.task = task
        amips.train(task, amips.Linear(rank=4), samples=512, batch=64, out=place, evaluations=3)

    def use(self, path, rng):
        if rng.random() < 0.5:
            describe(path)
            load_summary(path)
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
        if rng.random() < 0.5:
            describe(path)
        for run in ResultsStore(path).runs(self.systems):
            assert (run.scanned >= -1).all()
            assert not np.isnan(run.scores).any()
        write_page(path, path / "report.html")


class Encoder:
    """Every text is a random direction."""

    name, d = "fake", D

    def encode(self, texts):
        rows = np.concatenate([vectors(1, zlib.crc32(text.encode())) for text in texts])
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)


class Embeddings:
    """Texts and their vectors."""

    def __init__(self, place):
        embed([Text(f"id {i}", "", f"text {i}") for i in range(40)], encoder=Encoder(), out=place)

    def use(self, path, rng):
        embedded = Embedded(path, verify=rng.random() < 0.5)
        assert len(list(embedded.key_texts)) == len(embedded.key_texts)


class Asked:
    """Bundles with texts, asked in words."""

    def __init__(self, place):
        corpus, queries = ([Text(f"id {i}", "", f"{kind} {i}") for i in range(40)] for kind in "ab")
        embedded = embed(corpus, queries, encoder=Encoder(), out=place.with_name("embedded"))
        task = amips.label(embedded.keys, embedded.queries, cells=4, val=5, test=5, query_aware=0)
        amips.build(task, None, storage="flat", spill_fraction=0.0, out=place)
        attach(place, embedded)

    def use(self, path, rng):
        asker = Asker(path, encoder=Encoder())
        answer = asker.ask("a question", probes=4)
        assert len(answer.hits) == 5
        assert all(isinstance(hit.text.id, str) for hit in answer.hits)
        amips.verify(path)


class Wrapped:
    """What is saved beside a FAISS index of the user's own."""

    def __init__(self, place):
        import faiss

        task = small_task(None)
        self.index = faiss.index_factory(D, f"IVF{C},Flat", faiss.METRIC_INNER_PRODUCT)
        self.index.train(task.keys)
        self.index.add(task.keys)
        amips.wrap(self.index, None, task=task, recall=0.9).save(place)

    def use(self, path, rng):
        if rng.random() < 0.5:
            describe(path)
        wrapped = amips.load(path, index=self.index)
        ids = wrapped.search(vectors(4, 2), 5)[1]
        assert set(ids.ravel().tolist()) <= set(range(-1, N)), "ids out of range"


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return small_task(tmp_path_factory.mktemp("fuzz") / "task")


def kind_of(name, place, task):
    """The object that makes a good directory at `place` and uses a damaged one."""
    if name.startswith("bundle"):
        _, storage, *more = name.split("-")
        if "memory" in more:
            return MemoryBundle(place, storage)
        if "graph" in more:
            return GraphBundle(place, storage, "ids" in more)
        return Bundle(place, storage, "spill" in more, "ids" in more)
    if name in ("run", "results"):
        return {"run": RunKind, "results": Results}[name](place, task)
    kinds = {"task": TaskKind, "embeddings": Embeddings, "asked": Asked, "wrapped": Wrapped}
    return kinds[name](place)


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
allowed: list[str] = []


def watch(event, arguments):
    """Note what is opened outside of the directory that is tried, and is no file of Python or a library."""
    if event != "open" or not isinstance(arguments[0], str | bytes):
        return
    path = os.path.realpath(os.fsdecode(arguments[0]))
    if not path.startswith((*allowed, *PREFIXES)):
        opened.add(path)


def child(kind, good, work, first, end, pipe):
    """Try from one seed on, and report each; never returns."""
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # what libraries, and `amips info`, print
        os.dup2(silent, stream)
    sys.stdout = sys.stderr = os.fdopen(silent, "w")
    # The temporary directories of amips, by the names that it gives them; the task that a run goes on with.
    places = [good, work, Path(tempfile.gettempdir()) / "amips-"]
    places += [kind.task.path] if hasattr(kind, "task") else []
    allowed[:] = [os.path.realpath(place) for place in places]
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


class Elsewhere:
    """Opens what it is told to, to see whether that is seen."""

    def __init__(self, name):
        self.name = name

    def use(self, path, rng):
        Path(self.name.format(path)).read_bytes()


@pytest.mark.parametrize(("name", "seen"), [("/etc/hosts", True), ("{}/../x", True), ("{}/a.bin", False)])
def test_a_file_elsewhere_is_seen(tmp_path, name, seen):
    (tmp_path / "good").mkdir()
    for file in ("good/a.bin", "x"):
        (tmp_path / file).write_bytes(bytes(range(64)))
    wrongs = campaign(Elsewhere(name), tmp_path / "good", tmp_path / "work", 4)
    assert [wrong for wrong in wrongs if " opened [" in wrong] == (wrongs if seen else [])
    assert len(wrongs) == 4 or not seen


KINDS = ("flat", "flat-spill-ids", "sq8", "pq-spill", "lean-ids", "lean-spill")
BUNDLES = [f"bundle-{kind}" for kind in (*KINDS, "flat-graph", "sq8-graph-ids", "lean-graph", "flat-memory")]


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", [*BUNDLES, "task", "run", "results", "embeddings", "asked", "wrapped"])
def test_whatever_is_changed(name, task, tmp_path):
    tries = -(-TRIES // len(BUNDLES)) if name.startswith("bundle") else TRIES
    kind = kind_of(name, tmp_path / "good", task)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind.use(shutil.copytree(tmp_path / "good", tmp_path / "work"), random.Random(0))  # it can be used
    wrongs = campaign(kind, tmp_path / "good", tmp_path / "work", tries)
    sys.stdout.write(f"{name}: seed {SEED}, {tries:,} tries, {len(wrongs)} went wrong\n")
    assert not wrongs, "\n".join(wrongs[:40])
