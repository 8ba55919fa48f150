"""One query in cells by compiled code: what many get, whatever the storage, the router, the scale."""

import copy
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

import amips
from amips import native
from amips.builder import Builder
from amips.design import Design
from amips.index import MOST_IN_ORDER, FaissCellStore, FewSearch
from amips.lean import learn_projection
from amips.nets import Linear
from amips.routers import cells_above
from amips.search import Index, Searcher, recalls
from amips.search.inputs import MOST_FEW
from amips.vectors import open_vectors
from helpers import make_world

needs_compiled = pytest.mark.skipif(native.compiled is None, reason="not compiled")
pytestmark = needs_compiled
N, D, C = 900, 20, 24


class Own:
    """A router of one's own: no compiled code knows it."""

    def __init__(self, weights):
        self.weights = weights

    def scores(self, x):
        """Tanh of products."""
        return np.tanh(x @ self.weights.T)


@pytest.fixture(scope="module")
def keys_and_queries():
    return make_world(N, 200, D, seed=3)


@pytest.fixture(scope="module", params=["flat", "lean", "lean odd"])
def store(request, keys_and_queries):
    """Keys in 24 cells of very different sizes, one of them empty, a third in a second cell, some equal."""
    keys, x = keys_and_queries
    keys = keys.copy()
    keys[-40:] = keys[:40]
    rng = np.random.default_rng(0)
    assignment = np.minimum(rng.geometric(0.12, N) - 1, C - 2).astype(np.int32)
    second = np.where(rng.random(N) < 0.33, (assignment + 1) % (C - 1), -1).astype(np.int32)
    centroids = rng.standard_normal((C, D)).astype(np.float32)
    vectors = open_vectors(keys)
    storage, _, odd = request.param.partition(" ")
    r = 11 if odd else 16
    projection = learn_projection(vectors, open_vectors(x), r) if storage == "lean" else None
    return FaissCellStore.build(vectors, assignment, centroids, storage, projection, second)


def alone(index, x, k, **asked):
    """Each query by itself."""
    found = [index.search(row, k, **asked) for row in x]
    return np.concatenate([one[0] for one in found]), np.concatenate([one[1] for one in found])


def same(found, expected, keys, x):
    """The same scores at every place, and the ids that have them."""
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-5)
    true = np.einsum("mkd,md->mk", keys[np.maximum(found[1], 0)], x)
    there = found[1] >= 0
    np.testing.assert_allclose(found[0][there], true[there], rtol=1e-4, atol=1e-5)
    assert (np.isneginf(found[0]) == ~there).all()
    for row in found[1]:
        kept = row[row >= 0]
        assert len(np.unique(kept)) == len(kept)


@pytest.mark.parametrize("router", ["centroids", "own"])
@pytest.mark.parametrize(("k", "probes"), [(1, 1), (10, 3), (10, C), (40, 2), (300, 2)])
def test_as_many_queries_at_a_time(store, keys_and_queries, router, k, probes):
    """All candidates are scored again, so codes cannot tell the two ways apart."""
    keys, x = keys_and_queries[0].copy(), keys_and_queries[1]
    keys[-40:] = keys[:40]
    index = Searcher(replace(store, refine=N), Own(store.centroids) if router == "own" else None)
    assert index._few is not None
    assert index._few.routed == (router == "centroids")
    same(alone(index, x, k, probes=probes), index.search(x, k, probes=probes), keys, x)


@pytest.mark.parametrize("min_mass", [1.0, 0.2, 0.03, 1e-6])
def test_the_cells_with_enough_mass(store, keys_and_queries, min_mass):
    """As `cells_above` says; the flat store shows it, which scores whatever it scans."""
    x = keys_and_queries[1]
    index = Searcher(replace(store, refine=N), None, temperature=0.8)
    expected = index.search(x, 30, min_mass=min_mass)
    found = alone(index, x, 30, min_mass=min_mass)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-5)
    probed = cells_above(index.router.scores(x), 0.8, min_mass)
    assert (probed >= 0).sum() < probed.shape[0] * C or min_mass < 0.03


def test_few_candidates_are_the_best_by_their_codes(store, keys_and_queries):
    """Two candidates for each result: FAISS's choice, but for codes that tie."""
    x = keys_and_queries[1]
    index = Searcher(replace(store, refine=2), None)
    many, each = index.search(x, 10, probes=6), alone(index, x, 10, probes=6)
    assert (many[1] == each[1]).mean() > 0.97


@pytest.mark.parametrize("router", ["centroids", "own"])
@pytest.mark.parametrize("m", [2, 5, MOST_FEW])
def test_a_few_queries_have_the_answers_of_each_alone(store, keys_and_queries, router, m, monkeypatch):
    """In one compiled call, to the last bit, whatever their norms."""
    scale = 3.0 ** (np.arange(m) % 7 - 3)
    x = (np.resize(keys_and_queries[1], (m, D)) * scale[:, None]).astype(np.float32)
    index = Searcher(store, Own(store.centroids) if router == "own" else None, temperature=0.8)
    monkeypatch.setattr(Searcher, "search_with", None)
    for asked in ({"probes": 4}, {"min_mass": 0.05}):
        expected, together = alone(index, x, 10, **asked), index.search(x, 10, **asked)
        np.testing.assert_array_equal(together[1], expected[1])
        np.testing.assert_allclose(together[0], expected[0], rtol=0 if router == "centroids" else 1e-6)


@pytest.mark.parametrize("scale", [1e-12, 0.3, 1.0, 7.0, 1e12])
def test_the_norm_of_a_query_changes_nothing_but_scores(store, keys_and_queries, scale):
    x = keys_and_queries[1][:20]
    index = Searcher(store, None, temperature=0.8)
    for asked in ({"probes": 4}, {"min_mass": 0.05}):
        unit = alone(index, x, 10, **asked)
        scaled = alone(index, x * np.float32(scale), 10, **asked)
        np.testing.assert_array_equal(unit[1], scaled[1])
        np.testing.assert_allclose(scaled[0], unit[0] * np.float32(scale), rtol=1e-5)


def test_what_it_is_not_for_goes_the_other_way(store, keys_and_queries):
    """Zero and bad queries, more results than are kept in order, and lists of numbers."""
    x = keys_and_queries[1]
    index = Searcher(store, None)
    assert index.search(np.zeros(D, np.float32), 3, probes=C)[0].tolist() == [[0, 0, 0]]
    bad = np.full(D, np.nan)
    with pytest.raises(amips.AmipsError, match="query 0 is not finite"):
        index.search(bad, probes=2)
    assert index.search(bad, probes=2, on_bad="skip")[1].max() == -1
    with pytest.raises(amips.AmipsError, match="on_bad"):
        index.search(x[0], probes=2, on_bad="ignore")
    for wrong in (x[0][:-1], "x", x[:1, :, None]):
        with pytest.raises(amips.AmipsError):
            index.search(wrong, probes=2)
    many = index.search(x[0], MOST_IN_ORDER + 1, probes=C)
    assert (many[1] >= 0).sum() == MOST_IN_ORDER + 1
    given = index.search(x[0].tolist(), probes=3)
    np.testing.assert_array_equal(given[1], index.search(x[0], probes=3)[1])
    np.testing.assert_array_equal(given[1], index.search(x[0].astype(np.float64), probes=3)[1])


def test_labels_and_threads(store, keys_and_queries):
    """Searches at the same time, each with memory of its own."""
    x = keys_and_queries[1]
    labels = np.array([f"key {i}" for i in range(N)])
    index = Searcher(store, None, labels=labels)
    expected = alone(index, x, 5, probes=4)
    assert expected[1].dtype.kind == "U"
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda row: index.search(row, 5, probes=4), np.tile(x, (5, 1))))
    np.testing.assert_array_equal(np.concatenate([ids for _, ids in found]), np.tile(expected[1], (5, 1)))


def test_no_store_of_other_codes(keys_and_queries):
    """Product codes and 8 bits are FAISS's."""
    keys, x = keys_and_queries
    assignment, centroids = np.zeros(N, np.int32), np.ones((1, D), np.float32)
    for storage in ("sq8", "pq"):
        store = FaissCellStore.build(open_vectors(keys), assignment, centroids, storage)
        assert FewSearch.of(store, None) is None
        assert Searcher(store, None).search(x[0], probes=1)[1].min() >= 0


def test_a_trained_router_from_a_bundle(task, tmp_path):
    """W A x in compiled code; the keys on disk or in memory."""
    design = Design(8, router=Linear(rank=6), recipe=None, dimensions=8)
    index = Index(Builder(task).searcher(design))
    index.save(tmp_path / "b")
    x = np.asarray(task.test.queries)
    for mmap in (False, True):
        loaded = amips.load(tmp_path / "b", mmap=mmap)
        assert loaded.snapshot._few.routed
        same(
            alone(loaded, x, 10, probes=3),
            loaded.search(x, 10, probes=3),
            np.asarray(task.key_vectors.load()),
            x,
        )


SCRIPT = """
import sys, numpy as np, amips
index = amips.load(sys.argv[1])
x = np.load(sys.argv[2])
print(*[i for row in x for i in index.search(row, 10, probes=3)[1][0].tolist()])
"""


@pytest.mark.parametrize("switch", ["generic", "0"])
def test_every_processor_gives_the_same(task, tmp_path, switch):
    index = amips.build(task, storage="lean")
    index.save(tmp_path / "b")
    x = np.asarray(task.test.queries)
    np.save(tmp_path / "x.npy", x)
    environment = os.environ | {"AMIPS_NATIVE": switch}
    command = [sys.executable, "-c", SCRIPT, tmp_path / "b", tmp_path / "x.npy"]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    ids = np.array(ran.stdout.split(), np.int64).reshape(-1, 10)
    assert (ids == alone(index, x, 10, probes=3)[1]).mean() > 0.99


def test_it_can_be_pickled_and_copied(store, keys_and_queries):
    x = keys_and_queries[1][:5]
    index = Searcher(store, None)
    expected = alone(index, x, 5, probes=3)
    for other in (pickle.loads(pickle.dumps(index)), copy.deepcopy(index)):
        np.testing.assert_array_equal(alone(other, x, 5, probes=3)[1], expected[1])


def test_unpickled_where_nothing_is_compiled(store, keys_and_queries, tmp_path):
    x = keys_and_queries[1][:5]
    index = Searcher(store, None)
    expected = alone(index, x, 5, probes=3)[1]
    (tmp_path / "index").write_bytes(pickle.dumps(index))
    np.save(tmp_path / "x.npy", x)
    script = (
        "import pickle, sys, numpy as np; index = pickle.load(open(sys.argv[1], 'rb')); "
        "print(*(i for q in np.load(sys.argv[2]) for i in index.search(q, 5, probes=3)[1][0]))"
    )
    command = [sys.executable, "-c", script, tmp_path / "index", tmp_path / "x.npy"]
    environment = os.environ | {"AMIPS_NATIVE": "0"}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    np.testing.assert_array_equal(np.array(ran.stdout.split(), np.int64).reshape(5, 5), expected)


def test_scores_of_any_layout(store, keys_and_queries):
    """A router of one's own may give a part of a table, or double precision."""
    x = keys_and_queries[1][:20]

    class Strided(Own):
        def scores(self, x):
            """Every second column of a table of doubles."""
            return np.repeat(super().scores(x).astype(np.float64), 2, axis=1)[:, ::2]

    plain, strided = (Searcher(store, kind(store.centroids)) for kind in (Own, Strided))
    np.testing.assert_array_equal(alone(plain, x, 5, probes=3)[1], alone(strided, x, 5, probes=3)[1])


@pytest.mark.parametrize("threads", [1, 2])
def test_many_on_one_thread_go_a_few_at_a_time_where_codes_are_scanned(
    store, keys_and_queries, threads, monkeypatch
):
    x = keys_and_queries[1]
    index = Searcher(store, None)
    probes = np.arange(len(x)) // MOST_FEW + 1  # each call has its own
    calls = []

    def counted(self, x, *rest):
        calls.append(len(x))
        return compiled(self, x, *rest)

    compiled = FewSearch.__call__
    monkeypatch.setattr(FewSearch, "__call__", counted)
    result = index.search(x, 5, probes=probes, threads=threads)
    assert calls == ([48, 48, 48, 48, 8] if threads == 1 and store.storage == "lean" else [])
    monkeypatch.undo()
    each = [index.search(row, 5, probes=int(count))[0] for row, count in zip(x, probes, strict=True)]
    np.testing.assert_allclose(result[0], np.concatenate(each), rtol=1e-4, atol=1e-4)
    bad = x.copy()
    bad[100, 3] = np.nan
    with pytest.raises(amips.AmipsError, match="query 100 is not finite"):
        index.search(bad, 5, probes=3, threads=threads)


@pytest.mark.parametrize("threads", [1, 2])
def test_any_number_of_threads_goes_the_same_way(store, keys_and_queries, threads, monkeypatch):
    x = keys_and_queries[1][:20]
    index = Searcher(store, None)
    expected = alone(index, x, 5, probes=3)
    monkeypatch.setattr(Searcher, "search_with", None)  # the way for many
    np.testing.assert_array_equal(alone(index, x, 5, probes=3, threads=threads)[1], expected[1])
    for wrong in (0, 1.5, "two"):
        with pytest.raises(amips.AmipsError, match="threads"):
            index.search(x[0], probes=3, threads=wrong)


def test_an_answer_is_not_short_for_want_of_looking(store, keys_and_queries):
    """By mass one small cell may be enough; the next best ones follow until there are k keys."""
    x = keys_and_queries[1]
    index = Searcher(store, None, temperature=1e-3)
    assert store.sizes.min() == 0
    for k in (1, 10, 60):
        many, each = index.search(x, k, min_mass=0.5), alone(index, x, k, min_mass=0.5)
        assert (many[1] >= 0).all()
        assert (each[1] >= 0).all()
        np.testing.assert_allclose(many[0], each[0], rtol=1e-5, atol=1e-5)
    assert (index.cost(x, 60, min_mass=0.5).scanned >= 60).all()
    everything = index.search(x[0], N + 5, min_mass=0.5)[1]
    assert (everything >= 0).sum() == N


def test_cells_have_no_margin(store, keys_and_queries):
    with pytest.raises(amips.AmipsError, match="has cells, not a graph: give recall"):
        Searcher(store, None).search(keys_and_queries[1][0], margin=0.1)


@pytest.mark.parametrize("d", [33, 64, 100])
def test_every_dimension(d):
    """Whole vectors of numbers, and what is left over."""
    keys, x = make_world(300, 40, d, seed=d)
    assignment = (np.arange(300) % 7).astype(np.int32)
    centroids = np.stack([keys[assignment == j].mean(axis=0) for j in range(7)])
    for storage, r in (("flat", None), ("lean", 24), ("lean", 31)):
        projection = None if r is None else learn_projection(open_vectors(keys), open_vectors(x), r)
        store = FaissCellStore.build(open_vectors(keys), assignment, centroids, storage, projection)
        index = Searcher(replace(store, refine=300), None)
        same(alone(index, x, 10, probes=3), index.search(x, 10, probes=3), keys, x)


def test_the_recall_that_was_measured_is_that_of_a_query_alone(task):
    """Lean codes, the default number of candidates."""
    index = amips.build(task, storage="lean")
    x, top = np.asarray(task.test.queries), np.asarray(task.test.top_ids)
    many, each = (recalls(ids, top, 10).mean() for ids in (index.search(x)[1], alone(index, x, 10)[1]))
    assert abs(many - each) < 0.005


@pytest.mark.parametrize("k", [1, 3])
def test_few_results_are_looked_for_where_ten_are(store, keys_and_queries, k):
    """The recall of a bound on the mass was measured with the cells that ten results need."""
    x = keys_and_queries[1]
    index = Searcher(store, None, temperature=1e-3)
    ten, few = (index.cost(x, count, min_mass=0.5) for count in (10, k))
    np.testing.assert_array_equal(few.probed, ten.probed)
    whole = Searcher(replace(store, refine=N), None, temperature=1e-3)
    best = whole.search(x, 10, min_mass=0.5)
    for found in (whole.search(x, k, min_mass=0.5), alone(whole, x, k, min_mass=0.5)):
        np.testing.assert_allclose(found[0], best[0][:, :k], rtol=1e-5, atol=1e-5)
