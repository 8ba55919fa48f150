"""Every backend that is installed, searched with x and with the key that a KeyNet predicts.

Where its cells can be addressed, it is also routed by that, and by amips's own recipe (query-aware cells, a
linear router, as many probes as each query needs).

DATA is a directory with keys and queries; a sample of it is taken. Backends whose library is missing are left
out, and said to be. What is there in WORK is not made again.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import sample, write

import amips
from amips.backends import BACKENDS, backend_class, missing
from amips.bench import (
    Settings,
    System,
    backend_systems,
    bench,
    load_models,
    own_on_backends,
    sweep,
)
from amips.cells import default_count
from amips.design import Design
from amips.tables import markdown_table
from amips.task import HELD_OUT, Task

TARGETS = (0.9, 0.95)
TOLD = 0.95  # of these, where keys scanned and FLOPs are told
DEFAULTS = {"keys": 20_000, "queries": 40_000, "samples": 1_000_000, "minutes": 0.5, "rounds": 3}
TIMES = ("single/1", "batch/1")
KEPT = ("budget", "recall@1", "recall@10", "flops", "scanned", *TIMES)  # of a point
TOLD_OF = "times less time than x (batch 1 / {batch:,}):"
MISSED, MISSED_BY_X = "not reached on", "not reached with x on"
X, DROP_IN, ROUTED, AMIPS = WAYS = ("x", "drop-in", "routed by KeyNet", "amips")
IVF = "FAISS IVF"


@dataclass(frozen=True)
class Measured:
    """A backend, a way to search it, and what that costs: points, and costs by recall@10."""

    backend: str
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
    parser.add_argument("--work", type=Path, default=Path("backends-work"))
    for name, value in DEFAULTS.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    o = parser.parse_args()
    absent = missing()
    names = [name for name in BACKENDS if name not in absent]
    task, measured = measure(o, names)
    batch = min(Settings().batch, len(task.test))
    title = f"Backends: {task.n:,} keys, d = {task.d}, KeyNet XS of {o.samples:,} samples"
    if absent:
        title += f" (not here: {', '.join(absent)})"
    head = ["backend", "searched with", "best recall@10"]
    for target in TARGETS:
        head += [f"us at recall@10 {target}, batch 1", f"batch {batch:,}"]
    head += [f"keys scanned at {TOLD}", f"FLOPs at {TOLD}, share of a full scan"]
    rows = [row(one, measured[name, X]) for (name, _), one in measured.items()]
    raw = [
        {
            "backend": one.backend,
            "way": one.way,
            "points": [{n: p[n] for n in KEPT if n in p} for p in one.points],
        }
        for one in measured.values()
    ]
    text = (
        f"{len(task.test):,} held-out queries, one thread as far as a backend lets itself be limited. In "
        "brackets: how many times less time than the same backend with x; below 1 is a loss. A dash: "
        "that recall is not reached. Drop-in asks for the neighbours of the predicted key, four times as "
        "many as are wanted, and scores these with x. FAISS IVF with x is the best of sqrt(n) / 2 to 10 "
        "sqrt(n) cells; every other backend has its defaults, and what is routed has 4 sqrt(n) cells."
    )
    more = [text, summary(measured, batch), supports(names, measured)]
    stated = {name: getattr(o, name) for name in DEFAULTS}
    options = "".join(f" --{name} {value}" for name, value in stated.items() if value != DEFAULTS[name])
    command = f"python benchmarks/backends.py DATA{options}"
    write("backends", title, command, head, rows, raw, "\n\n".join(more))


def measure(o: argparse.Namespace, names: list[str]) -> tuple[Task, dict[tuple[str, str], Measured]]:
    """The task, and every backend in every way, by (its name, the way)."""
    held_out = min(HELD_OUT, o.queries // 8)
    keys, queries = sample(o.data, "keys", o.keys), sample(o.data, "queries", o.queries + 2 * held_out)
    options = {"val": held_out, "test": held_out, "copies": 1, "query_aware": 0.0}
    task = amips.label(keys, queries, cells=1, out=o.work / "task", progress=True, **options)
    run = o.work / "keynet-xs"
    amips.train(task, amips.KeyNet(size="XS"), samples=o.samples, out=run, resume="auto", progress=True)
    systems = listed(task, names, str(run))
    results = bench(
        task, out=o.work / "results", systems=systems, minutes=o.minutes, rounds=o.rounds, progress=True
    )
    print("\n".join(results.verdict))
    measured = {}
    for name in (IVF, *names):
        for way in WAYS:
            if families := {s.family for s in systems if (s.backend or IVF) == name and way_of(s) == way}:
                (family,) = families
                measured[name, way] = Measured(
                    name if name == IVF else backend_class(name).title,
                    way,
                    [p for p in results.values["points"] if p["family"] == family],
                    {
                        c["recall"]: c
                        for c in results.values["costs"]
                        if (c["family"], c["metric"]) == (family, "recall@10")
                    },
                )
    return task, measured


def listed(task: Task, names: list[str], run: str) -> list[System]:
    """FAISS IVF and every backend, in every way; those of one name are one family."""
    own = default_count(task.n)
    systems = [System(Design.plain(count)) for count in sweep(task.n)]
    systems += [System(Design.plain(own), run=run, label="KeyNet XS")]
    systems += [System(Design.plain(own), run=run, mode="drop-in-rescored", label="KeyNet XS")]
    systems.append(System(Design(own, storage="flat"), label=AMIPS))
    return systems + backend_systems(task, names, load_models([run])) + own_on_backends(task.n, names)


def way_of(system: System) -> str:
    """One of WAYS."""
    if system.run:
        return ROUTED if system.mode == "cells" else DROP_IN
    return X if system.role in ("baseline", "reference") else AMIPS


def gain(one: Measured, with_x: Measured, target: float, time: str) -> float | None:
    """How many times less time than with x; None where one does not reach the recall."""
    own, theirs = one.costs[target][time], with_x.costs[target][time]
    return None if own is None or theirs is None else float(theirs / own)


def row(one: Measured, with_x: Measured) -> list[str]:
    """A line of the table."""
    cells = [one.backend, one.way, f"{max(p['recall@10'] for p in one.points):.3f}"]
    for target in TARGETS:
        for time in TIMES:
            seconds, less = one.costs[target][time], gain(one, with_x, target, time)
            beside = "" if one is with_x or less is None else f" ({less:.2f})"
            cells.append("-" if seconds is None else f"{seconds * 1e6:,.0f}{beside}")
    counts = [one.costs[TOLD][what] for what in ("scanned", "flops")]
    return cells + [f"{v:.1%}" if v is not None else ("-" if one.tells else "not told") for v in counts]


def summary(measured: dict[tuple[str, str], Measured], batch: int) -> str:
    """What was gained over x, for each way of using what was learned."""
    lines = []
    for way in WAYS[1:]:
        mine = [(one, measured[name, X]) for (name, which), one in measured.items() if which == way]
        for target in TARGETS:
            parts: dict[str, list[str]] = {TOLD_OF: [], MISSED: [], MISSED_BY_X: []}
            for one, with_x in mine:
                gains = [gain(one, with_x, target, time) for time in TIMES]
                if None not in gains:
                    parts[TOLD_OF].append(f"{one.backend} {gains[0]:.2f} / {gains[1]:.2f}")
                else:
                    own = one.costs[target][TIMES[0]] is None
                    parts[MISSED if own else MISSED_BY_X].append(one.backend)
            words = [
                f"{what.format(batch=batch)} {', '.join(names)}" for what, names in parts.items() if names
            ]
            lines.append(f"- {way}, recall@10 {target}: {'; '.join(words)}.")
    return "\n".join(lines)


def supports(names: list[str], measured: dict[tuple[str, str], Measured]) -> str:
    """The table of what each backend can do; whether it tells what it looked at is as measured."""
    head = ["backend", "name", "drop-in", "routed", "learns from queries", "budget", "server"]
    head += ["keys and FLOPs are told with x", "routed"]
    rows = [[IVF, "-", "yes", "yes", "no", "probes", "no", "yes", "yes"]]
    for name in names:
        kind = backend_class(name)
        tells = [yes(measured[name, X].tells), yes(kind.routable and measured[name, ROUTED].tells)]
        can = ["yes", yes(kind.routable), yes(kind.learns), kind.budget, yes(kind.server is not None)]
        rows.append([kind.title, f"`{name}`", *can, *tells])
    return markdown_table(head, rows)


def yes(flag: bool) -> str:
    """The flag as a word of a table: "yes" or "no"."""
    return "yes" if flag else "no"


if __name__ == "__main__":
    main()
