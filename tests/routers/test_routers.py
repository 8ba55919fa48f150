"""Routers against plain formulas, the linear router's mathematics, files and training."""

import json
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import amips
from amips import RunError, VectorError
from amips.lean import learn_projection
from amips.learn import centroid_metrics, evaluate, loop
from amips.learn.affine_network import AffineNetwork, affine_network
from amips.learn.batches import CellBatches
from amips.learn.losses import CellBatch, route_loss, total_loss
from amips.metrics import routing_accuracy
from amips.nets import AffineArchitecture, AffineNet, MaxAffine, initial_model, load_model
from amips.nets.recipe import Recipe
from amips.routers import (
    CellRouter,
    CentroidRouter,
    MapperRouter,
    best_cells,
    cells_above,
    fit_temperature,
    limit_probes,
    router_for,
)
from amips.vectors import open_vectors
from helpers import make_world
from reference import architecture, base, numeric_jacobian, queries, random_net, scores

torch.set_num_threads(1)
CPU = torch.device("cpu")
D, C = 6, 5


@pytest.fixture(scope="module")
def task(world, tmp_path_factory):
    """8 plain cells with their targets, 500 training queries with a noisy copy each, 100 for val and test."""
    out = tmp_path_factory.mktemp("task") / "task"
    return amips.label(
        *world, cells=8, query_aware=0.0, copies=1, cell_targets=True, val=100, test=100, out=out
    )


def one_line(caught):
    return "\n" not in str(caught.value) and str(caught.value) != ""


def random_affine(d=D, c=C, pieces=1, bias=False, seed=0, rank=0):
    rng = np.random.default_rng(seed)
    weights = {"W": rng.standard_normal((c * pieces, rank or d)).astype(np.float32)}
    if bias:
        weights["b"] = rng.standard_normal(c * pieces).astype(np.float32)
    if rank:
        weights["A"] = rng.standard_normal((rank, d)).astype(np.float32)
    kind = "linear" if pieces == 1 else "max-affine"
    return AffineNet(AffineArchitecture(d, c, pieces, bias, kind, rank), weights, {})


def plain_affine(net, x):
    """max_p <w_jp, x> + b_jp ||x||, in float64 and with loops; w_jp = A' v_jp where there is a rank."""
    a, W = net.architecture, net.weights["W"].astype(np.float64)
    W = W @ net.weights["A"].astype(np.float64) if a.rank else W
    b = net.weights["b"].astype(np.float64) if a.bias else np.zeros(len(W))
    x = np.asarray(x, np.float64)
    out = np.empty((len(x), a.c))
    for i, row in enumerate(x):
        for j in range(a.c):
            pieces = range(j * a.pieces, (j + 1) * a.pieces)
            out[i, j] = max(W[p] @ row + b[p] * np.linalg.norm(row) for p in pieces)
    return out


@pytest.fixture(scope="module")
def centroids():
    return np.random.default_rng(8).standard_normal((C, D)).astype(np.float32)


FORMS = [(1, False, 0), (1, True, 0), (3, False, 0), (3, True, 0), (1, False, 2), (3, False, 4), (3, True, 4)]


@pytest.fixture(params=FORMS, ids=lambda p: f"{p[0]}-{p[1]}-{p[2]}")
def affine(request):
    pieces, bias, rank = request.param
    return random_affine(pieces=pieces, bias=bias, seed=pieces, rank=rank)


X = queries(30, D)


class TestRouters:
    def test_centroid(self, centroids):
        router = router_for(None, centroids)
        assert isinstance(router, CentroidRouter)
        want = np.array([[c @ x for c in centroids.astype(np.float64)] for x in X])
        np.testing.assert_allclose(router.scores(X), want, rtol=1e-5, atol=1e-5)
        assert (router.c, router.name, router.flops) == (C, "centroid", 2 * C * D)

    @pytest.mark.parametrize("bias", [False, True])
    def test_linear(self, centroids, bias):
        net = random_affine(bias=bias)
        router = router_for(net, centroids)
        assert isinstance(router, CellRouter)
        np.testing.assert_allclose(router.scores(X), plain_affine(net, X), rtol=1e-5, atol=1e-5)
        # As cheap as scoring centroids.
        assert (router.c, router.name, router.flops) == (C, "linear", 2 * C * D)

    def test_supportnet(self, centroids):
        net = random_net(architecture(c=C))
        router = router_for(net, centroids)
        assert isinstance(router, CellRouter)
        want = scores(net.architecture, net.weights, X)
        np.testing.assert_allclose(router.scores(X), want, rtol=1e-4, atol=1e-5)
        h = 7
        assert router.flops == 2 * (D * h + 2 * (D * h + h * h) + h * C)
        assert (router.c, router.name) == (C, "support")

    def test_keynet_scores_its_keys_with_the_query(self, centroids):
        net = random_net(architecture("key", c=C))
        router = router_for(net, centroids)
        assert isinstance(router, CellRouter)
        units = X / np.linalg.norm(X, axis=1, keepdims=True)
        keys = base(net.architecture, net.weights, units).reshape(len(X), C, D)
        want = (keys * X[:, None, :]).sum(axis=2)
        np.testing.assert_allclose(router.scores(X), want, rtol=1e-4, atol=1e-5)
        h = 7
        assert router.flops == 2 * (D * h + 2 * (D * h + h * h) + h * C * D + C * D)
        assert (router.c, router.name) == (C, "key")

    def test_keynet_as_a_mapper(self, centroids):
        net = random_net(architecture("key", c=1))
        router = router_for(net, centroids)
        assert isinstance(router, MapperRouter)
        units = X / np.linalg.norm(X, axis=1, keepdims=True)
        mapped = base(net.architecture, net.weights, units)
        np.testing.assert_allclose(router.map(X), mapped, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(router.scores(X), mapped @ centroids.T, rtol=1e-4, atol=1e-5)
        h = 7
        assert router.flops == 2 * (D * h + 2 * (D * h + h * h) + h * D) + 2 * C * D
        assert (router.c, router.name) == (C, "key mapper")

    def test_supportnet_as_a_mapper(self, centroids):
        net = random_net(architecture(c=1))
        router = router_for(net, centroids)
        assert isinstance(router, MapperRouter)
        gradient = numeric_jacobian(lambda x: scores(net.architecture, net.weights, x), X)[:, 0]
        np.testing.assert_allclose(router.map(X), gradient, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(router.scores(X), gradient @ centroids.T, rtol=1e-3, atol=1e-3)
        h = 7
        forward, reverse = D * h + 2 * (D * h + h * h) + h, D * h + 2 * (D * h + h * h)
        assert router.flops == 2 * (forward + reverse) + 2 * C * D
        assert (router.c, router.name) == (C, "support mapper")

    @pytest.mark.parametrize("kind", ["centroid", "linear", "support", "key", "mapper"])
    def test_one_query_alone_is_the_same(self, centroids, kind):
        model = {
            "centroid": lambda: None,
            "linear": lambda: random_affine(bias=True),
            "mapper": lambda: random_net(architecture("key", c=1)),
        }.get(kind, lambda: random_net(architecture(kind, c=C)))()
        router = router_for(model, centroids)
        alone = np.concatenate([router.scores(X[i : i + 1]) for i in range(len(X))])
        np.testing.assert_allclose(alone, router.scores(X), rtol=1e-4, atol=1e-5)
        assert router.scores(X[:0]).shape == (0, C)

    def test_wrong_dimension(self, centroids):
        with pytest.raises(RunError, match=f"dimension 4.*dimension {D}") as caught:
            router_for(random_affine(d=4), centroids)
        assert one_line(caught)
        with pytest.raises(RunError, match="dimension 4"):
            router_for(random_net(architecture("key", d=4, c=1)), centroids)

    def test_wrong_number_of_cells(self, centroids):
        for net in (random_affine(c=3), random_net(architecture(c=3)), random_net(architecture("key", c=3))):
            with pytest.raises(RunError, match=f"scores 3 cells, but there are {C}") as caught:
                router_for(net, centroids)
            assert one_line(caught)


class TestBestCells:
    @pytest.mark.parametrize("probes", [1, 2, 7, 19, 20, 50])
    def test_is_a_stable_sort(self, probes):
        values = np.random.default_rng(0).standard_normal((50, 20)).astype(np.float32)
        got = best_cells(values, probes)
        assert got.dtype == np.int64
        np.testing.assert_array_equal(got, np.argsort(-values, axis=1, kind="stable")[:, :probes])

    @pytest.mark.parametrize("probes", [1, 3, 10, 20, 99])
    @pytest.mark.parametrize("levels", [1, 2, 5])
    def test_ties_go_to_the_lower_cell(self, probes, levels):
        # Few levels: nearly every row has a tie for the last place.
        values = np.random.default_rng(1).integers(0, levels, (200, 20)).astype(np.float32)
        got = best_cells(values, probes)
        np.testing.assert_array_equal(got, np.argsort(-values, axis=1, kind="stable")[:, :probes])

    def test_more_probes_begin_with_the_same_cells(self):
        values = np.zeros((1, 40), np.float32)
        for probes in range(1, 41):
            np.testing.assert_array_equal(best_cells(values, probes), [range(probes)])

    @pytest.mark.parametrize("levels", [3, 1000])
    def test_one_query_is_as_one_of_many(self, levels):
        values = np.random.default_rng(2).integers(0, levels, (50, 20)).astype(np.float32)
        for probes in (1, 5, 19, 20):
            many = best_cells(values, probes)
            for row, expected in zip(values, many, strict=True):
                np.testing.assert_array_equal(best_cells(row[None], probes), expected[None])

    @pytest.mark.parametrize("bad", [[0], [3, 7], range(1, 12), range(12)], ids=len)
    @pytest.mark.parametrize("probes", [1, 2, 5, 11, 12])
    def test_scores_of_one_query_that_are_not_numbers(self, bad, probes):
        """As many cells as asked for, all different, and any real best ones among them in their order."""
        row = np.random.default_rng(3).standard_normal((1, 12)).astype(np.float32)
        row[0, list(bad)] = np.nan
        got = best_cells(row, probes)
        assert got.shape == (1, probes)
        assert len(set(got[0].tolist())) == probes
        assert set(got[0].tolist()) <= set(range(12))
        real = row[0, got[0]]
        real = real[~np.isnan(real)]
        np.testing.assert_array_equal(real, -np.sort(-row[0][~np.isnan(row[0])])[: len(real)])

    def test_no_queries(self):
        assert best_cells(np.empty((0, 9), np.float32), 3).shape == (0, 3)

    def test_limit_probes(self):
        cells = np.array([[3, 1, 2], [0, 2, 1], [2, 0, 3]])
        got = limit_probes(cells, np.array([1, 3, 2]))
        np.testing.assert_array_equal(got, [[3, -1, -1], [0, 2, 1], [2, 0, -1]])
        np.testing.assert_array_equal(limit_probes(cells, np.array([9, 9, 9])), cells)
        assert limit_probes(cells[:0], np.empty(0, np.int64)).shape == (0, 3)


def shares_slowly(values, temperature, share):
    """The cells of each row, best first: those of at least this share, and the best in any case."""
    found = []
    for row in values.astype(np.float64):
        chances = np.exp((row - row.max()) / temperature)
        chances /= chances.sum()
        order = np.argsort(-row, kind="stable")
        found.append([int(order[0]), *(int(j) for j in order[1:] if chances[j] >= share)])
    return found


class TestShare:
    VALUES = np.random.default_rng(4).standard_normal((60, 25)).astype(np.float32)

    @pytest.mark.parametrize("share", [1.0, 0.5, 0.2, 0.05, 0.004])
    @pytest.mark.parametrize("temperature", [0.05, 0.4, 3.0])
    def test_as_by_softmax(self, share, temperature):
        want = shares_slowly(self.VALUES, temperature, share)
        got = cells_above(self.VALUES, temperature, share)
        assert got.dtype == np.int64
        assert got.shape == (60, max(map(len, want)))
        for row, cells in zip(got, want, strict=True):
            assert row[0] == cells[0]  # the best first
            assert sorted(row[: len(cells)].tolist()) == sorted(cells)
            assert (row[len(cells) :] == -1).all()

    @pytest.mark.parametrize("share", [1.0, 0.2, 0.004])
    def test_one_query_has_the_same_cells_in_order(self, share):
        many = cells_above(self.VALUES, 0.4, share)
        for row, cells, want in zip(self.VALUES, many, shares_slowly(self.VALUES, 0.4, share), strict=True):
            alone = cells_above(row[None], 0.4, share)
            assert alone.tolist() == [want]
            assert sorted(cells[cells >= 0].tolist()) == sorted(want)

    def test_the_ends(self):
        for rows in (self.VALUES, self.VALUES[:1]):
            one = cells_above(rows, 0.4, 1.0)
            np.testing.assert_array_equal(one, rows.argmax(axis=1)[:, None])
            every = cells_above(rows, 0.4, 1e-30)
            np.testing.assert_array_equal(np.sort(every, axis=1), np.tile(np.arange(25), (len(rows), 1)))

    def test_scores_may_be_far_apart_or_large(self):
        """No exponential overflows, whatever the temperature."""
        for scale in (1e-20, 1.0, 1e20):
            values = (self.VALUES * np.float32(scale)).astype(np.float32)
            got = cells_above(values, 0.4 * scale, 0.1)
            np.testing.assert_array_equal(got, cells_above(self.VALUES, 0.4, 0.1))
        wide = cells_above(self.VALUES, 1e-6, 0.4)
        np.testing.assert_array_equal(wide, self.VALUES.argmax(axis=1)[:, None])

    def test_ties(self):
        """Cells that tie are all taken or all left, but for the first of the best."""
        tied = np.array([[1, 2, 2, 0, 2], [0, 0, 0, 0, 0]], np.float32)
        assert cells_above(tied, 0.1, 0.34).tolist() == [[1], [0]]
        got = cells_above(tied, 0.1, 0.33)
        assert got.tolist() == [[1, 2, 4], [0, -1, -1]]
        assert sorted(cells_above(tied, 0.1, 0.19)[1].tolist()) == [0, 1, 2, 3, 4]
        for share in (0.34, 0.33, 0.19):
            for row, cells in zip(tied, cells_above(tied, 0.1, share), strict=True):
                assert cells_above(row[None], 0.1, share)[0].tolist() == cells[cells >= 0].tolist()

    def test_no_queries(self):
        assert len(cells_above(np.empty((0, 9), np.float32), 0.4, 0.1)) == 0


class TestTemperature:
    @pytest.mark.parametrize("true", [0.1, 0.5, 2.0])
    @pytest.mark.parametrize("scale", [1.0, 1e-3, 1e3])
    def test_the_one_the_cells_were_drawn_with(self, true, scale):
        rng = np.random.default_rng(0)
        values = rng.standard_normal((4000, 20)) + rng.standard_normal((4000, 1))
        # Gumbel noise draws from the softmax.
        noise = rng.gumbel(size=(4000, 10, 20))
        cells = (values[:, None, :] / true + noise).argmax(axis=2)
        got = fit_temperature((scale * values).astype(np.float32), cells)
        assert got / scale == pytest.approx(true, rel=0.1)

    def test_scores_that_say_nothing(self):
        cells = np.random.default_rng(0).integers(0, 5, (8, 3))
        assert fit_temperature(np.ones((8, 5), np.float32), cells) == 1
        assert fit_temperature(np.zeros((8, 1), np.float32), np.zeros((8, 3), int)) == 1


class TestAffine:
    def test_scores(self, affine):
        got = affine.scores(X)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, plain_affine(affine, X), rtol=1e-5, atol=1e-5)

    def test_pieces_matter(self):
        net = random_affine(pieces=3)
        first = AffineNet(AffineArchitecture(D, C), {"W": np.ascontiguousarray(net.weights["W"][::3])}, {})
        assert (net.scores(X) >= first.scores(X)).all()
        assert (net.scores(X) > first.scores(X) + 1e-3).any()

    @pytest.mark.parametrize("rank", [0, 4])
    def test_convex(self, rank):
        # With biases only where they are not negative: b ||x|| is concave for b < 0.
        net = random_affine(pieces=3, bias=True, rank=rank)
        net = replace(net, weights={**net.weights, "b": np.abs(net.weights["b"])})
        y, share = queries(30, D, seed=4), np.random.default_rng(0).random((30, 1)).astype(np.float32)
        between = net.scores(share * X + (1 - share) * y)
        assert (between <= share * net.scores(X) + (1 - share) * net.scores(y) + 1e-4).all()

    @pytest.mark.parametrize("factor", [0.0, 1e-3, 7.0, 1e6])
    def test_homogeneous(self, affine, factor):
        factor = np.float32(factor)
        np.testing.assert_allclose(
            affine.scores(factor * X), factor * affine.scores(X), rtol=1e-4, atol=1e-5 * factor
        )

    def test_a_long_query_does_not_overflow(self):
        net = random_affine(bias=True)
        long = X * np.float32(1e25)
        np.testing.assert_allclose(net.scores(long), net.scores(X) * np.float32(1e25), rtol=1e-3)
        np.testing.assert_allclose(net.keys(long), net.keys(X), rtol=1e-3, atol=1e-4)

    def test_keys_are_the_gradient(self, affine):
        numeric = numeric_jacobian(lambda x: plain_affine(affine, x), X)
        assert affine.keys(X).shape == (len(X), C, D)
        np.testing.assert_allclose(affine.keys(X), numeric, rtol=1e-4, atol=1e-4)

    def test_euler(self, affine):
        np.testing.assert_allclose(
            np.einsum("mcd,md->mc", affine.keys(X), X), affine.scores(X), rtol=1e-4, atol=1e-5
        )

    def test_chosen_cells(self, affine):
        cells = np.random.default_rng(0).integers(0, C, (len(X), 2))
        got = affine.keys(X, cells)
        np.testing.assert_array_equal(got, affine.keys(X)[np.arange(len(X))[:, None], cells])

    def test_zero(self, affine):
        zero = np.zeros((1, D), np.float32)
        np.testing.assert_array_equal(affine.scores(zero), np.zeros((1, C)))
        assert np.isfinite(affine.keys(zero)).all()

    def test_counts(self):
        a = AffineArchitecture(D, C, 3, bias=True)
        assert (
            a.parameters
            == C * 3 * (D + 1)
            == sum(w.size for w in random_affine(pieces=3, bias=True).weights.values())
        )
        assert AffineArchitecture(D, C).parameters == C * D
        assert a.score_flops == a.key_flops() == 2 * C * 3 * D
        assert a.floats == C * 3

    def test_counts_with_a_rank(self):
        a = AffineArchitecture(D, C, 3, True, "max-affine", 4)
        assert a.parameters == C * 3 * (4 + 1)
        assert a.score_flops == 2 * D * 4 + 2 * C * 3 * 4
        assert a.key_flops() == a.score_flops + 2 * C * 4 * D  # the winning pieces, back in R^d
        assert a.key_flops(2) == a.score_flops + 2 * 2 * 4 * D
        assert a.floats == C * 3 + 4
        assert router_for(random_affine(rank=4), np.zeros((C, D), np.float32)).flops == 2 * 4 * (D + C)

    def test_a_rank_of_all_dimensions_is_no_rank(self):
        full = random_affine(pieces=2, rank=D)
        W = full.weights["W"] @ full.weights["A"]
        plain = AffineNet(AffineArchitecture(D, C, 2, False, "max-affine"), {"W": W}, {})
        np.testing.assert_allclose(full.scores(X), plain.scores(X), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(full.keys(X), plain.keys(X), rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("shape", [(D,), (3, D + 1), (2, 3, D)])
    def test_wrong_queries(self, affine, shape):
        with pytest.raises(VectorError, match="trained for") as caught:
            affine.scores(np.zeros(shape, np.float32))
        assert one_line(caught)

    def test_torch_is_the_same(self, affine):
        module = module_of(affine)
        np.testing.assert_allclose(
            module(torch.from_numpy(X)).detach(), affine.scores(X), rtol=1e-4, atol=1e-5
        )
        exported = module.export({"note": 1})
        np.testing.assert_array_equal(exported.scores(X), affine.scores(X))
        assert exported.weights.keys() == affine.weights.keys()
        assert (exported.architecture, exported.about) == (affine.architecture, {"note": 1})

    def test_keys_are_torch_s_gradient(self, affine):
        x = torch.from_numpy(X).requires_grad_()
        scores = module_of(affine)(x)
        for j in range(C):
            (gradient,) = torch.autograd.grad(scores[:, j].sum(), x, retain_graph=True)
            np.testing.assert_allclose(gradient, affine.keys(X)[:, j], rtol=1e-4, atol=1e-4)

    def test_the_projection_is_not_trained(self):
        module = module_of(random_affine(bias=True, rank=3))
        assert [name for name, _ in module.named_parameters()] == ["W", "b"]
        averaged = {name: 2 * p for name, p in module.named_parameters()}
        exported = module.export({}, averaged)
        np.testing.assert_array_equal(exported.weights["A"], module.A)
        np.testing.assert_allclose(exported.scores(X), 2 * module(torch.from_numpy(X)).detach(), rtol=1e-4)

    def test_the_smooth_maximum_is_above_the_maximum_and_comes_near(self):
        net = random_affine(pieces=3, rank=4)
        sharp, last = module_of(net)(torch.from_numpy(X)), np.inf
        for t in (1.0, 0.1, 0.01):
            smooth = module_of(net, smooth=t)(torch.from_numpy(X))
            apart = (smooth - sharp).detach().numpy()
            assert (apart >= -1e-5).all()
            assert apart.max() <= t * np.log(3) + 1e-5
            assert apart.max() < last
            last = apart.max()
        assert last < 0.01
        pieces = net._pieces(X).astype(np.float64)
        want = 0.5 * np.log(np.exp(pieces / 0.5).sum(axis=2))
        got = module_of(net, smooth=0.5)(torch.from_numpy(X)).detach()
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
        # What is exported takes the maximum.
        np.testing.assert_array_equal(module_of(net, smooth=0.5).export({}).scores(X), net.scores(X))


def module_of(net, smooth=0.0):
    """The torch module with the weights of a runtime."""
    module = AffineNetwork(net.architecture, net.weights["W"], net.weights.get("A"), smooth)
    if module.b is not None:
        with torch.no_grad():
            module.b.copy_(torch.from_numpy(net.weights["b"]))
    return module


class TestBeginning:
    """Where training begins."""

    def test_a_linear_router_begins_at_the_centroids(self, task):
        begun = initial_model(task, amips.Linear(bias=True))
        x = np.asarray(task.val.queries)
        np.testing.assert_allclose(begun.scores(x), x @ task.cells.centroids.T, atol=1e-5)

    @pytest.mark.parametrize(
        "network", [amips.Linear(bias=True), MaxAffine(3), MaxAffine(2, rank=6)], ids=str
    )
    def test_training_begins_with_its_weights(self, task, network):
        begun = initial_model(task, network)
        module = affine_network(begun, 0.5)
        assert module.smooth == 0.5
        assert module.moved() == 0
        exported = module.export({})
        assert exported.architecture == begun.architecture == network.architecture(task.n, task.d, task.c)
        assert exported.weights.keys() == begun.weights.keys()
        for name, weight in begun.weights.items():
            np.testing.assert_array_equal(exported.weights[name], weight)

    def test_with_a_rank_at_the_nearest_to_the_centroids(self, task):
        begun = initial_model(task, amips.Linear(rank=6))
        x = np.asarray(task.train.queries)
        want = x @ task.cells.centroids.T
        projection = learn_projection(open_vectors(task.keys), open_vectors(x), 6)
        np.testing.assert_allclose(begun.weights["A"], projection.queries, rtol=1e-4, atol=1e-5)
        reduced = x @ projection.queries.T
        best = reduced @ np.linalg.lstsq(reduced, want, rcond=None)[0]
        np.testing.assert_allclose(begun.scores(x), best, atol=1e-3)
        same = initial_model(task, amips.Linear(rank=task.d))
        np.testing.assert_allclose(same.scores(x), want, atol=1e-3)

    def test_pieces_begin_at_parts_of_their_own_cell(self, task):
        pieces = initial_model(task, MaxAffine(3)).weights["W"].reshape(task.c, 3, task.d)
        np.testing.assert_allclose(np.linalg.norm(pieces, axis=2), 1, rtol=1e-5)
        for j, own in enumerate(pieces):
            members = task.keys[task.cells.assignment == j]
            nearest = (members @ own.T).argmax(axis=1)
            assert set(nearest.tolist()) == {0, 1, 2}
            # Five rounds of k-means: nearly where the next round would put them.
            for p in range(3):
                mean = members[nearest == p].mean(axis=0)
                assert own[p] @ mean / np.linalg.norm(mean) > 0.95
            # Together they are nearer to the cell's keys than its centroid is.
            assert (members @ own.T).max(axis=1).mean() > (members @ task.cells.centroids[j]).mean() + 0.01

    def test_the_seed_decides(self, task):
        first, again, other = (initial_model(task, MaxAffine(3), seed).weights["W"] for seed in (1, 1, 2))
        np.testing.assert_array_equal(first, again)
        assert (first != other).any()

    def test_in_blocks(self, task, monkeypatch):
        whole = initial_model(task, MaxAffine(2)).weights["W"]
        monkeypatch.setattr("amips.vectors.vectors.BLOCK_BYTES", 37 * 4 * task.d)
        np.testing.assert_allclose(initial_model(task, MaxAffine(2)).weights["W"], whole, atol=1e-4)

    def test_cells_with_fewer_keys_than_pieces(self, task):
        """One cell holds one key, another none at all."""
        assignment = task.cells.assignment.copy()
        assignment[assignment == 5] = 4
        assignment[assignment == 6] = 4
        assignment[0] = 6
        few = task.with_cells(replace(task.cells, assignment=assignment))
        pieces = initial_model(few, MaxAffine(4)).weights["W"].reshape(task.c, 4, task.d)
        assert np.isfinite(pieces).all()
        np.testing.assert_allclose(np.linalg.norm(pieces, axis=2), 1, rtol=1e-5)
        assert ((pieces[6] @ task.keys[0]).max()) == pytest.approx(np.linalg.norm(task.keys[0]), rel=1e-4)

    @pytest.mark.parametrize(
        ("network", "match"),
        [
            (amips.Linear(rank=17), r"^rank=17: expected a whole number from 0 to 16$"),
            (MaxAffine(rank=17), r"^rank=17: "),
        ],
        ids=str,
    )
    def test_what_cannot_be(self, task, tmp_path, network, match):
        with pytest.raises(RunError, match=match):
            train(task, tmp_path / "run", network)
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize(("name", "value"), [("rank", -1), ("pieces", 0)])
    def test_what_no_task_can_have(self, name, value):
        with pytest.raises(RunError, match=rf"^{name}={value}: expected a whole number, at least"):
            MaxAffine(**{name: value})


class TestFiles:
    def test_json(self):
        for a in (
            AffineArchitecture(D, C, 3, bias=True),
            AffineArchitecture(D, C, 2, False, "max-affine", 4),
        ):
            assert AffineArchitecture.from_json(json.loads(json.dumps(a.to_json()))) == a
        old = {"d": D, "c": C, "pieces": 1, "bias": False, "kind": "linear"}  # of before there were ranks
        assert AffineArchitecture.from_json(old) == AffineArchitecture(D, C)

    @pytest.mark.parametrize(
        "change",
        [
            {"d": 0},
            {"c": -1},
            {"pieces": 0},
            {"kind": "support"},
            {"d": "6"},
            {"d": None},
            {"d": 6.5},
            {"d": True},
            {"bias": "no"},
            {"bias": 7},
            {"surplus": 1},
            {"rank": -1},
            {"rank": D + 1},
            {"rank": 2.0},
            {"rank": True},
            {"rank": None},
        ],
        ids=str,
    )
    def test_bad_json(self, change):
        with pytest.raises(RunError, match="architecture") as caught:
            AffineArchitecture.from_json({**AffineArchitecture(D, C).to_json(), **change})
        assert one_line(caught)

    def test_missing_field(self):
        with pytest.raises(RunError):
            AffineArchitecture.from_json({"kind": "linear", "d": D})

    def test_save_and_load(self, affine, tmp_path):
        known = replace(affine, about={"keys": "abc", "val": {"routing@1": 0.5}})
        known.save(tmp_path / "model")
        again = load_model(tmp_path / "model")
        assert isinstance(again, AffineNet)
        assert again.architecture == affine.architecture
        assert again.about == known.about
        assert again.weights.keys() == affine.weights.keys()
        np.testing.assert_array_equal(again.scores(X), affine.scores(X))

    @pytest.mark.parametrize(
        "weights",
        [
            {},
            {"W": np.zeros((C, D + 1), np.float32), "b": np.zeros(C, np.float32)},
            {"W": np.zeros((C, D), np.float64), "b": np.zeros(C, np.float32)},
            {"W": np.zeros((C, D), np.float32)},
            {"W": np.zeros((C, D), np.float32), "b": np.zeros((C, 1), np.float32)},
        ],
        ids=["none", "shape", "type", "no-bias", "bias-shape"],
    )
    def test_wrong_weights(self, weights, tmp_path):
        random_affine(bias=True).save(tmp_path)
        save_file(weights, tmp_path / "model.safetensors")
        with pytest.raises(RunError, match=r"weight [Wb]: expected float32") as caught:
            load_model(tmp_path)
        assert one_line(caught)

    @pytest.mark.parametrize(
        ("weights", "match"),
        [
            ({"W": np.zeros((C, 4), np.float32)}, "A: expected float32"),
            ({"W": np.zeros((C, 4), np.float32), "A": np.zeros((4, D + 1), np.float32)}, "A: expected"),
            ({"W": np.zeros((C, D), np.float32), "A": np.zeros((4, D), np.float32)}, "W: expected"),
        ],
        ids=["none", "shape", "full"],
    )
    def test_wrong_weights_with_a_rank(self, weights, match, tmp_path):
        random_affine(rank=4).save(tmp_path)
        save_file(weights, tmp_path / "model.safetensors")
        with pytest.raises(RunError, match=f"weight {match}") as caught:
            load_model(tmp_path)
        assert one_line(caught)

    @pytest.mark.parametrize("content", [b"", b"\xff" * 64, None], ids=["empty", "noise", "cut"])
    def test_damaged_weights(self, content, tmp_path):
        random_affine().save(tmp_path)
        path = tmp_path / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-5] if content is None else content)
        with pytest.raises(RunError, match=r"model\.safetensors cannot be read") as caught:
            load_model(tmp_path)
        assert one_line(caught)

    @pytest.mark.parametrize("text", ["", "[]", '{"about": {}}', '{"architecture": {"kind": "linear"}}'])
    def test_damaged_description(self, text, tmp_path):
        random_affine().save(tmp_path)
        (tmp_path / "model.json").write_text(text)
        with pytest.raises(RunError) as caught:
            load_model(tmp_path)
        assert one_line(caught)


class TestLoss:
    def test_is_cross_entropy(self):
        rng = np.random.default_rng(0)
        values, cells = rng.standard_normal((7, C)).astype(np.float32), rng.integers(0, C, (7, 3))
        want = 0.0
        for row, chosen in zip(values.astype(np.float64) / 0.3, cells, strict=True):
            chances = np.exp(row) / np.exp(row).sum()
            want -= np.mean([np.log(chances[j]) for j in chosen]) / 7
        got = route_loss(torch.from_numpy(values), torch.from_numpy(cells), None, Recipe(temperature=0.3))
        assert float(got) == pytest.approx(want, rel=1e-5)

    @pytest.mark.parametrize("share", [0.25, 1.0])
    def test_listwise_is_cross_entropy_with_how_good_each_cell_s_best_is(self, share):
        rng = np.random.default_rng(1)
        values, sigma = rng.standard_normal((2, 7, C)).astype(np.float32)
        cells = rng.integers(0, C, (7, 3))
        recipe = Recipe(temperature=0.3, listwise=share, listwise_temperature=0.6)
        want = 0.0
        for row, good, chosen in zip(
            values.astype(float) / 0.3, sigma.astype(float) / 0.6, cells, strict=True
        ):
            logs = np.log(np.exp(row) / np.exp(row).sum())
            target = np.exp(good) / np.exp(good).sum()
            want -= (1 - share) * logs[chosen].mean() / 7 + share * (target @ logs) / 7
        got = route_loss(torch.from_numpy(values), torch.from_numpy(cells), torch.from_numpy(sigma), recipe)
        assert float(got) == pytest.approx(want, rel=1e-5)

    def test_total_loss_uses_the_temperature(self, centroids):
        module = AffineNetwork(AffineArchitecture(D, C), centroids)
        cells = torch.arange(len(X))[:, None] % C
        loss, parts = total_loss(module, CellBatch(torch.from_numpy(X), cells), Recipe(temperature=0.7))
        values = (X @ centroids.T).astype(np.float64) / 0.7
        own = values[np.arange(len(X)), np.arange(len(X)) % C]
        assert loss.item() == pytest.approx((np.log(np.exp(values).sum(axis=1)) - own).mean(), rel=1e-5)
        assert parts == {"route": loss}

    @pytest.mark.parametrize("top", [1, 4])
    def test_batches_hold_the_cells_of_the_top_keys(self, task, top):
        batches = CellBatches(task, Recipe(batch=32, route_top=top), 3, 0, 1, CPU)
        batch = batches(0)
        true = np.argsort(-(batch.x.numpy() @ task.keys.T), axis=1, kind="stable")[:, :top]
        np.testing.assert_array_equal(batch.cells, task.cells.assignment[true])

    @pytest.mark.parametrize(
        "value", [{"route_top": 0}, {"temperature": 0.0}, {"temperature": np.nan}], ids=str
    )
    def test_bad_recipe(self, value):
        with pytest.raises(RunError, match=next(iter(value))):
            Recipe(**value)


def train(task, out, network, samples=640, batch=32, evaluations=1, **options):
    return amips.train(
        task, network, out=out, samples=samples, batch=batch, evaluations=evaluations, **options
    )


@pytest.fixture(scope="module")
def untargeted(world, tmp_path_factory):
    """A task without targets for each cell."""
    out = tmp_path_factory.mktemp("untargeted") / "task"
    return amips.label(*world, cells=8, query_aware=0.0, copies=1, val=100, test=100, out=out)


class TestTraining:
    RECIPE = Recipe(rate=3e-3, decay=0.97, route_top=1)  # what routing@1 asks for

    @pytest.mark.parametrize("bias", [False, True])
    def test_beats_centroids(self, tmp_path, bias):
        keys, asked = make_world(1000, 6000, 16, seed=1)
        task = amips.label(keys, asked, cells=12, query_aware=0.0, val=500, test=1000, out=tmp_path / "task")
        model = train(
            task, tmp_path / "run", amips.Linear(bias=bias, rank=0), 60_000, 128, recipe=self.RECIPE
        )
        assert set(model.weights) == ({"W", "b"} if bias else {"W"})
        cell = task.cells.assignment[task.test.top_ids[:, 0]]
        x = np.asarray(task.test.queries)
        centroid = routing_accuracy(x @ task.cells.centroids.T, cell)
        learned = routing_accuracy(model.scores(x), cell)
        assert learned["routing@1"] > centroid["routing@1"] + 0.05
        assert learned["routing@2"] > centroid["routing@2"]
        assert evaluate(model, task, task.test).items() >= learned.items()

    @pytest.mark.parametrize(
        "network",
        [
            amips.Linear(rank=10),
            MaxAffine(2),
            MaxAffine(3, smooth=False),
            MaxAffine(2, rank=10),
        ],
        ids=str,
    )
    def test_other_forms_beat_centroids(self, tmp_path, network):
        keys, asked = make_world(4000, 8600, 32, seed=3)
        task = amips.label(keys, asked, cells=64, query_aware=0.0, val=300, test=300, out=tmp_path / "task")
        model = train(task, tmp_path / "run", network, 60_000, 128, evaluations=20, recipe=Recipe(rate=3e-3))
        x = np.asarray(task.test.queries)
        begun = initial_model(task, network)
        before, learned = (evaluate(m, task, task.test)["scan@0.95"] for m in (begun, model))
        centroid = centroid_metrics(task, task.test)["scan@0.95"]
        assert learned < 0.97 * before
        assert learned < 0.97 * centroid
        again = load_model(tmp_path / "run")
        assert (again.architecture.kind, again.architecture) == (network.kind, model.architecture)
        np.testing.assert_array_equal(again.scores(x), model.scores(x))
        index = amips.build(task, tmp_path / "run", out=tmp_path / "bundle")
        again = amips.load(tmp_path / "bundle")
        np.testing.assert_array_equal(again.search(x, 5, probes=2)[1], index.search(x, 5, probes=2)[1])
        assert index.cost(x, probes=2).network == model.architecture.score_flops

    def test_smooth_is_another_training(self, task, tmp_path):
        recipe = Recipe(rate=3e-3, temperature=0.2)
        smooth, sharp = (
            train(task, tmp_path / f"{on}", MaxAffine(2, smooth=on, rank=0), recipe=recipe)
            for on in (True, False)
        )
        assert (smooth.weights["W"] != sharp.weights["W"]).any()
        with pytest.raises(RunError, match="network"):
            train(task, tmp_path / "True", MaxAffine(2, smooth=False, rank=0), recipe=recipe)

    @pytest.mark.parametrize("network", [amips.Linear(rank=5), MaxAffine(3), MaxAffine(2, rank=5)], ids=str)
    def test_resumed_bit_for_bit(self, task, tmp_path, monkeypatch, network):
        train(task, tmp_path / "whole", network)
        real = loop.Run.step

        def step(run, done):
            losses = real(run, done)
            if run.state.progress.step == 8:
                os.kill(os.getpid(), signal.SIGINT)
            return losses

        with monkeypatch.context() as patch:
            patch.setattr(loop.Run, "step", step)
            with pytest.raises(amips.TrainingInterrupted):
                train(task, tmp_path / "run", network)
        assert not (tmp_path / "run" / "model.json").exists()
        train(task, tmp_path / "run", network, resume=True)
        files = [tmp_path / name / "model.safetensors" for name in ("run", "whole")]
        assert files[0].read_bytes() == files[1].read_bytes()

    def test_more_top_keys(self, tmp_path):
        # With more of the top keys to find, the few best cells hold more of them.
        keys, asked = make_world(1000, 6000, 16, seed=1)
        task = amips.label(keys, asked, cells=12, query_aware=0.0, val=500, test=1000, out=tmp_path / "task")
        cells = task.cells.assignment[np.asarray(task.test.top_ids)]
        x = np.asarray(task.test.queries)

        def recall(top):
            recipe = replace(self.RECIPE, route_top=top)
            model = train(task, tmp_path / f"run{top}", amips.Linear(), 60_000, 128, recipe=recipe)
            probed = best_cells(model.scores(x), 2)
            return (cells[:, :, None] == probed[:, None, :]).any(axis=2).mean()

        assert recall(10) > recall(1)

    def test_the_log_has_the_loss(self, task, tmp_path):
        recipe = Recipe(rate=1e-9, temperature=0.2, route_top=1, anchor=0.0)
        train(task, tmp_path / "run", amips.Linear(rank=0), samples=1000, batch=1000, recipe=recipe)
        line = json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[-1])
        # One step, over every training row, at the centroids.
        x, top = np.asarray(task.train.queries), np.asarray(task.train.top_ids[:, 0])
        assert len(x) == 1000
        values = (x @ task.cells.centroids.T).astype(np.float64) / 0.2
        own = np.take_along_axis(values, task.cells.assignment[top][:, None], axis=1)[:, 0]
        want = (np.log(np.exp(values).sum(axis=1)) - own).mean()
        assert line["train"]["route"] == line["train"]["loss"] == pytest.approx(want, rel=1e-4)
        assert (
            set(line["val"]) == set(line["centroid"]) == {"scan@0.95", "routing@1", "routing@2", "routing@4"}
        )

    def test_the_run_is_a_model_of_these_keys(self, task, tmp_path):
        model = train(task, tmp_path / "run", amips.Linear())
        again = load_model(tmp_path / "run")
        np.testing.assert_array_equal(again.scores(task.val.queries), model.scores(task.val.queries))
        assert again.about["keys"] == task.fingerprint
        assert (again.c, again.d) == (task.c, task.d)

    def test_without_targets_for_each_cell(self, untargeted, task, tmp_path):
        assert not untargeted.has_cell_targets
        model = train(untargeted, tmp_path / "one", amips.Linear())
        whole = train(task, tmp_path / "two", amips.Linear())
        np.testing.assert_array_equal(model.weights["W"], whole.weights["W"])

    @pytest.mark.parametrize("network", [amips.SupportNet(width=8, depth=2), amips.KeyNet(width=8, depth=2)])
    def test_networks_need_targets_for_each_cell(self, untargeted, network, tmp_path):
        with pytest.raises(RunError, match="label again with cell_targets=True") as caught:
            train(untargeted, tmp_path / "run", network)
        assert one_line(caught)
        assert not (tmp_path / "run").exists()

    def test_needs_cells(self, task1, tmp_path):
        with pytest.raises(RunError, match="cells=2 or more") as caught:
            train(task1, tmp_path / "run", amips.Linear())
        assert one_line(caught)
