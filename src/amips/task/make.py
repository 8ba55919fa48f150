"""Making a task: duplicates out, split by source, noise, exact targets, manifest last."""

import hashlib
import operator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips import cells as partition
from amips import exact
from amips.errors import TaskError, VectorError
from amips.files import differing, read_json, write_json, write_manifest
from amips.rowfiles import JOURNAL, Columns, RowFiles
from amips.task.store import FORMAT, MANIFEST, SPLITS, Task, task_files
from amips.vectors import Vectors, first_equal, inspect, open_vectors, row_norms

PLAN = "plan.json"


def label(
    keys: Any,
    queries: Any,
    *,
    out: str | Path,
    cells: Any = 1,
    spherical: bool = True,
    runs: int = 1,
    query_aware: float = 0.0,
    copies: int = 1,
    noise: float = 0.02,
    noisy_splits: tuple[str, ...] = ("train",),
    val: int = 1000,
    test: int = 1000,
    split: Any = None,
    k: int = 100,
    cell_targets: bool = True,
    seed: int = 0,
    zero: str = "error",
    memory: int = exact.MEMORY,
    progress: bool = False,
) -> Task:
    """Make a task: deduplicate, split by source query, add noise, compute exact targets.

    Args:
        keys, queries: arrays or files, see `open_vectors`.
        out: the task directory. A finished task with the same inputs is returned as it is; an unfinished
            one is continued; one with other inputs is left alone and is an error.
        cells: the number of cells for k-means, a `Cells`, or a FAISS IVF index to take them from; 1 means
            no partition.
        spherical, runs: see `cells.kmeans`.
        query_aware: move keys towards the training queries that want them before k-means, by so much; see
            `cells.query_aware`. 1.5 is a good value; 0 is plain k-means.
        copies: noisy copies of each query beside the original, in the splits named by `noisy_splits`.
        noise: standard deviation of the Gaussian noise for each coordinate, relative to the query's norm.
            Noisy queries are scaled back to their norm.
        val, test: how many distinct queries to hold out for choosing and for reporting.
        split: a split of your own instead, one of "train", "val", "test" or "" (unused) for each query. Of
            equal queries the first counts.
        k: top keys stored for each query.
        cell_targets: find the top key of every cell too. Linear routers do not need it, and with many
            cells it takes most of the time and space.
        zero: "keep" allows all-zero keys; zero queries are always an error.
        memory: a bound on the working set of exact search, in bytes. (k-means holds up to 256 keys a cell.)
        progress: show progress bars when standard error is a terminal.
    """
    out = Path(out)
    keys, queries = open_vectors(keys, "keys"), open_vectors(queries, "queries")
    if keys.d != queries.d:
        raise VectorError(f"keys have dimension {keys.d} but queries have dimension {queries.d}")
    copies, val, test, k, seed, runs = map(operator.index, (copies, val, test, k, seed, runs))
    if hasattr(cells, "ntotal"):  # a FAISS index
        cells = partition.from_faiss(cells, keys)
    elif not isinstance(cells, partition.Cells):
        cells = operator.index(cells)
    noise, memory = float(noise), int(memory)
    # Everything that can be wrong with the request is found before the directory is begun.
    _check_options(copies, noise, noisy_splits, val, test, k, seed)
    count = partition.check(cells, runs, keys)
    if query_aware and (not isinstance(cells, int) or cells == 1 or runs > 1 or not spherical):
        raise VectorError("query_aware is for a number of cells, spherical, one run")
    if not 0 <= query_aware < np.inf:
        raise VectorError(f"query_aware={query_aware}: expected a finite number, not negative")
    if cell_targets and isinstance(cells, partition.Cells) and (cells.sizes == 0).any():
        empty = int((cells.sizes == 0).argmax())
        raise VectorError(
            f"cell {empty} holds no keys, so it has no top key; label with cell_targets=False "
            "(--no-cell-targets)"
        )
    exact.check_memory(memory, keys.d, min(k, keys.n), count)
    given = None if split is None else _given_split(split, queries)
    hint = ', or keep them with zero="keep" (--keep-zero)'
    key_facts, query_facts = inspect(keys, zero, hint), inspect(queries)
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
        "split": None if given is None else hashlib.sha256(given.tobytes()).hexdigest(),
        "k": k,
        "cell_targets": cell_targets,
        "seed": seed,
        "memory": memory,  # it decides the block sizes, and so the last bits of the scores
    } | ({"query_aware": float(query_aware)} if query_aware else {})
    distinct = np.flatnonzero(first_equal(queries) == np.arange(queries.n))
    held = (
        _split_randomly(queries, distinct, val, test, seed)
        if given is None
        else {name: distinct[given[distinct] == name] for name in SPLITS}
    )
    if lacking := [name for name in SPLITS if len(held[name]) == 0]:
        raise VectorError(f"split: no distinct query is in {lacking[0]!r}")
    if _already_there(out, plan):
        return Task(out)
    stored = _copy_keys(out, keys)
    for number, name in enumerate(SPLITS):
        amount = copies if name in noisy_splits else 0
        _write_queries(out / name, queries, np.sort(held[name]), amount, noise, seed=[seed, 1 + number])
        written = open_vectors(out / name / "queries.npy", f"{name} queries")
        exact.top_k(stored, written, k, memory=memory, out=out / name / "top", progress=progress)
    parts = _cells_on_disk(out, stored, cells, spherical, runs, query_aware, seed)
    for name in SPLITS:
        folder = out / name
        if parts.count > 1 and cell_targets:
            written = open_vectors(folder / "queries.npy", f"{name} queries")
            exact.cell_maxima(
                stored,
                parts.assignment,
                written,
                count=parts.count,
                memory=memory,
                out=folder / "cells",
                progress=progress,
            )
    rows = {split: len(np.load(out / split / "source.npy", mmap_mode="r")) for split in SPLITS}
    fields = {
        "kind": "task",
        "format": FORMAT,
        "n": keys.n,
        "d": keys.d,
        "c": parts.count,
        "keys": key_facts.fingerprint,
        "unit_norm": key_facts.unit_norm and query_facts.unit_norm,
        "duplicate_queries": queries.n - len(distinct),
        "imbalance": parts.imbalance,
        "rows": rows,
        "options": plan,
    }
    write_manifest(out, MANIFEST, fields, task_files(parts.count > 1 and cell_targets))
    for leftover in [*out.rglob(JOURNAL), out / PLAN]:
        leftover.unlink()
    return Task(out)


def _split_randomly(
    queries: Vectors, distinct: NDArray[np.int64], val: int, test: int, seed: int
) -> dict[str, NDArray[np.int64]]:
    if len(distinct) < val + test + 1:
        raise VectorError(
            f"{queries.name}: {len(distinct)} distinct queries are too few to hold out "
            f"{val} for val and {test} for test; lower val and test, or bring more queries"
        )
    shuffled = np.random.default_rng([seed, 0]).permutation(distinct)
    return {"val": shuffled[:val], "test": shuffled[val : val + test], "train": shuffled[val + test :]}


def _given_split(split: Any, queries: Vectors) -> NDArray[np.str_]:
    given = np.asarray(split)
    if given.shape != (queries.n,) or given.dtype.kind != "U":
        raise VectorError(
            f"split: expected {queries.n} words, one for each query, got {given.dtype} {given.shape}"
        )
    if unknown := set(np.unique(given).tolist()) - {*SPLITS, ""}:
        raise VectorError(f"split: {sorted(unknown)[0]!r} is not one of train, val, test or nothing")
    return given.astype("<U5")


def _check_options(
    copies: int, noise: float, noisy_splits: tuple[str, ...], val: int, test: int, k: int, seed: int
) -> None:
    if copies < 0 or noise < 0 or not np.isfinite(noise):
        raise VectorError(f"copies={copies}, noise={noise}: expected finite numbers, neither negative")
    if unknown := set(noisy_splits) - set(SPLITS):
        raise VectorError(f"noisy_splits: {sorted(unknown)} are not among {list(SPLITS)}")
    if val < 1 or test < 1 or k < 1:
        raise VectorError(f"val={val}, test={test}, k={k}: each must be at least 1")
    if seed < 0:
        raise VectorError(f"seed={seed}: it cannot be negative")


def _already_there(out: Path, plan: dict[str, Any]) -> bool:
    """True if the finished task is there; otherwise the directory is ready to be begun or continued."""
    advice = "choose another directory, or remove this one"
    if (out / MANIFEST).exists():
        found = read_json(out / MANIFEST, TaskError).get("options")
        if found != plan:
            other = differing(found or {}, plan)
            raise TaskError(
                f"{out} already holds a task made from other inputs or options ({other}); {advice}"
            )
        return True
    if (out / PLAN).exists():
        if (found := read_json(out / PLAN, TaskError)) != plan:
            other = differing(found, plan)
            raise TaskError(f"{out} holds an unfinished task of other inputs or options ({other}); {advice}")
        return False
    if out.exists() and (not out.is_dir() or any(f.name[0] != "." for f in out.iterdir())):
        raise TaskError(f"{out} exists and is not a task; {advice}")
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / PLAN, plan)
    return False


def _copy_keys(out: Path, keys: Vectors) -> Vectors:
    """Write the keys as float32 .npy, or continue to."""
    size = max(1, (1 << 25) // (4 * keys.d))
    with RowFiles(out, keys.n, {"keys": (np.float32, (keys.d,))}) as files:
        for start in range(files.done, keys.n, size):
            files.append({"keys": keys.rows(start, start + size)})
            files.commit()
    return open_vectors(out / "keys.npy")


def _cells_on_disk(
    out: Path,
    keys: Vectors,
    cells: int | partition.Cells,
    spherical: bool,
    runs: int,
    query_aware: float,
    seed: int,
) -> partition.Cells:
    if (out / "cells.npy").exists():
        return partition.Cells(np.load(out / "cells.npy"), np.load(out / "centroids.npy"))
    if isinstance(cells, int) and query_aware:
        top = np.load(out / "train" / "top" / "ids.npy", mmap_mode="r")[:, : partition.WANTED]
        queries = open_vectors(out / "train" / "queries.npy")
        cells = partition.query_aware(keys, queries, top, cells, strength=query_aware, seed=seed)
    elif isinstance(cells, int):
        cells = partition.kmeans(keys, cells, spherical=spherical, runs=runs, seed=seed)
    np.save(out / "centroids.npy", cells.centroids)
    np.save(out / "cells.partial.npy", cells.assignment.astype(np.int32))
    (out / "cells.partial.npy").rename(out / "cells.npy")
    return cells


def _write_queries(
    folder: Path, queries: Vectors, source: NDArray[np.int64], copies: int, noise: float, seed: list[int]
) -> None:
    """Each query followed by its noisy copies x + noise ||x|| eps, eps ~ N(0, I), at the norm of x."""
    each = 1 + copies
    step = max(1, (1 << 22) // (queries.d * each))
    columns: Columns = {
        "queries": (np.float32, (queries.d,)),
        "source": (np.int64, ()),
    }
    with RowFiles(folder, len(source) * each, columns) as files:
        for low in range(files.done // each, len(source), step):
            ids = source[low : low + step]
            x = np.repeat(queries.take(ids), each, axis=0)
            if copies:
                norms = row_norms(x)
                # Each block has random numbers of its own, so a restart repeats none and skips none.
                eps = np.random.default_rng([*seed, low]).standard_normal(x.shape, np.float32)
                eps[::each] = 0
                x += noise * norms[:, None] * eps
                x *= (norms / row_norms(x))[:, None]
            files.append({"queries": x, "source": np.repeat(ids, each)})
            files.commit()


def _fingerprint(cells: partition.Cells) -> str:
    digest = hashlib.sha256(np.ascontiguousarray(cells.assignment, np.int32).tobytes())
    digest.update(np.ascontiguousarray(cells.centroids, np.float32).tobytes())
    return digest.hexdigest()
