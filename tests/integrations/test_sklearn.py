"""Neighbours in scikit-learn's manner: its own checks, and what those leave out."""

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator

import amips
from amips.integrations.sklearn import AmipsNeighbors
from helpers import make_world

# Checks that do not apply, with the reason; docs/integrations.md has the same list.
LEFT_OUT = {"check_array_api_input": "arrays of other libraries are not taken: keys are numpy's float32"}
CHECKS = [
    (getattr(check, "func", check).__name__, estimator, check)
    for estimator, check in estimator_checks_generator(AmipsNeighbors())
]


@pytest.mark.parametrize(
    ("name", "estimator", "check"), CHECKS, ids=[f"{i}-{name}" for i, (name, _, _) in enumerate(CHECKS)]
)
def test_checks_of_scikit_learn(name, estimator, check):
    if name in LEFT_OUT:
        pytest.skip(LEFT_OUT[name])
    check(estimator)


@pytest.mark.parametrize("metric", ["inner_product", "cosine"])
def test_all_rows_are_scored_without_queries(metric):
    keys, x = make_world(300, 20, 8, seed=1)
    keys = keys * np.linspace(1, 2, 300, dtype=np.float32)[:, None]
    distances, rows = AmipsNeighbors(4, metric=metric).fit(keys).kneighbors(x)
    scores = x @ (keys / np.linalg.norm(keys, axis=1, keepdims=True) if metric == "cosine" else keys).T
    assert (rows == np.argsort(-scores, axis=1, kind="stable")[:, :4]).all()
    assert (np.diff(distances, axis=1) >= 0).all()
    offset = 1 if metric == "cosine" else 0
    np.testing.assert_allclose(distances, offset - np.take_along_axis(scores, rows, 1), atol=1e-5)


def test_its_own_rows_are_asked_without_themselves():
    keys, _ = make_world(60, 1, 8, seed=2)
    neighbors = AmipsNeighbors(3).fit(keys)
    assert not (neighbors.kneighbors(return_distance=False) == np.arange(60)[:, None]).any()
    graph = neighbors.kneighbors_graph()
    assert graph.shape == (60, 60)
    assert (np.diff(graph.indptr) == 3).all()


def test_it_learns_from_queries():
    keys, queries = make_world(600, 900, 16, seed=3)
    neighbors = AmipsNeighbors(5, recall=0.9, minutes=0.05).fit(keys, queries=queries[:700])
    x = queries[700:]
    _, rows = neighbors.kneighbors(x)
    assert neighbors.index_ is not None
    top = np.argsort(-(x @ keys.T), axis=1)[:, :5]
    assert np.mean([len(set(a) & set(b)) / 5 for a, b in zip(rows, top, strict=True)]) > 0.8
    assert clone(neighbors).get_params() == neighbors.get_params()


def test_queries_may_come_second():
    keys, queries = make_world(300, 400, 8, seed=5)
    for state in (None, np.random.RandomState(3), np.int64(3)):
        neighbors = AmipsNeighbors(5, recall=0.9, minutes=0.05, random_state=state).fit(keys, queries)
        assert neighbors.index_ is not None
    assert AmipsNeighbors(5).fit(keys, np.zeros(300)).index_ is None


def test_at_the_end_of_a_pipeline():
    keys, x = make_world(300, 20, 8, seed=6)
    pipeline = make_pipeline(StandardScaler(), AmipsNeighbors(5)).fit(keys)
    rows = pipeline[-1].kneighbors(pipeline[:-1].transform(x), return_distance=False)
    scaled = StandardScaler().fit(keys)
    expected = AmipsNeighbors(5).fit(scaled.transform(keys)).kneighbors(scaled.transform(x))[1]
    assert (rows == expected).all()


def test_errors_are_one_line():
    keys, queries = make_world(60, 60, 8, seed=4)
    with pytest.raises(amips.AmipsError, match="metric='l2'"):
        AmipsNeighbors(metric="l2").fit(keys)
    with pytest.raises(amips.AmipsError, match="leave queries out"):
        AmipsNeighbors().fit(keys, queries=queries)
    with pytest.raises(ValueError, match="n_neighbors = 61"):
        AmipsNeighbors().fit(keys).kneighbors(queries, 61)
