"""What every backend is: keys in a library or a database that finds the best ones by itself.

A backend lives in a directory of its own, or, if it is a server, keeps there what is needed to find its table
again:

    DIRECTORY/
      backend.json    which backend, its settings, n, d, fingerprints of the keys; written last. And what
                      `measure` found: recall by budget
      ...             what the backend keeps
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from amips.arguments import check_recall
from amips.backends.budget_search import BudgetSearch, measured_points
from amips.cells import Cells
from amips.errors import AmipsError, BundleError
from amips.extras import needs_extra
from amips.files import digest_of, read_json, write_json
from amips.metrics import TARGET_RECALL
from amips.search import Cost, ladder
from amips.task import Task, load_task
from amips.vectors import Floats, Vectors, inspect, open_vectors

Ids = NDArray[np.int64]
Row = tuple[Sequence[float] | Floats, Sequence[int] | Ids]  # scores and ids of one query

MANIFEST = "backend.json"
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
    fewest: ClassVar[int] = 1  # keys that it can be made of
    directory: Path
    n: int
    d: int
    fingerprint: str = ""  # of the keys; "" of one that was put together by hand,
    sample: str = ""  # ... and of some of them

    @abstractmethod
    def find(self, x: Floats, k: int, budget: int) -> tuple[Floats, Ids]:
        """As `search`, for float32 queries of norms near 1 and k of at most n."""

    @abstractmethod
    def budgets(self) -> list[int]:
        """Budgets to choose from, from cheap to dear."""

    def find_cost(self, x: Floats, k: int, budget: int) -> Cost | None:
        """What `find` costs for each query; None where the library does not tell."""
        return None

    def close(self) -> None:
        """Let go of files, connections and servers of its own."""

    def measure(self, task: Task | str | Path, *, recall: float = TARGET_RECALL) -> "Backend":
        """Measure recall by budget on the val queries of a task of these keys, and keep it in backend.json.

        Args:
            recall: the recall@10 that `search` then serves if it is asked for nothing else.
        """
        recall, task = check_recall(recall), load_task(task, verify=True)
        if self.fingerprint and self.fingerprint != task.fingerprint:
            raise AmipsError(f"{self.title} was built of other keys than the task's")
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
