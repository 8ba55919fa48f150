"""From stored runs to figures: recall, costs, Pareto fronts, costs at a recall, ratios with intervals.

A system with a budget is a point (cost, recall). The front of a family is what its best points reach, over
all its budgets and numbers of cells; the cost at a recall R is read off the front between the two nearest
points,

    cost(R) = cost_i + (R - r_i) / (r_{i+1} - r_i) (cost_{i+1} - cost_i),

which is what sending a share of the queries to either point would cost. A ratio of two such costs gets a
bootstrap interval over queries (and, for times, over rounds).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from amips.bench.results import Run
from amips.metrics import cost_at
from amips.search import recalls
from amips.task import Task

Array = NDArray[np.float64]
Metric = Literal["recall@1", "recall@10", "recall@0.01%", "recall@0.1%", "recall@0.5%", "mrr"]
Axis = Literal["flops", "scanned", "single/1", "single/all", "batch/1", "batch/all"]

AXES: dict[Axis, str] = {
    "flops": "FLOPs a query",
    "scanned": "keys scanned, fraction of all",
    "single/1": "us a query, batch 1, 1 thread",
    "single/all": "us a query, batch 1, all threads",
    "batch/1": "us a query, large batch, 1 thread",
    "batch/all": "us a query, large batch, all threads",
}
TOP_FRACTIONS = {"0.01%": 0.0001, "0.1%": 0.001, "0.5%": 0.005}  # of n: the paper's Recall@...
DRAWS = 1000
HELD_UP = 3.0  # a round counts if its yardstick took no more than so many times what it mostly takes
MOST_WEIGHTS = 1 << 25  # numbers in memory: with very many queries there are fewer draws


def within(n: int) -> list[int]:
    """How many keys the paper's fractions of n are, at least 1."""
    return [max(1, math.ceil(fraction * n)) for fraction in TOP_FRACTIONS.values()]


@dataclass(frozen=True)
class Measured:
    """A run beside what is true, on the test queries alone; `val` is the same on the val queries."""

    run: Run
    rows: slice
    true: NDArray[np.integer[Any]]
    n: int
    clock: dict[str, float] = field(default_factory=dict)  # what the yardstick takes, by batch/threads
    _known: dict[str, Array] = field(default_factory=dict, compare=False, repr=False)

    def metric(self, name: Metric) -> Array:
        """One value for each query; their mean is the metric."""
        if name not in self._known:
            self._known[name] = self._metric(name)
        return self._known[name]

    def _metric(self, name: Metric) -> Array:
        rank = self.run.rank[self.rows]
        if name == "recall@1":
            first: Array = (self.run.ids[self.rows, 0] == self.true[:, 0]).astype(np.float64)
            return first
        if name == "recall@10":
            return recalls(self.run.ids[self.rows], self.true, 10)
        if name == "mrr":
            return np.where(rank > 0, 1.0 / np.maximum(rank, 1), 0.0)
        deep = dict(zip(TOP_FRACTIONS, within(self.n), strict=True))[name.removeprefix("recall@")]
        return ((rank > 0) & (rank <= deep)).astype(np.float64)

    def cost(self, axis: Axis, metric: Metric | None = None) -> Array | None:
        """FLOPs or keys of each query, or seconds (in units of the yardstick's) of each round.

        None where it was not measured, or the backend does not tell (stored as less than nothing).

        Args:
            metric: what is had for it. A mapped query orders keys by its own scores, so that its recall in a
                fraction of n needs as many results: its time is then that of so many.
        """
        if axis in ("flops", "scanned") and (self.run.scanned < 0).any():
            return None
        if axis == "flops":
            return (self.run.network + self.run.coarse + self.run.scan[self.rows]).astype(np.float64)
        if axis == "scanned":
            return self.run.scanned[self.rows].astype(np.float64)
        fraction = (metric or "").removeprefix("recall@")
        if self.run.system.mode == "drop-in" and f"{axis}@{fraction}" in self._times:
            return self._times[f"{axis}@{fraction}"]
        return self._times.get(axis)

    @cached_property
    def _times(self) -> dict[str, Array]:
        """For each batch and threads, of the ways to compute the same answers the fastest."""
        best: dict[str, Array] = {}
        for name, seconds in self.run.times.items():
            way, _, mode = name.partition("/")
            if way == "yardstick":
                continue
            # The median of single queries: one that the machine held up decides nothing.
            each, yard = (
                np.median(times, axis=1) if times.ndim > 1 else times
                for times in (seconds, self.run.times[f"yardstick/{name}"])
            )
            # Where the yardstick itself was held up (threads that wait for a busy core), it is no clock.
            sound = yard <= HELD_UP * self.clock.get(mode, math.inf)
            if not sound.any():
                continue
            relative = (each / yard)[sound]
            if mode not in best or np.median(relative) < np.median(best[mode]):
                best[mode] = relative
        return best


def yardstick_seconds(runs: Sequence[Run]) -> dict[str, float]:
    """What the yardstick took, the median of all times it was measured, by batch/threads."""
    times: dict[str, list[Array]] = {}
    for run in runs:
        for name, seconds in run.times.items():
            if name.startswith("yardstick/"):
                each = np.median(seconds, axis=1) if seconds.ndim > 1 else seconds
                times.setdefault(name.split("/", 2)[2], []).append(each)
    return {mode: float(np.median(np.concatenate(parts))) for mode, parts in times.items()}


@dataclass(frozen=True)
class Family:
    """Runs that share one front: one way of routing, over all its cells and budgets."""

    name: str
    role: str
    runs: list[Measured]

    @property
    def host(self) -> str | None:
        """The family of the same backend searched with x, for models on a backend."""
        return self.runs[0].run.system.host

    @property
    def backend(self) -> str | None:
        """Another library's index, if it is one."""
        return self.runs[0].run.system.backend

    @property
    def learns(self) -> bool:
        """Whether it may learn from the training queries."""
        return any(measured.run.system.learns for measured in self.runs)

    def knows(self, axis: Axis) -> bool:
        """Whether anything is known of this cost."""
        return any(run.cost(axis) is not None for run in self.runs)

    def costs(self, axis: Axis, metric: Metric | None = None) -> Array:
        """The cost of each run: the mean over queries, the median over rounds; nan where not measured."""
        values = [run.cost(axis, metric) for run in self.runs]
        middle = np.mean if axis in ("flops", "scanned") else np.median
        return np.array([math.nan if v is None else float(middle(v)) for v in values])

    def rounds(self, axis: Axis) -> int:
        """How often each time on this axis was taken, at least."""
        values = [run.cost(axis) for run in self.runs]
        return min((len(v) for v in values if v is not None), default=0)

    def recalls(self, metric: Metric) -> Array:
        """The metric of each run."""
        return np.array([run.metric(metric).mean() for run in self.runs])

    def cost_at(self, axis: Axis, metric: Metric, target: float) -> float:
        """The cost at which the family reaches a recall."""
        cost, recall = self.costs(axis, metric), self.recalls(metric)
        known = ~np.isnan(cost)
        return cost_at(cost[known], recall[known], target)

    def nearest(self, axis: Axis, metric: Metric, target: float) -> Measured | None:
        """The cheapest run that reaches a recall."""
        cost, recall = self.costs(axis, metric), self.recalls(metric)
        reached = np.flatnonzero((recall >= target - 1e-12) & ~np.isnan(cost))
        return None if len(reached) == 0 else self.runs[int(reached[np.argmin(cost[reached])])]


@dataclass(frozen=True)
class Ratio:
    """How many times less one family costs than another at a recall, with a 95 % interval where it is known.

    Neither end is known of times that were taken once; one is not where draws of the queries miss the recall.
    """

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def known(self) -> bool:
        """Whether both ends of the interval are known."""
        return self.low is not None and self.high is not None

    @property
    def better(self) -> bool:
        """Whether the cost is surely less: the whole interval is above 1."""
        return self.low is not None and self.low > 1.0

    @property
    def worse(self) -> bool:
        """Whether the cost is surely more: the whole interval is below 1."""
        return self.high is not None and self.high < 1.0

    def __str__(self) -> str:
        """ "1.90 (1.71 to 2.04)", or "1.90" where the interval is not known."""
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})" if self.known else f"{self.value:.2f}"


class Bootstrap:
    """Resampled test queries: the same draws for every family, so that what they share cancels.

    `queries` is their number, or the source of each: noisy copies of one query are drawn together.
    """

    def __init__(self, queries: int | NDArray[np.integer[Any]], draws: int = DRAWS, seed: int = 0) -> None:
        sources = np.arange(queries) if isinstance(queries, int) else np.asarray(queries)
        _, of = np.unique(sources, return_inverse=True)
        m = int(of.max()) + 1
        self.draws = draws = max(100, min(draws, MOST_WEIGHTS // len(of)))
        self.rng = np.random.default_rng(seed)
        counts = self.rng.multinomial(m, np.full(m, 1 / m), size=draws)[:, of]
        self.weights: Array = counts / counts.sum(axis=1, keepdims=True)
        self._known: dict[tuple[str, str, str], Array] = {}

    def recalls(self, family: Family, metric: Metric) -> Array:
        """[draws, runs]."""
        return self._drawn(family, metric, [run.metric(metric) for run in family.runs])

    def costs(self, family: Family, axis: Axis, metric: Metric | None = None) -> Array:
        """[draws, runs]; nan where a run has no such cost."""
        values = [run.cost(axis, metric) for run in family.runs]
        if axis in ("flops", "scanned"):
            return self._drawn(family, axis, [v for v in values if v is not None])
        key = (family.role, family.name, f"{axis} {metric}")
        if key not in self._known:
            out = np.full((self.draws, len(values)), math.nan)
            for i, rounds in enumerate(values):
                if rounds is not None:
                    drawn = self.rng.integers(len(rounds), size=(self.draws, len(rounds)))
                    out[:, i] = np.median(rounds[drawn], axis=1)
            self._known[key] = out
        return self._known[key]

    def _drawn(self, family: Family, what: str, values: list[Array]) -> Array:
        key = (family.role, family.name, what)
        if key not in self._known:
            self._known[key] = self.weights @ np.stack(values).T
        return self._known[key]

    def ratio(self, base: Family, ours: Family, axis: Axis, metric: Metric, target: float) -> Ratio | None:
        """Cost of `base` over cost of `ours` at a recall; None where one of them does not reach it."""
        value = base.cost_at(axis, metric, target) / ours.cost_at(axis, metric, target)
        if math.isnan(value):
            return None
        if axis not in ("flops", "scanned") and min(base.rounds(axis), ours.rounds(axis)) < 2:
            return Ratio(value)  # a time taken once says nothing of its spread
        pairs = zip(
            self.costs(base, axis, metric),
            self.recalls(base, metric),
            self.costs(ours, axis, metric),
            self.recalls(ours, metric),
            strict=True,
        )
        drawn = np.array(
            [_ratio_of_draw(_cost_of_draw(a, b, target), _cost_of_draw(c, d, target)) for a, b, c, d in pairs]
        )
        drawn = drawn[~np.isnan(drawn)]
        if len(drawn) < 0.5 * self.draws:
            return None
        low, high = (float(q) for q in np.quantile(drawn, [0.025, 0.975], method="nearest"))
        # A side that misses the recall in so many draws may cost any amount: that end is not known.
        return Ratio(value, low if low > 0 else None, high if high < math.inf else None)


def _ratio_of_draw(base: float, ours: float) -> float:
    """A side that does not reach the recall in a draw costs any amount; nan where neither does."""
    if math.isnan(base):
        return math.nan if math.isnan(ours) else math.inf
    return 0.0 if math.isnan(ours) else base / ours


def _cost_of_draw(cost: Array, recall: Array, target: float) -> float:
    known = ~np.isnan(cost)
    return cost_at(cost[known], recall[known], target)


def families(runs: Sequence[Run], rows: slice, true: NDArray[np.integer[Any]], n: int) -> list[Family]:
    """Stored runs by family, on some of their rows; `true` are the top keys of these."""
    by_name: dict[str, list[Run]] = {}
    for run in runs:
        by_name.setdefault(run.system.family, []).append(run)
    clock = yardstick_seconds(runs)
    grouped = [
        Family(name, members[0].system.role, [Measured(run, rows, true, n, clock) for run in members])
        for name, members in by_name.items()
    ]
    order = {"baseline": 0, "contender": 1, "reference": 2}
    return sorted(grouped, key=lambda family: (order[family.role], family.name))


def on_test(runs: Sequence[Run], task: Task) -> list[Family]:
    """Families on the test queries, for reporting."""
    return families(runs, slice(len(task.val), None), np.asarray(task.test.top_ids), task.n)


def on_val(runs: Sequence[Run], task: Task) -> list[Family]:
    """Families on the val queries, for choosing."""
    return families(runs, slice(0, len(task.val)), np.asarray(task.val.top_ids), task.n)


SECOND = "FAISS IVF, PQ FastScan + refine"


def second_baseline(tested: Sequence[Family]) -> Family | None:
    """FAISS IVF with PQ FastScan codes and refinement, all its settings as one family, if it was run."""
    members = [f for f in tested if f.role == "reference" and f.backend == "fastscan"]
    if len(members) < 2:
        return members[0] if members else None
    return Family(SECOND, "reference", [run for family in members for run in family.runs])


def baseline(tested: Sequence[Family]) -> Family | None:
    """All centroid routing as one family, whatever its storage: the best baseline is their common front."""
    members = [family for family in tested if family.role == "baseline"]
    if len(members) < 2:
        return members[0] if members else None
    return Family("centroid routing", "baseline", [run for family in members for run in family.runs])
