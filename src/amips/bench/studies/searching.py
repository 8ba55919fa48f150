"""What the studies that search have in common: systems run over budgets, stored, and read back by family."""

from collections.abc import Sequence

from amips.bench.derive import Family, on_test
from amips.bench.running import Bench, Settings
from amips.bench.store import Run, Store
from amips.bench.studies.lab import Lab
from amips.bench.systems import System
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
    settings = Settings(
        batch=batch, singles=singles, rounds=lab.scale.rounds, seed=lab.seed, progress=lab.progress
    )
    Bench(task, store, settings, work=lab.work).run(systems, folder.split("/")[0], ladder, times)
    runs = store.runs(systems)
    return on_test(runs, task), runs
