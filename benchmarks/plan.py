"""Is the cost model right? Each phase of `amips plan` beside a real run, for more and more keys.

    python benchmarks/plan.py WORK [--sizes 100000 1000000] [--dim 128] [--queries 20000]

Measures the rates of this machine, then labels, partitions, trains, builds and searches generated keys (see
`common.generated`), phase by phase as the model counts them, and prints predicted and real seconds. WORK
keeps keys and finished phases: the same call continues. The table goes to results/plan.md.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from common import generated, merged, write

import amips
from amips.builder import Builder
from amips.capacity import Rates, calibrate, code_seconds_of, load_rates, plan, second_seconds_of
from amips.cells import default_count
from amips.design import SPILL_FRACTION, Design
from amips.index import FaissCellStore
from amips.metrics import TOP
from amips.nets import Linear, Recipe
from amips.routers import router_for
from amips.search import save, second_cells
from amips.task import load_task

WITHIN = 1.5  # the factor that is aimed at
EPOCHS = 20  # of training, as many as the model counts
SINGLES = 200


def timed(work: Callable[[], object]) -> float:
    """Seconds that a piece of work takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def real(folder: Path, n: int, m: int, d: int) -> dict[str, float]:
    """Seconds of the phases for n keys, read from the folder where they were measured before."""
    place = folder / "phases.json"
    known: dict[str, float] = json.loads(place.read_text()) if place.exists() else {}

    def phase(name: str, work: Callable[[], object]) -> None:
        if name not in known:
            known[name] = timed(work)
            place.write_text(json.dumps(known))
            print(f"{n:,} keys: {name} {known[name]:.1f} s", flush=True)

    keys, queries = generated(folder, n, m, d)
    phase("label", lambda: amips.label(keys, queries, cells=1, out=folder / "task"))
    task = load_task(folder / "task")
    c = default_count(n)
    builder = Builder(task, folder / "work")
    design = Design(c, 0.0, router=Linear(), recipe=None, storage="lean")
    phase("cells", lambda: builder.cells(design))
    task = builder.task_of(design)
    if "train" not in known:
        from amips.learn import train

        options = {"samples": EPOCHS * len(task.train), "recipe": Recipe(patience=0), "evaluations": 1}
        model = train(task, Linear(), **options)  # type: ignore[arg-type]
        known["train"] = float(model.about["seconds"])
        place.write_text(json.dumps(known))
    design = builder.resolved(replace(design, dimensions=plan(n, d, m).dimensions))
    projection = builder.projection(plan(n, d, m).dimensions)
    parts = (task.key_vectors, task.cells.assignment, task.cells.centroids, "lean", projection)
    design = replace(design, spill_fraction=0.0)
    router = router_for(builder.model(design), task.cells.centroids)
    phase("second", lambda: second_cells(task, router, SPILL_FRACTION))
    phase("code", lambda: FaissCellStore.build(*parts))  # type: ignore[arg-type]
    index = builder.searcher(design)
    phase("save", lambda: save(index, folder / "bundle"))
    if "query" not in known:
        probes = max(1, round(plan(n, d, m).serving.scanned * c))
        x = np.asarray(task.test.queries)
        times = [timed(lambda i=i: index.search(x[i : i + 1], TOP, probes=probes)) for i in range(SINGLES)]
        known["query"] = float(np.median(times))
        known["scanned"] = float(index.cost(x, TOP, probes=probes).scanned.mean() / n)
        place.write_text(json.dumps(known))
    return known


def predicted(n: int, m: int, d: int, rates: Rates, scanned: float) -> dict[str, float]:
    """Seconds of the same phases by the model; of what `build` does only the parts that are measured here."""
    forecast = plan(n, d, m, rates=rates, scanned=scanned)
    seconds = {phase.name: phase.seconds for phase in forecast.phases}
    c, r = forecast.cells, forecast.dimensions
    return {
        "label": seconds["label"],
        "cells": seconds["cells"],
        "train": seconds["train"] * (m - 2000) / m,
        "second": second_seconds_of(n, d, c, m - 2000, rates),
        "code": code_seconds_of(n, d, r, rates),
        "save": (n * (r / 2 + 8) + 4.0 * n * d) / rates.save,
        "query": forecast.serving.latency,
    }


def main() -> None:
    """Measure, compare, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", type=Path)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e5, 1e6])
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--queries", type=int, default=20_000)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    place = arguments.work / "rates.json"
    if not place.exists():
        calibrate(print).save_to(place)
    rates = load_rates(place)[0]
    rows, raw = list[list[str]](), list[dict[str, Any]]()
    for size in map(int, arguments.sizes):
        folder = arguments.work / str(size)
        folder.mkdir(exist_ok=True)
        measured = real(folder, size, arguments.queries, arguments.dim)
        model = predicted(size, arguments.queries, arguments.dim, rates, measured["scanned"])
        raw.append({"keys": size, "predicted": model, "real": measured})
    raw = merged("plan", raw, ["keys"])
    for one in raw:
        for name, seconds in one["predicted"].items():
            ratio = seconds / one["real"][name]
            within = "yes" if abs(math.log(ratio)) <= math.log(WITHIN) else "no"
            numbers = [f"{seconds:.3g}", f"{one['real'][name]:.3g}", f"{ratio:.2f}"]
            rows.append([f"{one['keys']:,}", name, *numbers, within])
    sizes = " ".join(str(one["keys"]) for one in raw)
    command = f"python benchmarks/plan.py WORK --sizes {sizes} --dim {arguments.dim}"
    head = ["keys", "phase", "predicted s", "real s", "ratio", f"within {WITHIN}"]
    write("plan", "The cost model beside real runs", command, head, rows, raw)


if __name__ == "__main__":
    main()
