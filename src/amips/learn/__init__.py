"""Training with torch: modules, losses, the loop. Beside encoders of texts, nothing else imports torch."""

from amips.resources import check_address_space

check_address_space(640 << 20)  # torch and its threads take so much; without it, loading ends in a signal

from amips.learn.budget import Budget  # noqa: E402
from amips.learn.distributed import Group  # noqa: E402
from amips.learn.evaluation import centroid_metrics, criterion, evaluate  # noqa: E402
from amips.learn.loop import Run, train  # noqa: E402
from amips.learn.modules import Network  # noqa: E402
from amips.learn.setup import set_up  # noqa: E402

__all__ = [
    "Budget",
    "Group",
    "Network",
    "Run",
    "centroid_metrics",
    "criterion",
    "evaluate",
    "set_up",
    "train",
]
