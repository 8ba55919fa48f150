"""Scores that are maxima of linear functions: f(x)_j = max_p <w_jp, x>.

With one piece for each cell this is the linear router: one c x d matrix, as cheap as scoring centroids.
f is convex and positively 1-homogeneous by construction, and its gradient is the winning piece.

With a rank r < d the query is projected first, w_jp = A' v_jp with A [r, d] and v_jp in R^r: the same
function of fewer numbers. It costs d r + c p r instead of c p d products, which is what makes many small
cells affordable. A is the projection that keeps inner products best, see `amips.lean`.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from amips.arguments import check_flag, check_whole
from amips.errors import RunError, VectorError
from amips.lean import RANK_FRACTION, reduced_dimension
from amips.nets.model import Floats, Model

AFFINE_KINDS = ("linear", "max-affine")


@dataclass(frozen=True)
class AffineArchitecture:
    """c cells of `pieces` linear functions of R^d each; `bias` adds b_jp ||x|| to each.

    With a `rank`, of R^rank: queries are projected first. 0 means that they are not.
    """

    d: int
    c: int
    pieces: int = 1
    bias: bool = False
    kind: Literal["linear", "max-affine"] = "linear"
    rank: int = 0

    @property
    def inner(self) -> int:
        """The dimension in which queries meet the pieces."""
        return self.rank or self.d

    @property
    def parameters(self) -> int:
        """c p r and c p biases; the projection is not learned with them."""
        return self.c * self.pieces * (self.inner + self.bias)

    @property
    def score_flops(self) -> int:
        """2 c p r, and 2 d r for the projection."""
        return 2 * (self.c * self.pieces * self.inner + self.d * self.rank)

    def key_flops(self, cells: int | None = None) -> int:
        """The winning pieces are known once the scores are; with a rank, each is brought back to R^d."""
        return self.score_flops + 2 * self.d * self.rank * (self.c if cells is None else cells)

    @property
    def floats(self) -> int:
        """The score of every piece, and the projected query."""
        return self.c * self.pieces + self.rank

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        return dict(vars(self))

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "AffineArchitecture":
        """The inverse of `to_json`; raises RunError on anything else."""
        try:
            built = cls(**values)
            sizes = (built.d, built.c, built.pieces)
            if not all(type(size) is int and size >= 1 for size in sizes):
                raise ValueError(f"d, c, pieces = {sizes}: each is a whole number of at least 1")
            if built.kind not in AFFINE_KINDS or type(built.bias) is not bool:
                kinds = " or ".join(map(repr, AFFINE_KINDS))
                raise ValueError(f"kind={built.kind!r}, bias={built.bias!r}: expected {kinds}, true or false")
            if type(built.rank) is not int or not 0 <= built.rank <= built.d:
                raise ValueError(f"rank={built.rank!r}: expected a whole number between 0 and {built.d}")
        except (TypeError, ValueError) as problem:
            raise RunError(f"not a description of an architecture: {problem}") from None
        return built


@dataclass(frozen=True)
class Linear:
    """A linear router, c x d or, with a rank, c x rank: trained to find the cells of the top keys.

    Args:
        bias: one more number for each cell, added as b_j ||x||.
        rank: project queries to so many dimensions first: about d / 4 if None, 0 for no projection.
    """

    bias: bool = False
    rank: int | None = None
    kind: Literal["linear"] = field(default="linear", init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bias", check_flag("bias", self.bias, error=RunError))
        object.__setattr__(self, "rank", _checked_rank(self.rank))

    def architecture(self, n: int, d: int, c: int) -> AffineArchitecture:
        """This router for c cells of dimension d."""
        rank = self.rank_for(d)
        return AffineArchitecture(d, _checked_cells(c), 1, self.bias, "linear", rank)

    def rank_for(self, d: int) -> int:
        """The rank for queries of dimension d; 0 where nothing is projected."""
        return _rank(self.rank, d)


@dataclass(frozen=True)
class MaxAffine:
    """A SupportNet of another form: f(x)_j = max_p <w_jp, x>, convex and 1-homogeneous by construction.

    The predicted key of a cell is the winning piece; no backward pass is needed. Pieces begin as the centres
    of sub-clusters of their cell.

    Args:
        pieces: for each cell.
        smooth: train t log sum_p exp(<w_jp, x> / t) in the place of the maximum, so that every piece learns
            from every query; t is the recipe's temperature. The trained model takes the maximum.
        rank: project queries to so many dimensions first: about d / 4 if None, 0 for no projection.
    """

    pieces: int = 2
    smooth: bool = True
    rank: int | None = None
    kind: Literal["max-affine"] = field(default="max-affine", init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pieces", check_whole("pieces", self.pieces, 1, error=RunError))
        object.__setattr__(self, "smooth", check_flag("smooth", self.smooth, error=RunError))
        object.__setattr__(self, "rank", _checked_rank(self.rank))

    def architecture(self, n: int, d: int, c: int) -> AffineArchitecture:
        """This network for c cells of dimension d."""
        rank = self.rank_for(d)
        return AffineArchitecture(d, _checked_cells(c), self.pieces, False, "max-affine", rank)

    def rank_for(self, d: int) -> int:
        """The rank for queries of dimension d; 0 where nothing is projected."""
        return _rank(self.rank, d)


def _checked_rank(rank: Any) -> int | None:
    return None if rank is None else check_whole("rank", rank, 0, error=RunError)


def _rank(rank: int | None, d: int) -> int:
    if rank is not None:
        return check_whole("rank", rank, 0, d, error=RunError)  # 0 for no projection
    least = reduced_dimension(d, RANK_FRACTION)
    return least if least < d else 0  # to project onto all dimensions costs and gains nothing


def _checked_cells(c: int) -> int:
    if c < 2:
        raise RunError("a linear router needs a task with cells; label with cells=2 or more")
    return c


def affine_shapes(a: AffineArchitecture) -> dict[str, tuple[int, ...]]:
    """W [c p, r], with biases b [c p], with a rank A [r, d]."""
    shapes: dict[str, tuple[int, ...]] = {"W": (a.c * a.pieces, a.inner)}
    shapes |= {"b": (a.c * a.pieces,)} if a.bias else {}
    return shapes | ({"A": (a.rank, a.d)} if a.rank else {})


@dataclass(frozen=True)
class AffineNet(Model):
    """A trained linear router, or its generalisation to several pieces a cell."""

    architecture: AffineArchitecture

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """The name and shape of every weight."""
        return affine_shapes(self.architecture)

    @property
    def factors(self) -> "tuple[Floats, Floats | None] | None":
        """Of one piece for each cell and without biases."""
        a = self.architecture
        if a.pieces > 1 or a.bias:
            return None
        return self.weights["W"], self.weights["A"] if a.rank else None

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
        winning: Floats = self.weights["W"][rows]
        if a.rank:
            winning = np.asarray(winning @ self.weights["A"], np.float32)
        if a.bias:
            norms = _norms(x)
            u = x / np.where(norms > 0, norms, np.float32(1))
            winning = winning + self.weights["b"][rows][:, :, None] * u[:, None, :]
        return winning

    def _pieces(self, x: Floats) -> Floats:
        """<w_jp, x> (+ b_jp ||x||) for every piece, [m, c, p]."""
        a = self.architecture
        if x.ndim != 2 or x.shape[1] != a.d:
            raise VectorError(f"queries of shape {list(x.shape)}; this model was trained for [m, {a.d}]")
        inner: Floats = x @ self.weights["A"].T if a.rank else x
        scores: Floats = inner @ self.weights["W"].T
        if a.bias:
            scores += self.weights["b"] * _norms(x)
        return scores.reshape(len(x), a.c, a.pieces)


def _norms(x: Floats) -> Floats:
    """||x|| as a column; in float64, because the squares of a long x overflow float32 before x does."""
    norms: Floats = np.sqrt(np.einsum("md,md->m", x, x, dtype=np.float64)).astype(np.float32)
    return norms[:, None]
