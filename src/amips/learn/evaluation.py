"""How good a network is on a split: losses, transport error, ranks, routing accuracy, keys to scan."""

import numpy as np
from numpy.typing import NDArray

from amips import exact
from amips.learn.on_device import OnDevice
from amips.metrics import SCAN, TARGET_RECALL, TOP, rank_metrics, routing_accuracy, transport_error
from amips.nets import AffineNet, Model, Net
from amips.routers import CentroidRouter, RoutingEstimate, router_for
from amips.task import Split, Task
from amips.vectors import Floats

# Predicted keys of every cell for every query are c backward passes of a SupportNet: key errors with
# many cells are measured on as many of the first queries as give this many (query, cell) pairs.
MOST_PAIRS = 65_536
BLOCK_FLOATS = 1 << 23
EREL = "erel"  # what decides between networks that predict one key; between routers it is SCAN


def evaluate(
    net: Model, task: Task, split: Split, through: Task | None = None, device: str | None = None
) -> dict[str, float]:
    """Metrics on a split. A linear router predicts cells only, so it has those of routing only.

    `score` and `key` are the mean squared errors of support values and of keys (summed over d), `erel` and
    `erel_half` the relative transport error, all averaged over cells. `match`, `recall@k` and `mrr` rank
    the true top key by distance from the predicted key, taken from the best-scored cell. `routing@k` is
    the share of queries whose top key lies in one of the k best-scored cells, and `scan@0.95` the mean share
    of the keys that is scanned for recall@10 0.95 with the stopping rule by mass (both c > 1 only).

    Args:
        through: for a network that predicts one key, the same task with the cells that it is to choose from.
        device: where torch computes scores, keys and ranks, "cuda" for example; None is numpy, on the CPU.
    """
    runtime = net if device is None else OnDevice(net, device)
    if isinstance(net, AffineNet):
        return routing_metrics(runtime.scores(np.asarray(split.queries)), task, split)
    assert isinstance(net, Net)
    assert isinstance(runtime, Net | OnDevice)
    m, c, d = len(split), net.c, net.d
    key_rows = min(m, max(64, MOST_PAIRS // c))
    score_errors, key_errors, transports = [], [], []
    points = np.empty((m, d), np.float32)
    scores = np.empty((m, c), np.float32)
    step = max(1, BLOCK_FLOATS // (max(c, net.architecture.width) * d))
    for low in range(0, m, step):
        rows = slice(low, min(low + step, m))
        x, sigma = np.asarray(split.queries[rows]), np.asarray(split.cell_scores[rows])
        scores[rows] = runtime.scores(x)
        score_errors.append(np.square(scores[rows] - sigma).mean(axis=1))
        if low < key_rows:
            keys = runtime.keys(x)
            targets = task.keys[split.cell_ids[rows]]
            key_errors.append(np.square(keys - targets).sum(axis=2).mean(axis=1))
            transports.append(transport_error(keys, x[:, None, :], targets).mean(axis=1))
        best = scores[rows].argmax(axis=1)[:, None]
        points[rows] = runtime.keys(x, best)[:, 0]
    erel = float(np.concatenate(transports).mean())
    top = np.asarray(split.top_ids[:, 0])
    result = {
        "score": float(np.concatenate(score_errors).mean()),
        "key": float(np.concatenate(key_errors).mean()),
        EREL: erel,
        "erel_half": erel / 2,
        **rank_metrics(exact.ranks(task.keys, points, top, device=device)),
    }
    if through is not None:
        if device is not None:
            return result | routing_metrics(points @ through.cells.centroids.T, through, split)
        router = router_for(net, through.cells.centroids)
        return result | routing_metrics(router.scores(np.asarray(split.queries)), through, split)
    return result | routing_metrics(scores, task, split) if c > 1 else result


def criterion(metrics: dict[str, float]) -> float:
    """What training makes small on val: keys to scan or, of a network that predicts one key, `erel`."""
    return metrics[SCAN if SCAN in metrics else EREL]


def centroid_metrics(task: Task, split: Split) -> dict[str, float]:
    """The same metrics of centroid routing: the line that a router must beat. Empty without cells."""
    if task.c == 1:
        return {}
    return routing_metrics(
        CentroidRouter(task.cells.centroids).scores(np.asarray(split.queries)), task, split
    )


def routing_metrics(scores: Floats, task: Task, split: Split) -> dict[str, float]:
    """`routing@k` and `scan@0.95` of scores [m, c] of the cells of a task."""
    top: NDArray[np.int32] = np.asarray(split.top_ids)[:, :TOP]
    cells = task.cells.assignment[top]
    estimate = RoutingEstimate(scores, cells, task.cells.sizes)
    scanned = estimate.at_mass(estimate.min_mass_for(TARGET_RECALL)).scanned.mean() / task.n
    return {SCAN: float(scanned), **routing_accuracy(scores, cells[:, 0])}


def gain_lines(model: Model) -> list[str]:
    """What training gained on val, beside centroid routing; a second line if it gained nothing."""
    about = model.about
    metric = SCAN if SCAN in about["val"] else EREL

    def figure(name: str) -> str:
        value = about[name][metric]
        return f"{100 * value:.1f} %" if metric == SCAN else f"{value:.3f}"

    centroid = [f"centroid routing {figure('centroid')}"] if metric in about.get("centroid", {}) else []
    figures = [*centroid, f"untrained {figure('start')}", f"trained {figure('val')}"]
    what = f"keys scanned for recall@{TOP} {TARGET_RECALL}" if metric == SCAN else EREL
    lines = [f"{what}, on val: {', '.join(figures)}"]
    if not about["blend"]:
        lines.append("training did not improve on the start: the untrained network is kept")
    elif centroid and about["val"][metric] >= about["centroid"][metric]:
        lines.append("centroid routing scans no more: train with more queries, or build without this model")
    return lines
