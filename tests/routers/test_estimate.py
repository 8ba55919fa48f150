"""What a router finds and costs, known from its scores alone: as a real search finds and costs."""

from dataclasses import replace

import numpy as np
import pytest

import amips
from amips.routers import fit_temperature
from amips.search.build import measure, measure_masses, routed
from amips.search.estimate import RoutingEstimate
from amips.search.points import ladder, shares
from helpers import make_world

M, C, K = 80, 30, 10


@pytest.fixture(scope="module")
def made():
    """Scores that say something of where the top keys are."""
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((M, C)).astype(np.float32)
    chances = np.exp(scores / 0.5) / np.exp(scores / 0.5).sum(axis=1, keepdims=True)
    wanted = np.stack([rng.choice(C, K, p=p / p.sum()) for p in chances.astype(np.float64)])
    return RoutingEstimate(scores, wanted, rng.integers(0, 50, C), given=0.5)


def slowly(made, taken):
    """found, probed and scanned of the cells that are taken, a set for each query."""
    found = [[cell in cells for cell in row] for cells, row in zip(taken, made.wanted, strict=True)]
    scanned = [sum(int(made.sizes[cell]) for cell in cells) for cells in taken]
    return np.array(found), np.array([len(cells) for cells in taken]), np.array(scanned)


def taken_by_share(made, share, temperature):
    taken = []
    for row in made.scores.astype(np.float64):
        chances = np.exp((row - row.max()) / temperature)
        chances /= chances.sum()
        taken.append({int(row.argmax()), *np.flatnonzero(chances >= share).tolist()})
    return taken


def agrees(got, want):
    for part, expected in zip((got.found, got.probed, got.scanned), want, strict=True):
        np.testing.assert_array_equal(part, expected)


class TestByHand:
    @pytest.mark.parametrize("probes", [1, 2, 7, C])
    def test_by_probes(self, made, probes):
        taken = [set(np.argsort(-row, kind="stable")[:probes].tolist()) for row in made.scores]
        agrees(made.at_probes(probes), slowly(made, taken))

    @pytest.mark.parametrize("share", [1.0, 0.6, 0.2, 0.05, 0.01, 1e-9])
    def test_by_share(self, made, share):
        agrees(made.at_mass(share), slowly(made, taken_by_share(made, share, 0.5)))

    def test_the_ends(self, made):
        one, every = made.at_mass(1.0), made.at_mass(1e-12)
        assert one.probed.tolist() == [1] * M
        agrees(one, (made.at_probes(1).found, one.probed, made.at_probes(1).scanned))
        assert every.found.all()
        assert every.scanned.tolist() == [made.sizes.sum()] * M

    def test_cells_that_tie(self):
        """The first of the best is probed in any case, the others only if they hold enough."""
        tied = RoutingEstimate(np.zeros((1, 4), np.float32), np.array([[0, 3]]), np.array([5, 6, 7, 8]), given=1.0)
        agrees(tied.at_mass(0.3), ([[True, False]], [1], [5]))
        agrees(tied.at_mass(0.25), ([[True, True]], [4], [26]))
        agrees(tied.at_probes(2), ([[True, False]], [2], [11]))
        assert tied.min_mass_for(0.5) == 1
        assert tied.min_mass_for(0.9) == 0.25

    def test_the_temperature_is_fitted_where_none_is_given(self, made):
        fitted = replace(made, given=0.0)
        assert fitted.temperature == fit_temperature(made.scores, made.wanted)
        assert made.temperature == 0.5
        share = 0.1
        want = slowly(made, taken_by_share(made, share, fitted.temperature))
        agrees(fitted.at_mass(share), want)


class TestFor:
    @pytest.mark.parametrize("recall", [0.2, 0.5, 0.8, 0.9, 0.95, 0.99, 1.0])
    def test_probes(self, made, recall):
        probes = made.probes_for(recall)
        assert made.at_probes(probes).found.mean() >= recall - 1e-9
        assert probes == 1 or made.at_probes(probes - 1).found.mean() < recall

    @pytest.mark.parametrize("recall", [0.2, 0.5, 0.8, 0.9, 0.95, 0.99, 1.0])
    def test_share(self, made, recall):
        share = made.min_mass_for(recall)
        assert 0 < share <= 1
        assert made.at_mass(share).found.mean() >= recall - 1e-9
        assert share == 1 or made.at_mass(share * (1 + 1e-5)).found.mean() < recall

    @pytest.mark.parametrize("recall", [1e-9, 0.1])
    def test_what_the_best_cell_holds_needs_no_more(self, made, recall):
        easy = replace(made, wanted=np.repeat(made.scores.argmax(axis=1)[:, None], K, axis=1))
        assert (easy.probes_for(recall), easy.min_mass_for(recall)) == (1, 1)
        assert (easy.probes_for(1.0), easy.min_mass_for(1.0)) == (1, 1)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """An index of float32 keys, routed by centroid; its queries are in no cell's middle."""
    keys, queries = make_world(2500, 900, 24, seed=3)
    out = tmp_path_factory.mktemp("expected") / "task"
    task = amips.label(keys, queries, cells=40, copies=0, val=300, test=200, k=10, out=out)
    return amips.build(task, None), task


def found(true, ids):
    return (np.asarray(true)[:, :, None] == ids[:, None, :]).any(axis=2)


class TestRealSearches:
    @pytest.mark.parametrize("probes", [1, 3, 11, 40])
    def test_by_probes(self, built, probes):
        index, task = built
        got = routed(index, task.test).at_probes(probes)
        x = np.asarray(task.test.queries)
        np.testing.assert_array_equal(got.found, found(task.test.top_ids, index.search(x, 10, probes)[1]))
        cost = index.cost(x, probes)
        np.testing.assert_array_equal(got.scanned, cost.scanned)
        np.testing.assert_array_equal(got.probed, cost.probed)

    @pytest.mark.parametrize("share", [1.0, 0.3, 0.1, 0.02, 0.001])
    def test_by_share(self, built, share):
        index, task = built
        got = replace(routed(index, task.test), given=index.temperature).at_mass(share)
        x = np.asarray(task.test.queries)
        ids = index.search(x, 10, share=share)[1]
        np.testing.assert_array_equal(got.found, found(task.test.top_ids, ids))
        cost = index.cost(x, share=share)
        np.testing.assert_array_equal(got.scanned, cost.scanned)
        np.testing.assert_array_equal(got.probed, cost.probed)

    def test_in_parts(self, built, monkeypatch):
        """Many cells are scored for few queries at a time."""
        index, task = built
        whole = routed(index, task.val)
        calls = []
        real = type(index.router).scores
        monkeypatch.setattr(
            type(index.router), "scores", lambda self, x: calls.append(len(x)) or real(self, x)
        )
        monkeypatch.setattr("amips.search.estimate.BLOCK_FLOATS", 64 * index.c)
        parts = routed(index, task.val)
        assert max(calls) == 64
        np.testing.assert_allclose(parts.scores, whole.scores, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(parts.wanted, whole.wanted)

    def test_points(self, built):
        """The points of a built index are those of both ways, on val."""
        index, task = built
        x, true = np.asarray(task.val.queries), task.val.top_ids
        assert index.temperature == routed(index, task.val).temperature
        fixed = [p for p in index.points if not p.share]
        bounded = [p for p in index.points if p.share]
        assert fixed == measure(index, task.val)
        assert bounded == measure_masses(index, task.val)
        assert [p.probes for p in fixed] == ladder(40)
        assert [p.share for p in bounded] == shares()[: len(bounded)]
        for point in bounded:
            hits = found(true, index.search(x, 10, share=point.share)[1])
            cost = index.cost(x, share=point.share)
            assert point.recall10 == pytest.approx(hits.mean())
            assert point.recall1 == pytest.approx(hits[:, 0].mean())
            assert point.flops == pytest.approx(cost.flops.mean())
            assert point.scanned == pytest.approx(cost.scanned.mean() / 2500)
            assert point.probes == np.ceil(cost.probed.mean())
        # The ladder ends where nearly all is found or much is scanned, not before and not after.
        enough = [p.recall10 >= 0.999 or p.scanned >= 0.3 for p in bounded]
        assert enough == [False] * (len(bounded) - 1) + [True]

    def test_a_bound_on_the_share_finds_as_much_for_less(self, built):
        """Easy queries leave to the hard ones what they do not need."""
        index, task = built
        seen = replace(routed(index, task.test), given=index.temperature)
        for recall in (0.8, 0.9, 0.95):
            at_probes = seen.at_probes(seen.probes_for(recall)).scanned.mean()
            at_mass = seen.at_mass(seen.min_mass_for(recall)).scanned.mean()
            assert at_mass < 0.97 * at_probes
