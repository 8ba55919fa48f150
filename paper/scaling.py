"""How everything grows with the number of keys n: labelling, training, the cost of a recall, memory.

Each n is a workspace of its own: n keys drawn at random, the same queries, the scale's settings. Where data
have too few keys, mixtures of these make up for them at every n, or the fit would be over two kinds of keys;
the keys of the data alone are then measured, too, and stand beside it.
"""

import math
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from amips import Design, Linear, exact
from amips.bench import (
    OWN_LABEL,
    Axis,
    Bootstrap,
    Family,
    Measured,
    Summary,
    System,
    describe_machine,
    in_turns,
    sweep,
)
from amips.builder import Builder
from amips.cells import default_count
from amips.nets import Model
from amips.task import HELD_OUT, Task
from paper.claims import claim_values, verdict
from paper.mappers import Trained, budget, trained
from paper.mixtures import data_with_mixtures
from paper.scaling_summary import (
    AMIPS,
    LEVEL,
    LINEAR,
    MAPPED,
    MEASURES,
    METRIC,
    ORIGINAL,
    ROUTED,
    WAYS,
    by_n_table,
    findings,
    growth_chart,
    growth_of,
    growth_table,
)
from paper.search_runs import Lead, lead_chosen_on_val, none_if_nan, recall_at, runner_of, search_all
from paper.workspace import Workspace

KEYS = (10_000, 31_623, 100_000, 316_228, 1_000_000, 2_000_000)
LARGEST = (5_000_000, 15_000_000)  # at full: the paper's HotpotQA and BioASQ have so many
REPLICA = (20_000, 44_721, 100_000)  # at the scale "replica", with the same source queries at every n
STEPS = (0.1, 10**-0.5, 1.0)  # of the keys there are, at the scale "smoke"
QUERIES = 20_000  # for training unless the scale has no limit: labelling 2 million keys for more takes hours
FACTORS = (2.0, 4.0, 8.0)  # cells, in units of sqrt(n); queries are mapped over all but the first
# K-means as FAISS does it for an inverted file, on the points it asks for; ladders of budgets end in time.
BENCH = {"iterations": 10, "points": 39, "most_keys": 50_000}
LABELLED = 1024  # queries whose labelling is timed


def ladder(scale: str, n: int) -> list[int]:
    """The numbers of keys of a scale, where the data have n."""
    if scale == "smoke":
        return sorted({max(2, round(step * n)) for step in STEPS})
    if scale == "replica":
        return [*REPLICA]
    return [*KEYS, *(LARGEST if scale == "full" else ())]


@dataclass(frozen=True)
class Step:
    """What was made of n keys."""

    n: int
    task: Task
    network: Trained
    linear: list[int]  # samples of the linear routers
    families: dict[str, Family]
    leads: dict[str, Lead | None]  # of each way over x, where it is largest on val
    cells: int  # of the largest index,
    own_bytes: int  # ... and the bytes of amips's index and router
    cheapest: int | None  # cells of the index that x searches most cheaply at the recall that is compared

    def cost_at_level(self, name: str, axis: Axis = "flops") -> float:
        """What the recall that is compared costs; nan if it is not reached."""
        return self.families[name].cost_at(axis, METRIC, LEVEL)


def run(workspace: Workspace) -> Summary:
    """Label, train and search at every n."""
    everything = _own_workspace(workspace, workspace.data, None, "data")
    ns = ladder(workspace.scale.name, workspace.keys.n)
    of_text = max(ns) <= everything.keys.n
    data = workspace.data if of_text else data_with_mixtures(everything, max(ns))
    steps = [_measure(_own_workspace(workspace, data, n, f"n-{n}")) for n in ns]
    control = None if of_text else _measure(everything)
    values = figures(steps, control, workspace.scale.rounds)
    results = findings(values)
    return Summary(
        name="scaling",
        title="How everything grows with the number of keys",
        verdict=verdict(results),
        tables=[growth_table(values), by_n_table(values)],
        charts=[growth_chart(values)],
        facts=[
            ("keys", ", ".join(f"{n:,}" for n in ns) + f" of dimension {workspace.keys.d}"),
            ("which keys", f"{everything.keys.n:,} of the data" + ("" if of_text else ", and mixtures")),
            ("training rows", f"{len(steps[-1].task.train):,}, noisy copies included"),
            ("test queries", f"{len(steps[-1].task.test):,}"),
        ],
        method=[
            f"Labelling: exact top 10 of {values['labelled']:,} queries, the numbers of keys in turns, "
            f"median of {workspace.scale.rounds}. Training: KeyNet XS (1 % of n d parameters, so it grows "
            f"with n) for {budget(workspace)} at every n, evaluations not counted; seconds a million "
            "samples.",
            "Search: with x over indexes of 2, 4 and 8 sqrt(n) cells; mapped, routed by KeyNet XS and by "
            f"linear routers ({workspace.scale.router_minutes:g} minutes at most each) over those of 4 and 8 "
            "sqrt(n). amips: 4 sqrt(n) query-aware cells, half of the keys in a second one, a linear router "
            "of low rank (as long), as many probes as each query needs. Equal cost: the FLOPs at which x "
            f"reaches {METRIC} = {LEVEL:.2f}. Cells are made as FAISS makes them for an inverted file (10 "
            "iterations) on 39 keys a cell. Contenders scan at most a fifth of the keys, and 50,000. "
            "Where x is best with the most cells that were tried, still more might be better, for x and for "
            "amips, which has one number of cells. The queries are the same at every n: the more keys there "
            "are, the fewer of them were ever asked for.",
            "Memory: by how much a fresh process grew at most while labelling, its file pages included; of "
            "the index with 8 sqrt(n) cells, of amips's with its router, and of the network, the bytes of "
            "their arrays. A fit of few points is a description of these, not a law.",
        ],
        command=workspace.command("scaling"),
        machine=describe_machine(),
        values={**values, **claim_values(results)},
    )


def _own_workspace(workspace: Workspace, data: Path, n: int | None, name: str) -> Workspace:
    """A workspace of n keys of `data`, all if None, and no more queries than can be labelled."""
    scale = workspace.scale
    queries = None if scale.queries is None else min(scale.queries, QUERIES)
    own = replace(scale, keys=n, queries=queries, held_out=min(scale.held_out, HELD_OUT))
    place = workspace.out / "scaling" / name
    return Workspace(data, own, place, workspace.seed, workspace.progress).by(workspace.split_by)


def ways_of(task: Task, run: str) -> dict[str, list[System]]:
    """The systems that are compared: what each way to search is made of.

    Args:
        run: the directory of KeyNet XS.
    """
    every = sweep(task.n, FACTORS)
    more = every[1:] or every  # of very few keys
    plain = [Design.plain(count) for count in more]
    label = "KeyNet XS"
    own = Design(max(2, default_count(task.n)), storage="flat")
    return {
        ORIGINAL: [System(Design.plain(count)) for count in every],
        MAPPED: [System(design, run=run, mode="drop-in", label=label) for design in plain],
        ROUTED: [System(design, run=run, label=label) for design in plain],
        LINEAR: [System(_linear(count), label=LINEAR) for count in more],
        AMIPS: [System(own, label=OWN_LABEL)],
    }


def _linear(cells: int) -> Design:
    """Plain cells, as for the baseline, with a linear router of full rank."""
    return Design(cells, 0.0, Linear(rank=0), stop="probes", spill_fraction=0.0, storage="flat")


def _measure(workspace: Workspace) -> Step:
    task = workspace.mapping_task()
    network = trained(workspace, task, "KeyNet", "XS")
    ways = ways_of(task, str(network.directory))
    searched = search_all(workspace, task, "search", ways, None, times=False, **BENCH)
    families = searched.test
    builder = runner_of(
        workspace, task, "search", **BENCH
    ).builder  # its routers are trained: they are read back
    models = {way: [_model(builder, system) for system in ways[way]] for way in (LINEAR, AMIPS)}
    samples = [int(model.about["samples"]) for model in models[LINEAR]]
    (own,) = [system.design for system in ways[AMIPS]]
    (router,) = models[AMIPS]
    assert own is not None
    own_bytes = _index_bytes(task, own.cells, 1 + own.spill_fraction)
    own_bytes += sum(weights.nbytes for weights in router.weights.values())
    cells, cheapest = ways[ORIGINAL][-1].cells, _cheapest(families[ORIGINAL])
    sides = [{"val": searched.val[name], "test": families[name]} for name in ways]
    bootstrap = Bootstrap(np.asarray(task.test.source))
    leads = {
        name: lead_chosen_on_val(sides[0], own_side, "flops", METRIC, bootstrap)
        for name, own_side in zip(ways, sides, strict=True)
        if name != ORIGINAL
    }
    return Step(task.n, task, network, samples, families, leads, cells, own_bytes, cheapest)


def _model(builder: Builder, system: System) -> Model:
    assert system.design is not None
    model = builder.model(system.design)
    assert model is not None
    return model


def _index_bytes(task: Task, cells: int, copies: float = 1.0) -> int:
    """Keys and an id of 8 bytes for each, in so many cells on average, and centroids."""
    return round(copies * task.n) * (4 * task.d + 8) + 4 * cells * task.d


def _cheapest(family: Family) -> int | None:
    """At how many cells x needs the fewest FLOPs for the recall that is compared; None if none has it."""
    by_cells: dict[int, list[Measured]] = {}
    for run in family.runs:
        by_cells.setdefault(run.run.system.cells, []).append(run)
    costs = {
        cells: replace(family, runs=runs).cost_at("flops", METRIC, LEVEL) for cells, runs in by_cells.items()
    }
    known = {cells: cost for cells, cost in costs.items() if not math.isnan(cost)}
    return min(known, key=lambda cells: known[cells]) if known else None


def _labelling_seconds(steps: list[Step], rounds: int) -> list[float]:
    """Of the same queries at every n, in turns."""
    x = np.asarray(steps[0].task.train.queries[:LABELLED])

    def work(step: Step) -> Any:
        keys = step.task.key_vectors
        return lambda: exact.top_k(keys, x, 10)

    times = in_turns([{str(i): work(step) for i, step in enumerate(steps)}], rounds)
    return [median(times[str(i)]) for i in range(len(steps))]


LABELLING = """
import sys
from amips import exact
from amips.bench import peak_memory
from amips.task import load_task
task = load_task(sys.argv[1])
keys, x = task.key_vectors, task.train.queries[:int(sys.argv[2])]
exact.top_k(keys, x[:1], 10)  # what is loaded once is not of any n
print(peak_memory(lambda: exact.top_k(keys, x, 10)))
"""


def _labelling_memory(task: Task) -> int | None:
    """By how much a process that does nothing else grows while it labels; None if that is unknown."""
    command = [sys.executable, "-c", LABELLING, str(task.path), str(LABELLED)]
    done = subprocess.run(command, capture_output=True, text=True)
    line = done.stdout.strip()
    return int(line) if done.returncode == 0 and line.isdigit() else None


def figures(steps: list[Step], control: Step | None, rounds: int) -> dict[str, Any]:
    """Everything that is measured, by n; `control` is of the data's own keys where others are generated."""
    measured = steps if control is None else [*steps, control]
    seconds = _labelling_seconds(measured, rounds)
    rows = [_row(step, labelling) for step, labelling in zip(measured, seconds, strict=True)]
    beside = None if control is None else rows.pop()
    ns = [row["n"] for row in rows]
    grows = {}
    for what, pick in MEASURES.items():
        power = growth_of(ns, [math.nan if (value := pick(row)) is None else float(value) for row in rows])
        grows[what] = None if power is None else vars(power)
    labelled = min(LABELLED, len(steps[0].task.train))
    return {"rows": rows, "control": beside, "growth": grows, "labelled": labelled}


def _row(step: Step, seconds: float) -> dict[str, Any]:
    """What was measured at one number of keys."""
    about = step.network.model.about
    cost = step.cost_at_level(ORIGINAL)
    return {
        "n": step.n,
        "labelling seconds": seconds,
        "labelling memory": _labelling_memory(step.task),
        "training seconds": 1e6 * float(about["seconds"]) / step.network.samples,
        "samples": step.network.samples,
        "linear samples": step.linear,
        "erel": step.network.mean("erel"),
        "mrr": step.network.mean("mrr"),
        "network bytes": 4 * step.network.model.architecture.parameters,
        "index bytes": _index_bytes(step.task, step.cells),
        "own bytes": step.own_bytes,
        "cells of x": step.cheapest,
        "flops": {name: none_if_nan(step.cost_at_level(name)) for name in WAYS},
        "scanned": {name: none_if_nan(step.cost_at_level(name, "scanned")) for name in WAYS},
        "recall": {name: none_if_nan(recall_at(step.families[name], "flops", METRIC, cost)) for name in WAYS},
        "lead": {name: None if one is None else one.value for name, one in step.leads.items()},
        "lead interval": {
            name: None if one is None else [one.low, one.high] for name, one in step.leads.items()
        },
        "full scan": 2 * step.n * step.task.d,
    }
