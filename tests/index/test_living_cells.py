"""Cells to which keys were added, in any number of parts: as one store of all keys, and few parts."""

from functools import lru_cache

import numpy as np
import pytest

from amips import native
from amips.index import (
    FaissCellStore,
    FewSearch,
    KeyMask,
    Matches,
    kept_cells,
    living_cells,
    parts_of,
    with_added,
)
from amips.lean import learn_projection
from amips.vectors import open_vectors
from helpers import make_world

N, D, C = 500, 16, 12
ALL = 1100
KEYS, X = make_world(ALL, 30, D, seed=8)
CENTROIDS = np.random.default_rng(1).standard_normal((C, D)).astype(np.float32)
CELLS = np.random.default_rng(2).integers(0, C - 1, ALL).astype(np.int32)  # the last one is empty
SECOND = np.where(np.random.default_rng(3).random(ALL) < 0.3, (CELLS + 1) % (C - 1), -1).astype(np.int32)
STORAGES = ("flat", "sq8", "pq", "lean")


@lru_cache
def base_of(storage, spilled, n=N):
    projection = learn_projection(open_vectors(KEYS[:N]), open_vectors(X), 12) if storage == "lean" else None
    second = SECOND[:n] if spilled else None
    vectors = open_vectors(KEYS[:n])
    return FaissCellStore.build(vectors, CELLS[:n], CENTROIDS, storage, projection, second)


def grown(store, spilled, batches):
    low = store.n
    for size in batches:
        rows = slice(low, low + size)
        store = with_added(store, KEYS[rows], CELLS[rows], SECOND[rows] if spilled else None)
        low += size
    return store


@pytest.fixture(params=[(storage, spilled) for storage in STORAGES for spilled in (False, True)])
def stores(request, monkeypatch):
    """A store in four parts, and one of the same keys."""
    monkeypatch.setattr(living_cells, "FEW", 4)
    monkeypatch.setattr(living_cells, "FOLD", ALL)
    parts = grown(base_of(*request.param), request.param[1], [400, 90, 10, 3])
    assert [part.n for part in parts_of(parts)] == [500, 400, 90, 13]
    return parts, kept_cells(parts, None)


def test_as_one_store(stores):
    parts, one = stores
    n = one.n
    cells = np.random.default_rng(4).permuted(np.tile(np.arange(C), (len(X), 1)), axis=1)
    masks = [None, *(KeyMask(np.random.default_rng(5).random(n) < share) for share in (0.5, 0.01))]
    for k, probes in ((1, 1), (10, 3), (40, C)):
        for mask in masks:
            # Every candidate is scored again: what codes leave out would depend on the parts.
            a, b = parts.with_refine(n), one.with_refine(n)
            for rows in (slice(0, 1), slice(0, None)):
                few = a.scan(X[rows], cells[rows, :probes], k, mask)
                whole = b.scan(X[rows], cells[rows, :probes], k, mask)
                np.testing.assert_array_equal(few[1], whole[1])
                np.testing.assert_allclose(few[0], whole[0], atol=1e-5)
            few, whole = parts.every_key(X, k, mask), one.every_key(X, k, mask)
            np.testing.assert_array_equal(few[1], whole[1])
    ids = np.random.default_rng(6).integers(0, n, (7, 5))
    np.testing.assert_array_equal(parts.keys_at(ids), KEYS[ids])
    np.testing.assert_array_equal(one.keys_at(ids), KEYS[ids])
    for name in ("sizes", "assignment", "n", "twice"):
        np.testing.assert_array_equal(getattr(parts, name), getattr(one, name))
    if one.twice:
        np.testing.assert_array_equal(parts.second, one.second)
    assert parts.candidates(10) == one.candidates(10)


def test_some_of_the_keys_as_one_store(stores):
    parts, _ = stores
    kept = np.flatnonzero(np.random.default_rng(7).random(parts.n) < 0.4)
    some = kept_cells(parts, kept)
    np.testing.assert_array_equal(some.keys_at(np.arange(some.n)), KEYS[kept])
    np.testing.assert_array_equal(some.assignment, parts.assignment[kept])
    mask = np.zeros(parts.n, bool)
    mask[kept] = True
    cells = np.tile(np.arange(3), (len(X), 1))
    a = parts.with_refine(parts.n).scan(X, cells, 10, KeyMask(mask))
    b = some.with_refine(parts.n).scan(X, cells, 10)
    np.testing.assert_array_equal(a[1], np.where(b[1] < 0, -1, kept[b[1]]))


def test_saved_and_read_as_one(stores, tmp_path):
    parts, one = stores
    parts.save(tmp_path)
    read = FaissCellStore.load(tmp_path, one.storage, False, one.twice)
    np.testing.assert_array_equal(read.entries, one.entries)
    cells = np.tile(np.arange(4), (len(X), 1))
    np.testing.assert_array_equal(read.scan(X, cells, 10)[1], one.scan(X, cells, 10)[1])


@pytest.mark.skipif(native.compiled is None, reason="not compiled")
@pytest.mark.parametrize("spilled", [False, True])
@pytest.mark.parametrize("storage", ["flat", "lean"])
def test_few_queries_in_any_number_of_parts(storage, spilled, monkeypatch):
    monkeypatch.setattr(living_cells, "FEW", 1)
    monkeypatch.setattr(living_cells, "FOLD", ALL)
    store = grown(base_of(storage, spilled), spilled, [400, 90, 20, 4, 1])
    base, *added = parts_of(store)
    assert len(added) == 5
    several = FewSearch.of(base, (CENTROIDS, None), *added)
    one = FewSearch.of(kept_cells(store, None), (CENTROIDS, None))
    assert several.n == one.n == store.n
    allowed = np.random.default_rng(9).random(store.n) < 0.3
    for mask in (None, allowed):
        for probes, mass in ((1, 0.0), (4, 0.0), (0, 0.02)):
            effort = (None, 10, 2 * len(SECOND), probes, 0.3, mass, 20)
            a, b = several(X[:20], *effort, mask), one(X[:20], *effort, mask)
            np.testing.assert_array_equal(a[1], b[1])
            np.testing.assert_allclose(a[0], b[0], atol=1e-6)


def test_parts_are_few_and_keys_are_seldom_copied(monkeypatch):
    """Adding costs the logarithm of what was added, whatever the base holds."""
    copied = []

    def counting(parts, *, light):
        store = one_store(parts, light=light)
        copied.append(store.n)
        return store

    one_store = living_cells.one_store
    monkeypatch.setattr(living_cells, "one_store", counting)
    monkeypatch.setattr(living_cells, "FEW", 2)
    monkeypatch.setattr(living_cells, "FOLD", ALL)
    store = base = base_of("flat", False, 8)
    for i in range(8, 1000):
        store = grown(store, False, [1])
        parts = parts_of(store)
        assert parts[0] is base
        assert len(parts) <= 2 + np.log(i) / np.log(living_cells.LARGER)
    assert sum(copied) < 16 * 1000  # all that were added, each time: 500 * 1000
    copied.clear()
    monkeypatch.setattr(living_cells, "FOLD", 100)
    store = grown(base_of("flat", False), False, [100, 26])
    assert isinstance(store, FaissCellStore)
    assert copied == [100, 626]
    np.testing.assert_array_equal(store.keys_at(np.arange(626)), KEYS[:626])


def test_matches_brought_up_to_date_are_those_made_anew(monkeypatch):
    """While keys go and come, in parts that merge and fold."""
    monkeypatch.setattr(living_cells, "FEW", 8)
    monkeypatch.setattr(living_cells, "FOLD", 100)
    rng = np.random.default_rng(3)
    store = base_of("flat", True)
    allowed = KeyMask(rng.random(store.n) < 0.6)
    matches = Matches.of(store, allowed)
    for count in (40, 3, 90, 200, 1):
        allowed = allowed.without(rng.choice(allowed.numbers, 20, replace=False))
        matches = matches.after(store, allowed)
        rows = rng.integers(0, len(KEYS), count)
        first, second = rng.integers(0, C, count, np.int32), np.full(count, -1, np.int32)
        second[::3] = (first[::3] + 1) % C
        store, allowed = with_added(store, KEYS[rows], first, second), allowed.followed_by(count)
        allowed = allowed.without(allowed.numbers[-1:])
        matches = matches.after(store, allowed)
        fresh = Matches.of(store, allowed)
        np.testing.assert_array_equal(matches.starts, fresh.starts)
        for low, high in zip(fresh.starts[:-1], fresh.starts[1:], strict=True):
            assert sorted(matches.numbers[low:high]) == sorted(fresh.numbers[low:high])
