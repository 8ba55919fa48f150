"""What cannot matter does not: the norm of a query, the scale of all keys; and huge and tiny queries."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import amips
from amips import exact
from amips.search.inputs import restore_norms, split_norms

N, D, M = 1500, 16, 1200
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


@pytest.mark.parametrize("exponent", [-20, 7])
def test_the_scale_of_all_keys_changes_no_id(data, indexes, exponent):
    keys, log, x = data
    task = amips.label(np.ldexp(keys, exponent), log, cells=40)
    model = amips.train(task, samples=20_000)
    for storage in STORAGES:
        options = {"dimensions": 8} if storage == "lean" else {}
        index = amips.build(task, model, storage=storage, recall=0.9, **options)
        for k in (1, 10):
            np.testing.assert_array_equal(
                index.search(x, k, probes=5)[1], indexes[storage].search(x, k, probes=5)[1]
            )


def test_the_scale_of_the_log_changes_no_id(data, indexes):
    keys, log, x = data
    index = amips.build(amips.label(keys, np.ldexp(log, 9), cells=40), None, recall=0.9)
    plain = amips.build(amips.label(keys, log, cells=40), None, recall=0.9)
    np.testing.assert_array_equal(index.search(x)[1], plain.search(x)[1])


def test_a_query_is_taken_apart_exactly():
    x = np.float32([[3e38, 1e38], [1e-45, 0], [0.6, 0.8], [0, 0]])
    u, v, exponents = split_norms(x)
    np.testing.assert_allclose(np.linalg.norm(u.astype(np.float64), axis=1), [1, 1, 1, 0], rtol=1e-6)
    np.testing.assert_array_equal(restore_norms(v, exponents), x)
    assert ((np.linalg.norm(v, axis=1) < 2) & (np.linalg.norm(v, axis=1) > 0.4))[:3].all()
