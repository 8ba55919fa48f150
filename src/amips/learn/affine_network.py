"""The torch module of linear and max-affine routers."""

from typing import Any

import torch
from torch import Tensor, nn

from amips.nets import AffineArchitecture, AffineNet
from amips.vectors import Floats


class AffineNetwork(nn.Module):
    """f(x)_j = max_p <w_jp, A x> (+ b_jp ||x||), A the identity where there is no rank.

    `pieces` [c p, r] is where W begins. With a `smooth` temperature t the maximum is t log sum exp(. / t).
    """

    def __init__(
        self,
        architecture: AffineArchitecture,
        pieces: Floats,
        projection: Floats | None = None,
        smooth: float = 0.0,
    ) -> None:
        super().__init__()
        self.architecture, self.smooth = architecture, smooth
        self.W = nn.Parameter(torch.tensor(pieces))
        self.b = nn.Parameter(torch.zeros(len(pieces))) if architecture.bias else None
        # Not trained: queries could be projected once for all uses, and training is several times faster.
        self.A: Tensor | None
        self.register_buffer("A", None if projection is None else torch.tensor(projection))
        self.start: Tensor
        self.register_buffer("start", torch.tensor(pieces))

    def moved(self) -> Tensor:
        """||W - W0||^2 (+ ||b||^2): how far training has gone from where it began."""
        apart = (self.W - self.start).square().sum()
        return apart if self.b is None else apart + self.b.square().sum()

    def forward(self, x: Tensor) -> Tensor:
        """Scores [m, c]."""
        inner = x if self.A is None else x @ self.A.T
        scores = inner @ self.W.T
        if self.b is not None:
            scores = scores + self.b * torch.linalg.vector_norm(x, dim=1, keepdim=True)
        if self.architecture.pieces == 1:
            return scores
        scores = scores.view(len(x), -1, self.architecture.pieces)
        if self.smooth:
            return self.smooth * torch.logsumexp(scores / self.smooth, dim=2)
        return scores.amax(dim=2)

    def project(self) -> None:
        """Nothing is constrained."""

    def export(self, about: dict[str, Any], values: dict[str, Tensor] | None = None) -> AffineNet:
        """The runtime of this network, from its own parameters or from `values` (the averaged ones)."""
        values = dict(self.named_parameters()) if values is None else values
        values = values | ({} if self.A is None else {"A": self.A})
        weights = {name: v.detach().cpu().float().contiguous().numpy().copy() for name, v in values.items()}
        return AffineNet(self.architecture, weights, about)


def affine_network(start: AffineNet, smooth: float) -> AffineNetwork:
    """The network that begins with the weights of this router; `smooth` as there."""
    network = AffineNetwork(start.architecture, start.weights["W"], start.weights.get("A"), smooth)
    if network.b is not None:
        network.b.data.copy_(torch.tensor(start.weights["b"]))
    return network
