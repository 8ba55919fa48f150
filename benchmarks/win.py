"""What amips gains over the best FAISS IVF, and what each part of it gives.

    python benchmarks/win.py TASK --out RESULTS
    python benchmarks/win.py TASK --out RESULTS --engine scann --engine soar --engine usearch

TASK is labelled with k of at least 10. Every system is answered on all held-out queries; budgets are timed
where they surround a recall of interest, each beside the same yardstick, on one thread.
Raw runs are kept in RESULTS: a second call derives the tables again. The tables go to results/win.md.
Engines named with --engine are searched with x and stand beside HNSW, as references.
"""

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from amips.bench.comparison import identity
from amips.bench.derive import Bootstrap, Family, Measured, baseline, on_test, on_val, yardstick_seconds
from amips.bench.engines import OpenedIVF, budgets
from amips.bench.machine import describe
from amips.bench.running import Bench, Settings
from amips.bench.store import Store
from amips.bench.systems import System, engine_systems, own_systems, sweep
from amips.cells import STRENGTH
from amips.engines import ENGINES, missing
from amips.lean import ROUTE_SHARE, SCAN_SHARE, rank_for
from amips.progress import bar
from amips.search import recalls
from amips.search.build import routed
from amips.search.points import shares
from amips.task import Task

TARGETS = [("recall@1", 0.90), ("recall@1", 0.95), ("recall@10", 0.90), ("recall@10", 0.95)]
TIMED = (0.90, 0.95)  # recall@10 around which times are taken
AXES = {"flops": "FLOPs", "single/1": "time, batch 1", "batch/1": "time, batch 1,024"}
LOW, HIGH = 0.89, 0.96  # recalls between which budgets are run: no more are needed


def parts(n: int, d: int) -> dict[str, list[System]]:
    """Each part of the recipe alone and together, over the same numbers of cells."""
    counts = sorted({s.cells for s in own_systems(n, d)})[1:]
    rank, dims = rank_for(d, ROUTE_SHARE), rank_for(d, SCAN_SHARE)
    lean = {"storage": "lean", "lean": dims}
    routed = {"router": "linear", "rank": rank}
    made = {
        "query-aware cells": {"aware": STRENGTH},
        "probes as each query needs": {"stop": "share"},
        "linear router": {"router": "linear"},
        f"linear router of rank {rank}": routed,
        f"lean storage, {dims} dimensions": lean,
        "query-aware cells + linear router": {"aware": STRENGTH, **routed},
        "query-aware cells + probes as needed": {"aware": STRENGTH, "stop": "share"},
        "plain cells + linear router + probes as needed": {**routed, "stop": "share"},
    }
    return {
        name: [System(cells=c, label=name, **how) for c in counts]  # type: ignore[arg-type]
        for name, how in made.items()
    }


def of_interest(bench: Bench, system: System) -> list[int] | None:
    """The budgets whose recall on val surrounds the recalls of interest; None for engines without cells."""
    if system.engine != "ivf":
        return None
    opened = bench.open(system)
    assert isinstance(opened, OpenedIVF)
    seen = routed(opened.searcher, bench.task.val)
    ladder = budgets(system)
    kept, last = [], None
    for budget in ladder:
        by_share = system.stop == "share"
        found = (seen.by_share(shares()[budget]) if by_share else seen.by_probes(budget)).found
        recall = [float(found[:, 0].mean()), float(found.mean())]
        if max(recall) >= LOW:
            kept += [last] if last is not None and not kept else []
            kept.append(budget)
        if min(recall) >= HIGH + (0.02 if system.lean else 0):  # codes lose a little more
            break
        last = budget
    return [b for b in kept if b is not None] or [ladder[-1]]


def around(bench: Bench, system: System, budgets: list[int]) -> list[int]:
    """The budgets just below and just above each recall of interest, on val."""
    held = len(bench.task.val)
    found = [recalls(bench.store.get(system, b).ids[:held], bench.true[:held], 10).mean() for b in budgets]
    chosen: set[int] = set()
    for target in TIMED:
        above = next((i for i, recall in enumerate(found) if recall >= target), len(found) - 1)
        chosen |= {above, max(0, above - 1)}
    return [budgets[i] for i in sorted(chosen)]


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def share(family: Family, metric: str, target: float, full: float) -> str:
    """FLOPs at a recall as a share of a full scan; - where the engine does not tell them."""
    if not family.told("flops"):
        return "-"
    value = family.cost_at("flops", metric, target) / full  # type: ignore[arg-type]
    return "not reached" if math.isnan(value) else f"{value:.2%}"


def main() -> None:
    """Run, derive, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=0.75, help="Training of each router.")
    parser.add_argument("--rounds", type=int, default=5, help="How often each time is taken.")
    parser.add_argument(
        "--engine", dest="engines", action="append", default=[], choices=[*ENGINES], help="May be repeated."
    )
    parser.add_argument("--write", type=Path, default=Path(__file__).parent / "results" / "win.md")
    o = parser.parse_args()
    for reason in missing(o.engines).values():
        parser.error(reason)
    task = Task(o.task)
    show = sys.stderr.isatty()
    settings = Settings(minutes=o.minutes, rounds=o.rounds, progress=show, all_threads=False)
    store = Store(o.out, identity(task, settings))
    bench = Bench(task, store, settings)
    plain = [System(cells=c) for c in sweep(task.n)]
    own = own_systems(task.n, task.d)
    named = engine_systems(task, ["hnsw", *o.engines], {})
    references = [*named, System(engine="flat")]
    pieces = parts(task.n, task.d)
    compared = [*plain, *own, *references]
    everything = [*compared, *(s for systems in pieces.values() for s in systems)]
    with bar(len(everything), "answers", "system", show) as shown:
        ran = {}
        for system in sorted(everything, key=lambda s: (s.engine, s.cells, s.aware, s.lean)):
            ran[system] = bench.answer(system, of_interest(bench, system))
            shown.update()
    for system in compared:
        bench.take_times({system: around(bench, system, ran[system])})
    bench.close()

    full = 2 * task.n * task.d
    runs = store.runs(compared)
    tested = on_test(runs, task)
    base = baseline(tested)
    assert base is not None
    draw = Bootstrap(len(task.test))
    clock = yardstick_seconds(runs)
    rows, ratios = [], []
    own_way = by_faiss(base)
    others = {"FAISS IVF": own_way, "FAISS IVF, amips's scan": base}
    others |= {f.name: f for f in tested if f.role == "reference" and not f.name.startswith("exact")}
    for family in [own_way, *tested]:
        if family.name.startswith("exact"):
            continue
        cells = [share(family, metric, target, full) for metric, target in TARGETS]
        for mode in ("single/1", "batch/1"):
            for target in TIMED:
                seconds = family.cost_at(mode, "recall@10", target) * clock[mode]  # type: ignore[arg-type]
                cells.append("-" if math.isnan(seconds) else f"{1e6 * seconds:.0f} us")
        rows.append([family.name, *cells])
        if family.role != "contender":
            continue
        for metric, target, axis in [
            *((m, t, "flops") for m, t in TARGETS),
            *(("recall@10", t, mode) for mode in ("single/1", "batch/1") for t in TIMED),
        ]:
            told = []
            for other in others.values():
                ratio = draw.ratio(other, family, axis, metric, target)  # type: ignore[arg-type]
                known = ratio is not None and not math.isnan(ratio.value)
                told.append(f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})" if known else "-")
            ratios.append([family.name, f"{metric} {target:.2f}", AXES[axis], *told])
    names = [f"FLOPs, {metric} {target:.2f}" for metric, target in TARGETS]
    names += [f"{what}, recall@10 {t:.2f}" for what in ("batch 1", "batch 1,024") for t in TIMED]
    ablation = []
    for name, systems in [("plain IVF", plain), *pieces.items()]:
        on = [families(store.runs(systems), task) for families in (on_val, on_test)]
        ablation.append(
            [
                name,
                *(share(merged(found), metric, target, full) for found in on for metric, target in TARGETS),
            ]
        )
    for family, val in zip(tested, on_val(runs, task), strict=True):
        if family.role == "contender":
            both = [share(f, metric, target, full) for f in (val, family) for metric, target in TARGETS]
            ablation.append([f"all of it: {family.name}", *both])
    machine = ", ".join(f"{name} {value}" for name, value in describe().items())
    command = f"python benchmarks/win.py TASK --out RESULTS --minutes {o.minutes} --rounds {o.rounds}"
    command += "".join(f" --engine {name}" for name in o.engines)
    untold = " (- where an engine does not tell them)" if o.engines else ""
    text = "\n\n".join(
        [
            "# What amips gains over the best FAISS IVF",
            f"`{command}`; "
            f"{task.n:,} keys, d = {task.d}, {len(task.train):,} training queries, {len(task.test):,} test "
            f"queries; {machine}. FLOPs as a share of a full scan{untold}; times on one thread.",
            markdown(["", *names], rows),
            "How many times less than others, with 95 % intervals. FAISS IVF has the best of its numbers of "
            "cells, from sqrt(n) / 2 to 10 sqrt(n); in its second column it may also be scanned cell by cell "
            "with matrix products, which is how amips scans float32 keys for large batches.",
            markdown(["", "at", "cost", *others], ratios),
            "## What each part gives",
            "FLOPs as a share of a full scan, the best over "
            + " and ".join(f"{c:,}" for c in sorted({s.cells for s in own})[1:])
            + " cells (plain IVF and all of it: over their own sweeps); on val, then on test.",
            markdown(["", *(f"{s} {m} {t:.2f}" for s in ("val", "test") for m, t in TARGETS)], ablation),
        ]
    )
    print(text)
    o.write.write_text(text + "\n")


def by_faiss(family: Family) -> Family:
    """The same runs, with the times of FAISS's own search alone."""
    name = f"{family.name}, FAISS's own search"
    runs = [
        replace(
            m, run=replace(m.run, times={k: t for k, t in m.run.times.items() if "faiss/" in k}), _known={}
        )
        for m in family.runs
    ]
    return Family(name, family.role, runs)


def merged(found: list[Family]) -> Family:
    """Families as one."""
    members: list[Measured] = [run for family in found for run in family.runs]
    return replace(found[0], runs=members)


if __name__ == "__main__":
    np.seterr(all="raise", under="ignore")
    main()
