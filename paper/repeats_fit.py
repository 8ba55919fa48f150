"""What `amips.fit(order="time")` gains: the index that it fits to a log, without its memory and with it.

The fit sees a log up to its test rows and holds out the last part of that itself; what it made is measured
on the test rows: as a user would have it, with the log that there is today and the traffic of tomorrow.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

import amips
from amips.bench import Bootstrap, Table
from amips.metrics import TOP
from amips.search import MemorySearcher, plain_index, point_for, recalls, surest_point
from amips.task import Task
from amips.vectors import Floats
from paper.repeats_ways import BATCH, FASTER, FIT, FIT_WITHOUT, RECALL, ROUNDS, times_in_turns
from paper.workspace import Workspace

ROUTER_TIMES = 5.0  # the minutes of a fit, in those that the scale gives a router
KINDS = ("alone", "among many")
Values = Mapping[str, Any]


def minutes_of(workspace: Workspace) -> float:
    """What a fit may take."""
    return ROUTER_TIMES * workspace.scale.router_minutes


def fitted(workspace: Workspace, log: Floats, task: Task) -> dict[str, Any]:
    """FLOPs, recall and times without the memory and with it, of a fit on the rows [m, d] before the test."""
    index = amips.fit(
        workspace.work / "keys.npy",
        log,
        order="time",
        minutes=minutes_of(workspace),
        recall=RECALL,
        seed=workspace.seed,
        keep_log=False,
        quiet=True,
    ).snapshot
    ways = {FIT_WITHOUT: plain_index(index), FIT: index}
    full, x = 2 * task.n * task.d, np.asarray(task.test.queries)
    recognised = index.memory.recognise(x)[0].mean() if isinstance(index, MemorySearcher) else 0.0
    values: dict[str, Any] = {
        "index": index.design.describe() if index.design else "",
        "recognised": float(recognised),
        "times": times_in_turns(ways, x),
    }
    flops = {}
    for name, one in ways.items():
        if surest_point(one.points, TOP).recall_assured(TOP) < RECALL:
            values[name] = None
            continue
        flops[name] = one.cost(x, TOP, recall=RECALL).flops
        ids = one.search(x, TOP, recall=RECALL)[1]
        values[name] = {
            "val": point_for(one.points, RECALL, TOP).flops / full,
            "test": float(flops[name].mean() / full),
            "recall": float(recalls(ids, np.asarray(task.test.top_ids), TOP).mean()),
        }
    if len(flops) == 2:
        draws = Bootstrap(len(x)).weights
        ratios = (draws @ flops[FIT_WITHOUT]) / (draws @ flops[FIT])
        interval = [float(value) for value in np.quantile(ratios, (0.025, 0.975))]
        values["gain"] = [float(flops[FIT_WITHOUT].mean() / flops[FIT].mean()), *interval]
    return values


def fit_findings(shares: Values) -> list[str]:
    """What the memory of a fit gains, in FLOPs and in time, by share."""
    said = {share: one["fit"] for share, one in shares.items() if one["fit"].get("gain")}
    if not said:
        return []
    gains = ", ".join(
        f"{one['gain'][0]:.2f} ({one['gain'][1]:.2f} to {one['gain'][2]:.2f}) at {share}"
        for share, one in said.items()
    )
    lines = [
        f'`amips.fit(order="time")` for recall@10 {RECALL:g}: so many times fewer FLOPs a test query with '
        "its memory of the log than without it, by the share of traffic that comes again, with 95 % "
        f"intervals: {gains}."
    ]
    lines.append(f"In FLOPs it pays {_from([s for s, one in said.items() if one['gain'][1] > 1])}.")
    for place, kind in enumerate(KINDS):
        times = {share: _both(one, place) for share, one in said.items()}
        known = {share: pair for share, pair in times.items() if pair is not None}
        words = ", ".join(
            f"{1e6 * with_it:.0f} us instead of {1e6 * without:.0f} at {share}"
            for share, (without, with_it) in known.items()
        )
        faster = [share for share, (without, with_it) in known.items() if without > FASTER * with_it]
        slower = [share for share, (without, with_it) in known.items() if with_it > FASTER * without]
        lines.append(
            f"In time, a query {kind}: {words}; it pays {_from(faster)}"
            + (f", and is slower at {', '.join(slower)}." if slower else ".")
        )
    return lines


def _from(shares: list[str]) -> str:
    return f"at a share of {', '.join(shares)}" if shares else "at no share"


def _both(one: Values, place: int) -> tuple[float, float] | None:
    """The time without the memory and with it; None where the recall is out of reach."""
    pair = [one["times"].get(name) for name in (FIT_WITHOUT, FIT)]
    return None if None in pair else (pair[0][place], pair[1][place])


def fit_table(shares: Values, minutes: float) -> Table:
    """What a fit gains by its memory: a column for each share."""
    rows = []
    for field, words in (("val", "FLOPs on val, where it was chosen"), ("test", "FLOPs on test, as served")):
        rows += [
            [f"{words}, {name}", *(_cell(one["fit"], name, field, ".2%") for one in shares.values())]
            for name in (FIT_WITHOUT, FIT)
        ]
    gains = [one["fit"].get("gain") for one in shares.values()]
    cells = ["" if g is None else f"{g[0]:.2f}x ({g[1]:.2f} to {g[2]:.2f})" for g in gains]
    rows.append(["fewer FLOPs with the memory, on test", *cells])
    for place, kind in enumerate(KINDS):
        for name in (FIT_WITHOUT, FIT):
            times = [one["fit"]["times"].get(name) for one in shares.values()]
            cells = ["" if t is None else f"{1e6 * t[place]:.0f} us" for t in times]
            rows.append([f"a query {kind}, {name}", *cells])
    for name in (FIT_WITHOUT, FIT):
        cells = [_cell(one["fit"], name, "recall", ".3f") for one in shares.values()]
        rows.append([f"recall@10 on test, {name}", *cells])
    rows.append(["test queries recognised", *(f"{one['fit']['recognised']:.1%}" for one in shares.values())])
    note = (
        f"A fit of {minutes:g} min for each share, on the log before the test rows, asked for recall@10 "
        f"{RECALL:g}, which is then kept with 95 % confidence. Without: the same index, its memory left out. "
        "In brackets the 95 % interval over test queries. Times on one thread, in turns: of each query, "
        f"and of each batch of {BATCH}, the least of {ROUNDS}, on a machine that others used, too."
    )
    head = ["share that comes again", *shares]
    return Table('What `amips.fit(order="time")` gains by its memory', head, rows, note)


def _cell(one: Values, name: str, field: str, form: str) -> str:
    return "not reached" if one[name] is None else format(one[name][field], form)
