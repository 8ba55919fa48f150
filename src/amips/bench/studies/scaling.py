"""How everything grows with the number of keys n: labelling, training, the cost of a recall, memory.

Each n is a lab of its own: n keys drawn at random, the same queries, the scale's settings. Where the data
have too few keys, mixtures of these make up for them at every n, or the fit would be over two kinds of keys;
the keys of the data alone are then measured, too, and stand beside it. Growth is the exponent b of a n^b,
fitted by least squares in logarithms.
"""

import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from amips import exact
from amips.bench.derive import Axis, Family, Metric, on_test
from amips.bench.machine import describe, in_turns
from amips.bench.store import Run
from amips.bench.studies.generated import generated
from amips.bench.studies.lab import Lab, find
from amips.bench.studies.mappers import Trained, compared, trained
from amips.bench.studies.searching import bench_of, lead, none_if_nan, recall_at
from amips.bench.summary import Chart, Panel, Series, Summary, Table
from amips.bench.systems import OWN, System
from amips.bench.verdict import SMALL
from amips.cells import STRENGTH
from amips.lean import ROUTE_SHARE, rank_for
from amips.search.spill import SPILL
from amips.task import Task
from amips.vectors import open_vectors

KEYS = (10_000, 31_623, 100_000, 316_228, 1_000_000, 2_000_000)
STEPS = (0.1, 10**-0.5, 1.0)  # of the keys there are, at the scale "smoke"
QUERIES = 20_000  # for training unless the scale has no limit: labelling 2 million keys for more takes hours
HELD = 1000
FACTORS = (2.0, 4.0, 8.0)  # cells, in units of sqrt(n); queries are mapped over all but the first,
OWN_FACTOR = 4.0  # ... and amips has these
KMEANS = {"iterations": 10, "points": 39}  # what FAISS does for an inverted file, with the points it asks for
LABELLED = 1024  # queries whose labelling is timed
LINEAR_SHARE = 1 / 3  # of the scale's budget, for each linear router
METRIC: Metric = "recall@0.1%"
LEVEL = 0.9
CLEARLY = 0.01
ORIGINAL, DROP_IN, ROUTED, LINEAR = "centroid", "KeyNet XS, drop-in", "KeyNet XS", "linear"
WAYS = {
    ORIGINAL: "x",
    DROP_IN: "mapped (drop-in)",
    ROUTED: "routed by KeyNet XS",
    LINEAR: "routed linearly",
    OWN: "amips",
}
PAPER = (
    "The paper (BioASQ, 15M keys; figures, no table): mapped queries dominate in the middle of the budgets "
    "as they do with fewer keys, and the gap to the original query does not collapse; recall curves lie "
    "lower."
)


@dataclass(frozen=True)
class Growth:
    """y = factor n^exponent, and the largest relative distance of a point from it."""

    factor: float
    exponent: float
    off: float


def fit(n: Sequence[float], y: Sequence[float]) -> Growth | None:
    """Least squares of log y over log n; None unless there are two points above 0."""
    known = [(a, b) for a, b in zip(n, y, strict=True) if b > 0 and math.isfinite(b)]
    if len({a for a, _ in known}) < 2:
        return None
    logs = np.log(np.array(known, np.float64))
    exponent, constant = np.polyfit(logs[:, 0], logs[:, 1], 1)
    off = np.exp(np.abs(logs[:, 1] - exponent * logs[:, 0] - constant)).max() - 1
    return Growth(float(np.exp(constant)), float(exponent), float(off))


def ladder(scale: str, n: int) -> list[int]:
    """The numbers of keys of a scale, where the data have n."""
    return sorted({max(2, round(step * n)) for step in STEPS}) if scale == "smoke" else list(KEYS)


def counts(n: int) -> list[int]:
    """Numbers of cells, none with fewer than two keys a cell."""
    return sorted({min(max(2, round(factor * math.sqrt(n))), max(2, n // 2)) for factor in FACTORS})


@dataclass(frozen=True)
class Step:
    """What was made of n keys."""

    n: int
    task: Task
    network: Trained
    linear: list[int]  # samples of the linear routers
    families: dict[str, Family]
    cells: int  # of the larger index

    def cost_at_level(self, name: str, axis: Axis = "flops") -> float:
        """What the recall that is told costs; nan if it is not reached."""
        return self.families[name].cost_at(axis, METRIC, LEVEL)


def run(lab: Lab) -> Summary:
    """Label, train and search at every n."""
    ns = ladder(lab.scale.name, lab.keys.n)
    of_text = max(ns) <= open_vectors(find(lab.data, "keys")[0]).n
    data = lab.data if of_text else generated(lab, max(ns))
    steps = [_measure(_own_lab(lab, data, n, f"n-{n}")) for n in ns]
    control = None if of_text else _measure(_own_lab(lab, lab.data, lab.keys.n, "data"))
    values = figures(steps, control, lab.scale.rounds)
    return Summary(
        name="scaling",
        title="How everything grows with the number of keys",
        verdict=_verdict(values),
        tables=[_growth_table(values), _table(values)],
        charts=[_chart(values)],
        facts=[
            ("keys", ", ".join(f"{n:,}" for n in ns) + f" of dimension {lab.keys.d}"),
            ("which keys", "drawn from the data" if of_text else f"{lab.keys.n:,} of the data, and mixtures"),
            ("training rows", f"{len(steps[-1].task.train):,}, noisy copies included"),
            ("test queries", f"{len(steps[-1].task.test):,}"),
        ],
        method=[
            f"Labelling: exact top 10 of {values['labelled']:,} queries, the numbers of keys in turns, "
            f"median of {lab.scale.rounds}. Training: KeyNet XS (1 % of n d parameters, so it grows with n) "
            f"for {lab.scale.budget} at every n; seconds a million samples, evaluation included.",
            "Search: with x over indexes of 2, 4 and 8 sqrt(n) cells; mapped, routed by KeyNet XS and by "
            "linear routers (a third of the budget each) over those of 4 and 8 sqrt(n). amips: 4 sqrt(n) "
            "query-aware cells, half of the keys in a second one, a linear router of low rank (a third of "
            "the budget), as many probes as each query needs. Equal cost: the FLOPs at which x reaches "
            f"{METRIC} = {LEVEL:.2f}. Cells are made as FAISS makes them for an inverted file (10 "
            "iterations) on 39 keys a cell. The bench has times.",
            "Memory: by how much a fresh process grew at most while labelling, its file pages included; of "
            "the index with 8 sqrt(n) cells and of the network, the bytes of their arrays. A fit of few "
            "points is a description of these, not a law.",
        ],
        command=f"amips study scaling --data DATA --scale {lab.scale.name} --out OUT",
        machine=describe(),
        values=values,
    )


def _own_lab(lab: Lab, data: Path, n: int, name: str) -> Lab:
    """A lab of n keys of `data` and no more queries than can be labelled."""
    scale = lab.scale
    queries = None if scale.queries is None else min(scale.queries, QUERIES)
    own = replace(scale, keys=n, queries=queries, held=min(scale.held, HELD))
    return Lab(data, own, lab.out / "scaling" / name, lab.seed, lab.progress)


def _measure(lab: Lab) -> Step:
    task = lab.mapping_task()
    network = trained(lab, task, "KeyNet", "XS")
    bench, directory = bench_of(lab, task, "search", **KMEANS), str(network.directory)
    few, *more = counts(task.n)
    runs = _run(lab, task, [System(cells=few)])
    linear = []
    for count in more:
        split = task.with_cells(bench.cells(count))
        linear.append(int(lab.linear(split, LINEAR_SHARE).about["samples"]))
        systems = [
            System(cells=count),
            System(cells=count, router=directory, route="drop-in", label="KeyNet XS"),
            System(cells=count, router=directory, label="KeyNet XS"),
            System(cells=count, router=str(lab.linear_directory(split)), label=LINEAR),
        ]
        runs += _run(lab, split, systems)
    count, rank = max(2, round(OWN_FACTOR * math.sqrt(task.n))), rank_for(task.d, ROUTE_SHARE)
    split = task.with_cells(bench.cells(count, STRENGTH))
    lab.linear(split, LINEAR_SHARE, rank)
    router = str(lab.linear_directory(split, rank))
    how: dict[str, Any] = {"aware": STRENGTH, "spill": SPILL, "stop": "share", "label": OWN}
    runs += _run(lab, split, [System(cells=count, router=router, **how)])
    families = {family.name: family for family in on_test(runs, task)}
    return Step(task.n, task, network, linear, families, more[-1])


def _run(lab: Lab, task: Task, systems: list[System]) -> list[Run]:
    bench = bench_of(lab, task, "search", **KMEANS)
    bench.run(systems, "scaling", times=False)
    return bench.store.runs(systems)


def _labelling_seconds(steps: list[Step], rounds: int) -> list[float]:
    """Of the same queries at every n, in turns."""
    x = np.asarray(steps[0].task.train.queries[:LABELLED])

    def work(step: Step) -> Any:
        keys = open_vectors(step.task.path / "keys.npy")
        return lambda: exact.top_k(keys, x, 10)

    times = in_turns([{str(i): work(step) for i, step in enumerate(steps)}], rounds)
    return [median(times[str(i)]) for i in range(len(steps))]


LABELLING = """
import sys
import numpy as np
from amips import exact
from amips.bench.machine import peak_memory
from amips.vectors import open_vectors
keys, x = open_vectors(sys.argv[1]), np.load(sys.argv[2])[:int(sys.argv[3])]
exact.top_k(keys, x[:1], 10)  # what is loaded once is not of any n
print(peak_memory(lambda: exact.top_k(keys, x, 10)))
"""


def _labelling_memory(task: Task) -> int | None:
    """By how much a process that does nothing else grows while it labels; None if that is unknown."""
    files = [str(task.path / "keys.npy"), str(task.path / "train" / "queries.npy")]
    command = [sys.executable, "-c", LABELLING, *files, str(LABELLED)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return None if told == "None" else int(told)


def figures(steps: list[Step], control: Step | None, rounds: int) -> dict[str, Any]:
    """Everything that is told, by n; `control` is of the data's own keys where others are generated."""
    measured = steps if control is None else [*steps, control]
    seconds = _labelling_seconds(measured, rounds)
    rows = [_row(step, taken) for step, taken in zip(measured, seconds, strict=True)]
    beside = None if control is None else rows.pop()
    ns = [row["n"] for row in rows]
    grows = {}
    for what, pick in MEASURES.items():
        found = fit(ns, [math.nan if (value := pick(row)) is None else float(value) for row in rows])
        grows[what] = None if found is None else vars(found)
    labelled = min(LABELLED, len(steps[0].task.train))
    return {"rows": rows, "control": beside, "growth": grows, "labelled": labelled}


def _row(step: Step, seconds: float) -> dict[str, Any]:
    """What is told of one number of keys."""
    about, base = step.network.model.about, step.families[ORIGINAL]
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
        # Keys and an id of 8 bytes for each, and centroids.
        "index bytes": step.n * (4 * step.task.d + 8) + 4 * step.cells * step.task.d,
        "flops": {name: none_if_nan(step.cost_at_level(name)) for name in WAYS},
        "scanned": {name: none_if_nan(step.cost_at_level(name, "scanned")) for name in WAYS},
        "recall": {name: none_if_nan(recall_at(step.families[name], "flops", METRIC, cost)) for name in WAYS},
        "lead": {
            name: none_if_nan(lead(base, step.families[name], "flops", METRIC))
            for name in WAYS
            if name != ORIGINAL
        },
        "full scan": 2 * step.n * step.task.d,
    }


def _fewer(row: dict[str, Any], name: str) -> float | None:
    """How many times fewer FLOPs than x a way needs at the recall that is told."""
    theirs, own = row["flops"][ORIGINAL], row["flops"][name]
    return None if theirs is None or own is None else theirs / own


MEASURES: dict[str, Any] = {
    "labelling, seconds": lambda row: row["labelling seconds"],
    "labelling, memory": lambda row: row["labelling memory"],
    "training, seconds a million samples": lambda row: row["training seconds"],
    "network, bytes": lambda row: row["network bytes"],
    "index, bytes": lambda row: row["index bytes"],
    **{
        f"FLOPs at {METRIC} = {LEVEL}, {way}": (lambda row, name=name: row["flops"][name])
        for name, way in WAYS.items()
    },
    **{
        f"keys scanned at {METRIC} = {LEVEL}, {way}": (lambda row, name=name: row["scanned"][name])
        for name, way in WAYS.items()
    },
}


def _number(value: Any, form: str = ".3g") -> str:
    return "-" if value is None else format(value, form)


def _megabytes(value: int | None) -> str:
    return "-" if value is None else f"{value / 1e6:,.1f}"


def _growth_table(values: dict[str, Any]) -> Table:
    rows = []
    last = values["rows"][-1]
    for what, pick in MEASURES.items():
        found = values["growth"][what]
        exponent = "-" if found is None else f"{found['exponent']:.2f}"
        off = "-" if found is None else f"{found['off']:.0%}"
        rows.append([what, exponent, off, _number(pick(last))])
    head = ["what", "grows as n to the power", "points off the fit by at most", f"at n = {last['n']:,}"]
    note = "A dash where fewer than two numbers of keys gave a value: not reached, or not measured."
    return Table("Growth", head, rows, note)


def _table(values: dict[str, Any]) -> Table:
    rows = []
    control = values["control"]
    for row in [*values["rows"], *([] if control is None else [control])]:
        found = [_number(row["recall"][name], ".3f") for name in WAYS]
        rows.append(
            [
                f"{row['n']:,}" + (", of the data alone" if row is control else ""),
                f"{row['labelling seconds']:.3g} ({_megabytes(row['labelling memory'])})",
                f"{row['training seconds']:.3g}",
                f"{row['samples'] / 1e6:.3g}",
                f"{row['erel']:.3f}",
                f"{row['mrr']:.3f}",
                _number(None if (cost := row["flops"][ORIGINAL]) is None else cost / row["full scan"], ".2%"),
                " / ".join(found),
                " / ".join(_number(_fewer(row, name), ".2f") for name in (ROUTED, LINEAR, OWN)),
                _number(row["lead"][DROP_IN], "+.3f"),
                f"{_megabytes(row['index bytes'])} and {_megabytes(row['network bytes'])}",
            ]
        )
    head = [
        "keys",
        f"labelling {values['labelled']:,} queries, s (MB)",
        "training, s a million samples",
        "million samples",
        "erel",
        "MRR",
        f"FLOPs of x at {LEVEL:.2f}, of a full scan",
        f"{METRIC} at that cost: " + " / ".join(WAYS.values()),
        f"times fewer FLOPs than x at {LEVEL:.2f}: " + " / ".join(WAYS[n] for n in (ROUTED, LINEAR, OWN)),
        "largest lead of mapped",
        "index and network, MB",
    ]
    return Table("At every number of keys", head, rows, PAPER)


def _chart(values: dict[str, Any]) -> Chart:
    ns = [float(row["n"]) for row in values["rows"]]

    def line(name: str, what: str, unit: float = 1.0) -> Series:
        found = [MEASURES[what](row) for row in values["rows"]]
        known = [(n, unit * value) for n, value in zip(ns, found, strict=True) if value is not None]
        group: Any = "baseline" if name == WAYS[ORIGINAL] else "contender"
        return Series(name, [n for n, _ in known], [value for _, value in known], group=group)

    labelled = f"labelling {values['labelled']:,} queries"
    lines = [
        (
            "time",
            "seconds",
            [
                line(labelled, "labelling, seconds"),
                line("training, a million samples", "training, seconds a million samples"),
            ],
        ),
        (
            "cost",
            f"FLOPs at {METRIC} = {LEVEL}",
            [line(way, f"FLOPs at {METRIC} = {LEVEL}, {way}") for way in WAYS.values()],
        ),
        (
            "memory",
            "MB",
            [line(name, name, 1e-6) for name in ("labelling, memory", "index, bytes", "network, bytes")],
        ),
    ]
    panels = [
        Panel(title, "keys", label, [one for one in series if one.x], log_x=True, log_y=True)
        for title, label, series in lines
    ]
    return Chart("scaling", "Growth with the number of keys", panels, "Straight lines are powers of n.")


def _times(ratio: float) -> str:
    return f"{ratio:.2f} times fewer" if ratio >= 1 else f"{1 / ratio:.2f} times more"


def _verdict(values: dict[str, Any]) -> list[str]:
    rows, grows, control = values["rows"], values["growth"], values["control"]
    first, last = rows[0], rows[-1]

    def power(what: str) -> str:
        return "an unknown power of n" if grows[what] is None else f"n^{grows[what]['exponent']:.2f}"

    among = "" if control is None else " (generated ones among them)"
    said = [
        f"From {first['n']:,} to {last['n']:,} keys{among}, "
        f"labelling a query grows as {power('labelling, seconds')}, training KeyNet XS on a sample as "
        f"{power('training, seconds a million samples')}, the memory of the index as "
        f"{power('index, bytes')}."
    ]
    costs = {name: f"FLOPs at {METRIC} = {LEVEL}, {way}" for name, way in WAYS.items()}
    parts = [
        f"{WAYS[name]} {power(what)}" if grows[what] is not None else f"{WAYS[name]} does not reach it"
        for name, what in costs.items()
    ]
    said.append(f"FLOPs for {METRIC} = {LEVEL:.2f} grow with the number of keys: {', '.join(parts)}.")
    for name in (OWN, LINEAR, ROUTED):
        before, after = _fewer(first, name), _fewer(last, name)
        if before is not None and after is not None:
            trend = "grows" if after > before else "shrinks"
            if abs(after / before - 1) <= SMALL:
                trend = "stays about the same"
            said.append(
                f"Against x, {WAYS[name]} needs {_times(before)} FLOPs at {first['n']:,} keys and "
                f"{_times(after)} at {last['n']:,}: with n, what it is worth {trend}."
            )
    if control is not None and (of_data := _fewer(control, OWN)) is not None:
        (near, worth) = min(
            ((row["n"], worth) for row in rows if (worth := _fewer(row, OWN)) is not None),
            key=lambda found: abs(math.log(found[0] / control["n"])),
            default=(0, None),
        )
        if worth is not None:
            said.append(
                f"Of the {control['n']:,} keys of the data alone, amips needs {_times(of_data)} FLOPs than "
                f"x; of {near:,} keys with generated ones among them, {_times(worth)}."
            )
    leads = [(row["n"], row["lead"][DROP_IN]) for row in rows]
    known = [(n, value) for n, value in leads if value is not None]
    told = ", ".join(f"{100 * value:+.1f} points at {n:,}" for n, value in known) or "nowhere comparable"
    held = len(known) == len(leads) and all(value > CLEARLY for _, value in known)
    said.append(
        f"The mapped query's largest lead over x at equal FLOPs, in {METRIC}: {told}: "
        f"{compared(held, 'mapped queries stay ahead in the middle of the budgets as n grows')}."
    )
    return said
