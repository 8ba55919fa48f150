"""Checking what a search is given, the same for every object that searches."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.arguments import check_choice, check_whole, refused
from amips.errors import AmipsError, VectorError
from amips.search.key_ids import check_usable
from amips.vectors import Floats, inspect, open_vectors, read_ids, unit_rows

Ids = NDArray[np.int64]

_FLOAT32 = np.dtype(np.float32)
SAFE_SQUARES = (1e-30, 1e30)  # norms squared that float32 has all digits of
BATCH_BYTES = 1 << 28  # working memory of one block of queries
MOST_FEW = 48  # queries that one compiled call takes: of more, FAISS shares what is read between them


def checked_queries(
    x: Any, d: int, on_bad: str | None = "error", name: str = "queries"
) -> tuple[Floats, NDArray[np.bool_]]:
    """Queries as contiguous float32 [m, d], bad rows zeroed, and which rows are bad.

    Args:
        on_bad: "error" or "skip"; None is an error for someone who has no such choice.
        name: of the rows, in errors.
    """
    if on_bad is not None:
        check_choice("on_bad", on_bad, ("error", "skip"))
    try:
        array = np.asarray(x)
    except ValueError:  # rows of different lengths
        raise VectorError(f"{name} are not a table; this index needs numbers [m, {d}]") from None
    if array.ndim == 1 and array.shape == (d,):
        array = array[None]
    if array.ndim != 2 or array.shape[1] != d or array.dtype.kind not in "fiu":
        raise VectorError(
            f"{name} of type {array.dtype} and shape {list(array.shape)}; this index needs numbers [m, {d}]"
        )
    if array.dtype != _FLOAT32 or not array.flags.c_contiguous:
        with np.errstate(over="ignore"):  # float64 beyond float32 becomes inf, which is found below
            array = np.ascontiguousarray(array, np.float32)
    if math.isfinite(np.vdot(array, array)):  # as a sum of squares is of finite numbers alone; in one call
        return array, np.zeros(len(array), np.bool_)
    bad = ~np.isfinite(array).all(axis=1)
    if bad.any():
        if on_bad != "skip":
            row = int(np.flatnonzero(bad)[0])
            hint = "" if on_bad is None else ', or pass on_bad="skip"'
            what = "query" if name == "queries" else f"{name}: row"
            raise VectorError(f"{what} {row} is not finite; repair it{hint}")
        array = np.where(bad[:, None], np.float32(0), array)
    return array, bad


def checked_keys(keys: Any, d: int) -> Floats:
    """Keys that an index gets as float32 [m, d]; an error of one line names a bad one."""
    if (isinstance(keys, np.ndarray) and keys.shape == (0, d)) or (isinstance(keys, list) and not keys):
        return np.empty((0, d), np.float32)
    vectors = open_vectors(keys, "keys", single=True)
    if vectors.d != d:
        raise AmipsError(f"{vectors.name} has dimension {vectors.d}, this index has {d}")
    if vectors.n:
        inspect(vectors, zero="keep")
    return np.ascontiguousarray(vectors.load(), np.float32)


def split_norms(x: Floats) -> tuple[Floats, Floats, NDArray[np.int32] | None]:
    """Queries [m, d] as (u, v, e): u = x / ||x||, v = x / 2^e of a norm near 1; e is None if all are 0.

    Which keys are best for a query does not depend on its norm, so cells are chosen with u, and a threshold
    on their scores means the same for every query. Keys are scored with v: a power of two takes no digit from
    a float, so <x, y> = 2^e <v, y> to the last bit, and neither huge nor tiny queries leave the range of
    float32.
    """
    if len(x) == 1:  # one query: the calls are what costs, so as few as can be
        square = float(np.vdot(x, x))
        if SAFE_SQUARES[0] < square < SAFE_SQUARES[1]:
            unit, exponent = x * np.float32(1 / math.sqrt(square)), round(math.log2(square) / 2)
            if not exponent:
                return unit, x, None
            return unit, x * np.float32(2.0**-exponent), np.array([exponent], np.int32)
    u, norms = unit_rows(x)
    exponents = np.rint(np.log2(np.where(norms > 0, norms, 1))).astype(np.int32)
    if not exponents.any():
        return u, x, None
    return u, np.ldexp(x, -exponents[:, None]), exponents


def one_query(x: Any, d: int) -> tuple[Floats, int] | None:
    """A single query as v = x / 2^e of a norm near 1, [1, d], and e; None of anything else, or of a bad one.

    What `checked_queries` and `split_norms` do for many, at a fraction of the calls.
    """
    if type(x) is not np.ndarray or x.dtype != _FLOAT32 or not x.flags.c_contiguous:
        if not isinstance(x, np.ndarray) or x.dtype.kind not in "fiu" or x.size != d or not x.ndim:
            return None
        with np.errstate(over="ignore"):  # what is too large becomes infinite, and is named elsewhere
            x = np.ascontiguousarray(x, np.float32)
    if x.ndim == 1:
        x = x[None]
    if x.shape != (1, d):
        return None
    square = float(np.vdot(x, x))
    if 0.5 < square < 2:
        return x, 0
    if not SAFE_SQUARES[0] < square < SAFE_SQUARES[1]:  # a NaN is not between
        return None
    exponent = round(math.log2(square) / 2)
    return x * np.float32(2.0**-exponent), exponent


def few_queries(x: Any, d: int) -> "tuple[Floats, NDArray[np.int32] | int] | None":
    """As `one_query`, of up to 48 queries: v [m, d], and e [m, 1], or a number that is that of all."""
    if (one := one_query(x, d)) is not None:
        return one
    if type(x) is not np.ndarray or x.dtype != _FLOAT32 or not x.flags.c_contiguous:
        return None
    if x.ndim != 2 or x.shape[1] != d or not 1 < len(x) <= MOST_FEW:
        return None
    squares = np.einsum("md,md->m", x, x)
    low, high = squares.min(), squares.max()
    if low > 0.5 and high < 2:
        return x, 0
    if not (low > SAFE_SQUARES[0] and high < SAFE_SQUARES[1]):  # a NaN is not between
        return None
    exponents = np.rint(np.log2(squares[:, None]) / 2).astype(np.int32)
    return np.ldexp(x, -exponents), exponents


def restore_norms(scores: Floats, exponents: NDArray[np.int32] | None) -> Floats:
    """Scores [m, k] of v = x / 2^e as those of x; infinite where that is beyond float32."""
    if exponents is None:
        return scores
    with np.errstate(over="ignore"):
        return np.ldexp(scores, exponents[:, None])


def labelled(ids: Ids, labels: NDArray[Any] | None) -> NDArray[Any]:
    """Key numbers [m, k] as the ids that a user gave; -1 or an empty string where there is none."""
    if labels is None:
        return ids
    nothing: Any = -1 if labels.dtype.kind == "i" else ""
    return np.where(ids < 0, nothing, labels[np.maximum(ids, 0)]).astype(labels.dtype)


def checked_k(k: Any) -> int:
    """k as a Python integer: FAISS takes no numpy ones."""
    return k if type(k) is int and k > 0 else check_whole("k", k, 1, error=VectorError)


def checked_probes(probes: Any, m: int, c: int) -> Ids:
    """How many of c cells each of m queries may probe, [m]."""
    if type(probes) is int and probes > 0:  # what is asked for most, at a tenth of the time
        return np.full(m, min(probes, c))
    counts = np.asarray(probes)
    if counts.dtype.kind not in "iu" or counts.shape not in ((), (m,)):
        raise refused("probes", probes, f"a whole number, at least 1, or {m} of them, one for each query")
    if counts.size and counts.min() < 1:
        raise refused("probes", int(counts.min()), "a whole number, at least 1")
    return np.broadcast_to(np.minimum(counts, c).astype(np.int64), (m,))


def check_labels(ids: Any, n: int) -> NDArray[Any]:
    """External ids as int64 or strings, one for each key, no two the same; see `amips.vectors.read_ids`."""
    labels = read_ids(ids)
    if labels.shape != (n,):
        raise AmipsError(f"ids of shape {list(labels.shape)}: expected one for each of the {n} keys")
    check_usable(labels)
    return labels
