"""Keys come and go in any order, against a dictionary in numpy: the index always holds what it holds.

AMIPS_CHAOS says how many runs there are (`make chaos`: 300).
"""

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import amips
from amips.index import living_cells
from helpers import make_world

N, D = 240, 8
KINDS = ["flat", "sq8", "lean", "graph"]
RUNS = max(2, int(os.environ.get("AMIPS_CHAOS", "12")) // 3)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    folder = tmp_path_factory.mktemp("states")
    keys, queries = make_world(N, 400, D, seed=6)
    task = amips.label(keys, queries, cells=6, val=80, test=60, k=10, out=folder / "task")
    for kind in KINDS:
        options = {"structure": "graph", "storage": "flat"} if kind == "graph" else {"storage": kind}
        amips.build(task, out=folder / kind, **options)
    return folder, keys, queries


class Living(RuleBasedStateMachine):
    """An index on disk, a second reader of it, and what they should hold."""

    start: tuple = ()

    @initialize(kind=st.sampled_from(KINDS), seed=st.integers(0, 1000))
    def begin(self, kind, seed):
        folder, keys, self.queries = self.start
        self.folder = Path(tempfile.mkdtemp(prefix="amips-states-"))
        shutil.copytree(folder / kind, self.folder / "b")
        self.index, self.rng = amips.load(self.folder / "b"), np.random.default_rng(seed)
        self.reader = amips.load(self.folder / "b")
        self.present = dict(enumerate(keys))

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
        names = None if not named else (10**6 + self.rng.choice(10**9, count, replace=False)).tolist()
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

    @precondition(lambda self: self.present)
    @rule(count=st.integers(1, 20))
    def update(self, count):
        ids = self.some(count)
        keys = self.vectors(len(ids))
        self.index.update(ids, keys)
        self.present |= dict(zip(ids, keys, strict=True))

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
            "taken": lambda: self.index.add(self.vectors(2), [*self.some(1), 5] if self.present else [5, 5]),
            "unknown": lambda: self.index.remove([*self.some(1), 10**15]),
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
        scores, ids = index.search(x, 10, recall=1.0)
        if not self.present:
            assert (ids == -1).all()
            return
        names, keys = np.array(list(self.present)), np.array(list(self.present.values()))
        products = x @ keys.T
        best = np.sort(products, axis=1)[:, ::-1][:, :10]
        np.testing.assert_allclose(scores[:, : best.shape[1]], best, rtol=1e-4, atol=1e-5)
        assert (ids[:, best.shape[1] :] == -1).all()
        by_name = np.argsort(names)
        for row, line in enumerate(ids[:, : best.shape[1]]):
            assert len(set(line.tolist())) == len(line)
            at = by_name[np.searchsorted(names[by_name], line)]
            np.testing.assert_array_equal(names[at], line)
            np.testing.assert_allclose(products[row, at], best[row], rtol=1e-4, atol=1e-5)
        one = index.search(x[0], 5)[1]  # whatever the effort, nothing but what is there
        assert set(one[one >= 0].tolist()) <= set(self.present)


def test_any_order_of_changes(bundles, monkeypatch):
    monkeypatch.setattr(living_cells, "FEW", 8)  # so that there are several parts, and folds
    monkeypatch.setattr(living_cells, "FOLD", 100)
    Living.start = bundles
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    Living.TestCase.settings = settings(
        max_examples=RUNS,
        stateful_step_count=20,
        deadline=None,
        suppress_health_check=checks,
        derandomize=True,
    )
    Living.TestCase("runTest").runTest()
