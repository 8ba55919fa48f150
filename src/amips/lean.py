"""A projection learned from queries and keys that keeps their inner products (LeanVec-OOD, in closed form).

Queries are mapped to A x and keys to B y in R^r, r < d, such that <A x, B y> is near <x, y>. Over queries x
and keys y the mean square error

    E_x E_y (<A x, B y> - <x, y>)^2

is least, of all A and B of this size, for

    A = D_r^(1/2) U_r' S^(-1/2),    B = D_r^(1/2) V_r' T^(-1/2),

where S = E[x x'], T = E[y y'] and S^(1/2) T^(1/2) = U D V' is a singular value decomposition: in terms of
S^(1/2) x and T^(1/2) y it is the best approximation of a matrix by one of rank r. The error is the sum of
the squares of the singular values that are left out. Where queries are like keys (S = T) this is PCA.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from amips.errors import VectorError
from amips.vectors import Floats, Vectors

MOMENT_BYTES = 1 << 22  # of rows at a time
SAMPLE = 1 << 17  # rows that a second moment is taken of: more do not change it
SMALLEST = 1e-6  # of an eigenvalue, relative to the largest: what queries hardly ever have is no guide
RANK_FRACTION = 1 / 4  # of the dimensions: enough to choose cells
STEP = 16  # reduced dimensions are multiples of this, which is what a processor adds at once

Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class Projection:
    """A and B, both [r, d]."""

    queries: Floats
    keys: Floats
    functionals: Floats  # R = D_r^(-1/2) U_r' S^(1/2)
    spectrum: Doubles  # all d singular values

    @property
    def r(self) -> int:
        """The reduced dimension."""
        return len(self.queries)

    @property
    def kept(self) -> float:
        """How much of E <x, y>^2 is kept."""
        energy = self.spectrum**2
        return float(energy[: self.r].sum() / energy.sum())

    def first(self, r: int) -> "Projection":
        """The best projection to fewer dimensions: the first of these."""
        return Projection(self.queries[:r], self.keys[:r], self.functionals[:r], self.spectrum)

    def of_keys(self, keys: Vectors) -> Vectors:
        """B y for each key, computed as they are read."""

        def projected(start: int, stop: int) -> Floats:
            out, step = np.empty((stop - start, self.r), np.float32), max(1, MOMENT_BYTES // (4 * keys.d))
            for low in range(start, stop, step):  # a block of keys takes more than what becomes of it
                high = min(low + step, stop)
                np.matmul(keys.rows(low, high), self.keys.T, out=out[low - start : high - start])
            return out

        return Vectors(f"{keys.name} in {self.r} dimensions", keys.n, self.r, projected)

    def weights(self, vectors: Floats) -> Floats:
        """For each v the w in R^r for which <w, A x> is nearest to <v, x> over queries: w = R v."""
        return vectors @ self.functionals.T


def learn_projection(keys: Vectors, queries: Vectors, r: int) -> Projection:
    """The best projection to r dimensions for these queries and keys; a sample of each is looked at."""
    if keys.d != queries.d:
        raise VectorError(f"keys have dimension {keys.d} but queries have dimension {queries.d}")
    if not 1 <= r <= keys.d:
        raise VectorError(f"r={r}: a projection has between 1 and {keys.d} dimensions")
    moment_s, exponent_s = _scaled(_second_moment(queries))
    moment_t, exponent_t = _scaled(_second_moment(keys))
    root_s, inverse_s = _roots(moment_s)
    root_t, inverse_t = _roots(moment_t)
    u, singular, v = np.linalg.svd(root_s @ root_t)
    u, v, scale = u[:, :r].T, v[:r], np.sqrt(singular[:r])[:, None]
    a, b, back = scale * (u @ inverse_s), scale * (v @ inverse_t), (u @ root_s) / np.maximum(scale, 1e-12)
    a, b, back = (np.ascontiguousarray(matrix, np.float32) for matrix in (a, b, back))
    return Projection(a, b, back, np.ldexp(singular, exponent_s + exponent_t))


def reduced_dimension(d: int, fraction: float) -> int:
    """About this fraction of d dimensions, a multiple of 16 where d allows it, and 16 at least."""
    return min(d, STEP * max(1, round(fraction * d / STEP)))


def _second_moment(vectors: Vectors) -> Doubles:
    """E[v v'], by blocks, of every row or of evenly spaced ones; float64 has room for any float32 squared."""
    total = np.zeros((vectors.d, vectors.d))
    step = max(1, vectors.n // SAMPLE)
    for start, block in vectors.blocks(max(1, MOMENT_BYTES // (4 * vectors.d))):
        rows = block[-start % step :: step].astype(np.float64)
        total += rows.T @ rows
    return total / len(range(0, vectors.n, step))


def _scaled(moment: Doubles) -> tuple[Doubles, int]:
    """The second moment of vectors divided by 2^e, and e, such that their mean squared norm is near 1.

    <A x, B y> is linear in x and y, so A and B are the same whatever the vectors were divided by: computed
    from these, they do not depend on the scale of the data, and no bound on a number does either.
    """
    trace = float(np.trace(moment))
    exponent = round(math.log2(trace) / 2) if trace > 0 else 0
    return np.ldexp(moment, -2 * exponent), exponent


def _roots(moment: Doubles) -> tuple[Doubles, Doubles]:
    """The square root of a positive semi-definite matrix, and its inverse where there is one."""
    values, vectors = np.linalg.eigh(moment)
    values = np.maximum(values, SMALLEST * (float(values[-1]) if values[-1] > 0 else 1.0))
    return (vectors * np.sqrt(values)) @ vectors.T, (vectors / np.sqrt(values)) @ vectors.T
