"""What else was tried to make search cheaper, on val: most of it does not help.

    python benchmarks/tried.py TASK --out RUNS --samples 800000

Each line changes one thing of the recipe (query-aware cells, a router of reduced rank, as many probes as each
query needs, float32 keys). FLOPs at a recall of the top 10, as a share of a full scan. The table goes to
results/tried.md.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from common import unit
from moving import moved
from numpy.typing import NDArray
from stopping import Walk

import amips
from amips import exact
from amips.cells import STRENGTH, Cells, default_count, query_aware, wanted_by
from amips.lean import reduced_dimension
from amips.nets import Linear, Model
from amips.routers import RoutingEstimate, router_for
from amips.search import second_cells
from amips.tables import markdown_table
from amips.task import Task, load_task
from amips.vectors import Floats, open_vectors

Ids = NDArray[np.integer[Any]]

RECALLS = (0.90, 0.95)
SEED = 0
EXTRA = 50_000  # rows that more training signal adds
SAME = 0.02  # costs that differ by less are the same: so much comes with the choice of the queries
WALKED = 2_000  # val queries at most for which early stops are simulated


class Trials:
    """A task and what was trained on it."""

    def __init__(self, task: Task, out: Path, samples: int) -> None:
        self.task, self.out, self.samples = task, out, samples
        self.count = default_count(task.n)
        self.queries = task.train.vectors
        self.top = np.asarray(task.train.top_ids)[:, :10]
        self.rank = Linear().rank_for(task.d)

    def cells(self, strength: float) -> Cells:
        """Query-aware cells of this strength."""
        keys = self.task.key_vectors
        return query_aware(keys, self.queries, self.top, self.count, strength=strength, iterations=10)

    def train(self, name: str, cells: Cells, rank: int, longer: float = 1, task: Task | None = None) -> Model:
        """A router for these cells."""
        out = self.out / name.replace(" ", "-").replace("/", "-")
        return amips.train(
            (task or self.task).with_cells(cells),
            amips.Linear(rank=rank),
            recipe=amips.Recipe(),
            samples=round(self.samples * longer),
            out=out,
            resume="auto",
            evaluations=1,
        )

    def costs(self, model: Model, cells: Cells, second: NDArray[np.int32] | None = None) -> list[str]:
        """FLOPs at each recall."""
        task = self.task.with_cells(cells)
        x, top = np.asarray(task.val.queries), np.asarray(task.val.top_ids)[:, :10]
        sizes = cells.sizes
        if second is not None:
            sizes = sizes + np.bincount(second[second >= 0], minlength=cells.count)
        router = router_for(model, cells.centroids)
        routing = RoutingEstimate.by(router, x, top, cells.assignment, sizes, second=second)
        scanned = [routing.at_mass(routing.min_mass_for(recall)).scanned.mean() for recall in RECALLS]
        full = 2 * task.d * task.n
        return [f"{(router.flops + 2 * task.d * keys) / full:.2%}" for keys in scanned]

    def next_best(self, model: Model, cells: Cells, spill_fraction: float) -> NDArray[np.int32]:
        """Second cells for the keys that fit another nearly as well as their own, by the router's scores."""
        wanted = wanted_by(self.queries, self.top, self.task.n)(0, self.task.n)
        fits = model.scores(np.ascontiguousarray(self.task.keys + STRENGTH * wanted, np.float32))
        rows = np.arange(self.task.n)
        own = fits[rows, cells.assignment].copy()
        fits[rows, cells.assignment] = -np.inf
        margin = own - fits.max(axis=1)
        return np.where(margin <= np.quantile(margin, spill_fraction), fits.argmax(axis=1), -1).astype(
            np.int32
        )

    def walk(self, model: Model, cells: Cells) -> Walk:
        """Some val queries on their way through the cells."""
        val = self.task.val
        rows = np.random.default_rng(SEED).permutation(len(val))[:WALKED]
        x, top_cells = np.asarray(val.queries)[rows], cells.assignment[np.asarray(val.top_ids)[rows, :10]]
        routing = RoutingEstimate(model.scores(x), top_cells, cells.sizes)
        return Walk(np.asarray(self.task.keys), x, cells, routing, model.architecture.score_flops)

    def with_more(self, name: str, x: Floats, top_scores: Floats, top_ids: Ids) -> Task:
        """The task with more training rows, their top keys among those of the task."""
        split = self.task.train
        more = replace(
            split,
            vectors=open_vectors(np.concatenate([np.asarray(split.queries), x]), "queries"),
            source=np.concatenate([split.source, split.source.max() + 1 + np.arange(len(x))]),
            top_scores=np.concatenate([split.top_scores, top_scores]),
            top_ids=np.concatenate([split.top_ids, top_ids.astype(np.int32)]),
            cell_scores=np.empty((len(split) + len(x), 0), np.float32),
            cell_ids=np.empty((len(split) + len(x), 0), np.int32),
        )
        return replace(self.task, train=more, options={**self.task.options, "more": name})


def signals(trials: Trials) -> dict[str, Callable[[], tuple[Floats, Floats, Ids]]]:
    """More rows to train on, with their exact top keys."""
    task, rng = trials.task, np.random.default_rng(SEED)
    rows = rng.choice(len(task.train), min(EXTRA, len(task.train)), replace=False)
    x = np.asarray(task.train.queries)[rows]
    keys = np.asarray(task.keys)
    best = keys[np.asarray(task.train.top_ids)[rows, 0]]

    def labelled(vectors: Floats) -> tuple[Floats, Floats, Ids]:
        scaled = unit(vectors)
        return scaled, *exact.top_k(keys, scaled, task.train.top_ids.shape[1])

    return {
        "noisy copies": lambda: labelled(x + np.float32(0.02) * rng.standard_normal(x.shape, np.float32)),
        "queries mixed with their top key": lambda: labelled(x + 0.5 * best),
        "keys as queries": lambda: labelled(keys[rng.choice(task.n, min(EXTRA, task.n), replace=False)]),
    }


def early_stops(walk: Walk) -> tuple[dict[str, list[float]], list[str]]:
    """FLOPs with stops by the k-th best score so far, by name; and how these compare with the mass bound."""
    base = walk.at_mass(RECALLS)
    guesses = {
        "estimates from the router's scores": walk.estimate(products=False),
        "estimates from these and the centroids": walk.estimate(products=True),
    }
    alone = {f"stop by the 10th score so far, {how}": walk.stopped(e, RECALLS) for how, e in guesses.items()}
    beside = {f"mass bound and 10th score so far, {how}": walk.both(e, RECALLS) for how, e in guesses.items()}
    oracle = {"an oracle stops when all of the top 10 are found: recall 1.00": [walk.oracle()] * len(RECALLS)}
    sentences = []
    for name, costs in (alone | beside).items():
        ratios = [cost / alone_cost for cost, alone_cost in zip(costs, base, strict=True)]
        words = [
            f"{'gain' if r < 1 - SAME else 'loss' if r > 1 + SAME else 'about the same'} at recall@10 "
            f"{recall:.2f} ({r:.2f} times its FLOPs)"
            for r, recall in zip(ratios, RECALLS, strict=True)
        ]
        sentences.append(f"{name}, against the mass bound alone: {', '.join(words)}.")
    return alone | beside | oracle, sentences


def main() -> None:
    """Try, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("task", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=800_000)
    parser.add_argument("--write", type=Path, default=Path(__file__).parent / "results" / "tried.md")
    o = parser.parse_args()
    task = load_task(o.task)
    t = Trials(task, o.out, o.samples)
    rows: list[list[str]] = []

    def tell(name: str, costs: list[str]) -> None:
        rows.append([name, *costs])
        print("  ".join(rows[-1]), flush=True)

    cells = t.cells(STRENGTH)
    base = t.train("base", cells, t.rank)
    tell(f"the recipe: query-aware {STRENGTH}, rank {t.rank}", t.costs(base, cells))
    for strength in (0.0, 0.75, 3.0, 6.0):
        others = t.cells(strength)
        tell(f"query-aware {strength}", t.costs(t.train(f"aware {strength}", others, t.rank), others))
    for rank in sorted({reduced_dimension(task.d, fraction) for fraction in (1 / 6, 1 / 2, 1)}):
        tell(f"rank {rank}", t.costs(t.train(f"rank {rank}", cells, rank), cells))
    tell("trained twice as long", t.costs(t.train("longer", cells, t.rank, 2), cells))
    others = moved(cells, task.key_vectors, t.queries, t.top, base.scores)
    tell(
        "keys moved to the cell their queries are sent to, trained again",
        t.costs(t.train("moved", others, t.rank), others),
    )
    routed = router_for(base, cells.centroids)
    for fraction in (0.1, 0.25, 0.5, 0.75, 1.0):
        second = second_cells(task.with_cells(cells), routed, fraction)
        tell(f"{fraction:.0%} of the keys in a second cell", t.costs(base, cells, second))
    for fraction in (0.5, 1.0):
        name = f"{fraction:.0%} of the keys in the cell that they fit next best by the router's scores"
        tell(name, t.costs(base, cells, t.next_best(base, cells, fraction)))
    for fraction in (0.5, 1.0):
        second = second_cells(task.with_cells(cells), routed, fraction, strength=0, saved=0)
        tell(
            f"{fraction:.0%} of the keys in a second cell by SOAR's rule alone", t.costs(base, cells, second)
        )
    walk = t.walk(base, cells)
    stops, sentences = early_stops(walk)
    for name, costs in stops.items():
        tell(name, [f"{cost:.2%}" for cost in costs])
    for name, make in signals(t).items():
        more = t.with_more(name.replace(" ", "-"), *make())
        tell(
            f"{EXTRA:,} more rows: {name}", t.costs(t.train(f"more {name}", cells, t.rank, task=more), cells)
        )
    head = ["", *(f"recall@10 {recall:.2f}" for recall in RECALLS)]
    about = (
        f"`python benchmarks/tried.py TASK --out RUNS --samples {o.samples}`; {task.n:,} keys, d = {task.d}, "
        f"{t.count:,} cells, {len(task.train):,} training queries, {len(task.val):,} val queries. FLOPs of "
        "router and scan, float32 keys, as many probes as each query needs, as a share of a full scan."
    )
    about_stops = (
        f"Early stops are simulated on {len(walk.best):,} val queries. What a cell can hold is estimated by "
        "least squares, fitted on one half of them and used on the other; products with centroids are "
        "counted for the cells that are asked about. How sure to be is chosen on val, as the mass bound is. "
        "Estimates from the router's scores add nothing but the 10th score so far; those from the centroids "
        "also know something that the router does not."
    )
    lines = "\n".join(f"- {sentence}" for sentence in sentences)
    parts = ["# What else was tried", about, markdown_table(head, rows), about_stops, lines]
    o.write.write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
