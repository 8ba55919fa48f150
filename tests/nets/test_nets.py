"""Architectures and the numpy runtime: counts, convexity, homogeneity, gradients, files."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import amips
from amips.nets import (
    SIZES,
    Architecture,
    KeyNet,
    SupportNet,
    hidden_width,
    injected_layers,
    load_model,
    weight_shapes,
)
from amips.nets.runtime import activation, activation_slope
from reference import architecture, base, numeric_jacobian, queries, random_net, scores

SHAPES = {
    "plain": {"injected": ()},
    "injected": {"injected": (1, 2)},
    "sparse": {"injected": (2,)},
    "residual": {"residual": True},
    "one cell": {"c": 1},
    "one layer": {"depth": 1, "injected": ()},
    "leaky relu": {"beta": math.inf},
    "relu": {"homogeneous": "relu"},
    "relu residual": {"homogeneous": "relu", "residual": True, "injected": (1,)},
}
WRAPPED = [name for name, more in SHAPES.items() if more.get("homogeneous") != "relu"]


@pytest.fixture(params=SHAPES, ids=lambda name: name.replace(" ", "-"))
def support(request):
    return random_net(architecture(**SHAPES[request.param]), seed=len(request.param))


@pytest.fixture(params=WRAPPED, ids=lambda name: name.replace(" ", "-"))
def keynet(request):
    return random_net(architecture("key", **SHAPES[request.param]), seed=len(request.param))


def one_line(caught):
    return "\n" not in str(caught.value) and str(caught.value) != ""


class TestSizing:
    def test_shares_of_the_database_are_the_papers(self):
        assert SIZES == {"XS": 0.01, "S": 0.05, "M": 0.1, "L": 0.2, "XL": 0.4, "XXL": 0.5}
        assert SupportNet(size="xs").fraction() == 0.01
        assert KeyNet(size=0.3).fraction() == 0.3

    @given(
        budget=st.floats(1e3, 1e9),
        d=st.integers(2, 1024),
        depth=st.integers(2, 16),
        share=st.floats(0, 1),
    )
    @settings(max_examples=200, deadline=None)
    def test_width_solves_the_papers_equation(self, budget, d, depth, share):
        n_x = round(share * (depth - 1))
        h = hidden_width(budget, d, depth, n_x)

        def used(h):
            return (depth - 1) * h**2 + (1 + n_x) * d * h

        # h is a rounded root: half a unit less is too small, half a unit more is too large.
        assert h == 1 or used(h - 0.5) <= budget * (1 + 1e-9)
        assert used(h + 0.5) >= budget * (1 - 1e-9)

    def test_width_by_the_papers_closed_form(self):
        n, d, L, n_x = 100_000, 384, 8, 7
        P, D = 0.05 * n * d, (1 + n_x) * d
        h = (math.sqrt(D**2 + 4 * (L - 1) * P) - D) / (2 * (L - 1))
        assert SupportNet(size="S", depth=L).architecture(n, d, 10).width == round(h)

    def test_deep_limit(self):
        # Without injections and with P much larger than d^2: sqrt(P / (L - 1)).
        assert hidden_width(1e10, 4, 17, 0) == pytest.approx(math.sqrt(1e10 / 16), rel=1e-3)

    def test_limit_of_frequent_injection(self):
        # The linear term dominates: P / D = rho n / (1 + n_x).
        n, d, n_x = 20_000, 100_000, 3
        assert hidden_width(0.01 * n * d, d, 4, n_x) == pytest.approx(0.01 * n / (1 + n_x), rel=2e-3)

    def test_one_layer(self):
        assert hidden_width(0.01 * 50_000 * 384, 384, 1, 0) == 500

    @pytest.mark.parametrize("size", SIZES)
    def test_a_large_network_spends_its_budget(self, size):
        a = SupportNet(size=size, depth=4).architecture(n=500_000, d=384, c=10)
        assert a.parameters == pytest.approx(SIZES[size] * 500_000 * 384, rel=0.02)

    def test_width_itself(self):
        assert KeyNet(width=33, size="XXL").architecture(1000, 16, 2).width == 33

    def test_a_tiny_database_still_gets_a_unit(self):
        assert SupportNet(size="XS").architecture(n=5, d=4, c=1).width == 1


architectures = st.builds(
    lambda kind, d, c, width, depth, seed, residual, homogeneous: architecture(
        kind,
        d,
        c,
        width,
        depth,
        tuple(i for i in range(1, depth) if (seed >> i) & 1),
        residual=residual,
        homogeneous=homogeneous,
    ),
    st.sampled_from(["support", "key"]),
    st.integers(1, 20),
    st.integers(1, 9),
    st.integers(1, 20),
    st.integers(1, 9),
    st.integers(0, 1023),
    st.booleans(),
    st.sampled_from(["wrapper", "relu"]),
)


class TestCounts:
    @given(a=architectures)
    @settings(max_examples=200, deadline=None)
    def test_parameters_are_the_weights_that_there_are(self, a):
        assert a.parameters == sum(math.prod(shape) for shape in weight_shapes(a).values())

    @given(a=architectures)
    @settings(max_examples=200, deadline=None)
    def test_parameters_by_the_papers_formula(self, a):
        h, L, n_x, d_out = a.width, a.depth, len(a.injected), a.c * (a.d if a.kind == "key" else 1)
        weights = (1 + n_x) * a.d * h + (L - 1) * h**2 + h * d_out
        without_biases = a.kind == "support" and a.homogeneous == "relu"
        assert a.parameters == weights + (0 if without_biases else L * h + d_out)

    @given(a=architectures)
    @settings(max_examples=200, deadline=None)
    def test_flops_are_two_for_each_entry_of_each_matrix_used(self, a):
        entries = {name: math.prod(s) for name, s in weight_shapes(a).items() if len(s) == 2}
        hidden = sum(entries.values()) - entries["W"]
        inner_products = a.c * a.d if a.kind == "key" else 0
        assert a.score_flops == 2 * (sum(entries.values()) + inner_products)
        if a.kind == "key":
            assert a.key_flops() == 2 * sum(entries.values())
        else:
            # Forward for the slopes, then every hidden matrix once more for each gradient.
            assert a.key_flops() == a.score_flops + 2 * a.c * hidden
            assert a.key_flops(2) == a.score_flops + 2 * 2 * hidden

    @given(a=architectures)
    @settings(max_examples=100, deadline=None)
    def test_json_round_trip(self, a):
        text = json.dumps(a.to_json(), allow_nan=False)
        assert Architecture.from_json(json.loads(text)) == a

    def test_json_of_an_infinite_beta(self):
        a = architecture(beta=math.inf)
        assert a.to_json()["beta"] == "inf"
        assert Architecture.from_json(json.loads(json.dumps(a.to_json()))).beta == math.inf


class TestInjection:
    @pytest.mark.parametrize(
        ("inject", "depth", "layers"),
        [
            ("all", 4, (1, 2, 3)),
            ("all", 1, ()),
            (0, 4, ()),
            (1, 4, (3,)),
            (3, 4, (1, 2, 3)),
            (2, 5, (2, 4)),
            (3, 8, (2, 4, 7)),
            ("every 1", 4, (1, 2, 3)),
            ("every 2", 8, (2, 4, 6)),
            ("every 4", 16, (4, 8, 12)),
            ("every 9", 4, ()),
        ],
    )
    def test_layers(self, inject, depth, layers):
        assert injected_layers(inject, depth) == layers

    @given(depth=st.integers(1, 40), share=st.floats(0, 1))
    @settings(deadline=None)
    def test_a_count_is_that_many_layers(self, depth, share):
        count = round(share * (depth - 1))
        layers = injected_layers(count, depth)
        assert len(set(layers)) == count == len(layers)
        assert list(layers) == sorted(layers)
        assert all(1 <= i <= depth - 1 for i in layers)
        assert count == 0 or layers[-1] == depth - 1

    @pytest.mark.parametrize(
        "inject", [4, -1, 1.5, "every", "every 0", "every x", "every ²", "every 1.5", "some", "every -2"]
    )
    def test_errors(self, inject):
        with pytest.raises(amips.RunError, match="inject") as caught:
            injected_layers(inject, 4)
        assert one_line(caught)

    def test_defaults_of_the_two_networks(self):
        assert SupportNet(depth=4).architecture(1000, 8, 2).injected == (1, 2, 3)
        assert KeyNet(depth=4).architecture(1000, 8, 2).injected == ()


class TestSpecs:
    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"depth": 0}, "depth=0"),
            ({"depth": 2.5}, "depth=2.5"),
            ({"size": "XXS"}, "XXS.*XS, S, M, L, XL, XXL"),
            ({"size": 0}, "size=0"),
            ({"size": 1.5}, "size=1.5"),
            ({"size": math.nan}, "size=nan"),
            ({"alpha": -0.1}, "alpha=-0.1"),
            ({"alpha": 1.1}, "alpha=1.1"),
            ({"beta": 0}, "beta=0"),
            ({"beta": math.nan}, "beta=nan"),
            ({"width": 0}, "width=0"),
            ({"width": -3}, "width=-3"),
            ({"inject": 4}, "inject=4"),
        ],
    )
    @pytest.mark.parametrize("net", [SupportNet, KeyNet])
    def test_errors(self, net, options, match):
        with pytest.raises(amips.RunError, match=match) as caught:
            net(**options)
        assert one_line(caught)

    @pytest.mark.parametrize("options", [{"homogeneous": "cone"}, {"nonnegative": "hope"}])
    def test_errors_of_support_nets(self, options):
        with pytest.raises(amips.RunError, match=r"cone|hope") as caught:
            SupportNet(**options)
        assert one_line(caught)

    def test_they_are_frozen(self):
        with pytest.raises(AttributeError):
            SupportNet().depth = 3

    def test_relu_brings_its_activation(self):
        a = SupportNet(homogeneous="relu").architecture(1000, 8, 2)
        assert (a.alpha, a.beta, a.biases) == (0.0, math.inf, False)
        a = SupportNet().architecture(1000, 8, 2)
        assert (a.alpha, a.beta, a.biases) == (0.1, 20.0, True)


class TestActivation:
    def test_formula(self):
        x = np.linspace(-3, 3, 101, dtype=np.float32)
        x64 = x.astype(np.float64)
        expected = 0.1 * x64 + 0.9 / 20 * np.log(1 + np.exp(20 * x64))
        np.testing.assert_allclose(activation(x, 0.1, 20.0), expected, atol=1e-6)
        slope = 0.1 + 0.9 / (1 + np.exp(-20 * x64))
        np.testing.assert_allclose(activation_slope(x, 0.1, 20.0), slope, atol=1e-6)

    @pytest.mark.parametrize("alpha", [0.0, 0.1, 1.0])
    def test_limit_of_beta(self, alpha):
        x = np.linspace(-3, 3, 101, dtype=np.float32)
        x = x[np.abs(x) > 1e-3]
        leaky = np.where(x > 0, x, alpha * x)
        np.testing.assert_allclose(activation(x, alpha, math.inf), leaky, atol=1e-6)
        np.testing.assert_allclose(activation(x, alpha, 1e6), leaky, atol=1e-5)
        slope = np.where(x > 0, 1, alpha)
        np.testing.assert_allclose(activation_slope(x, alpha, math.inf), slope, atol=1e-6)
        np.testing.assert_allclose(activation_slope(x, alpha, 1e6), slope, atol=1e-5)

    @pytest.mark.parametrize("beta", [20.0, math.inf])
    def test_large_arguments(self, beta):
        x = np.float32([-1e30, -1e4, -100, 100, 1e4, 1e30])
        np.testing.assert_allclose(activation(x, 0.1, beta), np.where(x > 0, x, 0.1 * x), rtol=1e-6)
        np.testing.assert_allclose(activation_slope(x, 0.1, beta), np.where(x > 0, 1, 0.1), rtol=1e-6)

    @pytest.mark.parametrize("beta", [0.5, 20.0, math.inf])
    def test_it_is_convex_and_rising(self, beta):
        slope = activation_slope(np.linspace(-5, 5, 1001, dtype=np.float32), 0.1, beta)
        assert (np.diff(slope) >= -1e-7).all()
        assert slope.min() >= 0.1 - 1e-6
        assert slope.max() <= 1 + 1e-6

    def test_its_argument_is_left_alone(self):
        x = np.float32([-1, 0, 2])
        activation(x, 0.1, 20.0)
        activation(x, 0.1, math.inf)
        activation_slope(x, 0.1, 20.0)
        assert x.tolist() == [-1, 0, 2]


def worst_bend(g, d, pairs=4000, seed=5):
    """The largest g((x + y) / 2) - (g(x) + g(y)) / 2 over random pairs: not above 0 if g is convex."""
    rng = np.random.default_rng(seed)
    x, y = (rng.standard_normal((2, pairs, d)) * rng.uniform(0.1, 3, (2, pairs, 1))).astype(np.float32)
    return float((g((x + y) / 2) - (g(x) + g(y)) / 2).max())


class TestConvexity:
    def test_base_network(self, support):
        assert worst_bend(lambda x: support._forward(x, None), support.d) <= 1e-5

    @pytest.mark.parametrize("residual", [False, True])
    def test_relu_network_on_all_of_space(self, residual):
        net = random_net(architecture(homogeneous="relu", residual=residual), seed=2)
        assert worst_bend(net.scores, net.d) <= 1e-5

    @pytest.mark.parametrize("weight", ["Wz.2", "W"])
    def test_a_negative_weight_breaks_it(self, weight):
        net = random_net(architecture(), seed=2)
        net.weights[weight][:] = -net.weights[weight]
        assert worst_bend(lambda x: net._forward(x, None), net.d) > 1e-2

    def test_negative_input_weights_are_allowed(self):
        net = random_net(architecture(), seed=2)
        assert min(net.weights[f"Wx.{i}"].min() for i in range(3)) < -0.1
        assert worst_bend(lambda x: net._forward(x, None), net.d) <= 1e-5


class TestHomogeneity:
    @pytest.mark.parametrize("t", [1e-4, 0.5, 7.0, 1e4])
    def test_scores_scale_and_keys_stay(self, support, t):
        x = queries(20, support.d)
        np.testing.assert_allclose(support.scores(np.float32(t) * x) / t, support.scores(x), atol=3e-5)
        np.testing.assert_allclose(support.keys(np.float32(t) * x), support.keys(x), atol=3e-4)

    def test_euler(self, support):
        x = queries(50, support.d)
        products = np.einsum("mcd,md->mc", support.keys(x), x)
        np.testing.assert_allclose(products, support.scores(x), atol=5e-5)

    def test_keynet(self, keynet):
        x = queries(20, keynet.d)
        np.testing.assert_allclose(keynet.keys(5 * x), keynet.keys(x), atol=1e-5)
        np.testing.assert_allclose(keynet.scores(5 * x), 5 * keynet.scores(x), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(
            keynet.scores(x), np.einsum("mcd,md->mc", keynet.keys(x), x), rtol=1e-4, atol=1e-5
        )

    @pytest.mark.parametrize("length", [1e-20, 1e15, 1e30])
    def test_very_short_and_very_long_queries(self, length):
        x = queries(20, 6)
        for net in (random_net(architecture()), random_net(architecture("key"))):
            far = (x * np.float32(length)).astype(np.float32)
            np.testing.assert_allclose(net.scores(far) / length, net.scores(x), rtol=1e-3, atol=1e-4)
            np.testing.assert_allclose(net.keys(far), net.keys(x), rtol=1e-3, atol=1e-4)


class TestValuesAndGradients:
    def test_scores(self, support):
        x = queries(30, support.d)
        expected = scores(support.architecture, support.weights, x)
        got = support.scores(x)
        assert got.dtype == np.float32
        assert got.shape == (30, support.c)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)

    def test_keys_of_keynet(self, keynet):
        x = queries(30, keynet.d)
        u = x / np.linalg.norm(x, axis=1, keepdims=True)
        expected = base(keynet.architecture, keynet.weights, u).reshape(30, keynet.c, keynet.d)
        np.testing.assert_allclose(keynet.keys(x), expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(
            keynet.scores(x), scores(keynet.architecture, keynet.weights, x), rtol=1e-5, atol=1e-5
        )

    def test_keys_are_finite_differences(self, support):
        x = queries(30, support.d)
        expected = numeric_jacobian(lambda x: scores(support.architecture, support.weights, x), x)
        got = support.keys(x)
        assert got.dtype == np.float32
        assert got.shape == (30, support.c, support.d)
        np.testing.assert_allclose(got, expected, atol=2e-5)

    def test_keys_are_autograds(self, support):
        torch = pytest.importorskip("torch")
        a = support.architecture
        w = {name: torch.from_numpy(value).double() for name, value in support.weights.items()}
        x = torch.from_numpy(queries(30, support.d)).double().requires_grad_()
        norms = x.norm(dim=1, keepdim=True)
        u = x / norms if a.homogeneous == "wrapper" else x
        z = None
        for i in range(a.depth):
            pre = u @ w[f"Wx.{i}"].T if f"Wx.{i}" in w else 0
            pre = pre + (z @ w[f"Wz.{i}"].T if i else 0) + (w[f"b.{i}"] if a.biases else 0)
            if math.isinf(a.beta):
                after = torch.nn.functional.leaky_relu(pre, a.alpha)
            else:
                after = a.alpha * pre + (1 - a.alpha) * torch.nn.functional.softplus(pre, a.beta)
            z = z + after if a.residual and i else after
        out = z @ w["W"].T + (w["b"] if a.biases else 0)
        f = out * norms if a.homogeneous == "wrapper" else out
        rows = [torch.autograd.grad(f[:, j].sum(), x, retain_graph=True)[0] for j in range(a.c)]
        np.testing.assert_allclose(support.keys(x.detach().float().numpy()), torch.stack(rows, 1), atol=2e-5)

    def test_at_zero(self, support):
        x = queries(5, support.d)
        x[[1, 4]] = 0
        assert (support.scores(x)[[1, 4]] == 0).all()
        assert (support.keys(x)[[1, 4]] == 0).all()
        np.testing.assert_array_equal(support.keys(x)[[0, 2, 3]] != 0, True)
        chosen = np.zeros((5, 1), np.int64)
        assert (support.keys(x, chosen)[[1, 4]] == 0).all()

    def test_scores_of_keynet_at_zero(self, keynet):
        x = np.zeros((2, keynet.d), np.float32)
        assert (keynet.scores(x) == 0).all()
        assert np.isfinite(keynet.keys(x)).all()

    @pytest.mark.parametrize("kind", ["support", "key"])
    def test_chosen_cells_are_slices(self, kind):
        net = random_net(architecture(kind, c=7))
        x = queries(25, net.d)
        cells = np.random.default_rng(1).integers(7, size=(25, 3))
        expected = np.take_along_axis(net.keys(x), cells[:, :, None], axis=1)
        np.testing.assert_allclose(net.keys(x, cells), expected, atol=1e-6)

    def test_chosen_cells_of_the_relu_network(self):
        net = random_net(architecture(c=7, homogeneous="relu"))
        x = queries(25, net.d)
        cells = np.random.default_rng(1).integers(7, size=(25, 2)).astype(np.int32)
        expected = np.take_along_axis(net.keys(x), cells[:, :, None], axis=1)
        np.testing.assert_allclose(net.keys(x, cells), expected, atol=1e-6)

    @pytest.mark.parametrize("kind", ["support", "key"])
    def test_rows_do_not_depend_on_each_other(self, kind):
        net = random_net(architecture(kind))
        x = queries(9, net.d)
        np.testing.assert_allclose(net.scores(x)[4:5], net.scores(x[4:5]), atol=1e-6)
        np.testing.assert_allclose(net.keys(x)[4:5], net.keys(x[4:5]), atol=1e-6)
        assert net.scores(x[:0]).shape == (0, 3)
        assert net.keys(x[:0]).shape == (0, 3, 6)

    def test_queries_are_left_alone(self, support):
        x = queries(5, support.d)
        before = x.copy()
        support.scores(x)
        support.keys(x)
        assert (x == before).all()

    @pytest.mark.parametrize("shape", [(4, 5), (6,), (2, 3, 6)])
    def test_queries_of_another_dimension(self, shape):
        net = random_net(architecture())
        for call in (net.scores, net.keys):
            with pytest.raises(amips.VectorError, match=r"\[m, 6\]") as caught:
                call(np.zeros(shape, np.float32))
            assert one_line(caught)


class TestFiles:
    @pytest.fixture
    def saved(self, tmp_path):
        net = random_net(architecture(beta=math.inf, residual=True))
        net.about.update({"keys": "0123", "val": {"erel": -1.5}})
        net.save(tmp_path / "model")
        return net, tmp_path / "model"

    def describe(self, directory, **changes):
        """Change fields of the architecture in model.json; None leaves a field out."""
        path = directory / "model.json"
        described = json.loads(path.read_text())
        described["architecture"] |= changes
        described["architecture"] = {k: v for k, v in described["architecture"].items() if v is not None}
        path.write_text(json.dumps(described))

    def refused(self, directory, match):
        with pytest.raises(amips.RunError, match=match) as caught:
            load_model(directory)
        assert one_line(caught)
        assert str(directory) in str(caught.value)

    def test_round_trip(self, saved):
        net, directory = saved
        again = load_model(directory)
        assert again.architecture == net.architecture
        assert again.about == net.about
        assert set(again.weights) == set(net.weights)
        for name, value in net.weights.items():
            np.testing.assert_array_equal(again.weights[name], value)
        x = queries(5, net.d)
        np.testing.assert_array_equal(again.keys(x), net.keys(x))
        assert sorted(p.name for p in directory.iterdir()) == ["model.json", "model.safetensors"]

    def test_nothing_there(self, tmp_path):
        self.refused(tmp_path / "none", "model.json does not exist")

    def test_another_error_class(self, tmp_path):
        with pytest.raises(amips.TaskError):
            load_model(tmp_path, amips.TaskError)

    @pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
    def test_truncated_weights(self, saved, share):
        path = saved[1] / "model.safetensors"
        data = path.read_bytes()
        path.write_bytes(data[: int(share * len(data))])
        self.refused(saved[1], "model.safetensors cannot be read")

    def test_weights_that_are_something_else(self, saved):
        (saved[1] / "model.safetensors").write_bytes(b"\xff" * 4096)
        self.refused(saved[1], "model.safetensors cannot be read")

    def test_missing_weights_file(self, saved):
        (saved[1] / "model.safetensors").unlink()
        self.refused(saved[1], "model.safetensors")

    @pytest.mark.parametrize("name", ["Wx.0", "Wz.2", "b.1", "W", "b"])
    def test_missing_weight(self, saved, name):
        net, directory = saved
        save_file({k: v for k, v in net.weights.items() if k != name}, directory / "model.safetensors")
        self.refused(directory, rf"weight {name}: .*nothing")

    def test_wrong_shape(self, saved):
        net, directory = saved
        save_file(net.weights | {"Wz.1": net.weights["Wz.1"][:, :-1].copy()}, directory / "model.safetensors")
        self.refused(directory, r"weight Wz.1: expected float32 \[7, 7\], got float32 \[7, 6\]")

    @pytest.mark.parametrize("dtype", [np.float16, np.float64])
    def test_wrong_type(self, saved, dtype):
        net, directory = saved
        save_file(net.weights | {"W": net.weights["W"].astype(dtype)}, directory / "model.safetensors")
        self.refused(directory, f"weight W: expected float32 .*{np.dtype(dtype).name}")

    def test_a_type_that_numpy_lacks(self, saved):
        path = saved[1] / "model.safetensors"
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:end])
        header["W"]["dtype"] = "BF16"
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
        self.refused(saved[1], r"weight W: expected float32 \[3, 7\], got BF16 \[3, 7\]")

    @pytest.mark.parametrize("text", ["", "{", "[1, 2]", '"model"', "\udcff"])
    def test_bad_json(self, saved, text):
        (saved[1] / "model.json").write_bytes(text.encode("utf-8", "surrogateescape"))
        self.refused(saved[1], "model.json is damaged")

    @pytest.mark.parametrize(
        "change",
        [
            {"d": None},
            {"injected": None},
            {"beta": None},
            {"kind": "transformer"},
            {"surprise": 1},
            {"depth": 2.5},
            {"depth": "3"},
            {"width": 0},
            {"c": -1},
            {"injected": [0, 1]},
            {"injected": [3]},
            {"injected": [2, 1]},
            {"injected": 5},
            {"beta": "nan"},
            {"beta": "soft"},
            {"alpha": 2},
            {"alpha": "0.1"},
            {"homogeneous": "sometimes"},
            {"nonnegative": ""},
        ],
        ids=str,
    )
    def test_bad_architecture(self, saved, change):
        self.describe(saved[1], **change)
        self.refused(saved[1], "not a description of an architecture")

    def test_an_architecture_the_weights_do_not_fit(self, saved):
        self.describe(saved[1], width=8)
        self.refused(saved[1], "weight Wx.0: expected")

    @pytest.mark.parametrize("value", [None, 5, [], "text"])
    def test_no_architecture(self, saved, value):
        (saved[1] / "model.json").write_text(json.dumps({"architecture": value}))
        self.refused(saved[1], "not a description of an architecture")

    def test_a_failed_save_leaves_the_model_before(self, saved, monkeypatch):
        net, directory = saved
        before = (directory / "model.safetensors").read_bytes()

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space"):
            random_net(net.architecture, seed=9).save(directory)
        monkeypatch.undo()
        assert (directory / "model.safetensors").read_bytes() == before
        assert sorted(p.name for p in directory.iterdir()) == ["model.json", "model.safetensors"]
        load_model(directory)


class TestOneQuery:
    """One query goes another way, with fewer numpy calls: it must give the same."""

    @pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
    def test_scores(self, support, scale):
        x = scale * queries(6, support.d, seed=3)
        one_by_one = np.concatenate([support.scores(row[None]) for row in x])
        np.testing.assert_allclose(one_by_one, support.scores(x), rtol=1e-5, atol=1e-6 * scale)

    def test_predicted_keys_and_their_scores(self, keynet):
        x = queries(6, keynet.d, seed=4)
        for run in (keynet.keys, keynet.scores):
            one_by_one = np.concatenate([run(row[None]) for row in x])
            np.testing.assert_allclose(one_by_one, run(x), rtol=1e-5, atol=1e-6)

    def test_zero_and_very_long(self, support):
        assert (
            support.scores(np.zeros((1, support.d), np.float32)) == 0
        ).all() or not support.architecture.biases
        x = queries(1, support.d) * np.float32(1e25)
        np.testing.assert_allclose(support.scores(x), support.scores(np.repeat(x, 2, axis=0))[:1], rtol=1e-4)

    def test_no_activation_at_all(self):
        net = random_net(architecture(alpha=1.0))
        x = queries(3, net.d)
        np.testing.assert_allclose(net.scores(x[:1]), net.scores(x)[:1], rtol=1e-6)
