"""amips: learned maximum-inner-product search.

    task = amips.label(keys, queries, cells=512, out="task")
    model = amips.train(task, amips.SupportNet(size="XS", depth=4), out="run")
    index = amips.build(task, model, out="bundle")
    scores, ids = index.search(x, k=10, probes=8)
    index = amips.load("bundle")

Importing amips, and searching with it, does not import torch; `train` does when it is first used.
"""

from typing import TYPE_CHECKING, Any

from amips.cells import Cells, kmeans, query_aware
from amips.errors import (
    AmipsError,
    BundleError,
    RunError,
    TaskError,
    TrainingDivergedError,
    TrainingInterrupted,
    VectorError,
)
from amips.fit import fit
from amips.nets import KeyNet, Linear, MaxAffine, Model, SupportNet, load_model
from amips.search import Point, Searcher, Wrapped, build, load, save, wrap
from amips.task import Task, label
from amips.vectors import open_vectors
from amips.version import __version__

if TYPE_CHECKING:
    from amips.learn import Recipe, evaluate, train

__all__ = [
    "AmipsError",
    "BundleError",
    "Cells",
    "KeyNet",
    "Linear",
    "MaxAffine",
    "Model",
    "Point",
    "Recipe",
    "RunError",
    "Searcher",
    "SupportNet",
    "Task",
    "TaskError",
    "TrainingDivergedError",
    "TrainingInterrupted",
    "VectorError",
    "Wrapped",
    "__version__",
    "build",
    "evaluate",
    "fit",
    "kmeans",
    "label",
    "load",
    "load_model",
    "open_vectors",
    "query_aware",
    "save",
    "train",
    "wrap",
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
