"""What a fit says and notes of the designs that it tries."""

import math

import numpy as np

from amips.builder import Builder
from amips.design import MEMORY, Design
from amips.fitting.candidates import Candidate
from amips.fitting.reporting import finite, reaches, seconds
from amips.fitting.settings import Settings
from amips.metrics import TOP
from amips.search import (
    GraphSearcher,
    MemoryCost,
    MemorySearcher,
    Snapshot,
    Trial,
    cost_in_words,
    plain_index,
    point_for,
)


class Trials:
    """Costs of designs, estimated or measured, in the order in which they were tried."""

    def __init__(self, settings: Settings, quiet: bool) -> None:
        self.settings, self.quiet = settings, quiet
        self.trials: list[Trial] = []
        self.timed = np.empty((0, 0), np.float32)  # val queries that times are taken of
        self.memory_cost: MemoryCost | None = None  # of the memory that is kept

    def say(self, text: str) -> None:
        """Print, unless quiet."""
        if not self.quiet:
            print(text, flush=True)  # noqa: T201

    def note_plain(self, count: int, cost: float) -> None:
        """Keep the estimated cost of plain IVF with so many cells."""
        self.trials.append(Trial(Design.plain(count), cost, measured=False))
        self.say(f"  {cost:6.2%}  plain IVF, {count:,} cells")

    def note_estimate(self, candidate: Candidate) -> None:
        """Keep the estimated cost of a candidate."""
        self.trials.append(Trial(candidate.design, candidate.cost, measured=False))
        self.say(f"  {candidate.cost:6.2%}  {candidate.design.describe()}")

    def note_measured(self, index: Snapshot, design: Design) -> float:
        """The measured cost of an index, kept as a trial of a design."""
        cost = self.cost(index)
        self.trials.append(Trial(design, finite(cost), measured=True))
        self.say(f"  {cost_in_words(finite(cost), self.settings.objective)}  {design.describe()}")
        return cost

    def cost(self, index: Snapshot) -> float:
        """What the objective names, of one val query at the recall asked for; infinite if out of reach."""
        recall, objective = self.settings.recall, self.settings.objective
        if not reaches(index, recall):
            return math.inf
        if isinstance(plain_index(index), GraphSearcher) and point_for(index.points, recall, TOP).certain:
            return math.inf  # it would score every key, which needs no graph
        if objective == "flops":
            return point_for(index.points, recall, TOP).flops / (2 * index.n * index.d)
        return seconds(index, self.timed, recall, objective)

    def with_memory(self, builder: Builder, index: Snapshot) -> Snapshot:
        """The index, with a memory of the log in front of it where that costs less."""
        if self.settings.order is None or isinstance(index, MemorySearcher):
            return index
        self.say("trying a memory of the log; measured on held-out queries, where it pays:")
        better = builder.with_memory(index, min(MEMORY, builder.task.n))
        if better is index:
            self.say("  it does not pay: too little of what is held out came before")
            return index
        assert better.design is not None
        if self.note_measured(better, better.design) >= self.cost(index):
            return index
        self.memory_cost = self._memory_cost(index, better)
        return better

    def _memory_cost(self, index: Snapshot, better: Snapshot) -> MemoryCost | None:
        """What the memory changes; None if the recall is out of reach without it."""
        recall, ways = self.settings.recall, (index, better)
        if not all(reaches(one, recall) for one in ways):
            return None
        full = 2 * index.n * index.d
        flops, latency, throughput = (
            (costs[0], costs[1])
            for costs in (
                [point_for(one.points, recall, TOP).flops / full for one in ways],
                [seconds(one, self.timed, recall, "latency") for one in ways],
                [seconds(one, self.timed, recall) for one in ways],
            )
        )
        return MemoryCost(flops, latency, throughput)
