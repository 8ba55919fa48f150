"""Reading the files of an index, which may be damaged or made to do harm."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.errors import BundleError
from amips.vectors import Floats


def read_array(path: Path, shape: tuple[int, ...], kinds: str, mmap: bool = False) -> NDArray[Any]:
    """An .npy of a bundle, which must have this shape and one of these kinds of type."""
    array = _read(path, mmap)
    if array.shape != shape or array.dtype.kind not in kinds:
        raise BundleError(f"{path} holds {array.dtype} {list(array.shape)}, expected shape {list(shape)}")
    return array


def read_lean(path: Path, index: Any) -> dict[str, Floats]:
    """The projection [r, d] and centroids [c, d] of a lean index."""
    try:
        # Opened here: numpy leaves a file that it cannot read open.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in ("projection", "centroids")}
    except Exception as problem:  # a damaged file makes numpy raise nearly anything
        raise BundleError(f"{path} is damaged: {(str(problem) or repr(problem)).splitlines()[0]}") from None
    a, centroids = arrays["projection"], arrays["centroids"]
    if a.ndim != 2 or len(a) != index.d or centroids.shape != (index.nlist, a.shape[1]):
        shapes = f"{list(a.shape)} and {list(centroids.shape)}"
        raise BundleError(f"{path} holds {shapes}, which do not fit the index")
    if a.dtype != np.float32 or centroids.dtype != np.float32:
        raise BundleError(f"{path} holds {a.dtype} and {centroids.dtype}, expected float32")
    return arrays


def read_second(path: Path, index: Any) -> NDArray[np.int32]:
    """The second cells [n], which must account for the entries that are not a key's first."""
    second: NDArray[np.int32] = _read(path)
    fits = second.dtype == np.int32 and second.ndim == 1 and len(second) + (second >= 0).sum() == index.ntotal
    if not fits or second.min(initial=-1) < -1 or second.max(initial=-1) >= index.nlist:
        raise BundleError(f"{path} does not fit the index")
    return second


def check_entries(
    path: Path, cells: list[NDArray[np.int64]], second: NDArray[np.int32] | None, n: int
) -> None:
    """BundleError unless every key is in one cell, and in its second if it has one: FAISS checks nothing."""
    first, other = np.zeros(n, np.int64), np.zeros(n, np.int64)
    for cell, ids in enumerate(cells):
        if len(ids) and (ids.min() < 0 or ids.max() >= n):
            raise BundleError(f"{path} is damaged: cell {cell} names a key that is not there")
        again = np.zeros(len(ids), np.bool_) if second is None else second[ids] == cell
        np.add.at(first, ids[~again], 1)
        np.add.at(other, ids[again], 1)
    expected = np.zeros(n, np.int64) if second is None else (second >= 0).astype(np.int64)
    if (first != 1).any() or (other != expected).any():
        raise BundleError(f"{path} is damaged: a key is in the wrong number of cells")


def _read(path: Path, mmap: bool = False) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r" if mmap else None, allow_pickle=False)
    except Exception as problem:  # a damaged header makes numpy raise nearly anything
        raise BundleError(f"{path} is damaged: {str(problem).splitlines()[0]}") from None
    return array
