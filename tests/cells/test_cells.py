"""Partitions: the same for a seed, no cell empty, every key in its nearest cell."""

import numpy as np
import pytest

from amips import cells as partition
from amips.cells import Cells, kmeans
from amips.errors import VectorError
from amips.vectors import open_vectors
from helpers import make_world


@pytest.fixture(scope="module")
def keys():
    return make_world(2000, 1, 12, seed=0)[0]


def check(cells, n, c, d):
    """A partition of n keys into c cells, none empty."""
    assert cells.assignment.shape == (n,)
    assert cells.assignment.dtype == np.int32
    assert cells.centroids.shape == (c, d)
    assert cells.centroids.dtype == np.float32
    assert np.isfinite(cells.centroids).all()
    assert cells.count == c
    assert cells.sizes.min() >= 1
    assert cells.sizes.sum() == n
    assert np.array_equal(np.unique(cells.assignment), np.arange(c))


class TestKmeans:
    @pytest.mark.parametrize("spherical", [True, False])
    @pytest.mark.parametrize("count", [2, 7, 40])
    def test_every_key_is_in_its_nearest_cell(self, keys, spherical, count):
        scaled = keys * np.linspace(0.5, 2, len(keys), dtype=np.float32)[:, None]
        cells = kmeans(scaled, count, spherical=spherical)
        check(cells, 2000, count, 12)
        if spherical:
            assert np.allclose(np.linalg.norm(cells.centroids, axis=1), 1, atol=1e-5)
            nearness = scaled.astype(np.float64) @ cells.centroids.T
        else:
            nearness = -(np.linalg.norm(scaled[:, None].astype(np.float64) - cells.centroids, axis=2) ** 2)
        own = nearness[np.arange(2000), cells.assignment]
        assert (own >= nearness.max(axis=1) - 1e-5).all()

    def test_spherical_and_plain_differ(self, keys):
        scaled = keys * np.linspace(0.1, 3, len(keys), dtype=np.float32)[:, None]
        a, b = kmeans(scaled, 10), kmeans(scaled, 10, spherical=False)
        assert not np.array_equal(a.assignment, b.assignment)
        assert not np.allclose(np.linalg.norm(b.centroids, axis=1), 1, atol=1e-2)

    def test_centroids_are_the_means_of_their_cells(self, keys):
        """To convergence, on clusters far apart."""
        centres = 20 * np.eye(5, 12)
        points = (centres[np.arange(1000) % 5] + np.random.default_rng(0).standard_normal((1000, 12))).astype(
            "f4"
        )
        cells = kmeans(points, 5, spherical=False, iterations=50, runs=5)
        for j in range(5):
            assert np.allclose(points[cells.assignment == j].mean(axis=0), cells.centroids[j], atol=1e-3)
        assert cells.sizes.tolist() == [200] * 5
        assert cells.imbalance == 1.0

    def test_the_same_seed_gives_the_same_cells(self, keys):
        for options in ({}, {"spherical": False}, {"runs": 3}):
            a, b = kmeans(keys, 16, seed=5, **options), kmeans(keys, 16, seed=5, **options)
            assert np.array_equal(a.assignment, b.assignment)
            assert np.array_equal(a.centroids, b.centroids)
        assert not np.array_equal(kmeans(keys, 16, seed=6).assignment, kmeans(keys, 16, seed=5).assignment)

    def test_files_and_arrays_give_the_same_cells(self, keys, tmp_path):
        np.save(tmp_path / "keys.npy", keys)
        a, b = kmeans(keys, 16), kmeans(tmp_path / "keys.npy", 16)
        assert np.array_equal(a.assignment, b.assignment)
        assert np.array_equal(a.centroids, b.centroids)

    def test_a_sample_is_enough_when_keys_are_many(self, keys):
        """With fewer training points than keys all keys are still assigned, to the nearest."""
        a, b = kmeans(keys, 8, points=40, seed=1), kmeans(keys, 8, points=40, seed=1)
        check(a, 2000, 8, 12)
        assert np.array_equal(a.assignment, b.assignment)
        assert np.array_equal(a.assignment, (keys @ a.centroids.T).argmax(axis=1))

    def test_every_point_that_is_asked_for_is_learned_from(self, keys, monkeypatch):
        """FAISS draws 256 points a cell of what it is given, unless it is told not to."""
        limits, real = [], partition.clustering.faiss.Kmeans

        def record(d, count, **options):
            limits.append(count * options["max_points_per_centroid"])
            return real(d, count, **options)

        monkeypatch.setattr(partition.clustering.faiss, "Kmeans", record)
        all_of_them = kmeans(keys, 3, points=700)
        assert limits[0] >= 2000
        assert np.array_equal(all_of_them.assignment, kmeans(keys, 3, points=10**6).assignment)
        assert not np.array_equal(all_of_them.centroids, kmeans(keys, 3, points=256).centroids)
        assert 3 * 256 <= limits[2] < 3 * 257

    def test_few_cells_learn_from_all_keys(self, keys):
        assert np.array_equal(kmeans(keys, 3).centroids, kmeans(keys, 3, points=10**6).centroids)
        assert partition.points_for(10) * 10 > 6_000_000
        assert partition.points_for(128) * 128 > 500_000
        assert [partition.points_for(c) for c in (512, 513, 10_000)] == [256] * 3
        work = [c * c * partition.points_for(c) for c in range(2, 513)]  # products of a pass
        assert max(work) <= 256 * 512**2

    def test_few_cells_of_many_keys_stay_within_memory(self, keys, monkeypatch):
        sizes, real = [], partition.clustering.faiss.Kmeans.train
        monkeypatch.setattr(
            partition.clustering.faiss.Kmeans, "train", lambda self, x: sizes.append(x.shape) or real(self, x)
        )
        monkeypatch.setattr(partition.clustering, "POINT_BYTES", 4 * 12 * 500)
        check(kmeans(keys, 3), 2000, 3, 12)
        check(kmeans(keys, 3, points=10**6), 2000, 3, 12)
        assert sizes == [(500, 12), (500, 12)]

    def test_all_keys_give_better_and_more_even_cells(self):
        """Keys near their centroid, and no cell much larger than another: both, on these keys."""
        keys = make_world(30_000, 1, 24, seed=4)[0]
        figures = {}
        for points in (None, 256):
            runs = [kmeans(keys, 10, points=points, seed=seed) for seed in range(6)]
            near = [(keys * cells.centroids[cells.assignment]).sum(axis=1).mean() for cells in runs]
            figures[points] = np.mean(near), np.mean([cells.imbalance for cells in runs])
        assert figures[None][0] > figures[256][0]
        assert figures[None][1] < figures[256][1]

    def test_keys_of_any_number_type(self, keys):
        check(kmeans(np.round(40 * keys).astype(np.int8), 9), 2000, 9, 12)
        check(kmeans(keys.astype(np.float64), np.int64(9)), 2000, 9, 12)


class TestOneCell:
    @pytest.mark.parametrize("spherical", [True, False])
    def test_is_the_trivial_partition(self, keys, spherical):
        cells = kmeans(keys, 1, spherical=spherical, runs=10)
        check(cells, 2000, 1, 12)
        assert np.allclose(cells.centroids[0], keys.mean(axis=0, dtype=np.float64), atol=1e-6)
        assert cells.imbalance == 1.0


class TestNoEmptyCell:
    @pytest.mark.parametrize("spherical", [True, False])
    @pytest.mark.parametrize(
        ("distinct", "n", "c"), [(3, 100, 10), (1, 50, 50), (5, 40, 39), (40, 40, 40), (90, 100, 95)]
    )
    def test_with_many_doubles_and_nearly_as_many_cells_as_keys(self, spherical, distinct, n, c):
        rows = np.random.default_rng(1).standard_normal((distinct, 6)).astype(np.float32)
        cells = kmeans(rows[np.arange(n) % distinct], c, spherical=spherical)
        check(cells, n, c, 6)
        if spherical:
            assert np.allclose(np.linalg.norm(cells.centroids, axis=1), 1, atol=1e-5)

    def test_an_empty_cell_gets_the_key_that_fits_the_largest_cell_worst(self):
        keys = open_vectors(np.array([[1, 0], [1, 0.1], [0.9, 0.9], [-1, 0]], np.float32))
        centroids = np.array([[1, 0], [-1, 0], [0, -1]], np.float32)
        assignment, nearness = partition.assign(keys, centroids, spherical=True)
        assert assignment.tolist() == [0, 0, 0, 1]
        partition.fill_empty(keys, assignment, nearness, centroids, spherical=True)
        assert assignment.tolist() == [0, 0, 2, 1]
        assert np.allclose(centroids[2], np.sqrt(0.5))

    def test_zero_keys(self):
        keys = np.zeros((30, 4), np.float32)
        keys[:5] = np.eye(5, 4) + 1
        check(kmeans(keys, 8), 30, 8, 4)


class TestImbalance:
    @pytest.mark.parametrize(
        ("sizes", "expected"), [([5, 5, 5, 5], 1.0), ([20, 0, 0, 0], 4.0), ([3, 1], 2 * 10 / 16), ([1], 1.0)]
    )
    def test_is_c_times_the_sum_of_squared_shares(self, sizes, expected):
        assignment = np.repeat(np.arange(len(sizes)), sizes).astype(np.int32)
        cells = Cells(assignment, np.zeros((len(sizes), 2), np.float32))
        assert cells.sizes.tolist() == sizes
        assert cells.imbalance == pytest.approx(expected)

    def test_the_most_even_of_several_runs_is_kept(self, keys):
        alone = [kmeans(keys, 12, seed=3 + i) for i in range(5)]
        figures = [cells.imbalance for cells in alone]
        assert len(set(figures)) > 1
        best = kmeans(keys, 12, seed=3, runs=5)
        assert best.imbalance == min(figures)
        assert np.array_equal(best.assignment, alone[int(np.argmin(figures))].assignment)

    def test_the_first_of_several_runs_on_request(self, keys):
        first = kmeans(keys, 12, seed=3, runs=5, pick="first")
        assert np.array_equal(first.assignment, kmeans(keys, 12, seed=3).assignment)


class TestErrors:
    @pytest.mark.parametrize("count", [0, -1, 2001])
    def test_the_number_of_cells(self, keys, count):
        with pytest.raises(VectorError, match=f"cells={count}: .* between 1 and the 2000 keys"):
            kmeans(keys, count)

    def test_runs_and_pick(self, keys):
        with pytest.raises(VectorError, match="runs=0"):
            kmeans(keys, 4, runs=0)
        with pytest.raises(VectorError, match="pick='odd'"):
            kmeans(keys, 4, pick="odd")
        with pytest.raises(VectorError, match="points=0"):
            kmeans(keys, 4, points=0)

    def test_a_partition_that_does_not_fit(self, keys):
        vectors = open_vectors(keys)
        good = kmeans(keys, 4)
        assert partition.check(good, 1, vectors) == 4
        for wrong in (
            Cells(good.assignment[:-1], good.centroids),
            Cells(good.assignment, good.centroids[:, :-1]),
            Cells(good.assignment, good.centroids[:-1]),
            Cells(good.assignment - 1, good.centroids),
        ):
            with pytest.raises(VectorError, match=r"^cells: "):
                partition.check(wrong, 1, vectors)


def test_means_of_cells_are_those_of_their_points_by_any_blocks(monkeypatch):
    rng = np.random.default_rng(3)
    points = rng.standard_normal((500, 6)).astype(np.float32)
    assignment = rng.choice([0, 1, 2, 4, 5], 500).astype(np.int32)  # cell 3 has no points
    for block_bytes in (1 << 26, 1 << 10):
        monkeypatch.setattr("amips.vectors.vectors.BLOCK_BYTES", block_bytes)
        means = partition.cell_means(open_vectors(points), assignment, 7)
        assert means.dtype == np.float32
        assert means.shape == (7, 6)
        for cell in (0, 1, 2, 4, 5):
            expected = points[assignment == cell].mean(axis=0, dtype=np.float64)
            np.testing.assert_allclose(means[cell], expected, rtol=1e-6, atol=1e-7)
        assert not means[[3, 6]].any()
