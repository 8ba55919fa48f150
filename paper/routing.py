"""Routing: with few cells, is the top key in the cells that a router scores best, and at what cost?

The paper clusters the keys into c = 10 cells (of 10 k-means runs the most even), trains SupportNet and
KeyNet to predict the support value of every cell, and searches the best 1 to 5 cells exhaustively; then
once more with c = 128, a SupportNet XS of 8 layers, and 1 to 32 cells. Routing accuracy is the share of
queries whose top key lies in the cells searched; FLOPs are those of choosing cells and of searching them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from amips.bench.derive import Bootstrap, Family, on_val
from amips.bench.facts import training_curves
from amips.bench.machine import describe
from paper.workspace import Workspace
from paper.search_runs import run_systems
from amips.bench.summary import Chart, Panel, Series, Summary, Table
from amips.bench.systems import System
from amips.bench.verdict import in_words
from amips.nets import KeyNet, SupportNet
from amips.task import Task

TOP = (1, 2, 3, 4, 5)
TOP_128 = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Entry:
    """A network of the study, and what it is called."""

    name: str
    network: SupportNet | KeyNet


def entries(scale: str, sizes: tuple[str, ...]) -> list[Entry]:
    """Sizes, depths and injections, as far as the scale allows."""
    if scale == "smoke":
        shapes: list[tuple[str, int, int | str]] = [("XS", 2, "all")]
    elif scale == "small":
        # One thing is varied at a time: there is a minute and a half for each.
        shapes = [(size, 4, "all") for size in sizes] + [("XS", 8, "all"), ("XS", 4, 0)]
    else:
        shapes = [(size, depth, inject) for size in sizes for depth in (4, 8, 16) for inject in (0, "all")]
    made = []
    for kind in (SupportNet, KeyNet):
        for size, depth, inject in shapes:
            layers = depth - 1 if inject == "all" else inject
            made.append(
                Entry(
                    f"{kind.__name__} {size}, L = {depth}, n_x = {layers}",
                    kind(size=size, depth=depth, inject=inject),
                )
            )
    return made


def run(workspace: Workspace) -> Summary:
    """c = 10."""
    task = workspace.task(min(10, workspace.keys.n // 4), runs=10)
    summary = _run(workspace, task, "routing", entries(workspace.scale.name, workspace.scale.sizes), TOP)
    note = (
        "The paper (its figure, no table): on NQ (2.6M keys) both networks beat the centroids at all "
        "budgets, by at least 10 points at k = 1, and come near 100 % at k = 5; on Quora (513K keys) the "
        "centroids do well where the budget is small. It trains on 1 to 10 billion samples."
    )
    return _with_note(summary, note)


def run_128(workspace: Workspace) -> Summary:
    """c = 128."""
    task = workspace.task(min(128, workspace.keys.n // 4))
    depth = 2 if workspace.scale.name == "smoke" else 8
    entry = Entry(f"SupportNet XS, L = {depth}", SupportNet(size="XS", depth=depth))
    summary = _run(workspace, task, "routing128", [entry], TOP_128, share=2.0)
    note = (
        "The paper's NQ has 2.6M keys; of its figure only these values are given in words, and no FLOPs as a "
        "share of a full scan."
    )
    rows = PAPER_128 if len(summary.tables[0].head) == len(PAPER_128[0]) else []
    return _with_note(summary, note, rows)


PAPER_128 = [
    ["the paper, NQ: centroid", "-", "56 %", "", "", "", "95 %", ""],
    ["the paper, NQ: SupportNet XS, L = 8", "1,000", "72 %", "", "95 %", "", "", ""],
]


def _run(
    workspace: Workspace, task: Task, name: str, networks: list[Entry], top: tuple[int, ...], share: float = 1.0
) -> Summary:
    runs: dict[str, str] = {}
    systems = [System(cells=task.c)]
    seen: dict[str, int] = {}
    for entry in networks:
        slug = "".join(ch if ch.isalnum() else "-" for ch in entry.name.lower())
        model = workspace.model(task, entry.network, slug, share=share)
        directory = str(workspace.run_directory(slug, task))
        runs[directory] = entry.name
        seen[entry.name] = int(model.about["samples"])
        systems.append(System(cells=task.c, router=directory, label=entry.name))
    linear = workspace.linear(task)
    seen["linear"] = int(linear.about["samples"])
    systems.append(System(cells=task.c, router=str(workspace.linear_directory(task)), label="linear"))
    tested, raw = run_systems(workspace, task, name, systems, [k for k in top if k <= task.c], times=False)
    base = next(family for family in tested if family.role == "baseline")
    contenders = [family for family in tested if family is not base]
    scale = workspace.scale
    return Summary(
        name=name,
        title=f"Routing among {task.c} cells",
        verdict=_verdict(base, contenders, _best(on_val(raw, task)), task),
        tables=[_table([base, *contenders], task, seen)],
        charts=[_chart(name, [base, *contenders], task)],
        facts=[
            ("keys", f"{task.n:,}"),
            ("training queries", f"{len(task.train):,}"),
            ("test queries", f"{len(task.test):,}"),
            ("imbalance of the cells", f"{task.cells.imbalance:.3f}"),
        ],
        curves=training_curves(runs),
        method=[
            f"Each network was trained for {share:g} times {scale.budget} (recipe {scale.recipe!r}), the "
            f"linear router for half of {scale.budget}. The router of the verdict was chosen on val. Cells "
            "are spherical k-means. FLOPs are the only cost here, as in the paper; the bench has times.",
            "Routing accuracy is the share of test queries whose top key lies in the k cells searched; FLOPs "
            "are those of the router and of the exhaustive search in these cells.",
        ],
        command=f"amips study {name} --data DATA --scale {scale.name} --out OUT",
        machine=describe(),
        values={
            "accuracy": {f.name: f.recalls("recall@1").tolist() for f in tested},
            "flops": {f.name: f.costs("flops").tolist() for f in tested},
            "k": [run.run.budget for run in base.runs],
            "samples": seen,
        },
    )


def _sorted(family: Family) -> list[Any]:
    return sorted(family.runs, key=lambda run: run.run.budget)


def _accuracy(family: Family) -> list[float]:
    return [float(run.metric("recall@1").mean()) for run in _sorted(family)]


def _flops(family: Family) -> list[float]:
    return [float(run.cost("flops").mean()) for run in _sorted(family)]


def _table(shown: list[Family], task: Task, seen: dict[str, int]) -> Table:
    full = 2 * task.n * task.d
    ks = [run.run.budget for run in _sorted(shown[0])]
    rows = []
    for family in shown:
        cells = [
            f"{accuracy:.1%} ({flops / full:.1%})"
            for accuracy, flops in zip(_accuracy(family), _flops(family), strict=True)
        ]
        samples = seen.get(family.name)
        rows.append([family.name, "-" if samples is None else f"{samples / 1e6:.2f}", *cells])
    head = ["routed by", "million samples", *(f"k = {k}" for k in ks)]
    return Table("Routing accuracy (FLOPs as a share of a full scan)", head, rows)


def _with_note(summary: Summary, note: str, rows: Sequence[list[str]] = ()) -> Summary:
    """The summary with what the paper reports in its first table."""
    table = summary.tables[0]
    told = Table(table.title, table.head, [*table.rows, *rows], note)
    return Summary(**{**vars(summary), "tables": [told, *summary.tables[1:]]})


def _chart(name: str, shown: list[Family], task: Task) -> Chart:
    series = []
    for family in shown:
        ks = [run.run.budget for run in _sorted(family)]
        x, y = _flops(family), _accuracy(family)
        text = [f"{family.name}, {k} cells: {a:.1%}, {f:.3g} FLOPs" for k, a, f in zip(ks, y, x, strict=True)]
        role: Any = family.role
        series.append(Series(family.name, x, y, text, "line", role))
    panel = Panel("", "FLOPs a query", "routing accuracy", series, log_x=True)
    return Chart(name, f"Routing accuracy against FLOPs, {task.c} cells", [panel])


def _best(chosen_from: list[Family]) -> str:
    """The learned router that finds most at k = 1 on the val queries."""
    learned = [family for family in chosen_from if family.role == "contender"]
    return max(learned, key=lambda family: _accuracy(family)[0]).name


def _verdict(base: Family, contenders: list[Family], chosen: str, task: Task) -> list[str]:
    """At k = 1, with a paired bootstrap over queries; then who needs the fewest FLOPs for 95 %."""
    bootstrap = Bootstrap(np.asarray(task.test.source))
    first = _sorted(base)[0].metric("recall@1")
    said = []
    for family in contenders:
        gain = _sorted(family)[0].metric("recall@1") - first
        drawn = bootstrap.weights @ gain
        low, high = np.quantile(drawn, [0.025, 0.975])
        said.append((float(gain.mean()), float(low), float(high), family))
    best = next(one for one in said if one[3].name == chosen)
    sure = "" if best[1] > 0 or best[2] < 0 else " (no sure difference)"
    shares = [_flops(family)[0] / (2 * task.n * task.d) for family in (base, best[3])]
    sentences = [
        f"In the best cell alone (k = 1) the centroids find {first.mean():.1%} of the top keys of "
        f"{len(task.test):,} held-out queries; the learned router that was best on val, {best[3].name}, "
        f"finds {first.mean() + best[0]:.1%}: {100 * best[0]:+.1f} points, 95 % interval "
        f"{100 * best[1]:+.1f} to {100 * best[2]:+.1f}{sure}, for {shares[1]:.1%} instead of {shares[0]:.1%} "
        "of the FLOPs of a full scan."
    ]
    wins = [one[3].name for one in said if one[1] > 0]
    losses = [one[3].name for one in said if one[2] < 0]
    if wins:
        sentences.append(f"Surely better than centroids at k = 1: {'; '.join(wins)}.")
    if losses:
        sentences.append(f"Surely worse: {'; '.join(losses)}.")
    target = 0.95
    ratio = bootstrap.ratio(base, best[3], "flops", "recall@1", target)
    if ratio is not None:
        said_so = in_words(ratio, "FLOPs", "fewer", "more")
        sentences.append(
            f"For {target:.0%} accuracy it needs {said_so} (ratio {ratio.value:.2f}, 95 % interval "
            f"{ratio.low:.2f} to {ratio.high:.2f})."
        )
    return sentences
