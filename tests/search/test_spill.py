"""Keys in a second cell: found in either, returned once, chosen where training queries miss them."""

import numpy as np
import pytest

import amips
from amips.cells import towards_queries
from amips.index import SECOND, FaissCellStore
from amips.lean import learn_projection
from amips.routers import CentroidRouter, RoutingEstimate
from amips.search import estimate_routing, measure_masses, second_cells, spill
from amips.vectors import open_vectors
from helpers import make_world, plain_build

N, D, C, R = 700, 16, 9, 12
STORAGES = ("flat", "sq8", "pq", "lean")


class World:
    """Keys in cells that have nothing to do with where the keys are, a third of them in two."""

    def __init__(self, storage, whole=False):
        rng = np.random.default_rng(5)
        draw = (lambda *s: rng.integers(-2, 3, s)) if whole else (lambda *s: rng.standard_normal(s))
        self.keys, self.x = draw(N, D).astype(np.float32), draw(40, D).astype(np.float32)
        self.assignment = rng.integers(0, C, N)
        self.second = np.where(rng.random(N) < 1 / 3, (self.assignment + rng.integers(1, C, N)) % C, -1)
        self.second = self.second.astype(np.int32)
        self.centroids = rng.standard_normal((C, D)).astype(np.float32)
        self.cells = np.argsort(rng.random((40, C)), axis=1)
        keys = open_vectors(self.keys)
        projection = learn_projection(keys, open_vectors(self.x), R) if storage == "lean" else None
        parts = (self.assignment, self.centroids, storage, projection, self.second)
        self.store = FaissCellStore.build(keys, *parts)

    def there(self, cells):
        """Which keys are in these cells, [m, n]."""
        first = (self.assignment[:, None] == cells[:, None, :]).any(axis=2)
        return first | (self.second[:, None] == cells[:, None, :]).any(axis=2)

    def brute(self, cells, k):
        scores = np.where(self.there(cells), self.x[: len(cells)] @ self.keys.T, -np.inf)
        order = np.lexsort((np.broadcast_to(np.arange(N), scores.shape), -scores), axis=1)[:, :k]
        best = np.take_along_axis(scores, order, axis=1)
        return best, np.where(np.isneginf(best), -1, order)


@pytest.fixture(scope="module", params=STORAGES)
def world(request):
    return World(request.param)


def test_what_it_holds(world):
    e = world.store
    assert (e.n, e.d) == (N, D)
    sizes = np.bincount(world.assignment, minlength=C)
    np.testing.assert_array_equal(e.sizes, sizes + np.bincount(world.second[world.second >= 0], minlength=C))
    np.testing.assert_array_equal(e.assignment, world.assignment)
    assert e.sizes.sum() > N


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("m", [1, 3, 40])
@pytest.mark.parametrize("probes", [1, 2, 5, C])
@pytest.mark.parametrize("k", [1, 10, 300])
def test_flat_is_brute_force(whole, m, probes, k):
    """By FAISS and by product; whole numbers tie everywhere."""
    world = World("flat", whole)
    cells = world.cells[:m, :probes]
    scores, ids = world.store.scan(world.x[:m], cells, k)
    best, expected = world.brute(cells, k)
    np.testing.assert_allclose(scores, best, atol=1e-5)
    np.testing.assert_array_equal(ids, expected)


@pytest.mark.parametrize("m", [1, 40])
def test_no_key_twice_and_true_scores(world, m):
    for k in (1, 10, 500):
        cells = world.cells[:m, :6]
        scores, ids = world.store.scan(world.x[:m], cells, k)
        true = world.x[:m] @ world.keys.T
        for row in range(m):
            own = ids[row][ids[row] >= 0]
            assert len(set(own)) == len(own) >= min(k, world.there(cells)[row].sum()) * 0.99
            assert world.there(cells)[row, own].all()
            np.testing.assert_allclose(scores[row, : len(own)], true[row, own], atol=1e-4)
        if k == 10:
            assert (ids[:, :, None] == world.brute(cells, k)[1][:, None, :]).any(axis=2).mean() > 0.97


@pytest.mark.parametrize("mmap", [False, True])
def test_round_trip(world, tmp_path, mmap):
    files = world.store.save(tmp_path)
    assert SECOND in files
    back = FaissCellStore.load(tmp_path, world.store.storage, mmap, spilled=True)
    np.testing.assert_array_equal(back.second, world.second)
    np.testing.assert_array_equal(back.assignment, world.assignment)
    for m in (1, 40):
        expected, got = (e.scan(world.x[:m], world.cells[:m, :4], 10) for e in (world.store, back))
        np.testing.assert_array_equal(got[1], expected[1])


@pytest.mark.parametrize("damage", ["short", "range", "type", "count", "garbage", "missing"])
def test_damaged_second_cells(tmp_path, damage):
    world = World("lean")
    world.store.save(tmp_path)
    path = tmp_path / SECOND
    second = world.second.copy()
    if damage == "short":
        second = second[:-1]
    elif damage == "range":
        second[second >= 0] = C
    elif damage == "count":
        second[np.flatnonzero(second >= 0)[0]] = -1
    np.save(path, second.astype(np.float32) if damage == "type" else second)
    if damage == "garbage":
        path.write_bytes(b"no array")
    elif damage == "missing":
        path.unlink()
    with pytest.raises(amips.BundleError, match=r"second\.npy"):
        FaissCellStore.load(tmp_path, "lean", False, spilled=True)


class TestExpected:
    """What follows from the cells alone is what a search finds."""

    def test_by_hand(self):
        scores = np.array([[3.0, 2.0, 1.0, 0.0]], np.float32)
        seen = RoutingEstimate(scores, np.array([[2, 3]]), np.full(4, 50), 1.0, np.array([[1, -1]]))
        np.testing.assert_array_equal(seen.at_probes(1).hits, [[False, False]])
        np.testing.assert_array_equal(seen.at_probes(2).hits, [[True, False]])
        assert seen.probes_for(0.5) == 2
        shares = np.exp(scores[0]) / np.exp(scores[0]).sum()
        np.testing.assert_array_equal(seen.at_mass(shares[1] * 0.99).hits, [[True, False]])
        np.testing.assert_array_equal(seen.at_mass(shares[1] * 1.01).hits, [[False, False]])
        assert seen.min_mass_for(0.5) == pytest.approx(shares[1], rel=1e-5)
        assert seen.min_mass_for(1.0) == pytest.approx(shares[3], rel=1e-5)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """Queries come from elsewhere than the keys: cells lose some."""
    keys, queries = make_world(3000, 6000, 16, seed=3)
    out = tmp_path_factory.mktemp("spill") / "task"
    return amips.label(keys, queries, cells=60, query_aware=0, val=600, test=600, out=out)


@pytest.fixture(scope="module")
def second(task):
    return second_cells(task, CentroidRouter(task.cells.centroids), 0.1)


def test_second_cells_by_their_formula(task, second):
    """Against plain loops over keys, cells and the log."""
    cells, router = task.cells, CentroidRouter(task.cells.centroids)
    seen = estimate_routing(plain_build(task, None), task.val)
    bound = seen.min_mass_for(0.95)
    saved = np.zeros((task.n, cells.count), int)
    x, top = np.asarray(task.train.queries), np.asarray(task.train.top_ids)[:, :10]
    chances = np.exp((router.scores(x) - router.scores(x).max(axis=1, keepdims=True)) / seen.temperature)
    chances /= chances.sum(axis=1, keepdims=True)
    for row, wanted in zip(chances, top, strict=True):
        probed = row >= bound
        probed[row.argmax()] = True
        for key in wanted:
            if not probed[cells.assignment[key]]:
                saved[key] += probed
    assert saved.max() > 2
    z = towards_queries(open_vectors(task.keys), open_vectors(x), top).load().astype(np.float64)
    means = np.stack([z[cells.assignment == j].mean(axis=0) for j in range(cells.count)])
    value, best = np.empty(task.n), np.empty(task.n, int)
    for key in range(task.n):
        r = z[key] - means[cells.assignment[key]]
        other = z[key] - means
        length = max(r @ r, 1e-12)  # 0 for a key alone in its cell
        loss = (other**2).sum(axis=1) + 3 * (other @ r) ** 2 / length - 0.1 * saved[key]
        loss[cells.assignment[key]] = np.inf
        best[key], value[key] = loss.argmin(), loss.min() / length
    has = second >= 0
    assert has.sum() == round(0.1 * task.n)
    assert (second[has] == best[has]).mean() > 0.999  # rounding
    assert value[has].max() < value[~has].min() + 1e-5


def test_blocks_and_a_part_of_the_log(task, second, monkeypatch):
    router = CentroidRouter(task.cells.centroids)
    monkeypatch.setattr("amips.search.spill.BLOCK_FLOATS", 5000)
    again = second_cells(task, router, 0.1)
    assert (again == second).mean() > 0.999  # products of other shapes round otherwise
    monkeypatch.setattr("amips.search.spill.MOST_QUERIES", 300)
    few = second_cells(task, router, 0.1)
    assert (few != second).any()
    np.testing.assert_array_equal(second_cells(task, router, 0.1), few)  # the same part of it each time


def test_one_cell_has_no_second(tmp_path):
    keys, queries = make_world(50, 100, 8, seed=1)
    task = amips.label(keys, queries, cells=1, out=tmp_path / "t", val=20, test=20)
    assert second_cells(task, CentroidRouter(task.cells.centroids), 0.5) is None
    assert plain_build(task, None, spill_fraction=0.5).store.second is None


def test_it_saves_keys_on_held_out_queries(task):
    plain, spilled = plain_build(task, None), plain_build(task, None, spill_fraction=0.1)
    assert (plain.spilled, spilled.spilled) == (0, (spilled.store.second >= 0).sum())
    assert "10% of the keys in a second cell" in repr(spilled)
    costs = []
    for searcher in (plain, spilled):
        seen = estimate_routing(searcher, task.test)
        costs.append(seen.at_mass(seen.min_mass_for(0.95)).scanned.mean())
    assert costs[1] < 0.95 * costs[0]


@pytest.mark.parametrize("storage", ["flat", "lean"])
def test_points_are_those_of_a_search(task, storage):
    searcher = plain_build(task, None, spill_fraction=0.1, storage=storage)
    point = measure_masses(searcher.snapshot, task.test)[8]
    x, true = np.asarray(task.test.queries), np.asarray(task.test.top_ids)[:, :10]
    ids = searcher.search(x, min_mass=point.min_mass)[1]
    assert (true[:, :, None] == ids[:, None, :]).any(axis=2).mean() == pytest.approx(point.recall10, abs=1e-9)
    cost = searcher.cost(x, min_mass=point.min_mass)
    assert cost.scanned.mean() / task.n == pytest.approx(point.scanned)


def test_a_bundle_with_spilled_keys(task, tmp_path):
    index = plain_build(task, None, spill_fraction=0.1, out=tmp_path / "b")
    back = amips.load(tmp_path / "b")
    assert back.spilled == index.spilled > 0
    x = task.test.queries[:50]
    for options in ({"recall": 0.95}, {"probes": 5, "k": 40}):
        for got, want in zip(back.search(x, **options), index.search(x, **options), strict=True):
            np.testing.assert_array_equal(got, want)
    # A file that the manifest does not list is not read; one that it lists is checked.
    (data,) = (tmp_path / "b").glob("data-*")
    (data / SECOND).unlink()
    with pytest.raises(amips.BundleError, match=r"second\.npy"):
        amips.load(tmp_path / "b")


def test_second_cells_of_ones_own(task):
    second = np.full(task.n, -1, np.int32)
    second[:100] = (task.cells.assignment[:100] + 1) % task.c
    index = plain_build(task, None, second_cells=second)
    np.testing.assert_array_equal(index.store.second, second)
    assert index.spilled == 100
    assert plain_build(task, None, second_cells=second.tolist()).spilled == 100
    assert plain_build(task, None, second_cells=np.full(task.n, -1)).store.second is None


@pytest.mark.parametrize("storage", STORAGES)
def test_codes_have_as_many_candidates(storage):
    """Where every key is in two cells and all are probed, as much is recalls as where it is in one."""
    world = World(storage)
    keys = open_vectors(world.keys)
    projection = learn_projection(keys, open_vectors(world.x), R) if storage == "lean" else None
    every = ((world.assignment + 1) % C).astype(np.int32)
    cells = np.tile(np.arange(C), (40, 1))
    true = world.brute(cells, 10)[1]
    recalls = []
    for second in (None, every):
        store = FaissCellStore.build(keys, world.assignment, world.centroids, storage, projection, second)
        ids = store.scan(world.x, cells, 10)[1]
        recalls.append((ids[:, :, None] == true[:, None, :]).any(axis=2).mean())
        if storage == "sq8":  # 2 d for each entry, and for each candidate that is scored again
            entries = store.sizes.sum()
            candidates = 100 if second is None else 200
            assert store.scan_flops(np.array([entries]), 10) == 2 * D * (entries + candidates)
    assert recalls[1] >= recalls[0] - 1e-9


def test_labels_and_drop_in_with_two_cells(task):
    names = [f"key {i}" for i in range(task.n)]
    index = plain_build(task, None, spill_fraction=0.5, ids=names)
    plain = plain_build(task, None, spill_fraction=0.5)
    x = task.test.queries[:30]
    hits = index.search(x, probes=6)[1]
    want = plain.search(x, probes=6)[1]
    assert (hits == np.array(names)[want]).all()
    assert all(len(set(row)) == 10 for row in hits.tolist())
    candidates = np.concatenate([want, np.full((30, 2), -1)], axis=1)
    scores, ids = plain.store.score_again(x, candidates, 10)
    np.testing.assert_array_equal(ids, want)
    np.testing.assert_allclose(scores, np.take_along_axis(x @ np.asarray(task.keys).T, ids, 1), atol=1e-5)


@pytest.mark.parametrize("storage", ["flat", "lean"])
def test_second_cells_that_fit_in_number_only(tmp_path, storage):
    """The right number of them, but not where the keys are."""
    world = World(storage)
    world.store.save(tmp_path)
    has = np.flatnonzero(world.second >= 0)
    second = world.second.copy()
    for key in has[:5]:  # a third cell, where it is not
        second[key] = next(j for j in range(C) if j not in (world.assignment[key], second[key]))
    np.save(tmp_path / SECOND, second)
    with pytest.raises(amips.BundleError, match="wrong number of cells"):
        FaissCellStore.load(tmp_path, storage, False, spilled=True)
    short = world.second[:-10].copy()
    short[np.flatnonzero(short < 0)[: 10 + (world.second[-10:] >= 0).sum()]] = 0
    np.save(tmp_path / SECOND, short)
    with pytest.raises(amips.BundleError):
        FaissCellStore.load(tmp_path, storage, False, spilled=True)


@pytest.mark.parametrize("fraction", [1.5, -0.1, float("nan"), "0.5", True])
def test_not_a_fraction(task, fraction):
    with pytest.raises(
        amips.AmipsError, match=r"^spill_fraction=.*: expected a fraction of the keys from 0 to 1$"
    ):
        plain_build(task, None, spill_fraction=fraction)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ((), "for each of the 3000 keys"),
        (np.zeros(3, np.int32), "for each of the 3000 keys"),
        (np.zeros(3000, np.float32), "a whole number"),
        (np.full(3000, 60), "cells from 0 to 59"),
        (np.full(3000, -2), "cells from 0 to 59"),
        (None, "the same cell twice"),
    ],
)
def test_what_cannot_be(task, second, message):
    with pytest.raises(amips.AmipsError, match=message):
        amips.build(task, None, second_cells=task.cells.assignment if second is None else second)


def test_what_the_log_misses_is_counted_within_the_memory(monkeypatch):
    keys, queries = make_world(600, 900, 16, seed=2)
    task = amips.label(keys, queries, cells=30, query_aware=0, val=100, test=100)
    router = CentroidRouter(task.cells.centroids)
    monkeypatch.setattr(spill, "BLOCK_FLOATS", 30 * 10)  # ten queries at a time

    def saved(memory):
        codes, times = spill._saved(task, router, task.train.vectors, 0.9, memory)
        assert (codes[1:] > codes[:-1]).all()
        return dict(zip(codes.tolist(), times.tolist(), strict=True))

    whole = saved(None)
    assert saved(10**9) == whole  # the same, whatever the order
    pairs = sum(whole.values())
    some = saved(spill.CODE_BYTES * pairs // 4)
    assert pairs // 4 <= sum(some.values()) < pairs // 2
    assert all(whole[code] >= times for code, times in some.items())
