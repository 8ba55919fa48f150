"""When a memory of the log pays: traffic that comes again, split by time.

A log is made of the queries of the data. With probability `share` a row asks a popular query again, drawn by
a Zipf law, with noise as in the paper; every other row asks something new. The last rows are held out. So
the share of held-out traffic that has a near relative in the past is known, and goes from 0 to 1.
"""

import numpy as np
from numpy.typing import NDArray

from amips import KeyNet, label
from amips.nets import Model
from amips.task import Task
from amips.vectors import Floats, Vectors, unit_rows
from paper.workspace import Workspace

SHARES = (0.5, 1.0, 0.0, 0.25, 0.75)  # the one that matters most first
NOISE = 0.02  # the paper's
DEPTH = 64  # top keys that are stored for each row
POPULAR = 8  # one of so many queries of the data is popular, where the scale does not say how many
PORTION = 0.15  # of the scale's training budget


def make_log(
    queries: Vectors, share: float, rows: int, popular: int, seed: int
) -> tuple[Floats, NDArray[np.bool_]]:
    """A log in the order of time [rows, d], at norm 1, and which rows ask a popular query [rows].

    The first so many rows that ask one ask each of them once, the others by a Zipf law: 1 / rank.
    """
    rng = np.random.default_rng([seed, 11])
    order, chance = rng.permutation(queries.n), rng.random(rows)
    again = chance < share
    source = np.empty(rows, np.int64)
    ranks = 1 / np.arange(1, popular + 1)
    asked = rng.choice(popular, rows, p=ranks / ranks.sum())[: int(again.sum())]
    asked[:popular] = rng.permutation(popular)[: len(asked)]
    source[again] = order[asked]
    fresh = order[popular:] if again.any() else order
    source[~again] = fresh[: rows - int(again.sum())]
    log = unit_rows(queries.take(source))[0]
    eps = np.random.default_rng([seed, 12]).standard_normal(log.shape, np.float32)
    log[again] = unit_rows(log[again] + NOISE * eps[again])[0]
    return log, again


def repeats_task(workspace: Workspace, share: float) -> tuple[Task, NDArray[np.bool_]]:
    """The log of a share as a task split by time, and which of its rows ask a popular query."""
    scale, queries = workspace.scale, workspace.queries
    popular = scale.sources or queries.n // POPULAR
    held_out = min(scale.held_out, queries.n // 8)
    log, again = make_log(queries, share, queries.n, popular, workspace.seed)
    out = workspace.work / f"task-repeats-{round(100 * share)}"
    options = {"split": "time", "val": held_out, "test": held_out, "k": DEPTH, "seed": workspace.seed}
    return label(workspace.keys, log, out=out, cells=1, progress=workspace.progress, **options), again


def remembering_network(workspace: Workspace, task: Task) -> Model:
    """A KeyNet of traffic that all comes again: the best case for one."""
    return workspace.model(task, KeyNet("XS"), "repeats", portion=PORTION)
