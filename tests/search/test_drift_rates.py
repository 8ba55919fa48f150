"""How often traffic is called drift: as rarely as stated if it is like the log, mostly if it is not."""

from dataclasses import replace

import numpy as np
import pytest

import amips
from amips.search import FALSE_ALARMS, QueryLog
from amips.search.drift import Reference
from helpers import make_world, unit

N, D = 1500, 16
LOOKS, HELD_OUT, RECENT = 60, 200, 200
MOST = 4  # of 60 looks: with a rate of 1 %, more come once in 3,000 times


@pytest.fixture(scope="module")
def world():
    return make_world(N, 12_000, D, seed=3)


@pytest.fixture(scope="module")
def snapshot(world):
    keys, queries = world
    return amips.build(amips.label(keys, queries[:2000], cells=24), storage="flat", recall=0.9).snapshot


def halves(queries):
    return np.asarray(queries, np.float16)


def reference(snapshot, train, val):
    """A snapshot whose log has these queries."""
    rounds = [np.zeros(len(part), np.int16) for part in (train, val)]
    log = QueryLog(halves(train), halves(val), *rounds, np.zeros((len(train), 10), np.int32))
    return Reference(replace(snapshot, origin=replace(snapshot.origin, log=log)))


def popular(rng, pool, m):
    """Queries as they are asked: a few very often, most of them once."""
    weight = 1 / (1 + np.arange(len(pool)))
    return pool[rng.choice(len(pool), m, p=weight / weight.sum())]


def once(queries):
    return np.unique(queries, axis=0)


@pytest.mark.parametrize("split", ["each once", "each once, traffic repeats", "by time"])
def test_false_alarms_are_as_rare_as_stated(snapshot, world, split):
    alarms, rng = 0, np.random.default_rng(0)
    for _ in range(LOOKS):
        pool = world[1][2000:][rng.permutation(10_000)[:3000]]
        if split == "each once":
            rows = pool[: 2 * HELD_OUT + RECENT]
            train, val, recent = np.split(rows, [HELD_OUT, 2 * HELD_OUT])
        elif split == "by time":
            rows = popular(rng, pool, 3 * HELD_OUT + RECENT)
            train, val, recent = np.split(rows, [2 * HELD_OUT, 3 * HELD_OUT])
        else:
            known = rng.permutation(once(popular(rng, pool, 2000)))
            val, train = known[:HELD_OUT], known[HELD_OUT:]
            recent = popular(rng, pool, 3 * RECENT)
        alarms += reference(snapshot, train, val).compare(recent).drifted
    assert alarms <= MOST
    assert FALSE_ALARMS == 0.01


@pytest.mark.parametrize("repeats", [False, True])
def test_a_moderate_shift_is_seen(snapshot, world, repeats):
    seen, rng = 0, np.random.default_rng(1)
    for _ in range(20):
        pool = world[1][2000:][rng.permutation(10_000)[:3000]]
        shift = 0.25 * rng.standard_normal(D)
        ask = popular if repeats else (lambda rng, pool, m: pool[rng.choice(len(pool), m, replace=False)])
        train, val = np.split(ask(rng, pool, 3 * HELD_OUT), [2 * HELD_OUT])
        recent = unit(ask(rng, pool, 3 * RECENT) + shift)
        seen += reference(snapshot, train, val).compare(recent).drifted
    assert seen >= 18
