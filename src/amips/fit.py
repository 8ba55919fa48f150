"""The shortest way in: keys and queries to a bundle, in one call."""

import math
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

from amips import exact
from amips.errors import AmipsError
from amips.nets import Linear, Model
from amips.search import Point, Searcher, build, measure, save
from amips.search.build import check_labels
from amips.table import table
from amips.task import label
from amips.vectors import Vectors, open_vectors

LABEL_SHARE, TRAIN_SHARE = 0.5, 0.35  # of the time given; the rest is for cells, building and measuring
TOP = 10  # the true top keys whose cells the router learns to find


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
    if minutes <= 0:
        raise AmipsError(f"minutes={minutes}: must be positive")
    try:
        from amips.learn import Recipe, train
    except ModuleNotFoundError as problem:
        if problem.name != "torch":
            raise
        raise AmipsError("amips.fit needs torch; pip install 'amips[train]'") from None
    keys, queries = open_vectors(keys, "keys"), open_vectors(queries, "queries")
    labels = None if ids is None else check_labels(ids, keys.n)

    def say(text: str) -> None:
        if not quiet:
            print(text, flush=True)  # noqa: T201

    c = cells or min(max(2, round(3 * math.sqrt(keys.n))), max(2, keys.n // 8))
    held = max(1, min(1000, queries.n // 5))
    queries = _affordable(keys, queries, 60 * minutes * LABEL_SHARE, seed, say)
    work = Path(f"{out}.work")
    say(f"{keys.n:,} keys, {queries.n:,} queries of dimension {keys.d}; {c:,} cells; labelling ...")
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
    say("training a linear router ...")
    recipe = Recipe(route_top=TOP)
    model = train(
        task,
        Linear(),
        recipe=recipe,
        minutes=minutes * TRAIN_SHARE,
        out=work / "run",
        resume=(work / "run").exists(),
        evaluations=1,
        seed=seed,
        progress=not quiet,
    )
    learned = build(task, model, ids=labels)
    baseline = measure(learned.with_model(None), task.val, [p.probes for p in learned.points])
    chosen = _better(learned, baseline, model, say)
    save(chosen, out)
    shutil.rmtree(work)
    say(f"saved {out}")
    return chosen


def _affordable(keys: Vectors, queries: Vectors, seconds: float, seed: int, say: Any) -> Vectors:
    """As many queries, drawn at random, as can be labelled in the time given."""
    few = min(queries.n, 1024)
    x = queries.rows(0, few)
    started = time.perf_counter()
    exact.top_k(keys, x, TOP)
    rate = few / (time.perf_counter() - started)
    most = int(rate * seconds)
    if queries.n <= most or most < 100:
        return queries
    say(f"using {most:,} of {queries.n:,} queries: labelling them all would take too long")
    drawn = np.sort(np.random.default_rng([seed, 3]).choice(queries.n, most, replace=False))
    return open_vectors(queries.take(drawn), "queries")


def _better(learned: Searcher, baseline: list[Point], model: Model, say: Any) -> Searcher:
    """The learned searcher, unless centroid routing is cheaper at every recall that matters."""
    rows, gained = [], False
    for target in (0.8, 0.9, 0.95, 0.99):
        plain, ours = cost_at(baseline, target), cost_at(learned.points, target)
        if plain is None or ours is None:
            continue
        gained = gained or ours < plain
        full = 2 * learned.n * learned.d
        rows.append([f"{target:.2f}", f"{plain / full:.2%}", f"{ours / full:.2%}", f"{plain / ours:.2f}x"])
    head = ["recall@10", "centroid", "learned", "gain"]
    say("cost of a search as a share of scanning all keys, on held-out queries:\n")
    say(table(head, rows) + "\n")
    if gained:
        return learned
    say("learning does not pay here: the bundle routes by centroid")
    plain_searcher = learned.with_model(None)
    return Searcher(plain_searcher.engine, None, baseline, learned.labels, learned.fingerprint)


def cost_at(points: list[Point], recall: float) -> float | None:
    """FLOPs at which recall@10 is reached, between the two nearest points; None if it is not."""
    reached = next((i for i, p in enumerate(points) if p.recall10 >= recall), None)
    if reached is None:
        return None
    above = points[reached]
    if reached == 0:
        return above.flops
    below = points[reached - 1]
    share = (recall - below.recall10) / (above.recall10 - below.recall10)
    return below.flops + share * (above.flops - below.flops)
