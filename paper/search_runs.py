"""What the studies that search have in common: systems run over budgets, stored, and read back by family."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from amips.bench.derive import Array, Axis, Family, Metric, on_test
from amips.metrics import front
from amips.bench.runner import Bench, Settings
from amips.bench.results import Run, Store
from paper.workspace import Workspace
from amips.bench.systems import System
from amips.task import Task

PLACES = 64  # costs at which two fronts are compared
CLEARLY = 0.01  # a lead of this much counts


def run_systems(
    workspace: Workspace,
    task: Task,
    folder: str,
    systems: Sequence[System],
    ladder: Sequence[int] | None,
    times: bool,
    **options: Any,
) -> tuple[list[Family], list[Run]]:
    """Run systems, or read what is stored of them: their families on the test queries, and the raw runs.

    Args:
        folder: where in the workspace's `out` the runs are stored.
        ladder: budgets; None climbs until nearly everything is found.
        times: take times too.
        options: other `Settings` of the bench.
    """
    bench = bench_of(workspace, task, folder, **options)
    bench.run(systems, folder.split("/")[0], ladder, times)
    runs = bench.store.runs(systems)
    return on_test(runs, task), runs


def bench_of(workspace: Workspace, task: Task, folder: str, **options: Any) -> Bench:
    """What runs systems on a task and stores the runs in `folder` of the workspace's `out`; other `Settings`."""
    about = {"kind": "results", "keys": task.fingerprint, "study": folder, "seed": workspace.seed}
    store = Store(workspace.out / folder, about)
    settings = Settings(
        batch=batch_of(workspace),
        singles=8 if workspace.scale.name == "smoke" else 64,
        rounds=workspace.scale.rounds,
        seed=workspace.seed,
        progress=workspace.progress,
        **options,
    )
    return Bench(task, store, settings, work=workspace.work)


def batch_of(workspace: Workspace) -> int:
    """Queries in the large batch of studies that take times, where there are as many."""
    return 64 if workspace.scale.name == "smoke" else 1024


def none_if_nan(value: float) -> float | None:
    """For files: JSON has no nan."""
    return None if math.isnan(value) else value


def shown(value: float | None, form: str = ".3g") -> str:
    """A number for a table, a dash for none."""
    return "-" if value is None else format(value, form)


def front_of(family: Family, axis: Axis, metric: Metric) -> tuple[Array, Array]:
    """Costs and recalls along the front of a family, both rising; of the runs whose cost is known."""
    cost, recall = family.costs(axis), family.recalls(metric)
    known = ~np.isnan(cost)
    cost, recall = cost[known], recall[known]
    best = front(cost, recall)
    return cost[best], recall[best]


def recall_at(family: Family, axis: Axis, metric: Metric, cost: float) -> float:
    """The recall that a cost buys, read off the front; nan below its cheapest point."""
    costs, recalls = front_of(family, axis, metric)
    return float(np.interp(cost, costs, recalls)) if cost >= costs[0] else math.nan


def lead(base: Family, ours: Family, axis: Axis, metric: Metric) -> float:
    """By how much `ours` finds more than `base` at equal cost, where it does most; below 0 if nowhere.

    Over all costs that both fronts cover; nan if there are none.
    """
    fronts = [front_of(family, axis, metric) for family in (base, ours)]
    low, high = max(cost[0] for cost, _ in fronts), min(cost[-1] for cost, _ in fronts)
    if low > high:
        return math.nan
    places = np.geomspace(low, high, PLACES)
    theirs, own = (np.interp(places, cost, recall) for cost, recall in fronts)
    return float((own - theirs).max())
