"""Queries of any norm, asked of an index from elsewhere: which keys are best does not depend on the norm.

Inner products are linear in x: they are taken of v = x / 2^e, and 2^e restores them to the last bit. Two
kinds of index answer otherwise for 2 x than for x: by L2, and behind a transform that adds a vector (a PCA
that subtracts the mean). If the norm of their keys is known, R, they are asked R u, u = x / ||x||, and
answers for x follow from those for R u. By L2, with keys of norm R,

    ||x - y||^2 = (||x|| - R)^2 + (||x|| / R) ||R u - y||^2.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from amips.cells import IVFParts
from amips.search.inputs import SAFE_SQUARES, restore_norms, split_norms
from amips.vectors import Floats, unit_rows

SAME = 1e-6  # relative: a query whose norm differs by less has the norm of the keys, but for rounding


@dataclass(slots=True)  # not frozen: one is made for each query, and that would take a microsecond more
class Asked:
    """Queries as an index is asked: u at norm 1 for models, `x` [m, d] for the index.

    Scores are restored by `exponents`, or by `norms` if x was brought to the norm `to`; neither is known if
    they are the queries themselves.
    """

    u: Floats
    x: Floats
    inner_product: bool
    exponents: NDArray[np.int32] | None = None
    norms: NDArray[np.float64] | None = None
    to: float = 0.0

    def restored(self, scores: Floats, ids: NDArray[np.int64]) -> Floats:
        """The index's scores [m, k] as those of the queries; of missing results (id -1) as they are."""
        if self.exponents is None and self.norms is None:
            return scores
        if self.norms is None:
            true = restore_norms(scores, self.exponents)
        else:
            norms = self.norms[:, None]
            wide = scores * (norms / self.to)
            wide = wide if self.inner_product else wide + (norms - self.to) ** 2
            with np.errstate(over="ignore"):
                true = wide.astype(np.float32)
        missing = ids < 0
        return np.where(missing, scores, true) if missing.any() else true


@dataclass(frozen=True)
class QueryNorms:
    """How queries are asked of one index.

    Args:
        parts: the index.
        key_norm: of its keys; 0 if it is not known, or they differ: then x is asked as it is where its norm
            matters.
    """

    parts: IVFParts
    key_norm: float

    @cached_property
    def matter(self) -> bool:
        """Whether the index answers otherwise for 2 x than for x."""
        return not self.parts.inner_product or any(transform.have_bias for transform in self.parts.transforms)

    @property
    def scale(self) -> float:
        """The norm of queries that the index is asked with."""
        return self.key_norm if self.matter and self.key_norm else 1.0

    def asked(self, x: Floats) -> Asked:
        """Queries [m, d] of any norm."""
        product = self.parts.inner_product
        if not self.matter or not self.key_norm:
            u, v, exponents = split_norms(x)
            return Asked(u, x, product) if self.matter else Asked(u, v, product, exponents)
        if len(x) == 1:  # the calls are what costs
            square = float(np.vdot(x, x))
            if SAFE_SQUARES[0] < square < SAFE_SQUARES[1]:
                norm = math.sqrt(square)
                unit = x * np.float32(1 / norm)
                if abs(norm - self.key_norm) <= SAME * self.key_norm:
                    return Asked(unit, x, product)
                same_norm = unit * np.float32(self.key_norm)
                return Asked(unit, same_norm, product, None, np.array([norm]), self.key_norm)
        u, norms = unit_rows(x)
        other = np.abs(norms - self.key_norm) > SAME * self.key_norm
        if not other.any():
            return Asked(u, x, product)
        same_norm = np.where(other[:, None], u * np.float32(self.key_norm), x)
        own: NDArray[np.float64] = np.where(other, norms.astype(np.float64), self.key_norm)
        return Asked(u, same_norm, product, None, own, self.key_norm)
