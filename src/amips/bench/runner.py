"""Running systems: answers first, then times, each run stored as soon as it is there."""

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

from amips.bench.derive import TOP_FRACTIONS, within
from amips.bench.opener import Opener
from amips.bench.results import WORK, ResultsStore, Run
from amips.bench.searchers import Search, SystemSearch, faiss_search
from amips.bench.systems import System
from amips.blas import threads as limit_threads
from amips.builder import Builder
from amips.cells import default_count
from amips.design import Design
from amips.errors import TrainingInterrupted
from amips.metrics import TOP
from amips.progress import Bar
from amips.resources import threads
from amips.search import recalls
from amips.task import Task
from amips.vectors import Floats

ENOUGH = 0.985  # recall@10 on val at which a ladder of budgets ends,
MOST_SCANNED = 0.2  # ... or, for contenders, the fraction of the keys scanned
YARDSTICK_CELLS, YARDSTICK_PROBES = 1.0, 8  # cells in units of sqrt(n)


@dataclass(frozen=True)
class Settings:
    """How a bench is run."""

    k: int = TOP
    batch: int = 1024
    singles: int = 64  # queries that are timed one at a time
    rounds: int = 3
    minutes: float = 0.5  # of training for each router, at most
    seed: int = 0
    progress: bool = False
    all_threads: bool = True  # also take times on all threads, beside those on one
    iterations: int = 20  # of k-means,
    points: int | None = None  # ... on so many keys a cell; None: what `kmeans` takes
    most_keys: int | None = None  # scanned by a contender, where its ladder ends; a fraction of all if None
    depth: int = 0  # results that every system is asked for, and timed with, where these are more than k


class Runner:
    """Runs systems on one task and stores what came of it.

    Args:
        task: the keys, and the val and test queries that are answered.
        store: where runs are stored; what is there is not run again.
        work: where the builder and backends keep what they make; in the store if None.
    """

    def __init__(self, task: Task, store: ResultsStore, settings: Settings, work: Path | None = None) -> None:
        self.task, self.store, self.settings = task, store, settings
        self.x = np.concatenate([np.asarray(task.val.queries), np.asarray(task.test.queries)])
        self.true = np.concatenate([np.asarray(task.val.top_ids), np.asarray(task.test.top_ids)])
        # Drawn, because test queries are in the order of the log: its first hour would stand for the whole.
        rng = np.random.default_rng(settings.seed)
        drawn = rng.permutation(len(task.test))[: settings.batch]
        self.timed = np.ascontiguousarray(task.test.queries[drawn])
        self.work = work or store.path / WORK
        self.builder = Builder(
            task,
            self.work,
            minutes=settings.minutes,
            seed=settings.seed,
            iterations=settings.iterations,
            points=settings.points,
            progress=settings.progress,
        )
        self.opener = Opener(self.builder, self.work)

    @property
    def asked(self) -> int:
        """Results that every system is asked for."""
        return max(self.settings.k, self.settings.depth)

    def _is_deep(self, system: System) -> bool:
        """Whether it is asked for the paper's fractions of n results, too, because nobody said how many."""
        return system.mode == "drop-in" and not self.settings.depth

    def resolved(self, system: System) -> System:
        """The system with every number of its design known: rank, dimensions of lean storage."""
        if system.design is None:
            return system
        return replace(system, design=self.builder.resolved(system.design))

    def run(
        self, systems: Sequence[System], what: str, ladder: Sequence[int] | None = None, times: bool = True
    ) -> None:
        """Answer with every system over its ladder, or over the one given, and take the times.

        Systems on the same cells are timed in turns: their ratios are then of times taken seconds apart,
        and one index in memory (beside the yardstick's) serves them all.
        """
        for system in systems:
            self.opener.check(system)
        ordered = sorted(systems, key=shared_index)
        with closing(self.opener), Bar(len(ordered), what, "systems", self.settings.progress) as shown:
            for _, group in groupby(ordered, key=shared_index):
                answered = {}
                for system in group:
                    shown.set_postfix_str(system.name)
                    answered[system] = self.answer(system, ladder)
                if times:
                    self.take_times(answered)
                shown.update(len(answered))

    def answer(self, system: System, ladder: Sequence[int] | None = None) -> list[int]:
        """Run a system over its budgets until it finds nearly everything, or over those given.

        A contender stops at a fifth of the keys too; the baseline goes on, so that no recall is missed.
        """
        opened: SystemSearch | None = None
        val = slice(0, len(self.task.val))
        answered = []
        for budget in ladder or self.opener.ladder(system):
            if not self.store.has(system, budget):
                if opened is None:
                    opened = self.open(system)
                self.store.put(self._run(system, opened, budget), self.settings.seed)
            answered.append(budget)
            if ladder is not None:
                continue
            run = self.store.get(system, budget)
            recall = recalls(run.ids[val], self.true[val], self.settings.k).mean()
            most = min(MOST_SCANNED * self.task.n, self.settings.most_keys or self.task.n)
            capped = system.role == "contender" and run.scanned[val].mean() >= most
            if recall >= ENOUGH or capped:
                break
        return answered

    def _run(self, system: System, opened: SystemSearch, budget: int) -> Run:
        k, n = min(self.settings.k, self.task.n), self.task.n
        # The mapped query orders keys by its own scores, so the true top key may come far down the list;
        # whoever scores with x has it first, or has not seen it.
        asked = min(self.asked, n)
        deep = max(asked, within(n)[-1]) if self._is_deep(system) else asked
        ids = np.empty((len(self.x), k), np.int32)
        scores = np.empty((len(self.x), k), np.float32)
        rank = np.empty(len(self.x), np.int32)
        step = max(1, min(len(self.x), (1 << 24) // deep))
        for low in range(0, len(self.x), step):
            rows = slice(low, low + step)
            block_scores, block = opened.search(self.x[rows], deep, budget)
            ids[rows], scores[rows] = block[:, :k], block_scores[:, :k]
            hit = block == self.true[rows, :1]
            rank[rows] = np.where(hit.any(axis=1), hit.argmax(axis=1) + 1, 0)
        cost = opened.cost(self.x, asked, budget)
        return Run(system, budget, ids, scores, rank, cost.scanned, cost.scan, cost.network, cost.coarse, {})

    def open(self, system: System) -> SystemSearch:
        """A system ready to search."""
        try:
            return self.opener.open(system)
        except TrainingInterrupted:
            raise TrainingInterrupted("stopped; the same command continues where it was") from None

    def take_times(self, answered: dict[System, list[int]]) -> None:
        """Time the runs that have no times yet: systems and budgets in turns, each beside the yardstick.

        Systems of one call should share their cells, so that one index serves them all.
        """
        missing = [
            (system, budget)
            for system, ladder in answered.items()
            for budget in ladder
            if not self._timed(system, budget)
        ]
        if not missing:
            return
        opened = {system: self.open(system) for system in dict(missing)}
        _seconds(self.yardstick, [self.timed[:1], self.timed], self.settings.k, YARDSTICK_PROBES)  # warm
        for system, budget in dict(missing).items():
            for search in opened[system].ways.values():
                _seconds(search, [self.timed[:1], self.timed], self.asked, budget)
        times: dict[tuple[System, int], dict[str, list[Any]]] = {run: {} for run in missing}
        for _ in range(self.settings.rounds):
            for system, budget in missing:
                for way, search in opened[system].ways.items():
                    for name, seconds in self._modes(search, budget, self._is_deep(system)):
                        times[system, budget].setdefault(f"{way}/{name}", []).append(seconds)
        for (system, budget), by_name in times.items():
            arrays: dict[str, NDArray[np.float64]] = {}
            for name, pairs in by_name.items():
                arrays[name] = np.array([own for own, _ in pairs])
                arrays[f"yardstick/{name}"] = np.array([yard for _, yard in pairs])
            self.store.put_times(system, budget, arrays)

    def _timed(self, system: System, budget: int) -> bool:
        """Whether the times of a run are stored; of a mapped query also those of fractions of n results."""
        if not self.store.has_times(system, budget):
            return False
        return not self._is_deep(system) or any("@" in name for name in self.store.get(system, budget).times)

    def _modes(self, search: Search, budget: int, deep: bool) -> Iterator[tuple[str, tuple[Any, Any]]]:
        """(batch/threads, (seconds of this, seconds of the yardstick)), seconds for each query.

        Args:
            deep: on one thread also for the paper's fractions of n results, as batch/threads@fraction: what
                the recall of a mapped query needs.
        """
        singles = [self.timed[i : i + 1] for i in range(min(self.settings.singles, len(self.timed)))]
        fractions = {f"@{name}": k for name, k in zip(TOP_FRACTIONS, within(self.task.n), strict=True)}
        for count in sorted({1, threads()} if self.settings.all_threads else {1}):
            which = "all" if count > 1 else "1"
            depths = {"": self.asked, **(fractions if deep and count == 1 else {})}
            with limit_threads(count):
                for at, k in depths.items():
                    yield f"single/{which}{at}", self._beside(search, singles, k, budget)
                    if len(self.timed) > 1:
                        own, yard = self._beside(search, [self.timed], k, budget)
                        m = len(self.timed)
                        yield f"batch/{which}{at}", (float(own[0] / m), float(yard[0] / m))

    def _beside(self, search: Search, batches: list[Floats], k: int, budget: int) -> tuple[Any, Any]:
        """Seconds of each batch, and those of the yardstick, taken just before."""
        yard = _seconds(self.yardstick, batches, self.settings.k, YARDSTICK_PROBES)
        return _seconds(search, batches, k, budget), yard

    @cached_property
    def yardstick(self) -> Search:
        """A fixed FAISS search whose time is taken beside every other: the clock of a machine that drifts."""
        design = Design.plain(default_count(self.task.n, YARDSTICK_CELLS))
        return faiss_search(self.builder.store(design, None).index)


def shared_index(system: System) -> tuple[Any, ...]:
    """What systems that use one index have in common, to sort by; what amips builds comes first."""
    design = system.design
    parts: tuple[Any, ...] = (0, "", "", 0)
    if design is not None:
        # A run that chooses second cells has a store of its own; the design knows it as "own" alone.
        parts = (design.cells, design.part("store"), system.run if design.spill_fraction else "", 1)
    return (system.backend is not None, system.backend or "", *parts, str(system.settings))


def _seconds(search: Search, batches: list[Floats], k: int, budget: int) -> NDArray[np.float64]:
    """How long each batch takes."""
    seconds = np.empty(len(batches))
    for i, x in enumerate(batches):
        started = time.perf_counter()
        search(x, k, budget)
        seconds[i] = time.perf_counter() - started
    return seconds
