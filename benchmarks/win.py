"""What amips gains over the best FAISS IVF, and what each part of it gives.

    python benchmarks/win.py TASK --out RESULTS
    python benchmarks/win.py TASK --out RESULTS --engine scann --engine soar --engine usearch

TASK is labelled with k of at least 10. Every system is answered on all held-out queries; budgets are timed
where they surround a recall of interest, each beside the same yardstick, on one thread.
Raw runs are kept in RESULTS: a second call derives the tables again. The tables go to results/win.md, recall
against cost to win.png beside it.
Engines named with --engine are searched with x and stand beside HNSW, as references.
"""

import argparse
import math
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from amips.bench.comparison import identity
from amips.bench.derive import (
    Axis,
    Bootstrap,
    Family,
    Measured,
    Metric,
    baseline,
    front,
    on_test,
    on_val,
    yardstick_seconds,
)
from amips.bench.searchers import CellSearch, budgets
from amips.bench.figures import figures
from amips.bench.machine import describe
from amips.bench.runner import Bench, Settings
from amips.bench.results import Store
from amips.bench.summary import Chart, Panel, Series, Summary
from amips.bench.systems import System, engine_systems, own_systems, sweep
from amips.cells import STRENGTH
from amips.backends import BACKENDS, missing
from amips.errors import ResultsError
from amips.files import locked
from amips.lean import RANK_FRACTION, SCAN_FRACTION, reduced_dimension
from amips.progress import bar
from amips.search import recalls
from amips.search.build import routed
from amips.search.points import shares
from amips.search.spill import SPILL
from amips.tables import markdown_table
from amips.task import Task

TARGETS: list[tuple[Metric, float]] = [
    *(("recall@1", 0.90), ("recall@1", 0.95), ("recall@10", 0.90), ("recall@10", 0.95)),
]
TIMED = (0.80, 0.90, 0.95, 0.98)  # recall@10 around which times are taken
FLOPS_AT: list[tuple[Metric, float]] = [*TARGETS[:2], *(("recall@10", target) for target in TIMED)]
TIMES: dict[Axis, str] = {"single/1": "batch 1", "batch/1": "batch 1,024"}
RANGE = (0.79, 0.985)  # recalls between which budgets of what is compared are run: no more are needed
PARTS_RANGE = (0.89, 0.96)  # ... and of the parts, which are told at TARGETS only
DRAWN_FROM = 0.75  # recall@10 from which points are drawn
FAISS, FAISS_SCANNED = "FAISS IVF", "FAISS IVF, amips's scan"


def parts(n: int, d: int) -> dict[str, list[System]]:
    """Each part of the recipe alone and together, over the same numbers of cells."""
    counts = sorted({s.cells for s in own_systems(n, d)})[1:]
    rank, dims = reduced_dimension(d, RANK_FRACTION), reduced_dimension(d, SCAN_FRACTION)
    lean = {"storage": "lean", "lean": dims}
    routed = {"router": "linear", "rank": rank}
    made = {
        "query-aware cells": {"aware": STRENGTH},
        "probes as each query needs": {"stop": "share"},
        "linear router": {"router": "linear"},
        f"linear router of rank {rank}": routed,
        f"lean storage, {dims} dimensions": lean,
        f"{SPILL:.0%} of the keys in a second cell": {"spill": SPILL},
        "query-aware cells + linear router": {"aware": STRENGTH, **routed},
        "query-aware cells + probes as needed": {"aware": STRENGTH, "stop": "share"},
        "plain cells + linear router + probes as needed": {**routed, "stop": "share"},
        "all of it, float32 keys, no second cells": {"aware": STRENGTH, **routed, "stop": "share"},
        "all of it, lean storage, no second cells": {"aware": STRENGTH, **routed, "stop": "share", **lean},
    }
    return {
        name: [System(cells=c, label=name, **how) for c in counts]  # type: ignore[arg-type]
        for name, how in made.items()
    }


def of_interest(bench: Bench, system: System, low: float, high: float) -> list[int] | None:
    """The budgets whose recall on val surrounds the recalls of interest; None for engines without cells."""
    if system.engine != "ivf":
        return None
    opened = bench.open(system)
    assert isinstance(opened, CellSearch)
    seen = routed(opened.searcher, bench.task.val)
    ladder = budgets(system)
    enough = min(high + 0.02, 0.995) if system.lean else high  # codes lose a little more
    kept: list[int] = []
    for place, budget in enumerate(ladder):
        at_mass = system.stop == "share"
        found = (seen.at_mass(shares()[budget]) if at_mass else seen.at_probes(budget)).found
        recall = [float(found[:, 0].mean()), float(found.mean())]
        if max(recall) >= low:
            kept = kept or ladder[max(0, place - 1) : place]
            kept.append(budget)
        if min(recall) >= enough:
            break
    return kept or [ladder[-1]]


def around(bench: Bench, system: System, budgets: list[int]) -> list[int]:
    """The budgets just below and just above each recall of interest, on val."""
    held = len(bench.task.val)
    found = [recalls(bench.store.get(system, b).ids[:held], bench.true[:held], 10).mean() for b in budgets]
    chosen: set[int] = set()
    for target in TIMED:
        above = next((i for i, recall in enumerate(found) if recall >= target), len(found) - 1)
        chosen |= {above, max(0, above - 1)}
    return [budgets[i] for i in sorted(chosen)]


def share(family: Family, metric: Metric, target: float, full: float) -> str:
    """FLOPs at a recall as a share of a full scan; - where the engine does not tell them."""
    if not family.told("flops"):
        return "-"
    value = family.cost_at("flops", metric, target) / full
    return "not reached" if math.isnan(value) else f"{value:.2%}"


def microseconds(family: Family, axis: Axis, target: float, clock: dict[str, float]) -> str:
    """Time of a query at a recall@10; - where it is not reached."""
    seconds = family.cost_at(axis, "recall@10", target) * clock[axis]
    return "-" if math.isnan(seconds) else f"{1e6 * seconds:.0f} us"


def verdict(own: list[tuple[Family, Family]], others: dict[str, Family], draw: Bootstrap) -> list[str]:
    """Where each of the others takes less time than amips's best system, and where more.

    `own` are amips's systems on val and on test: of those that reach a recall the best is chosen on val.
    """
    sentences = []
    for name, other in others.items():
        for axis, batch in TIMES.items():
            said: dict[str, list[str]] = {}
            for target in TIMED:
                how, why = _compared(own, name, other, axis, target, draw)
                said.setdefault(how, []).append(f"{target:.2f} ({why})")
            told = "; ".join(f"{how} {', '.join(where)}" for how, where in said.items())
            sentences.append(f"{name}, {batch}: {told}.")
    return sentences


def _compared(
    own: list[tuple[Family, Family]], name: str, other: Family, axis: Axis, target: float, draw: Bootstrap
) -> tuple[str, str]:
    """How the time of one other compares at a recall, and by how much."""

    def cost(family: Family) -> float:
        return family.cost_at(axis, "recall@10", target)

    reached = {cost(val): test for val, test in own if not math.isnan(cost(val) + cost(test))}
    late = [name] if math.isnan(cost(other)) else []
    late += [] if reached else ["amips"]
    if late:
        return "not compared at", f"not reached by {' and '.join(late)}"
    ours = reached[min(reached)]
    ratio = draw.ratio(other, ours, axis, "recall@10", target)
    if ratio is None:
        return "not compared at", "not reached by either in most resamples"
    if ratio.worse:
        most = f"{1 / ratio.low:.2f}" if ratio.low > 0 else "inf"
        return (
            "faster at",
            f"{1 / ratio.value:.2f} times as fast, {1 / ratio.high:.2f} to {most}; {ours.name}",
        )
    longer = f"{ratio.value:.2f} times as long, {ratio.low:.2f} to {ratio.high:.2f}; {ours.name}"
    return "slower at" if ratio.better else "undecided at", longer


def chart(name: str, shown: dict[str, Family], clock: dict[str, float], full: float) -> Chart:
    """Recall@10 against the time of a query at both batch sizes, and against FLOPs: the front of each."""
    panels = []
    units: dict[Axis, tuple[float, str, str]] = {
        axis: (1e6 * clock[axis], f"{batch[0].upper()}{batch[1:]}", "us a query, one thread")
        for axis, batch in TIMES.items()
    }
    units["flops"] = (100 / full, "FLOPs", "% of a full scan")
    for axis, (unit, title, label) in units.items():
        series = []
        for family_name, family in shown.items():
            if axis == "flops" and family_name == FAISS_SCANNED:
                continue  # another way to compute the same
            cost, recall = family.costs(axis), family.recalls("recall@10")
            known = np.flatnonzero(~np.isnan(cost) & (recall >= DRAWN_FROM))
            best = known[front(cost[known], recall[known])]
            if len(best) == 0:
                continue
            role: Any = family.role
            x, y = ([float(v) for v in values[best]] for values in (recall, cost * unit))
            series.append(Series(family_name, x, y, group=role))
        panels.append(Panel(title, "recall@10", label, series, log_y=True))
    return Chart(name, "Cost of a recall: lower is better", panels)


def measure(bench: Bench, compared: list[System], pieces: list[System], show: bool) -> None:
    """Answer with everything, and time what is compared."""
    ran = {}
    ranges = dict.fromkeys(pieces, PARTS_RANGE) | dict.fromkeys(compared, RANGE)
    with closing(bench):
        with bar(len(ranges), "answers", "system", show) as shown:
            for system in sorted(ranges, key=lambda s: (s.engine, s.cells, s.aware, s.lean)):
                ran[system] = bench.answer(system, of_interest(bench, system, *ranges[system]))
                shown.update()
        for system in compared:
            bench.take_times({system: around(bench, system, ran[system])})


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
        "--engine", dest="engines", action="append", default=[], choices=[*BACKENDS], help="May be repeated."
    )
    parser.add_argument("--write", type=Path, default=Path(__file__).parent / "results" / "win.md")
    o = parser.parse_args()
    for reason in missing(o.engines).values():
        parser.error(reason)
    task = load_task(o.task)
    show = sys.stderr.isatty()
    settings = Settings(minutes=o.minutes, rounds=o.rounds, progress=show, all_threads=False)
    store = Store(o.out, identity(task, settings))
    plain = [System(cells=c) for c in sweep(task.n)]
    own = own_systems(task.n, task.d)
    compared = [*plain, *own, *engine_systems(task, ["hnsw", *o.engines], {}), System(engine="flat")]
    pieces = parts(task.n, task.d)
    # The lock of `amips bench`, which may be at work on the same results.
    busy = ResultsError(f"another amips bench is at work in {o.out}; wait for it, or choose another out")
    with locked(store.path / ".lock", busy):
        bench = Bench(task, store, settings)
        measure(bench, compared, [s for systems in pieces.values() for s in systems], show)

        runs = store.runs(compared)
        part_runs = {name: store.runs(systems) for name, systems in [("plain IVF", plain), *pieces.items()]}
    full = 2 * task.n * task.d
    clock = yardstick_seconds(runs)
    both = [
        (val, test)
        for val, test in zip(on_val(runs, task), on_test(runs, task), strict=True)
        if not test.name.startswith("exact")
    ]
    tested = [test for _, test in both]
    contenders = [pair for pair in both if pair[1].role == "contender"]
    base = baseline(tested)
    assert base is not None
    own_way = by_faiss(base)
    others = {FAISS: own_way, FAISS_SCANNED: base}
    others |= {f.name: f for f in tested if f.role == "reference"}
    draw = Bootstrap(len(task.test))

    listed = [own_way, *tested]
    flops = [[f.name, *(share(f, m, t, full) for m, t in FLOPS_AT)] for f in listed]
    times = [[f.name, *(microseconds(f, axis, t, clock) for axis in TIMES for t in TIMED)] for f in listed]
    asked: list[tuple[Metric, float, Axis]] = [(m, t, "flops") for m, t in FLOPS_AT]
    asked += [("recall@10", t, axis) for axis in TIMES for t in TIMED]
    ratios = []
    for _, family in contenders:
        for metric, target, axis in asked:
            told = []
            for other in others.values():
                ratio = draw.ratio(other, family, axis, metric, target)
                told.append(
                    "-" if ratio is None else f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
                )
            cost = f"time, {TIMES[axis]}" if axis in TIMES else "FLOPs"
            ratios.append([family.name, f"{metric} {target:.2f}", cost, *told])
    ablation = []
    for name, found in part_runs.items():
        on = [merged(families(found, task)) for families in (on_val, on_test)]
        ablation.append([name, *(share(f, m, t, full) for f in on for m, t in TARGETS)])
    for val, test in contenders:
        row = [share(f, m, t, full) for f in (val, test) for m, t in TARGETS]
        ablation.append([f"all of it: {test.name}", *row])

    shown = {FAISS: own_way, FAISS_SCANNED: base} | {f.name: f for f in tested if f is not base}
    drawn = chart(o.write.stem, shown, clock, full)
    figures(Summary("win", drawn.title, [], charts=[drawn]), o.write.parent, formats=("png",))
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
            markdown_table(["FLOPs", *(f"{m} {t:.2f}" for m, t in FLOPS_AT)], flops),
            markdown_table(["time", *(f"{w}, recall@10 {t:.2f}" for w in TIMES.values() for t in TIMED)], times),
            f"![{drawn.title}]({drawn.name}.png)",
            f"Each line is the best over all numbers of cells and budgets; times were taken near recall@10 "
            f"{', '.join(f'{t:.2f}' for t in TIMED)} only.",
            "Who is faster than amips, by recall@10 and batch size? amips is the faster of its systems on "
            "val, named in brackets; it is decided where the 95 % interval says so.",
            "\n".join(f"- {sentence}" for sentence in verdict(contenders, others, draw)),
            "How many times less than others, with 95 % intervals. FAISS IVF has the best of its numbers of "
            "cells, from sqrt(n) / 2 to 10 sqrt(n); in its second column it may also be scanned cell by cell "
            "with matrix products, which is how amips scans float32 keys for large batches.",
            markdown_table(["", "at", "cost", *others], ratios),
            "## What each part gives",
            "FLOPs as a share of a full scan, the best over "
            + " and ".join(f"{c:,}" for c in sorted({s.cells for s in own})[1:])
            + " cells (plain IVF and all of it: over their own sweeps); on val, then on test.",
            markdown_table(["", *(f"{s} {m} {t:.2f}" for s in ("val", "test") for m, t in TARGETS)], ablation),
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
