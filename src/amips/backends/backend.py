"""What every backend is: keys in a library or a database that finds the best ones by itself.

A backend lives in a directory of its own, or, if it is a server, keeps there what is needed to find its table
again:

    DIRECTORY/
      backend.json    which backend, its settings, n, d, fingerprints of the keys; written last. And what
                      `measure` found: recall by budget
      ...             what the backend keeps
"""

import importlib
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from amips.blas import faiss
from amips.blas import threads as limit_threads
from amips.cells import Cells
from amips.errors import AmipsError, BundleError
from amips.extras import needs_extra
from amips.files import digest_of, read_json, write_json
from amips.metrics import TARGET_RECALL, TOP
from amips.search import Cost, Point, assured_recalls, checked_k, checked_queries, effort_for, ladder, recalls
from amips.task import Split, Task, load_task
from amips.vectors import Floats, Vectors, inspect, open_vectors

Ids = NDArray[np.int64]
Row = tuple[Sequence[float] | Floats, Sequence[int] | Ids]  # scores and ids of one query

MANIFEST = "backend.json"
NEARLY_ALL = 0.999  # of the top keys: a ladder of budgets that is measured ends there
GROWTH = 2**0.5  # from one budget to the next
SAMPLE = 256  # keys, whatever their number
BLOCK_BYTES = 1 << 26  # of candidates' keys that are scored at a time


@dataclass(frozen=True)
class BuildInputs:
    """What a backend is built from.

    Args:
        keys: to be searched.
        queries: like those that will be asked, for backends that learn from them.
        cells: a partition of the keys, for backends whose cells can be addressed.
        settings: all of them, by name.
        address: of the server that is to hold the keys; None where the backend is to keep them by itself.
    """

    keys: Vectors
    queries: Vectors | None
    cells: Cells | None
    settings: dict[str, Any]
    address: str | None


class Searchable(Protocol):
    """What finds keys within a budget, and what was measured of it."""

    @property
    def n(self) -> int:
        """The number of keys."""
        ...

    @property
    def d(self) -> int:
        """The dimension."""
        ...

    @property
    def points(self) -> Sequence[Point]:
        """Recall by budget."""
        ...

    @property
    def target_recall(self) -> float | None:
        """The recall to serve."""
        ...

    @property
    def temperature(self) -> float:
        """0: a backend does not know what mass a cell holds."""
        ...

    def budgets(self) -> list[int]:
        """Budgets from cheap to dear."""
        ...

    def find(self, x: Floats, k: int, budget: int) -> tuple[Floats, Ids]:
        """Scores and ids of the k best keys within a budget, [m, k]."""
        ...

    def cost(self, x: Floats, k: int, budget: int) -> Cost | None:
        """What that costs, for each query; None if it is not known."""
        ...


class BudgetSearch:
    """`search` of whatever is `Searchable`: backends, and backends asked for the predicted key."""

    points: Sequence[Point] = ()  # recall by budget, on held-out queries, if `measure` was called
    target_recall: float | None = None  # what `search` serves when nothing else is asked for
    temperature: ClassVar[float] = 0.0

    def search(
        self: Searchable,
        x: Any,
        k: int = 10,
        *,
        recall: float | None = None,
        probes: int | None = None,
        best_effort: bool = False,
        threads: int | None = None,
    ) -> tuple[Floats, Ids]:
        """The k best keys of each query: scores float32 [m, k] and ids int64 [m, k], best first.

        Scores are true inner products <x, y>. Where fewer than k are found, the id is -1 and the score -inf.
        With neither `recall` nor `probes` it serves the recall that it was measured for.

        Args:
            x: queries [m, d], or one query [d].
            recall: the smallest budget that had this recall (of the true top 10; of the top key if k is 1) on
                held-out queries; needs `measure` first.
            probes: the budget itself. What it counts is in `self.budget`; `budgets()` is a ladder of them.
            best_effort: a recall that is out of reach is served as well as it can be, with a warning.
            threads: a limit for numpy and for libraries that run in this process (FAISS, usearch, ScaNN,
                Intel's); databases have their own.
        """
        x, _ = checked_queries(x, self.d)
        k = checked_k(k)
        if probes is None and not self.points:
            raise AmipsError("its recall was not measured: give probes, or call measure(task) first")
        budget = checked_budget(effort_for(self, probes, recall, None, k, best_effort).probes)
        if len(x) == 0:
            return padded(np.empty((0, 0), np.float32), np.empty((0, 0), np.int64), k)
        with limit_threads(threads):
            return padded(*self.find(x, min(k, self.n), budget), k)


class Backend(BudgetSearch, ABC):
    """Keys, searched by a library that chooses for itself where to look.

    A subclass builds and opens its files in `make` and `open`, and searches in `find`.
    """

    title: ClassVar[str]  # what people call it
    budget: ClassVar[str]  # what its budget is
    needs: ClassVar[tuple[str, ...]] = ()  # its libraries,
    extra: ClassVar[str | None] = None  # ... and the extra of pip that brings them
    server: ClassVar[str | None] = None  # the environment variable with the address of its server
    routable: ClassVar[bool] = False  # whether its cells can be addressed
    learns: ClassVar[bool] = False  # whether it learns from queries
    directory: Path
    n: int
    d: int
    fingerprint: str = ""  # of the keys; "" of one that was put together by hand,
    sample: str = ""  # ... and of some of them

    @abstractmethod
    def find(self, x: Floats, k: int, budget: int) -> tuple[Floats, Ids]:
        """As `search`, for queries that are known to be good and k of at most n."""

    @abstractmethod
    def budgets(self) -> list[int]:
        """Budgets to choose from, from cheap to dear."""

    def cost(self, x: Floats, k: int, budget: int) -> Cost | None:
        """What a search costs for each query; None where the library does not tell: then there is only time.

        Libraries search again to find out, so this takes as long as searching.
        """
        return None

    def close(self) -> None:
        """Let go of files, connections and servers of its own."""

    def measure(self, task: Task | str | Path, *, recall: float = TARGET_RECALL) -> "Backend":
        """Measure recall by budget on the val queries of a task of these keys, and keep it in backend.json.

        Args:
            recall: the recall@10 that `search` then serves if it is asked for nothing else.
        """
        task = load_task(task)
        if self.fingerprint and self.fingerprint != task.fingerprint:
            raise AmipsError(f"{self.title} was built of other keys than the task's")
        recall = checked_recall(recall)
        self.points, self.target_recall = measured_points(self, task.val), recall
        facts = read_json(self.directory / MANIFEST, BundleError)
        facts |= {"points": [point.to_json() for point in self.points], "target_recall": recall}
        write_json(self.directory / MANIFEST, {**facts, "digest": digest_of(facts)})
        return self

    def __enter__(self) -> "Backend":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @classmethod
    def require(cls) -> None:
        """AmipsError unless its libraries are here."""
        for name in cls.needs:
            library(cls, name)

    @classmethod
    @abstractmethod
    def settings(cls, n: int, d: int) -> dict[str, Any]:
        """Every setting that building takes, with its default for n keys of dimension d."""

    @classmethod
    @abstractmethod
    def make(cls, inputs: BuildInputs, directory: Path) -> list[str]:
        """Put the keys in; the names, relative to the directory, of the files that must not change."""

    @classmethod
    @abstractmethod
    def open(
        cls, directory: Path, n: int, d: int, settings: dict[str, Any], address: str | None
    ) -> "Backend":
        """Open what `make` wrote."""


def measured_points(index: Searchable, split: Split) -> list[Point]:
    """Recall@1 and @10 on the queries of a split for each budget, until nearly all top keys are found.

    FLOPs and keys scanned are 0 where the library does not tell: then the smallest budget is the cheapest.
    """
    x, true = np.asarray(split.queries), np.asarray(split.top_ids)
    k, points = min(TOP, index.n), list[Point]()
    for budget in index.budgets():
        ids, cost = index.find(x, k, budget)[1], index.cost(x, k, budget)
        scanned = 0.0 if cost is None else float(cost.scanned.mean() / index.n)
        flops = 0.0 if cost is None else float(cost.flops.mean())
        first, all_of_them = (float(recalls(ids, true, top).mean()) for top in (1, k))
        hits = (true[:, :k, None] == ids[:, None, :]).any(axis=2)
        points.append(Point(budget, first, all_of_them, scanned, flops, assured=assured_recalls(hits)))
        if all_of_them >= NEARLY_ALL:
            break
    return points


def checked_recall(recall: float) -> float:
    """A recall that can be served."""
    if not (isinstance(recall, int | float) and math.isfinite(recall) and 0 < recall <= 1):
        raise AmipsError(f"recall={recall}: expected a share of the true top 10, above 0 and up to 1")
    return float(recall)


def checked_budget(budget: Any) -> int:
    """A budget as a Python integer."""
    if not hasattr(budget, "__index__") or budget < 1:
        raise AmipsError(f"probes is {budget}; it must be a whole number, at least 1")
    return operator.index(budget)


def padded(scores: Floats, ids: Ids, k: int) -> tuple[Floats, Ids]:
    """Results [m, r] as [m, k]: cut, or filled with -inf and -1."""
    width = k - ids.shape[1]
    if width <= 0:
        return scores[:, :k], ids[:, :k]
    wide = ((0, 0), (0, width))
    return (
        np.pad(scores, wide, constant_values=-np.inf),
        np.pad(ids, wide, constant_values=-1),
    )


def from_rows(rows: Sequence[Row], k: int) -> tuple[Floats, Ids]:
    """What a database gave for each query, as tables [m, k]: best first, ties by the lower id."""
    scores, ids = np.full((len(rows), k), -np.inf, np.float32), np.full((len(rows), k), -1, np.int64)
    for row, (values, numbers) in enumerate(rows):
        of, some = np.asarray(values, np.float32), np.asarray(numbers, np.int64)
        order = np.lexsort((some, -of))
        scores[row, : len(some)], ids[row, : len(some)] = of[order], some[order]
    return scores, ids


def rungs(most: int) -> list[int]:
    """Budgets from 1 to `most` in steps that are worth a measurement each: 1, 2, 3, 4, 6, 8, 11, 16, ..."""
    return ladder(most, GROWTH)


def sample_of(keys: Vectors) -> str:
    """The fingerprint of some keys, evenly spaced: tells others, or another order, without a pass."""
    rows = np.unique(np.linspace(0, keys.n - 1, SAMPLE).astype(np.int64))
    return inspect(open_vectors(keys.take(rows)), zero="keep").fingerprint


@contextmanager
def one_line(what: str, *kinds: type[Exception], error: type[AmipsError] = AmipsError) -> Iterator[None]:
    """A library's errors of these kinds as one of amips's: what it is about, and the first line of theirs."""
    try:
        yield
    except AmipsError:
        raise
    except kinds as problem:
        said = str(problem).splitlines() or [type(problem).__name__]
        raise error(f"{what}: {said[0]}") from None


def library(kind: type[Backend], name: str) -> Any:
    """Import a backend's library, or say which extra brings it."""
    with needs_extra(kind.title, str(kind.extra), name.split(".")[0]):
        return importlib.import_module(name)


def threads_allowed() -> int:
    """How many threads a library of its own may use: what `blas.threads` allows the caller."""
    return int(faiss.omp_get_max_threads())
