"""amips: learned maximum-inner-product search.

    task = amips.label(keys, queries, cells=10, out="task")
    model = amips.train(task, amips.SupportNet(size="XS", depth=4), out="run")

Importing amips, and searching with it, does not import torch; `train` does when it is first used.
"""

from typing import TYPE_CHECKING, Any

from amips.cells import Cells, kmeans
from amips.errors import (
    AmipsError,
    RunError,
    TaskError,
    TrainingDivergedError,
    TrainingInterrupted,
    VectorError,
)
from amips.nets import KeyNet, Net, SupportNet, load_net
from amips.task import Task, label

if TYPE_CHECKING:
    from amips.learn import Recipe, evaluate, train

__version__ = "0.1.0"

__all__ = [
    "AmipsError",
    "Cells",
    "KeyNet",
    "Net",
    "Recipe",
    "RunError",
    "SupportNet",
    "Task",
    "TaskError",
    "TrainingDivergedError",
    "TrainingInterrupted",
    "VectorError",
    "evaluate",
    "kmeans",
    "label",
    "load_net",
    "train",
]

_NEEDS_TORCH = ("Recipe", "evaluate", "train")


def __getattr__(name: str) -> Any:
    if name in _NEEDS_TORCH:
        try:
            from amips import learn
        except ModuleNotFoundError as problem:
            if problem.name != "torch":
                raise
            raise AmipsError(f"amips.{name} needs torch; pip install 'amips[train]'") from None
        return getattr(learn, name)
    raise AttributeError(f"module 'amips' has no attribute {name!r}")
