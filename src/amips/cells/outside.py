"""The cells of a FAISS index that was built elsewhere, and where the keys are in it.

FAISS calls cells inverted lists. An inverted list holds codes and ids, so three things must be known before
anything can be learned: which row of `keys` is which entry, that these are the same vectors, and what decides
the cell of a key (the quantizer, and the transforms before it).
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.arguments import check_array, refused
from amips.blas import faiss
from amips.cells.clustering import Cells, cell_means
from amips.errors import VectorError
from amips.vectors import Floats, Vectors, open_vectors, row_norms

Ids = NDArray[np.int64]

SAMPLE = 64  # vectors that are reconstructed to see whether keys are in the order of the index
EXACT = 1e-3  # relative error of a float32 key that went through a transform, at most
QUANTISED = 0.9  # of the sample must be nearest to their own keys where codes are all that is stored
UNDECIDED = 1e-3  # of the keys may lie between two centroids, so that rounding decides on their cell
ASSIGNED_AT_ONCE = 1 << 16  # keys, as in `faiss.IndexIVF.add`: the same blocks are rounded the same way
SAME_NORM = 1e-3  # relative difference of norms up to which L2 and inner product have the same order
HOW_TO_NAME = "in the order of adding, or with their ids: amips.cells.from_faiss(index, keys, ids=ids)"


@dataclass(frozen=True)
class IVFParts:
    """A FAISS index taken apart: its IVF, the linear transforms before it, its map of ids or None."""

    index: Any
    ivf: Any
    transforms: list[Any]
    id_map: Any  # FAISS's own vector, so that keys added later have their ids

    def __reduce__(self) -> Any:
        """For pickle: the index, taken apart again; the parts are inside of it."""
        return ivf_parts, (self.index,)

    @property
    def inner_product(self) -> bool:
        """Whether larger scores are better; otherwise they are squared L2 distances."""
        return bool(self.ivf.metric_type == faiss.METRIC_INNER_PRODUCT)

    @property
    def exact(self) -> bool:
        """Whether it holds the keys as they are, in float32."""
        return isinstance(self.ivf, faiss.IndexIVFFlat) and not self.transforms

    @property
    def sizes(self) -> Ids:
        """Keys in each cell now, [c]."""
        lists = self.ivf.invlists
        return np.array([lists.list_size(j) for j in range(self.ivf.nlist)], np.int64)

    @cached_property
    def centroids(self) -> Floats:
        """What the quantizer holds, [c, inner dimension]."""
        centroids: Floats = self.ivf.quantizer.reconstruct_n(0, self.ivf.nlist)
        return centroids

    @cached_property
    def squares(self) -> Floats:
        """||centroid||^2, [c]."""
        squares: Floats = np.einsum("cd,cd->c", self.centroids, self.centroids)
        return squares

    @property
    def identity(self) -> dict[str, Any]:
        """By what the index is known again, however many keys were added to it."""
        return {
            "d": int(self.index.d),
            "c": int(self.ivf.nlist),
            "type": type(self.ivf).__name__,
            "metric": "inner product" if self.inner_product else "L2",
            "quantizer": self.fingerprint,
        }

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the centroids and the transforms: what decides the cell of a key, whoever adds it."""
        digest = hashlib.sha256(np.ascontiguousarray(self.centroids, np.float32).tobytes())
        for transform in self.transforms:
            for part in (transform.A, transform.b):
                digest.update(faiss.vector_to_array(part).tobytes())
        return digest.hexdigest()

    def transformed(self, x: Floats) -> Floats:
        """Vectors [m, d] as the IVF sees them, [m, inner dimension]."""
        for transform in self.transforms:
            x = transform.apply(x)
        return x

    @property
    def numbered(self) -> bool:
        """Whether the ids in the inverted lists are the numbers of the keys in the order of adding."""
        n = int(self.ivf.ntotal)
        if self.id_map is None and n not in self._numbered:
            self._numbered[n] = _numbered(_entries(self.ivf).ids)
        return self.id_map is not None or self._numbered[n]

    @cached_property
    def _numbered(self) -> dict[int, bool]:  # by how many keys there were
        return {}

    def external(self, ids: Ids) -> Ids:
        """The ids that the index answers with, for those in its inverted lists; -1 stays."""
        if self.id_map is None:
            return ids
        names: Ids = faiss.rev_swig_ptr(self.id_map.data(), self.id_map.size())
        return np.where(ids < 0, -1, names[np.maximum(ids, 0)])


@dataclass(frozen=True)
class Placement:
    """Where keys are in an index: the cell of each, [n], and the id that it answers with, [n].

    `ids` is None where FAISS was given ids of its own and nobody says which key has which.
    """

    cells: NDArray[np.int32]
    ids: Ids | None


@dataclass(frozen=True)
class _Entries:
    """Every entry of the inverted lists, list by list: its cell, its place there, the id stored with it."""

    cells: NDArray[np.int32]
    places: Ids
    ids: Ids


def ivf_parts(index: Any) -> IVFParts:
    """The parts of a `faiss.IndexIVF`, alone or in `IndexIDMap`, `IndexIDMap2` and `IndexPreTransform`."""
    transforms: list[Any] = []
    id_map: Any = None
    inner = index
    if not isinstance(index, faiss.Index):
        raise refused("index", index, "a faiss.IndexIVF, or the path of a file that holds one", VectorError)
    while True:
        inner = faiss.downcast_index(inner)
        if isinstance(inner, faiss.IndexIVF):
            break
        if isinstance(inner, faiss.IndexPreTransform):
            for i in range(inner.chain.size()):
                transform = faiss.downcast_VectorTransform(inner.chain.at(i))
                if not isinstance(transform, faiss.LinearTransform):
                    raise VectorError(f"the index applies a {type(transform).__name__}, which is not linear")
                transforms.append(transform)
        elif isinstance(inner, (faiss.IndexIDMap, faiss.IndexIDMap2)):
            id_map = inner.id_map
        else:
            raise VectorError(f"a {type(inner).__name__} has no cells; an IndexIVF is needed")
        inner = inner.index
    if inner.metric_type not in (faiss.METRIC_INNER_PRODUCT, faiss.METRIC_L2):
        raise VectorError(f"the index has metric {inner.metric_type}: inner product or L2 is needed")
    if not index.is_trained:
        raise VectorError("the index is not trained: it has no cells yet")
    return IVFParts(index, inner, transforms, id_map)


def from_faiss(index: Any, keys: Any, *, ids: Any = None) -> Cells:
    """The cells of an existing FAISS IVF index that holds these keys, and nothing else.

    Behind a transform the index's centroids live in another space; then the means of the keys stand for them.

    Args:
        index: a `faiss.IndexIVF`, also inside `IndexIDMap`, `IndexIDMap2` or `IndexPreTransform`.
        keys: the vectors [n, d] in the order in which they were added, an array or a file.
        ids: [n], the ids of the keys in the index, if they are in another order.
    """
    parts, keys = ivf_parts(index), open_vectors(keys, "keys")
    if index.ntotal != keys.n or index.d != keys.d:
        raise VectorError(
            f"the index holds {index.ntotal} keys of dimension {index.d}, but {keys.n} of dimension "
            f"{keys.d} were given"
        )
    assignment = place_keys(parts, keys, ids).cells
    if not parts.transforms:
        return Cells(assignment, parts.centroids, parts.fingerprint)
    return Cells(assignment, cell_means(keys, assignment, parts.ivf.nlist), parts.fingerprint)


def place_keys(parts: IVFParts, keys: Vectors, ids: Any = None) -> Placement:
    """Where these keys are in an index, which may hold others that were added after them.

    With `ids` [n] each key has its id. Otherwise keys are in the order of adding, and an entry's row is its
    number: of an IndexIDMap always, of an IVF if it numbered its keys itself. Where an IVF was filled with
    `add_with_ids`, keys go to the cells that the index's own quantizer gives them, as FAISS did it.
    """
    if keys.d != parts.index.d:
        raise VectorError(f"the index has dimension {parts.index.d}, the keys have {keys.d}")
    _check_norms(parts, keys)
    entries = _entries(parts.ivf)
    if ids is not None:
        rows = _rows_by_id(parts.external(entries.ids), ids, keys.n)
    elif parts.id_map is not None or _numbered(entries.ids):
        if len(entries.ids) and not (entries.ids.min() >= 0 and entries.ids.max() < len(entries.ids)):
            raise VectorError(
                "the index's map of ids does not fit its inverted lists, as after remove_ids: build it again"
            )
        rows = np.where(entries.ids < keys.n, entries.ids, -1)
    else:
        return _place_by_quantizer(parts, keys, entries)
    entry = np.full(keys.n, -1, np.int64)
    entry[rows[rows >= 0]] = np.flatnonzero(rows >= 0)
    if (entry < 0).any():
        raise VectorError(
            f"the index does not hold key {int((entry < 0).argmax())}: give the keys {HOW_TO_NAME}"
        )
    if not _same_vectors(parts, keys, np.arange(keys.n), entries, entry):
        raise VectorError(
            f"the keys are not those of the index, or in another order: give them {HOW_TO_NAME}"
        )
    return Placement(entries.cells[entry], parts.external(entries.ids[entry]))


def _place_by_quantizer(parts: IVFParts, keys: Vectors, entries: _Entries) -> Placement:
    """Each key in the cell that the quantizer gives it; entries of a list are in the order of adding."""
    cells = np.empty(keys.n, np.int32)
    for start, block in keys.blocks(ASSIGNED_AT_ONCE):
        inner = parts.transformed(np.ascontiguousarray(block))
        cells[start : start + len(block)] = parts.ivf.quantizer.assign(inner, 1)[:, 0]
    counts, sizes = np.bincount(cells, minlength=parts.ivf.nlist), parts.sizes
    if np.maximum(counts - sizes, 0).sum() > 2 + UNDECIDED * keys.n:
        raise VectorError("the keys are not those of the index: its quantizer puts them into other cells")
    order = np.argsort(cells, kind="stable")
    place = np.empty(keys.n, np.int64)
    place[order] = np.arange(keys.n) - np.repeat(np.cumsum(counts) - counts, counts)
    entry = (np.cumsum(sizes) - sizes)[cells] + place
    there = np.flatnonzero(place < sizes[cells])  # all but what rounding has put elsewhere
    if not _same_vectors(parts, keys, there, entries, entry):
        return Placement(cells, None)
    ids = np.full(keys.n, -1, np.int64)
    ids[there] = entries.ids[entry[there]]
    return Placement(cells, parts.external(ids))


def _entries(ivf: Any) -> _Entries:
    lists, ids, sizes = ivf.invlists, [], []
    for j in range(ivf.nlist):
        sizes.append(lists.list_size(j))
        if sizes[-1]:
            pointer = lists.get_ids(j)
            ids.append(faiss.rev_swig_ptr(pointer, sizes[-1]).copy())
            lists.release_ids(j, pointer)
    counts = np.array(sizes, np.int64)
    places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    cells = np.repeat(np.arange(ivf.nlist, dtype=np.int32), counts)
    return _Entries(cells, places, np.concatenate(ids) if ids else np.empty(0, np.int64))


def _numbered(ids: Ids) -> bool:
    """Whether these are the numbers 0..n-1, in any order."""
    if not len(ids) or ids.min() != 0 or ids.max() != len(ids) - 1:
        return False
    return bool((np.bincount(ids, minlength=len(ids)) == 1).all())


def _rows_by_id(names: Ids, ids: Any, n: int) -> Ids:
    """The row of each entry by its id; -1 for those that are not in `ids`."""
    known = check_array("ids", ids, error=VectorError)
    if known.shape != (n,) or known.dtype.kind not in "iu":
        raise VectorError(
            f"ids of type {known.dtype} and shape {list(known.shape)}: expected {n} whole numbers"
        )
    known = known.astype(np.int64)
    order = np.argsort(known, kind="stable")
    if (np.diff(known[order]) == 0).any():
        raise VectorError("ids: two keys have the same id")
    at = np.minimum(np.searchsorted(known[order], names), n - 1)
    return np.where(known[order][at] == names, order[at], -1)


def _same_vectors(parts: IVFParts, keys: Vectors, rows: Ids, entries: _Entries, entry: Ids) -> bool:
    """Whether some of these rows of `keys` are what the index holds at their entries.

    Float32 keys must be equal. A code is only near its key, but a key of another entry is as far as any.
    """
    chosen = np.sort(np.random.default_rng(0).choice(rows, min(SAMPLE, len(rows)), replace=False))
    own = parts.transformed(np.ascontiguousarray(keys.take(chosen)))
    stored = np.empty_like(own)
    if getattr(parts.ivf, "fine_quantizer", parts) is None:  # as FAISS leaves it after reading a file,
        if not hasattr(parts.ivf, "pq"):
            return True
        parts.ivf.fine_quantizer = parts.ivf.pq  # ... and then crashes when it decodes
    try:
        for i, at in enumerate(entry[chosen]):
            place = int(entries.cells[at]), int(entries.places[at])
            parts.ivf.reconstruct_from_offset(*place, faiss.swig_ptr(stored[i : i + 1]))
    except RuntimeError:  # storage that cannot be read back
        return True
    apart = row_norms(stored - own)
    if isinstance(parts.ivf, faiss.IndexIVFFlat):
        return bool((apart <= EXACT * np.maximum(row_norms(own), 1e-30)).all())
    from_all = np.linalg.norm(stored[:, None] - own[None], axis=2)
    return bool((apart <= 1.1 * from_all.min(axis=1) + 1e-6).mean() >= QUANTISED)


def _check_norms(parts: IVFParts, keys: Vectors) -> None:
    """VectorError if the nearest keys of an L2 index are not those with the largest inner products."""
    if parts.inner_product:
        return
    low, high = np.inf, 0.0
    for _, block in keys.blocks():
        norms = row_norms(block)
        low, high = min(low, float(norms.min())), max(high, float(norms.max()))
    if high - low > SAME_NORM * high:
        raise VectorError(
            "the index compares by L2 distance and the keys have different norms, so its nearest keys are "
            "not those of the largest inner product, which amips finds: normalise the keys, or use "
            "METRIC_INNER_PRODUCT"
        )
