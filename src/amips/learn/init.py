"""Initial weights that keep the signal's size through any depth.

Non-negative weights cannot have mean zero, so the usual rules let activations explode. Hoedt and
Klambauer (2023) draw them from a log-normal distribution whose mean and variance keep pre-activations at
mean 0, variance 1 and a fixed correlation rho = 1/2 between units, with a bias that cancels the mean.
Their formulas are for ReLU; with s(x) = alpha x + (1 - alpha) relu(x) the moments of s(g), g standard
normal and correlated by rho, become

    m1 = E s(g)       = (1 - alpha) / sqrt(2 pi)
    m2 = E s(g)^2     = (1 + alpha^2) / 2
    K  = E s(g) s(g') = alpha rho + (1 - alpha)^2 (sqrt(1 - rho^2) + rho arccos(-rho)) / (2 pi)

and for fan-in N the weights have

    mean^2   = rho / (N m2 + N (N - 1) K - N^2 m1^2)
    variance = (1 - rho) / (N m2)
    bias     = -N mean m1
"""

import math

import numpy as np
from numpy.typing import NDArray

from amips.nets import Architecture, weight_shapes

Floats = NDArray[np.float32]

CORRELATION = 0.5


def convex_moments(fan_in: int, alpha: float, rho: float = CORRELATION) -> tuple[float, float, float]:
    """Mean and variance of a non-negative weight, and the bias, that keep the signal's size."""
    m1 = (1 - alpha) / math.sqrt(2 * math.pi)
    m2 = (1 + alpha**2) / 2
    K = alpha * rho + (1 - alpha) ** 2 * (math.sqrt(1 - rho**2) + rho * math.acos(-rho)) / (2 * math.pi)
    mean = math.sqrt(rho / (fan_in * m2 + fan_in * (fan_in - 1) * K - (fan_in * m1) ** 2))
    return mean, (1 - rho) / (fan_in * m2), -fan_in * mean * m1


def log_normal(rng: np.random.Generator, shape: tuple[int, ...], mean: float, variance: float) -> Floats:
    """Positive values with the given mean and variance."""
    spread = math.log1p(variance / mean**2)
    return rng.lognormal(math.log(mean) - spread / 2, math.sqrt(spread), shape).astype(np.float32)


def initial_weights(a: Architecture, seed: int) -> dict[str, Floats]:
    """Weights for inputs of norm 1: every pre-activation starts with mean 0 and variance 1.

    Where a layer sees the input again, both parts share the variance equally. The head is scaled by
    1 / sqrt(d), so that predicted keys start at a norm of about 1.
    """
    rng = np.random.default_rng([seed, 7])
    m2 = (1 + a.alpha**2) / 2
    weights: dict[str, Floats] = {}
    for name, shape in weight_shapes(a).items():
        kind, _, layer = name.partition(".")
        i = int(layer) if layer else a.depth
        variance_part = 0.5 if i in a.injected else 1.0
        # A residual block adds to what is there. Activations are mostly positive, so it is the blocks that
        # add up, not their variances: let the sum over all of them have the size of one.
        variance_part /= a.depth**2 if a.residual and 0 < i < a.depth else 1
        size = math.sqrt(variance_part / (a.d if kind in ("W", "b") and not layer else 1))
        if kind == "Wx":
            weights[name] = size * rng.standard_normal(shape, np.float32)
        elif a.kind == "key" or (i == 0 and kind == "b"):
            spread = size / math.sqrt(a.width * m2) if kind != "b" else 0.0
            weights[name] = spread * rng.standard_normal(shape, np.float32)
        else:
            mean, variance, bias = convex_moments(a.width, a.alpha)
            if not a.biases:  # nothing cancels the mean, so the layer must carry it on unchanged
                mean = 1 / a.width
            if kind == "b":
                weights[name] = np.full(shape, size * bias, np.float32)
            else:
                weights[name] = size * log_normal(rng, shape, mean, variance)
    return {name: value.astype(np.float32) for name, value in weights.items()}
