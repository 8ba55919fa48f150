"""Training workers: one function in several processes of a cluster that torch joins into a group."""

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from amips.cluster.tasks import RETRIES
from amips.errors import AmipsError
from amips.extras import needs_extra


def run_together(
    work: Callable[[dict[str, Any]], None], inputs: dict[str, Any], workers: int, notes: Path, gpu: bool
) -> None:
    """Call `work(inputs)` in so many processes of the cluster that was joined, by Ray Train's TorchTrainer.

    The processes find RANK, WORLD_SIZE and torch's process group as under torchrun. If one is lost, all are
    begun again: the function continues from what it has saved.

    Args:
        notes: a directory that all nodes see, for what Ray notes of the run.
        gpu: whether each has a GPU.
    """
    with needs_extra("training on Ray", "ray", "ray", "pandas", "pyarrow", "fsspec", "pydantic"):
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer
    for name in ("ray.train", "ray.train.v2"):  # it tells of every step that it takes
        logging.getLogger(name).setLevel(logging.ERROR)
    trainer = TorchTrainer(
        work,
        train_loop_config=inputs,
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=gpu, placement_strategy="SPREAD"),
        run_config=RunConfig(
            name="workers", storage_path=str(notes), failure_config=FailureConfig(max_failures=RETRIES)
        ),
        torch_config=TorchConfig("cpu:gloo,cuda:nccl" if gpu else "gloo"),
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's, of its own settings
            trainer.fit()
    except Exception as problem:  # of Ray Train, around what was raised in a worker
        lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
        reason = lines[-1] if lines else type(problem).__name__
        raise AmipsError(f"training on the Ray cluster failed: {reason}") from problem
