"""What a fit gained, on queries that nothing was chosen by."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from amips.fitting.settings import Settings
from amips.metrics import TOP, cost_at
from amips.search import (
    MemoryCost,
    Objective,
    Point,
    Report,
    Row,
    Searcher,
    Snapshot,
    Trial,
    measure,
    measure_about,
    measure_index,
    recalls,
    surest_point,
    with_facts,
)
from amips.task import Task
from amips.vectors import Floats

TARGETS = (0.8, 0.9, 0.95, 0.98)  # recalls at which the gain is shown
LONG = 1.0  # seconds, after which a time is not taken once more
TIMED, REPEATS = 256, 3  # queries that are searched to take a time, and how often


def compare(
    task: Task,
    index: Snapshot,
    baseline: Searcher,
    settings: Settings,
    cost: Callable[[Snapshot], float],
    plain_cells: Sequence[int],
    untried_cells: Sequence[int],
    trials: list[Trial],
    say: Callable[[str], None],
    every: int = 1,
    memory: MemoryCost | None = None,
) -> Snapshot:
    """The index with a report of what it gains on test; plain IVF where it gains nothing on val.

    A graph that was asked for stays, and the report says what it loses.

    Args:
        index, baseline: the best design, and the best plain IVF.
        cost: of an index on val, by the objective; infinite if the recall is out of its reach.
        plain_cells, untried_cells: see `Report`.
        every: of the ladder of efforts on test, which steps are measured; 0: none but those at the recall.
        memory: what the memory changes that is in front of the index, if one is.
    """
    assert index.design is not None
    assert baseline.design is not None
    report = Report(
        settings.recall,
        settings.objective,
        index.design,
        finite(cost(index)),
        baseline.design,
        finite(cost(baseline)),
        _rows(task, index, baseline, settings.recall, every),
        sorted(plain_cells),
        sorted(untried_cells),
        trials,
        wanted=settings.structure == "graph",
        memory=memory,
    )
    say("\nshare of what scanning all keys costs, on queries that nothing was chosen by;")
    say(f"the baseline is {report.against}; the best design is\n{report.best.describe()}:\n")
    say(report.table() + "\n")
    for note in report.notes():
        say(note)
    return with_facts(index if report.design is index.design else baseline, report=report)


def finite(cost: float) -> float | None:
    """A cost as a report has it: None if the recall is out of reach."""
    return None if math.isinf(cost) else cost


def _rows(task: Task, index: Snapshot, baseline: Searcher, recall: float, every: int) -> list[Row]:
    """Costs of both at the recalls that both reach on test, with times at the one asked for."""
    rows, full = list[Row](), 2 * task.n * task.d
    plain = _measured(task, baseline, recall, every)
    best = _measured(task, index, recall, every)
    x = np.asarray(task.test.queries[:TIMED])
    # Where little was measured, it was about one recall: of others it says nothing.
    for target in sorted({*TARGETS, recall} if every else {recall}):
        flops = [_cost_at(points, "flops", target) / full for points in (plain, best)]
        scanned = [_cost_at(points, "scanned", target) for points in (plain, best)]
        if np.isnan(flops).any():
            continue
        pair = [
            Row("plain IVF", target, flops[0], scanned[0]),
            Row("best design", target, flops[1], scanned[1]),
        ]
        both: tuple[Snapshot, Snapshot] = (baseline, index)
        if target == recall and all(reaches(one, recall) for one in both):
            pair = [_with_times(row, one, task, x) for row, one in zip(pair, both, strict=True)]
        rows += pair
    return rows


def _measured(task: Task, index: Snapshot, recall: float, every: int) -> list[Point]:
    """Recall and cost on test; of codes, with little time, about the recall asked for only."""
    if isinstance(index, Searcher) and index.store.storage != "flat" and not every:
        return measure_about(index, task.test, recall)
    if isinstance(index, Searcher) and index.design is not None and index.design.stop == "probes":
        return measure(index, task.test, every=1 if index.store.storage == "flat" else every)
    return measure_index(index, task.test, every or 1)


def _with_times(row: Row, index: Snapshot, task: Task, x: Floats) -> Row:
    """The row with what `search` serves for its recall on the test queries, and the time that takes."""
    queries, target = np.asarray(task.test.queries), row.recall
    ids = with_facts(index, labels=None).search(queries, TOP, recall=target)[1]
    return replace(
        row,
        latency=seconds(index, x, target, "latency"),
        throughput=seconds(index, x, target),
        served=float(recalls(ids, np.asarray(task.test.top_ids), TOP).mean()),
        served_flops=float(index.cost(queries, recall=target).flops.mean()) / (2 * task.n * task.d),
    )


def reaches(index: Snapshot, recall: float) -> bool:
    """Whether an index can be asked for this recall."""
    return surest_point(index.points, TOP).recall_assured(TOP) >= recall


def seconds(index: Snapshot, x: Floats, recall: float, objective: Objective = "throughput") -> float:
    """The time of one of these queries [m, d] at a recall: alone ("latency"), or among all of them."""
    parts = [x[i : i + 1] for i in range(len(x))] if objective == "latency" else [x]
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        for part in parts:
            index.search(part, TOP, recall=recall)
        times.append(time.perf_counter() - started)
        if sum(times) > LONG:
            break
    return min(times) / len(x)  # what else the machine does can only add to it


def _cost_at(points: Sequence[Point], name: str, target: float) -> float:
    cost, recall = (np.array([getattr(point, field) for point in points]) for field in (name, "recall10"))
    return cost_at(cost, recall, target)
