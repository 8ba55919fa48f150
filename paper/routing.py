"""Routing: with few cells, is the top key in the cells that a router scores best, and at what cost?

The paper clusters the keys into c = 10 cells (of 10 k-means runs the most even), trains SupportNet and
KeyNet to predict the support value of every cell, and searches the best 1 to 5 cells exhaustively; then
once more with c = 128, a SupportNet XS of 8 layers, and 1 to 32 cells. Routing accuracy is the fraction of
queries whose top key lies in the cells searched; FLOPs are those of choosing cells and of searching them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from amips import KeyNet, Linear, Recipe, SupportNet
from amips.bench import (
    Bootstrap,
    Chart,
    Family,
    Panel,
    Series,
    Summary,
    System,
    Table,
    cells_of,
    describe_machine,
    training_curves,
)
from amips.nets import Model
from amips.task import Task
from paper.claims import claim_values, verdict
from paper.routing_claims import Comparison, accuracies, by_budget, compare, compare_128, flops
from paper.search_runs import runner_of, search_all
from paper.workspace import Workspace

TOP = (1, 2, 3, 4, 5)
TOP_128 = (1, 2, 4, 8, 16, 32)
# Of the scale's budget; the paper trains its one network on 128 cells for a billion samples, as full does.
PORTIONS_128 = {"small": {"SupportNet": 2.0}, "replica": {"SupportNet": 3.0}}
# At replica KeyNet remembers after few samples; SupportNet, whose steps cost less, learns from many.
PORTIONS = {"replica": {"SupportNet": 4.0}}
# Times the weight of the score, with 10 and with 128 cells: with it SupportNet learns to route in minutes.
SCORED, SCORED_128 = 100.0, 1000.0
EVALUATIONS = {"replica": 1}  # in a run, 10 elsewhere: with targets for every cell they take long
SIZES_128 = {"replica": "M"}  # XS in the paper
CENTROID, LINEAR = "centroid", "linear"
PUBLISHED = (
    "Score and consistency losses weigh d times 0.01, as in the authors' published code, which averages the "
    "gradient and key losses over d. With M there are 256 parameters for each source query and each of 10 "
    "cells, 20 for each of 128; the paper's XS on NQ has 289 and 23. {times:,.0f} x score: so many times "
    "that weight of SupportNet's score loss. It was chosen on val; so was the network that the verdict is "
    "about."
)


@dataclass(frozen=True)
class Entry:
    """A network of the experiment: its kind, size, depth and layers with the input injected."""

    network: SupportNet | KeyNet
    injected: bool = True  # whether its name says how many layers have the input
    scored: float = 1.0  # so many times the recipe's weight of the score loss

    @property
    def kind(self) -> str:
        """SupportNet or KeyNet."""
        return type(self.network).__name__

    @property
    def name(self) -> str:
        """What it is called in tables and charts."""
        net = self.network
        layers = net.depth - 1 if net.inject == "all" else net.inject
        name = f"{self.kind} {net.size}, L = {net.depth}" + (f", n_x = {layers}" if self.injected else "")
        return name + (f", {self.scored:g} x score" if self.scored != 1 else "")

    @property
    def shape(self) -> str:
        """What networks have in common that differ in depth and injections alone."""
        return f"{self.network.size}" + (f", {self.scored:g} x score" if self.scored != 1 else "")

    @property
    def slug(self) -> str:
        """What its run is called."""
        return "".join(ch if ch.isalnum() else "-" for ch in self.name.lower())


def entries(scale: str, sizes: tuple[str, ...]) -> list[Entry]:
    """Sizes, depths and injections, as far as the scale allows."""
    if scale == "smoke":
        shapes: list[tuple[str, int, int | str]] = [("XS", 2, "all")]
    elif scale == "replica":
        # 256 parameters for each source query and cell; the paper's XS on NQ has 289.
        shapes = [("M", 4, "all"), ("M", 8, "all"), ("M", 4, 1)]
    elif scale == "small":
        # One thing is varied at a time: there is a minute and a half for each.
        shapes = [(size, 4, "all") for size in sizes] + [("XS", 8, "all"), ("XS", 4, 1)]
    else:  # the paper's figure: the input in every fourth layer, and in all of them
        shapes = [
            (size, depth, inject) for size in sizes for depth in (4, 8, 16) for inject in (depth // 4, "all")
        ]
    # Both weights where that is to be compared; shapes with the one that learns to route there.
    weights = (1.0, SCORED) if scale == "replica" else (1.0,)
    supports = [
        Entry(SupportNet(size=size, depth=depth, inject=inject), scored=weight)
        for weight in weights
        for size, depth, inject in (shapes if weight == weights[-1] else shapes[:1])
    ]
    return supports + [Entry(KeyNet(size=size, depth=depth, inject=inject)) for size, depth, inject in shapes]


def network_recipe(workspace: Workspace, d: int, scored: float = 1.0) -> Recipe:
    """The scale's recipe; at replica with the weights of the authors' published code.

    It averages the gradient and key losses over d, so that the weight of the scores, which routing follows,
    is d times that of the paper's formulas.

    Args:
        scored: so many times that weight of SupportNet's score loss.
    """
    recipe = workspace.recipe()
    times = d if workspace.scale.name == "replica" else 1
    return replace(recipe, score=scored * times * recipe.score, consist=times * recipe.consist)


def run(workspace: Workspace) -> Summary:
    """c = 10."""
    task = workspace.task(min(10, workspace.keys.n // 4), runs=10)
    networks = entries(workspace.scale.name, workspace.scale.sizes)
    portions = PORTIONS.get(workspace.scale.name, {})
    comparison, summary = _run(workspace, task, "routing", networks, TOP, portions)
    note = (
        "The paper (its figure, no table): on NQ (2.6M keys) both networks beat the centroids at all "
        "budgets, by at least 10 points at k = 1, and come near 100 % at k = 5; on Quora (513K keys) the "
        "centroids do well where the budget is small. It trains on 1 to 10 billion samples."
    )
    findings = compare(comparison)
    values = {**summary.values, **claim_values(findings)}
    return replace(_with_note(summary, note), verdict=verdict(findings), values=values)


def run_128(workspace: Workspace) -> Summary:
    """c = 128."""
    task = workspace.task(min(128, workspace.keys.n // 4))
    depth = 2 if workspace.scale.name == "smoke" else 8
    spec = SupportNet(size=SIZES_128.get(workspace.scale.name, "XS"), depth=depth)
    weights = (1.0, SCORED_128) if workspace.scale.name == "replica" else (1.0,)
    networks = [Entry(spec, injected=False, scored=weight) for weight in weights]
    portions = PORTIONS_128.get(workspace.scale.name, {})
    comparison, summary = _run(workspace, task, "routing128", networks, TOP_128, portions)
    note = (
        "The paper's NQ has 2.6M keys; of its figure only these values are given in words, and no FLOPs as a "
        "fraction of a full scan."
    )
    rows = PAPER_128 if len(summary.tables[0].head) == len(PAPER_128[0]) else []
    findings = compare_128(comparison)
    values = {**summary.values, **claim_values(findings)}
    return replace(_with_note(summary, note, rows), verdict=verdict(findings), values=values)


PAPER_128 = [
    ["the paper, NQ: centroid", "-", "56 %", "", "", "", "95 %", ""],
    ["the paper, NQ: SupportNet XS, L = 8", "1,000", "72 %", "", "95 %", "", "", ""],
]


def _run(
    workspace: Workspace,
    task: Task,
    name: str,
    networks: Sequence[Entry],
    top: tuple[int, ...],
    portions: Mapping[str, float],
) -> tuple[Comparison, Summary]:
    """Centroids, networks and the linear router over the task's cells; a summary without a verdict."""
    plain = cells_of(task)
    ways = {CENTROID: [System(plain)]}
    samples, runs, errors = {}, {}, {}
    for entry in networks:
        recipe = network_recipe(workspace, task.d, entry.scored)
        looks = EVALUATIONS.get(workspace.scale.name, 10)
        portion = portions.get(entry.kind, 1.0)
        model = workspace.model(task, entry.network, entry.slug, recipe, portion, looks)
        directory = str(workspace.run_directory(entry.slug, task))
        runs[directory], samples[entry.name] = entry.name, int(model.about["samples"])
        ways[entry.name] = [System(plain, run=directory, label=entry.name)]
        errors[entry.name] = score_error(model, task)
    scored = max(entry.scored for entry in networks)
    reweighed = network_recipe(workspace, task.d) != workspace.recipe()
    linear = replace(plain, router=Linear(rank=0), recipe=Recipe())
    ways[LINEAR] = [System(linear, label=LINEAR)]
    searched = search_all(workspace, task, name, ways, [k for k in top if k <= task.c], times=False)
    router = runner_of(workspace, task, name).builder.model(linear)  # trained above: it is read back
    assert router is not None
    samples[LINEAR] = int(router.about["samples"])
    scale, test = workspace.scale, searched.test
    budgets = [
        f"{kind} was trained for {portions.get(kind, 1.0):g} times {scale.budget}"
        for kind in dict.fromkeys(entry.kind for entry in networks)
    ]
    summary = Summary(
        name=name,
        title=f"Routing among {task.c} cells",
        verdict=[],
        tables=[_table(test, task, samples), _errors_table(errors, task)],
        charts=[_chart(name, test, task)],
        facts=[
            ("keys", f"{task.n:,}"),
            ("training rows", f"{len(task.train):,} of {len(np.unique(task.train.source)):,} source queries"),
            ("test queries", f"{len(task.test):,}"),
            ("imbalance of the cells", f"{task.cells.imbalance:.3f}"),
        ],
        curves=training_curves(runs),
        method=[
            f"Each {' and each '.join(budgets)} (recipe {scale.recipe!r}), the "
            f"linear router for {scale.router_minutes:g} minutes at most. The routers of the verdict were "
            "chosen on val. Cells are spherical k-means on all keys. FLOPs are the only cost here, as in the "
            "paper; the bench has times.",
            "Routing accuracy is the fraction of test queries whose top key lies in the k cells searched; "
            "FLOPs are those of the router and of the exhaustive search in these cells.",
            *([PUBLISHED.format(times=scored)] if reweighed else []),
        ],
        command=workspace.command(name),
        machine=describe_machine(),
        values={
            "accuracy": {name: family.recalls("recall@1").tolist() for name, family in test.items()},
            "flops": {name: family.costs("flops").tolist() for name, family in test.items()},
            "k": [run.run.budget for run in by_budget(test[CENTROID])],
            "samples": samples,
            "score errors": errors,
        },
    )
    learned = [name for name in ways if name != CENTROID]
    comparison = Comparison(
        base=test[CENTROID],
        base_on_val=searched.val[CENTROID],
        test={name: test[name] for name in learned},
        val={name: searched.val[name] for name in learned},
        kinds={entry.name: entry.kind for entry in networks},
        shapes={entry.name: (entry.kind, entry.shape) for entry in networks},
        scored=frozenset(entry.name for entry in networks if entry.scored != 1),
        bootstrap=Bootstrap(np.asarray(task.test.source)),
        full_scan=2 * task.n * task.d,
    )
    return comparison, summary


def _table(families: Mapping[str, Family], task: Task, samples: Mapping[str, int]) -> Table:
    full = 2 * task.n * task.d
    ks = [run.run.budget for run in by_budget(families[CENTROID])]
    rows = []
    for name, family in families.items():
        cells = [
            f"{accuracy:.1%} ({cost / full:.1%})"
            for accuracy, cost in zip(accuracies(family), flops(family), strict=True)
        ]
        rows.append([name, f"{samples[name] / 1e6:.2f}" if name in samples else "-", *cells])
    head = ["routed by", "million samples", *(f"k = {k}" for k in ks)]
    return Table("Routing accuracy (FLOPs as a fraction of a full scan)", head, rows)


def score_error(model: Model, task: Task) -> float:
    """How far off the differences between the scores of cells are, on test: their root mean square error.

    What is wrong by as much in all cells of a query does not change the order of its cells.
    """
    off = model.scores(np.asarray(task.test.queries)) - np.asarray(task.test.cell_scores)
    off = off - off.mean(axis=1, keepdims=True)
    return float(np.sqrt(np.square(off).mean()))


def _errors_table(errors: Mapping[str, float], task: Task) -> Table:
    best = np.sort(np.asarray(task.test.cell_scores), axis=1)[:, -2:]
    gap = float(np.median(best[:, 1] - best[:, 0]))
    rows = [[name, f"{error:.3f}"] for name, error in errors.items()]
    note = (
        "Root mean square error over queries and cells, less what all cells of a query have in common, which "
        f"does not change their order. The best and the second best cell are {gap:.3f} apart (median)."
    )
    return Table("How far off the scores are", ["network", "error of the scores"], rows, note)


def _with_note(summary: Summary, note: str, rows: Sequence[list[str]] = ()) -> Summary:
    """The summary with what the paper reports in its first table."""
    table = summary.tables[0]
    noted = Table(table.title, table.head, [*table.rows, *rows], note)
    return replace(summary, tables=[noted, *summary.tables[1:]])


def _chart(name: str, families: Mapping[str, Family], task: Task) -> Chart:
    series = []
    for label, family in families.items():
        ks = [run.run.budget for run in by_budget(family)]
        x, y = flops(family), accuracies(family)
        text = [f"{label}, {k} cells: {a:.1%}, {f:.3g} FLOPs" for k, a, f in zip(ks, y, x, strict=True)]
        series.append(Series(label, x, y, text, "line", "baseline" if label == CENTROID else "contender"))
    panel = Panel("", "FLOPs a query", "routing accuracy", series, log_x=True)
    return Chart(name, f"Routing accuracy against FLOPs, {task.c} cells", [panel])
