"""One FAISS IVF, searched with x and with the predicted key at equal probes, as in Figure 5 of the paper.

The index has sqrt(n) cells. What counts is Recall@0.01% (or of another fraction): whether the top key of x is
among the first 0.01 % of n keys that are returned, by inner products with what was searched with. The probes
are common, and what the network costs is left out, as in the paper. With how many of them a lead is judged
is chosen on val. `leak` compares the two splits like this, `ivf` the queries of one.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.bench import Bootstrap, Chart, Panel, Series, Table, within
from amips.blas import faiss
from amips.builder import Builder
from amips.design import Design
from amips.nets import Model
from amips.task import Split, Task
from paper.claims import Claim, Finding, all_of, decided

WHERE = "Section 4.4, Figure 5"
PROBES = (1, 2, 4, 8, 16, 32, 64)
CLEARLY = 0.01  # a lead of less than a point is none
KINDS = {
    "leaky": ("rows", "rows whose relatives were trained on"),
    "held_out": ("source", "queries never seen"),
}
Doubles = NDArray[np.float64]
Kinds = Mapping[str, tuple[str, str]]  # how queries were held out, and which they are, in words


def cells_of_one(n: int) -> int:
    """How many cells the index of n keys has."""
    return max(2, round(math.sqrt(n)))


def probes_of_one(n: int) -> list[int]:
    """The probes that both are searched with."""
    return [p for p in PROBES if p <= cells_of_one(n)]


def lead_row(x: Doubles, mapped: Doubles, draw: Bootstrap) -> list[float]:
    """Recall with x and mapped, and the 95 % interval of their difference, from hits of every query [m]."""
    low, high = np.quantile(draw.weights @ (mapped - x), (0.025, 0.975))
    return [float(x.mean()), float(mapped.mean()), float(low), float(high)]


def one_index(
    task: Task, net: Model, splits: Mapping[str, Split], val: Mapping[str, Split], builder: Builder
) -> dict[str, Any]:
    """Recall at equal probes of each kind of rows, with x and mapped, and 95 % intervals of the lead.

    Args:
        splits: the rows that are reported, by kind,
        val: ... and those that the number of probes is chosen on.
    """
    cells, k = cells_of_one(task.n), within(task.n)[0]
    index: Any = builder.index(Design.plain(cells))
    values: dict[str, Any] = {"cells": cells, "k": k, "probes": probes_of_one(task.n), "place": {}}

    def hits(split: Split, probes: int) -> tuple[Doubles, Doubles]:
        """Whether each query's top key is found with x, and with the predicted key."""
        x, top = np.asarray(split.queries), np.asarray(split.top_ids[:, :1])
        parameters = faiss.SearchParametersIVF(nprobe=probes)
        with_x, mapped = (
            (index.store.index.search(searched, k, params=parameters)[1] == top).any(axis=1).astype(float)
            for searched in (x, np.ascontiguousarray(net.keys(x)[:, 0]))
        )
        return with_x, mapped

    for kind, split in splits.items():
        draw = Bootstrap(np.asarray(split.source))
        on_test = [hits(split, probes) for probes in values["probes"]]
        values[kind] = [lead_row(x, mapped, draw) for x, mapped in on_test]
        on_val = [hits(val[kind], probes) for probes in values["probes"]]
        values["place"][kind] = int(np.argmax([mapped.mean() - x.mean() for x, mapped in on_val]))
    return values


def claims(values: dict[str, Any], kinds: Kinds = KINDS, metric: str = "Recall@0.01%") -> list[Finding]:
    """The headline, once for each kind of queries."""
    said: list[Finding] = []
    for kind, (split, words) in kinds.items():
        rows = np.array(values[kind])
        lead = rows[:, 1] - rows[:, 0]
        best = values["place"][kind]
        evidence = (
            f"FAISS IVF with {values['cells']:,} cells, {metric} on {words}: the predicted key finds "
            f"{rows[best, 1]:.3f} and x {rows[best, 0]:.3f} with {values['probes'][best]} of the cells, "
            f"where it leads most on val, a difference of {lead[best]:+.3f} ({rows[best, 2]:+.3f} to "
            f"{rows[best, 3]:+.3f})"
        )
        leads = decided(rows[best, 2], rows[best, 3], CLEARLY)
        text = "mapped queries find more than x at small and middle budgets"
        figures = (float(lead[best]), float(rows[best, 2]), float(rows[best, 3]))
        said.append(Claim(text, WHERE, leads, evidence, split, *figures))
        behind = [p for p, one in zip(values["probes"], lead, strict=True) if one < 0]
        # It overtakes where it is behind with the fewest cells, and ahead with the most.
        first, last = [(decided(low, high, 0)) for low, high in (rows[0, 2:], rows[-1, 2:])]
        crosses = all_of([first, None if last is None else not last])
        evidence = (
            f"on {words} x is ahead from {behind[0]} probes on" if behind else f"on {words} x never leads"
        )
        figures = (float(lead[-1]), float(rows[-1, 2]), float(rows[-1, 3]))
        evidence += (
            f"; the predicted key minus x is {lead[0]:+.3f} ({rows[0, 2]:+.3f} to {rows[0, 3]:+.3f}) with "
            f"{values['probes'][0]} and {figures[0]:+.3f} ({figures[1]:+.3f} to {figures[2]:+.3f}) with "
            f"{values['probes'][-1]}"
        )
        text = "at large budgets x overtakes the predicted key"
        said.append(Claim(text, WHERE, crosses, evidence, split, *figures))
    return said


def table(values: dict[str, Any], kinds: Kinds = KINDS, metric: str = "Recall@0.01%") -> Table:
    """Recall of x and of the predicted key by probes, all kinds of queries side by side."""
    rows = []
    for place, probes in enumerate(values["probes"]):
        row = [f"{probes}"]
        for kind in kinds:
            x, mapped, low, high = values[kind][place]
            row += [f"{x:.3f}", f"{mapped:.3f}", f"{mapped - x:+.3f} ({low:+.3f} to {high:+.3f})"]
        rows.append(row)
    head = ["probes"]
    several = len(kinds) > 1
    for split, _ in kinds.values():
        head += [f"x, split by {split}" if several else "x", "predicted key", "difference"]
    note = (
        f"One index of {values['cells']:,} cells; {metric}: the top key is among the first {values['k']} "
        "that are returned."
    )
    if several:
        note += " Split by rows: noise first, as in the paper; by source: queries never seen."
    title = "At equal probes on one index" + ("" if metric == "Recall@0.01%" else f", {metric}")
    return Table(title, head, rows, note)


def chart(values: dict[str, Any], kinds: Kinds = KINDS, metric: str = "Recall@0.01%") -> Chart:
    """Recall against probes, all kinds of queries side by side."""
    panels = []
    for kind, (_, words) in kinds.items():
        rows = np.array(values[kind])
        probes = [float(p) for p in values["probes"]]
        lines = [
            Series("x", probes, rows[:, 0].tolist(), group="baseline"),
            Series("predicted key", probes, rows[:, 1].tolist(), group="contender"),
        ]
        panels.append(Panel(words, "probes", metric, lines, log_x=True))
    return Chart("one-index", "One FAISS IVF, searched with x and with the predicted key", panels)
