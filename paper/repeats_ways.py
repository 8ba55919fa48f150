"""What `repeats` compares, by name, and the times of indexes: in turns, on one thread, least of several."""

import time
from collections.abc import Mapping

import numpy as np

from amips.metrics import TOP
from amips.search import Snapshot, surest_point
from amips.vectors import Floats

NOISE = 0.02  # the paper's
LEARNED = 0.5  # the share of the log that cells, router and graph are made of
DEPTH = 64  # top keys that are stored for each row
TARGETS, RECALL = (0.8, 0.9, 0.95), 0.95
ROUNDS = 7  # times that a time is taken
CLEARLY = 1.02  # times fewer FLOPs, from which on something pays,
FASTER = 1.05  # ... and times less time
IVF, CELLS, GRAPH = "FAISS IVF, x", "cells, linear router", "graph"
DROP_IN, ROUTED = "KeyNet, drop-in", "KeyNet, routed"
SUPPORT = "SupportNet, 128 cells"
MEMORY = "graph with a memory"
ALONE = "memory alone"
FIT_WITHOUT, FIT = "without", "with"  # the memory of a fit
WAYS = (IVF, DROP_IN, ROUTED, SUPPORT, CELLS, GRAPH, MEMORY, ALONE)
TIMED = 200  # queries that are timed one by one


def times_in_turns(indexes: Mapping[str, Snapshot], x: Floats) -> dict[str, list[float] | None]:
    """Seconds of a query alone and among all [m, d], at the recall; None where that is out of reach."""
    best: dict[str, list[float] | None] = {}
    for name, index in indexes.items():
        reach = surest_point(index.points, TOP).recall_assured(TOP) >= RECALL if index.points else False
        best[name] = [np.inf, np.inf] if reach else None
    for _ in range(ROUNDS):
        for name, index in indexes.items():
            times = best[name]
            if times is None:
                continue
            for place, parts in enumerate(([x[i : i + 1] for i in range(TIMED)], [x])):
                started = time.perf_counter()
                for part in parts:
                    index.search(part, TOP, recall=RECALL, threads=1)
                spent = (time.perf_counter() - started) / sum(len(part) for part in parts)
                times[place] = min(times[place], spent)
    return best
