"""What the experiments that search have in common: ways to search, run over budgets, stored and read back."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from amips.bench import (
    Array,
    Axis,
    Bootstrap,
    Family,
    Metric,
    ResultsStore,
    Runner,
    Settings,
    System,
    on_test,
    on_val,
    yardstick_seconds,
)
from amips.metrics import front
from amips.task import Task
from paper.workspace import Workspace

PLACES = 64  # costs at which two fronts are compared
CLEARLY = 0.01  # a lead of this much counts
IVF = "ivf"  # FAISS's inverted file, as amips makes it of a design

Query = Literal["original", "mapped", "routed"]
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Way:
    """One way to search an index: what a series of an experiment is.

    Args:
        query: "original" searches with x, "mapped" with the predicted key in its place, "routed" with x in
            the cells that the prediction chooses.
        size: of the KeyNet that predicts; "" where none does.
        backend: whose index it is, one of `amips.backends` or "ivf".
    """

    query: Query
    size: str = ""
    backend: str = IVF


ORIGINAL = Way("original")


@dataclass(frozen=True)
class Searched(Generic[K]):
    """What was measured of each way: on the test queries, for reporting, and on val, for choosing."""

    test: dict[K, Family]
    val: dict[K, Family]
    seconds: dict[str, float]  # of the yardstick, by batch/threads, nan without times, which are in its units


def search_all(
    workspace: Workspace,
    task: Task,
    folder: str,
    ways: Mapping[K, Sequence[System]],
    ladder: Sequence[int] | None,
    times: bool,
    **options: Any,
) -> Searched[K]:
    """Run the systems of every way, or read what is stored of them.

    Args:
        folder: where in the workspace's `out` the runs are stored.
        ways: the systems that make one front each: they differ in the number of cells alone.
        ladder: budgets; None climbs until nearly everything is found.
        times: measure times too, unless the workspace takes none.
        options: other `Settings` of the bench.
    """
    runner = runner_of(workspace, task, folder, **options)
    systems = [system for members in ways.values() for system in members]
    runner.run(systems, folder.split("/")[0], ladder, times and workspace.times)
    runs = runner.store.runs(systems)
    way_of = {system: way for way, members in ways.items() for system in members}
    test, val = (
        {way_of[family.runs[0].run.system]: family for family in families}
        for families in (on_test(runs, task), on_val(runs, task))
    )
    return Searched(
        {way: test[way] for way in ways},
        {way: val[way] for way in ways},
        {"single/1": math.nan, "batch/1": math.nan, **yardstick_seconds(runs)},
    )


def runner_of(workspace: Workspace, task: Task, folder: str, **options: Any) -> Runner:
    """What runs systems on a task and stores the runs in `folder` of the workspace's `out`; other `Settings`.

    Its builder keeps cells and routers with the workspace, so that experiments share them.
    """
    about = {"kind": "results", "keys": task.fingerprint, "experiment": folder, "seed": workspace.seed}
    store = ResultsStore(workspace.results(folder), about)
    options = {"minutes": workspace.scale.router_minutes, **options}
    replica = workspace.scale.name == "replica"  # runs twice, once for each split: times are taken twice,
    if replica:
        options["all_threads"] = False  # ... and on one thread
    settings = Settings(
        batch=batch_of(workspace),
        singles=8 if workspace.scale.name in ("smoke", "replica") else 64,
        rounds=2 if replica else workspace.scale.rounds,
        seed=workspace.seed,
        progress=workspace.progress,
        **options,
    )
    return Runner(task, store, settings, work=workspace.work)


def batch_of(workspace: Workspace) -> int:
    """Queries in the large batch of experiments that measure times, where there are as many."""
    return {"smoke": 64, "replica": 256}.get(workspace.scale.name, 1024)


def none_if_nan(value: float) -> float | None:
    """For files: JSON has no nan."""
    return None if math.isnan(value) else value


def shown(value: float | None, form: str = ".3g") -> str:
    """A number for a table, a dash for none."""
    return "-" if value is None else format(value, form)


def front_of(family: Family, axis: Axis, metric: Metric) -> tuple[Array, Array]:
    """Costs and recalls along the front of a family, both rising; of the runs whose cost is known."""
    cost, recall = family.costs(axis, metric), family.recalls(metric)
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
    return lead_of_fronts(front_of(base, axis, metric), front_of(ours, axis, metric))


@dataclass(frozen=True)
class Lead:
    """By how much one way finds more than another at a cost that was chosen on val, with its 95 % interval.

    Args:
        draws: of the difference, over resampled test queries.
    """

    value: float
    draws: Array

    @property
    def low(self) -> float:
        """Of the interval."""
        return float(np.quantile(self.draws, 0.025))

    @property
    def high(self) -> float:
        """Of the interval."""
        return float(np.quantile(self.draws, 0.975))

    def text(self) -> str:
        """In points of recall, with the interval."""
        return f"{points(self.value)} ({100 * self.low:+.1f} to {100 * self.high:+.1f})"


def lead_chosen_on_val(
    base: Mapping[str, Family], ours: Mapping[str, Family], axis: Axis, metric: Metric, bootstrap: Bootstrap
) -> Lead | None:
    """The lead on test at the cost at which it is largest on val; None where no cost is in common.

    The largest of many leads on test would be one even where there is none.

    Args:
        base, ours: the families on "val" and on "test".
    """
    places, leads = leads_over_costs(*(front_of(one["val"], axis, metric) for one in (base, ours)))
    if not len(places):
        return None
    place = float(places[int(leads.argmax())])
    known, drawn = [], []
    for one in (base, ours):
        cost = one["test"].costs(axis, metric)
        there = np.flatnonzero(~np.isnan(cost))
        if not len(there):
            return None
        recalls = [one["test"].recalls(metric)[there], *bootstrap.recalls(one["test"], metric)[:, there]]
        read = [_read_off(cost[there], recall, place) for recall in recalls]
        known.append(read[0])
        drawn.append(np.array(read[1:]))
    return Lead(known[1] - known[0], drawn[1] - drawn[0])


def _read_off(cost: Array, recall: Array, place: float) -> float:
    best = front(cost, recall)
    return float(np.interp(place, cost[best], recall[best]))


def lead_of_fronts(base: tuple[Array, Array], ours: tuple[Array, Array]) -> float:
    """The same for fronts as (costs, recalls), both rising."""
    leads = leads_over_costs(base, ours)[1]
    return float(leads.max()) if len(leads) else math.nan


def leads_over_costs(base: tuple[Array, Array], ours: tuple[Array, Array]) -> tuple[Array, Array]:
    """Costs that both fronts cover, and the leads there; none where they have none in common."""
    nothing = np.zeros(0), np.zeros(0)
    if not all(len(cost) for cost, _ in (base, ours)):  # no time is sound on a machine that was held up
        return nothing
    low, high = max(cost[0] for cost, _ in (base, ours)), min(cost[-1] for cost, _ in (base, ours))
    if low > high:
        return nothing
    places = np.geomspace(low, high, PLACES)
    theirs, own = (np.interp(places, cost, recall) for cost, recall in (base, ours))
    return places, own - theirs


def points(value: float) -> str:
    """A lead in words, in points of recall."""
    return "no cost in common" if math.isnan(value) else f"{100 * value:+.1f} points"
