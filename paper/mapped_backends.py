"""Backends searched with x, with the key that a KeyNet predicts, and routed by it: the runs of `backends`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from amips import Design
from amips.backends import backend_class
from amips.bench import (
    Axis,
    Chart,
    Family,
    Metric,
    Mode,
    Panel,
    Series,
    System,
    sweep,
)
from amips.task import Task
from paper.ivf import index_ways, mapper
from paper.search_runs import IVF, Searched, Way, batch_of, front_of, search_all
from paper.workspace import Workspace

METRIC: Metric = "recall@10"  # every way scores with x in the end, so deeper recalls tell no more
IVF_TITLE = "FAISS IVF"
CELLS = (4.0,)  # of a backend whose cells can be addressed, in units of sqrt(n)


@dataclass(frozen=True)
class Measurement:
    """Backends, each with x and with mappers: what was measured."""

    task: Task
    searched: Searched[Way]
    batch: int  # queries in the large one

    def chart(self, name: str, title: str, metric: Metric, backend: str) -> Chart:
        """Fronts of one backend over every cost that is known."""
        seconds = self.searched.seconds
        axes: dict[Axis, tuple[str, float]] = {
            "flops": ("FLOPs, fraction of a full scan", 1 / (2 * self.task.n * self.task.d)),
            "scanned": ("keys scanned, fraction of all", 1 / self.task.n),
            "single/1": ("us a query, batch 1, 1 thread", seconds["single/1"] * 1e6),
            "batch/1": ("us a query, large batch, 1 thread", seconds["batch/1"] * 1e6),
        }
        panels = []
        for axis, (label, unit) in axes.items():
            series = []
            for way, family in self.searched.test.items():
                if way.backend == backend and family.knows(axis):
                    cost, recall = front_of(family, axis, metric)
                    x, y = (cost * unit).tolist(), recall.tolist()
                    group = "baseline" if way.query == "original" else "contender"
                    series.append(Series(family.name, x, y, [], "line", group))  # type: ignore[arg-type]
            if series:
                panels.append(Panel("", label, metric, series, log_x=True))
        return Chart(name, f"{title}: {metric}", panels)

    def values(self, metric: Metric) -> dict[str, dict[str, list[float]]]:
        """Recall and seconds at batch 1 of every run, by family."""
        families, second = self.searched.test.values(), self.searched.seconds["single/1"]
        return {
            "recall": {family.name: family.recalls(metric).tolist() for family in families},
            "seconds": {
                family.name: [float(v) * second for v in family.costs("single/1")] for family in families
            },
        }


def backend_ways(
    n: int, backend: str, runs: Mapping[str, str], mapped: Mode = "drop-in-rescored"
) -> dict[Way, list[System]]:
    """A backend with x, with mappers and, where its cells can be addressed, routed by these.

    Args:
        runs: the run directory of the KeyNet of each size.
        mapped: whether what is found for the predicted key is scored again with x.
    """
    design = Design.plain(min(sweep(n, CELLS)[0], n)) if backend_class(backend).routable else None
    ways = {Way("original", backend=backend): [System(design, backend=backend)]}
    for size, run in runs.items():
        system = System(design, backend=backend, run=run, mode=mapped, label=f"KeyNet {size}")
        ways[Way("mapped", size, backend)] = [system]
        if design is not None:
            ways[Way("routed", size, backend)] = [replace(system, mode="cells")]
    return ways


def measure(workspace: Workspace, folder: str, backends: Sequence[str], sizes: Sequence[str]) -> Measurement:
    """Run backends ("ivf" is FAISS's inverted file) with x and with KeyNets of these sizes, or read it back.

    Args:
        folder: where in the workspace's `out` the runs are stored.
    """
    task = workspace.mapping_task()
    runs = {size: mapper(workspace, task, size) for size in sizes}
    ways: dict[Way, list[System]] = {}
    for backend in backends:
        ways |= (
            index_ways(task.n, runs, "drop-in-rescored")
            if backend == IVF
            else backend_ways(task.n, backend, runs)
        )
    searched = search_all(workspace, task, folder, ways, None, times=True)
    return Measurement(task, titled(searched), min(batch_of(workspace), len(task.test)))


def with_x(families: Mapping[Way, Family]) -> dict[Way, tuple[Family, Family]]:
    """Every family with a mapper, beside that of the same backend searched with x: (x, mapper)."""
    return {
        way: (families[Way("original", backend=way.backend)], family)
        for way, family in families.items()
        if way.query != "original"
    }


def method(budgets: dict[str, str], routed: bool) -> str:
    """How it was done; `budgets` says what the budget of each backend is, `routed` whether any has cells."""
    counted = ", ".join(f"of {title} is {budget}" for title, budget in budgets.items())
    return (
        f"The budget {counted}. Drop-in asks the backend for the neighbours of the predicted key, "
        "four times as many as are wanted, and scores these with x. "
        + ("Routed chooses cells with the prediction and scores with x. " if routed else "")
        + "Times are for k = 10, one thread as far as the backend lets itself be limited."
    )


def titled(searched: Searched[Way]) -> Searched[Way]:
    """The same with the inverted file called so."""
    test, val = (
        {way: _titled(way, family) for way, family in by.items()} for by in (searched.test, searched.val)
    )
    return Searched(test, val, searched.seconds)


def _titled(way: Way, family: Family) -> Family:
    """Among backends the inverted file needs a name; the bench gives it none, because nothing else has
    cells."""
    if way.backend != IVF:
        return family
    return replace(family, name=IVF_TITLE if way.query == "original" else f"{IVF_TITLE}: {family.name}")
