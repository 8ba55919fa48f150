"""What cannot matter does not: the norm of a query, the scale of all keys; and huge and tiny queries."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import amips
from amips import exact
from amips.blas import faiss
from amips.search import recalls
from amips.search.inputs import restore_norms, split_norms

N, D, M = 1500, 16, 1200
IP, L2 = faiss.METRIC_INNER_PRODUCT, faiss.METRIC_L2
STORAGES = ("flat", "sq8", "pq", "lean")


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(3)
    keys = rng.standard_normal((N, D)).astype(np.float32)
    return keys, *(rng.standard_normal((m, D)).astype(np.float32) for m in (M, 300))


@pytest.fixture(scope="module")
def indexes(data):
    task = amips.label(data[0], data[1], cells=40)
    model = amips.train(task, samples=20_000)
    built = {}
    for storage in STORAGES:
        options = {"dimensions": 8} if storage == "lean" else {}
        built[storage] = amips.build(task, model, storage=storage, recall=0.9, **options)
    return built


@given(
    st.sampled_from(STORAGES), st.integers(-120, 120), st.sampled_from([None, 0.8, 0.99]), st.integers(1, 12)
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_a_power_of_two_changes_nothing_but_the_scores(data, indexes, storage, exponent, recall, k):
    index, x = indexes[storage], data[2]
    scores, ids = index.search(x, min(k, 10), recall=recall)
    more, same = index.search(np.ldexp(x, exponent), min(k, 10), recall=recall)
    np.testing.assert_array_equal(same, ids)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(more, np.ldexp(scores, exponent))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("factor", [10.0, 100.0, 0.01, 1e30, 1e-30, 3e37])
def test_recall_does_not_depend_on_the_norm(data, indexes, storage, factor):
    index, x = indexes[storage], data[2]
    with np.errstate(over="ignore"):
        scaled = x * np.float32(factor)
    x, scaled = (rows[np.isfinite(scaled).all(axis=1)] for rows in (x, scaled))
    assert len(x) > 50
    # Rounding may change which of two nearly equal scores is the larger: one place in a thousand.
    assert (index.search(scaled)[1] != index.search(x)[1]).mean() < 1e-3
    cost, usual = index.cost(scaled), index.cost(x)
    assert (cost.scanned != usual.scanned).mean() < 0.02


@pytest.mark.parametrize("storage", STORAGES)
def test_huge_and_tiny_queries_find_the_same_keys(data, indexes, storage):
    x = data[2][:40]
    tiny = np.ldexp(x, -140)  # denormal: they have lost digits, so the truth is theirs
    huge = np.ldexp(x, 124)
    true = exact.top_k(data[0], np.ldexp(tiny, 140), 10)[1]
    ids = indexes[storage].search(tiny, 10, recall=1.0)[1]
    assert (ids[:, :, None] == true[:, None, :]).any(axis=1).mean() > 0.999
    scores, ids = indexes[storage].search(huge, 10, recall=1.0)
    np.testing.assert_array_equal(ids, exact.top_k(data[0], x, 10)[1])
    assert not np.isnan(scores).any()


def test_one_query_alone_is_scaled_as_in_a_batch(data, indexes):
    for factor in (1.0, 1e-20, 1e20):
        x = data[2][:20] * np.float32(factor)
        together = indexes["lean"].search(x)[1]
        alone = np.concatenate([indexes["lean"].search(row)[1] for row in x])
        np.testing.assert_array_equal(alone, together)


@pytest.mark.parametrize("factor", [2.0**-66, 1e-15, 2.0**-20, 0.3, 2.0**7, 2.0**40])
def test_the_scale_of_all_keys_changes_no_id(data, indexes, factor):
    keys, log, x = data
    task = amips.label(keys * np.float32(factor), log, cells=40)
    model = amips.train(task, samples=20_000)
    for storage in STORAGES:
        options = {"dimensions": 8} if storage == "lean" else {}
        index = amips.build(task, model, storage=storage, recall=0.9, **options)
        for effort in ({"probes": 5}, {"recall": 0.9}, {}):
            for k in (1, 10):
                ids, same = indexes[storage].search(x, k, **effort)[1], index.search(x, k, **effort)[1]
                if factor >= 2.0**-20 and np.log2(factor).is_integer():
                    np.testing.assert_array_equal(same, ids)
                assert (same == ids).mean() > 0.98  # codes are rounded elsewhere


@pytest.mark.parametrize(
    ("network", "cells"), [(amips.SupportNet, 40), (amips.KeyNet, 40), (amips.KeyNet, 1)]
)
def test_the_recall_of_networks_is_served_at_every_scale_of_the_keys(data, network, cells):
    """Networks begin at random weights, so they are others for keys of another scale; recall is measured."""
    keys, log, x = data
    true, reached = exact.top_k(keys, x, 10)[1], {}
    for factor in (1, 1e-15, 2.0**-20, 300):
        scaled = keys * np.float32(factor)
        task = amips.label(scaled, log, cells=cells, cell_targets=cells > 1)
        model = amips.train(task, network(depth=1, width=16), samples=20_000)
        index = amips.build(task if cells > 1 else amips.label(scaled, log, cells=40), model, recall=0.9)
        assert recalls(index.search(x)[1], true, 10).mean() > 0.88
        reached[factor] = recalls(index.search(x, probes=5)[1], true, 10).mean()
    assert reached[300] > reached[1] - 0.03


def test_the_scale_of_the_log_changes_no_id(data, indexes):
    keys, log, x = data
    index = amips.build(amips.label(keys, np.ldexp(log, 9), cells=40), None, recall=0.9)
    plain = amips.build(amips.label(keys, log, cells=40), None, recall=0.9)
    np.testing.assert_array_equal(index.search(x)[1], plain.search(x)[1])


# Indexes from elsewhere

WRAPPED = {
    "inner product": ("IVF40,Flat", IP),
    "codes": ("IVF40,PQ8x4", IP),
    "a mean is subtracted": ("PCA12,IVF40,Flat", IP),
    "L2": ("IVF40,Flat", L2),
    "L2, turned": ("RR16,IVF40,Flat", L2),
    "L2, codes": ("IVF40,SQ8", L2),
    "L2, a mean is subtracted": ("PCA12,IVF40,Flat", L2),
}


@pytest.fixture(scope="module")
def unit(data):
    keys, log, x = data
    return (keys + np.float32(0.3)) / np.linalg.norm(keys + np.float32(0.3), axis=1, keepdims=True), log, x


def faiss_index(keys, name):
    factory, metric = WRAPPED[name]
    index = faiss.index_factory(D, factory, metric)
    ivf = faiss.extract_index_ivf(index)
    ivf.cp.min_points_per_centroid = 1
    if hasattr(ivf, "pq"):
        ivf.pq.cp.min_points_per_centroid = 1
    index.train(keys)
    index.add(keys)
    return index


@pytest.fixture(scope="module")
def wrapped(unit):
    """By name and whether a model chooses the cells; keys of norm 3 where that is asked for."""
    kept = {}

    def wrap(name, learned, norm=1.0):
        if (name, norm) not in kept:
            keys = np.float32(norm) * unit[0]
            index = faiss_index(keys, name)
            task = amips.label(keys, unit[1], cells=index)
            model = amips.train(task, amips.Linear(rank=0), samples=5000)
            kept[name, norm] = [amips.wrap(index, m, task=task, recall=0.3) for m in (None, model)]
        return kept[name, norm][learned]

    return wrap


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("learned", [False, True], ids=["centroids", "learned"])
@pytest.mark.parametrize("factor", [1e-30, 1e-3, 17.0, 1e30])
def test_norms_do_not_matter_to_a_wrapped_index(unit, wrapped, name, learned, factor):
    index, x = wrapped(name, learned), unit[2]
    for effort in ({"recall": 0.3}, {"probes": 8}, {"min_mass": 0.02}, {}):
        ids, same = index.search(x, **effort)[1], index.search(x * np.float32(factor), **effort)[1]
        assert (same == ids).mean() > 0.998
        cost, usual = index.cost(x * np.float32(factor), **effort), index.cost(x, **effort)
        assert (cost.scanned != usual.scanned).mean() < 0.02
    alone = np.concatenate([index.search(row * np.float32(factor), probes=8)[1] for row in x[:20]])
    assert (alone == index.search(x[:20], probes=8)[1]).mean() > 0.98


@pytest.mark.parametrize("name", ["L2", "L2, turned"])
@pytest.mark.parametrize("norm", [1.0, 3.0])
def test_nor_to_one_of_which_nothing_was_measured(unit, name, norm):
    keys, x = np.float32(norm) * unit[0], unit[2]
    index = amips.wrap(faiss_index(keys, name), None)
    assert index.key_norm == pytest.approx(norm, rel=1e-5)
    want = index.search(np.float32(norm) * x / np.linalg.norm(x, axis=1, keepdims=True), probes=8)[1]
    for factor in (1e-30, 1e-3, 1.0, 1e30):
        assert (index.search(x * np.float32(factor), probes=8)[1] == want).mean() > 0.998


@pytest.mark.parametrize("norm", [1.0, 3.0])
@pytest.mark.parametrize("name", ["inner product", "L2", "L2, turned"])
def test_scores_of_a_wrapped_index_are_those_of_faiss(unit, wrapped, name, norm):
    index, x = wrapped(name, False, norm), unit[2]
    for factor in (0.01, 1.0, 40.0):
        scaled = x * np.float32(factor)
        scores, ids = index.search(scaled, 10, probes=40)
        want = faiss_scores(index.index, scaled, ids)
        np.testing.assert_allclose(scores, want, rtol=1e-4, atol=1e-5 * factor)
    scores, ids = index.search(x * np.float32(1e30), 10, probes=40)
    assert not np.isnan(scores).any()
    assert (ids >= 0).all()


def faiss_scores(index, x, ids):
    """What FAISS has for these ids."""
    faiss.extract_index_ivf(index).nprobe = 40
    scores, every = index.search(x, index.ntotal)
    at = np.argsort(every, axis=1)
    return np.take_along_axis(np.take_along_axis(scores, at, 1), ids, 1)


def test_keys_of_different_norms_are_searched_by_distance(data):
    """As FAISS does: there is no inner product that it would find."""
    keys, _, x = data
    index = faiss_index(keys, "L2")
    plain = amips.wrap(index, None)
    assert plain.key_norm == 0
    index.nprobe = 8
    for factor in (1, 5):
        want = index.search(x * np.float32(factor), 10)
        got = plain.search(x * np.float32(factor), 10)
        np.testing.assert_allclose(got[0], want[0], rtol=1e-4, atol=1e-4)
        assert (got[1] == want[1]).mean() > 0.99


def test_missing_results_of_a_wrapped_index_stay_missing(unit, wrapped):
    for name, worst in (("inner product", -1), ("L2", 1)):
        scores, ids = wrapped(name, False).search(unit[2][:5] * np.float32(1e-3), N + 3, probes=1)
        assert (ids[:, -3:] == -1).all()
        assert (worst * scores[:, -3:] > 1e38).all()


def test_the_norm_of_the_keys_is_kept(unit, wrapped, tmp_path):
    index = wrapped("L2, codes", True, 3.0)
    assert index.key_norm == pytest.approx(3, rel=1e-5)
    index.save(tmp_path / "b")
    again = amips.load(tmp_path / "b", index=index.index)
    assert again.key_norm == index.key_norm
    np.testing.assert_array_equal(again.search(unit[2])[1], index.search(unit[2])[1])


def test_a_query_is_taken_apart_exactly():
    x = np.float32([[3e38, 1e38], [1e-45, 0], [0.6, 0.8], [0, 0]])
    u, v, exponents = split_norms(x)
    np.testing.assert_allclose(np.linalg.norm(u.astype(np.float64), axis=1), [1, 1, 1, 0], rtol=1e-6)
    np.testing.assert_array_equal(restore_norms(v, exponents), x)
    assert ((np.linalg.norm(v, axis=1) < 2) & (np.linalg.norm(v, axis=1) > 0.4))[:3].all()
