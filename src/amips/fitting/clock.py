"""The time of a fit: what each part of it may take, so that the whole keeps within the minutes asked for."""

import time
from collections.abc import Callable

# Where in the whole time the steps end. What one leaves over goes to those that follow.
LABEL_TIME = 0.35
BUILD_END = 0.8  # cells and graphs are made and compared; then the best is measured, reported and saved
MEASURE_END, REPORT_END = 0.88, 0.95
# Of the time between labels and BUILD_END that cells have: where their steps end.
PARTITIONS_END, TRAINING_END, SECOND_END = 0.35, 0.6, 0.7
MOMENT = 1.0  # seconds that a step has, however late it is


class Clock:
    """Seconds since a fit began, and what is left of them.

    Args:
        seconds: that the whole may take.
        now: what tells the time.
    """

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self.now = seconds, now
        self.began = now()
        self.labelled = LABEL_TIME  # the fraction of the time at which labels were there
        self.cells_time = 1.0  # of the time until BUILD_END, that cells may have: a graph takes the rest

    @property
    def spent(self) -> float:
        """Seconds since the beginning."""
        return self.now() - self.began

    def until(self, fraction: float) -> float:
        """Seconds until this fraction of the time has passed; a moment, if it has: small things are done."""
        return max(fraction * self.seconds - self.spent, min(MOMENT, self.seconds))

    def past(self, fraction: float) -> bool:
        """Whether this fraction of the time has passed."""
        return self.spent >= fraction * self.seconds

    def note_labelled(self) -> None:
        """Take note that labels are there now: the later steps share what is left."""
        self.labelled = min(BUILD_END, self.spent / self.seconds)

    def until_of_cells(self, fraction: float) -> float:
        """Seconds until this fraction of the time that cells have has passed."""
        span = (BUILD_END - self.labelled) * self.cells_time
        return self.until(self.labelled + fraction * span)
