"""Keys come and go in any order, against a dictionary in numpy: the index always holds what it holds.

AMIPS_CHAOS says how many runs there are (`make chaos`: 300).
"""

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import amips
from amips.fitting import refitting
from amips.index import living_cells
from amips.search import Index, Memory, MemorySearcher
from helpers import make_world

N, D = 240, 8
KINDS = ["flat", "sq8", "lean", "graph", "named", "memory"]
RUNS = max(5, int(os.environ.get("AMIPS_CHAOS", "12")) // 6)  # of each kind


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    folder = tmp_path_factory.mktemp("states")
    keys, queries = make_world(N, 500, D, seed=6)
    task = amips.label(keys, queries, cells=6, val=80, test=60, k=10, out=folder / "task")
    for kind in KINDS:
        options = {"storage": "flat" if kind in ("graph", "named", "memory") else kind}
        options |= {"structure": "graph"} if kind == "graph" else {}
        options |= {"ids": [f"key {i}" for i in range(N)]} if kind == "named" else {}
        index = amips.build(task, out=folder / kind, **options)
        if kind == "memory":
            remembering(index, task).save(folder / kind)
    return folder, keys, queries


def remembering(index, task):
    """The index with a memory of its log, which serves whenever it is asked by recall."""
    plain, train = index.snapshot, np.asarray(task.train.queries)
    memory = Memory.build(train, np.asarray(task.train.top_ids)[:, :10], np.eye(D, dtype=np.float32), 0)
    known = replace(plain.points[-1], recall10=0.99, recognised=0.5, flops=1.0, assured=(0.99,) * 10)
    return Index(MemorySearcher(plain, memory.with_gate(0.999), [*plain.points, known]))


class Living(RuleBasedStateMachine):
    """An index on disk, a second reader of it, and what they should hold."""

    start: tuple = ()
    kind = ""

    @initialize(number=st.integers(0, 1000))
    def begin(self, number):
        (folder, keys, self.queries), kind = self.start, self.kind
        self.folder = Path(tempfile.mkdtemp(prefix="amips-states-"))
        shutil.copytree(folder / kind, self.folder / "b")
        self.index, self.rng = amips.load(self.folder / "b"), np.random.default_rng(number)
        self.reader = amips.load(self.folder / "b")
        names = [f"key {i}" for i in range(N)] if kind == "named" else range(N)
        self.present = dict(zip(names, keys, strict=True))  # in the order in which they were given
        self.stock = None  # an attribute of each key, once they have some

    def teardown(self):
        if hasattr(self, "index"):
            self.index.close()
            shutil.rmtree(self.folder)

    def vectors(self, count):
        rows = self.rng.standard_normal((count, D))
        return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)

    def some(self, count):
        ids = list(self.present)
        return [ids[i] for i in self.rng.choice(len(ids), min(count, len(ids)), replace=False)]

    @rule(count=st.integers(1, 60), named=st.booleans())
    def add(self, count, named):
        keys = self.vectors(count)
        names = (10**6 + self.rng.choice(10**9, count, replace=False)).tolist()
        names = [f"new {one}" for one in names] if self.kind == "named" else names if named else None
        ids = self.index.add(keys, names)
        assert not set(ids.tolist()) & set(self.present)
        self.present |= dict(zip(ids.tolist(), keys, strict=True))

    @precondition(lambda self: self.present)
    @rule(count=st.integers(1, 80))
    def remove(self, count):
        ids = self.some(count)
        self.index.remove(ids)
        for one in ids:
            del self.present[one]
            if self.stock is not None:
                self.stock.pop(one, None)

    @precondition(lambda self: self.present)
    @rule(count=st.integers(1, 20))
    def update(self, count):
        ids = self.some(count)
        keys = self.vectors(len(ids))
        self.index.update(ids, keys)
        self.present |= dict(zip(ids, keys, strict=True))

    @precondition(lambda self: self.present)
    @rule(classes=st.integers(1, 4))
    def set_attributes(self, classes):
        values = [int(one) for one in self.rng.integers(classes, size=len(self.present))]
        self.index.set_attributes(pa.table({"stock": values}))
        self.stock = dict(zip(self.present, values, strict=True))

    @precondition(lambda self: len(self.present) >= 40)
    @rule(back=st.booleans())
    def refit(self, back):
        """Refit, or go back behind the last refit, with all that has changed since."""
        try:
            if back and any(path.match("previous-*") for path in (self.folder / "b").iterdir()):
                self.index.rollback()
            else:
                self.index.refit(self.queries, minutes=0.002)
        except amips.AmipsError as problem:
            assert "refused" in str(problem)  # noqa: PT017

    @precondition(lambda self: self.present)
    @rule()
    def compact(self):
        self.index.compact()

    @rule()
    def load(self):
        self.index.close()
        self.index = amips.load(self.folder / "b")

    @precondition(lambda self: self.present)
    @rule()
    def save_elsewhere(self):
        self.index.save(self.folder / "copy")
        self.holds(amips.load(self.folder / "copy"))

    @rule()
    def refresh(self):
        self.reader.refresh()
        self.holds(self.reader)

    @rule(wrong=st.sampled_from(["taken", "unknown", "NaN"]))
    def refused(self, wrong):
        calls = {
            "taken": lambda: self.index.add(self.vectors(2), 2 * (self.some(1) or [5])),
            "unknown": lambda: self.index.remove([*self.some(1), "no" if self.kind == "named" else 10**15]),
            "NaN": lambda: self.index.add(np.full((1, D), np.nan)),
        }
        with pytest.raises(amips.AmipsError):
            calls[wrong]()

    @invariant()
    def is_what_it_should_be(self):
        if hasattr(self, "index"):
            self.holds(self.index)

    def holds(self, index):
        assert index.n == len(self.present)
        x = self.queries[:8]
        nothing = "" if self.kind == "named" else -1
        scores, ids = index.search(x, 10, recall=1.0)
        if not self.present:
            assert (ids == nothing).all()
            return
        self.answers(x, scores, ids, list(self.present), nothing)
        mask = np.random.default_rng(len(self.present)).random(len(self.present)) < 0.3
        chosen = [one for one, wanted in zip(self.present, mask, strict=True) if wanted]
        self.answers(x, *index.search(x, 10, recall=1.0, filter=mask), chosen, nothing)
        self.answers(x, *index.search(x, 10, recall=1.0, filter=chosen), chosen, nothing)
        if self.stock is not None:
            chosen = [one for one in self.present if self.stock.get(one) == 1]
            self.answers(x, *index.search(x, 10, recall=1.0, where="stock = 1"), chosen, nothing)
        for row in (x, x[:1]):  # whatever the effort, nothing but what is there
            found = index.search(row, 5)[1]
            assert set(found[found != nothing].tolist()) <= set(self.present)

    def answers(self, x, scores, ids, chosen, nothing):
        """These are the best of the chosen keys."""
        if not chosen:
            assert (ids == nothing).all()
            return
        names, keys = np.array(chosen), np.array([self.present[one] for one in chosen])
        products = x @ keys.T
        best = np.sort(products, axis=1)[:, ::-1][:, :10]
        np.testing.assert_allclose(scores[:, : best.shape[1]], best, rtol=1e-4, atol=1e-5)
        assert (ids[:, best.shape[1] :] == nothing).all()
        by_name = np.argsort(names)
        for row, line in enumerate(ids[:, : best.shape[1]]):
            assert len(set(line.tolist())) == len(line)
            at = by_name[np.searchsorted(names[by_name], line)]
            np.testing.assert_array_equal(names[at], line)
            np.testing.assert_allclose(products[row, at], best[row], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_any_order_of_changes(bundles, monkeypatch, kind):
    monkeypatch.setattr(living_cells, "FEW", 8)  # so that there are several parts, and folds
    monkeypatch.setattr(living_cells, "FOLD", 100)
    monkeypatch.setattr(refitting, "WORTH", 2.0)  # so that a refit is hardly ever refused
    Living.start, Living.kind = bundles, kind
    seed(KINDS.index(kind))(Living)  # otherwise all kinds see the same changes
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    Living.TestCase.settings = settings(
        max_examples=RUNS,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=checks,
        derandomize=True,
    )
    Living.TestCase("runTest").runTest()
