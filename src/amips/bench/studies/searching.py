"""What the studies that search have in common: systems run over budgets, stored, and read back by family."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from amips.bench.derive import Family, families
from amips.bench.running import Bench, Settings
from amips.bench.store import Run, Store
from amips.bench.studies.lab import Lab
from amips.bench.systems import System
from amips.progress import bar
from amips.task import Task


def run_systems(
    lab: Lab, task: Task, folder: str, systems: Sequence[System], ladder: Sequence[int] | None, times: bool
) -> tuple[list[Family], list[Run]]:
    """Run systems, or read what is stored of them: their families on the test queries, and the raw runs.

    Args:
        folder: where in the lab's `out` the runs are stored.
        ladder: budgets; None climbs until nearly everything is found.
        times: take times too.
    """
    about = {"kind": "results", "keys": task.fingerprint, "study": folder, "seed": lab.seed}
    store = Store(lab.out / folder, about)
    batch, singles = (64, 8) if lab.scale.name == "smoke" else (1024, 64)
    settings = Settings(batch=batch, singles=singles, rounds=lab.scale.rounds, seed=lab.seed)
    bench = Bench(task, store, settings, work=lab.work)
    with bar(len(systems), folder.split("/")[0], "system", lab.progress) as shown:
        for system in sorted(systems, key=lambda s: (s.cells, s.storage)):
            shown.set_postfix_str(system.name)
            bench.check(system)
            answered = bench.answer(system, ladder)
            if times:
                bench.take_times(system, answered)
            shown.update()
    runs = store.runs(systems)
    return families(runs, len(task.val), np.asarray(task.test.top_ids), task.n), runs


def run_directory(lab: Lab, name: str, task: Task) -> Path:
    """Where the lab keeps a run."""
    return lab.work / f"run-{name}-{task.path.name}"
