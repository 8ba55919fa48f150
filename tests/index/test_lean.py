"""The projection that keeps inner products: the best there is, and storage that scans it."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

import amips
from amips import AmipsError, VectorError, lean
from amips.builder import Builder, fewest_dimensions
from amips.builder.reduced import LEAN_FRACTIONS
from amips.index import FaissCellStore
from amips.vectors import open_vectors
from amips.vectors import vectors as table
from helpers import make_world, plain_build

D = 12


def spread(n, weights, seed):
    """Rows whose directions of more and less variance are turned at random."""
    rng = np.random.default_rng(seed)
    turn = np.linalg.qr(rng.standard_normal((len(weights), len(weights))))[0]
    return (rng.standard_normal((n, len(weights))) * weights @ turn).astype(np.float32)


KEYS = spread(300, 0.8 ** np.arange(D), seed=0)
QUERIES = spread(250, 0.7 ** np.arange(D), seed=1) + np.float32(0.3)


def learn(r, keys=KEYS, queries=QUERIES):
    return lean.learn_projection(open_vectors(keys), open_vectors(queries), r)


def error(a, b, keys=KEYS, queries=QUERIES):
    """E_x E_y (<A x, B y> - <x, y>)^2, pair by pair."""
    x, y = queries.astype(np.float64), keys.astype(np.float64)
    return float((((x @ a.T) @ (y @ b.T).T - x @ y.T) ** 2).mean())


class TestProjection:
    @pytest.mark.parametrize("r", [1, 3, 7, 11])
    def test_no_projection_of_this_size_has_a_smaller_error(self, r):
        projection = learn(r)
        assert projection.queries.shape == projection.keys.shape == (r, D)
        assert (projection.queries.dtype, projection.keys.dtype, projection.r) == (np.float32, np.float32, r)
        # All inner products are a matrix, and <A x, B y> is one of rank r: Eckart and Young.
        products = QUERIES.astype(np.float64) @ KEYS.T.astype(np.float64) / np.sqrt(len(QUERIES) * len(KEYS))
        singular = np.linalg.svd(products, compute_uv=False)
        assert error(projection.queries, projection.keys) == pytest.approx(
            (singular[r:] ** 2).sum(), rel=1e-3
        )
        np.testing.assert_allclose(projection.spectrum, singular[:D], rtol=1e-4)
        assert projection.kept == pytest.approx((singular[:r] ** 2).sum() / (singular**2).sum(), rel=1e-5)

    @pytest.mark.parametrize("r", [2, 6])
    def test_better_than_pca_and_than_anything_near(self, r):
        projection = learn(r)
        least = error(projection.queries, projection.keys)
        for rows in (KEYS, QUERIES, np.concatenate([KEYS, QUERIES])):
            main = np.linalg.svd(rows, full_matrices=False)[2][:r]
            assert error(main, main) > 1.05 * least
        rng = np.random.default_rng(2)
        for size in (1e-3, 1e-1):
            for _ in range(10):
                a, b = (
                    m + size * rng.standard_normal(m.shape) for m in (projection.queries, projection.keys)
                )
                assert error(a, b) > least

    def test_where_queries_are_like_keys_it_is_pca(self):
        projection = learn(4, KEYS, KEYS)
        main = np.linalg.svd(KEYS.astype(np.float64), full_matrices=False)[2][:4]
        np.testing.assert_allclose(projection.queries.T @ projection.keys, main.T @ main, atol=1e-5)

    def test_all_dimensions_give_the_inner_products(self):
        projection = learn(D)
        np.testing.assert_allclose(
            (QUERIES @ projection.queries.T) @ (KEYS @ projection.keys.T).T, QUERIES @ KEYS.T, atol=1e-4
        )
        assert projection.kept == pytest.approx(1)

    @pytest.mark.parametrize("r", [1, 5])
    def test_the_first_of_many_dimensions_are_the_best_few(self, r):
        few, first = learn(r), learn(D).first(r)
        assert first.r == r
        for name in ("queries", "keys", "functionals"):
            ours, theirs = getattr(first, name), getattr(few, name)
            signs = np.sign((first.queries * few.queries).sum(axis=1, keepdims=True))
            np.testing.assert_allclose(ours, signs * theirs, atol=2e-5)
        assert first.kept == pytest.approx(few.kept)

    @pytest.mark.parametrize("r", [2, 7])
    def test_weights_are_the_least_squares_solution(self, r):
        projection = learn(r)
        vectors = np.random.default_rng(3).standard_normal((5, D)).astype(np.float32)
        reduced = QUERIES.astype(np.float64) @ projection.queries.T.astype(np.float64)
        want = np.linalg.lstsq(reduced, QUERIES.astype(np.float64) @ vectors.T, rcond=None)[0].T
        np.testing.assert_allclose(projection.weights(vectors), want, rtol=1e-3, atol=1e-4)

    @pytest.mark.parametrize(("of_keys", "of_queries"), [(-66, 0), (0, 40), (50, -30), (-80, -80)])
    def test_the_scale_of_the_data_changes_nothing(self, of_keys, of_queries):
        want = learn(5)
        got = learn(5, np.ldexp(KEYS, of_keys), np.ldexp(QUERIES, of_queries))
        for name in ("queries", "keys", "functionals"):
            np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
        np.testing.assert_array_equal(got.spectrum, np.ldexp(want.spectrum, of_keys + of_queries))
        assert got.kept == pytest.approx(want.kept)

    def test_nor_does_a_factor_that_is_no_power_of_two(self):
        want, got = learn(5), learn(5, KEYS * np.float32(1e-20))
        products = [(QUERIES @ p.queries.T) @ (KEYS @ p.keys.T).T for p in (want, got)]
        np.testing.assert_allclose(*products, atol=1e-4)

    def test_keys_are_projected_as_they_are_read(self, monkeypatch):
        projection, whole = learn(3), KEYS @ learn(3).keys.T
        monkeypatch.setattr(table, "BLOCK_BYTES", 7 * 4 * 3)
        projected = projection.of_keys(open_vectors(KEYS))
        assert (projected.n, projected.d) == (len(KEYS), 3)
        assert len(list(projected.blocks())) > 10
        np.testing.assert_allclose(projected.load(), whole, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(projected.take(np.array([7, 290, 7])), whole[[7, 290, 7]], atol=1e-6)

    def test_a_sample_is_of_evenly_spaced_rows_whatever_the_blocks(self, monkeypatch):
        monkeypatch.setattr(lean, "SAMPLE", 60)  # every 5th key, every 4th query
        want = learn(4, KEYS[::5], QUERIES[::4])
        for size in (13, 64, 1000):
            monkeypatch.setattr(table, "BLOCK_BYTES", size * 4 * D)
            got = learn(4)
            np.testing.assert_allclose(got.spectrum, want.spectrum, rtol=1e-4)
            np.testing.assert_allclose(got.queries.T @ got.keys, want.queries.T @ want.keys, atol=1e-4)

    @pytest.mark.parametrize("r", [2, 3, 8])
    def test_queries_of_few_dimensions(self, r):
        flat = (QUERIES[:, :3] @ np.random.default_rng(4).standard_normal((3, D))).astype(np.float32)
        projection = learn(r, KEYS, flat)
        for matrix in (projection.queries, projection.keys, projection.functionals):
            assert np.isfinite(matrix).all()
        scale = float(((flat @ KEYS.T) ** 2).mean())
        lost = error(projection.queries, projection.keys, KEYS, flat) / scale
        assert lost < 1e-5 if r >= 3 else lost > 1e-3

    def test_nothing_to_learn_from(self):
        projection = learn(3, KEYS, np.zeros((5, D), np.float32))
        for matrix in (projection.queries, projection.keys, projection.functionals):
            assert np.isfinite(matrix).all()

    @pytest.mark.parametrize("r", [0, -1, D + 1])
    def test_a_dimension_that_cannot_be(self, r):
        with pytest.raises(VectorError, match=f"^r={r}: a projection has between 1 and {D} dimensions$"):
            learn(r)

    def test_keys_and_queries_of_other_dimensions(self):
        with pytest.raises(VectorError, match=r"^keys have dimension 12 but queries have dimension 5$"):
            learn(2, KEYS, QUERIES[:, :5])

    @pytest.mark.parametrize(
        ("d", "share", "rank"),
        [
            (384, 1 / 3, 128),
            (384, 0.4, 160),
            (768, 0.25, 192),
            (64, 0.4, 32),
            (32, 1 / 3, 16),
            (32, 0.1, 16),  # never fewer than a step, if there are as many
            (16, 1 / 3, 16),
            (20, 0.3, 16),
            (5, 0.4, 5),
            (1, 0.4, 1),
            (40, 1.0, 32),
        ],
    )
    def test_ranks_are_multiples_of_16_where_they_can_be(self, d, share, rank):
        assert lean.reduced_dimension(d, share) == rank


# Storage

N, DIM, CELLS, R = 3000, 32, 24, 16


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    keys, queries = make_world(N, 900, DIM, seed=6)
    out = tmp_path_factory.mktemp("lean") / "task"
    return amips.label(keys, queries, cells=CELLS, copies=0, val=100, test=200, k=10, out=out)


@pytest.fixture(scope="module")
def stored(data):
    return plain_build(data, None, storage="lean", dimensions=R)


@pytest.fixture(scope="module")
def x(data):
    return np.array(data.test.queries)


class TestStorage:
    def test_scores_are_inner_products(self, stored, data, x):
        long = x * np.linspace(0.1, 50, len(x), dtype=np.float32)[:, None]
        scores, ids = stored.search(long, 7, probes=5)
        np.testing.assert_allclose(scores, np.einsum("mkd,md->mk", data.keys[ids], long), rtol=1e-4)
        assert (np.diff(scores, axis=1) <= 0).all()
        assert all(len(set(row)) == 7 for row in ids.tolist())

    def test_only_probed_cells_are_scanned(self, stored, data, x):
        ids = stored.search(x, 10, probes=3)[1]
        cells = stored.choose_cells(x, 3)
        assert (data.cells.assignment[ids][:, :, None] == cells[:, None, :]).any(axis=2).all()
        np.testing.assert_array_equal(stored.cells, data.cells.assignment)
        np.testing.assert_array_equal(stored.store.centroids, data.cells.centroids)

    def test_nearly_all_of_the_true_keys_are_found(self, stored, data, x):
        """In half the dimensions, 4 bits each, with ten candidates for each result."""
        got = stored.search(x, 10, probes=CELLS)[1]
        true = np.asarray(data.test.top_ids)
        assert (true[:, :, None] == got[:, None, :]).any(axis=2).mean() > 0.97
        assert (got[:, 0] == true[:, 0]).mean() > 0.98

    def test_the_projection_is_that_of_the_training_queries(self, stored, data):
        keys, queries = open_vectors(data.keys), open_vectors(np.asarray(data.train.queries))
        want = lean.learn_projection(keys, queries, R)
        np.testing.assert_allclose(stored.store.projection, want.queries, rtol=1e-5, atol=1e-6)
        # Not that of the keys alone, which finds less.
        assert np.abs(stored.store.projection - lean.learn_projection(keys, keys, R).queries).max() > 0.1
        assert (stored.n, stored.d, stored.store.index.d) == (N, DIM, R)

    @pytest.mark.parametrize("k", [1, 10, 100])
    def test_one_query_is_as_one_of_many(self, stored, x, k):
        many = stored.search(x, k, probes=6)
        alone = [stored.search(row, k, probes=6) for row in x[:60]]
        np.testing.assert_array_equal(np.concatenate([ids for _, ids in alone]), many[1][:60])
        np.testing.assert_allclose(np.concatenate([s for s, _ in alone]), many[0][:60], rtol=1e-5)

    def test_more_results_than_keys_in_a_cell(self, stored, x):
        sizes = stored.store.sizes[stored.choose_cells(x, 1)[:, 0]]
        scores, ids = stored.search(x, 500, probes=1)
        np.testing.assert_array_equal((ids >= 0).sum(axis=1), np.minimum(sizes, 500))
        assert np.isneginf(scores[ids < 0]).all()

    def test_flops(self, stored, x):
        cost = stored.cost(x, probes=4, k=3)
        again = 2 * DIM * np.minimum(cost.scanned, 100)  # as many for three results as for ten
        scan = 2 * R * cost.scanned + 2 * R * DIM + 2 * 16 * R + again
        np.testing.assert_array_equal(cost.scan, scan)
        np.testing.assert_array_equal(cost.flops, scan + 2 * CELLS * DIM)

    def test_points_are_of_real_searches(self, stored, data):
        val, true = np.asarray(data.val.queries), np.asarray(data.val.top_ids)
        shared = [point for point in stored.points if point.min_mass]
        assert 1 < len(shared) < len(stored.points)
        for point in stored.points:
            options = {"min_mass": point.min_mass} if point.min_mass else {"probes": point.probes}
            if point.refine == 0:  # every key itself
                assert (point.recall10, point.scanned) == (1, 1)
                continue
            store = stored.store if point.refine is None else replace(stored.store, refine=point.refine)
            index = replace(stored.snapshot, store=store)
            ids = index.search(val, 10, **options)[1]
            hits = (true[:, :, None] == ids[:, None, :]).any(axis=2)
            assert point.recall10 == pytest.approx(hits.mean())
            assert point.recall1 == pytest.approx(hits[:, 0].mean())
            assert point.flops == pytest.approx(index.cost(val, **options).flops.mean())

    @pytest.mark.parametrize("threads", [1, 2])
    def test_threads(self, stored, x, threads):
        want = stored.search(x, 10, probes=5)
        np.testing.assert_array_equal(stored.search(x, 10, probes=5, threads=threads)[1], want[1])
        with ThreadPoolExecutor(4) as pool:
            probes = [1, 5, 9, 24] * 3
            answers = list(pool.map(lambda p: stored.search(x, 10, probes=p)[1], probes))
        for p, ids in zip(probes, answers, strict=True):
            np.testing.assert_array_equal(ids, stored.search(x, 10, probes=p)[1])

    @pytest.mark.parametrize("mmap", [False, True])
    def test_saved_and_loaded(self, stored, data, x, tmp_path, mmap):
        names = [f"key {i}" for i in range(N)]
        amips.search.save(replace(stored.snapshot, labels=np.array(names)), tmp_path / "b")
        assert len(list(tmp_path.glob("b/data-*/projection.npy"))) == 1
        loaded = amips.load(tmp_path / "b", mmap=mmap)
        assert (loaded.n, loaded.d, loaded.c, loaded.store.storage) == (N, DIM, CELLS, "lean")
        assert (loaded.points, loaded.temperature) == (stored.points, stored.temperature)
        for options in ({"probes": 5}, {"min_mass": 0.05}, {"recall": 0.9}):
            got, want = loaded.search(x, 10, **options), stored.search(x, 10, **options)
            np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
            np.testing.assert_array_equal(got[1], np.array(names)[want[1]])
        np.testing.assert_array_equal(loaded.cost(x, probes=5).flops, stored.cost(x, probes=5).flops)

    def test_keys_of_another_type_are_scored_all_the_same(self, stored, data, x):
        """A bundle of another program may hold them in float64, or column by column."""
        want = stored.search(x, 10, probes=4)
        for keys in (data.keys.astype(np.float64), np.asfortranarray(data.keys)):
            other = replace(stored.snapshot, store=replace(stored.store, keys=keys))
            got = other.search(x, 10, probes=4)
            np.testing.assert_array_equal(got[1], want[1])
            np.testing.assert_allclose(got[0], want[0], rtol=1e-5)

    def test_when_not_said_dimensions_are_the_fewest_that_keep_the_top_keys(self, data):
        chosen = plain_build(data, None, storage="lean").store.index.d
        builder = Builder(data)
        assert chosen == builder.lean_dimensions() == fewest_dimensions(data, builder.projection)
        assert chosen in [lean.reduced_dimension(DIM, fraction) for fraction in LEAN_FRACTIONS]

    @pytest.mark.parametrize("r", [0, -3, 33])
    def test_dimensions_that_cannot_be(self, data, r):
        with pytest.raises(AmipsError, match=r"dimensions=.*at least 1|there are only 32 dimensions"):
            plain_build(data, None, storage="lean", dimensions=r)

    @pytest.mark.parametrize("r", [1, 7, 32])
    def test_any_number_of_dimensions(self, data, x, r):
        searcher = plain_build(data, None, storage="lean", dimensions=r)
        scores, ids = searcher.search(x, 5, probes=4)
        np.testing.assert_allclose(scores, np.einsum("mkd,md->mk", data.keys[ids], x), rtol=1e-4)

    def test_dimensions_are_of_lean_storage_only(self, data, stored):
        with pytest.raises(AmipsError, match=r"dimensions.*lean"):
            plain_build(data, None, dimensions=8)
        keys, parts = open_vectors(data.keys), (data.cells.assignment, data.cells.centroids)
        with pytest.raises(AmipsError, match="needs a projection"):
            FaissCellStore.build(keys, *parts, "lean")
        with pytest.raises(AmipsError, match="no other storage has one"):
            FaissCellStore.build(keys, *parts, "flat", lean.learn_projection(keys, keys, 4))

    def test_few_keys(self, tmp_path, capfd):
        """FAISS finds 16 values for each dimension, and would complain of few keys on standard error."""
        keys, queries = make_world(20, 60, 8, seed=1)
        task = amips.label(keys, queries, cells=2, val=10, test=10, k=10, out=tmp_path / "task")
        searcher = plain_build(task, None, storage="lean", dimensions=4)
        assert capfd.readouterr() == ("", "")
        got = searcher.search(np.asarray(task.test.queries), 10, probes=2)[1]
        np.testing.assert_array_equal(got, task.test.top_ids)  # every key is a candidate
        task = amips.label(keys[:15], queries, cells=2, val=10, test=10, k=10, out=tmp_path / "fewer")
        with pytest.raises(
            AmipsError, match=r"^storage='lean' needs at least 16 keys, got 15; use 'flat' or"
        ):
            plain_build(task, None, storage="lean", dimensions=4)
