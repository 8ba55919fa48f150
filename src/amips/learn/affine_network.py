"""The torch module of linear and max-affine routers."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from amips import lean
from amips.nets import AffineArchitecture, AffineNet, Linear, MaxAffine, spec_to_json
from amips.task import Task
from amips.vectors import Floats, Vectors

ROUNDS = 5  # of k-means within each cell


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


def affine_network(architecture: AffineArchitecture, task: Task, smooth: float, seed: int) -> AffineNetwork:
    """The network as training begins: pieces at the centroids of the cells, or of their sub-clusters."""
    a, keys = architecture, task.key_vectors
    pieces = task.cells.centroids if a.pieces == 1 else _sub_centroids(keys, task, a.pieces, seed)
    if not a.rank:
        return AffineNetwork(a, pieces, None, smooth)
    projection = lean.learn_projection(keys, task.train.vectors, a.rank)
    return AffineNetwork(a, projection.weights(pieces), projection.queries, smooth)


def initial_model(task: Task, network: Linear | MaxAffine, seed: int = 0) -> AffineNet:
    """The router that training begins with."""
    about = {**task.fingerprints, "network": spec_to_json(network)}
    architecture = network.architecture(task.n, task.d, task.c)
    return affine_network(architecture, task, 0.0, seed).export(about)


def _sub_centroids(keys: Vectors, task: Task, pieces: int, seed: int) -> Floats:
    """Spherical k-means within every cell at once, [c p, d]; a cell's pieces begin at keys of its own."""
    cells, c = task.cells.assignment, task.c
    shuffled = np.random.default_rng([seed, 17]).permutation(keys.n)
    order = shuffled[np.argsort(cells[shuffled], kind="stable")]
    sizes = np.bincount(cells, minlength=c)
    starts = np.append(0, np.cumsum(sizes))[:-1]
    drawn = starts[:, None] + np.arange(pieces) % np.maximum(sizes, 1)[:, None]
    first = keys.take(order[np.minimum(drawn, keys.n - 1)].ravel()).reshape(c, pieces, keys.d)
    # Half way to the centroid: a lone key is a poor centre. Cells with fewer keys than pieces repeat some.
    centres = _unit(_unit(first) + task.cells.centroids[:, None, :])
    for _ in range(ROUNDS):
        sums = np.zeros((c * pieces, keys.d), np.float32)
        for start, block in keys.blocks():
            own = cells[start : start + len(block)]
            near = np.stack([np.einsum("nd,nd->n", block, centres[own, p]) for p in range(pieces)], axis=1)
            np.add.at(sums, own * pieces + near.argmax(axis=1), block)
        moved = np.abs(sums).max(axis=1).reshape(c, pieces, 1) > 0  # a piece without keys stays
        centres = np.where(moved, _unit(sums.reshape(centres.shape)), centres)
    return np.ascontiguousarray(centres.reshape(c * pieces, keys.d))


def _unit(x: Floats) -> Floats:
    scaled: Floats = x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-30)
    return scaled
