"""Training with torch: modules, losses, the loop."""

import amips.device  # noqa: F401  (first: it looks whether there is memory for torch before it loads it)
from amips.learn.budget import Budget
from amips.learn.distributed import Group
from amips.learn.evaluation import centroid_metrics, criterion, evaluate
from amips.learn.loop import Run, train
from amips.learn.modules import Network
from amips.learn.seeds import SeedRuns, train_seeds
from amips.learn.setup import set_up

__all__ = [
    "Budget",
    "Group",
    "Network",
    "Run",
    "SeedRuns",
    "centroid_metrics",
    "criterion",
    "evaluate",
    "set_up",
    "train",
    "train_seeds",
]
