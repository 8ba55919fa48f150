"""The paper's formulas once more, in float64 and as plainly as they can be written."""

import numpy as np

from amips.nets import Architecture, Net, weight_shapes


def soft_leaky_relu(x, alpha, beta):
    """alpha x + (1 - alpha) / beta log(1 + exp(beta x))."""
    soft = np.maximum(x, 0) if np.isinf(beta) else np.logaddexp(0, beta * x) / beta
    return alpha * x + (1 - alpha) * soft


def pre_activations(a, weights, u):
    """What goes into the activation of every hidden layer, and the output W_L z_L + b_L."""
    w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    u = np.asarray(u, np.float64)
    pres, z = [], None
    for i in range(a.depth):
        pre = np.zeros((len(u), a.width))
        if i == 0 or i in a.injected:
            pre = pre + u @ w[f"Wx.{i}"].T
        if i > 0:
            pre = pre + z @ w[f"Wz.{i}"].T
        if a.biases:
            pre = pre + w[f"b.{i}"]
        pres.append(pre)
        after = soft_leaky_relu(pre, a.alpha, a.beta)
        z = z + after if a.residual and i > 0 else after
    out = z @ w["W"].T
    return pres, out + w["b"] if a.biases else out


def base(a, weights, u):
    """g, the network itself, [m, d] -> [m, d_out]."""
    return pre_activations(a, weights, u)[1]


def scores(a, weights, x):
    """f(x)_j or <F(x)_j, x>, [m, d] -> [m, c]; x must not be 0."""
    x = np.asarray(x, np.float64)
    norms = np.linalg.norm(x, axis=1, keepdims=True)
    if a.kind == "key":
        return np.einsum("mcd,md->mc", base(a, weights, x / norms).reshape(len(x), a.c, a.d), x)
    if a.homogeneous == "relu":
        return base(a, weights, x)
    return norms * base(a, weights, x / norms)


def numeric_jacobian(f, x, step=1e-6):
    """Central differences: [m, d] -> [m, c, d]."""
    x = np.asarray(x, np.float64)
    columns = []
    for i in range(x.shape[1]):
        e = np.zeros(x.shape[1])
        e[i] = step
        columns.append((f(x + e) - f(x - e)) / (2 * step))
    return np.stack(columns, axis=2)


def architecture(kind="support", d=6, c=3, width=7, depth=3, injected=(1, 2), **more):
    """A small architecture; homogeneous="relu" brings its activation along."""
    if kind == "support" and more.get("homogeneous") == "relu":
        more |= {"alpha": 0.0, "beta": np.inf}
    return Architecture(kind, d, c, width, depth, injected, **more)


def random_net(a, seed=0):
    """Random weights of a size that keeps values near 1; those a SupportNet needs so are not negative."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in weight_shapes(a).items():
        value = rng.standard_normal(shape) / np.sqrt(shape[-1] if len(shape) > 1 else 4)
        if a.kind == "support" and (name.startswith("Wz") or name == "W"):
            value = np.abs(value)
        weights[name] = value.astype(np.float32)
    return Net(a, weights, {})


def queries(m, d, seed=0):
    """Random queries whose norms differ a lot."""
    rng = np.random.default_rng([seed, 99])
    return (rng.standard_normal((m, d)) * rng.uniform(0.2, 3, (m, 1))).astype(np.float32)


def best_in_cells(keys, x, assignment, cells, k):
    """The k best keys in the cells [m, p] of each query: best first, ties to the lower id, padded."""
    scores = x.astype(np.float64) @ keys.astype(np.float64).T
    probed = (assignment[None, :, None] == cells[:, None, :]).any(axis=2)
    scores[~probed] = -np.inf
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    best = np.take_along_axis(scores, order, axis=1)
    ids = np.where(np.isneginf(best), -1, order)
    pad = ((0, 0), (0, k - ids.shape[1]))
    return np.pad(best, pad, constant_values=-np.inf), np.pad(ids, pad, constant_values=-1)
