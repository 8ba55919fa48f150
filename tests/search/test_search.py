"""Searcher: every kind of input and option, against brute force over the cells that the router names."""

import itertools
import subprocess
import sys
import threading
import tracemalloc
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

import amips
from amips import AmipsError, RunError, VectorError
from amips.blas import _pools as blas_pools
from amips.blas import faiss
from amips.blas import threads as limit_threads
from amips.index import FaissCellStore
from amips.nets import AffineNet
from amips.search import Point, Searcher, ladder, mass_bounds, point_for, surest_point
from amips.vectors import open_vectors
from helpers import make_world, plain_build
from reference import architecture, best_in_cells, random_net

D, C = 16, 8  # of the task of conftest


def one_line(text):
    return "\n" not in str(text) and str(text) != ""


def net(kind="support", c=C, seed=0, **about):
    searcher = random_net(architecture(kind, d=D, c=c, width=12), seed)
    return replace(searcher, about=about)


@pytest.fixture(scope="module")
def index(task):
    """Routed by centroid."""
    return plain_build(task, None)


@pytest.fixture(scope="module")
def support(task):
    return plain_build(task, net())


@pytest.fixture(scope="module")
def mapper(task):
    return plain_build(task, net("key", c=1))


@pytest.fixture(scope="module")
def x(task):
    return np.array(task.test.queries)


def expected(searcher, task, x, probes, k):
    """Brute force over the best-scored cells of each query."""
    cells = np.argsort(-searcher.router.scores(x), axis=1, kind="stable")[:, : np.max(probes)]
    cells = np.where(np.arange(cells.shape[1]) < np.reshape(probes, (-1, 1)), cells, -1)
    return best_in_cells(task.keys, x, task.cells.assignment, cells, k)


def same(got, want, rtol=1e-5):
    np.testing.assert_array_equal(got[1], want[1])
    np.testing.assert_allclose(got[0], want[0], rtol=rtol, atol=1e-6)


class TestSearch:
    @pytest.mark.parametrize("probes", [1, 3, C])
    @pytest.mark.parametrize("kind", ["centroid", "support", "key", "mapper"])
    def test_scans_the_routed_cells(self, index, task, x, kind, probes):
        models = {"centroid": None, "support": net(), "key": net("key"), "mapper": net("key", c=1)}
        searcher = index.with_model(models[kind])
        got = searcher.search(x, 10, probes=probes)
        assert (got[0].dtype, got[1].dtype) == (np.float32, np.int64)
        same(got, expected(searcher, task, x, probes, 10))

    def test_all_cells_is_exact(self, support, task, x):
        got = support.search(x, 10, probes=C)
        np.testing.assert_array_equal(got[1], task.test.top_ids)
        np.testing.assert_allclose(got[0], task.test.top_scores, rtol=1e-5)

    def test_without_options_it_serves_its_target(self, task, x):
        for target in (0.8, 0.95):
            searcher = plain_build(task, None, recall=target)
            assert searcher.target_recall == target
            same(searcher.search(x), searcher.search(x, 10, recall=target))
            cost = searcher.cost(x, recall=target)
            np.testing.assert_array_equal(searcher.cost(x).flops, cost.flops)

    def test_without_a_target_probes_are_needed(self, index, x):
        unmeasured = index.with_model(net())
        with pytest.raises(AmipsError, match=r"^nothing was measured on this index: give probes$"):
            unmeasured.search(x)
        assert unmeasured.search(x, probes=2)[1].shape == (len(x), 10)

    @pytest.mark.parametrize("c", [2, 10])
    def test_few_large_cells(self, c):
        keys, asked = make_world(3000, 50, 32, seed=4)
        cells = amips.cells.kmeans(keys, c)
        store = FaissCellStore.build(open_vectors(keys), cells.assignment, cells.centroids, "flat")
        searcher = Searcher(store, random_net(architecture(d=32, c=c)))
        exact = np.argsort(-(asked @ keys.T), axis=1, kind="stable")[:, :10]
        np.testing.assert_array_equal(searcher.search(asked, 10, probes=c)[1], exact)
        for i in range(5):
            np.testing.assert_array_equal(searcher.search(asked[i], 10, probes=c)[1][0], exact[i])
        two = searcher.search(asked, 10, probes=2)[1]
        owners = searcher.cells[two]
        assert all(len(set(row)) <= 2 for row in owners)

    @pytest.mark.parametrize("storage", ["flat", "sq8", "pq", "lean"])
    def test_scores_are_inner_products(self, task, x, storage):
        searcher = plain_build(task, None, storage=storage)
        # Queries of any length: a score is <x, y>, not a cosine.
        long = x * np.linspace(0.1, 50, len(x), dtype=np.float32)[:, None]
        scores, ids = searcher.search(long, 5, probes=4)
        true = np.einsum("mkd,md->mk", task.keys[ids], long)
        np.testing.assert_allclose(scores, true, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(ids, searcher.search(x, 5, probes=4)[1])


class TestInput:
    @pytest.mark.parametrize(
        "convert",
        [
            lambda x: x.astype(np.float64),
            lambda x: np.repeat(x, 2, axis=0)[::2],
            lambda x: np.repeat(x, 3, axis=1)[:, ::3],
            np.asfortranarray,
            lambda x: x[::-1][::-1],
            lambda x: x.tolist(),
            lambda x: list(x),
            lambda x: x.astype(">f4"),
        ],
        ids=["float64", "rows", "columns", "fortran", "reversed", "lists", "arrays", "big-endian"],
    )
    def test_forms(self, support, x, convert):
        same(support.search(convert(x), 7, probes=3), support.search(x, 7, probes=3))

    @pytest.mark.parametrize("dtype", [np.float16, np.int8, np.uint8, np.int64])
    def test_types(self, support, x, dtype):
        coarse = np.abs(20 * x).astype(dtype)
        same(support.search(coarse, 7, probes=3), support.search(coarse.astype(np.float32), 7, probes=3))

    def test_input_is_left_as_it_is(self, support, x):
        given = x.copy()
        given.flags.writeable = False
        support.search(given, 5, probes=2)
        np.testing.assert_array_equal(given, x)
        bad = x.copy()
        bad[3, 2] = np.nan
        kept = bad.copy()
        support.search(bad, 5, probes=2, on_bad="skip")
        np.testing.assert_array_equal(bad, kept)

    def test_one_query(self, support, x):
        got = support.search(x[4], 6, probes=3)
        assert got[0].shape == got[1].shape == (1, 6)
        same(got, [part[4:5] for part in support.search(x, 6, probes=3)])

    def test_no_queries(self, support, mapper):
        nothing = np.empty((0, D), np.float32)
        for probes in (3, np.empty(0, np.int64)):
            scores, ids = support.search(nothing, 6, probes=probes)
            assert scores.shape == ids.shape == (0, 6)
            assert (scores.dtype, ids.dtype) == (np.float32, np.int64)
        assert mapper.search(nothing, 6, probes=2, drop_in=True)[1].shape == (0, 6)
        assert support.choose_cells(nothing, 3).shape == (0, 3)
        assert support.cost(nothing, probes=3).scanned.shape == (0,)

    @pytest.mark.parametrize(
        "bad",
        [
            np.zeros((3, D + 1)),
            np.zeros(D - 1),
            np.zeros((2, 3, D)),
            np.float32(1),
            [],
            ["a"] * D,
            [["1.0"] * D],
            np.zeros((2, D), complex),
            np.zeros((2, D), bool),
            np.full((2, D), None),
            [[1.0] * D, [1.0]],
            None,
        ],
        ids=lambda bad: f"{type(bad).__name__}-{np.shape(bad) if isinstance(bad, np.ndarray) else ''}",
    )
    def test_not_queries(self, support, bad):
        for call in (
            support.search,
            lambda q: support.choose_cells(q, 2),
            lambda q: support.cost(q, probes=2),
        ):
            with pytest.raises(VectorError, match=f"needs numbers \\[m, {D}\\]") as caught:
                call(bad)
            assert one_line(caught.value)

    def test_zero_query(self, support, mapper, index, task):
        zero = np.zeros((1, D), np.float32)
        for searcher in (support, mapper, index):
            scores, ids = searcher.search(zero, 5, probes=C)
            np.testing.assert_array_equal(scores, np.zeros((1, 5)))
            np.testing.assert_array_equal(ids, [range(5)])
        # Without a query every cell is as good: the first ones are taken.
        np.testing.assert_array_equal(index.choose_cells(zero, 3), [[0, 1, 2]])

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
    def test_not_finite(self, support, x, value):
        bad = x.astype(np.float64)
        bad[[2, 5], [1, 0]] = value
        with pytest.raises(VectorError, match=r'query 2 is not finite.*on_bad="skip"') as caught:
            support.search(bad, 4, probes=3)
        assert one_line(caught.value)
        scores, ids = support.search(bad, 4, probes=3, on_bad="skip")
        good = np.setdiff1d(np.arange(len(x)), [2, 5])
        assert (ids[[2, 5]] == -1).all()
        assert np.isneginf(scores[[2, 5]]).all()
        want = support.search(x, 4, probes=3)
        same((scores[good], ids[good]), (want[0][good], want[1][good]))
        with pytest.raises(VectorError, match="not finite"):
            support.choose_cells(bad, 2)

    def test_skip_of_a_single_query(self, support):
        scores, ids = support.search(np.full(D, np.nan), 3, probes=2, on_bad="skip")
        assert (ids == -1).all()
        assert np.isneginf(scores).all()


class TestNumbers:
    def test_more_results_than_keys(self, support, task, x):
        scores, ids = support.search(x[:3], task.n + 7, probes=C)
        np.testing.assert_array_equal(np.sort(ids[:, : task.n], axis=1), np.tile(np.arange(task.n), (3, 1)))
        assert (ids[:, task.n :] == -1).all()
        assert np.isneginf(scores[:, task.n :]).all()

    def test_more_results_than_keys_scanned(self, support, task, x):
        same(support.search(x, 300, probes=1), expected(support, task, x, 1, 300))
        assert (support.search(x, 300, probes=1)[1] == -1).any()

    def test_more_probes_than_cells(self, support, x):
        same(support.search(x, 5, probes=10_000), support.search(x, 5, probes=C))

    def test_numpy_integers(self, support, x):
        same(support.search(x, np.int64(5), probes=np.int32(2)), support.search(x, 5, probes=2))
        same(support.search(x[0], np.int64(5), probes=np.uint8(2)), support.search(x[0], 5, probes=2))

    @pytest.mark.parametrize("k", [0, -3, 2.0, "3", None])
    def test_bad_k(self, support, x, k):
        with pytest.raises(VectorError, match=r"^k=.*at least 1$") as caught:
            support.search(x, k, probes=2)
        assert one_line(caught.value)

    @pytest.mark.parametrize("probes", [0, -1, 2.0, "3", True, [1, 2], np.ones((2, 2), int)], ids=str)
    def test_bad_probes(self, support, x, probes):
        with pytest.raises(AmipsError, match="probes") as caught:
            support.search(x, 5, probes=probes)
        assert one_line(caught.value)

    def test_one_bad_count_among_many(self, support, x):
        counts = np.full(len(x), 3)
        counts[7] = 0
        with pytest.raises(AmipsError, match="probes=0: "):
            support.search(x, 5, probes=counts)

    @pytest.mark.parametrize("drop_in", [False, True])
    def test_probes_of_each_query(self, mapper, task, x, drop_in):
        counts = np.random.default_rng(0).integers(1, C + 4, len(x))
        got = mapper.search(x, 6, probes=counts, drop_in=drop_in)
        alone = [mapper.search(x[i], 6, probes=int(counts[i]), drop_in=drop_in) for i in range(len(x))]
        same(got, [np.concatenate(part) for part in zip(*alone, strict=True)])
        same(mapper.search(x, 6, probes=counts.tolist(), drop_in=drop_in), got)
        assert len(set(counts)) > 5
        if not drop_in:
            same(got, expected(mapper, task, x, np.minimum(counts, C), 6))

    def test_probes_and_recall(self, support, x):
        with pytest.raises(AmipsError, match="give one of recall, probes and min_mass"):
            support.search(x, 5, probes=2, recall=0.9)


@pytest.fixture(scope="module", params=["flat", "pq"])
def many_cells(request):
    rng = np.random.default_rng(0)
    keys, centroids = (rng.standard_normal((rows, 64)).astype(np.float32) for rows in (1000, 128))
    return FaissCellStore.build(open_vectors(keys), rng.integers(0, 128, 1000), centroids, request.param)


class TestBatches:
    @pytest.mark.parametrize("limit", [1, 30_000, 200_000])
    def test_blocks_give_the_same(self, task, x, limit, monkeypatch):
        for storage in ("flat", "sq8"):
            searcher = plain_build(task, net("key", c=1), storage=storage)
            counts = np.random.default_rng(0).integers(1, C + 1, len(x))
            # Bound to its arguments now: before and after blocks are searcher small.
            calls = [
                lambda searcher=searcher: searcher.search(x, 6, probes=3),
                lambda searcher=searcher, counts=counts: searcher.search(x, 6, probes=counts),
                lambda searcher=searcher: searcher.search(x, 6, probes=3, drop_in=True),
                lambda searcher=searcher: (np.zeros(1), searcher.choose_cells(x, 3)),
                lambda searcher=searcher: (np.zeros(1), searcher.cost(x, probes=3).scanned),
            ]
            whole = [call() for call in calls]
            with monkeypatch.context() as patch:
                patch.setattr("amips.search.inputs.BATCH_BYTES", limit)
                assert len(list(searcher.snapshot.batches(np.full(len(x), 3), 6, searcher.store.refine))) > 1
                for call, want in zip(calls, whole, strict=True):
                    same(call(), want)

    @pytest.mark.parametrize("kind", ["support", "key", "mapper", "centroid"])
    def test_memory_is_bounded(self, many_cells, kind, monkeypatch):
        c, d, m, limit = 128, 64, 1500, 1 << 22
        models = {
            "centroid": None,
            "mapper": random_net(architecture("key", d=d, c=1)),
            "key": random_net(architecture("key", d=d, c=c)),
            "support": random_net(architecture(d=d, c=c)),
        }
        searcher = Searcher(many_cells, models[kind])
        asked = np.random.default_rng(1).standard_normal((m, d)).astype(np.float32)
        searcher.search(asked[:2], 1, probes=2)  # what is searcher once is not what is measured
        monkeypatch.setattr("amips.search.inputs.BATCH_BYTES", limit)
        monkeypatch.setattr("amips.index.faiss_store.REFINE_BYTES", limit)
        tracemalloc.start()
        searcher.search(asked, 1, probes=c)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        # All keys of a KeyNet at once would be 49 MB, and as much the centroids of all probes.
        assert peak < 3 * limit


class TestCells:
    def test_facts(self, support, task):
        assert (support.n, support.d, support.c) == (task.n, D, C)
        assert support.cells.dtype == np.int32
        np.testing.assert_array_equal(support.cells, task.cells.assignment)
        assert repr(support).startswith(
            "<Index: 600 keys, d = 16; 8 query-aware cells (strength 1.5); SupportNet"
        )
        by_hand = repr(Searcher(support.store, support.model))
        assert by_hand == "<Searcher: 600 keys, d = 16, 8 cells (flat), routed by support>"

    @pytest.mark.parametrize("probes", [1, 3, C, 50])
    def test_route(self, support, x, probes):
        cells = support.choose_cells(x, probes)
        assert cells.dtype == np.int64
        want = np.argsort(-support.model.scores(x), axis=1, kind="stable")[:, :probes]
        np.testing.assert_array_equal(cells, want)
        np.testing.assert_array_equal(support.choose_cells(x[3], probes, threads=1), want[3:4])

    def test_route_of_a_mapper(self, mapper, task, x):
        key = mapper.model.keys(x)[:, 0]
        want = np.argsort(-(key @ task.cells.centroids.T), axis=1, kind="stable")[:, :4]
        np.testing.assert_array_equal(mapper.choose_cells(x, 4), want)

    @pytest.mark.parametrize("bad", [0, -2, 1.5, "2"])
    def test_bad_route(self, support, x, bad):
        with pytest.raises(AmipsError, match="probes"):
            support.choose_cells(x, bad)

    @pytest.mark.parametrize("probes", [1, 3, C, 50])
    def test_cost(self, index, support, mapper, task, x, probes):
        sizes = np.bincount(task.cells.assignment, minlength=C)
        h, forward = 12, 3 * D * 12 + 2 * 12 * 12  # what the three layers cost
        for searcher, routing in (
            (index, 2 * C * D),
            (support, 2 * (forward + h * C)),
            (mapper, 2 * (forward + h * D) + 2 * C * D),
        ):
            cost = searcher.cost(x, probes=probes)
            scanned = [sum(sizes[j] for j in row) for row in searcher.choose_cells(x, probes)]
            np.testing.assert_array_equal(cost.scanned, scanned)
            np.testing.assert_array_equal(cost.flops, routing + 2 * D * np.array(scanned))

    def test_cost_of_each_query(self, support, x):
        counts = np.arange(len(x)) % C + 1
        cost = support.cost(x, probes=counts)
        alone = [support.cost(x[i], probes=int(counts[i])) for i in range(len(x))]
        np.testing.assert_array_equal(cost.scanned, [one.scanned[0] for one in alone])
        np.testing.assert_array_equal(cost.flops, [one.flops[0] for one in alone])

    def test_cost_of_quantised_storage(self, task, x):
        searcher = plain_build(task, None, storage="sq8")
        cost = searcher.cost(x, probes=3, k=2)
        again = np.minimum(cost.scanned, 100)  # as many for few results as for ten
        np.testing.assert_array_equal(cost.flops, 2 * C * D + 2 * D * (cost.scanned + again))

    def test_another_model(self, support, x):
        other = support.with_model(None)
        assert other.router.name == "centroid"
        assert other.points == []
        assert (other.choose_cells(x, 1) != support.choose_cells(x, 1)).any()


def point(probes, recall1, recall10):
    return Point(probes, recall1, recall10, 0.1 * probes, 100.0 * probes)


class TestRecall:
    POINTS = (point(1, 0.5, 0.3), point(2, 0.8, 0.6), point(3, 0.8, 0.75), point(6, 0.95, 0.9))

    @pytest.mark.parametrize(
        ("k", "recall", "probes"),
        [(1, 0.5, 1), (1, 0.51, 2), (1, 0.8, 2), (1, 0.9, 6), (10, 0.5, 2), (10, 0.61, 3), (5, 0.9, 6)],
    )
    def test_the_fewest_probes(self, index, x, k, recall, probes):
        assert point_for(list(self.POINTS), recall, k).probes == probes
        searcher = replace(index.snapshot, points=list(self.POINTS))
        same(searcher.search(x, k, recall=recall), index.search(x, k, probes=probes))

    @pytest.mark.parametrize(("k", "name", "best"), [(1, "recall@1", "0.9500"), (10, "recall@10", "0.9000")])
    def test_out_of_reach(self, index, x, k, name, best):
        searcher = replace(index.snapshot, points=list(self.POINTS))
        text = f"recall 0.99 is out of reach: the highest {name} that can be relied on is {best}"
        with pytest.raises(AmipsError) as refused:
            searcher.search(x, k, recall=0.99)
        assert (
            str(refused.value) == f"{text}; ask for less, or take that with best_effort=True (--best-effort)"
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = searcher.search(x, k, recall=0.99, best_effort=True)
        assert [w.category for w in caught] == [UserWarning]
        assert str(caught[0].message) == text
        assert caught[0].filename == __file__
        same(got, index.search(x, k, probes=6))

    @pytest.mark.parametrize("recall", [0, -0.1, 1.01, np.nan, True, "0.9"])
    def test_not_a_share(self, index, x, recall):
        with pytest.raises(AmipsError, match="above 0 and up to 1") as caught:
            index.search(x, recall=recall)
        assert one_line(caught.value)

    def test_nothing_measured(self, index, x):
        with pytest.raises(AmipsError, match="give probes instead"):
            replace(index.snapshot, points=[]).search(x, recall=0.5)

    def test_what_can_be_relied_on_decides(self):
        sure = Point(4, 0.97, 0.96, 0.4, 400.0, assured=(0.95, 0.94, *[0.93] * 8))
        dear = Point(8, 1.0, 1.0, 0.8, 800.0, assured=(1.0,) * 10)
        assert point_for([sure, dear], 0.95, 1) is sure
        assert point_for([sure, dear], 0.95, 2) is dear
        assert point_for([sure, dear], 0.93, 10) is sure
        assert point_for([sure, dear], 0.935, 10) is dear

    def test_a_lucky_point_below_one_that_fails_is_not_relied_on(self):
        points = [point(1, 0.9, 0.91), point(2, 0.8, 0.8), point(3, 0.95, 0.95)]
        assert point_for(points, 0.9, 10).probes == 3
        assert surest_point(points, 10).probes == 3
        points[2] = point(3, 0.85, 0.85)
        with pytest.raises(AmipsError, match=r"highest recall@10 that can be relied on is 0\.8500"):
            point_for(points, 0.9, 10)
        assert surest_point(points, 10).probes == 3

    def test_measured_and_kept_on_other_queries(self, task, x):
        searcher = plain_build(task, None)
        for recall in (0.5, 0.8, 0.95):
            point = point_for(searcher.points, recall, 10)
            options = {"min_mass": point.min_mass} if point.min_mass else {"probes": point.probes}
            same(searcher.search(x, recall=recall), searcher.search(x, 10, **options))
            ids = searcher.search(x, recall=recall)[1]
            assert (ids[:, :, None] == task.test.top_ids[:, None, :]).any(axis=1).mean() > recall - 0.08

    @pytest.mark.parametrize("c", [1, 2, 5, 8, 100, 1024])
    def test_ladder(self, c):
        steps = ladder(c)
        assert steps[0] == 1
        assert steps[-1] == c
        assert (np.diff(steps) > 0).all()
        assert all(b <= max(a + 1, 1.25 * a + 1) for a, b in itertools.pairwise(steps))

    @pytest.mark.parametrize("kind", ["centroid", "support", "mapper"])
    def test_points_by_brute_force(self, index, support, mapper, task, kind):
        searcher = {"centroid": index, "support": support, "mapper": mapper}[kind]
        x, true = np.asarray(task.val.queries), np.asarray(task.val.top_ids)
        points = [p for p in searcher.points if not p.min_mass]
        assert [p.probes for p in points] == ladder(C)
        for p in points:
            ids = expected(searcher, task, x, p.probes, 10)[1]
            assert p.recall1 == pytest.approx(np.mean(ids[:, 0] == true[:, 0]))
            shares = [len(set(a) & set(b)) / 10 for a, b in zip(ids, true, strict=True)]
            assert p.recall10 == pytest.approx(np.mean(shares))
            cost = searcher.cost(x, probes=p.probes)
            assert p.scanned == pytest.approx(cost.scanned.mean() / task.n)
            assert p.flops == pytest.approx(searcher.router.flops + 2 * D * cost.scanned.mean())
        for name in ("probes", "scanned", "flops"):
            assert (np.diff([getattr(p, name) for p in points]) > 0).all()
        for name in ("recall1", "recall10"):
            assert (np.diff([getattr(p, name) for p in points]) >= 0).all()
            assert getattr(points[-1], name) == 1
        assert points[-1].scanned == 1


class TestMinMass:
    """A bound on the mass: the share of the top keys that a cell is expected to hold."""

    def cells_of(self, searcher, x, min_mass):
        """The cells of each query by softmax, in float64."""
        probed = []
        for row in searcher.router.scores(x).astype(np.float64) / searcher.temperature:
            chances = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
            probed.append({int(row.argmax()), *np.flatnonzero(chances >= min_mass).tolist()})
        return probed

    @pytest.mark.parametrize("min_mass", [1.0, 0.3, 0.1, 0.01, 1e-9])
    @pytest.mark.parametrize("kind", ["centroid", "support", "mapper"])
    def test_scans_the_cells_that_hold_enough(self, index, support, mapper, task, x, kind, min_mass):
        searcher = {"centroid": index, "support": support, "mapper": mapper}[kind]
        chosen = self.cells_of(searcher, x, min_mass)
        cells = np.array([[*row, *[-1] * (C - len(row))] for row in map(list, chosen)])
        got = searcher.search(x, 10, min_mass=min_mass)
        same(got, best_in_cells(task.keys, x, task.cells.assignment, cells, 10))
        alone = [searcher.search(row, 10, min_mass=min_mass) for row in x[:20]]
        same([np.concatenate(part) for part in zip(*alone, strict=True)], [part[:20] for part in got])
        cost = searcher.cost(x, min_mass=min_mass)
        assert cost.probed.tolist() == [len(row) for row in chosen]
        sizes = task.cells.sizes
        assert cost.scanned.tolist() == [sum(int(sizes[j]) for j in row) for row in chosen]
        np.testing.assert_array_equal(cost.scan, 2 * D * cost.scanned)
        np.testing.assert_array_equal(cost.flops, searcher.router.flops + 2 * D * cost.scanned)

    def test_easy_queries_probe_fewer_cells(self, index, x):
        probed = index.cost(x, min_mass=0.1).probed
        assert probed.min() < probed.max()
        everything = index.search(x, 10, min_mass=1e-30)
        same(everything, index.search(x, 10, probes=C))

    def test_cost_counts_the_cells_of_a_number_of_probes_too(self, index, x):
        probes = np.arange(len(x)) % 5 + 1
        cost = index.cost(x, probes=probes)
        np.testing.assert_array_equal(cost.probed, probes)
        cells = index.choose_cells(x, probes)
        np.testing.assert_array_equal((cells >= 0).sum(axis=1), cost.probed)
        np.testing.assert_array_equal(np.append(index.store.sizes, 0)[cells].sum(axis=1), cost.scanned)
        assert (index.cost(x, probes=99).probed == C).all()

    def test_in_small_blocks(self, index, x, monkeypatch):
        """Blocks differ in how many cells their hardest query needs."""
        want, cost = index.search(x, 10, min_mass=0.05), index.cost(x, min_mass=0.05)
        monkeypatch.setattr("amips.search.inputs.BATCH_BYTES", 1)
        same(index.search(x, 10, min_mass=0.05), want)
        np.testing.assert_array_equal(index.cost(x, min_mass=0.05).probed, cost.probed)

    def test_bad_queries_cost_one_cell(self, index, x):
        bad = x.copy()
        bad[[3, 8]] = np.nan
        scores, ids = index.search(bad, 5, min_mass=0.2, on_bad="skip")
        assert (ids[[3, 8]] == -1).all()
        good = np.setdiff1d(np.arange(len(x)), [3, 8])
        want = index.search(x, 5, min_mass=0.2)
        same((scores[good], ids[good]), (want[0][good], want[1][good]))
        assert index.cost(np.zeros((2, D)), min_mass=0.2).probed.tolist() == [1, 1]

    def test_no_queries(self, index):
        nothing = np.empty((0, D), np.float32)
        assert index.search(nothing, 4, min_mass=0.2)[1].shape == (0, 4)
        assert index.cost(nothing, min_mass=0.2).probed.shape == (0,)

    @pytest.mark.parametrize("min_mass", [0, -0.1, 1.01, np.nan, np.inf])
    def test_not_a_mass(self, index, x, min_mass):
        for call in (index.search, index.cost):
            with pytest.raises(
                AmipsError, match=r"^min_mass=.*: expected a share of the top keys, above 0 and up to 1$"
            ):
                call(x, min_mass=min_mass)

    @pytest.mark.parametrize(
        "options",
        [{"probes": 2, "min_mass": 0.1}, {"recall": 0.9, "min_mass": 0.1}, {"probes": 2, "recall": 0.9}],
    )
    def test_one_of_three(self, index, x, options):
        for call in (index.search, index.cost):
            with pytest.raises(AmipsError, match=r"^give one of recall, probes and min_mass$"):
                call(x, **options)

    def test_where_nothing_is_known_of_the_masses(self, index, x):
        for searcher in (replace(index.snapshot, temperature=0.0), index.with_model(net())):
            with pytest.raises(AmipsError, match=r"does not know what mass .* give probes$") as caught:
                searcher.search(x, min_mass=0.1)
            assert one_line(caught.value)

    @pytest.mark.parametrize("options", [{"min_mass": 0.1}, {"recall": 0.9}])
    def test_not_with_a_drop_in(self, mapper, x, options):
        with pytest.raises(
            AmipsError, match="recall and min_mass are for cells that a model chooses"
        ) as caught:
            mapper.search(x, 5, drop_in=True, **options)
        assert one_line(caught.value)

    def test_recall_takes_the_cheapest_point_by_mass_and_what_is_certain(self, index, x):
        points = [
            Point(2, 0.9, 0.9, 0.2, 100.0),
            Point(3, 0.9, 0.92, 0.3, 150.0, min_mass=0.1),
            Point(4, 0.99, 0.97, 0.4, 400.0),
            Point(6, 0.99, 0.98, 0.6, 500.0, min_mass=0.01),
        ]
        searcher = replace(index.snapshot, points=points)
        same(searcher.search(x, recall=0.9), index.search(x, min_mass=0.1))
        same(searcher.search(x, recall=0.95), index.search(x, min_mass=0.01))
        same(searcher.search(x, recall=0.98), index.search(x, min_mass=0.01))
        np.testing.assert_array_equal(searcher.cost(x, recall=0.9).probed, index.cost(x, min_mass=0.1).probed)
        with pytest.warns(UserWarning, match=r"recall@10 that can be relied on is 0\.9800$"):
            same(searcher.search(x, recall=0.99, best_effort=True), index.search(x, min_mass=0.01))
        every = Point(C, 1.0, 1.0, 1.0, 900.0, assured=(1.0,) * 10)
        same(
            replace(index.snapshot, points=[*points, every]).search(x, recall=0.99), index.search(x, probes=C)
        )

    def test_a_ladder_of_bounds(self):
        steps = mass_bounds()
        assert steps[0] == 0.4
        assert all(b == pytest.approx(2 / 3 * a) for a, b in itertools.pairwise(steps))
        assert 0 < steps[-1] < 1e-6


class TestIds:
    def test_whole_numbers(self, task, x):
        names = np.random.default_rng(0).permutation(task.n).astype(np.int64) * 10**12 - 5
        searcher, plain = plain_build(task, None, ids=names), plain_build(task, None)
        scores, ids = searcher.search(x, 200, probes=1)
        want = plain.search(x, 200, probes=1)
        assert ids.dtype == np.int64
        np.testing.assert_array_equal(scores, want[0])
        np.testing.assert_array_equal(ids, np.where(want[1] < 0, -1, names[want[1]]))
        assert (ids == -1).any()
        assert searcher.points == plain.points

    @pytest.mark.parametrize("kind", [list, np.array, lambda names: np.array(names, object)])
    def test_strings(self, task, x, kind):
        names = [f"Schlüssel {i}" for i in range(task.n)]
        searcher = plain_build(task, None, ids=kind(names))
        ids = searcher.search(x, 200, probes=1)[1]
        want = plain_build(task, None).search(x, 200, probes=1)[1]
        assert ids.dtype.kind == "U"
        assert ids.tolist() == [["" if i < 0 else names[i] for i in row] for row in want]
        assert "" in ids
        bad = np.full((1, D), np.nan)
        assert searcher.search(bad, 3, on_bad="skip")[1].tolist() == [["", "", ""]]
        assert searcher.search(x[:0], 3)[1].shape == (0, 3)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda ids: ids[:-1], "one for each of the 600 keys"),
            (lambda ids: np.stack([ids, ids]), "one for each of the 600 keys"),
            (lambda ids: np.where(ids == 5, 6, ids), "the same id"),
            (lambda ids: [str(i // 2) for i in ids], "the same id"),
            (lambda ids: ids + 0.5, "whole numbers or strings"),
            (lambda ids: ids.astype(bool), "whole numbers or strings"),
            (lambda ids: [None, *ids[1:]], "whole numbers or strings"),
            (lambda ids: ids.astype(np.uint64) + np.uint64(2**63), "does not fit in int64"),
        ],
    )
    def test_refused(self, task, change, message, tmp_path):
        with pytest.raises(AmipsError, match=message) as caught:
            plain_build(task, None, ids=change(np.arange(task.n)), out=tmp_path / "bundle")
        assert one_line(caught.value)
        assert not (tmp_path / "bundle").exists()


class TestDropIn:
    @pytest.fixture
    def spherical(self, task):
        """Each key is in the cell of its nearest centroid, as FAISS puts it."""
        return task.with_cells(amips.cells.kmeans(task.keys, C))

    @pytest.fixture
    def faiss_index(self, spherical):
        """As anyone would make it."""
        task = spherical
        quantizer = faiss.IndexFlatIP(D)
        quantizer.add(np.ascontiguousarray(task.cells.centroids))
        index = faiss.IndexIVFFlat(quantizer, D, C, faiss.METRIC_INNER_PRODUCT)
        index.train(np.asarray(task.keys))
        index.add(np.ascontiguousarray(task.keys))
        return index

    @pytest.mark.parametrize("kind", ["key", "support"])
    @pytest.mark.parametrize("probes", [1, 3, C])
    def test_without_rescoring_it_is_faiss_searched_with_the_prediction(
        self, spherical, faiss_index, x, kind, probes
    ):
        searcher = plain_build(spherical, net(kind, c=1))
        mapped = searcher.model.keys(x)[:, 0]
        scores, ids = searcher.search(x, 10, probes=probes, drop_in=True, rescore=False)
        faiss_index.nprobe = probes
        same((scores, ids), faiss_index.search(np.ascontiguousarray(mapped), 10), rtol=1e-4)

    @pytest.mark.parametrize("storage", ["flat", "sq8"])
    def test_with_rescoring_scores_are_of_the_query(self, task, x, storage):
        searcher = plain_build(task, net("key", c=1), storage=storage)
        mapped = searcher.model.keys(x)[:, 0]
        scores, ids = searcher.search(x, 5, probes=3, drop_in=True)
        np.testing.assert_allclose(scores, np.einsum("mkd,md->mk", task.keys[ids], x), rtol=1e-4, atol=1e-5)
        assert (np.diff(scores, axis=1) <= 0).all()
        if storage == "flat":  # the best 5 by x of the best 20 by the predicted key
            cells = searcher.choose_cells(x, 3)
            candidates = best_in_cells(task.keys, mapped, task.cells.assignment, cells, 20)[1]
            for row, query, given in zip(ids, x, candidates, strict=True):
                order = np.argsort(-(task.keys[given] @ query), kind="stable")[:5]
                np.testing.assert_array_equal(row, given[order])

    def test_padding(self, mapper, task, x):
        scores, ids = mapper.search(x, 300, probes=1, drop_in=True)
        same((scores, ids), mapper.search(x, 300, probes=1))
        assert (ids == -1).any()

    def test_needs_a_mapper(self, index, support, x):
        for searcher in (index, support):
            with pytest.raises(AmipsError, match="cells=1") as caught:
                searcher.search(x, 5, probes=2, drop_in=True)
            assert one_line(caught.value)


def thread_limits():
    """Of faiss and numpy; torch, where another test has loaded it, is not concerned."""
    info = [lib for lib in threadpool_info() if "numpy" in lib["filepath"] or "faiss" in lib["filepath"]]
    return faiss.omp_get_max_threads(), sorted((lib["filepath"], lib["num_threads"]) for lib in info)


class TestThreads:
    def test_the_same_answers_and_limits_restored(self, support, x, monkeypatch):
        inside = []
        real = FaissCellStore.scan
        monkeypatch.setattr(
            FaissCellStore, "scan", lambda *args: inside.append(thread_limits()) or real(*args)
        )
        with threadpool_limits(2):
            faiss.omp_set_num_threads(2)
            before = thread_limits()
            got = support.search(x, 5, probes=3, threads=1)
            assert thread_limits() == before
            with pytest.raises(AmipsError):
                support.search(x, 5, probes=3, drop_in=True, threads=1)
            assert thread_limits() == before
            want = support.search(x, 5, probes=3)
        same(got, want)
        assert inside[0][0] == 1
        assert {count for _, count in inside[0][1]} == {1}
        assert inside[1] == before

    @pytest.mark.parametrize("count", [0, -1])
    def test_too_few(self, support, x, count):
        before = thread_limits()
        with pytest.raises(AmipsError, match=f"threads={count}"):
            support.search(x, 5, probes=3, threads=count)
        assert thread_limits() == before

    def test_limits_that_overlap_are_all_undone(self):
        def blas():
            # Those that were there when amips was imported; other tests may have loaded one since.
            return [lib["num_threads"] for lib in blas_pools.info() if "openblas" in lib["prefix"]]

        entered, first_left = threading.Event(), threading.Event()

        def second():
            with limit_threads(1):
                entered.set()
                assert first_left.wait(30)

        outer = threadpool_limits(2, user_api="blas")  # not `with`: that would bind it to this thread
        try:
            before = blas()
            other = threading.Thread(target=second)
            with limit_threads(1):
                other.start()
                assert entered.wait(30)
                assert set(blas()) == {1}
            assert min(blas()) == 1  # numpy's has one limit for all threads, and the other call is not over
            first_left.set()
            other.join()
            assert blas() == before
        finally:
            outer.restore_original_limits()

    @pytest.mark.parametrize("drop_in", [False, True])
    @pytest.mark.parametrize("rows", [1, 5, 100])
    def test_eight_at_once(self, mapper, x, drop_in, rows):
        def search(probes):
            return mapper.search(x[:rows], 10, probes=probes, drop_in=drop_in)

        want = {probes: search(probes) for probes in range(1, C + 1)}
        assert (want[1][1] != want[C][1]).any()
        start = threading.Barrier(8)

        def work(probes):
            start.wait(30)
            return [search(probes) for _ in range(40)]

        with ThreadPoolExecutor(8) as pool:
            for probes, answers in zip(want, pool.map(work, want), strict=True):
                for got in answers:
                    same(got, want[probes])

    def test_eight_at_once_on_an_index_not_used_before(self, task, x):
        # What is computed on first use is computed by several threads at the same time.
        want = plain_build(task, net()).search(x, 10, probes=2)
        for _ in range(10):
            fresh = plain_build(task, net()).with_model(net())
            start = threading.Barrier(8)

            def work(_, fresh=fresh, start=start):
                start.wait(30)
                return fresh.search(x, 10, probes=2)

            with ThreadPoolExecutor(8) as pool:
                for got in pool.map(work, range(8)):
                    same(got, want)


class TestBuild:
    def test_a_model_of_other_keys(self, task, tmp_path):
        for kind, c in (("support", C), ("key", 1)):
            with pytest.raises(RunError, match="other keys") as caught:
                plain_build(task, net(kind, c=c, keys="0" * 64), out=tmp_path / "bundle")
            assert one_line(caught.value)
        assert not (tmp_path / "bundle").exists()

    def test_a_model_of_other_cells(self, task):
        with pytest.raises(RunError, match="other cells") as caught:
            plain_build(task, net(keys=task.fingerprint, cells="0" * 64))
        assert one_line(caught.value)
        # A mapper does not mind.
        plain_build(task, net("key", c=1, keys=task.fingerprint, cells="0" * 64))

    def test_a_model_of_another_number_of_cells(self, task):
        with pytest.raises(RunError, match="scores 5 cells, but there are 8") as caught:
            plain_build(task, net(c=5))
        assert one_line(caught.value)

    def test_a_model_of_another_dimension(self, task):
        with pytest.raises(RunError, match=r"dimension 6.*dimension 16"):
            plain_build(task, random_net(architecture(c=C)))

    def test_from_directories(self, task, support, x, tmp_path):
        net().save(tmp_path / "run")
        searcher = plain_build(str(task.path), str(tmp_path / "run"), out=tmp_path / "bundle")
        same(searcher.search(x, 5, probes=2), support.search(x, 5, probes=2))
        same(amips.load(tmp_path / "bundle").search(x, 5, probes=2), support.search(x, 5, probes=2))
        assert searcher.fingerprint == task.fingerprint


@pytest.mark.parametrize("kind", ["linear", "support", "key"])
def test_searching_needs_no_torch(task, x, kind, tmp_path):
    if kind == "linear":
        a = amips.Linear(bias=True).architecture(task.n, D, C)
        weights = {"W": np.array(task.cells.centroids), "b": np.zeros(C, np.float32)}
        model = AffineNet(a, weights, {})
    else:
        model = net(kind, c=C if kind == "support" else 1)
    plain_build(task, model, out=tmp_path / "bundle")
    np.save(tmp_path / "x.npy", x)
    program = f"""
import sys
import numpy as np
import amips
index = amips.load({str(tmp_path / "bundle")!r})
np.save({str(tmp_path / "ids.npy")!r}, index.search(np.load({str(tmp_path / "x.npy")!r}), 5, probes=2)[1])
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    want = amips.load(tmp_path / "bundle").search(x, 5, probes=2)[1]
    np.testing.assert_array_equal(np.load(tmp_path / "ids.npy"), want)


def test_recall_is_known_of_the_top_ten_only():
    points = [amips.search.Point(1, 0.9, 0.9, 0.1, 1.0)]
    with pytest.warns(UserWarning, match="recall is known of the top 10: of the top 11 it is lower"):
        assert point_for(points, 0.5, 11) is points[0]
    assert point_for(points, 0.5, 10) is points[0]  # a warning would be an error
