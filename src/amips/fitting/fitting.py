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
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

import numpy as np

from amips import native
from amips.builder import Builder, at_start, graph_design
from amips.cells import POINTS_PER_CELL
from amips.design import MEMORY, OWN, Design, GraphStorage
from amips.errors import AmipsError, TrainingInterrupted
from amips.files import read_json, remove_directory, write_json
from amips.fitting.candidates import SPILL_FRACTIONS, Candidate, Estimator, counts, partitions, ranks, trained
from amips.fitting.rate import graph_seconds, labelling_rate
from amips.fitting.reporting import TIMED, compare, finite, reaches, seconds
from amips.fitting.settings import Settings
from amips.graph import LOG_DEPTH
from amips.metrics import TOP
from amips.search import (
    GraphSearcher,
    Index,
    MemorySearcher,
    Searcher,
    Trial,
    cost_in_words,
    plain_index,
    point_for,
)
from amips.task import HELD_OUT, Task, label
from amips.vectors import Vectors, open_vectors

# Fractions of the time given; the rest is for building and measuring.
LABEL_TIME, PARTITION_TIME, TRAIN_TIME, SPILL_TIME = 0.4, 0.25, 0.2, 0.1
GRAPH_TIME = 0.4  # that a graph may take, as far as that is known beforehand
CELLS_TIME = 0.6  # of what cells would have, where a graph is tried, too
GRAPH_FROM = 5_000  # keys: with fewer, a graph has little to gain
ENTRIES = (64, 256, 1024)  # keys that a walk may begin at: more only where fewer do not reach the recall
LEAST = 100  # queries, however short the time
FEW = 1000  # queries: with fewer, what is chosen and reported rests on too few to be sure of
CALL, WORK_TASK, WORK_DESIGNS = "fit.json", "task", "designs"  # in the directory of work in progress
SURVIVORS = 3  # of each step
ITERATIONS = 10  # of k-means
TRIALS, FEWEST_POINTS = 6, 16  # k-means looks at fewer points a cell, if so many trials would take too long
WORTH = 0.98  # of the cost, at most, that second cells must come down to: they take memory


class Fitting:
    """One call of `fit` and its work in progress."""

    def __init__(self, work: Path, settings: Settings, quiet: bool, device: str | None = None) -> None:
        self.work, self.settings, self.quiet, self.device = work, settings, quiet, device
        self.seconds = 60 * settings.minutes
        self.cells_time = 1.0  # fraction of the time that cells may have
        self.rate = 0.0  # FLOPs a second, of exact search with numpy
        self.trials: list[Trial] = []
        self.timed = np.empty((0, 0), np.float32)  # val queries that times are taken of

    def say(self, text: str) -> None:
        """Print, unless quiet."""
        if not self.quiet:
            print(text, flush=True)  # noqa: T201

    def run(self, keys: Vectors, queries: Vectors) -> Index:
        """The best index, with its report."""
        task = self._label(keys, queries)
        graph = self._tries_graph(task)
        self.cells_time = CELLS_TIME if graph else 1.0
        self.timed = np.asarray(task.val.queries[:TIMED])
        builder = self._builder(task)
        estimator = Estimator(builder, self.settings)
        candidates, plain = self._partitions(estimator)
        cells: Searcher | None = None
        if self.settings.structure != "graph":
            candidates = self._trained(estimator, self._ranks(estimator, candidates))
            candidates = self._with_second_cells(estimator, candidates)
            cells = self._built(builder, candidates)
        index: Index | None = self._with_graph(builder, cells) if graph else cells
        assert index is not None
        index = self._with_memory(builder, index)
        best = min(plain, key=lambda count: plain[count])
        baseline = self._measured(builder, self._plain(estimator, best))[0]
        assert isinstance(baseline, Searcher)
        untried = set(counts(task.n, self.settings.cells)) - set(plain)
        numbers = (list(plain), list(untried))
        return compare(task, index, baseline, self.settings, self.cost, *numbers, self.trials, self.say)

    def _tries_graph(self, task: Task) -> bool:
        """Whether a graph is one of the designs."""
        if self.settings.structure is not None:
            return self.settings.structure == "graph"
        if task.n < GRAPH_FROM:
            return False
        if native.compiled is None:
            self.say("no graph is tried: amips was installed without a C++ compiler, and numpy walks slowly")
            return False
        if graph_seconds(task, self.rate) <= GRAPH_TIME * self.seconds:
            return True
        self.say("no time to try a graph: give more minutes")
        return False

    def _with_graph(self, builder: Builder, cells: Searcher | None) -> Index:
        """The best of a graph that learns from the log, one that does not, and the best index of cells."""
        storage = cast("GraphStorage | None", self.settings.storage)
        self.say("making graphs; measured on held-out queries:")
        best: Index | None = cells
        least = math.inf if cells is None else self.cost(cells)
        for entries in ENTRIES:
            designs = [
                builder.resolved(graph_design(builder.task, storage=storage, entries=entries, learned=one))
                for one in (True, False)
            ]
            costs = []
            for design in dict.fromkeys(designs):  # a log that is too short to learn from leaves one
                graph, cost = self._measured(builder, Candidate(design, OWN, None, math.nan))
                costs.append(cost)
                if best is None or cost < least:
                    best, least = graph, cost
            if not math.isinf(min(costs)) or entries >= builder.task.n:
                break  # otherwise keys are in clusters that no walk leads into: with more entries one may
        assert best is not None
        return best

    def _with_memory(self, builder: Builder, index: Index) -> Index:
        """The index, with a memory of the log in front of it where that costs less."""
        if self.settings.order is None or isinstance(index, MemorySearcher):
            return index
        self.say("trying a memory of the log; measured on held-out queries, where it pays:")
        better = builder.with_memory(index, min(MEMORY, builder.task.n))
        if better is index:  # too little of what is held out came before
            return index
        assert better.design is not None
        return better if self._noted(better, better.design) < self.cost(index) else index

    def remove(self) -> None:
        """Remove the work of this call: a call that is killed meanwhile leaves all of it or nothing."""
        remove_directory(self.work)

    def _label(self, keys: Vectors, queries: Vectors) -> Task:
        """Exact top keys of as many queries as there is time for."""
        if (self.work / CALL).exists():
            known = read_json(self.work / CALL, AmipsError)  # measured anew it would differ
            if type(known.get("labelled")) is not int or type(known.get("rate")) is not float:
                raise AmipsError(f"{self.work / CALL} is damaged; remove {self.work}")
            count, self.rate = int(known["labelled"]), float(known["rate"])
        else:
            self.rate = labelling_rate(keys, queries)
            labelling = self.rate if self.device is None else labelling_rate(keys, queries, self.device)
            affordable = int(labelling * self.seconds * LABEL_TIME / (2 * keys.n * keys.d))
            count = min(queries.n, max(LEAST, affordable))
            self.work.mkdir(parents=True, exist_ok=True)
            write_json(self.work / CALL, {**asdict(self.settings), "labelled": count, "rate": self.rate})
        seed = self.settings.seed
        if count < queries.n:
            self.say(f"using {count:,} of {queries.n:,} queries: labelling them all would take too long")
            drawn = np.sort(np.random.default_rng([seed, 3]).choice(queries.n, count, replace=False))
            if self.settings.order is not None:
                drawn = np.arange(queries.n - count, queries.n)  # with gaps, less would come again
            queries = open_vectors(queries.take(drawn), "queries")
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
                k=LOG_DEPTH if self.settings.order is None else max(LOG_DEPTH, MEMORY),
                seed=seed,
                device=self.device,
                progress=not self.quiet,
            )
        except AmipsError:
            if not (self.work / WORK_TASK).exists():  # refused before anything was done
                self.remove()
            raise

    def _builder(self, task: Task) -> Builder:
        # Points a cell such that a partition takes its part of the time, as labelling went.
        most = max(counts(task.n, self.settings.cells))
        product = 2 * ITERATIONS * most * most * task.d
        points = int(self.rate * self.seconds * self.cells_time * PARTITION_TIME / TRIALS / product)
        return Builder(
            task,
            self.work / WORK_DESIGNS,
            minutes=self.settings.minutes * self.cells_time * TRAIN_TIME / SURVIVORS,
            recall=self.settings.recall,
            seed=self.settings.seed,
            iterations=ITERATIONS,
            points=None if points >= POINTS_PER_CELL else max(FEWEST_POINTS, points),
            device=self.device,
            progress=not self.quiet,
        )

    def _partitions(self, estimator: Estimator) -> tuple[list[Candidate], dict[int, float]]:
        """Partitions with their untrained routers, and plain IVF's cost by number of cells.

        As many as there is time for, two at least: one that follows the queries and a plain one.
        """
        builder = estimator.builder
        self.say("trying cells; cost as a share of scanning all keys, on held-out queries:")
        candidates: list[Candidate] = []
        plain: dict[int, float] = {}
        started = time.perf_counter()
        for design in partitions(builder.task.n, self.settings.cells):
            spent = time.perf_counter() - started
            number = len(candidates)
            if number >= 2 and spent * (1 + 1 / number) > self.seconds * self.cells_time * PARTITION_TIME:
                break
            design = builder.resolved(design)
            candidate = estimator.candidate(design, builder.model(design))
            candidates.append(candidate)
            if not design.query_aware:
                cost = plain[design.cells] = estimator.plain(design.cells)
                self.trials.append(Trial(Design.plain(design.cells), cost, measured=False))
                self.say(f"  {cost:6.2%}  plain IVF, {design.cells:,} cells")
            self._note_estimate(candidate)
        return candidates, plain

    def _ranks(self, estimator: Estimator, candidates: list[Candidate]) -> list[Candidate]:
        """The best partitions, each with the rank of its router that costs least."""
        builder, survivors = estimator.builder, []
        for candidate in _best(candidates):
            others = [
                estimator.candidate(design, builder.model(design))
                for design in ranks(candidate.design, builder.task.d)
            ]
            best = min([candidate, *others], key=lambda one: one.cost)
            survivors.append(best)
            if best is not candidate:
                self._note_estimate(best)
        return survivors

    def _trained(self, estimator: Estimator, candidates: list[Candidate]) -> list[Candidate]:
        """Of the best partitions the better of the trained and the untrained router."""
        builder, survivors = estimator.builder, []
        for candidate in _best(candidates):
            self.say(f"training a router for {candidate.design.cells:,} cells ...")
            design = trained(candidate.design)
            try:
                model = builder.model(design)
            except TrainingInterrupted:
                raise TrainingInterrupted(
                    f"stopped; the same call continues with what is in {self.work}"
                ) from None
            if at_start(model):
                survivors.append(candidate)
                continue
            learned = estimator.candidate(design, model)
            self._note_estimate(learned)
            survivors.append(min(learned, candidate, key=lambda one: one.cost))
        return survivors

    def _with_second_cells(self, estimator: Estimator, candidates: list[Candidate]) -> list[Candidate]:
        """Each as it is, and with the fraction of its keys in second cells that makes it cheapest."""
        wanted = self.settings.spill_fraction
        if wanted == 0:
            return candidates
        task, ways = estimator.builder.task, []
        left = SPILL_TIME * self.cells_time * self.seconds * self.rate  # FLOPs
        for candidate in _best(candidates):
            left -= 4 * task.n * candidate.design.cells * task.d
            if wanted is None:
                ways.append(candidate)
            if wanted is None and left < 0:
                self.say(f"no time to look for second cells among {candidate.design.cells:,} cells")
                continue
            fractions = SPILL_FRACTIONS if wanted is None else (wanted,)
            best = min(estimator.with_second_cells(candidate, fractions), key=lambda one: one.cost)
            self._note_estimate(best)
            ways.append(best)
        return ways

    def _built(self, builder: Builder, candidates: list[Candidate]) -> Searcher:
        """The cheapest index of the best candidates, measured on val."""
        self.say("building the best of them; measured on held-out queries:")
        best: Searcher | None = None
        least = math.inf
        ways = _best(candidates)
        if self.settings.storage is None and ways[0].design.storage != "flat":
            # What codes lose is an estimate, and can be too much: float32 keys always reach the recall.
            ways.append(replace(ways[0], design=replace(ways[0].design, storage="flat", dimensions=None)))
        for candidate in ways:
            index, cost = self._measured(builder, candidate)
            assert isinstance(index, Searcher)
            cost /= WORTH if index.spilled else 1
            if best is None or cost < least:
                best, least = index, cost
        assert best is not None
        return best

    def _measured(self, builder: Builder, candidate: Candidate) -> tuple[Index, float]:
        index = builder.index(candidate.design, candidate.model, second=candidate.second)
        return index, self._noted(index, candidate.design)

    def _noted(self, index: Index, design: Design) -> float:
        """The measured cost of an index, kept as a trial of a design."""
        cost = self.cost(index)
        self.trials.append(Trial(design, finite(cost), measured=True))
        self.say(f"  {cost_in_words(finite(cost), self.settings.objective)}  {design.describe()}")
        return cost

    def _plain(self, estimator: Estimator, count: int) -> Candidate:
        """Plain IVF in the storage asked for, float32 keys if none was."""
        storage, dimensions = estimator.storages()[0]
        return Candidate(Design.plain(count, storage, dimensions), None, None, math.nan)

    def _note_estimate(self, candidate: Candidate) -> None:
        self.trials.append(Trial(candidate.design, candidate.cost, measured=False))
        self.say(f"  {candidate.cost:6.2%}  {candidate.design.describe()}")

    def cost(self, index: Index) -> float:
        """What the objective names, of one val query at the recall asked for; infinite if out of reach."""
        recall, objective = self.settings.recall, self.settings.objective
        if not reaches(index, recall):
            return math.inf
        if isinstance(plain_index(index), GraphSearcher) and point_for(index.points, recall, TOP).certain:
            return math.inf  # it would score every key, which needs no graph
        if objective == "flops":
            return point_for(index.points, recall, TOP).flops / (2 * index.n * index.d)
        return seconds(index, self.timed, recall, objective)


def _best(candidates: list[Candidate]) -> list[Candidate]:
    return sorted(candidates, key=lambda candidate: candidate.cost)[:SURVIVORS]
