"""Does traffic still look like the log? A two-sample test of recent queries against held-out ones.

Both are looked at with the index and the keys of now: their top scores, the keys that a search scans and the
mass of the best cell, how near each is to the queries that the index learned from, and their coordinates
along the main directions of those. Each is compared by Kolmogorov-Smirnov, and the p-values are corrected
for their number by Holm. So traffic like the log is called drift in at most `FALSE_ALARMS` of the looks, and
keys that come and go, which move the scores of both, are none.

Queries that come again count as the log counts them. Of a log that was split by time they are held out as
often as they were asked, and so is traffic compared. Otherwise each query of the log is in it once, and
held-out ones are none that it learned from: then traffic counts each query once, without those.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from amips.errors import AmipsError
from amips.routers import masses
from amips.search.applying import live_keys
from amips.search.effort import effort_of
from amips.search.filtered_cells import FEW_REMOVED
from amips.search.graph_searcher import GraphSearcher
from amips.search.inputs import checked_queries
from amips.search.memory_searcher import Snapshot, plain_index
from amips.search.points import served_point
from amips.search.query_log import QueryLog, halves
from amips.search.searcher import Searcher
from amips.search.traffic import RING
from amips.search.two_samples import holm, kolmogorov_smirnov
from amips.tables import text_table
from amips.vectors import Floats, Vectors, inspect, open_vectors, unit_rows

FALSE_ALARMS = 0.01  # of the looks at traffic that is like the log
LEAST = 100  # queries, with fewer of which nothing can be said
SAME = 1 - 1e-5  # the cosine of a query and its copy in the log, at least
ROWS = 1 << 10  # queries of the log compared with at a time
NEIGHBOURS = 2000  # queries of the log that are compared with, at most
DIRECTIONS = 8  # along which queries are compared

Verdict = Literal["the same", "drifted"]


@dataclass(frozen=True)
class Comparison:
    """One thing that traffic and log are compared by.

    Args:
        difference: of the distribution functions, at most.
        p: of a difference as large or larger if both were the same, corrected for the number of comparisons.
        log, now: the means.
    """

    name: str
    difference: float
    p: float
    log: float
    now: float


@dataclass(frozen=True)
class Drift:
    """Whether traffic still looks like the log.

    Args:
        queries: of traffic that were looked at; `reference` of the log.
        comparisons: what was compared, the most different first.
        false_alarms: the share of looks at traffic like the log that are called drift, at most.
        growth: what to do about keys that have become many more, if they have.
    """

    queries: int
    reference: int
    comparisons: list[Comparison]
    false_alarms: float = FALSE_ALARMS
    growth: str | None = None

    @property
    def p(self) -> float:
        """Of differences as large or larger if traffic were like the log."""
        return min(one.p for one in self.comparisons)

    @property
    def drifted(self) -> bool:
        """Whether traffic is another than the log."""
        return self.p < self.false_alarms

    @property
    def verdict(self) -> Verdict:
        """In a word."""
        return "drifted" if self.drifted else "the same"

    def to_json(self) -> dict[str, Any]:
        """Plain values, for a monitor."""
        return {"verdict": self.verdict, "p": self.p, **asdict(self)}

    def __str__(self) -> str:
        worst = self.comparisons[0]
        if self.drifted:
            say = f"traffic is not like the log: {worst.name} {worst.now:.3f} now, {worst.log:.3f} in the log"
        else:
            say = "traffic looks like the log"
        alarm = f"false alarms in at most {self.false_alarms:.0%} of the looks"
        lines = [f"{say} (p = {self.p:.2g}; {alarm})"]
        lines += [f"{self.queries:,} recent queries against {self.reference:,} held-out ones of the log"]
        lines += [] if self.growth is None else [self.growth]
        rows = [
            [one.name, f"{one.log:.3f}", f"{one.now:.3f}", f"{one.difference:.3f}", f"{one.p:.2g}"]
            for one in self.comparisons
        ]
        return "\n".join([*lines, "", text_table(["mean of", "log", "now", "difference", "p"], rows)])


class Reference:
    """The log as a snapshot sees it: made once, because a look needs it each time."""

    def __init__(self, snapshot: Snapshot) -> None:
        log = snapshot.origin.log
        if log is None or len(log.val) < LEAST:
            raise AmipsError(
                "this index has no sample of its log to compare with: fit or build it with keep_log"
            )
        self.snapshot, self.log = snapshot, log
        self.near = _part(log, NEIGHBOURS)
        self.mean = self.near.mean(axis=0)
        centred = self.near - self.mean
        self.directions = np.linalg.eigh(centred.T @ centred)[1][:, ::-1][:, :DIRECTIONS]
        self.queries = len(log.reference)
        distinct, place = np.unique(log.reference, axis=0, return_inverse=True)
        self.known = {row.tobytes(): i for i, row in enumerate(distinct)}
        self.known_values = self.look(distinct)
        self.values = {name: values[place.ravel()] for name, values in self.known_values.items()}

    def look(self, u: Floats) -> dict[str, NDArray[Any]]:
        """What is compared, of queries of norm 1 [m, d]: a value for each, by name."""
        values = _effort(self.snapshot, u)
        values["the cosine with the nearest of the log"] = (u @ self.near.T).max(axis=1)
        along = (u - self.mean) @ self.directions
        for i in range(along.shape[1]):
            values[f"direction {i + 1} of the log"] = along[:, i]
        return values

    def look_again(self, u: Floats) -> dict[str, NDArray[Any]]:
        """The same, where a query that the reference has gets just the values that it has there.

        Else a query that is asked often would differ from itself by a rounding, and be all of a difference.
        """
        distinct, place = np.unique(u, axis=0, return_inverse=True)
        at = np.array([self.known.get(row.tobytes(), -1) for row in distinct])
        values = {name: np.where(at >= 0, one[at], 0.0) for name, one in self.known_values.items()}
        if (at < 0).any():
            for name, fresh in self.look(distinct[at < 0]).items():
                values[name][at < 0] = fresh
        return {name: one[place.ravel()] for name, one in values.items()}

    def compare(self, u: Floats) -> Drift:
        """Recent queries, at norm 1 [m, d], as often as they came, against the log."""
        kind, u = "recent queries", unit_rows(halves(u).astype(np.float32))[0]  # as the log has them
        if not self.log.repeats:
            u, kind = _unknown(np.unique(u, axis=0), self.log), "different queries that the log does not have"
        if len(u) < LEAST:
            raise AmipsError(f"{len(u):,} {kind}: a comparison with the log needs {LEAST} at least")
        now = self.look_again(u)
        results = {name: kolmogorov_smirnov(self.values[name], now[name]) for name in now}
        p = holm(np.array([result[1] for result in results.values()]))
        comparisons = [
            Comparison(
                name, results[name][0], float(p[i]), float(self.values[name].mean()), float(now[name].mean())
            )
            for i, name in enumerate(results)
        ]
        comparisons.sort(key=lambda one: (one.p, -one.difference))
        return Drift(len(u), self.queries, comparisons, growth=growth(self.snapshot))


def growth(snapshot: Snapshot) -> str | None:
    """What to do about keys that have become many more since the fit, or were removed; None if nothing."""
    live, lines = live_keys(snapshot), list[str]()
    if live < (1 - FEW_REMOVED) * snapshot.n:
        share = 1 - live / snapshot.n
        lines.append(f"{share:.0%} of its keys were removed: to search faster, run amips compact BUNDLE")
    more = snapshot.origin.growth(live, cells=isinstance(plain_index(snapshot), Searcher))
    lines += [] if more is None else [more]
    return "; ".join(lines) or None


def drawn(queries: Any, d: int, most: int = RING, seed: int = 0) -> Floats:
    """At most so many of the queries of an array or a file, at norm 1."""
    vectors = queries if isinstance(queries, Vectors) else open_vectors(queries, "queries", single=True)
    if vectors.d != d:
        raise AmipsError(f"{vectors.name} has dimension {vectors.d}, this index needs {d}")
    rows = np.arange(vectors.n)
    if vectors.n > most:
        rows = np.sort(np.random.default_rng([seed, 41]).choice(vectors.n, most, replace=False))
    inspect(vectors, zero="keep", any_norm=True)  # all of them: what is drawn is a matter of luck
    x, _ = checked_queries(vectors.take(rows), d)
    x = x[x.any(axis=1)]
    return unit_rows(x)[0] if len(x) else x


def _unknown(u: Floats, log: QueryLog) -> Floats:
    """Those of the queries [m, d] that the index did not learn from."""
    nearest = np.full(len(u), -1, np.float32)
    for low in range(0, len(log.train), ROWS):
        known = unit_rows(log.train[low : low + ROWS].astype(np.float32))[0]
        nearest = np.maximum(nearest, (u @ known.T).max(axis=1, initial=-1))
    return u[nearest < SAME]


def _part(log: QueryLog, most: int) -> Floats:
    """Evenly spaced training queries at norm 1; of a log without any, held-out ones."""
    rows = log.train if len(log.train) else log.val
    return unit_rows(rows[:: max(1, len(rows) // most)][:most].astype(np.float32))[0]


def _effort(snapshot: Snapshot, u: Floats) -> dict[str, NDArray[Any]]:
    """The top scores of queries, and what a search for them looks at, at the point that the index serves."""
    index = plain_index(snapshot)
    if not index.points or index.target_recall is None:
        return {}
    point = served_point(index.points, index.target_recall)
    if isinstance(index, GraphSearcher):
        scores, _, counts = index.search_with(u, 1, None if point.certain else point.margin)
        return {"the top score": scores[:, 0], "keys scored": counts[:, 1].astype(np.float64)}
    effort = effort_of(point)
    values = {"the top score": index.search_with(u, 1, effort)[0][:, 0]}
    values["keys scanned"] = index.cost_with(u, 1, effort).scanned.astype(np.float64)
    if index.temperature > 0:
        step = max(1, (1 << 22) // index.c)
        best = [
            masses(index.router.scores(u[low : low + step]), index.temperature).max(axis=1)
            for low in range(0, len(u), step)
        ]
        values["the mass of the best cell"] = np.concatenate(best)
    return values
