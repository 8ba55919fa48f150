"""Maximal marginal relevance: results that are near to the query, and not all near to each other."""

import numpy as np

from amips.arguments import check_number
from amips.integrations.document_index import Hit
from amips.vectors import Floats, unit_rows


def diverse(hits: list[Hit], x: Floats, k: int, balance: float) -> list[Hit]:
    """k of the hits, chosen one after the other by what they add (Carbonell and Goldstein, 1998).

    Each time the one is taken whose balance * cos(x, y) - (1 - balance) * max cos(y, taken) is largest.

    Args:
        hits: with vectors, best first.
        x: the query, [d].
        k: results.
        balance: between 1, which is the order of the hits if those are by cosine, and 0.
    """
    balance = check_number("balance", balance, least=0, most=1)
    vectors = [hit.document.vector for hit in hits if hit.document.vector is not None]
    if not vectors:
        return []
    rows = unit_rows(np.stack(vectors))[0]
    near = rows @ unit_rows(np.asarray(x, np.float32)[None])[0][0]
    chosen: list[int] = []
    alike = np.full(len(rows), -np.inf, np.float32)  # cosine with the nearest that is chosen
    while len(chosen) < min(k, len(rows)):
        worth = balance * near - (1 - balance) * alike if chosen else near.copy()
        worth[chosen] = -np.inf
        chosen.append(int(worth.argmax()))
        alike = np.maximum(alike, rows @ rows[chosen[-1]])
    return [hits[i] for i in chosen]
