"""Making a task: duplicates out, split by source, noise, exact targets, manifest last.

The order matters: duplicates go first, then the log is split by source query, and only then are noisy copies
made. So no copy of a test query, however noisy, is ever trained on. `split="rows"` does it the other way
round, as the paper does: nearly every held-out row then has relatives in train, and the task says so.
`split="time"` is for traffic: rows stay as they came, what comes again is kept, and the last are held out.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from amips import cells as partition
from amips import exact
from amips.cluster import Cluster, connected
from amips.files import is_address
from amips.resources import plain_resource_errors
from amips.scratch import Scratch
from amips.task.planning import LabelOptions, TaskPlan, checked_options, task_plan
from amips.task.store import TaskStore, check_task_place
from amips.task.task import SPLITS, Task
from amips.vectors import Vectors, open_vectors, unit_rows


@plain_resource_errors()
def label(
    keys: Any,
    queries: Any,
    *,
    out: str | Path | None = None,
    preset: str | None = None,
    cells: Any = None,
    query_aware: float | None = None,
    spherical: bool = True,
    runs: int = 1,
    copies: int | None = None,
    noise: float = 0.02,
    noisy_splits: tuple[str, ...] = ("train",),
    val: int | None = None,
    test: int | None = None,
    split: Any = None,
    k: int = 10,
    cell_targets: bool | None = None,
    seed: int = 0,
    zero: str = "error",
    memory: int = exact.MEMORY,
    device: str | None = None,
    ray: str | None = None,
    progress: bool = False,
) -> Task:
    """Make a task: deduplicate, split by source query, find exact targets, partition the keys.

    Without options it makes what `amips.fit` begins with: query-aware cells, 4 sqrt(n) of them. Queries are
    kept at norm 1: what their best keys are does not depend on it.

    Args:
        keys, queries: arrays or files, see `open_vectors`.
        out: the task directory. A finished task with the same inputs is returned as it is; an unfinished
            one is continued; one with other inputs is left alone and is an error. None makes a temporary one
            that is gone when the process ends.
        preset: "paper" begins with what the paper does: no cells, four noisy copies of each query, targets
            for every cell. Other options replace those of the preset.
        cells: the number of cells (FAISS calls it nlist), a `Cells`, or a FAISS IVF index that holds the
            keys, to take them from (`amips.cells.from_faiss`); 1 means no partition; about 4 sqrt(n) if None.
        query_aware: move keys towards the training queries that want them before k-means, by so much; see
            `amips.cells.query_aware`. 1.5 if None and nothing speaks against it; 0 is plain k-means.
        spherical, runs: see `amips.cells.kmeans`.
        copies: noisy copies of each query beside the original, in the splits named by `noisy_splits`.
        noise: standard deviation of the Gaussian noise for each coordinate, relative to the query's norm.
        val, test: how many distinct queries (by "time": rows) to hold out for choosing and for reporting;
            1,000 each if None, or a fifth of them where there are fewer than 5,000.
        split: "source" splits the queries, and makes noisy copies afterwards; "rows" makes the copies first
            and then splits the rows, as the paper does: `val` and `test` count rows, and what is measured on
            them tells how well the log is remembered, not what new queries get. "time" takes the rows as a
            log in the order of time: train, then val, then test are its parts, and queries that come again
            are kept and weigh as they occur. Or a split of your own: one of "train", "val", "test" or ""
            (unused) for each query. Of queries that are equal at norm 1 the first counts, but for "time".
        k: top keys stored for each query.
        cell_targets: find the top key of every cell too, from which SupportNet and KeyNet learn. Linear and
            max-affine routers do not need it, and with many cells it takes most of the time and space.
        zero: "keep" allows all-zero keys; zero queries are always an error.
        memory: a bound on the working set of exact search, in bytes. (k-means holds up to 256 keys a cell.)
        device: where exact search multiplies, with torch: "cuda", "cuda:1", ...; None is numpy, on the CPU.
            The task is the same, and one that was begun elsewhere is continued.
        ray: a Ray cluster whose workers find the top keys and assign keys to cells: "auto", HOST:PORT, or
            "local". They read keys from the file, where all nodes see it, or from its address. The task is
            the same, and one that was begun elsewhere is continued.
        progress: say on standard error how far it is: a bar on a terminal, a line now and then otherwise.
    """
    options = checked_options(
        preset,
        cells=cells,
        query_aware=query_aware,
        spherical=spherical,
        runs=runs,
        copies=copies,
        noise=noise,
        noisy_splits=noisy_splits,
        val=val,
        test=test,
        k=k,
        cell_targets=cell_targets,
        seed=seed,
        zero=zero,
        memory=memory,
        device=device,
        ray=ray,
        progress=progress,
    )
    if out is not None:
        check_task_place(out)  # before the work, not after it
    # Everything that can be wrong with the request is found before the directory is begun.
    plan = task_plan(options, open_vectors(keys, "keys"), open_vectors(queries, "queries"), split)
    store = TaskStore(Scratch("amips-task-") if out is None else out)
    if store.is_finished(plan.identity):
        return store.read()
    with connected(options.ray) as cluster, store.making(plan.identity) as unfinished:
        return _write(store, options, plan, cluster) if unfinished else store.read()


def _write(store: TaskStore, options: LabelOptions, plan: TaskPlan, cluster: Cluster | None) -> Task:
    """Write keys, queries, targets and cells, as far as they are not there yet; the manifest last."""
    keys = store.write_keys(plan.keys, plan.identity["keys"])
    if plan.keys.source is not None and is_address(plan.keys.source.name):
        keys = replace(keys, source=plan.keys.source)  # which every node of a cluster can read
    sweep: dict[str, Any] = {name: getattr(options, name) for name in ("memory", "device", "progress")}
    sweep["cluster"] = cluster
    for number, name in enumerate(SPLITS, 1):
        _write_queries(store, name, plan, options.noise, [options.seed, number])
        exact.top_k(keys, store.queries(name), options.k, out=store.top(name), **sweep)
    cells = store.read_cells(keys.n, keys.d)
    if cells is None:
        cells = _make_cells(store, options, plan, keys, cluster)
        store.write_cells(cells)
    cell_targets = options.cell_targets and cells.count > 1
    for name in SPLITS if cell_targets else ():
        x, targets = store.queries(name), store.cell_targets(name)
        exact.cell_maxima(keys, cells.assignment, x, count=cells.count, out=targets, **sweep)
    fields = {
        "n": keys.n,
        "d": keys.d,
        "c": cells.count,
        "keys": plan.identity["keys"],
        "unit_norm": plan.unit_norm,
        "duplicate_queries": plan.duplicates,
        "imbalance": cells.imbalance,
        "quantizer": plan.cells.quantizer if isinstance(plan.cells, partition.Cells) else "",
        "rows": {name: store.queries(name).n for name in SPLITS},
        "options": plan.identity,
    }
    return store.finish(fields, cell_targets)


def _make_cells(
    store: TaskStore, options: LabelOptions, plan: TaskPlan, keys: Vectors, cluster: Cluster | None
) -> partition.Cells:
    if isinstance(plan.cells, partition.Cells):
        return plan.cells
    return partition.make_cells(
        keys,
        plan.cells,
        store.queries("train"),
        store.top_ids("train"),
        strength=plan.strength,
        spherical=options.spherical,
        runs=options.runs,
        seed=options.seed,
        cluster=cluster,
        progress=options.progress,
    )


def _write_queries(store: TaskStore, split: str, plan: TaskPlan, noise: float, seed: list[int]) -> None:
    """Rows u = x / ||x||, and of noisy ones u + noise eps, eps ~ N(0, I), at norm 1 again.

    What the best keys of a query are does not depend on its norm, so nothing that is learned from it may.
    """
    queries, rows = plan.queries, plan.rows[split]
    step = max(1, (1 << 22) // (queries.d * rows.each)) * rows.each
    with store.query_files(split, len(rows.source), queries.d) as files:
        for low in range(files.done, len(rows.source), step):
            ids, noisy = rows.source[low : low + step], rows.noisy[low : low + step]
            distinct, places = np.unique(ids, return_inverse=True)
            x = unit_rows(queries.take(distinct))[0][places]
            if noisy.any():
                # Each block has random numbers of its own, so a restart repeats none and skips none.
                eps = np.random.default_rng([*seed, low // rows.each]).standard_normal(x.shape, np.float32)
                x[noisy] = unit_rows((x + noise * eps)[noisy])[0]
            files.append({"queries": x, "source": ids})
            files.commit()
