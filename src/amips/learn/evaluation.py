"""How good a network is on a split: losses, transport error, ranks, routing accuracy."""

import numpy as np

from amips import exact
from amips.metrics import rank_metrics, routing_accuracy, transport_error
from amips.nets import AffineNet, Model, Net
from amips.task import Split, Task
from amips.vectors import Floats

# Predicted keys of every cell for every query are c backward passes of a SupportNet: key errors with
# many cells are measured on as many of the first queries as give this many (query, cell) pairs.
MOST_PAIRS = 65_536
BLOCK_FLOATS = 1 << 23


def evaluate(net: Model, task: Task, split: Split) -> dict[str, float]:
    """Metrics on a split. A linear router predicts cells only, so it has routing accuracy only.

    `score` and `key` are the mean squared errors of support values and of keys (summed over d), `erel` and
    `erel_half` the relative transport error, all averaged over cells. `match`, `recall@k` and `mrr` rank
    the true top key by distance from the predicted key, taken from the best-scored cell. `routing@k` is
    the share of queries whose top key lies in one of the k best-scored cells (c > 1 only).
    """
    if isinstance(net, AffineNet):
        return _routing(net.scores(np.asarray(split.queries)), task, split)
    assert isinstance(net, Net)
    m, c, d = len(split), net.c, net.d
    key_rows = min(m, max(64, MOST_PAIRS // c))
    score_errors, key_errors, transports = [], [], []
    points = np.empty((m, d), np.float32)
    scores = np.empty((m, c), np.float32)
    step = max(1, BLOCK_FLOATS // (max(c, net.architecture.width) * d))
    for low in range(0, m, step):
        rows = slice(low, min(low + step, m))
        x, sigma = np.asarray(split.queries[rows]), np.asarray(split.cell_scores[rows])
        scores[rows] = net.scores(x)
        score_errors.append(np.square(scores[rows] - sigma).mean(axis=1))
        if low < key_rows:
            keys = net.keys(x)
            targets = task.keys[split.cell_ids[rows]]
            key_errors.append(np.square(keys - targets).sum(axis=2).mean(axis=1))
            transports.append(transport_error(keys, x[:, None, :], targets).mean(axis=1))
        best = scores[rows].argmax(axis=1)[:, None]
        points[rows] = net.keys(x, best)[:, 0]
    erel = float(np.concatenate(transports).mean())
    top = np.asarray(split.top_ids[:, 0])
    result = {
        "score": float(np.concatenate(score_errors).mean()),
        "key": float(np.concatenate(key_errors).mean()),
        "erel": erel,
        "erel_half": erel / 2,
        **rank_metrics(exact.ranks(task.keys, points, top)),
    }
    return result | _routing(scores, task, split) if c > 1 else result


def _routing(scores: Floats, task: Task, split: Split) -> dict[str, float]:
    return routing_accuracy(scores, task.cells.assignment[np.asarray(split.top_ids[:, 0])])
