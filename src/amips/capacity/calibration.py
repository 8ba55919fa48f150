"""Measuring what a machine does in a second, in less than a minute.

Each part of the work is done on a small collection, with the code that does it on a large one. Where a step
takes a while however few keys there are, it is done for a quarter of them, too, and the difference counts.
"""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from amips import exact
from amips.builder import Builder
from amips.capacity.rates import Rates
from amips.cells import Cells, assign, kmeans
from amips.design import Design
from amips.errors import AmipsError
from amips.extras import needs_extra
from amips.index import REFINE, FaissCellStore
from amips.metrics import TOP
from amips.nets import Linear, Recipe
from amips.npy import save_npy
from amips.routers import router_for
from amips.scratch import Scratch
from amips.search import save, second_cells
from amips.task import Split, Task, label
from amips.vectors import Floats, Vectors, gather, open_vectors, unit_rows

Note = Callable[[str, float, float], None]  # name, amount, seconds

N, D, M = 100_000, 128, 4_000
C, RANK, R = 1_024, 32, 48
ITERATIONS = 4
SAMPLES = 1 << 17
READS = 4_096


def calibrate(say: Callable[[str], None] | None = None) -> Rates:
    """The rates of this machine; takes about half a minute and 200 MB of memory and disk."""
    say = say or (lambda _: None)
    scratch = Scratch("amips-plan-")
    try:
        return _measured(scratch.path, say)
    finally:
        scratch.remove()


def _measured(folder: Path, say: Callable[[str], None]) -> Rates:
    keys, queries = _collection()
    values: dict[str, float] = {}
    save_npy(folder / "keys.npy", keys)
    stored = open_vectors(folder / "keys.npy", "keys")

    def note(name: str, amount: float, seconds: float) -> None:
        values[name] = amount / max(seconds, 1e-9)
        say(f"{name}: {values[name]:.3g} a second")

    started = time.perf_counter()
    few = queries[:64]
    exact.top_k(stored, few, TOP)
    base = time.perf_counter() - started
    started = time.perf_counter()
    exact.top_k(stored, queries[:2112], TOP)
    note("exact", 2.0 * N * D * 2048, time.perf_counter() - started - base)
    took = list[float]()
    for part in (keys[: N // 4], stored):
        started = time.perf_counter()
        task = label(part, queries, cells=1, out=folder / f"task{len(took)}", val=500, test=500)
        took.append(time.perf_counter() - started - 2.0 * len(part) * D * M / values["exact"])
    note("passes", 3.0 * N * D, max(0.05, took[1] - took[0]))
    cells = _partition(keys, note)
    task = task.with_cells(cells)
    _training(task, note)
    router = router_for(None, cells.centroids)
    took.clear()
    for count in (len(task.train) // 4, len(task.train)):
        some = replace(task, train=_first(task.train, count))
        started = time.perf_counter()
        second_cells(some, router, 0.1)
        took.append(time.perf_counter() - started)
    judging = max(0.01, took[1] - took[0]) / 0.75  # of all training queries
    note("judge", float(len(task.train) * C), judging)
    note("second", 4.0 * N * C * D, max(0.05, took[1] - judging))
    values["query"], values["learn_code"] = _store(task, cells, folder, queries, note)
    values["random_read"] = _disk(folder, stored, note)
    say(f"a query: {values['query']:.3g} s and its products; a key from disk: {values['random_read']:.3g} s")
    return Rates(**values)


def _collection() -> tuple[Floats, Floats]:
    """Keys about topics, and queries near them."""
    rng = np.random.default_rng(0)
    topics = rng.standard_normal((N // 50, D), np.float32)
    keys = unit_rows(topics[rng.integers(0, len(topics), N)] + rng.standard_normal((N, D), np.float32))[0]
    asked = keys[rng.integers(0, N, M)] + 0.05 * rng.standard_normal((M, D), np.float32)
    return keys, unit_rows(asked)[0]


def _partition(keys: Floats, note: Note) -> Cells:
    vectors = open_vectors(keys, "keys")
    started = time.perf_counter()
    _assignment, _ = assign(vectors, keys[:C], True)
    assigning = time.perf_counter() - started
    note("assign", 2.0 * N * C * D, assigning)
    started = time.perf_counter()
    cells = kmeans(vectors, C, iterations=ITERATIONS, points=64)
    took = time.perf_counter() - started - assigning
    note("kmeans", 2.0 * ITERATIONS * 64 * C * C * D, max(took, 1e-3))
    return cells


def _training(task: Task, note: Note) -> None:
    """What a sample costs to learn from; nothing is noted without torch."""
    try:
        with needs_extra("training", "train", "torch"):
            from amips.learn import train
    except AmipsError:  # what is shipped stays
        return
    options: dict[str, Any] = {"recipe": Recipe(patience=0), "samples": SAMPLES, "evaluations": 1}
    model = train(task, Linear(rank=RANK), device="cpu", **options)
    note("train", 6.0 * RANK * (D + C) * SAMPLES, float(model.about["seconds"]))


def _store(task: Task, cells: Cells, folder: Path, queries: Floats, note: Note) -> tuple[float, float]:
    """Filling cells with codes, saving them, and searching them.

    Returns the seconds of a query that asks little, and of learning the codes of a dimension.
    """
    builder = Builder(task, folder / "work")
    projection = builder.projection(R)
    took = list[float]()
    for few in (N // 4, N):
        keys = task.key_vectors if few == N else open_vectors(task.key_vectors.rows(0, few))
        started = time.perf_counter()
        store = FaissCellStore.build(keys, cells.assignment[:few], cells.centroids, "lean", projection)
        took.append(time.perf_counter() - started)
    note("code", 0.75 * N * R, max(0.01, took[1] - took[0]))
    learning = took[1] - (took[1] - took[0]) / 0.75
    design = Design(
        C, None, router=Linear(rank=RANK), recipe=None, storage="lean", dimensions=R, spill_fraction=0.0
    )
    searcher = builder.searcher(design)
    place = folder / "bundle"
    started = time.perf_counter()
    save(searcher, place)
    files = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
    note("save", float(files), time.perf_counter() - started)
    x = [queries[i : i + 1] for i in range(200)]
    least, many = (_median_seconds(partial(searcher.search, k=TOP, probes=p), x) for p in (1, C // 4))
    scanned = float(N / 4 - N / C)
    note("scan", scanned * R, max(1e-7, many - least))
    rows = np.asarray(task.key_vectors.load())
    ids = np.random.default_rng(0).integers(0, N, (200, REFINE * TOP))
    in_memory = FaissCellStore(store.index, "lean", store.sizes, store.entries, cells.centroids, rows)
    pairs = [(x[i], ids[i : i + 1]) for i in range(200)]
    rescoring = _median_seconds(lambda pair: in_memory.score_again(pair[0], pair[1], TOP), pairs)
    note("rescore", float(REFINE * TOP * D), rescoring)
    router = searcher.router
    routing = _median_seconds(router.scores, x)
    note("route", 2.0 * RANK * (D + C), routing)
    return max(least - routing - rescoring, 5e-6), max(learning, 1e-3) / R


def _first(split: Split, count: int) -> Split:
    """The first queries of a split."""
    arrays = {name: value[:count] for name, value in vars(split).items() if isinstance(value, np.ndarray)}
    return replace(split, vectors=open_vectors(split.vectors.rows(0, count), "queries"), **arrays)


def _median_seconds(work: Callable[[Any], object], items: list[Any]) -> float:
    times = []
    for item in items:
        started = time.perf_counter()
        work(item)
        times.append(time.perf_counter() - started)
    return float(np.median(times))


def _disk(folder: Path, stored: Vectors, note: Note) -> float:
    """Reading keys in order, and the seconds of one at random, from the disk if its cache can be dropped."""
    path = folder / "keys.npy"

    def forget() -> None:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    forget()
    started = time.perf_counter()
    for _ in stored.blocks():
        pass
    note("read", 4.0 * N * D, time.perf_counter() - started)
    forget()
    ids = np.random.default_rng(1).choice(N, READS, replace=False)
    assert stored.array is not None
    started = time.perf_counter()
    gather(stored.array, ids)
    return max((time.perf_counter() - started) / READS, 1e-7)
