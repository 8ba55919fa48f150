"""What is said of stored runs: the verdict, tables, charts."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from amips.bench.backend_tables import (
    gain_tables,
    pairs,
    ratio_head,
    ratio_row,
    silent_sentences,
)
from amips.bench.derive import (
    AXES,
    SECOND,
    Axis,
    Bootstrap,
    Family,
    Measured,
    Metric,
    baseline,
    on_test,
    on_val,
    second_baseline,
    within,
    yardstick_seconds,
)
from amips.bench.facts import facts, top_scores, training_curves
from amips.bench.machine import describe_machine
from amips.bench.results import Run
from amips.bench.runner import Runner, Settings
from amips.bench.searchers import spent
from amips.bench.summary import Chart, Panel, Series, Summary, Table
from amips.bench.systems import System
from amips.bench.verdict import TARGETS, best_system, gain_sentences, give_verdict
from amips.design import RouterSpec
from amips.metrics import front
from amips.resources import threads
from amips.task import Task

METRICS: tuple[Metric, ...] = ("recall@1", "recall@10", "recall@0.01%", "recall@0.1%", "recall@0.5%", "mrr")


def summarize(runner: Runner, systems: list[System]) -> Summary:
    """Everything that is said of stored runs; the runs of other systems in the store are left out."""
    task, settings, runs = runner.task, runner.settings, runner.store.runs(systems)
    tested = on_test(runs, task)
    seconds = yardstick_seconds(runs)
    batch = min(settings.batch, len(task.test))
    bootstrap = Bootstrap(np.asarray(task.test.source), seed=settings.seed)
    val = on_val(runs, task)
    compared = pairs(tested)
    more = [*gain_sentences(compared, bootstrap, batch), *silent_sentences(compared)]
    verdict = give_verdict(tested, val, bootstrap, len(task.test), batch, seconds, more)
    best = best_system(val)
    values = {
        "contender": verdict.contender,
        "best": None if best is None else best.to_json(),
        "costs": _costs(tested, seconds, task),
        "points": [_point(run, family.name, seconds) for family in tested for run in family.runs],
    }
    return Summary(
        name="bench",
        title=f"Learned search on {task.n:,} keys",
        verdict=verdict.sentences,
        tables=[
            *_ratio_tables(tested, bootstrap, batch),
            *gain_tables(compared, bootstrap, batch),
            _cost_table(tested, seconds, task),
            _point_table(tested, seconds, task),
        ],
        charts=[*_charts(tested, seconds, task), *top_scores(task)],
        facts=facts(task),
        curves=training_curves(_trained(runner, systems)),
        method=_method(task, settings, batch, runs),
        machine=describe_machine(),
        values=values,
    )


def _trained(runner: Runner, systems: list[System]) -> dict[str, str]:
    """Directories of the runs that were compared, and what they are called."""
    runs = {system.run: system.label or Path(system.run).name for system in systems if system.run}
    for system in systems:
        design = system.design
        if design is not None and design.recipe is not None and isinstance(design.router, RouterSpec):
            label = f"{system.label or design.router.kind}, {system.cells:,} cells"
            runs.setdefault(str(runner.builder.run_directory(design)), label)
    return runs


def _point(measured: Measured, family: str, seconds: dict[str, float]) -> dict[str, Any]:
    """One run in plain figures."""
    run = measured.run
    point: dict[str, Any] = {"family": family, "system": run.system.name, "budget": run.budget}
    point |= {metric: float(measured.metric(metric).mean()) for metric in METRICS}
    if measured.cost("flops") is not None:
        scan = float(run.scan[measured.rows].mean())
        point |= {"network": run.network, "coarse": run.coarse, "scan": scan}
    for axis in AXES:
        cost = measured.cost(axis)
        if cost is not None:
            query = axis in ("flops", "scanned")
            point[axis] = float(cost.mean()) if query else float(np.median(cost)) * seconds[axis]
            if not query:
                point[f"{axis} spread"] = [float(v) * seconds[axis] for v in np.quantile(cost, [0.25, 0.75])]
    return point


def _costs(tested: list[Family], seconds: dict[str, float], task: Task) -> list[dict[str, Any]]:
    """Cost at recall for each family, target and axis; FLOPs and keys as shares of all, times in seconds."""
    rows = []
    units: dict[str, float] = {**seconds, "flops": 1 / (2 * task.n * task.d), "scanned": 1 / task.n}
    for metric, target in TARGETS:
        for family in tested:
            costs = {axis: family.cost_at(axis, metric, target) * units.get(axis, math.nan) for axis in AXES}
            known: dict[str, Any] = {
                axis: (None if math.isnan(cost) else cost) for axis, cost in costs.items()
            }
            rows.append({"metric": metric, "recall": target, "family": family.name, **known})
    return rows


def _cost_table(tested: list[Family], seconds: dict[str, float], task: Task) -> Table:
    rows = []
    for cost in _costs(tested, seconds, task):
        family = next(family for family in tested if family.name == cost["family"])
        unknown = "not reached" if family.knows("flops") else "not told"
        fractions = [cost["flops"], cost["scanned"]]
        times = [cost[axis] for axis in ("single/1", "single/all", "batch/1", "batch/all")]
        rows.append(
            [
                f"{cost['metric']} {cost['recall']:.2f}",
                cost["family"],
                "yes" if family.learns else "no",
                *(unknown if v is None else f"{v:.2%}" for v in fractions),
                *("-" if v is None else f"{v * 1e6:,.0f}" for v in times),
            ]
        )
    head = ["recall", "searched by", "learns from the log", "FLOPs, share of a full scan", "keys scanned"]
    head += ["us: batch 1, 1 thread", "batch 1, all", "large batch, 1 thread", "large batch, all"]
    note = (
        "Each the best over all its numbers of cells and efforts; between measured points, interpolated. "
        "What learns from the log was given all training queries; the others know only the keys."
    )
    return Table("What a recall costs", head, rows, note)


def _ratio_tables(tested: list[Family], bootstrap: Bootstrap, batch: int) -> list[Table]:
    """Every contender against plain IVF, and against IVF with FastScan codes, where these were run."""
    ours = [family for family in tested if family.role == "contender" and family.host is None]
    bases = {
        "Against the best FAISS IVF": (baseline(tested), "the best centroid routing"),
        "Against FAISS IVF with FastScan codes": (second_baseline(tested), SECOND),
    }
    tables = []
    for title, (base, words) in bases.items():
        if base is None:
            continue
        rows = [ratio_row(bootstrap, base, one, metric, at) for metric, at in TARGETS for one in ours]
        note = (
            f"How many times less than {words}: above 1 is a gain. In brackets the 95 % bootstrap interval "
            "over queries, for times over rounds too, where it is known; - where one does not reach the "
            "recall; not taken where one thread is all there is."
        )
        tables.append(Table(title, ratio_head("searched by", batch), rows, note))
    return tables


def _point_table(tested: list[Family], seconds: dict[str, float], task: Task) -> Table:
    """The points of each family's FLOPs front, or of its front of time if FLOPs are not told."""
    rows = []
    for family in tested:
        axis: Axis = "flops" if family.knows("flops") else "single/1"
        for i in front(family.costs(axis), family.recalls("recall@10")):
            run = family.runs[int(i)].run
            point = _point(family.runs[int(i)], family.name, seconds)
            times = [point.get(axis) for axis in ("single/1", "batch/1")]
            rows.append(
                [
                    family.name,
                    f"{run.system.cells:,}" if run.system.routed and run.system.cells else "-",
                    spent(run.system, run.budget),
                    *(f"{point[m]:.3f}" for m in ("recall@1", "recall@10", "recall@0.1%", "mrr")),
                    *(f"{point[p] / 1e6:.2f}" if p in point else "-" for p in ("network", "coarse", "scan")),
                    f"{point['scanned'] / task.n:.2%}" if "scanned" in point else "-",
                    *("-" if t is None else f"{t * 1e6:,.0f}" for t in times),
                ]
            )
    head = ["searched by", "cells", "effort", "recall@1", "recall@10", "recall@0.1%", "MRR"]
    head += ["MFLOP: network", "coarse", "scan", "keys scanned", "us, batch 1", "us, large batch"]
    return Table("The best points of each", head, rows, "One thread.")


def _charts(tested: list[Family], seconds: dict[str, float], task: Task) -> list[Chart]:
    """Recall@10 against each of the axes, then recall@1."""
    charts = []
    groups: list[tuple[str, str, tuple[Axis, ...]]] = [
        ("cost", "against FLOPs, keys scanned and time", ("flops", "scanned", "single/1")),
        ("time", "against time", ("single/1", "single/all", "batch/1", "batch/all")),
    ]
    metrics: tuple[Metric, ...] = ("recall@10", "recall@1")
    for metric in metrics:
        for name, words, axes in groups:
            panels = [_panel(tested, axis, metric, seconds, task) for axis in axes]
            panels = [panel for panel in panels if panel.series]
            if panels:
                slug = f"{metric.replace('@', '')}-{name}"
                caption = "The front of each way to search, over all its numbers of cells and efforts."
                charts.append(Chart(slug, f"{metric[0].upper()}{metric[1:]} {words}", panels, caption))
    return charts


def _panel(tested: list[Family], axis: Axis, metric: Metric, seconds: dict[str, float], task: Task) -> Panel:
    units: dict[str, float] = {"flops": 1.0, "scanned": 1 / task.n}
    unit = units.get(axis, seconds.get(axis, math.nan) * 1e6)
    series = []
    for family in tested:
        cost, recall = family.costs(axis), family.recalls(metric)
        known = np.flatnonzero(~np.isnan(cost))
        if len(known) == 0:
            continue
        best = known[front(cost[known], recall[known])]
        texts = []
        for i in best:
            run = family.runs[int(i)].run
            where = f"{run.system.name}, {spent(run.system, run.budget)}"
            shown = f"{cost[i] * unit:.4g}"
            texts.append(f"{where}: {metric} {recall[i]:.4f}, {AXES[axis]} {shown}")
        role: Any = family.role
        points = [float(v) for v in cost[best] * unit]
        series.append(Series(family.name, points, [float(v) for v in recall[best]], texts, "line", role))
    return Panel("", AXES[axis], metric, series, log_x=True)


def _cells_of(runs: list[Run]) -> str:
    """Which numbers of cells each family could choose from: not all need have the same."""
    counts: dict[str, set[int]] = {}
    for run in runs:
        if run.system.routed and run.system.cells:
            counts.setdefault(run.system.family, set()).add(run.system.cells)
    return "; ".join(f"{name} {', '.join(f'{c:,}' for c in sorted(cells))}" for name, cells in counts.items())


def _split(task: Task) -> str:
    """How queries were held out, in a sentence."""
    if task.shares_sources:
        return (
            "The split is by rows, after noise was added: test queries have relatives that were trained on."
        )
    if task.by_time:
        return (
            "The split is by time: test queries are the last of the log, those that came before among them."
        )
    return "The split is by source query, before noise is added."


def _method(task: Task, settings: Settings, batch: int, runs: list[Run]) -> list[str]:
    deep = ", ".join(f"{count:,}" for count in within(task.n))
    counts = sorted({len(seconds) for run in runs for seconds in run.times.values()})
    rounds = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1]))) if counts else "0"
    singles = min(settings.singles, batch)
    return [
        f"Recall and costs are of {len(task.test):,} test queries that nothing was trained on; the contender "
        f"of the verdict was chosen on {len(task.val):,} val queries. Fronts over cells and probes are those "
        f"of the test queries, for both sides alike. {_split(task)} Ground truth is exact.",
        "The baseline is FAISS IVF with spherical k-means and inner products, at every number of cells of "
        "the sweep; its Pareto front over all of them is what others are compared with. Numbers of cells: "
        f"{_cells_of(runs)}. A model that scores cells has only those that it was trained on. Times of the "
        "baseline are the faster of FAISS's own search (flat storage) and of the scan that the contenders "
        "use. A contender's ladder ends where it scans a fifth of the keys.",
        "FLOPs are counted from shapes and list sizes for each query: network, coarse scores and scan; a "
        "multiply-add is 2. HNSW and graphs count the distances they computed; amips's graph may score a key "
        "more than once.",
        f"Times are for k = {settings.k}, warm, {rounds} rounds, on 1 and on {threads()} threads: at batch 1 "
        f"the median of {singles} queries, at batch {batch:,} the mean of the batch; queries drawn from the "
        "test queries. Systems on the same cells take turns, and each time is taken right after that of a "
        "fixed FAISS search and compared as the ratio of the two, so that a machine whose speed drifts does "
        "not decide the comparison; microseconds are that ratio times the median of the fixed search. "
        "Intervals of times are over rounds, and over queries as far as recall is concerned; with few rounds "
        "they are about the range of the rounds.",
        f"recall@0.01%, @0.1% and @0.5% tell whether the top key is among the first {deep} keys returned.",
    ]
