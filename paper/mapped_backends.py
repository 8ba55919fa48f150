"""Engines searched with x, with the key that a KeyNet predicts, and routed by it: what the study `ivf` does
on another engine, and `backends` on several.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from amips.bench.derive import Axis, Bootstrap, Family, Metric, on_val, yardstick_seconds
from amips.bench.backend_tables import hosted_sentences, hosted_tables, silent_sentences
from amips.bench.machine import describe
from paper.ivf import SIZES, index_systems, mapper
from paper.workspace import Workspace
from paper.search_runs import batch_of, front_of, run_systems
from amips.bench.summary import Chart, Panel, Series, Summary
from amips.bench.systems import System, engine_systems, load_models
from amips.backends import backend_class
from amips.task import Task

METRIC: Metric = "recall@10"  # every way scores with x in the end, so deeper recalls tell no more
IVF, IVF_TITLE = "ivf", "FAISS IVF"


@dataclass(frozen=True)
class Hosted:
    """Engines, each with x and with mappers: what was measured."""

    task: Task
    tested: list[Family]
    held: list[Family]  # the same on val, for choosing
    seconds: dict[str, float]  # of the yardstick, by batch/threads
    batch: int  # queries in the large one

    @property
    def pairs(self) -> list[tuple[Family, Family]]:
        """(an engine searched with x, the same engine with a mapper)."""
        return by_engine(self.tested)

    def chart(self, name: str, title: str, metric: Metric, families: Sequence[Family]) -> Chart:
        """Fronts over every cost that is told."""
        axes: dict[Axis, tuple[str, float]] = {
            "flops": ("FLOPs, share of a full scan", 1 / (2 * self.task.n * self.task.d)),
            "scanned": ("keys scanned, share of all", 1 / self.task.n),
            "single/1": ("us a query, batch 1, 1 thread", self.seconds["single/1"] * 1e6),
            "batch/1": ("us a query, large batch, 1 thread", self.seconds["batch/1"] * 1e6),
        }
        panels = []
        for axis, (label, unit) in axes.items():
            series = []
            for family in families:
                if family.told(axis):
                    cost, recall = front_of(family, axis, metric)
                    group = "contender" if family.role == "contender" else "baseline"
                    x, y = (cost * unit).tolist(), recall.tolist()
                    series.append(Series(family.name, x, y, [], "line", group))  # type: ignore[arg-type]
            if series:
                panels.append(Panel("", label, metric, series, log_x=True))
        return Chart(name, f"{title}: {metric}", panels)

    def values(self, metric: Metric) -> dict[str, dict[str, list[float]]]:
        """Recall and seconds at batch 1 of every run, by family."""
        return {
            "recall": {family.name: family.recalls(metric).tolist() for family in self.tested},
            "seconds": {
                family.name: [float(v) * self.seconds["single/1"] for v in family.costs("single/1")]
                for family in self.tested
            },
        }


def measure(workspace: Workspace, folder: str, engines: Sequence[str], sizes: Sequence[str]) -> Hosted:
    """Run engines ("ivf" is FAISS's inverted file) with x and with KeyNets of these sizes, or read it back.

    Args:
        folder: where in the workspace's `out` the runs are stored.
    """
    task = workspace.mapping_task()
    labels = {mapper(workspace, task, size): f"KeyNet {size}" for size in sizes}
    systems = index_systems(task.n, labels, ("cells", "drop-in-rescored")) if IVF in engines else []
    others = engine_systems(task, [name for name in engines if name != IVF], load_models([*labels]))
    systems += [_labelled(system, labels) for system in others]
    tested, raw = run_systems(workspace, task, folder, systems, None, times=True)
    batch = min(batch_of(workspace), len(task.test))
    named, held = ([_titled(family) for family in found] for found in (tested, on_val(raw, task)))
    return Hosted(task, named, held, yardstick_seconds(raw), batch)


def run(workspace: Workspace, engine: str) -> Summary:
    """Original, drop-in and routed, for every size."""
    finder = backend_class(engine)
    name = f"ivf-{engine}"
    found = measure(workspace, name, [engine], SIZES if workspace.scale.name != "smoke" else ("XS",))
    bootstrap = Bootstrap(np.asarray(found.task.test.source))
    return Summary(
        name=name,
        title=f"{finder.title} searched with x and with the predicted key",
        verdict=[*hosted_sentences(found.pairs, bootstrap, found.batch), *silent_sentences(found.pairs)],
        tables=hosted_tables(found.pairs, bootstrap, found.batch),
        charts=[found.chart(name, finder.title, METRIC, found.tested)],
        facts=[("keys", f"{found.task.n:,}"), ("test queries", f"{len(found.task.test):,}")],
        method=[method({finder.title: finder.budget}, finder.celled)],
        command=f"amips study ivf --engine {engine} --data DATA --scale {workspace.scale.name} --out OUT",
        machine=describe(),
        values=found.values(METRIC),
    )


def by_engine(families: Sequence[Family]) -> list[tuple[Family, Family]]:
    """Every family with a mapper beside that of the same engine searched with x."""
    with_x = {engine_of(family): family for family in families if family.role != "contender"}
    return [(with_x[engine_of(family)], family) for family in families if family.role == "contender"]


def engine_of(family: Family) -> str:
    """The name of its engine."""
    return family.runs[0].run.system.engine


def method(budgets: dict[str, str], routed: bool) -> str:
    """How it was done; `budgets` says what the budget of each engine is, `routed` whether any has cells."""
    counted = ", ".join(f"of {title} is {budget}" for title, budget in budgets.items())
    return (
        f"The budget {counted}. Drop-in asks the engine for the neighbours of the predicted key, "
        "four times as many as are wanted, and scores these with x. "
        + ("Routed chooses cells with the prediction and scores with x. " if routed else "")
        + "Times are for k = 10, one thread as far as the engine lets itself be limited."
    )


def _labelled(system: System, labels: dict[str, str]) -> System:
    return replace(system, label=labels[system.router]) if system.router in labels else system


def _titled(family: Family) -> Family:
    """Elsewhere the inverted file needs no name: nothing else has cells."""
    if engine_of(family) != IVF:
        return family
    return replace(family, name=IVF_TITLE if family.role == "baseline" else f"{IVF_TITLE}: {family.name}")
