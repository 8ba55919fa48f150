"""From a task and a model to a searcher with measured operating points."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.cells import fingerprint_of
from amips.errors import AmipsError, RunError
from amips.index import FaissIVF, Storage
from amips.lean import SCAN_SHARE, rank_for
from amips.lean import learn as learn_projection
from amips.nets import Model, load_model
from amips.nets.model import DESCRIPTION
from amips.route import check_fits, router_for
from amips.search.bundle import check_place, save
from amips.search.expected import Probed, Routed
from amips.search.points import Point, ladder, shares
from amips.search.searcher import Searcher
from amips.search.spill import checked_second, second_cells
from amips.task import Split, Task
from amips.vectors import open_vectors

NEARLY_ALL, MOST_SCANNED = 0.999, 0.3  # recall@10, or share of the keys, at which a ladder of shares ends


def build(
    task: Task | str | Path,
    model: Model | str | Path | None,
    *,
    out: str | Path | None = None,
    storage: Storage = "flat",
    lean: int | None = None,
    spill: Any = 0.0,
    ids: Any = None,
) -> Searcher:
    """Put the keys of a task into an index that a model routes, and measure it on the val queries.

    Args:
        task: a task or its directory; its cells are the cells of the index.
        model: what `train` returned, a run directory, or None to route by centroid.
        out: where to save the bundle; None keeps it in memory.
        storage: "flat", "sq8", "pq" or "lean": see `FaissIVF`.
        lean: dimensions of "lean" storage; about 0.4 d when not given.
        spill: the share of the keys that are put into a second cell, too (see `amips.search.spill`); or the
            second cell of each key, -1 for none.
        ids: what to return for each key instead of 0..n-1: n whole numbers or n strings.
    """
    task = task if isinstance(task, Task) else Task(task)
    if isinstance(model, (str, Path)):
        if not Path(model).exists():
            raise RunError(f"{model} does not exist")
        if (Path(model) / "config.json").exists() and not (Path(model) / DESCRIPTION).exists():
            raise RunError(f"{model} is an unfinished run; continue it with resume=True (--resume)")
        model = load_model(model)
    router = router_for(model, task.cells.centroids)  # refuses another shape before there is an index
    if model is not None:
        check_fits(model, task.fingerprint, fingerprint_of(task.cells.assignment))
    if out is not None:
        check_place(out)  # before the work, not after it
    labels = None if ids is None else check_labels(ids, task.n)
    second = second_cells(task, router, spill) if np.ndim(spill) == 0 else checked_second(spill, task.cells)
    keys = open_vectors(task.path / "keys.npy")
    projection = None
    if storage == "lean":
        queries = open_vectors(task.path / "train" / "queries.npy")
        projection = learn_projection(keys, queries, rank_for(task.d, SCAN_SHARE) if lean is None else lean)
    elif lean is not None:
        raise AmipsError("lean is for storage='lean' only")
    engine = FaissIVF.build(keys, task.cells.assignment, task.cells.centroids, storage, projection, second)
    made = calibrated(Searcher(engine, model, [], labels, task.fingerprint), task.val)
    if out is not None:
        save(made, out)
    return made


def calibrated(searcher: Searcher, split: Split) -> Searcher:
    """The searcher with a temperature and operating points, found on a split."""
    known = replace(searcher, temperature=routed(searcher, split).temperature)
    return replace(known, points=measure(known, split) + measure_shares(known, split))


def measure(searcher: Searcher, split: Split, probes: list[int] | None = None) -> list[Point]:
    """Recall and cost on a split for a ladder of probes.

    Codes are searched for real, no further than a third of the keys where no ladder is given. Of float32 keys
    the recall follows from which cells are probed.
    """
    seen, points = routed(searcher, split), list[Point]()
    for count in probes or ladder(searcher.c):
        points.append(_point(searcher, split, seen.by_probes(min(count, searcher.c)), count))
        if probes is None and searcher.engine.storage != "flat" and points[-1].scanned >= MOST_SCANNED:
            break
    return points


def measure_shares(searcher: Searcher, split: Split) -> list[Point]:
    """The same for bounds on the share of the top keys, down to where nearly all are found."""
    seen, points = replace(routed(searcher, split), given=searcher.temperature), list[Point]()
    for share in shares():
        points.append(_point(searcher, split, seen.by_share(share), None, share))
        if points[-1].recall10 >= NEARLY_ALL or points[-1].scanned >= MOST_SCANNED:
            break
    return points


def routed(searcher: Searcher, split: Split) -> Routed:
    """The router's scores for the queries of a split, and the cells of their top keys."""
    x, true, engine = np.asarray(split.queries), np.asarray(split.top_ids)[:, :10], searcher.engine
    return Routed.by(searcher.router, x, true, engine.assignment, engine.sizes, second=engine.second)


def _point(
    searcher: Searcher, split: Split, probed: Probed, probes: int | None, share: float | None = None
) -> Point:
    found = probed.found
    if searcher.engine.storage != "flat":
        plain = replace(searcher, labels=None)  # the split knows keys by number, not by label
        true = np.asarray(split.top_ids)[:, :10]
        ids = plain.search(np.asarray(split.queries), 10, probes, share=share)[1]
        found = (true[:, :, None] == ids[:, None, :]).any(axis=2)
    scan = searcher.engine.scan_flops(probed.scanned, 10)
    return Point(
        math.ceil(probed.probed.mean()),
        float(found[:, 0].mean()),
        float(found.mean()),
        float(probed.scanned.mean() / searcher.n),
        float(searcher.router.flops + scan.mean()),
        share or 0.0,
    )


def check_labels(ids: Any, n: int) -> NDArray[Any]:
    """External ids as int64 or strings, one for each key, no two the same."""
    labels = np.asarray(ids)
    if labels.dtype.kind in "iu":
        if labels.max(initial=0) > np.iinfo(np.int64).max:
            raise AmipsError(f"ids: {labels.max()} does not fit in int64")
        labels = labels.astype(np.int64)
    elif labels.dtype.kind in "UO" and all(isinstance(label, str) for label in labels.ravel().tolist()):
        labels = labels.astype(np.str_)
    else:
        raise AmipsError(f"ids of type {labels.dtype}: expected whole numbers or strings")
    if labels.shape != (n,):
        raise AmipsError(f"ids of shape {list(labels.shape)}: expected one for each of the {n} keys")
    if len(np.unique(labels)) < n:
        raise AmipsError("ids: two keys have the same id")
    nothing = -1 if labels.dtype.kind == "i" else ""
    if (labels == nothing).any():
        raise AmipsError(f"ids: {nothing!r} means that there is no result, so no key can have it")
    return labels
