"""The same training with several seeds: how much of a figure is luck."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from amips.arguments import check_flag, check_path, check_seed, check_whole, refused
from amips.errors import RunError
from amips.learn.loop import train
from amips.learn.run_directory import Resume
from amips.learn.setup import Spec
from amips.nets import Model, is_run
from amips.task import Task, load_task


@dataclass(frozen=True)
class SeedRuns:
    """Models by seed, and what their figures on val have in common."""

    models: dict[int, Model]

    @property
    def val(self) -> dict[str, list[float]]:
        """Every figure on val, one number for each seed."""
        figures = [model.about["val"] for model in self.models.values()]
        return {name: [float(one[name]) for one in figures] for name in figures[0]}

    @property
    def mean(self) -> dict[str, float]:
        """The mean of every figure on val."""
        return {name: float(np.mean(values)) for name, values in self.val.items()}

    @property
    def spread(self) -> dict[str, float]:
        """The standard deviation of every figure on val over seeds (of a sample: n - 1); nan of one seed."""
        several = len(self.models) > 1
        return {name: float(np.std(v, ddof=1)) if several else float("nan") for name, v in self.val.items()}


def train_seeds(
    task: Task | str | Path,
    network: Spec | None = None,
    *,
    seeds: int | Sequence[int] = 3,
    out: str | Path | None = None,
    resume: Resume = False,
    **options: Any,
) -> SeedRuns:
    """`train` once for each seed.

    Args:
        task, network: as in `train`.
        seeds: how many, 0, 1, ...; or which.
        out: the directory of the runs, `seed-0`, `seed-1`, ... in it; None keeps none. Finished ones are
            returned as they are.
        resume: continue the run that is unfinished and begin those that are not there yet.
        options: all others of `train`.
    """
    numbers = checked_seeds(seeds)
    if not isinstance(resume, str) or resume != "auto":
        resume = check_flag("resume", resume, error=RunError)
    if "seed" in options:
        raise RunError("seed: give either seed, to train, or seeds, to train_seeds")
    place = None
    if out is not None:
        place = check_path("out", out, error=RunError)
        if is_run(place):
            raise RunError(f"{place} holds a run of its own; give seeds another directory")
    elif resume is True:
        raise RunError("resume: give the directory of the runs to continue, as out")
    task = load_task(task, verify=True)
    models = {}
    for seed in numbers:
        models[seed] = train(
            task,
            network,
            seed=seed,
            out=None if place is None else place / f"seed-{seed}",
            resume="auto" if resume else False,
            **options,
        )
    return SeedRuns(models)


def checked_seeds(seeds: Any) -> list[int]:
    """The seeds that are meant; RunError if they are none, or one is there twice."""
    if isinstance(seeds, Sequence | np.ndarray) and not isinstance(seeds, str):
        numbers = [check_seed(seed, error=RunError) for seed in seeds]
        if not numbers or len(set(numbers)) < len(numbers):
            raise refused("seeds", seeds, "different seeds, at least one", RunError)
        return numbers
    return list(range(check_whole("seeds", seeds, 1, error=RunError)))
