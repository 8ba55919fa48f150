"""What every engine of this room is: keys in a library or a database that finds the best ones by itself.

An engine lives in a directory of its own, or, if it is a server, keeps there what is needed to find its
table again:

    DIRECTORY/
      engine.json    which engine, its settings, n, d and fingerprints of the keys; written last
      ...            what the engine keeps
"""

import importlib
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
from amips.errors import AmipsError
from amips.search import Cost
from amips.search.inputs import checked_k, checked_queries
from amips.vectors import Floats, Vectors, inspect, open_vectors

Ids = NDArray[np.int64]
Row = tuple[Sequence[float] | Floats, Sequence[int] | Ids]  # scores and ids of one query

GROWTH = 2**0.5  # from one budget to the next
SAMPLE = 256  # keys, whatever their number
BLOCK_BYTES = 1 << 26  # of candidates' keys that are scored at a time


@dataclass(frozen=True)
class BuildInputs:
    """What an engine is built from.

    Args:
        keys: to be searched.
        queries: like those that will be asked, for engines that learn from them.
        cells: a partition of the keys, for engines whose cells can be addressed.
        settings: all of them, by name.
        address: of the server that is to hold the keys; None where the engine is to keep them by itself.
    """

    keys: Vectors
    queries: Vectors | None
    cells: Cells | None
    settings: dict[str, Any]
    address: str | None


class Backend(ABC):
    """Keys, searched by an engine that chooses for itself where to look.

    A subclass builds and opens its files in `make` and `open`, and searches in `find`.
    """

    title: ClassVar[str]  # what people call it
    budget: ClassVar[str]  # what its budget is
    needs: ClassVar[tuple[str, ...]] = ()  # its libraries,
    extra: ClassVar[str | None] = None  # ... and the extra of pip that brings them
    server: ClassVar[str | None] = None  # the environment variable with the address of its server
    celled: ClassVar[bool] = False  # whether its cells can be addressed
    learns: ClassVar[bool] = False  # whether it learns from queries
    n: int
    d: int
    fingerprint: str = ""  # of the keys; "" of one that was made before these were kept,
    sample: str = ""  # ... and of some of them

    @abstractmethod
    def find(self, x: Floats, k: int, budget: int) -> tuple[Floats, Ids]:
        """As `search`, for queries that are known to be good and k of at most n."""

    @abstractmethod
    def budgets(self) -> list[int]:
        """The ladder of budgets, from cheap to dear."""

    def cost(self, x: Floats, k: int, budget: int) -> Cost | None:
        """What a search costs for each query; None where the engine does not tell: then there is only time.

        Engines search again to find out, so this takes as long as searching.
        """
        return None

    def close(self) -> None:  # noqa: B027  (most have nothing to let go of)
        """Let go of files, connections and servers of its own."""

    def search(
        self, x: Any, k: int = 10, budget: int | None = None, *, threads: int | None = None
    ) -> tuple[Floats, Ids]:
        """The k best keys that a budget finds: scores float32 [m, k] and ids int64 [m, k], best first.

        Scores are true inner products <x, y>. Where fewer than k are found, the id is -1 and the score -inf.

        Args:
            x: queries [m, d], or one query [d].
            budget: how hard to look; what it counts is in `self.budget`. The middle of `budgets()` if None.
            threads: a limit for numpy and for libraries that run in this process (FAISS, usearch, ScaNN,
                Intel's); databases have their own.
        """
        return checked_search(self, x, k, budget, threads)

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
    def make(cls, given: BuildInputs, directory: Path) -> list[str]:
        """Put the keys in; the names, relative to the directory, of the files that must not change."""

    @classmethod
    @abstractmethod
    def open(cls, directory: Path, n: int, d: int, settings: dict[str, Any], address: str | None) -> "Backend":
        """Open what `make` made."""


class Searchable(Protocol):
    """What a checked search needs."""

    @property
    def n(self) -> int:
        """The number of keys."""
        ...

    @property
    def d(self) -> int:
        """The dimension."""
        ...

    def budgets(self) -> list[int]:
        """The ladder."""
        ...

    def find(self, x: Floats, k: int, budget: int) -> tuple[Floats, Ids]:
        """The search itself."""
        ...


def checked_search(
    finder: Searchable, x: Any, k: int, budget: int | None, threads: int | None
) -> tuple[Floats, Ids]:
    """Check, search with `finder.find`, and fill up to k results."""
    x, _ = checked_queries(x, finder.d)
    k = checked_k(k)
    ladder = finder.budgets()
    budget = checked_budget(ladder[len(ladder) // 2] if budget is None else budget)
    if len(x) == 0:
        return padded(np.empty((0, 0), np.float32), np.empty((0, 0), np.int64), k)
    with limit_threads(threads):
        return padded(*finder.find(x, min(k, finder.n), budget), k)


def checked_budget(budget: Any) -> int:
    """A budget as a Python integer."""
    if not hasattr(budget, "__index__") or budget < 1:
        raise AmipsError(f"budget is {budget}; it must be a whole number, at least 1")
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
    for row, found in enumerate(rows):
        of, some = np.asarray(found[0], np.float32), np.asarray(found[1], np.int64)
        order = np.lexsort((some, -of))
        scores[row, : len(some)], ids[row, : len(some)] = of[order], some[order]
    return scores, ids


def rungs(most: int) -> list[int]:
    """Budgets from 1 to `most`, each at least 1 and about 1.4 times more than the one before."""
    steps, step = {1, most}, 1.0
    while step < most:
        steps.add(round(step))
        step = max(step + 1, step * GROWTH)
    return sorted(steps)


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


def library(finder: type[Backend], name: str) -> Any:
    """Import an engine's library, or say which extra brings it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as problem:
        if problem.name is None or problem.name.split(".")[0] != name.split(".")[0]:
            raise
        raise AmipsError(f"{finder.title} needs {name}; pip install 'amips[{finder.extra}]'") from None


def threads_allowed() -> int:
    """How many threads a library of its own may use: what `blas.threads` allows the caller."""
    return int(faiss.omp_get_max_threads())
