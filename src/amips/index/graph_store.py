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
"""

from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips import native
from amips.blas import threads_allowed
from amips.design import MOST_DEGREE, GraphStorage
from amips.errors import AmipsError, BundleError
from amips.graph import Graph
from amips.index.cell_files import read_array
from amips.index.graph_walk import NumpyWalker, codes_of_values
from amips.index.top_keys import top_of_rows
from amips.lean import Projection
from amips.metrics import TOP
from amips.npy import save_npy
from amips.vectors import Floats, Vectors, unit_rows

Ids = NDArray[np.int64]

NUMBERS: dict[GraphStorage, int] = {"flat": 0, "sq8": 1, "lean": 2}  # as in native/walk.hpp
# The part of the margin within which what was found is scored again: what codes lose of the order.
REFINE: dict[GraphStorage, float] = {"flat": 0.0, "sq8": 0.2, "lean": 0.6}
WIDTH = 1024  # keys kept while walking, at least; 8 for each result asked for
MOST_RESULTS = 1024  # from which on every key is scored
EXACT_BYTES = 1 << 26  # of scores, at once, where every key is
TAIL = 0.001  # of the values of a dimension, at each end, that codes need not tell apart
SAMPLE = 1 << 15  # keys that the range of codes is taken of
BLOCK = 32  # neighbours whose codes are kept together
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
    directory: Path | None = None  # where it was loaded from, if the keys stay there

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
        low, high = _range(keys, below, wanted)
        if storage == "sq8":
            most = np.maximum(np.abs(low), np.abs(high))
            step, unit = _normal(most / 127)
            codes = _coded(keys, below, np.zeros_like(step), step * unit, -127, 127, np.int8)
            return cls(storage, graph.neighbours, graph.entries, rows, codes, step, unit)
        assert projection is not None
        step, unit = _normal((high - low) / 15)
        values = _coded(keys, below, low, step * unit, 0, 15, np.uint8)
        whole, scale = _whole(projection.queries)
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
    ) -> tuple[Floats, Ids, Ids]:
        """Scores [m, k], ids [m, k], and how many keys were visited, scored and scored again, [m, 3].

        Args:
            x: queries [m, d] of norms near 1, float32 and contiguous.
            margin: in scores of a query of norm 1; None scores every key.
            width: keys kept while walking, at most; with an infinite margin this alone is the effort.
        """
        m = len(x)
        if margin is None or k > min(MOST_RESULTS, self.n // 4):
            scores, ids = top_of_rows(self.keys, x, k, EXACT_BYTES)
            return scores, ids, np.tile(np.array([self.n, self.n, 0]), (m, 1))
        scores, ids, counts = (
            np.empty((m, k), np.float32),
            np.empty((m, k), np.int64),
            np.empty((m, 3), np.int64),
        )
        depth = max(k, TOP)
        threads = 1 if m < FEW else threads or threads_allowed()
        search, unit, refine = self._walk
        width = max(depth + 1, width or max(WIDTH, 8 * depth))
        search(x, depth, width, margin / unit, refine, threads, scores, ids, counts)
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
        """What walks: compiled, with the codes of neighbours beside each other, or in numpy."""
        keys = np.ascontiguousarray(self.keys)
        largest = _largest_norm(keys) if self.storage == "flat" else 0.0
        projection = np.zeros((0, self.d), np.int8) if self.projection is None else self.projection
        codes: NDArray[Any] = np.zeros(0, np.uint8) if self.codes is None else self.codes
        if native.compiled is None:
            parts = (self.neighbours, self.entries, keys, self.storage, codes, self.step)
            return NumpyWalker(*parts, projection, self.scale, largest)
        spare, aligned = -self.neighbours.shape[1] % BLOCK, -self.d % 32
        neighbours = (
            np.pad(self.neighbours, ((0, 0), (0, spare)), constant_values=-1) if spare else self.neighbours
        )
        degree = neighbours.shape[1]
        entries = np.pad(self.entries, (0, -len(self.entries) % degree), constant_values=-1)
        if self.storage == "lean":
            rows = len(neighbours) + len(entries) // degree
            blocks = np.empty((rows, degree * self.r // 2), np.uint8)
            threads = threads_allowed()
            native.compiled.pack(codes, np.ascontiguousarray(neighbours), threads, blocks[: self.n])
            native.compiled.pack(codes, entries.reshape(-1, degree), threads, blocks[self.n :])
            codes = blocks
        else:
            codes = codes.view(np.uint8)
        offset = 128 * projection.sum(axis=1, dtype=np.float32)
        padded = np.pad(projection, ((0, 0), (0, aligned)))
        numbers = (NUMBERS[self.storage], codes, self.r, self.step, padded, self.scale, offset, largest)
        return native.compiled.Walker(np.ascontiguousarray(neighbours), entries, keys, *numbers)

    def save(self, directory: Path) -> list[str]:
        """Write the files above; their names."""
        for file in GRAPH_FILES[self.storage]:
            save_npy(directory / file, getattr(self, file.removesuffix(".npy")))
        return list(GRAPH_FILES[self.storage])

    @classmethod
    def load(cls, directory: Path, storage: GraphStorage, mmap: bool, finite: bool = True) -> "GraphStore":
        """Read what `save` wrote and check it: no walk leaves the arrays, whatever is in the files.

        Args:
            mmap: leave float32 keys on disk.
            finite: whether keys that are left on disk are looked at for NaN and infinite values.
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
        return make(storage, neighbours, entries, keys, codes, step, unit, projection, scale)

    def __reduce__(self) -> Any:
        """For pickle: opened again where keys stay on disk and still are there, otherwise the arrays."""
        if self.directory is not None and self.directory.is_dir():
            return GraphStore.load, (self.directory, self.storage, True, False)
        values = [getattr(self, one.name) for one in fields(self)[:-1]]
        return GraphStore, (*values[:3], np.asarray(self.keys), *values[4:])


MOST_KEYS, MOST_VALUES = 1 << 30, 2048
NORM_ROWS = 1 << 14  # keys whose norms are taken at a time
LARGEST_WHOLE = 63  # of the projection: products of two with bytes fit into 16 bits together


def _largest_norm(keys: Floats) -> float:
    """The largest norm of the keys that have one: what is not finite says nothing about the others."""
    blocks = (keys[low : low + NORM_ROWS] for low in range(0, len(keys), NORM_ROWS))
    with np.errstate(all="ignore"):
        norms = [unit_rows(block)[1] for block in blocks]
    return float(max(one[np.isfinite(one)].max(initial=0) for one in norms))


def check_graph_size(n: int, dimensions: int | None = None) -> None:
    """AmipsError if a graph cannot have so many keys, or codes of so many dimensions."""
    if dimensions is not None and dimensions > MOST_VALUES:
        raise AmipsError(f"dimensions={dimensions}: codes of a graph have {MOST_VALUES} at most")
    if not 1 < n < MOST_KEYS:
        raise AmipsError(f"a graph has between 2 and {MOST_KEYS:,} keys, got {n:,}")


def _range(
    keys: Vectors, below: Floats | None, wanted: NDArray[np.integer[Any]] | None
) -> tuple[Floats, Floats]:
    """The values of each dimension that codes must span, least and largest, both [r].

    Of keys in general and of those that queries want: where norms differ, these are the large ones.
    """
    rng = np.random.default_rng(0)
    every = np.sort(rng.choice(keys.n, min(keys.n, SAMPLE), replace=False))
    samples = [every]
    if wanted is not None and wanted.size:
        samples.append(np.sort(rng.choice(np.asarray(wanted).ravel(), min(wanted.size, SAMPLE))))
    ends = []
    for ids in samples:
        rows = keys.take(ids)
        rows = rows if below is None else rows @ below.T
        ends.append(np.quantile(rows, [TAIL, 1 - TAIL], axis=0).astype(np.float32))
    return np.min([one[0] for one in ends], axis=0), np.max([one[1] for one in ends], axis=0)


def _normal(step: NDArray[np.floating[Any]]) -> tuple[Floats, Floats]:
    """Steps divided by a power of two, so that the largest is near 1, and that power, [1]."""
    exponent = int(np.frexp(step.max(initial=0))[1])
    return np.ldexp(step, -exponent).astype(np.float32), np.ldexp(np.ones(1, np.float32), exponent)


def _coded(
    keys: Vectors, below: Floats | None, low: Floats, step: Floats, least: int, most: int, dtype: Any
) -> NDArray[Any]:
    """Keys [n, r] as whole numbers: (y - low) / step, within least..most."""
    out = np.empty((keys.n, len(step)), dtype)
    divisor = np.where(step > 0, step, 1)
    for start, block in keys.blocks():
        values = block if below is None else block @ below.T
        whole = np.rint((values - low) / divisor)
        out[start : start + len(block)] = np.where(step > 0, np.clip(whole, least, most), 0)
    return out


def _whole(projection: Floats) -> tuple[NDArray[np.int8], Floats]:
    """A projection [r, d] as small whole numbers, and what one of each row stands for, [r]."""
    largest = np.abs(projection).max(axis=1)
    scale = np.where(largest > 0, largest / LARGEST_WHOLE, 1).astype(np.float32)
    return np.rint(projection / scale[:, None]).astype(np.int8), scale
