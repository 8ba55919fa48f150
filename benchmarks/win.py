"""What amips gains over the best FAISS IVF and over the fastest of other libraries.

    python benchmarks/win.py TASK --out RESULTS --backend symphonyqg --backend lorann --backend fastscan
    python benchmarks/win.py TASK --out RESULTS --parts PARTS.md    # also each part of the recipe of cells

TASK is labelled with k of at least 16, which is what a graph learns from. Every system is answered on all
held-out queries; budgets are timed where they surround a recall of interest, each beside the same yardstick,
on one thread. Raw runs are kept in RESULTS: a second call derives the tables again. The tables go to
results/win.md, recall against cost to win.png beside it.
Backends named with --backend are searched with x and stand beside HNSW, as references.
"""

import argparse
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from win_tables import (
    FAISS,
    FAISS_SCANNED,
    FLOPS_AT,
    TARGETS,
    TIMED,
    TIMES,
    by_faiss,
    chart,
    flops,
    merged,
    microseconds,
    verdict,
)

from amips.backends import BACKENDS, backend_class, missing
from amips.bench import (
    EXACT,
    Axis,
    Bootstrap,
    CellSearch,
    Metric,
    ResultsStore,
    Runner,
    Settings,
    Summary,
    System,
    backend_systems,
    baseline,
    budgets,
    describe_machine,
    draw_figures,
    effort,
    graph_systems,
    identity,
    on_test,
    on_val,
    own_systems,
    sweep,
    yardstick_seconds,
)
from amips.builder import Builder
from amips.cells import STRENGTH
from amips.design import SPILL_FRACTION, Design
from amips.errors import ResultsError
from amips.locks import locked
from amips.nets import Linear, Recipe
from amips.progress import Bar
from amips.search import estimate_routing, recalls
from amips.tables import markdown_table
from amips.task import load_task

RANGE = (0.79, 0.985)  # recalls between which budgets of what is compared are run: no more are needed
PARTS_RANGE = (0.89, 0.96)  # ... and of the parts, which are shown at TARGETS only


def parts(builder: Builder) -> dict[str, list[System]]:
    """Each part of the recipe alone and together, over the same numbers of cells."""
    counts = sorted({system.cells for system in own_systems(builder)})[1:]
    rank, dimensions = Linear().rank_for(builder.task.d), builder.lean_dimensions()
    aware: dict[str, Any] = {"query_aware": STRENGTH}
    mass: dict[str, Any] = {"stop": "mass"}
    full: dict[str, Any] = {"router": Linear(rank=0), "recipe": Recipe()}
    routed: dict[str, Any] = {"router": Linear(rank=rank), "recipe": Recipe()}
    lean: dict[str, Any] = {"storage": "lean", "dimensions": dimensions}
    changes = {
        "query-aware cells": aware,
        "probes as each query needs": mass,
        "linear router": full,
        f"linear router of rank {rank}": routed,
        f"linear router of rank {rank}, untrained": {**routed, "recipe": None},
        f"{SPILL_FRACTION:.0%} of the keys in a second cell": {"spill_fraction": SPILL_FRACTION},
        "query-aware cells + linear router": aware | routed,
        "query-aware cells + probes as needed": aware | mass,
        "plain cells + linear router + probes as needed": routed | mass,
        "all of it, float32 keys, no second cells": aware | routed | mass,
    }
    if dimensions is not None:
        changes[f"lean storage, {dimensions} dimensions"] = lean
        changes["all of it, lean storage, no second cells"] = aware | routed | mass | lean
    return {
        name: [System(replace(Design.plain(c), **change), label=name) for c in counts]
        for name, change in changes.items()
    }


def of_interest(runner: Runner, system: System, low: float, high: float) -> list[int] | None:
    """The budgets whose recall on val surrounds the recalls of interest; None for backends and graphs."""
    if system.backend is not None or system.design is None or system.design.structure == "graph":
        return None
    opened = runner.open(system)
    assert isinstance(opened, CellSearch)
    routing = estimate_routing(opened.searcher, runner.task.val)
    ladder = budgets(system)
    enough = min(high + 0.02, 0.995) if system.design.storage == "lean" else high  # codes lose a little more
    kept: list[int] = []
    for place, budget in enumerate(ladder):
        spent = effort(system, budget)
        probing = routing.at_mass(spent["min_mass"]) if "min_mass" in spent else routing.at_probes(budget)
        recall = [float(probing.hits[:, 0].mean()), probing.recall]
        if max(recall) >= low:
            kept = kept or ladder[max(0, place - 1) : place]
            kept.append(budget)
        if min(recall) >= enough:
            break
    return kept or [ladder[-1]]


def around(runner: Runner, system: System, answered: list[int]) -> list[int]:
    """The budgets just below and just above each recall of interest, on val."""
    val = slice(0, len(runner.task.val))
    runs = [runner.store.get(system, budget) for budget in answered]
    reached = [recalls(run.ids[val], runner.true[val], 10).mean() for run in runs]
    chosen: set[int] = set()
    for target in TIMED:
        above = next((i for i, recall in enumerate(reached) if recall >= target), len(reached) - 1)
        chosen |= {above, max(0, above - 1)}
    if system.backend is not None or (system.design is not None and system.design.structure == "graph"):
        chosen.add(min(above + 1, len(reached) - 1))  # on test the highest recall may take one step more
    return [answered[i] for i in sorted(chosen)]


def measure(runner: Runner, compared: list[System], pieces: list[System]) -> None:
    """Answer with everything, and time what is compared."""
    answered = {}
    ranges = dict.fromkeys(pieces, PARTS_RANGE) | dict.fromkeys(compared, RANGE)
    with closing(runner.opener):
        with Bar(len(ranges), "answers", "systems", runner.settings.progress) as shown:
            for system in sorted(ranges, key=lambda s: (s.backend or "", s.cells, s.slug)):
                answered[system] = runner.answer(system, of_interest(runner, system, *ranges[system]))
                shown.update()
        for system in compared:
            runner.take_times({system: around(runner, system, answered[system])})


def main() -> None:
    """Run, derive, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=0.75, help="Training of each router, at most.")
    parser.add_argument("--rounds", type=int, default=5, help="How often each time is taken.")
    parser.add_argument(
        "--backend",
        dest="backends",
        action="append",
        default=[],
        choices=[*BACKENDS],
        help="May be repeated.",
    )
    parser.add_argument("--parts", type=Path, help="Also measure each part alone; the page to write.")
    parser.add_argument("--write", type=Path, default=Path(__file__).parent / "results" / "win.md")
    o = parser.parse_args()
    for reason in missing(o.backends).values():
        parser.error(reason)
    task = load_task(o.task)
    settings = Settings(minutes=o.minutes, rounds=o.rounds, progress=True, all_threads=False)
    store = ResultsStore(o.out, identity(task, settings))
    # The lock of `amips bench`, which may be at work on the same results.
    busy = ResultsError(f"another amips bench is at work in {o.out}; wait for it, or choose another out")
    with locked(store.path / ".lock", busy):
        runner = Runner(task, store, settings)
        plain = [System(Design.plain(cells)) for cells in sweep(task.n)]
        own = [runner.resolved(system) for system in own_systems(runner.builder)]
        graphs = graph_systems(runner.builder)
        others_named = backend_systems(task, ["hnsw", *o.backends], {})
        compared = [*plain, *own, *graphs, *others_named, System(backend=EXACT)]
        pieces = parts(runner.builder) if o.parts else {}
        measure(runner, compared, [s for systems in pieces.values() for s in systems])
        runs = store.runs(compared)
        part_runs = {name: store.runs(systems) for name, systems in [("plain IVF", plain), *pieces.items()]}
    full = 2 * task.n * task.d
    clock = yardstick_seconds(runs)
    both = [
        (val, test)
        for val, test in zip(on_val(runs, task), on_test(runs, task), strict=True)
        if test.runs[0].run.system.backend != EXACT
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
    flop_rows = [[f.name, *(flops(f, m, t, full) for m, t in FLOPS_AT)] for f in listed]
    times = [[f.name, *(microseconds(f, axis, t, clock) for axis in TIMES for t in TIMED)] for f in listed]
    asked: list[tuple[Metric, float, Axis]] = [(m, t, "flops") for m, t in FLOPS_AT]
    asked += [("recall@10", t, axis) for axis in TIMES for t in TIMED]
    ratios = []
    for _, family in contenders:
        for metric, target, axis in asked:
            against = [draw.ratio(other, family, axis, metric, target) for other in others.values()]
            cells = ["-" if ratio is None else str(ratio) for ratio in against]
            cost = f"time, {TIMES[axis]}" if axis in TIMES else "FLOPs"
            ratios.append([family.name, f"{metric} {target:.2f}", cost, *cells])
    ablation = []
    for name, some in part_runs.items():
        on = [merged(families(some, task)) for families in (on_val, on_test)]
        ablation.append([name, *(flops(f, m, t, full) for f in on for m, t in TARGETS)])
    for val, test in contenders:
        row = [flops(f, m, t, full) for f in (val, test) for m, t in TARGETS]
        ablation.append([f"all of it: {test.name}", *row])
    kinds = [backend_class(system.backend) for system in others_named if system.backend]
    learns = [kind.title for kind in kinds if kind.learns]
    may_learn = ", ".join(["amips, amips graph", *learns])

    shown = {FAISS: own_way, FAISS_SCANNED: base} | {f.name: f for f in tested if f is not base}
    drawn = chart(o.write.stem, shown, clock, full)
    draw_figures(Summary("win", drawn.title, [], charts=[drawn]), o.write.parent, formats=("png",))
    machine = ", ".join(f"{name} {value}" for name, value in describe_machine().items())
    command = f"python benchmarks/win.py TASK --out RESULTS --minutes {o.minutes} --rounds {o.rounds}"
    command += "".join(f" --backend {name}" for name in o.backends)
    unknown = " (- where a backend does not tell them)" if o.backends else ""
    text = "\n\n".join(
        [
            "# What amips gains over the best FAISS IVF",
            f"`{command}`; "
            f"{task.n:,} keys, d = {task.d}, {len(task.train):,} training queries, {len(task.test):,} test "
            f"queries; {machine}. FLOPs as a share of a full scan{unknown}; times on one thread. The log of "
            f"training queries is given to {may_learn}; the others know the keys alone.",
            markdown_table(["FLOPs", *(f"{m} {t:.2f}" for m, t in FLOPS_AT)], flop_rows),
            markdown_table(
                ["time", *(f"{w}, recall@10 {t:.2f}" for w in TIMES.values() for t in TIMED)], times
            ),
            f"![{drawn.title}]({drawn.name}.png)",
            f"Each line is the best over all numbers of cells and budgets; times were taken near recall@10 "
            f"{', '.join(f'{t:.2f}' for t in TIMED)} only.",
            "Who is faster than amips, by recall@10 and batch size? amips is the faster of its systems on "
            "val, named in brackets; it is decided where the 95 % interval says so.",
            "\n".join(f"- {sentence}" for sentence in verdict(contenders, others, draw)),
            "How many times less than others, with 95 % intervals where these are known. FAISS IVF has the "
            "best of its numbers of cells, from sqrt(n) / 2 to 10 sqrt(n); in its second column it may also "
            "be scanned cell by cell with matrix products, which is how amips scans float32 keys for large "
            "batches.",
            markdown_table(["", "at", "cost", *others], ratios),
        ]
    )
    print(text)
    o.write.write_text(text + "\n")
    if not o.parts:
        return
    text = "\n\n".join(
        [
            "# What each part of the recipe of cells gives",
            f"`{command} --parts PARTS.md`; {task.n:,} keys, d = {task.d}.",
            "FLOPs as a share of a full scan, the best over "
            + " and ".join(f"{c:,}" for c in sorted({s.cells for s in own})[1:])
            + " cells (plain IVF and all of it: over their own sweeps); on val, then on test.",
            markdown_table(
                ["", *(f"{s} {m} {t:.2f}" for s in ("val", "test") for m, t in TARGETS)], ablation
            ),
        ]
    )
    print(text)
    o.parts.write_text(text + "\n")


if __name__ == "__main__":
    np.seterr(all="raise", under="ignore")
    main()
