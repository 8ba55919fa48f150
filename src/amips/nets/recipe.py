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
    decay_warmup: bool = True  # average less at first: else a short run ends with its first weights
    clip: float = 1.0  # largest norm of the gradient
    score: float = 0.01  # weights of the losses: SupportNet's ...
    grad: float = 1.0
    penalty: float = 1.0  # on negative W^z
    key: float = 1.0  # ... and KeyNet's
    consist: float = 0.01
    route_weight: float = 0.0  # the routing loss, beside these; linear and max-affine routers have no other
    route_top: int = 10  # routing: learn to find the cells of so many of the top keys,
    temperature: float = 0.05  # ... with a softmax of the scores over this;
    listwise: float = 0.0  # ... this share of it on the true support values instead,
    listwise_temperature: float = 1 / 30  # ... with a softmax of them over this
    all_cells_up_to: int = 16  # with more cells than this, the gradient and key losses draw some:
    sampled_cells: int = 8  # so many for each query

    def __post_init__(self) -> None:
        if min(self.batch, self.sampled_cells, self.route_top) < 1:
            raise RunError(
                f"batch={self.batch}, sampled_cells={self.sampled_cells}, route_top={self.route_top}: "
                "each must be at least 1"
            )
        if not min(self.temperature, self.listwise_temperature) > 0:
            both = f"temperature={self.temperature}, listwise_temperature={self.listwise_temperature}"
            raise RunError(f"{both}: must be positive")
        if not (self.route_weight >= 0 and 0 <= self.listwise <= 1):
            raise RunError(f"route_weight={self.route_weight}, listwise={self.listwise}: a weight, and a share from 0 to 1")
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

    def decay_at(self, step: int, batch: int) -> float:
        """The decay of the averaged weights, at this step, for this batch."""
        decay = float(self.decay ** (batch / self.reference_batch))
        return min(decay, (1 + step) / (10 + step)) if self.decay_warmup else decay


RECIPES = {
    # Measured on two cores and minutes of training: a higher rate reaches in 10 million samples what the
    # paper's reaches in hundreds of millions.
    "default": Recipe(),
    # As the paper says; its budget is 1 to 10 billion samples.
    "paper": Recipe(batch=4096, rate=1e-4, decay_warmup=False),
}
PAPER_SAMPLES = 1_000_000_000


def recipe_named(recipe: str | Recipe, batch: int | None = None) -> Recipe:
    """A recipe by name or as it is, with another batch if one is given."""
    if isinstance(recipe, str):
        if recipe not in RECIPES:
            raise RunError(f"recipe={recipe!r}: expected one of {' '.join(RECIPES)}")
        recipe = RECIPES[recipe]
    return recipe if batch is None else replace(recipe, batch=batch)
