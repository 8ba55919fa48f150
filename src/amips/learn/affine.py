"""The torch module of a linear router."""

from typing import Any

import torch
from torch import Tensor, nn

from amips.nets import AffineArchitecture, AffineNet
from amips.vectors import Floats


class AffineNetwork(nn.Module):
    """f(x)_j = max_p <w_jp, x> (+ b_jp ||x||); every piece starts at its cell's centroid."""

    def __init__(self, architecture: AffineArchitecture, centroids: Floats, seed: int = 0) -> None:
        super().__init__()
        self.architecture = architecture
        pieces = torch.tensor(centroids).repeat_interleave(architecture.pieces, dim=0)
        if architecture.pieces > 1:  # equal pieces would stay equal
            generator = torch.Generator().manual_seed(seed)
            pieces = pieces + 0.02 * torch.randn(pieces.shape, generator=generator)
        self.W = nn.Parameter(pieces)
        self.b = nn.Parameter(torch.zeros(len(pieces))) if architecture.bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Scores [m, c]."""
        scores = x @ self.W.T
        if self.b is not None:
            scores = scores + self.b * torch.linalg.vector_norm(x, dim=1, keepdim=True)
        if self.architecture.pieces == 1:
            return scores
        return scores.view(len(x), -1, self.architecture.pieces).amax(dim=2)

    def project(self) -> None:
        """Nothing is constrained."""

    def export(self, about: dict[str, Any], values: dict[str, Tensor] | None = None) -> AffineNet:
        """The runtime of this network, from its own parameters or from `values` (the averaged ones)."""
        values = dict(self.named_parameters()) if values is None else values
        weights = {name: v.detach().cpu().float().contiguous().numpy().copy() for name, v in values.items()}
        return AffineNet(self.architecture, weights, about)
