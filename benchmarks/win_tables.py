"""The tables, sentences and picture of `win.py`: what a recall costs, and who is faster where."""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from amips.bench import Axis, Bootstrap, Chart, Family, Measured, Metric, Panel, Series
from amips.metrics import front

TARGETS: list[tuple[Metric, float]] = [
    *(("recall@1", 0.90), ("recall@1", 0.95), ("recall@10", 0.90), ("recall@10", 0.95)),
]
TIMED = (0.80, 0.90, 0.95, 0.98)  # recall@10 around which times are taken
FLOPS_AT: list[tuple[Metric, float]] = [*TARGETS[:2], *(("recall@10", target) for target in TIMED)]
TIMES: dict[Axis, str] = {"single/1": "batch 1", "batch/1": "batch 1,024"}
DRAWN_FROM = 0.75  # recall@10 from which points are drawn
FAISS, FAISS_SCANNED = "FAISS IVF", "FAISS IVF, amips's scan"


def flops(family: Family, metric: Metric, target: float, full: float) -> str:
    """FLOPs at a recall as a share of a full scan; - where the backend does not tell them."""
    if not family.knows("flops"):
        return "-"
    value = family.cost_at("flops", metric, target) / full
    return "not reached" if math.isnan(value) else f"{value:.2%}"


def microseconds(family: Family, axis: Axis, target: float, clock: dict[str, float]) -> str:
    """Time of a query at a recall@10; - where it is not reached."""
    seconds = family.cost_at(axis, "recall@10", target) * clock[axis]
    return "-" if math.isnan(seconds) else f"{1e6 * seconds:.0f} us"


def verdict(own: list[tuple[Family, Family]], others: dict[str, Family], draw: Bootstrap) -> list[str]:
    """Where each of the others takes less time than amips's best system, and where more.

    `own` are amips's systems on val and on test: of those that reach a recall the best is chosen on val.
    """
    sentences = []
    for name, other in others.items():
        for axis, batch in TIMES.items():
            words: dict[str, list[str]] = {}
            for target in TIMED:
                how, why = _compared(own, name, other, axis, target, draw)
                words.setdefault(how, []).append(f"{target:.2f} ({why})")
            parts = "; ".join(f"{how} {', '.join(where)}" for how, where in words.items())
            sentences.append(f"{name}, {batch}: {parts}.")
    return sentences


def _compared(
    own: list[tuple[Family, Family]], name: str, other: Family, axis: Axis, target: float, draw: Bootstrap
) -> tuple[str, str]:
    """How the time of one other compares at a recall, and by how much."""

    def cost(family: Family) -> float:
        return family.cost_at(axis, "recall@10", target)

    reached = {cost(val): test for val, test in own if not math.isnan(cost(val) + cost(test))}
    late = [name] if math.isnan(cost(other)) else []
    late += [] if reached else ["amips"]
    if late:
        return "not compared at", f"not reached by {' and '.join(late)}"
    ours = reached[min(reached)]
    ratio = draw.ratio(other, ours, axis, "recall@10", target)
    if ratio is None:
        return "not compared at", "not reached by either in most resamples"
    if ratio.worse:
        ends = None if not ratio.known else (1 / float(ratio.high or 1), 1 / float(ratio.low or 1))
        return "faster at", f"{1 / ratio.value:.2f} times as fast{_interval(ends)}; {ours.name}"
    ends = None if not ratio.known else (float(ratio.low or 0), float(ratio.high or 0))
    longer = f"{ratio.value:.2f} times as long{_interval(ends)}; {ours.name}"
    return "slower at" if ratio.better else "undecided at", longer


def _interval(ends: tuple[float, float] | None) -> str:
    """An interval for a sentence; nothing where it is not known."""
    return "" if ends is None else f", {ends[0]:.2f} to {ends[1]:.2f}"


def chart(name: str, shown: dict[str, Family], clock: dict[str, float], full: float) -> Chart:
    """Recall@10 against the time of a query at both batch sizes, and against FLOPs: the front of each."""
    panels = []
    units: dict[Axis, tuple[float, str, str]] = {
        axis: (1e6 * clock[axis], f"{batch[0].upper()}{batch[1:]}", "us a query, one thread")
        for axis, batch in TIMES.items()
    }
    units["flops"] = (100 / full, "FLOPs", "% of a full scan")
    for axis, (unit, title, label) in units.items():
        series = []
        for family_name, family in shown.items():
            if axis == "flops" and family_name == FAISS_SCANNED:
                continue  # another way to compute the same
            cost, recall = family.costs(axis), family.recalls("recall@10")
            known = np.flatnonzero(~np.isnan(cost) & (recall >= DRAWN_FROM))
            best = known[front(cost[known], recall[known])]
            if len(best) == 0:
                continue
            role: Any = family.role
            x, y = ([float(v) for v in values[best]] for values in (recall, cost * unit))
            series.append(Series(family_name, x, y, group=role))
        panels.append(Panel(title, "recall@10", label, series, log_y=True))
    return Chart(name, "Cost of a recall: lower is better", panels)


def by_faiss(family: Family) -> Family:
    """The same runs, with the times of FAISS's own search alone."""
    name = f"{family.name}, FAISS's own search"
    runs = [
        replace(
            m, run=replace(m.run, times={k: t for k, t in m.run.times.items() if "faiss/" in k}), _known={}
        )
        for m in family.runs
    ]
    return Family(name, family.role, runs)


def merged(families: list[Family]) -> Family:
    """Families as one."""
    members: list[Measured] = [run for family in families for run in family.runs]
    return replace(families[0], runs=members)
