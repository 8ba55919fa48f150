"""Recipes: every number of a training run, by name."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

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
    warmup: float = 0.025  # fraction of the run in which the rate rises
    decay: float = 0.999  # of the averaged weights, at the reference batch
    decay_warmup: bool = True  # average less at first: else a short run ends with its first weights
    clip: float = 1.0  # largest norm of the gradient
    patience: int = 5  # stop after so many evaluations on val without a better one; 0 trains to the end
    keep_best: bool = True  # return the best weights on val; False: those at the end, whatever they are worth
    anchor: float = 20.0  # linear, max-affine: weight of ||W - W0||^2 / training queries, W0 where they begin
    score: float = 0.01  # weights of the losses: SupportNet's ...
    grad: float = 1.0
    penalty: float = 1.0  # on negative W^z
    key: float = 1.0  # ... and KeyNet's
    consist: float = 0.01
    route_weight: float = 0.0  # the routing loss, beside these; linear and max-affine routers have no other
    route_top: int = 10  # routing: learn to find the cells of so many of the top keys,
    temperature: float = 0.05  # ... with a softmax of the scores over this;
    listwise: float = 0.0  # ... this fraction of it on the true support values instead,
    listwise_temperature: float = 1 / 30  # ... with a softmax of them over this
    all_cells_up_to: int = 16  # with more cells than this, the gradient and key losses draw some:
    sampled_cells: int = 8  # so many for each query

    def __post_init__(self) -> None:
        if min(self.batch, self.reference_batch, self.sampled_cells, self.route_top) < 1:
            raise RunError(
                f"batch={self.batch}, reference_batch={self.reference_batch}, "
                f"sampled_cells={self.sampled_cells}, route_top={self.route_top}: each must be at least 1"
            )
        if not min(self.temperature, self.listwise_temperature) > 0:
            both = f"temperature={self.temperature}, listwise_temperature={self.listwise_temperature}"
            raise RunError(f"{both}: must be positive")
        for name in ("patience", "anchor", "score", "grad", "penalty", "key", "consist", "route_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise RunError(f"{name}={getattr(self, name)}: must not be negative")
        if not 0 <= self.listwise <= 1:
            raise RunError(f"listwise={self.listwise}: expected a fraction from 0 to 1")
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

    def changed(self, settings: Mapping[str, Any]) -> "Recipe":
        """This recipe with other values of some fields, which may be text as a user types it.

        Raises RunError if a value is not of its field's type or, with the names of all, if there is no such
        field.
        """
        kinds = {field.name: type(getattr(self, field.name)) for field in fields(self)}
        for name in settings:
            if name not in kinds:
                raise RunError(f"a recipe has no field {name!r}; its fields are {', '.join(kinds)}")
        return replace(self, **{name: _read(name, value, kinds[name]) for name, value in settings.items()})


RECIPES = {
    # Measured on two cores and minutes of training. Rate: 1e-3 reaches in 10 million samples what the paper's
    # reaches in hundreds of millions. Anchor: with few queries for each cell the last weights of a linear
    # router are worse than its first without one, and better with it (20,000 keys and queries, four splits,
    # keys scanned for recall@10 0.95: first 11.6 %, last 12.9 % and 10.8 %). What is chosen on val ends level
    # with and without it (10.7 %).
    "default": Recipe(),
    # As the paper says; its budget is 1 to 10 billion samples. It has no early end and no anchor.
    "paper": Recipe(batch=4096, rate=1e-4, decay_warmup=False, patience=0, anchor=0.0),
}
PAPER_SAMPLES = 1_000_000_000


def recipe_named(recipe: str | Recipe, batch: int | None = None) -> Recipe:
    """A recipe by name or as it is, with another batch if one is given."""
    if isinstance(recipe, str):
        if recipe not in RECIPES:
            raise RunError(f"recipe={recipe!r}: expected one of {' '.join(RECIPES)}")
        recipe = RECIPES[recipe]
    return recipe if batch is None else replace(recipe, batch=batch)


def _read(name: str, value: Any, kind: type) -> Any:
    """A value of the kind that a field has; whole numbers are numbers, and nothing else is."""
    if kind is bool:
        known = {"true": True, "false": False, True: True, False: False}
        if isinstance(value, str | bool) and value in known:
            return known[value]
        raise RunError(f"{name}={value}: expected true or false")
    what = "a whole number" if kind is int else "a number"
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RunError(f"{name}={value}: expected {what}")
    try:
        number = kind(value)
    except ValueError:
        raise RunError(f"{name}={value}: expected {what}") from None
    if kind is int and not isinstance(value, str) and number != value:
        raise RunError(f"{name}={value}: expected {what}")
    if not math.isfinite(number):
        raise RunError(f"{name}={value}: expected {what}")
    return number
