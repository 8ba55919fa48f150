"""Original against mapped queries on several backends: FAISS IVF, LeanVec, ScaNN, SOAR and HNSW.

Each is searched with x, with the predicted key (candidates scored again with x) and, where it has cells,
routed by the prediction; costs are FLOPs, keys scanned and time.
"""

import math
from collections.abc import Sequence

import numpy as np

from amips.bench.derive import Axis, Bootstrap, Family, Metric
from amips.bench.backend_tables import hosted_tables, silent_sentences
from amips.bench.machine import describe
from paper.mapped_backends import IVF, IVF_TITLE, Hosted, by_engine, engine_of, measure, method
from paper.workspace import Workspace
from paper.mappers import compared
from paper.search_runs import CLEARLY, lead, none_if_nan
from amips.bench.summary import Chart, Summary, Table
from amips.backends import backend_class, missing

OF_THE_PAPER = ("ivf", "leanvec", "scann", "soar")
COMPARED = (*OF_THE_PAPER, "hnsw")
# All candidates are scored with x, so the top key comes first wherever it is among them: that is what the
# paper's recall asks, too.
TOLD: Metric = "recall@1"
AXES: dict[Axis, str] = {"flops": "FLOPs", "scanned": "keys scanned", "batch/1": "time, large batch"}
SMALL_SIZES = ("XS", "S")
PAPER = (
    "The paper (Quora, NQ, HotpotQA; figures, no table): on FAISS IVF, ScaNN, SOAR and LeanVec and on all "
    "three axes mapped queries dominate in the middle of the budgets, XS and S most of all; at very small "
    "budgets the original query is as good. With ScaNN gains shrink at high budgets; SOAR leaves least room "
    "(on Quora the curves overlap); LeanVec is like FAISS. It has no HNSW."
)

Pair = tuple[Family, Family]


def run(workspace: Workspace) -> Summary:
    """Every backend that can be run here; the others are named."""
    absent = missing([name for name in BACKENDS if name != IVF])
    here = [name for name in BACKENDS if name not in absent]
    found = measure(workspace, "backends", here, workspace.scale.sizes)
    bootstrap = Bootstrap(np.asarray(found.task.test.source))
    pairs = sorted(found.pairs, key=lambda pair: (here.index(engine_of(pair[0])), routed(pair[1])))
    best = chosen(pairs, by_engine(found.held))
    finders = [backend_class(name) for name in here if name != IVF]
    budgets = {IVF_TITLE: "probes", **{finder.title: finder.budget for finder in finders}}
    scale = workspace.scale
    return Summary(
        name="backends",
        title="Original against mapped queries on several backends",
        verdict=[*_verdict(best, workspace.scale.sizes), *silent_sentences(pairs), *_not_run(absent)],
        tables=[_lead_table(pairs), *hosted_tables(best, bootstrap, found.batch)],
        charts=[_chart(found, name) for name in here],
        facts=[
            ("keys", f"{found.task.n:,}"),
            ("training rows", f"{len(found.task.train):,}, noisy copies included"),
            ("test queries", f"{len(found.task.test):,}"),
            ("backends", "; ".join(dict.fromkeys(base.name for base, _ in pairs))),
            *([("not run", ", ".join(backend_class(name).title for name in absent))] if absent else []),
        ],
        method=[
            f"Each KeyNet was trained for {scale.budget} (recipe {scale.recipe!r}). FAISS IVF with x is the "
            "front over indexes of sqrt(n) / 2 to 10 sqrt(n) cells; where a prediction searches or routes, "
            "there are 4 sqrt(n). Other engines have the settings that amips gives them.",
            method(budgets, routed=True) + f" The paper scores with the prediction; here {TOLD} asks whether "
            "the top key is among the candidates, as the paper's recall does.",
        ],
        command=f"amips study backends --data DATA --scale {scale.name} --out OUT",
        machine=describe(),
        values={
            **found.values(TOLD),
            "flops": {f.name: f.costs("flops").tolist() for f in found.tested if f.told("flops")},
            "lead": {
                ours.name: {axis: none_if_nan(value) for axis, value in leads(base, ours).items()}
                for base, ours in pairs
            },
            "not run": absent,
        },
    )


def leads(base: Family, ours: Family) -> dict[Axis, float]:
    """By how much a mapper finds more than x at equal cost, where it does most, by every cost told."""
    return {axis: lead(base, ours, axis, TOLD) for axis in AXES if base.told(axis) and ours.told(axis)}


def chosen(pairs: Sequence[Pair], held: Sequence[Pair]) -> list[Pair]:
    """Of the sizes of each engine and way the one that leads most on val, in FLOPs where these are told."""

    def on_val(pair: Pair) -> float:
        value = next(iter(leads(*of[pair[1].name]).values()), math.nan)
        return -math.inf if math.isnan(value) else value

    of = {ours.name: (base, ours) for base, ours in held}
    groups: dict[tuple[str, bool], list[Pair]] = {}
    for pair in pairs:
        groups.setdefault((engine_of(pair[1]), routed(pair[1])), []).append(pair)
    return [max(group, key=on_val) for group in groups.values()]


def routed(family: Family) -> bool:
    """Whether the prediction chooses cells; otherwise it is what the engine searches with."""
    return family.runs[0].run.system.route == "cells"


def _verdict(best: Sequence[Pair], sizes: Sequence[str]) -> list[str]:
    said, ahead, small = [], [], []
    for base, ours in best:
        label, found = ours.runs[0].run.system.label, leads(base, ours)
        told = [
            f"{'no cost in common' if math.isnan(value) else f'{100 * value:+.1f} points'} ({AXES[axis]})"
            for axis, value in found.items()
        ]
        way = "routed by the prediction" if routed(ours) else "searched with the predicted key"
        sentence = (
            f"{base.name} {way} ({label}, the best on val): {TOLD} minus that of x at equal cost, where it "
            f"is highest: {', '.join(told)}"
        )
        if engine_of(base) in OF_THE_PAPER and not routed(ours):
            ahead.append(bool(found) and all(value > CLEARLY for value in found.values()))
            small.append(label.split()[-1] in SMALL_SIZES)
            sentence += f": {compared(ahead[-1], 'mapped queries lead in the middle of the budgets')}"
        said.append(f"{sentence}.")
    said.append(
        f"Mapped queries lead by more than a point on every axis that is told on {sum(ahead)} of the "
        f"{len(ahead)} backends of the paper that were run: "
        f"{compared(all(ahead), 'the same picture on all backends and axes')}."
    )
    if not set(sizes) <= set(SMALL_SIZES):
        said.append(
            f"The size that leads most on val is XS or S on {sum(small)} of {len(small)} backends: "
            f"{compared(all(small), 'XS and S gain most')}."
        )
    return said


def _not_run(absent: dict[str, str]) -> list[str]:
    return [f"Not run: {reason}." for reason in absent.values()]


def _lead_table(pairs: Sequence[Pair]) -> Table:
    rows = []
    for base, ours in pairs:
        found = leads(base, ours)
        values = {axis: "-" if math.isnan(value) else f"{value:+.3f}" for axis, value in found.items()}
        best = [f"{family.recalls(TOLD).max():.3f}" for family in (base, ours)]
        rows.append([ours.name, *best, *(values.get(axis, "not told") for axis in AXES)])
    head = ["backend: model", f"best {TOLD} with x", "with the model", *AXES.values()]
    note = (
        f"The largest lead in {TOLD} over x at equal cost, over all budgets that both have (- where there "
        f"are none); below 0 the unmodified query is ahead everywhere. {PAPER}"
    )
    return Table(f"{TOLD[0].upper()}{TOLD[1:]}: the largest lead over searching with x", head, rows, note)


def _chart(found: Hosted, name: str) -> Chart:
    mine = [family for family in found.tested if engine_of(family) == name]
    title = IVF_TITLE if name == IVF else backend_class(name).title
    return found.chart(f"backends-{name}", title, TOLD, mine)
