"""Making a task: duplicates out, split by source, noise, exact targets, manifest last.

The order matters: duplicates go first, then the log is split by source query, and only then are noisy copies
made. So no copy of a test query, however noisy, is ever trained on.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips import cells as partition
from amips import exact
from amips.arguments import (
    check_array,
    check_choice,
    check_flag,
    check_number,
    check_seed,
    check_whole,
    refused,
)
from amips.errors import TaskError, VectorError
from amips.resources import plain_resource_errors
from amips.scratch import Scratch
from amips.task.store import TaskStore, check_task_place
from amips.task.task import SPLITS, Task
from amips.vectors import Vectors, first_equal, inspect, open_vectors, unit_rows

# Queries for choosing, and as many for reporting, where there are at least five times as many.
HELD_OUT = 1000
# What the paper does, where it differs from the defaults: noisy copies, and targets for every cell.
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"cells": 1, "query_aware": 0.0, "copies": 4, "cell_targets": True}
}


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
        val, test: how many distinct queries to hold out for choosing and for reporting; 1,000 each if None,
            or a fifth of them where there are fewer than 5,000.
        split: a split of your own instead, one of "train", "val", "test" or "" (unused) for each query. Of
            queries that are equal at norm 1 the first counts.
        k: top keys stored for each query.
        cell_targets: find the top key of every cell too, from which SupportNet and KeyNet learn. Linear and
            max-affine routers do not need it, and with many cells it takes most of the time and space.
        zero: "keep" allows all-zero keys; zero queries are always an error.
        memory: a bound on the working set of exact search, in bytes. (k-means holds up to 256 keys a cell.)
        progress: say on standard error how far it is: a bar on a terminal, a line now and then otherwise.
    """
    if preset is not None:
        check_choice("preset", preset, tuple(PRESETS), error=TaskError)
    chosen = PRESETS.get(preset or "", {})
    check_choice("zero", zero, ("error", "keep"), error=VectorError)
    spherical = check_flag("spherical", spherical, error=VectorError)
    progress = check_flag("progress", progress, error=VectorError)
    runs, seed = check_whole("runs", runs, 1, error=VectorError), check_seed(seed, error=VectorError)
    k, memory = (
        check_whole(name, value, 1, error=VectorError) for name, value in (("k", k), ("memory", memory))
    )
    noise = check_number("noise", noise, least=0, error=VectorError)
    if not isinstance(noisy_splits, tuple | list) or not set(map(str, noisy_splits)) <= set(SPLITS):
        raise refused("noisy_splits", noisy_splits, f"some of {', '.join(SPLITS)}", VectorError)
    if query_aware is not None:
        query_aware = check_number("query_aware", query_aware, least=0, error=VectorError)
    val, test = (
        None if number is None else check_whole(name, number, 1, error=VectorError)
        for name, number in (("val", val), ("test", test))
    )
    if out is not None:
        check_task_place(out)  # before the work, not after it
    keys, queries = open_vectors(keys, "keys"), open_vectors(queries, "queries")
    if keys.d != queries.d:
        raise VectorError(f"keys have dimension {keys.d} but queries have dimension {queries.d}")
    cells = _checked_cells(chosen.get("cells") if cells is None else cells, keys)
    copies = check_whole(
        "copies", chosen.get("copies", 0) if copies is None else copies, 0, error=VectorError
    )
    cell_targets = chosen.get("cell_targets", False) if cell_targets is None else cell_targets
    cell_targets = check_flag("cell_targets", cell_targets, error=VectorError)
    if query_aware is None:
        countable = isinstance(cells, int) and cells > 1 and runs == 1 and spherical
        query_aware = chosen.get("query_aware", partition.STRENGTH) if countable else 0.0
    # Everything that can be wrong with the request is found before the directory is begun.
    count = partition.check(cells, runs, keys)
    if query_aware and (not isinstance(cells, int) or cells == 1 or runs > 1 or not spherical):
        raise VectorError("query_aware is for a number of cells, spherical, one run")
    if cell_targets and isinstance(cells, partition.Cells) and (cells.sizes == 0).any():
        empty = int((cells.sizes == 0).argmax())
        raise VectorError(
            f"cell {empty} holds no keys, so it has no top key; label without cell_targets (--cell-targets)"
        )
    exact.check_memory(memory, keys.d, min(k, keys.n), count)
    own_split = None if split is None else _checked_split(split, queries)
    hint = ', or keep them with zero="keep" (--keep-zero)'
    key_facts, query_facts = inspect(keys, zero, hint), inspect(queries, any_norm=True)
    distinct = np.flatnonzero(first_equal(queries, unit=True) == np.arange(queries.n))
    val, test = (_held_out(number, len(distinct)) for number in (val, test))
    plan = {
        "keys": key_facts.fingerprint,
        "queries": query_facts.fingerprint,
        "cells": cells if isinstance(cells, int) else _fingerprint(cells),
        "spherical": spherical,
        "runs": runs,
        "copies": copies,
        "noise": noise,
        "noisy_splits": list(noisy_splits),
        "val": val,
        "test": test,
        "split": None if own_split is None else hashlib.sha256(own_split.tobytes()).hexdigest(),
        "k": k,
        "cell_targets": cell_targets,
        "seed": seed,
        "memory": memory,  # it decides the block sizes, and so the last bits of the scores
    } | ({"query_aware": float(query_aware)} if query_aware else {})
    rows = (
        _split_randomly(queries, distinct, val, test, seed)
        if own_split is None
        else {name: distinct[own_split[distinct] == name] for name in SPLITS}
    )
    if lacking := [name for name in SPLITS if len(rows[name]) == 0]:
        raise VectorError(f"split: no distinct query is in {lacking[0]!r}")
    store = TaskStore(Scratch("amips-task-") if out is None else out)
    if store.is_finished(plan):
        return store.read()
    with store.making(plan) as unfinished:
        if not unfinished:
            return store.read()
        stored = store.write_keys(keys, key_facts.fingerprint)
        for number, name in enumerate(SPLITS):
            amount = copies if name in noisy_splits else 0
            _write_queries(store, name, queries, np.sort(rows[name]), amount, noise, seed=[seed, 1 + number])
            written = store.queries(name)
            exact.top_k(stored, written, k, memory=memory, out=store.top(name), progress=progress)
        parts = store.read_cells(keys.n, keys.d)
        if parts is None:
            parts = (
                cells
                if isinstance(cells, partition.Cells)
                else partition.make_cells(
                    stored,
                    cells,
                    store.queries("train"),
                    store.top_ids("train"),
                    strength=query_aware,
                    spherical=spherical,
                    runs=runs,
                    seed=seed,
                )
            )
            store.write_cells(parts)
        for name in SPLITS if parts.count > 1 and cell_targets else ():
            exact.cell_maxima(
                stored,
                parts.assignment,
                store.queries(name),
                count=parts.count,
                memory=memory,
                out=store.cell_targets(name),
                progress=progress,
            )
        fields = {
            "n": keys.n,
            "d": keys.d,
            "c": parts.count,
            "keys": key_facts.fingerprint,
            "unit_norm": key_facts.unit_norm and query_facts.unit_norm,
            "duplicate_queries": queries.n - len(distinct),
            "imbalance": parts.imbalance,
            "quantizer": cells.quantizer if isinstance(cells, partition.Cells) else "",
            "rows": {name: store.queries(name).n for name in SPLITS},
            "options": plan,
        }
        return store.finish(fields, parts.count > 1 and cell_targets)


def _checked_cells(cells: Any, keys: Vectors) -> "int | partition.Cells":
    if cells is None:
        return partition.default_count(keys.n)
    if hasattr(cells, "ntotal"):  # a FAISS index
        return partition.from_faiss(cells, keys)
    return cells if isinstance(cells, partition.Cells) else check_whole("cells", cells, 1, error=VectorError)


def _held_out(number: int | None, distinct: int) -> int:
    return max(1, min(HELD_OUT, distinct // 5)) if number is None else number


def _split_randomly(
    queries: Vectors, distinct: NDArray[np.int64], val: int, test: int, seed: int
) -> dict[str, NDArray[np.int64]]:
    if len(distinct) < val + test + 1:
        less = "lower val and test, or " if val + test > 2 else ""
        raise VectorError(
            f"{queries.name}: {len(distinct)} distinct queries are too few to hold out "
            f"{val} for val and {test} for test; {less}bring more queries"
        )
    shuffled = np.random.default_rng([seed, 0]).permutation(distinct)
    return {"val": shuffled[:val], "test": shuffled[val : val + test], "train": shuffled[val + test :]}


def _checked_split(split: Any, queries: Vectors) -> NDArray[np.str_]:
    words = check_array("split", split, error=VectorError)
    if words.shape != (queries.n,) or words.dtype.kind != "U":
        raise VectorError(
            f"split: expected {queries.n} words, one for each query, got {words.dtype} {words.shape}"
        )
    if unknown := set(np.unique(words).tolist()) - {*SPLITS, ""}:
        raise VectorError(f"split: {sorted(unknown)[0]!r} is not one of train, val, test or nothing")
    return words.astype("<U5")


def _write_queries(
    store: TaskStore,
    split: str,
    queries: Vectors,
    source: NDArray[np.int64],
    copies: int,
    noise: float,
    seed: list[int],
) -> None:
    """Each query u = x / ||x||, followed by its noisy copies u + noise eps, eps ~ N(0, I), at norm 1 again.

    What the best keys of a query are does not depend on its norm, so nothing that is learned from it may.
    """
    each = 1 + copies
    step = max(1, (1 << 22) // (queries.d * each))
    with store.query_files(split, len(source) * each, queries.d) as files:
        for low in range(files.done // each, len(source), step):
            ids = source[low : low + step]
            x = np.repeat(unit_rows(queries.take(ids))[0], each, axis=0)
            if copies:
                # Each block has random numbers of its own, so a restart repeats none and skips none.
                eps = np.random.default_rng([*seed, low]).standard_normal(x.shape, np.float32)
                noisy = np.arange(len(x)) % each > 0
                x[noisy] = unit_rows((x + noise * eps)[noisy])[0]
            files.append({"queries": x, "source": np.repeat(ids, each)})
            files.commit()


def _fingerprint(cells: partition.Cells) -> str:
    digest = hashlib.sha256(np.ascontiguousarray(cells.assignment, np.int32).tobytes())
    digest.update(np.ascontiguousarray(cells.centroids, np.float32).tobytes())
    return digest.hexdigest()
