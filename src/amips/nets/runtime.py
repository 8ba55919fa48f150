"""Networks at run time: numpy alone.

Weights are named after the paper: `Wx.i` [h, d], `Wz.i` [h, h], `b.i` [h] for hidden layer i, `W` and `b`
for the head. Non-negativity is a matter of training; here weights are what they are.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.errors import VectorError
from amips.nets.model import Floats, Model
from amips.nets.single import SingleQuery
from amips.nets.spec import Architecture

SINGLE_UP_TO = 1 << 22  # parameters: larger networks spend their time in the matrix products anyway


def weight_shapes(a: Architecture) -> dict[str, tuple[int, ...]]:
    """The name and shape of every weight of an architecture."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(a.depth):
        if i == 0 or i in a.injected:
            shapes[f"Wx.{i}"] = (a.width, a.d)
        if i > 0:
            shapes[f"Wz.{i}"] = (a.width, a.width)
        if a.biases:
            shapes[f"b.{i}"] = (a.width,)
    shapes["W"] = (a.outputs, a.width)
    if a.biases:
        shapes["b"] = (a.outputs,)
    return shapes


@dataclass(frozen=True)
class Net(Model):
    """A trained SupportNet or KeyNet."""

    architecture: Architecture

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """The name and shape of every weight."""
        return weight_shapes(self.architecture)

    def scores(self, x: Floats) -> Floats:
        """[m, d] -> [m, c]: f(x)_j for SupportNet, <F(x)_j, x> for KeyNet."""
        if len(x) == 1 and (one := self._score_one(x)) is not None:
            return one
        u, norms = self._inputs(x)
        out = self._forward(u, None)
        if self.architecture.kind == "support":
            return out * norms if self._wrapped else out
        scores: Floats = np.matmul(out.reshape(-1, self.c, self.d), x[:, :, None])[:, :, 0]
        return scores

    def keys(self, x: Floats, cells: NDArray[np.integer[Any]] | None = None) -> Floats:
        """[m, d] -> [m, c, d]: the predicted top key of every cell, or [m, p, d] for chosen cells [m, p]."""
        if len(x) == 1 and self.architecture.kind == "key" and cells is None:
            one = self._forward_one(x)
            if one is not None:
                return one[0].reshape(1, self.c, self.d)
        u, norms = self._inputs(x)
        if self.architecture.kind == "key":
            predicted = self._forward(u, None).reshape(-1, self.c, self.d)
            if cells is not None:
                predicted = np.take_along_axis(predicted, cells[:, :, None], axis=1)
            return predicted
        slopes: list[Floats] = []
        out = self._forward(u, slopes)
        jacobian = self._reverse(slopes, cells)
        if not self._wrapped:
            return jacobian
        # d/dx ||x|| g(u) = grad g(u) + (g(u) - <grad g(u), u>) u, and 0 at x = 0.
        value = out if cells is None else np.take_along_axis(out, cells, axis=1)
        radial = value - np.matmul(jacobian, u[:, :, None])[:, :, 0]
        jacobian += radial[:, :, None] * u[:, None, :]
        jacobian[norms[:, 0] == 0] = 0
        return jacobian

    @cached_property
    def _single(self) -> SingleQuery | None:
        """The faster way for one query: it keeps a copy of the weights, so only where calls are what costs.

        alpha = 1 (no activation at all) has none.
        """
        small = self.architecture.parameters <= SINGLE_UP_TO
        return SingleQuery(self.architecture, self.weights) if small and self.architecture.alpha < 1 else None

    def _score_one(self, x: Floats) -> Floats | None:
        """The scores of one query, [1, c]; None where only the way for many queries is exact enough."""
        one = self._forward_one(x)
        if one is None:
            return None
        out, norm = one
        if self.architecture.kind == "support":
            if self._wrapped:
                out *= norm
            return out[None]
        scores: Floats = out.reshape(self.c, self.d).dot(x[0])
        return scores[None]

    def _forward_one(self, x: Floats) -> tuple[Floats, float] | None:
        """The outputs of the last layer, [outputs], and ||x||; None if its square is not a sound float32."""
        if self._single is None or x.shape != (1, self.d):
            return None
        norm = math.sqrt(np.vdot(x, x))
        if not 1e-15 < norm < math.inf:
            return None
        u = np.empty(self.d + 1, np.float32)
        u[-1] = 1
        scaled = self.architecture.kind == "key" or self._wrapped
        np.multiply(x[0], 1 / norm if scaled else 1.0, u[:-1])
        return self._single(u), norm

    @property
    def _wrapped(self) -> bool:
        return self.architecture.homogeneous == "wrapper"

    def _inputs(self, x: Floats) -> tuple[Floats, Floats]:
        """What the layers see, and ||x|| as a column. At x = 0 that is 0, and so is the score."""
        if x.ndim != 2 or x.shape[1] != self.d:
            raise VectorError(f"queries of shape {list(x.shape)}; this model was trained for [m, {self.d}]")
        # float64, because the squares of a long x overflow float32 long before x does.
        norms = np.sqrt(np.einsum("md,md->m", x, x, dtype=np.float64)).astype(np.float32)[:, None]
        if self.architecture.kind == "support" and not self._wrapped:
            return x, norms
        u: Floats = np.divide(x, np.where(norms > 0, norms, 1), dtype=np.float32)
        return u, norms

    def _forward(self, u: Floats, slopes: list[Floats] | None) -> Floats:
        """W_L z_L + b_L; `slopes`, when given, collects s'(pre-activation) of every layer."""
        a, w = self.architecture, self.weights
        z: Floats | None = None
        for i in range(a.depth):
            pre = z @ w[f"Wz.{i}"].T if z is not None else u @ w["Wx.0"].T
            if i in a.injected:
                pre += u @ w[f"Wx.{i}"].T
            if a.biases:
                pre += w[f"b.{i}"]
            if slopes is not None:
                slopes.append(activation_slope(pre, a.alpha, a.beta))
            activated = activation(pre, a.alpha, a.beta)
            if a.residual and z is not None:
                activated += z
            z = activated
        assert z is not None
        out = z @ w["W"].T
        if a.biases:
            out += w["b"]
        return out

    def _reverse(self, slopes: list[Floats], cells: NDArray[np.integer[Any]] | None) -> Floats:
        """Rows of the Jacobian of g: the chain rule from the head down, [m, p, d]."""
        a, w = self.architecture, self.weights
        m = len(slopes[0])
        head = w["W"]
        delta = np.broadcast_to(head, (m, *head.shape)) if cells is None else head[cells]
        p = delta.shape[1]
        jacobian = np.zeros((m * p, a.d), np.float32)
        for i in reversed(range(a.depth)):
            inner = (delta * slopes[i][:, None, :]).reshape(m * p, a.width)
            if i == 0 or i in a.injected:
                jacobian += inner @ w[f"Wx.{i}"]
            if i > 0:
                below = (inner @ w[f"Wz.{i}"]).reshape(m, p, a.width)
                delta = below + delta if a.residual else below
        return jacobian.reshape(m, p, a.d)


def activation(x: Floats, alpha: float, beta: float) -> Floats:
    """The soft leaky ReLU, alpha x + (1 - alpha) / beta log(1 + exp(beta x)); beta = inf is its limit.

    log(1 + exp(z)) = max(z, 0) + log(1 + exp(-|z|)) does not overflow; log instead of log1p is within
    6e-8 here and several times faster.
    """
    positive = np.maximum(x, np.float32(0))
    if math.isinf(beta):
        positive *= np.float32(1 - alpha)
        positive += np.float32(alpha) * x
        return positive
    soft = np.abs(x)
    soft *= np.float32(-beta)
    np.exp(soft, out=soft)
    soft += np.float32(1)
    np.log(soft, out=soft)
    soft *= np.float32(1 / beta)
    soft += positive
    soft *= np.float32(1 - alpha)
    if alpha:
        soft += np.float32(alpha) * x
    return soft


def activation_slope(x: Floats, alpha: float, beta: float) -> Floats:
    """alpha + (1 - alpha) sigmoid(beta x); at the kink of beta = inf the lower slope, alpha."""
    if math.isinf(beta):
        return np.where(x > 0, np.float32(1), np.float32(alpha)).astype(np.float32, copy=False)
    half: Floats = np.tanh(np.float32(beta / 2) * x)  # sigmoid(z) = (1 + tanh(z / 2)) / 2
    half *= np.float32((1 - alpha) / 2)
    half += np.float32((1 + alpha) / 2)
    return half
