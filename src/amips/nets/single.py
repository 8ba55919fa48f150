"""The forward pass for one query, in as few numpy calls as possible.

At batch 1 a matrix-vector product takes a few microseconds and every other numpy call half of one, so the
calls are what must be saved. With t = beta x the activation is

    s(x) = (1 - alpha) / beta S(t),    S(t) = g t + log(1 + exp(t)),    g = alpha / (1 - alpha).

Hidden states are kept as S; the constants go into the weights once: inputs and biases times beta, W^z times
1 - alpha, the head times (1 - alpha) / beta. Biases are a last column, met by a 1 at the end of the state.
"""

import math

import numpy as np
from numpy.typing import NDArray

from amips.nets.spec import Architecture

Floats = NDArray[np.float32]

# log(1 + exp(t)) is t to float32 precision from here on, and exp(t) does not overflow before.
LINEAR_FROM = 20.0


class SingleQuery:
    """g(u) for one unit vector u; safe to call from several threads."""

    def __init__(self, a: Architecture, weights: dict[str, Floats]) -> None:
        self.a = a
        self.soft = not math.isinf(a.beta)
        rate = a.beta if self.soft else 1.0
        hidden = 1 - a.alpha if self.soft else 1.0
        zeros = np.zeros(a.width, np.float32)

        def with_bias(W: Floats, scale: float, b: Floats, b_scale: float) -> Floats:
            return np.ascontiguousarray(np.column_stack([scale * W, b_scale * b]), np.float32)

        places = {i: place for place, i in enumerate((0, *a.injected))}
        self.inputs = np.concatenate(
            [
                with_bias(weights[f"Wx.{i}"], rate, weights.get("b.0", zeros) if i == 0 else zeros, rate)
                for i in places
            ]
        )
        # Of each later layer: its matrix, and where in the product with the inputs its share begins.
        self.hidden = [
            (
                with_bias(weights[f"Wz.{i}"], hidden, weights.get(f"b.{i}", zeros), rate),
                places[i] * a.width if i in places else 0,
            )
            for i in range(1, a.depth)
        ]
        bias = weights.get("b", np.zeros(a.outputs, np.float32))
        self.head = with_bias(weights["W"], hidden / rate, bias, 1.0)
        # Full arrays: a numpy call with a scalar must first make an array of it.
        self.limit = np.full(a.width, LINEAR_FROM, np.float32)
        self.slope = np.full(a.width, a.alpha / (1 - a.alpha) if self.soft else a.alpha, np.float32)

    def __call__(self, u: Floats) -> Floats:
        """u [d + 1], its last entry 1 -> W_L z_L + b_L."""
        h, activate = self.a.width, self._soft if self.soft else self._hard
        state = np.empty(h + 1, np.float32)
        state[h] = 1
        z = state[:h]
        first = self.inputs.dot(u)
        activate(first[:h], z)
        for matrix, low in self.hidden:
            t = matrix.dot(state)
            if low:
                t += first[low : low + h]
            if self.a.residual:
                before = z.copy()
                activate(t, z)
                z += before
            else:
                activate(t, z)
        out: Floats = self.head.dot(state)
        return out

    def _soft(self, t: Floats, z: Floats) -> None:
        """z = g t + log(1 + exp(t)); t is used up."""
        np.minimum(t, self.limit, out=z)
        np.exp(z, z)
        np.log1p(z, z)
        np.maximum(z, t, out=z)
        np.multiply(t, self.slope, t)
        np.add(z, t, z)

    def _hard(self, t: Floats, z: Floats) -> None:
        """z = max(t, alpha t)."""
        np.multiply(t, self.slope, z)
        np.maximum(z, t, out=z)
