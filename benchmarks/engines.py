"""Every engine that is installed, searched with x and with the key that a KeyNet predicts.

Where its cells can be addressed, it is also routed by that, and by amips's own recipe (query-aware cells, a
linear router, as many probes as each query needs).

DATA is a directory with keys and queries, as for `amips study`; a sample of it is taken. Engines whose
library is missing are left out, and said to be. What is there in WORK is not made again.
"""

import argparse
import math
from pathlib import Path

from machine import write

import amips
from amips.bench import System, bench
from amips.bench.studies.lab import Lab, Scale
from amips.bench.systems import engine_systems, load_models, own_on_engines, own_systems
from amips.engines import ENGINES, missing

TARGETS = (0.9, 0.95)
WAYS = ("x", "drop-in", "routed by KeyNet", "amips")


def main() -> None:
    """Measure and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--work", type=Path, default=Path("engines-work"))
    for name, value in (("keys", 20_000), ("queries", 40_000), ("samples", 1_000_000), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    o = parser.parse_args()
    scale = Scale("engines", o.keys, o.queries, 1000, 1, None, o.samples, "default", ("XS",), 3)
    lab = Lab(o.data, scale, o.work, progress=True)
    task = lab.mapping_task()
    lab.model(task, amips.KeyNet(size="XS"), "keynet-xs")
    run = str(lab.run_directory("keynet-xs", task))
    absent = missing()
    found = [name for name in ENGINES if name not in absent]
    cells = round(4 * math.sqrt(task.n))
    ivf = {"cells": cells, "router": run, "label": "KeyNet XS"}
    systems = [System(cells=cells), System(**ivf), System(**ivf, route="drop-in-rescored")]
    systems += [s for s in own_systems(task.n, task.d, (4.0,)) if s.storage == "flat"]
    systems += engine_systems(task, found, load_models([run])) + own_on_engines(task.n, task.d, found)
    made = bench(task, out=o.work / "results", systems=systems, rounds=o.rounds, progress=True)
    print("\n".join(made.verdict))

    points = made.values["points"]
    rows, raw = [], []
    for name in ("ivf", *found):
        title = "FAISS IVF" if name == "ivf" else System(engine=name).family
        for way in WAYS:
            chosen = [s for s in systems if s.engine == name and way_of(s) == way]
            if not chosen:
                continue
            family = chosen[0].family
            mine = [p for p in points if p["family"] == family]
            costs = [c for c in made.values["costs"] if c["family"] == family]
            kept = ("budget", "recall@1", "recall@10", "flops", "scanned", "single/1", "batch/1")
            raw.append(
                {"engine": title, "way": way, "points": [{n: p[n] for n in kept if n in p} for p in mine]}
            )
            best = max(p["recall@10"] for p in mine)
            cost = {c["recall"]: c for c in costs if c["metric"] == "recall@10"}
            row = [title, way, f"{best:.3f}"]
            for target in TARGETS:
                at = cost[target]
                times = (at["single/1"], at["batch/1"])
                row += ["-" if seconds is None else f"{seconds * 1e6:,.0f}" for seconds in times]
            scanned = [cost[0.9]["scanned"], cost[0.9]["flops"]]
            told = any("flops" in p for p in mine)
            row += [f"{v:.1%}" if v is not None else ("-" if told else "not told") for v in scanned]
            rows.append(row)
    head = ["engine", "searched with", "best recall@10"]
    for target in TARGETS:
        head += [f"us at recall@10 {target}, batch 1", "large batch"]
    head += ["keys scanned at 0.9", "FLOPs at 0.9, share of a full scan"]
    title = f"Engines: {task.n:,} keys, d = {task.d}, KeyNet XS of {o.samples:,} samples"
    if absent:
        title += f" (not here: {', '.join(absent)})"
    command = f"python benchmarks/engines.py DATA --rounds {o.rounds}"
    write("engines", title, command, head, rows, raw)


def way_of(system: System) -> str:
    """One of WAYS."""
    if system.router in ("centroid", "linear"):
        return "x" if system.router == "centroid" else "amips"
    return "routed by KeyNet" if system.route == "cells" else "drop-in"


if __name__ == "__main__":
    main()
