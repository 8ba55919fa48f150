"""Routing as a FAISS index does it itself: by its own centroids, in its own metric."""

from dataclasses import dataclass

import numpy as np

from amips.cells import IVFParts
from amips.nets import Model
from amips.vectors import Floats


@dataclass(frozen=True)
class QuantizerRouter:
    """Scores the centroids of an index with x, or with the key that a mapper predicts; larger is better.

    Of the inner product a score is <A x + b, centroid> with the index's transforms A, b; of L2 it is
    2 <A x + b, centroid> - ||centroid||^2, the negative squared distance but for what all cells share.
    Queries of norm 1 are brought to the norm `scale` first.
    """

    parts: IVFParts
    mapper: Model | None
    scale: float = 1.0
    factors = None

    @property
    def name(self) -> str:
        """What it is, in a word."""
        return "centroid" if self.mapper is None else f"{self.mapper.architecture.kind} mapper"

    @property
    def c(self) -> int:
        """The number of cells."""
        return len(self.parts.centroids)

    @property
    def network_flops(self) -> int:
        """Of the mapper."""
        return 0 if self.mapper is None else self.mapper.architecture.key_flops()

    @property
    def coarse_flops(self) -> int:
        """2 c times the inner dimension: what a flat quantizer costs, and another at most."""
        return 2 * self.parts.centroids.size

    @property
    def flops(self) -> int:
        """Both together."""
        return self.network_flops + self.coarse_flops

    @property
    def floats(self) -> int:
        """A score for each cell, and the mapper's."""
        return self.c + (0 if self.mapper is None else self.mapper.architecture.floats)

    def scores(self, x: Floats) -> Floats:
        """[m, d] -> [m, c]."""
        scores = self.points(x) @ self.parts.centroids.T
        return scores if self.parts.inner_product else 2 * scores - self.parts.squares

    def points(self, x: Floats) -> Floats:
        """What the quantizer is asked with, [m, inner dimension]: the query, or the key predicted for it."""
        if self.mapper is not None:
            x = np.ascontiguousarray(self.mapper.keys(x)[:, 0])
        elif self.scale != 1:
            x = x * np.float32(self.scale)
        return self.parts.transformed(x)
