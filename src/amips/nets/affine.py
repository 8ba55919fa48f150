"""Scores that are maxima of linear functions: f(x)_j = max_p <w_jp, x>.

With one piece for each cell this is the linear router: one c x d matrix, as cheap as scoring centroids.
f is convex and positively 1-homogeneous by construction, and its gradient is the winning piece.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from amips.errors import RunError, VectorError
from amips.nets.model import Floats, Model


@dataclass(frozen=True)
class AffineArchitecture:
    """c cells of `pieces` linear functions of R^d each; `bias` adds b_jp ||x|| to each."""

    d: int
    c: int
    pieces: int = 1
    bias: bool = False
    kind: Literal["linear"] = "linear"

    @property
    def parameters(self) -> int:
        """c p d, and c p biases."""
        return self.c * self.pieces * (self.d + self.bias)

    @property
    def score_flops(self) -> int:
        """2 c p d."""
        return 2 * self.c * self.pieces * self.d

    def key_flops(self, cells: int | None = None) -> int:
        """The winning pieces are known once the scores are."""
        return self.score_flops

    @property
    def floats(self) -> int:
        """The score of every piece."""
        return self.c * self.pieces

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        return dict(vars(self))

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "AffineArchitecture":
        """The inverse of `to_json`; raises RunError on anything else."""
        try:
            made = cls(**values)
            sizes = (made.d, made.c, made.pieces)
            if not all(type(size) is int and size >= 1 for size in sizes):
                raise ValueError(f"d, c, pieces = {sizes}: each is a whole number of at least 1")
            if made.kind != "linear" or type(made.bias) is not bool:
                raise ValueError(f"kind={made.kind!r}, bias={made.bias!r}: expected 'linear', true or false")
        except (TypeError, ValueError) as problem:
            raise RunError(f"not a description of an architecture: {problem}") from None
        return made


@dataclass(frozen=True)
class Linear:
    """A linear router, c x d: trained by cross-entropy on the cell that holds the top key.

    Args:
        bias: one more number for each cell, added as b_j ||x||.
    """

    bias: bool = False
    kind: Literal["linear"] = "linear"

    def architecture(self, n: int, d: int, c: int) -> AffineArchitecture:
        """This router for c cells of dimension d."""
        if c < 2:
            raise RunError("a linear router needs a task with cells; label with cells=2 or more")
        return AffineArchitecture(d, c, 1, self.bias)


@dataclass(frozen=True)
class AffineNet(Model):
    """A trained linear router, or its generalisation to several pieces a cell."""

    architecture: AffineArchitecture

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """W [c p, d] and, with biases, b [c p]."""
        a = self.architecture
        shapes: dict[str, tuple[int, ...]] = {"W": (a.c * a.pieces, a.d)}
        return shapes | ({"b": (a.c * a.pieces,)} if a.bias else {})

    def scores(self, x: Floats) -> Floats:
        """max_p <w_jp, x>, [m, c]."""
        pieces = self._pieces(x)
        return pieces[:, :, 0] if self.architecture.pieces == 1 else pieces.max(axis=2)

    def keys(self, x: Floats, cells: NDArray[np.integer[Any]] | None = None) -> Floats:
        """The winning pieces: the gradient of the scores (with biases, plus b_jp x / ||x||)."""
        a = self.architecture
        winners = self._pieces(x).argmax(axis=2)  # [m, c]
        cells = np.broadcast_to(np.arange(a.c), winners.shape) if cells is None else cells
        rows = cells * a.pieces + np.take_along_axis(winners, cells, axis=1)
        found: Floats = self.weights["W"][rows]
        if a.bias:
            norms = _norms(x)
            u = x / np.where(norms > 0, norms, np.float32(1))
            found = found + self.weights["b"][rows][:, :, None] * u[:, None, :]
        return found

    def _pieces(self, x: Floats) -> Floats:
        """<w_jp, x> (+ b_jp ||x||) for every piece, [m, c, p]."""
        a = self.architecture
        if x.ndim != 2 or x.shape[1] != a.d:
            raise VectorError(f"queries of shape {list(x.shape)}; this model was trained for [m, {a.d}]")
        scores = x @ self.weights["W"].T
        if a.bias:
            scores += self.weights["b"] * _norms(x)
        return scores.reshape(len(x), a.c, a.pieces)


def _norms(x: Floats) -> Floats:
    """||x|| as a column; in float64, because the squares of a long x overflow float32 before x does."""
    norms: Floats = np.sqrt(np.einsum("md,md->m", x, x, dtype=np.float64)).astype(np.float32)
    return norms[:, None]
