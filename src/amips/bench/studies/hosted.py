"""The study `ivf` on another engine: searched with x, with the predicted key, and routed by it."""

from dataclasses import replace

import numpy as np

from amips.bench.derive import Axis, Bootstrap, Metric, front, yardstick_seconds
from amips.bench.hosted import hosted_sentences, hosted_tables
from amips.bench.machine import describe
from amips.bench.studies.ivf import SIZES, mapper
from amips.bench.studies.lab import Lab
from amips.bench.studies.searching import run_systems
from amips.bench.summary import Chart, Panel, Series, Summary
from amips.bench.systems import System, engine_systems, load_models
from amips.engines import engine_class
from amips.engines.finder import Finder

METRIC: Metric = "recall@10"  # every way scores with x in the end, so deeper recalls tell no more


def run(lab: Lab, engine: str) -> Summary:
    """Original, drop-in and routed, for every size."""
    task, finder = lab.mapping_task(), engine_class(engine)
    sizes = SIZES if lab.scale.name != "smoke" else ("XS",)
    runs = [mapper(lab, task, size) for size in sizes]
    systems = engine_systems(task, [engine], load_models(runs))
    labels = dict(zip(runs, (f"KeyNet {size}" for size in sizes), strict=True))
    systems = [_labelled(system, labels) for system in systems]
    name = f"ivf-{engine}"
    tested, raw = run_systems(lab, task, name, systems, None, times=True)
    seconds = yardstick_seconds(raw)
    bootstrap = Bootstrap(np.asarray(task.test.source))
    batch = min(64 if lab.scale.name == "smoke" else 1024, len(task.test))
    axes: dict[Axis, tuple[str, float]] = {
        "flops": ("FLOPs, share of a full scan", 1 / (2 * task.n * task.d)),
        "scanned": ("keys scanned, share of all", 1 / task.n),
        "single/1": ("us a query, batch 1, 1 thread", seconds["single/1"] * 1e6),
        "batch/1": ("us a query, large batch, 1 thread", seconds["batch/1"] * 1e6),
    }
    panels = []
    for axis, (label, unit) in axes.items():
        series = []
        for family in tested:
            if family.told(axis):
                cost, recall = family.costs(axis), family.recalls(METRIC)
                best = front(cost, recall)
                x, y = (cost[best] * unit).tolist(), recall[best].tolist()
                group = "baseline" if family.host is None else "contender"
                series.append(Series(family.name, x, y, [], "line", group))  # type: ignore[arg-type]
        if series:
            panels.append(Panel("", label, METRIC, series, log_x=True))
    return Summary(
        name=name,
        title=f"{finder.title} searched with x and with the predicted key",
        verdict=hosted_sentences(tested, bootstrap, batch),
        tables=hosted_tables(tested, bootstrap, batch),
        charts=[Chart(name, f"{finder.title}: {METRIC}", panels)],
        facts=[("keys", f"{task.n:,}"), ("test queries", f"{len(task.test):,}")],
        method=[_method(finder)],
        command=f"amips study ivf --engine {engine} --data DATA --scale {lab.scale.name} --out OUT",
        machine=describe(),
        values={
            "recall": {family.name: family.recalls(METRIC).tolist() for family in tested},
            "seconds": {
                family.name: [float(v) * seconds["single/1"] for v in family.costs("single/1")]
                for family in tested
            },
        },
    )


def _labelled(system: System, labels: dict[str, str]) -> System:
    return replace(system, label=labels[system.router]) if system.router in labels else system


def _method(finder: type[Finder]) -> str:
    return (
        f"The budget of {finder.title} is {finder.budget}. Drop-in asks the engine for the neighbours of the "
        "predicted key, four times as many as are wanted, and scores these with x. "
        + ("Routed chooses cells with the prediction and scores with x. " if finder.celled else "")
        + "Times are for k = 10, one thread as far as the engine lets itself be limited."
    )
