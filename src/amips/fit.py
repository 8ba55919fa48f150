"""The shortest way in: keys and queries to a bundle, in one call."""

import contextlib
import hashlib
import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

from amips import exact
from amips.errors import AmipsError, TrainingInterrupted, VectorError
from amips.files import read_json, write_json
from amips.nets import Linear, Model
from amips.search import Point, Searcher, build, measure, save
from amips.search.build import check_labels
from amips.search.bundle import check_place
from amips.table import table
from amips.task import label
from amips.vectors import Vectors, inspect, open_vectors

LABEL_SHARE, TRAIN_SHARE = 0.5, 0.35  # of the time given; the rest is for cells, building and measuring
TOP = 10  # the true top keys whose cells the router learns to find
LEAST = 100  # queries, however short the time
CALL = "fit.json"  # in the directory of work in progress: what it is for


def fit(
    keys: Any,
    queries: Any,
    *,
    out: str | Path,
    minutes: float = 5.0,
    cells: int | None = None,
    ids: Any = None,
    seed: int = 0,
    quiet: bool = False,
) -> Searcher:
    """Label, train a linear router, build, and save a bundle, in about the minutes given.

    Queries are held out to measure on, and what was gained over centroid routing is printed. If nothing
    was, the bundle routes by centroid. Work in progress is kept beside `out` and reused when the same
    call is made again.

    Args:
        keys, queries: arrays or files, see `open_vectors`.
        out: the bundle directory.
        minutes: how long it may take, roughly. With little time, part of the queries is used.
        cells: how many cells; about 3 sqrt(n) when not given.
        ids: what to return for each key instead of 0..n-1.
        quiet: print nothing.
    """
    if not 0 < minutes < math.inf:
        raise AmipsError(f"minutes={minutes}: must be positive and finite")
    if seed < 0:
        raise AmipsError(f"seed={seed}: must not be negative")
    check_place(out)  # before the work, not after it
    try:
        from amips.learn import Recipe, train
    except ModuleNotFoundError as problem:
        if problem.name != "torch":
            raise
        raise AmipsError("amips.fit needs torch; pip install 'amips[train]'") from None
    keys, queries = open_vectors(keys, "keys"), open_vectors(queries, "queries")
    if keys.d != queries.d:
        raise VectorError(f"keys have dimension {keys.d} but queries have dimension {queries.d}")
    labels = None if ids is None else check_labels(ids, keys.n)

    def say(text: str) -> None:
        if not quiet:
            print(text, flush=True)  # noqa: T201

    c = min(max(2, round(3 * math.sqrt(keys.n))), max(2, keys.n // 8)) if cells is None else cells
    if c == 1:
        raise AmipsError("cells=1: a linear router needs a task with cells; give 2 or more")
    call = {
        "keys": inspect(keys).fingerprint,
        "queries": inspect(queries).fingerprint,
        "cells": int(c),
        "minutes": float(minutes),
        "seed": int(seed),
    }
    out = Path(out)
    # A folder for each call: the same call continues, another neither waits for it nor destroys it.
    name = hashlib.sha256(json.dumps(call, sort_keys=True).encode()).hexdigest()[:12]
    work = out.with_name(out.name + ".work") / name
    if (work / CALL).exists():
        count = int(read_json(work / CALL, AmipsError)["labelled"])  # measured anew it would differ
    else:
        count = _affordable(keys, queries, 60 * minutes * LABEL_SHARE)
        work.mkdir(parents=True, exist_ok=True)
        write_json(work / CALL, {**call, "labelled": count})
    if count < queries.n:
        say(f"using {count:,} of {queries.n:,} queries: labelling them all would take too long")
        drawn = np.sort(np.random.default_rng([seed, 3]).choice(queries.n, count, replace=False))
        queries = open_vectors(queries.take(drawn), "queries")
    held = max(1, min(1000, queries.n // 5))
    say(f"{keys.n:,} keys, {queries.n:,} queries of dimension {keys.d}; {c:,} cells; labelling ...")
    try:
        task = label(
            keys,
            queries,
            out=work / "task",
            cells=c,
            copies=0,
            val=held,
            test=1,
            k=TOP,
            seed=seed,
            cell_targets=False,
            progress=not quiet,
        )
    except AmipsError:
        if not (work / "task").exists():  # refused before anything was done
            _remove(work)
        raise
    say("training a linear router ...")
    recipe = Recipe(route_top=TOP)
    try:
        model = train(
            task,
            Linear(),
            recipe=recipe,
            minutes=minutes * TRAIN_SHARE,
            out=work / "run",
            resume=(work / "run" / "config.json").exists(),
            evaluations=1,
            seed=seed,
            progress=not quiet,
        )
    except TrainingInterrupted:
        raise TrainingInterrupted(f"stopped; the same call continues with what is in {work}") from None
    learned = build(task, model, ids=labels)
    baseline = measure(learned.with_model(None), task.val, [p.probes for p in learned.points])
    chosen = _better(learned, baseline, model, say)
    save(chosen, out)
    _remove(work)
    say(f"saved {out}")
    return chosen


def _remove(work: Path) -> None:
    """Remove the work of this call, and the folder around it if no other call is at work there."""
    shutil.rmtree(work)
    with contextlib.suppress(OSError):
        work.parent.rmdir()


def _affordable(keys: Vectors, queries: Vectors, seconds: float) -> int:
    """How many queries can be labelled in the time given."""
    few = min(queries.n, 1024)
    x = queries.rows(0, few)
    started = time.perf_counter()
    exact.top_k(keys, x, TOP)
    rate = few / (time.perf_counter() - started)
    most = int(rate * seconds)
    return min(queries.n, max(LEAST, most))


def _better(learned: Searcher, baseline: list[Point], model: Model, say: Any) -> Searcher:
    """The learned searcher, if it is cheaper at most of the recalls that matter."""
    rows, wins = [], 0
    for target in (0.8, 0.9, 0.95, 0.99):
        plain, ours = cost_at(baseline, target), cost_at(learned.points, target)
        if plain is None or ours is None:
            continue
        wins += 1 if ours.flops < plain.flops else -1
        full = 2 * learned.n * learned.d
        shares = [plain.flops / full, ours.flops / full, plain.scanned, ours.scanned]
        rows.append([f"{target:.2f}", *(f"{v:.2%}" for v in shares), f"{plain.flops / ours.flops:.2f}x"])
    head = ["recall@10", "FLOPs: centroid", "learned", "keys scanned: centroid", "learned", "fewer FLOPs"]
    say("cost of a search as a share of scanning all keys, on held-out queries:\n")
    say(table(head, rows) + "\n")
    if wins > 0:
        return learned
    say("learning does not pay here: the bundle routes by centroid")
    plain_searcher = learned.with_model(None)
    return Searcher(plain_searcher.engine, None, baseline, learned.labels, learned.fingerprint)


def cost_at(points: list[Point], recall: float) -> Point | None:
    """The point at which recall@10 is reached, between the two nearest measured ones; None if it is not."""
    reached = next((i for i, p in enumerate(points) if p.recall10 >= recall), None)
    if reached is None:
        return None
    above, below = points[reached], points[max(0, reached - 1)]
    rise = above.recall10 - below.recall10
    share = (recall - below.recall10) / rise if rise > 0 else 1.0

    def between(name: str) -> float:
        low, high = float(getattr(below, name)), float(getattr(above, name))
        return low + share * (high - low)

    return Point(above.probes, between("recall1"), recall, between("scanned"), between("flops"))
