"""amips: learned maximum-inner-product search.

    index = amips.fit(keys, queries, out="bundle")  # chosen on held-out queries; index.report has the gain
    scores, ids = index.search(x, k=10)  # the recall it was fitted for; or recall=0.98
    index = amips.load("bundle")
    index = amips.connect("http://127.0.0.1:8000")  # what `amips serve bundle` serves

and the steps of it:

    task = amips.label(keys, queries, out="task")
    model = amips.train(task, out="run")
    index = amips.build(task, model, out="bundle")

Importing amips, and searching with it, does not import torch; `train` and `fit` do when they are first used.
"""

from typing import TYPE_CHECKING, Any

from amips.builder import build
from amips.capacity import plan
from amips.design import Design
from amips.errors import (
    AmipsError,
    BundleError,
    ResultsError,
    RunError,
    ShardsMissingError,
    TaskError,
    TrainingDivergedError,
    TrainingInterrupted,
    VectorError,
)
from amips.extras import needs_extra
from amips.fitting import fit
from amips.nets import KeyNet, Linear, MaxAffine, Recipe, SupportNet
from amips.publishing import fetch, publish
from amips.search import sign, verify, wrap
from amips.sharding import load, load_shards, shard
from amips.task import label
from amips.version import __version__

if TYPE_CHECKING:
    from amips.client import connect
    from amips.learn import train

__all__ = [
    "AmipsError",
    "BundleError",
    "Design",
    "KeyNet",
    "Linear",
    "MaxAffine",
    "Recipe",
    "ResultsError",
    "RunError",
    "ShardsMissingError",
    "SupportNet",
    "TaskError",
    "TrainingDivergedError",
    "TrainingInterrupted",
    "VectorError",
    "__version__",
    "build",
    "connect",
    "fetch",
    "fit",
    "label",
    "load",
    "load_shards",
    "plan",
    "publish",
    "shard",
    "sign",
    "train",
    "verify",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name == "train":
        with needs_extra("amips.train", "train", "torch"):
            from amips.learn import train

            return train
    if name == "connect":
        with needs_extra("amips.connect", "client", "httpx"):
            from amips.client import connect

            return connect
    raise AttributeError(f"module 'amips' has no attribute {name!r}")
