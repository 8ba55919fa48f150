"""What does it cost to keep an index alive: keys that come later, how fast, what searching pays meanwhile.

    python benchmarks/living.py DATA [--keys 100000 --queries 60000] [--only growth|speed|beside]

DATA holds `keys` and `queries`. Three questions, each of cells (lean and flat) and of a graph:

growth   An index is made of a part of the keys, and the others are added in batches of 1,000. What recall@10
         does it have, at the FLOPs at which one that was made of all keys has 0.95, on queries nothing saw?
speed    Keys added in a second, in batches of 1,000, each on disk before the next, on one thread.
beside   The time of a query alone, while one thread adds and another removes without a pause, against that
         at rest.

Filters are in filters.py, drift is in drift.py. The table goes to results/living.md: for each
row the goal, what was measured, and whether it reached the goal.
"""

import argparse
import statistics
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from common import sample, write
from defaults import HeldOut

import amips
from amips.blas import threads
from amips.design import Design
from amips.nets import Linear
from amips.search import Index
from amips.vectors import Floats

RECALL, BATCH, HELD_OUT = 0.95, 1000, 2000
PARTS = (0.75, 0.5)
KINDS = ("cells, lean", "cells, flat", "graph")
POINTS_LOST = {0.75: 1.0, 0.5: 2.0}  # of recall, at most, by the part that was there first
RATES = {"cells, lean": 10_000, "cells, flat": 20_000}  # keys a second, at least
SLOWER = 1.3  # times the time of a query at rest, at most
SECONDS = 8.0  # of searching, at rest and beside changes


def index_of(keys: Floats, queries: Floats, kind: str, out: Path) -> Index:
    """An index of these keys, in a bundle; its router is not trained, which would only take time."""
    task = amips.label(
        keys, queries, out=out / f"task-{len(keys)}", cells=max(2, round(4 * len(keys) ** 0.5))
    )
    name = out / f"{kind.replace(', ', '-')}-{len(keys)}"
    if kind == "graph":
        return amips.build(task, structure="graph", out=name)
    storage = "lean" if kind.endswith("lean") else "flat"
    design = Design(task.c, router=Linear(), recipe=None, storage=storage)
    return amips.build(task, design=design, out=name)


def reached(goal: bool) -> str:
    """In the table."""
    return "yes" if goal else "no"


def at(points: list[tuple[float, float]], column: int, value: float) -> float:
    """Along a front of (share of a full scan, recall): the one at a value of the other, on a line between."""
    front: list[tuple[float, float]] = []
    for cost, recall in sorted(points):
        if not front or recall > front[-1][1]:
            front.append((cost, recall))
    costs, recalls = np.log([cost for cost, _ in front]), [recall for _, recall in front]
    if column == 0:
        return float(np.exp(np.interp(value, recalls, costs)))
    return float(np.interp(np.log(value), costs, recalls))


def growth(keys: Floats, queries: Floats, held_out: HeldOut, out: Path) -> list[list[str]]:
    """A row for each kind and part."""
    rows = []
    for kind in KINDS:
        cost = at(held_out.points(index_of(keys, queries, kind, out)), 0, RECALL)
        for part in PARTS:
            first = round(part * len(keys))
            with index_of(keys[:first], queries, kind, out) as index:
                for low in range(first, len(keys), BATCH):
                    index.add(keys[low : low + BATCH])
                recall = at(held_out.points(index), 1, cost)
            what = f"{kind}: {1 / part - 1:.0%} added to {part:.0%} of the keys"
            lost, most = 100 * (RECALL - recall), POINTS_LOST[part]
            figure = (
                f"{-lost:+.1f} points: recall@10 {recall:.3f} at the {cost:.2%} that {RECALL} costs with all"
            )
            rows.append([what, f"{-most:+.0f} point{'s'[: most > 1]} at most", figure, reached(lost <= most)])
            print(*rows[-1], sep=" | ", flush=True)
    return rows


def speed(keys: Floats, queries: Floats, out: Path) -> list[list[str]]:
    """Keys a second, of the second half of what is added: when the index is warm."""
    rows, first = [], round(PARTS[0] * len(keys))
    for kind in KINDS:
        with index_of(keys[:first], queries, kind, out) as index, threads(1):
            times = []
            for low in range(first, len(keys) - BATCH + 1, BATCH):
                start = time.perf_counter()
                index.add(keys[low : low + BATCH])
                times.append(time.perf_counter() - start)
        rate = BATCH * len(times[1:]) / sum(times[1:])
        goal, figure = RATES.get(kind), f"{rate:,.0f} keys a second (median {statistics.median(times):.3f} s)"
        rows.append(
            [
                f"{kind}: adding, on disk",
                "none" if goal is None else f"{goal:,} keys a second",
                figure,
                "" if goal is None else reached(rate >= goal),
            ]
        )
        print(*rows[-1], sep=" | ", flush=True)
    return rows


def beside(keys: Floats, queries: Floats, x: Floats, out: Path) -> list[list[str]]:
    """The median time of a query alone, in turns at rest and beside changes."""
    rows, first = [], round(PARTS[0] * len(keys))
    for kind in KINDS:
        with index_of(keys[:first], queries, kind, out) as index:
            stop, changes = threading.Event(), [0, 0]
            pool = keys[first:]

            def add(
                index: Index = index,
                stop: threading.Event = stop,
                changes: list[int] = changes,
                pool: Floats = pool,
            ) -> None:
                low = 0
                while not stop.is_set():
                    index.add(pool[low % len(pool) : low % len(pool) + 100])
                    low, changes[0] = low + 100, changes[0] + 1

            def remove(
                index: Index = index, stop: threading.Event = stop, changes: list[int] = changes
            ) -> None:
                low = 0
                while not stop.is_set() and low < first - 10:
                    index.remove(np.arange(low, low + 10))
                    low, changes[1] = low + 10, changes[1] + 1

            rest = _times(index, x)
            writers = [threading.Thread(target=work) for work in (add, remove)]
            for writer in writers:
                writer.start()
            busy = _times(index, x)
            stop.set()
            for writer in writers:
                writer.join()
            rest += _times(index, x)
        medians = statistics.median(rest), statistics.median(busy)
        tails = np.quantile(rest, 0.99), np.quantile(busy, 0.99)
        figure = f"{1e6 * medians[1]:,.0f} us beside {changes[0]:,} additions and {changes[1]:,} removals, "
        figure += f"{1e6 * medians[0]:,.0f} us at rest"
        slower = medians[1] / medians[0]
        figure = f"{slower:.2f} times (99th of 100: {tails[1] / tails[0]:.1f}): {figure}"
        goal = f"{SLOWER:g} times at most"
        rows.append([f"{kind}: one query beside changes", goal, figure, reached(slower <= SLOWER)])
        print(*rows[-1], sep=" | ", flush=True)
    return rows


def _times(index: Index, x: Floats) -> list[float]:
    times, end, row = [], time.perf_counter() + SECONDS, 0
    while time.perf_counter() < end:
        start = time.perf_counter()
        index.search(x[row % len(x)])
        times.append(time.perf_counter() - start)
        row += 1
    return times


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--queries", type=int, default=60_000)
    parser.add_argument("--only", choices=["growth", "speed", "beside"])
    o = parser.parse_args()
    keys, asked = sample(o.data, "keys", o.keys), sample(o.data, "queries", o.queries + HELD_OUT)
    rng = np.random.default_rng(0)
    keys, asked = keys[rng.permutation(len(keys))], asked[rng.permutation(len(asked))]
    x, queries = asked[:HELD_OUT], asked[HELD_OUT:]
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        if o.only in (None, "growth"):
            rows += growth(keys, queries, HeldOut.of(keys, x), out / "growth")
        if o.only in (None, "speed"):
            rows += speed(keys, queries, out / "speed")
        if o.only in (None, "beside"):
            rows += beside(keys, queries, x, out / "beside")
    size = f"{len(keys):,} keys, {len(queries):,} queries to learn from, {len(x):,} others to measure on"
    if o.only is None:
        write(
            "living",
            "What it costs to keep an index alive",
            f"python benchmarks/living.py DATA --keys {o.keys} --queries {o.queries}",
            ["what", "goal", "measured", "reached"],
            rows,
            rows,
            f"{size}; d = {keys.shape[1]}. Additions of 1,000 keys (beside searches 100), removals of 10, "
            "each on disk before the next. Routers are not trained.",
        )


if __name__ == "__main__":
    main()
