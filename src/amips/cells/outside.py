"""The cells of a FAISS index that was built elsewhere."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.blas import faiss
from amips.cells.clustering import Cells
from amips.errors import VectorError
from amips.vectors import Vectors


def faiss_ivf_inside(index: Any) -> tuple[Any, list[Any], Any]:
    """The IVF of a FAISS index, the linear transforms before it, and its map of ids, if it has one."""
    transforms: list[Any] = []
    id_map: Any = None
    while True:
        index = faiss.downcast_index(index)
        if isinstance(index, faiss.IndexIVF):
            return index, transforms, id_map
        if isinstance(index, faiss.IndexPreTransform):
            for i in range(index.chain.size()):
                transform = faiss.downcast_VectorTransform(index.chain.at(i))
                if not isinstance(transform, faiss.LinearTransform):
                    raise VectorError(f"the index applies a {type(transform).__name__}, which is not linear")
                transforms.append(transform)
        elif isinstance(index, (faiss.IndexIDMap, faiss.IndexIDMap2)):
            id_map = index.id_map
        else:
            raise VectorError(f"a {type(index).__name__} has no cells; an IndexIVF is needed")
        index = index.index


def from_faiss(index: Any, keys: Vectors) -> Cells:
    """The cells of an existing FAISS IVF index that holds these keys.

    Keys must be numbered as they were added, 0..n-1 (an IndexIDMap around the IVF is fine). Behind a
    transform the index's centroids live in another space; then the means of the keys stand in for them.
    """
    ivf, transforms, _ = faiss_ivf_inside(index)
    assignment = cells_of_faiss(ivf)
    if len(assignment) != keys.n or index.d != keys.d:
        raise VectorError(
            f"the index holds {len(assignment)} keys of dimension {index.d}, but {keys.n} of dimension "
            f"{keys.d} were given"
        )
    if not transforms:
        return Cells(assignment, ivf.quantizer.reconstruct_n(0, ivf.nlist))
    sums = np.zeros((ivf.nlist, keys.d))
    for start, block in keys.blocks():
        np.add.at(sums, assignment[start : start + len(block)], block)
    sizes = np.bincount(assignment, minlength=ivf.nlist)
    return Cells(assignment, (sums / np.maximum(sizes, 1)[:, None]).astype(np.float32))


def cells_of_faiss(ivf: Any) -> NDArray[np.int32]:
    """The cell of each key of a `faiss.IndexIVF`."""
    assignment = np.full(ivf.ntotal, -1, np.int32)
    for j in range(ivf.nlist):
        size = ivf.invlists.list_size(j)
        if size == 0:
            continue
        ids = faiss.rev_swig_ptr(ivf.invlists.get_ids(j), size)
        if ids.min() < 0 or ids.max() >= ivf.ntotal:
            raise VectorError("the index numbers its keys otherwise than 0..n-1 in the order of adding")
        assignment[ids] = j
    if (assignment < 0).any():
        raise VectorError("the index numbers its keys otherwise than 0..n-1 in the order of adding")
    return assignment
