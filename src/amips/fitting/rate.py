"""How fast this machine finds top keys."""

import time

from amips import exact
from amips.metrics import TOP
from amips.vectors import Vectors

PILOT = 2048  # queries labelled to see how long that takes


def labelling_rate(keys: Vectors, queries: Vectors) -> float:
    """FLOPs a second of finding top keys."""
    lengths, times = [], []
    for few in (min(64, queries.n // 2), min(64 + PILOT, queries.n)):
        x = queries.rows(0, max(1, few))
        started = time.perf_counter()
        exact.top_k(keys, x, TOP)
        times.append(time.perf_counter() - started)
        lengths.append(len(x))
    # Of the difference: what a call costs whatever it is asked is not part of a rate.
    seconds = times[1] - times[0] if times[1] > times[0] else times[1]
    return 2 * keys.n * keys.d * max(1, lengths[1] - lengths[0]) / max(seconds, 1e-9)
