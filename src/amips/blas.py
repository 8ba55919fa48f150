"""faiss, imported so that its matrix products run at the speed of the machine.

Every room takes faiss from here, for two reasons, both measured:

- The OpenBLAS inside the faiss wheel is old. On a processor it does not know it falls back to its
  slowest kernel (5x slower here). numpy carries a newer one; the name of the kernel that it chose is
  handed to faiss's while it loads.
- `distance_compute_blas_threshold` is 128000 by default, which keeps batches below that on a path
  that is up to 9x slower than the matrix product.

One thing is for torch, which is imported later, if at all: virtual machines may state that the processor has
matrix tiles (AMX) and yet not let them be used; torch's products in bfloat16 then end the process. They are
left out unless the variable of oneDNN that says so is set otherwise.
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

from amips import resources
from amips.arguments import check_whole
from amips.resources import address_space_limit, check_address_space

__all__ = ["faiss", "one_thread", "parallel", "threads", "threads_allowed"]

Item = TypeVar("Item")

# Bytes of address space that faiss takes, and each thread of OpenBLAS and OpenMP: buffers, stack, heap.
LOADING, EACH_THREAD, MOST_THREADS = 320 << 20, 128 << 20, 16

# Kernel names of newer releases that the one in faiss does not know, and what is nearest to them there.
_OLDER_NAME = {"SapphireRapids": "SkylakeX", "Cooperlake": "SkylakeX"}


os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


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


def _reserve() -> None:
    """Let both OpenBLAS allocate their buffers now: later, if memory has run out, they end the process."""
    ones = np.ones((512, 64), np.float32)
    ones @ ones.T
    flat = faiss.IndexFlatIP(64)
    flat.add(ones)
    flat.search(ones, 1)


check_address_space(LOADING + EACH_THREAD * min(MOST_THREADS, resources.threads()))
_load()
import faiss as _faiss  # noqa: E402

faiss: Any = _faiss  # its type stubs lag behind what it has
faiss.cvar.distance_compute_blas_threshold = 20
if address_space_limit() is not None:
    _reserve()


_pools = ThreadpoolController()  # numpy's and faiss's; once, because looking for them takes most of a ms
_limit_lock = threading.Lock()
_limits: list[int] = []  # of the calls under way
_before: dict[str, int] = {}  # the threads of BLAS libraries that have one limit for the process, before them
_forked = False  # whether this process was forked from one that had this module


def _after_fork() -> None:
    """Make a forked child usable: of its parent's threads it has none.

    OpenMP waits for ever for the threads that it had before the fork, so faiss is kept to the one that calls.
    OpenBLAS starts its threads again by itself. A lock may have been held by a thread that is not here.
    """
    global _limit_lock, _forked
    _limit_lock, _forked = threading.Lock(), True
    _limits.clear()
    if _before:
        _pools.limit(limits=dict(_before))
        _before.clear()
    faiss.omp_set_num_threads(1)


os.register_at_fork(after_in_child=_after_fork)


def _checked_threads(count: Any) -> int:
    """How many threads were asked for, no more than there are processors: more would only take turns."""
    return min(check_whole("threads", count, 1), os.cpu_count() or 1)


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Limit numpy's BLAS and faiss together to `count` threads; None leaves them as they are.

    OpenMP's limit, and so faiss's, belongs to the calling thread, but numpy's BLAS has one for the whole
    process. So of several calls at a time the last to end restores what was before the first: if each
    restored what it had found, one could leave the limit of another behind for good.

    In a forked process faiss keeps to one thread.
    """
    if count is None:
        if _forked:
            faiss.omp_set_num_threads(1)  # a new thread begins with OpenMP's default, as before the fork
        yield
        return
    count = _checked_threads(count)
    faiss_before = faiss.omp_get_max_threads()
    with _limit_lock:
        if not _limits:
            shared = [pool for pool in _pools.info() if pool.get("threading_layer") == "pthreads"]
            _before.update({pool["prefix"]: pool["num_threads"] for pool in shared})
        _limits.append(count)
        limited = ExitStack()
        limited.enter_context(_pools.limit(limits=count))
    try:
        faiss.omp_set_num_threads(1 if _forked else count)
        yield
    finally:
        faiss.omp_set_num_threads(1 if _forked else faiss_before)
        with _limit_lock:
            limited.close()
            if count in _limits:  # not in a child that was forked within the call
                _limits.remove(count)
            _pools.limit(limits=dict.fromkeys(_before, min(_limits)) if _limits else _before)
            with _pools.limit():  # on leaving, threadpoolctl lets other threads set limits again
                pass


def threads_allowed() -> int:
    """How many threads code of its own may use: what `threads` allows the caller."""
    return int(faiss.omp_get_max_threads())


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep faiss to the calling thread, for what is too short to share.

    OpenMP's threads wait for each other by spinning: where a core is busy with something else, one query on
    two threads takes milliseconds instead of some hundred microseconds.
    """
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


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
