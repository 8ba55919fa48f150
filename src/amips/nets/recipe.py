"""Recipes: every number of a training run, by name."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from amips.arguments import check_choice, check_flag, check_number, check_whole, refused
from amips.errors import RunError

Precision = Literal["float32", "bf16"]  # of products while training

# Of the fields that cannot be any number from 0 on.
BOUNDS: dict[str, dict[str, Any]] = {
    **{name: {"least": 1} for name in ("batch", "reference_batch", "sampled_cells", "route_top")},
    **{name: {"above": 0} for name in ("rate", "clip", "temperature", "listwise_temperature")},
    **{name: {"least": 0, "below": 1} for name in ("warmup", "decay")},
    "listwise": {"least": 0, "most": 1},
}
Reduction = Literal["sum", "mean"]
# Fields that came later, and what was done before they were there: left out of files where they say the same,
# so that what was made before is known again, and a run that was begun then continues.
LATER: dict[str, Any] = {"reduction": "sum"}


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
    reduction: Reduction = "sum"  # over d, of the gradient and key losses; "mean" makes them d times smaller
    route_weight: float = 0.0  # the routing loss, beside these; linear and max-affine routers have no other
    route_top: int = 10  # routing: learn to find the cells of so many of the top keys,
    temperature: float = 0.05  # ... with a softmax of the scores over this;
    listwise: float = 0.0  # ... this fraction of it on the true support values instead,
    listwise_temperature: float = 1 / 30  # ... with a softmax of them over this
    all_cells_up_to: int = 16  # with more cells than this, the key loss draws some:
    sampled_cells: int = 8  # so many for each query
    sampled_gradients: int = 2  # the gradient loss of SupportNet draws so many cells for each query; 0: all

    def __post_init__(self) -> None:
        for field in fields(self):
            value, bounds = getattr(self, field.name), BOUNDS.get(field.name, {"least": 0})
            if isinstance(field.default, str):
                value = check_choice(field.name, value, Reduction, error=RunError)
            elif isinstance(field.default, bool):
                value = check_flag(field.name, value, error=RunError)
            elif isinstance(field.default, int):
                value = check_whole(field.name, value, int(bounds["least"]), error=RunError)
            else:
                value = check_number(field.name, value, **bounds, error=RunError)
            object.__setattr__(self, field.name, value)

    def cells_drawn(self, kind: str, c: int) -> int:
        """How many of c cells are drawn for each query; 0 where all of them are taken."""
        if kind == "support":
            return self.sampled_gradients if self.sampled_gradients < c else 0
        return self.sampled_cells if c > self.all_cells_up_to else 0

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
        _check_names(settings)
        kinds = {field.name: type(getattr(self, field.name)) for field in fields(self)}
        values = {
            name: _parsed(name, value, kinds[name]) if isinstance(value, str) else value
            for name, value in settings.items()
        }
        return replace(self, **values)

    @classmethod
    def from_json(cls, values: Any) -> "Recipe":
        """The recipe of plain values, those left out as by default; RunError on anything else."""
        if not isinstance(values, dict):
            raise refused("recipe", values, "the fields of a recipe", RunError)
        _check_names(values)
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """Plain values for a file; a field of `LATER` only where it is not what was done before it came."""
        values = asdict(self)
        return {name: value for name, value in values.items() if name not in LATER or value != LATER[name]}

    def differences(self) -> dict[str, Any]:
        """The fields that are not as by default, with their values."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != field.default
        }


RECIPES = {
    # Measured on two cores and minutes of training. Rate: 1e-3 reaches in 10 million samples what the paper's
    # reaches in hundreds of millions. Anchor: with few queries for each cell the last weights of a linear
    # router are worse than its first without one, and better with it (20,000 keys and queries, four splits,
    # keys scanned for recall@10 0.95: first 11.6 %, last 12.9 % and 10.8 %). What is chosen on val ends level
    # with and without it (10.7 %).
    "default": Recipe(),
    # The paper says: Adam, peak rate about 1e-4, 2.5 % warm-up, cosine, weights 0.01 and 1, averages of decay
    # 0.999 at batch 128, rate scaled by the root of the batch; 1 to 10 billion samples. It says nothing of an
    # early end, an anchor or a warm-up of averages, so there is none. OURS, because it does not say: `batch`
    # (it names 512 to 16,384), `reference_batch` for the rate (it names one for the averages), `clip`,
    # `penalty`, `keep_best`, how many cells are drawn. The authors' published configuration has batch 4096
    # and clip 1, too. Its rate peaks at 8e-5 (at batch 128) and ends at an eighth of that, not at 0; it has
    # no penalty; and it averages over d, which `reduction="mean"` offers: here it is as in the formulas.
    "paper": Recipe(batch=4096, rate=1e-4, decay_warmup=False, patience=0, anchor=0.0),
}
PAPER_SAMPLES = 1_000_000_000
DEFAULT_MINUTES = 1.0  # of training a router, at most: it ends when val stops improving


def recipe_named(recipe: str | Recipe, batch: int | None = None) -> Recipe:
    """A recipe by name or as it is, with another batch if one is given."""
    if isinstance(recipe, str) and recipe in RECIPES:
        recipe = RECIPES[recipe]
    if not isinstance(recipe, Recipe):
        raise refused("recipe", recipe, f"a Recipe or one of {', '.join(RECIPES)}", RunError)
    return recipe if batch is None else replace(recipe, batch=batch)


def _check_names(settings: Mapping[str, Any]) -> None:
    names = [field.name for field in fields(Recipe)]
    for name in settings:
        if name not in names:
            raise RunError(f"a recipe has no field {name!r}; its fields are {', '.join(names)}")


def _parsed(name: str, text: str, kind: type) -> Any:
    """The value that a text stands for, in a field of this kind."""
    if kind is bool:
        if text not in ("true", "false"):
            raise RunError(f"{name}={text}: expected true or false")
        return text == "true"
    try:
        return kind(text)
    except ValueError:
        raise RunError(f"{name}={text}: expected {'a whole number' if kind is int else 'a number'}") from None
