"""A memory of the log: what it recognises, what that is worth, and a bundle of it that cannot be forged."""

import json
import pickle
import shutil
from dataclasses import replace

import numpy as np
import pytest

import amips
from amips import native
from amips.builder import Builder
from amips.builder.memories import memory_of
from amips.cli import main
from amips.design import Design
from amips.files import sha256
from amips.index import KeyMask
from amips.search import (
    Index,
    Memory,
    MemorySearcher,
    Searcher,
    point_for,
    recalls,
    with_facts,
    with_memory,
)
from helpers import generate, reseal, unit

DEPTH, D = 40, 24
GRAPH = Design.graph(storage="flat", degree=16, entries=16)
CELLS = Design(64, recipe=None, storage="flat", spill_fraction=0.0)


def make_log(share, rows=1600):
    """Keys, and a log of which so much asks one of 60 queries again, with small changes."""
    keys, queries = generate(4000, 60 + rows, D, seed=3)
    rng = np.random.default_rng(4)
    again = rng.random(rows) < share
    log = np.where(again[:, None], queries[rng.integers(60, size=rows)], queries[60:])
    return keys, unit(log + 0.02 * rng.standard_normal(log.shape)).astype(np.float32), again


def make_task(share):
    keys, log, again = make_log(share)
    return amips.label(keys, log, split="time", cells=1, k=DEPTH, val=300, test=300), again


@pytest.fixture(scope="module")
def traffic():
    return make_task(0.7)


@pytest.fixture(scope="module")
def builder(traffic):
    return Builder(traffic[0])


@pytest.fixture(scope="module", params=["graph", "cells"])
def index(request, builder):
    """A graph or cells, with a memory in front."""
    made = builder.index(replace(GRAPH if request.param == "graph" else CELLS, memory=DEPTH))
    assert isinstance(made, MemorySearcher)
    return Index(made)


class TestRecognising:
    def test_what_came_before_is_recognised_and_little_else(self, index, traffic):
        task, again = traffic
        known, candidates = index.memory.recognise(np.asarray(task.test.queries))
        assert known[again[-300:]].mean() > 0.9
        assert known[~again[-300:]].mean() < 0.5
        assert candidates.shape == (known.sum(), DEPTH)

    def test_one_query_as_among_many_and_of_any_norm(self, index, traffic):
        x = np.asarray(traffic[0].test.queries)[:40]
        known, candidates = index.memory.recognise(x)
        several = index.search(x)
        place = 0
        for row in range(40):
            for norm in (1.0, 1e-3, 3e7):
                alone = index.memory.recognise_one((norm * x[row : row + 1]).astype(np.float32))
                assert (alone is not None) == known[row]
                if alone is not None:
                    np.testing.assert_array_equal(alone[0], candidates[place])
            place += int(known[row])
            single = index.search(7 * x[row])
            np.testing.assert_array_equal(single[1][0], several[1][row])
            np.testing.assert_allclose(single[0][0], 7 * several[0][row], rtol=1e-4, atol=1e-5)

    def test_compiled_and_in_numpy_alike(self, index, traffic, monkeypatch):
        x = np.asarray(traffic[0].test.queries)[:150]  # more than one compiled call takes
        compiled, scored = index.memory.nearest(x), index.search(x)
        ones = [index.memory.recognise_one(row[None]) for row in x]
        monkeypatch.setattr(native, "compiled", None)
        memory = replace(index.memory)  # without what it has made ready
        cosines, ids = memory.nearest(x)
        np.testing.assert_allclose(compiled[0], cosines, atol=1e-5)
        np.testing.assert_array_equal(compiled[1], ids)
        for row, one in zip(x, ones, strict=True):
            other = memory.recognise_one(row[None])
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                np.testing.assert_array_equal(one, other)
        again = replace(index.snapshot, memory=memory).search(x)
        np.testing.assert_allclose(scored[0], again[0], atol=1e-5)
        np.testing.assert_array_equal(scored[1], again[1])

    @pytest.mark.skipif(native.compiled is None, reason="nothing is compiled")
    def test_a_look_up_is_one_compiled_call(self, index, traffic, monkeypatch):
        x = np.asarray(traffic[0].test.queries)[:100]
        for name in ("search", "search_with", "search_few"):
            monkeypatch.setattr(Searcher, name, None)
        memory = replace(index.memory)
        assert memory.recognise(x)[0].any()
        assert any(memory.recognise_one(row[None]) is not None for row in x)

    def test_an_exact_repeat_is_recognised_whatever_the_gate(self, traffic, builder):
        train = traffic[0].train
        x = np.asarray(train.queries)[:200]
        memory = Memory.build(x, np.asarray(train.top_ids)[:200], builder.projection(8).queries, 0)
        known, candidates = memory.with_gate(1.0).recognise(x)
        assert known.all()
        np.testing.assert_array_equal(candidates, np.asarray(train.top_ids)[:200])

    def test_equal_queries_are_kept_once(self, traffic):
        keys, log, _ = make_log(0.7)
        log[:1000] = log[:10].repeat(100, axis=0)
        task = amips.label(keys, log, split="time", cells=1, k=DEPTH, val=300, test=300)
        assert len(memory_of(Builder(task), DEPTH).logged) == 10


class TestSearching:
    def test_scores_are_true_and_the_recall_is_kept(self, index, traffic):
        task = traffic[0]
        x, top = np.asarray(task.test.queries), np.asarray(task.test.top_ids)
        scores, ids = index.search(x)
        np.testing.assert_allclose(scores, np.einsum("md,mkd->mk", x, task.keys[ids]), atol=1e-5)
        assert (np.diff(scores, axis=1) <= 0).all()
        assert recalls(ids, top, 10).mean() > 0.93

    def test_it_costs_less_and_says_what(self, index, traffic):
        task = traffic[0]
        x = np.asarray(task.val.queries)
        cost, plain = index.cost(x), index.index.cost(x)
        assert cost.flops.mean() < plain.flops.mean()
        known, _ = index.memory.recognise(x)
        looking = index.memory.flops(x)
        np.testing.assert_array_equal(cost.flops[known], looking[known] + 2 * D * DEPTH)
        assert (cost.flops[~known] > looking[~known]).all()  # who is not recognised pays for it, too
        served = point_for(index.points, 0.95, 10)
        assert index.cost(np.asarray(task.val.queries)).flops.mean() == pytest.approx(served.flops)
        assert served.recognised == pytest.approx(
            index.memory.recognise(np.asarray(task.val.queries))[0].mean()
        )

    def test_every_recall_is_as_cheap_as_without(self, index):
        for recall in (0.5, 0.8, 0.9, 0.95, 0.98, 1.0):
            costs = []
            for points in (index.points, index.index.points):
                reach = max(point.recall_assured(10) for point in points)
                costs.append(point_for(points, recall, 10).flops if reach >= recall else np.inf)
            assert costs[0] <= costs[1]

    def test_what_was_not_measured_is_searched_without_it(self, index, traffic):
        x = np.asarray(traffic[0].test.queries)[:20]
        effort = {"margin": 0.2} if index.design.structure == "graph" else {"probes": 3}
        for options in ({"k": 10, **effort}, {"k": 30, **effort}):
            for a, b in zip(index.search(x, **options), index.index.search(x, **options), strict=True):
                np.testing.assert_array_equal(a, b)
        with pytest.warns(UserWarning, match="recall is known of the top 10"):
            more = index.search(x, 15)
        with pytest.warns(UserWarning, match="recall is known of the top 10"):
            np.testing.assert_array_equal(more[1], index.index.search(x, 15)[1])

    def test_bad_queries_labels_threads_and_errors(self, index, traffic):
        x = np.array(traffic[0].test.queries[:30])
        names = with_facts(index.snapshot, labels=np.arange(4000) + 10**6)
        np.testing.assert_array_equal(names.search(x, threads=1)[1], index.search(x)[1] + 10**6)
        x[3], x[4] = np.nan, 0
        scores, ids = index.search(x, on_bad="skip")
        assert (ids[3] == -1).all()
        assert np.isneginf(scores[3]).all()
        assert (scores[4] == 0).all()  # every key is as good
        with pytest.raises(amips.VectorError, match="query 3 is not finite"):
            index.search(x)
        with pytest.raises(amips.AmipsError, match="threads=0"):
            index.search(x[:2], threads=0)
        with pytest.raises(amips.AmipsError, match="recall=2"):
            index.search(x[:2], recall=2)
        assert index.search(x[:0])[1].shape == (0, 10)
        other = {"probes": 3} if index.design.structure == "graph" else {"margin": 0.2}
        for call in (index.search, index.cost):
            with pytest.raises(amips.AmipsError, match="this index"):
                call(x[:2], **other)

    def test_it_can_be_sent_to_another_process(self, index, traffic):
        x = np.asarray(traffic[0].test.queries)[:20]
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(index)).search(x)[1], index.search(x)[1])


def test_traffic_that_is_new_gets_no_memory():
    task, _ = make_task(0.0)
    builder = Builder(task)
    plain = builder.index(GRAPH)
    made = builder.index(replace(GRAPH, memory=DEPTH))
    assert made.design == plain.design
    assert made.points == plain.points
    assert builder.with_memory(plain, DEPTH) is plain


def test_a_memory_that_answers_wrongly_is_left_out(traffic, builder):
    plain, task = builder.index(GRAPH), traffic[0]
    wrong = np.random.default_rng(0).integers(task.n, size=(1000, DEPTH))
    memory = Memory.build(np.asarray(task.train.queries), wrong, builder.projection(8).queries, 0)
    assert with_memory(plain, memory, task.val, 0.95) is None


def test_more_than_the_task_has_is_refused(builder):
    with pytest.raises(
        amips.AmipsError, match="memory=41: the task has 40 top keys of each query; label with k=41"
    ):
        builder.index(replace(GRAPH, memory=41))


class TestChanging:
    """A memory serves on when keys are removed and the index is compacted; keys that come it cannot know."""

    @pytest.fixture
    def changed(self, index, traffic, tmp_path):
        """The index with a twentieth of its keys removed, what may be found, and top keys of test queries."""
        index.save(tmp_path / "bundle")
        changed, keys = amips.load(tmp_path / "bundle"), np.asarray(traffic[0].keys)
        gone = np.random.default_rng(7).choice(len(keys), len(keys) // 20, replace=False)
        changed.remove(gone)
        x = np.asarray(traffic[0].test.queries)
        scores = x @ keys.T
        scores[:, gone] = -np.inf
        return changed, gone, x, np.argsort(-scores, axis=1, kind="stable")[:, :10]

    def test_it_serves_on_after_keys_were_removed(self, changed, index):
        one, gone, x, top = changed
        assert isinstance(one.snapshot, MemorySearcher)
        known, candidates = one.snapshot.memory.recognise(x, one.snapshot.index.alive)
        assert known.mean() > 0.8 * index.memory.recognise(x)[0].mean() > 0
        assert (candidates < 0).any()
        ids = one.search(x)[1]
        assert not np.isin(ids, gone).any()
        assert recalls(ids, top, 10).mean() >= 0.93
        np.testing.assert_array_equal(np.concatenate([one.search(row)[1] for row in x]), ids)
        assert one.cost(x).flops.mean() < 1.1 * index.cost(x).flops.mean()

    def test_it_is_there_when_compacted(self, changed):
        one, _, x, _ = changed
        ids, flops = one.search(x)[1], one.cost(x).flops.mean()
        one.compact()
        for index in (one, amips.load(one.path)):
            assert isinstance(index.snapshot, MemorySearcher)
            assert recalls(index.search(x)[1], ids, 10).mean() > 0.97
            assert index.cost(x).flops.mean() == pytest.approx(flops, rel=0.05)

    def test_queries_whose_keys_are_gone_are_searched(self, index, traffic):
        memory, x = index.memory, np.asarray(traffic[0].test.queries)
        known, candidates = memory.recognise(x)
        alive = np.ones(index.n, bool)
        alive[candidates[0, : 1 + memory.depth // 8]] = False
        left = memory.recognise(x, KeyMask(alive))[0]
        assert not left[np.flatnonzero(known)[0]]
        assert memory.recognise_one(x[known][:1], KeyMask(alive)) is None
        assert memory.renumbered(np.flatnonzero(alive), index.n).logged.shape < memory.logged.shape
        assert memory.renumbered(np.arange(5), index.n) is None

    def test_added_keys_end_it(self, changed):
        one, _, x, _ = changed
        one.add(2 * x[:1])
        assert not isinstance(one.snapshot, MemorySearcher)
        assert one.search(x[0], 1)[1].item() == 4000


class TestBundle:
    @pytest.fixture
    def bundle(self, index, tmp_path):
        index.save(tmp_path / "bundle")
        (data,) = (tmp_path / "bundle").glob("data-*")
        return tmp_path / "bundle", data

    @pytest.mark.parametrize("mmap", [False, True])
    def test_the_same_answers_again(self, index, bundle, traffic, mmap):
        x = np.asarray(traffic[0].test.queries)
        loaded = amips.load(bundle[0], mmap=mmap)
        np.testing.assert_array_equal(loaded.search(x)[1], index.search(x)[1])
        assert (loaded.points, loaded.design) == (index.points, index.design)
        assert loaded.index.points == index.index.points
        np.testing.assert_array_equal(loaded.cost(x).flops, index.cost(x).flops)

    def test_info_tells_of_it(self, bundle, capsys, monkeypatch):
        monkeypatch.setattr("sys.argv", ["amips", "info", str(bundle[0])])
        assert main() in (0, None)
        text = capsys.readouterr().out
        assert "logged queries with 40 top keys each; recognised from a cosine of" in text
        assert "a memory of the log with 40 top keys a query" in text
        assert "recognised" in text

    @pytest.mark.parametrize(
        ("file", "change", "words"),
        [
            ("loggedtop.npy", lambda a: a + 4000, "names a key that is not there"),
            ("loggedtop.npy", lambda a: -1 - a, "names a key that is not there"),
            ("loggedtop.npy", lambda a: a[:-1], "loggedtop.npy"),
            ("loggedtop.npy", lambda a: a[:, :0], "names a key that is not there"),
            ("loggedtop.npy", lambda a: a.astype(np.int64), "loggedtop.npy"),
            ("loggedsizes.npy", lambda a: np.append(a[:-1], a[-1] + 1), "do not have"),
            ("loggedsizes.npy", lambda a: np.append([-1, a[0] + a[1] + 1], a[2:]), "do not have"),
            ("loggedsizes.npy", lambda a: np.append(a[:-1], 1 << 62), "do not have"),
            ("loggedsizes.npy", lambda a: a[:0], "loggedcentroids.npy"),
            ("loggedcentroids.npy", lambda a: a[:, :-1], "loggedcentroids.npy"),
            ("loggedprojection.npy", lambda a: a[:-1], "loggedprojection.npy"),
            ("loggedprojection.npy", lambda a: np.full_like(a, np.nan), "not finite"),
            ("logged.npy", lambda a: np.full_like(a, np.inf), "not finite"),
            ("logged.npy", lambda a: a[:0], "loggedtop.npy"),
        ],
    )
    def test_arrays_that_do_not_fit_are_refused(self, bundle, file, change, words):
        path, data = bundle
        np.save(data / file, change(np.load(data / file)))
        manifest = json.loads((path / "manifest.json").read_text())
        facts = {"size": (data / file).stat().st_size, "sha256": sha256(data / file)}
        reseal(path / "manifest.json", files={**manifest["files"], f"{data.name}/{file}": facts})
        with pytest.raises(amips.BundleError) as caught:
            amips.load(path)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("gate", [0, -0.5, 1.5, "1", True, [0.5]])
    def test_a_gate_that_cannot_be_is_refused(self, bundle, gate):
        reseal(bundle[0] / "manifest.json", gate=gate)
        with pytest.raises(amips.BundleError, match="gate="):
            amips.load(bundle[0])

    def test_a_memory_that_is_not_there_is_missed(self, bundle):
        path = bundle[0]
        shutil.copytree(path, path.with_name("other"))
        reseal(path / "manifest.json", gate=None)
        with pytest.raises(amips.BundleError, match="has a memory of the log, and there is none"):
            amips.load(path)
        other = path.with_name("other") / "manifest.json"
        files = json.loads(other.read_text())["files"]
        del files[f"{bundle[1].name}/loggedtop.npy"]
        reseal(other, files=files)
        with pytest.raises(amips.BundleError, match=r"does not list .*loggedtop\.npy"):
            amips.load(path.with_name("other"))


def test_an_audit_measures_it_with_its_memory(index, traffic, tmp_path):
    task, _ = traffic
    queries, top = np.asarray(task.test.queries), np.asarray(task.test.top_ids)
    audit = index.audit(queries)
    assert audit.recall10.mean == pytest.approx(recalls(index.search(queries)[1], top, 10).mean())
    Index(audit.index).save(tmp_path / "bundle")
    again = amips.load(tmp_path / "bundle")
    np.testing.assert_array_equal(again.search(queries)[1], audit.index.search(queries)[1])
    # Where nothing comes again the memory answers nothing, and the recall is kept.
    strange = unit(np.random.default_rng(9).standard_normal((300, D))).astype(np.float32)
    other = index.audit(strange).index
    true = np.argsort(-(strange @ np.asarray(task.keys).T), axis=1, kind="stable")
    assert recalls(other.search(strange)[1], true, 10).mean() >= 0.95
