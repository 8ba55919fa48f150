"""What a search of one query looks at, beside exact search and plain IVF."""

import numpy as np
import pytest

import amips
from amips.search import PlainIvf
from amips.search.plain_ivf import AS_MANY_KEYS


@pytest.fixture(scope="module")
def index(task):
    return amips.build(task, recall=0.9)


@pytest.fixture(scope="module")
def x(task):
    return task.test.queries[:].copy()


def test_results_are_those_of_a_search(index, x):
    for row in x[:5]:
        result = index.explain(row, 5)
        scores, ids = index.search(row[None], 5)
        assert result.ids.tolist() == ids[0].tolist()
        np.testing.assert_allclose(result.scores, scores[0], rtol=1e-5)
        cost = index.cost(row[None], 5)
        ours = result.methods[0]
        assert (ours.name, ours.scanned, ours.probed) == ("amips", cost.scanned[0], cost.probed[0])


def test_the_true_top_keys_are_known_and_cells_are_those_that_were_scanned(index, x, task):
    keys = task.keys[:]
    for row in x[:5]:
        result = index.explain(row, 5, probes=2)
        assert result.way == "cells"
        assert len(result.cells) == 2
        assert result.top_ids.tolist() == np.argsort(-(keys @ row))[:5].tolist()
        exact = result.methods[-1]
        assert (exact.name, exact.scanned, result.hits(exact)) == ("exact search", index.n, 5)
        assert all(one.seconds > 0 for one in result.methods)


def test_plain_ivf_scores_as_many_keys(index, x):
    for row in x[:5]:
        result = index.explain(row, 5)
        plain = {one.name: one for one in result.methods}.get(AS_MANY_KEYS)
        if plain is None:
            assert any("plain IVF" in note for note in result.notes)
        else:
            assert plain.scanned >= result.methods[0].scanned
    assert "exact search" in str(result)


def test_a_graph_says_what_it_does_not_know(task, x):
    index = amips.build(task, structure="graph", recall=0.9)
    result = index.explain(x[0], 5)
    assert result.way == "graph"
    assert len(result.cells) == result.c == 0
    assert any("graph" in note for note in result.notes)
    beside = index.explain(x[0], 5, plain=PlainIvf.of(index.snapshot))
    assert AS_MANY_KEYS in [one.name for one in beside.methods]


def test_one_query_at_a_time(index, x):
    with pytest.raises(amips.AmipsError, match="one at a time"):
        index.explain(x[:2])
