"""How long a run lasts, and when it looks at the val queries."""

import math
from dataclasses import dataclass

from amips.arguments import check_number, check_whole
from amips.errors import RunError
from amips.learn.checkpoint import Progress

# Of the training time, at most, for looking at val. Where the budget is in samples the count alone decides:
# what a run leaves must not depend on the clock.
EVALUATING = 0.2


@dataclass(frozen=True)
class Budget:
    """Samples or minutes of training, and how often it is interrupted to evaluate.

    Evaluation i of E is due at the fraction (i / E)^2 of the budget: a router that begins at the centroids
    may be at its best after a few passes over the queries, seconds into a minute.
    """

    samples: int | None
    minutes: float | None
    evaluations: int

    def __post_init__(self) -> None:
        values: dict[str, int | float] = {
            "evaluations": check_whole("evaluations", self.evaluations, 1, error=RunError)
        }
        if self.samples is not None:
            values["samples"] = check_whole("samples", self.samples, 1, error=RunError)
        if self.minutes is not None:
            values["minutes"] = check_number("minutes", self.minutes, above=0, error=RunError)
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def done(self, at: Progress) -> float:
        """How much of it is used, 0..1."""
        if self.samples is not None:
            return min(1.0, at.samples / self.samples)
        assert self.minutes is not None
        return min(1.0, at.seconds / (60 * self.minutes))

    def evaluations_due(self, done: float) -> int:
        """How many evaluations belong to this much of the budget."""
        return math.floor(math.sqrt(done) * self.evaluations + 1e-9)

    def affords(self, at: Progress) -> bool:
        """Whether one more evaluation keeps within its part of the time, if the budget is in time."""
        mean = at.evaluating / max(1, at.evaluations)
        return self.samples is not None or at.evaluating + mean <= EVALUATING * at.seconds
