"""What is my recall now? A sample of queries searched for exactly, and what the index answers."""

import warnings
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from amips.arguments import check_choice, check_recall, check_seed, check_whole
from amips.blas import threads as limit_threads
from amips.errors import AmipsError
from amips.index import KeyMask, OwnCells
from amips.metrics import TOP, mean_interval
from amips.search.effort import Effort
from amips.search.graph_searcher import GraphSearcher
from amips.search.inputs import checked_queries
from amips.search.measuring import calibrated, calibrated_graph, scored_all
from amips.search.memory_measuring import with_memory
from amips.search.memory_searcher import MemorySearcher, Snapshot, plain_index, with_facts
from amips.search.points import Point, point_for, recalls
from amips.search.searcher import Searcher
from amips.tables import text_table
from amips.task import Split
from amips.vectors import Floats, Vectors, inspect, open_vectors, unit_rows

SAMPLE = 500  # queries: recall@10 is then known to about a point
SHOWN = 12  # operating points of a table, at most

Verdict = Literal["kept", "likely kept", "likely missed", "missed"]


@dataclass(frozen=True)
class Recall:
    """A mean over queries, and between which two values it lies with 95 % confidence."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> "Recall":
        """Of the values of each query, [m]."""
        return cls(float(values.mean()), *mean_interval(values))

    def __str__(self) -> str:
        return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True)
class Audit:
    """The recall of an index on queries of now.

    Args:
        queries: how many were searched for exactly, of how many `total`.
        target: the recall@10 that is asked of the index.
        recall1, recall10: what its answers have, searched as it is.
        flops: of a query, as a share of a full scan; `promised_flops` on the queries it was measured with.
        points: recall and cost of other efforts on these queries, from cheap to dear.
        needed: the cheapest of them that has the target with 95 % confidence.
        full_scan: FLOPs of scoring every key.
        index: the index with the points of these queries, so that it keeps its recall on such;
            `Index.adopt` makes that last.
        matches: keys that the filter let through, if there was one.
    """

    queries: int
    total: int
    target: float
    recall1: Recall
    recall10: Recall
    flops: float
    promised_flops: float
    points: list[Point]
    needed: Point
    full_scan: float
    index: Any = field(repr=False, compare=False)
    matches: int | None = None

    @property
    def verdict(self) -> Verdict:
        """Whether the target is kept: for sure, with 95 % confidence, or as it looks."""
        if self.recall10.high < self.target:
            return "missed"
        if self.recall10.low >= self.target:
            return "kept"
        return "likely kept" if self.recall10.mean >= self.target else "likely missed"

    def to_json(self) -> dict[str, Any]:
        """Plain values, for a monitor."""
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "index"}
        values |= {name: asdict(values[name]) for name in ("recall1", "recall10", "needed")}
        return {"verdict": self.verdict, **values, "points": [point.to_json() for point in self.points]}

    def __str__(self) -> str:
        words = {
            "kept": "is kept",
            "likely kept": "is likely kept; more queries would tell for sure",
            "likely missed": "is likely missed; more queries would tell for sure",
            "missed": "is missed: these queries are harder than those it was measured with",
        }
        lines = [
            f"{self.queries:,} of {self.total:,} queries, searched exactly",
            f"recall@10 {self.recall10}, recall@1 {self.recall1}: "
            f"the target, {self.target:g}, {words[self.verdict]}",
            f"cost {self.flops:.2%} of a full scan, {self.promised_flops:.2%} when it was measured",
            f"recall@10 {self.target:g} on such queries, 95 % sure: {effort_in_words(self.needed)}, "
            f"{self.needed.flops / self.full_scan:.2%} of a full scan",
        ]
        return "\n".join([*lines, "", self.table()])

    def table(self) -> str:
        """Other efforts on these queries, for a terminal."""
        step = max(1, -(-len(self.points) // SHOWN))
        rows = [
            [
                effort_in_words(point),
                *(f"{value:.3f}" for value in (point.recall1, point.recall10, point.recall_assured(TOP))),
                f"{point.flops / self.full_scan:.2%}",
            ]
            for point in self.points[::step]
        ]
        return text_table(["effort", "recall@1", "recall@10", "95 % sure", "FLOPs"], rows)


def effort_in_words(point: Point) -> str:
    """What to ask of `search` for a point."""
    if point.certain:
        return "every key scored"
    if point.recognised:
        behind = effort_in_words(replace(point, recognised=0.0))
        return f"the memory for {point.recognised:.0%}, {behind} for the others"
    if point.margin:
        return f"margin={point.margin:.4g}"
    return f"min_mass={point.min_mass:.4g}" if point.min_mass else f"probes={point.probes}"


def audit(
    index: Snapshot,
    queries: Any,
    *,
    sample: int = SAMPLE,
    recall: float | None = None,
    seed: int = 0,
    on_bad: Literal["error", "skip"] = "error",
    threads: int | None = None,
    allowed: KeyMask | None = None,
) -> Audit:
    """Search for a sample of queries exactly: what recall the index has on them, and would have.

    Args:
        index: what `fit`, `build` or `load` gives.
        queries: today's, [m, d], an array or a file; those of the log say nothing new.
        sample: queries to search for exactly, at most, drawn at random.
        recall: what is asked of the index; by default what it was made for.
        seed: of the draw.
        on_bad: a query that is not finite is an error, or ("skip") left out.
        threads: limit on them.
        allowed: the keys that may be results, of a search behind a filter: only its recall and cost are told.
    """
    check_whole("sample", sample, 2)
    check_choice("on_bad", on_bad, ("error", "skip"))
    if not index.points or index.target_recall is None:
        raise AmipsError("nothing was measured on this index when it was made: there is nothing to audit")
    target = check_recall(index.target_recall if recall is None else recall)
    split, total = exact_split(index, queries, sample, check_seed(seed), on_bad, threads, allowed)
    x, top, plain = np.asarray(split.queries), np.asarray(split.top_ids), with_facts(index, labels=None)
    with limit_threads(threads), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a recall that is out of reach: the audit tells
        asked: Any = {"recall": target, "best_effort": True, "allowed": allowed}
        ids = plain.search(x, top.shape[1], **asked)[1]
        flops = plain.cost(x, top.shape[1], **asked).flops
        promised = point_for(index.points, target, TOP, best_effort=True)
        if allowed is not None:
            every = [scored_all(plain_index(plain), allowed.count)]
            now = with_points(plain, every)
        else:
            now = _calibrated(plain, split, target)
        needed = point_for(now.points, target, TOP, best_effort=True)
    full = 2.0 * index.n * index.d
    return Audit(
        queries=len(x),
        total=total,
        target=target,
        recall1=Recall.of(recalls(ids, top, 1)),
        recall10=Recall.of(recalls(ids, top, TOP)),
        flops=float(flops.mean()) / full,
        promised_flops=promised.flops / full,
        points=sorted(now.points, key=lambda point: (point.flops, point.probes)),
        needed=needed,
        full_scan=full,
        index=with_facts(now, labels=index.labels, report=None),  # which told of other queries
        matches=None if allowed is None else allowed.count,
    )


def with_points(index: Snapshot, points: list[Point]) -> Snapshot:
    """The index with other points; a memory of the log is left out."""
    return replace(plain_index(index), points=points)


def _calibrated(index: Snapshot, split: Split, target: float) -> Snapshot:
    if isinstance(index, MemorySearcher):
        behind = plain_index(_calibrated(index.index, split, target))
        known = with_memory(behind, index.memory, split, target)
        return known or MemorySearcher(behind, index.memory, behind.points)  # which then answers nothing
    if isinstance(index, GraphSearcher):
        return calibrated_graph(index, split, target)
    return calibrated(index, split, target)


def exact_split(
    index: Snapshot,
    queries: Any,
    sample: int,
    seed: int,
    on_bad: Literal["error", "skip"],
    threads: int | None,
    allowed: KeyMask | None = None,
) -> tuple[Split, int]:
    """A sample of the queries with their true top keys, and how many queries there were."""
    x, rows, total = draw_queries(queries, index.d, sample, seed, on_bad)
    with limit_threads(threads):
        scores, ids = every_key(plain_index(index), x, allowed)
    nothing = np.empty((len(x), 0))
    return Split(
        open_vectors(x, "queries"),
        rows,
        scores,
        ids.astype(np.int32),
        nothing.astype(np.float32),
        nothing.astype(np.int32),
    ), total


def draw_queries(
    queries: Any, d: int, sample: int, seed: int, on_bad: Literal["error", "skip"]
) -> tuple[Floats, NDArray[np.int64], int]:
    """A random sample of queries of unit norm [m, d], their rows [m], and how many there were in all."""
    vectors = queries if isinstance(queries, Vectors) else open_vectors(queries, "queries", single=True)
    if vectors.d != d:
        raise AmipsError(f"{vectors.name} has dimension {vectors.d}, this index needs {d}")
    if vectors.n < 2:
        raise AmipsError(f"{vectors.name} holds {vectors.n} query: a recall needs two at least")
    if on_bad == "error":
        inspect(vectors, zero="keep", any_norm=True)  # all of them: what is drawn is a matter of luck
    rows = np.sort(np.random.default_rng(seed).choice(vectors.n, min(sample, vectors.n), replace=False))
    x, bad = checked_queries(vectors.take(rows), d, on_bad)
    x, rows = unit_rows(x[~bad])[0], rows[~bad]
    if len(x) < 2:
        raise AmipsError(f"{vectors.name} has too few queries that are finite")
    return x, rows, vectors.n


def every_key(
    index: Searcher | GraphSearcher, x: Floats, allowed: KeyMask | None = None, k: int = TOP
) -> tuple[Floats, NDArray[np.int64]]:
    """The true top keys: scores and numbers [m, k or all there are], every key scored with the query."""
    present = allowed or index.alive
    k = min(k, index.n if present is None else present.count)
    if k == 0:
        why = "every key was removed" if allowed is None else "no key matches the filter"
        raise AmipsError(f"{why}: there is nothing to audit")
    if isinstance(index, GraphSearcher):
        return index.search_with(x, k, None, allowed=allowed)[:2]
    if not isinstance(index.store, OwnCells):
        raise AmipsError("an audit needs the keys themselves: this index leaves them with another library")
    whole = Effort(index.c) if index.store.storage == "flat" else Effort(index.c, refine=0)
    return index.search_with(x, k, whole, allowed)
