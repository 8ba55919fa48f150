"""Relevance: the library's measures against a few lines that follow the definitions."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amips import AmipsError
from amips.bench.relevance import Relevance, difference, measure, read_qrels

pytest.importorskip("ir_measures")


def naive(judged, found):
    """nDCG@10 and recall@100 of one query: judgements by key, keys in the order found."""
    gains = [judged.get(name, 0) for name in found[:10]]
    best = sorted(judged.values(), reverse=True)[:10]

    def dcg(values):
        return sum(max(g, 0) / math.log2(i + 2) for i, g in enumerate(values))

    relevant = {name for name, score in judged.items() if score > 0}
    return dcg(gains) / dcg(best), len(relevant & set(found[:100])) / len(relevant)


@st.composite
def worlds(draw):
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    n, m, k = draw(st.integers(1, 150)), draw(st.integers(1, 5)), 120
    names = [f"k{i}" for i in rng.permutation(n)]  # so that the order of names is not that of numbers
    ids = np.full((m, k), -1)
    scores = np.full((m, k), -np.inf, np.float32)
    for row in range(m):
        count = int(rng.integers(0, min(n, k) + 1))
        ids[row, :count] = rng.permutation(n)[:count]
        values = rng.integers(0, 5, size=count) if draw(st.booleans()) else rng.random(count)
        scores[row, :count] = np.sort(values)[::-1]  # many are equal
    qrels = {
        f"q{row}": {names[i]: int(rng.integers(0, 3)) for i in rng.integers(n, size=rng.integers(1, 20))}
        for row in range(m)
    }
    qrels["q0"][names[0]] = 1
    return qrels, [f"q{row}" for row in range(m)], names, ids, scores


@settings(deadline=None, max_examples=60)
@given(worlds())
def test_measures_are_those_of_the_definitions(world):
    qrels, queries, names, ids, scores = world
    found = measure(*world)
    asked = [query for query in queries if any(score > 0 for score in qrels[query].values())]
    assert found.queries == asked
    for i, query in enumerate(asked):
        row = queries.index(query)
        order = sorted((-scores[row, j], ids[row, j]) for j in range(ids.shape[1]) if ids[row, j] >= 0)
        gain, recall = naive(qrels[query], [names[key] for _, key in order])
        assert found.values["nDCG@10"][i] == pytest.approx(gain, abs=1e-6)
        assert found.values["recall@100"][i] == pytest.approx(recall, abs=1e-6)
    means = measure(*world).means
    assert means == pytest.approx({name: values.mean() for name, values in found.values.items()})
    assert set(means) == {"nDCG@10", "recall@100"}


def test_equal_scores_are_ordered_by_number_as_search_orders_them():
    names = ["a", "b", *(f"x{i}" for i in range(10))]
    ids, scores = np.arange(12)[None], np.ones((1, 12), np.float32)
    first = measure({"q": {"a": 1}}, ["q"], names, ids, scores)
    second = measure({"q": {"b": 1}}, ["q"], names, ids, scores)
    assert first.values["nDCG@10"][0] == pytest.approx(1.0)
    assert second.values["nDCG@10"][0] == pytest.approx(1 / math.log2(3))


def test_a_query_that_is_a_key_does_not_answer_itself():
    ids, scores = np.array([[0, 1, 2]]), np.array([[3.0, 2.0, 1.0]], np.float32)
    arguments = {"a": {"b": 1}}, ["a"], ["a", "b", "c"], ids, scores
    assert measure(*arguments).means["nDCG@10"] == pytest.approx(1 / math.log2(3))
    assert measure(*arguments, drop_same_id=True).means["nDCG@10"] == pytest.approx(1.0)


def test_queries_without_judgements_or_answers():
    ids, scores = np.array([[0, 1], [-1, -1], [0, 1]]), np.array([[2, 1], [0, 0], [2, 1]], np.float32)
    found = measure({"p": {"a": 1}, "q": {"a": 1}, "r": {"a": 0}}, ["p", "q", "r"], ["a", "b"], ids, scores)
    assert found.queries == ["p", "q"]  # nothing is relevant to r
    assert found.values["recall@100"].tolist() == [1.0, 0.0]


def test_a_difference_is_paired():
    rng = np.random.default_rng(0)
    hard = rng.random(400)  # how hard a query is differs far more than the two systems do
    names = [f"q{i}" for i in range(400)]

    def system(gain):
        values = hard + gain + 0.01 * rng.standard_normal(400)
        return Relevance(names, {"nDCG@10": values, "recall@100": hard})

    better, base = system(0.01), system(0.0)
    found = difference(better, base, seed=1)
    gained = found["nDCG@10"]
    assert 0.005 < gained.low < gained.value < gained.high < 0.015
    assert gained.value == pytest.approx((better.values["nDCG@10"] - base.values["nDCG@10"]).mean())
    assert found["recall@100"] == type(gained)(0.0, 0.0, 0.0)
    assert found == difference(better, base, seed=1)
    with pytest.raises(AmipsError, match="same queries"):
        difference(better, Relevance(names[::-1], base.values))


def test_qrels_are_read_with_a_header_or_as_trec_writes_them(tmp_path):
    beir, trec = tmp_path / "qrels.tsv", tmp_path / "qrels.txt"
    beir.write_text('query-id\tcorpus-id\tscore\n01\t"a\t1\n01\tb b\t0\n02\ta\t2\n')
    assert read_qrels(beir) == {"01": {'"a': 1, "b b": 0}, "02": {"a": 2}}
    trec.write_text("01 0 a 1\n02 0 a 2\n\n")
    assert read_qrels(trec) == {"01": {"a": 1}, "02": {"a": 2}}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "no judgements"),
        (b"query-id\tcorpus-id\tscore\n", "no judgements"),
        (b"a\tb\n", "line 1: expected query-id"),
        (b"a\tb\t1\na\tb\tgood\n", "line 2: 'good'"),
        (b"\xff\xfe\t\t", "not a readable table"),
    ],
)
def test_damaged_qrels_are_one_line(tmp_path, body, says):
    (tmp_path / "qrels.tsv").write_bytes(body)
    with pytest.raises(AmipsError, match=says):
        read_qrels(tmp_path / "qrels.tsv")


def test_what_does_not_belong_together_is_refused():
    names, ids = [f"k{i}" for i in range(200)], np.arange(100)[None]
    scores = np.zeros((1, 100))
    with pytest.raises(AmipsError, match="belong together"):
        measure({"other": {"k1": 1}}, ["q"], names, ids, scores)
    with pytest.raises(AmipsError, match="k=100"):
        measure({"q": {"k1": 1}}, ["q"], names, ids[:, :10], scores[:, :10])
    with pytest.raises(AmipsError, match="one row"):
        measure({"q": {"k1": 1}}, ["q", "r"], names, ids, scores)
    with pytest.raises(AmipsError, match="from 0 to 49"):
        measure({"q": {"k1": 1}}, ["q"], names[:50], ids, scores)
    with pytest.raises(AmipsError, match="same id"):
        measure({"q": {"k1": 1}}, ["q", "q"], names, np.tile(ids, (2, 1)), np.tile(scores, (2, 1)))
    with pytest.raises(AmipsError, match="does not exist"):
        read_qrels("none.tsv")
