"""The order in which a user knows the keys: as they were given and added, an updated one in its old place.

Masks and tables of attributes have a value a key in it. Key numbers are in that order until a key is updated,
which then has a number behind all others; compacting numbers keys anew, in this order.
"""

import numpy as np
from numpy.typing import NDArray

from amips.search.memory_searcher import Snapshot, plain_index

Ids = NDArray[np.int64]


def places_of(index: Snapshot) -> Ids:
    """The place of each key number, [n]; a number that was updated has that of the one that came for it."""
    plain = plain_index(index)
    return np.arange(plain.n) if plain.order is None else plain.order


def place_count(index: Snapshot) -> int:
    """How many places there are, those of keys that were removed in it."""
    plain = plain_index(index)
    return plain.n if plain.order is None else 1 + int(plain.order.max(initial=-1))


def places_with(index: Snapshot, m: int, replaced: Ids | None) -> Ids | None:
    """The places with those of m more keys: behind the others, or of those that they replace.

    None as long as each number is its place.
    """
    plain = plain_index(index)
    if plain.order is None and replaced is None:
        return None
    places = places_of(index)
    if replaced is None:
        first = place_count(index)
        return np.append(places, np.arange(first, first + m))
    return np.append(places, places[replaced])


def live_numbers(index: Snapshot) -> Ids:
    """The numbers of the keys that were not removed, in the order of their places."""
    plain = plain_index(index)
    numbers = np.arange(plain.n) if plain.alive is None else plain.alive.numbers
    return numbers if plain.order is None else numbers[np.argsort(plain.order[numbers], kind="stable")]
