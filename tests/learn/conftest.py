"""The tasks that training is tested on: as in the paper, so that every kind of network can learn."""

import pytest

import amips


@pytest.fixture(scope="session")
def task(world, tmp_path_factory):
    """8 plain cells with their targets, 500 training queries with a noisy copy each, 100 for val and test."""
    out = tmp_path_factory.mktemp("task") / "task"
    options = {"query_aware": 0.0, "copies": 1, "cell_targets": True}
    return amips.label(*world, cells=8, val=100, test=100, k=10, out=out, **options)


@pytest.fixture(scope="session")
def task1(world, tmp_path_factory):
    """The same without a partition: c = 1."""
    out = tmp_path_factory.mktemp("task1") / "task"
    return amips.label(*world, cells=1, copies=1, val=100, test=100, k=10, out=out)
