"""Shards, measured: recall and cost on held-out queries, and an audit on queries of now."""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from amips.arguments import check_choice, check_recall, check_seed, check_whole
from amips.blas import threads as limit_threads
from amips.errors import AmipsError
from amips.metrics import TOP
from amips.search import (
    SAMPLE,
    Audit,
    Cost,
    Index,
    Point,
    Recall,
    all_found,
    assured_recalls,
    draw_queries,
    mass_bounds,
    point_for,
    recalls,
)
from amips.sharding.merging import Results
from amips.vectors import Floats

if TYPE_CHECKING:
    from amips.sharding.sharded import ShardedIndex

STEPS = 8  # points between the one that misses the recall that is served and the one that reaches it


def search_shard(bundle: Index, x: Floats, k: int, recall: float) -> Results:
    """A shard's k best keys, with this recall or the highest that it has, without a warning."""
    served = max(point.recall_assured(min(k, TOP)) for point in bundle.points)
    return bundle.search(x, k, recall=min(recall, served))


def shard_cost(bundle: Index, x: Floats, recall: float) -> Cost:
    """What a shard costs that is asked for the top 10, as `search_shard` does."""
    served = max(point.recall_assured(TOP) for point in bundle.points)
    return bundle.cost(x, TOP, recall=min(recall, served))


def measure_shards(
    index: "ShardedIndex",
    x: Floats,
    top: NDArray[Any],
    source: NDArray[Any],
    target_recall: float,
    opened: Callable[[int], Index] | None = None,
) -> list[Point]:
    """Recall and cost on queries by bound on the mass, and of asking all shards for everything.

    Every shard is searched once for every query; which of the results count is then a matter of the bound.

    Args:
        x: queries [m, d].
        top: the ids of their true top keys, [m, 10].
        source: of each query, [m]: those of one source are no independent evidence.
        target_recall: about which points lie close together.
        opened: gives the bundle of a shard, which is then let go of; those of the index if None.
    """
    shards = len(index.sizes)
    hit_in = np.zeros((len(x), top.shape[1], shards), np.bool_)
    flops, scanned = np.zeros((len(x), shards)), np.zeros((len(x), shards))
    for shard in range(shards):
        bundle = index.local(shard) if opened is None else opened(shard)
        ids = search_shard(bundle, x, TOP, index.inner_recall)[1]
        hit_in[:, :, shard] = (top[:, :, None] == ids[:, None, :]).any(axis=2)
        cost = shard_cost(bundle, x, index.inner_recall)
        flops[:, shard], scanned[:, shard] = cost.flops, cost.scanned
        del bundle  # before the next one is opened

    def point(min_mass: float) -> Point:
        chosen = index.choose_shards(x, TOP, min_mass=min_mass)
        hits: NDArray[np.bool_] = np.any(hit_in & chosen[:, None, :], axis=2)
        return Point(
            math.ceil(chosen.sum(axis=1).mean()),
            float(hits[:, 0].mean()),
            float(hits.mean()),
            float((scanned * chosen).sum(axis=1).mean() / index.n),
            float(index.router.flops + (flops * chosen).sum(axis=1).mean()),
            min_mass,
            assured=assured_recalls(hits, source),
        )

    points: list[Point] = []
    for bound in mass_bounds():
        points.append(point(bound))
        if all_found(points[-1]) or points[-1].probes == shards:
            break
    reached = next((i for i, p in enumerate(points) if p.recall_assured(TOP) >= target_recall), 0)
    if reached:
        loose, tight = points[reached - 1].min_mass, points[reached].min_mass
        points += [point(loose * (tight / loose) ** (step / STEPS)) for step in range(1, STEPS)]
    every = 2.0 * float(index.sizes.sum()) * index.d
    share = float(index.sizes.sum() / index.n)
    return [*points, Point(shards, 1.0, 1.0, share, every, refine=0, assured=(1.0,) * TOP)]


def audit_shards(
    index: "ShardedIndex",
    queries: Any,
    *,
    sample: int = SAMPLE,
    recall: float | None = None,
    seed: int = 0,
    on_bad: Literal["error", "skip"] = "error",
    threads: int | None = None,
) -> Audit:
    """Search for a sample of queries exactly, in all shards: what recall the index has, and would have.

    Args:
        index: with all its shards in this process.
        queries, sample, recall, seed, on_bad, threads: as of `Index.audit`.
    """
    check_whole("sample", sample, 2)
    check_choice("on_bad", on_bad, ("error", "skip"))
    if index.target_recall is None and recall is None:
        raise AmipsError("nothing says which recall these shards serve: give recall=")
    target = check_recall(index.target_recall if recall is None else recall)
    x, rows, total = draw_queries(queries, index.d, sample, check_seed(seed), on_bad)
    with limit_threads(threads), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a recall that is out of reach: the audit tells
        top = index.search(x, min(TOP, index.n), recall=1.0)[1]
        asked: Any = {"recall": target, "best_effort": True}
        ids = index.search(x, top.shape[1], **asked)[1]
        flops = index.cost(x, top.shape[1], **asked).flops
        promised = point_for(index.points, target, TOP, best_effort=True)
        points = measure_shards(index, x, top, rows, target)
        needed = point_for(points, target, TOP, best_effort=True)
    full = 2.0 * index.n * index.d
    return Audit(
        queries=len(x),
        total=total,
        target=target,
        recall1=Recall.of(recalls(ids, top, 1)),
        recall10=Recall.of(recalls(ids, top, TOP)),
        flops=float(flops.mean()) / full,
        promised_flops=promised.flops / full,
        points=sorted(points, key=lambda point: (point.flops, point.probes)),
        needed=needed,
        full_scan=full,
        index=replace(index, points=points),
    )
