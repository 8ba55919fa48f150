"""The builder: cells, router, second cells and index of a design, each made once and kept by fingerprint.

directory/
  cells-<fingerprint>.npz     a partition
  run-<fingerprint>/          the training run of a router
  second-<fingerprint>.npy    second cells
  index-<fingerprint>/        a bundle
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from amips import exact
from amips.cells import POINTS_PER_CELL, TOP, Cells, fingerprint_of, query_aware
from amips.design import OWN, Design, RouterSpec
from amips.errors import AmipsError, BundleError, RunError, TrainingInterrupted
from amips.extras import needs_extra
from amips.files import local, temporary_directory, write_atomically
from amips.index import FEWEST_KEYS, REFINE, FaissCellStore
from amips.lean import STEP, Projection, learn_projection, reduced_dimension
from amips.nets import AffineNet, Linear, MaxAffine, Model
from amips.routers import check_fits, router_for
from amips.search import (
    Searcher,
    calibrated,
    estimate_routing,
    load,
    save,
    second_cells,
)
from amips.task import Task

Value = TypeVar("Value")

ITERATIONS = 20  # of k-means
MINUTES = 1.0  # of training, at most: it ends when val stops improving
TARGET_RECALL = 0.95
LEAN_FRACTIONS = (
    0.25,
    1 / 3,
    0.4,
    0.5,
    0.6,
)  # of the dimensions, of lean storage: the smallest that will do,
LEAN_RECALL = 0.99  # ... which is: so many of the true top keys are among the candidates
LEAN_SAMPLE = 200  # queries this is looked up for
CELLS = ("structure", "cells", "query_aware")  # the fields that a partition depends on,
ROUTER = (*CELLS, "router", "recipe")  # ... a router,
SECOND = (*ROUTER, "spill_fraction")  # ... and second cells


class Builder:
    """Makes what designs are made of, from one task. What is there is not made again.

    Args:
        task: keys, queries and their targets. Its own cells serve designs that ask for such cells.
        directory: where to keep what is made; None keeps it until the process ends.
        minutes: of training, at most, for each router.
        recall: the recall@10 that indexes are made for: what second cells are chosen by and `search` serves.
        iterations, points: of k-means, on so many keys a cell.
    """

    def __init__(
        self,
        task: Task,
        directory: str | Path | None = None,
        *,
        minutes: float = MINUTES,
        recall: float = TARGET_RECALL,
        seed: int = 0,
        iterations: int = ITERATIONS,
        points: int = POINTS_PER_CELL,
        progress: bool = False,
    ) -> None:
        self.task, self.minutes, self.recall, self.seed = task, minutes, recall, seed
        self.iterations, self.points, self.progress = iterations, points, progress
        self.directory = (
            temporary_directory("amips-build-") if directory is None else local(directory, RunError)
        )
        self.directory.mkdir(parents=True, exist_ok=True)
        # What is kept belongs to this task and these settings: another builder may use the same directory.
        inputs = [task.fingerprint, task.options, seed, iterations, points]
        self._inputs = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:8]
        self._projection: Projection | None = None
        self._store: tuple[str, FaissCellStore] | None = None  # one: an index is what takes memory
        self._dimensions: list[int | None] = []

    def resolved(self, design: Design) -> Design:
        """The design with every number known: the rank of its router, the dimensions of lean storage."""
        if design.storage == "lean" and design.dimensions is None:
            return design.resolved(self.task.d, self.lean_dimensions() or self.task.d)
        return design.resolved(self.task.d)

    def lean_dimensions(self) -> int | None:
        """What `fewest_dimensions` finds for the task."""
        if not self._dimensions:
            self._dimensions = [fewest_dimensions(self.task, self.projection)]
        return self._dimensions[0]

    def check(self, design: Design) -> None:
        """AmipsError if a design cannot be made of this task."""
        n, d = self.task.n, self.task.d
        if design.cells > n:
            raise AmipsError(f"cells={design.cells}: there are only {n:,} keys")
        rank = design.router.rank_for(d) if isinstance(design.router, Linear | MaxAffine) else 0
        if max(rank, design.dimensions or 0) > d:
            raise AmipsError(f"{design!r}: there are only {d} dimensions")
        if n < FEWEST_KEYS.get(design.storage, 0):
            few = f"storage={design.storage!r} needs at least {FEWEST_KEYS[design.storage]} keys, got {n}"
            raise AmipsError(f"{few}; use 'flat' or 'sq8'")
        if design.query_aware is None and design.cells != self.task.c:
            raise AmipsError(f"the cells that were given are {self.task.c}, the design has {design.cells}")

    def cells(self, design: Design) -> Cells:
        """The partition of a design: the task's own if it is the same, or k-means."""
        own = (self.task.c, self.task.query_aware)
        if design.query_aware is None or (design.cells, design.query_aware) == own:
            return self.task.cells
        name = f"cells-{design.fingerprint(*CELLS)}-{self._inputs}.npz"
        return _kept(self.directory / name, lambda: self._partition(design), _write_cells, _read_cells)

    def _partition(self, design: Design) -> Cells:
        assert design.query_aware is not None
        return query_aware(
            self.task.key_vectors,
            self.task.train.vectors,
            np.asarray(self.task.train.top_ids)[:, :TOP],
            design.cells,
            strength=design.query_aware,
            iterations=self.iterations,
            points=self.points,
            seed=self.seed,
        )

    def task_of(self, design: Design) -> Task:
        """The task with the cells of the design."""
        cells = self.cells(design)
        return self.task if cells is self.task.cells else self.task.with_cells(cells)

    def model(self, design: Design) -> Model | None:
        """The router of a design: None for centroids, where training begins without a recipe, or trained."""
        design = self.resolved(design)
        if design.router is None:
            return None
        if not isinstance(design.router, RouterSpec):
            raise AmipsError("a router of its own cannot be made: bring it, as model")
        if design.recipe is None:
            return self._untrained(design)
        with needs_extra(f"training a {design.router.kind} router", "train", "torch"):
            from amips.learn import train
        run = self.run_directory(design)
        try:
            return train(
                self.task_of(design),
                design.router,
                recipe=design.recipe,
                minutes=self.minutes,
                out=run,
                resume=(run / "config.json").exists(),
                seed=self.seed,
                progress=self.progress,
            )
        except TrainingInterrupted:
            raise TrainingInterrupted("stopped; the same call continues where it was") from None

    def run_directory(self, design: Design) -> Path:
        """Where the training run of a design's router is kept."""
        name = f"run-{self.resolved(design).fingerprint(*ROUTER)}-{self._inputs}-{self.minutes:g}"
        return self.directory / name

    def _untrained(self, design: Design) -> Model:
        """A linear router at the centroids, a max-affine one too: what training would begin with."""
        router, task = design.router, self.task_of(design)
        assert isinstance(router, Linear | MaxAffine)
        if isinstance(router, MaxAffine):
            with needs_extra("a max-affine router", "train", "torch"):
                from amips.learn import initial_model
            return initial_model(task, router, self.seed)
        architecture = router.architecture(task.n, task.d, task.c)
        weights = {"W": task.cells.centroids}
        if architecture.rank:
            projection = self.projection(architecture.rank)
            weights = {"A": projection.queries, "W": projection.weights(task.cells.centroids)}
        if architecture.bias:
            weights["b"] = np.zeros(task.c, np.float32)
        about = dict(task.fingerprints)
        return AffineNet(architecture, weights, about)

    def projection(self, r: int) -> Projection:
        """The projection that keeps inner products of the task's queries and keys best in r dimensions."""
        if self._projection is None:
            self._projection = learn_projection(self.task.key_vectors, self.task.train.vectors, self.task.d)
        return self._projection.first(r)

    def second_cells(self, design: Design, model: Any) -> NDArray[np.int32] | None:
        """The second cells of a design: which keys have one depends on where the router sends queries."""
        if not design.spill_fraction:
            return None
        task = self.task_of(design)

        def make() -> NDArray[np.int32] | None:
            router = router_for(model, task.cells.centroids)
            return second_cells(task, router, design.spill_fraction, self.recall)

        if not isinstance(model, Model | None):
            return make()
        parts = (self.resolved(design).fingerprint(*SECOND), self._inputs, _identity(model))
        name = f"second-{'-'.join(parts)}-{self.recall:g}.npy"
        return _kept(self.directory / name, make, _write_second, _read_second)

    def store(self, design: Design, model: Any, second: NDArray[np.int32] | None = None) -> FaissCellStore:
        """The keys of a design by cell. The last one made is held: several ways to route it may follow."""
        design = self.resolved(design)
        self.check(design)
        names = ("structure", "cells", "query_aware", "storage", "dimensions")
        # Second cells are where a router sends queries: each router has its own.
        spilled = f"{design.fingerprint(*SECOND)}-{_identity(model)}" if design.spill_fraction else ""
        key = f"{design.fingerprint(*names)}-{spilled}"
        if self._store is None or self._store[0] != key or second is not None:
            self._store = None  # lets go of the old one first: two would need twice the memory
            cells = self.cells(design)
            if second is None:
                second = self.second_cells(design, model)
            projection = None
            if design.storage == "lean":
                assert design.dimensions is not None
                projection = self.projection(design.dimensions)
            parts = (cells.assignment, cells.centroids, design.storage, projection, second)
            self._store = (key, FaissCellStore.build(self.task.key_vectors, *parts))
        return self._store[1]

    def searcher(
        self, design: Design, model: Any = OWN, *, second: NDArray[np.int32] | None = None
    ) -> Searcher:
        """The index of a design, with the temperature of its stopping rule and no operating points yet.

        Args:
            model: what chooses cells, if the builder is not to make it.
            second: second cells [n], -1 for none, if the builder is not to choose them.
        """
        design = self.resolved(design)
        self.check(design)
        model = self.model(design) if isinstance(model, str) else model
        cells = self.cells(design)
        router_for(model, cells.centroids)  # refuses a model of another shape before there is an index
        check_fits(model, self.task.fingerprint, fingerprint_of(cells.assignment))
        store = self.store(design, model, second)
        if isinstance(design.router, Linear | MaxAffine) and at_start(model):
            design = replace(design, recipe=None)  # what it is, not what was asked for
        searcher = Searcher(store, model, fingerprint=self.task.fingerprint, design=design)
        return replace(searcher, temperature=estimate_routing(searcher, self.task.val).temperature)

    def index(self, design: Design, model: Any = OWN, *, second: NDArray[np.int32] | None = None) -> Searcher:
        """The index of a design, measured on the val queries; kept as a bundle if the builder made it all."""
        design = self.resolved(design)
        name = f"index-{design.fingerprint()}-{self._inputs}-{self.minutes:g}-{self.recall:g}"
        kept = self.directory / name
        own = isinstance(model, str) and second is None
        if own and (kept / "manifest.json").exists():
            try:
                return load(kept)
            except BundleError as problem:
                raise BundleError(f"{problem}; delete {kept}") from None
        index = calibrated(self.searcher(design, model, second=second), self.task.val, self.recall)
        if own:
            save(index, kept)
        return index


def fewest_dimensions(task: Task, projection: Callable[[int], Projection]) -> int | None:
    """The fewest dimensions whose candidates hold nearly all of the true top keys; None if none are few."""
    if task.n <= REFINE * TOP or task.d <= STEP:
        return None  # every key is a candidate, or nothing is saved
    x, top = np.asarray(task.val.queries[:LEAN_SAMPLE]), np.asarray(task.val.top_ids[:LEAN_SAMPLE, :TOP])
    for r in dict.fromkeys(reduced_dimension(task.d, fraction) for fraction in LEAN_FRACTIONS):
        if r >= task.d:
            return None
        reduced = projection(r)
        candidates = exact.top_k(reduced.of_keys(task.key_vectors), x @ reduced.queries.T, REFINE * TOP)[1]
        if (top[:, :, None] == candidates[:, None, :]).any(axis=2).mean() >= LEAN_RECALL:
            return r
    return None


def at_start(model: Any) -> bool:
    """Whether a model is where its training began: `train` may find nothing better on val."""
    return isinstance(model, Model) and model.about.get("blend") == 0


def _identity(model: Any) -> str:
    """Tells models apart: by their weights, or by the object."""
    return "centroids" if model is None else model.fingerprint if isinstance(model, Model) else str(id(model))


def _kept(
    path: Path, make: Callable[[], Value], write: Callable[[Any, Value], None], read: Callable[[Path], Value]
) -> Value:
    """What is in the file, or what `make` gives, written there."""
    if not path.exists():
        value = make()
        write_atomically(path, lambda file: write(file, value))
        return value
    try:
        return read(path)
    except Exception as problem:  # a damaged file makes numpy raise nearly anything
        reason = (str(problem) or type(problem).__name__).splitlines()[0]
        raise RunError(f"{path} is damaged ({reason}); delete it") from None


def _write_cells(file: Any, cells: Cells) -> None:
    np.savez(file, assignment=cells.assignment, centroids=cells.centroids)


def _read_cells(path: Path) -> Cells:
    with path.open("rb") as file, np.load(file) as arrays:  # numpy leaves a file that it cannot read open
        return Cells(arrays["assignment"], arrays["centroids"])


def _write_second(file: Any, second: NDArray[np.int32] | None) -> None:
    np.save(file, np.empty(0, np.int32) if second is None else second)


def _read_second(path: Path) -> NDArray[np.int32] | None:
    second: NDArray[np.int32] = np.load(path)
    return second if len(second) else None
