"""Every engine that is installed, searched with x and with the key that a KeyNet predicts.

Where its cells can be addressed, it is also routed by that, and by amips's own recipe (query-aware cells, a
linear router, as many probes as each query needs).

DATA is a directory with keys and queries, as for `amips study`; a sample of it is taken. Engines whose
library is missing are left out, and said to be. What is there in WORK is not made again.
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import write

import amips
from amips.bench import System, bench
from amips.bench.runner import Settings
from paper.workspace import Workspace, Scale
from amips.bench.systems import engine_systems, load_models, own_on_engines, own_systems, sweep
from amips.backends import BACKENDS, backend_class, missing
from amips.tables import markdown_table
from amips.task import Task

TARGETS = (0.9, 0.95)
TOLD = 0.95  # of these, where keys scanned and FLOPs are told
DEFAULTS = {"keys": 20_000, "queries": 40_000, "samples": 1_000_000, "minutes": 0.5, "rounds": 3}
TIMES = ("single/1", "batch/1")
KEPT = ("budget", "recall@1", "recall@10", "flops", "scanned", *TIMES)  # of a point
TOLD_OF = "times less time than x (batch 1 / {batch:,}):"
MISSED, MISSED_BY_X = "not reached on", "not reached with x on"
X, DROP_IN, ROUTED, OWN = WAYS = ("x", "drop-in", "routed by KeyNet", "amips")


@dataclass(frozen=True)
class Measured:
    """An engine, a way to search it, and what that costs: points, and costs by recall@10."""

    engine: str
    way: str
    points: list[dict[str, Any]]
    costs: dict[float, dict[str, Any]]

    @property
    def tells(self) -> bool:
        """Whether it says what it looked at."""
        return any("flops" in point for point in self.points)


def main() -> None:
    """Measure and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--work", type=Path, default=Path("engines-work"))
    for name, value in DEFAULTS.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    o = parser.parse_args()
    absent = missing()
    found = [name for name in BACKENDS if name not in absent]
    task, measured = measure(o, found)
    batch = min(Settings().batch, len(task.test))
    title = f"Engines: {task.n:,} keys, d = {task.d}, KeyNet XS of {o.samples:,} samples"
    if absent:
        title += f" (not here: {', '.join(absent)})"
    head = ["engine", "searched with", "best recall@10"]
    for target in TARGETS:
        head += [f"us at recall@10 {target}, batch 1", f"batch {batch:,}"]
    head += [f"keys scanned at {TOLD}", f"FLOPs at {TOLD}, share of a full scan"]
    rows = [row(one, measured[name, X]) for (name, _), one in measured.items()]
    raw = [
        {
            "engine": one.engine,
            "way": one.way,
            "points": [{n: p[n] for n in KEPT if n in p} for p in one.points],
        }
        for one in measured.values()
    ]
    text = (
        f"{len(task.test):,} held-out queries, one thread as far as an engine lets itself be limited. In "
        "brackets: how many times less time than the same engine searched with x; below 1 is a loss. A dash: "
        "that recall is not reached. Drop-in asks for the neighbours of the predicted key, four times as "
        "many as are wanted, and scores these with x. FAISS IVF with x is the best of sqrt(n) / 2 to 10 "
        "sqrt(n) cells; every other engine has its defaults, and what is routed has 4 sqrt(n) cells."
    )
    more = [text, summary(measured, batch), supports(found, measured)]
    given = {name: getattr(o, name) for name in DEFAULTS}
    options = "".join(f" --{name} {value}" for name, value in given.items() if value != DEFAULTS[name])
    write("engines", title, f"python benchmarks/engines.py DATA{options}", head, rows, raw, "\n\n".join(more))


def measure(o: argparse.Namespace, found: list[str]) -> tuple[Task, dict[tuple[str, str], Measured]]:
    """The task, and every engine in every way, by (its name, the way)."""
    scale = Scale("engines", o.keys, o.queries, 1000, 1, None, o.samples, "default", ("XS",), 3)
    lab = Workspace(o.data, scale, o.work, progress=True)
    task = lab.mapping_task()
    lab.model(task, amips.KeyNet(size="XS"), "keynet-xs")
    run = str(lab.run_directory("keynet-xs", task))
    ivf: dict[str, Any] = {"cells": round(4 * math.sqrt(task.n)), "router": run, "label": "KeyNet XS"}
    systems = [System(cells=count) for count in sweep(task.n)]
    systems += [System(**ivf), System(**ivf, route="drop-in-rescored")]
    systems += [s for s in own_systems(task.n, task.d, (4.0,)) if s.storage == "flat"]
    systems += engine_systems(task, found, load_models([run])) + own_on_engines(task.n, task.d, found)
    made = bench(
        task, out=o.work / "results", systems=systems, minutes=o.minutes, rounds=o.rounds, progress=True
    )
    print("\n".join(made.verdict))
    measured = {}
    for name in ("ivf", *found):
        for way in WAYS:
            if families := {s.family for s in systems if s.engine == name and way_of(s) == way}:
                (family,) = families
                measured[name, way] = Measured(
                    "FAISS IVF" if name == "ivf" else backend_class(name).title,
                    way,
                    [p for p in made.values["points"] if p["family"] == family],
                    {
                        c["recall"]: c
                        for c in made.values["costs"]
                        if (c["family"], c["metric"]) == (family, "recall@10")
                    },
                )
    return task, measured


def way_of(system: System) -> str:
    """One of WAYS."""
    if system.router in ("centroid", "linear"):
        return X if system.router == "centroid" else OWN
    return ROUTED if system.route == "cells" else DROP_IN


def gain(one: Measured, with_x: Measured, target: float, time: str) -> float | None:
    """How many times less time than with x; None where one does not reach the recall."""
    own, theirs = one.costs[target][time], with_x.costs[target][time]
    return None if own is None or theirs is None else float(theirs / own)


def row(one: Measured, with_x: Measured) -> list[str]:
    """A line of the table."""
    cells = [one.engine, one.way, f"{max(p['recall@10'] for p in one.points):.3f}"]
    for target in TARGETS:
        for time in TIMES:
            seconds, less = one.costs[target][time], gain(one, with_x, target, time)
            beside = "" if one is with_x or less is None else f" ({less:.2f})"
            cells.append("-" if seconds is None else f"{seconds * 1e6:,.0f}{beside}")
    counts = [one.costs[TOLD][what] for what in ("scanned", "flops")]
    return cells + [f"{v:.1%}" if v is not None else ("-" if one.tells else "not told") for v in counts]


def summary(measured: dict[tuple[str, str], Measured], batch: int) -> str:
    """What was gained over x, for each way of using what was learned."""
    said = []
    for way in WAYS[1:]:
        mine = [(one, measured[name, X]) for (name, which), one in measured.items() if which == way]
        for target in TARGETS:
            parts: dict[str, list[str]] = {TOLD_OF: [], MISSED: [], MISSED_BY_X: []}
            for one, with_x in mine:
                gains = [gain(one, with_x, target, time) for time in TIMES]
                if None not in gains:
                    parts[TOLD_OF].append(f"{one.engine} {gains[0]:.2f} / {gains[1]:.2f}")
                else:
                    own = one.costs[target][TIMES[0]] is None
                    parts[MISSED if own else MISSED_BY_X].append(one.engine)
            words = [
                f"{what.format(batch=batch)} {', '.join(names)}" for what, names in parts.items() if names
            ]
            said.append(f"- {way}, recall@10 {target}: {'; '.join(words)}.")
    return "\n".join(said)


def supports(found: list[str], measured: dict[tuple[str, str], Measured]) -> str:
    """The table of what each engine can do; whether it tells what it looked at is as measured."""
    head = ["engine", "name", "drop-in", "routed", "learns from queries", "budget", "server"]
    head += ["keys and FLOPs are told with x", "routed"]
    rows = [["FAISS IVF", "-", "yes", "yes", "no", "probes", "no", "yes", "yes"]]
    for name in found:
        engine = backend_class(name)
        told = [yes(measured[name, X].tells), yes(engine.celled and measured[name, ROUTED].tells)]
        can = ["yes", yes(engine.celled), yes(engine.learns), engine.budget, yes(engine.server is not None)]
        rows.append([engine.title, f"`{name}`", *can, *told])
    return markdown_table(head, rows)


def yes(flag: bool) -> str:
    """In words."""
    return "yes" if flag else "no"


if __name__ == "__main__":
    main()
