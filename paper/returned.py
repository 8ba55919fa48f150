"""One and the same index, searched with x and with the predicted key for a fraction of n results, as in the
paper: Recall@{0.01, 0.1, 0.5}% asks whether the top key is among what the engine itself returns.

Both are asked for equally many results at equal budgets, and their times are taken with so many. Nothing is
scored again with x: that is another comparison, beside this one in `backends`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from amips import Design
from amips.bench import Bootstrap, Family, Measured, Metric, System, within
from amips.task import Task
from paper.one_index import Kinds, cells_of_one, lead_row, probes_of_one
from paper.search_runs import ORIGINAL, Searched, Way, none_if_nan, search_all
from paper.workspace import Workspace

FRACTIONS: tuple[Metric, ...] = ("recall@0.01%", "recall@0.1%", "recall@0.5%")


def one_index_ways(n: int, runs: Mapping[str, str]) -> dict[Way, list[System]]:
    """An inverted file of sqrt(n) cells with x and with the key that each KeyNet predicts.

    Args:
        runs: the run directory of the KeyNet of each size.
    """
    plain = Design.plain(cells_of_one(n))
    ways = {ORIGINAL: [System(plain)]}
    for size, run in runs.items():
        ways[Way("mapped", size)] = [System(plain, run=run, mode="drop-in", label=f"KeyNet {size}")]
    return ways


def search_returned(
    workspace: Workspace,
    task: Task,
    folder: str,
    ways: Mapping[Way, list[System]],
    metric: Metric,
    *,
    ladder: Sequence[int] | None = None,
    times: bool = True,
) -> Searched[Way]:
    """What engines return for x and for the predicted key, as many results as the metric looks at.

    Args:
        folder: the experiment; runs are stored in it, by fraction.
        ladder: common budgets; None climbs that of each engine until nearly everything is found.
    """
    depth = within(task.n)[FRACTIONS.index(metric)]
    place = f"{folder}/returned-{metric.removeprefix('recall@').removesuffix('%')}"
    return search_all(workspace, task, place, ways, ladder, times, depth=depth, all_threads=False)


def at_equal_probes(
    families: Mapping[Way, Family], size: str, metric: Metric, bootstrap: Bootstrap
) -> list[list[float]]:
    """For each number of probes the recall of x and of the predicted key, with the interval of the lead."""
    sides = [
        {run.run.budget: run.metric(metric) for run in families[way].runs}
        for way in (ORIGINAL, Way("mapped", size))
    ]
    return [lead_row(sides[0][budget], sides[1][budget], bootstrap) for budget in sorted(sides[0])]


def place_on_val(families: Mapping[Way, Family], size: str, metric: Metric) -> int:
    """Which of the common probes, from the fewest, the predicted key leads most with, on val."""
    x, mapped = (
        np.array([run.metric(metric).mean() for run in sorted(families[way].runs, key=_budget)])
        for way in (ORIGINAL, Way("mapped", size))
    )
    return int((mapped - x).argmax())


def _budget(run: Measured) -> int:
    return run.run.budget


def on_one_index(searched: Searched[Way], n: int, metric: Metric, bootstrap: Bootstrap) -> dict[str, Any]:
    """Recall on test at equal probes of one index, by size.

    On val are chosen: the best size, and the number of probes with which each size leads most.
    """
    sizes = [way.size for way in searched.test if way.query == "mapped"]
    val = {size: float(searched.val[Way("mapped", size)].recalls(metric).mean()) for size in sizes}
    seconds = searched.seconds["batch/1"]
    return {
        "cells": cells_of_one(n),
        "k": within(n)[FRACTIONS.index(metric)],
        "probes": probes_of_one(n),
        "best": max(val, key=lambda size: val[size]),
        "place": {size: place_on_val(searched.val, size, metric) for size in sizes},
        "seconds": {
            way.size or "x": [none_if_nan(float(v) * seconds) for v in family.costs("batch/1")]
            for way, family in searched.test.items()
        },
        "flops": {way.size or "x": family.costs("flops").tolist() for way, family in searched.test.items()},
        **{size: at_equal_probes(searched.test, size, metric, bootstrap) for size in sizes},
    }


def kinds_of(size: str) -> Kinds:
    """What tables and claims of one index say of the queries."""
    return {size: ("source", f"the test queries (KeyNet {size})")}
