"""A few queries in cells by compiled code: keys that were added later, and keys that may not be results."""

import pickle
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from amips import AmipsError, native
from amips.blas import faiss
from amips.index import FaissCellStore, FewSearch, ListedKeys, fill
from amips.lean import learn_projection
from amips.vectors import open_vectors
from helpers import make_world

pytestmark = pytest.mark.skipif(native.compiled is None, reason="not compiled")
N, ADDED, D, C = 700, 260, 20, 16
ALL = N + ADDED
KEYS, X = make_world(ALL, 40, D, seed=5)
CENTROIDS = np.random.default_rng(1).standard_normal((C, D)).astype(np.float32)
CELLS = np.random.default_rng(2).integers(0, C - 1, ALL).astype(np.int32)  # the last one is empty
SECOND = np.where(np.random.default_rng(3).random(ALL) < 0.3, (CELLS + 1) % (C - 1), -1).astype(np.int32)
CELLS[N:][CELLS[N:] == 3] = 4  # one in which no key was added
SECOND[N:][SECOND[N:] == 3] = -1


@pytest.fixture(params=[("flat", False), ("flat", True), ("lean", False), ("lean", True)])
def parts(request, monkeypatch):
    """A store of 700 keys, one of 260 added with its codebook, and whether keys are in two cells."""
    storage, spilled = request.param
    projection = None
    if storage == "lean":
        projection = learn_projection(open_vectors(KEYS[:N]), open_vectors(X), 12)

    def build(rows):
        second = SECOND[rows] if spilled else None
        vectors = open_vectors(np.ascontiguousarray(KEYS[rows]))
        return FaissCellStore.build(vectors, CELLS[rows], CENTROIDS, storage, projection, second)

    base = build(slice(0, N))

    def train(index, *_):
        if storage == "lean":
            faiss.copy_array_to_vector(base.codebook.ravel(), index.pq.centroids)
        index.is_trained = True

    with monkeypatch.context() as patch:
        patch.setattr(fill, "_train", train)
        return base, build(slice(N, ALL)), spilled


def expected(x, cells, k, spilled, allowed):
    """The best keys in these cells, ids after the last -1."""
    inside = np.isin(CELLS, cells) & allowed
    if spilled:
        inside |= np.isin(SECOND, cells) & allowed
    ids = np.flatnonzero(inside)
    scores = KEYS[ids] @ x
    order = np.lexsort((ids, -scores))[:k]
    return scores[order], ids[order]


def check(search, x, cells, k, spilled, allowed, **effort):
    mask = None if allowed is None else allowed
    asked = {"scores": None, "candidates": 2 * ALL, "temperature": 1.0, "min_mass": 0.0, "keys": 0} | effort
    scores, ids = search(x[None], k=k, allowed=mask, **asked)
    everyone = np.ones(ALL, bool) if allowed is None else allowed
    true, numbers = expected(x, cells, k, spilled, everyone)
    np.testing.assert_array_equal(ids[0, : len(numbers)], numbers)
    np.testing.assert_allclose(scores[0, : len(numbers)], true, atol=1e-5)
    assert (ids[0, len(numbers) :] == -1).all()


MASKS = (None, 0.5, 0.05, 0.0)


@pytest.mark.parametrize("share", MASKS)
def test_both_parts_of_the_chosen_cells(parts, share):
    base, added, spilled = parts
    allowed = None if share is None else np.random.default_rng(4).random(ALL) < share
    search = FewSearch.of(base, (CENTROIDS, None), added)
    assert search.n == ALL
    for x in X:
        order = np.argsort(-(CENTROIDS @ x), kind="stable")
        for k, probes in ((1, 1), (10, 3), (50, C)):
            check(search, x, order[:probes], k, spilled, allowed, probes=probes)


def test_scores_that_come_with_the_query(parts):
    base, added, spilled = parts
    search = FewSearch.of(base, None, added)
    assert not search.routed
    for x in X[:10]:
        scores = np.tanh(CENTROIDS @ x)[None]
        order = np.argsort(-scores[0], kind="stable")
        check(search, x, order[:4], 10, spilled, None, probes=4, scores=scores)


def test_cells_by_mass_hold_enough_keys_together(parts):
    """So many cells that both parts have enough in them, not one of them alone."""
    base, added, spilled = parts
    search = FewSearch.of(base, (CENTROIDS, None), added)
    together = base.sizes + added.sizes
    for x in X[:20]:
        order = np.argsort(-(CENTROIDS @ x), kind="stable")
        for keys in (50, 200, 500):
            enough = 1 + int(np.argmax(np.cumsum(together[order]) >= keys))
            check(search, x, order[:enough], 20, spilled, None, probes=0, min_mass=1.0, keys=keys)


def test_one_part_alone_as_before(parts):
    base, added, _ = parts
    alone = FewSearch.of(base, (CENTROIDS, None))
    nothing = replace(added, sizes=np.zeros(C, np.int64), entries=np.zeros(0, np.int64), second=None)
    empty = FewSearch.of(base, (CENTROIDS, None), nothing)
    allowed = np.arange(ALL) < N
    both = FewSearch.of(base, (CENTROIDS, None), added)
    effort = {"scores": None, "k": 10, "probes": 3, "temperature": 1.0, "min_mass": 0.0, "keys": 0}
    for x in X:
        scores, ids = alone(x[None], candidates=2 * ALL, **effort)
        for other in (
            empty(x[None], candidates=2 * ALL, **effort),
            both(x[None], candidates=2 * ALL, allowed=allowed, **effort),
            both(x[None], candidates=2 * ALL, allowed=3 * allowed.astype(np.uint8), **effort),
        ):
            np.testing.assert_array_equal(other[1], ids)
            np.testing.assert_array_equal(other[0], scores)


def test_few_candidates_are_of_those_that_are_allowed(parts):
    """Codes choose among what may be a result: what may not takes no place."""
    base, added, spilled = parts
    search = FewSearch.of(base, (CENTROIDS, None), added)
    allowed = np.random.default_rng(6).random(ALL) < 0.02
    for x in X:
        check(search, x, np.arange(C), 10, spilled, allowed, probes=C, candidates=2 * int(allowed.sum()))


def test_pickled(parts):
    base, added, spilled = parts
    search = pickle.loads(pickle.dumps(FewSearch.of(base, (CENTROIDS, None), added)))
    for x in X[:5]:
        order = np.argsort(-(CENTROIDS @ x), kind="stable")
        check(search, x, order[:3], 10, spilled, None, probes=3)


def test_what_does_not_fit(parts):
    base, added, _ = parts
    search = FewSearch.of(base, (CENTROIDS, None), added)
    with pytest.raises(AmipsError, match="allowed"):
        search(X[:1], None, 10, 100, 3, 1.0, 0.0, 0, np.ones(N, bool))
    fewer = FaissCellStore.build(open_vectors(KEYS[:50]), CELLS[:50], CENTROIDS, "sq8")
    assert FewSearch.of(base, (CENTROIDS, None), fewer) is None
    other = FaissCellStore.build(open_vectors(KEYS[:50]), np.zeros(50, np.int32), CENTROIDS[:1], "flat")
    with pytest.raises(AmipsError, match="other cells"):
        FewSearch.of(base, (CENTROIDS, None), other)


class TestListed:
    """Keys that are listed for each query: compiled and in numpy alike."""

    @pytest.mark.parametrize("kind", ["compiled", "numpy", "cells", "cells with second ones", "lean", "disk"])
    @pytest.mark.parametrize(("width", "k"), [(1, 1), (40, 10), (3, 10)])
    def test_the_best_of_them(self, kind, width, k, monkeypatch, tmp_path):
        rng = np.random.default_rng(width)
        keys = rng.integers(-2, 3, (500, 7)).astype(np.float32)  # many tie: the lower id comes first
        x = rng.integers(-2, 3, (30, 7)).astype(np.float32)
        listed = np.argsort(rng.random((30, 500)), axis=1)[:, :width].astype(np.int32)
        store = SimpleNamespace(keys=keys)
        if kind in ("cells", "cells with second ones", "lean"):
            cells = rng.integers(0, 8, 500).astype(np.int32)
            second = np.where(cells < 3, cells + 1, -1).astype(np.int32) if "second" in kind else None
            projection = learn_projection(open_vectors(keys), open_vectors(x), 4) if kind == "lean" else None
            storage = "lean" if kind == "lean" else "flat"
            centroids = rng.standard_normal((9, 7)).astype(np.float32)
            store = FaissCellStore.build(open_vectors(keys), cells, centroids, storage, projection, second)
        if kind == "disk":
            np.save(tmp_path / "keys.npy", keys)
            store.keys = np.load(tmp_path / "keys.npy", mmap_mode="r")
        if kind == "numpy":
            monkeypatch.setattr(native, "compiled", None)
        several = ListedKeys(store)
        sent = pickle.loads(pickle.dumps(several))  # its keys are elsewhere
        del several
        for rows in (slice(0, 30), slice(4, 5)):
            scores, ids = sent.search(x[rows], listed[rows], k)
            for place, row in enumerate(range(30)[rows]):
                order = sorted(listed[row], key=lambda i: (-(x[row] @ keys[i]), i))[:k]
                np.testing.assert_array_equal(ids[place, : len(order)], order)
                np.testing.assert_array_equal(scores[place, : len(order)], keys[order] @ x[row])
                assert (ids[place, len(order) :] == -1).all()
                assert np.isneginf(scores[place, len(order) :]).all()
