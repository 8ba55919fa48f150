"""The transport error during training: KeyNets of several sizes and depths, with one key each (c = 1)."""

import math
from typing import Any

import numpy as np

from amips.bench.machine import describe
from paper.workspace import Workspace
from paper.mappers import (
    EVALUATIONS,
    ONE_SEED,
    Trained,
    compared,
    counted,
    draws,
    grid,
    in_millions,
    pairs,
)
from amips.bench.summary import Chart, Panel, Series, Summary, Table
from amips.nets import SIZES

RISE = 0.02  # an end this much above the lowest point of a curve counts as instability
PAPER = (
    "The paper (Quora, 513K keys; a figure, no table): the curves separate cleanly by size, none diverges, "
    "larger models reach lower errors and favour greater depth."
)


def run(workspace: Workspace) -> Summary:
    """Curves of erel on val, and where they end on test."""
    task = workspace.mapping_task()
    found = grid(workspace, task, ["KeyNet"])
    equal = float(min(one.samples for one in found))
    values: dict[str, Any] = {
        "networks": {one.name: one.described() for one in found},
        "equal": {"samples": equal, "erel": {one.name: at(one, equal) for one in found}},
    }
    return Summary(
        name="dynamics",
        title="The transport error during training",
        verdict=_verdict(found, equal),
        tables=[_table(found, equal)],
        charts=[_chart(found)],
        facts=[
            ("keys", f"{task.n:,} of dimension {task.d}"),
            ("training rows", f"{len(task.train):,}, noisy copies included"),
            ("val and test queries", f"{len(task.val):,} and {len(task.test):,}"),
        ],
        method=[
            f"KeyNet, c = 1, each trained for {workspace.scale.budget} (recipe {workspace.scale.recipe!r}), in which the "
            f"rate falls to 0. Curves are of the averaged weights on val, {EVALUATIONS} evaluations a run; "
            "the end is told on test. erel is the mean log ratio of squared distances, the paper's formula.",
            "At equal samples the errors are read off the curves on val; the rate of a run that went on from "
            "there was still high, which speaks against it.",
            ONE_SEED,
        ],
        command=f"amips study dynamics --data DATA --scale {workspace.scale.name} --out OUT",
        machine=describe(),
        values=values,
    )


def at(one: Trained, samples: float) -> float | None:
    """erel on val after so many samples, between the two nearest evaluations; None outside of these."""
    xs, ys = one.curve("erel")
    if not xs or not xs[0] <= samples <= xs[-1]:
        return None
    return float(np.interp(samples, xs, ys))


def rise(one: Trained) -> float:
    """How far above its lowest point a curve ends."""
    _, ys = one.curve("erel")
    return ys[-1] - min(ys)


def _table(found: list[Trained], equal: float) -> Table:
    rows = []
    for one in found:
        _, ys = one.curve("erel")
        there = at(one, equal)
        rows.append(
            [
                one.name,
                f"{one.samples / 1e6:.3g}",
                f"{ys[0]:.3f}",
                f"{ys[(len(ys) - 1) // 2]:.3f}",
                f"{ys[-1]:.3f}",
                "-" if there is None else f"{there:.3f}",
                f"{one.mean('erel'):.3f}",
                f"{math.exp(one.mean('erel')):.3f}",
            ]
        )
    head = [
        "network",
        "million samples",
        "val: first",
        "half way",
        "end",
        f"at {equal / 1e6:.3g} million samples",
        "test: erel",
        "exp(erel)",
    ]
    return Table("erel during and after training", head, rows, PAPER)


def _chart(found: list[Trained]) -> Chart:
    panels = []
    for size in dict.fromkeys(one.size for one in found):
        series = []
        for one in (one for one in found if one.size == size):
            xs, ys = one.curve("erel")
            text = [f"{one.name}: {y:.3f} after {x:,.0f} samples" for x, y in zip(xs, ys, strict=True)]
            series.append(Series(f"L = {one.depth}", xs, ys, text))
        panels.append(Panel(f"KeyNet {size}", "training samples", "erel on val", series, log_x=True))
    return Chart("dynamics", "Transport error during training", panels, "Lower is better.")


def _verdict(found: list[Trained], equal: float) -> list[str]:
    bootstrap = draws(found[0].task)
    risen = {one.name: rise(one) for one in found}
    claim = "no run diverges or becomes unstable late"
    worst = max(risen, key=lambda name: risen[name])
    said = [
        f"Stability: no curve ends more than {RISE} above its lowest point (at most {risen[worst]:.3f}, "
        f"{worst}): {compared(True, claim)}."
        if risen[worst] <= RISE
        else f"Stability: {worst} ends {risen[worst]:.3f} above its lowest point: {compared(False, claim)}."
    ]
    by_size = pairs(found, "size")
    wins, sure = counted(by_size, "erel", bootstrap)
    held = compared(sure == len(by_size), "larger models reach lower errors")
    said.append(
        f"Size: of {len(by_size)} pairs that differ in size alone, the larger network ends with the lower "
        f"erel on test in {wins} (surely in {sure}): {held}. Each had the same budget, which gave them "
        f"{in_millions(found)}."
    )
    known = [
        (small, large)
        for first, second in by_size
        if (small := at(first, equal)) is not None and (large := at(second, equal)) is not None
    ]
    if known:
        lower = sum(large < small for small, large in known)
        said.append(
            f"After the same {equal / 1e6:.3g} million samples the larger one is lower on val in {lower} of "
            f"{len(known)} pairs."
        )
    best = {
        size: min((one for one in found if one.size == size), key=lambda one: one.model.about["val"]["erel"])
        for size in sorted({one.size for one in found}, key=lambda size: SIZES[size])
    }
    smallest, largest = next(iter(best.values())), list(best.values())[-1]
    parts = [f"L = {one.depth} for {one.size} (erel {one.mean('erel'):.3f} on test)" for one in best.values()]
    said.append(
        f"Depth: the best on val is {', '.join(parts)}: "
        f"{compared(largest.depth > smallest.depth, 'larger models favour greater depth')}."
    )
    return said
