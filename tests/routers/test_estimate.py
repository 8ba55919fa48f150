"""What a router finds and costs, known from its scores alone: as a real search finds and costs."""

from dataclasses import replace

import numpy as np
import pytest

import amips
from amips.routers import RoutingEstimate, fit_temperature
from amips.search import estimate_routing, ladder, mass_bounds, measure, measure_masses
from helpers import make_world

M, C, K = 80, 30, 10


@pytest.fixture(scope="module")
def routing():
    """Scores that say something of where the top keys are."""
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((M, C)).astype(np.float32)
    chances = np.exp(scores / 0.5) / np.exp(scores / 0.5).sum(axis=1, keepdims=True)
    wanted = np.stack([rng.choice(C, K, p=p / p.sum()) for p in chances.astype(np.float64)])
    return RoutingEstimate(scores, wanted, rng.integers(K, 50, C), known_temperature=0.5)


def slowly(routing, chosen):
    """Hits, probes and keys scanned, if the cells `chosen` are probed: a set for each query."""
    hits = [[cell in cells for cell in row] for cells, row in zip(chosen, routing.top_cells, strict=True)]
    scanned = [sum(int(routing.sizes[cell]) for cell in cells) for cells in chosen]
    return np.array(hits), np.array([len(cells) for cells in chosen]), np.array(scanned)


def chosen_by_mass(routing, min_mass, temperature):
    chosen = []
    for row in routing.scores.astype(np.float64):
        chances = np.exp((row - row.max()) / temperature)
        chances /= chances.sum()
        chosen.append({int(row.argmax()), *np.flatnonzero(chances >= min_mass).tolist()})
    return chosen


def agrees(got, want):
    for part, expected in zip((got.hits, got.probes, got.scanned), want, strict=True):
        np.testing.assert_array_equal(part, expected)


class TestByHand:
    @pytest.mark.parametrize("probes", [1, 2, 7, C])
    def test_by_probes(self, routing, probes):
        chosen = [set(np.argsort(-row, kind="stable")[:probes].tolist()) for row in routing.scores]
        agrees(routing.at_probes(probes), slowly(routing, chosen))

    @pytest.mark.parametrize("min_mass", [1.0, 0.6, 0.2, 0.05, 0.01, 1e-9])
    def test_by_share(self, routing, min_mass):
        agrees(routing.at_mass(min_mass), slowly(routing, chosen_by_mass(routing, min_mass, 0.5)))

    def test_the_ends(self, routing):
        one, every = routing.at_mass(1.0), routing.at_mass(1e-12)
        assert one.probes.tolist() == [1] * M
        agrees(one, (routing.at_probes(1).hits, one.probes, routing.at_probes(1).scanned))
        assert every.hits.all()
        assert every.scanned.tolist() == [routing.sizes.sum()] * M

    @pytest.mark.parametrize("second", [False, True])
    def test_small_cells_are_not_enough(self, routing, second):
        """The best cells follow until they hold as many keys as are asked for, twice where some are twice."""
        sizes = np.random.default_rng(1).integers(0, 7, C)
        none = np.full(routing.top_cells.shape, -1) if second else None
        small = replace(routing, sizes=sizes, second=none)
        needed = 2 * K if second else K
        chosen = []
        for row, cells in zip(routing.scores, chosen_by_mass(routing, 0.2, 0.5), strict=True):
            best = np.argsort(-row, kind="stable").tolist()
            while sum(int(sizes[cell]) for cell in cells) < needed:
                cells.add(next(cell for cell in best if cell not in cells))
            chosen.append(cells)
        agrees(small.at_mass(0.2), slowly(small, chosen))
        assert (small.at_mass(0.2).scanned >= needed).all()

    def test_cells_that_tie(self):
        """The first of the best is probed in any case, the others only if they hold enough."""
        tied = RoutingEstimate(
            np.zeros((1, 4), np.float32),
            np.array([[0, 3]]),
            np.array([50, 60, 70, 80]),
            known_temperature=1.0,
        )
        agrees(tied.at_mass(0.3), ([[True, False]], [1], [50]))
        agrees(tied.at_mass(0.25), ([[True, True]], [4], [260]))
        agrees(tied.at_probes(2), ([[True, False]], [2], [110]))
        assert tied.min_mass_for(0.5) == 1
        assert tied.min_mass_for(0.9) == 0.25

    def test_the_temperature_is_fitted_where_none_is_given(self, routing):
        fitted = replace(routing, known_temperature=0.0)
        assert fitted.temperature == fit_temperature(routing.scores, routing.top_cells)
        assert routing.temperature == 0.5
        min_mass = 0.1
        want = slowly(routing, chosen_by_mass(routing, min_mass, fitted.temperature))
        agrees(fitted.at_mass(min_mass), want)


class TestFor:
    @pytest.mark.parametrize("recall", [0.2, 0.5, 0.8, 0.9, 0.95, 0.99, 1.0])
    def test_probes(self, routing, recall):
        probes = routing.probes_for(recall)
        assert routing.at_probes(probes).recall >= recall - 1e-9
        assert probes == 1 or routing.at_probes(probes - 1).recall < recall

    @pytest.mark.parametrize("recall", [0.2, 0.5, 0.8, 0.9, 0.95, 0.99, 1.0])
    def test_share(self, routing, recall):
        min_mass = routing.min_mass_for(recall)
        assert 0 < min_mass <= 1
        assert routing.at_mass(min_mass).recall >= recall - 1e-9
        assert min_mass == 1 or routing.at_mass(min_mass * (1 + 1e-5)).recall < recall

    @pytest.mark.parametrize("recall", [1e-9, 0.1])
    def test_what_the_best_cell_holds_needs_no_more(self, routing, recall):
        easy = replace(routing, top_cells=np.repeat(routing.scores.argmax(axis=1)[:, None], K, axis=1))
        assert (easy.probes_for(recall), easy.min_mass_for(recall)) == (1, 1)
        assert (easy.probes_for(1.0), easy.min_mass_for(1.0)) == (1, 1)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """An index of float32 keys, routed by centroid; its queries are in no cell's middle."""
    keys, queries = make_world(2500, 900, 24, seed=3)
    out = tmp_path_factory.mktemp("expected") / "task"
    task = amips.label(keys, queries, cells=40, query_aware=0.0, val=300, test=200, out=out)
    return amips.build(task, storage="flat", spill_fraction=0.0), task


def hits_of(true, ids):
    return (np.asarray(true)[:, :, None] == ids[:, None, :]).any(axis=2)


class TestRealSearches:
    @pytest.mark.parametrize("probes", [1, 3, 11, 40])
    def test_by_probes(self, built, probes):
        index, task = built
        got = estimate_routing(index, task.test).at_probes(probes)
        x = np.asarray(task.test.queries)
        np.testing.assert_array_equal(
            got.hits, hits_of(task.test.top_ids, index.search(x, 10, probes=probes)[1])
        )
        cost = index.cost(x, probes=probes)
        np.testing.assert_array_equal(got.scanned, cost.scanned)
        np.testing.assert_array_equal(got.probes, cost.probed)

    @pytest.mark.parametrize("min_mass", [1.0, 0.3, 0.1, 0.02, 0.001])
    def test_by_share(self, built, min_mass):
        index, task = built
        got = replace(estimate_routing(index, task.test), known_temperature=index.temperature).at_mass(
            min_mass
        )
        x = np.asarray(task.test.queries)
        ids = index.search(x, 10, min_mass=min_mass)[1]
        np.testing.assert_array_equal(got.hits, hits_of(task.test.top_ids, ids))
        cost = index.cost(x, min_mass=min_mass)
        np.testing.assert_array_equal(got.scanned, cost.scanned)
        np.testing.assert_array_equal(got.probes, cost.probed)

    def test_in_parts(self, built, monkeypatch):
        """Many cells are scored for few queries at a time."""
        index, task = built
        whole = estimate_routing(index, task.val)
        calls = []
        real = type(index.router).scores
        monkeypatch.setattr(
            type(index.router), "scores", lambda self, x: calls.append(len(x)) or real(self, x)
        )
        monkeypatch.setattr("amips.routers.estimate.BLOCK_FLOATS", 64 * index.c)
        parts = estimate_routing(index, task.val)
        assert max(calls) == 64
        np.testing.assert_allclose(parts.scores, whole.scores, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(parts.top_cells, whole.top_cells)

    def test_points(self, built):
        """The points of a built index are those of both ways, on val."""
        index, task = built
        x, true = np.asarray(task.val.queries), task.val.top_ids
        assert index.temperature == estimate_routing(index, task.val).temperature
        fixed = [p for p in index.points if not p.min_mass]
        by_mass = [p for p in index.points if p.min_mass]
        assert fixed == measure(index, task.val)
        bounded = measure_masses(index, task.val)
        assert by_mass[: len(bounded)] == bounded  # those between two of them, near the target, come after
        assert [p.probes for p in fixed] == ladder(40)
        assert [p.min_mass for p in bounded] == mass_bounds()[: len(bounded)]
        for point in by_mass:
            hits = hits_of(true, index.search(x, 10, min_mass=point.min_mass)[1])
            cost = index.cost(x, min_mass=point.min_mass)
            assert point.recall10 == pytest.approx(hits.mean())
            assert point.recall1 == pytest.approx(hits[:, 0].mean())
            assert point.flops == pytest.approx(cost.flops.mean())
            assert point.scanned == pytest.approx(cost.scanned.mean() / 2500)
            assert point.probes == np.ceil(cost.probed.mean())
        # The ladder ends where no more can be found or nearly all is scanned, not before and not after.
        enough = [p.recall10 == 1 or p.assured[-1] >= 0.999 or p.scanned >= 0.9 for p in bounded]
        assert enough == [False] * (len(bounded) - 1) + [True]

    def test_a_bound_on_the_share_finds_as_much_for_less(self, built):
        """Easy queries leave to the hard ones what they do not need."""
        index, task = built
        seen = replace(estimate_routing(index, task.test), known_temperature=index.temperature)
        for recall in (0.8, 0.9, 0.95):
            at_probes = seen.at_probes(seen.probes_for(recall)).scanned.mean()
            at_mass = seen.at_mass(seen.min_mass_for(recall)).scanned.mean()
            assert at_mass < 0.97 * at_probes
