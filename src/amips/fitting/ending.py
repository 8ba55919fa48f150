"""The end of a fit: the best index measured as finely as there is time for."""

import math
import time
from typing import Any

import numpy as np

from amips.builder import Builder
from amips.fitting.clock import MEASURE_END, REPORT_END, Clock
from amips.metrics import TOP
from amips.search import DEPTH_QUERIES, Searcher, Snapshot, with_facts

POINTS, REPORT_POINTS = 110, 36  # that codes are searched for, when all is measured: on val, and on test
DEARER = 1.5  # times what the recall asked for costs, that a point costs on average
FEWEST_DEPTHS = 50  # queries that filters are measured on at least
MASKS = 4.0  # full scans that measuring filters is worth, at the rate of plain products
LONGEST_STEP = 8  # of the ladder: with less time, only what was measured about the recall counts
TIMED = 64


class Ending:
    """Measures indexes of cells in full, within the time that a fit has left."""

    def __init__(self, builder: Builder, clock: Clock, rate: float) -> None:
        self.builder, self.clock, self.rate = builder, clock, rate
        self.complete: list[Any] = []  # stores of indexes that are

    def completed(self, index: Snapshot) -> Snapshot:
        """The index with all its points, as finely as there is time for; a graph has them already."""
        if not isinstance(index, Searcher) or any(index.store is one for one in self.complete):
            return index
        left = self.clock.until(MEASURE_END)
        scan = 2.0 * MASKS * index.n * index.d / max(self.rate, 1.0)  # seconds of a query
        queries = int(np.clip(0.5 * max(0.0, left) / max(scan, 1e-9), FEWEST_DEPTHS, DEPTH_QUERIES))
        every = self._every(index, POINTS, max(0.1, left - queries * scan))
        known = with_facts(self.builder.completed(index, every, queries), report=index.report)
        self.complete.append(known.store)
        return known

    def every(self, index: Snapshot) -> int:
        """The step of the ladder with which an index is measured on test; 0: about the recall only."""
        return self._every(index, REPORT_POINTS, self.clock.until(REPORT_END))

    def _every(self, index: Snapshot, points: int, left: float) -> int:
        if not isinstance(index, Searcher) or index.store.storage == "flat":
            return 1  # its points are known without a search
        x = np.asarray(self.builder.task.val.queries[:TIMED])
        unlabelled = with_facts(index, labels=None)
        started = time.perf_counter()
        unlabelled.search(x, TOP, recall=self.builder.recall, best_effort=True)
        each = (time.perf_counter() - started) / len(x) * len(self.builder.task.val)
        step = max(1, math.ceil(DEARER * points * each / max(left, 0.1)))
        return step if step <= LONGEST_STEP else 0
