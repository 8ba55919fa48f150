"""Threads and forks: a wrong number leaves nothing behind, and a forked child can search."""

import os
import threading
import time

import numpy as np
import pytest

import amips
from amips.blas import faiss, threads

STORAGES = ("flat", "sq8", "pq", "lean")


@pytest.fixture(scope="module")
def world():
    rng = np.random.default_rng(0)
    keys, x = (rng.standard_normal((m, 32)).astype(np.float32) for m in (4000, 2000))
    task = amips.label(keys, x, cells=32, query_aware=0)
    built = {}
    for storage in STORAGES:
        options = {"dimensions": 16} if storage == "lean" else {}
        built[storage] = amips.build(task, None, storage=storage, **options)
    return built, x[:400]


def exit_code(child, seconds=30.0):
    """Of a forked process; None if it had to be killed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return None


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("count", [None, 2])
def test_a_forked_child_searches(world, storage, count):
    index, x = world[0][storage], world[1]
    expected = index.search(x, probes=8, threads=2)[1]  # OpenMP has its threads now
    child = os.fork()
    if child == 0:
        code = 1
        try:
            answers = [index.search(x, probes=8, threads=count)[1]]
            one = threading.Thread(target=lambda: answers.append(index.search(x, probes=8, threads=count)[1]))
            one.start()
            one.join()
            code = 0 if len(answers) == 2 and all((a == expected).all() for a in answers) else 2
        finally:
            os._exit(code)
    assert exit_code(child) == 0
    np.testing.assert_array_equal(index.search(x, probes=8)[1], expected)  # and the parent still does


def test_a_fork_within_a_call_that_limits_threads(world):
    index, x = world[0]["lean"], world[1]
    expected = index.search(x, probes=8)[1]
    with threads(2):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = 0 if (index.search(x, probes=8, threads=2)[1] == expected).all() else 2
            finally:
                os._exit(code)
        assert exit_code(child) == 0


@pytest.mark.parametrize("count", [0, -1, 2.5, "2", True, np.float64(1)])
def test_a_wrong_number_of_threads_leaves_nothing_behind(world, count):
    index, x = world[0]["flat"], world[1]
    before, expected = faiss.omp_get_max_threads(), index.search(x, probes=2)[1]
    with pytest.raises(amips.AmipsError, match=r"^threads=.*: expected a whole number, at least 1$"):
        index.search(x, probes=2, threads=count)
    assert faiss.omp_get_max_threads() == before
    np.testing.assert_array_equal(index.search(x, probes=2, threads=1)[1], expected)


@pytest.mark.parametrize("count", [np.int64(2), np.uint8(1), 10**6, 10**18])
def test_any_whole_number_of_threads(world, count):
    index, x = world[0]["lean"], world[1]
    before = faiss.omp_get_max_threads()
    np.testing.assert_array_equal(index.search(x, probes=2, threads=count)[1], index.search(x, probes=2)[1])
    assert faiss.omp_get_max_threads() == before


def test_no_more_threads_than_processors():
    with threads(10**6):
        assert faiss.omp_get_max_threads() <= (os.cpu_count() or 1)
