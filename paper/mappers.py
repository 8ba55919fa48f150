"""What the experiments on training share: networks of one key (c = 1) that are trained once, what they
logged, and their errors on every test query.

A network is known by its kind, size and depth, and by what its training differs in from the scale's: every
experiment that asks for the same gets the same run.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips import exact
from amips.bench import Bootstrap, Table
from amips.metrics import transport_error
from amips.nets import SIZES, KeyNet, Model, Recipe, SupportNet, read_run_log
from amips.task import Split, Task
from paper.workspace import Workspace

Doubles = NDArray[np.float64]

KINDS = {"KeyNet": KeyNet, "SupportNet": SupportNet}
BLOCK_FLOATS = 1 << 22
EVALUATIONS = 10  # in a run of the scale's budget
PORTIONS = {"replica": 3.0}  # of the scale's budget, for each network: beyond, nothing is gained (`horizon`)
LOWER_IS_BETTER = ("erel", "score", "key")
EREL_HEAD = ("erel", "erel_half", "exp(erel)", "exp(erel_half)")
HALF = (
    "erel is the paper's formula, the mean log ratio of squared distances; erel_half is half of it, the "
    "ratio of distances that its prose and the authors' published code have. Its figures do not say which "
    "they show."
)
# Errors of networks that were trained with one seed: what is sure is so for these networks.
ONE_SEED = (
    "Intervals are 95 %, over the test queries, the same draws for both sides. Each network was trained "
    "once: another seed may give another order where the differences are small."
)


@dataclass(frozen=True)
class Trained:
    """A network of one key after its training."""

    kind: str
    size: str
    depth: int
    task: Task
    directory: Path
    model: Model

    @property
    def name(self) -> str:
        """What it is called in tables and charts."""
        return f"{self.kind} {self.size}, L = {self.depth}"

    @property
    def samples(self) -> int:
        """How many samples it was trained on."""
        return int(self.model.about["samples"])

    @cached_property
    def rows(self) -> dict[str, Doubles]:
        """Its errors on each test query."""
        return per_row(self.model, self.task, self.task.test)

    def mean(self, metric: str) -> float:
        """Of the test queries."""
        return float(self.rows[metric].mean())

    @cached_property
    def val_rows(self) -> dict[str, Doubles]:
        """Its errors on each val query of its task.

        What was logged during training is of the val rows that it was trained beside: where one network
        serves both splits these are rows of the pool.
        """
        return per_row(self.model, self.task, self.task.val)

    def on_val(self, metric: str) -> float:
        """Of the val queries of its task."""
        return float(self.val_rows[metric].mean())

    @cached_property
    def log(self) -> list[dict[str, Any]]:
        """What was logged during its training, on val; not the look at it before the first step."""
        return [entry for entry in read_run_log(self.directory) if entry["samples"]]

    def curve(self, metric: str) -> tuple[list[float], list[float]]:
        """Samples and a metric on val, or ("loss") the training loss since the evaluation before."""
        values = [entry["train"]["loss"] if metric == "loss" else entry["val"][metric] for entry in self.log]
        return [float(entry["samples"]) for entry in self.log], [float(value) for value in values]

    def described(self) -> dict[str, Any]:
        """Plain values for a summary."""
        samples, erel = self.curve("erel")
        return {
            "kind": self.kind,
            "size": self.size,
            "depth": self.depth,
            "parameters": self.model.architecture.parameters,
            "samples": self.samples,
            "seconds": float(self.model.about["seconds"]),
            "test": {metric: self.mean(metric) for metric in self.rows},
            "val": {metric: self.on_val(metric) for metric in ("erel", "mrr")},
            "curve": {"samples": samples, "erel": erel, "loss": self.curve("loss")[1]},
        }


@dataclass(frozen=True)
class Difference:
    """A mean over queries of one network minus that of another, with a 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def sure(self) -> bool:
        """Whether the interval leaves 0 out."""
        return self.low > 0 or self.high < 0

    def text(self) -> str:
        """With its interval."""
        return f"{self.value:+.3f} ({self.low:+.3f} to {self.high:+.3f})"


def erel_cells(erel: float) -> list[str]:
    """The cells of a table under `EREL_HEAD`."""
    return [f"{value:.3f}" for value in (erel, erel / 2, math.exp(erel), math.exp(erel / 2))]


def task_facts(task: Task) -> list[tuple[str, str]]:
    """What an experiment on mappers was run on."""
    return [
        ("keys", f"{task.n:,} of dimension {task.d}"),
        ("training rows", f"{len(task.train):,}, noisy copies included"),
        ("test queries", f"{len(task.test):,}"),
    ]


def base_depth(workspace: Workspace) -> int:
    """The depth of networks where an experiment does not vary it."""
    return 2 if workspace.scale.name == "smoke" else 4


def portion_of(workspace: Workspace) -> float:
    """How much of the scale's budget a network has where an experiment does not vary it."""
    return PORTIONS.get(workspace.scale.name, 1.0)


def budget(workspace: Workspace) -> str:
    """The training of a network where an experiment does not vary it, in words."""
    portion = portion_of(workspace)
    return f"{portion:g} times {workspace.scale.budget}" if portion != 1 else workspace.scale.budget


def paper_depth(workspace: Workspace) -> int:
    """Where the paper has one depth, 16: that, if the scale allows."""
    return 16 if workspace.scale.name == "full" else base_depth(workspace)


def depths(workspace: Workspace) -> tuple[int, ...]:
    """The depths of an experiment that varies them; those of the paper at full."""
    return {"smoke": (2, 4), "small": (2, 4, 8), "replica": (4, 8)}.get(workspace.scale.name, (4, 8, 16))


def sizes(workspace: Workspace) -> tuple[str, ...]:
    """The sizes of an experiment that compares them: two at least, at full all six of the paper."""
    if workspace.scale.name == "full":
        return tuple(SIZES)
    if workspace.scale.name == "replica":  # a network takes seconds there
        return ("XS", "S", "M")
    return workspace.scale.sizes if len(workspace.scale.sizes) > 1 else ("XS", "S")


def trained(
    workspace: Workspace,
    task: Task,
    kind: str,
    size: str,
    depth: int | None = None,
    recipe: Recipe | None = None,
    portion: float | None = None,
    tag: str = "",
) -> Trained:
    """A KeyNet or SupportNet, trained on a task of one cell, or read back from an earlier run.

    Args:
        recipe, portion: as for `Workspace.model`; without a portion the usual one of the scale.
        tag: tells the run from others where the recipe is not the scale's.
    """
    portion = portion_of(workspace) if portion is None else portion
    depth = base_depth(workspace) if depth is None else depth
    parts = [kind, size, *([str(depth)] if depth != base_depth(workspace) else [])]
    parts += [f"x{portion:.3g}"] if portion != 1 else []
    name = "-".join([*parts, *([tag] if tag else [])]).lower()
    # As many evaluations a minute whatever the portion: a curve is then as fine.
    evaluations = max(1, round(EVALUATIONS * portion))
    model = workspace.model(task, KINDS[kind](size=size, depth=depth), name, recipe, portion, evaluations)
    return Trained(kind, size, depth, task, workspace.run_directory(name, task), model)


def grid(
    workspace: Workspace, task: Task, kinds: Sequence[str], of_sizes: Sequence[str] = ()
) -> list[Trained]:
    """Networks of these kinds in every depth and in these sizes, by default every size, of the scale."""
    return [
        trained(workspace, task, k, size, depth)
        for k in kinds
        for size in of_sizes or sizes(workspace)
        for depth in depths(workspace)
    ]


def per_row(net: Model, task: Task, split: Split) -> dict[str, Doubles]:
    """The metrics of `amips.learn.evaluate` (c = 1), one value for each row instead of their means."""
    top = np.asarray(split.top_ids[:, 0])
    points = np.empty((len(split), task.d), np.float32)
    score, key, erel = (np.empty(len(split)) for _ in range(3))
    step = max(1, BLOCK_FLOATS // (net.architecture.floats + task.d))
    for low in range(0, len(split), step):
        rows = slice(low, low + step)
        x, targets = np.asarray(split.queries[rows]), task.keys[top[rows]]
        points[rows] = net.keys(x)[:, 0]
        score[rows] = np.square(net.scores(x) - np.asarray(split.cell_scores[rows]))[:, 0]
        key[rows] = np.square(points[rows] - targets).sum(axis=1)
        erel[rows] = transport_error(points[rows], x, targets)
    ranks = exact.ranks(task.keys, points, top)
    hits = {"match": ranks == 1, "recall@10": ranks <= 10, "recall@100": ranks <= 100, "mrr": 1.0 / ranks}
    by_rank = {name: value.astype(np.float64) for name, value in hits.items()}
    return {"score": score, "key": key, "erel": erel, **by_rank}


def difference(one: Trained, other: Trained, metric: str, bootstrap: Bootstrap) -> Difference:
    """The metric of `one` minus that of `other` on the same test queries."""
    gain = one.rows[metric] - other.rows[metric]
    low, high = np.quantile(bootstrap.weights @ gain, (0.025, 0.975))
    return Difference(float(gain.mean()), float(low), float(high))


def draws(task: Task) -> Bootstrap:
    """Resampled test queries."""
    return Bootstrap(np.asarray(task.test.source))


def closest(
    compared: Sequence[tuple[Trained, Trained]], metric: str, bootstrap: Bootstrap
) -> Difference | None:
    """Of the differences second minus first the one that speaks least for the second; None of none."""
    gains = [difference(second, first, metric, bootstrap) for first, second in compared]
    sign = 1 if metric in LOWER_IS_BETTER else -1
    return max(gains, key=lambda gain: sign * gain.value, default=None)


def speaks(first: Difference, metric: str) -> bool | None:
    """Whether a difference surely speaks for the one that comes first; None where it is not sure."""
    return better(first, metric) if first.sure else None


def better(first: Difference, metric: str) -> bool:
    """Whether a difference speaks for the one that comes first."""
    return first.value < 0 if metric in LOWER_IS_BETTER else first.value > 0


def pairs(networks: Sequence[Trained], by: str) -> list[tuple[Trained, Trained]]:
    """Networks that differ in `by` ("size" or "depth") alone, neighbours in it, the smaller one first."""
    other = "depth" if by == "size" else "size"
    groups: dict[tuple[str, Any], list[Trained]] = {}
    for one in networks:
        groups.setdefault((one.kind, getattr(one, other)), []).append(one)

    def rank(one: Trained) -> float:
        return SIZES[one.size] if by == "size" else one.depth

    return [pair for group in groups.values() for pair in pairwise(sorted(group, key=rank))]


def counted(
    compared: Sequence[tuple[Trained, Trained]], metric: str, bootstrap: Bootstrap
) -> tuple[int, int]:
    """In how many pairs the second network is better than the first, and in how many surely."""
    gains = [difference(second, first, metric, bootstrap) for first, second in compared]
    wins = [gain for gain in gains if better(gain, metric)]
    return len(wins), sum(gain.sure for gain in wins)


def settled(won: int, sure: int, total: int) -> bool | None:
    """Whether all of so many pairs go one way: None if they do, but not all surely."""
    return None if won == total > sure else sure == total


def in_millions(networks: Sequence[Trained]) -> str:
    """The samples of these networks, from the fewest to the most, in words."""
    least, most = (pick(one.samples for one in networks) / 1e6 for pick in (min, max))
    return f"{least:.3g} million samples" if least == most else f"{least:.3g} to {most:.3g} million samples"


def errors_table(title: str, networks: Sequence[Trained], note: str) -> Table:
    """What networks achieve on the test queries."""
    rows = []
    for one in networks:
        errors = [*erel_cells(one.mean("erel")), f"{one.mean('mrr'):.3f}", f"{one.mean('match'):.3f}"]
        size = one.model.architecture.parameters / (one.task.n * one.task.d)
        rows.append([one.name, f"{size:.1%}", f"{one.samples / 1e6:.3g}", *errors])
    head = ["network", "parameters / (n d)", "million samples", *EREL_HEAD, "MRR", "match rate"]
    return Table(title, head, rows, note)
