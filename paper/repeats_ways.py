"""What `repeats` compares, by name, and the times of indexes: in turns, on one thread, least of several."""

import time
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from amips.metrics import TOP
from amips.search import Snapshot, surest_point
from amips.vectors import Floats

Doubles = NDArray[np.float64]

NOISE = 0.02  # the paper's
LEARNED = 0.5  # the share of the log that cells, router and graph are made of
DEPTH = 64  # top keys that are stored for each row
TARGETS, RECALL = (0.8, 0.9, 0.95), 0.95
ROUNDS = 7  # times that a time is taken
CLEARLY = 1.02  # times fewer FLOPs, from which on something pays,
FASTER = 1.1  # ... and times less time
IVF, CELLS, GRAPH = "FAISS IVF, x", "cells, linear router", "graph"
DROP_IN, ROUTED = "KeyNet, drop-in", "KeyNet, routed"
SUPPORT = "SupportNet, 128 cells"
MEMORY = "graph with a memory"
ALONE = "memory alone"
FIT_WITHOUT, FIT = "without", "with"  # the memory of a fit
WAYS = (IVF, DROP_IN, ROUTED, SUPPORT, CELLS, GRAPH, MEMORY, ALONE)
TIMED, BATCH = 200, 200  # queries that are timed one by one, and those in a batch


def times_in_turns(indexes: Mapping[str, Snapshot], x: Floats) -> dict[str, list[float] | None]:
    """Seconds of a query alone and in batches [m, d], at the recall; None where that is out of reach.

    Of each query and each batch the least of several rounds counts: what else the machine does can only add.
    """
    parts = [[x[i : i + 1] for i in range(min(TIMED, len(x)))]]
    parts.append([x[low : low + BATCH] for low in range(0, len(x), BATCH)])
    least: dict[int, list[Doubles]] = {}
    for index in indexes.values():
        if index.points and surest_point(index.points, TOP).recall_assured(TOP) >= RECALL:
            least[id(index)] = [np.full(len(of_kind), np.inf) for of_kind in parts]
    distinct = {id(index): index for index in indexes.values() if id(index) in least}
    for _ in range(ROUNDS):
        for number, index in distinct.items():
            for times, of_kind in zip(least[number], parts, strict=True):
                for place, part in enumerate(of_kind):
                    started = time.perf_counter()
                    index.search(part, TOP, recall=RECALL, threads=1)
                    times[place] = min(times[place], time.perf_counter() - started)
    counts = [sum(len(part) for part in of_kind) for of_kind in parts]
    return {
        name: [float(times.sum() / count) for times, count in zip(least[id(index)], counts, strict=True)]
        if id(index) in least
        else None
        for name, index in indexes.items()
    }
