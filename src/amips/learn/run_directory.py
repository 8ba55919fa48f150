"""A run directory while it is trained in; `amips.nets` reads its settings and its log.

run/
  config.json              the network, the recipe, the budget, the task: what makes a run the same
  checkpoint.safetensors   the full state, replaced atomically
  log.jsonl                one line for each evaluation, the first before any training
  tensorboard/             the same for TensorBoard, if that was asked for
  model.json, model.safetensors    the best weights; there when the run is finished
"""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from amips.errors import RunError
from amips.files import check_output, check_same, remove_partials, write_atomic
from amips.learn.budget import Budget
from amips.learn.checkpoint import CHECKPOINT
from amips.learn.compute import Compute
from amips.learn.setup import Setup
from amips.learn.tensorboard import Events
from amips.locks import locked
from amips.nets import (
    RUN_CONFIG,
    RUN_FORMAT,
    RUN_LOG,
    Model,
    Recipe,
    is_run,
    is_unfinished_run,
    load_model,
    read_run_config,
    read_run_log,
    spec_to_json,
    write_run_config,
)

LOCK = ".lock"
Resume = bool | Literal["auto"]


def run_config(
    setup: Setup, recipe: Recipe, budget: Budget, seed: int, world: int, compute: Compute
) -> dict[str, Any]:
    """What makes a run of `world` processes the same, as its config.json has it."""
    config: dict[str, Any] = {
        "kind": "run",
        "format": RUN_FORMAT,
        "architecture": setup.architecture.to_json(),
        "network": spec_to_json(setup.spec),
        "recipe": recipe.to_json(),
        "world": world,
        "samples": budget.samples,
        "minutes": budget.minutes,
        "seed": seed,
        "keys": setup.task.fingerprint,
        "task": setup.task.options,
    }
    config |= compute.settings()
    if setup.through is not None:
        config["through"] = setup.through.fingerprints["cells"]
    return config


class RunDirectory:
    """The directory of a run with these settings: not there yet, begun, or finished."""

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self.path, self.config = path, config
        self.events: Events | None = None

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is a state to continue from."""
        return (self.path / CHECKPOINT).exists()

    def finished(self, resume: Resume) -> Model | None:
        """The model, if the run is finished; RunError if the directory is not one that can be trained in.

        Args:
            resume: True if there must be a run to continue, False if there must be none that is unfinished,
                "auto" if either will do.
        """
        check_output(self.path, RunError, what="a run", marks=[RUN_CONFIG])
        if is_run(self.path):
            check_same(self.path, read_run_config(self.path), self.config, RunError, "a run")
            if not is_unfinished_run(self.path):
                return load_model(self.path)
            if not resume and self.has_checkpoint:
                raise RunError(
                    f"{self.path} holds an unfinished run; continue it with resume=True (--resume), "
                    "or remove the directory"
                )
        elif resume is True:
            raise RunError(f"{self.path} holds no run to resume; leave resume out to begin one")
        return None

    def begin(self, step: int, stack: ExitStack, tensorboard: bool = False) -> None:
        """Make it ready to train in from this step on; `stack` keeps others from training here too.

        With `tensorboard` the log is written for TensorBoard, too.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        busy = RunError(f"{self.path}: another process is training there")
        stack.enter_context(locked(self.path / LOCK, busy))
        if is_run(self.path) and not is_unfinished_run(self.path):
            raise RunError(
                f"{self.path}: another process has just finished this run; give the same call again"
            )
        remove_partials(self.path)
        write_run_config(self.path, self.config, finished=False)
        # Evaluations after the checkpoint will be made again; without one all of them.
        last = step if self.has_checkpoint else -1
        entries = [entry for entry in read_run_log(self.path) if entry["step"] <= last]
        write_atomic(self.path / RUN_LOG, "".join(json.dumps(entry) + "\n" for entry in entries).encode())
        if tensorboard:
            self.events = Events(self.path, entries)
            stack.callback(self.events.close)

    def finish(self, model: Model) -> None:
        """Write the model and declare the run finished."""
        model.save(self.path)
        write_run_config(self.path, self.config, finished=True)

    def log(self, line: dict[str, Any]) -> None:
        """Add a line to the log."""
        with (self.path / RUN_LOG).open("a") as f:
            f.write(json.dumps(line) + "\n")
        if self.events is not None:
            self.events.add(line)
