"""SupportNet trained on the gradients of all cells, and on those of two that are drawn for each query.

    python benchmarks/drawn_cells.py DATA

DATA holds `keys` and `queries`. Both see the same batches for as many steps; rates are of training alone, in
turns in one process. Errors are those of the averaged weights on val. The table goes to
results/drawn_cells.md.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from common import sample, write

from amips import Recipe, SupportNet, label, train
from amips.task import Task

WAYS = {"all cells": 0, "two drawn cells": 2}  # `sampled_gradients` of the recipe


def measured(task: Task, size: str, drawn: int, steps: int, seed: int, out: Path) -> dict[str, float]:
    """Samples a second, and the errors on val, of a SupportNet after so many steps."""
    recipe = Recipe(sampled_gradients=drawn, patience=0, keep_best=False)
    samples = steps * recipe.batch
    about: dict[str, Any] = train(
        task, SupportNet(size), out=out, recipe=recipe, samples=samples, evaluations=1, seed=seed
    ).about
    val = about["val"]
    return {"rate": samples / about["seconds"], "score": val["score"], "gradient": val["key"]}


def main() -> None:
    """Measure and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", type=Path)
    options = (("keys", 20_000), ("queries", 20_000), ("cells", 10), ("steps", 20), ("seeds", 3))
    for name, value in options:
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--sizes", default="XS,M")
    o = parser.parse_args()
    keys, queries = sample(o.data, "keys", o.keys), sample(o.data, "queries", o.queries)
    rows, raw = [], []
    with tempfile.TemporaryDirectory() as folder:
        task = label(keys, queries, out=Path(folder) / "task", preset="paper", cells=o.cells, copies=0, k=10)
        for size in o.sizes.split(","):
            runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
            for seed in range(o.seeds):
                for way, drawn in WAYS.items():
                    out = Path(folder) / f"{size}-{drawn}-{seed}"
                    runs[way].append(measured(task, size, drawn, o.steps, seed, out))
            pairs = zip(*(runs[way] for way in WAYS), strict=True)
            faster = statistics.median(few["rate"] / every["rate"] for every, few in pairs)
            for way, rates in runs.items():
                mean = {name: statistics.mean(run[name] for run in rates) for name in ("score", "gradient")}
                rate = statistics.median(run["rate"] for run in rates)
                times = f"{faster:.1f}" if way != next(iter(WAYS)) else ""
                errors = [f"{mean['score']:.5f}", f"{mean['gradient']:.4f}"]
                rows.append([f"SupportNet {size}", way, f"{rate:,.0f}", times, *errors])
                raw.append({"row": rows[-1], "runs": rates})
    head = ["network", "gradients of", "samples/s", "times as many", "score error", "gradient error"]
    title = (
        f"SupportNet's gradients: n = {len(keys):,}, d = {keys.shape[1]}, c = {o.cells}; {o.steps} steps of "
        f"{Recipe().batch:,} samples"
    )
    note = f"Rates: the median of {o.seeds} seeds. Errors: their mean, on val, after as many steps."
    write("drawn_cells", title, "python benchmarks/drawn_cells.py DATA", head, rows, raw, note)


if __name__ == "__main__":
    main()
