"""Learned routing for a FAISS index that was built elsewhere. The index itself is not changed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from amips.blas import faiss
from amips.blas import threads as limit_threads
from amips.cells import cells_of_faiss, faiss_ivf_inside, fingerprint_of
from amips.errors import AmipsError
from amips.nets import Model, load_model
from amips.routers import best_cells, limit_probes
from amips.search import inputs
from amips.search.inputs import checked_k, checked_probes, checked_queries
from amips.vectors import Floats

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class WrappedIndex:
    """A FAISS IVF index whose cells a model chooses; `search` answers in the index's own metric and ids."""

    index: Any
    ivf: Any
    transforms: list[Any]
    id_map: Any  # FAISS's own vector, so that keys added later have their ids
    model: Model
    centroids: Floats
    ntotal: int  # when it was wrapped: a router knows the cells of that moment

    @property
    def d(self) -> int:
        """The dimension of queries."""
        return int(self.index.d)

    def __repr__(self) -> str:
        kind = type(self.ivf).__name__
        return (
            f"<WrappedIndex: {kind} of {self.ivf.ntotal:,} keys, d = {self.d}, {self.ivf.nlist:,} cells, "
            f"routed by {self.model.architecture.kind}>"
        )

    def search(
        self,
        x: Any,
        k: int = 10,
        probes: "int | NDArray[np.integer[Any]] | None" = None,
        *,
        on_bad: Literal["error", "skip"] = "error",
        threads: int | None = None,
    ) -> tuple[Floats, Ids]:
        """As `faiss.Index.search`, in cells chosen by the model.

        `probes` is a number, or one for each query; by default the index's nprobe. `on_bad="skip"` gives
        queries that are not finite no results instead of an error.
        """
        x, bad = checked_queries(x, self.d, on_bad)
        k = checked_k(k)
        counts = checked_probes(self.ivf.nprobe if probes is None else probes, len(x), self.ivf.nlist)
        if self.model.c > 1 and self.ivf.ntotal != self.ntotal:
            raise AmipsError("the index has changed since it was wrapped; wrap it again")
        most = int(counts.max(initial=1))
        scores, ids = np.empty((len(x), k), np.float32), np.empty((len(x), k), np.int64)
        parameters = faiss.SearchParametersIVF(nprobe=most)
        each = 8 * most * self.ivf.d + 24 * self.ivf.nlist + 8 * self.d + 4 * self.model.architecture.floats
        step = max(1, inputs.BATCH_BYTES // each)
        with limit_threads(threads):
            for low in range(0, len(x), step):
                block = x[low : low + step]
                inner = self._transformed(block)
                cells = limit_probes(self._cells(block, most), counts[low : low + step])
                base = self._coarse(inner, cells)
                out = (scores[low : low + step], ids[low : low + step])
                arguments = [faiss.swig_ptr(a) for a in (cells, base, *out)]
                self.ivf.search_preassigned_c(
                    len(block), faiss.swig_ptr(inner), k, *arguments, False, parameters
                )
        if self.id_map is not None:
            names = faiss.vector_to_array(self.id_map)
            ids = np.where(ids < 0, -1, names[np.maximum(ids, 0)])
        worst = -np.inf if self.ivf.metric_type == faiss.METRIC_INNER_PRODUCT else np.inf
        scores[bad], ids[bad] = worst, -1
        return scores, ids

    def _transformed(self, x: Floats) -> Floats:
        for transform in self.transforms:
            x = transform.apply(x)
        return x

    def _cells(self, x: Floats, p: int) -> Ids:
        if self.model.c > 1:
            return best_cells(self.model.scores(x), p)
        mapped = self._transformed(np.ascontiguousarray(self.model.keys(x)[:, 0]))
        cells: Ids = self.ivf.quantizer.search(mapped, p)[1]
        return cells

    def _coarse(self, inner: Floats, cells: Ids) -> Floats:
        """What FAISS would have for the chosen cells: <x, centroid>, or the squared distance to it."""
        chosen = self.centroids[np.maximum(cells, 0)]
        if self.ivf.metric_type == faiss.METRIC_INNER_PRODUCT:
            return np.ascontiguousarray(np.matmul(chosen, inner[:, :, None])[:, :, 0])
        apart = chosen - inner[:, None, :]
        return np.ascontiguousarray(np.einsum("mpd,mpd->mp", apart, apart))


def wrap(index: Any, model: Model | str | Path) -> WrappedIndex:
    """Route an existing FAISS IVF index with a model.

    Args:
        index: a `faiss.IndexIVF`, also inside `IndexIDMap` or behind linear transforms
            (`IndexPreTransform`), or the path of a file that holds one.
        model: a mapper (trained with cells=1) works with any index; a router must have been trained on this
            index's own cells: `amips.label(..., cells=index)`.
    """
    if isinstance(index, (str, Path)):
        if not Path(index).is_file():
            raise AmipsError(f"{index} does not exist")
        try:
            index = faiss.read_index(str(index))
        except RuntimeError as problem:
            raise AmipsError(
                f"{index} is not a readable FAISS index: {str(problem).splitlines()[-1]}"
            ) from None
    model = load_model(model) if isinstance(model, (str, Path)) else model
    ivf, transforms, id_map = faiss_ivf_inside(index)
    if not index.is_trained:
        raise AmipsError("the index is not trained: it has no cells yet")
    if model.d != index.d:
        raise AmipsError(f"the model is for dimension {model.d}, the index for {index.d}")
    if model.c > 1:
        if model.c != ivf.nlist:
            raise AmipsError(f"the model scores {model.c} cells, the index has {ivf.nlist}")
        if model.about.get("cells") != fingerprint_of(cells_of_faiss(ivf)):
            raise AmipsError(
                "the model was trained on other cells than this index has; "
                "label with cells=index and train again"
            )
    centroids = ivf.quantizer.reconstruct_n(0, ivf.nlist)
    return WrappedIndex(index, ivf, transforms, id_map, model, centroids, ivf.ntotal)
