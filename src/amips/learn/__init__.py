"""Training with torch: modules, losses, the loop. Nothing else in amips imports torch."""

from amips.learn.affine_network import initial_model
from amips.learn.evaluation import evaluate
from amips.learn.loop import train

__all__ = ["evaluate", "initial_model", "train"]
