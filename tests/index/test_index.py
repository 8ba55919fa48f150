"""The FAISS index with given cells, against plain formulas, in every storage."""

from dataclasses import replace

import numpy as np
import pytest

from amips import AmipsError, BundleError
from amips.index import FaissCellStore, faiss_store, fill, product_scan
from amips.index.top_keys import best_first
from amips.lean import learn_projection
from amips.vectors import gather, open_vectors, vectors
from reference import best_in_cells

N, D, C = 700, 16, 9
EMPTY = 4  # a cell without keys
STORAGES = ("flat", "sq8", "pq", "lean")
R = 12  # dimensions of lean storage


def random_cells(rng, m, p):
    """p different cells for each of m queries, in any order."""
    return np.argsort(rng.random((m, C)), axis=1)[:, :p]


class World:
    """Keys in cells that have nothing to do with where the keys are."""

    def __init__(self, storage, whole=False):
        rng = np.random.default_rng(5)
        draw = (lambda *s: rng.integers(-2, 3, s)) if whole else (lambda *s: rng.standard_normal(s))
        self.keys = draw(N, D).astype(np.float32)
        self.x = draw(40, D).astype(np.float32)
        self.assignment = rng.choice([j for j in range(C) if j != EMPTY], N)
        self.assignment[:3], self.assignment[3:][self.assignment[3:] == 7] = 7, 6  # cell 7 holds 3 keys
        self.centroids = rng.standard_normal((C, D)).astype(np.float32)
        self.rng = rng
        keys = open_vectors(self.keys)
        projection = learn_projection(keys, open_vectors(self.x), R) if storage == "lean" else None
        self.store = FaissCellStore.build(keys, self.assignment, self.centroids, storage, projection)

    def brute(self, cells, k):
        return best_in_cells(self.keys, self.x[: len(cells)], self.assignment, cells, k)


@pytest.fixture(scope="module", params=STORAGES)
def world(request):
    return World(request.param)


@pytest.fixture(scope="module")
def flat():
    return World("flat")


@pytest.fixture(scope="module")
def whole():
    """Whole numbers: sums are exact in any order, and there are ties everywhere."""
    return World("flat", whole=True)


class TestCells:
    def test_keys_are_in_the_given_cells(self, world):
        store = world.store
        assert (store.n, store.d) == (N, D)
        assert store.assignment.dtype == np.int32
        np.testing.assert_array_equal(store.assignment, world.assignment)
        np.testing.assert_array_equal(store.centroids, world.centroids)
        np.testing.assert_array_equal(store.sizes, np.bincount(world.assignment, minlength=C))
        assert store.sizes[EMPTY] == 0
        assert store.sizes[7] == 3
        # FAISS itself would have put them elsewhere.
        nearest = (world.keys @ world.centroids.T).argmax(axis=1)
        assert (nearest != world.assignment).mean() > 0.5

    def test_more_keys_than_one_block(self, flat, monkeypatch):
        monkeypatch.setattr("amips.vectors.vectors.BLOCK_BYTES", 4 * D * 64)
        store = FaissCellStore.build(open_vectors(flat.keys), flat.assignment, flat.centroids, "flat")
        np.testing.assert_array_equal(store.assignment, flat.assignment)
        ids = np.arange(N)[None]
        np.testing.assert_array_equal(store.keys_at(ids)[0], flat.keys)

    def test_unknown_storage(self, flat):
        with pytest.raises(AmipsError, match="'flat', 'sq8', 'pq' or 'lean'"):
            FaissCellStore.build(open_vectors(flat.keys), flat.assignment, flat.centroids, "float8")

    def test_pq_needs_enough_keys(self, flat):
        with pytest.raises(AmipsError, match="at least 256 keys, got 100"):
            FaissCellStore.build(open_vectors(flat.keys[:100]), flat.assignment[:100], flat.centroids, "pq")

    @pytest.mark.parametrize("d", [1, 3, 7])
    def test_pq_of_any_dimension(self, d):
        keys = np.random.default_rng(0).standard_normal((300, d)).astype(np.float32)
        store = FaissCellStore.build(
            open_vectors(keys), np.zeros(300, int), np.zeros((1, d), np.float32), "pq"
        )
        scores, ids = store.scan(keys[:5], np.zeros((5, 1), np.int64), 300)
        want = best_in_cells(keys, keys[:5], np.zeros(300, int), np.zeros((5, 1), int), 300)
        np.testing.assert_allclose(scores, want[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(np.sort(ids, axis=1), np.tile(np.arange(300), (5, 1)))


class TestScan:
    @pytest.mark.parametrize("m", [1, 3, 40])
    @pytest.mark.parametrize("probes", [1, 3, C])
    def test_only_probed_cells_and_true_scores(self, world, m, probes):
        cells = random_cells(world.rng, m, probes)
        scores, ids = world.store.scan(world.x[:m], cells, 10)
        assert (scores.shape, scores.dtype) == ((m, 10), np.float32)
        assert (ids.shape, ids.dtype) == ((m, 10), np.int64)
        there = ids >= 0
        owner = np.where(there, world.assignment[np.maximum(ids, 0)], -2)
        probed = (owner[:, :, None] == cells[:, None, :]).any(axis=2)
        assert probed[there].all()
        true = np.einsum("mkd,md->mk", world.keys[np.maximum(ids, 0)], world.x[:m])
        np.testing.assert_allclose(scores[there], true[there], rtol=1e-5, atol=1e-5)
        assert np.isneginf(scores[~there]).all()
        with np.errstate(invalid="ignore"):
            assert not (np.diff(scores, axis=1) > 0).any()
        assert all(len(set(row[row >= 0])) == (row >= 0).sum() for row in ids)

    def test_quantised_storage_finds_nearly_all(self, world):
        cells = random_cells(world.rng, 40, 5)
        want = world.brute(cells, 10)[1]
        got = world.store.scan(world.x, cells, 10)[1]
        share = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(got, want, strict=True)])
        assert share == 1 if world.store.storage == "flat" else share > 0.95

    @pytest.mark.parametrize("m", [1, 40])
    def test_flat_is_brute_force(self, flat, m):
        for probes in (1, 2, 5, C):
            cells = random_cells(flat.rng, m, probes)
            scores, ids = flat.store.scan(flat.x[:m], cells, 25)
            want = flat.brute(cells, 25)
            np.testing.assert_array_equal(ids, want[1])
            np.testing.assert_allclose(scores, want[0], rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("m", [1, 2, 40])
    @pytest.mark.parametrize("k", [1, 10, 200])
    def test_ties_go_to_the_lower_id(self, whole, m, k):
        for probes in (1, 3, C):
            cells = random_cells(whole.rng, m, probes)
            scores, ids = whole.store.scan(whole.x[:m], cells, k)
            want = whole.brute(cells, k)
            np.testing.assert_array_equal(ids, want[1])
            np.testing.assert_array_equal(scores, want[0])

    @pytest.mark.parametrize("storage", ["sq8", "pq", "lean"])
    def test_ties_of_quantised_storage(self, storage):
        world = World(storage, whole=True)
        cells = random_cells(world.rng, 40, C)
        # Every key is a candidate, so the codes lose nothing.
        scores, ids = world.store.scan(world.x, cells, 80)
        want = world.brute(cells, 80)
        np.testing.assert_array_equal(scores, want[0])
        np.testing.assert_array_equal(ids, want[1])

    def test_zero_query_ties_with_every_key(self, world):
        x = np.zeros((1, D), np.float32)
        scores, ids = world.store.scan(x, np.arange(C)[None], 5)
        np.testing.assert_array_equal(scores, np.zeros((1, 5)))
        if world.store.storage == "flat":
            np.testing.assert_array_equal(ids, [[0, 1, 2, 3, 4]])

    def test_skipped_cells(self, world):
        cells = random_cells(world.rng, 40, 4)
        skipped = cells.copy()
        skipped[::2, 1:] = -1
        skipped[5] = -1
        got = world.store.scan(world.x, skipped, 8)
        few = world.store.scan(world.x[::2], np.ascontiguousarray(cells[::2, :1]), 8)
        np.testing.assert_array_equal(got[1][::2], few[1])
        np.testing.assert_allclose(got[0][::2], few[0], rtol=1e-5)
        assert (got[1][5] == -1).all()
        assert np.isneginf(got[0][5]).all()

    @pytest.mark.parametrize("m", [1, 40])
    def test_padding_where_cells_hold_too_few(self, world, m):
        cells = np.tile([7, EMPTY], (m, 1))
        scores, ids = world.store.scan(world.x[:m], cells, 6)
        np.testing.assert_array_equal(np.sort(ids[:, :3], axis=1), np.tile([0, 1, 2], (m, 1)))
        np.testing.assert_allclose(scores, world.brute(cells, 6)[0], rtol=1e-5, atol=1e-6)
        assert (ids[:, 3:] == -1).all()
        assert np.isneginf(scores[:, 3:]).all()

    @pytest.mark.parametrize("m", [1, 40])
    def test_an_empty_cell(self, world, m):
        scores, ids = world.store.scan(world.x[:m], np.full((m, 1), EMPTY), 3)
        assert (ids == -1).all()
        assert np.isneginf(scores).all()

    @pytest.mark.parametrize("m", [1, 40])
    def test_more_results_than_keys(self, world, m):
        scores, ids = world.store.scan(world.x[:m], np.tile(np.arange(C), (m, 1)), N + 30)
        np.testing.assert_array_equal(np.sort(ids[:, :N], axis=1), np.tile(np.arange(N), (m, 1)))
        assert (ids[:, N:] == -1).all()
        np.testing.assert_allclose(
            scores[:, :N], -np.sort(-(world.x[:m] @ world.keys.T), axis=1), rtol=1e-4, atol=1e-5
        )

    def test_nothing_to_scan(self, world):
        scores, ids = world.store.scan(world.x[:0], np.empty((0, 3), np.int64), 4)
        assert scores.shape == ids.shape == (0, 4)
        scores, ids = world.store.scan(world.x[:2], np.empty((2, 0), np.int64), 4)
        assert (ids == -1).all()
        assert np.isneginf(scores).all()

    @pytest.mark.parametrize("storage", STORAGES)
    def test_norms_that_differ(self, storage):
        rng = np.random.default_rng(3)
        keys = rng.standard_normal((N, D)) * np.exp(rng.normal(0, 1.5, (N, 1)))
        keys, x = keys.astype(np.float32), rng.standard_normal((30, D)).astype(np.float32)
        assignment = rng.integers(0, C, N)
        projection = learn_projection(open_vectors(keys), open_vectors(x), R) if storage == "lean" else None
        centroids = rng.standard_normal((C, D)).astype(np.float32)
        store = FaissCellStore.build(open_vectors(keys), assignment, centroids, storage, projection)
        cells = np.tile(np.arange(C), (30, 1))
        want = best_in_cells(keys, x, assignment, cells, 1)
        scores, ids = store.scan(x, cells, 1)
        right = ids[:, 0] == want[1][:, 0]
        assert right.all() if storage == "flat" else right.mean() >= 0.9
        np.testing.assert_allclose(scores[right], want[0][right], rtol=1e-5)
        # The answers are not those of cosine similarity.
        cosine = (x @ (keys / np.linalg.norm(keys, axis=1, keepdims=True)).T).argmax(axis=1)
        assert (cosine != want[1][:, 0]).mean() > 0.5


class TestTwoWays:
    @pytest.mark.parametrize("k", [1, 7, 90, N + 5])
    @pytest.mark.parametrize("block", [1, 3, 1024])
    def test_product_is_faiss(self, whole, k, block, monkeypatch):
        monkeypatch.setattr(product_scan, "PRODUCT_BLOCK", block)
        cells = random_cells(whole.rng, 40, 5)
        cells[::3, 2:] = -1
        cells[4] = -1
        by_product = whole.store._scan_by_product(whole.x, cells, k, None)
        by_faiss = whole.store._settle_ties(
            whole.x, cells, *whole.store._scan_by_faiss(whole.x, cells, k + 1, None), None
        )
        for got, want in zip(by_product, by_faiss, strict=True):
            np.testing.assert_array_equal(got, want)

    def test_a_batch_in_which_nobody_probes_a_second_cell(self, whole):
        cells = random_cells(whole.rng, 40, 3)
        cells[:, 1:] = -1
        for got, want in zip(
            whole.store._scan_by_product(whole.x, cells, 5, None),
            whole.store._scan_by_product(whole.x, cells[:, :1], 5, None),
            strict=True,
        ):
            np.testing.assert_array_equal(got, want)

    def test_a_batch_is_scanned_by_product_and_a_query_by_faiss(self, flat, monkeypatch):
        used = []
        for name in ("_scan_by_product", "_scan_by_faiss"):
            real = getattr(FaissCellStore, name)
            monkeypatch.setattr(
                FaissCellStore, name, lambda *args, name=name, real=real: used.append(name) or real(*args)
            )
        flat.store.scan(flat.x, random_cells(flat.rng, 40, 5), 3)
        flat.store.scan(flat.x[:1], random_cells(flat.rng, 1, C), 3)
        assert used == ["_scan_by_product", "_scan_by_faiss"]

    def test_a_tile_has_a_bounded_size(self, flat, monkeypatch):
        monkeypatch.setattr(faiss_store, "REFINE_BYTES", 4 * 200)
        tiles = []
        real = product_scan.TopKeys.take
        monkeypatch.setattr(
            product_scan.TopKeys,
            "take",
            lambda self, r, tile, i: tiles.append(tile.size) or real(self, r, tile, i),
        )
        cells = random_cells(flat.rng, 40, C)
        ids = flat.store.scan(flat.x, cells, 5)[1]
        assert max(tiles) <= 200
        np.testing.assert_array_equal(ids, flat.brute(cells, 5)[1])

    @pytest.mark.parametrize("storage", ["sq8", "pq", "lean"])
    def test_small_blocks_of_candidates(self, storage, monkeypatch):
        world = World(storage)
        cells = random_cells(world.rng, 40, 6)
        want = world.store.scan(world.x, cells, 5)
        monkeypatch.setattr(faiss_store, "REFINE_BYTES", 1)
        got = world.store.scan(world.x, cells, 5)
        np.testing.assert_array_equal(got[1], want[1])
        np.testing.assert_allclose(got[0], want[0], rtol=1e-5)


class TestScoreAgain:
    def test_true_scores_in_order(self, world):
        candidates = np.argsort(world.rng.random((40, N)), axis=1)[:, :30]
        candidates[::4, 20:] = -1
        scores, ids = world.store.score_again(world.x, candidates, 25)
        for row, (x, given) in enumerate(zip(world.x, candidates, strict=True)):
            given = given[given >= 0]
            order = given[np.argsort(-(world.keys[given] @ x), kind="stable")][:25]
            np.testing.assert_array_equal(ids[row, : len(order)], order)
            np.testing.assert_allclose(scores[row, : len(order)], world.keys[order] @ x, rtol=1e-5, atol=1e-5)
            assert (ids[row, len(order) :] == -1).all()
            assert np.isneginf(scores[row, len(order) :]).all()

    def test_fewer_candidates_than_results(self, world):
        scores, ids = world.store.score_again(world.x[:2], np.array([[5, -1], [-1, -1]]), 4)
        np.testing.assert_array_equal(ids, [[5, -1, -1, -1], [-1, -1, -1, -1]])
        assert scores[0, 0] == pytest.approx(world.keys[5] @ world.x[0], rel=1e-5)
        assert np.isneginf(scores.ravel()[1:]).all()

    def test_ties(self, whole):
        candidates = np.tile(np.arange(N)[::-1], (40, 1))
        ids = whole.store.score_again(whole.x, candidates, 50)[1]
        np.testing.assert_array_equal(ids, whole.brute(np.tile(np.arange(C), (40, 1)), 50)[1])


class TestBestFirst:
    """The k best of each row, ties to the lower id, however many rows there are."""

    @pytest.mark.parametrize("rows", [1, 16, 17, 60])
    @pytest.mark.parametrize(("width", "k"), [(100, 1), (100, 10), (100, 24), (100, 25), (100, 100), (7, 5)])
    @pytest.mark.parametrize("levels", [3, 12, 10**6])
    def test_as_sorted(self, rows, width, k, levels):
        rng = np.random.default_rng([rows, width, k, levels])
        scores = rng.integers(0, levels, (rows, width)).astype(np.float32)
        ids = np.argsort(rng.random((rows, width)), axis=1)
        scores[rng.random((rows, width)) < 0.2] = -np.inf
        scores[0] = -np.inf
        got = best_first(scores, ids, k)
        for row in range(rows):
            order = sorted(range(width), key=lambda i: (-scores[row, i], ids[row, i]))[:k]
            np.testing.assert_array_equal(got[1][row], ids[row, order])
            np.testing.assert_array_equal(got[0][row], scores[row, order])

    def test_no_rows(self):
        assert best_first(np.empty((0, 50), np.float32), np.empty((0, 50), np.int64), 3)[1].shape == (0, 3)


class TestFlops:
    def test_by_hand(self, world):
        scanned = np.array([0, 30, 700])
        got = world.store.scan_flops(scanned, 4)
        again = 2 * D * np.array([0, 30, 100])  # 10 candidates for each of 10 results, at most
        want = {
            "flat": 2 * D * scanned,
            "sq8": 2 * D * scanned + again,
            "pq": 4 * scanned + 2 * 256 * D + again,  # 16 dimensions in 4 bytes
            "lean": 2 * R * (scanned + D + 16) + again,
        }[world.store.storage]
        np.testing.assert_array_equal(got, want)


class TestFiles:
    @pytest.mark.parametrize("mmap", [False, True])
    def test_round_trip(self, world, tmp_path, mmap):
        files = world.store.save(tmp_path)
        assert sorted(files) == sorted(file.name for file in tmp_path.iterdir())
        again = FaissCellStore.load(tmp_path, world.store.storage, mmap)
        np.testing.assert_array_equal(again.assignment, world.assignment)
        np.testing.assert_array_equal(again.centroids, world.centroids)
        np.testing.assert_array_equal(again.sizes, world.store.sizes)
        for m in (1, 40):
            cells = random_cells(world.rng, m, 5)
            cells[0, 2:] = -1
            got, want = again.scan(world.x[:m], cells, 9), world.store.scan(world.x[:m], cells, 9)
            np.testing.assert_array_equal(got[1], want[1])
            np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
        candidates = np.arange(60).reshape(2, 30)
        got, want = (e.score_again(world.x[:2], candidates, 30) for e in (again, world.store))
        np.testing.assert_array_equal(got[1], want[1])
        on_disk = again.rows if again.storage == "flat" else again.keys
        assert isinstance(getattr(on_disk, "base", None), np.memmap) == mmap

    def test_a_directory_of_something_else(self, tmp_path):
        (tmp_path / "sizes.npy").write_bytes(b"something else")
        with pytest.raises(BundleError, match=r"sizes\.npy is not a readable \.npy file") as caught:
            FaissCellStore.load(tmp_path, "flat", False)
        assert "\n" not in str(caught.value)
        with pytest.raises(BundleError, match="'float8' is not known"):
            FaissCellStore.load(tmp_path, "float8", False)


@pytest.mark.parametrize("storage", ["sq8", "pq", "lean"])
def test_candidates_on_disk_are_read_in_one_pass(storage, tmp_path, monkeypatch):
    """The same scores and ids as with keys in memory, and each key is read once for all queries."""
    world = World(storage)
    np.save(tmp_path / "keys.npy", world.keys)
    on_disk = replace(world.store, keys=np.load(tmp_path / "keys.npy", mmap_mode="r"))
    cells = random_cells(world.rng, len(world.x), 5)
    want = world.store.scan(world.x, cells, 7)
    asked = []

    def noted(keys, ids):
        asked.append(ids)
        return gather(keys, ids)

    monkeypatch.setattr(faiss_store, "gather", noted)
    np.testing.assert_array_equal(on_disk.scan(world.x, cells, 7)[1], want[1])
    assert not asked  # few are read as they come
    monkeypatch.setattr(faiss_store, "FEW_ON_DISK", 0)
    for block_bytes in (1 << 24, 3 * 4 * D * 700):
        asked.clear()
        monkeypatch.setattr(faiss_store, "DISK_BYTES", block_bytes)
        got = on_disk.scan(world.x, cells, 7)
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other)
        assert all((np.diff(ids) > 0).all() or (ids[:2] == 0).all() for ids in asked)
        assert (len(asked) == 1) == (block_bytes == 1 << 24)


@pytest.mark.parametrize("storage", ["flat", "sq8"])
def test_cells_are_filled_the_same_however_much_waits(storage, monkeypatch):
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((900, 8)).astype(np.float32)
    assignment, second = rng.integers(0, 7, 900), rng.integers(-1, 7, 900).astype(np.int32)
    second[second == assignment] = -1
    monkeypatch.setattr(vectors, "BLOCK_BYTES", 100 * 4 * 8)
    codes, writes = [], []
    write = fill._ExactLists.write
    monkeypatch.setattr(fill._ExactLists, "write", lambda lists: writes.append(1) or write(lists))
    for waiting in (1, 1 << 20):
        monkeypatch.setattr(fill, "LEAST_WAITING", waiting)
        monkeypatch.setattr(fill, "WAITING_PARTS", 1 << 20)
        store = FaissCellStore.build(open_vectors(keys), assignment, keys[:7], storage, None, second)
        codes.append([fill.codes_of(store.index, j, int(store.sizes[j])).tolist() for j in range(7)])
    assert codes[0] == codes[1]
    assert len(writes) == 10 + 1  # after each of nine blocks and at the end; at the end
