"""Walking a graph: true inner products, compiled and in numpy alike, whatever the storage and the scale."""

import os
import pickle
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from amips import exact, native
from amips.graph import make_graph
from amips.index import GraphStore
from amips.index.graph_walk import codes_of_values, values_of_codes
from amips.lean import learn_projection
from amips.search import GraphSearcher, recalls
from amips.vectors import open_vectors
from helpers import make_world

STORAGES = ("flat", "sq8", "lean")
N, D, M = 600, 24, 200
HUGE = 1e3  # a margin within which every score is
COMPILED = native.compiled
needs_compiled = pytest.mark.skipif(COMPILED is None, reason="not compiled")
storages = pytest.mark.parametrize("storage", STORAGES)


def store_of(keys, queries, storage, r=None, **options):
    """A store of the plain graph of keys; lean codes have r values."""
    vectors = open_vectors(keys)
    lean = storage == "lean"
    projection = learn_projection(vectors, open_vectors(queries), r or keys.shape[1]) if lean else None
    return GraphStore.build(vectors, make_graph(keys, None, None, **options), storage, projection)


@cache
def world(storage, norms=False, doubles=60):
    """600 keys, some of them there twice, 200 queries of norm 1, and the store of a graph of degree 12."""
    keys, x = make_world(N, M, D, seed=6)
    if norms:
        keys *= np.exp(0.4 * np.random.default_rng(0).standard_normal((N, 1))).astype(np.float32)
    keys[N - doubles :] = keys[:doubles]
    return keys, x, store_of(keys, x, storage, 16, degree=12)


def in_numpy(store, monkeypatch):
    """The same store, walked in numpy."""
    other = replace(store)
    with monkeypatch.context() as patch:
        patch.setattr(native, "compiled", None)
        assert type(other._walker).__name__ == "NumpyWalker"
    return other


@pytest.fixture(params=["compiled", "numpy"])
def walked(request, monkeypatch):
    """A function that has a store walked by compiled code, or in numpy."""
    if request.param == "numpy":
        return lambda store: in_numpy(store, monkeypatch)
    return (lambda store: store) if COMPILED is not None else pytest.skip("not compiled")


@needs_compiled
@storages
@pytest.mark.parametrize("norms", [False, True])
def test_compiled_and_numpy_walk_alike(storage, norms, monkeypatch):
    _, x, store = world(storage, norms, 0)
    x = x[:100]
    other = in_numpy(store, monkeypatch)
    for k, margin in ((10, 0.0), (10, 0.05), (1, 0.1), (5, 0.0), (30, 0.0)):
        scores, ids, counts = store.search(x, k, margin)
        other_scores, other_ids, other_counts = other.search(x, k, margin)
        same = ids == other_ids
        assert same.all(axis=1).mean() >= 0.99
        np.testing.assert_allclose(other_scores[same], scores[same], atol=1e-5)
        assert (other_counts == counts).all(axis=1).mean() >= 0.97


@storages
def test_scores_are_true_and_fall(storage, walked):
    keys, x, store = world(storage, True)
    for k, margin in ((10, 0.1), (40, 0.0), (3, HUGE)):
        scores, ids, counts = walked(store).search(x[:12], k, margin)
        true = np.einsum("mkd,md->mk", keys[ids].astype(np.float64), x[:12])
        np.testing.assert_allclose(scores, true, atol=3e-6)
        assert (np.diff(scores, axis=1) <= 0).all()
        assert all(len(set(row)) == k for row in ids.tolist())
        assert (counts[:, 1] >= k).all()
        assert (counts[:, 2] >= k).all()


@storages
def test_of_equal_keys_the_lower_id_comes_first(storage, walked):
    """Two equal keys have one score, to the last bit."""
    keys, x, store = world(storage, True)
    asked = np.concatenate([keys[:20], x[:10]])
    scores, ids, _ = walked(store).search(asked / np.linalg.norm(asked, axis=1, keepdims=True), 10, 0.05)
    np.testing.assert_array_equal(np.lexsort((ids, -scores), axis=1), np.tile(np.arange(10), (30, 1)))
    twins = 0
    for row, row_scores in zip(ids.tolist(), scores, strict=True):
        for key in set(row) & set(range(60)) & {j - N + 60 for j in row}:
            assert row_scores[row.index(key)] == row_scores[row.index(key + N - 60)]
            twins += 1
    assert twins > 20


@storages
def test_a_huge_margin_finds_the_exact_top_keys(storage, walked):
    keys, x, store = world(storage, True, 0)
    for k in (1, 60):
        scores, ids, counts = walked(store).search(x[:5], k, HUGE)
        best, true = exact.top_k(keys, x[:5], k)
        np.testing.assert_array_equal(ids, true)
        np.testing.assert_allclose(scores, best, atol=1e-5)
        assert (counts[:, 0] == N).all()


@needs_compiled
@storages
@pytest.mark.parametrize("norms", [False, True])
def test_and_of_equal_keys_the_right_ones(storage, norms):
    keys, x, store = world(storage, norms)
    for k in (1, 7, 10, 60):
        np.testing.assert_array_equal(store.search(x, k, HUGE)[1], exact.top_k(keys, x, k)[1])


@storages
def test_recall_and_cost_rise_with_the_margin(storage):
    keys, x, store = world(storage, True)
    true = exact.top_k(keys, x, 10)[1]
    reached, visited = [], []
    for margin in (0.0, 0.02, 0.05, 0.1, 0.2, 0.5):
        _, ids, counts = store.search(x, 10, margin)
        reached.append(recalls(ids, true, 10).mean())
        visited.append(counts[:, 0].mean())
    assert (np.diff(reached) > -0.002).all(), reached
    assert reached[-1] > max(0.97, reached[0] + 0.03), reached
    assert (np.diff(visited) > 0).all()


@storages
@pytest.mark.parametrize("factor", [2.0, 3.0, 1e-6, 1e6])
def test_the_norm_of_a_query_does_not_matter(storage, factor):
    _, x, store = world(storage)
    index = GraphSearcher(store)
    scores, ids = index.search(x, 10, margin=0.1)
    scaled = x * np.float32(factor)
    more, same = index.search(scaled, 10, margin=0.1)
    assert (same == ids).mean() > (0.998 if factor != 2 else 0.999999)
    np.testing.assert_allclose(more[same == ids], scores[same == ids] * factor, rtol=1e-4, atol=1e-5 * factor)
    alone = np.concatenate([index.search(row, 10, margin=0.1)[1] for row in scaled[:30]])
    assert (alone == ids[:30]).mean() > 0.99
    counts, usual = index.cost(scaled, margin=0.1), index.cost(x, margin=0.1)
    assert (counts.scanned != usual.scanned).mean() < 0.02


@storages
@pytest.mark.parametrize("exponent", [-40, 40])
def test_the_scale_of_all_keys_changes_no_id(storage, exponent, walked):
    keys, x, store = world(storage, True)
    scaled = store_of(np.ldexp(keys, exponent), x, storage, 16, degree=12)
    np.testing.assert_array_equal(scaled.neighbours, store.neighbours)
    np.testing.assert_array_equal(scaled.entries, store.entries)
    for margin in (0.0, 0.1):
        scores, ids, counts = walked(store).search(x[:20], 10, margin)
        other, same, other_counts = walked(scaled).search(x[:20], 10, float(np.ldexp(margin, exponent)))
        np.testing.assert_array_equal(same, ids)
        np.testing.assert_array_equal(other, np.ldexp(scores, exponent))
        np.testing.assert_array_equal(other_counts, counts)


@storages
@pytest.mark.parametrize(
    ("n", "d", "degree"),
    [
        *((2, 3, 2), (3, 17, 32), (33, 1, 31), (33, 17, 64), (33, 100, 2)),
        *((200, 1, 8), (200, 3, 31), (200, 17, 64), (200, 100, 2)),
    ],
)
def test_small_and_odd_shapes(storage, n, d, degree, walked):
    rng = np.random.default_rng([n, d, degree])
    keys, x = (rng.standard_normal((rows, d)).astype(np.float32) for rows in (n, 6))
    store = walked(store_of(keys, x, storage, degree=degree))
    every = np.sort(x @ keys.T, axis=1)[:, ::-1]
    for k in (1, 5, n, n + 3):
        scores, ids, _ = store.search(x, k, HUGE)
        some = min(k, n)
        np.testing.assert_allclose(scores[:, :some], every[:, :some], rtol=1e-4, atol=1e-4)
        assert ((ids[:, :some] >= 0) & (ids[:, :some] < n)).all()
        assert (ids[:, some:] == -1).all()
        assert np.isneginf(scores[:, some:]).all()
        scores, ids, _ = store.search(x, k, 0.0)
        true = np.einsum("mkd,md->mk", keys[ids], x)
        np.testing.assert_allclose(scores[ids >= 0], true[ids >= 0], rtol=1e-4, atol=1e-4)


@storages
def test_of_few_keys_that_are_much_alike_codes_do_not_choose(storage, walked):
    rng = np.random.default_rng(0)
    keys = (rng.standard_normal(16) + 0.01 * rng.standard_normal((10, 16))).astype(np.float32)
    x = rng.standard_normal((100, 16)).astype(np.float32)
    store = walked(store_of(keys, x, storage))
    np.testing.assert_array_equal(store.search(x, 1, 1e6)[1][:, 0], (x @ keys.T).argmax(axis=1))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_key_that_is_no_number_does_not_spoil_the_others(value, walked):
    keys, x, store = world("flat", doubles=0)
    spoilt = keys.copy()
    spoilt[5] = value
    true = exact.top_k(np.delete(keys, 5, axis=0), x, 10)[1]
    true += true >= 5
    ids = walked(replace(store, keys=spoilt)).search(x, 11, 0.2)[1]
    shares = [len(set(row) & set(best)) / 10 for row, best in zip(ids, true, strict=True)]
    assert np.mean(shares) > 0.95


def test_flat_keys_whose_squares_vanish(walked):
    keys, x, store = world("flat", doubles=0)
    ids = walked(replace(store, keys=keys * np.float32(1e-30))).search(x, 10, 0.2e-30)[1]
    assert recalls(ids, exact.top_k(keys, x, 10)[1], 10).mean() > 0.95


def chain(storage, n=40):
    """Keys on an arc, each with the two beside it as neighbours, and one entry, at the far end."""
    angles = np.linspace(0, 1.5, n)
    keys = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    neighbours = np.stack([np.arange(n) - 1, np.arange(n) + 1], axis=1).astype(np.int32)
    neighbours[0], neighbours[-1] = [1, -1], [n - 2, -1]
    projection = learn_projection(open_vectors(keys), open_vectors(keys), 2) if storage == "lean" else None
    graph = replace(make_graph(keys, None, None), neighbours=neighbours, entries=np.int32([n - 1]))
    return GraphStore.build(open_vectors(keys), graph, storage, projection)


@storages
def test_a_walk_goes_along_the_edges(storage, walked):
    """From the far end it comes to the best key by every key between; then it stops, or goes on by margin."""
    store, x = walked(chain(storage)), np.float32([[1, 0]])
    _, ids, counts = store.search(x, 3, 0.0)
    np.testing.assert_array_equal(ids, [[0, 1, 2]])
    assert counts[0, 0] in (40, 39, 38)  # the last neighbours may be seen without being visited
    middle = np.float32([[np.cos(1.2), np.sin(1.2)]])
    few, more = (store.search(middle, 3, margin)[2][0, 0] for margin in (0.0, 0.1))
    assert few < more < 40


@storages
def test_a_query_of_zeros(storage, walked):
    _, x, store = world(storage)
    index = GraphSearcher(walked(store))
    mixed = x[:5].copy()
    mixed[[1, 3]] = 0
    scores, ids = index.search(mixed, 7, margin=0.1)
    np.testing.assert_array_equal(ids[[1, 3]], np.tile(np.arange(7), (2, 1)))
    assert (scores[[1, 3]] == 0).all()
    np.testing.assert_array_equal(ids[[0, 2, 4]], index.search(x[[0, 2, 4]], 7, margin=0.1)[1])
    np.testing.assert_array_equal(index.search(np.zeros(D), 3, margin=0.1)[1], [[0, 1, 2]])


@storages
def test_a_margin_of_any_size(storage, walked):
    _, x, store = world(storage)
    expected = walked(store).search(x[:2], 10, HUGE)[1]
    for margin in (1e20, 1e300):
        np.testing.assert_array_equal(walked(store).search(x[:2], 10, margin)[1], expected)


def test_codes_and_back():
    values = np.random.default_rng(0).integers(0, 16, (50, 24)).astype(np.uint8)
    codes = codes_of_values(values)
    assert codes.shape == (50, 12)
    np.testing.assert_array_equal(values_of_codes(codes), values)
    np.testing.assert_array_equal(codes_of_values(np.uint8([[1, 2, 3, 15]])), [[0x31, 0xF2]])
    assert len(np.unique(codes_of_values(np.uint8(list(np.ndindex(4, 4, 4, 4)))), axis=0)) == 256


@storages
def test_codes_stand_for_keys(storage):
    """What codes say of a score is near it."""
    keys, x, store = world(storage)
    true = x @ keys.T
    if storage == "flat":
        np.testing.assert_array_equal(store.keys, keys)
    elif storage == "sq8":
        scores = x @ (store.codes * store.step * store.unit).T
        assert np.abs(scores - true).max() < 0.05
        assert (scores - true).std() < 0.01 * true.std()
    else:
        projected = x @ (store.projection * store.scale[:, None]).T
        scores = projected @ (values_of_codes(store.codes) * store.step * store.unit).T
        errors = scores - true  # up to a constant: codes count from the least value of a dimension
        assert (errors - errors.mean(axis=1, keepdims=True)).std() < 0.2 * true.std()


# Who asks, and from where


@storages
def test_threads_do_not_matter(storage):
    _, x, store = world(storage)
    many = np.concatenate([x, x[::-1], x[:, ::-1]])
    expected = store.search(many, 10, 0.1, threads=1)
    for threads in (2, 5, None):
        for part, other in zip(store.search(many, 10, 0.1, threads=threads), expected, strict=True):
            np.testing.assert_array_equal(part, other)


@storages
def test_several_python_threads_at_once(storage):
    _, x, store = world(storage)
    parts = [x[low : low + 5] for low in range(0, M, 5)] * 3
    expected = [store.search(part, 10, 0.1)[1] for part in parts]
    fresh = replace(store)  # the first calls find nothing made ready
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda part: fresh.search(part, 10, 0.1, threads=2)[1], parts))
    for ids, other in zip(answers, expected, strict=True):
        np.testing.assert_array_equal(ids, other)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@storages
def test_a_child_answers_the_same(storage, tmp_path):
    _, x, store = world(storage)
    expected = store.search(x, 10, 0.1, threads=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons: this process has threads
        pid = os.fork()
    if pid == 0:
        try:
            answers = [store.search(x, 10, 0.1, threads=2), replace(store).search(x, 10, 0.1)]
            same = all(np.array_equal(a, b) for one in answers for a, b in zip(one, expected, strict=True))
            os._exit(0 if same else 3)
        finally:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@storages
def test_pickled(storage):
    _, x, store = world(storage)
    expected = store.search(x, 10, 0.1)
    again = pickle.loads(pickle.dumps(store))
    for part, other in zip(again.search(x, 10, 0.1), expected, strict=True):
        np.testing.assert_array_equal(part, other)


SCRIPT = """
import sys
from pathlib import Path
import numpy as np
from amips.index import GraphStore
place, storage = Path(sys.argv[1]), sys.argv[2]
store = GraphStore.load(place, storage, mmap=False)
for name, part in zip(("scores", "ids", "counts"), store.search(np.load(place / "x.npy"), 10, 0.1)):
    np.save(place / f"{name}.npy", part)
"""


@needs_compiled
@storages
def test_the_code_for_every_processor_answers_as_that_for_this_one(storage, tmp_path):
    """Which one runs is decided when the module is loaded: in a process of its own."""
    _, x, store = world(storage)
    scores, ids, counts = store.search(x, 10, 0.1)
    store.save(tmp_path)
    np.save(tmp_path / "x.npy", x)
    command = [sys.executable, "-c", SCRIPT, tmp_path, storage]
    subprocess.run(command, env=os.environ | {native.SWITCH: "generic"}, check=True)
    others = [np.load(tmp_path / f"{name}.npy") for name in ("scores", "ids", "counts")]
    assert (ids == others[1]).all(axis=1).mean() >= 0.97  # sums of floats are rounded in another order
    same = ids == others[1]
    np.testing.assert_allclose(scores[same], others[0][same], rtol=1e-5)
    if storage != "flat":  # whole numbers
        np.testing.assert_array_equal(counts, others[2])


@needs_compiled
def test_codes_in_another_order_are_not_read_wrongly():
    _, x, store = world("lean")
    turned = replace(store, codes=np.asfortranarray(store.codes))
    np.testing.assert_array_equal(turned.search(x, 10, 0.1)[1], store.search(x, 10, 0.1)[1])
