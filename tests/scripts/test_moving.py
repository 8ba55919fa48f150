"""Cells after routing, as `benchmarks/moving.py` makes them: a key goes where its queries are sent."""

import numpy as np
import pytest

import amips
from amips.cells import Cells
from amips.routers import CentroidRouter
from helpers import load_script, make_world

moving = load_script("moving")


@pytest.fixture(scope="module")
def task():
    keys, queries = make_world(3000, 6000, 16, seed=3)
    return amips.label(keys, queries, cells=60, query_aware=0, val=600, test=600)


def test_by_hand():
    """Two cells on a line; one key lies in the wrong one, and one that would gain less finds no room."""
    keys = np.array([[1.0, 0], [0.9, 0.1], [0.8, 0.3], [0, 1.0]], np.float32)
    cells = Cells(np.array([0, 1, 1, 1], np.int32), np.eye(2, dtype=np.float32))
    queries, top = np.array([[0.0, 1.0]], np.float32), np.array([[3]])
    router = lambda x: x @ np.eye(2, dtype=np.float32)  # noqa: E731
    cells_after = moving.moved(cells, keys, queries, top, router, strength=1.0, limit=1.0)
    np.testing.assert_array_equal(cells_after.assignment, [0, 0, 1, 1])
    cells_after = moving.moved(cells, keys, queries, top, router, strength=1.0, limit=1.5)
    np.testing.assert_array_equal(cells_after.assignment, [0, 0, 0, 1])


def test_queries_decide():
    """A key between two cells goes where the query is that wants it."""
    keys = np.array([[1.0, 0], [0.7, 0.71], [0, 1.0], [0, 1.0]], np.float32)
    cells = Cells(np.array([0, 1, 1, 1], np.int32), np.eye(2, dtype=np.float32))
    router = lambda x: x @ np.eye(2, dtype=np.float32)  # noqa: E731
    for query, expected in (([1.0, 0.0], 0), ([0.0, 1.0], 1)):
        cells_after = moving.moved(
            cells, keys, np.array([query], np.float32), np.array([[1]]), router, limit=2.0
        )
        assert cells_after.assignment[1] == expected


def test_the_limit_and_the_blocks(task, monkeypatch):
    queries, top = task.train.vectors, np.asarray(task.train.top_ids)[:, :10]
    router = CentroidRouter(task.cells.centroids[::-1].copy())  # sends every query elsewhere
    parts = (task.cells, task.key_vectors, queries, top, router.scores)
    cells_after = moving.moved(*parts, limit=1.2)
    assert (cells_after.assignment != task.cells.assignment).sum() > 100
    assert cells_after.sizes.sum() == task.n
    assert cells_after.sizes.max() <= max(int(1.2 * task.n / task.c), task.cells.sizes.max())
    monkeypatch.setattr(moving, "BLOCK_BYTES", 1 << 12)
    np.testing.assert_array_equal(moving.moved(*parts, limit=1.2).assignment, cells_after.assignment)


def test_refused(task):
    parts = (task.cells, task.key_vectors, task.val.queries, task.val.top_ids, None)
    for limit in (0.5, float("nan"), float("inf")):
        with pytest.raises(amips.VectorError, match="limit"):
            moving.moved(*parts, limit=limit)
