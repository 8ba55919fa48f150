"""Keys at the nodes of a graph, which is walked for the best of them.

Storage decides what a walk scores neighbours by: "flat" float32 keys; "sq8" 8 bits a value; "lean" 4 bits a
value of a learned projection to fewer dimensions (`amips.lean`), with the codes of the 32 neighbours of a key
beside each other, so that a step reads one piece of memory and scores them all at once. Whatever is found is
scored again with float32 keys, so every score is a true inner product.

    neighbours.npy    int32 [n, degree]: -1 after the last
    entries.npy       int32 [e]: keys that a walk begins at
    keys.npy          float32 [n, d]
    codes.npy         "sq8" int8 [n, d]; "lean" uint8 [n, r / 2], see `amips.index.graph_walk`
    step.npy          "sq8", "lean": float32 [d] or [r], what one unit of a code stands for, over `unit`
    projection.npy    "lean": int8 [r, d], what queries are multiplied with
    scale.npy         "lean": float32 [r], what one unit of that stands for
    unit.npy          "sq8", "lean": float32 [1], a power of two, near the largest of the steps
    coding.npy        "lean": float32 [r, d + 1], what keys are multiplied with, what a code of 0 stands for;
                      where it is missing it is found from keys and codes, once keys are added
"""

from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.blas import threads_allowed
from amips.design import MOST_DEGREE, GraphStorage
from amips.errors import AmipsError, BundleError
from amips.graph import Graph
from amips.index.cell_files import read_array
from amips.index.graph_codes import LARGEST_WHOLE, code_range, coded, normal_steps, whole_projection
from amips.index.graph_compact import compacted
from amips.index.graph_filter import AWAY, EVERY, allowed_keys, effort_for, exact_search, led_away
from amips.index.graph_growth import grown, known_lists
from amips.index.graph_walk import codes_of_values
from amips.index.graph_walkers import walker_of
from amips.index.top_keys import top_of_rows
from amips.lean import Projection
from amips.metrics import TOP
from amips.npy import save_npy
from amips.vectors import Floats, Vectors

Ids = NDArray[np.int64]

# The part of the margin within which what was found is scored again: what codes lose of the order.
REFINE: dict[GraphStorage, float] = {"flat": 0.0, "sq8": 0.2, "lean": 0.6}
WIDTH = 1024  # keys kept while walking, at least; 8 for each result asked for
MOST_RESULTS = 1024  # from which on every key is scored
EXACT_BYTES = 1 << 26  # of scores, at once, where every key is
FEW = 64  # queries that are not worth a second thread
ARRAYS = {
    "flat": (),
    "sq8": ("codes", "step", "unit"),
    "lean": ("codes", "step", "unit", "projection", "scale"),
}
GRAPH_FILES: dict[str, list[str]] = {
    storage: [f"{name}.npy" for name in ("neighbours", "entries", "keys", *names)]
    for storage, names in ARRAYS.items()
}
CODING = "coding.npy"  # of "lean": not in bundles that were made before keys could be added


@dataclass(frozen=True)
class GraphStore:
    """Keys, a graph over them, and codes to walk it by; see above for the arrays."""

    storage: GraphStorage
    neighbours: NDArray[np.int32]
    entries: NDArray[np.int32]
    keys: Floats
    codes: NDArray[Any] | None = None
    step: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    unit: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    projection: NDArray[np.int8] | None = None
    scale: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    coding: Floats | None = None
    directory: Path | None = None  # where it was loaded from, if the keys stay there
    growing: Any = field(
        default=None, compare=False, repr=False
    )  # `graph_growth.Growing`, once keys were added

    @classmethod
    def build(
        cls,
        keys: Vectors,
        graph: Graph,
        storage: GraphStorage,
        projection: Projection | None = None,
        wanted: NDArray[np.integer[Any]] | None = None,
    ) -> "GraphStore":
        """Codes of the keys, beside the graph; "lean" needs a projection.

        Args:
            wanted: keys that queries want, as often as they do: codes must tell these apart above all.
        """
        addressable = keys.array is not None and keys.array.dtype == np.float32
        rows = keys.array if addressable else keys.load()
        assert rows is not None
        if storage == "flat":
            return cls(storage, graph.neighbours, graph.entries, rows)
        below = None if projection is None else projection.keys
        low, high = code_range(keys, below, wanted)
        if storage == "sq8":
            most = np.maximum(np.abs(low), np.abs(high))
            step, unit = normal_steps(most / 127)
            codes = coded(keys, below, np.zeros_like(step), step * unit, -127, 127, np.int8)
            return cls(storage, graph.neighbours, graph.entries, rows, codes, step, unit)
        assert projection is not None
        step, unit = normal_steps((high - low) / 15)
        values = coded(keys, below, low, step * unit, 0, 15, np.uint8)
        whole, scale = whole_projection(projection.queries)
        spare = -len(step) % 4  # codes are read four values at a time
        values = np.pad(values, ((0, 0), (0, spare)))
        return cls(
            storage,
            graph.neighbours,
            graph.entries,
            rows,
            codes_of_values(values),
            np.pad(step, (0, spare)),
            unit,
            np.pad(whole, ((0, spare), (0, 0))),
            np.pad(scale, (0, spare)),
            np.pad(np.column_stack([projection.keys, low]).astype(np.float32), ((0, spare), (0, 0))),
        )

    @property
    def n(self) -> int:
        """The number of keys."""
        return len(self.neighbours)

    @property
    def d(self) -> int:
        """The dimension."""
        return int(self.keys.shape[1])

    @property
    def r(self) -> int:
        """Values that are multiplied to score a neighbour."""
        return len(self.step) or self.d

    def search(
        self,
        x: Floats,
        k: int,
        margin: float | None,
        threads: int | None = None,
        width: int | None = None,
        allowed: NDArray[Any] | None = None,
    ) -> tuple[Floats, Ids, Ids]:
        """Scores [m, k], ids [m, k], and how many keys were visited, scored and scored again, [m, 3].

        Args:
            x: queries [m, d] of norms near 1, float32 and contiguous.
            margin: in scores of a query of norm 1; None scores every key.
            width: keys kept while walking, at most; with an infinite margin this alone is the effort.
            allowed: which keys may be results, bool or uint8 [n]; all, if None. The walk goes through the
                others, and the margin is measured from those that are allowed. Where few of the nearest keys
                are, the margin is wider. Where it finds fewer than there are, or becomes dearer than that,
                all that are allowed are scored.
        """
        if allowed is not None:
            return self._search_allowed(x, k, margin, threads, width, allowed_keys(allowed, self.n))
        m = len(x)
        if margin is None or not self.walks(k):
            scores, ids = top_of_rows(self.keys, x, k, EXACT_BYTES)
            return scores, ids, np.tile(np.array([self.n, self.n, 0]), (m, 1))
        scores, ids, counts = _results(m, k)
        depth = max(k, TOP)
        threads = 1 if m < FEW else threads or threads_allowed()
        search, unit, refine = self._walk
        width = max(depth + 1, width or max(WIDTH, 8 * depth))
        search(x, depth, width, margin / unit, refine, threads, scores, ids, counts, EVERY, 0, 0, 0)
        return scores, ids, counts

    def walks(self, k: int) -> bool:
        """Whether a walk finds so many results; of more every key is scored."""
        return k <= min(MOST_RESULTS, self.n // 4)

    def _search_allowed(
        self,
        x: Floats,
        k: int,
        margin: float | None,
        threads: int | None,
        width: int | None,
        allowed: NDArray[np.uint8],
    ) -> tuple[Floats, Ids, Ids]:
        """`search` where some keys may not be results, [n] of 0 and 1."""
        m, matches, depth = len(x), int(np.count_nonzero(allowed.view(bool))), max(k, TOP)
        least = max(WIDTH, 8 * depth)
        effort = effort_for(self.n, matches, depth, m, least)
        scores, ids, counts = _results(m, k)
        if margin is None or k > min(MOST_RESULTS, matches // 4) or effort is None:
            exact_search(self.keys, x, allowed, scores, ids, EXACT_BYTES)
            counts[:] = [matches, matches, 0]
            return scores, ids, counts
        threads = 1 if m < FEW else threads or threads_allowed()
        search, unit, refine = self._walk
        wide, visits = max(depth + 1, width or effort[0]), effort[1]
        limits = (allowed, max(depth + 1, least), visits)
        search(x, depth, wide, margin / unit, refine, threads, scores, ids, counts, *limits, effort[2])
        again = led_away(counts, self.flops, 2 * self.d * matches, visits)
        if len(again):
            further, more = _results(len(again), k), AWAY * margin / unit
            search(x[again], depth, wide, more, refine, threads, *further, *limits, 0)
            scores[again], ids[again] = further[:2]
            counts[again] = further[2] + counts[again] * [0, 1, 1]
        lacking = np.flatnonzero((ids[:, -1] < 0) | (counts[:, 0] >= visits))  # matches > k
        if len(lacking):
            best = _results(len(lacking), k)
            exact_search(self.keys, x[lacking], allowed, best[0], best[1], EXACT_BYTES)
            scores[lacking], ids[lacking] = best[:2]
            counts[lacking, 1 if self.storage == "flat" else 2] += matches
        return scores, ids, counts

    def flops(self, counts: Ids) -> Ids:
        """FLOPs of walks with these counts [m, 3]: of scoring neighbours, candidates, and the projection.

        Where nothing was scored again every key was scored itself.
        """
        projection = 2 * self.r * self.d if self.storage == "lean" else 0
        again = 2 * self.d if self.storage != "flat" else 0
        walk = projection + 2 * self.r * counts[:, 1] + again * counts[:, 2]
        return np.where(counts[:, 2] == 0, 2 * self.d * counts[:, 1], walk)

    def prepare(self) -> None:
        """Make ready what the first search would otherwise wait for."""
        self._walk  # noqa: B018  (kept by itself)

    @cached_property
    def _walk(self) -> tuple[Any, float, float]:
        """How to walk, in which unit the margin is given, and the part of it to score again."""
        unit = float(self.unit[0]) if len(self.unit) else 1.0
        return self._walker.search, unit, REFINE[self.storage]

    @cached_property
    def _walker(self) -> Any:
        return walker_of(self)

    def with_added(self, keys: Floats) -> "GraphStore":
        """A store with more keys, float32 [m, d], numbered from n on; see `amips.index.graph_growth`.

        This one stays as it is, and may be searched by other threads meanwhile. One thread at a time adds.
        """
        return grown(self, keys)

    def compacted(self, kept: NDArray[np.integer[Any]]) -> "GraphStore":
        """A store of the keys `kept` alone, numbers [m], which become 0 ... m - 1."""
        return compacted(self, kept)

    @property
    def lists(self) -> NDArray[np.int32]:
        """The neighbours, without keys that were added after this store was made."""
        return self.neighbours if self.growing is None else known_lists(self.neighbours, self.n)

    def save(self, directory: Path) -> list[str]:
        """Write the files above; their names."""
        files = [*GRAPH_FILES[self.storage], *([] if self.coding is None else [CODING])]
        for file in files:
            name = file.removesuffix(".npy")
            save_npy(directory / file, self.lists if name == "neighbours" else getattr(self, name))
        return files

    @classmethod
    def load(
        cls,
        directory: Path,
        storage: GraphStorage,
        mmap: bool,
        finite: bool = True,
        coding: bool | None = None,
    ) -> "GraphStore":
        """Read what `save` wrote and check it: no walk leaves the arrays, whatever is in the files.

        Args:
            mmap: leave float32 keys on disk.
            finite: whether keys that are left on disk are looked at for NaN and infinite values.
            coding: whether `coding.npy` is to be read; if it is there, if None.
        """

        def read(name: str, dtype: Any, *shape: int | None) -> NDArray[Any]:
            return read_array(directory / f"{name}.npy", dtype, shape)

        keys = read_array(
            directory / "keys.npy", np.float32, (None, None), mmap=mmap, finite=finite or not mmap
        )
        n, d = keys.shape
        if not 0 < n < MOST_KEYS or d < 1:
            raise BundleError(f"{directory / 'keys.npy'} is damaged: shape {[n, d]}")
        neighbours, entries = read("neighbours", np.int32, n, None), read("entries", np.int32, None)
        for name, ids, least in (("neighbours", neighbours, -1), ("entries", entries, 0)):
            if not ids.size or ids.size >= 1 << 40 or ids.min() < least or ids.max() >= n:
                raise BundleError(f"{directory / name}.npy is damaged: it names a key that is not there")
        if neighbours.shape[1] > MOST_DEGREE:  # codes are laid out for every one of them
            raise BundleError(f"{directory / 'neighbours.npy'} is damaged: {neighbours.shape[1]} neighbours")
        if ((neighbours[:, 1:] >= 0) & (neighbours[:, :-1] < 0)).any():
            raise BundleError(f"{directory / 'neighbours.npy'} is damaged: a list goes on after its end")
        make = partial(cls, directory=directory.absolute() if mmap else None)
        if storage == "flat":
            return make(storage, neighbours, entries, keys)
        r = d if storage == "sq8" else None
        step, unit = read("step", np.float32, r), read("unit", np.float32, 1)
        if not unit[0] > 0 or step.min(initial=0) < 0:
            raise BundleError(f"{directory / 'step.npy'} is damaged: steps of codes that cannot be")
        if storage == "sq8":
            codes = read("codes", np.int8, n, d)
            if codes.min() < -127:  # sums of products are sure to fit for the others
                raise BundleError(f"{directory / 'codes.npy'} is damaged: a code is too small")
            return make(storage, neighbours, entries, keys, codes, step, unit)
        r = len(step)
        if r < 4 or r % 4 or r > MOST_VALUES:
            raise BundleError(f"{directory / 'step.npy'} is damaged: {r} values in a code")
        codes = read("codes", np.uint8, n, r // 2)
        projection, scale = read("projection", np.int8, r, d), read("scale", np.float32, r)
        if np.abs(projection.astype(np.int16)).max() > LARGEST_WHOLE:
            raise BundleError(f"{directory / 'projection.npy'} is damaged: its numbers are too large")
        there = (directory / CODING).exists() if coding is None else coding
        matrix = read("coding", np.float32, r, d + 1) if there else None
        return make(storage, neighbours, entries, keys, codes, step, unit, projection, scale, matrix)

    def __reduce__(self) -> Any:
        """For pickle: opened again where keys stay on disk and still are there, otherwise the arrays."""
        if self.directory is not None and self.directory.is_dir():
            return GraphStore.load, (self.directory, self.storage, True, False)
        parts = {one.name: getattr(self, one.name) for one in fields(self)[:-2]}
        parts |= {"neighbours": self.lists, "keys": np.asarray(self.keys)}
        return GraphStore, tuple(parts.values())


def _results(m: int, k: int) -> tuple[Floats, Ids, Ids]:
    """Places for the results of m queries: scores [m, k], ids [m, k], counts [m, 3]."""
    return np.empty((m, k), np.float32), np.empty((m, k), np.int64), np.empty((m, 3), np.int64)


MOST_KEYS, MOST_VALUES = 1 << 30, 2048


def check_graph_size(n: int, dimensions: int | None = None) -> None:
    """AmipsError if a graph cannot have so many keys, or codes of so many dimensions."""
    if dimensions is not None and dimensions > MOST_VALUES:
        raise AmipsError(f"dimensions={dimensions}: codes of a graph have {MOST_VALUES} at most")
    if not 1 < n < MOST_KEYS:
        raise AmipsError(f"a graph has between 2 and {MOST_KEYS:,} keys, got {n:,}")
