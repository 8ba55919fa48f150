"""The torch modules against the runtime, autograd and plain formulas; losses, initial weights, schedules."""

import math
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from amips import KeyNet, RunError, SupportNet
from amips.learn.adam import BETAS
from amips.learn.batches import Batches
from amips.learn.budget import Budget
from amips.learn.distributed import Group
from amips.learn.init import CORRELATION, convex_moments, initial_weights, log_normal
from amips.learn.loop import Run
from amips.learn.losses import Batch, draw_cells, key_losses, support_losses, total_loss
from amips.learn.modules import Network
from amips.learn.setup import set_up
from amips.nets import injected_layers
from amips.nets.recipe import RECIPES, Recipe, recipe_named
from reference import architecture, pre_activations, queries

torch.set_num_threads(1)
CPU = torch.device("cpu")
INJECT = (0, "all", "every 2")


def network(kind, inject="all", c=3, seed=0, noise=0.1, d=6, width=8, depth=4, **more):
    """A network some way from its initial weights, as training would leave it."""
    a = architecture(kind, d, c, width, depth, injected_layers(inject, depth), **more)
    made = Network(a, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in made.parameters():
            p.add_(noise * torch.randn(p.shape, generator=generator))
        made.project()
    return made


def plain_scores(net, x):
    """f(x) as the paper writes it, for autograd to differentiate as often as it likes."""
    a, w = net.architecture, {name: net.weight(name) for name in net.shapes}
    norms = x.norm(dim=1, keepdim=True)
    u = x / norms if a.homogeneous == "wrapper" else x
    z = None
    for i in range(a.depth):
        pre = u @ w[f"Wx.{i}"].T if f"Wx.{i}" in w else 0.0
        if i:
            pre = pre + z @ w[f"Wz.{i}"].T
        if a.biases:
            pre = pre + w[f"b.{i}"]
        soft = F.relu(pre) if math.isinf(a.beta) else F.softplus(a.beta * pre, threshold=200) / a.beta
        after = a.alpha * pre + (1 - a.alpha) * soft
        z = z + after if a.residual and i else after
    out = z @ w["W"].T + (w["b"] if a.biases else 0.0)
    return out * norms if a.homogeneous == "wrapper" else out


def plain_jacobian(net, x):
    f = plain_scores(net, x)
    rows = [torch.autograd.grad(f[:, j].sum(), x, create_graph=True)[0] for j in range(f.shape[1])]
    return torch.stack(rows, dim=1)


BOTH = product((False, True), INJECT, (20.0, math.inf), (1, 5))
SUPPORT = [
    {"kind": "support", "residual": r, "inject": i, "beta": b, "c": c, "homogeneous": h, "nonnegative": n}
    for (r, i, b, c), h, n in product(BOTH, ("wrapper", "relu"), ("penalty", "clip", "softplus"))
    if not (h == "relu" and b == 20.0)
]
KEY = [
    {"kind": "key", "residual": r, "inject": i, "beta": b, "c": c}
    for r, i, b, c in product((False, True), INJECT, (20.0, math.inf), (1, 5))
]


def name_of(options):
    return "-".join(str(v).replace(" ", "") for v in options.values())


def begun(task, spec, out, recipe, samples, seed=0):
    """A run before its first step."""
    group = Group(CPU)
    return Run(
        set_up(task, spec, recipe, seed, CPU, group), out, recipe, Budget(samples, None, 1), seed, group
    )


class TestRuntime:
    @pytest.mark.parametrize("options", SUPPORT + KEY, ids=name_of)
    def test_torch_and_numpy_agree(self, options):
        net = network(**options)
        runtime = net.export({})
        x = queries(40, 6)
        x[7] = 0
        with torch.no_grad():
            if options["kind"] == "key":
                keys = net(torch.from_numpy(x))
                scores = torch.einsum("mcd,md->mc", keys, torch.from_numpy(x))
            else:
                scores, keys = net.scores_and_gradient(torch.from_numpy(x))
                np.testing.assert_array_equal(net(torch.from_numpy(x)), scores)
                assert (scores[7] == 0).all()
                assert (keys[7] == 0).all()
        np.testing.assert_allclose(runtime.scores(x), scores, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(runtime.keys(x), keys, rtol=1e-5, atol=1e-5)

    def test_export_copies(self):
        net = network("support")
        runtime = net.export({"from": "here"})
        before = runtime.weights["W"].copy()
        with torch.no_grad():
            net.free["W"].add_(1)
        np.testing.assert_array_equal(runtime.weights["W"], before)
        assert runtime.about == {"from": "here"}

    def test_export_of_averages(self):
        net = network("support", nonnegative="softplus")
        values = {name: torch.full_like(p, -1.0) for name, p in net.named_parameters()}
        weights = net.export({}, values).weights
        np.testing.assert_allclose(weights["W"], math.log1p(math.exp(-1)), rtol=1e-6)
        np.testing.assert_array_equal(weights["Wx.0"], -1)


class TestGradients:
    @pytest.mark.parametrize("options", SUPPORT, ids=name_of)
    def test_gradient_is_autograds(self, options):
        net = network(**options).double()
        x = torch.from_numpy(queries(20, 6)).double().requires_grad_()
        expected = plain_jacobian(net, x)
        scores, gradient = net.scores_and_gradient(x)
        torch.testing.assert_close(scores, plain_scores(net, x), rtol=0, atol=1e-6)
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-6)
        own = torch.stack(
            [torch.autograd.grad(net(x)[:, j].sum(), x)[0] for j in range(scores.shape[1])], dim=1
        )
        torch.testing.assert_close(gradient, own, rtol=0, atol=1e-6)
        combine = torch.randn(20, options["c"], generator=torch.Generator().manual_seed(1)).double()
        _, mixed = net.scores_and_gradient(x, combine)
        torch.testing.assert_close(
            mixed[:, 0], torch.einsum("mc,mcd->md", combine, expected), atol=1e-6, rtol=0
        )

    @pytest.mark.parametrize("options", [o for o in SUPPORT if o["c"] == 5], ids=name_of)
    def test_gradient_loss_by_double_backward(self, options):
        net = network(**options).double()
        x = torch.from_numpy(queries(10, 6)).double().requires_grad_()
        targets = torch.randn(10, 5, 6, generator=torch.Generator().manual_seed(2)).double()
        ours = (net.scores_and_gradient(x)[1] - targets).square().sum(dim=2).mean()
        plain = (plain_jacobian(net, x) - targets).square().sum(dim=2).mean()
        torch.testing.assert_close(ours, plain)
        parameters = dict(net.named_parameters())
        expected = torch.autograd.grad(plain, list(parameters.values()), allow_unused=True)
        got = torch.autograd.grad(ours, list(parameters.values()), allow_unused=True)
        largest = max(float(g.abs().max()) for g in expected if g is not None)
        assert largest > 1e-3
        for name, a, b in zip(parameters, got, expected, strict=True):
            nothing = torch.zeros_like(parameters[name])
            a, b = (nothing if g is None else g for g in (a, b))
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6 * largest, msg=name)

    def test_total_loss_by_double_backward_in_sampled_form(self):
        net = network("support", c=20).double()
        x = torch.from_numpy(queries(10, 6)).double().requires_grad_()
        cells, signs = draw_cells(10, 20, 8, torch.Generator().manual_seed(0))
        random = torch.Generator().manual_seed(2)
        batch = Batch(
            x,
            torch.randn(10, 20, generator=random).double(),
            torch.randn(10, 8, 6, generator=random).double(),
            cells,
            signs.double(),
        )
        recipe = Recipe(score=0.3, grad=0.7, penalty=2.0)
        ours, _ = total_loss(net, batch, recipe)
        chosen = torch.take_along_dim(plain_jacobian(net, x), cells[:, :, None], dim=1)
        mixed = (batch.signs[:, :, None] * (chosen - batch.targets)).sum(dim=1)
        negative = sum(F.relu(-net.weight(f"Wz.{i}")).square().sum() for i in (1, 2, 3))
        plain = (
            0.3 * (plain_scores(net, x) - batch.sigma).square().mean()
            + 0.7 * mixed.square().sum(dim=1).mean() / 8
            + 2.0 * negative
        )
        assert negative.item() > 0
        torch.testing.assert_close(ours, plain)
        got = torch.autograd.grad(ours, list(net.parameters()))
        expected = torch.autograd.grad(plain, list(net.parameters()))
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)

    def test_loss_stays_differentiable_at_zero(self):
        net = network("support")
        batch = Batch(torch.zeros(2, 6), torch.ones(2, 3), torch.ones(2, 3, 6))
        loss, _ = total_loss(net, batch, Recipe())
        loss.backward()
        assert all(torch.isfinite(p.grad).all() for p in net.parameters())

    @pytest.mark.parametrize("alpha", [0.0, 0.1, 1.0])
    def test_slopes_at_the_ends_of_alpha(self, alpha):
        net = network("support", alpha=alpha).double()
        x = torch.from_numpy(queries(10, 6)).double().requires_grad_()
        loss = net.scores_and_gradient(x)[1].square().sum()
        plain = plain_jacobian(net, x).square().sum()
        for a, b in zip(
            torch.autograd.grad(loss, list(net.parameters())),
            torch.autograd.grad(plain, list(net.parameters())),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


class TestInitialWeights:
    @pytest.mark.parametrize("fan_in", [1, 2, 10, 512])
    def test_relu_has_the_published_closed_form(self, fan_in):
        N, pi = fan_in, math.pi
        spread = 6 * (pi - 1) + (N - 1) * (3 * math.sqrt(3) + 2 * pi - 6)
        mean, variance, bias = convex_moments(N, alpha=0.0)
        assert mean**2 == pytest.approx(6 * pi / (N * spread))
        assert variance == pytest.approx(1 / N)
        assert bias == pytest.approx(-math.sqrt(3 * N / spread))

    @pytest.mark.parametrize("alpha", [0.0, 0.1, 0.5])
    def test_a_layer_keeps_mean_variance_and_correlation(self, alpha):
        # In: normal, mean 0, variance 1, correlated by 1/2. Out: the same, over inputs and weights.
        rng = np.random.default_rng(0)
        N, mean, variance, bias = 64, *convex_moments(64, alpha)
        out = []
        for _ in range(400):
            shared, own = rng.standard_normal((500, 1)), rng.standard_normal((500, N))
            pre = math.sqrt(CORRELATION) * shared + math.sqrt(1 - CORRELATION) * own
            W = mean + math.sqrt(variance) * rng.standard_normal((2, N))  # only two moments matter
            out.append(np.where(pre > 0, pre, alpha * pre) @ W.T + bias)
        out = np.concatenate(out)
        assert abs(out.mean()) < 0.05
        np.testing.assert_allclose(np.cov(out.T), [[1, CORRELATION], [CORRELATION, 1]], atol=0.08)

    def test_log_normal(self):
        values = log_normal(np.random.default_rng(0), (1_000_000,), mean=0.02, variance=0.002)
        assert values.min() > 0
        assert values.mean() == pytest.approx(0.02, rel=0.02)
        assert values.var() == pytest.approx(0.002, rel=0.1)

    @pytest.mark.parametrize("alpha", [0.0, 0.1])
    @pytest.mark.parametrize("beta", [20.0, math.inf])
    def test_signal_through_sixteen_layers(self, alpha, beta):
        a = architecture(d=32, width=256, depth=16, injected=tuple(range(1, 16)), alpha=alpha, beta=beta)
        means, squares = [], []
        for seed in range(4):
            weights = initial_weights(a, seed)
            assert min(weights[f"Wz.{i}"].min() for i in range(1, 16)) > 0
            assert weights["W"].min() > 0
            x = queries(200, 32, seed)
            pres, _ = pre_activations(a, weights, x / np.linalg.norm(x, axis=1, keepdims=True))
            means.append([p.mean() for p in pres])
            squares.append([np.square(p).mean() for p in pres])
        means, squares = np.mean(means, axis=0), np.mean(squares, axis=0)
        assert abs(means[:2]).max() < 0.05
        assert abs(means).max() < 0.4
        assert squares.min() > 0.4
        assert squares.max() < 2
        # Layer after layer the same: neither growing nor vanishing.
        assert squares[-4:].mean() == pytest.approx(squares[4:8].mean(), rel=0.4)

    def test_naive_non_negative_weights_would_explode(self):
        a = architecture(d=32, width=256, depth=16, injected=tuple(range(1, 16)))
        rng = np.random.default_rng(0)
        weights = {
            name: np.abs(rng.standard_normal(w.shape)) / 16 if name.startswith("Wz") else w
            for name, w in initial_weights(a, 0).items()
        }
        x = queries(50, 32)
        pres, _ = pre_activations(a, weights, x / np.linalg.norm(x, axis=1, keepdims=True))
        assert np.square(pres[-1]).mean() > 1e6

    @pytest.mark.parametrize("options", [{}, {"residual": True}, {"homogeneous": "relu"}], ids=str)
    @pytest.mark.parametrize("kind", ["support", "key"])
    @pytest.mark.parametrize("inject", [0, "all"])
    @pytest.mark.parametrize("depth", [1, 4, 16])
    def test_predicted_keys_start_near_norm_one(self, kind, depth, inject, options):
        a = architecture(kind, 32, 4, 128, depth, injected_layers(inject, depth), **options)
        keys = Network(a).export({}).keys(queries(100, 32))
        norm = np.linalg.norm(keys, axis=2).mean()
        assert 0.05 < norm < 2.5

    def test_seeds(self):
        a = architecture()
        same, other = initial_weights(a, 3), initial_weights(a, 4)
        for name, value in initial_weights(a, 3).items():
            np.testing.assert_array_equal(value, same[name])
            assert name.startswith("b") or (value != other[name]).any()

    def test_softplus_starts_from_the_same_weights(self):
        plain, rectified = (Network(architecture(nonnegative=n), seed=1) for n in ("clip", "softplus"))
        for name in plain.shapes:
            torch.testing.assert_close(plain.weight(name), rectified.weight(name), rtol=1e-4, atol=1e-6)


class TestConstraints:
    def test_what_is_constrained(self):
        assert network("support").constrained == ["Wz.1", "Wz.2", "Wz.3", "W"]
        assert network("key").constrained == []

    @pytest.mark.parametrize("nonnegative", ["penalty", "clip", "softplus"])
    def test_after_training_steps(self, task, tmp_path, nonnegative):
        # A rate far too high pushes weights below zero, if anything does.
        spec = SupportNet(width=16, depth=3, nonnegative=nonnegative)
        recipe = Recipe(batch=64, rate=0.1, penalty=1e-3)
        run = begun(task, spec, tmp_path, recipe, 64 * 30, seed=0)
        for _ in range(30):
            run.step(0.5)
        net = run.network
        hidden = torch.cat([net.weight(f"Wz.{i}").detach().flatten() for i in (1, 2)])
        averaged = net.export({}, run.state.averages).weights
        assert float(net.weight("W").detach().min()) >= 0
        assert averaged["W"].min() >= 0
        if nonnegative == "clip":
            assert float(hidden.min()) == 0
            assert min(averaged[f"Wz.{i}"].min() for i in (1, 2)) >= 0
        elif nonnegative == "softplus":
            assert float(hidden.min()) > 0
            assert net.free["Wz_1"].min().item() < 0
        else:
            assert float(hidden.min()) < 0
            assert net.penalty().item() > 0

    def test_penalty_formula(self):
        net = network("support", noise=1.0)
        with torch.no_grad():
            net.free["W"].fill_(-5)  # the head is clipped, not penalised
        expected = sum(
            np.square(np.minimum(net.free[f"Wz_{i}"].detach().double().numpy(), 0)).sum() for i in (1, 2, 3)
        )
        assert expected > 1
        assert net.penalty().item() == pytest.approx(expected, rel=1e-5)

    def test_a_larger_penalty_leaves_less_below_zero(self, task, tmp_path):
        left = []
        for weight in (0.0, 10.0):
            recipe = Recipe(batch=64, rate=3e-3, penalty=weight)
            spec = SupportNet(width=16, depth=3)
            run = begun(task, spec, tmp_path, recipe, 64 * 60, seed=0)
            for _ in range(60):
                run.step(0.5)
            left.append(run.network.penalty().item())
        assert left[1] < left[0] / 3

    def test_only_the_penalty_mode_has_the_penalty(self):
        batch = Batch(torch.ones(2, 6), torch.ones(2, 3), torch.ones(2, 3, 6))
        for mode, there in (("penalty", True), ("clip", False), ("softplus", False)):
            _, parts = total_loss(network("support", nonnegative=mode), batch, Recipe())
            assert ("penalty" in parts) == there

    @pytest.mark.parametrize("nonnegative", ["clip", "softplus"])
    def test_the_trained_base_network_is_convex(self, task, tmp_path, nonnegative):
        spec = SupportNet(width=16, depth=3, nonnegative=nonnegative)
        run = begun(task, spec, tmp_path, Recipe(batch=64), 64 * 40, seed=0)
        for _ in range(40):
            run.step(0.3)
        g = run.network.export({}, run.state.averages)
        x, y = queries(2000, 16, 1), queries(2000, 16, 2)
        ends = (g._forward(x, None) + g._forward(y, None)) / 2
        assert (g._forward((x + y) / 2, None) - ends).max() < 1e-5


class TestLosses:
    def test_support(self):
        net = network("support", c=4)
        rng = np.random.default_rng(0)
        x, sigma = queries(30, 6), rng.standard_normal((30, 4)).astype(np.float32)
        targets = rng.standard_normal((30, 4, 6)).astype(np.float32)
        parts, _ = support_losses(net, Batch(*map(torch.from_numpy, (x, sigma, targets))))
        runtime = net.export({})
        score = np.mean([np.mean((f - s) ** 2) for f, s in zip(runtime.scores(x), sigma, strict=True)])
        grad = np.mean(
            [
                np.mean([np.sum((k[j] - t[j]) ** 2) for j in range(4)])
                for k, t in zip(runtime.keys(x), targets, strict=True)
            ]
        )
        assert parts["score"].item() == pytest.approx(score, rel=1e-4)
        assert parts["grad"].item() == pytest.approx(grad, rel=1e-4)

    def test_key(self):
        net = network("key", c=4)
        rng = np.random.default_rng(0)
        x, sigma = queries(30, 6), rng.standard_normal((30, 4)).astype(np.float32)
        targets = rng.standard_normal((30, 4, 6)).astype(np.float32)
        parts, _ = key_losses(net, Batch(*map(torch.from_numpy, (x, sigma, targets))))
        keys = net.export({}).keys(x)
        assert parts["key"].item() == pytest.approx(np.square(keys - targets).sum(axis=2).mean(), rel=1e-4)
        products = np.stack([[k @ q for k in of_query] for of_query, q in zip(keys, x, strict=True)])
        assert parts["consist"].item() == pytest.approx(np.square(products - sigma).mean(), rel=1e-4)

    def test_weights_of_the_sum(self):
        batch = Batch(torch.ones(2, 6), torch.ones(2, 3), torch.ones(2, 3, 6))
        total, parts = total_loss(network("key"), batch, Recipe(key=3.0, consist=0.5))
        assert total.item() == pytest.approx(3 * parts["key"].item() + 0.5 * parts["consist"].item())
        total, parts = total_loss(network("support"), batch, Recipe(score=3.0, grad=0.5, penalty=7.0))
        assert parts["penalty"].item() > 0
        assert total.item() == pytest.approx(
            3 * parts["score"].item() + 0.5 * parts["grad"].item() + 7 * parts["penalty"].item()
        )

    @pytest.mark.parametrize(
        ("kind", "score", "vector"), [("key", "consist", "key"), ("support", "score", "grad")]
    )
    @pytest.mark.parametrize("cells", [None, torch.tensor([[0], [2]])])
    def test_the_mean_over_d_weighs_the_vectors_d_times_less(self, kind, score, vector, cells):
        """As the authors' code: mean squares of all numbers, in the place of mean squared norms."""
        drawn = 3 if cells is None else 1
        signs = None if cells is None else torch.ones(2, 1)
        batch = Batch(torch.ones(2, 6), torch.ones(2, 3), torch.ones(2, drawn, 6), cells, signs)
        total, parts = total_loss(network(kind), batch, Recipe(reduction="mean", penalty=0.0))
        assert total.item() == pytest.approx(0.01 * parts[score].item() + parts[vector].item() / 6)
        _, summed = total_loss(network(kind), batch, Recipe())
        assert summed[vector].item() == parts[vector].item()

    def test_a_perfect_network_has_no_loss(self):
        net = network("support")
        x = torch.from_numpy(queries(5, 6))
        scores, gradients = (v.detach() for v in net.scores_and_gradient(x))
        parts, _ = support_losses(net, Batch(x, scores, gradients))
        assert parts["score"].item() == 0
        assert parts["grad"].item() == 0


class TestSampledCells:
    @pytest.mark.parametrize(("c", "sampled"), [(17, 8), (20, 3), (32, 8), (100, 8), (103, 8), (5, 8)])
    def test_cells_are_distinct_and_uniform(self, c, sampled):
        rows = 40_000
        cells, signs = draw_cells(rows, c, sampled, torch.Generator().manual_seed(0))
        s = min(sampled, c)
        assert cells.shape == signs.shape == (rows, s)
        assert cells.min() >= 0
        assert cells.max() < c
        assert all(len(set(row)) == s for row in cells[:2000].tolist())
        share = np.bincount(cells.flatten().numpy(), minlength=c) / rows
        expected = s / c
        error = math.sqrt(expected * (1 - expected) / rows)
        assert abs(share - expected).max() < 5 * error + 1e-12
        assert set(signs.unique().tolist()) == {-1.0, 1.0}
        assert abs(float(signs.mean())) < 5 / math.sqrt(signs.numel())
        if s > 1:
            assert abs(float((signs[:, 0] * signs[:, 1]).mean())) < 5 / math.sqrt(rows)

    def test_a_seed_gives_the_same_draw(self):
        one, two, other = (draw_cells(50, 40, 8, torch.Generator().manual_seed(s)) for s in (1, 1, 2))
        assert torch.equal(one[0], two[0])
        assert torch.equal(one[1], two[1])
        assert not torch.equal(one[0], other[0])

    @pytest.mark.parametrize(("c", "sampled"), [(20, 8), (40, 8), (40, 1)])
    @pytest.mark.parametrize("kind", ["support", "key"])
    def test_estimates_have_no_bias(self, kind, c, sampled):
        net = network(kind, c=c, noise=0.3)
        random = torch.Generator().manual_seed(3)
        x, sigma = torch.from_numpy(queries(4, 6)), torch.randn(4, c, generator=random)
        # Errors that differ from cell to cell: a cell drawn too often would show.
        targets = torch.randn(4, c, 6, generator=random) * torch.linspace(0, 3, c)[None, :, None]
        name, losses = ("grad", support_losses) if kind == "support" else ("key", key_losses)
        draws, repeat = [], 40
        with torch.no_grad():
            full = losses(net, Batch(x, sigma, targets))[0][name].item()
            for _ in range(500):
                cells, signs = draw_cells(4 * repeat, c, sampled, random)
                many = torch.take_along_dim(targets.repeat(repeat, 1, 1), cells[:, :, None], dim=1)
                batch = Batch(x.repeat(repeat, 1), sigma.repeat(repeat, 1), many, cells, signs)
                draws.append(losses(net, batch)[0][name].item())
        error = np.std(draws) / math.sqrt(len(draws))
        assert error < 0.01 * full
        assert abs(np.mean(draws) - full) < 4 * error

    def test_other_losses_use_every_cell(self):
        for kind, losses, name in (("support", support_losses, "score"), ("key", key_losses, "consist")):
            net = network(kind, c=20)
            x, sigma = torch.from_numpy(queries(9, 6)), torch.randn(9, 20)
            cells, signs = draw_cells(9, 20, 2, torch.Generator().manual_seed(0))
            some = losses(net, Batch(x, sigma, torch.zeros(9, 2, 6), cells, signs))[0][name]
            full = losses(net, Batch(x, sigma, torch.zeros(9, 20, 6)))[0][name]
            torch.testing.assert_close(some, full)


class TestRecipe:
    def test_the_papers_numbers(self):
        paper = RECIPES["paper"]
        assert (paper.rate, paper.reference_batch, paper.warmup, paper.decay) == (1e-4, 128, 0.025, 0.999)
        assert (paper.score, paper.grad, paper.key, paper.consist) == (0.01, 1.0, 1.0, 0.01)
        assert paper.penalty > 0
        assert 512 <= paper.batch <= 16384

    def test_rate(self):
        recipe = Recipe(rate=1e-4, warmup=0.025)
        assert recipe.rate_at(0.0, 128) == 0
        assert recipe.rate_at(0.0125, 128) == pytest.approx(0.5e-4)
        assert recipe.rate_at(0.025, 128) == pytest.approx(1e-4)
        assert recipe.rate_at(0.025, 4 * 128) == pytest.approx(2e-4)
        assert recipe.rate_at(0.025, 32) == pytest.approx(0.5e-4)
        assert recipe.rate_at(0.025 + 0.975 / 2, 128) == pytest.approx(0.5e-4)
        assert recipe.rate_at(0.025 + 0.975 / 3, 128) == pytest.approx(0.75e-4)
        assert recipe.rate_at(1.0, 128) == pytest.approx(0, abs=1e-12)
        rates = [recipe.rate_at(p, 128) for p in np.linspace(0, 1, 500)]
        assert np.argmax(rates) == pytest.approx(0.025 * 499, abs=1)
        assert Recipe(warmup=0.0, rate=0.1).rate_at(0.0, 128) == 0.1

    def test_decay(self):
        recipe = Recipe(decay=0.999)
        assert recipe.decay_at(10**9, 128) == pytest.approx(0.999)
        assert recipe.decay_at(10**9, 1024) == pytest.approx(0.999**8)
        assert recipe.decay_at(10**9, 64) == pytest.approx(math.sqrt(0.999))
        # The half-life in samples is the same for every batch.
        assert recipe.decay_at(1, 128) == pytest.approx(2 / 11)
        assert Recipe(decay_warmup=False).decay_at(1, 128) == pytest.approx(0.999)
        lives = [b * math.log(0.5) / math.log(recipe.decay_at(10**9, b)) for b in (32, 128, 4096)]
        assert lives == pytest.approx([lives[0]] * 3)

    def test_by_name(self):
        assert recipe_named("paper") is RECIPES["paper"]
        assert recipe_named("paper", 512) == Recipe(**{**vars(RECIPES["paper"]), "batch": 512})
        own = Recipe(rate=0.5)
        assert recipe_named(own) is own

    @pytest.mark.parametrize(
        "options",
        [
            {"batch": 0},
            {"sampled_cells": 0},
            {"rate": 0.0},
            {"rate": math.nan},
            {"warmup": 1.0},
            {"decay": 1.0},
            {"clip": 0.0},
        ],
        ids=str,
    )
    def test_errors(self, options):
        with pytest.raises(RunError) as caught:
            Recipe(**options)
        assert "\n" not in str(caught.value)
        with pytest.raises(RunError, match="one of default, paper"):
            recipe_named("secret")


class TestUpdates:
    def test_the_steps_are_adams(self, task1, tmp_path):
        recipe = Recipe(batch=32, rate=3e-3, clip=0.05)
        spec = KeyNet(width=12, depth=2)
        run = begun(task1, spec, tmp_path, recipe, 32 * 20, seed=5)
        plain = Network(run.setup.architecture, seed=5)
        adam = torch.optim.Adam(plain.parameters(), lr=1.0, betas=BETAS)
        averages = {name: p.detach().clone() for name, p in plain.named_parameters()}
        clipped = 0
        for step in range(20):
            decay = min(0.999 ** (32 / 128), (2 + step) / (11 + step))  # warmed up
            done = step / 20
            run.step(done)
            adam.zero_grad()
            loss, _ = total_loss(plain, run.batches(step), recipe)
            loss.backward()
            clipped += float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)) > 0.05
            adam.param_groups[0]["lr"] = recipe.rate_at(done, 32)
            adam.step()
            averages = {
                name: decay * averages[name] + (1 - decay) * p.detach()
                for name, p in plain.named_parameters()
            }
        assert clipped > 10
        for name, p in plain.named_parameters():
            torch.testing.assert_close(run.state.parameters[name], p, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(run.state.averages[name], averages[name], rtol=1e-4, atol=1e-6)

    def test_named_parameters_are_what_is_trained(self):
        net = network("support", nonnegative="softplus")
        moved = {name: p.detach() + 0.1 for name, p in net.named_parameters()}
        x = torch.from_numpy(queries(3, 6))
        out = functional_call(net, moved, (x,)).detach()
        np.testing.assert_allclose(net.export({}, moved).scores(x.numpy()), out, rtol=1e-5, atol=1e-5)


class TestBatches:
    def batches(self, task, rank=0, world=1, seed=0, **options):
        return Batches(task, Recipe(**options), seed, rank, world, CPU, kind="key")

    def test_an_epoch_holds_every_row_once(self, task):
        made = self.batches(task, batch=48)
        rows = torch.cat([made._rows_at(step * 48, 48) for step in range(2 * made.rows // 48 + 1)])
        for epoch in range(2):
            part = rows[epoch * made.rows : (epoch + 1) * made.rows]
            assert sorted(part.tolist()) == list(range(made.rows))
        assert not torch.equal(rows[: made.rows], rows[made.rows : 2 * made.rows])

    def test_a_batch_larger_than_an_epoch(self, task):
        made = self.batches(task, batch=2500)
        assert np.bincount(made._rows_at(0, 2500)).tolist().count(0) == 0
        assert made(3).x.shape == (2500, task.d)

    @pytest.mark.parametrize("name", ["task", "task1"])
    def test_contents(self, name, request):
        task = request.getfixturevalue(name)
        made = self.batches(task, batch=32)
        batch, rows = made(40), made._rows_at(40 * 32, 32).numpy()
        np.testing.assert_array_equal(batch.x, task.train.queries[rows])
        np.testing.assert_array_equal(batch.sigma, task.train.cell_scores[rows])
        np.testing.assert_array_equal(batch.targets, task.keys[task.train.cell_ids[rows]])
        products = torch.einsum("md,mcd->mc", batch.x, batch.targets)
        torch.testing.assert_close(products, batch.sigma, rtol=1e-5, atol=1e-6)
        assert batch.cells is None

    def test_sampled_contents(self, task):
        made = self.batches(task, batch=32, all_cells_up_to=4, sampled_cells=3)
        batch, rows = made(2), made._rows_at(64, 32).numpy()
        ids = np.take_along_axis(task.train.cell_ids[rows], batch.cells.numpy(), axis=1)
        np.testing.assert_array_equal(batch.targets, task.keys[ids])
        assert batch.sigma.shape == (32, task.c)

    @pytest.mark.parametrize("all_cells_up_to", [4, 16])
    def test_the_parts_of_all_processes_are_the_whole(self, task, all_cells_up_to):
        options = {"all_cells_up_to": all_cells_up_to, "sampled_cells": 3}
        whole = self.batches(task, batch=60, **options)
        parts = [self.batches(task, rank, 3, batch=20, **options) for rank in range(3)]
        for step in (0, 5, 31):
            expected = whole(step)
            got = [part(step) for part in parts]
            for field in ("x", "sigma", "targets", "cells", "signs"):
                value = getattr(expected, field)
                if value is None:
                    assert all(getattr(g, field) is None for g in got)
                else:
                    assert torch.equal(torch.cat([getattr(g, field) for g in got]), value)

    def test_a_support_net_draws_gradients_from_two_cells_on(self, task):
        """Nine tenths of the time went into gradients of cells that one batch hardly needs."""
        support = Batches(task, Recipe(batch=32), 0, 0, 1, CPU, kind="support")
        assert support(0).cells.shape == (32, 2)
        assert Batches(task, Recipe(batch=32, sampled_gradients=0), 0, 0, 1, CPU)(0).cells is None
        assert Recipe().cells_drawn("support", 2) == 0
        assert Recipe().cells_drawn("support", 3) == 2
        assert Recipe().cells_drawn("key", 16) == 0
        assert Recipe().cells_drawn("key", 17) == 8

    def test_order_of_asking_does_not_matter(self, task):
        forward, jumping = (self.batches(task, batch=64) for _ in range(2))
        steps = range(40)
        expected = [forward(step).x for step in steps]
        for step in (39, 0, 20, 7, 39):
            assert torch.equal(jumping(step).x, expected[step])

    @pytest.mark.parametrize("seed", [1, 20_240_501, 2**40])
    def test_any_seed(self, task, seed):
        one = self.batches(task, seed=seed, batch=16, all_cells_up_to=4)(3)
        two = self.batches(task, seed=seed + 1, batch=16, all_cells_up_to=4)(3)
        assert not torch.equal(one.x, two.x)
        assert not torch.equal(one.cells, two.cells)
