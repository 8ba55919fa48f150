"""Query-aware cells: keys move to where the queries that want them are, and nowhere else."""

import numpy as np
import pytest

import amips
from amips import VectorError
from amips.cells import aware, kmeans, query_aware, wanted_by
from amips.routers import RoutingEstimate
from amips.vectors import open_vectors

N, M, D, K = 300, 120, 8, 5


def unit(x):
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="module")
def world():
    """Keys and queries of any length, and top keys: only every third key is wanted by anyone."""
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((N, D)).astype(np.float32) * rng.uniform(0.2, 5, (N, 1)).astype(np.float32)
    queries = rng.standard_normal((M, D)).astype(np.float32) * rng.uniform(0.2, 5, (M, 1)).astype(np.float32)
    top = np.argsort(-(queries @ keys[::3].T), axis=1)[:, :K] * 3
    return keys, queries, top


def wanted_slowly(queries, top, n):
    """m_y of every key, in float64 and with loops."""
    sums, weights = np.zeros((n, queries.shape[1])), np.zeros(n)
    for x, row in zip(queries.astype(np.float64), top, strict=True):
        for rank, y in enumerate(row, start=1):
            if y >= 0:
                sums[y] += x / np.linalg.norm(x) / np.sqrt(rank)
                weights[y] += 1 / np.sqrt(rank)
    return sums / (1 + weights)[:, None]


@pytest.fixture
def moved(monkeypatch):
    """What is given to k-means, call by call."""
    given = []

    def record(keys, count, **options):
        given.append(np.array(open_vectors(keys).load()))
        return kmeans(keys, count, **options)

    monkeypatch.setattr(aware, "kmeans", record)
    return given


class TestWanted:
    def test_by_hand(self):
        queries = np.array([[2, 0], [0, 3]], np.float32)
        wanted = wanted_by(open_vectors(queries), np.array([[1, 0], [1, 2]]), 4)
        w = 1 / np.sqrt(2)  # second among the top keys
        want = [[w / (1 + w), 0], [1 / 3, 1 / 3], [0, w / (1 + w)], [0, 0]]
        np.testing.assert_allclose(wanted(0, 4), want, rtol=1e-6)
        np.testing.assert_allclose(wanted(1, 3), want[1:3], rtol=1e-6)
        assert wanted(3, 4).tolist() == [[0, 0]]
        assert wanted(2, 2).shape == (0, 2)

    def test_as_with_loops(self, world):
        _, queries, top = world
        wanted = wanted_by(open_vectors(queries), top, N)
        want = wanted_slowly(queries, top, N)
        np.testing.assert_allclose(wanted(0, N), want, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(wanted(100, 171), want[100:171], rtol=1e-4, atol=1e-6)

    def test_few_pairs_at_a_time(self, world, monkeypatch):
        _, queries, top = world
        want = wanted_slowly(queries, top, N)
        for pairs in (1, 2, 7):  # a key's queries are then cut apart
            monkeypatch.setattr(aware, "BLOCK_BYTES", pairs * 4 * D)
            wanted = wanted_by(open_vectors(queries), top, N)
            np.testing.assert_allclose(wanted(0, N), want, rtol=1e-4, atol=1e-6)

    def test_where_there_is_no_key_there_is_nothing(self, world):
        """-1 is what fewer keys than k leave."""
        _, queries, top = world
        some = np.where(np.arange(K) < 3, top, -1)
        wanted = wanted_by(open_vectors(queries), some, N)
        np.testing.assert_allclose(wanted(0, N), wanted_slowly(queries, some, N), rtol=1e-4, atol=1e-6)


class TestCells:
    @pytest.mark.parametrize("strength", [0.5, 1.5])
    def test_keys_move_by_the_formula(self, world, moved, strength):
        keys, queries, top = world
        cells = query_aware(keys, queries, top, 7, strength=strength, seed=3)
        want = unit(unit(keys) + strength * wanted_slowly(queries, top, N))
        np.testing.assert_allclose(moved[0], want, rtol=1e-4, atol=1e-5)
        again = kmeans(moved[0], 7, seed=3)
        np.testing.assert_array_equal(cells.assignment, again.assignment)
        np.testing.assert_array_equal(cells.centroids, again.centroids)

    def test_the_strength_is_one_and_a_half_when_not_said(self, world, moved):
        query_aware(*world, 5)
        query_aware(*world, 5, strength=1.5)
        np.testing.assert_array_equal(moved[0], moved[1])

    def test_keys_that_nobody_wants_stay(self, world, moved):
        keys, queries, top = world
        query_aware(keys, queries, top, 7, strength=50)
        nobody = np.setdiff1d(np.arange(N), top)
        assert len(nobody) >= 2 * N / 3
        np.testing.assert_allclose(moved[0][nobody], unit(keys[nobody]), rtol=1e-6, atol=1e-6)
        asked = np.unique(top)
        assert (np.linalg.norm(moved[0][asked] - unit(keys[asked]), axis=1) > 1e-2).all()

    def test_without_strength_it_is_kmeans(self, world, moved):
        keys, queries, top = world
        cells, plain = query_aware(keys, queries, top, 9, strength=0, seed=2), kmeans(keys, 9, seed=2)
        np.testing.assert_array_equal(cells.assignment, plain.assignment)
        np.testing.assert_array_equal(cells.centroids, plain.centroids)
        assert (query_aware(keys, queries, top, 9, seed=2).assignment != plain.assignment).any()

    def test_the_same_seed_gives_the_same_cells(self, world):
        a, b, c = (query_aware(*world, 9, seed=seed) for seed in (4, 4, 5))
        np.testing.assert_array_equal(a.assignment, b.assignment)
        np.testing.assert_array_equal(a.centroids, b.centroids)
        assert (a.assignment != c.assignment).any()

    def test_iterations_are_of_kmeans(self, world):
        one, many = (query_aware(*world, 9, iterations=i) for i in (1, 20))
        assert (one.assignment != many.assignment).any()

    def test_too_many_keys_for_memory_are_computed_as_they_are_read(self, world):
        keys, queries, top = world
        parts = (open_vectors(keys), open_vectors(queries), top, 1.5)
        few = 4 * N * D * aware.SHARE
        in_memory, computed = (aware.towards_queries(*parts, memory=few - less) for less in (0, 1))
        assert in_memory.array is not None  # just as many as may be held
        assert computed.array is None
        np.testing.assert_array_equal(computed.load(), in_memory.load())
        for start in (0, 1, N // 2):
            np.testing.assert_array_equal(computed.rows(start, start + 9), in_memory.rows(start, start + 9))

    def test_cells_are_the_same_with_little_memory(self, world, monkeypatch):
        want = query_aware(*world, 9)
        monkeypatch.setattr(aware, "IN_MEMORY", 4 * N * D - 1)
        cells = query_aware(*world, 9)
        np.testing.assert_array_equal(cells.assignment, want.assignment)
        np.testing.assert_array_equal(cells.centroids, want.centroids)

    @pytest.mark.parametrize("rows", [1, 7, 128])
    def test_block_by_block(self, world, moved, monkeypatch, rows):
        want = query_aware(*world, 9)
        monkeypatch.setattr(aware, "BLOCK_BYTES", rows * 4 * D)
        cells = query_aware(*world, 9)
        np.testing.assert_allclose(moved[1], moved[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(cells.assignment, want.assignment)

    def test_files(self, world, tmp_path):
        keys, queries, top = world
        np.save(tmp_path / "keys.npy", keys)
        np.save(tmp_path / "queries.npy", queries)
        cells = query_aware(tmp_path / "keys.npy", tmp_path / "queries.npy", top, 9)
        np.testing.assert_array_equal(cells.assignment, query_aware(*world, 9).assignment)

    def test_what_is_given_is_left_as_it_is(self, world):
        kept = [part.copy() for part in world]
        for part in world:
            part.flags.writeable = False
        query_aware(*world, 9)
        for part, before in zip(world, kept, strict=True):
            part.flags.writeable = True
            np.testing.assert_array_equal(part, before)

    def test_keys_of_zeros(self, world):
        keys, queries, top = world
        keys = keys.copy()
        keys[[0, 1]] = 0  # 0 is wanted by some, 1 by nobody
        cells = query_aware(keys, queries, top, 9)
        assert np.isfinite(cells.centroids).all()
        assert (cells.sizes > 0).all()

    @pytest.mark.parametrize("strength", [-1, np.nan, np.inf])
    def test_a_strength_that_cannot_be(self, world, strength):
        with pytest.raises(VectorError, match=r"^strength=.*: expected a finite number, not negative$"):
            query_aware(*world, 9, strength=strength)

    def test_top_keys_of_other_queries(self, world):
        keys, queries, top = world
        with pytest.raises(VectorError, match=r"^top_ids of shape \[100, 5\]: expected \[120, k\]$"):
            query_aware(keys, queries, top[:100], 9)

    @pytest.mark.parametrize("count", [0, N + 1])
    def test_a_number_of_cells_that_cannot_be(self, world, count):
        with pytest.raises(VectorError, match=f"cells={count}"):
            query_aware(*world, count)


@pytest.mark.parametrize("seed", [0, 1])
def test_it_takes_fewer_keys_to_find_as_much(seed):
    """Groups of keys that are asked for together, by queries of a place of their own."""
    rng = np.random.default_rng(seed)
    n, m, d, groups = 4000, 6000, 24, 40
    group = rng.integers(0, groups, n)
    keys = unit(rng.standard_normal((groups, d))[group] + 1.2 * rng.standard_normal((n, d)))
    about = rng.standard_normal((groups, d))[rng.integers(0, groups, m)]
    queries = unit(about + 0.5 * rng.standard_normal((m, d)))
    top = np.argsort(-(queries @ keys.T), axis=1)[:, :10]
    train, held = slice(0, 5000), slice(5000, m)

    def scanned(cells):
        routed = RoutingEstimate(queries[held] @ cells.centroids.T, cells.assignment[top[held]], cells.sizes)
        return routed.at_probes(routed.probes_for(0.9)).scanned.mean()

    plain = scanned(amips.cells.kmeans(keys, 64))
    ours = scanned(query_aware(keys, queries[train], top[train], 64))
    assert ours < 0.6 * plain, (ours, plain)


@pytest.mark.parametrize(("key_power", "query_power"), [(-100, 0), (0, -100), (90, -80)])
def test_the_scale_of_keys_and_queries_does_not_matter(world, moved, key_power, query_power):
    """Squares of such values leave the range of float32."""
    keys, queries, top = world
    query_aware(keys, queries, top, 10)
    query_aware(np.ldexp(keys, key_power), np.ldexp(queries, query_power), top, 10)
    np.testing.assert_array_equal(moved[1], moved[0])
