"""The torch module of an architecture: forward pass, gradients with respect to the input, export.

SupportNet is trained on its gradient, so the gradient must itself be differentiable. It is written out
here (the chain rule from the head down, as in the runtime) rather than taken with autograd: one plain
graph of matrix products, about twice the work of the forward pass, and any combination of outputs or the
whole Jacobian costs one pass.
"""

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amips.learn.init import initial_weights
from amips.nets import Architecture, Net, weight_shapes
from amips.vectors import Floats


class _SoftLeakyReLU(torch.autograd.Function):
    """(s(x), s'(x)) in one go; the second output is differentiable too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: float, beta: float) -> tuple[Tensor, Tensor]:
        # s(x) = leaky(x) + (1 - alpha) / beta log(1 + exp(-beta |x|)), in place and in as little fresh memory
        # as can be: a third of the time of F.softplus.
        memory = x.abs().mul_(-beta).exp_().add_(1).log_()
        value = F.leaky_relu(x, alpha).add_(memory, alpha=(1 - alpha) / beta)
        slope = torch.mul(x, beta, out=memory).sigmoid_().mul_(1 - alpha).add_(alpha)
        ctx.alpha, ctx.beta = alpha, beta
        ctx.save_for_backward(slope)
        ctx.set_materialize_grads(False)
        return value, slope

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None]:
        d_value, d_slope = gradients
        (slope,) = ctx.saved_tensors
        total = None if d_value is None else d_value * slope
        if d_slope is not None:
            # s'' = (1 - alpha) beta p (1 - p) with p = (s' - alpha) / (1 - alpha)
            curvature = (slope - ctx.alpha).mul_(1 - slope).mul_(ctx.beta / (1 - ctx.alpha)).mul_(d_slope)
            total = curvature if total is None else total.add_(curvature)
        return total, None, None


def _activate(x: Tensor, alpha: float, beta: float) -> tuple[Tensor, Tensor]:
    if math.isinf(beta):
        slope = torch.where(x > 0, 1.0, alpha)
        return x * slope, slope
    if alpha == 1:  # the identity: its curvature above would be 0 / 0
        return x, torch.ones_like(x)
    value, slope = _SoftLeakyReLU.apply(x, alpha, beta)  # type: ignore[no-untyped-call]
    return value, slope


class Network(nn.Module):
    """A SupportNet or KeyNet with parameters named as in the runtime (dots become underscores).

    `centroids` are those through which a KeyNet of one key is trained to route.
    """

    def __init__(self, architecture: Architecture, seed: int = 0, centroids: Floats | None = None) -> None:
        super().__init__()
        self.centroids: Tensor | None
        self.register_buffer("centroids", None if centroids is None else torch.tensor(centroids))
        self.architecture = architecture
        self.free = nn.ParameterDict()
        self.shapes = weight_shapes(architecture)
        for name, value in initial_weights(architecture, seed).items():
            if name in self.rectified:
                value = value + np.log(-np.expm1(-value))  # the inverse of softplus
            self.free[name.replace(".", "_")] = nn.Parameter(torch.from_numpy(value))

    @property
    def constrained(self) -> list[str]:
        """Weights that must not be negative for convexity: every W^z, and the head."""
        if self.architecture.kind == "key":
            return []
        return [name for name in self.shapes if name.startswith("Wz")] + ["W"]

    @property
    def rectified(self) -> list[str]:
        """Weights that are softplus of a free parameter."""
        return self.constrained if self.architecture.nonnegative == "softplus" else []

    def weight(self, name: str) -> Tensor:
        """A weight as the forward pass uses it."""
        free: Tensor = self.free[name.replace(".", "_")]
        return F.softplus(free) if name in self.rectified else free

    def penalty(self) -> Tensor:
        """sum_i ||relu(-W_i^z)||^2."""
        total = torch.zeros((), device=self.free["W"].device)
        for name in self.constrained:
            if name != "W":
                total = total + F.relu(-self.weight(name)).square().sum()
        return total

    @torch.no_grad()
    def project(self) -> None:
        """After an update: clip what must not be negative. The head always, W^z under "clip"."""
        mode = self.architecture.nonnegative
        for name in self.constrained:
            if mode == "clip" or (mode == "penalty" and name == "W"):
                self.free[name.replace(".", "_")].clamp_(min=0)

    def forward(self, x: Tensor) -> Tensor:
        """Scores [m, c] of a SupportNet, predicted keys [m, c, d] of a KeyNet."""
        a = self.architecture
        u, norms = self._inputs(x)
        out, _ = self._hidden(u)
        if a.kind == "key":
            return out.view(-1, a.c, a.d)
        return out * norms if a.homogeneous == "wrapper" else out

    def scores_and_gradient(self, x: Tensor, combine: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Scores [m, c] with the Jacobian [m, c, d], or with sum_j v_j grad f_j [m, 1, d] for v [m, c]."""
        a = self.architecture
        u, norms = self._inputs(x)
        out, slopes = self._hidden(u)
        gradient = self._reverse(slopes, combine)
        if a.homogeneous == "relu":
            return out, gradient
        value = out if combine is None else (out * combine).sum(dim=1, keepdim=True)
        radial = value - torch.einsum("mpd,md->mp", gradient, u)
        gradient = gradient + radial[:, :, None] * u[:, None, :]
        return out * norms, gradient * (norms > 0)[:, :, None]

    def _inputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        norms = torch.linalg.vector_norm(x, dim=1, keepdim=True)
        if self.architecture.kind == "support" and self.architecture.homogeneous == "relu":
            return x, norms
        return x / torch.where(norms > 0, norms, 1.0), norms

    def _hidden(self, u: Tensor) -> tuple[Tensor, list[Tensor]]:
        a = self.architecture
        z: Tensor | None = None
        slopes = []
        for i in range(a.depth):
            bias = self.weight(f"b.{i}") if a.biases else None
            source, weight = (u, "Wx.0") if z is None else (z, f"Wz.{i}")
            pre = F.linear(source, self.weight(weight), bias)
            if i in a.injected:
                pre = torch.addmm(pre, u, self.weight(f"Wx.{i}").T)
            activated, slope = _activate(pre, a.alpha, a.beta)
            slopes.append(slope)
            z = activated + z if a.residual and z is not None else activated
        assert z is not None
        return F.linear(z, self.weight("W"), self.weight("b") if a.biases else None), slopes

    def _reverse(self, slopes: list[Tensor], combine: Tensor | None) -> Tensor:
        a = self.architecture
        head = self.weight("W")
        delta = head.expand(len(slopes[0]), *head.shape) if combine is None else (combine @ head)[:, None, :]
        p = delta.shape[1]
        gradient: Tensor | None = None
        for i in reversed(range(a.depth)):
            inner = (delta * slopes[i][:, None, :]).flatten(0, 1)
            if i == 0 or i in a.injected:
                Wx = self.weight(f"Wx.{i}")
                gradient = inner @ Wx if gradient is None else torch.addmm(gradient, inner, Wx)
            if i > 0:
                below = (inner @ self.weight(f"Wz.{i}")).view(-1, p, a.width)
                delta = below + delta if a.residual else below
        assert gradient is not None
        return gradient.view(-1, p, a.d)

    def export(self, about: dict[str, Any], values: dict[str, Tensor] | None = None) -> Net:
        """The runtime of this network, from its own parameters or from `values` (the averaged ones)."""
        weights = {}
        with torch.no_grad():
            for name in self.shapes:
                plain = name.replace(".", "_")
                free = self.free[plain] if values is None else values[f"free.{plain}"]
                used = F.softplus(free) if name in self.rectified else free
                weights[name] = used.detach().cpu().float().contiguous().numpy().copy()
        return Net(self.architecture, weights, about)
