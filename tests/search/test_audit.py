"""The audit of an index: its recall on queries of now, and what they need."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest

import amips
from amips.cli import main
from amips.errors import AmipsError
from amips.metrics import mean_interval
from amips.search import GraphSearcher, Index, Searcher, recalls
from helpers import make_world

N, D = 600, 16
KINDS = {
    "flat cells": {"storage": "flat"},
    "lean cells": {"storage": "lean"},
    "a graph": {"structure": "graph"},
}


@pytest.fixture(scope="module", params=KINDS)
def index(request, task):
    return amips.build(task, recall=0.9, **KINDS[request.param])


@pytest.fixture(scope="module")
def today():
    """The keys of `task`, and 300 queries that nothing was measured with."""
    keys, queries = make_world(N, 1000, D, seed=0)
    return keys, queries[700:]


def true_recall(index, keys, queries, ids=None):
    top = np.argsort(-(queries @ keys.T), axis=1, kind="stable")[:, :10]
    answers = index.search(queries)[1] if ids is None else ids
    return float(recalls(answers, top, 10).mean())


class TestAudit:
    def test_its_recall_is_that_of_the_answers(self, index, today):
        keys, queries = today
        audit = index.audit(queries)
        assert (audit.queries, audit.total) == (300, 300)
        assert audit.recall10.mean == pytest.approx(true_recall(index, keys, queries))
        assert audit.recall10.low < audit.recall10.mean < audit.recall10.high
        assert audit.target == 0.9

    def test_as_promised_on_such_queries(self, index, today):
        audit = index.audit(today[1])
        assert audit.verdict in ("kept", "likely kept")
        assert audit.flops == pytest.approx(audit.promised_flops, rel=0.25)

    def test_of_queries_of_another_kind(self, index, today):
        """Queries that nobody had asked: the recall falls, and what is needed costs more, and keeps it."""
        keys, _ = today
        rng = np.random.default_rng(5)
        strange = rng.standard_normal((600, D)).astype(np.float32)
        audit = index.audit(strange[:300], recall=0.99)
        asked = index.search(strange[300:], recall=0.99, best_effort=True)[1]
        reached = true_recall(index, keys, strange[300:], asked)
        assert audit.recall10.low - 0.05 <= reached <= audit.recall10.high + 0.05
        adopted = audit.index
        kept = true_recall(adopted, keys, strange[300:], adopted.search(strange[300:], recall=0.99)[1])
        assert kept >= 0.985
        assert audit.needed.recall_assured(10) >= 0.99

    def test_a_sample(self, index, today):
        audit, again, other = (index.audit(today[1], sample=50, seed=seed) for seed in (1, 1, 2))
        assert audit.queries == 50
        assert audit.recall10 == again.recall10
        assert audit.recall10 != other.recall10 or audit.recall1 != other.recall1
        whole = index.audit(today[1])
        assert audit.recall10.high - audit.recall10.low > whole.recall10.high - whole.recall10.low

    def test_ids_of_ones_own_and_queries_of_any_norm(self, index, today):
        labelled = Index(replace(index.snapshot, labels=np.array([f"key {i}" for i in range(N)])))
        audit = labelled.audit(1e20 * today[1])
        assert audit.recall10 == index.audit(today[1]).recall10
        assert audit.index.search(today[1][0])[1][0, 0].startswith("key ")

    def test_told(self, index, today):
        audit = index.audit(today[1], sample=100)
        text, values = str(audit), json.loads(json.dumps(audit.to_json()))
        assert "100 of 300 queries, searched exactly" in text
        assert f"recall@10 {audit.recall10.mean:.3f}" in text
        assert values["recall10"]["mean"] == audit.recall10.mean
        assert values["verdict"] == audit.verdict
        assert len(values["points"]) == len(audit.points)
        assert "index" not in values

    @pytest.mark.parametrize(
        ("queries", "options", "said"),
        [
            (np.zeros((9, 5)), {}, "has dimension 5, this index needs 16"),
            (np.ones((1, D)), {}, "holds 1 query: a recall needs two at least"),
            (np.full((9, D), np.nan), {}, "NaN"),
            (np.ones((9, D)), {"sample": 1}, "sample=1: expected a whole number, at least 2"),
            (np.ones((9, D)), {"recall": 2}, "recall=2"),
        ],
    )
    def test_what_is_wrong_is_said_in_one_line(self, index, queries, options, said):
        with pytest.raises(AmipsError, match=said) as caught:
            index.audit(queries, **options)
        assert "\n" not in str(caught.value)

    def test_queries_that_are_not_finite_can_be_left_out(self, index, today):
        queries = today[1].copy()
        queries[::50] = np.nan
        assert index.audit(queries, on_bad="skip").queries == 294

    def test_where_nothing_was_measured(self, index, today):
        with pytest.raises(AmipsError, match="nothing was measured on this index"):
            Index(replace(index.snapshot, points=[])).audit(today[1])


def test_fewer_keys_than_ten():
    keys, queries = make_world(6, 300, D, seed=2)
    task = amips.label(keys, queries[:200], cells=2, val=50, test=20, k=5)
    audit = amips.build(task, storage="flat").audit(queries[200:])
    assert audit.recall10.mean >= 0.95


def test_an_interval_of_a_mean_holds_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        low, high = mean_interval(rng.binomial(10, 0.93, 200) / 10)
        hits += low <= 0.93 <= high
    assert 0.92 <= hits / 400 <= 1


class TestCommand:
    @pytest.fixture
    def bundle(self, task, tmp_path, today):
        amips.build(task, recall=0.9, structure="graph", out=tmp_path / "bundle")
        np.save(tmp_path / "today.npy", today[1])
        rng = np.random.default_rng(5)
        np.save(tmp_path / "strange.npy", rng.standard_normal((300, D)).astype(np.float32))
        return tmp_path

    @pytest.fixture
    def run(self, monkeypatch):
        def command(*words):
            monkeypatch.setattr(sys, "argv", ["amips", *map(str, words)])
            try:
                main()
            except SystemExit as end:
                return end.code
            return 0

        return command

    def test_in_words_and_as_json(self, bundle, run, capsys):
        assert run("audit", bundle / "bundle", bundle / "today.npy", "--sample", 100) == 0
        assert "100 of 300 queries, searched exactly" in capsys.readouterr().out
        assert run("audit", bundle / "bundle", bundle / "today.npy", "--json") == 0
        assert json.loads(capsys.readouterr().out)["verdict"] in ("kept", "likely kept")

    def test_what_is_missed_ends_with_3_until_it_is_adopted(self, bundle, run, capsys):
        words = ["audit", bundle / "bundle", bundle / "strange.npy"]
        low = amips.load(bundle / "bundle")
        assert isinstance(low.snapshot, GraphSearcher)
        cheap = [replace(p, assured=(0.999,) * 10) for p in low.points]
        Index(replace(low.snapshot, points=cheap)).save(bundle / "bundle")  # it promises what it cannot keep
        assert run(*words, "--recall", 0.99) == 3
        assert "is missed" in capsys.readouterr().out
        assert run(*words, "--recall", 0.99, "--adopt") == 0
        index = amips.load(bundle / "bundle")
        assert isinstance(index.snapshot, GraphSearcher | Searcher)
        assert index.target_recall == 0.99
        assert run(*words) == 0
