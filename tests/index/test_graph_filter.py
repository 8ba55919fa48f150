"""Walks of whose keys only some may be results: against scoring all of those, compiled and in numpy."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from amips import AmipsError, native
from amips.graph import make_graph
from amips.index import GraphStore, graph_filter, top_of_rows
from amips.lean import learn_projection
from amips.vectors import open_vectors
from helpers import make_world

N, D, M = 2000, 24, 60
STORAGES = ("flat", "sq8", "lean")
SHARES = (1.0, 0.5, 0.1, 0.01, 0.001)
WALKS = ("compiled", "numpy")
storages = pytest.mark.parametrize("storage", STORAGES)
walks = pytest.mark.parametrize("walk", WALKS)


@cache
def world(storage):
    """2,000 keys of different norms, 60 queries, and the store of a graph."""
    keys, x = make_world(N, M, D, seed=8)
    keys *= np.exp(0.2 * np.random.default_rng(0).standard_normal((N, 1))).astype(np.float32)
    vectors = open_vectors(keys)
    projection = learn_projection(vectors, open_vectors(x), 20) if storage == "lean" else None
    return keys, x, GraphStore.build(vectors, make_graph(keys, None, None, degree=16), storage, projection)


@pytest.fixture
def opened(monkeypatch):
    """A world walked by compiled code or in numpy, where walks are never too dear."""

    def of(storage, walk, always=True):
        keys, x, store = world(storage)
        if walk == "compiled" and native.compiled is None:
            pytest.skip("not compiled")
        if walk == "numpy":
            monkeypatch.setattr(native, "compiled", None)
            store = replace(store)
        if always:
            monkeypatch.setattr(graph_filter, "DEARER", 0)
            monkeypatch.setattr(graph_filter, "DEARER_TOGETHER", 0)
            monkeypatch.setattr(graph_filter, "VISIT", 1)
        return keys, x, store

    return of


def masks(keys, x):
    """By share: chosen at random, and for a direction that some queries share and others do not."""
    rng = np.random.default_rng(1)
    along = keys @ x[0]
    for share in SHARES:
        yield rng.permutation(N) < max(1, round(share * N))
        yield along >= np.sort(along)[-max(1, round(share * N))]
        yield along <= np.sort(along)[max(1, round(share * N)) - 1]


def best_allowed(keys, x, mask, k):
    """True scores [m, k] of the allowed keys, -inf after the last."""
    scores = np.where(mask, x.astype(np.float64) @ keys.T.astype(np.float64), -np.inf)
    return -np.sort(-scores, axis=1)[:, :k]


@storages
@walks
def test_only_allowed_keys_and_as_many_as_there_are(storage, walk, opened):
    keys, x, store = opened(storage, walk)
    x = x[: 20 if walk == "compiled" else 4]
    for mask in masks(keys, x):
        for k, margin in ((10, 0.0), (3, 0.3), (10, None)):
            scores, ids, counts = store.search(x, k, margin, allowed=mask)
            some = min(k, int(mask.sum()))
            assert mask[ids[:, :some]].all()
            assert (ids[:, :some] >= 0).all()
            assert (ids[:, some:] == -1).all()
            assert np.isneginf(scores[:, some:]).all()
            assert all(len(set(row[:some])) == some for row in ids.tolist())
            true = np.einsum("mkd,md->mk", keys[ids[:, :some]].astype(np.float64), x)
            np.testing.assert_allclose(scores[:, :some], true, atol=5e-6)
            assert (np.diff(scores[:, :some], axis=1) <= 0).all()
            assert (counts[:, 0] > 0).all()
            if margin is None:
                np.testing.assert_allclose(scores[:, :some], best_allowed(keys, x, mask, some), atol=5e-6)


@storages
@walks
def test_the_recall_of_a_margin_is_kept(storage, walk, opened):
    keys, x, store = opened(storage, walk)
    x = x if walk == "compiled" else x[:10]
    every = np.ones(N, bool)

    def recall(mask):
        scores = store.search(x, 10, 0.2, allowed=mask)[0]
        some = min(10, int(mask.sum()))
        return (scores[:, :some] >= best_allowed(keys, x, mask, some)[:, -1:] - 1e-5).mean()

    least = recall(every)
    assert least > 0.9
    for mask in masks(keys, x):
        assert recall(mask) > least - 0.08  # some lie where no query looks, and yet a walk is made


@storages
def test_where_every_key_is_allowed_it_is_the_same_walk(storage, opened):
    _, x, store = opened(storage, "compiled")
    for k, margin in ((10, 0.0), (10, 0.1), (3, 0.2)):
        expected = store.search(x, k, margin)
        for mask in (np.ones(N, bool), np.full(N, 7, np.uint8)):
            for part, other in zip(store.search(x, k, margin, allowed=mask), expected, strict=True):
                np.testing.assert_array_equal(part, other)


@storages
def test_compiled_and_numpy_walk_alike(storage, opened):
    _, x, store = opened(storage, "compiled")
    x, rng = x[:25], np.random.default_rng(2)
    some = [rng.random(N) < share for share in (0.5, 0.2, 0.05)]
    first = [store.search(x, 10, 0.05, allowed=mask) for mask in some]
    _, _, other = opened(storage, "numpy")
    for mask, (scores, ids, counts) in zip(some, first, strict=True):
        other_scores, other_ids, other_counts = other.search(x, 10, 0.05, allowed=mask)
        same = ids == other_ids
        assert same.all(axis=1).mean() >= 0.95
        np.testing.assert_allclose(other_scores[same], scores[same], atol=1e-5)
        assert (other_counts == counts).all(axis=1).mean() >= 0.9


@storages
@walks
def test_few_matches_are_scored_and_no_more(storage, walk, opened):
    keys, x, store = opened(storage, walk, always=False)
    mask = np.zeros(N, bool)
    mask[::100] = True
    for queries in (x[:1], x):
        scores, _, counts = store.search(queries, 10, 0.1, allowed=mask)
        np.testing.assert_array_equal(counts, np.tile([20, 20, 0], (len(queries), 1)))
        np.testing.assert_allclose(scores, best_allowed(keys, queries, mask, 10), atol=5e-6)
        assert (store.flops(counts) == 2 * D * 20).all()
    np.testing.assert_array_equal(store.search(x[:2], 10, 0.1, allowed=np.zeros(N, bool))[1], -1)


@storages
def test_a_walk_is_never_much_dearer_than_scoring_what_matches(storage, opened, monkeypatch):
    keys, x, store = opened(storage, "compiled")
    along = keys @ x[0]
    mask = along <= np.quantile(along, 0.2)  # far from where the walk goes
    monkeypatch.setattr(graph_filter, "VISIT", 20)
    _, _, counts = store.search(x[:1], 10, 0.0, allowed=mask)
    assert counts[0, 0] <= mask.sum() // 20
    scores, _, _ = store.search(x[:1], 10, 0.0, allowed=mask)
    np.testing.assert_allclose(scores, best_allowed(keys, x[:1], mask, 10), atol=5e-6)


@storages
def test_threads_do_not_matter(storage, opened):
    _, x, store = opened(storage, "compiled")
    many, mask = np.concatenate([x, x[:, ::-1], x[::-1]]), np.random.default_rng(3).random(N) < 0.3
    expected = store.search(many, 10, 0.1, threads=1, allowed=mask)
    for threads in (2, 5):
        for part, other in zip(store.search(many, 10, 0.1, threads, allowed=mask), expected, strict=True):
            np.testing.assert_array_equal(part, other)


def test_a_mask_that_is_not_one():
    _, x, store = world("flat")
    for mask in (np.ones(N - 1, bool), np.ones((N, 1), bool), np.ones(N), np.ones(N, np.int64)):
        with pytest.raises(AmipsError, match="allowed"):
            store.search(x, 10, 0.1, allowed=mask)
    strided = np.zeros(2 * N, bool)
    strided[::4] = True
    ids = store.search(x, 10, 0.1, allowed=strided[::2])[1]
    assert (ids % 2 == 0).all()


def test_the_best_of_some_rows():
    keys, x, _ = world("flat")
    mask = np.random.default_rng(4).random(N) < 0.1
    for block in (1 << 12, 1 << 26):
        scores, ids = top_of_rows(keys, x, 7, block, mask)
        np.testing.assert_allclose(scores, best_allowed(keys, x, mask, 7), atol=5e-6)
        assert mask[ids].all()


SCRIPT = """
import sys
from pathlib import Path
import numpy as np
from amips.index import GraphStore, graph_filter
graph_filter.DEARER = graph_filter.DEARER_TOGETHER = 0
place, storage = Path(sys.argv[1]), sys.argv[2]
store = GraphStore.load(place, storage, mmap=False)
x, mask = np.load(place / "x.npy"), np.load(place / "mask.npy")
np.save(place / "ids.npy", store.search(x, 10, 0.1, allowed=mask)[1])
np.save(place / "exact.npy", store.search(x[:3], 10, None, allowed=mask)[1])
"""


@pytest.mark.skipif(native.compiled is None, reason="not compiled")
@storages
def test_the_code_for_every_processor_answers_as_that_for_this_one(storage, tmp_path, opened, monkeypatch):
    _, x, store = opened(storage, "compiled", always=False)
    mask = np.random.default_rng(5).random(N) < 0.3
    store.save(tmp_path)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "mask.npy", mask)
    command = [sys.executable, "-c", SCRIPT, tmp_path, storage]
    subprocess.run(command, env=os.environ | {native.SWITCH: "generic"}, check=True)
    monkeypatch.setattr(graph_filter, "DEARER_TOGETHER", 0)
    ids = store.search(x, 10, 0.1, allowed=mask)[1]
    assert (ids == np.load(tmp_path / "ids.npy")).all(axis=1).mean() >= 0.97
    exact = store.search(x[:3], 10, None, allowed=mask)[1]
    np.testing.assert_array_equal(exact, np.load(tmp_path / "exact.npy"))
