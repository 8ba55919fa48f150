"""Recipes: every number of a training run, by name."""

import math
from dataclasses import dataclass, replace

from amips.errors import RunError


@dataclass(frozen=True)
class Recipe:
    """How a network is trained.

    The learning rate and the decay of the averaged weights are given for a batch of `reference_batch`
    and scaled to the actual one: rate x sqrt(ratio), decay ^ ratio.
    """

    batch: int = 1024
    rate: float = 1e-3  # peak learning rate at the reference batch
    reference_batch: int = 128
    warmup: float = 0.025  # share of the run in which the rate rises
    decay: float = 0.999  # of the averaged weights, at the reference batch
    clip: float = 1.0  # largest norm of the gradient
    score: float = 0.01  # weights of the losses: SupportNet's ...
    grad: float = 1.0
    penalty: float = 1.0  # on negative W^z
    key: float = 1.0  # ... and KeyNet's
    consist: float = 0.01
    all_cells_up_to: int = 16  # with more cells than this, the gradient and key losses draw some:
    sampled_cells: int = 8  # so many for each query

    def __post_init__(self) -> None:
        if self.batch < 1 or self.sampled_cells < 1:
            raise RunError(f"batch={self.batch}, sampled_cells={self.sampled_cells}: each must be at least 1")
        if not (self.rate > 0 and 0 <= self.warmup < 1 and 0 <= self.decay < 1 and self.clip > 0):
            raise RunError(
                f"rate={self.rate}, warmup={self.warmup}, decay={self.decay}, clip={self.clip}: "
                "expected rate > 0, 0 <= warmup < 1, 0 <= decay < 1, clip > 0"
            )

    def rate_at(self, progress: float, batch: int) -> float:
        """Linear warm-up, then a cosine to 0, over progress 0..1, for the batch of all processes."""
        peak = self.rate * math.sqrt(batch / self.reference_batch)
        if progress < self.warmup:
            return peak * progress / self.warmup
        return peak * 0.5 * (1 + math.cos(math.pi * (progress - self.warmup) / (1 - self.warmup)))

    def decay_for(self, batch: int) -> float:
        """The decay of the averaged weights for this batch."""
        return float(self.decay ** (batch / self.reference_batch))


RECIPES = {
    # Measured on two cores and minutes of training: a higher rate reaches in 10 million samples what the
    # paper's reaches in hundreds of millions.
    "default": Recipe(),
    # As the paper says; its budget is 1 to 10 billion samples.
    "paper": Recipe(batch=4096, rate=1e-4),
}
PAPER_SAMPLES = 1_000_000_000


def recipe_named(recipe: str | Recipe, batch: int | None = None) -> Recipe:
    """A recipe by name or as it is, with another batch if one is given."""
    if isinstance(recipe, str):
        if recipe not in RECIPES:
            raise RunError(f"recipe={recipe!r}: expected one of {' '.join(RECIPES)}")
        recipe = RECIPES[recipe]
    return recipe if batch is None else replace(recipe, batch=batch)
