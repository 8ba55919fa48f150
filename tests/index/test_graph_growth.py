"""A graph that grows and shrinks: what is added is found, what reads meanwhile is not disturbed."""

import pickle
import threading
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from amips import AmipsError, exact, native
from amips.graph import make_graph, reached
from amips.index import CODING, GraphStore
from amips.lean import learn_projection
from amips.search import recalls
from amips.vectors import open_vectors
from helpers import make_world

N, D, M = 3000, 24, 100
STORAGES = ("flat", "sq8", "lean")
storages = pytest.mark.parametrize("storage", STORAGES)
KEYS, X = make_world(N, M, D, seed=11)
KEYS *= np.exp(0.1 * np.random.default_rng(0).standard_normal((N, 1))).astype(np.float32)
TOP = exact.top_k(KEYS, X, 10)[1]


def store_of(keys, storage, **options):
    vectors = open_vectors(keys)
    projection = learn_projection(vectors, open_vectors(X), 20) if storage == "lean" else None
    return GraphStore.build(vectors, make_graph(keys, None, None, **options), storage, projection)


@cache
def half(storage):
    """A store of the first 1,500 keys."""
    return store_of(KEYS[: N // 2], storage, degree=24)


@cache
def whole(storage):
    """A store of all keys."""
    return store_of(KEYS, storage, degree=24)


def grown(store, keys, batch):
    for low in range(0, len(keys), batch):
        store = store.with_added(keys[low : low + batch])
    return store


def recall(store, margin=0.15, top=TOP, x=X):
    return recalls(store.search(x, 10, margin)[1], top, 10).mean()


def check(store, keys):
    """Keys and lists that fit together: every key is reached, no list has a key twice or its own."""
    lists = store.lists
    assert store.n == len(keys) == len(lists)
    np.testing.assert_array_equal(store.keys, keys)
    assert reached(lists, store.entries).all()
    assert lists.min() >= -1
    assert lists.max() < store.n
    assert not ((lists[:, 1:] >= 0) & (lists[:, :-1] < 0)).any()
    assert (lists != np.arange(len(lists))[:, None]).all()
    ordered = np.sort(lists, axis=1)
    assert not ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any()


@storages
@pytest.mark.parametrize("batch", [100, 1500])
def test_keys_that_were_added_are_found(storage, batch):
    store = grown(half(storage), KEYS[N // 2 :], batch)
    check(store, KEYS)
    assert recall(store) > recall(whole(storage)) - 0.02
    scores, ids, _ = store.search(X, 10, 0.15)
    np.testing.assert_allclose(scores, np.einsum("mkd,md->mk", KEYS[ids], X), atol=1e-5)
    check(half(storage), KEYS[: N // 2])  # which stays as it was


@storages
def test_the_same_batches_make_the_same_graph(storage):
    one, other = (grown(half(storage), KEYS[N // 2 : 2000], 250) for _ in range(2))
    np.testing.assert_array_equal(one.lists, other.lists)
    one, other = one.with_added(KEYS[2000:2100]), other.with_added(KEYS[2000:2100])
    for part, same in zip(one.search(X, 10, 0.1), other.search(X, 10, 0.1), strict=True):
        np.testing.assert_array_equal(part, same)


@storages
def test_compiled_and_numpy_grow_alike(storage, monkeypatch):
    store = store_of(KEYS[:300], storage, degree=16)
    compiled = grown(store, KEYS[300:500], 50)
    monkeypatch.setattr(native, "compiled", None)
    other = grown(replace(store), KEYS[300:500], 50)
    check(other, KEYS[:500])
    top = exact.top_k(KEYS[:500], X, 10)[1]
    ids = other.search(X[:20], 10, 0.1)[1]
    assert recalls(ids, top[:20], 10).mean() > recall(compiled, 0.1, top[:20], X[:20]) - 0.05
    if storage != "flat":  # whole numbers but for cosines
        assert (compiled.lists == other.lists).mean() > 0.9


@storages
def test_older_snapshots_stay_as_they_are(storage):
    """They never return what they do not have; to add to one copies it."""
    snapshots = [half(storage)]
    for low in range(N // 2, N, 300):
        snapshots.append(snapshots[-1].with_added(KEYS[low : low + 300]))
    check(snapshots[-1], KEYS)
    for store in snapshots:
        ids = store.search(X, 10, 0.1)[1]
        assert ids.max() < store.n
        assert store.lists.max() < store.n
    newest = snapshots[-1].search(X, 10, 0.1)
    branch = snapshots[2].with_added(KEYS[:200])
    check(branch, np.concatenate([KEYS[: snapshots[2].n], KEYS[:200]]))
    for part, same in zip(snapshots[-1].search(X, 10, 0.1), newest, strict=True):
        np.testing.assert_array_equal(part, same)


@storages
@pytest.mark.parametrize("compiled", [True, False])
def test_small_and_odd(storage, compiled, monkeypatch):
    """Few keys and many, keys of zeros, keys that are all equal."""
    if not compiled:
        monkeypatch.setattr(native, "compiled", None)
    elif native.compiled is None:
        pytest.skip("not compiled")
    for n, m in ((2, 1), (2, 60), (5, 200)):
        store = store_of(KEYS[:n], storage).with_added(KEYS[n : n + m])
        check(store, KEYS[: n + m])
        everything = store.search(X[:5], min(10, n + m), 1e3)[1]
        assert (everything >= 0).all()
    rows = KEYS[:120].copy()
    rows[40:80] = 0
    rows[80:120] = rows[0]
    store = store_of(rows[:40], storage).with_added(rows[40:])
    check(store, rows)
    assert store.with_added(KEYS[:0]) is store


@storages
def test_what_is_not_a_key_is_refused(storage):
    store = half(storage)
    for wrong in (KEYS[:3, :-1], KEYS[0], np.full((2, D), np.nan, np.float32)):
        with pytest.raises(AmipsError, match="keys"):
            store.with_added(wrong)


@storages
def test_saved_and_pickled(storage, tmp_path):
    first = half(storage).with_added(KEYS[N // 2 : 2000])
    store = first.with_added(KEYS[2000:])
    for one, place in ((first, tmp_path / "first"), (store, tmp_path / "all")):
        place.mkdir()
        one.save(place)
        loaded = GraphStore.load(place, storage, mmap=False)
        assert loaded.n == one.n == len(np.load(place / "neighbours.npy"))
        for other in (loaded, pickle.loads(pickle.dumps(one))):
            np.testing.assert_array_equal(other.lists, one.lists)
            assert recalls(other.search(X, 10, 0.1)[1], one.search(X, 10, 0.1)[1], 10).mean() > 0.97
        check(loaded.with_added(KEYS[:50]), np.concatenate([KEYS[: one.n], KEYS[:50]]))


def test_bundles_that_do_not_say_how_keys_are_coded(tmp_path):
    """The projection is found from keys and codes."""
    store = half("lean")
    store.save(tmp_path)
    (tmp_path / CODING).unlink()
    loaded = GraphStore.load(tmp_path, "lean", mmap=True)
    assert loaded.coding is None
    other = loaded.with_added(KEYS[N // 2 :])
    np.testing.assert_allclose(other.coding, store.coding, atol=0.05 * np.abs(store.coding).max())
    assert (other.codes[N // 2 :] == store.with_added(KEYS[N // 2 :]).codes[N // 2 :]).mean() > 0.8
    assert recall(other) > recall(whole("lean")) - 0.03


@storages
def test_masks_of_what_was_added(storage):
    store = grown(half(storage), KEYS[N // 2 :], 500)
    mask = np.arange(N) >= N // 2
    ids = store.search(X, 10, 0.3, allowed=mask)[1]
    top = exact.top_k(KEYS[N // 2 :], X, 10)[1] + N // 2
    assert recalls(ids, top, 10).mean() > 0.95


@pytest.mark.skipif(native.compiled is None, reason="not compiled")
@storages
def test_readers_while_keys_are_added(storage):
    """In threads, with the newest snapshot or one they keep: true scores, no key twice, none too new."""
    newest, done, problems = [half(storage)], threading.Event(), []
    newest[0] = newest[0].with_added(KEYS[N // 2 : N // 2 + 1])
    kept = newest[0]

    def read(own):
        turn = 0
        while not done.is_set() and not problems:
            store = kept if own else newest[0]
            x = X[turn % 90 : turn % 90 + 10]
            scores, ids, _ = store.search(x, 10, 0.1)
            turn += 1
            there = ids >= 0
            true = np.einsum("mkd,md->mk", KEYS[np.maximum(ids, 0)], x)
            if ids.max() >= store.n or not there.all():
                problems.append("a key that is not there")
            if not np.allclose(scores[there], true[there], atol=1e-5):
                problems.append("a score that is not true")
            if any(len(set(row)) < len(row) for row in ids.tolist()):
                problems.append("a key twice")

    readers = [threading.Thread(target=read, args=(own,)) for own in (False, False, True)]
    for reader in readers:
        reader.start()
    try:
        for low in range(N // 2 + 1, N, 37):
            newest[0] = newest[0].with_added(KEYS[low : low + 37])
    finally:
        done.set()
        for reader in readers:
            reader.join()
    assert not problems
    check(newest[0], KEYS)


@storages
@pytest.mark.parametrize("share", [0.9, 0.5, 0.05])
def test_compacted(storage, share):
    """What is left is found as in a graph that was built of it."""
    store = grown(half(storage), KEYS[N // 2 :], 500)
    kept = np.flatnonzero(np.random.default_rng(1).random(N) < share)
    small = store.compacted(kept)
    check(small, KEYS[kept])
    assert small.growing is None
    top = exact.top_k(KEYS[kept], X, 10)[1]
    fresh = store_of(KEYS[kept], storage, degree=24)
    assert recall(small, 0.15, top) > recall(fresh, 0.15, top) - 0.03
    check(small.with_added(KEYS[:100]), np.concatenate([KEYS[kept], KEYS[:100]]))
    check(store, KEYS)


@storages
def test_compacted_to_one_side_and_to_few(storage):
    """A part of space is gone, entry points with it; one key is left."""
    store = whole(storage)
    kept = np.flatnonzero(KEYS @ X[0] < np.quantile(KEYS @ X[0], 0.3))
    check(store.compacted(kept), KEYS[kept])
    for few in ([7], [3, 2999], range(40)):
        small = store.compacted(np.array(few))
        check(small, KEYS[np.array(few)])
        assert (small.search(X[:3], len(few), 1e3)[1] >= 0).all()


def test_numbers_that_cannot_be_kept():
    store = half("flat")
    for wrong in ([], [1, 1], [-1, 3], [0, N // 2], [[1, 2]]):
        with pytest.raises(AmipsError, match="kept"):
            store.compacted(np.array(wrong, np.int64))
