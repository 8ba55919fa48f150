"""faiss, imported so that its matrix products run at the speed of the machine.

Every room takes faiss from here, for two reasons, both measured:

- The OpenBLAS inside the faiss wheel is old. On a processor it does not know it falls back to its
  slowest kernel (5x slower here). numpy carries a newer one; the name of the kernel that it chose is
  handed to faiss's while it loads.
- `distance_compute_blas_threshold` is 128000 by default, which keeps batches below that on a path
  that is up to 9x slower than the matrix product.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import numpy as np  # before threadpoolctl looks for numpy's OpenBLAS
from threadpoolctl import ThreadpoolController, threadpool_info

from amips.errors import AmipsError

__all__ = ["faiss", "parallel", "threads"]

Item = TypeVar("Item")

# Kernel names of newer releases that the one in faiss does not know, and what is nearest to them there.
_OLDER_NAME = {"SapphireRapids": "SkylakeX", "Cooperlake": "SkylakeX"}


def _kernel_of_numpy() -> str | None:
    np.ones((2, 2), np.float32) @ np.ones((2, 2), np.float32)
    for library in threadpool_info():
        if library["internal_api"] == "openblas":
            name = str(library.get("architecture"))
            return _OLDER_NAME.get(name, name)
    return None


def _load() -> None:
    name = None
    if "faiss" not in sys.modules and "OPENBLAS_CORETYPE" not in os.environ:
        name = _kernel_of_numpy()
    if name is not None:
        os.environ["OPENBLAS_CORETYPE"] = name
    try:
        import faiss  # noqa: F401  (loads the library while the variable is set)
    finally:
        if name is not None:
            del os.environ["OPENBLAS_CORETYPE"]


_load()
import faiss as _faiss  # noqa: E402

faiss: Any = _faiss  # its type stubs lag behind what it has
faiss.cvar.distance_compute_blas_threshold = 20


_pools = ThreadpoolController()  # numpy's and faiss's; once, because looking for them takes most of a ms
_limit_lock = threading.Lock()
_limits: list[int] = []  # of the calls under way
_before: dict[str, int] = {}  # the threads of BLAS libraries that have one limit for the process, before them


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Limit numpy's BLAS and faiss together to `count` threads; None leaves them as they are.

    OpenMP's limit, and so faiss's, belongs to the calling thread, but numpy's BLAS has one for the whole
    process. So of several calls at a time the last to end restores what was before the first: if each
    restored what it had found, one could leave the limit of another behind for good.
    """
    if count is None:
        yield
        return
    if count < 1:
        raise AmipsError(f"threads={count}: expected at least 1")
    with _limit_lock:
        if not _limits:
            shared = [pool for pool in _pools.info() if pool.get("threading_layer") == "pthreads"]
            _before.update({pool["prefix"]: pool["num_threads"] for pool in shared})
        _limits.append(count)
        faiss_before = faiss.omp_get_max_threads()
        limited = ExitStack()
        limited.enter_context(_pools.limit(limits=count))
        faiss.omp_set_num_threads(count)
    try:
        yield
    finally:
        with _limit_lock:
            limited.close()
            faiss.omp_set_num_threads(faiss_before)
            _limits.remove(count)
            _pools.limit(limits=dict.fromkeys(_before, min(_limits)) if _limits else _before)
            with _pools.limit():  # on leaving, threadpoolctl lets other threads set limits again
                pass


def parallel(work: Callable[[Item], None], items: Iterable[Item], at_most: int) -> None:
    """Run `work` on each item, in as many Python threads as BLAS has, each with a BLAS of one thread.

    For work that alternates matrix products with element-wise numpy, which alone uses one core: both
    then run on all cores (numpy releases the interpreter lock in both). `at_most` bounds the number of
    threads where each needs memory of its own.
    """
    count = max((pool["num_threads"] for pool in _pools.info() if pool["user_api"] == "blas"), default=1)
    if count == 1:
        for item in items:
            work(item)
        return
    with threads(1), ThreadPoolExecutor(min(count, at_most)) as pool:
        for _ in pool.map(work, items):
            pass
