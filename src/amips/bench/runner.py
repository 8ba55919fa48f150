"""Running systems: answers first, then times, each run stored as soon as it is there."""

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.backends import BACKENDS, Backend, DropIn, backend_class
from amips.backends import build as build_engine
from amips.backends import load as load_engine
from amips.backends.registry import MANIFEST
from amips.bench.derive import within
from amips.bench.machine import threads
from amips.bench.searchers import (
    BackendSearch,
    CellSearch,
    Search,
    SystemSearch,
    budgets,
    faiss_search,
    open_flat,
)
from amips.bench.results import WORK, Run, Store
from amips.bench.systems import CENTROID, LINEAR, SLUG_DIGEST, System
from amips.blas import threads as limit_threads
from amips.cells import POINTS_PER_CELL, Cells, fingerprint_of, query_aware
from amips.errors import AmipsError, BundleError, ResultsError, RunError, TrainingInterrupted
from amips.index import FaissCellStore
from amips.lean import learn_projection
from amips.nets import Linear, Model, load_model
from amips.progress import bar
from amips.routers import Router, check_fits, router_for
from amips.search import Searcher, recalls
from amips.search.build import routed
from amips.search.spill import second_cells
from amips.task import Task
from amips.vectors import Floats

ENOUGH = 0.985  # recall@10 on val at which a ladder of budgets ends,
MOST_SCANNED = 0.2  # ... or, for contenders, the share of keys scanned
YARDSTICK_PROBES = 8
LEARN_FROM = 20_000  # queries, for engines that learn from them


@dataclass(frozen=True)
class Settings:
    """How a bench is run."""

    k: int = 10
    batch: int = 1024
    singles: int = 64  # queries that are timed one at a time
    rounds: int = 3
    minutes: float = 0.5  # of training for each linear router
    seed: int = 0
    progress: bool = False
    all_threads: bool = True  # also take times on all threads, beside those on one
    iterations: int = 20  # of k-means,
    points: int = POINTS_PER_CELL  # ... on at most so many keys a cell
    most_keys: int | None = None  # scanned by a contender, where its ladder ends; a share of all if None


class Bench:
    """A task, a store, and what systems need: partitions, indexes and routers, made when first asked for."""

    def __init__(self, task: Task, store: Store, settings: Settings, work: Path | None = None) -> None:
        self.task, self.store, self.settings = task, store, settings
        self.x = np.concatenate([np.asarray(task.val.queries), np.asarray(task.test.queries)])
        self.true = np.concatenate([np.asarray(task.val.top_ids), np.asarray(task.test.top_ids)])
        # Drawn, because test queries are in the order of the log: its first hour would stand for the whole.
        rng = np.random.default_rng(settings.seed)
        drawn = rng.permutation(len(task.test))[: settings.batch]
        self.timed = np.ascontiguousarray(task.test.queries[drawn])
        self.keys = task.key_vectors
        self.work = work or store.path / WORK
        self._held: tuple[tuple[Any, ...], FaissCellStore] | None = None
        self._finder: tuple[Path, Backend] | None = None

    def check(self, system: System) -> None:
        """Refuse what cannot be run, before anything is."""
        if system.engine == "flat":
            return
        if system.engine in BACKENDS:
            backend_class(system.engine).require()
        if system.cells > self.task.n:
            raise AmipsError(f"{system.name}: there are only {self.task.n:,} keys")
        if max(system.rank, system.lean) > self.task.d:
            raise AmipsError(f"{system.name}: there are only {self.task.d} dimensions")
        if system.router in (CENTROID, LINEAR):
            return
        model = load_model(system.router)
        if model.d != self.task.d or model.c not in (1, system.cells if system.routed else 1):
            raise RunError(
                f"{system.router} scores {model.c} cells in dimension {model.d}: it does not fit "
                f"{system.cells} cells in dimension {self.task.d}"
            )
        if system.route != "cells" and model.c != 1:
            raise RunError(f"{system.router} scores cells: route={system.route!r} needs a model of one key")
        cells = (
            "" if model.c == 1 or system.cells != self.task.c else fingerprint_of(self.task.cells.assignment)
        )
        check_fits(model, self.task.fingerprint, cells)

    def run(
        self, systems: Sequence[System], what: str, ladder: Sequence[int] | None = None, times: bool = True
    ) -> None:
        """Answer with every system over its ladder, or over the one given, and take the times.

        Systems on the same cells are timed in turns: their ratios are then of times taken seconds apart,
        and one index in memory (beside the yardstick's) serves them all.
        """
        for system in systems:
            self.check(system)
        ordered = sorted(systems, key=_shared)
        with closing(self), bar(len(ordered), what, "system", self.settings.progress) as shown:
            for _, group in groupby(ordered, key=_shared):
                answered = {}
                for system in group:
                    shown.set_postfix_str(system.name)
                    answered[system] = self.answer(system, ladder)
                    shown.update()
                if times:
                    self.take_times(answered)

    def answer(self, system: System, ladder: Sequence[int] | None = None) -> list[int]:
        """Run a system over its budgets until it finds nearly everything, or over those given.

        A contender stops at a fifth of the keys too; the baseline goes on, so that no recall is missed.
        """
        opened: SystemSearch | None = None
        held = len(self.task.val)
        answered = []
        for budget in ladder or self._ladder(system):
            if not self.store.has(system, budget):
                if opened is None:
                    opened = self.open(system)
                self.store.put(self._run(system, opened, budget), self.settings.seed)
            answered.append(budget)
            if ladder is not None:
                continue
            run = self.store.get(system, budget)
            found = recalls(run.ids[:held], self.true[:held], self.settings.k).mean()
            most = min(MOST_SCANNED * self.task.n, self.settings.most_keys or self.task.n)
            capped = system.role == "contender" and run.scanned[:held].mean() >= most
            if found >= ENOUGH or capped:
                break
        return answered

    def _run(self, system: System, opened: SystemSearch, budget: int) -> Run:
        k, n = min(self.settings.k, self.task.n), self.task.n
        # The mapped query orders keys by its own scores, so the true top key may come far down the list;
        # whoever scores with x has it first, or has not seen it.
        deep = within(n)[-1] if system.route == "drop-in" else k
        ids = np.empty((len(self.x), k), np.int32)
        scores = np.empty((len(self.x), k), np.float32)
        rank = np.empty(len(self.x), np.int32)
        step = max(1, min(len(self.x), (1 << 24) // max(k, deep)))
        for low in range(0, len(self.x), step):
            rows = slice(low, low + step)
            found_scores, found = opened.search(self.x[rows], max(k, deep), budget)
            ids[rows], scores[rows] = found[:, :k], found_scores[:, :k]
            hit = found == self.true[rows, :1]
            rank[rows] = np.where(hit.any(axis=1), hit.argmax(axis=1) + 1, 0)
        cost = opened.cost(self.x, k, budget)
        return Run(system, budget, ids, scores, rank, cost.scanned, cost.scan, cost.network, cost.coarse, {})

    def take_times(self, answered: dict[System, list[int]]) -> None:
        """Time the runs that have no times yet: systems and budgets in turns, each beside the yardstick.

        Systems of one call should share their cells, so that one index serves them all.
        """
        missing = [
            (system, budget)
            for system, ladder in answered.items()
            for budget in ladder
            if not self.store.has_times(system, budget)
        ]
        if not missing:
            return
        opened = {system: self.open(system) for system in dict(missing)}
        _seconds(self.yardstick, [self.timed[:1], self.timed], self.settings.k, YARDSTICK_PROBES)  # warm
        for system, budget in dict(missing).items():
            for search in opened[system].ways.values():
                _seconds(search, [self.timed[:1], self.timed], self.settings.k, budget)
        taken: dict[tuple[System, int], dict[str, list[Any]]] = {run: {} for run in missing}
        for _ in range(self.settings.rounds):
            for system, budget in missing:
                for way, search in opened[system].ways.items():
                    for name, seconds in self._modes(search, budget):
                        taken[system, budget].setdefault(f"{way}/{name}", []).append(seconds)
        for (system, budget), times in taken.items():
            arrays: dict[str, NDArray[np.float64]] = {}
            for name, pairs in times.items():
                arrays[name] = np.array([own for own, _ in pairs])
                arrays[f"yardstick/{name}"] = np.array([yard for _, yard in pairs])
            self.store.put_times(system, budget, arrays)

    def _modes(self, search: Search, budget: int) -> Iterator[tuple[str, tuple[Any, Any]]]:
        """(batch/threads, (seconds of this, seconds of the yardstick)), seconds for each query."""
        k = self.settings.k
        singles = [self.timed[i : i + 1] for i in range(min(self.settings.singles, len(self.timed)))]
        for count in sorted({1, threads()} if self.settings.all_threads else {1}):
            which = "all" if count > 1 else "1"
            with limit_threads(count):
                yard = _seconds(self.yardstick, singles, k, YARDSTICK_PROBES)
                yield f"single/{which}", (_seconds(search, singles, k, budget), yard)
                if len(self.timed) > 1:
                    yard = _seconds(self.yardstick, [self.timed], k, YARDSTICK_PROBES) / len(self.timed)
                    own = _seconds(search, [self.timed], k, budget) / len(self.timed)
                    yield f"batch/{which}", (float(own[0]), float(yard[0]))

    @cached_property
    def yardstick(self) -> Search:
        """A fixed FAISS search whose time is taken beside every other: the clock of a machine that drifts."""
        cells = self._kmeans(min(max(2, round(self.task.n**0.5)), self.task.n))
        engine = FaissCellStore.build(self.keys, cells.assignment, cells.centroids, "flat")
        return faiss_search(engine.index)

    def cells(self, count: int, aware: float = 0.0) -> Cells:
        """The task's own cells, or spherical k-means, plain or query-aware."""
        own = float(self.task.options.get("query_aware", 0.0))
        return self.task.cells if (count, aware) == (self.task.c, own) else self._kmeans(count, aware)

    def _kmeans(self, count: int, aware: float = 0.0) -> Cells:
        """Spherical k-means, kept."""
        folder = self.work / (f"cells-{count}" + (f"-aware-{aware:g}" if aware else ""))
        if not (folder / "assignment.npy").exists():
            queries = self.task.train.vectors
            top = np.asarray(self.task.train.top_ids)[:, : self.settings.k]
            how = self.settings
            made = query_aware(
                self.keys,
                queries,
                top,
                count,
                strength=aware,
                iterations=how.iterations,
                points=how.points,
                seed=how.seed,
            )
            folder.mkdir(parents=True, exist_ok=True)
            np.save(folder / "centroids.npy", made.centroids)
            np.save(folder / "assignment.partial.npy", made.assignment)
            (folder / "assignment.partial.npy").rename(folder / "assignment.npy")
        try:
            return Cells(np.load(folder / "assignment.npy"), np.load(folder / "centroids.npy"))
        except Exception as problem:  # a damaged file makes numpy raise nearly anything
            reason = (str(problem) or type(problem).__name__).splitlines()[0]
            raise ResultsError(f"{folder} is damaged ({reason}); delete it") from None

    def linear(self, cells: Cells, name: str, rank: int = 0) -> Model:
        """A linear router for these cells, trained on the task's queries; kept, continued if unfinished."""
        try:
            from amips.learn import Recipe, train
        except ModuleNotFoundError as problem:
            if problem.name != "torch":
                raise
            raise AmipsError("the linear router needs torch; pip install 'amips[train]'") from None
        task = self.task.with_cells(cells)
        out = self.work / name
        try:
            return train(
                task,
                Linear(rank=rank),
                recipe=Recipe(route_top=min(10, task.train.top_ids.shape[1])),
                minutes=self.settings.minutes,
                out=out,
                resume=(out / "config.json").exists(),
                evaluations=5,
                seed=self.settings.seed,
                progress=self.settings.progress,
            )
        except TrainingInterrupted:
            raise TrainingInterrupted("stopped; the same command continues where it was") from None

    def open(self, system: System) -> SystemSearch:
        """A system ready to search. The index of its cells is kept in memory until others are asked for."""
        if system.engine == "flat":
            return open_flat(self.keys)
        if not system.routed:
            return self._by_itself(system)
        cells = self.cells(system.cells, system.aware)
        model = None
        if system.router == LINEAR:
            model = self.linear(cells, system.linear_name, system.rank)
        elif system.router != CENTROID:
            model = load_model(system.router)
        router = router_for(model, cells.centroids)  # refuses a model of another shape
        # An engine of its own whose cells a system routes is a `RoutableBackend` one: the system has seen to that.
        engine: Any = (
            self._engine(system, cells, router) if system.engine == "ivf" else self._engine_of(system)
        )
        searcher = Searcher(engine, model, fingerprint=self.task.fingerprint)
        if system.stop == "share":
            searcher = replace(searcher, temperature=routed(searcher, self.task.val).temperature)
        if model is not None:
            check_fits(model, self.task.fingerprint, searcher.cells_fingerprint)
        return CellSearch(system, searcher)

    def _engine(self, system: System, cells: Cells, router: Router) -> FaissCellStore:
        wanted = _shared(system)
        if self._held is None or self._held[0] != wanted:
            self._held = None  # lets go of the old one first: two would need twice the memory
            projection = None
            if system.storage == "lean":
                queries = self.task.train.vectors
                projection = learn_projection(self.keys, queries, system.lean)
            second = None
            if system.spill:
                second = second_cells(self.task.with_cells(cells), router, system.spill)
            parts = (cells.assignment, cells.centroids, system.storage, projection, second)
            made = FaissCellStore.build(self.keys, *parts)
            self._held = (wanted, made)
        return self._held[1]

    def _ladder(self, system: System) -> list[int]:
        by_itself = system.engine in BACKENDS and not system.routed
        return self._engine_of(system).budgets() if by_itself else budgets(system)

    def _by_itself(self, system: System) -> BackendSearch:
        engine = self._engine_of(system)
        if system.router == CENTROID:
            return BackendSearch(engine)
        model = load_model(system.router)
        check_fits(model, self.task.fingerprint, "")
        return BackendSearch(DropIn(engine, model, np.asarray(self.task.keys)))

    def _engine_of(self, system: System) -> Backend:
        """An engine of its own, kept on disk, and open until another is asked for.

        One that learns from queries learns from those that it will be given: x, or predicted keys. Both may
        be searched in turns: such engines are libraries, which have nothing to close.
        """
        finder = backend_class(system.engine)
        mapped = finder.learns and system.route == "drop-in-rescored"
        parts = [system.engine]
        parts += [str(system.links)] if system.engine == "hnsw" else []
        parts += [str(system.cells)] if finder.celled else []
        parts += [f"aware-{system.aware:g}"] if finder.celled and system.aware else []
        parts += [system.slug[-SLUG_DIGEST:]] if mapped else []
        folder = self.work / "-".join(parts)
        if self._finder is not None and self._finder[0] == folder:
            return self._finder[1]
        self.close()
        if (folder / MANIFEST).exists():
            try:
                made = load_engine(folder)
            except BundleError as problem:
                raise ResultsError(f"{problem}; delete {folder}") from None
        else:
            shutil.rmtree(folder, ignore_errors=True)  # what an interrupted build left
            queries = np.asarray(self.task.train.queries[:LEARN_FROM])
            queries = load_model(system.router).keys(queries)[:, 0] if mapped else queries
            cells = self.cells(system.cells, system.aware) if finder.celled else None
            settings: dict[str, Any] = {"links": system.links} if system.engine == "hnsw" else {}
            made = build_engine(system.engine, self.keys, folder, queries=queries, cells=cells, **settings)
        self._finder = (folder, made)
        return made

    def close(self) -> None:
        """Let go of the engine that is open, and of its server."""
        if self._finder is not None:
            self._finder[1].close()
            self._finder = None


def _shared(system: System) -> tuple[Any, ...]:
    """What systems that use one index have in common; inverted files come first."""
    # Second cells are where a router sends queries: each router has its own.
    spilled = (system.spill, system.router, system.rank) if system.spill else (0.0, "", 0)
    parts = (system.cells, system.aware, system.storage, system.lean)
    return (system.engine != "ivf", system.engine, *parts, *spilled)


def _seconds(search: Search, batches: list[Floats], k: int, budget: int) -> NDArray[np.float64]:
    """How long each batch takes."""
    seconds = np.empty(len(batches))
    for i, x in enumerate(batches):
        started = time.perf_counter()
        search(x, k, budget)
        seconds[i] = time.perf_counter() - started
    return seconds
