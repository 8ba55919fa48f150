"""Traffic, drift and adaptation: what is watched, when it is called drift, and that the recall is kept."""

import pickle
import shutil
import threading

import numpy as np
import pytest

import amips
from amips.errors import AmipsError
from amips.search import FALSE_ALARMS, Point, QueryLog, Traffic, holm, kolmogorov_smirnov, recalls, safer
from helpers import make_world, unit

N, D = 1500, 16


@pytest.fixture(scope="module")
def world():
    keys, queries = make_world(N, 6000, D, seed=3)
    return keys, queries[:3000], queries[3000:]


@pytest.fixture(scope="module", params=["flat", "graph"])
def bundle(request, world, tmp_path_factory):
    keys, log, _ = world
    path = tmp_path_factory.mktemp("drift") / "bundle"
    options = {"structure": "graph"} if request.param == "graph" else {"storage": "flat"}
    amips.build(amips.label(keys, log, cells=24), out=path, recall=0.9, **options)
    return path


@pytest.fixture
def index(bundle):
    return amips.load(bundle)


def other_queries(keys, m, seed=0):
    """Queries that nobody had asked: keys with much noise."""
    rng = np.random.default_rng(seed)
    return unit(keys[rng.integers(len(keys), size=m)] + 0.4 * rng.standard_normal((m, keys.shape[1])))


class TestTwoSamples:
    def test_false_alarms_are_as_rare_as_stated(self):
        rng = np.random.default_rng(0)
        alarms = 0
        for _ in range(1000):
            p = [kolmogorov_smirnov(rng.random(150), rng.random(200))[1] for _ in range(5)]
            alarms += holm(np.array(p)).min() < FALSE_ALARMS
        assert alarms <= 20  # of 1,000: with a rate of 1 %, more come once in 600 times

    def test_values_that_are_equal_are_on_the_safe_side(self):
        rng = np.random.default_rng(1)
        p = [kolmogorov_smirnov(rng.integers(3, size=200), rng.integers(3, size=200))[1] for _ in range(500)]
        assert np.mean(np.array(p) < 0.05) <= 0.05

    def test_a_shift_is_seen(self):
        rng = np.random.default_rng(2)
        assert kolmogorov_smirnov(rng.random(500), rng.random(500) + 0.2)[1] < 1e-4

    def test_holm(self):
        assert holm(np.array([0.01, 0.04, 0.03])) == pytest.approx([0.03, 0.06, 0.06])


class TestTraffic:
    def test_every_fourth_of_single_queries_is_kept(self):
        traffic, x = Traffic(4, size=8), np.eye(4, dtype=np.float32)
        for i in range(12):
            traffic.note(x[i % 4 : i % 4 + 1])
        assert traffic.count == 3

    def test_a_ring_is_announced_once(self):
        traffic = Traffic(4, size=8)
        x = np.random.default_rng(0).standard_normal((16, 4)).astype(np.float32)
        assert [traffic.note(x) for _ in range(4)] == [False, True, False, True]
        assert len(traffic.recent()) <= 8

    def test_what_cannot_be_compared_is_left_out(self):
        traffic = Traffic(2, size=8, every=1)
        traffic.note(np.array([[np.nan, 1], [0, 0], [3, 4], [3, 4]], np.float32))
        assert traffic.recent() == pytest.approx(np.array([[0.6, 0.8], [0.6, 0.8]]))

    def test_threads(self):
        traffic = Traffic(2, size=64, every=1)
        x = np.ones((1, 2), np.float32)
        threads = [threading.Thread(target=lambda: [traffic.note(x) for _ in range(500)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert traffic.count == 2000

    def test_another_process_has_its_own(self, index, world):
        index.search(world[2][:800])
        again = pickle.loads(pickle.dumps(index))
        assert again._traffic.count == 0
        index.watch(False)
        assert pickle.loads(pickle.dumps(index))._traffic is None


class TestLog:
    def test_a_bundle_has_a_sample(self, index, world):
        log = index.origin.log
        assert len(log.train) > 1000
        assert (log.train_rounds == 0).all()
        top = np.argsort(-(log.train[:50].astype(np.float32) @ world[0].T), axis=1, kind="stable")[:, :1]
        assert (top == log.top[:50, :1]).mean() > 0.9
        assert index.origin.n == N

    def test_none_is_kept(self, world):
        task = amips.label(world[0], world[1], cells=8)
        index = amips.build(task, storage="flat", keep_log=False)
        assert index.origin.log is None
        with pytest.raises(AmipsError, match="no sample of its log"):
            index.drift(world[2])

    def test_older_rounds_fade(self):
        rng = np.random.default_rng(0)
        x, top = rng.standard_normal((400, 4)).astype(np.float32), np.zeros((400, 10), np.int32)
        halves, rounds = x.astype(np.float16), np.zeros(400, np.int16)
        log = QueryLog(halves, halves[:0], rounds, rounds[:0], top).followed_by(x, top, x[:50], most=600)
        assert len(log.train) == 600
        assert set(log.train_rounds) == {0, 1}
        assert 0.3 < len(log.older()[0]) / 600 < 0.95

    def test_a_key_that_goes_is_marked(self):
        top = np.array([[0, 2], [1, 2]], np.int32)
        halves, rounds = np.ones((2, 3), np.float16), np.zeros(2, np.int16)
        log = QueryLog(halves, halves, rounds, rounds, top).renumbered(np.array([0, 2]), 3)
        assert log.top.tolist() == [[0, 1], [-1, 1]]


class TestDrift:
    def test_traffic_like_the_log(self, index, world):
        index.search(world[2])
        result = index.drift()
        assert not result.drifted
        assert "looks like the log" in str(result)
        assert result.to_json()["verdict"] == "the same"

    def test_another_kind_of_queries(self, index, world):
        result = index.drift(other_queries(world[0], 600))
        assert result.drifted
        assert "not like the log" in str(result)
        assert result.comparisons[0].p < 1e-6

    def test_keys_that_go_are_no_drift(self, bundle, world, tmp_path):
        index = amips.load(shutil.copytree(bundle, tmp_path / "bundle"))
        top = np.argsort(-(world[2][:300] @ world[0].T), axis=1)[:, :3]
        index.remove(np.unique(top)[:600])
        assert not index.drift(world[2][:1000]).drifted

    def test_too_few(self, index):
        with pytest.raises(AmipsError, match="needs 100 at least"):
            index.drift()
        index.watch(False)
        with pytest.raises(AmipsError, match="does not watch"):
            index.drift()

    def test_many_removed(self, bundle, tmp_path):
        index = amips.load(shutil.copytree(bundle, tmp_path / "bundle"))
        index.remove(np.arange(N // 5))
        assert index.growth == "20% of its keys were removed: to search faster, run amips compact BUNDLE"
        more = make_world(N, N, D, seed=4)[0]
        index.add(more)
        assert "were removed" not in index.growth
        index.remove(np.arange(N // 5, N // 2))
        index.add(more)
        assert "were removed" in index.growth
        assert "would be cheaper" in index.growth  # the one does not hide the other
        index.compact()
        assert "were removed" not in index.growth

    def test_growth(self, index):
        assert index.growth is None
        assert "more cells would be cheaper" in index.origin.growth(2 * N, cells=True)
        assert index.origin.growth(int(1.4 * N), cells=True) is None


class TestAdapting:
    def test_recall_is_kept_and_the_cost_rises(self, index, world):
        keys, today = world[0], other_queries(world[0], 1600, seed=7)
        top = np.argsort(-(today @ keys.T), axis=1, kind="stable")[:, :10]
        before = recalls(index.snapshot.search(today[800:])[1], top[800:], 10).mean()
        result = index.adapt(today[:800])
        served = recalls(index.search(today[800:])[1], top[800:], 10).mean()
        assert served >= 0.89
        assert served >= before - 0.01
        assert "recall@10" in str(result)
        assert result.to_json()["queries"] == result.queries
        assert index.serving is not index.snapshot

    def test_and_goes_back(self, index, world):
        index.adapt(other_queries(world[0], 600))
        assert index.adaptation is not None
        assert index.adapt(world[2]) is None
        assert index.serving is index.snapshot

    def test_by_itself(self, index, world):
        today = other_queries(world[0], 4400)
        for part in np.split(today, 4):
            index.search(part)
        index.wait()
        assert index.adaptation is not None

    def test_only_a_report(self, bundle, world, caplog):
        index = amips.load(bundle, watch="report")
        index.search(other_queries(world[0], 4400))
        index.wait()
        assert index.adaptation is None
        assert "not like the log" in caplog.text

    def test_switched_off(self, bundle, world):
        index = amips.load(bundle, watch=False)
        index.search(other_queries(world[0], 4400))
        assert index.adaptation is None
        with pytest.raises(AmipsError, match="watch"):
            index.watch("sometimes")

    def test_safer_promises_the_less_of_both(self):
        def point(mass, sure):
            return Point(1, sure, sure, 0.1, 1 / mass, mass, assured=(sure,) * 10)

        fitted = [point(0.4, 0.8), point(0.2, 0.9), point(0.1, 0.99)]
        recent = [point(0.5, 0.7), point(0.3, 0.95), point(0.1, 0.97)]
        promised = {p.min_mass: p.assured[0] for p in safer(fitted, recent)}
        assert promised == {0.3: 0.8, 0.1: 0.97}
        fitted.append(point(0.01, 0.999))  # which was not tried on recent queries
        assert {p.min_mass: p.assured[0] for p in safer(fitted, recent)}[0.01] == 0.97
