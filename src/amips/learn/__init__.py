"""Training with torch: modules, losses, the loop. Nothing else in amips imports torch."""

from amips.learn.evaluation import evaluate
from amips.learn.loop import train
from amips.learn.recipe import RECIPES, Recipe

__all__ = ["RECIPES", "Recipe", "evaluate", "train"]
