"""What a fit gained, on queries that nothing was chosen by."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from amips.fitting.settings import Settings
from amips.metrics import cost_at
from amips.search import Point, Report, Searcher, measure, measure_masses
from amips.task import Task

TARGETS = (0.8, 0.9, 0.95, 0.98)  # recalls at which the gain is shown


def compare(
    task: Task,
    index: Searcher,
    baseline: Searcher,
    swept: str,
    settings: Settings,
    cost: Callable[[Searcher], float],
    trials: list[tuple[str, str]],
    say: Callable[[str], None],
) -> Searcher:
    """The index with a report of what it gains on test; plain IVF where it gains nothing on val.

    Args:
        swept: over which numbers of cells plain IVF is the best, in words.
        cost: of an index on val, by the objective.
    """
    before, after = cost(baseline), cost(index)
    kept = index if after < before else baseline
    report = Report(
        recall=settings.recall,
        objective=settings.objective,
        baseline=f"plain IVF, the best of {swept}",
        chosen=_words(kept),
        head=[
            "recall@10",
            "FLOPs: plain IVF",
            "best design",
            "keys: plain IVF",
            "best design",
            "fewer FLOPs",
        ],
        rows=_rows(measure(baseline, task.test), measure_masses(index, task.test), task, settings.recall),
        trials=trials,
        notes=_notes(task, index, settings, before, after),
    )
    say("\nshare of what scanning all keys costs, on queries that nothing was chosen by;")
    say(f"plain IVF is the best of {swept}; the best design is\n{_words(index)}:\n")
    say(report.table() + "\n")
    for note in report.notes:
        say(note)
    return replace(kept, report=report)


def _words(index: Searcher) -> str:
    assert index.design is not None
    return index.design.describe()


def _rows(plain: Sequence[Point], ours: Sequence[Point], task: Task, recall: float) -> list[list[str]]:
    rows, full = [], 2 * task.n * task.d
    for target in sorted({*TARGETS, recall}):
        flops = [_cost_at(points, "flops", target) / full for points in (plain, ours)]
        keys = [_cost_at(points, "scanned", target) for points in (plain, ours)]
        if not np.isnan(flops).any():
            shares = [f"{value:.2%}" for value in (*flops, *keys)]
            rows.append(
                [
                    f"{target:.3g}" if target not in TARGETS else f"{target:.2f}",
                    *shares,
                    f"{flops[0] / flops[1]:.2f}x",
                ]
            )
    return rows


def _cost_at(points: Sequence[Point], name: str, target: float) -> float:
    cost, recall = (np.array([getattr(point, field) for point in points]) for field in (name, "recall10"))
    return cost_at(cost, recall, target)


def _notes(task: Task, index: Searcher, settings: Settings, before: float, after: float) -> list[str]:
    def shown(cost: float) -> str:
        if np.isinf(cost):
            return "does not reach it"
        return (
            f"{cost:.2%} of a full scan" if settings.objective == "flops" else f"{1e6 * cost:,.0f} us a query"
        )

    notes = [
        f"{settings.objective} at recall@10 {settings.recall} on val: plain IVF {shown(before)}; "
        f"the best design {shown(after)}"
    ]
    if not after < before:
        notes.append("learning does not pay here: the bundle is plain IVF")
    return notes
