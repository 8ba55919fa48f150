"""Checking vectors and telling them apart: finite values, norms, fingerprints, exact duplicates."""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.errors import VectorError
from amips.vectors.vectors import BLOCK_BYTES, Floats, Vectors

# Rows whose norms differ from 1 by less than this count as unit-norm: float16 storage rounds by ~5e-4.
UNIT_TOLERANCE = 2e-3
SAFE_NORMS = (1e-15, 1e15)  # between which squares of float32 neither overflow nor lose their digits


@dataclass(frozen=True)
class Facts:
    """What one pass over a set of vectors found."""

    n: int
    d: int
    fingerprint: str
    min_norm: float
    max_norm: float
    zero_rows: int

    @property
    def unit_norm(self) -> bool:
        """Whether every row lies on the unit sphere."""
        return abs(self.min_norm - 1) < UNIT_TOLERANCE and abs(self.max_norm - 1) < UNIT_TOLERANCE


def inspect(vectors: Vectors, zero: str = "error", hint: str = "", any_norm: bool = False) -> Facts:
    """Check every value and fingerprint the content, in one pass.

    Raises VectorError naming the first row that is not finite, or (unless `zero="keep"`) that is all
    zero, or (unless `any_norm`) so long that products with it may leave the range of float32. The
    fingerprint is SHA-256 over the shape and the float32 rows: it does not depend on the file format or on
    the block size.
    """
    if zero not in ("error", "keep"):
        raise VectorError(f'zero={zero!r}: expected "error" or "keep"')
    digest = hashlib.sha256(f"{vectors.n}x{vectors.d}:f32".encode())
    low, high, zeros = np.inf, 0.0, 0
    for start, block in vectors.blocks():
        norms = unit_rows(block)[1] if any_norm else row_norms(block)
        # A sum of squares is finite only if every value is (float32 overflow: checked again below).
        suspects = np.flatnonzero(~np.isfinite(norms))
        if suspects.size:
            row = start + int(suspects[0])
            bad = block[suspects[0]]
            what = "NaN" if np.isnan(bad).any() else "infinite" if np.isinf(bad).any() else "too large"
            raise VectorError(
                f"{vectors.name}: row {row} has a value that is {what}; remove or repair such rows"
            )
        empty = np.flatnonzero(norms == 0)
        if empty.size and zero == "error":
            raise VectorError(
                f"{vectors.name}: row {start + int(empty[0])} is all zero (or too small for float32), every "
                f"inner product with it is 0; remove such rows{hint}"
            )
        zeros += int(empty.size)
        low, high = min(low, float(norms.min())), max(high, float(norms.max()))
        digest.update(block.data)
    return Facts(vectors.n, vectors.d, digest.hexdigest(), low, high, zeros)


def row_norms(block: Floats) -> Floats:
    """Euclidean norm of each row."""
    with np.errstate(over="ignore"):
        norms: Floats = np.sqrt(np.einsum("ij,ij->i", block, block))
    return norms


def unit_rows(block: Floats) -> tuple[Floats, NDArray[np.floating[Any]]]:
    """Each row at norm 1, float32 [m, d], and the norms [m], whatever their size; a zero row stays zero.

    What becomes of a row depends on no other, nor on a power of two that it is multiplied by.
    """
    norms = row_norms(block)
    safe = (norms > SAFE_NORMS[0]) & (norms < SAFE_NORMS[1])
    if safe.all():
        return block / norms[:, None], norms
    divisors: Floats = np.where(safe, norms, 1).astype(np.float32)
    unit = block / divisors[:, None]
    exponents = np.frexp(np.abs(block[~safe]).max(axis=1))[1]
    scaled = np.ldexp(block[~safe], -exponents[:, None])  # squares of these fit
    scaled_norms = row_norms(scaled)
    with np.errstate(invalid="ignore"):  # what is not finite is not so afterwards
        unit[~safe] = scaled / np.where(scaled_norms > 0, scaled_norms, np.float32(1))[:, None]
    wide_norms = norms.astype(np.float64)
    wide_norms[~safe] = np.ldexp(scaled_norms.astype(np.float64), exponents)
    return unit, wide_norms


def first_equal(vectors: Vectors, unit: bool = False) -> NDArray[np.int64]:
    """For each row the lowest id of a row with exactly the same content (itself if it has no double).

    With `unit`, with the same content at norm 1 (`unit_rows`). Rows are compared by a 64-bit hash (a random
    linear form over their bits), then value by value.
    """
    rng = np.random.default_rng(0)
    weights = rng.integers(1, 2**63, size=vectors.d, dtype=np.uint64) | np.uint64(1)
    hashes = np.empty(vectors.n, np.uint64)
    for start, block in vectors.blocks(max(1, BLOCK_BYTES // (16 * vectors.d))):
        bits = (_form(block, unit) + 0.0).view(np.uint32)  # + 0.0 makes -0.0 and 0.0 the same
        hashes[start : start + len(block)] = (bits * weights).sum(axis=1, dtype=np.uint64)
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    result: NDArray[np.int64] = first[inverse].astype(np.int64)
    doubled = np.flatnonzero(result != np.arange(vectors.n))
    step = max(1, BLOCK_BYTES // (16 * vectors.d))
    differ = [doubled[:0]]
    for s in range(0, len(doubled), step):
        ids = doubled[s : s + step]
        same = (_form(vectors.take(ids), unit) == _form(vectors.take(result[ids]), unit)).all(axis=1)
        differ.append(ids[~same])
    # Different rows with one hash are few, but rows of few distinct values (signs, small integers) have
    # some: their doubles are among themselves.
    if (ids := np.concatenate(differ)).size:
        rows = _form(vectors.take(ids), unit) + 0.0
        _, first, inverse = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        result[ids] = ids[first[inverse.ravel()]]
    return result


def _form(block: Floats, unit: bool) -> Floats:
    return unit_rows(block)[0] if unit else block
