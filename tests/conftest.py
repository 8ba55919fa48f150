"""Fixtures that tests of every room share."""

import os

import pytest
from hypothesis import settings

import amips
from helpers import make_world

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"  # before haystack is imported: no test speaks to anybody

# How long an example takes depends on what else the machine does.
settings.register_profile("amips", deadline=None)
settings.load_profile("amips")


@pytest.fixture(autouse=True)
def nothing_in_the_background(request, monkeypatch):
    """An index that adapts to the queries of a test would answer the next one otherwise."""
    if not any(name in request.node.nodeid for name in ("drift", "refit", "watch")):
        monkeypatch.setattr("amips.search.watching.Looks.start", lambda self, look: None)


@pytest.fixture(scope="session")
def world():
    """600 keys and 700 queries, d = 16: what `task` and `task1` are made of."""
    return make_world(600, 700, 16, seed=0)


@pytest.fixture(scope="session")
def task(world, tmp_path_factory):
    """8 query-aware cells, 500 training queries, 100 for val, 100 for test."""
    out = tmp_path_factory.mktemp("task") / "task"
    return amips.label(*world, cells=8, val=100, test=100, k=10, out=out)


@pytest.fixture(scope="session")
def task1(world, tmp_path_factory):
    """The same without a partition: c = 1."""
    out = tmp_path_factory.mktemp("task1") / "task"
    return amips.label(*world, cells=1, val=100, test=100, k=10, out=out)
