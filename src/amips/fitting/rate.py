"""How fast this machine finds top keys, and what follows from it."""

import math
import time

from amips import exact
from amips.graph import EXACT_KEYS, PROBES
from amips.metrics import TOP
from amips.task import Task
from amips.vectors import Vectors

PILOT = 2048  # queries labelled to see how long that takes


def labelling_rate(keys: Vectors, queries: Vectors, device: str | None = None) -> float:
    """FLOPs a second of finding top keys, with numpy or on a device."""
    lengths, times = [], []
    for few in (min(64, queries.n // 2), min(64 + PILOT, queries.n)):
        x = queries.rows(0, max(1, few))
        started = time.perf_counter()
        exact.top_k(keys, x, TOP, device=device)
        times.append(time.perf_counter() - started)
        lengths.append(len(x))
    # Of the difference: what a call costs whatever it is asked is not part of a rate.
    seconds = times[1] - times[0] if times[1] > times[0] else times[1]
    return 2 * keys.n * keys.d * max(1, lengths[1] - lengths[0]) / max(seconds, 1e-9)


def graph_seconds(task: Task, rate: float) -> float:
    """What the nearest keys of every key take, which is most of a graph, at a rate in FLOPs a second."""
    pairs = task.n * (task.n if task.n <= EXACT_KEYS else PROBES * math.sqrt(task.n) / 4)
    return 2 * pairs * (task.d / 2) / rate  # in half of the dimensions, as lean storage usually has
