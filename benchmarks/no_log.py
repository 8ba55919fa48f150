"""What a router is worth that has never seen a real query: trained on stand-ins, tested on real queries.

DATA holds `keys` and `queries` in files of any format that `amips label` reads; the queries are real. There
are no texts here, so pseudo-queries themselves cannot be made: stand-ins are made of key vectors instead, at
several distances.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import data_file, unit
from numpy.typing import NDArray

import amips
from amips.bench import cells_of, describe_machine
from amips.builder import Builder
from amips.cells import default_count, kmeans
from amips.design import Design
from amips.metrics import cost_at
from amips.search import Searcher, ladder, recalls
from amips.tables import markdown_table
from amips.task import Split, Task

Floats = NDArray[np.float32]
Make = Callable[[Floats, float, np.random.Generator], Floats]
TARGETS = (0.90, 0.95)
SWEEP = (1, 2, 3, 4, 8)  # cells of the centroid baseline, in units of sqrt(n)


def rows_of(data: Path, name: str, rows: NDArray[np.int64]) -> Floats:
    """Some rows of a file of DATA, as unit float32."""
    return unit(data_file(data, name).take(np.sort(rows)))


def noisy(keys: Floats, weight: float, rng: np.random.Generator) -> Floats:
    """Keys with noise in all directions alike, of `weight` times their norm."""
    noise = unit(rng.standard_normal(keys.shape, np.float32))
    return unit(keys + np.float32(weight) * noise)


def mixed(keys: Floats, weight: float, rng: np.random.Generator) -> Floats:
    """Keys pulled towards the mean of three others: noise in the directions in which keys differ."""
    others = unit(sum((keys[rng.permutation(len(keys))] for _ in range(3)), np.zeros_like(keys)))
    return unit(keys + np.float32(weight) * others)


def weight_for(make: Make, keys: Floats, top: float) -> float:
    """The weight at which the mean inner product with the best key is `top`, by bisection on 1,000 keys."""
    low, high = 0.0, 1.5  # much further, another key is the best
    for _ in range(12):
        middle = (low + high) / 2
        drawn = np.random.default_rng(2)
        sample = make(keys, middle, drawn)[drawn.permutation(len(keys))[:1000]]
        low, high = (middle, high) if (sample @ keys.T).max(axis=1).mean() > top else (low, middle)
    return (low + high) / 2


class Curve:
    """Recall@10 and cost of every query of a split over a ladder of probes: arrays [probes, queries]."""

    def __init__(self, searcher: Searcher, split: Split) -> None:
        x, true = np.asarray(split.queries), np.asarray(split.top_ids)
        steps = ladder(searcher.c)
        self.recall = np.stack([recalls(searcher.search(x, 10, probes=p)[1], true, 10) for p in steps])
        full = 2 * searcher.n * searcher.d
        self.cost = np.stack([searcher.cost(x, probes=p).flops / full for p in steps])

    def at(self, target: float, rows: Any = slice(None)) -> float:
        """FLOPs, as a share of a full scan, at this recall; between numbers of probes, interpolated."""
        return cost_at(self.cost[:, rows].mean(axis=1), self.recall[:, rows].mean(axis=1), target)

    def ratio(self, base: "Curve", target: float) -> str:
        """How many times less than the base, with a 95 % interval over 500 resamples of the queries."""
        rng = np.random.default_rng(0)
        m = self.recall.shape[1]
        drawn = [rng.integers(0, m, m) for _ in range(500)]
        low, high = np.quantile([base.at(target, r) / self.at(target, r) for r in drawn], [0.025, 0.975])
        return f"{base.at(target) / self.at(target):.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="The Markdown file to write.")
    parser.add_argument("--keys", type=int, default=20_000)
    parser.add_argument("--queries", type=int, default=60_000, help="Training queries of each kind.")
    parser.add_argument(
        "--held-out", type=int, default=2_000, help="Real queries for val, and as many for test."
    )
    parser.add_argument("--samples", type=int, default=1_000_000, help="Training samples of each router.")
    parser.add_argument("--top", type=float, default=0.71, help="Mean top score of pseudo-queries.")
    o = parser.parse_args()
    rng = np.random.default_rng(0)
    count = {name: data_file(o.data, name).n for name in ("keys", "queries")}
    keys = rows_of(o.data, "keys", rng.permutation(count["keys"])[: o.keys])
    order = np.random.default_rng(1).permutation(count["queries"])
    rows_by_split = {"test": order[: o.held_out], "val": order[o.held_out : 2 * o.held_out]}
    real = rows_of(o.data, "queries", order[2 * o.held_out : 2 * o.held_out + o.queries])
    val, test = (rows_of(o.data, "queries", rows_by_split[name]) for name in ("val", "test"))
    copies = -(-o.queries // len(keys))
    many = np.concatenate([keys] * copies)[: o.queries]

    def stand_in(make: Make, weight: float) -> Floats:
        parts = [make(keys, weight, rng) for _ in range(copies)]
        return np.concatenate(parts)[: len(many)]

    trained = {
        "real queries": real,
        "the keys themselves": keys,
        "keys, noise of 0.02 a coordinate": stand_in(noisy, 0.02 * keys.shape[1] ** 0.5),
        f"keys, noise to a top score of {o.top:.2f}": stand_in(noisy, weight_for(noisy, keys, o.top)),
        f"keys mixed with keys, to {o.top:.2f}": stand_in(mixed, weight_for(mixed, keys, o.top)),
    }
    cells = kmeans(keys, default_count(len(keys), 3.0))
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:

        def labelled(name: str, x: Floats) -> Task:
            split = ["train"] * len(x) + ["val"] * len(val) + ["test"] * len(test)
            queries = np.concatenate([x, val, test])
            return amips.label(keys, queries, cells=cells, split=split, out=Path(folder) / name)

        first = labelled("task-0", real)
        builder, same_cells = Builder(first), cells_of(first)
        counts = [default_count(len(keys), factor) for factor in SWEEP]
        plain = [builder.searcher(Design.plain(count), None) for count in counts]
        # The number of cells of the baseline is chosen on val.
        base_searcher = min(plain, key=lambda s: sum(Curve(s, first.val).at(t) for t in TARGETS))
        base = Curve(base_searcher, first.test)

        def row(what: str, searcher: Searcher, top: str) -> None:
            curve = Curve(searcher, first.test)
            costs = [f"{curve.at(t):.1%}" for t in TARGETS]
            rows.append([what, f"{searcher.c:,}", top, *costs, *(curve.ratio(base, t) for t in TARGETS)])
            print(" | ".join(rows[-1]), flush=True)

        row("centroid, cells chosen on val", base_searcher, "-")
        row("centroid, the cells of the routers", builder.searcher(same_cells, None), "-")
        for i, (what, x) in enumerate(trained.items()):
            task = first if i == 0 else labelled(f"task-{i}", x)
            top = f"{np.asarray(task.train.top_scores[:, 0]).mean():.2f}"
            model = amips.train(task, samples=o.samples, out=Path(folder) / f"run-{i}")
            row(f"linear, trained on {what}", builder.searcher(same_cells, model), top)
        real_top = float(np.asarray(first.test.top_scores[:, 0]).mean())
    head = ["cells chosen by", "cells", "top score of its queries"]
    head += [f"cost at recall@10 {t:.2f}" for t in TARGETS]
    head += [f"x less than centroid, {t:.2f}" for t in TARGETS]
    note = (
        f"Cost: FLOPs of routing and scan on {o.held_out:,} real held-out queries (mean top score "
        f"{real_top:.2f}), as a share of a full scan; above 1 in the last columns is a gain over centroid. "
        f"n = {len(keys):,}, d = {keys.shape[1]}, {o.samples:,} training samples and one training run each; "
        f"in brackets the 95 % interval over test queries. {o.top:.2f} is the mean top score of the demo's "
        "pseudo-queries (another encoder, other texts). The stand-ins are made of vectors: they are not "
        "sentences, so this is not a measurement of pseudo-queries."
    )
    text = f"{markdown_table(head, rows)}\n\n{note}"
    machine = ", ".join(f"{name} {value}" for name, value in describe_machine().items())
    title = "# Trained on stand-ins, tested on real queries"
    o.out.write_text(f"{title}\n\n`python benchmarks/no_log.py DATA --out FILE`\n\n{text}\n\n{machine}.\n")
    print(o.out.read_text())


if __name__ == "__main__":
    main()
