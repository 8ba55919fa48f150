"""FAISS IVF with KeyNet: the index searched with x, with the predicted key (the paper's drop-in), and with
cells chosen by the prediction and keys scored with x.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from amips.bench.derive import Axis, Bootstrap, Family, Metric, on_val, within, yardstick_seconds
from amips.metrics import front
from amips.bench.facts import training_curves
from amips.bench.machine import describe
from amips.bench.runner import Settings
from paper.workspace import Workspace
from paper.mappers import trained
from paper.search_runs import run_systems
from amips.bench.summary import Chart, Panel, Series, Summary, Table
from amips.bench.systems import System, Way, sweep
from amips.bench.verdict import in_words
from amips.task import Task

CELLS = (4.0,)  # of the indexes that mapped queries search, in units of sqrt(n)
SIZES = ("XS", "S", "M", "L")
METRICS: tuple[Metric, ...] = ("recall@0.01%", "recall@0.1%", "recall@0.5%")
TARGETS = (0.8, 0.9, 0.95)
ORIGINAL = "centroid"
TOLD: Metric = "recall@0.1%"  # what the verdict is about,
LEVEL = 0.9  # ... and where


def mapper(workspace: Workspace, task: Task, size: str) -> str:
    """The run directory of a KeyNet of this size, trained on the workspace's task of one cell."""
    return str(trained(workspace, task, "KeyNet", size).directory)


def counts(n: int) -> list[int]:
    """Numbers of cells of the indexes."""
    return sorted({max(2, round(factor * n**0.5)) for factor in CELLS})


def index_systems(n: int, runs: Mapping[str, str], ways: Sequence[Way]) -> list[System]:
    """Inverted files of n keys: with x over the whole sweep of cells, with mappers over `counts`.

    Args:
        runs: what the mapper in each run directory is called.
    """
    systems = [System(cells=c) for c in sorted({*sweep(n), *counts(n)})]
    return systems + [
        System(cells=c, router=run, route=way, label=label)
        for run, label in runs.items()
        for way in ways
        for c in counts(n)
    ]


def run(workspace: Workspace) -> Summary:
    """Original, drop-in and routed, for every size."""
    task = workspace.mapping_task()
    sizes = SIZES if workspace.scale.name != "smoke" else ("XS",)
    runs = {mapper(workspace, task, size): f"KeyNet {size}" for size in sizes}
    systems = index_systems(task.n, runs, ("cells", "drop-in"))
    tested, raw = run_systems(workspace, task, "ivf", systems, None, times=True)
    seconds = yardstick_seconds(raw)
    bootstrap = Bootstrap(np.asarray(task.test.source))
    base = next(family for family in tested if family.role == "baseline")
    scale = workspace.scale
    return Summary(
        name="ivf",
        title="FAISS IVF searched with x and with the predicted key",
        verdict=_verdict(base, tested, on_val(raw, task), bootstrap, task),
        tables=[_table(base, tested, bootstrap, metric) for metric in METRICS],
        charts=[_chart(tested, metric, seconds, task) for metric in METRICS],
        facts=[
            ("keys", f"{task.n:,}"),
            ("training rows", f"{len(task.train):,}, noisy copies included"),
            ("test queries", f"{len(task.test):,}"),
            ("cells", ", ".join(f"{c:,}" for c in counts(task.n))),
        ],
        curves=training_curves(runs),
        method=[
            f"Each KeyNet was trained for {scale.budget} (recipe {scale.recipe!r}). With x, the front is "
            "over indexes of sqrt(n) / 2 to 10 sqrt(n) cells; with a prediction, one index of 4 sqrt(n) "
            "cells was searched.",
            "Drop-in searches and scores with the prediction, as the paper does; the top key may then come "
            "later than first, which Recall@0.1% of n forgives and recall@1 does not. Routed chooses cells "
            "with the prediction and scores with x. Times are for k = 10, one thread.",
        ],
        command=f"amips study ivf --data DATA --scale {scale.name} --out OUT",
        machine=describe(),
        values={
            "recall": {metric: {f.name: f.recalls(metric).tolist() for f in tested} for metric in METRICS},
            "flops": {f.name: f.costs("flops").tolist() for f in tested},
            "seconds": {
                f.name: [float(v) * seconds["single/1"] for v in f.costs("single/1")] for f in tested
            },
        },
    )


def _table(base: Family, tested: list[Family], bootstrap: Bootstrap, metric: Metric) -> Table:
    """How many times fewer FLOPs, probes' keys and time than with x."""
    rows = []
    axes: tuple[Axis, ...] = ("flops", "scanned", "single/1", "batch/1")
    for target in TARGETS:
        for family in tested:
            if family is base:
                continue
            cells = []
            for axis in axes:
                r = bootstrap.ratio(base, family, axis, metric, target)
                text = "not reached" if r is None else f"{r.value:.2f} ({r.low:.2f} to {r.high:.2f})"
                cells.append(text if _has_time(family, axis, metric) else "-")
            rows.append([f"{target:.2f}", family.name, *cells])
    head = ["recall", "searched with", "FLOPs", "keys scanned", "time, batch 1", "time, large batch"]
    note = (
        "How many times less than the unmodified query needs; above 1 is a gain. The paper (figures, no "
        "table): mapped queries dominate in the middle of the budgets on Quora, NQ and HotpotQA, XS and S "
        "most of all; at very small budgets the original query is as good. No times of drop-in where the "
        "recall is of more than the 10 results that were timed."
    )
    return Table(f"{metric[0].upper()}{metric[1:]}: against searching with x", head, rows, note)


def _has_time(family: Family, axis: Axis, metric: Metric) -> bool:
    """Whether a cost belongs to a recall: times are for 10 results, drop-in's deeper recalls need more."""
    if axis in ("flops", "scanned") or not family.name.endswith("drop-in"):
        return True
    return metric == METRICS[0] and within(family.runs[0].n)[0] <= Settings().k


def _chart(tested: list[Family], metric: Metric, seconds: dict[str, float], task: Task) -> Chart:
    panels = []
    labels: dict[Axis, tuple[str, float]] = {
        "single/1": ("us a query, batch 1", 1e6 * seconds["single/1"]),
        "scanned": ("keys scanned, share of all", 1 / task.n),
        "flops": ("FLOPs a query", 1.0),
    }
    for axis, (label, unit) in labels.items():
        series = []
        for family in tested:
            if not _has_time(family, axis, metric):
                continue
            cost, recall = family.costs(axis), family.recalls(metric)
            best = front(cost, recall)
            text = [
                f"{family.runs[i].run.system.name}, {family.runs[i].run.budget} probes: {recall[i]:.4f}"
                for i in best
            ]
            x, y = [float(v) for v in cost[best] * unit], [float(v) for v in recall[best]]
            name = "original" if family.name == ORIGINAL else family.name
            group = "baseline" if family.role == "baseline" else "contender"
            series.append(Series(name, x, y, text, "line", group))  # type: ignore[arg-type]
        panels.append(Panel("", label, metric, series, log_x=True))
    slug = metric.replace("recall@", "recall").replace("%", "").replace(".", "")
    return Chart(f"ivf-{slug}", f"FAISS IVF: {metric} of n", panels)


def _verdict(
    base: Family, tested: list[Family], chosen_from: list[Family], bootstrap: Bootstrap, task: Task
) -> list[str]:
    """For both ways the size that was best on val, against searching with x."""
    sentences = []
    named = {family.name: family for family in tested}
    for way in ("drop-in", "routed"):
        words = (
            "searched with the predicted key (drop-in)" if way == "drop-in" else "routed by the prediction"
        )
        costs = {
            family.name: family.cost_at("flops", TOLD, LEVEL)
            for family in chosen_from
            if family.role == "contender" and family.name.endswith(", drop-in") == (way == "drop-in")
        }
        reached = {name: cost for name, cost in costs.items() if not math.isnan(cost)}
        chosen = min(reached, key=lambda name: reached[name]) if reached else None
        ratio = None if chosen is None else bootstrap.ratio(base, named[chosen], "flops", TOLD, LEVEL)
        if ratio is None and math.isnan(base.cost_at("flops", TOLD, LEVEL)):
            sentences.append(f"Searched with x the index does not reach {TOLD} = {LEVEL:.2f}.")
        elif ratio is None:
            sentences.append(
                f"The index {words} does not reach {TOLD} = {LEVEL:.2f} within the budgets tried."
            )
        else:
            sentences.append(
                f"At {TOLD} = {LEVEL:.2f} on {len(task.test):,} held-out queries, the index {words} "
                f"({chosen}, the best size on val) against the best index searched with x: "
                f"{in_words(ratio, 'FLOPs', 'fewer', 'more')} (ratio of FLOPs {ratio.value:.2f}, 95 % "
                f"interval {ratio.low:.2f} to {ratio.high:.2f})."
            )
    return sentences
