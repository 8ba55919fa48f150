"""Adaptation of an index with a memory of the log: the memory goes on answering what comes again."""

from dataclasses import replace

import numpy as np
import pytest

import amips
from amips.builder import Builder
from amips.design import Design
from amips.search import MemorySearcher, plain_index, recalls
from amips.search.adapting import adaptation
from amips.search.drift import Drift
from helpers import generate, unit

N, D = 4000, 24


@pytest.fixture(scope="module")
def world():
    """Keys, and a log of which most asks one of 60 queries again, with small changes."""
    keys, queries = generate(N, 2460, D, seed=3)
    rng = np.random.default_rng(4)
    again = rng.random(2400) < 0.7
    log = np.where(again[:, None], queries[rng.integers(60, size=2400)], queries[60:])
    return keys, unit(log + 0.02 * rng.standard_normal(log.shape))


def test_the_memory_stays_in_front(world):
    keys, log = world
    task = amips.label(keys, log[:1800], split="time", k=40, cells=1, val=300, test=10)
    design = Design(64, recipe=None, storage="flat", spill_fraction=0.0)
    snapshot = Builder(task).index(replace(design, memory=40))
    assert isinstance(snapshot, MemorySearcher)
    recent, x = log[1800:2100], log[2100:]
    result = adaptation(snapshot, recent, Drift(len(recent), 300, []))
    served = result.on(snapshot)
    assert isinstance(served, MemorySearcher)
    assert any(point.recognised for point in served.points)
    alone = plain_index(served)
    assert served.cost(x).flops.mean() < 0.8 * alone.cost(x).flops.mean()
    top = np.argsort(-(x @ keys.T), axis=1, kind="stable")[:, :10]
    assert recalls(served.search(x)[1], top, 10).mean() >= 0.88
