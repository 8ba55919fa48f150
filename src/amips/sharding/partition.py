"""Which keys are in which shard, and what chooses between shards."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from amips import exact
from amips.builder import Builder
from amips.cells import STRENGTH, Cells, cell_means, default_count
from amips.design import Design, RouterSpec
from amips.extras import needs_extra
from amips.metrics import TARGET_RECALL, TOP
from amips.nets import DEFAULT_MINUTES, KeyNet, Linear, Model, Recipe, SupportNet
from amips.routers import RoutingEstimate, fit_temperature, router_for
from amips.search import ranked
from amips.sharding.grouping import Wants, group_cells
from amips.sharding.router import ShardRouter, same_cells
from amips.task import Split, Task
from amips.vectors import unit_rows

Kind = Literal["centroid", "linear", "support", "key"]
KINDS: tuple[Kind, ...] = get_args(Kind)

SLACK = 0.05  # how much larger than the mean a shard may be
COPIES = 0.2  # of the keys that have a copy in a second shard
SAVED = 1.0  # weight of the log when copies are placed: of cells it is a tenth of that
CELLS_PER_SHARD = 12  # fewer cannot be grouped evenly
GROUPED_QUERIES = 50_000  # of the log that grouping looks at


@dataclass(frozen=True)
class Partition:
    """Which keys are in which shards, and what chooses between them.

    Args:
        assignment: the shard of each key, [n].
        second: the shard of its copy, -1 for none, [n].
        router: chooses shards.
        contacted: shards a query asks on val at the recall asked for, before copies, by kind of router.
        chosen: the kind of the router.
    """

    assignment: NDArray[np.int64]
    second: NDArray[np.int64]
    router: ShardRouter
    contacted: dict[str, float]
    chosen: str = ""

    def estimate(self, split: Split) -> RoutingEstimate:
        """What routing between the shards finds of the top keys of a split."""
        x, top = np.asarray(split.queries), np.asarray(split.top_ids)[:, :TOP]
        sizes = self.sizes
        second = self.second.astype(np.int32) if (self.second >= 0).any() else None
        return RoutingEstimate.by(self.router, x, top, self.assignment, sizes, second=second)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Keys in each shard, copies among them."""
        copies = self.second[self.second >= 0]
        both = np.bincount(self.assignment, minlength=self.router.count)
        return (both + np.bincount(copies, minlength=self.router.count)).astype(np.int64)


def divide(
    task: Task,
    shards: int,
    *,
    kinds: Any = ("centroid", "linear"),
    copies: float = COPIES,
    slack: float = SLACK,
    recall: float = TARGET_RECALL,
    minutes: float = DEFAULT_MINUTES,
    seed: int = 0,
    work: Path | None = None,
    progress: bool = False,
) -> Partition:
    """The shards of a task's keys, with a router chosen on val; arguments as of `shard`."""
    builder = Builder(task, work, minutes=minutes, recall=recall, seed=seed, progress=progress)
    design = _cells_for(task, shards)
    celled = builder.task_of(design)
    cells = celled.cells
    top = np.asarray(task.train.top_ids)[:, :TOP]
    rows = np.arange(len(top))
    if len(rows) > GROUPED_QUERIES:
        rows = np.sort(np.random.default_rng([seed, 41]).choice(len(rows), GROUPED_QUERIES, replace=False))
    wants = Wants(cells.assignment[top[rows]], cells.count)
    group = group_cells(
        wants, cells.centroids, cells.sizes, shards, slack=slack, seed=seed, progress=progress
    )
    assignment = group[cells.assignment]
    none = np.full(task.n, -1, np.int64)
    tried: dict[str, tuple[float, Partition]] = {}
    for kind in kinds:
        router = _router(kind, builder, design, celled, assignment, group, shards)
        partition = Partition(assignment, none, router, {})
        routing = partition.estimate(task.val)
        tried[kind] = (float(routing.at_mass(routing.min_mass_for(recall)).probes.mean()), partition)
    chosen = min(tried, key=lambda kind: tried[kind][0])
    contacted = {kind: asked for kind, (asked, _) in tried.items()}
    best = replace(tried[chosen][1], contacted=contacted, chosen=chosen)
    if not round(copies * task.n):
        return best
    return replace(best, second=_copies(task, best, copies, slack, recall))


def _copies(
    task: Task, partition: Partition, copies: float, slack: float, recall: float
) -> NDArray[np.int64]:
    """The second shard of each key, -1 for none: this fraction at most, and no shard too large by it."""
    shards = partition.router.count
    celled = task.with_cells(_as_cells(task, partition.assignment, shards))
    second, order = ranked(celled, partition.router, recall, saved=SAVED)
    chosen = np.full(task.n, -1, np.int64)
    load = np.bincount(partition.assignment, minlength=shards).astype(np.float64)
    most, remaining = (1 + slack) * (1 + copies) * task.n / shards, round(copies * task.n)
    for key in order.tolist():
        there = second[key]
        if load[there] + 1 <= most:
            chosen[key] = there
            load[there] += 1
            remaining -= 1
            if not remaining:
                break
    return chosen


def _cells_for(task: Task, shards: int) -> Design:
    """Cells to group, and their linear router: the task's own cells where they are query-aware and enough."""
    least = CELLS_PER_SHARD * shards
    if task.query_aware and task.c >= least:
        count, strength = task.c, task.query_aware
    else:
        count, strength = max(shards, min(max(default_count(task.n), least), task.n // 4)), STRENGTH
    # A bias for each cell: how often its keys are wanted at all says something about every query.
    return Design(count, query_aware=strength, router=Linear(bias=True, rank=0), recipe=Recipe())


def _router(
    kind: Kind,
    builder: Builder,
    design: Design,
    celled: Task,
    assignment: NDArray[np.int64],
    group: NDArray[np.int64],
    shards: int,
) -> ShardRouter:
    """A candidate: over cells, or a network with an output for each shard."""
    if kind in ("centroid", "linear"):
        model = builder.model(design) if kind == "linear" else None
        return _fitted(model, celled, group, shards)
    task = _with_targets(celled.with_cells(_as_cells(celled, assignment, shards)), builder.progress)
    spec: RouterSpec = SupportNet() if kind == "support" else KeyNet()
    with needs_extra(f"training a {spec.kind} router", "train", "torch"):
        from amips.learn import train
    run = builder.directory / f"run-shards-{kind}"
    show: Any = "bar" if builder.progress else False
    model = train(
        task, spec, minutes=builder.minutes, out=run, resume="auto", seed=builder.seed, progress=show
    )
    return _fitted(model, task, same_cells(shards), shards)


def _fitted(model: Model | None, task: Task, group: NDArray[np.int64], shards: int) -> ShardRouter:
    """The router of shards over the cells of a task, with the temperature that val says."""
    centroids = task.cells.centroids
    x, top = np.asarray(task.val.queries), np.asarray(task.val.top_ids)[:, :TOP]
    scores = router_for(model, centroids).scores(x)
    temperature = fit_temperature(scores, task.cells.assignment[top])
    return ShardRouter(model, centroids, group, temperature, shards)


def _as_cells(task: Task, assignment: NDArray[np.int64], shards: int) -> Cells:
    """Shards as cells of a task."""
    means = unit_rows(cell_means(task.key_vectors, assignment, shards))[0]
    return Cells(assignment.astype(np.int32), means)


def _with_targets(task: Task, progress: bool) -> Task:
    """The task with the top key of every shard for each query of train and val, which networks learn from."""

    def targets(split: Split) -> Split:
        assignment, vectors = task.cells.assignment, split.vectors
        scores, ids = exact.cell_maxima(
            task.key_vectors, assignment, vectors, count=task.c, progress=progress
        )
        return replace(split, cell_scores=scores, cell_ids=ids.astype(np.int32))

    return replace(task, train=targets(task.train), val=targets(task.val))
