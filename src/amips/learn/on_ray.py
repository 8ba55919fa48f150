"""Training on a Ray cluster: the loop of `train` in several processes, as under torchrun.

The task and the run directory are on a file system that all nodes share. A lost worker or node costs what was
done since the last checkpoint: all workers begin again and continue from it.
"""

import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from amips import errors
from amips.arguments import check_whole
from amips.cells import Cells
from amips.cluster import Cluster, connected, run_together
from amips.errors import AmipsError, RunError
from amips.files import write_json
from amips.learn.budget import Budget
from amips.learn.compute import Compute
from amips.learn.run_directory import Resume, RunDirectory, run_config
from amips.learn.setup import set_up
from amips.locks import locked
from amips.nets import Model, Recipe, load_model, read_run_log
from amips.progress import Bar
from amips.task import Task, load_task

NOTES, FAILED, CELLS = ".ray", "failed.json", "cells.npz"  # in the run directory, while it is trained in
LOOK_SECONDS = 1.0  # between looks at the log of the run


def check_workers(workers: Any, ray: str | None) -> int | None:
    """The number of training workers; RunError if it is none, or there is no cluster for them."""
    if workers is None:
        return None
    if ray is None:
        raise RunError(f"workers={workers}: give the Ray cluster that they run on, as ray")
    return check_whole("workers", workers, 1, error=RunError)


def _check_room(cluster: Cluster, workers: int) -> None:
    """RunError if the cluster has no processor for a worker: Ray would wait for one, and say nothing."""
    if workers > cluster.processors():
        raise RunError(
            f"workers={workers}: the Ray cluster has {cluster.processors()} processors, and each worker "
            "takes one; give fewer workers, or add nodes with: ray start"
        )


@dataclass(frozen=True)
class RaySettings:
    """How a run is trained on a cluster: its address, the number of workers (None: one a node), and the rest.

    Args:
        show: say how far it is.
        options: of `train`, that workers are given as they are.
    """

    address: str
    workers: int | None
    resume: Resume
    show: bool
    options: dict[str, Any]


def train_on_ray(
    settings: RaySettings,
    task: Task,
    network: Any,
    out: Path | None,
    recipe: Recipe,
    budget: Budget,
    seed: int,
    compute: Compute,
) -> Model:
    """`train` by the workers of a Ray cluster; arguments as there."""
    if out is None:
        raise RunError("ray: give the directory of the run, as out: workers meet there")
    with connected(settings.address) as cluster:
        assert cluster is not None
        workers = settings.workers or len(cluster.nodes())
        alone: Any = SimpleNamespace(rank=0, world=workers)
        setup = set_up(task, network, recipe, seed, torch.device("cpu"), alone)
        config = run_config(setup, recipe, budget, seed, workers, compute)
        finished = RunDirectory(out, config).finished(settings.resume)
        if finished is not None:
            return finished
        _check_room(cluster, workers)
        own = load_task(task.path, verify=False).fingerprints == task.fingerprints
        inputs = {
            "task": str(task.path.resolve()),
            "quantizer": None if own else task.cells.quantizer,
            "network": network,
            "out": str(out.resolve()),
            "options": {
                **settings.options,
                "recipe": recipe,
                "samples": budget.samples,
                "minutes": budget.minutes,
                "evaluations": budget.evaluations,
                "seed": seed,
                "precision": compute.precision,
                "compile": compute.compile,
            },
        }
        gpu = str(settings.options.get("device") or "").startswith("cuda")
        with _notes(out, task, cluster) as notes, _watched(out, budget, workers, settings.show):
            if not own:
                np.savez(notes / CELLS, assignment=task.cells.assignment, centroids=task.cells.centroids)
            run_together(work, inputs, workers, notes, gpu)
            if (notes / FAILED).exists():
                failed = json.loads((notes / FAILED).read_text())
                raise getattr(errors, failed["kind"])(failed["text"])
    return load_model(out)


@contextmanager
def _notes(out: Path, task: Task, cluster: Cluster) -> Iterator[Path]:
    """A directory for what Ray and the workers note; RunError unless every node sees it, and the task."""
    notes = out / NOTES
    out.mkdir(parents=True, exist_ok=True)
    # Of those who call: the lock of the run is taken by a worker, which comes too late for what is here.
    with locked(out / f"{NOTES}.lock", RunError(f"{out}: another process is training there on Ray")):
        shutil.rmtree(notes, ignore_errors=True)
        notes.mkdir()
        yield from _shared_notes(out, notes, task, cluster)


def _shared_notes(out: Path, notes: Path, task: Task, cluster: Cluster) -> Iterator[Path]:
    try:
        for place in (notes, task.path):
            seen = cluster.everywhere(os.path.isdir, str(place.resolve()))
            if blind := [node for node, sees in seen.items() if not sees]:
                raise RunError(
                    f"node {blind[0]} of the Ray cluster does not see {place}: training needs the task and "
                    "the run on a file system that all nodes share"
                )
        yield notes
    finally:
        shutil.rmtree(notes, ignore_errors=True)
        (out / f"{NOTES}.lock").unlink(missing_ok=True)
        with suppress(OSError):  # it is not empty if something was trained
            out.rmdir()


@contextmanager
def _watched(out: Path, budget: Budget, workers: int, show: bool) -> Iterator[None]:
    """Show how far a run is that others train: by its log, which has a line for each evaluation."""
    ended = threading.Event()

    def watch() -> None:
        with Bar(budget.samples or 0, f"training on {workers} workers", " samples", True) as shown:
            while not ended.wait(LOOK_SECONDS):
                try:
                    entries = read_run_log(out)
                except AmipsError:  # it is just being written
                    continue
                if entries:
                    shown.update(max(0, int(entries[-1]["samples"]) - shown.n))

    watcher = threading.Thread(target=watch, daemon=True)
    if show:
        watcher.start()
    try:
        yield
    finally:
        ended.set()
        if show:
            watcher.join()


def work(inputs: dict[str, Any]) -> None:
    """What a worker does: train, or continue to.

    An error of amips would come again however often the workers were begun again. So it is written down, and
    workers that find it written down end at once.
    """
    from amips.learn.loop import train

    out = Path(inputs["out"])
    if (out / NOTES / FAILED).exists():
        return
    try:
        task = load_task(inputs["task"])
        if inputs["quantizer"] is not None:
            with np.load(out / NOTES / CELLS) as cells:
                arrays = cells["assignment"], cells["centroids"]
            task = task.with_cells(Cells(*arrays, quantizer=inputs["quantizer"]))
        train(task, inputs["network"], out=out, resume="auto", **inputs["options"])
    except AmipsError as problem:
        write_json(out / NOTES / FAILED, {"kind": type(problem).__name__, "text": str(problem)})
        raise
