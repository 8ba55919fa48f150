"""Does the gain over FAISS grow or vanish with the number of keys? Cells and a graph against IVF and IVF PQ.

    python benchmarks/scaling_n.py WORK [--sizes 1e4 1e5 1e6 2e6] [--dim 128] [--logs fixed growing]
        [--systems IVF "IVF PQ" cells graph]

The log has 20,000 queries ("fixed"), or one for every 20 keys, 5,000 at least ("growing"). Keys and queries
are generated (`common.generated`). Baselines are swept over numbers of cells, and their best on test counts;
what is ours is chosen on val and measured on test. FLOPs at recall@10 0.95, as a share of a full scan.

Every measurement is a line of WORK/scaling.jsonl, written when it is known: the same call continues, and
measures IVF PQ again where it did not reach the recall with other numbers of candidates than `REFINES`. The
table of what is there, and of what was there before in results/scaling_n.json, goes to results/scaling_n.md;
with `--sizes` and nothing behind it, only that.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from common import generated, merged, write

import amips
from amips.backends import build as build_backend
from amips.builder import Builder, graph_design
from amips.cells import default_count
from amips.design import Design
from amips.graph import LOG_DEPTH
from amips.metrics import TOP, cost_at
from amips.nets import Linear, Recipe
from amips.scratch import Scratch
from amips.search import (
    GraphSearcher,
    Point,
    Searcher,
    measure,
    measure_margins,
    measure_masses,
    near_target,
    recalls,
)
from amips.task import Split, Task

TARGET = 0.95
FACTORS = (0.5, 1.0, 2.0, 4.0, 8.0, 10.0)  # cells of the baselines, in units of sqrt(n)
OWN_FACTORS = (2.0, 4.0, 8.0)
REFINES = (10, 40, 160, 640, 2560)  # candidates of IVF PQ for each result, that are scored again
HELD_OUT = 1000
FIXED, EACH, LEAST = 20_000, 20, 5_000  # queries of the log: fixed; one for so many keys, so many at least
OURS = ("cells", "graph")
BASELINES = ("IVF", "IVF PQ")
SYSTEMS = (*BASELINES, *OURS)
HEAD = ["keys", "log", "queries", "IVF", "IVF PQ FastScan", *OURS, "gain over the best baseline"]
Figures = dict[str, Any]


def log_length(kind: str, n: int) -> int:
    """How many queries are learned from."""
    return FIXED if kind == "fixed" else max(LEAST, n // EACH)


def share(points: list[Point], full: float) -> float:
    """FLOPs at the target along the front of these points, as a share of a full scan."""
    flops, recall = (np.array([getattr(p, name) for p in points]) for name in ("flops", "recall10"))
    return float(cost_at(flops, recall, TARGET)) / full


def plain(builder: Builder, count: int) -> Figures:
    """Plain IVF: recall follows from the cells that are probed."""
    searcher = builder.searcher(Design.plain(count))
    return {"test": share(measure(searcher, builder.task.test), _full(builder.task))}


def fastscan(task: Task, count: int) -> Figures:
    """FAISS IVF with PQ FastScan codes and float32 refinement, over its probes and candidates.

    What costs more than a setting that reached the target cannot lower the cost at the target: a sweep of
    probes ends there, or where half of a full scan is spent.
    """
    scratch = Scratch("amips-scaling-")
    backend = build_backend("fastscan", task.key_vectors, scratch.path / "index", partitions=count)
    x, top = np.asarray(task.test.queries), np.asarray(task.test.top_ids)
    costs, reached = list[float](), list[float]()
    most = 0.5 * _full(task)
    for refine in REFINES:
        backend.refine = refine  # type: ignore[attr-defined]
        for budget in backend.budgets():
            cost = float(backend.find_cost(x, TOP, budget).flops.mean())
            if cost > most:
                break
            costs.append(cost)
            reached.append(float(recalls(backend.find(x, TOP, budget)[1], top, TOP).mean()))
            if reached[-1] >= TARGET:
                most = min(most, cost)
    scratch.remove()
    at_target = float(cost_at(np.array(costs), np.array(reached), TARGET)) / _full(task)
    return {"test": at_target, "refines": list(REFINES), "recall": max(reached, default=0.0)}


def cells(builder: Builder, design: Design) -> Figures:
    """A design of cells: its cost on val, by which it is chosen, and on test."""
    searcher = near_target(builder.searcher(design), builder.task.val, TARGET)
    on_val = share(searcher.points, _full(builder.task))
    return {"val": on_val, "test": share(_on_test(searcher, builder.task.test), _full(builder.task))}


def _on_test(searcher: Searcher, split: Split) -> list[Point]:
    """Points at the efforts that were measured on val."""
    efforts = {(point.min_mass, point.refine) for point in searcher.points if point.min_mass}
    return [one for mass, refine in efforts for one in measure_masses(searcher, split, [mass], refine)]


def graph(builder: Builder) -> Figures:
    """A graph that learns from the log."""
    index = builder.index(builder.resolved(graph_design(builder.task)))
    assert isinstance(index, GraphSearcher)
    full = _full(builder.task)
    return {"val": share(index.points, full), "test": share(measure_margins(index, builder.task.test), full)}


def _full(task: Task) -> float:
    return 2.0 * task.n * task.d


def own_designs(n: int, d: int) -> Iterator[tuple[str, Design]]:
    """Designs of cells: numbers of them, plain and query-aware, at the start of training and trained."""
    for count in dict.fromkeys(default_count(n, factor) for factor in OWN_FACTORS):
        for strength in (1.5, 0.0):
            for recipe in (None, Recipe()):
                base = Design(count, strength, router=Linear(), recipe=recipe, spill_fraction=0.0)
                for storage in ("flat", "lean"):
                    words = (
                        f"{count} cells, strength {strength:g}, {'trained' if recipe else 'start'}, {storage}"
                    )
                    yield words, replace(base, storage=storage, dimensions=None)


def measurements(
    folder: Path, n: int, d: int, kind: str, minutes: float
) -> Iterator[tuple[str, str, Callable[[], Figures]]]:
    """(system, setting, what measures it) for one size and log; the task is made when the first is asked."""
    m = log_length(kind, n)
    keys, queries = generated(folder, n, m + 2 * HELD_OUT, d)
    place = folder / f"{n}-{m}"
    options = {"k": LOG_DEPTH, "val": HELD_OUT, "test": HELD_OUT, "cells": 1}
    task = amips.label(keys, queries, out=place / "task", progress=True, **options)  # type: ignore[arg-type]
    builder = Builder(task, place / "designs", minutes=minutes, iterations=10)
    for count in dict.fromkeys(default_count(n, factor) for factor in FACTORS):
        yield "IVF", f"{count} cells", lambda count=count: plain(builder, count)
        yield "IVF PQ", f"{count} cells", lambda count=count: fastscan(task, count)
    for words, design in own_designs(n, d):
        yield "cells", words, lambda design=design: cells(builder, builder.resolved(design))
    yield "graph", "from keys and log", lambda: graph(builder)


def table(lines: list[dict[str, Any]]) -> tuple[list[list[str]], str]:
    """A row for each size and log, and how costs grow with the keys.

    The gain is over the best baseline of those that reached the recall, which it names: one that did not, or
    was not measured, is not beaten by that.
    """
    rows, costs = list[list[str]](), dict[tuple[str, str], list[tuple[int, float]]]()
    for n, kind in sorted({(line["n"], line["log"]) for line in lines}):
        best, shown = dict[str, float](), list[str]()
        for system in SYSTEMS:
            some = [line for line in lines if (line["n"], line["log"], line["system"]) == (n, kind, system)]
            cost = _best(some, "val" if system in OURS else "test")
            shown.append("not measured" if not some else _missed(some) if cost is None else f"{cost:.3%}")
            if cost is not None:
                best[system] = cost
                costs.setdefault((kind, system), []).append((n, cost * n))
        baseline = min((one for one in BASELINES if one in best), key=best.__getitem__, default=None)
        own = min((best[one] for one in OURS if one in best), default=None)
        gain = f"{best[baseline] / own:.2f}x, over {baseline}" if baseline and own else "none to tell"
        rows.append([f"{n:,}", kind, f"{log_length(kind, n):,}", *shown, gain])
    growth = []
    for (kind, system), pairs in costs.items():
        if len(pairs) > 1:
            power = np.polyfit(*np.log(np.array(pairs).T), 1)[0]
            growth.append(f"{system}, {kind} log: n^{power:.2f}")
    return rows, "The cost of a query grows like: " + "; ".join(growth) + "." if growth else ""


def _best(lines: list[dict[str, Any]], by: str) -> float | None:
    """The cost on test of the setting that is best by a figure; None if that did not reach the recall."""
    reached = [line for line in lines if line[by] is not None]
    cost: float | None = min(reached, key=lambda line: line[by])["test"] if reached else None
    return cost


def _missed(lines: list[dict[str, Any]]) -> str:
    """What is said of a system of which no setting reached the recall: also what was tried."""
    tried = sorted({refine for line in lines for refine in line.get("refines", [])})
    recall = max((line["recall"] for line in lines if "recall" in line), default=None)
    best = "" if recall is None else f": {recall:.3f} at best"
    return f"did not reach {TARGET}{best}" + (f" (refine {', '.join(map(str, tried))})" if tried else "")


def finished(line: dict[str, Any]) -> bool:
    """Whether a measurement of before stands: not if it missed the recall with other candidates than now."""
    return line["system"] != "IVF PQ" or line["test"] is not None or line.get("refines") == list(REFINES)


def main() -> None:
    """Measure what is not there yet, and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", type=Path)
    parser.add_argument("--sizes", type=float, nargs="*", default=[1e4, 1e5, 1e6, 2e6])
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--logs", nargs="+", choices=["fixed", "growing"], default=["fixed", "growing"])
    parser.add_argument("--minutes", type=float, default=1.0, help="of training, for each router")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS, help="to measure now")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    place = arguments.work / "scaling.jsonl"
    lines = [json.loads(line) for line in place.read_text().splitlines()] if place.exists() else []
    done = {(line["n"], line["log"], line["system"], line["setting"]) for line in lines if finished(line)}
    for n in map(int, arguments.sizes):
        for kind in arguments.logs:
            for system, setting, work in measurements(
                arguments.work, n, arguments.dim, kind, arguments.minutes
            ):
                if system not in arguments.systems or (n, kind, system, setting) in done:
                    continue
                figures = work()
                figures |= {name: None for name in ("val", "test") if math.isnan(figures.get(name, 0))}
                line = {"n": n, "log": kind, "system": system, "setting": setting, **figures}
                lines.append(line)
                with place.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(json.dumps(line), flush=True)
    lines = merged("scaling_n", lines, ("n", "log", "system", "setting"))  # of each the last
    rows, growth = table(lines)
    command = f"python benchmarks/scaling_n.py WORK --dim {arguments.dim}"
    write("scaling_n", "The gain with the number of keys", command, HEAD, rows, lines, growth)


if __name__ == "__main__":
    main()
