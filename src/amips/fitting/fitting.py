"""The steps of a fit: label, search over designs by successive halving, compare with plain IVF.

    every partition there is time for, untrained          estimated cost on val, the best storage for each
    the best three of these, with routers of other ranks
    the best three of these, trained                      ... the better of trained and untrained counts
    the best three of these, with second cells            ... with the best fraction, or none
    the best three of these, built                        measured cost on val: FLOPs or time
    a graph, where there are some thousand keys           ... the same
    the best of all, with a memory of the log             ... the same, if the log is in the order of time

At every step cells, router, second cells and storage are judged together. Everything is chosen on the val
queries; the test queries are looked at once, to say what was gained.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np

from amips import native
from amips.builder import Builder, at_start, graph_design
from amips.cells import POINTS_PER_CELL
from amips.design import MEMORY, OWN, Design, GraphStorage
from amips.errors import AmipsError, TrainingInterrupted
from amips.files import remove_directory
from amips.fitting.affordable import (
    ITERATIONS,
    affordable_cells,
    check_memory,
    no_room_for_graph,
    part_of_log,
)
from amips.fitting.candidates import SPILL_FRACTIONS, Candidate, Estimator, counts, partitions, ranks, trained
from amips.fitting.clock import (
    BUILD_END,
    MEASURE_END,
    PARTITIONS_END,
    SECOND_END,
    TRAINING_END,
    Clock,
)
from amips.fitting.ending import Ending
from amips.fitting.rate import affordable_queries, graph_seconds, partition_seconds, second_seconds
from amips.fitting.reporting import TIMED, compare
from amips.fitting.settings import Settings
from amips.fitting.trials import Trials
from amips.graph import LOG_DEPTH
from amips.search import Searcher, Snapshot
from amips.task import HELD_OUT, Task, label
from amips.vectors import Vectors

TRAIN_TIME = 0.15  # of the time given, for all routers; `amips.fitting.clock` says what the other steps have
GRAPH_TIME = 0.25  # ... that a graph may take, as far as that is known beforehand
CELLS_TIME = 0.55  # of what cells would have, where a graph is tried, too
GRAPH_FROM = 5_000  # keys: with fewer, a graph has little to gain
ENTRIES = (64, 256, 1024)  # keys that a walk may begin at: more only where fewer do not reach the recall
FEW = 1000  # queries: with fewer, what is chosen and reported rests on too few to be sure of
# In the directory of work in progress:
CALL, CELLS, WORK_TASK, WORK_DESIGNS = "fit.json", "cells.json", "task", "designs"
SURVIVORS = 3  # of each step
WORTH = 0.98  # of the cost, at most, that second cells must come down to: they take memory


class Fitting(Trials):
    """One call of `fit` and its work in progress."""

    def __init__(
        self, work: Path, settings: Settings, quiet: bool, device: str | None, ray: str | None, clock: Clock
    ) -> None:
        super().__init__(settings, quiet)
        self.work, self.device, self.ray, self.clock = work, device, ray, clock
        self.seconds = 60 * settings.minutes
        self.rate = 0.0  # FLOPs a second, of exact search with numpy

    def run(self, keys: Vectors, queries: Vectors) -> Snapshot:
        """The best index, with its report."""
        check_memory(self.settings, keys, min(self._depth, keys.n))
        task = self._label(keys, queries)
        self.clock.note_labelled()
        graph = self._tries_graph(task)
        self.clock.cells_time = CELLS_TIME if graph else 1.0
        self.timed = np.asarray(task.val.queries[:TIMED])
        numbers, points = affordable_cells(task, self.settings, self.clock, self.rate, self.work / CELLS)
        builder = self._builder(task, points)
        estimator = Estimator(builder, self.settings)
        candidates, plain = self._partitions(estimator, numbers, points)
        cells: Searcher | None = None
        if self.settings.structure != "graph":
            candidates = self._trained(estimator, self._ranks(estimator, candidates))
            candidates = self._with_second_cells(estimator, candidates)
            cells = self._built(estimator, candidates)
        index: Snapshot | None = self._with_graph(builder, cells) if graph else cells
        del cells
        assert index is not None
        best = min(plain, key=lambda count: plain[count])
        baseline = self._measured(builder, self._plain(estimator, best))[0]
        ending = Ending(builder, self.clock, self.rate)
        index = self.with_memory(builder, ending.completed(index))
        assert isinstance(baseline, Searcher)
        tried = (list(plain), list(set(counts(task.n, self.settings.cells)) - set(plain)))
        parts = (self.settings, self.cost, *tried, self.trials, self.say, ending.every(index))
        return ending.completed(compare(task, index, baseline, *parts, self.memory_cost))

    def _tries_graph(self, task: Task) -> bool:
        """Whether a graph is one of the designs."""
        if self.settings.structure is not None:
            return self.settings.structure == "graph"
        if task.n < GRAPH_FROM:
            return False
        if native.compiled is None:
            self.say("no graph is tried: amips was installed without a C++ compiler, and numpy walks slowly")
            return False
        if problem := no_room_for_graph(self.settings, task.n, task.d):
            self.say(problem)
            return False
        if graph_seconds(task, self.rate) <= GRAPH_TIME * self.seconds:
            return True
        self.say("no time to try a graph: give more minutes")
        return False

    def _with_graph(self, builder: Builder, cells: Searcher | None) -> Snapshot:
        """The best of a graph that learns from the log, one that does not, and the best index of cells."""
        storage = cast("GraphStorage | None", self.settings.storage)
        self.say("making graphs; measured on held-out queries:")
        best: Snapshot | None = cells
        least = math.inf if cells is None else self.cost(cells)
        for entries in ENTRIES:
            if entries > ENTRIES[0] and self.clock.past(BUILD_END):
                self.say(f"no time to try graphs of {entries:,} entries: give more minutes")
                break
            designs = [
                builder.resolved(graph_design(builder.task, storage=storage, entries=entries, learned=one))
                for one in (True, False)
            ]
            costs: list[float] = []
            started = self.clock.spent
            for design in dict.fromkeys(designs):  # a log that is too short to learn from leaves one
                if costs and self.clock.spent - started > self.clock.until(BUILD_END):
                    break
                graph, cost = self._measured(builder, Candidate(design, OWN, None, math.nan))
                costs.append(cost)
                if best is None or cost < least:
                    best, least = graph, cost
                del graph  # one beside the next is what the memory is for
            if not math.isinf(min(costs)) or entries >= builder.task.n:
                break  # otherwise keys are in clusters that no walk leads into: with more entries one may
        assert best is not None
        return best

    def remove(self) -> None:
        """Remove the work of this call: a call that is killed meanwhile leaves all of it or nothing."""
        remove_directory(self.work)

    def _label(self, keys: Vectors, queries: Vectors) -> Task:
        """Exact top keys of as many queries as there is time for."""
        parts = keys, queries, self.settings, self.clock, self.work / CALL
        count, self.rate = affordable_queries(*parts, self.device, self.ray)
        seed = self.settings.seed
        if count < queries.n:
            self.say(f"using {count:,} of {queries.n:,} queries: labelling them all would take too long")
            queries = part_of_log(queries, count, self.settings)
        held_out = max(1, min(HELD_OUT, queries.n // 5))
        self.say(f"{keys.n:,} keys, {queries.n:,} queries of dimension {keys.d}: finding their top keys ...")
        if queries.n < FEW:
            self.say(
                f"few queries: what is chosen rests on {held_out:,} of them, and what is reported on "
                f"{held_out:,} others; some thousands would do better"
            )
        try:
            return label(
                keys,
                queries,
                out=self.work / WORK_TASK,
                cells=1,
                split=self.settings.order,
                k=self._depth,
                seed=seed,
                memory=self.settings.exact_memory,
                device=self.device,
                ray=self.ray,
                progress=not self.quiet,
            )
        except AmipsError:
            if not (self.work / WORK_TASK).exists():  # refused before anything was done
                self.remove()
            raise

    @property
    def _depth(self) -> int:
        """Top keys that are found of each query."""
        return LOG_DEPTH if self.settings.order is None else max(LOG_DEPTH, MEMORY)

    def _builder(self, task: Task, points: int) -> Builder:
        return Builder(
            task,
            self.work / WORK_DESIGNS,
            minutes=self.settings.minutes * self.clock.cells_time * TRAIN_TIME / SURVIVORS,
            recall=self.settings.recall,
            seed=self.settings.seed,
            iterations=ITERATIONS,
            points=None if points >= POINTS_PER_CELL else points,
            device=self.device,
            ray=self.ray,
            progress=not self.quiet,
            keep_log=self.settings.keep_log,
            memory=self.settings.memory,
        )

    def _partitions(
        self, estimator: Estimator, numbers: list[int], points: int
    ) -> tuple[list[Candidate], dict[int, float]]:
        """Partitions with their untrained routers, and plain IVF's cost by number of cells.

        As many as there is time for, two at least: one that follows the queries and a plain one.
        """
        builder = estimator.builder
        self.say("trying cells; cost as a share of scanning all keys, on held-out queries:")
        candidates: list[Candidate] = []
        plain: dict[int, float] = {}
        spent, expected = 0.0, 0.0
        for design in partitions(numbers):
            parts = (builder.task.n, builder.task.d, design.cells, points, ITERATIONS)
            predicted = partition_seconds(*parts, self.rate)
            slower = spent / expected if expected else 1.0
            if len(candidates) >= 2 and slower * predicted > self.clock.until_of_cells(PARTITIONS_END):
                continue  # one of fewer cells may follow
            started = self.clock.spent
            design = builder.resolved(design)
            candidate = estimator.candidate(design, builder.model(design))
            candidates.append(candidate)
            if not design.query_aware:
                plain[design.cells] = estimator.plain(design.cells)
                self.note_plain(design.cells, plain[design.cells])
            self.note_estimate(candidate)
            spent, expected = spent + self.clock.spent - started, expected + predicted
        return candidates, plain

    def _ranks(self, estimator: Estimator, candidates: list[Candidate]) -> list[Candidate]:
        """The best partitions, each with the rank that costs least, of those that there is time for."""
        builder, survivors = estimator.builder, []
        longest = 0.0
        for candidate in _best(candidates):
            ways = [candidate]
            for design in ranks(candidate.design, builder.task.d):
                if longest > self.clock.until_of_cells(TRAINING_END):
                    break
                started = self.clock.spent
                ways.append(estimator.candidate(design, builder.model(design)))
                longest = max(longest, self.clock.spent - started)
            best = min(ways, key=lambda one: one.cost)
            survivors.append(best)
            if best is not candidate:
                self.note_estimate(best)
        return survivors

    def _trained(self, estimator: Estimator, candidates: list[Candidate]) -> list[Candidate]:
        """Of the best partitions the better of the trained and the untrained router."""
        builder, survivors, longest = estimator.builder, [], 60 * estimator.builder.minutes
        for candidate in _best(candidates):
            if longest > self.clock.until_of_cells(TRAINING_END):
                self.say(f"no time to train a router for {candidate.design.cells:,} cells")
                survivors.append(candidate)
                continue
            started = self.clock.spent
            self.say(f"training a router for {candidate.design.cells:,} cells ...")
            design = trained(candidate.design)
            try:
                model = builder.model(design)
            except TrainingInterrupted:
                raise TrainingInterrupted(
                    f"stopped; the same call continues with what is in {self.work}"
                ) from None
            longest = max(longest, self.clock.spent - started)
            if at_start(model):
                survivors.append(candidate)
                continue
            learned = estimator.candidate(design, model)
            self.note_estimate(learned)
            survivors.append(min(learned, candidate, key=lambda one: one.cost))
        return survivors

    def _with_second_cells(self, estimator: Estimator, candidates: list[Candidate]) -> list[Candidate]:
        """Each as it is, and with the fraction of its keys in second cells that makes it cheapest."""
        wanted = self.settings.spill_fraction
        if wanted == 0:
            return candidates
        task, ways = estimator.builder.task, []
        for candidate in _best(candidates):
            needed = second_seconds(task.n, task.d, candidate.design.cells, self.rate)
            if wanted is None:
                ways.append(candidate)
            if wanted is None and needed > self.clock.until_of_cells(SECOND_END):
                self.say(f"no time to look for second cells among {candidate.design.cells:,} cells")
                continue
            fractions = SPILL_FRACTIONS if wanted is None else (wanted,)
            if spilled := estimator.with_second_cells(candidate, fractions):
                best = min(spilled, key=lambda one: one.cost)
                self.note_estimate(best)
                ways.append(best)
        return ways

    def _built(self, estimator: Estimator, candidates: list[Candidate]) -> Searcher:
        """The cheapest index of the best candidates, as many as there is time for, measured on val."""
        self.say("building the best of them; measured on held-out queries:")
        best: Searcher | None = None
        least = math.inf
        ways, longest = _best(candidates), 0.0
        for storage, dimensions in estimator.storages()[:1]:
            # What codes lose is an estimate, and can be too much: float32 keys always reach the recall.
            surer = replace(ways[0].design, storage=storage, dimensions=dimensions)
            if surer.storage != ways[0].design.storage:
                ways.insert(1, replace(ways[0], design=surer))
        for candidate in ways:
            # The baseline is built, too, and takes as long as one of these.
            if best is not None and 2 * longest > self.clock.until_of_cells(1.0):
                self.say(f"no time to build others than the best {ways.index(candidate)}")
                break
            started = self.clock.spent
            index, cost = self._measured(estimator.builder, candidate)
            longest = max(longest, self.clock.spent - started)
            assert isinstance(index, Searcher)
            cost /= WORTH if index.spilled else 1
            if best is None or cost < least:
                best, least = index, cost
            del index  # one beside the next is what the memory is for
        assert best is not None
        return best

    def _measured(self, builder: Builder, candidate: Candidate) -> tuple[Snapshot, float]:
        parts = candidate.design, candidate.model
        index = builder.index(*parts, second=candidate.second, late=lambda: self.clock.past(MEASURE_END))
        return index, self.note_measured(index, candidate.design)

    def _plain(self, estimator: Estimator, count: int) -> Candidate:
        """Plain IVF in the storage asked for, float32 keys if none was."""
        storage, dimensions = estimator.storages()[0]
        return Candidate(Design.plain(count, storage, dimensions), None, None, math.nan)


def _best(candidates: list[Candidate]) -> list[Candidate]:
    return sorted(candidates, key=lambda candidate: candidate.cost)[:SURVIVORS]
