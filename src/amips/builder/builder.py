"""The builder: cells, router, second cells and index of a design, each made once and kept by fingerprint.

directory/
  cells-<fingerprint>.npz     a partition
  run-<fingerprint>/          the training run of a router
  second-<fingerprint>.npz    second cells
  index-<fingerprint>/        a bundle
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.builder.graphs import graph_searcher, resolved_graph
from amips.builder.kept_files import cached, read_cells, read_second, write_cells, write_second
from amips.builder.memories import remembering
from amips.builder.reduced import fewest_dimensions
from amips.builder.training_workers import workers_for
from amips.cells import ITERATIONS, Cells, fingerprint_of, make_cells
from amips.cluster import connected
from amips.design import OWN, Design, RouterSpec
from amips.errors import AmipsError, BundleError, RunError, TrainingInterrupted
from amips.extras import needs_extra
from amips.files import local
from amips.index import FaissCellStore, check_enough_keys, check_graph_size
from amips.lean import Projection, learn_projection
from amips.metrics import TARGET_RECALL
from amips.nets import DEFAULT_MINUTES, Linear, MaxAffine, Model, initial_model
from amips.routers import check_fits, router_for
from amips.scratch import Scratch
from amips.search import (
    DEPTH_QUERIES,
    KEEP_LOG,
    Demand,
    GraphSearcher,
    Origin,
    QueryLog,
    Searcher,
    Snapshot,
    WrappedIndex,
    calibrated,
    calibrated_graph,
    estimate_routing,
    learn_placement,
    near_target,
    read_index,
    save,
    second_cells,
)
from amips.task import Task


class Builder:
    """Makes what designs are made of, from one task. What is there is not made again.

    Args:
        task: keys, queries and their targets. Its own cells serve designs that ask for such cells.
        directory: where to keep what is made; None keeps it as long as the builder.
        minutes: of training, at most, for each router.
        recall: the recall@10 that indexes are made for: what second cells are chosen by and `search` serves.
        iterations, points: of k-means, on so many keys a cell; None: on all of them where cells are few.
        device: where routers are trained, as in `train`.
        ray: a Ray cluster that partitions keys and trains routers, as in `label` and `train`.
        keep_log: training queries that an index keeps, at most, and a fifth of that held out; 0 for none.
        memory: a bound on the bytes that making cells takes, beside the index; None for none.
    """

    def __init__(
        self,
        task: Task,
        directory: str | Path | None = None,
        *,
        minutes: float = DEFAULT_MINUTES,
        recall: float = TARGET_RECALL,
        seed: int = 0,
        iterations: int = ITERATIONS,
        points: int | None = None,
        device: str | None = None,
        ray: str | None = None,
        progress: bool = False,
        keep_log: int = KEEP_LOG,
        memory: int | None = None,
    ) -> None:
        self.task, self.minutes, self.recall, self.seed = task, minutes, recall, seed
        self.iterations, self.points, self.device, self.progress = iterations, points, device, progress
        self.keep_log, self.memory, self.ray = keep_log, memory, ray
        task.verify()  # what is made is known by the fingerprint of the keys: they must be these
        self._scratch: Scratch | None = None
        if directory is None:
            self._scratch = Scratch("amips-build-")
            directory = self._scratch.path
        self.directory = local(directory, RunError)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.workers = None if ray is None else workers_for(ray, self.directory)
        # What is kept belongs to this task and these settings: another builder may use the same directory.
        inputs = [
            task.fingerprint,
            task.options,
            seed,
            iterations,
            points,
            *([] if memory is None else [memory]),
        ]
        self.inputs = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:8]
        self._projection: Projection | None = None
        self._store: tuple[str, FaissCellStore] | None = None  # one: an index is what takes memory
        self._dimensions: list[int | None] = []

    def resolved(self, design: Design) -> Design:
        """The design with every number known: the rank of its router, the dimensions of lean storage."""
        if design.structure == "graph":
            return resolved_graph(self, design)
        if design.storage == "lean" and design.dimensions is None:
            return design.resolved(self.task.d, self.lean_dimensions() or self.task.d)
        return design.resolved(self.task.d)

    def lean_dimensions(self) -> int | None:
        """What `fewest_dimensions` finds for the task."""
        if not self._dimensions:
            self._dimensions = [fewest_dimensions(self.task, self.projection, memory=self.memory)]
        return self._dimensions[0]

    def check(self, design: Design) -> None:
        """AmipsError if a design cannot be made of this task."""
        n, d = self.task.n, self.task.d
        if design.structure == "graph":
            check_graph_size(n, design.dimensions)
        if design.cells > n:
            raise AmipsError(f"cells={design.cells}: there are only {n:,} keys")
        stored = self.task.train.top_ids.shape[1]
        if min(design.memory, n) > stored:
            raise AmipsError(
                f"memory={design.memory}: the task has {stored} top keys of each query; "
                f"label with k={design.memory} (-k)"
            )
        rank = design.router.rank_for(d) if isinstance(design.router, Linear | MaxAffine) else 0
        if max(rank, design.dimensions or 0) > d:
            raise AmipsError(f"{design!r}: there are only {d} dimensions")
        check_enough_keys(design.storage, n)
        if design.query_aware is None and design.cells != self.task.c:
            raise AmipsError(f"the cells that were given are {self.task.c}, the design has {design.cells}")

    def cells(self, design: Design) -> Cells:
        """The partition of a design: the task's own if it is the same, or k-means."""
        own = (self.task.c, self.task.query_aware)
        if design.query_aware is None or (design.cells, design.query_aware) == own:
            return self.task.cells
        name = f"cells-{design.part('cells')}-{self.inputs}.npz"
        strength = design.query_aware

        def partition() -> Cells:
            inputs = self.task.key_vectors, design.cells, self.task.train.vectors, self.task.train.top_ids
            settings: Any = {"iterations": self.iterations, "points": self.points, "seed": self.seed}
            settings |= {"memory": self.memory, "progress": self.progress}
            with connected(self.ray) as cluster:
                return make_cells(*inputs, strength=strength, cluster=cluster, **settings)

        n, d = self.task.n, self.task.d
        read = partial(read_cells, n=n, c=design.cells, d=d)
        return cached(self.directory / name, partition, write_cells, read)

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
            assert isinstance(design.router, Linear | MaxAffine)
            return initial_model(self.task_of(design), design.router, self.seed, self.projection)
        with needs_extra(f"training a {design.router.kind} router", "train", "torch"):
            from amips.learn import train
        try:
            return train(
                self.task_of(design),
                design.router,
                recipe=replace(design.recipe, batch=design.recipe.batch // (self.workers or 1)),
                minutes=self.minutes,
                out=self.run_directory(design),
                resume="auto",
                seed=self.seed,
                device=self.device,
                ray=self.ray if self.workers else None,
                workers=self.workers,
                # What was gained is the caller's to say: a fit or a bench prints its own results.
                progress="bar" if self.progress else False,
            )
        except TrainingInterrupted:
            raise TrainingInterrupted("stopped; the same call continues where it was") from None

    def run_directory(self, design: Design) -> Path:
        """Where the training run of a design's router is kept."""
        name = f"run-{self.resolved(design).part('router')}-{self.inputs}-{self.minutes:g}"
        return self.directory / (name if self.workers is None else f"{name}-{self.workers}")

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
            return second_cells(task, router, design.spill_fraction, self.recall, memory=self.memory)

        if not isinstance(model, Model | None):
            return make()
        parts = (self.resolved(design).part("second cells"), self.inputs, _identity(model))
        name = f"second-{'-'.join(parts)}-{self.recall:g}.npz"
        read = partial(read_second, n=task.n, c=task.c)
        return cached(self.directory / name, make, write_second, read)

    def store(self, design: Design, model: Any, second: NDArray[np.int32] | None = None) -> FaissCellStore:
        """The keys of a design by cell. The last one made is held: several ways to route it may follow."""
        design = self.resolved(design)
        self.check(design)
        # Second cells are where a router sends queries: each router has its own.
        key = f"{design.part('store')}-{_identity(model) if design.spill_fraction else ''}"
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
        if design.structure == "graph":
            raise AmipsError("a graph has no cells to route: take `Builder.index`, or `graph_searcher`")
        model = self.model(design) if isinstance(model, str) else model
        cells = self.cells(design)
        router_for(model, cells.centroids)  # refuses a model of another shape before there is an index
        check_fits(model, self.task.fingerprint, fingerprint_of(cells.assignment))
        store = self.store(design, model, second)
        if isinstance(design.router, Linear | MaxAffine) and at_start(model):
            design = replace(design, recipe=None)  # what it is, not what was asked for
        searcher = Searcher(store, model, fingerprint=self.task.fingerprint, design=design)
        return replace(searcher, temperature=estimate_routing(searcher, self.task.val).temperature)

    def index(
        self,
        design: Design,
        model: Any = OWN,
        *,
        second: NDArray[np.int32] | None = None,
        late: Callable[[], bool] | None = None,
    ) -> Snapshot:
        """The index of a design, measured on the val queries; kept as a bundle if the builder made it all.

        With `late`, cells are measured about the recall that they are for only, until it says that there is
        no more time: `completed` does the rest.
        """
        design = self.resolved(design)
        self.check(design)
        name = f"index-{design.fingerprint()}-{self.inputs}-{self.minutes:g}-{self.recall:g}-{self.keep_log}"
        bundle = self.directory / name
        own = isinstance(model, str) and second is None
        if own and (bundle / "manifest.json").exists():
            try:
                snapshot = read_index(bundle)
                assert not isinstance(snapshot, WrappedIndex)
                return snapshot
            except BundleError as problem:
                raise BundleError(f"{problem}; delete {bundle}") from None
        index: Snapshot
        if design.memory:
            plain = self.index(replace(design, memory=0), model, second=second)
            assert isinstance(plain, Searcher | GraphSearcher)
            index = self.with_memory(plain, design.memory)
        elif design.structure == "graph":
            graph = replace(graph_searcher(self, design), origin=self._origin)
            index = calibrated_graph(graph, self.task.val, self.recall)
        else:
            searcher = self.searcher(design, model, second=second)
            if late is not None:
                return near_target(searcher, self.task.val, self.recall, late)
            index = self.completed(searcher)
        if own:
            save(index, bundle)
        return index

    def completed(self, searcher: Searcher, every: int = 1, depth_queries: int = DEPTH_QUERIES) -> Searcher:
        """An index of cells with all operating points (see `calibrated`), and what new keys are placed by.

        With `every` 0, those that it has stay, and only how deep filters go is measured.
        """
        placement = learn_placement(self.task, self._demand, searcher.router, searcher.store.centroids)
        searcher = replace(searcher, placement=placement, origin=self._origin)
        near = [point for point in searcher.points if not point.certain]  # finer, about the recall
        parts = (self.task.val, self.recall, searcher.temperature if near else 0.0)
        known = calibrated(searcher, *parts, every=every, depth_queries=depth_queries)
        return replace(known, points=[*known.points, *near])

    @cached_property
    def _demand(self) -> Demand:
        """Where the log wants keys: what new ones are placed by."""
        return Demand.of(self.task, self.memory)

    @cached_property
    def _origin(self) -> Origin:
        """What indexes say of where they come from."""
        return Origin(self.task.n, QueryLog.of(self.task, self.keep_log, self.seed))

    def with_memory(self, index: Searcher | GraphSearcher, depth: int) -> Snapshot:
        """The index with a memory of so many top keys of each training query, if that pays on val."""
        return remembering(self, index, depth)


def at_start(model: Any) -> bool:
    """Whether a model is where its training began: `train` may find nothing better on val."""
    return isinstance(model, Model) and model.about.get("blend") == 0


def _identity(model: Any) -> str:
    """Tells models apart: by their weights, or by the object."""
    return "centroids" if model is None else model.fingerprint if isinstance(model, Model) else str(id(model))
