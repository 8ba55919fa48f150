"""Training with torch: modules, losses, the loop. Beside encoders of texts, nothing else imports torch."""

from amips.learn.affine_network import initial_model
from amips.learn.budget import Budget
from amips.learn.distributed import Group
from amips.learn.evaluation import SCAN, centroid_metrics, criterion, evaluate
from amips.learn.loop import DEFAULT_MINUTES, Run, train
from amips.learn.modules import Network
from amips.learn.setup import set_up

__all__ = [
    "DEFAULT_MINUTES",
    "SCAN",
    "Budget",
    "Group",
    "Network",
    "Run",
    "centroid_metrics",
    "criterion",
    "evaluate",
    "initial_model",
    "set_up",
    "train",
]
