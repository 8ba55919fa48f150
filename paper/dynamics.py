"""The transport error during training: KeyNets of several sizes and depths, with one key each (c = 1)."""

from dataclasses import replace
from typing import Any

import numpy as np

from amips.bench import Bootstrap, Chart, Panel, Series, Summary, Table, describe_machine
from amips.nets import SIZES
from paper.claims import Claim, Finding, claim_values, verdict
from paper.mappers import (
    EREL_HEAD,
    EVALUATIONS,
    HALF,
    ONE_SEED,
    Trained,
    budget,
    closest,
    counted,
    difference,
    draws,
    erel_cells,
    grid,
    in_millions,
    pairs,
    settled,
    speaks,
)
from paper.workspace import Workspace

WHERE = "Appendix A.3, Figure 9"
RISE = 0.02  # an end this much above the lowest point of a curve counts as instability
PAPER = (
    "The paper (Quora, 513K keys; a figure, no table): the curves separate cleanly by size, none diverges, "
    "larger models reach lower errors and favour greater depth."
)


def run(workspace: Workspace) -> Summary:
    """Curves of erel on val, and where they end on test."""
    task = workspace.mapping_task()
    networks = grid(workspace, task, ["KeyNet"])
    equal = float(min(one.samples for one in networks))
    findings = compare(networks, equal)
    values: dict[str, Any] = {
        "networks": {one.name: one.described() for one in networks},
        "equal": {"samples": equal, "erel": {one.name: at(one, equal) for one in networks}},
        **claim_values(findings),
    }
    return Summary(
        name="dynamics",
        title="The transport error during training",
        verdict=verdict(findings),
        tables=[_table(networks, equal)],
        charts=[_chart(networks)],
        facts=[
            ("keys", f"{task.n:,} of dimension {task.d}"),
            ("training rows", f"{len(task.train):,}, noisy copies included"),
            ("val and test queries", f"{len(task.val):,} and {len(task.test):,}"),
        ],
        method=[
            f"KeyNet, c = 1, each trained for {budget(workspace)} (recipe {workspace.scale.recipe!r}), "
            f"in which the rate falls to 0. Curves are of the averaged weights on val, {EVALUATIONS} "
            "evaluations a run, of rows of the pool where one network serves both splits; the end is "
            "measured on test, and depths are chosen on the val queries of the split. " + HALF,
            "At equal samples the errors are read off the curves on val; the rate of a run that went on from "
            "there was still high, which speaks against it.",
            ONE_SEED,
        ],
        command=workspace.command("dynamics"),
        machine=describe_machine(),
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


def _table(networks: list[Trained], equal: float) -> Table:
    rows = []
    for one in networks:
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
                *erel_cells(one.mean("erel")),
            ]
        )
    head = [
        "network",
        "million samples",
        "val: first",
        "half way",
        "end",
        f"at {equal / 1e6:.3g} million samples",
        *(f"test: {name}" for name in EREL_HEAD),
    ]
    return Table("erel during and after training", head, rows, PAPER)


def _chart(networks: list[Trained]) -> Chart:
    panels = []
    for size in dict.fromkeys(one.size for one in networks):
        series = []
        for one in (one for one in networks if one.size == size):
            xs, ys = one.curve("erel")
            text = [f"{one.name}: {y:.3f} after {x:,.0f} samples" for x, y in zip(xs, ys, strict=True)]
            series.append(Series(f"L = {one.depth}", xs, ys, text))
        panels.append(Panel(f"KeyNet {size}", "training samples", "erel on val", series, log_x=True))
    return Chart(
        "dynamics", "Transport error during training", panels, "Lower is better; erel_half is half of it."
    )


def compare(networks: list[Trained], equal: float) -> list[Finding]:
    """Stability, size and depth: what the paper says of each, and what these curves do."""
    bootstrap = draws(networks[0].task)
    rises = {one.name: rise(one) for one in networks}
    worst = max(rises, key=lambda name: rises[name])
    stable = rises[worst] <= RISE
    findings: list[Finding] = [
        Claim(
            "no run diverges or becomes unstable late",
            WHERE,
            stable,
            f"Stability: no curve ends more than {RISE} above its lowest point (at most {rises[worst]:.3f}, "
            f"{worst})"
            if stable
            else f"Stability: {worst} ends {rises[worst]:.3f} above its lowest point",
        )
    ]
    by_size = pairs(networks, "size")
    wins, sure = counted(by_size, "erel", bootstrap)
    least = closest(by_size, "erel", bootstrap)
    evidence = (
        f"Size: of {len(by_size)} pairs that differ in size alone, the larger network ends with the lower "
        f"erel on test in {wins} (surely in {sure})"
    )
    evidence += "" if least is None else f"; where it gains least, by {least.text()}"
    claim = Claim(
        "larger models reach lower errors", WHERE, settled(wins, sure, len(by_size)), evidence, intervals=True
    )
    if least is not None:
        claim = replace(claim, value=least.value, low=least.low, high=least.high)
    findings.append(claim)
    findings.append(f"Each network had the same budget, which gave them {in_millions(networks)}.")
    known = [
        (small, large)
        for first, second in by_size
        if (small := at(first, equal)) is not None and (large := at(second, equal)) is not None
    ]
    if known:
        lower = sum(large < small for small, large in known)
        findings.append(
            f"After the same {equal / 1e6:.3g} million samples the larger one is lower on val in {lower} of "
            f"{len(known)} pairs."
        )
    best = {
        size: min((one for one in networks if one.size == size), key=lambda one: one.on_val("erel"))
        for size in sorted({one.size for one in networks}, key=lambda size: SIZES[size])
    }
    return [*findings, _depth_claim(networks, list(best.values()), bootstrap)]


def _depth_claim(networks: list[Trained], best: list[Trained], bootstrap: Bootstrap) -> Claim:
    """Whether the largest network is surely better deeper than the smallest one is best.

    Args:
        best: of each size, from small to large, the network whose depth is best on val.
    """
    smallest, largest = best[0], best[-1]
    parts = [f"L = {one.depth} for {one.size} (erel {one.mean('erel'):.3f} on test)" for one in best]
    evidence = f"Depth: the best on val is {', '.join(parts)}"
    text = "larger models favour greater depth"
    rivals = [one for one in networks if one.size == largest.size and one.depth <= smallest.depth]
    if largest.depth <= smallest.depth or not rivals:
        return Claim(text, WHERE, False, evidence, intervals=True)
    rival = min(rivals, key=lambda one: one.on_val("erel"))
    gain = difference(largest, rival, "erel", bootstrap)
    evidence += f"; {largest.name} minus {rival.name}: {gain.text()}"
    end = speaks(gain, "erel")
    return Claim(text, WHERE, end, evidence, value=gain.value, low=gain.low, high=gain.high)
